"""Which column a trace's times and lengths come from: two that could serve, paths into lists, other
CSV and encodings.
"""

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampacity.cli import main
from ampacity.config import make_settings
from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.traces.columns import parse_columns, reach
from ampacity.workloads.traces.read import read_trace
from ampacity.workloads.traces.records import ColumnCounts
from ampacity.workloads.traces.values import tokens
from tests.support.args import args_of
from tests.support.repeats import often
from tests.support.traces import HEADER, lines, refusal, rows

# --- two that could serve ---


@pytest.mark.parametrize(
    ("row", "taken", "note"),
    [
        (
            json.loads("""{"timestamp": 1, "prompt_tokens": 5, "completion_tokens": 7,
                "usage": {"prompt_tokens": 50, "completion_tokens": 70}}"""),
            (5, 7),
            "column prompt_tokens is taken for the input, not usage.prompt_tokens",
        ),
        (
            {"created_at": 900, "timestamp": 1, "input_tokens": 5, "output_tokens": 7},
            (5, 7),
            "column timestamp is taken for the time, not created_at",
        ),
        (
            {"timestamp": 1, "input_tokens": 5, "output_tokens": 7, "output_length": 9},
            (5, 9),
            "column output_length is taken for the output, not output_tokens",
        ),
        (
            json.loads("""{"timestamp": 1, "input_tokens": 5, "output_tokens": 7,
                "session_id": "a", "chat_id": "b", "session": "c"}"""),
            (5, 7),
            "column session_id is taken for the session, not session or chat_id",
        ),
    ],
)
def test_of_two_columns_the_one_taken_is_named(
    tmp_path: Path, row: dict[str, Any], taken: tuple[int, int], note: str
) -> None:
    trace = read_trace(lines(tmp_path / "t.jsonl", row, row))
    assert rows(trace) == [(0.0, *taken)] * 2
    assert f"t.jsonl: {note}" in trace.notes
    (tmp_path / "t.csv").write_text("created_at,timestamp,input_tokens,output_tokens\n9,1,5,7\n")
    expected = "t.csv: column timestamp is taken for the time, not created_at"
    assert expected in read_trace(tmp_path / "t.csv").notes


@pytest.mark.parametrize("late", [0, 30])
def test_a_row_without_the_column_taken_is_counted_by_another(tmp_path: Path, late: int) -> None:
    """As in an export over a change of names, which may come long after the first rows."""
    new = {"timestamp": 1, "usageDetails": {"input": 5, "output": 7}}
    old = {"timestamp": 2, "usage": {"input": 6, "output": 8}}
    found = read_trace(lines(tmp_path / "t.jsonl", *[new] * (late + 1), old))
    assert rows(found)[-1] == (1.0, 6, 8)
    assert "t.jsonl: 1 rows have no usageDetails.input: usage.input is taken" in found.notes
    assert not [note for note in found.notes if "not used" in note]
    given = {"input": "usageDetails.input"}
    expected = "column usageDetails.input: the value is missing"
    assert expected in refusal(tmp_path / "t.jsonl", columns=given)


@pytest.mark.parametrize("prefix", ["usage", None])
def test_anthropics_cached_tokens_are_a_part_of_the_prompt(
    tmp_path: Path, prefix: str | None
) -> None:
    """Its input_tokens are without those read from the cache, and those written into it."""
    usage = [
        {"input_tokens": 5, "output_tokens": 7, **cached}
        for cached in (
            {"cache_creation_input_tokens": 2000, "cache_read_input_tokens": 0},
            {"cache_creation_input_tokens": None, "cache_read_input_tokens": 1900},
        )
    ]
    found = read_trace(
        lines(
            tmp_path / "t.jsonl",
            *({"timestamp": k, **({prefix: u} if prefix else u)} for k, u in enumerate(usage)),
        )
    )
    assert rows(found) == [(0.0, 2005, 7), (1.0, 1905, 7)]
    assert found.cached_tokens.tolist() == [0, 1900]
    (note,) = found.notes
    assert note.startswith("t.jsonl: the input is the sum of ")
    assert note.endswith("cache_creation_input_tokens, as Anthropic counts it")


