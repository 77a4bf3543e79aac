"""Logs of gateways, engines and tracers: each format by hand, and what is said of rows that are
bad.
"""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.traces.formats import open_records
from ampacity.workloads.traces.read import read_trace
from tests.support.repeats import often
from tests.support.traces import HEADER, lines, refusal, rows

DATA = Path(__file__).parents[2] / "data" / "traces"


def test_openai_usage_log(tmp_path: Path) -> None:
    usage = {
        "prompt_tokens": 100,
        "completion_tokens": 20,
        "prompt_tokens_details": {"cached_tokens": 64},
    }
    items = [
        {
            "created": 1_700_000_000,
            "model": "m",
            "user": "ann",
            "usage": {**usage, "prompt_tokens_details": None},
        },
        {"created": 1_700_000_003, "model": "m", "user": "bob", "usage": usage},
    ]
    trace = read_trace(lines(tmp_path / "u.jsonl", *items))
    assert rows(trace) == [(0.0, 100, 20), (3.0, 100, 20)]
    assert trace.cached_tokens.tolist() == [-1, 64]
    assert trace.client.tolist() == [0, 1]


def test_litellm_spend_log_as_csv_and_as_a_json_list(tmp_path: Path) -> None:
    items = json.loads("""[{"request_id": "a", "startTime": "2025-03-01T10:00:00.250000Z",
        "endTime": "2025-03-01T10:00:02Z", "model": "m", "prompt_tokens": 12,
        "completion_tokens": 5, "api_key": "hash1", "session_id": "s", "spend": 0.1},
        {"request_id": "b", "startTime": "2025-03-01 10:00:01.750", "endTime": "",
        "model": "m", "prompt_tokens": 13, "completion_tokens": 6, "api_key": "hash2",
        "session_id": "s", "spend": 0.1}]""")
    items[1]["startTime"] = "2025-03-01 10:00:01.750Z"
    path = tmp_path / "spend.json"
    path.write_text(json.dumps(items, indent=2))
    trace = read_trace(path)
    assert rows(trace) == [(0.0, 12, 5), (1.5, 13, 6)]
    assert "LiteLLM" in trace.source
    names = list(items[0])
    table = "\r\n".join([",".join(names), *(",".join(str(i[n]) for n in names) for i in items)])
    (tmp_path / "spend.csv").write_text(table)
    again = read_trace(tmp_path / "spend.csv")
    assert rows(again) == rows(trace)
    assert again.session.tolist() == [0, 0]
    items[1]["prompt_tokens"] = "many"
    path.write_text(json.dumps(items))
    assert "spend.json entry 2: column prompt_tokens: 'many'" in refusal(path)


def test_opentelemetry_spans_in_three_layouts(tmp_path: Path) -> None:
    held = {
        "gen_ai.operation.name": "chat",
        "gen_ai.usage.input_tokens": 40,
        "gen_ai.usage.output_tokens": 8,
    }
    span = {
        "trace_id": "t1",
        "name": "chat m",
        "start_time": "2026-02-25T10:00:00.5Z",
        "attributes": held,
    }
    tool = json.loads("""{"trace_id": "t1", "name": "tool",
        "start_time": "2026-02-25T10:00:01Z",
        "attributes": {"gen_ai.operation.name": "execute_tool"}}""")
    later = {**span, "start_time": "2026-02-25T10:00:02Z"}
    (tmp_path / "t.json").write_text(
        json.dumps({"trace_id": "t1", "spans": [span, tool, later]}, indent=1)
    )
    expected = [(0.0, 40, 8), (1.5, 40, 8)]
    trace = read_trace(tmp_path / "t.json")
    assert rows(trace) == expected
    assert trace.session.tolist() == [0, 0]
    assert rows(read_trace(lines(tmp_path / "t.jsonl", span, tool, later))) == expected

    def otlp(start_ns: int) -> dict[str, object]:
        values = [
            {"key": "gen_ai.usage.prompt_tokens", "value": {"intValue": "40"}},
            {"key": "gen_ai.usage.completion_tokens", "value": {"intValue": 8}},
        ]
        return {"traceId": "t1", "startTimeUnixNano": str(start_ns), "attributes": values}

    spans = [otlp(1_772_013_600_500_000_000), otlp(1_772_013_602_000_000_000)]
    document = {
        "resourceSpans": [{"resource": {"attributes": []}, "scopeSpans": [{"spans": spans}]}]
    }
    assert rows(read_trace(lines(tmp_path / "o.jsonl", document))) == expected
    (tmp_path / "n.json").write_text(
        json.dumps({"spans": [{**span, "attributes": {"gen_ai.operation.name": "chat"}}]})
    )
    assert "column gen_ai.usage.input_tokens: the value is missing" in refusal(tmp_path / "n.json")


