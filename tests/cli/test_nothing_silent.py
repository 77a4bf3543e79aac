"""Each column and each kind of row of a file is taken away or spoilt in turn: it is used, refused
by name, or counted.
"""

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ampacity.simulator.server.launch import Started
from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.prompts.files import read_prompts
from ampacity.workloads.traces.columns import REQUIRED
from ampacity.workloads.traces.read import read_trace
from ampacity.workloads.traces.trace import Trace
from tests.support.args import Command, args_of

Row = dict[str, Any]


def azure(i: int) -> Row:
    return {
        "TIMESTAMP": f"2024-05-10 00:00:{i:02d}.0",
        "ContextTokens": 5 + i,
        "GeneratedTokens": 7,
    }


def mooncake(i: int) -> Row:
    return {
        "timestamp": i * 1000,
        "input_length": 600 + i,
        "output_length": 7,
        "hash_ids": [0, i + 1],
    }


def burstgpt(i: int) -> Row:
    return {
        "Timestamp": i,
        "Session ID": f"s{i // 2}",
        "Elapsed time": 3,
        "Model": "m",
        "Request tokens": 5 + i,
        "Response tokens": 7,
        "Total tokens": 12 + i,
        "Log Type": "Conversation log",
    }


def litellm(i: int) -> Row:
    return {
        "startTime": f"2024-05-10T00:00:{i:02d}Z",
        "prompt_tokens": 5 + i,
        "completion_tokens": 7,
        "session_id": f"s{i // 2}",
        "api_key": f"k{i % 3}",
        "model_group": "m",
    }


def usage(i: int) -> Row:
    return {
        "created": i,
        "usage": {
            "prompt_tokens": 5 + i,
            "completion_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": i},
        },
        "user": f"u{i}",
    }


def generic(i: int) -> Row:
    return {
        "timestamp_s": i,
        "input_tokens": 5 + i,
        "output_tokens": 7,
        "client_id": f"c{i % 3}",
        "cached_tokens": 1,
        "note": "n",
    }


def agent(i: int) -> Row:
    return {
        "session": f"s{i // 3}",
        "t_s": i,
        "input_tokens": 64 * (i + 1),
        "output_tokens": 7,
        "input_blocks64": i + 1,
        "blocks_shared_with_prev_turn": i,
        "api_time_s": 0.5,
        "think_time_s": 0.5,
        "stop_reason": "tool_use",
    }


MAKERS: dict[str, Callable[[int], Row]] = {
    m.__name__: m for m in (azure, mooncake, burstgpt, litellm, usage, generic, agent)
}
N = 12
ROLE_OF = {  # what each column means; the others mean nothing
    "TIMESTAMP": "time",
    "ContextTokens": "input",
    "GeneratedTokens": "output",
    "timestamp": "time",
    "input_length": "input",
    "output_length": "output",
    "hash_ids": "hash_ids",
    "Timestamp": "time",
    "Session ID": "session",
    "Request tokens": "input",
    "Response tokens": "output",
    "startTime": "time",
    "prompt_tokens": "input",
    "completion_tokens": "output",
    "session_id": "session",
    "api_key": "client",
    "created": "time",
    "usage.prompt_tokens": "input",
    "usage.completion_tokens": "output",
    "usage.prompt_tokens_details.cached_tokens": "cached",
    "user": "client",
    "timestamp_s": "time",
    "input_tokens": "input",
    "output_tokens": "output",
    "client_id": "client",
    "cached_tokens": "cached",
    "Elapsed time": "end",
    "session": "session",
    "t_s": "time",
    "input_blocks64": "shared_blocks",
    "blocks_shared_with_prev_turn": "shared_blocks",
    "api_time_s": "end",
    "think_time_s": "pause",
}
HELD: dict[str, Callable[[Trace], object]] = {
    "session": lambda t: t.session,
    "client": lambda t: t.client,
    "cached": lambda t: t.cached_tokens,
    "hash_ids": lambda t: t.blocks,
    "end": lambda t: t.end_s,
    "shared_blocks": lambda t: t.shared_blocks,
    "pause": lambda t: t.pause_s,
}


def leaves(row: Row, prefix: str = "") -> Iterator[str]:
    for key, value in row.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def without(row: Row, leaf: str) -> Row:
    head, _, rest = leaf.partition(".")
    if not rest:
        return {key: value for key, value in row.items() if key != head}
    inner = without(row[head], rest)  # an object without a field goes too
    return {**row, head: inner} if inner else without(row, head)


