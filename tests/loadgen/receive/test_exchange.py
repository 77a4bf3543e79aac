"""One exchange fed by hand: (time, bytes) in, the record out, to the nanosecond."""

import json
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
from tests.support.repeats import often

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


@settings(max_examples=often(20, 80), deadline=None)
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


# -- several choices -----------------------------------------------------------------------------


def ends(*indices: int | None, text: str = "") -> list[dict[str, Any]]:
    end = {"delta": {"content": text}, "finish_reason": "stop"}
    return [{"choices": [end | ({} if i is None else {"index": i})]} for i in indices]


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
        ("inf", None),
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
    "token ids of more tokens than usage has": (
        [text("a", token_ids=[5, 6]), text("b", token_ids=[7, 8]), with_usage({}, 2)],
        (2, "usage"),
        None,
    ),
    "logprobs of more tokens than usage has": (
        [choices({"text": "a", "logprobs": {"tokens": ["a", "b"]}}), with_usage({}, 1)],
        (1, "usage"),
        None,
    ),
    "token ids of fewer tokens than usage has": (  # the end token has no text
        [text("a", token_ids=[5, 6]), text("b", token_ids=[7, 8]), with_usage({}, 5)],
        (5, "usage"),
        [2, 2],
    ),
    "token ids beside a usage of zero": (
        [text("a", token_ids=[5, 6]), with_usage({}, 0)],
        (2, "logprobs"),
        [2],
    ),
    "legacy logprobs": (
        [choices({"text": "ab", "logprobs": {"tokens": ["a", "b"]}})],
        (2, "logprobs"),
        [2],
    ),
    "logprobs": (
        [text("ab", logprobs={"content": [{"token": "a", "bytes": [97]}, {"token": "b"}]})],
        (2, "logprobs"),
        [2],
    ),
    "logprobs of words alone": (
        [text("ab", logprobs={"content": ["a", "b"]})],
        (2, "logprobs"),
        [2],
    ),
    "logprobs that list nothing": (
        [text("a", logprobs=-0.5), text("b", logprobs={"content": 7}), text("c", logprobs=[])],
        (3, "chunks"),
        None,
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
    assert chat == json.loads("""{"model": "m", "messages": [{"role": "user",
        "content": "Hi"}], "max_tokens": 7, "stream": true,
        "stream_options": {"include_usage": true, "continuous_usage_stats": true},
        "ignore_eos": true}""")
    plainest = Dialect(False, False, False, "max_completion_tokens")
    shape = RequestShape("completions", "m", plainest, {"temperature": 0, "stream": False})
    assert json.loads(shape.body("Hi", 7)) == json.loads("""{"model": "m", "prompt": "Hi",
        "max_completion_tokens": 7, "stream": false, "temperature": 0}""")


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
