"""Which requests, and which stage, meet the SLOs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from analysis.intervals import judge_share, smallest_n
from analysis.metrics import Bools
from analysis.observations import Cohort, Observations, observations_for_slo
from analysis.percentiles import between_bounds, finite
from analysis.slo import GAP_METRICS, Slo

EDGE_FACTOR = 20.0
"""More times the requests that it has, and that its percentile needs at least: on the edge, not too short."""


def judge_slo(observations: Observations, slo: Slo) -> dict[str, Any]:
    """An entry of ``slo_verdicts``: is at least a share ``slo.quantile`` of the samples within the limit?

    ``requests_effective`` is the effective sample size (of gaps, for ITL and ICL).
    """
    o = observations
    result: dict[str, Any] = {
        "slo": slo.text, "verdict": "undecided", "value_s": None, "attainment": None,
        "requests_effective": 0, "more_requests": None, "reason": o.reason,
    }  # fmt: skip
    if not o.n:
        return result | {"reason": o.reason or "no request has a value"}
    misses, undecided = float(o.misses(slo.limit_s).sum()), o.undecided(slo.limit_s)
    n_effective, long_enough = o.tail_size(slo.quantile)
    judged = judge_share((misses, misses + undecided), o.n, n_effective, slo.quantile)
    low, high = o.quantile_bounds(slo.quantile)
    result |= {
        "verdict": judged.verdict,
        "value_s": finite(low) if low == high else None,
        **({} if low == high or math.isinf(low) else {"value_s_reason": between_bounds(o, low, high)}),
        "attainment": 1 - (misses + undecided) / o.n,
        "requests_effective": math.floor(n_effective),
    }
    if judged.verdict == "undecided":
        reason = f"{misses:.0f} of {o.n} {o.unit} over the limit, worth {n_effective:.0f} independent ones"
        if n_effective < smallest_n(slo.quantile):
            reason += f" ({slo.percentile} needs {smallest_n(slo.quantile)})"
        if undecided:
            reason += f"; {undecided} were cut off unfinished before the limit"
        if judged.factor is None or _on_the_edge(judged.factor, n_effective, slo.quantile):
            reason += "; the share of misses is on the edge of the SLO: no length is likely to decide"
        else:
            result["more_requests"] = max(1, math.ceil(o.n_owners * (judged.factor - 1)))
        result["reason"] = reason
    elif math.isinf(low):
        result["reason"] = f"infinite: {o.n_infinite} of {o.n} {o.unit} failed"
    return result


def _on_the_edge(factor: float, n_effective: float, quantile: float) -> bool:
    return factor > EDGE_FACTOR and factor * n_effective > EDGE_FACTOR * smallest_n(quantile)


def requests_meeting(cohort: Cohort, observed: Sequence[tuple[Slo, Observations]]) -> Bools:
    """Which requests of the cohort meet every SLO, shape (n,). Failed and unfinished ones miss.

    A request meets ``itl_p99=50ms`` when the p99 of its own gaps does. A metric that a good answer does
    not have (no text, a single token) cannot be missed by it.
    """
    r = cohort.requests
    meets = r.has_status("ok")
    for slo, o in observed:
        misses = o.misses(slo.limit_s)[: len(r)]
        if slo.metric in GAP_METRICS:
            sizes = o.sizes[: len(r)]
            allowed = sizes - np.maximum(np.ceil(slo.quantile * sizes - 1e-9), 0)
            meets = meets & (misses <= allowed)
        else:
            meets = meets & (misses == 0)
    return meets


def observe_slos(cohort: Cohort, slos: Sequence[Slo]) -> list[tuple[Slo, Observations]]:
    """The observations that each SLO is judged by."""
    cache: dict[str, Observations] = {}
    for slo in slos:
        if slo.metric not in cache:
            cache[slo.metric] = observations_for_slo(cohort, slo.metric)
    return [(slo, cache[slo.metric]) for slo in slos]
