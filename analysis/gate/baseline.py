"""Collect the facts of earlier runs that a gate needs, small enough to commit (baseline_file.py)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ampacity.analysis.change import samples
from ampacity.analysis.change.comparable import check_distinct, check_same, identity
from ampacity.analysis.change.judged import CompareError, Judged, carried, warmup_of
from ampacity.analysis.change.quantiles import MOST_TOLERANCE, SAME, rounded, track
from ampacity.analysis.contract.stage import Stage
from ampacity.analysis.gate.baseline_file import KIND, SCHEMA_VERSION
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
    head = {"identity": identity(first), "realised": first.realised()}
    for other in runs[1:]:
        check_same(head, other)
    check_distinct(runs)
    unfit = [{name: why for name, s in run.levels().items() if (why := _unfit(s))} for run in runs]
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
        **head,
        "slos": [s.text for s in first.summary.slos],
        "runs": [run.origin() for run in runs],
        "capacity_rps": _capacity(runs),
        "levels": {name: _level(runs, name, len(names)) for name in names},
    }


def _unfit(stage: Stage) -> str | None:
    """Return why a load level cannot be part of a baseline; None where it can."""
    n, left_out = stage.requests, sum(stage.errors.get(status, 0) for status in LEFT_OUT)
    failed = n - stage.ok - left_out
    if stage.client_limited:
        return "the client was the limit (use a quieter or larger machine)"
    if not carried(stage):
        lower = "use a lower load or a longer --duration"
        return f"no steady state ({stage.stable_reason}): {lower}"
    if n < REQUESTS_MIN:
        return f"{n} requests after the warm-up, {REQUESTS_MIN} are needed: use a longer --duration"
    if not stage.ok or failed > ERROR_SHARE * n:
        return (
            f"{failed} of {n} requests failed or were in flight at cutoff: with more than "
            f"{ERROR_SHARE:.0%} nothing would ever pass; lower the load or run longer"
        )
    return None


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
    known = [
        (c.capacity_rps, c.capacity_rps_ci[0] or 0.0, c.capacity_rps_ci[1])
        for c in (r.summary.capacity for r in runs)
        if c.capacity_rps and c.capacity_rps_ci and c.capacity_rps_ci[1] is not None
    ]
    if len(known) < len(runs):
        return None
    values, lows, highs = zip(*known, strict=True)
    return {"value": float(np.mean(values)), "bracket": [min(lows), max(highs)]}


def _level(runs: Sequence[Judged], name: str, n_levels: int) -> dict[str, Any]:
    stages = [run.levels()[name] for run in runs]
    skipped = max(map(warmup_of, stages))
    records = [run.read(s, skipped) for run, s in zip(runs, stages, strict=True)]
    short = min(level.n for level in records)
    if short < REQUESTS_MIN:
        raise CompareError(
            f"{runs[0].run.path}: {name} has {short} requests after its warm-up, "
            f"{REQUESTS_MIN} are needed: use a longer --duration"
        )
    first, rates = stages[0], [stage.output_tokens_per_s for stage in stages]
    kind, metas = first.kind, [run.meta_of(s) for run, s in zip(runs, stages, strict=True)]
    fixed = all(m.kind == "open" and not m.played_sessions for m in metas)
    values = {m: [level.metrics[m] for level in records] for m in samples.METRICS}
    cells = _cells(records, values["ttft"], fixed)
    quantiles, untracked = _quantiles(
        records, values, cells, kind, n_levels * (len(samples.TRACKED) + 2)
    )
    if not quantiles:
        listed = "; ".join(f"{metric}: {why}" for metric, why in untracked.items())
        where = f"{runs[0].run.path}: {name}"
        raise CompareError(f"{where} has no latency that a gate could track: {listed}")
    of_runs = list(zip(runs, stages, records, strict=True))
    return {
        "kind": kind,
        "offered_rps": first.offered_rps,
        "concurrency": first.concurrency_set,
        "skipped": skipped,
        "requests": [level.n for level in records],
        "schedules": [run.schedule(stage, level) for run, stage, level in of_runs],
        "errors": [samples.blocks_of(level.failed).as_dict() for level in records],
        "rates": [level.rates(kind).as_dict() for level in records],
        "client_delay_s": max(run.client_delay_s(stage) for run, stage, _ in of_runs),
        "output_tokens_per_s": None
        if None in rates
        else rounded(float(np.mean([r or 0.0 for r in rates]))),
        "slos": _slo_values(stages),
        "histograms": {m: _histogram(v) for m, v in values.items() if samples.no_values(v) is None},
        "quantiles": quantiles,
        "untracked": untracked,
        "cells": {metric: [c.as_dict() for c in held] for metric, held in cells.items()},
    }


def _quantiles(
    records: Sequence[samples.LevelRecords],
    values: Mapping[str, Sequence[Observations]],
    cells: Mapping[str, Sequence[samples.Cells]],
    kind: str,
    tests: int,
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return the tracked quantiles, and why the others are not tracked."""
    quantiles: dict[str, dict[str, Any]] = {}
    untracked = {
        metric: why for metric, found in values.items() if (why := samples.no_values(found))
    }
    for name, (metric, q) in samples.TRACKED.items():
        if metric in untracked:
            continue
        held = cells[metric]
        of_runs = [[c.of(level) for c in held] for level in records]
        measured = (
            [c.by in (samples.AT_ARRIVAL, samples.IN_FLIGHT) for c in held]
            if kind == "open"
            else None
        )
        entry = track(values[metric], q, of_runs, measured, tests)
        if isinstance(entry, str):
            untracked[name] = entry
        else:
            quantiles[name] = entry
    return quantiles, untracked


