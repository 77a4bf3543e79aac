"""The Responses API, Anthropic's Messages API and embeddings: same records, same words."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampacity.loadgen.receive.answers import ANSWERS
from ampacity.loadgen.receive.exchange import Exchange
from ampacity.loadgen.rundir.records import RequestRecord, to_batch
from ampacity.loadgen.send import history
from ampacity.loadgen.send.endpoint import parse_endpoint
from ampacity.loadgen.send.keys import Keys
from ampacity.loadgen.send.protocols import Api, Dialect, RequestShape
from tests.streams.playing import END, HEAD, MS, http_chunk, json_response, new_exchange
from tests.support.repeats import often


def event(value: dict[str, object]) -> bytes:
    return http_chunk(f"event: {value['type']}\ndata: {json.dumps(value)}\n\n".encode())


def play(api: Api, *events: dict[str, object], end: bytes = END) -> RequestRecord:
    """One event every 10 ms after the headers at 1 ms; the request started at 0."""
    ended: list[Exchange] = []
    exchange = new_exchange(api, ended.append)
    exchange.feed(MS, HEAD)
    for i, value in enumerate(events):
        exchange.feed((i + 1) * 10 * MS, event(value))
    exchange.feed((len(events) + 1) * 10 * MS, end)
    assert ended == [exchange]
    return exchange.record


RESPONSES_USAGE = json.loads("""{"input_tokens": 12,
    "input_tokens_details": {"cached_tokens": 4}, "output_tokens": 5,
    "output_tokens_details": {"reasoning_tokens": 2}, "total_tokens": 17}""")


def said(delta: str, kind: str = "output_text") -> dict[str, object]:
    return {"type": f"response.{kind}.delta", "delta": delta}


def ended(status: str, **more: object) -> dict[str, object]:
    return {"type": f"response.{status}", "response": {"status": status, **more}}


def block(kind: str, text: str, index: int = 0) -> dict[str, object]:
    name = {"text": "text", "thinking": "thinking", "input_json": "partial_json"}.get(kind, kind)
    delta = {"type": f"{kind}_delta", name: text}
    return {"type": "content_block_delta", "index": index, "delta": delta}


def begun(content: dict[str, object]) -> dict[str, object]:
    return {"type": "content_block_start", "index": 0, "content_block": content}


def part(kind: str, **whole: object) -> dict[str, object]:
    return {"type": f"response.{kind}.done", "output_index": 0, **whole}


def test_responses_stream() -> None:
    record = play(
        "responses",
        ended("created") | {"response": {"id": "r", "status": "in_progress", "usage": None}},
        {"type": "response.output_item.added", "item": {"type": "message"}},
        said("think", "reasoning_summary_text"),
        said("Hello"),
        said(""),
        said(" you"),
        {"type": "response.output_text.done", "text": "Hello you"},
        ended("completed", usage=RESPONSES_USAGE),
    )
    assert (record.status, record.finish_reason, record.token_source) == ("ok", "stop", "usage")
    counts = record.input_tokens, record.cached_tokens, record.output_tokens
    assert (*counts, record.reasoning_tokens) == (12, 4, 5, 2)
    assert (record.first_event_ns, record.first_token_ns) == (10 * MS, 30 * MS)
    assert (record.first_answer_ns, record.last_token_ns) == (40 * MS, 60 * MS)
    assert list(record.chunk_at_us) == [30_000, 40_000, 60_000]
    assert record.chunk_tokens is None


def test_responses_cut_by_its_length_limit() -> None:
    why = {"reason": "max_output_tokens"}
    last = ended("incomplete", incomplete_details=why, usage=RESPONSES_USAGE)
    record = play("responses", said("x"), last)
    assert (record.status, record.finish_reason, record.output_tokens) == ("ok", "length", 5)


OOM = {"code": "server_error", "message": "out of memory"}


@pytest.mark.parametrize(
    "last",
    [
        ended("failed", error=OOM),
        ended("cancelled", error=OOM),
        {"type": "error", **OOM},
        {"type": "error", "error": OOM},
    ],
)
def test_responses_failure_in_a_200_stream(last: dict[str, object]) -> None:
    record = play("responses", said("x"), last)
    assert record.status == "stream_error"
    assert "out of memory" in (record.error or "")


def test_responses_without_its_end_is_truncated() -> None:
    assert play("responses", said("x")).status == "truncated"


def test_messages_stream() -> None:
    usage = {"input_tokens": 25, "cache_read_input_tokens": 8, "output_tokens": 1}
    record = play(
        "messages",
        {"type": "message_start", "message": {"usage": usage}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "ping"},
        block("thinking", "hm"),
        block("signature", "zzz"),
        block("text", "Hello", 1),
        block("input_json", "{", 1),
        {
            "type": "message_delta",
            "delta": {"stop_reason": "max_tokens"},
            "usage": {"output_tokens": 15},
        },
        {"type": "message_stop"},
    )
    assert (record.status, record.finish_reason, record.output_tokens) == ("ok", "max_tokens", 15)
    assert (record.input_tokens, record.cached_tokens) == (
        33,
        8,
    )  # Anthropic counts what the cache gave apart
    assert list(record.chunk_at_us) == [40_000, 60_000, 70_000]
    assert record.first_answer_ns == 60 * MS


@pytest.mark.parametrize(
    ("api", "events", "named"),
    [
        ("chat", [{"type": "x", "model": "m-2", "choices": [{"delta": {"content": "a"}}]}], "m-2"),
        (
            "chat",
            [
                {"type": "x", "model": "", "choices": [], "prompt_filter_results": []},
                {"type": "x", "model": "m-2", "choices": [{"delta": {"content": "a"}}]},
            ],
            "m-2",
        ),
        (
            "chat",
            [
                {"type": "x", "model": "m", "choices": [{"delta": {"content": "a"}}]},
                {"type": "x", "model": "m-2", "choices": [{"delta": {"content": "b"}}]},
                {"type": "x", "model": "m-2", "choices": [{"delta": {}, "finish_reason": "stop"}]},
                {"type": "x", "model": "m-3", "choices": [], "usage": {"completion_tokens": 2}},
            ],
            "m, then m-2",
        ),
        (
            "responses",
            [
                {"type": "response.created", "response": {"model": "m"}},
                {"type": "response.completed", "response": {"model": "m-2"}},
            ],
            "m, then m-2",
        ),
        (
            "messages",
            [
                {"type": "message_start", "message": {"model": "m"}},
                {"type": "message_start", "message": {"model": "m"}},
            ],
            "m",
        ),
        ("completions", [{"type": "x", "model": 5, "choices": [{"text": "a"}]}], None),
        ("responses", [{"type": "response.created", "response": {"model": "m-2"}}], "m-2"),
        ("messages", [{"type": "message_start", "message": {"model": "m-2"}}], "m-2"),
        ("messages", [{"type": "message_start", "message": {}}], None),
    ],
)
def test_the_model_that_an_answer_names(
    api: Api, events: list[dict[str, object]], named: str | None
) -> None:
    assert play(api, *events).answered_by == named


CALL = {"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}}


@pytest.mark.parametrize(
    ("api", "events", "at_ms", "text"),
    [
        # in the event that begins a block
        ("messages", [begun({"type": "text", "text": "a"}), block("text", "b")], [10, 20], "ab"),
        ("messages", [begun({"type": "text", "text": ""}), block("text", "b")], [20], "b"),
        (
            "messages",
            [begun({"type": "thinking", "thinking": "a"}), block("text", "b")],
            [10, 20],
            "b",
        ),
        ("messages", [begun(CALL)], [10], ""),
        ("messages", [begun({**CALL, "input": {}}), block("input_json", "{")], [20], ""),
        # in those that end a part, or the answer
        (
            "responses",
            [part("output_text", text="a"), part("function_call_arguments", arguments="{}")],
            [10, 20],
            "a",
        ),
        ("responses", [said("a"), part("output_text", text="a")], [10], "a"),
        (
            "responses",
            [ended("completed", output=[{"type": "message", "content": [{"text": "a"}]}])],
            [10],
            "a",
        ),
    ],
)
def test_text_counts_once_wherever_it_comes(
    api: Api, events: list[dict[str, object]], at_ms: list[int], text: str
) -> None:
    exchange = new_exchange(api, keep=True)
    exchange.feed(MS, HEAD)
    for i, value in enumerate(events):
        exchange.feed((i + 1) * 10 * MS, event(value))
    exchange.feed(100 * MS, END)
    assert [at / 1000 for at in exchange.record.chunk_at_us] == at_ms
    assert exchange.text() == text


def test_no_count_of_the_prompt_at_the_end_takes_none_away() -> None:
    record = play(
        "messages",
        {"type": "message_start", "message": {"usage": {"input_tokens": 25, "output_tokens": 1}}},
        block("text", "a"),
        STOPPED | {"usage": {"input_tokens": 0, "output_tokens": 1}},
    )
    assert record.input_tokens == 25


@pytest.mark.parametrize(
    ("header", "named"),
    [
        ("X-Cache: HIT", "a cache"),
        ("cf-cache-status: Hit from edge", "a cache"),
        ("X-Cache: MISS", "m"),
        ("X-Cache-Hit: false", "m"),
        ("X-Prefix-Cache: hit", "m"),  # the engine's own, which makes the answer all the same
    ],
)
def test_an_answer_from_a_cache_names_it(header: str, named: str) -> None:
    exchange = new_exchange("chat", lambda _: None)
    exchange.feed(MS, HEAD.replace(b"\r\n", f"\r\n{header}\r\n".encode(), 1))
    exchange.feed(
        2 * MS, event({"type": "x", "model": "m", "choices": [{"delta": {"content": "a"}}]})
    )
    exchange.feed(3 * MS, END)
    assert exchange.record.answered_by == named


def test_messages_overloaded_in_the_stream() -> None:
    record = play(
        "messages",
        {"type": "message_start", "message": {"usage": {"input_tokens": 25, "output_tokens": 1}}},
        {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}},
    )
    assert (record.status, record.error) == ("stream_error", "Overloaded")


HALVES: dict[Api, list[dict[str, object]]] = {
    "responses": [
        said("\ud83d", "reasoning_text"),
        said("\ude00"),
        said("\ud83d", "function_call_arguments"),
        ended("completed"),
    ],
    "messages": [
        block("thinking", "\ud83d"),
        block("text", "\ude00"),
        block("input_json", "\ud83d"),
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}},
    ],
}


@pytest.mark.parametrize("api", HALVES)
def test_half_a_character_is_a_token_in_every_api(api: Api) -> None:
    record = play(api, *HALVES[api])
    assert (record.status, record.error) == ("ok", None)
    assert (record.first_token_ns, record.first_answer_ns) == (10 * MS, 20 * MS)
    assert list(record.chunk_at_us) == [10_000, 20_000, 30_000]


PING = http_chunk(b": ping\n\n")
TEXT: dict[str, object] = {"choices": [{"delta": {"content": "a"}, "finish_reason": "length"}]}
MORE: dict[str, object] = {"choices": [{"delta": {"content": "b"}}]}
COUNTED: dict[str, object] = {"choices": [], "usage": {"completion_tokens": 1}}
STOPPED = {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}}


@pytest.mark.parametrize(
    ("api", "events", "heartbeat", "end"),
    [
        ("chat", [TEXT, COUNTED, "[DONE]"], True, ("ok", 20)),
        ("completions", [{"choices": [{"text": "a"}]}, "[DONE]"], True, ("ok", 20)),
        ("messages", [block("text", "a"), STOPPED, {"type": "message_stop"}], True, ("ok", 30)),
        ("responses", [said("a"), ended("completed", usage=RESPONSES_USAGE)], True, ("ok", 20)),
        ("chat", [TEXT, COUNTED], False, ("ok", 20)),  # a usage may still come, so it is waited for
        (
            "messages",
            [block("text", "a"), STOPPED | {"usage": {"output_tokens": 1}}],
            False,
            ("ok", 20),
        ),
        ("chat", [TEXT, COUNTED, MORE], False, ("ok", 30)),  # and text after its end
        ("chat", [TEXT], False, ("timeout", 500)),
        ("messages", [block("text", "a")], False, ("timeout", 500)),
    ],
)
def test_a_whole_answer_needs_no_end_of_its_body(
    api: Api, events: list[Any], heartbeat: bool, end: tuple[str, int]
) -> None:
    """Some servers go on with heartbeats for ever: at 100 ms, when the user gives up at 500 ms."""
    exchange = new_exchange(api)
    exchange.feed(MS, HEAD)
    for i, value in enumerate(events):
        data = value if isinstance(value, str) else json.dumps(value)
        exchange.feed((i + 1) * 10 * MS, http_chunk(f"data: {data}\n\n".encode()))
    assert not exchange.ended
    assert exchange.feed(100 * MS, PING) == heartbeat
    exchange.fail("timeout", "no end", 500 * MS)
    record = exchange.record
    status, ended_ms = end  # nobody is in flight while only heartbeats come
    assert (record.status, record.ended_ns) == (status, ended_ms * MS)
    assert record.last_token_ns == (30 if MORE in events else 10) * MS
    assert exchange.close_after


@pytest.mark.parametrize("end", ["[DONE]", '{"type": "x", "choices": []}'])
def test_a_body_that_ends_with_a_close_is_over_with_done(end: str) -> None:
    exchange = new_exchange("chat")
    exchange.feed(MS, b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
    exchange.feed(10 * MS, f"data: {json.dumps(TEXT)}\n\n".encode())
    exchange.feed(20 * MS, f"data: {end}\n\n".encode())
    exchange.eof(1000 * MS)  # a second later
    assert exchange.record.status == "ok"
    assert exchange.record.ended_ns == (20 if end == "[DONE]" else 1000) * MS
    assert exchange.close_after


ONE_PIECE: dict[Api, dict[str, object]] = {"responses": said("x"), "messages": block("text", "x")}


@pytest.mark.parametrize(
    "last",
    [
        {"type": "error", "error": {"type": "api_error", "message": "busy"}},
        {"type": None, "error": {"message": "busy", "code": "500"}},  # a gateway's
        {"type": None, "message": "busy"},
        {"type": None, "object": "error", "message": "busy"},
    ],
)
@pytest.mark.parametrize("api", ONE_PIECE)
def test_a_gateways_error_ends_a_stream_of_typed_events(api: Api, last: dict[str, object]) -> None:
    record = play(api, ONE_PIECE[api], last)
    assert (record.status, record.error) == ("stream_error", "busy")
    assert list(record.chunk_at_us) == [10_000]


def test_embeddings() -> None:
    exchange = new_exchange("embeddings")
    body = json.dumps(
        {"data": [{"embedding": [0.1, 0.2]}], "usage": {"prompt_tokens": 7, "total_tokens": 7}}
    ).encode()
    response = json_response(body)
    exchange.feed(20 * MS, response[: -len(body)])
    exchange.feed(30 * MS, body)
    record = exchange.record
    assert (record.status, record.input_tokens, record.output_tokens) == ("ok", 7, None)
    assert record.first_token_ns is None  # there is no token, hence no TTFT
    assert record.last_token_ns == 30 * MS  # E2E: the vector is there


VECTOR = '{"embedding": [0.1, 2]}'


@pytest.mark.parametrize(
    ("items", "status"),
    [
        ("", "empty"),
        ("null", "empty"),
        ("{}", "empty"),
        ('{"embedding": null}', "empty"),
        ('{"embedding": []}', "empty"),
        ('{"embedding": ""}', "empty"),
        ('{"embedding": [null, null]}', "empty"),
        ('{"embedding": [[0.1], []]}', "empty"),
        (f'{VECTOR}, {{"embedding": [0.1, null]}}', "empty"),
        (f'{VECTOR}, {{"object": "error", "message": "out of memory"}}', "stream_error"),
        (f"{VECTOR}, {VECTOR}", "ok"),
        ('{"embedding": "zczMPQ=="}', "ok"),  # base64
        ('{"embedding": [[0.1, 0.2], [0.3, 0.4]]}', "ok"),  # a vector for each token
        ('{"embedding": {"int8": [1, 2]}}', "ok"),  # by type
    ],
)
def test_an_embedding_without_a_vector_is_no_answer(items: str, status: str) -> None:
    exchange = new_exchange("embeddings")
    exchange.feed(MS, json_response(b'{"data":[%b]}' % items.encode()))
    record = exchange.record
    assert (record.status, record.last_token_ns) == (status, MS if status == "ok" else None)
    assert status != "stream_error" or record.error == "out of memory"


STREAMED = {"model": "m", "stream": True, "ignore_eos": True}
BODIES: dict[Api, dict[str, object]] = {
    "responses": {**STREAMED, "input": "hi", "max_output_tokens": 9},
    "messages": {**STREAMED, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
    "embeddings": {"model": "m", "input": "hi"},
}


@pytest.mark.parametrize("api", BODIES)
def test_bodies(api: Api) -> None:
    assert json.loads(RequestShape(api, "m").body("hi", 9)) == BODIES[api]


def test_plain_dialect_sends_nothing_that_a_strict_server_refuses() -> None:
    shape = RequestShape("responses", "m", Dialect(ignore_eos=False))
    expected = {k: v for k, v in BODIES["responses"].items() if k != "ignore_eos"}
    assert json.loads(shape.body("hi", 9)) == expected


def test_the_key_goes_where_the_api_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K", "sk-1")
    endpoint = parse_endpoint("http://127.0.0.1/v1", keys=Keys("api_key_env", "K"))
    head = endpoint.request_prefix("messages").decode()
    assert head.startswith("POST /v1/messages HTTP/1.1\r\n")
    assert "x-api-key: sk-1\r\n" in head
    assert "anthropic-version: 2023-06-01\r\n" in head
    assert "x-api-key" not in endpoint.request_prefix("chat").decode()
    assert "Authorization: Bearer sk-1\r\n" in endpoint.request_prefix("chat").decode()


# -- whatever comes --------------------------------------------------------------------------------

NAMES = (
    "type delta choices content tool_calls function function_call arguments name index id "
    "text thinking reasoning message error errors detail object usage response status "
    "output item output_index content_block finish_reason stop_reason refusal summary "
    "input partial_json data"
).split()
WORDS = (
    "content_block_delta content_block_start message_delta message_start text_delta "
    "input_json_delta tool_use response.output_text.delta response.output_item.added "
    "response.function_call_arguments.delta response.completed function_call failed "
    "completed error stop <think> </think> a"
).split()
WORDS += ["\ud83d", "\ude00", ""]
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-1, 3), st.floats(), st.sampled_from(WORDS)
)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(NAMES), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(
    st.sampled_from(sorted(ANSWERS)),
    st.lists(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=4), max_size=6),
    st.booleans(),
)
@settings(max_examples=often(100, 400), deadline=None)
def test_whatever_a_server_says_ends_as_one_record_and_can_be_told_again(
    api: Api, events: list[dict[str, object]], whole: bool
) -> None:
    ended: list[Exchange] = []
    exchange = new_exchange(api, ended.append, keep=True)
    exchange.watch()
    bodies = [json.dumps(value).encode() for value in events]
    if whole:
        body = bodies[0] if bodies else b"{}"
        exchange.feed(MS, json_response(body))
    else:
        exchange.feed(MS, HEAD)
        for data in bodies:
            framed = b"data: " + data + b"\n\n"
            exchange.feed(MS, b"%x\r\n%b\r\n" % (len(framed), framed))
        exchange.feed(MS, END)
    assert ended == [exchange]
    to_batch([exchange.record])
    told = exchange.content()
    for other in ("chat", "completions", "messages", "responses"):
        for message in [
            *history.answer_messages(told, other),
            *history.result_messages(told.calls, [], other),
        ]:
            json.loads(message)


def test_arguments_and_events_that_are_nested_deep_harm_nothing() -> None:
    deep = "[" * 5000 + "]" * 5000
    told = history.AnswerContent("", (history.Call("a", "f", "{}"),))
    pieces = history.CallPieces()
    pieces.add(0, "a", "f", f'{{"a": {deep}}}')
    told = history.AnswerContent("", pieces.calls())
    for api in ("chat", "messages", "responses"):
        assert json.loads(history.answer_messages(told, api)[0])
    assert (
        play(
            "chat",
            {"type": "x", "choices": [], "y": "\ud83d", "z": json.loads("[" * 600 + "]" * 600)},
        ).status
        == "protocol_error"
    )
