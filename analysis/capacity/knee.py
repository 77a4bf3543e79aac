"""The knee of a sweep: the region between two of its loads where p99 diverges from p50.

Beside it the corner of the asymptotic bounds of throughput. The capacity within the SLOs
(``ampacity.analysis.capacity.limit``) is the number to publish.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ampacity.analysis.capacity.levels import number_text, stage_rate
from ampacity.analysis.contract.capacity import Knee, KneeMethod
from ampacity.analysis.contract.figures import Percentiles
from ampacity.analysis.contract.part import with_nulls
from ampacity.analysis.contract.stage import Stage
from ampacity.analysis.contract.summary import Summary
from ampacity.analysis.stats.scalability import corner_of_bounds

MIN_STAGES = 4
DIVERGENCE_FACTOR = 2.0
NOISE_FACTOR = 1.5  # a ratio nearer to the threshold than this may lie on either side of it
QUIET_LOADS = {"p99": 1, "p95": 2}
"""A stage near the knee may by chance hold no queue, the shorter the likelier: so many loads before
it count as well."""
BEFORE = {"p99": "p95", "p95": "p90"}
LOW_STAGES = 3  # so many of the lowest loads give the level
METRICS = ("ttft_from_schedule_s", "e2e_from_schedule_s")
WIDEST_REGION = 2.0  # upper over lower end of a region, in requests/s; a wider one says nothing
REGION_END = 1.05  # rates up to this times a region's upper end count as within it


@dataclass(frozen=True)
class _Point:
    """A steady or saturated load; ratios are over the median."""

    concurrency: float
    rps: float
    arrived_rps: float  # by chance more or less than that
    ratio: float  # of the tail percentile, inf where failures reach into it
    least: float  # what it is at least, within its noise
    most: float  # at most; inf where the stage is too short to say


def find_knee(stages: Sequence[Stage]) -> Knee:
    """Return the knee, from stage objects in any order.

    Open ones where there are any, else closed ones. Client-limited stages are left out. The figures
    of the knee are those of the divergence.
    """
    kind = "open" if any(s.kind == "open" for s in stages) else "closed"
    usable = [
        s
        for s in stages
        if s.kind == kind and not s.client_limited and s.concurrency > 0 and s.achieved_rps > 0
    ]
    set_load = "offered_rps" if kind == "open" else "concurrency_set"
    usable.sort(key=lambda s: float(getattr(s, set_load) or s.concurrency))
    if len(usable) < MIN_STAGES:
        found, methods = _null(f"needs {MIN_STAGES} usable stages, has {len(usable)}"), {}
    else:
        found = _divergence(usable)
        methods = {"p99_p50_divergence": found, "bounds": _bounds(usable)}
    return Knee(
        concurrency=found.concurrency,
        rps=found.rps,
        region=found.range,
        region_rps=found.range_rps,
        reason=found.reason,
        methods=methods,
    )


def _divergence(stages: Sequence[Stage]) -> KneeMethod:
    """Return the loads between which p99/p50 first exceeds ``DIVERGENCE_FACTOR`` x its low level.

    Loads are read from the lowest upwards, up to the first that is shown to be above the threshold
    by ``NOISE_FACTOR``: what lies beyond is ignored. The range begins at the last load before it
    whose interval lies below the threshold, or ``QUIET_LOADS`` before the last figure below it. In
    requests/s it spans what was offered and what arrived by chance. The level is the median of the
    ``LOW_STAGES`` lowest that are not above. The percentile is the highest that the lowest load
    supports (p99, else p95).
    """
    found = next(
        (
            (m, t)
            for m in METRICS
            for s in stages[:2]
            for t in ("p99", "p95")
            if _has(getattr(s, m), t)
        ),
        None,
    )
    if found is None:
        return _null(
            "the two lowest loads support neither p99 nor p95 of a latency: run them longer"
        )
    metric, tail = found
    points = [p for s in stages if (p := _point(s, metric, tail)) is not None]
    level, below, above = points[0].ratio, 0, 0
    for k, point in enumerate(points):
        threshold = DIVERGENCE_FACTOR * level
        if point.least > NOISE_FACTOR * threshold:
            above = k
            break
        if k < LOW_STAGES and point.ratio <= threshold:
            level = float(np.median([p.ratio for p in points[: k + 1]]))
            threshold = DIVERGENCE_FACTOR * level
        if point.most < threshold:
            below = k
        elif point.ratio < threshold / NOISE_FACTOR:
            below = max(below, k - QUIET_LOADS[tail])
    threshold = DIVERGENCE_FACTOR * level
    if not above:
        return _null(_beyond_all(points, f"{tail}/p50 of {metric}", level))
    what = (
        f"{tail}/p50 of {metric}, {DIVERGENCE_FACTOR:g} times the {level:.2f} of the lowest loads"
    )
    between = points[below : above + 1]
    a, b = next((a, b) for a, b in pairwise(between) if b.ratio > threshold)
    share = _share(a.ratio, b.ratio, threshold)
    in_flight = [p.concurrency for p in between]
    rates = [rate for p in between for rate in (p.rps, p.arrived_rps)]
    return KneeMethod(
        concurrency=a.concurrency ** (1 - share) * b.concurrency**share,
        rps=a.rps ** (1 - share) * b.rps**share,
        range=(min(in_flight), max(in_flight)),
        range_rps=(min(rates), max(rates)),
        reason=None,
        definition=what,
    )


def _beyond_all(points: Sequence[_Point], figure: str, level: float) -> str:
    """Return why no load is shown to lie above the threshold."""
    top = max(points, key=lambda p: p.ratio if math.isfinite(p.ratio) else p.least)
    seen = (
        f"{figure} is {level:.2f} at the lowest loads and {top.ratio:.2f} at {top.concurrency:.3g} "
        "in flight"
    )
    if top.ratio > DIVERGENCE_FACTOR * level:
        return f"in doubt: {seen}, too few requests to tell if it has doubled: use longer stages"
    return f"not reached: {seen}, the most of all loads; a knee is where it doubles"


def _share(low: float, high: float, threshold: float) -> float:
    """Return where between two ratios the threshold lies, on a log scale, 0 to 1."""
    if not math.isfinite(high):
        return 0.5
    return max(math.log(threshold / low), 0.0) / math.log(high / min(low, threshold))


def _has(figures: Percentiles, tail: str) -> bool:
    return bool(figures.p50 and getattr(figures, tail))


def _point(stage: Stage, metric: str, tail: str) -> _Point | None:
    """Return a stage as a point of the sweep; None where it does not support the tail.

    The tail is at least the lower end of p99's interval, or the percentile before it: of some
    hundred requests p90 is about the lower end of p95's, p95 of p99's.
    """
    figures: Percentiles = getattr(stage, metric)
    failed = figures.p50 and str(getattr(figures, f"{tail}_reason")).startswith("infinite")
    if not failed and not _has(figures, tail):
        return None
    value = math.inf if failed else getattr(figures, tail)
    low, high = (tail == "p99" and figures.p99_ci) or (None, None)
    least = max((v for v in (low, getattr(figures, BEFORE[tail])) if v), default=value)
    p50 = figures.p50 or math.nan
    rps = stage_rate(stage) or stage.achieved_rps
    return _Point(
        stage.concurrency,
        rps,
        stage.arrived_rps,
        value / p50,
        (value if failed else least) / p50,
        (high or math.inf) / p50,
    )


def _bounds(stages: Sequence[Stage]) -> KneeMethod:
    """Return the corner of the asymptotic bounds."""
    x, y = (
        np.array([getattr(s, name) for s in stages]) for name in ("concurrency", "achieved_rps")
    )
    corner = corner_of_bounds(x, y, any(s.stable is False for s in stages))
    if corner is None:
        return _null("throughput was still growing at the top: no ceiling is known")
    what = "time in flight at the lowest load x the highest throughput"
    return with_nulls(KneeMethod, concurrency=corner[0], rps=corner[1], definition=what)


def _null(reason: str) -> KneeMethod:
    """Return a method without a finding."""
    return with_nulls(KneeMethod, reason=reason)


def at_knee(summary: Summary) -> str | None:
    """Return where the capacity lies, where latency bends at or below it."""
    rate, region = summary.capacity.capacity_rps, summary.knee.region_rps
    if not rate or not region or rate < region[0] or region[1] > WIDEST_REGION * region[0]:
        return None
    where = "within" if rate <= REGION_END * region[1] else "above"
    return f"{where} the knee region of {number_text(region[0])} to {number_text(region[1])} req/s"


def knee_region(summary: Summary) -> str | None:
    """Warn where little is left above the capacity."""
    where, rate = at_knee(summary), summary.capacity.capacity_rps
    return where and (
        f"The capacity of {number_text(rate)} req/s lies {where}: there latency rises faster than "
        "the load, and a little more of it violates the SLO."
    )
