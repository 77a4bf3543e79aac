"""The highest goodput of a run, from all of its stages together."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ampacity.analysis.capacity.levels import Level, Verdict, open_levels
from ampacity.analysis.capacity.pooled import is_bracketed
from ampacity.analysis.capacity.posterior import (
    FLOORS,
    SLOPES,
    Posterior,
    late_share,
    posterior_of,
    saturation_of,
)
from ampacity.analysis.contract.capacity import Goodput
from ampacity.analysis.contract.part import with_nulls
from ampacity.analysis.contract.stage import Stage
from ampacity.analysis.metrics.requests import Floats
from ampacity.analysis.slo import GAP_METRICS, WAITS, Slo
from ampacity.analysis.stage.throughput import NO_FIGURE, is_figure

PEAK_STEPS = 3  # from the SLO to the share that meets it at the peak


def peak_goodput(stages: Sequence[Stage], slos: Sequence[Slo]) -> Goodput:
    """Return the maximum of load x share that meets every SLO, from all open stages together.

    Where they allow no such estimate, the best of the stages whose rates are figures, without an
    interval: the best of several is the one that chance favours.
    """
    judged = [s for s in stages if s.goodput_rps is not None]
    figures = [s for s in judged if is_figure(s)]
    if not figures:
        reasons = (s.goodput_rps_reason for s in stages if s.goodput_rps_reason)
        reason = NO_FIGURE if judged else next(reasons, "no stage was measured")
        return with_nulls(Goodput, reason=reason)
    if found := estimate_peak(open_levels(stages), slos):
        peak, ci, load = found
        return with_nulls(
            Goodput, peak_rps=peak, peak_rps_ci=ci, at_offered_rps=load, basis="pooled"
        )
    best = max(figures, key=lambda s: s.goodput_rps or 0.0)
    return with_nulls(
        Goodput, peak_rps=best.goodput_rps, at_offered_rps=best.offered_rps, basis="stage"
    )


def estimate_peak(
    levels: Sequence[Level], slos: Sequence[Slo]
) -> tuple[float, tuple[float, float], float] | None:
    """Return (median, 95 % interval, its load) of the highest rate that meets every SLO.

    The share that meets them all is taken as one SLO more, at the strictest quantile: each curve of
    its posterior has its own maximum of load x share, and the medians of these are given: the mean
    curve is flatter than any of them. None where ``estimate`` gives none.
    """
    if not is_bracketed(levels, slos) or any(level.attainment is None for level in levels):
        return None
    by_request = [slo for slo in slos if slo.metric not in GAP_METRICS] or list(slos)
    first = min(by_request, key=lambda slo: (slo.metric not in WAITS, slo.limit_s))
    metric = first.metric if first.metric in WAITS else "tpot"  # of requests, not of their gaps
    quantile, found = max(slo.quantile for slo in slos), None
    for _ in range(PEAK_STEPS):
        joint = replace(first, metric=metric, quantile=quantile)
        post = posterior_of([_jointly(level, first, joint) for level in levels], joint, False)
        if post is None or post.mass is None:
            return None
        found = _peak(post, post.mass, levels)
        quantile = float(np.clip(found[0][1] / found[1], 0.5, 0.99))
    return found and (found[0][1], (found[0][0], found[0][2]), found[1])


def _jointly(level: Level, slo: Slo, joint: Slo) -> Level:
    """Return the level with one verdict, that on every SLO, as clustered as that on ``slo``."""
    verdict = level.verdict(slo)
    effective = min(verdict.effective if verdict else 0.0, level.requests)
    every = Verdict(joint.text, joint, None, level.attainment, effective)
    return replace(level, verdicts=(every,))


def _peak(found: Posterior, mass: Floats, levels: Sequence[Level]) -> tuple[list[float], float]:
    """Return ((low, median, high) of the maximum of load x share met, its median load)."""
    saturation = saturation_of(levels)
    top = saturation.x if saturation else max(level.x for level in levels)
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
