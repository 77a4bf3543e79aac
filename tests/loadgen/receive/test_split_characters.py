"""Characters that come in two events, as halves of a pair."""

import json
from typing import Any

import pytest

from ampacity.loadgen.receive.exchange import Exchange
from tests.streams.playing import END, FINISH, HEAD, MS, chunk, new_exchange, play, text


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
        ends: list[Exchange] = []
        exchange = new_exchange(on_end=ends.append, keep=True)
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
