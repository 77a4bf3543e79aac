"""Reading recorded load: formats, exact times, and every kind of broken file."""

import gzip
import json
import os
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.trace_cuts import Replay, prepare
from ampacity.workloads.traces.read import read_trace
from tests.support.traces import HEADER, lines, refusal, rows, written

DATA = Path(__file__).parents[2] / "data" / "traces"

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:46.6835900,396,109\r\n"
    "2023-11-16 18:16:06.0000000,879,55"
)


def test_azure_csv_keeps_all_digits(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path / "trace.csv", AZURE))
    assert rows(trace) == [(0.0, 374, 44), (0.003, 396, 109), (19.31941, 879, 55)]
    assert trace.arrival_s.dtype == np.float64
    assert trace.input_tokens.dtype == trace.output_tokens.dtype == np.int64
    assert (trace.source, trace.notes) == ("trace.csv (Azure format)", ())


def test_mooncake_counts_milliseconds(tmp_path: Path) -> None:
    items = [
        {"timestamp": ms, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}
        for ms in (0, 3, 27482)
    ]
    trace = read_trace(lines(tmp_path / "m.jsonl", *items))
    assert rows(trace) == [(0.0, 6758, 500), (0.003, 6758, 500), (27.482, 6758, 500)]
    assert trace.notes == ("m.jsonl: column timestamp is read as milliseconds",)
    # Qwen-Bailian
    items = [item | {"chat_id": 1, "timestamp": item["timestamp"] / 1000} for item in items]
    assert rows(read_trace(lines(tmp_path / "q.jsonl", *items))) == rows(trace)


def test_burstgpt_counts_seconds_and_its_failed_requests_are_left_out(tmp_path: Path) -> None:
    content = (
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "19440110.0,a,43,GPT-4,906,446,1352,Conversation log\n"
        "19440112.5,,2,ChatGPT,36,0,36,API log\n"
        "19440113.0,,2,ChatGPT,0,0,0,API log\n"
        "19440192.0,b,8,GPT-4,1779,123,1902,Conversation log\n"
    )
    trace = read_trace(written(tmp_path / "b.csv", content))
    assert rows(trace) == [(0.0, 906, 446), (82.0, 1779, 123)]
    assert trace.notes == (
        "b.csv: 2 rows with 0 output tokens are left out (failed requests)",
        "b.csv: columns that are not used: Model, Total tokens, Log Type",
    )


@pytest.mark.parametrize(
    "time", ["timestamp", "timestamp_s", "arrival_s", "Arrived_At", " TIMESTAMP "]
)
@pytest.mark.parametrize(
    ("input_", "output"),
    [
        ("input_tokens", "output_tokens"),
        ("prompt_tokens", "completion_tokens"),
        ("num_prefill_tokens", "num_decode_tokens"),
    ],
)
def test_generic_names(tmp_path: Path, time: str, input_: str, output: str) -> None:
    content = f"id,{output},{time},{input_}\n1,5,0.5,10\n2,6.0,0.75,11\n"
    assert rows(read_trace(written(tmp_path / "g.csv", content))) == [(0.0, 10, 5), (0.25, 11, 6)]


def test_epoch_zero_based_stamps_and_milliseconds_are_one_schedule(tmp_path: Path) -> None:
    offsets_us = [0, 3_000, 123_456, 1_000_001, 60_000_000]
    start = datetime(2024, 5, 10, 23, 59, 59, 999_999, tzinfo=UTC)

    def trace(header: str, times: list[str]) -> list[tuple[float, int, int]]:
        lines = [f"{header},input_tokens,output_tokens"] + [
            f"{at},{i + 1},7" for i, at in enumerate(times)
        ]
        return rows(read_trace(written(tmp_path / "t.csv", "\n".join(lines))))

    expected = [(us / 1e6, i + 1, 7) for i, us in enumerate(offsets_us)]
    epoch_us = int((start - datetime(1970, 1, 1, tzinfo=UTC)) / timedelta(microseconds=1))
    stamps = [start + timedelta(microseconds=us) for us in offsets_us]
    assert trace("timestamp", [f"{us // 10**6}.{us % 10**6:06d}" for us in offsets_us]) == expected
    assert (
        trace(
            "timestamp",
            [
                f"{(epoch_us + us) // 10**6}.{us_part:06d}"
                for us, us_part in ((us, (epoch_us + us) % 10**6) for us in offsets_us)
            ],
        )
        == expected
    )
    assert (
        trace(
            "timestamp_ms",
            [f"{(epoch_us + us) // 1000}.{(epoch_us + us) % 1000:03d}" for us in offsets_us],
        )
        == expected
    )
    assert trace("timestamp", [s.isoformat() for s in stamps]) == expected
    assert trace("timestamp", [s.strftime("%Y-%m-%dT%H:%M:%S.%fZ") for s in stamps]) == expected
    assert trace("timestamp", [s.strftime("%Y-%m-%d %H:%M:%S.%f") for s in stamps]) == expected
    away = [(s + timedelta(hours=5.5)).strftime("%Y-%m-%d %H:%M:%S.%f+0530") for s in stamps]
    assert trace("timestamp", away) == expected


