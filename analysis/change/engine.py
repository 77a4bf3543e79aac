"""Test how much a metric has changed: the one engine of gate and compare.

A quantile is compared as a share: with Q the reference's quantile q and t the tolerance, a run is
worse when more than 1 - q of its samples are above (1 + t) Q. No density is estimated, so step
times that repeat do no harm. Rates are compared by the log of their ratio. Both give an
``Estimate``, which the gate tests one-sidedly against a tolerance; compare reports a two-sided
``Change`` with an interval. docs/methods/comparison.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from ampacity.analysis.change.samples import BLOCKS, Blocks
from ampacity.analysis.contract.part import Interval
from ampacity.analysis.metrics.observations import Observations
from ampacity.analysis.metrics.requests import Floats
from ampacity.analysis.warnings import ERROR_SHARE

ALPHA = 0.05
ASSUMED_NOISE = 0.005  # of a run's speed against the next, while only one baseline run exists
PRIOR_RUNS = 4  # weight of that assumption, in runs, beside what several baseline runs show
DEFAULT_TOLERANCE = 0.03  # a difference whose whole interval is smaller does not matter
LEAST = 0.02  # a smaller one is none, however sure: two runs of one system differ by it (2.8 s.d.)
_FARTHEST = math.log(1000.0)  # interval ends and differences beyond a thousandfold are unknown
_POWER = 0.8


@dataclass(frozen=True)
class Estimate:
    """``worse``: the amount beyond the tolerance (> 0: worse), with its variance in two parts."""

    worse: float
    within: float  # inside the runs; falls with their length
    between: float  # from run to run; falls with their number
    df: float

    @property
    def se(self) -> float:
        return math.sqrt(self.within + self.between)

    @property
    def p_regression(self) -> float:
        """p value of "no worse than the tolerance"."""
        return 1.0 - self.p_equivalence

    @property
    def p_equivalence(self) -> float:
        """p value of "worse than the tolerance, or exactly as much"."""
        if self.se == 0:
            return 0.5 if self.worse == 0 else float(self.worse > 0)
        return student_cdf(self.worse / self.se, self.df)

    @property
    def reach(self) -> float:
        """Half of the 95 % interval."""
        return student_quantile(0.975, self.df) * self.se


@dataclass(frozen=True)
class Change:
    """The other over the reference, as a log ratio; two-sided ``p``, 95 % interval of ratio - 1.

    ``log_ratio`` is what is tested; inf where only the other is infinite, -inf where only the
    reference is. ``shown``: the log ratio of the printed figures, where it differs (``beside``).
    """

    least: ClassVar[float] = math.log1p(LEAST)
    near: ClassVar[float] = DEFAULT_TOLERANCE

    log_ratio: float
    se: float
    df: float
    p: float
    ci: Interval
    shown: float | None = None

    @property
    def tested(self) -> float | None:
        return None if not math.isfinite(self.log_ratio) else math.expm1(self.log_ratio)

    @property
    def change(self) -> float | None:
        return self.tested if self.shown is None else math.expm1(self.shown)

    def beside(self, a: float, b: float) -> Change:
        """Return the same test with the change from figure ``a`` to ``b``, inside the interval.

        So no difference is reported where the figures show none, or the opposite of what they show.
        """
        return replace(self, shown=math.log(b / a), ci=widened(self.ci, b / a - 1))

    def verdict(self, real: bool) -> str:
        """Return differs, equal or inconclusive; ``real``: significant after the correction."""
        low, high = self.ci
        below, above = high is not None and high < 0, low is not None and low > 0
        size = min(abs(self.log_ratio), math.inf if self.shown is None else abs(self.shown))
        if real and (below or above or math.isinf(self.log_ratio)) and size >= self.least:
            return "differs"
        known = low is not None and high is not None
        return "equal" if known and max(-(low or 0.0), high or 0.0) < self.near else "inconclusive"

    def smallest_seen(self, tests: int) -> float | None:
        """Return the relative difference found with a power of 80 %, at 5 % over ``tests``."""
        if not math.isfinite(self.se):
            return None
        needed = student_quantile(1 - 0.025 / tests, self.df) + student_quantile(_POWER, self.df)
        return None if needed * self.se > _FARTHEST else max(math.expm1(needed * self.se), LEAST)


class Difference(Change):
    """The other's share less the reference's, not a log ratio; any significant one counts."""

    least, near = 0.0, ERROR_SHARE

    @property
    def tested(self) -> float:
        return self.log_ratio

    def smallest_seen(self, tests: int) -> None:
        """Return None: it depends on how many fail."""


def student_cdf(t: float, df: float) -> float:
    from scipy.special import ndtr, stdtr  # slow to import

    return float(ndtr(t) if math.isinf(df) else stdtr(df, t))


def student_quantile(probability: float, df: float) -> float:
    from scipy.special import ndtri, stdtrit

    return float(ndtri(probability) if math.isinf(df) else stdtrit(df, probability))


def widened(ci: Interval, change: float) -> Interval:
    """Return the interval, extended to include ``change``; an unknown end remains None."""
    low, high = ci
    low = None if low is None else min(low, change)
    return low, None if high is None else max(high, change)


def relative_end(log_ratio: float) -> float | None:
    """Return an interval end as a relative change; None beyond a thousandfold."""
    return math.expm1(log_ratio) if abs(log_ratio) <= _FARTHEST else None


def log_change(log_ratio: float, se: float, df: float) -> Change:
    """Test by Student's t; without scatter any difference is certain."""
    if not math.isfinite(se):
        return Change(log_ratio, se, df, 1.0, (None, None))
    p = 2 * student_cdf(-abs(log_ratio) / se, df) if se else float(log_ratio == 0)
    reach = student_quantile(0.975, df) * se
    ends = relative_end(log_ratio - reach), relative_end(log_ratio + reach)
    return Change(log_ratio, se, df, p, ends)


