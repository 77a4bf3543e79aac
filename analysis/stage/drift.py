"""Find what averages over a stage hide: a drifting tail, two modes, and the uncertainty of a rate.

Each works on consecutive blocks of the stage, in scheduled order. Times in seconds, rates per
second.
"""

import numpy as np

from ampacity.analysis.contract.stage import Drift, Modes
from ampacity.analysis.metrics.observations import Observations
from ampacity.analysis.metrics.requests import Floats

BLOCKS = 20
MIN_PER_BLOCK = 30
TREND_T = 4.0  # standard errors of the slope over the blocks
CHANGE = 1.25  # by which the tail must have moved as well
APART = 6.0  # two modes: distance of their means in standard deviations within
MODE_RATIO = 1.2
MODE_SHARE = 0.15  # of the blocks that the rarer mode has at least
MIN_SWITCHES = 2  # a single step from one level to another is a drift, no mode
RATE_BATCHES = 10


def tail_trend(o: Observations) -> Drift:
    """Return how the slow tail changed over the stage.

    Per block the share of requests above the stage's own p90 (p97 from 100 requests a block on) is
    regressed on the block's number. A drift is a slope of more than ``TREND_T`` standard errors
    (the residuals' dependence charged) together with that percentile differing by ``CHANGE``
    between the first and the last third. p99 of both is given.
    """
    series = _series(o)
    n = len(series)
    if n < BLOCKS * MIN_PER_BLOCK:
        return _no_trend(f"needs {BLOCKS * MIN_PER_BLOCK} requests, has {n}")
    quantile = 0.97 if n >= BLOCKS * 100 else 0.9
    level = _quantile(series, quantile)
    share = np.array([np.mean(block > level) for block in np.array_split(series, BLOCKS)])
    third = n // 3
    first, last = series[:third], series[-third:]
    p99_first, p99_last = _quantile(first, 0.99), _quantile(last, 0.99)
    if not np.isfinite([p99_first, p99_last, level]).all():
        return _no_trend("failures reach the tail")
    ends = _quantile(first, quantile), _quantile(last, quantile)
    moved = max(ends) >= CHANGE * min(ends)
    return Drift(
        drifting=bool(moved and abs(_slope_t(share)) > TREND_T),
        p99_first_s=p99_first,
        p99_last_s=p99_last,
        change=p99_last / p99_first if p99_first > 0 else 1.0,
        reason=None,
    )


def _no_trend(reason: str) -> Drift:
    return Drift(drifting=None, p99_first_s=None, p99_last_s=None, change=None, reason=reason)


def _quantile(values: Floats, quantile: float) -> float:
    return float(np.quantile(values, quantile, method="inverted_cdf"))


def _series(o: Observations) -> Floats:
    """Return one value per request in scheduled order, failures infinite, without censored."""
    values = np.full(o.n_owners, np.nan)
    values[o.owner] = o.values
    values[o.infinite > 0] = np.inf
    known: Floats = values[~np.isnan(values)]
    return known


def _slope_t(y: Floats) -> float:
    """Return the slope in standard errors, widened by (1+r)/(1-r) for lag-1 correlation r."""
    x = np.arange(len(y)) - (len(y) - 1) / 2
    slope = float(x @ y / (x @ x))
    residuals = y - y.mean() - slope * x
    square = float(residuals @ residuals)
    if square <= 0:
        return 0.0 if slope == 0 else float(np.copysign(np.inf, slope))
    r = min(max(float(residuals[1:] @ residuals[:-1]) / square, 0.0), 0.9)
    error = np.sqrt(square / (len(y) - 2) / (x @ x) * (1 + r) / (1 - r))
    return slope / float(error)


def two_modes(o: Observations) -> Modes:
    """Return whether requests took one of two times; nulls where the stage is too short to tell.

    The medians of 20 blocks, on a log scale, are cut where the spread within both parts is least.
    Two modes: their means differ by ``APART`` standard deviations within and by ``MODE_RATIO``, the
    rarer has ``MODE_SHARE`` of the blocks, and the stage went back and forth.
    """
    series = _series(o)
    series = series[np.isfinite(series)]
    if len(series) < BLOCKS * MIN_PER_BLOCK:
        return _no_modes(None)
    medians = np.array([np.median(block) for block in np.array_split(series, BLOCKS)])
    if medians.min() <= 0:
        return _no_modes(None)
    levels = np.sort(np.log(medians))
    within = [levels[:k].var() * k + levels[k:].var() * (BLOCKS - k) for k in range(1, BLOCKS)]
    k = 1 + int(np.argmin(within))
    low, high = levels[:k], levels[k:]
    spread = max(float(np.sqrt(within[k - 1] / (BLOCKS - 2))), 1e-3)
    gap = float(high.mean() - low.mean())
    is_slow = np.log(medians) >= high[0]
    switches = int(np.count_nonzero(is_slow[1:] != is_slow[:-1]))
    rare = min(k, BLOCKS - k) < MODE_SHARE * BLOCKS
    if gap < max(APART * spread, np.log(MODE_RATIO)) or rare or switches < MIN_SWITCHES:
        return _no_modes(False)
    return Modes(
        two=True,
        fast_p50_s=float(np.exp(low.mean())),
        slow_p50_s=float(np.exp(high.mean())),
        slow_share=(BLOCKS - k) / BLOCKS,
        switches=switches,
    )


def _no_modes(two: bool | None) -> Modes:
    return Modes(two=two, fast_p50_s=None, slow_p50_s=None, slow_share=None, switches=None)


def rate_interval(per_batch: Floats, batch_s: float) -> list[float] | None:
    """Return the 95 % interval of a rate by batch means.

    Mean -+ t(0.975, k-1) s/sqrt(k) over k equal spans of ``batch_s``. Batches must be longer than
    the dependence between events; their counts need not be Poisson.
    """
    k = len(per_batch)
    if k < 2 or batch_s <= 0:
        return None
    from scipy.special import stdtrit

    rates = per_batch / batch_s
    half = float(stdtrit(k - 1, 0.975)) * float(rates.std(ddof=1)) / np.sqrt(k)
    return [max(0.0, float(rates.mean()) - half), float(rates.mean()) + half]


def events_per_batch(at_s: Floats, start_s: float, end_s: float) -> Floats:
    """Return events in each of ``RATE_BATCHES`` equal spans of [start, end)."""
    inside = (at_s >= start_s) & (at_s < end_s)
    return np.histogram(at_s[inside], RATE_BATCHES, (start_s, end_s))[0].astype(np.float64)
