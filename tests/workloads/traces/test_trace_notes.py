"""Notes of a trace: what is sorted, odd, lacking or changed, each with its count."""

import random
import re
from pathlib import Path
from typing import Any

import pytest

from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.replay import replayed
from ampacity.workloads.trace_cuts import Replay
from tests.workloads.traces.test_trace_losses import (
    WHOLE,
    Row,
    counts,
    played,
    said,
    span,
    timed,
    traced,
    written,
)


def test_sessions_out_of_order_are_sorted_and_that_is_said(tmp_path: Path) -> None:
    rows = timed(
        *(
            {"session_id": s, "timestamp": t}
            for s, t in (("a", 2), ("b", 1), ("a", 1), ("b", 5), ("a", 3))
        )
    )
    found = traced(written(tmp_path, *rows))
    expected = "the rows of their session are not in the order of time (1 come before the row above them); they are sorted"
    assert said(found, "sorted") == expected
    grouped = timed(
        *({"session_id": s, "timestamp": t} for s, t in (("a", 2), ("a", 3), ("b", 1), ("b", 5)))
    )
    assert not [note for note in traced(written(tmp_path, *grouped)).notes if "sorted" in note]


@pytest.mark.parametrize(
    ("odd", "words", "same"),
    [
        ("x7", "members that are texts", True),
        (-4, "members that are negative numbers", True),
        (7.0, "members that are no whole numbers", True),
        (7.5, "members that are no whole numbers", False),
        (float("nan"), "members that are no whole numbers", False),
        (float("inf"), "members that are no whole numbers", False),
        (None, "members that are none", False),
        ([7], "members that are none", False),
        ({"id": 7}, "members that are none", False),
        (True, "members that are none", False),
        ("", "members that are none", False),
    ],
)
def test_odd_members_of_hash_ids_are_told(tmp_path: Path, odd: Any, words: str, same: bool) -> None:
    rows = timed(*({"timestamp": t, "hash_ids": [1, odd, 3]} for t in (1, 2)))
    found = traced(written(tmp_path, *rows))
    note = said(found, words)
    assert note.startswith("2 rows have hash_ids with")
    assert "(first line 1: " in note
    first, second = found.blocks.ids.reshape(2, 3).tolist()
    assert (first[0], first[2]) == (second[0], second[2]) == (1, 3)
    assert (first[1] == second[1]) is same
    if odd == 7.0:
        assert first[1] == 7


def test_ids_in_a_csv_file_are_read_as_in_json(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        'timestamp,input_tokens,output_tokens,hash_ids\n1,5,7,"[1, -2]"\n2,5,7,"[1, 2"\n'
    )
    found = traced(path)
    assert found.blocks.start.tolist() == [0, 2, 2]
    assert said(found, "negative").startswith("1 rows")
    assert said(found, "no list").startswith("1 rows")


def test_more_cached_tokens_than_tokens_and_ids_that_are_lists_are_told(tmp_path: Path) -> None:
    found = traced(
        written(tmp_path, *timed({"timestamp": 1, "cached_tokens": 10, "session_id": ["a"]}))
    )
    assert said(found, "cached").startswith("1 rows have more cached_tokens than tokens")
    assert said(found, "which is none").startswith("1 rows have the session_id ['a']")


def test_a_chat_id_that_comes_again_is_told(tmp_path: Path) -> None:
    rows = timed(
        *(
            {"timestamp": k, "chat_id": c, "parent_chat_id": p}
            for k, (c, p) in enumerate([(1, -1), (2, 1), (2, 1)])
        )
    )
    found = traced(written(tmp_path, *rows))
    assert said(found, "one conversation").startswith("1 rows have the id of an earlier chat")
    assert not [
        note for note in traced(written(tmp_path, *rows[:2])).notes if "one conversation" in note
    ]


def test_block_sizes_that_differ_and_callers_that_lack_are_told(tmp_path: Path) -> None:
    rows = timed(
        *(
            {"timestamp": k, "hash_ids": [1], "block_size": size}
            for k, size in enumerate((16, 16, 32))
        )
    )
    expected = "column block_size has several values (16 (2 rows), 32 (1 rows)): the first is taken for all"
    assert said(traced(written(tmp_path, *rows)), "several values") == expected
    rows = timed(
        *(
            {"timestamp": k, "session_id": s, "parent_session": p}
            for k, (s, p) in enumerate([("a", ""), ("b", "z"), ("c", "a")])
        )
    )
    expected = "1 rows name a parent_session that no row before them has"
    assert said(traced(written(tmp_path, *rows)), "no row before") == expected


def test_pauses_of_lone_requests_and_lengths_of_answers_are_told(tmp_path: Path) -> None:
    rows = timed(*({"timestamp": k, "delay": 5} for k in (1, 2)))
    expected = "2 requests without a session have a pause before them, which is not played"
    assert said(played(written(tmp_path, *rows)), "a pause") == expected
    found = traced(written(tmp_path, {"timestamp": 1, "input_tokens": 5, "response": "a" * 40}))
    assert counts(found) == [(5, 10)]
    assert said(found, "recorded answer").startswith(
        "1 rows have no count of output tokens: of the recorded answer a token"
    )


def test_ids_of_hashes_and_numbers_in_texts_are_ids(tmp_path: Path) -> None:
    found = traced(
        written(
            tmp_path,
            *timed(
                {"timestamp": 1, "hash_ids": [5, 2**63]}, {"timestamp": 2, "hash_ids": ["5", 2**63]}
            ),
        )
    )
    assert found.blocks.ids[:2].tolist() == found.blocks.ids[2:].tolist()
    assert said(found, "texts").startswith("1 rows")