def save(folder: Path, ending: str, rows: list[Row]) -> Path:
    """The rows as a file; in a CSV file a field that a row lacks is empty."""
    path = folder / f"t.{ending}"
    if ending == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif ending == "json":
        path.write_text(json.dumps(rows))
    elif ending == "parquet":
        pq.write_table(
            pa.Table.from_pylist(rows, schema=pa.Table.from_pylist(rows[-1:]).schema), path
        )
    else:
        held = io.StringIO(newline="")
        out = csv.DictWriter(held, list(rows[-1]))
        out.writeheader()
        out.writerows(rows)
        path.write_text(held.getvalue())
    return path


CASES = [
    (name, ending)
    for name, maker in MAKERS.items()
    for ending in ("csv", "jsonl", "json", "parquet")
    if ending != "csv" or not any(isinstance(value, dict | list) for value in maker(1).values())
]


@pytest.mark.parametrize(("name", "ending"), CASES)
def test_each_column_is_used_or_named(tmp_path: Path, name: str, ending: str) -> None:
    rows = [MAKERS[name](i) for i in range(N)]
    notes = " ".join(read_trace(save(tmp_path, ending, rows)).notes)
    said = notes.partition("columns that are not used: ")[2].split(", ")
    assert sorted(filter(None, said)) == sorted(
        leaf for leaf in leaves(rows[0]) if leaf not in ROLE_OF
    )


@pytest.mark.parametrize(("name", "ending"), CASES)
def test_each_column_in_turn_is_taken_from_all_rows(tmp_path: Path, name: str, ending: str) -> None:
    """What a trace needs is asked for by name; any other property is gone, and no note claims
    it."""
    rows = [MAKERS[name](i) for i in range(N)]
    for leaf in leaves(rows[0]):
        path, role = save(tmp_path, ending, [without(row, leaf) for row in rows]), ROLE_OF.get(leaf)
        if role in REQUIRED:
            with pytest.raises(WorkloadError, match=f"no column with the .*--column {role}=NAME"):
                read_trace(path)
            continue
        trace = read_trace(path)
        assert len(trace) == N
        assert role is None or HELD[role](trace) is None
        assert leaf not in " ".join(trace.notes).replace("no column", "")


@pytest.mark.parametrize(("name", "ending"), CASES)
def test_each_column_in_turn_is_taken_from_one_row(tmp_path: Path, name: str, ending: str) -> None:
    rows = [MAKERS[name](i) for i in range(N)]
    for leaf in leaves(rows[0]):
        role = ROLE_OF.get(leaf)
        k = 4 if role == "pause" else 3  # of a first turn it is not missed
        path = save(tmp_path, ending, [*rows[:k], without(rows[k], leaf), *rows[k + 1 :]])
        if role in REQUIRED:
            with pytest.raises(
                WorkloadError,
                match=f"t.{ending}(:5| entry 4|:4| row 4): column {leaf}: the value is missing",
            ):
                read_trace(path)
            trace = read_trace(path, skip_bad_rows=True)
            assert len(trace) == N - 1
            assert f"1 bad rows of {N} are left out: 1 for column {leaf}" in " ".join(trace.notes)
            continue
        trace = read_trace(path)
        assert len(trace) == N
        if role is not None:
            assert f"t.{ending}: column {leaf} has no value in 1 of {N} rows" in trace.notes
        elif ending.startswith("json"):
            assert f"{leaf} (of {N - 1} rows)" in " ".join(trace.notes)


# What is wrong with a row of JSON lines, and the words that count it.
GOOD = {"timestamp_s": 3, "input_tokens": 5, "output_tokens": 7}
BAD_LINES: dict[str, tuple[str | bytes, str]] = {
    "no JSON": ("{oops", "not readable"),
    "a list": ("[1]", "not readable"),
    "a number": ("5", "not readable"),
    "not a number": (json.dumps(GOOD | {"timestamp_s": float("nan")}), "column timestamp_s"),
    "a byte that is no text": (
        json.dumps(GOOD).encode()[:-1] + b', "user": "\xe9"}',
        "not readable",
    ),
    "no fields": ("{}", "column input_tokens"),
    **{
        f"{column} is {value!r}": (json.dumps(GOOD | {column: value}), f"column {column}")
        for column, values in {
            "timestamp_s": ["soon", None, "", 1e30, [1], True, "2024-05-10 00:00:00"],
            "input_tokens": ["x", None, -1, 1.5, "1,234", [5], 0, 10**12],
            "output_tokens": ["x", None, -1, 1.5, "1.234.567", {"n": 5}, 0, 10**12],
        }.items()
        for value in values
    },
}