def test_a_column_that_is_given_has_no_rival(tmp_path: Path) -> None:
    row = json.loads("""{"timestamp": 1, "prompt_tokens": 5, "usage": {"prompt_tokens": 50},
        "completion_tokens": 7}""")
    trace = read_trace(lines(tmp_path / "t.jsonl", row), columns={"input": "usage.prompt_tokens"})
    assert rows(trace) == [(0.0, 50, 7)]
    assert trace.notes == (
        "t.jsonl: columns are taken as given: input=usage.prompt_tokens (--column)",
        "t.jsonl: columns that are not used: prompt_tokens",
    )


def test_a_key_that_stands_twice_is_said(tmp_path: Path) -> None:
    twice = '{"timestamp": 1, "input_tokens": 5, "output_tokens": 7, "input_tokens": 6}'
    trace = read_trace(lines(tmp_path / "t.jsonl", twice, twice))
    assert rows(trace) == [(0.0, 6, 7)] * 2
    assert (
        "t.jsonl: the key input_tokens stands twice in an object, 2 times: the last one is taken"
        in trace.notes
    )
    path = tmp_path / "t.json"
    path.write_text(f"[{twice}]")
    assert (
        "t.json: the key input_tokens stands twice in an object, 1 times: the last one is taken"
        in read_trace(path).notes
    )


def test_columns_that_are_not_used_and_values_that_are_missing_are_counted(tmp_path: Path) -> None:
    first = json.loads("""{"timestamp": 1, "input_tokens": 5, "output_tokens": 7,
        "session_id": "a", "model": "m", "meta": {"region": "eu"}}""")
    second = json.loads("""{"timestamp": 2, "input_tokens": 5, "output_tokens": 7,
        "session_id": null, "model": "m"}""")
    trace = read_trace(lines(tmp_path / "t.jsonl", first, second, second))
    assert "t.jsonl: columns that are not used: model, meta.region (of 1 rows)" in trace.notes
    assert "t.jsonl: column session_id has no value in 2 of 3 rows" in trace.notes


def test_rows_of_ever_other_columns_take_no_memory_and_are_counted() -> None:
    """20,000 rows, each with a column of its own beside two that all have."""
    counts = ColumnCounts()
    for i in range(20_000):
        counts.add(("a", f"own{i}", "b"))
    names = counts.by_name()
    assert (counts.rows, names["a"], names["b"], names["own5"]) == (20_000, 20_000, 20_000, 1)
    assert len(names) == 10_000


# --- paths ---

EVENTS = json.loads("""[{"id": 1, "timing_events": [{"timestamp": 10.5},
    {"timestamp": 11.0}], "usage": {"in": 5, "all": [7, 9]}}, {"id": 2,
    "timing_events": [{"timestamp": 12.5}, {"timestamp": 13.5}], "usage": {"in": 6,
    "all": [8, 3]}}]""")


def test_a_path_reaches_into_lists_and_objects(tmp_path: Path) -> None:
    given = {"time": "timing_events.0.timestamp", "input": "usage.in", "output": "usage.all.1"}
    expected = [(0.0, 5, 9), (2.0, 6, 3)]
    assert rows(read_trace(lines(tmp_path / "e.jsonl", *EVENTS), columns=given)) == expected
    (tmp_path / "e.json").write_text(json.dumps(EVENTS))
    assert rows(read_trace(tmp_path / "e.json", columns=given)) == expected
    pq.write_table(pa.Table.from_pylist(EVENTS), tmp_path / "e.parquet")
    assert rows(read_trace(tmp_path / "e.parquet", columns=given)) == expected
    wanted = ("e.jsonl: columns that are not used: id",)
    assert read_trace(tmp_path / "e.jsonl", columns=given).notes[1:] == wanted
    last = {**given, "time": "Timing_Events.-1.timestamp"}  # from the end, in any case
    assert rows(read_trace(tmp_path / "e.jsonl", columns=last)) == [(0.0, 5, 9), (2.5, 6, 3)]
    for name in ("e.jsonl", "e.parquet"):
        assert "no column 'timing_events.7.timestamp' for time" in refusal(
            tmp_path / name, columns={**given, "time": "timing_events.7.timestamp"}
        )


