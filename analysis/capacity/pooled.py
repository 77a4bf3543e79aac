"""The capacity and C_max of a run, estimated from all open stages together.

Of several SLOs the lowest limit of ``ampacity.analysis.capacity.posterior`` counts.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ampacity.analysis.capacity.levels import Level, surely_violated, violations_above_met
from ampacity.analysis.capacity.posterior import (
    NEAR,
    Posterior,
    Saturation,
    begun_share,
    looks_of,
    posterior_of,
    saturation_of,
    steady_limit,
)
from ampacity.analysis.metrics.requests import Floats
from ampacity.analysis.slo import EXTREMES, WAITS, Slo

POOLED = (
    "all open stages together: near the limit the share of misses rises exponentially with the "
    "load (slope and crossing unknown, flat priors, 95 % of the posterior), each stage counts by "
    "its effective sample size"
)
LONE_MISSES = (
    "at the lowest loads requests miss {} nearly as often as it allows, so that the load hardly decides "
    "whether it is met: a laxer limit or shorter requests tell more"
)
NOT_ALL_MEASURED = "no stage can show whether all SLOs are met ({})"
# requests in which an idle queue fills to its mean, per rho / (1 - rho)^2; 0.4 to 0.7 measured
FILLS = 0.5
SAME_LOAD = 0.02  # in ln(load)
COARSE = math.log(1.5)  # in ln(load): a gap between two loads that no model is trusted to fill
FITS = 4  # of C_max, each weighted by the one before
MAY_BE_FIRST = 0.1  # chance of breaking first, below which an SLO is not named


@dataclass(frozen=True)
class Estimate:
    """Capacity in requests/s and C_max, with 95 % intervals, from all stages."""

    capacity_rps: float
    capacity_rps_ci: tuple[float, float]
    c_max: float | None
    c_max_ci: tuple[float, float] | None
    binding: tuple[Slo, ...]  # the SLO that breaks first, then those that may as well be the first
    # of the SLO with the lowest x*: by how much the log-odds of a miss rise with ln(load)
    slope: float
    nearest: int | None  # index of the stage nearest to the capacity whose rates are figures
    # one that a lone request may miss nearly as often as is allowed: no load is known to meet it
    lone: Slo | None = None

    @property
    def relative_error(self) -> float:
        """Return half the interval over its figure."""
        return (self.capacity_rps_ci[1] - self.capacity_rps_ci[0]) / 2 / self.capacity_rps

    def is_wide(self, times: float) -> bool:
        """Return whether the upper end is ``times`` the lower one or more, as of a doubled load."""
        return self.capacity_rps_ci[1] >= times * self.capacity_rps_ci[0]


def estimate(levels: Sequence[Level], slos: Sequence[Slo]) -> Estimate | None:
    """Return the pooled estimate from open levels, in order of load.

    None unless both sides of the limit were tried and every SLO was measured.
    """
    if not is_bracketed(levels, slos):
        return None
    found = {slo: post for slo in slos if (post := posterior_of(levels, slo)) is not None}
    limits = list(found.values())
    if not any(slo.metric in WAITS for slo in slos) and (steady := steady_limit(levels)):
        limits.append(steady)
    lowest, tightest = _lowest(limits), min(found.values(), key=lambda post: post.at(0.5))
    contradicted = False
    if (most := surely_violated(levels)) is not None:
        contradicted = lowest.at(0.025) > most  # by the other stages: no lower end is known
        lowest = lowest.below(most)
    c_max = _concurrency(levels, lowest)
    if (full := saturation_of(levels)) is not None and full.most > lowest.at(0.5):
        lowest = lowest.up_to(full.most)  # nothing is carried that was not served
    low, middle, high = (_load(x) for x in _as_wide_as_the_gap(levels, lowest))
    lone = next(
        (slo for slo, p in found.items() if p.by_any_load and p.at(0.025) < lowest.at(0.5)), None
    )
    figures = [level for level in levels if level.is_figure]
    nearest = min(figures, key=lambda level: abs(math.log(level.load / middle)), default=None)
    return Estimate(
        capacity_rps=middle,
        capacity_rps_ci=(0.0 if lone or contradicted else low, high),
        c_max=c_max and c_max[1],
        c_max_ci=c_max and (c_max[0], c_max[2]),
        binding=_binding(levels, found),
        slope=tightest.slope,
        nearest=None if nearest is None else nearest.index,
        lone=lone,
    )


def _load(x: float) -> float:
    """Return e^x, in twelve digits: an end that is a load of the run is that load exactly."""
    return float(f"{math.exp(x):.12g}")


def _as_wide_as_the_gap(levels: Sequence[Level], found: Posterior) -> tuple[float, float, float]:
    """Return (low, median, high) of x*.

    Between loads that are far apart nothing was measured, so the interval spans the gap. Saturation
    is measured as well: it ends a gap from above.
    """
    low, middle, high = (found.at(p) for p in (0.025, 0.5, 0.975))
    x = np.log([level.load for level in levels])
    below = x[x <= middle].max(initial=-np.inf)
    above = x[x >= middle].min(initial=np.inf)
    if (saturation := saturation_of(levels)) is not None and saturation.x > below:
        above = min(above, max(saturation.most, high))
    if not COARSE < above - below < math.inf:
        return low, middle, high
    return min(low, float(below)), middle, max(high, float(above))


def is_bracketed(levels: Sequence[Level], slos: Sequence[Slo]) -> bool:
    """Return whether both sides of the limit were tried and every SLO was measured.

    A ``max`` or ``min`` is a fact of each stage, which no curve joins.
    """
    if any(slo.quantile in EXTREMES for slo in slos):
        return False
    over = violations_above_met(levels)
    return bool(slos and over) and len(over) < len(levels) and not unmeasured(levels, slos)


def unmeasured(levels: Sequence[Level], slos: Sequence[Slo]) -> str | None:
    """Return the first SLO that no stage measured, and why."""
    for slo in slos:
        if levels and not len(looks_of(levels, slo).x):
            verdict = levels[-1].verdict(slo)
            return f"{slo.text}: {(verdict and verdict.reason) or 'no stage measured it'}"
    return None


def _above(posteriors: Sequence[Posterior]) -> tuple[Floats, Floats]:
    """Return a grid for all, and P[x_i > x] on it, shape (posteriors, grid)."""
    grid = np.unique(np.concatenate([p.x for p in posteriors]))
    return grid, np.array(
        [1 - np.interp(grid, p.x, p.cumulative, left=0.0, right=1.0) for p in posteriors]
    )


def _lowest(posteriors: Sequence[Posterior]) -> Posterior:
    """Return the posterior of the smallest of independent x*.

    P[min > x] = product of P[x_i > x].
    """
    if len(posteriors) == 1:
        return posteriors[0]
    grid, above = _above(posteriors)
    return Posterior(grid, 1 - above.prod(axis=0))


def _binding(levels: Sequence[Level], found: Mapping[Slo, Posterior]) -> tuple[Slo, ...]:
    """Return the SLOs that break first with a chance of ``MAY_BE_FIRST`` at least.

    The mass of x_i times P[all others > x_i]. The first of them was seen over its limit at the
    lowest load; where no stage shows that it is the likeliest.
    """
    _, above = _above(list(found.values()))
    mass, middle = -np.diff(above, axis=1), (above[:, 1:] + above[:, :-1]) / 2
    first = {
        slo: float(mass[i] @ np.delete(middle, i, axis=0).prod(axis=0))
        for i, slo in enumerate(found)
    }

    def lowest_over(slo: Slo) -> float:
        over = (v.load for v in levels if v.is_figure and (o := v.verdict(slo)) and o.is_over)
        return min(over, default=math.inf)

    likely = [slo for slo, p in first.items() if p >= MAY_BE_FIRST]
    return tuple(sorted(likely, key=lambda slo: (lowest_over(slo), -first[slo])))


def _concurrency(levels: Sequence[Level], x_star: Posterior) -> tuple[float, float, float] | None:
    """Return (low, middle, high) of the requests in flight at x*, by the stable stages near it."""
    centre = x_star.at(0.5)
    stable = [level for level in levels if level.stable is not False and level.concurrency > 0]
    if not stable:
        return None
    x = np.array([level.x for level in stable])
    n = np.array([float(level.requests) for level in stable])
    reach = max(NEAR, float(np.sort(np.abs(x - centre))[:2][-1]))
    weight = np.exp(-(((x - centre) / reach) ** 2) / 2) * n
    weight /= weight.sum()
    stay_s = np.array([level.concurrency for level in stable]) / np.exp(x)
    saturation = saturation_of(levels)
    if saturation is not None:
        cut = np.array([float(level.warmup) for level in stable])
        rho = np.clip(np.exp(x - saturation.x), 0.0, 1 - max(saturation.sd, 0.02))
        stay_s /= begun_share(n, cut, np.maximum(FILLS * rho / (1 - rho) ** 2, 1e-9))
    curve = _stay(x, stay_s, weight, centre, saturation)
    residual = stay_s / np.exp(curve(x)) - 1
    used = 1 / float(weight @ weight)  # stages that count
    # what each stage's own mean may be off by, and what they scatter about the curve
    drawn = np.array([level.concurrency_se / level.concurrency for level in stable])
    scatter = math.sqrt(float(weight @ residual**2) / max(used - 1, 1))
    few = math.sqrt(float(weight**2 @ drawn**2))
    error = max(0.02, scatter, few)
    at = np.array([x_star.at(p) for p in (0.025, 0.5, 0.975)])
    # a mean over a few jams is skewed like a log-normal: mostly below that of the long run
    low, middle, high = (at + curve(at) + few**2 / 2).tolist()
    down, up = (math.hypot(1.96 * error, end - middle) for end in (low, high))
    return math.exp(middle - down), math.exp(middle), math.exp(middle + up)


def _stay(
    x: Floats, stay_s: Floats, weight: Floats, centre: float, saturation: Saturation | None
) -> Callable[[Floats], Floats]:
    """Return ln of the time in flight over ln(load): a + c/(1 - rho), as in a queue, a and c >= 0.

    Errors are relative to the fit, not to what was seen: a stage that saw no jam would count most.
    """
    if float(np.ptp(x)) < SAME_LOAD:
        return lambda at: np.asarray(math.log(float(weight @ stay_s)) + at - float(x[0]))
    most = None if saturation is None else max(saturation.x, float(x.max()), centre) + 0.02

    def crowd(at: Floats) -> Floats:
        if most is None:
            return np.asarray(np.exp(at - centre))
        return np.asarray(1 / -np.expm1(np.minimum(at, most - 0.02) - most))

    of = np.stack([np.ones_like(x), crowd(x)], axis=1)
    fit = np.full_like(x, float(weight @ stay_s))
    for _ in range(FITS):
        each = np.sqrt(weight) / fit
        parts = _two_parts(of * each[:, None], stay_s * each)
        fit = of @ parts
    return lambda at: np.asarray(np.log(parts[0] + parts[1] * crowd(at)))


def _two_parts(of: Floats, seen: Floats) -> Floats:
    """Return the two numbers of at least 0 that fit ``of @ numbers`` to what was seen best.

    Least squares, or where one were below 0, the better column alone (scipy's nnls, which is slow
    to import).
    """
    parts = np.asarray(np.linalg.lstsq(of, seen)[0], dtype=np.float64)
    if parts.min() >= 0:
        return parts
    size = (of**2).sum(axis=0)
    alone = np.maximum(seen @ of, 0) / size
    return np.where(np.arange(2) == np.argmax(alone**2 * size), alone, 0.0)
