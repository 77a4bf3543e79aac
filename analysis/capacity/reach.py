"""Whether any load at all can meet an SLO, from the stages that were run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ampacity.analysis.capacity.judged import FILLING, blind, verdict_of
from ampacity.analysis.slo import Slo, parse_slo

BEYOND_NOISE = 2.0  # standard deviations


def out_of_reach(stages: Sequence[Mapping[str, Any]]) -> str | None:
    """Return why no load can meet an SLO.

    Either its misses do not come with the load, or at the two lowest loads, both steady, the median
    is over the limit and extrapolates to above it at load 0 (queues are convex, so the truth lies
    above the line).
    """
    steady = [s for s in stages if s["stable"] and not s["client_limited"] and s["slo_verdicts"]]
    lowest: dict[float, Mapping[str, Any]] = {}
    for stage in steady:
        lowest.setdefault(float(stage["offered_rps"] or stage["concurrency_set"]), stage)
    for slo in [parse_slo(v["slo"]) for v in steady[0]["slo_verdicts"]] if len(lowest) > 1 else ():
        regardless = _missed_at_any_load(lowest, slo)
        if regardless:
            return regardless
        low, next_ = sorted(lowest)[:2]
        low_s, next_s = (_median_s(lowest[load], slo) for load in (low, next_))
        idle_s = low_s - max(0.0, next_s - low_s) * low / (next_ - low)
        if slo.quantile >= 0.5 and idle_s > slo.limit_s:
            return (
                f"no load can meet {slo.text}: the median is {low_s:.3g} s at a load of {low:.3g} "
                f"and {next_s:.3g} s at {next_:.3g}, "
                f"so it is not the load that takes longer than {slo.limit_s:.3g} s; use a laxer "
                "limit, shorter requests or a "
                "faster endpoint"
            )
    return None


def _missed_at_any_load(stages: Mapping[float, Mapping[str, Any]], slo: Slo) -> str | None:
    """Return why an SLO is violated at any load: extrapolated to load 0, its odds are too high.

    Of what a server beyond its capacity c refuses the odds are (load - c) / c, such a line; those
    of a queue bend upwards.
    """
    seen = []
    for load, stage in stages.items():
        verdict = verdict_of(stage, slo)
        n = (
            verdict.get("requests_effective") or 0
            if verdict and verdict["attainment"] is not None
            else 0
        )
        filling = stage["kind"] == "open" and n and blind(stage, slo) > FILLING
        if verdict and n >= 1 and verdict["attainment"] > 0 and not filling:
            share = ((1 - verdict["attainment"]) * n + 0.5) / (n + 1)
            seen.append(
                (load, share / (1 - share), n * (1 - share) ** 3 / share, 1 - verdict["attainment"])
            )
    if len(seen) < 2:
        return None
    load, odds, weight, missed = np.array(sorted(seen)).T
    middle = weight @ load / weight.sum()
    spread = weight @ (load - middle) ** 2
    idle = weight @ odds / weight.sum() - middle * (weight @ ((load - middle) * odds)) / spread
    noise = BEYOND_NOISE * math.sqrt(1 / weight.sum() + middle**2 / spread)
    if idle - noise <= (1 - slo.quantile) / slo.quantile:
        return None
    return (
        f"no load can meet {slo.text}: {100 * missed[0]:.2g} % of the requests miss it at a load "
        f"of {load[0]:.3g} and "
        f"{100 * missed[-1]:.2g} % at {load[-1]:.3g}, so it is not the load that breaks it; see "
        "what failed or took long, or use a laxer limit"
    )


def _median_s(stage: Mapping[str, Any], slo: Slo) -> float:
    """Return the median of an SLO's metric, from schedule where there is such a one.

    0 where it is not known.
    """
    figures = stage if slo.class_ is None else stage["classes"].get(slo.class_) or {}
    held = figures.get(f"{slo.metric}_from_schedule_s") or figures.get(f"{slo.metric}_s") or {}
    return float(held.get("p50") or 0.0)
