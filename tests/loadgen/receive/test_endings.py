"""How a response can end, from bytes: statuses, errors, several choices, compressed bodies."""

import gzip
import json
import zlib
from typing import Any

import pytest

from tests.streams.playing import (
    END,
    FINISH,
    HEAD,
    MS,
    OK,
    chunk,
    event,
    http_chunk,
    json_response,
    new_exchange,
    play,
    text,
)

UNFRAMED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


def unframed(*values: dict[str, Any] | str) -> bytes:
    return UNFRAMED + b"".join(event(v) for v in values)


BEGUN = unframed(OK[0])


WHOLE = json.dumps(
    {
        "choices": [{"message": {"content": "a b"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 2},
    }
).encode()


def stream(*values: dict[str, Any] | str) -> bytes:
    """A whole chunked response with these events."""
    return HEAD + chunk(*values) + END


def ends(*indices: int | None, text: str = "") -> list[dict[str, Any]]:
    end = {"delta": {"content": text}, "finish_reason": "stop"}
    return [{"choices": [end | ({} if i is None else {"index": i})]} for i in indices]


def error_end(reason: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"delta": {}, "finish_reason": reason, **more}]}


JSON_500 = (
    json_response(b'{"error":"boom"}').replace(b"200 OK", b"500 Oops").replace(b": 16", b": 99")
)


Event = dict[str, Any] | str


# error events; name: (event, part of the error)
BEFORE_A_TOKEN: dict[str, tuple[Event, str]] = {
    "detail in a 200 stream": ({"detail": "no"}, "no"),
    "SGLang": ({"error": {"object": "error", "message": "The queue is full."}}, "queue is full"),
    "TGI": ({"error": "Model is overloaded", "error_type": "overloaded"}, "Model is overloaded"),
    "a bare message (AWS, Azure)": ({"statusCode": 429, "message": "Rate limit."}, "Rate limit."),
    "a list of errors (Cloudflare)": (
        {"success": False, "errors": [{"code": 3040, "message": "Capacity exceeded"}]},
        "Capacity exceeded",
    ),
    "in a whole message": ({"choices": [{"message": {"content": None, "error": "lost"}}]}, "lost"),
}


AFTER_A_TOKEN: dict[str, tuple[Event, str]] = {
    "vLLM before 0.10": ({"object": "error", "message": "engine is dead", "code": 500}, "is dead"),
    "vLLM": ({"error": {"message": "EngineCore died", "code": 500}}, "EngineCore died"),
    "LiteLLM": ({"error": {"message": "litellm.RateLimitError: no", "type": None}}, "litellm.Rate"),
    "Gemini, in a list": ('[{"error": {"code": 503, "message": "overloaded"}}]', "overloaded"),
    "OpenRouter, in mid-stream": (
        {"error": {"message": "Disconnected"}, **error_end("error")},
        "Disconnected",
    ),
    "a finish reason that is an error": (error_end("error"), "finish reason error"),
    "given up by the engine": (error_end("abort"), "finish reason abort"),
    "Anthropic's in a chat": ({"type": "error", "error": {"message": "Overloaded"}}, "Overloaded"),
    "in a choice (OpenRouter)": (error_end("error", error={"message": "Provider"}), "Provider"),
    "in a choice that stopped": (error_end("stop", error="lost"), "lost"),
    "cut for want of machines (DeepSeek)": (
        error_end("insufficient_system_resource"),
        "insufficient_system_resource",
    ),
    "in capitals (Cohere)": (error_end("ERROR"), "finish reason ERROR"),
    "MiniMax": (
        {"choices": None, "base_resp": {"status_code": 1002, "status_msg": "rate limit"}},
        "rate limit",
    ),
    "a code and its words": ({"code": 503, "msg": "busy"}, "busy"),
    "a problem (RFC 9457)": (
        {"type": "about:blank", "title": "Service Unavailable", "status": 503},
        "Service Unavailable",
    ),
    "no success": ({"success": False, "reason": "worker lost"}, "worker lost"),
    "in a delta": ({"choices": [{"delta": {"error": {"message": "no worker"}}}]}, "no worker"),
    "a name that nobody knows (Bedrock)": (
        {"throttlingException": {"message": "Too many requests"}},
        "Too many requests",
    ),
    "fields that nobody knows (Baidu)": ({"error_code": 336100, "error_msg": "busy"}, "336100"),
    "a status in words": ({"status": "failed", "reason": "worker lost"}, "worker lost"),
    "words in place of an object": ("[ERROR] upstream timed out", "[ERROR] upstream timed out"),
    "other words": ("Error: engine is overloaded", "engine is overloaded"),
    "a code as text": ({"code": "503", "msg": "busy"}, "busy"),
    "a finish reason nobody listed": (error_end("model_timeout"), "finish reason model_timeout"),
    "cancelled by the server": (error_end("Cancelled"), "finish reason Cancelled"),
}


