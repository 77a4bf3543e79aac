"""Figures of a trace that something else in the file contradicts are said."""

import json
from pathlib import Path
from typing import Any

import pytest

from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.replay import replayed
from ampacity.workloads.trace_cuts import Replay
from ampacity.workloads.traces.read import read_trace


def said_of(tmp_path: Path, *rows: dict[str, Any]) -> str:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return " ".join(read_trace(path, keep_texts=True).notes)


@pytest.mark.parametrize(
    ("content", "counted", "far"),
    [
        ("hi", 5_000, True),  # redacted
        ("word " * 2_000 + "(truncated 90000 characters)", 25_000, True),  # 2,500 tokens are left
        ("word " * 2_000, 9, True),
        ("\u5b57" * 4_000, 4_000, False),  # a token a character
        ("word " * 2_000, 2_000, False),
        ("hi", 60, False),  # a template's tokens
        ([{"type": "image_url", "image_url": {"url": "data:,"}}], 5_000, False),
    ],
)
def test_a_text_that_its_count_contradicts_is_said(
    tmp_path: Path, content: Any, counted: int, far: bool
) -> None:
    row = {"timestamp": 1, "input_tokens": counted, "output_tokens": 7}
    notes = said_of(tmp_path, row | {"messages": [{"role": "user", "content": content}]})
    assert ("1 rows have a text that is 5 times shorter or longer than its count" in notes) == far


def test_a_count_that_another_attribute_contradicts_is_said(tmp_path: Path) -> None:
    counts = {"gen_ai.usage.input_tokens": 5, "gen_ai.usage.output_tokens": 7}
    for more, said in (
        ({"gen_ai.usage.prompt_tokens": 99}, True),
        ({"gen_ai.usage.completion_tokens": 8}, True),
        ({"gen_ai.usage.prompt_tokens": 5, "gen_ai.usage.completion_tokens": 7}, False),
    ):
        span = {"start_time": "2024-05-10T00:00:00Z", "attributes": counts | more}
        notes = said_of(tmp_path, span | {"span_id": "a", "trace_id": "b"})
        assert (f"not used: attributes.{next(iter(more))}" in notes) == said


@pytest.mark.parametrize(
    ("inputs", "more", "said"),
    [
        ([5, 12, 19], {}, 0),  # each holds the prompt before and its answer of 7
        ([5, 11, 19], {}, 1),
        ([5, 6, 7], {}, 2),  # as of an id that all requests of a client have
        ([50, 9, 60], {}, 0),  # begins anew, which is said by itself
        ([5, 6, 7], {"cached_tokens": 0}, 0),  # the file tells what they share
    ],
)
def test_turns_that_cannot_hold_the_one_before_are_counted(
    tmp_path: Path, inputs: list[int], more: dict[str, Any], said: int
) -> None:
    path = tmp_path / "t.jsonl"
    rows = (
        {"timestamp": i, "input_tokens": n, "output_tokens": 7, "session_id": "a"} | more
        for i, n in enumerate(inputs)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    notes = " ".join(replayed(read_trace(path), Replay(), 1).notes)
    assert (f"{said} later turns are too short to hold" in notes) == bool(said)
    assert ("too short to hold" in notes) == bool(said)


TURNS = [{"input_tokens": 9, "output_tokens": 5, "session_id": "a", "timestamp": i} for i in (0, 2)]


@pytest.mark.parametrize(
    ("first", "later", "said"),
    [
        # ended at 0.5 s, so the pause was 1.5 s
        ({"end_time": 0.5}, {"delay_s": 1.5}, None),
        ({"latency_s": 0.5}, {"delay_s": 1.4}, None),  # within 50 ms and a tenth of 1.5 s
        ({"end_time": 0.5}, {"delay_s": 1.2}, "(1.2 s in all), not the times (1.5 s"),
        ({"latency_s": 0.5}, {"think_time_s": 9}, "(9 s in all), not the times (1.5 s"),
        ({}, {"delay_s": 0.01}, "(0.01 s in all), not the times (2 s in all behind the starts"),
        ({"end_time": 0.5}, {"delay_s": 1.5, "timestamp": None}, None),  # nothing contradicts it
        # whole seconds: an answer of 0.6 s that began at 0.9 s ends at 1
        ({"end_time": 1, "latency_s": 0.1}, {}, None),
        ({"end_time": 0.5, "latency_s": 0.1}, {}, "0.4 s apart in 1 rows: the first is taken"),
        ({"end_time": 0.5, "latency_s": 9}, {}, "8.5 s apart in 1 rows: the first is taken"),
    ],
)
def test_times_that_contradict_each_other_are_said(
    tmp_path: Path, first: dict[str, Any], later: dict[str, Any], said: str | None
) -> None:
    notes = said_of(tmp_path, TURNS[0] | first, TURNS[1] | later)
    assert said in notes if said else " is taken" not in notes and "not the times" not in notes


@pytest.mark.parametrize(
    ("ids", "sessions", "points"),
    [
        ([5, 5.0, "5", " 5", "5.0", 5], 1, 2),  # pandas writes 5.0 once an id is missing
        (["a", "a ", "A"], 2, 0),
        ([1.5, "1.50", 1], 3, 0),
        (["007", 7, "7.00"], 2, 1),
    ],
)
def test_an_id_is_the_same_as_a_number_with_a_point(
    tmp_path: Path, ids: list[Any], sessions: int, points: int
) -> None:
    path = tmp_path / "t.jsonl"
    rows = ({**TURNS[0], "timestamp": i, "session_id": held} for i, held in enumerate(ids))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace = read_trace(path)
    assert len(set(trace.session.tolist())) == sessions
    told = f"{points} rows have a session_id as a number with a point: 5.0 is taken for 5"
    assert any(told in note for note in trace.notes) == bool(points)


@pytest.mark.parametrize(
    ("bad", "lost"),
    [
        ({"input_tokens": -1, "delay": 5000}, True),
        ({"output_tokens": "x", "think_time": 5}, True),
        ({"input_tokens": -1}, False),
    ],
)
def test_the_pause_of_a_row_that_is_left_out_is_said(
    tmp_path: Path, bad: dict[str, Any], lost: bool
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (TURNS[0], TURNS[1] | bad)))
    notes = " ".join(read_trace(path, skip_bad_rows=True).notes)
    assert ("1 rows that are left out have a pause before them" in notes) == lost


