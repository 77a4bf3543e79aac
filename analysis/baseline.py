"""What a gate has to know of earlier runs, small enough to commit (analysis/baseline_file.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from analysis.baseline_file import KIND, SCHEMA_VERSION
from analysis.blocks import (
    METRICS,
    QUANTILES,
    Blocks,
    LevelRecords,
    Marks,
    as_dict,
    blocks_of,
    blocks_over,
    level_records,
    over_each,
    pooled_marks,
)  # fmt: skip
from analysis.caveats import ERROR_SHARE
from analysis.comparable import CompareError, Judged, carried, check_realised, check_same, identity, realised
from analysis.expected import Queue, fit_queue, table_of
from analysis.hdr import encode_seconds
from analysis.intervals import smallest_n
from analysis.observations import Observations
from analysis.regression import ALPHA, ASSUMED_NOISE, Estimate, compare_shares, student_quantile
from analysis.throughput import REQUESTS_MIN

DEFAULT_TOLERANCE = 0.03
TAIL_TOLERANCES = (0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0)
_SURE = 0.95  # chance that two equal runs pass with a tolerance that their noise allows


def make_baseline(runs: Sequence[Judged]) -> dict[str, Any]:
    """The content of a baseline file. Raises CompareError where the runs do not belong together or are no evidence."""
    first = runs[0]
    for other in runs[1:]:
        check_same(identity(first), identity(other), str(other.run.path))
        check_realised(realised(first), realised(other), str(other.run.path))
    if len({(r.run.meta["run_id"], r.run.meta["started_utc"]) for r in runs}) < len(runs):
        raise CompareError("a run is given twice: noise is learned from different runs")
    shared = set.intersection(*(_steady(run) for run in runs))
    names = [name for name in first.levels() if name in shared]
    if not names:
        told = "; ".join(f"{name}: {why}" for run in runs for name, why in _unfit(run).items())
        raise CompareError(f"no load level of these runs can be a baseline: {told}")
    return {
        "kind": KIND, "schema_version": SCHEMA_VERSION, "identity": identity(first), "realised": realised(first),
        "slos": [s["text"] for s in first.summary["slos"]], "runs": [_origin(run) for run in runs],
        "usable_rps": _usable(runs), "levels": {name: _level(runs, name) for name in names},
    }  # fmt: skip


def _steady(run: Judged) -> set[str]:
    return {name for name in run.levels() if name not in _unfit(run)}


def _unfit(run: Judged) -> dict[str, str]:
    """Why each load level that cannot be one of a baseline is none."""
    found = {}
    for name, (_, stage) in run.levels().items():
        n, failed = stage["requests"], stage["requests"] - stage["ok"] - stage["errors"].get("cancelled", 0)
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


def _usable(runs: Sequence[Judged]) -> dict[str, Any] | None:
    """The bracket that holds the usable rate of all runs; None where one of them has none, or no upper end."""
    capacities = [r.summary["capacity"] for r in runs]
    if not all(
        c["usable_rps"] and c["usable_rps_ci"] and c["usable_rps_ci"][1] is not None for c in capacities
    ):
        return None
    return {
        "value": float(np.mean([c["usable_rps"] for c in capacities])),
        "bracket": [min(c["usable_rps_ci"][0] for c in capacities), max(c["usable_rps_ci"][1] for c in capacities)],
    }  # fmt: skip


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
    return f"{records.schedule}-{run.run.meta.get('seed')}-{meta.get('schedule', meta.get('index'))}"


def _level(runs: Sequence[Judged], name: str) -> dict[str, Any]:
    stages = [run.levels()[name][1] for run in runs]
    skipped = max(int(s["window"]["warmup_requests"] or 0) for s in stages)
    levels = [read_level(run, name, skipped) for run in runs]
    short = min(level.n for level in levels)
    if short < REQUESTS_MIN:
        raise CompareError(f"{runs[0].run.path}: {name} has {short} requests after its warm-up, {REQUESTS_MIN} are needed: use a longer --duration")  # fmt: skip
    quantiles, untracked, histograms = {}, {}, {}
    queue = _queue(runs, name, levels)
    for metric in METRICS:
        found = [level.metrics[metric] for level in levels]
        reason = next((o.reason or "no request has a value" for o in found if not o.n or o.reason), None)
        if reason:
            untracked[metric] = reason
            continue
        histograms[metric] = _histogram(found)
        for percentile, q in QUANTILES.items():
            explained = metric == "ttft" and queue
            cells = [explained.cells(level.cohort.requests) for level in levels] if explained else None
            entry = _quantile(found, q, None if percentile == "p99" else DEFAULT_TOLERANCE, cells)
            if isinstance(entry, str):
                untracked[f"{metric}_{percentile}"] = entry
            else:
                quantiles[f"{metric}_{percentile}"] = entry
    if not quantiles:
        told = "; ".join(f"{metric}: {why}" for metric, why in untracked.items())
        raise CompareError(f"{runs[0].run.path}: {name} has no latency that a gate could track: {told}")
    return {
        "kind": stages[0]["kind"], "offered_rps": stages[0]["offered_rps"], "concurrency": stages[0]["concurrency_set"],
        "skipped": skipped, "requests": [level.n for level in levels],
        "schedules": [schedule_of(run, name, level) for run, level in zip(runs, levels, strict=True)],
        "errors": [as_dict(blocks_of(level.failed)) for level in levels],
        "rates": [as_dict(level.rates(stages[0]["kind"])) for level in levels],
        "client_delay_s": max(client_delay_s(run, name) for run in runs),
        "output_tokens_per_s": _round(float(np.mean([s["output_tokens_per_s"] for s in stages]))),
        "slos": _limited(stages), "histograms": histograms, "quantiles": quantiles, "untracked": untracked, "queue": queue and queue.as_dict(),
    }  # fmt: skip


def _limited(stages: Sequence[dict[str, Any]]) -> dict[str, float]:
    """What a limit may be set on and no tolerance: the runs' own SLOs and each p95, in s; the greatest of the runs."""
    found: dict[str, list[float | None]] = {
        f"{m}_p95": [s[f"{m}_s"].get("p95") for s in stages] for m in METRICS
    }
    for slo in {v["slo"] for s in stages for v in s["slo_verdicts"]}:
        found[slo.partition("=")[0]] = [
            v["value_s"] for s in stages for v in s["slo_verdicts"] if v["slo"] == slo
        ]
    return {name: max(v or 0.0 for v in values) for name, values in found.items() if None not in values}


