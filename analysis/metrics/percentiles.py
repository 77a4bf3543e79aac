"""The percentiles of summary.json from observations: figures, or the reason why there is none."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ampacity.analysis.contract.figures import Curve, Percentiles
from ampacity.analysis.metrics.observations import Observations, quantile_rank
from ampacity.analysis.slo import EXTREMES
from ampacity.analysis.stats.intervals import smallest_n

NO_VALUE = "no request has a value"

LEVELS: dict[str, float] = {
    "min": 0.0,
    "p50": 0.5,
    "p90": 0.9,
    "p95": 0.95,
    "p99": 0.99,
    "p99_9": 0.999,
    "max": 1.0,
}
"""The percentiles of summary.json, by the names of their fields."""
WITH_INTERVAL = ("p99", "p99_9")
_CURVE_LEVELS = np.concatenate([np.arange(1, 100) / 100, [0.995, 0.999]])


@dataclass(frozen=True)
class Figure:
    """A percentile in s with its 95 % interval; a null is explained by its reason or bounds.

    The smallest and the largest sample are facts of one run: they have no interval.
    """

    value: float | None
    reason: str | None
    bounds: list[float | None] | None
    ci: tuple[float | None, float | None] | None
    ci_reason: str | None


def figure(o: Observations, quantile: float, *, interval: bool = True) -> Figure:
    """Return any percentile of a metric; ``quantile`` 0 is the smallest sample, 1 the largest.

    ``interval``: with its interval, which takes most of the time.
    """
    if not o.n:
        why = o.reason or NO_VALUE
        return Figure(None, why, None, None, why)
    value, reason, bounds = _supported(o, quantile)
    if value is None or quantile in EXTREMES or not interval:
        return Figure(value, reason, bounds, None, reason)
    low, high = map(finite, o.confidence_interval(quantile))
    unknown = _unknown_end(o, quantile) if None in (low, high) else None
    return Figure(value, None, None, (low, high), unknown)


def percentiles(o: Observations) -> Percentiles:
    """Return the percentiles of a metric; all values in seconds."""
    if not o.n:
        nothing: dict[str, Any] = dict.fromkeys((*LEVELS, "p99_ci", "mean"))
        return Percentiles(n=0, infinite=o.n_infinite, reason=o.reason or NO_VALUE, **nothing)
    found: dict[str, Any] = {}
    for name, quantile in LEVELS.items():
        held = figure(o, quantile, interval=name in WITH_INTERVAL)
        found |= {name: held.value, f"{name}_reason": held.reason, f"{name}_bounds": held.bounds}
        if name in WITH_INTERVAL:
            found |= {f"{name}_ci": held.ci, f"{name}_ci_reason": held.ci_reason}
    mean = finite(o.mean())
    none_finite = f"none of {o.n} {o.unit} has a finite value"
    return Percentiles(
        n=o.n,
        infinite=o.n_infinite,
        censored=o.n_censored,
        mean=mean,
        mean_reason=none_finite if mean is None else None,
        assumption=o.assumption or None,
        **found,
    )


def _unknown_end(o: Observations, quantile: float) -> str:
    if o.n_infinite > 0.5 * (1 - quantile) * o.n:
        return "the upper end is among the failed requests"
    size = max(o.clustering(quantile)[0], o.likely_cluster)
    return f"{groups(o, size)}, so {o.n:,} {o.unit} are too few to have seen the worst"


def groups(o: Observations, size: float) -> str:
    """Return in how large groups slow ones come, by a stage that may see no whole one."""
    how = f"of about {size:,.0f}" if size < o.n else "longer than the stage"
    return f"slow {o.unit} come in groups {how}"


def _supported(
    o: Observations, quantile: float
) -> tuple[float | None, str | None, list[float | None] | None]:
    """Return (value, why it is null, its known bounds)."""
    needed = 1 if quantile in EXTREMES else smallest_n(quantile)
    if o.n < needed:
        return None, f"needs {needed} {o.unit}, has {o.n}", None
    low, high = o.quantile_bounds(quantile)
    if np.isinf(low):
        what = "gaps are missing (failed requests)" if o.unit == "gaps" else f"{o.unit} failed"
        return None, f"infinite: {o.n_infinite} of {o.n} {what}", None
    if low != high:
        return None, between_bounds(o, low, high), [low, finite(high)]
    return low, None, None


def between_bounds(o: Observations, low: float, high: float) -> str:
    """Return why a percentile is not known: unfinished requests leave it open."""
    upper = "infinite" if np.isinf(high) else f"{high:.4g} s"
    cut = f"{o.n_censored:,} of {o.n:,} {o.unit} were cut off, or gave no token"
    return f"between {low:.4g} s and {upper}: {cut}"


def curve(o: Observations) -> Curve:
    """Return the quantiles for charts, in s: 0.01 ... 0.99, 0.995, 0.999, as far as finite."""
    levels: list[float] = []
    values: list[float | None] = []
    for q in _CURVE_LEVELS if o.n else ():
        if o.n < 1 / (1 - q):
            break
        value = o.rank_bounds(quantile_rank(float(q), o.n))[0]
        if not np.isfinite(value):
            break
        levels.append(round(float(q), 4))
        values.append(value)
    return Curve(q=levels, value=values)


def finite(value: float) -> float | None:
    """Return the value, or None where it is NaN or infinite."""
    return float(value) if np.isfinite(value) else None
