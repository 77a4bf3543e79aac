"""What a gate needs to know of earlier runs, small enough to commit (baseline_file.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ampacity.analysis.change.baseline_file import KIND, SCHEMA_VERSION
from ampacity.analysis.change.comparable import (
    CompareError,
    Judged,
    carried,
    check_distinct,
    check_realised,
    check_same,
    identity,
    realised,
)
from ampacity.analysis.change.quantiles import MOST_TOLERANCE, SAME, rounded, track
from ampacity.analysis.change.samples import (
    AT_ARRIVAL,
    IN_FLIGHT,
    METRICS,
    OUTPUT_TOKENS,
    QUEUE,
    TRACKED,
    Cells,
    LevelRecords,
    blocks_of,
    fit_queue,
    level_records,
    make_cells,
    no_values,
    weights_of,
)
from ampacity.analysis.metrics.hdr import encode_seconds
from ampacity.analysis.metrics.observations import Observations
from ampacity.analysis.stage.throughput import REQUESTS_MIN
from ampacity.analysis.warnings import ERROR_SHARE
from ampacity.loadgen.rundir.records import LEFT_OUT

NEAR_LOAD = 0.8
NEAR_SATURATION = (
    "near saturation a small change of speed makes a large one of the queue, and so does chance: "
    "compare old and new in one run with ampacity ab, or gate at a lower load"
)


def make_baseline(runs: Sequence[Judged]) -> dict[str, Any]:
    """Return the content of a baseline file.

    Raises CompareError where the runs are no evidence or not of one experiment.
    """
    first = runs[0]
    for other in runs[1:]:
        check_same(identity(first), identity(other), str(other.run.path))
        check_realised(realised(first), realised(other), str(other.run.path))
    check_distinct(runs)
    unfit = [_unfit(run) for run in runs]
    shared = set.intersection(
        *(run.levels().keys() - why for run, why in zip(runs, unfit, strict=True))
    )
    names = [name for name in first.levels() if name in shared]
    if not names:
        listed = "; ".join(f"{name}: {why}" for found in unfit for name, why in found.items())
        raise CompareError(f"no load level of these runs can be a baseline: {listed}")
    return {
        "kind": KIND,
        "schema_version": SCHEMA_VERSION,
        "identity": identity(first),
        "realised": realised(first),
        "slos": [s["text"] for s in first.summary["slos"]],
        "runs": [_origin(run) for run in runs],
        "capacity_rps": _capacity(runs),
        "levels": {name: _level(runs, name, len(names)) for name in names},
    }


def _unfit(run: Judged) -> dict[str, str]:
    """Return the load levels that cannot be part of a baseline, and why."""
    found = {}
    for name, (_, stage) in run.levels().items():
        n, left_out = stage["requests"], sum(stage["errors"].get(status, 0) for status in LEFT_OUT)
        failed = n - stage["ok"] - left_out
        if stage["client_limited"]:
            found[name] = "the client was the limit (use a quieter or larger machine)"
        elif not carried(stage):
            found[name] = (
                f"no steady state ({stage['stable_reason']}): "
                "use a lower load or a longer --duration"
            )
        elif n < REQUESTS_MIN:
            found[name] = (
                f"{n} requests after the warm-up, {REQUESTS_MIN} are needed: "
                "use a longer --duration"
            )
        elif not stage["ok"] or failed > ERROR_SHARE * n:
            found[name] = (
                f"{failed} of {n} requests failed or were in flight at cutoff: with more than "
                f"{ERROR_SHARE:.0%} nothing would ever pass; lower the load or run longer"
            )
    return found


def _origin(run: Judged) -> dict[str, Any]:
    meta, locked = run.run.meta, run.run.meta.get("locked") or {}
    found = {name: meta.get(name) for name in ("run_id", "started_utc", "seed")}
    found["requests"] = run.summary["requests"]
    names = ("engine", "engine_version", "quantization", "hardware")
    return found | {name: locked.get(name) for name in names}


def near_saturation(base: Mapping[str, Any]) -> list[str]:
    """Return load levels near the capacity, or too noisy for a tolerance of most quantiles."""
    capacity = base["capacity_rps"] and base["capacity_rps"]["value"]
    found = []
    for name, level in base["levels"].items():
        rate = level["offered_rps"]
        near = bool(capacity and rate and rate >= NEAR_LOAD * capacity)
        tolerances = [
            q["tolerance"][SAME] for k, q in level["quantiles"].items() if not k.endswith("p99")
        ]
        watched = sum(t is None or t > MOST_TOLERANCE for t in tolerances)
        if near or 2 * watched > len(tolerances):
            found.append(name)
    return found


def _capacity(runs: Sequence[Judged]) -> dict[str, Any] | None:
    """Return the bracket of the capacities of all runs; None where one run has no upper end."""
    capacities = [r.summary["capacity"] for r in runs]
    brackets = [c["capacity_rps"] and c["capacity_rps_ci"] for c in capacities]
    if not all(b and b[1] is not None for b in brackets):
        return None
    return {
        "value": float(np.mean([c["capacity_rps"] for c in capacities])),
        "bracket": [min(b[0] for b in brackets), max(b[1] for b in brackets)],
    }


def read_level(run: Judged, name: str, skipped: int) -> LevelRecords:
    """Return the records of one load level without its first requests."""
    meta, stage = run.levels()[name]
    drained = meta.get("drained_ns") or meta.get("end_ns") or 0
    return level_records(run.records, stage["index"], skipped, float(drained) - run.origin_ns)


def client_delay_s(run: Judged, name: str) -> float:
    """Return the client's own delay at p99: of request starts, and of reads not kernel-timed."""
    audit = run.levels()[name][0].get("audit") or {}
    late_s = 0.0 if audit.get("dated_by_kernel") else audit.get("receive_delay_p99_s") or 0.0
    return float((audit.get("slip_p99_s") or 0.0) + late_s)


