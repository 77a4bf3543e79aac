"""Any records and any run.json: a strict summary, or one line."""

import copy
import io
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from ampacity.analysis.contract.summary import read_summary
from ampacity.analysis.metrics.requests import RecordsError
from ampacity.analysis.slo import SloError
from ampacity.loadgen.rundir.files import Run, RunDirError, load_run
from ampacity.loadgen.rundir.meta import fault_of
from ampacity.loadgen.rundir.records import SCHEMA, STATUSES, RequestRecord, to_batch
from ampacity.reports.pages.run_report import render_report
from ampacity.reports.pages.terminal import render_table
from tests.support import synthetic
from tests.support.contract import summarise
from tests.support.repeats import often

_seconds = st.floats(0, 20, allow_nan=False)
_TIMES = tuple(
    (
        "scheduled_ns dispatched_ns started_ns first_token_ns first_answer_ns last_token_ns "
        "ended_ns"
    ).split()
)
_tokens = st.none() | st.integers(0, 50)


@st.composite
def _record(draw: st.DrawFn) -> RequestRecord:
    chunks = sorted(draw(st.lists(st.integers(0, 10**7), max_size=6)))
    known = draw(st.booleans())
    at_ns = sorted(synthetic.ORIGIN_NS + round(draw(_seconds) * 1e9) for _ in _TIMES)
    times: dict[str, Any] = {
        n: ns if n == "scheduled_ns" or draw(st.booleans()) else None
        for n, ns in zip(_TIMES, at_ns, strict=True)
    }
    return RequestRecord(
        request_id=draw(st.integers(0, 10**6)),
        stage=draw(st.integers(0, 2)),
        attempt=draw(st.integers(0, 1)),
        status=draw(st.sampled_from(STATUSES)),
        **times,
        input_tokens=draw(_tokens),
        cached_tokens=draw(_tokens),
        output_tokens_planned=draw(_tokens),
        output_tokens=draw(_tokens),
        reasoning_tokens=draw(_tokens),
        finish_reason=draw(st.sampled_from([None, "stop", "length"])),
        chunk_at_us=chunks,
        chunk_tokens=draw(st.lists(st.integers(0, 4), min_size=len(chunks), max_size=len(chunks)))
        if known
        else None,
    )


@settings(
    max_examples=often(15, 60),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    st.lists(_record(), max_size=60, unique_by=lambda r: (r.request_id, r.stage, r.attempt)),
    st.lists(
        st.sampled_from(
            "ttft_p50=1s itl_p99=50ms icl_p50=1ms tpot_p95=2ms e2e_p99=5s first_answer_p90=1s".split()
        ),
        max_size=3,
        unique=True,
    ),
    st.sampled_from([None, 0, 5]),
    st.booleans(),
)
def test_any_records_give_a_strict_summary(
    records: list[RequestRecord], slos: list[str], warmup: int | None, complete: bool
) -> None:
    stages = [
        synthetic.Stage(
            [r for r in records if r.stage == i],
            20.0,
            concurrency=3 if i == 2 else None,
            offered_rps=i + 1.0,
        )
        for i in range(3)
    ]
    meta = synthetic.run_meta(stages, slos, warmup_requests=warmup, fleet_inputs=synthetic.FLEET)
    table = pa.Table.from_batches([to_batch(records)], schema=SCHEMA)
    run = Run(path=Path("nowhere"), meta=meta, requests=table, server=None, complete=complete)
    summary = summarise(run)
    synthetic.strict(summary)
    assert summary["verdict"]
    assert sum(summary["errors"].values()) <= summary["requests"]