def test_a_row_whose_path_ends_nowhere_is_a_bad_row(tmp_path: Path) -> None:
    short = {"id": 3, "timing_events": [], "usage": {"in": 5, "all": [7]}}
    given = {"time": "timing_events.0.timestamp", "input": "usage.in", "output": "usage.all.0"}
    path = lines(tmp_path / "e.jsonl", EVENTS[0], short, EVENTS[1])
    expected = "e.jsonl:2: column timing_events.0.timestamp: the value is missing"
    assert expected in refusal(path, columns=given)
    trace = read_trace(path, columns=given, skip_bad_rows=True)
    assert len(trace) == 2
    expected = "e.jsonl: 1 bad rows of 3 are left out: 1 for column timing_events.0.timestamp"
    assert expected in trace.notes


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("a", 1),
        ("A", 1),
        ("b.c", 2),
        ("b.l.0", 3),
        ("b.l.-1", 4),
        ("b.l.2", None),
        ("b.l.x", None),
        ("d.e", 5),
        ("d.e.f", None),
        ("", None),
        ("b.", None),
        ("b.l.-3", None),
        ("b.l.00", 3),
        ("b.l.٠", None),
        ("a.0", None),
    ],
)
def test_what_a_path_means(path: str, value: object) -> None:
    assert reach({"a": 1, "b": {"c": 2, "l": [3, 4]}, "d.e": 5}, path) == value


@settings(max_examples=often(50, 200))
@given(
    st.recursive(
        st.integers(),
        lambda v: st.lists(v, max_size=3) | st.dictionaries(st.sampled_from("abc"), v),
        max_leaves=8,
    ),
    st.lists(st.sampled_from(["a", "b", "c", "0", "1", "-1", ""]), max_size=5),
)
def test_a_path_is_what_python_reaches(value: Any, parts: list[str]) -> None:
    expected = {"r": value}
    try:
        for part in ("r", *parts):
            expected = expected[part] if isinstance(expected, dict) else expected[int(part)]
    except (KeyError, IndexError, ValueError, TypeError):
        expected = None
    assert reach({"r": value}, ".".join(["r", *parts])) == expected


def test_structs_of_parquet_are_objects(tmp_path: Path) -> None:
    items = [
        {
            "created_at": at,
            "usage": {
                "prompt_tokens": 5 + at,
                "prompt_tokens_details": {"cached_tokens": at},
                "completion_tokens": 7,
            },
        }
        for at in (0, 1)
    ]
    pq.write_table(pa.Table.from_pylist(items), tmp_path / "u.parquet")
    found, same = (
        read_trace(tmp_path / "u.parquet"),
        read_trace(lines(tmp_path / "u.jsonl", *items)),
    )
    assert rows(found) == rows(same) == [(0.0, 5, 7), (1.0, 6, 7)]
    assert found.cached_tokens.tolist() == [0, 1]
    pq.write_table(
        pa.Table.from_pylist([*items, {"created_at": 2, "usage": None}]), tmp_path / "n.parquet"
    )
    expected = "n.parquet row 3: column usage.prompt_tokens: the value is missing"
    assert expected in refusal(tmp_path / "n.parquet")