def test_zones_are_respected_row_by_row(tmp_path: Path) -> None:
    content = (
        "timestamp,input_tokens,output_tokens\n"
        "2024-01-01T01:00:00+01:00,1,1\n2024-01-01 00:00:01+00:00,2,1\n2023-12-31 19:00:02-05:00,3,1\n"
    )
    assert rows(read_trace(written(tmp_path / "z.csv", content))) == [
        (0.0, 1, 1),
        (1.0, 2, 1),
        (2.0, 3, 1),
    ]


def test_unsorted_rows_are_sorted_and_noted(tmp_path: Path) -> None:
    content = HEADER + "12,3,1\n10,1,1\n10,2,1\n13,4,1\n"
    trace = read_trace(written(tmp_path / "u.csv", content))
    assert rows(trace) == [(0.0, 1, 1), (0.0, 2, 1), (2.0, 3, 1), (3.0, 4, 1)]
    assert trace.notes == (
        "u.csv: the rows are not in the order of time (1 come before the row above them); they are sorted",
        "u.csv: 1 rows have the very time of another row; they are kept and arrive together",
    )


def test_a_coarse_clock_is_noted(tmp_path: Path) -> None:
    times = [step * 3 for step in range(4) for _ in range(5)]
    content = HEADER + "".join(f"{at},1,1\n" for at in times)
    trace = read_trace(written(tmp_path / "c.csv", content))
    assert trace.clock_step_s == 3
    (note,) = prepare(trace, Replay(as_written=True), seed=1).notes
    assert note == (
        "c.csv: coarse clock: 4 distinct arrival times, 3 s apart, for 20 requests; "
        "they are replayed as written, so requests of one time arrive as a burst"
    )


def test_gzip_byte_order_mark_blank_lines_and_quotes(tmp_path: Path) -> None:
    content = (
        '\ufefftimestamp,"note",input_tokens,output_tokens\n\n1,"a, ""b""\nc",10,2\n\n2.5,,20,3\n'
    )
    for name in ("t.csv", "t.csv.gz"):
        assert rows(read_trace(written(tmp_path / name, content))) == [(0.0, 10, 2), (1.5, 20, 3)]
    lines = '\n{"timestamp": 1, "input_tokens": 10, "output_tokens": 2}\r\n \n' * 2
    assert rows(read_trace(written(tmp_path / "t.jsonl.gz", lines))) == [(0.0, 10, 2), (0.0, 10, 2)]
    # zipped without saying so
    plain = written(tmp_path / "named.jsonl", gzip.compress(lines.encode()))
    assert len(read_trace(plain)) == 2