@pytest.mark.parametrize(
    "row",
    [
        {"usage": {"prompt_tokens": 9, "completion_tokens": 7}, "usage.prompt_tokens": 500},
        {"usage.prompt_tokens": 500, "usage": {"prompt_tokens": 9, "completion_tokens": 7}},
        {"a": {"b": {"c": 1}, "b.c": 2}, "input_tokens": 9, "output_tokens": 7},
    ],
)
def test_two_fields_of_one_path_are_said(tmp_path: Path, row: dict[str, Any]) -> None:
    path = "a.b.c" if "a" in row else "usage.prompt_tokens"
    said = f"the key {path} stands twice in an object, 1 times: the last one is taken"
    timed = {"timestamp": 0, **row}
    assert said in said_of(tmp_path, timed)
    assert said in said_of(tmp_path, {"session_id": "s", "requests": [timed]})


@pytest.mark.parametrize(
    ("choices", "tokens", "several"),
    [
        ([{"message": {"content": "a b c d"}}, {"message": {"content": "b " * 9}}], 2, True),
        ([{"message": {"role": "assistant", "content": "a b c d e"}}], 3, False),
        ([{"message": {"content": "a b c d e"}}], 3, False),
    ],
)
def test_of_several_choices_the_first_is_the_answer(
    tmp_path: Path, choices: Any, tokens: int, several: bool
) -> None:
    """Four characters a token: 7 are 2, 9 are 3."""
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"timestamp": 0, "input_tokens": 9, "response": choices}) + "\n")
    found = read_trace(path)
    assert found.output_tokens.tolist() == [tokens]
    assert ("1 rows have several choices" in " ".join(found.notes)) == several


@pytest.mark.parametrize("unit", ["CHARACTERS", "SECONDS", "IMAGES"])
def test_counts_in_another_unit_than_tokens_are_bad_rows(tmp_path: Path, unit: str) -> None:
    row = {"timestamp": 1, "usage": {"input": 500, "output": 70, "unit": "TOKENS"}}
    assert "unit" not in said_of(tmp_path, row)
    with pytest.raises(WorkloadError, match=f"usage.unit: the counts are '{unit}', not tokens"):
        said_of(tmp_path, row | {"usage": row["usage"] | {"unit": unit}})
