"""What a gate has to know of earlier runs, small enough to commit (analysis/change/baseline_file.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ampacity.analysis.change.baseline_file import KIND, SCHEMA_VERSION
from ampacity.analysis.change.blocks import (
    METRICS,
    TRACKED,
    LevelRecords,
    as_dict,
    blocks_beside,
    blocks_of,
    blocks_over,
    level_records,
    over_each,
    pooled_marks,
)
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
from ampacity.analysis.change.expected import (
    AT_ARRIVAL,
    IN_FLIGHT,
    OUTPUT_TOKENS,
    QUEUE,
    Cells,
    expected_of,
    fit_queue,
    make_cells,
    tables_of,
)
from ampacity.analysis.change.tracked import DEFAULT_TOLERANCE as DEFAULT_TOLERANCE
from ampacity.analysis.change.tracked import (
    MOST_TOLERANCE,
    SAME,
    Explained,
    Own,
    Tracked,
    amplified_by_load,
    rounded,
)
from ampacity.analysis.change.tracked import assumed_noise as assumed_noise
from ampacity.analysis.metrics.hdr import encode_seconds
from ampacity.analysis.metrics.observations import Observations
from ampacity.analysis.metrics.requests import Floats, Ints
from ampacity.analysis.stage.throughput import REQUESTS_MIN
from ampacity.analysis.stats.intervals import smallest_n
from ampacity.analysis.warnings import ERROR_SHARE
from ampacity.loadgen.rundir.records import LEFT_OUT

NEAR_LOAD = 0.8
NEAR_SATURATION = (
    "near saturation a small change of speed makes a large one of the queue, and so does chance: compare old and new in one run "
    "with ampacity ab, or gate at a lower load"
)


def make_baseline(runs: Sequence[Judged]) -> dict[str, Any]:
    """The content of a baseline file. Raises CompareError where the runs do not belong together or are no evidence."""
    first = runs[0]
    for other in runs[1:]:
        check_same(identity(first), identity(other), str(other.run.path))
        check_realised(realised(first), realised(other), str(other.run.path))
    check_distinct(runs)
    shared = set.intersection(*(_steady(run) for run in runs))
    names = [name for name in first.levels() if name in shared]
    if not names:
        told = "; ".join(f"{name}: {why}" for run in runs for name, why in _unfit(run).items())
        raise CompareError(f"no load level of these runs can be a baseline: {told}")
    return {
        "kind": KIND,
        "schema_version": SCHEMA_VERSION,
        "identity": identity(first),
        "realised": realised(first),
        "slos": [s["text"] for s in first.summary["slos"]],
        "runs": [_origin(run) for run in runs],
        "capacity_rps": _usable(runs),
        "levels": {name: _level(runs, name, len(names)) for name in names},
    }


def _steady(run: Judged) -> set[str]:
    return {name for name in run.levels() if name not in _unfit(run)}


def _unfit(run: Judged) -> dict[str, str]:
    """Why each load level that cannot be one of a baseline is none."""
    found = {}
    for name, (_, stage) in run.levels().items():
        n, left_out = stage["requests"], sum(stage["errors"].get(status, 0) for status in LEFT_OUT)
        failed = n - stage["ok"] - left_out
        if stage["client_limited"]:
            found[name] = "the client was the limit (use a quieter or larger machine)"
        elif not carried(stage):
            found[name] = (
                f"no steady state ({stage['stable_reason']}): use a lower load or a longer --duration"
            )
        elif n < REQUESTS_MIN:
            found[name] = (
                f"{n} requests after the warm-up, {REQUESTS_MIN} are needed: use a longer --duration"
            )
        elif not stage["ok"] or failed > ERROR_SHARE * n:
            found[name] = (
                f"{failed} of {n} requests failed or were cut off unfinished: with more than {ERROR_SHARE:.0%} nothing would ever pass; lower the load or run longer"
            )
    return found


def _origin(run: Judged) -> dict[str, Any]:
    meta, locked = run.run.meta, run.run.meta.get("locked") or {}
    found = {name: meta.get(name) for name in ("run_id", "started_utc", "seed")}
    found["requests"] = run.summary["requests"]
    return found | {
        name: locked.get(name) for name in ("engine", "engine_version", "quantization", "hardware")
    }


def near_saturation(base: Mapping[str, Any]) -> list[str]:
    """Load levels at NEAR_LOAD of the capacity or above, or at which no tolerance can be held for most quantiles."""
    usable = base["capacity_rps"] and base["capacity_rps"]["value"]
    found = []
    for name, level in base["levels"].items():
        near = bool(usable and level["offered_rps"] and level["offered_rps"] >= NEAR_LOAD * usable)
        tolerances = [
            q["tolerance"][SAME] for k, q in level["quantiles"].items() if not k.endswith("p99")
        ]
        watched = sum(t is None or t > MOST_TOLERANCE for t in tolerances)
        if near or 2 * watched > len(tolerances):
            found.append(name)
    return found


def _usable(runs: Sequence[Judged]) -> dict[str, Any] | None:
    """The bracket that holds the capacity of all runs; None where one of them has none, or no upper end."""
    capacities = [r.summary["capacity"] for r in runs]
    if not all(
        c["capacity_rps"] and c["capacity_rps_ci"] and c["capacity_rps_ci"][1] is not None
        for c in capacities
    ):
        return None
    return {
        "value": float(np.mean([c["capacity_rps"] for c in capacities])),
        "bracket": [
            min(c["capacity_rps_ci"][0] for c in capacities),
            max(c["capacity_rps_ci"][1] for c in capacities),
        ],
    }


def read_level(run: Judged, name: str, skipped: int) -> LevelRecords:
    """The records of one load level without its first requests."""
    meta, stage = run.levels()[name]
    drained = meta.get("drained_ns") or meta.get("end_ns") or 0
    return level_records(run.records, stage["index"], skipped, float(drained) - run.origin_ns)


def client_delay_s(run: Judged, name: str) -> float:
    """How late the client itself was at p99: its requests' start, and the reading of what had no date by then."""
    audit = run.levels()[name][0].get("audit") or {}
    late_s = 0.0 if audit.get("dated_by_kernel") else audit.get("receive_delay_p99_s") or 0.0
    return float((audit.get("slip_p99_s") or 0.0) + late_s)