def enough_pairs(order: Sequence[float]) -> bool:
    """Return True if there is scatter left beside the mean and the effect of the order."""
    return len(order) > len(set(order))


def between_rounds(log_ratios: Floats, order: Floats) -> Change:
    """Return the mean log ratio of ``enough_pairs`` of stages.

    Their order is a second coefficient where it varies, so that a drift cancels.
    """
    n = len(log_ratios)
    columns = [np.ones(n)] + ([order] if len(set(order.tolist())) > 1 else [])
    df = n - len(columns)
    design = np.stack(columns, axis=1)
    inverse = np.linalg.inv(design.T @ design)
    beta = inverse @ design.T @ log_ratios
    residual = log_ratios - design @ beta
    se = math.sqrt(float(residual @ residual) / df * inverse[0, 0])
    mean, se = (x if abs(x) > 1e-12 else 0.0 for x in (float(beta[0]), se))  # rounding errors
    return log_change(mean, se, float(df))


def compare_shares(
    base: Sequence[Blocks],
    candidate: Sequence[Blocks],
    share: float,
    *,
    paired: bool,
    noise: float,
    slope: float = 1.0,
) -> Estimate:
    """Test whether the candidates' share over their threshold exceeds ``share``, the baseline's.

    ``paired``: all runs sent the same schedule, so that what the blocks have in common cancels.
    ``noise``: the assumed standard deviation from run to run, as a share, of the baseline at its
    quantile; ``slope`` times as much where the candidate's samples are. Variance by the means of
    blocks (t with 19 degrees of freedom), unpaired at least by the effective sample sizes.
    """
    sides = _residuals(base), _residuals(candidate)
    if paired:
        own = sides[0] - sides[0].mean(axis=0)
        within, one_run = _within(*sides), _mean_variance(own) * len(base) / max(len(base) - 1, 1)
    else:
        floors = [_binomial(side) for side in (base, candidate)]
        within = sum(map(max, (_mean_variance(x.mean(axis=0)) for x in sides), floors))
        one_run = max(_mean_variance(sides[0]), floors[0] * len(base))
    figures = np.array([b.share for b in base])
    worse = _share(candidate) - share
    return _estimate(worse, within, figures, len(candidate), one_run, noise, slope)


def compare_rates(
    base: Sequence[Blocks],
    candidate: Sequence[Blocks],
    tolerance: float,
    *,
    paired: bool,
    noise: float,
) -> Estimate:
    """Test whether the candidates' rate is below 1 / (1 + tolerance) times the baseline's.

    By the log of the ratio of totals; its variance is that of the blocks' residuals, relative to
    the rate (delta method). No rate at all counts as a loss of the whole rate.
    """
    rates = _share(base), _share(candidate)
    sides = [_residuals(x, r or math.inf) for x, r in zip((base, candidate), rates, strict=True)]
    within = _within(*sides) if paired else sum(_mean_variance(x.mean(axis=0)) for x in sides)
    lost = min(max(rates[0] / max(rates[1], 1e-12), 1e-6), 1e6)
    figures = np.log(np.maximum([b.share for b in base], 1e-12))
    worse = math.log(lost) - math.log1p(tolerance)
    return _estimate(worse, within, figures, len(candidate), _mean_variance(sides[0]), noise)


def _within(base: Floats, candidate: Floats) -> float:
    return _mean_variance(candidate.mean(axis=0) - base.mean(axis=0))


def _estimate(
    worse: float,
    within: float,
    figures: Floats,
    candidates: int,
    one_run: float,
    noise: float,
    slope: float = 1.0,
) -> Estimate:
    """Add the variance from run to run, by the ``figures`` of the baseline's runs.

    Degrees of freedom of the sum of both variances by Satterthwaite.
    """
    per_run, df = between_runs(figures, one_run, noise)
    between = slope**2 * per_run * (1 / len(figures) + 1 / candidates)
    total = within + between
    by_runs = 0.0 if math.isinf(df) else between**2 / df
    df = total**2 / (within**2 / (BLOCKS - 1) + by_runs or 1e-300) if total > 0 else math.inf
    return Estimate(worse, within, between, df)