@pytest.mark.parametrize(
    ("row", "column", "complaint"),
    [
        ("2023-11-16 18:16:07,abc,1", "ContextTokens", "'abc' is not a whole number of tokens"),
        ("2023-11-16 18:16:07,1.5,1", "ContextTokens", "'1.5' is not a whole number of tokens"),
        ("2023-11-16 18:16:07,-3,1", "ContextTokens", "-3 is a negative number of tokens"),
        ("2023-11-16 18:16:07,0,1", "ContextTokens", "0 is too few tokens"),
        ("2023-11-16 18:16:07,NaN,1", "ContextTokens", "the value is missing"),
        ("2023-11-16 18:16:07,3000000000,1", "ContextTokens", "3000000000 tokens are more than"),
        ("2023-11-16 18:16:07,,1", "ContextTokens", "the value is missing"),
        ("2023-11-16 18:16:07,5,inf", "GeneratedTokens", "'inf' is not a whole number of tokens"),
        ("2023-11-16 18:16:07,5,-1", "GeneratedTokens", "-1 is a negative number of tokens"),
        (
            "2023-11-16 18:16:07,5,0",
            "GeneratedTokens",
            "0 is too few tokens: an answer has at least 1",
        ),
        ("2023-13-16 18:16:07,5,1", "TIMESTAMP", "is not a time"),
        ("2023-11-16 18:61:07,5,1", "TIMESTAMP", "is not a time"),
        ("2023-11-16 18:16:07+99:00,5,1", "TIMESTAMP", "is not a time"),
        ("yesterday,5,1", "TIMESTAMP", "'yesterday' is not a time"),
        ("nan,5,1", "TIMESTAMP", "the value is missing"),
        ("1e999999999,5,1", "TIMESTAMP", "too large"),
        (
            "1700000000000,5,1",
            "TIMESTAMP",
            "this time is a number of milliseconds, those before it are a date",
        ),
        ("9999-11-16 18:16:07,5,1", "TIMESTAMP", "is not a time of our age"),
        (",5,1", "TIMESTAMP", "the value is missing"),
        (
            "17,5,1",
            "TIMESTAMP",
            "this time is a number of seconds, those before it are a date and time without a zone",
        ),
        ("2023-11-16 18:16:07Z,5,1", "TIMESTAMP", "this time is a date and time with a zone"),
    ],
)
def test_a_broken_row_is_named_by_file_line_and_column(
    tmp_path: Path, row: str, column: str, complaint: str
) -> None:
    message = refusal(written(tmp_path / "trace.csv", f"{AZURE}\r\n{row}\r\n"))
    assert f"trace.csv:5: column {column}: " in message
    assert complaint in message
    assert message.endswith("; mend or remove the row, or give --skip-bad-rows")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (
            '{"timestamp": 1, "input_tokens": "x", "output_tokens": 2}',
            "column input_tokens: 'x' is not a whole",
        ),
        (
            '{"timestamp": 1, "input_tokens": true, "output_tokens": 2}',
            "column input_tokens: 'True' is not a whole",
        ),
        (
            '{"timestamp": 1, "input_tokens": [1], "output_tokens": 2}',
            "column input_tokens: '[1]' is not a whole",
        ),
        ('{"timestamp": 1, "input_tokens": 5}', "column output_tokens: the value is missing"),
        (
            '{"timestamp": null, "input_tokens": 5, "output_tokens": 2}',
            "column timestamp: the value is missing",
        ),
        (
            '{"timestamp": NaN, "input_tokens": 5, "output_tokens": 2}',
            "column timestamp: the value is missing",
        ),
        (
            '{"timestamp": 1e99999999999999999999, "input_tokens": 5, "output_tokens": 2}',
            "t.jsonl:2: ",
        ),
        ("[" * 100_000, "no JSON"),
        ("[1, 2]", "no JSON object"),
        ("{", "no JSON"),
        ("9" * 5000, "no JSON"),
    ],
)
def test_a_broken_json_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    good = '{"timestamp": 0, "input_tokens": 5, "output_tokens": 2}\n'
    message = refusal(written(tmp_path / "t.jsonl", good + line + "\n"))
    assert "t.jsonl:2: " in message
    assert complaint in message


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("t.csv", "", "holds no rows"),
        ("t.csv", HEADER, "holds no rows"),
        ("t.jsonl", "\n\n", "holds no rows"),
        (
            "t.csv",
            "Timestamp,Request tokens,Response tokens\n1,5,0\n",
            "every row has 0 output tokens",
        ),
        ("t.csv", "time,input_tokens,output_tokens\n", "no column with the arrival time"),
        ("t.csv", "timestamp,ins,output_tokens\n", "no column with the input tokens"),
        (
            "t.csv",
            "when,ins,outs\n1,2,3\n",
            "say which it is (--column time=NAME --column input=NAME --column output=NAME); the file has 'when', "
            "'ins', 'outs'",
        ),
        ("t.csv", HEADER, "the file holds no rows: a trace needs at least one request"),
        ("t.csv", "timestamp,input_tokens\n", "no column with the output tokens"),
        (
            "t.csv",
            "timestamp:input_tokens:output_tokens\n",
            "'timestamp:input_tokens:output_tokens'",
        ),
        (
            "t.csv",
            "timestamp,input_tokens,Timestamp,output_tokens\n",
            "timestamp is spelled timestamp and Timestamp: use one spelling",
        ),
        (
            "t.csv",
            "timestamp,input_tokens,timestamp,output_tokens\n",
            "timestamp stands there twice: keep one",
        ),
        (
            "t.jsonl",
            '{"timestamp": 1, "input_tokens": 9, "output_tokens": 9, "session_id": 1}\n'
            '{"timestamp": 1, "input_tokens": 9, "output_tokens": 9, "Session_Id": 1}\n',
            "session_id is spelled session_id and Session_Id: use one spelling",
        ),
        (
            "t.csv",
            "timestamp,input_tokens,output_tokens\n1,2\n",
            "t.csv:2: the row has 2 fields, the header has 3",
        ),
        ("t.csv", b"\x00\x01\xff\xfe\x80" * 50, "no column with the arrival time"),
        ("t.csv", b"\xff\xfe\x80", "no column with the arrival time"),  # half of a UTF-16 character
        ("t.jsonl", b"\x80\x80", "t.jsonl:1: a byte that is no UTF-8"),
        ("t.csv", b"\x00" * 50, "no UTF-32-BE text"),
        ("t.csv", b"\x1f\x8b\x08broken", "gzip data are broken"),
        ("t.csv", gzip.compress(AZURE.encode(), mtime=0)[:-12], "gzip data are broken"),
        ("t.csv", 'timestamp,input_tokens,output_tokens\n1,"' + "x" * 200_000, "no CSV"),
        ("t.parquet", "PAR1", "no Parquet file"),
        ("t.txt", "PAR1", "none of .csv, .tsv, .jsonl"),
    ],
)
def test_a_file_that_is_no_trace_is_one_line(
    tmp_path: Path, name: str, content: str | bytes, complaint: str
) -> None:
    assert complaint in refusal(written(tmp_path / name, content))


