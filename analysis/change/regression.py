"""Has a metric become worse by more than its tolerance? The test, and the correction over many metrics.

A quantile is compared as a share: with Q the baseline's quantile q and t the tolerance, a run is worse when more
than 1 - q of its samples are above (1 + t) Q, and no worse when fewer are. No density is estimated, so step times
that repeat (plateaus) do no harm. docs/methods.md, "Comparing two runs".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ampacity.analysis.change.blocks import BLOCKS, Blocks
from ampacity.analysis.metrics.requests import Floats

ALPHA = 0.05
ASSUMED_NOISE = 0.005  # of a run's speed against the next, while one baseline run is all there is
PRIOR_RUNS = 4  # so many runs is the assumption worth beside what the baseline runs show


@dataclass(frozen=True)
class Estimate:
    """``worse`` is what lies beyond the tolerance (> 0: worse), with its standard error in two parts."""

    worse: float
    within: float  # variance of what happened inside the runs; falls with their length
    between: float  # variance from run to run; falls with their number
    df: float

    @property
    def se(self) -> float:
        return math.sqrt(self.within + self.between)

    @property
    def p_regression(self) -> float:
        """Of "no worse than the tolerance"."""
        return 1.0 - self._probability()

    @property
    def p_equivalence(self) -> float:
        """Of "worse than the tolerance, or just as much"."""
        return self._probability()

    def _probability(self) -> float:
        if self.se == 0:
            return 0.5 if self.worse == 0 else float(self.worse > 0)
        return student_cdf(self.worse / self.se, self.df)


def student_cdf(t: float, df: float) -> float:
    from scipy.special import ndtr, stdtr  # here: slow to import

    return float(ndtr(t) if math.isinf(df) else stdtr(df, t))


def student_quantile(probability: float, df: float) -> float:
    from scipy.special import ndtri, stdtrit

    return float(ndtri(probability) if math.isinf(df) else stdtrit(df, probability))


def compare_shares(
    base: Sequence[Blocks],
    candidate: Sequence[Blocks],
    share: float,
    *,
    paired: bool,
    noise: float,
    slope: float = 1.0,
) -> Estimate:
    """Is the candidates' share over their threshold above ``share``, which is the baseline runs' over theirs?

    ``paired``: all runs sent the same schedule, so that what the blocks have in common cancels. ``noise``: standard
    deviation from run to run that is assumed, as a share; it is that of the baseline at its quantile, and ``slope``
    times as much where the candidate's samples lie. Variance by the means of blocks (t with 19 degrees of
    freedom); without pairing it is at least what the effective sample sizes say.
    """
    ours, theirs = _residuals(candidate), _residuals(base)
    p_candidate, p_base = _share(candidate), _share(base)
    if paired:
        within = _mean_variance(ours.mean(axis=0) - theirs.mean(axis=0))
        one_run = _mean_variance(theirs - theirs.mean(axis=0)) * len(base) / max(len(base) - 1, 1)
    else:
        within = max(_mean_variance(ours.mean(axis=0)), _binomial(p_candidate, candidate))
        within += max(_mean_variance(theirs.mean(axis=0)), _binomial(p_base, base))
        one_run = max(_mean_variance(theirs), _binomial(p_base, base) * len(base))
    per_run, df = between_runs(np.array([b.share for b in base]), one_run, noise)
    between = slope**2 * per_run * (1 / len(base) + 1 / len(candidate))
    return Estimate(p_candidate - share, within, between, _satterthwaite(within, between, df))


def compare_rates(
    base: Sequence[Blocks],
    candidate: Sequence[Blocks],
    tolerance: float,
    *,
    paired: bool,
    noise: float,
) -> Estimate:
    """Is the candidates' rate lower than 1 / (1 + tolerance) times the baseline's? The log of a ratio of totals.

    Its variance is that of the blocks' residuals, relative to the rate (delta method); no rate at all is a whole rate lower.
    """
    theirs, ours = ([r.share for r in side] for side in (base, candidate))
    spread = [
        np.stack([(r.over - _share(side) * r.size) / (_share(side) * r.size.mean()) for r in side])
        if _share(side) > 0
        else np.zeros((len(side), BLOCKS))
        for side in (base, candidate)
    ]
    lost = min(_share(base) / max(_share(candidate), 1e-12), 1e6)
    if paired:
        within = _mean_variance(spread[1].mean(axis=0) - spread[0].mean(axis=0))
    else:
        within = sum(_mean_variance(side.mean(axis=0)) for side in spread)
    figures = np.log(np.maximum(theirs, 1e-12))
    per_run, df = between_runs(figures, _mean_variance(spread[0]), noise)
    between = per_run * (1 / len(theirs) + 1 / len(ours))
    worse = math.log(max(lost, 1e-6)) - math.log1p(tolerance)
    return Estimate(worse, within, between, _satterthwaite(within, between, df))


def between_runs(figures: Floats, one_run: float, assumed: float) -> tuple[float, float]:
    """(variance from run to run, its degrees of freedom) from the figure of each baseline run.

    What the figures vary by beyond ``one_run``, the variance inside a run, weighed with an assumption that
    counts as PRIOR_RUNS further runs (a moderated variance; Smyth 2004). One run shows nothing: the assumption.
    """
    if len(figures) == 1:
        return assumed**2, math.inf
    seen = max(0.0, float(figures.var(ddof=1)) - one_run)
    df = len(figures) - 1
    return (PRIOR_RUNS * assumed**2 + df * seen) / (PRIOR_RUNS + df), float(PRIOR_RUNS + df)


def holm(p_values: Sequence[float], alpha: float) -> list[bool]:
    """Which hypotheses are rejected with the chance of any false rejection at most ``alpha`` (Holm 1979)."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    rejected = [False] * len(p_values)
    for rank, index in enumerate(order):
        if p_values[index] > alpha / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected


