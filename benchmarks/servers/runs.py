"""Runs of the studies' servers, as ``load_run`` returns them, without a disk."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ampacity.analysis.slo import Slo
from ampacity.loadgen.rundir.files import Run
from ampacity.loadgen.rundir.records import SCHEMA
from benchmarks.servers.laws import Floats, Server

ORIGIN_NS = 5_000_000_000_000
OUTPUT_TOKENS = 5
TIMES = "scheduled dispatched connected started sent headers first_event first_token first_answer"
AUDIT = {
    "slip_p50_s": 1e-4,
    "slip_p99_s": 2e-4,
    "slip_max_s": 5e-4,
    "loop_lag_p99_s": 2e-4,
    "cpu_fraction": 0.1,
    "client_limited": False,
}
META: dict[str, Any] = {
    "run_id": "study",
    "name": "study",
    "experiment": "sweep",
    "status": "complete",
    "status_reason": None,
    "tool": {"name": "ampacity", "version": "0"},
    "command_line": [],
    "started_utc": "2026-01-01T00:00:00Z",
    "ended_utc": "2026-01-01T00:10:00Z",
    "endpoint": {"url": "http://127.0.0.1:1/v1", "api": "chat", "model": "M", "server": None},
    "locked": {},
    "workload": {"name": "study", "arrivals": "poisson", "prompts": "unique"},
    "seed": 1,
    "workers": 1,
    "warmup_requests": None,
    "host": {},
    "fleet_inputs": {
        "peak_rps": None,
        "tensor_parallel": 1,
        "safety_factor": None,
        "gpu_hour_usd": None,
    },
}


@dataclass(frozen=True)
class Sent:
    """A stage as it was measured: its load, its length, and its requests in s after its start."""

    offered_rps: float
    duration_s: float
    arrival_s: Floats
    ttft_s: Floats
    e2e_s: Floats


def stage_of(server: Server, rate_rps: float, duration_s: float, rng: np.random.Generator) -> Sent:
    """Return one open stage on an idle server, drained to its end."""
    arrival = np.sort(rng.uniform(0, duration_s, rng.poisson(rate_rps * duration_s)))
    return Sent(rate_rps, duration_s, arrival, *server.serve(arrival, rng))


def requests_table(n: int, known: Mapping[str, Any]) -> pa.Table:
    """Return requests.parquet of n answered requests; a column that is not ``known`` is null.

    A single value stands for all rows."""
    known = {
        "attempt": 0,
        "status": "ok",
        "finish_reason": "length",
        "token_source": "usage",
        **known,
    }

    def column(field: pa.Field) -> pa.Array:
        values = known.get(field.name)
        if isinstance(values, pa.Array):
            return values
        return pa.array(np.full(n, values) if np.ndim(values) == 0 else values).cast(field.type)

    nulls = {name for name, values in known.items() if values is None}
    columns = [column(f) if f.name in known.keys() - nulls else pa.nulls(n, f.type) for f in SCHEMA]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def stage_meta(index: int, rate_rps: float, n: int, *times_ns: int) -> dict[str, Any]:
    """Return an open stage's entry of run.json; ``times_ns``: start, end, drained."""
    return {
        "index": index,
        "kind": "open",
        "offered_rps": float(rate_rps),  # of a study, which may be one of numpy
        "concurrency": None,
        **dict(zip(("start_ns", "end_ns", "drained_ns"), times_ns, strict=True)),
        "scheduled_requests": n,
        "ended_early": None,
        "audit": AUDIT,
    }


def table_of(stages: Sequence[Sent]) -> tuple[pa.Table, list[dict[str, Any]]]:
    """Return (requests.parquet, stages of run.json); a stage begins once the last has drained."""
    tables, metas, start_s, first = [], [], 0.0, 0
    for index, stage in enumerate(stages):
        table, drained_s = _requests(stage, index, start_s, first)
        tables.append(table)
        bounds_s = (start_s, start_s + stage.duration_s, drained_s)
        times_ns = (ORIGIN_NS + round(at * 1e9) for at in bounds_s)
        metas.append(stage_meta(index, stage.offered_rps, table.num_rows, *times_ns))
        start_s, first = drained_s + 1.0, first + table.num_rows
    return pa.concat_tables(tables) if tables else SCHEMA.empty_table(), metas


def _requests(stage: Sent, index: int, start_s: float, first: int) -> tuple[pa.Table, float]:
    """Return (requests.parquet of a stage, the time in s at which it has drained)."""
    n = len(stage.arrival_s)
    scheduled = ORIGIN_NS + np.round((start_s + stage.arrival_s) * 1e9).astype(np.int64)
    token, ended = (
        scheduled + np.round(s * 1e9).astype(np.int64) for s in (stage.ttft_s, stage.e2e_s)
    )
    chunks = np.linspace(stage.ttft_s, stage.e2e_s, OUTPUT_TOKENS, axis=1) * 1e6
    offsets = np.arange(0, n * OUTPUT_TOKENS + 1, OUTPUT_TOKENS, dtype=np.int32)
    known = {
        "request_id": first + np.arange(n),
        "stage": index,
        "class": "default",
        "worker": 0,
        **{f"{name}_ns": token if name[:5] == "first" else scheduled for name in TIMES.split()},
        "last_token_ns": ended,
        "ended_ns": ended,
        "http_status": 200,
        "input_tokens_planned": 100,
        "input_tokens": 100,
        "output_tokens_planned": OUTPUT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "chunk_at_us": pa.ListArray.from_arrays(
            offsets, pa.array(chunks.ravel().round().astype(np.uint32))
        ),
    }
    last_s = float((stage.arrival_s + stage.e2e_s).max(initial=0.0))
    return requests_table(n, known), start_s + max(stage.duration_s, last_s)


def run_of(stages: Sequence[Sent], slos: Sequence[Slo], **changes: Any) -> Run:
    """Return a complete run of these stages; ``changes`` override entries of run.json."""
    table, metas = table_of(stages)
    meta = copy.deepcopy(META) | {"slos": [slo.as_dict() for slo in slos], "stages": metas}
    return Run(Path("study"), meta | changes, table, None, True)
