"""One exchange fed by hand: (time, bytes) in, the record out, to the nanosecond."""

import json
from bisect import bisect_left
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampacity.loadgen.rundir.records import CHUNK_AT_MAX_US
from tests.streams.playing import (
    END,
    FINISH,
    HEAD,
    MS,
    ROLE,
    USAGE,
    chunk,
    event,
    http_chunk,
    in_pieces,
    json_response,
    new_exchange,
    play,
    text,
)
from tests.support.repeats import often


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
