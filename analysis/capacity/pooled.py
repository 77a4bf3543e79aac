"""The capacity and C_max of a run, estimated from all open stages together.

Of several SLOs the lowest limit of ``ampacity.analysis.capacity.posterior`` counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ampacity.analysis.capacity.judged import (
    WAITS,
    judged_open,
    surely_violated,
    verdict_of,
    violations_above_met,
)
from ampacity.analysis.capacity.posterior import (
    FLOORS,
    NEAR,
    SLOPES,
    Posterior,
    Saturation,
    begun_share,
    late_share,
    looks_of,
    posterior_of,
    saturation_of,
    steady_limit,
)
from ampacity.analysis.metrics.requests import Floats
from ampacity.analysis.slo import GAP_METRICS, Slo
from ampacity.analysis.stage.throughput import is_figure

POOLED = (
    "all open stages together: near the limit the share of misses rises exponentially with the "
    "load (slope and crossing unknown, flat priors, 95 % of the posterior), each stage counts by "
    "its effective sample size"
)
LONE_TELLS = (
    "at low loads requests miss {} nearly as often as it allows, so that the load hardly decides "
    "whether it is met: a laxer limit or shorter requests tell more"
)
NOT_ALL_SEEN = "no stage can show whether all SLOs are met ({})"
# requests in which an idle queue fills to its mean, per rho / (1 - rho)^2; 0.4 to 0.7 measured
FILLS = 0.5
SAME_LOAD = 0.02  # in ln(load)
COARSE = math.log(1.5)  # in ln(load): a gap between two loads that no model is trusted to fill
FITS = 4  # of C_max, each weighted by the one before
PEAK_STEPS = 3  # from the SLO to the share that meets it at the peak
MAY_BE_FIRST = 0.1  # chance of breaking first, below which an SLO is not named


@dataclass(frozen=True)
class Estimate:
    """Usable requests/s and C_max with 95 % intervals, from all stages."""

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


def estimate(stages: Sequence[Mapping[str, Any]], slos: Sequence[Slo]) -> Estimate | None:
    """Return the pooled estimate; None unless both sides were tried and every SLO was seen."""
    judged = judged_open(stages)
    if not _is_bracketed(judged, slos):
        return None
    found = {slo: post for slo in slos if (post := posterior_of(judged, slo)) is not None}
    limits = list(found.values())
    if (
        not any(slo.metric in WAITS for slo in slos)
        and (steady := steady_limit(judged)) is not None
    ):
        limits.append(steady)
    lowest, tightest = _lowest(limits), min(found.values(), key=lambda post: post.at(0.5))
    contradicted = False
    if (most := surely_violated(judged)) is not None:
        contradicted = (
            lowest.at(0.025) > most
        )  # by what the other stages say: nothing is known from below
        lowest = lowest.below(most)
    low, middle, high = (math.exp(x) for x in _as_wide_as_the_gap(judged, lowest))
    lone = next(
        (slo for slo, p in found.items() if p.by_any_load and p.at(0.025) < lowest.at(0.5)), None
    )
    c_max, binding = _concurrency(judged, lowest), _binding(judged, found)
    figures = [s for s in judged if is_figure(s)]
    nearest = min(figures, key=lambda s: abs(math.log(s["offered_rps"] / middle)), default=None)
    return Estimate(
        middle,
        (0.0 if lone or contradicted else low, high),
        c_max and c_max[1],
        c_max and (c_max[0], c_max[2]),
        binding,
        tightest.slope,
        int(nearest["index"]) if nearest else None,
        lone,
    )


def _as_wide_as_the_gap(
    judged: Sequence[Mapping[str, Any]], found: Posterior
) -> tuple[float, float, float]:
    """Return (low, median, high) of x*.

    Between loads that are far apart nothing was measured, so the interval spans the gap. Saturation
    is measured as well: it ends a gap from above.
    """
    low, middle, high = (found.at(p) for p in (0.025, 0.5, 0.975))
    loads = np.log([s["offered_rps"] for s in judged])
    below, above = (
        loads[loads <= middle].max(initial=-np.inf),
        loads[loads >= middle].min(initial=np.inf),
    )
    if (saturation := saturation_of(judged)) is not None and saturation.x > below:
        above = min(above, max(saturation.x + 2 * saturation.sd, high))
    if not COARSE < above - below < math.inf:
        return low, middle, high
    return min(low, float(below)), middle, max(high, float(above))


def _is_bracketed(judged: Sequence[Mapping[str, Any]], slos: Sequence[Slo]) -> bool:
    over = violations_above_met(judged)
    return bool(slos and over) and len(over) < len(judged) and not unseen(judged, slos)


def unseen(judged: Sequence[Mapping[str, Any]], slos: Sequence[Slo]) -> str | None:
    """Return the first SLO that no stage measured, and why."""
    for slo in slos:
        if judged and not len(looks_of(judged, slo).x):
            verdict = verdict_of(judged[-1], slo)
            return f"{slo.text}: {(verdict and verdict.get('reason')) or 'no stage measured it'}"
    return None


def peak_goodput_rps(
    stages: Sequence[Mapping[str, Any]], slos: Sequence[Slo]
) -> tuple[float, tuple[float, float], float] | None:
    """Return (median, 95 % interval, its load) of the highest rate that meets every SLO.

    The share that meets them all is taken as one SLO more, at the strictest quantile: each curve of
    its posterior has its own maximum of load x share, and the medians of these are given: the mean
    curve is flatter than any of them. None where ``estimate`` gives none.
    """
    judged = judged_open(stages)
    if not _is_bracketed(judged, slos) or any(s.get("slo_attainment") is None for s in judged):
        return None
    by_request = [slo for slo in slos if slo.metric not in GAP_METRICS] or list(slos)
    first = min(by_request, key=lambda slo: (slo.metric not in WAITS, slo.limit_s))
    metric = first.metric if first.metric in WAITS else "tpot"  # of requests, not of their gaps
    quantile, found = max(slo.quantile for slo in slos), None
    for _ in range(PEAK_STEPS):
        joint = replace(first, metric=metric, quantile=quantile)
        post = posterior_of(
            [{**s, "slo_verdicts": [_all_met(s, first, joint)]} for s in judged], joint, False
        )
        if post is None or post.mass is None:
            return None
        found = _peak(post, post.mass, judged)
        quantile = float(np.clip(found[0][1] / found[1], 0.5, 0.99))
    return found and (found[0][1], (found[0][0], found[0][2]), found[1])


def _peak(
    found: Posterior, mass: Floats, judged: Sequence[Mapping[str, Any]]
) -> tuple[list[float], float]:
    """Return ((low, median, high) of the maximum of load x share met, its median load)."""
    saturation = saturation_of(judged)
    top = saturation.x if saturation else math.log(max(s["offered_rps"] for s in judged))
    x = np.linspace(min(top, found.at(0.5)) - 1.0, top, 101)  # of the loads
    rise = np.expm1(np.clip(x - found.x[:, None], -50, 3))
    idle = FLOORS[:, None, None] * found.allowed
    good = (
        np.exp(x)
        * (1 - idle)
        * (1 - late_share(SLOPES[:, None, None, None], idle, found.allowed, rise))
    )
    most = _weighted(good.max(axis=-1).ravel(), mass.ravel(), (0.025, 0.5, 0.975))
    return most, math.exp(_weighted(x[good.argmax(axis=-1)].ravel(), mass.ravel(), (0.5,))[0])


def _weighted(values: Floats, mass: Floats, probabilities: tuple[float, ...]) -> list[float]:
    """Return the quantiles of ``values`` by their probability ``mass``."""
    order = np.argsort(values)
    return [float(q) for q in np.interp(probabilities, np.cumsum(mass[order]), values[order])]


def _all_met(stage: Mapping[str, Any], slo: Slo, joint: Slo) -> dict[str, Any]:
    """Return the verdict on the requests that met every SLO, as clustered as those on ``slo``."""
    verdict = verdict_of(stage, slo) or {}
    effective = min(verdict.get("requests_effective") or 0.0, stage["requests"])
    return {
        "slo": joint.text,
        "attainment": stage["slo_attainment"],
        "requests_effective": effective,
    }


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


def _binding(
    judged: Sequence[Mapping[str, Any]], found: Mapping[Slo, Posterior]
) -> tuple[Slo, ...]:
    """Return the SLOs that break first with a chance of ``MAY_BE_FIRST`` at least.

    The mass of x_i times P[all others > x_i]. The first of them was seen over its limit at the
    lowest load; where that says nothing it is the likeliest.
    """
    _, above = _above(list(found.values()))
    mass, middle = -np.diff(above, axis=1), (above[:, 1:] + above[:, :-1]) / 2
    first = {
        slo: float(mass[i] @ np.delete(middle, i, axis=0).prod(axis=0))
        for i, slo in enumerate(found)
    }

    def seen_over(slo: Slo) -> float:
        over = [
            s["offered_rps"]
            for s in judged
            for v in s["slo_verdicts"]
            if v["slo"] == slo.text
            and is_figure(s)
            and v["attainment"] is not None
            and v["attainment"] < slo.quantile
        ]
        return min(over, default=math.inf)

    able = [slo for slo, p in first.items() if p >= MAY_BE_FIRST]
    return tuple(sorted(able, key=lambda slo: (seen_over(slo), -first[slo])))


def _concurrency(
    judged: Sequence[Mapping[str, Any]], x_star: Posterior
) -> tuple[float, float, float] | None:
    """Return (low, middle, high) of the requests in flight at x*, by the stable stages near it."""
    centre = x_star.at(0.5)
    stable = [s for s in judged if s["stable"] is not False and s["concurrency"] > 0]
    if not stable:
        return None
    x = np.array([math.log(s["offered_rps"]) for s in stable])
    n = np.array([float(s["requests"]) for s in stable])
    reach = max(NEAR, float(np.sort(np.abs(x - centre))[:2][-1]))
    weight = np.exp(-(((x - centre) / reach) ** 2) / 2) * n
    weight /= weight.sum()
    stay_s = np.array([s["concurrency"] for s in stable]) / np.exp(x)
    saturation = saturation_of(judged)
    if saturation is not None:
        cut = np.array([float(s["window"]["warmup_requests"]) for s in stable])
        rho = np.clip(np.exp(x - saturation.x), 0.0, 1 - max(saturation.sd, 0.02))
        stay_s /= begun_share(n, cut, np.maximum(FILLS * rho / (1 - rho) ** 2, 1e-9))
    curve = _stay(x, stay_s, weight, centre, saturation)
    residual = stay_s / np.exp(curve(x)) - 1
    used = 1 / float(weight @ weight)  # stages that count
    # what each stage's own mean may be off by, and what they scatter about the curve
    drawn = np.array([(s.get("concurrency_se") or 0.0) / s["concurrency"] for s in stable])
    scatter = math.sqrt(float(weight @ residual**2) / max(used - 1, 1))
    few = math.sqrt(float(weight**2 @ drawn**2))
    error = max(0.02, scatter, few)
    at = np.array([x_star.at(p) for p in (0.025, 0.5, 0.975)])
    # a mean over a few jams is skewed like a log-normal: it is mostly below what it is in the long
    # run
    low, middle, high = (at + curve(at) + few**2 / 2).tolist()
    down, up = (math.hypot(1.96 * error, end - middle) for end in (low, high))
    return math.exp(middle - down), math.exp(middle), math.exp(middle + up)


def _stay(
    x: Floats, stay_s: Floats, weight: Floats, centre: float, saturation: Saturation | None
) -> Callable[[Floats], Floats]:
    """Return ln of the time in flight over ln(load): a + c/(1 - rho), as in a queue, a and c >= 0.

    Errors are relative to the fit, not to what was seen: a stage that saw no jam would count most.
    """
    from scipy.optimize import nnls

    if float(np.ptp(x)) < SAME_LOAD:
        return lambda at: np.asarray(math.log(float(weight @ stay_s)) + at - float(x[0]))
    most = None if saturation is None else max(saturation.x, float(x.max()), centre) + 0.02

    def crowd(at: Floats) -> Floats:
        return (
            np.exp(at - centre)
            if most is None
            else 1 / -np.expm1(np.minimum(at, most - 0.02) - most)
        )

    of = np.stack([np.ones_like(x), crowd(x)], axis=1)
    fit = np.full_like(x, float(weight @ stay_s))
    for _ in range(FITS):
        each = np.sqrt(weight) / fit
        parts, _ = nnls(of * each[:, None], stay_s * each)
        fit = of @ parts
    return lambda at: np.asarray(np.log(parts[0] + parts[1] * crowd(at)))
