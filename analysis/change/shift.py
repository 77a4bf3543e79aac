"""How one run differs from another, quantile by quantile (the shift function; Doksum 1974), and how sure that is.

One stage against one stage: which share of the other's samples is above the reference's quantile, in twenty
blocks, by the gate's test (ampacity.analysis.change.regression), with the noise of a run's speed as a queue amplifies it. Interleaved stages (ampacity ab): the log ratio of each pair of stages is one
observation, and what the order of the two does is taken out by regression, so that a drift over the run cancels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ampacity.analysis.change.baseline import DEFAULT_TOLERANCE, assumed_noise
from ampacity.analysis.change.blocks import (
    Blocks,
    LevelRecords,
    Marks,
    blocks_of,
    blocks_over,
    endless,
    moved_by,
    over_each,
    pooled_marks,
)
from ampacity.analysis.change.regression import (
    ASSUMED_NOISE,
    Estimate,
    compare_rates,
    compare_shares,
    student_cdf,
    student_quantile,
)
from ampacity.analysis.metrics.observations import Observations
from ampacity.analysis.metrics.requests import Floats
from ampacity.analysis.stats.intervals import CONFIDENCE, few_by_chance, smallest_n
from ampacity.analysis.warnings import ERROR_SHARE

QUANTILES = (*(k / 10 for k in range(1, 10)), 0.95, 0.99)
EQUAL = DEFAULT_TOLERANCE  # a difference whose whole interval is smaller is none that matters
LEAST = 0.02  # and one that is not beyond this is none, however sure: two runs of one thing differ by as much (2.8 s.d.)
TOGETHER = "0: tokens that came together reach into it"
NOTHING_COUNTS = "no request counts"
TOO_FEW_PAIRS = "too few pairs of stages: use more --rounds"
_FARTHEST = math.log(
    1000.0
)  # an end of an interval, or a difference, beyond a thousandfold is not known
NOISE_MOST = (
    0.03  # of a share: the noise of a run's speed says little where all samples are nearly equal
)
_POWER = 0.8
TAIL = 0.99  # from here on a quantile whose interval has no upper end is only a lower bound
_RUN_TO_RUN = math.sqrt(2) * ASSUMED_NOISE  # between two runs, where nothing shows their noise


@dataclass(frozen=True)
class Change:
    """The other over the reference, as a log ratio. ``p`` is two-sided, ``ci`` the 95 % interval of the ratio - 1.

    ``log_ratio`` is what is tested; inf where only the other is infinite, -inf where only the reference is.
    ``shown``: the log ratio of the two figures that are printed, where it is not that (``beside``).
    """

    least: ClassVar[float] = math.log1p(LEAST)
    near: ClassVar[float] = EQUAL

    log_ratio: float
    se: float
    df: float
    p: float
    ci: tuple[float | None, float | None]
    shown: float | None = None

    @property
    def tested(self) -> float | None:
        return None if not math.isfinite(self.log_ratio) else math.expm1(self.log_ratio)

    @property
    def change(self) -> float | None:
        return self.tested if self.shown is None else math.expm1(self.shown)

    def beside(self, a: float, b: float) -> Change:
        """The same test beside the figures ``a`` and ``b``: the change is theirs, and the interval is drawn out to hold it.

        So nothing differs whose figures do not, nor goes the other way than they do.
        """
        change, (low, high) = b / a - 1, self.ci
        ends = (
            None if low is None else min(low, change),
            None if high is None else max(high, change),
        )
        return replace(self, shown=math.log(b / a), ci=ends)

    def verdict(self, real: bool) -> str:
        """differs | equal | open; ``real``: it has survived the correction over all tests. The interval must say so too."""
        low, high = self.ci
        apart = (
            (low is not None and low > 0)
            or (high is not None and high < 0)
            or math.isinf(self.log_ratio)
        )
        size = min(abs(self.log_ratio), math.inf if self.shown is None else abs(self.shown))
        if real and apart and size >= self.least:
            return "differs"
        return (
            "equal"
            if low is not None and high is not None and max(-low, high) < self.near
            else "open"
        )

    def smallest_seen(self, tests: int) -> float | None:
        """The relative difference that a comparison with this noise finds in 8 of 10 cases, 5 % over ``tests`` together."""
        if not math.isfinite(self.se):
            return None
        needed = student_quantile(1 - 0.025 / tests, self.df) + student_quantile(_POWER, self.df)
        return None if needed * self.se > _FARTHEST else max(math.expm1(needed * self.se), LEAST)


class Difference(Change):
    """The other's share less the reference's, in place of the log ratio; any that is no chance counts."""

    least, near = 0.0, ERROR_SHARE

    @property
    def tested(self) -> float:
        return self.log_ratio

    def smallest_seen(self, tests: int) -> None:
        """Not given: it depends on how many fail."""


def log_change(log_ratio: float, se: float, df: float) -> Change:
    """By Student's t; without any scatter a difference is certain, and none is none."""
    if not math.isfinite(se):
        return Change(log_ratio, se, df, 1.0, (None, None))
    if se == 0:
        p, reach = float(log_ratio == 0), 0.0
    else:
        p, reach = 2 * student_cdf(-abs(log_ratio) / se, df), student_quantile(0.975, df) * se
    return Change(log_ratio, se, df, p, (_end(log_ratio - reach), _end(log_ratio + reach)))


