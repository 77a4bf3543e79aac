"""One exchange fed by hand: (time, bytes) in, the record out, to the nanosecond."""

from __future__ import annotations

import gzip
import json
import zlib
from bisect import bisect_left
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampacity.loadgen.receive.completions import Answer
from ampacity.loadgen.receive.exchange import Exchange
from ampacity.loadgen.rundir.records import CHUNK_AT_MAX_US, RequestRecord
from ampacity.loadgen.send.protocols import Dialect, RequestShape, error_text, excerpt
from tests.streams.playing import (
    END,
    HEAD,
    MS,
    http_chunk,
    in_pieces,
    json_response,
    new_exchange,
    play,
)

UNFRAMED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
ROLE = {
    "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]
}
FINISH = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}


def text(content: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": content}, **more}]}


def event(value: dict[str, Any] | str) -> bytes:
    return b"data: " + (value if isinstance(value, str) else json.dumps(value)).encode() + b"\n\n"


def chunk(*values: dict[str, Any] | str) -> bytes:
    """One HTTP chunk with these events."""
    return http_chunk(b"".join(event(v) for v in values))


def unframed(*values: dict[str, Any] | str) -> bytes:
    return UNFRAMED + b"".join(event(v) for v in values)


# -- characters in halves ------------------------------------------------------------------------


def _delta(**said: Any) -> str:
    return json.dumps({"choices": [{"index": 0, "delta": said}]})  # json writes halves as escapes


HALVES = {
    # name: (events, text without reasoning, text with it): U+1F600 is the pair D83D DE00
    "content": (
        [_delta(content="a\ud83d"), _delta(content="\ude00b")],
        "a\U0001f600b",
        "a\U0001f600b",
    ),
    "capital digits": (
        ['{"choices":[{"text":"\\uD83D"}]}', '{"choices":[{"text":"\\uDE00"}]}'],
        "\U0001f600",
        "\U0001f600",
    ),
    "reasoning": (
        [
            _delta(reasoning_content="\ud83d"),
            _delta(reasoning_content="\ude00"),
            _delta(content="x"),
        ],
        "x",
        "\U0001f600x",
    ),
    "a half alone": ([_delta(content="\ude00"), _delta(content="b")], "\ufffdb", "\ufffdb"),
    "other text between them": (
        [_delta(content="\ud83d"), _delta(reasoning="-"), _delta(content="\ude00")],
        "\U0001f600",
        "\ufffd-\ufffd",
    ),
    "begun in the reasoning, ended in the answer": (
        [_delta(reasoning_content="a\ud83d"), _delta(content="\ude00b")],
        "\ufffdb",
        "a\U0001f600b",
    ),
    "a half as the last token": ([_delta(content="a"), _delta(content="b\ud83d")],)
    + ("ab\ufffd",) * 2,
    "tool arguments": (
        [
            _delta(tool_calls=[{"index": 0, "function": {"arguments": half}}])
            for half in ('{"a":"\ud83d', '\ude00"}')
        ],
        "",
        "",
    ),
}


@pytest.mark.parametrize("name", HALVES)
def test_a_character_may_come_in_two_events(name: str) -> None:
    events, said, with_reasoning = HALVES[name]
    for in_one_read in (False, True):
        exchange, ends = _exchange()
        exchange.keep_text()
        reads = [HEAD + chunk(*events)] if in_one_read else [HEAD, *map(chunk, events)]
        for i, read in enumerate([*reads, chunk(FINISH, "[DONE]") + END]):
            exchange.feed((i + 1) * MS, read)
        assert ends == [exchange]
        record = exchange.record
        assert (record.status, record.error, record.finish_reason) == ("ok", None, "stop")
        assert len(record.chunk_at_us) == len(events)
        assert (exchange.text(), exchange.text(reasoning=True)) == (said, with_reasoning)


def test_half_a_character_in_an_error_or_a_finish_reason_is_printable() -> None:
    record = play([(1 * MS, HEAD + chunk({"error": {"message": "no \ud83d"}}) + END)])
    assert (record.status, record.error) == ("stream_error", "no \ufffd")
    record = play([(1 * MS, HEAD + chunk(text("a", finish_reason="st\ud83d")) + END)])
    assert (record.status, record.finish_reason) == ("ok", "st\ufffd")


@pytest.mark.parametrize(
    "broken", ['{"choices":[{"text":"\\ud83d"}', '{"choices":NaN,"x":"\\ud83d"}']
)
def test_half_a_character_excuses_no_other_fault(broken: str) -> None:
    assert play([(1 * MS, HEAD + chunk(broken, FINISH) + END)]).status == "protocol_error"


# -- times ---------------------------------------------------------------------------------------


def test_the_role_chunk_starts_no_clock_and_late_usage_stops_none() -> None:
    """Role at 10 ms, text at 500 and 512.345678 ms, usage 300 ms after the last token."""
    start = 1_000_000_007
    record = play(
        [
            (start + 2 * MS, HEAD),
            (start + 10 * MS, chunk(ROLE)),
            (start + 500 * MS, chunk(text("Hel"))),
            (start + 512_345_678, chunk(text("lo"))),
            (start + 812_345_678, chunk(FINISH, USAGE)),
            (start + 900 * MS, chunk("[DONE]") + END),
        ],
        started_ns=start,
    )
    assert (record.status, record.output_tokens, record.finish_reason) == ("ok", 2, "stop")
    assert record.headers_ns == start + 2 * MS
    assert record.first_event_ns == start + 10 * MS
    assert record.first_token_ns == record.first_answer_ns == start + 500 * MS
    assert record.last_token_ns == start + 512_345_678
    assert record.ended_ns == start + 900 * MS
    assert list(record.chunk_at_us) == [500_000, 512_345]  # whole microseconds, cut, not rounded


def test_reasoning_is_the_first_token_and_text_the_first_answer() -> None:
    record = play(
        [
            (1 * MS, HEAD + chunk(ROLE)),
            (20 * MS, chunk({"choices": [{"delta": {"reasoning_content": "hm"}}]})),
            (30 * MS, chunk({"choices": [{"delta": {"reasoning": "so"}}]})),
            (70 * MS, chunk(text("Yes"))),
            (71 * MS, chunk(FINISH, "[DONE]") + END),
        ]
    )
    assert (record.first_token_ns, record.first_answer_ns) == (20 * MS, 70 * MS)
    assert list(record.chunk_at_us) == [20_000, 30_000, 70_000]


def test_events_of_one_read_share_its_time() -> None:
    record = play(
        [
            (5 * MS, HEAD + chunk(*(text(c) for c in "abcde"))),
            (9 * MS, chunk(FINISH, "[DONE]") + END),
        ]
    )
    assert list(record.chunk_at_us) == [5_000] * 5
    assert record.first_token_ns == record.last_token_ns == 5 * MS
    assert record.output_tokens == 5


def test_an_event_belongs_to_the_read_that_completes_it() -> None:
    whole = chunk(text("Hello"))
    # the blank line ends 2 bytes before the chunk does: the third read brings it
    record = play(
        [
            (1 * MS, HEAD + whole[:20]),
            (2 * MS, whole[20:-4]),
            (3 * MS, whole[-4:]),
            (4 * MS, chunk(FINISH) + END),
        ]
    )
    assert list(record.chunk_at_us) == [3_000]


def test_times_do_not_depend_on_when_the_json_is_decoded() -> None:
    """1,000 chunks of 100 bytes: each event keeps the time of its read."""
    reads = [(0, HEAD), *((i * 77_777, chunk(text("x" * 40))) for i in range(1, 1001))]
    record = play([*reads, (10**9, chunk(FINISH, "[DONE]") + END)])
    assert list(record.chunk_at_us) == [i * 77_777 // 1000 for i in range(1, 1001)]


def test_a_body_that_is_no_stream_arrives_at_once() -> None:
    body = json.dumps(
        {
            "choices": [{"index": 0, "message": {"content": "Hello"}, "finish_reason": "length"}],
            "usage": {"prompt_tokens": 3, "completion_tokens": 8},
        }
    ).encode()
    whole = json_response(body)
    head, body = whole[: -len(body)], whole[-len(body) :]
    record = play([(4 * MS, head), (5 * MS, body[:30]), (6 * MS, body[30:])])
    assert (record.status, record.output_tokens, record.finish_reason) == ("ok", 8, "length")
    assert record.first_event_ns == record.first_token_ns == record.last_token_ns == 6 * MS
    assert (list(record.chunk_at_us), record.chunk_tokens) == ([6_000], [8])


def test_arrivals_beyond_71_minutes_saturate() -> None:
    hours = 2 * 3600 * 1000 * MS
    record = play([(1 * MS, HEAD + chunk(text("a"))), (hours, chunk(text("b"), FINISH) + END)])
    assert list(record.chunk_at_us) == [1_000, CHUNK_AT_MAX_US]
    assert record.last_token_ns == hours


def test_no_token_has_no_time() -> None:
    record = play([(1 * MS, HEAD + chunk(ROLE)), (2 * MS, chunk(FINISH, "[DONE]") + END)])
    assert record.status == "empty"
    times = record.first_token_ns, record.last_token_ns, record.first_answer_ns
    assert times == (None, None, None)
    assert (record.output_tokens, list(record.chunk_at_us)) == (None, [])
    assert record.first_event_ns == 1 * MS


# texts that look like the end of a chunked response or of an event
TRAPS = [text("0\r\n\r\n"), text("a\n\n\r\nb"), text("\n0\r\n\r\n"), text("é\u2028")]


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_reads_of_any_cut_keep_text_and_times_whatever_the_cuts(data: st.DataObject) -> None:
    """160 events, cut anywhere: each token has the time of the read with its blank line."""
    events = [event(text(f"w{i}") if i % 9 else TRAPS[i // 9 % len(TRAPS)]) for i in range(160)]
    body, ends = HEAD, []
    for one in events:
        body += http_chunk(one)
        ends.append(len(body) - 2)  # offset behind the event's blank line
    body += chunk(FINISH, "[DONE]") + END
    own = st.sampled_from([end + 2 for end in ends])  # where servers cut: behind a chunk
    anywhere = st.integers(1, len(body) - 1)
    cuts = sorted(
        set(data.draw(st.lists(own, max_size=160)) + data.draw(st.lists(anywhere, max_size=6)))
    )
    record = play((i * 1000, piece) for i, piece in enumerate(in_pieces(body, cuts), 1))
    assert (record.status, record.output_tokens) == ("ok", 160)
    assert list(record.chunk_at_us) == [1 + bisect_left(cuts, end) for end in ends]


def _counted(total: int, **more: Any) -> dict[str, Any]:
    return {**text("w", **more), "usage": {"prompt_tokens": 7, "completion_tokens": total}}


ODD = {  # in place of the 20th of 60 chunks of text
    "none": _counted,
    "no usage": lambda n: text("w"),
    "empty": lambda n: _counted(n) | {"choices": [{"index": 0, "delta": {"content": ""}}]},
    "reasoning": lambda n: (
        _counted(n) | {"choices": [{"index": 0, "delta": {"reasoning_content": "w"}}]}
    ),
    "two choices": lambda n: {
        "choices": [*text("w")["choices"], *text("w")["choices"]],
        "usage": _counted(n)["usage"],
    },
    "token ids": lambda n: _counted(n, token_ids=[1, 2]),
    "finish": lambda n: _counted(n, finish_reason="stop"),
    "no total": lambda n: _counted(n) | {"usage": {"prompt_tokens": 8}},
    "a total of 0": lambda n: _counted(0),
    "total that falls": lambda n: _counted(1),
    "cached": lambda n: (
        _counted(n)
        | {"usage": {"completion_tokens": n, "prompt_tokens_details": {"cached_tokens": 3}}}
    ),
    "error": lambda n: {"error": {"message": "no"}},
    "null": lambda n: "null",
    "no json": lambda n: '{"choices": [}',
    "two lines": lambda n: json.dumps(_counted(n)).replace(", ", ",\ndata: ", 1),
    "half an event": lambda n: json.dumps(_counted(n)).replace(", ", ",\n", 1),
    "carriage return": lambda n: json.dumps(_counted(n)).replace(", ", ",\r", 1),
    "two values": lambda n: "{} {}",
}


@pytest.mark.parametrize("merged", [1, 3])
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("usage", [True, False])
def test_reads_of_whole_chunks_say_the_same_as_pieces_of_them(
    usage: bool, odd: str, merged: int
) -> None:
    """Whole text chunks may skip the HTTP parser; chunks cut in two never do."""
    events = [_counted(i) if usage else text("w") for i in range(1, 61)]
    chunks = [chunk(ODD[odd](i) if i == 20 else e) for i, e in enumerate(events, 1)]
    last = (
        chunk(FINISH)
        + chunk({"choices": [], "usage": _counted(60)["usage"]})
        + chunk("[DONE]")
        + END
    )
    groups = [b"".join(chunks[i : i + merged]) for i in range(0, 60, merged)]
    whole = play(
        [(0, HEAD), *((i * MS, group) for i, group in enumerate(groups, 1)), (99 * MS, last)]
    )
    halves = [(i * MS, half) for i, g in enumerate(groups, 1) for half in (g[:-3], g[-3:])]
    assert whole == play([(0, HEAD), *halves, (99 * MS, last)])


def test_an_endless_stream_is_not_buffered_and_garbage_in_it_is_noticed() -> None:
    exchange = new_exchange()
    exchange.feed(1, HEAD)
    one = chunk(text("x" * 400))
    for i in range(200):
        exchange.feed(i + 2, one)
    assert exchange._body.pieces == []
    exchange.feed(300, b"no such chunk\n\n\r\n")
    exchange.fail("timeout", "nothing received for 1 s", 10**9)
    assert (exchange.record.status, exchange.record.ended_ns) == ("protocol_error", 300)
    assert exchange.record.output_tokens == 200


# -- how a response can end --------------------------------------------------------------------

OK = (text("a"), text("b"), FINISH)
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
    "an array": (json_response(b'[{"choices":[]}]'), None, "not JSON: Expected `object"),
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
    "JSON of another shape": (stream('{"choices": 5}', "[DONE]"), None, "not JSON"),
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
    "JSON cut off": (
        json_response(WHOLE[:40]),
        "truncated",
        None,
        "Input data was truncated",
    ),
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
    assert record.ended_ns is not None
    assert record.ended_ns <= 3 + 67


# -- several choices -----------------------------------------------------------------------------


def numbered(*indices: Any) -> list[dict[str, Any]]:
    """Text of these choices; None: of one without a number."""
    return [
        {"choices": [{"delta": {"content": "a"}} | ({} if i is None else {"index": i})]}
        for i in indices
    ]


def ends(*indices: int | None, text: str = "") -> list[dict[str, Any]]:
    end = {"delta": {"content": text}, "finish_reason": "stop"}
    return [{"choices": [end | ({} if i is None else {"index": i})]} for i in indices]


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


# -- one exchange ends once -------------------------------------------------------------------


def _exchange() -> tuple[Exchange, list[Exchange]]:
    ends: list[Exchange] = []
    return new_exchange(on_end=ends.append), ends


@pytest.mark.parametrize("late", ["cancelled by the user", "connection lost", "nothing"])
def test_a_whole_answer_is_judged_later_and_by_nothing_that_came_since(late: str) -> None:
    """Its times are those of its reads, and its status is that of what was read."""
    ends: list[Exchange] = []
    whole: list[Exchange] = []
    record = RequestRecord(1, 0, 0, "unfinished", started_ns=0)
    exchange = Exchange(record, b"request", ends.append, on_whole=whole.append)
    assert exchange.feed(1 * MS, HEAD + chunk(OK[0])) is False
    assert exchange.feed(5 * MS, chunk(*OK[1:]) + END) is True  # the connection is free
    assert (whole, ends, exchange.close_after) == ([exchange], [], False)
    if late == "cancelled by the user":
        exchange.fail("cancelled", "the user left", 7 * MS)
    elif late == "connection lost":
        exchange.eof(7 * MS)
    assert ends == []
    exchange.judge()
    assert ends == [exchange]
    plain = RequestRecord(1, 0, 0, "unfinished", started_ns=0)
    at_once = Exchange(plain, b"request", lambda _: None)
    at_once.feed(1 * MS, HEAD + chunk(OK[0]))
    at_once.feed(5 * MS, chunk(*OK[1:]) + END)
    assert record == plain
    assert (record.status, record.ended_ns) == ("ok", 5 * MS)


def test_a_broken_answer_is_judged_at_once_although_whole_ones_wait() -> None:
    ends: list[Exchange] = []
    record = RequestRecord(1, 0, 0, "unfinished", started_ns=0)
    not_whole = lambda _: pytest.fail("it is not whole")  # noqa: E731
    exchange = Exchange(record, b"request", ends.append, on_whole=not_whole)
    exchange.feed(1 * MS, HEAD + chunk(OK[0]))
    exchange.eof(2 * MS)
    assert ends == [exchange]
    assert record.status == "truncated"


def test_two_responses_to_one_request_end_it_once_and_leave_its_record_alone() -> None:
    exchange, ends = _exchange()
    first = HEAD + chunk(*OK) + END
    second = (
        b"HTTP/1.1 503 Busy\r\nRetry-After: 9\r\nX-Request-Id: other\r\nContent-Length: 0\r\n\r\n"
    )
    exchange.feed(5, first + second)
    exchange.feed(6, second)
    exchange.eof(7)
    assert ends == [exchange]
    record = exchange.record
    assert (record.status, record.http_status, record.ended_ns) == ("ok", 200, 5)
    assert (record.retry_after_s, record.server_request_id) == (None, None)
    assert exchange.close_after  # such a connection must not be used again


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("2.5", 2.5),
        ("in an hour", pytest.approx(3600, abs=60)),
        ("Fri, 31 Dec 1999 23:59:59 GMT", 0.0),  # already past
        ("soon", None),
        ("-3", None),
        ("nan", None),
    ],
)
def test_when_to_come_back_is_said_in_seconds_or_as_a_date(
    said: str, seconds: float | None
) -> None:
    if said == "in an hour":  # names of tests must not change while they are collected
        said = format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)
    exchange, _ = _exchange()
    exchange.feed(
        5, f"HTTP/1.1 429 Busy\r\nRetry-After: {said}\r\nContent-Length: 0\r\n\r\n".encode()
    )
    assert exchange.record.status == "http_error"
    assert exchange.record.retry_after_s == seconds


def test_a_server_that_says_an_error_and_falls_silent_is_no_timeout() -> None:
    for status, expected in (
        ("timeout", "stream_error"),
        ("unfinished", "stream_error"),
        ("cancelled", "cancelled"),
    ):
        exchange, _ = _exchange()
        exchange.feed(1 * MS, HEAD + chunk(OK[0], {"error": {"message": "overloaded"}}))
        assert not exchange.ended
        exchange.fail(status, "no token for 120 s", 9 * MS)
        assert exchange.record.status == expected
        assert ("overloaded" in (exchange.record.error or "")) is (expected == "stream_error")


def test_a_time_limit_keeps_what_arrived_and_what_comes_later_is_dropped() -> None:
    exchange, ends = _exchange()
    exchange.feed(1 * MS, HEAD + chunk(OK[0]))
    exchange.fail("timeout", "nothing received for 1 s", 1000 * MS)
    exchange.feed(1001 * MS, chunk(OK[1]) + END)
    exchange.fail("unfinished", "end of the stage", 2000 * MS)
    exchange.eof(2001 * MS, "Connection reset by peer")
    assert len(ends) == 1
    record = exchange.record
    assert (record.status, record.error) == ("timeout", "nothing received for 1 s")
    assert (record.output_tokens, list(record.chunk_at_us)) == (1, [1_000])
    assert record.ended_ns == 1000 * MS


@pytest.mark.parametrize(
    ("more", "reusable"),
    [(b"", True), (b"Connection: close\r\n", False), (b"Connection: keep-alive\r\n", True)],
)
def test_whether_the_connection_may_be_used_again(more: bytes, reusable: bool) -> None:
    exchange, _ = _exchange()
    exchange.feed(1, HEAD[:-2] + more + b"\r\n" + chunk(*OK) + END)
    assert exchange.ended
    assert exchange.close_after is not reusable


def test_a_second_attempt_on_a_fresh_connection_starts_from_nothing() -> None:
    exchange, ends = _exchange()
    exchange.restart()
    exchange.record.started_ns = 10 * MS
    exchange.feed(15 * MS, HEAD + chunk(*OK) + END)
    assert len(ends) == 1
    assert (exchange.record.status, list(exchange.record.chunk_at_us)) == ("ok", [5_000, 5_000])


# -- counting tokens ------------------------------------------------------------------------


def answer(*values: dict[str, Any]) -> Answer:
    found = Answer()
    for at_ns, value in enumerate(values):
        found.on_event(at_ns, json.dumps(value).encode())
    return found


def with_usage(value: dict[str, Any], completion_tokens: Any) -> dict[str, Any]:
    return {**value, "usage": {"completion_tokens": completion_tokens}}


def choices(*found: dict[str, Any]) -> dict[str, Any]:
    return {"choices": list(found)}


def totals(*counted: tuple[str | None, int]) -> list[dict[str, Any]]:
    """Text of one choice, or none, each with a running total."""
    return [with_usage({} if words is None else text(words), total) for words, total in counted]


PIECE = {"tool_calls": [{"function": {"arguments": "{"}}]}
COUNTS: dict[str, tuple[list[dict[str, Any]], tuple[int | None, str | None], list[int] | None]] = {
    "chunks only": ([text("a"), text("b")], (2, "chunks"), None),
    "usage of zero beside text": ([text("a"), text("b"), with_usage({}, 0)], (2, "chunks"), None),
    "usage of null": ([text("a"), with_usage({}, None)], (1, "chunks"), None),
    "usage that is no number": ([text("a"), with_usage({}, "12")], (1, "chunks"), None),
    "zeros in every chunk": (totals(("a", 0), ("b", 0)), (2, "chunks"), None),
    "usage in the last text chunk": ([text("a"), with_usage(text("b"), 5)], (5, "usage"), None),
    "the same total twice": (
        [text("a"), with_usage(FINISH, 7), with_usage({}, 7)],
        (7, "usage"),
        None,
    ),
    "one usage for each of two choices": (
        [text("a"), with_usage(FINISH, 3), text("b"), with_usage(FINISH, 4)],
        (7, "usage"),
        None,
    ),
    "cumulative, some tokens without text": (
        [with_usage(ROLE, 0), *totals(("a", 1), ("", 2), ("b", 3), ("c", 7))],
        (7, "usage_per_chunk"),
        [1, 2, 4],
    ),
    "cumulative, hidden tokens at the end": (
        totals(("a", 1), ("b", 2), ("", 5), (None, 5)),
        (5, "usage_per_chunk"),
        [1, 1],
    ),
    "cumulative that stands still": (
        totals(("a", 1), ("b", 1), (None, 2)),
        (2, "usage_per_chunk"),
        None,
    ),
    "token ids": (
        [text("ab", token_ids=[5, 6]), text("c", token_ids=[7])],
        (3, "logprobs"),
        [2, 1],
    ),
    "legacy logprobs": (
        [choices({"text": "ab", "logprobs": {"tokens": ["a", "b"]}})],
        (2, "logprobs"),
        [2],
    ),
    "two choices in one chunk": (
        [choices({"text": "a", "token_ids": [1, 2]}, {"index": 1, "text": "c", "token_ids": [3]})],
        (3, "logprobs"),
        [3],
    ),
    "reasoning under two names is one chunk": (
        [choices({"delta": {"reasoning": "x", "reasoning_content": "x"}})],
        (1, "chunks"),
        None,
    ),
    "tool call arguments": ([choices({"delta": PIECE})], (1, "chunks"), None),
    "a refusal": ([choices({"delta": {"refusal": "no"}})], (1, "chunks"), None),
    "nothing": ([ROLE, FINISH], (None, None), None),
    "hidden only": ([ROLE, FINISH, with_usage({}, 4)], (4, "usage"), None),
}


@pytest.mark.parametrize("name", COUNTS)
def test_token_counts(name: str) -> None:
    values, total, per_chunk = COUNTS[name]
    found = answer(*values)
    found.finish()
    assert (found.tally.output, found.tally.per_chunk()) == (total, per_chunk)


# -- requests and messages --------------------------------------------------------------------


def test_the_body_asks_for_exactly_the_planned_tokens() -> None:
    chat = json.loads(RequestShape("chat", "m").body("Hi", 7))
    assert chat == {
        "model": "m",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 7,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "ignore_eos": True,
    }
    plainest = Dialect(False, False, False, "max_completion_tokens")
    shape = RequestShape("completions", "m", plainest, {"temperature": 0, "stream": False})
    assert json.loads(shape.body("Hi", 7)) == {
        "model": "m",
        "prompt": "Hi",
        "max_completion_tokens": 7,
        "stream": False,
        "temperature": 0,
    }


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":{"message":"m","code":4}}', "m"),
        (b'{"error":"s"}', "s"),
        (b'{"detail":"d"}', "d"),
        (b'{"object":"error","message":"m","code":400}', "m"),
        (b'{"detail":[{"msg":"x"}]}', '[{"msg":"x"}]'),
        (b'{"error":{"code":5}}', '{"code":5}'),
        (b"[1]", "[1]"),
        (b"plain\r\n  text\t", "plain text"),
        (b"\xff\x00bin", "\ufffd\ufffdbin"),
        (b"", ""),
    ],
)
def test_the_servers_own_words(body: bytes, message: str) -> None:
    assert error_text(body) == message


def test_an_excerpt_is_one_short_printable_line() -> None:
    found = excerpt(b"a\x1b[31m\n" * 1000)
    assert len(found) == 200
    assert found.isprintable()