def test_a_path_that_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "none.csv")
    (tmp_path / "folder.csv").mkdir()
    assert "Is a directory" in refusal(tmp_path / "folder.csv")
    locked = written(tmp_path / "locked.csv", AZURE)
    locked.chmod(0)
    if os.access(locked, os.R_OK):
        pytest.skip("this user may read everything")
    assert "Permission denied" in refusal(locked)


# --- properties ---

requests = st.lists(
    st.tuples(st.integers(0, 10**15), st.integers(1, 2**31 - 1), st.integers(1, 2**31 - 1)),
    min_size=1,
    max_size=9,
)


@settings(deadline=None)
@given(requests, st.sampled_from(["csv", "jsonl"]), st.sampled_from(["\n", "\r\n"]))
def test_what_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, plan: list[tuple[int, int, int]], kind: str, end: str
) -> None:
    """Times in ns, written with all nine decimals."""
    seconds = [f"{ns // 10**9}.{ns % 10**9:09d}" for ns, _, _ in plan]
    names = ("arrived_at", "input_tokens", "output_tokens")
    if kind == "csv":
        lines = [",".join(names)] + [
            f"{at},{i},{o}" for at, (_, i, o) in zip(seconds, plan, strict=True)
        ]
    else:
        lines = [
            f'{{"arrived_at": {at}, "input_tokens": {i}, "output_tokens": {o}}}'
            for at, (_, i, o) in zip(seconds, plan, strict=True)
        ]
    path = written(tmp_path_factory.getbasetemp() / f"round.{kind}", end.join(lines))
    first = min(ns for ns, _, _ in plan)
    expected = [((ns - first) / 1e9, i, o) for ns, i, o in sorted(plan, key=lambda row: row[0])]
    assert rows(read_trace(path)) == expected


def assert_plain(path: Path) -> None:
    try:
        trace = read_trace(path)
    except WorkloadError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017 - whether it raises is up to the input
    else:
        assert trace.arrival_s[0] == 0
        assert (np.diff(trace.arrival_s) >= 0).all()
        assert (trace.input_tokens >= 1).all()
        assert (trace.output_tokens >= 1).all()