def between_runs(figures: Floats, one_run: float, assumed: float) -> tuple[float, float]:
    """Return the variance from run to run and its degrees of freedom, by each baseline run.

    Variance beyond ``one_run``, that inside a run, is weighed with an assumption that counts as
    PRIOR_RUNS further runs (moderated variance; Smyth 2004). For one run it is the assumption.
    """
    df = len(figures) - 1
    if not df:
        return assumed**2, math.inf
    seen = max(0.0, float(figures.var(ddof=1)) - one_run)
    return (PRIOR_RUNS * assumed**2 + df * seen) / (PRIOR_RUNS + df), float(PRIOR_RUNS + df)


def holm(p_values: Sequence[float], alpha: float) -> list[bool]:
    """Return which hypotheses are rejected, at a family-wise error of ``alpha`` (Holm 1979)."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    rejected = [False] * len(p_values)
    for rank, index in enumerate(order):
        if p_values[index] > alpha / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected


def spent_at_looks(alpha: float, looks: int) -> list[float]:
    """Return what each of ``looks`` equally spaced looks spends of ``alpha``."""
    return spent_at(alpha, [k / looks for k in range(1, looks + 1)])


def spent_at(alpha: float, shares: Sequence[float]) -> list[float]:
    """Return what a look at each of these shares of the data, the last 1, spends of ``alpha``.

    By Pocock's spending function (Lan and DeMets 1983): alpha ln(1 + (e - 1) t) is spent at share t
    of the looks. The parts add up to alpha, so the error over all looks is at most alpha.
    """
    by = [alpha * math.log1p((math.e - 1) * share) for share in (0.0, *shares)]
    return [after - before for before, after in itertools.pairwise(by)]


def times_longer(
    estimate: Estimate, alpha_equivalence: float, alpha_regression: float
) -> float | None:
    """Return by how many times longer runs would decide; None where no length would."""
    alpha = alpha_regression if estimate.worse > 0 else alpha_equivalence
    needed = (estimate.worse / student_quantile(1 - alpha, estimate.df)) ** 2 - estimate.between
    return None if needed <= 0 else max(1.0, estimate.within / needed)


def speed_noise(
    found: Sequence[Observations], limits_s: Floats, share: float | None = None
) -> float:
    """Return how far the share over these limits moves when a run is slower by ASSUMED_NOISE.

    ``share``: the share, where it is known better. By the secant over the default tolerance, as a
    plateau has no other slope.
    """
    n = [o.n for o in found]
    here, above = (
        float(np.average([o.shares_over(x).mean() for o in found], weights=n))
        for x in (limits_s, limits_s * (1 + DEFAULT_TOLERANCE))
    )
    moved = max(0.0, (here if share is None else share) - above)
    return moved * ASSUMED_NOISE / DEFAULT_TOLERANCE


def queue_noise(in_flight: Floats, over: Floats, sizes: Floats) -> float:
    """Return how far queueing moves a share when a run is slower by ASSUMED_NOISE.

    ``over`` of ``sizes`` samples of each request and the requests it finds ``in_flight``, shape
    (n,). This is beyond the change of the samples' own times. A server that takes (1 + e) times as
    long equals the same one at (1 + e) times the rate on a slower clock. For a share p that depends
    on the number N in flight, dp / d ln(rate) = Cov(over, N): exact where N is a birth-death
    process with Poisson arrivals (P(N = n) proportional to rate^n); for M/M/1 it gives
    1 / (1 - load). 0 in a closed loop, where N is fixed.
    """
    n = float(sizes.sum())
    if not n:
        return 0.0
    apart = over - over.sum() / n * sizes
    return ASSUMED_NOISE * abs(float(apart @ (in_flight - in_flight.mean()))) / n


def _share(runs: Sequence[Blocks]) -> float:
    return float(sum(r.over.sum() for r in runs) / sum(r.size.sum() for r in runs))


def _residuals(runs: Sequence[Blocks], scale: float = 1.0) -> Floats:
    """(over - p size) / mean size / scale, shape (runs, BLOCKS)."""
    p = _share(runs)
    return np.stack([(r.over - p * r.size) / (scale * r.size.mean()) for r in runs])


def _mean_variance(series: Floats) -> float:
    """Variance of the mean over blocks (last axis), averaged over the runs (first axes)."""
    return float(np.mean(series.var(axis=-1, ddof=1)) / series.shape[-1])


def _binomial(runs: Sequence[Blocks]) -> float:
    p = min(max(_share(runs), 0.0), 1.0)
    return p * (1 - p) / max(sum(r.effective for r in runs), 1.0)
