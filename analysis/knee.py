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

MIN_STAGES = 4
DIVERGENCE_FACTOR = 2.0
MIN_RISE = 1.3  # of the mean time in flight over the sweep; below it throughput is proportional to load
MAX_SPAN = 8.0  # of a region: a factor beyond which it names no load
MAX_SPAN_RPS = 2.0


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
    rps: float
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
    methods = {"p99_p50_divergence": _divergence(usable), "kneedle": _kneedle(usable)}
    found = [m for m in methods.values() if m["concurrency"] is not None]
    if not found:
        reasons = "; ".join(f"{name}: {m['reason']}" for name, m in methods.items())
        return _no_knee(reasons) | {"methods": methods}
    return _region(found) | {"methods": methods}


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


def _region(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The region of both methods; what spans too wide a range of loads is no finding."""
    region = [min(m["range"][0] for m in found), max(m["range"][1] for m in found)]
    region_rps = [min(m["range_rps"][0] for m in found), max(m["range_rps"][1] for m in found)]
    wide = f"the loads around the bend are too far apart ({region[0]:.3g} to {region[1]:.3g} in flight): put more loads there"
    if region[1] > MAX_SPAN * region[0] and region_rps[1] > MAX_SPAN_RPS * region_rps[0]:
        return _no_knee(wide)
    result = {
        "concurrency": _geometric_mean([m["concurrency"] for m in found]),
        "rps": _geometric_mean([m["rps"] for m in found]),
        "region": region, "region_rps": region_rps, "reason": None,
    }  # fmt: skip
    if (
        region[1] > MAX_SPAN * region[0]
    ):  # past capacity the requests in flight have no level, the rate has one
        result |= {"concurrency": None, "region": None, "concurrency_reason": wide, "region_reason": wide}
    return result


def _no_knee(reason: str) -> dict[str, Any]:
    return {
        "concurrency": None,
        "rps": None,
        "region": None,
        "region_rps": None,
        "reason": reason,
        "methods": {},
    }


def _no_method(reason: str) -> dict[str, Any]:
    return {"concurrency": None, "rps": None, "range": None, "range_rps": None, "reason": reason}


def _divergence(stages: list[dict[str, Any]]) -> dict[str, Any]:
    """Where p99/p50 first exceeds ``DIVERGENCE_FACTOR`` times its low-load level and stays there."""
    metric, tail = _best_percentile(stages)
    if metric is None:
        return _no_method("no latency percentile is supported in enough stages")
    points = [
        _Point(s["concurrency"], s["achieved_rps"], _ratio(s[metric], tail), s["stable"] is not False)
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
    return {
        "concurrency": _between(below.concurrency, above.concurrency, share),
        "rps": _between(below.rps, above.rps, share),
        "range": [below.concurrency, above.concurrency],
        "range_rps": sorted([below.rps, above.rps]),
        "reason": None,
        "definition": what,
    }


def _best_percentile(stages: list[dict[str, Any]]) -> tuple[str | None, str]:
    for metric in ("ttft_from_schedule_s", "e2e_from_schedule_s"):
        for tail in ("p99", "p95"):
            if sum(1 for s in stages if s[metric].get("p50") and s[metric].get(tail)) >= MIN_STAGES - 1:
                return metric, tail
    return None, "p99"


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
    low, high = knee.index - 1, knee.index + 1
    return {
        "concurrency": float(x[knee.index]), "rps": float(y[knee.index]),
        "range": [float(x[low]), float(x[high])], "range_rps": sorted([float(y[low]), float(y[high])]),
        "reason": None, "definition": f"throughput against concurrency, S = 1, {swept}",
    }  # fmt: skip


def _between(low: float, high: float, share: float) -> float:
    return math.exp((1 - share) * math.log(low) + share * math.log(high))


def _geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
