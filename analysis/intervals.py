"""How sure a share or a percentile is, when the samples of one run depend on each other.

A queue makes neighbouring requests alike, so n requests tell less than n independent ones would. The
effective sample size says how much less: n_eff = n / tau, tau = 1 + 2 sum rho_k, with rho_k the
autocorrelation of the exceedance indicator 1{x > D} in scheduled order. Exceedances come in clusters then:
their number is taken as negative binomial with the variance n p (1-p) tau, which is a Poisson number of
clusters of random size, and the binomial where tau is 1. ``ASSUMPTION`` says in words what that relies on;
``benchmarks/coverage.py`` is the study behind the constants.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

CONFIDENCE = 0.95
ASSUMPTION = (
    "within this run: requests in steady state, slow ones in clusters whose length is measured by the "
    "autocorrelation of 'slower than a limit' in scheduled order, at levels from a fifth of the rarest to twenty "
    "times the share in question; no upper end where the run lasts less than 120 correlation times, or has fewer than 65 "
    "independent looks at a load that is bunched; differences "
    "between runs, days or machines are not in it"
)
LONG_ENOUGH = 120.0
"""Correlation times (at the slowest fifth) that a run must last for its worst to have shown itself."""
LOOKS_OVER_QUANTILE = 0.65
"""Independent looks at a bunched load, times 1 - q, that it takes to have seen its worst: 65 for p99, 13 for p95."""
_BUNCHED = 3.0  # variance over mean of the in-flight count; it is 1 where requests do not meet (M/G/infinity)
_MORE_LIMIT = 10**9
_SERIES_BITS = 16


def _betainc(a: float, b: float, x: float) -> float:
    from scipy.special import betainc  # here: a quarter of a second that the start of a run does not have

    return float(betainc(a, b, x))


def prob_at_most(misses: float, n: float, p: float) -> float:
    """P[Bin(n, p) <= misses] for real n and misses, by the regularised incomplete beta function."""
    if misses >= n:
        return 1.0
    if misses <= 0:
        return 0.0 if misses < 0 else (1.0 - p) ** n  # the same as below, before scipy is there
    return _betainc(n - misses, misses + 1.0, 1.0 - p)


def prob_at_least(misses: float, n: float, p: float) -> float:
    """P[Bin(n, p) >= misses] for real n and misses."""
    if misses <= 0:
        return 1.0
    if misses > n:
        return 0.0
    return _betainc(misses, n - misses + 1.0, p)


def smallest_n(quantile: float, misses: int = 0, confidence: float = CONFIDENCE) -> int:
    """Fewest independent samples, of which ``misses`` are over, that prove P[over] <= 1 - quantile.

    The binomial rule of MLPerf's early stopping: P[Bin(n, 1 - q) <= misses] <= 1 - confidence.
    p99 with no miss: 299 at 95 %, 459 at 99 %.
    """
    return _first(lambda n: prob_at_most(misses, n, 1 - quantile) <= 1 - confidence, _MORE_LIMIT)


def clustered_at_most(misses: float, n: float, p: float, tau: float) -> float:
    """P[X <= misses] where X of n samples exceed, each with probability p, with Var X = n p (1-p) tau.

    Negative binomial where the variance is above the mean, I_{mean/var}(mean^2/(var - mean), misses + 1); else
    (nearly independent) the binomial of n / tau samples.
    """
    mean, tau = n * p, max(tau, 1.0)
    variance = mean * (1 - p) * tau
    if variance <= mean * (1 + 1e-9):
        return prob_at_most(misses / tau, n / tau, p)
    if misses < 0:
        return 0.0
    return _betainc(mean**2 / (variance - mean), misses + 1.0, mean / variance)


def clustered_at_least(misses: float, n: float, p: float, tau: float) -> float:
    """P[X >= misses], see ``clustered_at_most``."""
    tau = max(tau, 1.0)
    if (1 - p) * tau <= 1 + 1e-9:
        return prob_at_least(misses / tau, n / tau, p)
    return 1.0 - clustered_at_most(misses - 1, n, p, tau)


def unseen_tau(tau: float, n: float, p: float) -> float:
    """tau with what one run may not have shown, for the upper end of an interval.

    A run without its share of bad clusters has too few slow requests and too short a tau at once: it errs low,
    never high. With m = n p / tau clusters' worth of exceedances, tau - 1 is taken 2 + 3/sqrt(m) times.
    """
    return 1 + (tau - 1) * (2 + 3 / math.sqrt(max(n * p / tau, 1e-9)))


def order_statistic_ranks(
    n: int, quantile: float, confidence: float = CONFIDENCE, n_effective: float | None = None
) -> tuple[int | None, int | None]:
    """1-based ranks (l, u) so that [x_(l), x_(u)] covers the quantile; None where n is too small for it.

    For independent samples those of Conover: l = ppf((1-c)/2), u = ppf((1+c)/2) + 1 of Bin(n, q). With
    ``n_effective`` < n the number of samples over the quantile is clustered, and the upper rank is that of
    ``unseen_tau``, n at most.
    """
    p, alpha = 1 - quantile, (1 - confidence) / 2
    tau = 1.0 if n_effective is None else max(1.0, n / max(n_effective, 1e-9))
    most = _first(lambda c: clustered_at_least(c, n, p, tau) <= alpha, n + 1)
    low = n + 1 - most
    if clustered_at_most(0, n, p, tau) > alpha:
        return (low if low > 0 else None), None
    fewest = _first(lambda c: clustered_at_most(c, n, p, unseen_tau(tau, n, p)) > alpha, n) - 1
    return (low if low > 0 else None), n - max(fewest, 0)


def _first(holds: Callable[[int], bool], limit: int) -> int:
    """Smallest c in 0 .. limit for which a condition that stays true holds; ``limit`` where none does."""
    low, high = -1, limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def autocorrelation_time(series: Floats) -> float:
    """1 + 2 sum rho_k of a series in its order, at least 1 (Geyer's initial monotone sequence).

    Pairs rho_2k + rho_2k+1 are summed until one is not positive, and kept from rising (Geyer 1992).
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


def independent_looks(in_flight: Floats) -> float:
    """Correlation times that a series of in-flight counts lasts, as each request found it; inf where it is not bunched.

    A queue that forms only when the server is full shows nothing in the latencies before it does; the in-flight
    count, which must rise slowly to get there, shows how slow it is (its variance is far above Poisson's then).
    """
    series = in_flight[:: (len(in_flight) >> _SERIES_BITS) + 1]
    if len(series) < 4 or float(series.var()) <= _BUNCHED * float(series.mean()):
        return math.inf
    return len(series) / autocorrelation_time(series)


def effective_size(misses: Floats, sizes: Floats) -> float:
    """Effective number of samples behind the share sum(misses)/sum(sizes).

    ``misses[i]`` of ``sizes[i]`` samples of request i (in scheduled order) are over a threshold; sizes are
    1 for a metric with one value per request, the number of gaps for ITL and ICL. Ratio estimator with the
    long-run variance of its residuals: var = R gamma_0 tau / N^2, n_eff = p(1-p)/var, at most N.
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


@dataclass(frozen=True)
class ShareVerdict:
    """Is P[over the limit] <= 1 - q? ``factor`` is how many times the sample would decide it."""

    verdict: str  # met | broken | undecided
    factor: float | None  # of the present size; None where it is decided, or where no size would do


def judge_share(misses: tuple[float, float], n: float, n_effective: float, quantile: float) -> ShareVerdict:
    """One-sided tests at 95 % both ways for a clustered share, tau = n / n_effective.

    ``misses`` are the fewest and the most that there may be (they differ by censored requests): "met" must
    hold for the most, "broken" for the fewest.
    """
    p0 = 1 - quantile
    if n <= 0 or n_effective <= 0:
        return ShareVerdict("undecided", None)
    tau = max(1.0, n / n_effective)
    if _is_met(misses[1], n, tau, p0):
        return ShareVerdict("met", None)
    if clustered_at_least(misses[0], n, p0, tau) <= 1 - CONFIDENCE:
        return ShareVerdict("broken", None)
    return ShareVerdict("undecided", _deciding_factor(misses[1] / n, n, tau, p0))


def _is_met(misses: float, n: float, tau: float, p0: float) -> bool:
    return clustered_at_most(misses, n, p0, tau) <= 1 - CONFIDENCE


def _deciding_factor(share: float, n: float, tau: float, p0: float) -> float | None:
    """How many times as many samples with the same share of misses decide; None above 1e9 samples."""

    def decided(size: float) -> bool:
        if share < p0:
            return _is_met(share * size, size, tau, p0)
        return clustered_at_least(share * size, size, p0, tau) <= 1 - CONFIDENCE

    low, high = n, 2 * n
    while not decided(high):
        low, high = high, 2 * high
        if high > _MORE_LIMIT * tau:
            return None
    while high - low > max(0.5, 1e-3 * high):
        middle = (low + high) / 2
        low, high = (low, middle) if decided(middle) else (middle, high)
    return high / n
