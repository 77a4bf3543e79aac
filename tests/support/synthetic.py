"""Runs made by hand or by a small queue, written as real run directories."""

import copy
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ampacity.analysis.contract.summary import to_json
from ampacity.analysis.metrics.chunks import read_chunks
from ampacity.analysis.metrics.cohort import Cohort
from ampacity.analysis.metrics.requests import read_requests
from ampacity.analysis.slo import parse_slo
from ampacity.analysis.summary import summarise
from ampacity.loadgen.rundir.files import Run, load_run
from ampacity.loadgen.rundir.records import SCHEMA, RequestRecord, to_batch
from ampacity.loadgen.rundir.write import RunWriter

ORIGIN_NS = 5_000_000_000_000  # a monotonic clock does not start at zero

SLOS = ["ttft_p99=200ms", "itl_p99=50ms"]
FLEET = {"peak_rps": 900, "tensor_parallel": 4, "safety_factor": 1.3, "gpu_hour_usd": 2.5}


def at_ns(seconds: float | None) -> int | None:
    """A time in seconds after the start of the run, as the records hold it."""
    return None if seconds is None else ORIGIN_NS + round(seconds * 1e9)


def request(
    request_id: int,
    scheduled_s: float,
    *,
    stage: int = 0,
    ttft_s: float | None = 0.1,
    gaps_s: Sequence[float] = (),
    chunk_tokens: Sequence[int] | None = None,
    status: str = "ok",
    start_delay_s: float = 0.0,
    tail_s: float = 0.0,
    **columns: Any,
) -> RequestRecord:
    """One record: started ``start_delay_s`` after its schedule, first chunk after ``ttft_s``, then
    the gaps.

    ``tail_s`` is the time from the last token to the end of the response. ``columns`` override."""
    started_s = scheduled_s + start_delay_s
    after_first = itertools.accumulate(map(float, gaps_s), initial=0.0)
    at = [] if ttft_s is None else [float(ttft_s) + after_s for after_s in after_first]
    last_s = started_s + (at[-1] if at else 0.0)
    tokens = sum(chunk_tokens) if chunk_tokens is not None else len(at)
    scheduled_ns, started_ns = at_ns(scheduled_s), at_ns(started_s)
    first_ns = at_ns(started_s + at[0]) if at else None
    values: dict[str, Any] = {
        "dispatched_ns": scheduled_ns,
        "connected_ns": started_ns,
        "started_ns": started_ns,
        "sent_ns": started_ns,
        "first_token_ns": first_ns,
        "first_answer_ns": first_ns,
        "last_token_ns": at_ns(last_s) if at else None,
        "ended_ns": at_ns(last_s + tail_s),
        "input_tokens_planned": 100,
        "input_tokens": 100,
        "output_tokens_planned": columns.get("output_tokens") or tokens,
        "output_tokens": tokens if status == "ok" else None,
        "finish_reason": "length" if status == "ok" else None,
        "token_source": "usage" if status == "ok" else None,
        "chunk_at_us": [round(a * 1e6) for a in at],
        "chunk_tokens": None if chunk_tokens is None else list(chunk_tokens),
    }
    assert scheduled_ns is not None
    return RequestRecord(
        request_id=request_id,
        stage=stage,
        scheduled_ns=scheduled_ns,
        status=status,
        **(values | columns),
    )


def cohort(*records: RequestRecord, missing: int = 0, now_s: float = 100.0) -> Cohort:
    """All of the records as one cohort; ``missing`` more were lost."""
    table = pa.Table.from_batches([to_batch(list(records))], schema=SCHEMA)
    requests = read_requests(table, ORIGIN_NS)
    return Cohort(requests, read_chunks(table, requests), missing, now_s * 1e9)


@dataclass
class Stage:
    """One stage of a made-up run; ``start_s`` and ``duration_s`` are its scheduled span."""

    records: list[RequestRecord]
    duration_s: float
    start_s: float = 0.0
    offered_rps: float | None = None
    concurrency: int | None = None
    scheduled_requests: int | None = None
    client_limited: bool = False
    ended_early: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def meta(self, index: int) -> dict[str, Any]:
        kind = "closed" if self.concurrency is not None else "open"
        offered = self.offered_rps
        if kind == "open" and offered is None:
            offered = len(self.records) / self.duration_s
        ends = [r.ended_ns for r in self.records if r.ended_ns is not None]
        return {
            "index": index,
            "kind": kind,
            "offered_rps": offered,
            "concurrency": self.concurrency,
            "start_ns": at_ns(self.start_s),
            "end_ns": at_ns(self.start_s + self.duration_s),
            "scheduled_requests": sum(r.attempt == 0 for r in self.records)
            if self.scheduled_requests is None
            else self.scheduled_requests,
            "drained_ns": max(ends, default=at_ns(self.start_s + self.duration_s)),
            "ended_early": self.ended_early,
            "audit": {
                "slip_p50_s": 1e-4,
                "slip_p99_s": 5e-4,
                "slip_max_s": 1e-3,
                "loop_lag_p99_s": 4e-4,
                "cpu_fraction": 0.2,
                "client_limited": self.client_limited,
                "client_limited_reason": "slip p99 80 ms" if self.client_limited else None,
            },
        } | self.extra