LINES_AFTER_A_TOKEN: dict[str, tuple[bytes, str]] = {
    "an event named error, in words": (b"event: error\ndata: upstream lost\n\n", "upstream lost"),
    "an event named error, without a word": (b"event: error\n\n", "an event named error"),
    "an event named server_error": (
        b'event: Server_Error\ndata: {"reason": "lost"}\n\n' + event("[DONE]"),
        '{"reason": "lost"}',
    ),
    "an event named exception": (
        b"event: InternalServerException\ndata: lost\n\n" + event("[DONE]"),
        "lost",
    ),
    "an event named overloaded": (
        b'event: overloaded\ndata: {"retry_in_s": 3}\n\n' + event("[DONE]"),
        '{"retry_in_s":3}',
    ),
    "an error field": (b'error: {"message": "no GPU left"}\n\ndata: [DONE]\n\n', "no GPU left"),
    "an error field in words": (b"id: 4\nerror: timed out\n\ndata: [DONE]\n\n", "timed out"),
    "bare JSON": (b'{"error": {"message": "died"}}\n\ndata: [DONE]\n\n', "died"),
    "bare JSON, one line end": (b'{"detail": "died"}\ndata: [DONE]\n\n', "died"),
    "bare JSON, and the end": (event("[DONE]") + b'{"error":"died"}', "died"),
    "bare JSON of several lines": (
        b'{\n  "error": {\n    "message": "died"\n  }\n}\n\ndata: [DONE]\n\n',
        "died",
    ),
}


# tables by status; name: (bytes, then FIN; tokens; part of the error)
STREAM_ERRORS: dict[str, tuple[bytes, int | None, str]] = {
    "error event between tokens": (stream(OK[0], {"error": {"message": "oom"}}, *OK), 3, "oom"),
    "error event, then FIN": (unframed(OK[0], {"error": "oom"}), 1, "oom"),
    "error event, then FIN in a chunked body": (HEAD + chunk(OK[0], {"error": "oom"}), 1, "oom"),
    "an event named error, an object": (
        UNFRAMED + b'event: error\ndata: {"message": "busy", "code": 529}\n\n',
        None,
        "busy",
    ),
    "an error field beside text": (
        BEGUN[:-1] + b"error: late\n\n" + event(OK[1]) + event(FINISH),
        1,
        "late",
    ),
    "an error beside text in a delta": (
        stream(OK[0], {"choices": [{"delta": {"content": "a", "error": "no worker"}}]}, "[DONE]"),
        2,
        "no worker",
    ),
    "an error in the choice of a body": (
        json_response(b'{"choices":[{"message":{"content":"a"},"error":{"message":"refused"}}]}'),
        1,
        "refused",
    ),
    "a body that is no stream": (json_response(b'{"error":{"message":"no GPU"}}'), None, "no GPU"),
    **{n: (stream(e, "[DONE]"), None, words) for n, (e, words) in BEFORE_A_TOKEN.items()},
    **{n: (stream(OK[0], e, "[DONE]"), 1, words) for n, (e, words) in AFTER_A_TOKEN.items()},
    **{n: (BEGUN + lines, 1, words) for n, (lines, words) in LINES_AFTER_A_TOKEN.items()},
}