@pytest.mark.parametrize("nested", ["turns", "calls"])
def test_lists_of_structs_are_the_requests_of_a_session(tmp_path: Path, nested: str) -> None:
    """In Parquet as in JSON; types of other widths, dictionaries and dates say the same."""
    calls = [
        {"timestamp": at, "input_tokens": n, "output_tokens": 3}
        for at, n in ((0.0, 5), (3.0, 9), (1.0, 7))
    ]
    items = [{"session_id": "a", nested: calls[:2]}, {"session_id": "b", nested: calls[2:]}]
    pq.write_table(pa.Table.from_pylist(items), tmp_path / "n.parquet")
    flat = [{"session_id": s, **call} for s, call in zip("aab", calls, strict=True)]
    table = pa.table(
        {
            "session_id": pa.array([row["session_id"] for row in flat]).dictionary_encode(),
            "timestamp": pa.array([0, 3_000_000_000, 1_000_000_000], pa.timestamp("ns", "UTC")),
            "input_tokens": pa.array([5, 9, 7], pa.float32()),
            "output_tokens": pa.array([3, 3, 3], pa.int8()),
        }
    )
    pq.write_table(table, tmp_path / "d.parquet", compression="zstd")
    for path in (
        tmp_path / "n.parquet",
        lines(tmp_path / "n.jsonl", *items),
        tmp_path / "d.parquet",
    ):
        found = read_trace(path)
        assert rows(found) == [(0.0, 5, 3), (1.0, 7, 3), (3.0, 9, 3)]
        assert found.session.tolist() == [0, 1, 0]
    pq.write_table(
        table.rename_columns([*table.column_names[:3], "TIMESTAMP"]), tmp_path / "x.parquet"
    )
    assert "the column timestamp is spelled timestamp and TIMESTAMP" in refusal(
        tmp_path / "x.parquet"
    )
    pq.write_table(
        table.rename_columns([*table.column_names[:3], "timestamp"]), tmp_path / "y.parquet"
    )
    assert "y.parquet: the column timestamp stands there twice" in refusal(tmp_path / "y.parquet")


# --- other CSV, other encodings ---

PLAN = [(0.0, 5, 7), (1.5, 1234, 9)]
TABLE = "timestamp,input_tokens,output_tokens\n0,5,7\n1.5,1234,9\n"


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
def test_other_delimiters_and_encodings_are_read(
    tmp_path: Path, delimiter: str, encoding: str
) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(TABLE.replace(",", delimiter).encode(encoding))
    assert rows(read_trace(path)) == PLAN
    # as Excel writes it
    path.write_bytes(f"sep={delimiter}\r\n{TABLE.replace(',', delimiter)}".encode(encoding))
    assert rows(read_trace(path)) == PLAN
    path.write_bytes(f"sep={delimiter}\r\n{TABLE.replace(',', delimiter)}x\n".encode(encoding))
    assert "t.csv:5: the row has 1 fields" in refusal(path)


@pytest.mark.parametrize("cell", ["nan", "NaN", "None", "NULL", "-", "<NA>", " ", r"\N"])
@pytest.mark.parametrize("column", ["cached_tokens", "latency_s", "delay"])
def test_words_for_no_value_are_none_and_counted(tmp_path: Path, column: str, cell: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        f"session_id,timestamp,input_tokens,output_tokens,{column},x,x\n"
        f"a,0,5,7,3,1,2\na,1.5,1234,9,{cell},1,2\n"
    )
    found = read_trace(path)
    assert rows(found) == PLAN
    assert found.notes == (
        "t.csv: columns that are not used: x",
        f"t.csv: column {column} has no value in 1 of 2 rows",
    )


def test_numbers_that_are_none_spoil_no_row_of_json(tmp_path: Path) -> None:
    """As Python and pandas write them, in JSON and in Parquet."""
    items = [
        {"timestamp": at, "input_tokens": n, "output_tokens": out, "cached_tokens": float("nan")}
        for at, n, out in PLAN
    ]
    pq.write_table(pa.Table.from_pylist(items), tmp_path / "t.parquet")
    for path in (lines(tmp_path / "t.jsonl", *items), tmp_path / "t.parquet"):
        assert rows(read_trace(path)) == PLAN
        assert read_trace(path).cached_tokens is None
        expected = (f"{path.name}: column cached_tokens has no value in 2 of 2 rows",)
        assert read_trace(path).notes == expected


@pytest.mark.parametrize(
    ("name", "resolution", "value", "seconds"),
    [
        ("latency", "us", 500_000, 0.5),
        ("latency_ms", "ns", 500_000_000, 0.5),
        ("elapsed time", "s", 1, 1.0),
    ],
)
def test_durations_of_parquet_say_their_own_unit(
    tmp_path: Path, name: str, resolution: str, value: int, seconds: float
) -> None:
    items = {"timestamp": [0, 2], "session_id": ["a", "a"]}
    items |= {"input_tokens": [5, 9], "output_tokens": [3, 3]}
    took = pa.array([value, None], pa.duration(resolution))
    pq.write_table(pa.table(items | {name: took}), tmp_path / "t.parquet")
    ends = read_trace(tmp_path / "t.parquet").end_s
    assert ends.tolist() == pytest.approx([seconds, np.nan], nan_ok=True)