def _slo_values(stages: Sequence[Stage]) -> dict[str, float]:
    """Return values that a limit may be set on, in s, the largest of the runs.

    Those of the runs' own SLOs, and each p95, for which there is no tolerance.
    """
    found: dict[str, list[float | None]] = {
        f"{m}_p95": [getattr(s, f"{m}_s").p95 for s in stages] for m in samples.METRICS
    }
    for slo in {v.slo for s in stages for v in s.slo_verdicts}:
        found[slo.partition("=")[0]] = [
            v.value_s for s in stages for v in s.slo_verdicts if v.slo == slo
        ]
    return {
        name: max(v or 0.0 for v in values) for name, values in found.items() if None not in values
    }


def _cells(
    records: Sequence[samples.LevelRecords], ttft: Sequence[Observations], fixed: bool
) -> dict[str, list[samples.Cells]]:
    """Return the quantities that predict each metric (samples.py).

    ``fixed``: the prompts' schedule did not depend on the server.
    """
    planned = [level.planned for level in records]
    known = not any(np.isnan(p.input_tokens_planned).any() for p in planned)
    of_ttft = [samples.make_cells(samples.AT_ARRIVAL, records)]
    if fixed and known and not samples.no_values(ttft):
        seconds = [np.full(level.n, np.nan) for level in records]
        for ttft_s, o in zip(seconds, ttft, strict=True):
            ttft_s[o.owner] = o.values
        of_ttft.append(
            samples.make_cells(samples.QUEUE, records, samples.fit_queue(planned, seconds))
        )
    in_flight = [samples.make_cells(samples.IN_FLIGHT, records)]
    lengths = all((p.output_tokens_planned > 0).all() for p in planned)
    e2e = [samples.make_cells(samples.OUTPUT_TOKENS, records)] if lengths else []
    return {"ttft": of_ttft, "tpot": in_flight, "itl": in_flight, "e2e": e2e}


def _histogram(found: Sequence[Observations]) -> dict[str, Any]:
    return {
        "hdr": encode_seconds(*samples.pooled(found)),
        "unit": "us",
        "n": sum(o.n for o in found),
        "infinite": sum(o.n_infinite + o.n_censored for o in found),
    }