PROTOCOL_ERRORS: dict[str, tuple[bytes, int | None, str]] = {
    "headers without end": (
        UNFRAMED[:-2] + b"X-Filler: aaaaaaaaaaaaaaaa\r\n" * 3000,
        None,
        "more than 64 KiB of headers",
    ),
    "a header without end": (
        UNFRAMED[:-2] + b"X-Filler: " + b"a" * 70_000,
        None,
        "more than 64 KiB of headers",
    ),
    "informational answers without end": (
        b"HTTP/1.1 100 Continue\r\n\r\n" * 3000,
        None,
        "more than 64 KiB of headers",
    ),
    "invalid JSON": (stream(OK[0], '{"choices": [', FINISH, "[DONE]"), 1, "not JSON"),
    "JSON lines": (
        json_response(b'{"choices":[]}\n{"choices":[]}\n'),
        None,
        "JSON lines, no event",
    ),
    "an array": (
        json_response(b'[{"choices":[]}]'),
        None,
        "JSON, but no event of this API: Expected `object",
    ),
    "events without a blank line between them": (
        unframed(*OK).replace(b"\n\n", b"\n"),
        None,
        "JSON lines, no event",
    ),
    "a gzip stream that is not said to be one": (
        UNFRAMED + gzip.compress(b"".join(map(event, OK))),
        None,
        "without a single event",
    ),
    "JSON of another shape": (
        stream('{"choices": 5}', "[DONE]"),
        None,
        "JSON, but no event of this API: Expected",
    ),
    "a delta that is a text": (
        stream('{"choices": [{"delta": "a"}]}', "[DONE]"),
        None,
        "JSON, but no event of this API: Expected",
    ),
    "a transfer coding that nobody knows": (
        HEAD.replace(b": chunked", b": br, chunked") + chunk(*OK) + END,
        None,
        "coding br, which was not asked for",
    ),
    "invalid UTF-8": (
        UNFRAMED + b'data: {"choices":[{"text":"\xff\xfe"}]}\n\n' + event("[DONE]"),
        None,
        "not JSON",
    ),
    "stream under application/json": (
        unframed(*OK).replace(b"text/event-stream", b"application/json"),
        None,
        "not JSON",
    ),
    "garbage": (b"SSH-2.0-OpenSSH_9.2\r\n", None, "not HTTP"),
    "TLS alert": (b"\x15\x03\x01\x00\x02\x02\x46", None, "not HTTP"),
    "HTTP/0.9 page": (b"<html>hello</html>", None, "not HTTP"),
    "chunk size that is no number": (HEAD + b"zz\r\n", None, "not HTTP"),
    "another protocol": (
        b"HTTP/1.1 101 S\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\nxyz",
        None,
        "not HTTP",
    ),
}


GOOD: dict[str, tuple[bytes, int]] = {
    "close-delimited, finished": (unframed(*OK), 2),
    "close-delimited, [DONE] only": (unframed(OK[0], "[DONE]"), 1),
    "last event without its blank line": (unframed(*OK)[:-2], 2),
    "finish reason, no [DONE]": (stream(*OK), 2),
    "[DONE], no finish reason": (stream(OK[0], "[DONE]"), 1),
    "tokens after the finish reason": (stream(*OK, text("c"), "[DONE]"), 3),
    "an error field without a word": (BEGUN + b"error: null\n\n" + event(OK[1]) + event(FINISH), 2),
    "bare JSON that is no error": (
        UNFRAMED + b'{"error": null, "queue": 3}\n\n' + event(OK[0]) + event(FINISH),
        1,
    ),
    "no error in a choice": (stream(text("a", error=None), text("b", error={}), FINISH), 2),
    "many headers": (
        UNFRAMED[:-2]
        + b"X-Filler: aaaaaaaaaaaaaaaa\r\n" * 2000
        + b"\r\n"
        + b"".join(map(event, OK)),
        2,
    ),
    "words in the stream": (BEGUN + b"warming up\n\n" + event(FINISH), 1),
    "MiniMax, all well": (
        stream(
            OK[0],
            {"usage": {"completion_tokens": 1}, "base_resp": {"status_code": 0, "status_msg": ""}},
            FINISH,
        ),
        1,
    ),
    "a reason that says null, and then one": (stream(text("a", finish_reason="null"), FINISH), 1),
    "an error that is none": (
        stream({**OK[0], "error": None}, {**OK[1], "error": {}}, "[DONE]"),
        2,
    ),
    "unknown fields": (
        stream({"choices": [{"delta": {"content": "a", "new": [1]}, "x": {}}], "y": 1}, FINISH),
        1,
    ),
    "no choices key beside usage": (stream(*OK, {"usage": {"completion_tokens": 2}}), 2),
    "null event": (stream("null", *OK), 2),
    "an event of another kind": (stream(OK[0], {"object": "ping"}, OK[1], FINISH), 2),
    "an event of another kind, no finish reason": (stream({"queue": 3}, *OK[:2], "[DONE]"), 2),
    "empty event": (stream("", *OK), 2),
    "a byte order mark before an event": (
        UNFRAMED + event(OK[0]) + b"\xef\xbb\xbf" + event(OK[1]) + event(FINISH),
        2,
    ),
    "two byte order marks": (UNFRAMED + b"\xef\xbb\xbf" * 2 + b"".join(map(event, OK)), 2),
    "a gzip stream without its end": (
        UNFRAMED[:-2]
        + b"Content-Encoding: gzip\r\n\r\n"
        + gzip.compress(b"".join(map(event, OK)))[:-8],
        2,
    ),
    "multi-line data": (
        UNFRAMED + b'data: {"choices":\ndata: [{"text":"a","finish_reason":"stop"}]}\n\n',
        1,
    ),
    "compressed on its way": (
        HEAD.replace(b": chunked", b": gzip, chunked")
        + http_chunk(gzip.compress(b"".join(map(event, OK))))
        + END,
        2,
    ),
    "compressed on its way, in two headers": (
        HEAD.replace(b"Transfer-E", b"Transfer-Encoding: deflate\r\nTransfer-E")
        + http_chunk(zlib.compress(b"".join(map(event, OK))))
        + END,
        2,
    ),
    "another name for the stream type": (
        unframed(*OK).replace(b"text/event-stream", b"text/plain"),
        2,
    ),
    "JSON under another type": (UNFRAMED.replace(b"event-stream", b"plain") + WHOLE, 2),
    "100-continue first": (b"HTTP/1.1 100 Continue\r\n\r\n" + stream(*OK), 2),
    "103 early hints first": (b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + stream(*OK), 2),
}