def _end(log_ratio: float) -> float | None:
    """An end of an interval as a relative change; None where it is not known."""
    return math.expm1(log_ratio) if abs(log_ratio) <= _FARTHEST else None


@dataclass(frozen=True)
class Quantile:
    """``values``: of the reference and the other, s, inf where what failed or was cut off reaches into it (``endless``: which); each, and the change, or why not."""

    values: tuple[float | str, float | str]
    change: Change | str
    endless: str = ""
    at_least: tuple[bool, bool] = (
        False,
        False,
    )  # which of the two has an interval without an upper end


@dataclass(frozen=True)
class Pair:
    """A stage of the reference and one of the other; ``order`` is 1 where the reference's ran first, -1 where last."""

    reference: LevelRecords
    other: LevelRecords
    same_schedule: bool
    order: float = 1.0


def enough_pairs(order: Sequence[float]) -> bool:
    """For a mean, the effect of the order where it varies, and a scatter."""
    return len(order) > len(set(order))


def between_rounds(log_ratios: Floats, order: Floats) -> Change:
    """Mean of the log ratios of ``enough_pairs`` of stages; their order's effect is a second coefficient where it varies."""
    n = len(log_ratios)
    columns = [np.ones(n)] + ([order] if len(set(order.tolist())) > 1 else [])
    df = n - len(columns)
    design = np.stack(columns, axis=1)
    inverse = np.linalg.inv(design.T @ design)
    beta = inverse @ design.T @ log_ratios
    residual = log_ratios - design @ beta
    se = math.sqrt(float(residual @ residual) / df * inverse[0, 0])
    scale = 1e-12  # rounding is no scatter
    return log_change(
        float(beta[0]) if abs(beta[0]) > scale else 0.0, se if se > scale else 0.0, float(df)
    )


def quantile_change(pairs: Sequence[Pair], metric: str, q: float) -> Quantile:
    """One quantile of both, and how it changes."""
    found = [(p.reference.metrics[metric], p.other.metrics[metric]) for p in pairs]
    sides = [[o[side] for o in found] for side in range(2)]
    a, b = (_value(side, q) for side in sides)
    if isinstance(a, str) or isinstance(b, str):
        return Quantile((a, b), a if isinstance(a, str) else str(b))
    why = endless([o for both in found for o in both])
    least = (_no_upper_end(sides[0], q), _no_upper_end(sides[1], q))
    if math.isinf(a) and math.isinf(b):
        return Quantile((a, b), why, why)
    change: Change | str
    if len(pairs) == 1:
        change = _by_shares(pairs[0], metric, q, math.inf in (a, b))
    else:
        order = np.array([p.order for p in pairs])
        if math.isfinite(a) and math.isfinite(b):
            ratios = [math.log(y.quantile_bounds(q)[1] / x.quantile_bounds(q)[1]) for x, y in found]
            change = between_rounds(np.array(ratios), order)
        else:
            over = np.array(
                [[o.shares_over(np.array([min(a, b)]))[0] for o in pair] for pair in found]
            )
            change = between_rounds(over[:, 1] - over[:, 0], order)
            change = replace(
                change, log_ratio=math.copysign(math.inf, b - a), se=math.inf, ci=(None, None)
            )
    if isinstance(change, str) or math.isinf(change.log_ratio):
        return Quantile((a, b), change, why, least)
    return Quantile((a, b), change.beside(a, b), why, least)