@pytest.mark.parametrize(
    ("row", "column", "value", "said"),
    [
        (
            7,
            "first_token_ns",
            synthetic.ORIGIN_NS - 300_000_000,
            f"before started_ns, {synthetic.ORIGIN_NS + 700_000_000}",
        ),
        (7, "ended_ns", synthetic.ORIGIN_NS, "before last_token_ns"),
        (7, "started_ns", synthetic.ORIGIN_NS, "before scheduled_ns"),
        (7, "output_tokens", -7, "below zero"),
        (7, "scheduled_ns", None, "which every record has"),
        (7, "stage", 99, "which run.json does not have"),
        (7, "chunk_tokens", [1, 1, 1, 1, -3], "a count below zero or none"),
        (7, "chunk_tokens", [1, 1, 1], "of another length than chunk_at_us"),
        (29, "chunk_tokens", [], "of another length than chunk_at_us"),
        (0, "chunk_at_us", [200_000, 100_000], "a time before the one ahead of it"),
        (7, "request_id", 3, "with attempt 0 of stage 0 for the second time"),
    ],
)
def test_a_record_that_no_run_writes_is_named(row: int, column: str, value: Any, said: str) -> None:
    records = synthetic.fixed(30, 0.1)  # the request of row i started i * 0.1 s after the origin
    run = _run_of(synthetic.run_meta([synthetic.Stage(records, 3.0)]))
    setattr(records[row], column, value)
    table = pa.Table.from_batches([to_batch(records)], schema=SCHEMA)
    with pytest.raises(RecordsError) as caught:
        summarise(replace(run, requests=table))
    assert str(caught.value).startswith(
        f"nowhere/requests.parquet: row {row}: {column} is {value}, {said}"
    )
    assert "\n" not in str(caught.value)


def test_records_that_stand_there_twice_are_refused() -> None:
    run = _run_of(synthetic.run_meta([synthetic.Stage(synthetic.fixed(30, 0.1), 3.0)]))
    with pytest.raises(
        RecordsError, match="row 30: request_id is 0, with attempt 0 of stage 0 for the second"
    ):
        summarise(replace(run, requests=pa.concat_tables([run.requests, run.requests])))


def test_chunks_are_looked_at_in_every_part_of_a_table_and_a_list_begins_anew() -> None:
    """Row 40 stands in the second part, behind lists that are null or empty."""
    records = synthetic.fixed(60, 0.1)
    records[35].chunk_at_us = records[36].chunk_at_us = []
    records[36].chunk_tokens = []
    meta = synthetic.run_meta([synthetic.Stage(records, 6.0)])

    def refused() -> str:
        parts = [to_batch(records[:30]), to_batch(records[30:])]
        try:
            summarise(
                Run(
                    Path("nowhere"),
                    meta,
                    pa.Table.from_batches(parts, schema=SCHEMA),
                    None,
                    complete=True,
                )
            )
        except RecordsError as error:
            return str(error)
        return ""

    assert refused() == ""
    records[40].chunk_at_us = [100_000, 110_000, 109_999, 120_000, 130_000, 140_000, 150_000]
    expected = "row 40: chunk_at_us is [100000, 110000, 109999, 120000, 130000, 140000, ...], a time before"
    assert expected in refused()
    records[40].chunk_at_us = [100_000, 110_000, 110_000, 120_000, 130_000, 140_000, 150_000]
    assert refused() == ""
    records[40].chunk_tokens = [0, -1, 1, 1, 1, 1, 1]
    assert "row 40: chunk_tokens is [0, -1, 1, 1, 1, 1, ...], a count below zero" in refused()


def test_a_chunk_whose_count_is_null_is_refused() -> None:
    run = _run_of(synthetic.run_meta([synthetic.Stage(synthetic.fixed(30, 0.1), 3.0)]))
    field = SCHEMA.field("chunk_tokens")
    counts = pa.array([[1] * 5] * 29 + [[1, None, 1, 1, 1]], type=field.type)
    with pytest.raises(
        RecordsError,
        match=r"row 29: chunk_tokens is \[1, None, 1, 1, 1\], a count below zero or none",
    ):
        summarise(
            replace(
                run, requests=run.requests.set_column(SCHEMA.names.index(field.name), field, counts)
            )
        )