@pytest.mark.parametrize(
    "column", "cached_tokens duration_s latency_ms end_time think_time_s max_tokens delay".split()
)
def test_a_bad_value_names_its_column(tmp_path: Path, column: str) -> None:
    row = {"session_id": "a", "timestamp": 1, "input_tokens": 9, "output_tokens": 3, column: "soon"}
    if column == "max_tokens":
        del row["output_tokens"]
    with pytest.raises(WorkloadError, match=rf"t\.jsonl:1: column {column}: 'soon'"):
        traced(written(tmp_path, row))


def test_a_column_without_a_name_is_told(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(",timestamp,input_tokens,output_tokens\n0,1,5,7\n")
    assert said(traced(path), "not used") == "columns that are not used: (without a name)"
    found = traced(written(tmp_path, *timed({"timestamp": 1, "": 3, " ": 4})))
    expected = "columns that are not used: (without a name), (without a name)"
    assert said(found, "not used") == expected


SESSION = timed(*({"session_id": "a", "timestamp": t, "latency_s": 1} for t in (0, 5, 30)))


def test_a_change_of_speed_is_said_with_its_size(tmp_path: Path) -> None:
    path = written(tmp_path, *SESSION)  # pauses of 4 s and of 24 s
    assert said(played(path, time_scale=4.0), "--time-scale") == (
        "arrivals, and pauses within sessions, are played 4 times as fast as recorded (--time-scale): arrivals over 30 s "
        "come within 7.5 s"
    )
    both = played(path, time_scale=4.0, think_scale=0.5, max_think_s=10.0)
    assert said(both, "--time-scale").startswith("arrivals are played 4 times as fast as recorded")
    expected = "2 pauses within sessions are 0.5 times as long as recorded (--think-scale): 14 s in all, not 28 s"
    assert said(both, "--think-scale") == expected
    expected = "1 pauses within sessions are cut to 10 s (--max-think): the longest was 12 s, all of them are 2 s shorter"
    assert said(both, "--max-think") == expected
    assert not [note for note in played(path).notes if "--" in note]


def test_columns_block_sizes_and_rates_that_were_given_are_said(tmp_path: Path) -> None:
    path = written(tmp_path, *timed({"timestamp": 1, "hash_ids": [1], "other": 3}))
    expected = "hash_ids: blocks of 16 tokens are taken (--block-size)"
    assert said(played(path, block_tokens=16), "--block-size") == expected
    found = traced(path, columns={"output": "other"})
    assert said(found, "--column") == "columns are taken as given: output=other (--column)"
    rows = [{"session_id": "a", "input_tokens": 9, "output_tokens": 3}]
    expected = "sessions begin at random (Poisson), at 2 requests/s: the file has no arrivals"
    assert said(played(written(tmp_path, *rows), rate=2.0), "Poisson") == expected


ODD = [None, "", -1, 0, 1.5, "x", True, [], [5], {}, {"a": 1}, "nan", 10**12, WHOLE[:50], "1,234"]


COUNTED = re.compile(
    r"^t\.jsonl: (\d+) (?:bad rows of|rows with 0 output tokens|entries are no calls|entries are calls that|rows have the id of a span|rows \(spans)"
)


def entry(rng: random.Random, k: int) -> tuple[Row, int]:
    """(a row, a span, or a session with its calls; how many requests, or what is no request, stand
    in it).
    """
    kind = rng.choice(["row", "row", "span", "agent", "other", "vectors", "session"])
    if kind in ("span", "agent", "other", "vectors"):
        op, usage = (
            {"span": "chat", "agent": "invoke_agent"}.get(
                kind, "embeddings" if kind == "vectors" else "execute_tool"
            ),
            (rng.choice([5, 9]), 3),
        )
        return span(
            k % 60, op=op, usage=None if kind == "other" else usage, parent=f"s{rng.randint(0, 60)}"
        ), 1
    made = [
        {
            "timestamp": f"2026-02-25T10:00:{(k + j) % 60:02d}Z",
            "input_tokens": rng.choice([5, 9]),
            "output_tokens": 3,
            "session_id": rng.choice(["a", "b", "-"]),
            "messages": [{"role": "user", "content": "hi"}],
            "latency_s": 1,
            "cached_tokens": 2,
        }
        for j in range(1 if kind == "row" else rng.randint(1, 3))
    ]
    for row in made:
        for name in rng.sample(list(row), rng.choice([0, 0, 1, 2])):
            if rng.random() < 0.5:
                row[name] = rng.choice(ODD)
            else:
                del row[name]
    return ({"id": f"n{k}", "requests": made} if kind == "session" else made[0]), len(made)


def test_whatever_stands_in_a_file_each_entry_is_played_or_counted(tmp_path: Path) -> None:
    """Three hundred files of rows, spans and sessions, with fields that lack or are odd: the sums
    agree."""
    read = 0
    for seed in range(300):
        rng = random.Random(seed)
        made = [entry(rng, k) for k in range(rng.randint(3, 12))]
        path = written(tmp_path, *(row for row, _ in made))
        try:
            found = replayed(traced(path, skip_bad_rows=True), Replay(), 1, 2.0)
        except WorkloadError as error:
            assert re.search(r"no column|no rows|nothing is left|every row", str(error))  # noqa: PT017
            continue
        read += 1
        counted = [int(told[1]) for note in found.notes if (told := COUNTED.match(note))]
        assert len(found.schedule) + sum(counted) == sum(n for _, n in made), seed
    assert read > 150