def _no_upper_end(found: Sequence[Observations], q: float) -> bool:
    """Whether the stages of one side, taken together, are too short to know how high a p99 may be; of others it is not said."""
    if q < TAIL or not all(o.n for o in found):
        return False
    if len(found) == 1:
        return not math.isfinite(found[0].confidence_interval(q)[1])
    n = sum(o.n for o in found)
    tau = n / sum(o.n / o.clustering(q)[0] for o in found)
    likely = sum(o.n * o.likely_cluster for o in found) / n
    return float(few_by_chance(0, n, 1 - q, tau, likely)) > (1 - CONFIDENCE) / 2


def _value(found: Sequence[Observations], q: float) -> float | str:
    """The quantile of one side, in the geometric mean over its stages, each of which has the requests that it takes."""
    reason = next(
        (o.reason or "no request has a value" for o in found if o.reason or not o.n), None
    )
    needed, has = max(smallest_n(q), smallest_n(1 - q)), min(o.n_owners for o in found)
    if reason or has < needed:
        return (
            reason
            or f"needs {needed} requests{' in each stage' if len(found) > 1 else ''}, has {has}"
        )
    seconds = np.array([o.quantile_bounds(q)[1] for o in found])
    return float(np.exp(np.log(seconds).mean())) if seconds.all() else TOGETHER


def queue_noise(level: LevelRecords, over: Floats, sizes: Floats) -> float:
    """How far a share moves where a run is slower by ASSUMED_NOISE, beyond its samples' own times being longer by that.

    ``over`` of ``sizes`` samples of each request, shape (n,), are counted. A server that takes (1 + e) times as long is the same
    one at (1 + e) times the rate, in a time that runs slower. What the rate does to a share p that depends on the number N in flight
    is dp / d ln(rate) = Cov(over, N), N as each request found it: exact where the numbers in flight are a birth-death process with
    Poisson arrivals (M/M/c, or any service rate that depends on N: P(N = n) is proportional to rate^n).
    Of M/M/1 it gives 1 / (1 - load). 0 in a closed loop, where N is set.
    """
    n = level.cohort.in_flight
    if n is None or not sizes.sum():
        return 0.0
    share = over.sum() / sizes.sum()
    return ASSUMED_NOISE * abs(float((over - share * sizes) @ (n - n.mean()))) / float(sizes.sum())


def _by_shares(pair: Pair, metric: str, q: float, endless: bool) -> Change | str:
    """``endless``: one of the two is infinite; what is over the other's quantile tells all the same."""
    a, b = pair.reference.metrics[metric], pair.other.metrics[metric]
    marks, its_own = pooled_marks([a], q), pooled_marks([b], q)
    if endless and isinstance(marks, str) and not isinstance(its_own, str):
        change = _by_shares(
            replace(pair, reference=pair.other, other=pair.reference), metric, q, endless
        )
        if isinstance(change, str):
            return change
        least = change.ci[0]
        return replace(
            change, log_ratio=-math.inf, ci=(None, None if least is None else 1 / (1 + least) - 1)
        )
    if isinstance(marks, str) or (isinstance(its_own, str) and not endless):
        return marks if isinstance(marks, str) else str(its_own)
    where = marks if isinstance(its_own, str) else its_own
    queue = _queue_noise(pair, ((a, marks), (b, where)))
    noise = math.hypot(queue, min(assumed_noise([a], marks.limits_s, 1 - q), NOISE_MOST))
    paired = pair.same_schedule
    base = [blocks_over(a, marks, paired=paired)]

    def compared(limits: Marks, noise: float) -> Estimate:
        return compare_shares(
            base, [blocks_over(b, limits, paired=paired)], 1 - q, paired=paired, noise=noise
        )

    slower, faster = (
        compared(marks.times(factor), noise) for factor in (1 + LEAST, 1 / (1 + LEAST))
    )
    p = min(1.0, 2 * min(slower.p_regression, faster.p_equivalence))
    e = compared(where, queue)  # for the interval: shares over each one's own quantile
    t = student_quantile(0.975, e.df)
    low, middle, high = (moved_by([b], marks, 1 - q + x * t * e.se) for x in (1, 0, -1))
    if isinstance(its_own, str):
        least = None if not low else _end(math.log(low) - t * _RUN_TO_RUN)
        return Change(math.inf, math.inf, e.df, p, (least, None))
    log_ratio = math.log(middle or float(np.median(its_own.limits_s) / np.median(marks.limits_s)))
    down, up = (
        math.hypot(abs(log_ratio - math.log(end)), t * _RUN_TO_RUN) if end else math.inf
        for end in (low, high)
    )
    ends = (_end(log_ratio - down), _end(log_ratio + up))
    return Change(log_ratio, (down + up) / (2 * t), e.df, p, ends)