def schedule_of(run: Judged, name: str, records: LevelRecords) -> str | None:
    """Names what was sent when; equal in runs whose blocks hold the same requests. Closed loops have no such name."""
    meta, stage = run.levels()[name]
    if stage["kind"] == "closed":
        return None
    return (
        f"{records.schedule}-{run.run.meta.get('seed')}-{meta.get('schedule', meta.get('index'))}"
    )


def _level(runs: Sequence[Judged], name: str, n_levels: int) -> dict[str, Any]:
    stages = [run.levels()[name][1] for run in runs]
    skipped = max(int(s["window"]["warmup_requests"] or 0) for s in stages)
    levels = [read_level(run, name, skipped) for run in runs]
    short = min(level.n for level in levels)
    if short < REQUESTS_MIN:
        raise CompareError(
            f"{runs[0].run.path}: {name} has {short} requests after its warm-up, {REQUESTS_MIN} are needed: use a longer --duration"
        )
    quantiles, untracked, histograms = {}, {}, {}
    cells = _cells(runs, name, levels)
    tests = n_levels * (len(TRACKED) + 2)
    for metric in METRICS:
        found = [level.metrics[metric] for level in levels]
        reason = next(
            (o.reason or "no request has a value" for o in found if not o.n or o.reason), None
        )
        if reason:
            untracked[metric] = reason
            continue
        histograms[metric] = _histogram(found)
        held = [[c.of(level) for c in cells[metric]] for level in levels]
        measured = [c.by in (AT_ARRIVAL, IN_FLIGHT) for c in cells[metric]]
        for tracked, (of, q) in TRACKED.items():
            if of != metric:
                continue
            entry = _quantile(
                found, q, held, measured if stages[0]["kind"] == "open" else None, tests
            )
            if isinstance(entry, str):
                untracked[tracked] = entry
            else:
                quantiles[tracked] = entry
    if not quantiles:
        told = "; ".join(f"{metric}: {why}" for metric, why in untracked.items())
        raise CompareError(
            f"{runs[0].run.path}: {name} has no latency that a gate could track: {told}"
        )
    rates = [stage["output_tokens_per_s"] for stage in stages]
    return {
        "kind": stages[0]["kind"],
        "offered_rps": stages[0]["offered_rps"],
        "concurrency": stages[0]["concurrency_set"],
        "skipped": skipped,
        "requests": [level.n for level in levels],
        "schedules": [
            schedule_of(run, name, level) for run, level in zip(runs, levels, strict=True)
        ],
        "errors": [as_dict(blocks_of(level.failed)) for level in levels],
        "rates": [as_dict(level.rates(stages[0]["kind"])) for level in levels],
        "client_delay_s": max(client_delay_s(run, name) for run in runs),
        "output_tokens_per_s": None if None in rates else rounded(float(np.mean(rates))),
        "slos": _limited(stages),
        "histograms": histograms,
        "quantiles": quantiles,
        "untracked": untracked,
        "cells": {metric: [c.as_dict() for c in held] for metric, held in cells.items()},
    }


