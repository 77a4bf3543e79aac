"""Find when a series of windows changed: by ranks, so that one bad window is no change.

The largest standardised rank sum over all cuts (Pettitt 1979, Applied Statistics 28) against the
same of random orders of the series, so no distribution is assumed. Windows that depend on the one
before count as fewer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ampacity.analysis.metrics.requests import Floats, Ints

WINDOWS_MIN = 30  # with fewer, even a large step can be missed among so many figures
SIDE_MIN = 3  # windows on each side of a change
ORDERS = 9_999
DEPENDENCE_MAX = 0.25  # a series that wanders more than that has changed, not by chance
EXACT = 1e-20
FITTED = 4.0  # over the windows: by how much the correlation about a fitted change is too low


@dataclass(frozen=True)
class ChangePoint:
    """The likeliest change of a series of n windows: the first window after it, and its p value.

    ``step``: (median before, median after); ``ends``: (first, last) of the straight line that fits
    best, where that fits better than the step.
    """

    first: int
    p: float
    step: tuple[float, float]
    ends: tuple[float, float] | None


def find_change(values: Sequence[float]) -> ChangePoint:
    """Return the likeliest change of at least WINDOWS_MIN values, none of them NaN."""
    series = np.asarray(values, dtype=np.float64)
    cut, statistic = _largest(_ranks(series)[None, :])
    first = int(cut[0])
    before, after = series[:first], series[first:]
    x = np.arange(len(series)) - (len(series) - 1) / 2
    line = series.mean() + float(x @ series) / float(x @ x) * x
    steps = np.where(np.arange(len(series)) < first, before.mean(), after.mean())
    straight = float(((series - line) ** 2).sum()) < float(((series - steps) ** 2).sum())
    rest = series - (line if straight else steps)
    dependence = _dependence(rest, float(series @ series))
    null = _null(tuple(np.unique(series, return_counts=True)[1].tolist()))
    p = (1 + int((null >= statistic[0] / dependence).sum())) / (ORDERS + 1)
    return ChangePoint(
        first,
        p,
        (float(np.median(before)), float(np.median(after))),
        (float(line[0]), float(line[-1])) if straight else None,
    )


def _ranks(series: Floats) -> Floats:
    """Return ranks from 1; equal values share their mean."""
    _, index, count = np.unique(series, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(count) - (count - 1) / 2)[index], dtype=np.float64)


def _largest(ranks: Floats) -> tuple[Ints, Floats]:
    """Return (first window after the cut, standardised rank sum) of the best cut of each row."""
    n = ranks.shape[1]
    k = np.arange(SIDE_MIN, n - SIDE_MIN + 1)
    variance = ranks[0].var() * k * (n - k) / (n - 1)
    sums = np.cumsum(ranks, axis=1)[:, k - 1] - k * (n + 1) / 2
    z = np.abs(sums) / np.sqrt(np.maximum(variance, 1e-12))
    best = z.argmax(axis=1)
    return k[best], z[np.arange(len(z)), best]


@lru_cache(maxsize=256)
def _null(ties: tuple[int, ...]) -> Floats:
    """Return the statistic of random orders of a series with so many equal values each."""
    ranks = _ranks(np.repeat(np.arange(len(ties), dtype=np.float64), ties))
    rng = np.random.default_rng(0)
    return _largest(rng.permuted(np.tile(ranks, (ORDERS, 1)), axis=1))[1]


def _dependence(rest: Floats, scale: float) -> float:
    """Return by how much the error of a mean grows with the lag-1 correlation of the rest."""
    square = float(rest @ rest)
    if square <= EXACT * scale:  # nothing but rounding
        return 1.0
    r = float(rest[1:] @ rest[:-1]) / square + FITTED / len(rest)
    r = min(max(r, 0.0), DEPENDENCE_MAX)
    return float(np.sqrt((1 + r) / (1 - r)))