def run_meta(stages: Sequence[Stage], slos: Iterable[str] = (), **changes: Any) -> dict[str, Any]:
    """run.json of a made-up run; ``changes`` override top-level entries. The caller may change it:
    nothing is shared."""
    return copy.deepcopy(
        {
            "run_id": "synthetic",
            "name": "synthetic",
            "experiment": "sweep",
            "status": "complete",
            "status_reason": None,
            "tool": {"name": "ampacity", "version": "0"},
            "command_line": [],
            "started_utc": "2026-01-01T00:00:00Z",
            "ended_utc": "2026-01-01T00:10:00Z",
            "endpoint": json.loads("""{"url": "http://127.0.0.1:8000/v1", "api": "chat",
                "model": "M", "server": null}"""),
            "locked": {},
            "workload": {"name": "synthetic", "arrivals": "poisson", "prompts": "unique"},
            "slos": [parse_slo(text).as_dict() for text in slos],
            "seed": 1,
            "workers": 1,
            "warmup_requests": None,
            "stages": [stage.meta(index) for index, stage in enumerate(stages)],
            "host": {},
            "fleet_inputs": json.loads("""{"peak_rps": null, "tensor_parallel": 1,
                "safety_factor": null, "gpu_hour_usd": null}"""),
        }
        | changes
    )


def make_run(
    path: Path,
    stages: Sequence[Stage],
    slos: Iterable[str] = (),
    *,
    killed: bool = False,
    **changes: Any,
) -> Run:
    """Write a run directory at ``path`` (new) and read it back; ``killed`` leaves it as a kill in
    its last stage would."""
    meta = run_meta(stages, slos, **changes)
    if killed:
        meta["stages"][-1]["drained_ns"] = None
    with RunWriter(path, meta) as writer:
        for index, stage in enumerate(stages):
            for record in stage.records:
                record.stage = index
                writer.append(record)
        if not killed:
            writer.finish()
    return load_run(path)


def summary_of(
    path: Path, *stages: Stage, slos: Iterable[str] = (), **changes: Any
) -> dict[str, Any]:
    """Summarise a made-up run, which is written to a new directory in ``path``."""
    new = path / f"run{len(list(path.glob('run*')))}"
    return strict(to_json(summarise(make_run(new, stages, slos, **changes))))


def warned(summary: dict[str, Any], code: str) -> str | None:
    """Return the text of a warning of a summary, or None where it has none with that code."""
    return next((w["text"] for w in summary["warnings"] if w["code"] == code), None)


def queue_stage(
    rng: np.random.Generator,
    rate_rps: float,
    duration_s: float,
    *,
    service_rps: float,
    start_s: float = 0.0,
    output_tokens: int = 5,
    token_s: float = 0.01,
    first_id: int = 0,
) -> Stage:
    """An M/M/1 queue in front of the first token, then ``output_tokens`` tokens, one each
    ``token_s``.

    TTFT from schedule is the sojourn time of M/M/1: exponential with rate mu - lambda in steady
    state, so p99 <= D holds up to lambda = mu - ln(100)/D."""
    n = rng.poisson(rate_rps * duration_s)
    arrival = np.sort(rng.uniform(0, duration_s, n))
    service = rng.exponential(1 / service_rps, n)
    # Lindley: departure_i = S_i + max over j <= i of (arrival_j - S_{j-1}), S cumulative service
    done = np.cumsum(service)
    departure = done + np.maximum.accumulate(arrival - (done - service))
    records = [
        request(first_id + i, start_s + a, ttft_s=t, gaps_s=[token_s] * (output_tokens - 1))
        for i, (a, t) in enumerate(
            zip(arrival.tolist(), (departure - arrival).tolist(), strict=True)
        )
    ]
    return Stage(records, duration_s, start_s=start_s, offered_rps=rate_rps)


def queue_sweep(
    rng: np.random.Generator,
    rates_rps: Sequence[float],
    duration_s: float,
    *,
    service_rps: float,
    **options: Any,
) -> list[Stage]:
    """One ``queue_stage`` per rate, each long enough after the last that it has drained."""
    stages, start_s, first_id = [], 0.0, 0
    for rate in rates_rps:
        stage = queue_stage(
            rng,
            rate,
            duration_s,
            service_rps=service_rps,
            start_s=start_s,
            first_id=first_id,
            **options,
        )
        stages.append(stage)
        first_id += len(stage.records)
        start_s += duration_s * max(1.0, rate / service_rps) + 5.0
    return stages


def fixed(
    n: int, every_s: float, *, first: int = 0, start_s: float = 0.0, **options: Any
) -> list[RequestRecord]:
    return [
        request(first + i, start_s + i * every_s, **({"gaps_s": [0.01] * 4} | options))
        for i in range(n)
    ]


def strict(summary: dict[str, Any]) -> dict[str, Any]:
    """As a strict reader gets it: no NaN, no type that JSON lacks."""
    read: dict[str, Any] = json.loads(json.dumps(summary, allow_nan=False))
    assert read == summary
    return read