RESET, CUT, NO_END = "before the response headers", "middle of the body", "without a finish reason"


LENGTH_0 = b"Content-Length: 0\r\n\r\n"


ENDINGS: dict[str, tuple[bytes, str, int | None, str | None]] = {
    # name: (bytes, then FIN; status; tokens; part of the error)
    "nothing at all": (b"", "reset", None, RESET),
    "half a status line": (b"HTTP/1.1 20", "reset", None, RESET),
    "half the headers": (HEAD[:-4], "reset", None, RESET),
    "100-continue only": (b"HTTP/1.1 100 Continue\r\n\r\n", "reset", None, RESET),
    "headers only": (HEAD, "truncated", None, CUT),
    "chunked, no last chunk": (HEAD + chunk(*OK, "[DONE]"), "truncated", 2, CUT),
    "content-length short": (
        UNFRAMED.replace(b"\r\n\r\n", b"\r\nContent-Length: 9999\r\n\r\n") + event(OK[0]),
        "truncated",
        1,
        CUT,
    ),
    "close-delimited, no finish reason": (unframed(*OK[:2]), "truncated", 2, NO_END),
    "close-delimited, cut inside an event": (unframed(*OK[:2])[:-20], "truncated", 1, NO_END),
    "neither": (stream(OK[0]), "truncated", 1, NO_END),
    "an empty finish reason": (stream(text("a", finish_reason="")), "truncated", 1, NO_END),
    "a page in the stream": (BEGUN + b"<html>502</html>\n\n", "truncated", 1, NO_END),
    "a reason that says null (DashScope)": (
        stream(text("a", finish_reason="null"), text("b", finish_reason="null")),
        "truncated",
        2,
        NO_END,
    ),
    "HTML under 200": (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 13\r\n\r\n<html></html>",
        "protocol_error",
        None,
        "text/html: <html></html>",
    ),
    "a sentence under 200": (
        UNFRAMED.replace(b"event-stream", b"plain") + b"no upstream",
        "protocol_error",
        None,
        "content type text/plain: no upstream",
    ),
    "a sentence in chunks": (
        HEAD + http_chunk(b"busy") + END,
        "protocol_error",
        None,
        "text/event-stream: busy",
    ),
    "a sentence within the stream": (
        HEAD + chunk(OK[0]) + http_chunk(b"no upstream\n\n") + END,
        "truncated",
        1,
        "without a finish reason or [DONE]: no upstream",
    ),
    "the same, then [DONE]": (
        HEAD + chunk(OK[0]) + http_chunk(b"no upstream\n\n") + chunk("[DONE]") + END,
        "truncated",
        1,
        "without a finish reason: no upstream",
    ),
    "JSON cut off": (json_response(WHOLE[:40]), "truncated", None, "Input data was truncated"),
    "JSON cut off, under another type": (
        UNFRAMED.replace(b"event-stream", b"plain") + WHOLE[:40],
        "truncated",
        None,
        "Input data was truncated",
    ),
    "200 without a body": (
        b"HTTP/1.1 200 OK\r\n" + LENGTH_0,
        "empty",
        None,
        "content type unknown",
    ),
    "204": (b"HTTP/1.1 204 No Content\r\n\r\n", "empty", None, "HTTP 204"),
    "redirect": (
        b"HTTP/1.1 307 T\r\nLocation: /v1\r\n" + LENGTH_0,
        "http_error",
        None,
        "give the final URL",
    ),
    "error, empty body": (b"HTTP/1.1 503 Busy\r\n" + LENGTH_0, "http_error", None, "HTTP 503"),
    "error, body cut short": (JSON_500, "http_error", None, "HTTP 500: boom"),
    "error, close-delimited": (b"HTTP/1.1 400 Bad\r\n\r\nno", "http_error", None, "HTTP 400: no"),
}


