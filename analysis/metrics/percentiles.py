"""The percentile objects of summary.json, from observations.

Figures, or the reason why there is none.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ampacity.analysis.metrics.observations import Observations, quantile_rank
from ampacity.analysis.stats.intervals import smallest_n

LEVELS: dict[str, float] = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
_CURVE_LEVELS = np.concatenate([np.arange(1, 100) / 100, [0.995, 0.999]])


def percentiles(observations: Observations) -> dict[str, Any]:
    """Return a PERCENTILES object of docs/summary.md; all values in seconds."""
    o = observations
    result: dict[str, Any] = dict.fromkeys([*LEVELS, "p99_ci", "mean"])
    result |= {"n": o.n, "infinite": o.n_infinite}
    if not o.n:
        return result | {"reason": o.reason or "no request has a value"}
    for name, quantile in LEVELS.items():
        value, reason, bounds = _supported(o, quantile)
        result[name] = value
        if reason:
            result[f"{name}_reason"] = reason
        if bounds:
            result[f"{name}_bounds"] = bounds
    result["mean"] = finite(o.mean())
    if result["mean"] is None:
        result["mean_reason"] = f"none of {o.n} {o.unit} has a finite value"
    if o.n_censored:
        result["censored"] = o.n_censored
    if result["p99"] is not None:
        low, high = o.confidence_interval(0.99)
        result["p99_ci"] = [finite(low), finite(high)]
        if finite(high) is None or finite(low) is None:
            result["p99_ci_reason"] = _unknown_end(o, high)
    else:
        result["p99_ci_reason"] = result["p99_reason"]
    if o.assumption:
        result["assumption"] = o.assumption
    return result


def _unknown_end(o: Observations, high: float) -> str:
    if o.n_infinite > 0.5 * (1 - 0.99) * o.n:
        return "the upper end is among the failed requests"
    size = max(o.clustering(0.99)[0], o.likely_cluster)
    return (
        f"too short: slow {o.unit} come in clusters of about {size:.0f}, so the worst may not "
        "have been seen"
    )


def _supported(
    o: Observations, quantile: float
) -> tuple[float | None, str | None, list[float | None] | None]:
    needed = smallest_n(quantile)
    if o.n < needed:
        return None, f"needs {needed} {o.unit}, has {o.n}", None
    low, high = o.quantile_bounds(quantile)
    if np.isinf(low):
        if o.unit != "gaps":
            return None, f"infinite: {o.n_infinite} of {o.n} {o.unit} failed", None
        return None, f"infinite: {o.n_infinite} of {o.n} gaps are missing (failed requests)", None
    if low != high:
        return None, between_bounds(o, low, high), [low, finite(high)]
    return low, None, None


def between_bounds(o: Observations, low: float, high: float) -> str:
    """Return why a percentile is not known: unfinished requests leave it open."""
    upper = "infinite" if np.isinf(high) else f"{high:.6g} s"
    return (
        f"between {low:.6g} s and {upper}: {o.n_censored} of {o.n} {o.unit} were cut off unfinished"
    )


def curve(observations: Observations) -> dict[str, list[float]]:
    """Return the quantile curve for charts.

    0.99, 0.995, 0.999, as far as it is finite.
    """
    o = observations
    levels, values = [], []
    for q in _CURVE_LEVELS if o.n else ():
        if o.n < 1 / (1 - q):
            break
        value = o.rank_bounds(quantile_rank(float(q), o.n))[0]
        if not np.isfinite(value):
            break
        levels.append(round(float(q), 4))
        values.append(value)
    return {"q": levels, "value": values}


def finite(value: float) -> float | None:
    """Return the value, or None where it is NaN or infinite."""
    return float(value) if np.isfinite(value) else None