def test_a_bare_run_json_is_enough() -> None:
    meta = {
        "stages": [{"start_ns": synthetic.ORIGIN_NS, "end_ns": synthetic.at_ns(3.0)}],
        "status": "running",
    }
    table = pa.Table.from_batches([to_batch(synthetic.fixed(30, 0.1))], schema=SCHEMA)
    summary = synthetic.strict(summarise(Run(Path("nowhere"), meta, table, None, complete=False)))
    assert summary["requests"] == 30
    assert summary["stages"][0]["window"]["end_s"] > 2.0


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("stages", 0, "start_ns"), "x", "stages[0].start_ns is 'x': expected int, got str;"),
        (
            ("stages", 0, "offered_rps"),
            float("nan"),
            "stages[0].offered_rps is nan: expected float >= 0.0;",
        ),
        (
            ("stages", 0, "scheduled_requests"),
            1e300,
            "stages[0].scheduled_requests is 1e+300: expected int",
        ),
        (("stages", 0, "index"), 0.5, "stages[0].index is 0.5: expected int | null, got float;"),
        (
            ("stages", 0, "audit", "cpu_fraction"),
            {},
            "stages[0].audit.cpu_fraction is {}: expected float",
        ),
        (("fleet_inputs", "peak_rps"), "many", "fleet_inputs.peak_rps is 'many': expected float"),
        (("warmup_requests",), -1, "warmup_requests is -1: expected int >= 0;"),
        (("search",), [], "search is []: expected object"),
        (("search", "path", 0), {}, "search.path[0] is {}: object missing required field stage;"),
        (("search", "precision"), "x", "search.precision is 'x': expected float, got str;"),
        (("burst",), {}, "burst is {}: object missing required field base_rps;"),
        (
            ("imported", "definitions", 0),
            {},
            "imported.definitions[0] is {}: object missing required field what;",
        ),
        (("workload", "input_tokens"), "abc", "workload.input_tokens is 'abc': expected"),
    ],
)
def test_an_entry_that_no_run_writes_is_named(
    path: tuple[Any, ...], value: Any, said: str, tmp_path: Path
) -> None:
    run = synthetic.make_run(tmp_path / "run", [synthetic.Stage(synthetic.fixed(30, 0.1), 3.0)])
    (run.path / "run.json").write_text(json.dumps({"schema_version": 1, **_tampered(path, value)}))
    with pytest.raises(RunDirError) as caught:
        load_run(run.path)
    assert str(caught.value).startswith(f"{run.path / 'run.json'}: {said}")
    assert str(caught.value).endswith("no run writes that: the file was changed or is damaged")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("column", [{"running": ["a"]}, {"at_ns": [None]}, {"at_ns": ["a"]}])
def test_samples_of_a_server_that_no_run_writes_are_refused(
    column: dict[str, Any], tmp_path: Path
) -> None:
    run = synthetic.make_run(tmp_path / "run", [synthetic.Stage(synthetic.fixed(30, 0.1), 3.0)])
    pq.write_table(
        pa.table({"at_ns": [synthetic.ORIGIN_NS], **column}), run.path / "server.parquet"
    )
    with pytest.raises(
        RunDirError, match=r"server.parquet: (column running|column at_ns|a sample has no at_ns)"
    ):
        load_run(run.path)


SEARCH: dict[str, Any] = json.loads("""{"precision": 0.05, "reached": false, "ended": "x",
    "more_requests": 9, "path": [{"stage": 0, "offered_rps": 10.0, "why": "start"}]}""")
BURST: dict[str, Any] = json.loads("""{"base_rps": 10.0, "base_s": 1.0, "burst_s": 1.0,
    "recovery_s": 1.0, "factor": 2.0, "shape": "step"}""")
IMPORTED: dict[str, Any] = {
    "tool": "x",
    "definitions": [{"what": "a", "theirs": "b", "ours": "c"}],
    "missing": {},
}


def _tampered(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    stage = synthetic.Stage(
        synthetic.fixed(30, 0.1),
        3.0,
        extra={"sessions": {"begun": 1, "cut": ["0-1"]}, "cached_share_planned": 0.5},
    )
    meta = synthetic.run_meta([stage], ["ttft_p90=1s"], fleet_inputs=synthetic.FLEET)
    extra = {"search": SEARCH, "burst": BURST, "imported": IMPORTED}
    meta |= {name: copy.deepcopy(extra[name]) for name in extra if name == path[0]}
    meta["workload"] |= {
        "input_tokens": {"p50": 10, "text": "10"},
        "classes": [{"name": "a", "weight": 1}],
    }
    holder: Any = meta
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = value
    return meta


def _run_of(meta: dict[str, Any], complete: bool = True) -> Run:
    table = pa.Table.from_batches([to_batch(synthetic.fixed(30, 0.1))], schema=SCHEMA)
    return Run(Path("nowhere"), meta, table, None, complete=complete)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=3,
)