@pytest.mark.parametrize("kind", BAD_LINES)
def test_each_kind_of_bad_row_is_named_and_counted(tmp_path: Path, kind: str) -> None:
    bad, reason = BAD_LINES[kind]
    good = [json.dumps(GOOD | {"timestamp_s": i}).encode() for i in range(4)]
    path = tmp_path / "t.jsonl"
    path.write_bytes(
        b"\n".join([*good[:2], bad.encode() if isinstance(bad, str) else bad, *good[2:]])
    )
    with pytest.raises(
        WorkloadError, match=r"t\.jsonl:3: .*; mend or remove the row, or give --skip-bad-rows$"
    ):
        read_trace(path)
    trace = read_trace(path, skip_bad_rows=True)
    assert trace.arrival_s.tolist() == [0, 1, 2, 3]
    assert f"t.jsonl: 1 bad rows of 5 are left out: 1 for {reason}" in trace.notes


def test_a_row_of_csv_with_another_number_of_fields_is_named_and_counted(tmp_path: Path) -> None:
    for fields in ("3,5", "3,5,7,9", '"3,5,7"'):
        path = tmp_path / "t.csv"
        path.write_text(f"timestamp_s,input_tokens,output_tokens\n1,5,7\n{fields}\n2,5,7\n")
        with pytest.raises(
            WorkloadError, match=r"t\.csv:3: the row has \d fields, the header has 3"
        ):
            read_trace(path)
        expected = "t.csv: 1 bad rows of 3 are left out: 1 for not readable"
        assert expected in read_trace(path, skip_bad_rows=True).notes


# --- to the run directory and the report ---


class Text(HTMLParser):
    """The words of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_data(self, data: str) -> None:
        self.found.append(data)


def words_of(page: Path) -> str:
    text = Text()
    text.feed(page.read_text())
    return " ".join(" ".join(text.found).split())


def assert_noted(run: Path, expected: Sequence[str]) -> None:
    notes, page = json.loads((run / "run.json").read_text())["notes"], words_of(run / "report.html")
    for note in expected:
        assert note in notes
        assert note in page


def test_what_is_said_of_a_trace_stands_in_run_json_and_in_the_report(
    tmp_path: Path, command: Command, server: Started
) -> None:
    row = {"input_tokens": 5, "output_tokens": 3, "session_id": "", "model": "m"}
    rows = [{"timestamp_s": i / 10} | row for i in range(8)]
    bad = {"timestamp_s": 1, "input_tokens": -1, "output_tokens": 3}
    path, out = save(tmp_path, "jsonl", [*rows, bad]), tmp_path / "run"
    command("run", server.url, "--trace", path, "--skip-bad-rows --out", out)
    expected = read_trace(path, skip_bad_rows=True).notes
    assert len(expected) == 3
    assert_noted(out, expected)


def test_what_is_said_of_prompts_stands_in_run_json_and_in_the_report(
    tmp_path: Path, command: Command, server: Started
) -> None:
    path = tmp_path / "p.jsonl"
    rows: list[Any] = [{"prompt": f"prompt {i}", "id": i} for i in range(3)]
    rows += [{"prompt": ""}, {"conversations": []}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "oops\n")
    out = tmp_path / "run"
    options = (*args_of("--rates 20 --duration 500ms --prompts"), path, "--output-tokens", "3")
    command("run", server.url, *options, "--out", tmp_path / "refused", status=2)
    command("run", server.url, *options, "--skip-bad-rows --out", out)
    expected = read_prompts(path, skip_bad_rows=True).notes
    assert [note.partition(":")[0] for note in expected] == ["p.jsonl"] * 3
    assert_noted(out, expected)


def test_what_is_said_of_a_file_of_arrivals_stands_in_run_json_and_in_the_report(
    tmp_path: Path, command: Command, server: Started
) -> None:
    path, out = tmp_path / "log.csv", tmp_path / "run"
    path.write_text(
        "arrival_s,input_tokens,output_tokens,other\n0,5,5,1\n7,5,5,1\n5,5,5,1\n9,5,5,1\n"
    )
    lengths = tuple(args_of("--input-tokens 5 --output-tokens 3"))
    options = (*args_of("--rates 20 --duration 500ms --arrivals"), f"diurnal:trace={path},step=5s")
    command("run", server.url, *lengths, *options, "--out", out)
    unsorted = "the rows are not in the order of time (1 come before the row above them)"
    assert_noted(
        out, [f"log.csv: {unsorted}; they are sorted", "log.csv: columns that are not used: other"]
    )
