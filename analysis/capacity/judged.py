"""Which stages count for the capacity, and on which side of the limit each of them is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ampacity.analysis.slo import Slo, parse_slo
from ampacity.analysis.stage.throughput import all_failed
from ampacity.analysis.stats.intervals import prob_at_least

WAITS = ("ttft", "first_answer", "e2e")  # metrics whose limit includes time spent waiting
OVERLOADED = 1.05  # offered over answered rate above which an unstable stage shows the capacity
FILLING = 0.1  # a stage that is blind to overloads this large may only be filling up
SURE = 0.005  # chance that a stage which surely violates an SLO just meets it


def judged_open(stages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return open stages that are findings, in order of load.

    Not cut short, nor limited by the client, nor broken by an outage, with an answer.
    """
    kept = [
        s
        for s in stages
        if s["kind"] == "open"
        and s["offered_rps"]
        and s["requests"]
        and s["slo_verdicts"]
        and not s["client_limited"]
        and not s["ended_early"]
        and not all_failed(s)
        and (s["slo_met"] or not s.get("outage"))
    ]
    return sorted(kept, key=lambda s: float(s["offered_rps"]))


def is_over(stage: Mapping[str, Any]) -> bool:
    """Return whether a stage looks to be above the limit.

    A share within the limit below its SLO, or no steady state. A stage that is short against what
    is in it fills up, which looks like an overload: there only misses count.
    """
    slos = [parse_slo(v["slo"]) for v in stage["slo_verdicts"]]
    if stage["stable"] is False and all(blind(stage, slo) <= FILLING for slo in slos):
        return True
    return any(
        v["attainment"] is not None and v["attainment"] < slo.quantile
        for v, slo in zip(stage["slo_verdicts"], slos, strict=True)
    )


def verdict_of(stage: Mapping[str, Any], slo: Slo) -> dict[str, Any] | None:
    """Return the stage's verdict on an SLO."""
    return next((v for v in stage["slo_verdicts"] if v["slo"] == slo.text), None)


def together(stage: Mapping[str, Any], slo: Slo) -> float:
    """Return requests that share one fate.

    Those in flight, and those that arrive within the limit.
    """
    waits_s = slo.limit_s if slo.metric in WAITS else 0.0
    return float(stage["concurrency"]) + waits_s * float(stage["offered_rps"])


def blind(stage: Mapping[str, Any], slo: Slo) -> float:
    """Return the overload, as a share of the load, that a stage is too short to show.

    0 where the SLO limits no wait: an overload never shows in it, so the steady state alone has to
    tell.
    """
    if slo.metric not in WAITS:
        return 0.0
    return together(stage, slo) / max(
        int(stage["requests"] + stage["window"]["warmup_requests"]), 1
    )


def violations_above_met(judged: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the stages over the limit whose load is above every load that was shown to meet it.

    A few misses in a short stage far below are chance, or not the load's doing: they bound nothing
    from above.
    """
    held = max((float(s["offered_rps"]) for s in judged if s["slo_met"]), default=0.0)
    return [s for s in judged if is_over(s) and float(s["offered_rps"]) > held]


def clearly_violated(verdict: Mapping[str, Any], chance: float) -> bool:
    """Return whether an SLO just met would miss so often with at most ``chance``."""
    n = float(verdict["requests_effective"])
    if verdict["attainment"] is None or n < 1:
        return False
    return (
        prob_at_least((1 - verdict["attainment"]) * n, n, 1 - parse_slo(verdict["slo"]).quantile)
        <= chance
    )


def surely_violated(judged: Sequence[Mapping[str, Any]]) -> float | None:
    """Return ln of the lowest load, above all that met the SLOs, that surely violates them."""
    loads = [
        math.log(s["offered_rps"])
        for s in violations_above_met(judged)
        if (
            s["stable"] is False
            and s["offered_rps"] > OVERLOADED * s["achieved_rps"]
            and s["achieved_rps"] > 0
        )
        or any(clearly_violated(v, SURE) for v in s["slo_verdicts"])
    ]
    return min(loads, default=None)