def _limited(stages: Sequence[dict[str, Any]]) -> dict[str, float]:
    """What a limit may be set on and no tolerance: the runs' own SLOs and each p95, in s; the greatest of the runs."""
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


def _cells(
    runs: Sequence[Judged], name: str, levels: Sequence[LevelRecords]
) -> dict[str, list[Cells]]:
    """What each metric is expected by (analysis/change/expected.py)."""
    in_flight = make_cells(IN_FLIGHT, levels)
    planned = all((level.planned.output_tokens_planned > 0).all() for level in levels)
    s_per_token = _queue(runs, name, levels)
    queue = [make_cells(QUEUE, levels, s_per_token)] if s_per_token else []
    return {
        "ttft": [make_cells(AT_ARRIVAL, levels), *queue],
        "tpot": [in_flight],
        "itl": [in_flight],
        "e2e": [make_cells(OUTPUT_TOKENS, levels)] if planned else [],
    }


def _queue(runs: Sequence[Judged], name: str, levels: Sequence[LevelRecords]) -> float | None:
    """Its s per input token, where the schedule does not depend on the server and says how long the prompts were."""
    metas = [run.levels()[name][0] for run in runs]
    found = [level.metrics["ttft"] for level in levels]
    if any(
        meta["kind"] != "open"
        or meta.get("played_sessions")
        or o.reason
        or not o.n
        or np.isnan(level.planned.input_tokens_planned).any()
        for meta, level, o in zip(metas, levels, found, strict=True)
    ):
        return None
    ttft_s = [np.full(level.n, np.nan) for level in levels]
    for seconds, o in zip(ttft_s, found, strict=True):
        seconds[o.owner] = o.values
    return fit_queue([level.planned for level in levels], ttft_s)


def _histogram(found: Sequence[Observations]) -> dict[str, Any]:
    weights = [np.ones(len(o.values)) if o.weights is None else o.weights for o in found]
    text = encode_seconds(np.concatenate([o.values for o in found]), np.concatenate(weights))
    return {
        "hdr": text,
        "unit": "us",
        "n": sum(o.n for o in found),
        "infinite": sum(o.n_infinite + o.n_censored for o in found),
    }


def _quantile(
    found: Sequence[Observations],
    q: float,
    cells: Sequence[Sequence[Ints]],
    measured: Sequence[bool] | None,
    tests: int,
) -> dict[str, Any] | str:
    """One tracked quantile, or the reason why it is not tracked. ``cells`` of each run's requests.

    ``measured``: which of them are of the run and not of its plan; None in a closed loop.
    """
    few, needed = min(o.n_owners for o in found), max(smallest_n(q), smallest_n(1 - q))
    if few < needed:
        return f"needs {needed} requests, has {few}"
    marks = pooled_marks(found, q)
    if isinstance(marks, str):
        return marks
    tables: Floats | None = None
    explained: Explained = [None] * len(found)
    base = [blocks_over(o, marks) for o in found] if not cells[0] else []
    if cells[0]:
        over = [over_each(o, marks) for o in found]
        of_all = [np.concatenate(c) for c in zip(*cells, strict=True)]
        tables = tables_of(
            of_all, np.concatenate(over), np.concatenate([o.sizes for o in found]), 1 - q
        )
        expected = [expected_of(tables, c) for c in cells]
        base = [blocks_beside(o, x, e) for o, x, e in zip(found, over, expected, strict=True)]
        explained = expected
    noise = assumed_noise(found, marks.limits_s, 1 - q)
    amplified = 1.0
    if measured is not None:  # what the plan alone explains is no less amplified by a slower run
        kept = None if tables is None else tables * np.array(measured)[:, None]
        alone = explained if kept is None else [expected_of(kept, c) for c in cells]
        amplified = amplified_by_load(found, marks, alone, noise)
    known = Tracked(q, marks, noise, amplified, base, tables, {})
    own = Own(known, found, explained)
    tolerances = own.tolerances()
    return replace(known, tolerance=tolerances).as_dict() | {"finds": own.finds(tolerances, tests)}