NAMES: dict[tuple[Any, ...], Any] = {  # what is tampered with, by where it is
    (): (
        "status status_reason predicted warmup_requests started_utc search burst imported "
        "workload slos stages notes locked fleet_inputs host"
    ).split(),
    ("stages", 0): (
        "index kind offered_rps concurrency start_ns end_ns sessions lengths "
        "cached_share_planned audit ramp_s scheduled_requests drained_ns ended_early"
    ).split(),
    ("stages", 0, "audit"): "cpu_fraction client_limited client_limited_reason slip_p99_s".split(),
    ("stages", 0, "sessions"): ("begun", "cut"),
    ("fleet_inputs",): synthetic.FLEET,
    ("workload",): "prompts trace name input_tokens output_tokens classes arrivals".split(),
    ("slos", 0): ("metric", "quantile", "limit_s", "text"),
    ("search",): SEARCH,
    ("search", "path", 0): SEARCH["path"][0],
    ("burst",): BURST,
    ("imported",): IMPORTED,
    ("imported", "definitions", 0): ("what", "theirs", "ours"),
}


@settings(max_examples=often(60, 200), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from([(*where, name) for where, names in NAMES.items() for name in names]),
    _json,
    st.booleans(),
    st.booleans(),
)
def test_a_tampered_run_json_gives_a_report_or_one_line(
    path: tuple[Any, ...], value: Any, complete: bool, html: bool
) -> None:
    meta = _tampered(path, value)
    line = fault_of(meta)
    if line is None:
        try:
            summary = summarise(_run_of(meta, complete))
            render_table(read_summary(synthetic.strict(summary)), Console(file=io.StringIO()))
            if html:
                render_report(read_summary(summary), meta)
            return
        except SloError as refused:
            line = str(refused)
        except RecordsError as refused:  # the records are of another stage now
            line = str(refused).replace("stage is", "stages is")
    assert "\n" not in line
    assert str(path[-1]) in line or str(path[0]) in line


@pytest.mark.slow
def test_a_hundred_thousand_requests_take_seconds() -> None:
    n, tokens = 100_000, 100
    rng = np.random.default_rng(6)
    at_us = np.cumsum(rng.integers(5_000, 15_000, (n, tokens)), axis=1).astype(np.uint32)
    scheduled = synthetic.ORIGIN_NS + np.arange(n) * 1_000_000
    template = synthetic.request(0, 0.0, gaps_s=[0.01])
    columns = {
        name: pa.array([value] * n, type=SCHEMA.field(name).type)
        for name, value in zip(
            SCHEMA.names, to_batch([template]).to_pylist()[0].values(), strict=True
        )
    }
    for name, offset in (("scheduled", 0), ("dispatched", 0), ("started", 0)):
        columns[f"{name}_ns"] = pa.array(scheduled + offset)
    for name, at in (
        ("first_token", at_us[:, 0]),
        ("last_token", at_us[:, -1]),
        ("ended", at_us[:, -1]),
    ):
        columns[f"{name}_ns"] = pa.array(scheduled + at.astype(np.int64) * 1000)
    columns["request_id"] = pa.array(np.arange(n))
    columns["output_tokens"] = pa.array(np.full(n, tokens, np.int32))
    offsets = pa.array(np.arange(0, n * tokens + 1, tokens, dtype=np.int32))
    columns["chunk_at_us"] = pa.ListArray.from_arrays(offsets, pa.array(at_us.ravel()))
    table = pa.table([columns[name] for name in SCHEMA.names], schema=SCHEMA)
    meta = synthetic.run_meta(
        [synthetic.Stage([], n / 1000, offered_rps=1000.0, scheduled_requests=n)],
        ["ttft_p99=2s", "itl_p99=50ms"],
    )
    began = time.monotonic()
    summary = summarise(Run(Path("nowhere"), meta, table, None, complete=True))
    assert summary["stages"][0]["itl_s"]["n"] == summary["stages"][0]["requests"] * (tokens - 1)
    assert time.monotonic() - began < 30  # about two on one idle core