def test_more_names_than_are_counted_are_at_least_so_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ColumnCounts, "_NAMES_MAX", 20)
    known = {"timestamp": 0, "input_tokens": 5, "output_tokens": 3}
    for names, said in ((17, "x11 and 5 more"), (18, "x11 and at least 5 more")):
        rest = {f"x{i:02}": 1 for i in range(names)}
        (note,) = read_trace(lines(tmp_path / "t.jsonl", known | rest)).notes
        assert note.endswith(said)


def test_decimal_commas_are_named(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("timestamp;input_tokens;output_tokens\n0,5;5;7\n")
    with pytest.raises(WorkloadError, match=r"t\.csv:2: .* '0,5' .*a number with a decimal point"):
        read_trace(path)


def test_byte_order_marks_within_a_file_are_no_text(tmp_path: Path) -> None:
    """As where files were put one behind the other."""
    path = tmp_path / "t.jsonl"
    one = '\ufeff{"timestamp": 1, "input_tokens": 5, "output_tokens": 7}\n'
    path.write_text("\ufeff" + one + one)
    assert len(read_trace(path)) == 2
    path = tmp_path / "t.csv"
    path.write_text("\ufeff\ufeff" + TABLE)
    assert rows(read_trace(path)) == PLAN


def test_a_delimiter_is_chosen_by_the_names_it_makes(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        'timestamp;input_tokens;output_tokens;"note, with, many, commas"\n1;5;7;"a, b"\n'
    )
    assert rows(read_trace(path)) == [(0.0, 5, 7)]
    path.write_text("when;tin;tout\n1;5;7\n")
    assert rows(read_trace(path, columns={"time": "when", "input": "tin", "output": "tout"})) == [
        (0.0, 5, 7)
    ]
    (tmp_path / "t.tsv").write_text(TABLE.replace(",", "\t"))
    assert rows(read_trace(tmp_path / "t.tsv")) == PLAN
    (tmp_path / "t.jsonl").write_bytes(
        '{"timestamp": 1, "input_tokens": 5, "output_tokens": 7, "user": "ä"}\n'.encode("utf-16")
    )
    assert rows(read_trace(tmp_path / "t.jsonl")) == [(0.0, 5, 7)]


@pytest.mark.parametrize(
    "cell",
    [
        "1,234",
        "1 234",
        "1'234",
        "1_234",
        "1.234.567",
        "12.000",
        "1.000",
        "1\u00a0234",
        "1\u202f234",
    ],
)
def test_separators_of_thousands_are_never_half_read(tmp_path: Path, cell: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        f'timestamp,input_tokens,output_tokens\n0,5,7\n1,"{cell}",9\n', encoding="utf-8"
    )
    with pytest.raises(
        WorkloadError, match=r"t\.csv:3: column input_tokens: .* write the digits alone"
    ):
        read_trace(path)
    path.write_text(f"timestamp;input_tokens;output_tokens\n0;5;7\n1;{cell};9\n", encoding="utf-8")
    with pytest.raises(
        WorkloadError, match=r"t\.csv:3: column input_tokens: .* write the digits alone"
    ):
        read_trace(path)


def test_counts_as_programs_write_them_are_read() -> None:
    assert [
        tokens(value) for value in ("1234", "6.0", "6.00", " 7 ", "1234.000", 5, "+5")
    ] == json.loads("""[1234, 6, 6, 7, 1234,
        5, 5]""")


def test_a_byte_that_is_no_text_names_its_row_and_can_be_skipped(tmp_path: Path) -> None:
    good = b"timestamp,input_tokens,output_tokens,user\n0,5,7,a\n"
    path = tmp_path / "t.csv"
    path.write_bytes(good + b'1,6,8,"caf\xe9\nsecond line"\n2,7,9,b\n')
    expected = "t.csv:4: a byte that is no UTF-8; mend or remove the row, or give --skip"
    assert expected in refusal(path)
    trace = read_trace(path, skip_bad_rows=True)
    assert rows(trace) == [(0.0, 5, 7), (2.0, 7, 9)]
    assert "t.csv: 1 bad rows of 3 are left out: 1 for not readable" in trace.notes
    line = '{{"timestamp": {}, "input_tokens": 5, "output_tokens": 7, "user": "{}"}}'
    path = tmp_path / "t.jsonl"
    path.write_bytes(
        line.format(0, "é").encode() + b"\n" + line.format(1, "é").encode("latin-1") + b"\n"
    )
    assert "t.jsonl:2: a byte that is no UTF-8" in refusal(path)
    assert len(read_trace(path, skip_bad_rows=True)) == 1
    path = tmp_path / "t.json"
    path.write_bytes(
        b"[" + line.format(0, "é").encode() + b",\n" + line.format(1, "é").encode("latin-1") + b"]"
    )
    assert "t.json entry 2: a byte that is no UTF-8" in refusal(path)
    assert len(read_trace(path, skip_bad_rows=True)) == 1


@settings(max_examples=often(25, 100), deadline=None)
@given(
    st.sampled_from([",", ";", "\t", "|"]),
    st.sampled_from(["utf-8", "utf-8-sig", "utf-16"]),
    st.permutations(range(4)),
    st.lists(st.text(alphabet='ab,;|\t\n "ä', max_size=8), min_size=1, max_size=5),
)
def test_any_dialect_of_csv_says_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    delimiter: str,
    encoding: str,
    order: list[int],
    notes: list[str],
) -> None:
    names = ["timestamp", "input_tokens", "output_tokens", "note"]
    held = io.StringIO(newline="")
    out = csv.writer(held, delimiter=delimiter)
    out.writerow([names[i] for i in order])
    for at, note in enumerate(notes):
        out.writerow([(at, at + 5, at + 7, note)[i] for i in order])
    path = tmp_path_factory.getbasetemp() / "any.csv"
    path.write_bytes(held.getvalue().encode(encoding))
    assert rows(read_trace(path)) == [(float(at), at + 5, at + 7) for at in range(len(notes))]


