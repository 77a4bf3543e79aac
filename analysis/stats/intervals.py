"""Intervals of shares and percentiles, when the samples of one run depend on each other.

A queue makes neighbouring requests alike, so n requests tell less than n independent ones would:
slow ones come in clusters. With tau = 1 + 2 sum rho_k (rho_k the autocorrelation, in scheduled
order, of "slower than a limit") the number of slow ones has the variance n p (1-p) tau. It is taken
as negative binomial, which is a Poisson number of clusters of random size, and as binomial where
tau is 1. A run that happens to see few jams shows too few slow requests and too small a tau at
once, so whoever says "met" also asks how long that run's queue is remembered (``memory_of``), and
where the limit is far beyond all samples, how long the queue would have to be (``short_by_chance``).
``ASSUMPTION`` says in words what that relies on; ``benchmarks/studies/verdict_rates.py`` is the
study behind the constants.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

CONFIDENCE = 0.95
ASSUMPTION = (
    "within this run: requests in steady state; slow ones come in clusters, whose size is "
    "measured by the autocorrelation of 'slower than a limit' in scheduled order, and weighed "
    "against the number of requests over which the in-flight count stays alike; differences "
    "between runs, days or machines are not in it"
)
# requests in a cluster that are likely, per request over which the in-flight count stays alike
MEMORIES = 1.7
# that memory's own standard error, over itself, per square root of (memory / requests)
MEMORY_ERROR = 12.0
QUEUE_SHARES = np.array([0.3, 0.2, 0.1, 0.05])  # of the requests that find so many in flight
PRIOR_CLUSTERS = 12.0  # what is likely counts as much as so many clusters that were seen
_MORE_LIMIT = 10**9
_SERIES_BITS = 16


def _betainc(a: Any, b: Any, x: Any) -> Any:
    from scipy.special import betainc  # here: importing it takes a quarter of a second

    return betainc(a, b, x)


def prob_at_most(misses: float, n: float, p: float) -> float:
    """Return P[Bin(n, p) <= misses] for real n, misses, by the regularised incomplete beta."""
    if misses >= n:
        return 1.0
    if misses <= 0:
        return 0.0 if misses < 0 else (1.0 - p) ** n  # the same as below, before scipy is there
    return float(_betainc(n - misses, misses + 1.0, 1.0 - p))


def prob_at_least(misses: float, n: float, p: float) -> float:
    """Return P[Bin(n, p) >= misses] for real n and misses."""
    if misses <= 0:
        return 1.0
    if misses > n:
        return 0.0
    return float(_betainc(misses, n - misses + 1.0, p))


def smallest_n(quantile: float, misses: int = 0, confidence: float = CONFIDENCE) -> int:
    """Return the fewest samples, ``misses`` of them over, that prove P[over] <= 1 - quantile.

    Of independent samples, by the binomial rule of MLPerf's early stopping: P[Bin(n, 1 - q) <=
    misses] <= 1 - confidence. p99 with no miss: 299 at 95 %, 459 at 99 %.
    """
    return _first(lambda n: prob_at_most(misses, n, 1 - quantile) <= 1 - confidence, _MORE_LIMIT)


def clustered_at_most(misses: npt.ArrayLike, n: float, p: float, tau: npt.ArrayLike) -> Floats:
    """Return P[X <= misses], elementwise, of a clustered count X.

    X of n samples exceed, each with probability p, and Var X = n p (1-p) tau. Negative binomial
    where the variance is above the mean, I_{mean/var}(mean^2/(var - mean), misses + 1); else
    (nearly independent) the binomial of n / tau samples.
    """
    misses, tau = np.asarray(misses, dtype=np.float64), np.maximum(tau, 1.0)
    mean = n * p
    variance = mean * (1 - p) * tau
    wide = variance > mean * (1 + 1e-9)
    excess = np.where(wide, variance - mean, 1.0)
    clustered = _betainc(
        mean**2 / excess, np.maximum(misses, 0.0) + 1.0, np.minimum(mean / variance, 1.0)
    )
    few = np.clip(misses, 0.0, n - 1e-9)
    independent = _betainc((n - few) / tau, few / tau + 1.0, 1.0 - p)
    found = np.where(wide, clustered, np.where(misses >= n, 1.0, independent))
    return np.asarray(np.where(misses < 0, 0.0, found))


def clustered_at_least(misses: npt.ArrayLike, n: float, p: float, tau: npt.ArrayLike) -> Floats:
    """Return P[X >= misses], see ``clustered_at_most``. Elementwise."""
    misses, tau = np.asarray(misses, dtype=np.float64), np.maximum(tau, 1.0)
    some = np.clip(misses, 1e-9, n)
    independent = _betainc(some / tau, (n - some) / tau + 1.0, p)
    independent = np.where(misses <= 0, 1.0, np.where(misses > n, 0.0, independent))
    clustered = 1.0 - clustered_at_most(misses - 1, n, p, tau)
    return np.asarray(np.where((1 - p) * tau <= 1 + 1e-9, independent, clustered))


def few_by_chance(misses: npt.ArrayLike, n: float, p: float, tau: float, likely: float) -> Floats:
    """Return P[so few slow samples | each is slow with probability p], elementwise.

    Small: they are rarer than p. ``tau`` is the clustering that the run shows, ``likely`` the one
    that its queue makes likely, which counts as ``PRIOR_CLUSTERS`` clusters beside those seen: a
    jam-free run shows none. As a run without its share of jams shows too small a tau as well, tau -
    1 is taken 1 + 1/sqrt(m) times, m = n p / tau the clusters to expect.
    """
    misses = np.asarray(misses, dtype=np.float64)
    pooled = (PRIOR_CLUSTERS * likely + misses) / (PRIOR_CLUSTERS + misses / tau)
    size = np.maximum(tau, pooled)
    size = 1 + (size - 1) * (1 + np.sqrt(size / max(n * p, 1e-9)))
    return clustered_at_most(misses, n, p, size)


def short_by_chance(in_flight: Floats, longest: float, p: float, memory: float) -> float:
    """Return P[in-flight counts so low | a share p of them is ``longest`` or more].

    The smallest over four counts above the median. Their survival function is log-concave in a
    queue that is served no slower the longer it is (M/M/c, a batch), so at each count it is no
    lower than the straight line in its logarithm from the median to p.
    """
    n, memory = len(in_flight), max(memory, 1.0)
    middle = float(np.median(in_flight))
    start, chances = float(np.mean(in_flight >= middle)), [1.0]
    for count in np.quantile(in_flight, 1 - QUEUE_SHARES):
        if middle < count < longest:
            part = (count - middle) / (longest - middle)
            share = start ** (1 - part) * p**part
            seen = float(np.count_nonzero(in_flight >= count))
            chances.append(float(few_by_chance(seen, n, share, memory, memory)))
    return min(chances)


def many_by_chance(misses: npt.ArrayLike, n: float, p: float, tau: float) -> Floats:
    """Return P[so many slow samples | each is slow with probability p], elementwise.

    The largest over clusters of any size up to ``tau``.
    """
    sizes = np.array([1.0, math.sqrt(tau), tau] if tau > 1 else [1.0])
    return np.asarray(np.max([clustered_at_least(misses, n, p, size) for size in sizes], axis=0))


def order_statistic_ranks(n: int, quantile: float) -> tuple[int | None, int | None]:
    """Return 1-based ranks (l, u): [x_(l), x_(u)] covers the quantile of independent samples.

    None where n is too small. Conover's: l = ppf((1-c)/2), u = ppf((1+c)/2) + 1 of Bin(n, q).
    """
    p, alpha = 1 - quantile, (1 - CONFIDENCE) / 2
    low = n + 1 - _first(lambda c: prob_at_least(c, n, p) <= alpha, n + 1)
    high = n + 1 - _first(lambda c: prob_at_most(c, n, p) > alpha, n + 1)
    return (low if low > 0 else None), (high if high <= n else None)


def _first(holds: Callable[[int], bool], limit: int) -> int:
    """Return the smallest c in 0 .. limit from which on the condition holds, else ``limit``."""
    low, high = -1, limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def autocorrelation_time(series: Floats) -> float:
    """Return 1 + 2 sum rho_k of a series in its order, at least 1.

    Initial monotone sequence (Geyer 1992): pairs rho_2k + rho_2k+1 are summed until one is not
    positive, and kept from rising.
    """
    n = len(series)
    centred = series - series.mean() if n else series
    variance = float(centred @ centred)
    if n < 4 or variance <= 0:
        return 1.0
    size = 1 << (2 * n - 1).bit_length()
    spectrum = np.fft.rfft(centred, size)
    rho = np.fft.irfft(spectrum * np.conj(spectrum), size)[: n // 2] / variance
    pairs = rho[: len(rho) // 2 * 2].reshape(-1, 2).sum(axis=1)
    stop = np.flatnonzero(pairs <= 0)
    kept = np.minimum.accumulate(pairs[: stop[0]] if len(stop) else pairs)
    return max(1.0, 2.0 * float(kept.sum()) - 1.0)


def memory_of(in_flight: Floats) -> float:
    """Return the autocorrelation time, in requests, of the in-flight count that each finds.

    A jam is a stretch in which that count is high, so it lasts about as
    long as the count is remembered, and the count shows that in a run without any jam: in queues
    (M/M/1, M/G/1, M/M/8, batches of 16 and 64) slow requests came in clusters of 0.7 to 1.5 times
    it, where waits decide which are slow.
    """
    merged = (len(in_flight) >> _SERIES_BITS) + 1
    return merged * autocorrelation_time(in_flight[::merged])


def effective_size(misses: Floats, sizes: Floats) -> float:
    """Return the effective number of samples behind the share sum(misses)/sum(sizes).

    ``misses[i]`` of ``sizes[i]`` samples of request i (in scheduled order) are over a threshold;
    sizes are 1 for a metric with one value per request, the number of gaps for ITL and ICL. Ratio
    estimator with the long-run variance of its residuals: var = R gamma_0 tau / N^2, n_eff =
    p(1-p)/var, at most N.
    """
    total = float(sizes.sum())
    if total <= 0:
        return 0.0
    p = float(misses.sum()) / total
    residuals = misses - p * sizes
    merged = len(residuals) >> _SERIES_BITS
    if merged:  # sums of neighbours have the same long-run variance and are quick to correlate
        residuals = np.add.reduceat(residuals, np.arange(0, len(residuals), merged + 1))
    variance = float(residuals @ residuals) * autocorrelation_time(residuals)
    if variance <= 0 or not 0 < p < 1:
        return float(np.count_nonzero(sizes))  # nothing varies: each request is one look
    return min(total, p * (1 - p) * total**2 / variance)


def deciding_factor(
    share: float, n: float, p: float, tau: float, likely: float, chance: float = 1 - CONFIDENCE
) -> float | None:
    """Return how many times the samples, with the same share of slow ones, decide the verdict.

    ``chance``: of a false one. None where that takes over 1e9 independent samples.
    """

    def decided(size: float) -> bool:
        if share < p:
            return bool(few_by_chance(share * size, size, p, tau, likely) <= chance)
        return bool(many_by_chance(share * size, size, p, tau) <= chance)

    low, high = n, 2 * n
    while not decided(high):
        low, high = high, 2 * high
        if high > _MORE_LIMIT * tau:
            return None
    while high - low > max(0.5, 1e-3 * high):
        middle = (low + high) / 2
        low, high = (low, middle) if decided(middle) else (middle, high)
    return high / n