def schedule_of(run: Judged, name: str, records: LevelRecords) -> str | None:
    """Return an id that is equal in runs whose blocks hold the same requests; None if closed."""
    meta, stage = run.levels()[name]
    if stage["kind"] == "closed":
        return None
    number = meta.get("schedule", meta.get("index"))
    return f"{records.schedule}-{run.run.meta.get('seed')}-{number}"


@dataclass(frozen=True)
class _Level:
    """One load level of all runs of a baseline."""

    name: str
    metas: Sequence[Mapping[str, Any]]
    stages: Sequence[Mapping[str, Any]]
    records: Sequence[LevelRecords]

    def values(self, metric: str) -> list[Observations]:
        return [level.metrics[metric] for level in self.records]


def _level(runs: Sequence[Judged], name: str, n_levels: int) -> dict[str, Any]:
    metas, stages = zip(*(run.levels()[name] for run in runs), strict=True)
    skipped = max(int(s["window"]["warmup_requests"] or 0) for s in stages)
    at = _Level(name, metas, stages, [read_level(run, name, skipped) for run in runs])
    where = f"{runs[0].run.path}: {name} has"
    short = min(level.n for level in at.records)
    if short < REQUESTS_MIN:
        raise CompareError(
            f"{where} {short} requests after its warm-up, {REQUESTS_MIN} are needed: "
            "use a longer --duration"
        )
    cells = _cells(at)
    quantiles, untracked = _quantiles(at, cells, n_levels * (len(TRACKED) + 2))
    if not quantiles:
        listed = "; ".join(f"{metric}: {why}" for metric, why in untracked.items())
        raise CompareError(f"{where} no latency that a gate could track: {listed}")
    first, rates = stages[0], [stage["output_tokens_per_s"] for stage in stages]
    return {
        "kind": first["kind"],
        "offered_rps": first["offered_rps"],
        "concurrency": first["concurrency_set"],
        "skipped": skipped,
        "requests": [level.n for level in at.records],
        "schedules": [schedule_of(run, name, x) for run, x in zip(runs, at.records, strict=True)],
        "errors": [blocks_of(level.failed).as_dict() for level in at.records],
        "rates": [level.rates(first["kind"]).as_dict() for level in at.records],
        "client_delay_s": max(client_delay_s(run, name) for run in runs),
        "output_tokens_per_s": None if None in rates else rounded(float(np.mean(rates))),
        "slos": _slo_values(stages),
        "histograms": {
            m: _histogram(at.values(m)) for m in METRICS if no_values(at.values(m)) is None
        },
        "quantiles": quantiles,
        "untracked": untracked,
        "cells": {metric: [c.as_dict() for c in held] for metric, held in cells.items()},
    }


