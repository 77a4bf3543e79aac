"""Compare one run with another, quantile by quantile (shift function; Doksum 1974).

One stage against one stage: the share of the other's samples above the reference's quantile, in
blocks, as the gate counts it (engine.py, quantiles.py), with the noise of a run's speed as a queue
amplifies it. Interleaved stages (ampacity ab): the log ratio of each pair of stages is one
observation; the effect of the order is removed by regression, so that a drift over the run cancels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ampacity.analysis.change import engine, samples
from ampacity.analysis.change.quantiles import Reference
from ampacity.analysis.change.results import QuantileChange
from ampacity.analysis.change.samples import Blocks, LevelRecords, Marks
from ampacity.analysis.metrics.observations import Observations
from ampacity.analysis.stats.intervals import CONFIDENCE, few_by_chance, smallest_n

QUANTILES = (*(k / 10 for k in range(1, 10)), 0.95, 0.99)
NOTHING_COUNTS = "no request counts"
NOISE_MOST = 0.03  # of a share: speed noise says little where nearly all samples are equal
TAIL = 0.99  # from here on a quantile whose interval has no upper end is only a lower bound
_RUN_TO_RUN = math.sqrt(2) * engine.ASSUMED_NOISE  # where nothing shows it


@dataclass(frozen=True)
class Quantile:
    """A quantile of the reference and of the other with its change; a reason in place of unknowns.

    ``values`` in s, inf where failed or cut-off requests reach into it (``endless`` says which).
    ``at_least``: which of the two has an interval without an upper end.
    """

    values: tuple[float | str, float | str]
    change: engine.Change | str
    endless: str = ""
    at_least: tuple[bool, bool] = (False, False)


@dataclass(frozen=True)
class Pair:
    """Two stages; ``order`` is 1 where the reference's ran first, -1 where it ran last."""

    reference: LevelRecords
    other: LevelRecords
    same_schedule: bool
    order: float = 1.0


def orders(pairs: Sequence[Pair]) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array([p.order for p in pairs])


def quantile_change(pairs: Sequence[Pair], metric: str, q: float) -> Quantile:
    found = [(p.reference.metrics[metric], p.other.metrics[metric]) for p in pairs]
    sides = [[o[side] for o in found] for side in range(2)]
    a, b = (_value(side, q) for side in sides)
    if isinstance(a, str) or isinstance(b, str):
        return Quantile((a, b), a if isinstance(a, str) else str(b))
    why = samples.endless([o for both in found for o in both])
    if math.isinf(a) and math.isinf(b):
        return Quantile((a, b), why, why)
    change: engine.Change | str
    if len(pairs) == 1:
        change = _by_shares(pairs[0], metric, q, math.inf in (a, b))
    elif math.isfinite(a) and math.isfinite(b):
        ratios = [math.log(y.quantile_bounds(q)[1] / x.quantile_bounds(q)[1]) for x, y in found]
        change = engine.between_rounds(np.array(ratios), orders(pairs))
    else:
        limit = np.array([min(a, b)])
        over = np.array([[o.shares_over(limit)[0] for o in pair] for pair in found])
        change = engine.between_rounds(over[:, 1] - over[:, 0], orders(pairs))
        sign = math.copysign(math.inf, b - a)
        change = replace(change, log_ratio=sign, se=math.inf, ci=(None, None))
    if isinstance(change, engine.Change) and math.isfinite(change.log_ratio):
        change = change.beside(a, b)
    least = (_no_upper_end(sides[0], q), _no_upper_end(sides[1], q))
    return Quantile((a, b), change, why, least)


def _no_upper_end(found: Sequence[Observations], q: float) -> bool:
    """Return True if the stages of one side are together too short for an upper end of a p99."""
    if q < TAIL or not all(o.n for o in found):
        return False
    if len(found) == 1:
        return not math.isfinite(found[0].confidence_interval(q)[1])
    n = sum(o.n for o in found)
    tau = n / sum(o.n / o.clustering(q)[0] for o in found)
    likely = sum(o.n * o.likely_cluster for o in found) / n
    return float(few_by_chance(0, n, 1 - q, tau, likely)) > (1 - CONFIDENCE) / 2


def _value(found: Sequence[Observations], q: float) -> float | str:
    """Return the geometric mean of a quantile over the stages of one side, or why it is unknown."""
    needed, has = max(smallest_n(q), smallest_n(1 - q)), min(o.n_owners for o in found)
    if reason := samples.no_values(found):
        return reason
    if has < needed:
        return f"needs {needed} requests{' in each stage' if len(found) > 1 else ''}, has {has}"
    seconds = np.array([o.quantile_bounds(q)[1] for o in found])
    return float(np.exp(np.log(seconds).mean())) if seconds.all() else samples.TOGETHER