def test_an_agents_run_with_blocks_of_its_own(tmp_path: Path) -> None:
    turn = {"t": 0.0, "in": 130, "out": 5, "hash_ids": [1, 2, 3]}
    inner = {"type": "inner", "id": "a", "requests": [turn]}
    run = {
        "id": "r1",
        "block_size": 64,
        "hash_id_scope": "local",
        "requests": [turn, {**turn, "t": 9.5}, inner],
    }
    trace = read_trace(lines(tmp_path / "a.jsonl", run, {**run, "id": "r2"}))
    assert sorted(trace.session.tolist()) == [0, 0, 1, 2, 2, 3]
    # the same numbers mean other blocks in another run, and the same ones in its sub-agents
    assert len(set(trace.blocks.ids.tolist())) == 2 * 3
    assert trace.from_session_start


def test_vllm_log_with_and_without_the_answers_tokens(tmp_path: Path) -> None:
    received = (
        "INFO 11-27 20:41:{s} [logger.py:42] Received request chatcmpl-{i}: prompt: 'secret params: max_tokens=9, prompt_token_ids: [1]', params: SamplingParams(n=1, "
        "max_tokens={m}, min_tokens=0), prompt_token_ids: {ids}, prompt_embeds shape: None, lora_request: None.\n"
    )
    log = (
        received.format(s="37", i="a", m=16, ids="[1, 2, 3]")
        + "INFO 11-27 20:41:37 [loggers.py:1] Engine 000: Running: 1 reqs\n"
        + received.format(s="39", i="b", m=64, ids="[1, 2, 3, 4]")
        + "INFO 11-27 20:41:40 [logger.py:70] Generated response chatcmpl-a: output: 'x', output_token_ids: [7, 8], finish_reason: stop\n"
    )
    (tmp_path / "vllm.log").write_text(log)
    trace = read_trace(tmp_path / "vllm.log")
    assert rows(trace) == [(0.0, 3, 2), (2.0, 4, 64)]
    limit = "1 rows have no count of output tokens: the request's own limit is taken"
    assert f"vllm.log: {limit}" in trace.notes
    (tmp_path / "old.log").write_text(received.format(s="37", i="a", m=16, ids="None"))
    assert "old.log:1: column input_tokens: the value is missing" in refusal(tmp_path / "old.log")


@pytest.mark.parametrize("change", ["appended to", "cut", "replaced"])
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, change: str) -> None:
    path = tmp_path / "t.jsonl"
    row = '{"timestamp": 1, "input_tokens": 5, "output_tokens": 7}\n'
    path.write_text(9 * row)
    more = {"appended to": 10, "cut": 8, "replaced": 1}[change]

    def changed() -> None:
        with open_records(path) as held:
            next(held.rows)
            path.write_text(more * row)

    with pytest.raises(WorkloadError, match="changed while it was read"):
        changed()


