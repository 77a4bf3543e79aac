"""Decide if any load at all can meet an SLO, from the stages that were run."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ampacity.analysis.capacity.levels import FILLING, Level
from ampacity.analysis.slo import Slo

BEYOND_NOISE = 2.0  # standard deviations
QUIET = 1.0  # requests in flight, below which an endpoint is idle most of the time


def why_unmeetable(levels: Sequence[Level]) -> str | None:
    """Return why no load can meet an SLO; None where one may.

    Either its misses do not come with the load, or at the two lowest loads, both steady, the median
    is over the limit and extrapolates to above it at load 0 (queues are convex, so the truth lies
    above the line). A stage too short to show whether it is steady counts if nothing can queue.
    """
    lowest: dict[float, Level] = {}
    for level in levels:
        steady = level.stable or (level.stable is None and level.in_flight < QUIET)
        if steady and not level.client_limited and level.verdicts:
            lowest.setdefault(level.load, level)
    if len(lowest) < 2:
        return None
    low, next_ = sorted(lowest)[:2]
    for slo in (verdict.slo for verdict in next(iter(lowest.values())).verdicts):
        if regardless := _missed_at_any_load(lowest, slo):
            return regardless
        low_s, next_s = (lowest[load].median_s(slo) for load in (low, next_))
        idle_s = low_s - max(0.0, next_s - low_s) * low / (next_ - low)
        if slo.quantile >= 0.5 and idle_s > slo.limit_s:
            return (
                f"no load can meet {slo.text}: the median is {low_s:.3g} s at a load of {low:.3g} "
                f"and {next_s:.3g} s at {next_:.3g}, so it is not the load that takes longer than "
                f"{slo.limit_s:.3g} s; use a laxer limit, shorter requests or a faster endpoint"
            )
    return None


def _missed_at_any_load(lowest: Mapping[float, Level], slo: Slo) -> str | None:
    """Return why an SLO is violated at any load: extrapolated to load 0, its odds are too high.

    Of what a server beyond its capacity c refuses the odds are (load - c) / c, such a line; those
    of a queue bend upwards.
    """
    seen = []
    for load, level in lowest.items():
        verdict = level.verdict(slo)
        filling = level.is_open and level.blind(slo) > FILLING
        if verdict and verdict.is_known and verdict.attainment and not filling:
            n, missed = verdict.effective, verdict.missed
            share = (missed * n + 0.5) / (n + 1)
            seen.append((load, share / (1 - share), n * (1 - share) ** 3 / share, missed))
    if len(seen) < 2:
        return None
    load, odds, weight, missed = np.array(sorted(seen)).T
    middle = weight @ load / weight.sum()
    spread = weight @ (load - middle) ** 2
    idle = weight @ odds / weight.sum() - middle * (weight @ ((load - middle) * odds)) / spread
    noise = BEYOND_NOISE * math.sqrt(1 / weight.sum() + middle**2 / spread)
    if (idle - noise) * slo.quantile <= 1 - slo.quantile:
        return None
    return (
        f"no load can meet {slo.text}: {100 * missed[0]:.2g} % of the requests miss it at a load "
        f"of {load[0]:.3g} and {100 * missed[-1]:.2g} % at {load[-1]:.3g}, so it is not the load "
        "that breaks it; see what failed or took long, or use a laxer limit"
    )