ENDINGS |= {name: (data, "ok", tokens, None) for name, (data, tokens) in GOOD.items()}
whole, whole_tokens = next(iter(GOOD.values()))
for code in (201, 202, 203, 206):  # 201: as some frameworks answer each POST
    ended = (
        ("ok", whole_tokens, None)
        if code == 201
        else ("protocol_error", whole_tokens, f"HTTP {code}: ")
    )
    ENDINGS[str(code)] = (whole.replace(b"200 OK", b"%d Odd" % code, 1), *ended)


for status, table in (("stream_error", STREAM_ERRORS), ("protocol_error", PROTOCOL_ERRORS)):
    ENDINGS |= {
        name: (data, status, tokens, error) for name, (data, tokens, error) in table.items()
    }


@pytest.mark.parametrize("name", ENDINGS)
def test_how_a_response_can_end(name: str) -> None:
    data, status, tokens, error = ENDINGS[name]
    for reads in ([data], [data[i : i + 1] for i in range(len(data))]):
        record = play(enumerate(reads, 1))
        assert (record.status, record.output_tokens) == (status, tokens), record.error
        assert (error or "") in (record.error or "")
        assert (record.error is None) == (error is None)
        assert "\n" not in (record.error or "")


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_context_that_is_exceeded_is_no_failure_before_the_first_token(tokens: int) -> None:
    """As an event of a 200 stream; after a token it is the server that did not see it coming."""
    error = {"error": {"message": "context length exceeded: 4097 > 4096", "code": 400}}
    record = play([(1 * MS, stream(*OK[:tokens], error, "[DONE]"))])
    assert record.status == ("stream_error" if tokens else "too_long")


@pytest.mark.parametrize("endless", [b"0\r\nX-Filler: ", b"0\r\nX: y\r\n", b"1;extension="])
def test_what_follows_the_body_and_is_none_of_it_has_an_end(endless: bytes) -> None:
    """Trailers and chunk extensions of 1000 bytes a read: 65 reads make 64 KiB."""
    filler = b"X: abcde\r\n" * 100 if endless.endswith(b"\r\n") else b"a" * 1000
    reads = [HEAD, chunk(*OK), endless, *[filler] * 100]
    record = play(enumerate(reads, 1))
    assert (record.status, record.output_tokens) == ("protocol_error", 2)
    assert record.error == "more than 64 KiB of headers"
    assert record.ended_ns <= 3 + 67


def numbered(*indices: Any) -> list[dict[str, Any]]:
    """Text of these choices; None: of one without a number."""
    return [
        {"choices": [{"delta": {"content": "a"}} | ({} if i is None else {"index": i})]}
        for i in indices
    ]


