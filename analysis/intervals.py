"""How sure a share or a percentile is, when the samples of one run depend on each other.

A queue makes neighbouring requests alike, so n requests tell less than n independent ones would. The
effective sample size corrects for it: n_eff = n / (1 + 2 sum rho_k), with rho_k the autocorrelation of
the exceedance indicator 1{x > D} in scheduled order. It then takes the place of n in the binomial
formulas. ``ASSUMPTION`` says in words what that relies on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

CONFIDENCE = 0.95
ASSUMPTION = (
    "within this run: requests in steady state, their dependence on each other measured by the "
    "autocorrelation of 'slower than the limit' in scheduled order and charged as a smaller sample; "
    "differences between runs, days or machines are not in it"
)
_MORE_LIMIT = 10**9


_NORMAL = NormalDist()


def _betainc(a: float, b: float, x: float) -> float:
    from scipy.special import (
        betainc,  # here: it costs a quarter of a second that the start of a run does not have
    )

    return float(betainc(a, b, x))


def prob_at_most(misses: float, n: float, p: float) -> float:
    """P[Bin(n, p) <= misses] for real n and misses, by the regularised incomplete beta function."""
    if misses >= n:
        return 1.0
    if misses < 0:
        return 0.0
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
    low, high = misses, misses + 1
    while prob_at_most(misses, high, 1 - quantile) > 1 - confidence:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        if prob_at_most(misses, middle, 1 - quantile) <= 1 - confidence:
            high = middle
        else:
            low = middle
    return high


def binomial_ppf(probability: float, n: int, p: float) -> int:
    """Smallest k with P[Bin(n, p) <= k] >= probability."""
    low, high = -1, n
    while high - low > 1:
        middle = (low + high) // 2
        if prob_at_most(middle, n, p) >= probability:
            high = middle
        else:
            low = middle
    return high


def order_statistic_ranks(
    n: int, quantile: float, confidence: float = CONFIDENCE, n_effective: float | None = None
) -> tuple[int | None, int | None]:
    """1-based ranks (l, u) so that [x_(l), x_(u)] covers the quantile; None where n is too small for it.

    l = ppf((1-c)/2), u = ppf((1+c)/2) + 1 of Bin(n, q) (Conover). With ``n_effective`` < n the ranks are
    those of a sample of that size, stretched to n.
    """
    m = n if n_effective is None else max(1, min(n, math.floor(n_effective)))
    low = binomial_ppf((1 - confidence) / 2, m, quantile)
    high = binomial_ppf((1 + confidence) / 2, m, quantile) + 1
    low_rank = None if low < 1 else max(1, math.floor(low / m * n))
    high_rank = None if high > m else min(n, math.ceil(high / m * n))
    return low_rank or None, high_rank


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
    """One-sided binomial tests at 95 % both ways, with the effective sample size.

    ``misses`` are the fewest and the most that there may be (they differ by censored requests): "met" must
    hold for the most, "broken" for the fewest.
    """
    p0, alpha = 1 - quantile, 1 - CONFIDENCE
    if n <= 0 or n_effective <= 0:
        return ShareVerdict("undecided", None)
    fewest, most = (m * n_effective / n for m in misses)
    if prob_at_most(most, n_effective, p0) <= alpha:
        return ShareVerdict("met", None)
    if prob_at_least(fewest, n_effective, p0) <= alpha:
        return ShareVerdict("broken", None)
    return ShareVerdict("undecided", _deciding_factor(misses[1] / n, n_effective, p0, alpha))


def _deciding_factor(share: float, n_effective: float, p0: float, alpha: float) -> float | None:
    """How many times as many samples with the same share of misses decide; None above 1e9 samples."""

    def decided(size: float) -> bool:
        test = prob_at_most if share < p0 else prob_at_least
        return test(share * size, size, p0) <= alpha

    low, high = n_effective, 2 * n_effective
    while not decided(high):
        low, high = high, 2 * high
        if high > _MORE_LIMIT:
            return None
    while high - low > max(0.5, 1e-3 * high):
        middle = (low + high) / 2
        low, high = (low, middle) if decided(middle) else (middle, high)
    return high / n_effective


def normal_quantile(probability: float) -> float:
    """z with P[N(0, 1) <= z] = probability."""
    return _NORMAL.inv_cdf(probability)