def test_parquet_with_stamps_and_gzipped(tmp_path: Path) -> None:
    table = pa.table(
        {
            "timestamp": pa.array(
                [1_700_000_000_000_000_003, 1_700_000_001_000_000_003], pa.timestamp("ns", tz="UTC")
            ),
            "input_tokens": [5, 6],
            "output_tokens": [1, 2],
            "prompt": ["secret", "secret"],
        }
    )
    pq.write_table(table, tmp_path / "t.parquet")
    assert rows(read_trace(tmp_path / "t.parquet")) == [(0.0, 5, 1), (1.0, 6, 2)]
    (tmp_path / "t.parquet.gz").write_bytes(gzip.compress((tmp_path / "t.parquet").read_bytes()))
    assert len(read_trace(tmp_path / "t.parquet.gz")) == 2
    bad = table.drop_columns(["prompt"]).set_column(1, "input_tokens", [[5, None]])
    pq.write_table(bad, tmp_path / "n.parquet")
    expected = "n.parquet row 2: column input_tokens: the value is missing"
    assert expected in refusal(tmp_path / "n.parquet")


def test_columns_can_be_given(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("When,tin,tout,Tenant\n1,10,2,x\n2,20,3,y\n")
    given = {"time": "when", "input": "tin", "output": "tout", "client": "tenant"}
    trace = read_trace(path, columns=given)
    assert rows(trace) == [(0.0, 10, 2), (1.0, 20, 3)]
    assert trace.client is not None
    assert "--column time=NAME" in refusal(path)
    assert "no column 'nope' for output" in refusal(path, columns={**given, "output": "nope"})


@pytest.mark.parametrize(
    ("digits", "words"),
    [(0, "seconds"), (3, "milliseconds"), (6, "microseconds"), (9, "nanoseconds")],
)
def test_the_unit_of_an_epoch_is_told_by_its_size_and_said(
    tmp_path: Path, digits: int, words: str
) -> None:
    path = tmp_path / "t.csv"
    start, unit = 1_700_000_000 * 10**digits, 10**digits
    path.write_text(HEADER + f"{start},1,1\n{start + 2 * unit},1,1\n")
    trace = read_trace(path)
    assert rows(trace) == [(0.0, 1, 1), (2.0, 1, 1)]
    assert trace.clock == f"a number of {words}"
    assert trace.notes == (() if digits == 0 else (f"t.csv: column timestamp is read as {words}",))


def test_small_numbers_are_seconds_unless_it_is_said(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(HEADER + "0,1,1\n1500,1,1\n")
    assert read_trace(path).arrival_s.tolist() == [0.0, 1500.0]
    assert read_trace(path, time_unit="ms").arrival_s.tolist() == [0.0, 1.5]


def test_mixed_units_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(HEADER + "1700000000,1,1\n1700000001000,1,1\n")
    message = refusal(path)
    expected = "t.csv:3: column timestamp: this time is a number of milliseconds, those before it are a number of seconds"
    assert expected in message


def test_tokens_above_the_context_are_an_error_of_their_row(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(HEADER + "1,4000,96\n2,4000,97\n")
    assert len(read_trace(path, context=4097)) == 2
    expected = "t.csv:3: column input_tokens: 4000 tokens and 97 of output are more than the context of 4096"
    assert expected in refusal(path, context=4096)


def test_bad_rows_can_be_left_out_and_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "timestamp,input_tokens,output_tokens\n1,5,1\n,5,1\n2,-5,1\n3,x,1\n4,5\n9,6,2\n10,0,0\n"
    )
    trace = read_trace(path, skip_bad_rows=True)
    assert rows(trace) == [(0.0, 5, 1), (8.0, 6, 2)]
    (note,) = [note for note in trace.notes if "bad rows" in note]
    assert "5 bad rows of 7 are left out: 2 for column input_tokens" in note
    assert all(
        f"1 for {what}" in note
        for what in ("column timestamp", "not readable", "column output_tokens")
    )
    (tmp_path / "j.jsonl").write_text(
        '{"timestamp": 1, "input_tokens": 1, "output_tokens": 1}\nnot json\n'
    )
    assert len(read_trace(tmp_path / "j.jsonl", skip_bad_rows=True)) == 1
    path.write_text(HEADER + ",5,1\n")
    assert "all 1 rows are bad" in refusal(path, skip_bad_rows=True)


def test_a_file_without_times_is_taken_where_they_are_not_needed(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n10,2\n20,3\n")
    assert "no column with the arrival time" in refusal(path)
    trace = read_trace(path, timed=False)
    assert trace.input_tokens.tolist() == [10, 20]
    assert trace.clock == ""


def test_progress_is_told_while_a_large_file_is_streamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ampacity.workloads.traces.read._REPORT_EVERY", 20_000)
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress(HEADER.encode() + b"1,5,1\n" * 45_000))
    told: list[tuple[int, float]] = []
    assert len(read_trace(path, progress=lambda n, share: told.append((n, share)))) == 45_000
    assert [n for n, _ in told] == [20_000, 40_000]
    assert 0 < told[0][1] <= told[1][1] <= 1


@settings(deadline=None, max_examples=often(15, 40))
@given(
    st.lists(
        st.tuples(st.integers(0, 10**9), st.integers(1, 10**6), st.integers(1, 10**6)),
        min_size=1,
        max_size=8,
    )
)
def test_csv_jsonl_json_and_parquet_say_the_same(
    tmp_path_factory: pytest.TempPathFactory, plan: list[tuple[int, int, int]]
) -> None:
    folder = tmp_path_factory.getbasetemp()
    names = ("timestamp_ms", "input_tokens", "output_tokens")
    items = [dict(zip(names, row, strict=True)) for row in plan]
    (folder / "p.csv").write_text(
        "\r\n".join([",".join(names), *(",".join(map(str, row)) for row in plan)])
    )
    lines(folder / "p.jsonl", *items)
    (folder / "p.json").write_text(json.dumps(items))
    pq.write_table(pa.Table.from_pylist(items), folder / "p.parquet")
    found = [
        rows(read_trace(folder / f"p.{ending}")) for ending in ("csv", "jsonl", "json", "parquet")
    ]
    first = min(ms for ms, _, _ in plan)
    expected = [((ms - first) / 1e3, i, o) for ms, i, o in sorted(plan, key=lambda row: row[0])]
    assert found == [expected] * 4


values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=6),
    lambda v: (
        st.lists(v, max_size=2)
        | st.dictionaries(
            st.sampled_from(
                (
                    "spans requests resourceSpans attributes id usage start_time timestamp prompt_tokens "
                    "completion_tokens scopeSpans resource key value hash_ids"
                ).split()
            ),
            v,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=often(50, 200))
@given(values, st.booleans())
def test_any_json_is_read_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, value: object, skip: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps(value, indent=1))
    try:
        read_trace(path, skip_bad_rows=skip)
    except WorkloadError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017 - whether it raises is up to the input


@pytest.mark.parametrize(
    "document",
    json.loads("""[{"resourceSpans": [{"resource": [], "scopeSpans": 5}]},
        {"resourceSpans": [{"scopeSpans": [{"spans": 5}, 7]}, 3]},
        {"resourceSpans": [{"scopeSpans": [{"spans": [{"attributes": 5,
        "startTimeUnixNano": 1}, 4]}]}]}, {"spans": [{"attributes": [{"key": 1, "value": 2},
        3], "start_time": {}}]}, {"id": 1, "requests": [1, {"requests": [2]}]},
        {"timestamp": {"a": {"b": {"c": {"d": {"e": 1}}}}}, "input_tokens": 1,
        "output_tokens": 1}]"""),
)
def test_spans_that_are_no_spans_are_one_line(tmp_path: Path, document: object) -> None:
    assert "x.jsonl" in refusal(lines(tmp_path / "x.jsonl", document))


def test_numbers_too_large_for_their_unit_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(HEADER + "999999999999,1,1\n")
    for unit in ("s", "ms", "us", "ns"):
        try:
            read_trace(path, time_unit=unit)
        except WorkloadError as error:
            assert unit == "s" and "too large for a time in seconds" in str(error)  # noqa: PT017, PT018
    assert "too large" in refusal(path, time_unit="s")


def test_public_spans() -> None:
    path = DATA / "otel_agent_traces" / "prefix_sharing_example.json"
    trace = read_trace(path)
    assert sorted(trace.input_tokens.tolist()) == [40, 45, 50, 100, 180, 270, 380]
    assert trace.session is not None