CHOICES: dict[str, tuple[list[dict[str, Any]], bool]] = {
    # name: (events, whether they are several choices)
    "in turn": (numbered(*[0, 1, 2] * 5) + ends(0, 1, 2), True),
    "in turn, one end": (numbered(*[0, 1, 2] * 5) + ends(0), True),
    "one after the other": (numbered(*[0] * 5, *[1] * 5) + ends(1), True),
    "the first without its number (Go's omitempty)": (numbered(*[None, 1] * 3) + ends(0), True),
    "a late second one": (numbered(*[0] * 20, 1, 0) + ends(0), True),
    "of one token each": (numbered(0, 1) + ends(0, 1), True),
    "in one event": (
        [{"choices": [*numbered(0)[0]["choices"], *numbered(1)[0]["choices"]]}] * 3 + ends(0),
        True,
    ),
    "in one event, without numbers": (
        [{"choices": numbered(None)[0]["choices"] * 2}] * 3 + ends(0),
        True,
    ),
    "whole, in one": (
        [
            {
                "choices": [
                    {"index": i, "message": {"content": "a"}, "finish_reason": "stop"}
                    for i in (0, 1)
                ]
            }
        ],
        True,
    ),
    "without numbers, the first one shorter": (
        numbered(*[None] * 9) + ends(None) + numbered(*[None] * 3) + ends(None),
        True,
    ),
    "without numbers, ends with text": (numbered(*[None] * 9) + ends(None, None, text="a"), True),
    "all with the same number": (numbered(*[0] * 9) + ends(0) + numbered(0) + ends(0), True),
    "one": (numbered(*[0] * 9) + ends(0), False),
    "one without number, its end twice": (
        numbered(*[None] * 9) + ends(None, text="a") + ends(None),
        False,
    ),
    "one, and every chunk an end": (ends(*[0] * 9, text="a"), False),
    "numbers as text": (numbered(*"010101") + ends(0), True),
    "one, numbers that are none": (numbered([0], [1], [0], 0.5) + ends(0), False),
    "one, and its end twice": (numbered(*[0] * 9) + ends(0, 0), False),
    "one, with another number": (numbered(*[1] * 9) + ends(1), False),
    "one, two pieces in an event": (
        [{"choices": numbered(0)[0]["choices"] * 2}] * 3 + ends(0),
        False,
    ),
    "one, sometimes without its number": (numbered(0, None, 0, 0, None) + ends(0), False),
    "tokens of one, numbered (TGI)": (numbered(*range(9)) + ends(9), False),
    "tokens of one, numbered, with gaps": (numbered(0, 1, 3, 4, 7) + ends(8), False),
}


@pytest.mark.parametrize("name", CHOICES)
def test_several_choices_of_which_one_was_asked_for_are_no_answer(name: str) -> None:
    """Three choices every 10 ms, merged, would have an ITL of 0 and a third of the TPOT."""
    events, several = CHOICES[name]
    record = play((i * 10 * MS, data) for i, data in enumerate([HEAD, *map(chunk, events), END]))
    expected = (
        ("protocol_error", "several choices came, one was asked for") if several else ("ok", None)
    )
    assert (record.status, record.error) == expected


@pytest.mark.parametrize(
    ("planned", "index", "status"),
    [(5, None, "protocol_error"), (10, None, "ok"), (None, None, "ok"), (5, 0, "ok")],
)
def test_choices_in_lockstep_without_an_index_are_found_by_their_length(
    planned: int | None, index: int | None, status: str
) -> None:
    exchange = new_exchange()
    exchange.record.output_tokens_planned = planned
    for data in [HEAD, *map(chunk, numbered(*[index] * 10) + ends(index, index)), END]:
        exchange.feed(MS, data)
    assert exchange.record.status == status


def _compressed(body: bytes, encoding: bytes, how: Any) -> bytes:
    packed = how(body)
    return (
        UNFRAMED[:-2]
        + b"Content-Encoding: %b\r\nContent-Length: %d\r\n\r\n" % (encoding, len(packed))
        + packed
    )


@pytest.mark.parametrize(
    ("encoding", "how"), [(b"gzip", gzip.compress), (b"deflate", zlib.compress)]
)
def test_compressed_bodies(encoding: bytes, how: Any) -> None:
    data = _compressed(b"".join(event(v) for v in OK), encoding, how)
    for size in (1, 10, len(data)):
        record = play(enumerate(data[i : i + size] for i in range(0, len(data), size)))
        assert (record.status, record.output_tokens) == ("ok", 2)


def test_a_compressed_stream_keeps_the_time_of_each_token() -> None:
    packer = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)
    reads = [(1 * MS, UNFRAMED.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n"))]
    for i, value in enumerate(OK, 2):
        reads.append((i * MS, packer.compress(event(value)) + packer.flush(zlib.Z_SYNC_FLUSH)))
    record = play([*reads, (9 * MS, packer.flush())])
    assert (record.status, list(record.chunk_at_us)) == ("ok", [2_000, 3_000])


def test_a_broken_compressed_body_is_a_protocol_error() -> None:
    record = play([(1, _compressed(b"no such thing", b"gzip", lambda b: b))])
    assert (record.status, record.http_status) == ("protocol_error", 200)
    assert "compressed" in (record.error or "")