def spent_at_looks(alpha: float, looks: int) -> list[float]:
    """What each of ``looks`` equally spaced looks may spend of ``alpha``: Pocock's function (Lan and DeMets 1983).

    alpha ln(1 + (e - 1) t) is spent by the share t of the looks. Each look is a test at its own part; the parts add up
    to alpha, so that the chance of any error over all looks is at most alpha, however the looks depend on each other.
    """
    by = [alpha * math.log1p((math.e - 1) * k / looks) for k in range(looks + 1)]
    return [after - before for before, after in itertools.pairwise(by)]


def times_longer(
    estimate: Estimate, alpha_equivalence: float, alpha_regression: float
) -> float | None:
    """How many times as long runs would decide if the difference stays; None where length alone does not help."""
    alpha = alpha_regression if estimate.worse > 0 else alpha_equivalence
    needed = (estimate.worse / student_quantile(1 - alpha, estimate.df)) ** 2 - estimate.between
    return None if needed <= 0 else max(1.0, estimate.within / needed)


def _share(runs: Sequence[Blocks]) -> float:
    return float(sum(r.over.sum() for r in runs) / sum(r.size.sum() for r in runs))


def _residuals(runs: Sequence[Blocks]) -> Floats:
    """(over - p size) / mean size, of shape (runs, BLOCKS)."""
    p = _share(runs)
    return np.stack([(r.over - p * r.size) / r.size.mean() for r in runs])


def _mean_variance(series: Floats) -> float:
    """Variance of the mean over blocks (last axis), averaged over the runs in front of it."""
    return float(np.mean(series.var(axis=-1, ddof=1)) / series.shape[-1])


def _binomial(p: float, runs: Sequence[Blocks]) -> float:
    p = min(max(p, 0.0), 1.0)
    return p * (1 - p) / max(sum(r.effective for r in runs), 1.0)


def _satterthwaite(within: float, between: float, df: float) -> float:
    """Degrees of freedom of a sum of two estimated variances."""
    total = within + between
    if total <= 0:
        return math.inf
    return total**2 / (
        within**2 / (BLOCKS - 1) + (0.0 if math.isinf(df) else between**2 / df) or 1e-300
    )