def _by_shares(pair: Pair, metric: str, q: float, one_endless: bool) -> engine.Change | str:
    """Compare one stage with one; ``one_endless``: one of the two quantiles is infinite."""
    a, b = pair.reference.metrics[metric], pair.other.metrics[metric]
    marks, its_own = samples.pooled_marks([a], q), samples.pooled_marks([b], q)
    if one_endless and isinstance(marks, str) and not isinstance(its_own, str):
        swapped = replace(pair, reference=pair.other, other=pair.reference)
        change = _by_shares(swapped, metric, q, one_endless)
        if isinstance(change, str):
            return change
        least = change.ci[0]
        high = None if least is None else 1 / (1 + least) - 1
        return replace(change, log_ratio=-math.inf, ci=(None, high))
    if isinstance(marks, str) or (isinstance(its_own, str) and not one_endless):
        return marks if isinstance(marks, str) else str(its_own)
    where = marks if isinstance(its_own, str) else its_own
    paired = pair.same_schedule
    reference = Reference(q, marks, [samples.blocks_over(a, marks, paired=paired)])

    def compared(limits: Marks, noise: float) -> engine.Estimate:
        over = samples.blocks_over(b, limits, paired=paired)
        return reference.test([over], paired=paired, noise=noise)

    levels = (pair.reference, a, marks), (pair.other, b, where)
    over = [(x.at_arrival, samples.over_each(o, m), o.sizes) for x, o, m in levels]
    queue = float(np.mean([engine.queue_noise(*x) for x in over]))
    noise = math.hypot(queue, min(engine.speed_noise([a], marks.limits_s, 1 - q), NOISE_MOST))
    slower = compared(marks.times(1 + engine.LEAST), noise).p_regression
    faster = compared(marks.times(1 / (1 + engine.LEAST)), noise).p_equivalence
    p = min(1.0, 2 * min(slower, faster))
    e = compared(where, queue)  # for the interval: shares over each one's own quantile
    t = engine.student_quantile(0.975, e.df)
    low, middle, high = reference.factors([b], e)
    if isinstance(its_own, str):
        least = None if not low else engine.relative_end(math.log(low) - t * _RUN_TO_RUN)
        return engine.Change(math.inf, math.inf, e.df, p, (least, None))
    log_ratio = math.log(middle or its_own.middle_s / marks.middle_s)
    down, up = (
        math.hypot(abs(log_ratio - math.log(end)), t * _RUN_TO_RUN) if end else math.inf
        for end in (low, high)
    )
    ends = (engine.relative_end(log_ratio - down), engine.relative_end(log_ratio + up))
    return engine.Change(log_ratio, (down + up) / (2 * t), e.df, p, ends)


def failed_change(pairs: Sequence[Pair]) -> engine.Difference:
    """Compare the shares of failed requests: by pairs of stages, or by blocks of a single pair."""
    a = [samples.blocks_of(p.reference.failed) for p in pairs]
    b = [samples.blocks_of(p.other.failed) for p in pairs]
    if len(pairs) == 1:
        e = engine.compare_shares(a, b, a[0].share, paired=pairs[0].same_schedule, noise=0.0)
        worse, se, df = e.worse, e.se, e.df
    else:
        apart = np.array([y.share - x.share for x, y in zip(a, b, strict=True)])
        found = engine.between_rounds(apart, orders(pairs))
        worse, se, df = found.log_ratio, found.se, found.df
    n, m = (sum(float(x.size.sum()) for x in side) for side in (a, b))
    # A share of no failures has a variance as well
    share = (sum(x.over.sum() for x in (*a, *b)) + 1) / (n + m + 2)
    least = math.sqrt(share * (1 - share) * (1 / n + 1 / m))
    se, df = (least, math.inf) if se < least else (se, df)
    reach, p = engine.student_quantile(0.975, df) * se, 2 * engine.student_cdf(-abs(worse) / se, df)
    return engine.Difference(worse, se, df, p, (worse - reach, worse + reach))


def rate_change(a: Blocks, b: Blocks, *, paired: bool, noise: float) -> engine.Change | str:
    """Compare rates per unit of ``size``; ``noise``: s.d. of the log from run to run."""
    if not (a.over.sum() > 0 and b.over.sum() > 0):
        return NOTHING_COUNTS
    e = engine.compare_rates([a], [b], 0.0, paired=paired, noise=noise)
    return engine.log_change(-e.worse, e.se, e.df)


def quantile_result(q: float, found: Quantile, real: bool, tests: int) -> QuantileChange:
    """Return one quantile for the result; ``real``: its change is significant among ``tests``."""
    change = found.change
    a, b = (None if isinstance(v, str) or math.isinf(v) else v for v in found.values)
    sides = zip(("reference", "other"), found.values, strict=True)
    infinite = [side for side, v in sides if v == math.inf]
    head = q, a, b, infinite, list(found.at_least)
    if isinstance(change, str):
        return QuantileChange(*head, reason=change)
    tested = change.change, change.ci, change.tested, change.log_ratio > 0, change.p
    reason = found.endless if infinite else None
    seen = change.smallest_seen(tests)
    return QuantileChange(*head, *tested, seen, change.verdict(real), reason)
