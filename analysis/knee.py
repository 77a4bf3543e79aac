"""Where latency begins to rise faster than throughput: a region with its methods, never one bare number.

A knee depends on the range that was swept (Kneedle on M/M/1 says 0.80 or 0.90 of capacity); the SLO
crossing in ``analysis.capacity`` is the number to publish.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.metrics import Floats
from analysis.scalability import corner_of_bounds, fit_usl

MIN_STAGES = 4
DIVERGENCE_FACTOR = 2.0
MIN_RISE = 1.3  # of the mean time in flight over the sweep; below it throughput is proportional to load
MAX_SPAN = 8.0  # of a region: a factor beyond which it names no load
MAX_SPAN_RPS = 2.0
MIN_USL = 6
RESAMPLES = 60


@dataclass(frozen=True)
class Kneedle:
    """A knee of a curve, or None: ``index`` into the points, distance and threshold in scaled units."""

    index: int
    distance: float
    threshold: float


def kneedle(x: Floats, y: Floats, sensitivity: float = 1.0) -> Kneedle | None:
    """Knee of a concave increasing curve (Satopaa et al. 2011), without smoothing; x ascending.

    Both axes are scaled to [0, 1]; a local maximum of y - x is a knee when the difference falls below
    T = maximum - S mean(dx) before the next local maximum. The greatest such maximum is given.
    """
    spread_x, spread_y = float(np.ptp(x)), float(np.ptp(y))
    if len(x) < 3 or spread_x <= 0 or spread_y <= 0:
        return None
    scaled = (x - x.min()) / spread_x
    difference = (y - y.min()) / spread_y - scaled
    inner = np.arange(1, len(x) - 1)
    maxima = inner[(difference[inner] >= difference[inner - 1]) & (difference[inner] > difference[inner + 1])]
    step = sensitivity * float(np.mean(np.diff(scaled)))
    found: list[Kneedle] = []
    for k, index in enumerate(maxima):
        threshold = float(difference[index]) - step
        stop = maxima[k + 1] if k + 1 < len(maxima) else len(x)
        if np.any(difference[index + 1 : stop] < threshold):
            found.append(Kneedle(int(index), float(difference[index]), threshold))
    return max(found, key=lambda knee: knee.distance, default=None)


@dataclass(frozen=True)
class _Point:
    concurrency: float
    ratio: float  # tail percentile / median, inf where failures reach into the tail
    stable: bool


def find_knee(stages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The ``knee`` object, from stage objects in any order; client-limited stages are left out."""
    usable = [s for s in stages if not s["client_limited"] and s["concurrency"] > 0 and s["achieved_rps"] > 0]
    if len(usable) < MIN_STAGES:
        return _no_knee(f"needs {MIN_STAGES} usable stages, has {len(usable)}")
    usable.sort(key=lambda s: s["concurrency"])
    straight = _straight(usable)
    if straight:
        return _no_knee(straight)
    methods = {
        "p99_p50_divergence": _divergence(usable), "kneedle": _kneedle(usable), "usl": _usl(usable), "bounds": _bounds(usable),
    }  # fmt: skip
    x, y = (np.array([s[name] for s in usable]) for name in ("concurrency", "achieved_rps"))
    found = {n: m for n, m in methods.items() if m["concurrency"] is not None}
    for name, method in found.items():
        _widen(method, name, usable, x, y)
        method["rps"], method["range_rps"] = _rates(method["concurrency"], method["range"], x, y)
    if not found:
        reasons = "; ".join(f"{name}: {m['reason']}" for name, m in methods.items())
        return _no_knee(reasons) | {"methods": methods}
    group, disagreement = _agreeing(found)
    return _region(group, x, y) | {"disagreement": disagreement, "methods": methods}