# --- the command line ---


def test_run_takes_the_columns_that_fit_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = lines(tmp_path / "e.jsonl", *EVENTS)
    url = "http://127.0.0.1:9/v1"
    given = [
        *args_of(
            "--column time=timing_events.0.timestamp --column input=usage.in --column output=usage.all.1"
        )
    ]
    for flags, complaint in (
        (
            [*given, "--trace-from", "5m"],
            "no request arrives from 300 s to inf s; the trace lasts 2 s",
        ),
        ([*given, "--trace-from", "5m", "--time-unit", "ms"], "the trace lasts 0.002 s"),
        ([*given[:-1], "output=nope"], "there is no column 'nope' for output"),
        (["--column", "when=x"], "role 'when' is not known"),
        (["--time-unit", "days"], "--time-unit days: choose one of s, ms, us, ns"),
    ):
        monkeypatch.setattr(sys, "argv", ["ampacity", "run", url, "--trace", str(path), *flags])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        assert complaint in capsys.readouterr().err
    (tmp_path / "long.csv").write_text(HEADER + "0,5,7\n1728956,5,7\n")
    monkeypatch.setattr(
        sys, "argv", ["ampacity", "run", url, "--trace", str(tmp_path / "long.csv")]
    )
    with pytest.raises(SystemExit):
        main()
    assert "the replay would last 1,728,956 s (20 days)" in capsys.readouterr().err


def test_a_run_file_gives_columns_as_a_list_or_a_mapping() -> None:
    for held in (["time=ts", "input=a.b"], {"time": "ts", "input": "a.b"}):
        made = make_settings(
            {"url": "http://h/v1", "trace": "t.csv", "column": held, "time_unit": "ms"}
        )
        assert (made.columns, made.time_unit) == ({"time": "ts", "input": "a.b"}, "ms")
    assert parse_columns(["time = ts"]) == {"time": "ts"}


def test_a_header_that_is_no_text_spoils_no_row(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b"sep=;\ntimestamp;input_tokens;output_tokens;caf\xe9\n1;2;3;a\n2;3;4;b\n")
    trace = read_trace(path)
    assert rows(trace) == [(0.0, 2, 3), (1.0, 3, 4)]
    assert trace.notes == ("t.csv: columns that are not used: caf\ufffd",)