header = st.sampled_from(["", HEADER, "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"])
cells = st.one_of(
    st.text(max_size=12),
    st.integers().map(str),
    st.floats().map(str),
    st.datetimes().map(str),
    st.just("5"),
)
bodies = st.lists(st.lists(cells, min_size=3, max_size=3).map(",".join), max_size=3).map("\n".join)


@settings(deadline=None)
@given(
    st.one_of(
        st.binary(max_size=60), st.builds(lambda h, body: (h + body).encode(), header, bodies)
    ),
    st.booleans(),
)
def test_garbage_csv_is_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, zipped: bool
) -> None:
    assert_plain(
        written(tmp_path_factory.getbasetemp() / ("g.csv.gz" if zipped else "g.csv"), content)
    )


values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
    lambda v: st.lists(v, max_size=2),
)
objects = st.fixed_dictionaries(
    {"timestamp": values, "input_tokens": values, "output_tokens": values}
)


@settings(deadline=None)
@given(
    st.one_of(
        st.binary(max_size=60),
        st.lists(objects | values, max_size=3).map(
            lambda items: "\n".join(map(json.dumps, items)).encode()
        ),
    )
)
def test_garbage_json_is_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    assert_plain(written(tmp_path_factory.getbasetemp() / "g.jsonl", content))


def test_a_real_file_with_one_byte_changed_is_read_or_refused_in_one_line(tmp_path: Path) -> None:
    generator = random.Random(7)
    for _ in range(200):
        data = bytearray(AZURE.encode())
        data[generator.randrange(len(data))] = generator.randrange(256)
        assert_plain(written(tmp_path / "t.csv", bytes(data)))


# --- the public traces, where they are at hand ---


def test_azure_conversation_trace() -> None:
    trace = read_trace(DATA / "azure_llm_2023_conv.csv.gz")
    assert len(trace) == 19_366
    assert trace.input_tokens.mean() == pytest.approx(1154.697, abs=5e-4)
    assert trace.output_tokens.mean() == pytest.approx(211.126, abs=5e-4)
    assert np.quantile(trace.output_tokens, 0.95) == 451
    assert trace.input_tokens.max() == 14_050
    assert trace.arrival_s[-1] == pytest.approx(3501.722, abs=5e-4)
    gaps = np.diff(trace.arrival_s)
    assert gaps.std() / gaps.mean() == pytest.approx(1.094, abs=5e-4)
    assert trace.notes == ()


def test_azure_code_trace() -> None:
    trace = read_trace(DATA / "azure_llm_2023_code.csv.gz")
    assert len(trace) == 8_819
    assert trace.input_tokens.mean() == pytest.approx(2047.848, abs=5e-4)
    assert np.quantile(trace.output_tokens, 0.5) == 13
    assert np.quantile(trace.output_tokens, 0.99) == pytest.approx(251.46, abs=5e-3)
    assert trace.output_tokens.max() == 1899
    assert trace.arrival_s[-1] == pytest.approx(3435.948, abs=5e-4)


def test_mooncake_conversation_trace() -> None:
    trace = read_trace(DATA / "mooncake_conversation.jsonl.gz")
    assert len(trace) == 12_031
    assert trace.input_tokens.mean() == pytest.approx(12_035.06, abs=5e-3)
    assert trace.output_tokens.mean() == pytest.approx(342.62, abs=5e-3)
    assert len(np.unique(trace.arrival_s)) == 1_180
    assert trace.arrival_s[-1] == pytest.approx(3537, abs=0.5)
    assert trace.clock_step_s == pytest.approx(3.0, abs=0.003)


@pytest.mark.parametrize(
    ("name", "span_s", "first"),
    [
        ("burstgpt_v1_format_3rows.csv", 113, (0.0, 472, 18)),
        ("burstgpt_v3_format_4rows.csv", 144, (0.0, 906, 446)),
    ],
)
def test_burstgpt_formats(name: str, span_s: float, first: tuple[float, int, int]) -> None:
    trace = read_trace(DATA / name)
    assert trace.arrival_s[-1] == span_s
    assert rows(trace)[0] == first