def _queue_noise(pair: Pair, marked: Sequence[tuple[Observations, Marks]]) -> float:
    """Of both runs in the mean, as a share."""
    levels = (pair.reference, pair.other)
    found = [
        queue_noise(x, over_each(o, m), o.sizes) for x, (o, m) in zip(levels, marked, strict=True)
    ]
    return float(np.mean(found))


def failed_change(pairs: Sequence[Pair]) -> Difference:
    """Of the share of failed requests; by pairs of stages where there are several, else by blocks."""
    a, b = (
        [blocks_of(level.failed) for level in side]
        for side in zip(*((p.reference, p.other) for p in pairs), strict=True)
    )
    if len(pairs) == 1:
        e = compare_shares(a, b, a[0].share, paired=pairs[0].same_schedule, noise=0.0)
        worse, se, df = e.worse, e.se, e.df
    else:
        apart = np.array([y.share - x.share for x, y in zip(a, b, strict=True)])
        found = between_rounds(apart, np.array([p.order for p in pairs]))
        worse, se, df = found.log_ratio, found.se, found.df
    n, m = (sum(float(x.size.sum()) for x in side) for side in (a, b))
    share = (sum(x.over.sum() for x in (*a, *b)) + 1) / (
        n + m + 2
    )  # no failure at all has a variance too
    least = math.sqrt(share * (1 - share) * (1 / n + 1 / m))
    se, df = (least, math.inf) if se < least else (se, df)
    reach = student_quantile(0.975, df) * se
    return Difference(
        worse, se, df, 2 * student_cdf(-abs(worse) / se, df), (worse - reach, worse + reach)
    )


def rate_change(a: Blocks, b: Blocks, *, paired: bool, noise: float) -> Change | str:
    """Of a rate per unit of ``size``, by the gate's test; ``noise`` (s.d.) from one run to the next."""
    if not (a.over.sum() > 0 and b.over.sum() > 0):
        return NOTHING_COUNTS
    e = compare_rates([a], [b], 0.0, paired=paired, noise=noise)
    return log_change(-e.worse, e.se, e.df)


def as_dict(q: float, found: Quantile, real: bool, tests: int) -> dict[str, Any]:
    """One quantile for the file; of an infinite one the value is null and ``infinite`` names it.

    ``change`` is that of the two values; ``shift``, that of the quantile's neighbourhood, is what is tested.
    """
    values, change = found.values, found.change
    a, b = (None if isinstance(v, str) or math.isinf(v) else v for v in values)
    endless = [
        side for side, v in zip(("reference", "other"), values, strict=True) if v == math.inf
    ]
    held = (
        {
            "change": None,
            "change_ci": None,
            "shift": None,
            "slower": None,
            "p": None,
            "smallest_seen": None,
            "verdict": "unknown",
        }
        if isinstance(change, str)
        else {
            "change": change.change,
            "change_ci": list(change.ci),
            "shift": change.tested,
            "slower": change.log_ratio > 0,
            "p": change.p,
            "smallest_seen": change.smallest_seen(tests),
            "verdict": change.verdict(real),
        }
    )
    reason = change if isinstance(change, str) else found.endless if endless else None
    return {
        "q": q,
        "reference_s": a,
        "other_s": b,
        "infinite": endless,
        "at_least": list(found.at_least),
        **held,
        "reason": reason,
    }