def _queue(runs: Sequence[Judged], name: str, levels: Sequence[LevelRecords]) -> Queue | None:
    """Where the schedule does not depend on the server, and says how long the prompts were."""
    metas = [run.levels()[name][0] for run in runs]
    found = [level.metrics["ttft"] for level in levels]
    if any(
        meta["kind"] != "open" or meta.get("played_sessions") or o.reason or not o.n
        or np.isnan(level.cohort.requests.input_tokens_planned).any()
        for meta, level, o in zip(metas, levels, found, strict=True)
    ):  # fmt: skip
        return None
    ttft_s = [np.full(level.n, np.nan) for level in levels]
    for seconds, o in zip(ttft_s, found, strict=True):
        seconds[o.owner] = o.values
    return fit_queue([level.cohort.requests for level in levels], ttft_s)


def _histogram(found: Sequence[Observations]) -> dict[str, Any]:
    weights = [np.ones(len(o.values)) if o.weights is None else o.weights for o in found]
    text = encode_seconds(np.concatenate([o.values for o in found]), np.concatenate(weights))
    return {"hdr": text, "unit": "us", "n": sum(o.n for o in found), "infinite": sum(o.n_infinite + o.n_censored for o in found)}  # fmt: skip


def _quantile(
    found: Sequence[Observations], q: float, tolerance: float | None, cells: Sequence[Any] | None
) -> dict[str, Any] | str:
    """One tracked quantile, or the reason why it is not tracked. ``cells``: of each run's requests, where there is a queue."""
    few = min(o.n_owners for o in found)
    if few < smallest_n(q):
        return f"needs {smallest_n(q)} requests, has {few}"
    marks = pooled_marks(found, q)
    if isinstance(marks, str):
        return marks
    expected: dict[str, Any] = {}
    explained: list[Any] = [None] * len(found)
    if cells is not None:
        counted = [o.sizes > 0 for o in found]
        over = [over_each(o, marks)[c] for o, c in zip(found, counted, strict=True)]
        table = table_of([x[c] for x, c in zip(cells, counted, strict=True)], over, 1 - q)
        explained, expected = [table[x] for x in cells], {"expected": [round(x, 4) for x in table.tolist()]}
    base = [blocks_over(o, marks, explained=x) for o, x in zip(found, explained, strict=True)]
    noise = assumed_noise(found, marks.limits_s, 1 - q)
    tolerances: dict[str, float | None] = {"same_schedule": tolerance, "other_schedule": tolerance}
    if tolerance is None:
        tolerances = _allowed(found, marks, q, base, noise)
    return {
        "value_s": float(np.median(marks.limits_s)), "marks_s": [_round(x) for x in marks.limits_s.tolist()],
        "noise": float(f"{noise:.4g}"), "tolerance": tolerances, "runs": [as_dict(b) for b in base], **expected,
    }  # fmt: skip