def _quantiles(
    at: _Level, cells: Mapping[str, Sequence[Cells]], tests: int
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return the tracked quantiles, and why the others are not tracked."""
    quantiles: dict[str, dict[str, Any]] = {}
    untracked: dict[str, str] = {}
    for metric in METRICS:
        found, held = at.values(metric), cells[metric]
        if reason := no_values(found):
            untracked[metric] = reason
            continue
        of_runs = [[c.of(level) for c in held] for level in at.records]
        measured = [c.by in (AT_ARRIVAL, IN_FLIGHT) for c in held]
        open_loop = at.stages[0]["kind"] == "open"
        for name, (of, q) in TRACKED.items():
            if of != metric:
                continue
            entry = track(found, q, of_runs, measured if open_loop else None, tests)
            if isinstance(entry, str):
                untracked[name] = entry
            else:
                quantiles[name] = entry
    return quantiles, untracked


def _slo_values(stages: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return values that a limit may be set on, in s, the largest of the runs.

    Those of the runs' own SLOs, and each p95, for which there is no tolerance.
    """
    found: dict[str, list[float | None]] = {
        f"{m}_p95": [s[f"{m}_s"].get("p95") for s in stages] for m in METRICS
    }
    for slo in {v["slo"] for s in stages for v in s["slo_verdicts"]}:
        found[slo.partition("=")[0]] = [
            v["value_s"] for s in stages for v in s["slo_verdicts"] if v["slo"] == slo
        ]
    return {
        name: max(v or 0.0 for v in values) for name, values in found.items() if None not in values
    }


def _cells(at: _Level) -> dict[str, list[Cells]]:
    """Return the quantities that predict each metric (samples.py)."""
    in_flight = make_cells(IN_FLIGHT, at.records)
    planned = all((level.planned.output_tokens_planned > 0).all() for level in at.records)
    s_per_token = _queue(at)
    queue = [make_cells(QUEUE, at.records, s_per_token)] if s_per_token else []
    return {
        "ttft": [make_cells(AT_ARRIVAL, at.records), *queue],
        "tpot": [in_flight],
        "itl": [in_flight],
        "e2e": [make_cells(OUTPUT_TOKENS, at.records)] if planned else [],
    }


def _queue(at: _Level) -> float | None:
    """Return s per input token, where the prompts' schedule and lengths were fixed before."""
    found = at.values("ttft")
    if no_values(found) or any(
        meta["kind"] != "open"
        or meta.get("played_sessions")
        or np.isnan(level.planned.input_tokens_planned).any()
        for meta, level in zip(at.metas, at.records, strict=True)
    ):
        return None
    ttft_s = [np.full(level.n, np.nan) for level in at.records]
    for seconds, o in zip(ttft_s, found, strict=True):
        seconds[o.owner] = o.values
    return fit_queue([level.planned for level in at.records], ttft_s)


def _histogram(found: Sequence[Observations]) -> dict[str, Any]:
    weights = np.concatenate([weights_of(o) for o in found])
    return {
        "hdr": encode_seconds(np.concatenate([o.values for o in found]), weights),
        "unit": "us",
        "n": sum(o.n for o in found),
        "infinite": sum(o.n_infinite + o.n_censored for o in found),
    }