def _straight(stages: list[dict[str, Any]]) -> str | None:
    """Why a sweep has no bend at all; None where something broke or requests stay longer as load rises.

    concurrency / rate is the mean time in flight (Little), whose inverse is the slope of throughput
    against concurrency.
    """
    if any(s["stable"] is False or s["slo_met"] is False for s in stages):
        return None
    stays = [s["concurrency"] / s["achieved_rps"] for s in stages]
    low = float(np.median(stays[: max(2, len(stages) // 3)]))
    rise = float(np.median(stays[-2:])) / low
    if rise >= MIN_RISE:
        return None
    return (
        "no SLO broke and throughput is still proportional to the requests in flight: their mean time in flight at "
        f"the top is {rise:.2f} times that at low load (a bend needs {MIN_RISE:g}); try higher loads"
    )


def _agreeing(found: dict[str, dict[str, Any]]) -> tuple[list[dict[str, Any]], str | None]:
    """The largest group of methods whose ranges have a load in common, if it is more than half; else all of them."""
    ends = [end for m in found.values() for end in m["range"]]
    common = max(ends, key=lambda at: sum(m["range"][0] <= at <= m["range"][1] for m in found.values()))
    group = {n: m for n, m in found.items() if m["range"][0] <= common <= m["range"][1]}
    if len(group) == len(found):
        return list(found.values()), None
    said = "; ".join(f"{n} {m['range'][0]:.3g} to {m['range'][1]:.3g} in flight" for n, m in found.items())
    if 2 * len(group) > len(found):
        apart = ", ".join(n for n in found if n not in group)
        return list(group.values()), f"{apart} sees the bend elsewhere and is left out of the region: {said}"
    return list(found.values()), f"the methods disagree, so the region rests on them all: {said}"


def _widen(method: dict[str, Any], name: str, stages: list[dict[str, Any]], x: Floats, y: Floats) -> None:
    """Stretch a method's range to the 95 % of ``RESAMPLES`` parametric bootstrap samples of the stages' own noise."""
    metric, tail = _best_percentile(stages)
    ratio = np.array([_ratio(s[metric], tail) if metric else math.inf for s in stages])
    noise = np.array([1 / math.sqrt(max(s["requests"], 1)) for s in stages])
    spread = np.array([_log_spread(s[metric]) if metric else 0.0 for s in stages])
    rng, found = np.random.default_rng(1), []
    saturated = any(s["stable"] is False for s in stages)
    for _ in range(RESAMPLES):
        near_x = x * np.exp(3 * noise * rng.standard_normal(len(x)))  # queues remember: more than Poisson
        near_y = y * np.exp(noise * rng.standard_normal(len(y)))
        again = [
            {**s, "concurrency": float(a), "achieved_rps": float(b), "_ratio": float(r)}
            for s, a, b, r in zip(stages, near_x, near_y, ratio * np.exp(spread * rng.standard_normal(len(x))), strict=True)
        ]  # fmt: skip
        order = np.argsort(near_x, kind="stable")
        at = _point(name, [again[i] for i in order], near_x[order], near_y[order], saturated)
        if at is not None:
            found.append(at)
    if len(found) >= RESAMPLES // 2:
        low, high = np.quantile(found, [0.025, 0.975])
        method["range"] = [min(method["range"][0], float(low)), max(method["range"][1], float(high))]


def _point(name: str, stages: list[dict[str, Any]], x: Floats, y: Floats, saturated: bool) -> float | None:
    if name == "usl":
        law = fit_usl(x, y)
        return law.corner(float(x[-1])) if law else None
    if name == "bounds":
        return corner_of_bounds(x, y, saturated)
    found = _kneedle(stages) if name == "kneedle" else _divergence(stages)
    return found["concurrency"] if found["concurrency"] is None else float(found["concurrency"])


def _log_spread(figures: dict[str, Any]) -> float:
    """Standard deviation of ln p99, from its interval where it has one."""
    low, high = figures.get("p99_ci") or (None, None)
    return math.log(high / low) / 3.92 if low and high and high > low else 0.1


def _usl(stages: list[dict[str, Any]]) -> dict[str, Any]:
    """The corner of the Universal Scalability Law fitted to throughput against concurrency."""
    x, y = (np.array([s[name] for s in stages]) for name in ("concurrency", "achieved_rps"))
    if len(stages) < MIN_USL:
        return _no_method(f"{len(stages)} loads are too few for three parameters (needs {MIN_USL})")
    law = fit_usl(x, y)
    if law is None:
        return _no_method("the Universal Scalability Law does not fit")
    corner = law.corner(float(x[-1]))
    if corner > x[-1] / MIN_RISE:
        return _no_method("throughput shows neither contention nor coherency in the loads that were tried")
    error = float(np.sqrt(np.mean((law.at(x) / y - 1) ** 2)))
    what = f"gamma N meets the highest throughput of gamma N / (1 + {law.alpha:.3g} (N - 1) + {law.beta:.3g} N (N - 1)), fitted to {100 * error:.2g} %"
    return _found(
        corner, [corner / (1 + 2 * error), corner * (1 + 2 * error)], what
    )  # no better than its fit


def _bounds(stages: list[dict[str, Any]]) -> dict[str, Any]:
    """Where the lines of the asymptotic bounds meet."""
    x, y = (np.array([s[name] for s in stages]) for name in ("concurrency", "achieved_rps"))
    corner = corner_of_bounds(x, y, any(s["stable"] is False for s in stages))
    if corner is None:
        return _no_method("throughput was still growing at the top: no ceiling is known")
    if not x[0] <= corner <= x[-1]:
        return _no_method(f"the bounds meet at {corner:.3g} in flight, outside the loads that were tried")
    return _found(corner, [corner, corner], "time in flight at low load x the highest throughput")


def _rates(concurrency: float, range_: list[float], x: Floats, y: Floats) -> tuple[float, list[float]]:
    """Throughput at the knee, and the least and the most within its range: all read from the curve that was measured."""
    at, *ends = (float(np.interp(n, x, y)) for n in (concurrency, *range_))
    within = [*ends, *y[(x >= range_[0]) & (x <= range_[1])].tolist(), at]
    return at, [min(within), max(within)]


def _region(found: list[dict[str, Any]], x: Floats, y: Floats) -> dict[str, Any]:
    """The region of all methods, of most where that is too wide; what still spans too many loads is no finding.

    The figure is their median, which lies between the medians of the lower and of the upper ends as well.
    """
    region = [min(m["range"][0] for m in found), max(m["range"][1] for m in found)]
    if len(found) > 2 and region[1] > MAX_SPAN * region[0]:
        # past capacity the requests in flight have no level: a method whose range ends there must not silence the others
        region = [_median([m["range"][end] for m in found]) for end in (0, 1)]
    concurrency = _median([m["concurrency"] for m in found])
    rps, region_rps = _rates(concurrency, region, x, y)
    wide = f"the loads around the bend are too far apart ({region[0]:.3g} to {region[1]:.3g} in flight): a sweep with more loads between them would tell"
    if region[1] > MAX_SPAN * region[0] and region_rps[1] > MAX_SPAN_RPS * region_rps[0]:
        return _no_knee(wide)
    result = {
        "concurrency": concurrency,
        "rps": rps,
        "region": region,
        "region_rps": region_rps,
        "reason": None,
    }
    if region[1] > MAX_SPAN * region[0]:  # in flight there is no level past capacity, the rate has one
        result |= {"concurrency": None, "region": None, "concurrency_reason": wide, "region_reason": wide}
    return result


def _no_knee(reason: str) -> dict[str, Any]:
    nothing = dict.fromkeys(("concurrency", "rps", "region", "region_rps", "disagreement"))
    return nothing | {"reason": reason, "methods": {}}


def _no_method(reason: str) -> dict[str, Any]:
    return dict.fromkeys(("concurrency", "rps", "range", "range_rps", "definition")) | {"reason": reason}


def _found(concurrency: float, range_: list[float], definition: str) -> dict[str, Any]:
    return {"concurrency": concurrency, "range": range_, "reason": None, "definition": definition}


def _divergence(stages: list[dict[str, Any]]) -> dict[str, Any]:
    """Where p99/p50 first exceeds ``DIVERGENCE_FACTOR`` times its low-load level and stays there."""
    metric, tail = _best_percentile(stages)
    if metric is None:
        return _no_method("no latency percentile is supported in enough stages")
    points = [
        _Point(s["concurrency"], _ratio_of(s, metric, tail), s["stable"] is not False)
        for s in stages
        if s[metric].get("p50") or s["stable"] is False
    ]
    low_load = [p.ratio for p in points if p.stable and math.isfinite(p.ratio)]
    if len(points) < MIN_STAGES or len(low_load) < 2:
        return _no_method(f"{tail} of {metric} is supported in fewer than {MIN_STAGES} stages")
    level = float(np.median(low_load[: max(2, len(points) // 3)]))
    threshold = DIVERGENCE_FACTOR * level
    diverged = [p.ratio > threshold or not p.stable for p in points]
    what = f"{tail}/p50 of {metric}, {DIVERGENCE_FACTOR:g} times its low-load level {level:.2f}"
    if not diverged[-1]:
        return _no_method(f"never reached: {what}")
    first = len(points) - diverged[::-1].index(False) if False in diverged else 0
    if first == 0:
        return _no_method(f"reached in the lowest stage already: {what}")
    below, above = points[first - 1], points[first]
    share = 0.5
    if math.isfinite(above.ratio) and above.ratio > threshold:
        share = math.log(threshold / below.ratio) / math.log(above.ratio / below.ratio)
    at = below.concurrency ** (1 - share) * above.concurrency**share
    return _found(at, [below.concurrency, above.concurrency], what)


def _best_percentile(stages: list[dict[str, Any]]) -> tuple[str | None, str]:
    for metric in ("ttft_from_schedule_s", "e2e_from_schedule_s"):
        for tail in ("p99", "p95"):
            if sum(1 for s in stages if s[metric].get("p50") and s[metric].get(tail)) >= MIN_STAGES - 1:
                return metric, tail
    return None, "p99"


def _ratio_of(stage: dict[str, Any], metric: str, tail: str) -> float:
    """Tail over median of a stage; of a resampled one, as it was drawn."""
    drawn = stage.get("_ratio")
    return _ratio(stage[metric], tail) if drawn is None else float(drawn)


def _ratio(figures: dict[str, Any], tail: str) -> float:
    if not figures.get("p50") or not figures.get(tail):
        return math.inf
    return float(figures[tail] / figures["p50"])


def _kneedle(stages: list[dict[str, Any]]) -> dict[str, Any]:
    """Kneedle on throughput against concurrency, up to the first unstable stage."""
    unstable = [i for i, s in enumerate(stages) if s["stable"] is False]
    kept = stages[: unstable[0] + 1] if unstable else stages
    x = np.array([s["concurrency"] for s in kept])
    y = np.array([s["achieved_rps"] for s in kept])
    if len(kept) < MIN_STAGES:
        return _no_method(f"{len(kept)} stages up to the first unstable one, needs {MIN_STAGES}")
    knee = kneedle(x, y)
    swept = f"swept from concurrency {x[0]:.3g} to {x[-1]:.3g}"
    if knee is None:
        return _no_method(f"no knee in throughput against concurrency, {swept}")
    low, at, high = x[knee.index - 1 : knee.index + 2].tolist()
    return _found(at, [low, high], f"throughput against concurrency, S = 1, {swept}")


def _median(values: list[float]) -> float:
    """Median on a log scale: the geometric mean of the two in the middle."""
    return float(np.exp(np.median(np.log(values))))