def assumed_noise(found: Sequence[Observations], limits_s: Any, share: float | None = None) -> float:
    """How far the share over these limits (``share``, where it is known better) moves when a run is slower by ASSUMED_NOISE.

    By the secant over the default tolerance: a plateau has no other slope.
    """

    def above(limits: Any) -> float:
        return sum(float(o.shares_over(limits).mean()) * o.n for o in found) / sum(o.n for o in found)

    here = above(limits_s) if share is None else share
    return max(0.0, here - above(limits_s * (1 + DEFAULT_TOLERANCE))) * ASSUMED_NOISE / DEFAULT_TOLERANCE


def noise_slope(found: Sequence[Observations], limits_s: Any, noise: float) -> float:
    """How much less the share over ``limits_s`` moves by the noise of a run's speed than the baseline's over its quantile."""
    return min(1.0, assumed_noise(found, limits_s) / noise) if noise else 1.0


def _allowed(
    found: Sequence[Observations], marks: Marks, q: float, base: list[Blocks], noise: float
) -> dict[str, float | None]:
    """The least tolerance at which a run like these would pass in 95 of 100 cases, found before any candidate."""
    allowed: dict[str, float | None] = {"same_schedule": None, "other_schedule": None}
    for tolerance in reversed(TAIL_TOLERANCES):
        like = [
            replace(blocks_over(o, marks.times(1 + tolerance)), explained=b.explained)
            for o, b in zip(found, base, strict=True)
        ]
        apart = [b.adjusted() for b in base], [b.adjusted() for b in like]
        slope = noise_slope(found, marks.limits_s * (1 + tolerance), noise)
        for name in allowed:
            e = compare_shares(*apart, 1 - q, paired=False, noise=noise, slope=slope)
            if name == "same_schedule":  # the candidate's noise will be its own, not this run's again
                alike = compare_shares(base, like, 1 - q, paired=True, noise=noise, slope=slope)
                e = Estimate(e.worse, min(e.within, 2 * alike.within), alike.between, alike.df)
            needed = student_quantile(1 - ALPHA, e.df) + student_quantile(_SURE, math.inf)
            if e.worse + needed * e.se <= 0:
                allowed[name] = tolerance
    return allowed


def _round(value: float) -> float:
    return float(f"{value:.6g}")
