"""Usable requests/s and C_max: where, going up in load, the SLOs stop to hold.

The interval is a bracket: from the highest stage that is shown to meet the SLOs to the lowest one that is
shown to break them or has no steady state. The figure inside it is interpolated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from analysis.slo import Slo

MEASURED_RATIO = 1.05
ASSUMPTION = (
    "the SLOs hold below the highest stage that met them and fail above the lowest that broke them (a bracket of "
    "tested loads, each verdict at 95 %); in between the slowest SLO's percentile is interpolated on log scales"
)


@dataclass(frozen=True)
class Level:
    """One stage as capacity sees it. Rates in requests/s."""

    load: float  # what it is ordered by: offered rate, or set concurrency
    rate: float
    rate_low: float  # the rate that the stage surely had, at least and at most
    rate_high: float
    concurrency: float
    verdict: str  # met | broken | undecided
    stable: bool
    values: dict[str, tuple[float | None, float | None]]  # SLO text -> (percentile in s, attainment)


def levels_of(stages: Sequence[dict[str, Any]], kind: str) -> list[Level]:
    """Stages of one kind as levels in order of load; client-limited and empty ones are no finding."""
    levels = []
    for s in stages:
        load = s["offered_rps"] if kind == "open" else s["concurrency_set"]
        if s["kind"] != kind or s["client_limited"] or not s["requests"] or not load:
            continue
        rate = s["carried_rps"] if kind == "open" else s["achieved_rps"]
        bounds = (load, s["arrived_rps"], rate) if kind == "open" else (rate, rate)
        met = s["slo_met"]
        levels.append(Level(
            load=load, rate=rate, rate_low=min(bounds), rate_high=max(bounds),
            concurrency=s["concurrency"] if kind == "open" else float(load),
            verdict="met" if met else "undecided" if met is None else "broken",
            stable=s["stable"] is not False,
            values={v["slo"]: (v["value_s"], v["attainment"]) for v in s["slo_verdicts"]},
        ))  # fmt: skip
    return sorted(levels, key=lambda level: level.load)


def find_capacity(stages: Sequence[dict[str, Any]], slos: Sequence[Slo]) -> dict[str, Any]:
    """The ``capacity`` object, with ``non_monotone`` where a stage broke below one that met.

    Open stages are judged if there are any, else closed ones (then C_max is a set concurrency).
    """
    kind = "open" if any(s["kind"] == "open" for s in stages) else "closed"
    result: dict[str, Any] = {
        "c_max": None, "c_max_ci": None, "c_max_basis": kind, "usable_rps": None, "usable_rps_ci": None,
        "binding_slo": None, "crossing": "none", "assumption": ASSUMPTION, "reason": None, "non_monotone": False,
        "stage": None,
    }  # fmt: skip
    levels = levels_of(stages, kind)
    if not slos:
        return result | {
            "reason": "no SLO given: capacity is the load at which an SLO stops to hold (--slo ttft_p99=2s)"
        }
    if not levels:
        return result | {
            "reason": "no usable stage: the client was the limit in all of them" if stages else "no stage"
        }
    broken = next((level for level in levels if level.verdict == "broken"), None)
    below = [v for v in levels if v.verdict == "met" and (broken is None or v.load < broken.load)]
    top_met = max((v.load for v in levels if v.verdict == "met"), default=0.0)
    non_monotone = broken is not None and top_met >= broken.load
    upper = next((v for v in levels if v.verdict == "broken" and v.load > top_met), None)
    result["non_monotone"] = non_monotone
    if not below:
        return result | _none_met(levels, broken, upper)
    met = below[-1]
    result["stage"] = _stage_of(stages, met, kind)
    result["c_max_ci"] = [met.concurrency, max(met.concurrency, upper.concurrency) if upper else None]
    result["usable_rps_ci"] = [met.rate_low, max(met.rate_low, upper.rate_high) if upper else None]
    if broken is None:
        return result | {
            "c_max": met.concurrency, "usable_rps": met.rate, "crossing": "lower_bound",
            "reason": "no stage broke an SLO: the capacity is higher than what was tried",
        }  # fmt: skip
    between = [v for v in levels if met.load <= v.load <= broken.load and (v is met or v.load > met.load)]
    return result | _crossing(between, slos, kind, _ceiling(levels, broken))


def _none_met(levels: list[Level], broken: Level | None, upper: Level | None) -> dict[str, Any]:
    if broken is None:
        return {
            "reason": "no stage is decided: they hold too few independent requests, use a longer --duration"
        }
    low = levels[0]
    reason = f"the lowest load of {low.load:.3g} already breaks the SLO: start lower"
    if low.verdict == "undecided":
        reason = f"no stage is shown to meet the SLO, and {broken.load:.3g} breaks it: use longer stages or lower loads"
    top = upper or broken
    return {"c_max_ci": [0.0, top.concurrency], "usable_rps_ci": [0.0, top.rate_high], "reason": reason}


def _stage_of(stages: Sequence[dict[str, Any]], level: Level, kind: str) -> int:
    key = "offered_rps" if kind == "open" else "concurrency_set"
    return next(
        int(s["index"]) for s in stages if s["kind"] == kind and s[key] == level.load and s["slo_met"]
    )


def _ceiling(levels: list[Level], broken: Level) -> float:
    """An unstable stage carries all that there is: the crossing is no higher than the best carried rate."""
    return math.inf if broken.stable else max(v.rate for v in levels)


def _crossing(levels: list[Level], slos: Sequence[Slo], kind: str, ceiling: float) -> dict[str, Any]:
    """The crossing between the first (met) and the last (broken) of ``levels``."""
    met, broken = levels[0], levels[-1]
    candidates = [(*_where(levels, slo), slo) for slo in slos]
    position, slo = min(
        ((p, s) for p, found, s in candidates if found),
        key=lambda c: c[0],
        default=((len(levels) - 1) / 2, max(slos, key=lambda s: _load_of(broken, s))),
    )
    if kind == "closed" or broken.load <= MEASURED_RATIO * met.load:
        return {
            "c_max": met.concurrency,
            "usable_rps": met.rate,
            "binding_slo": slo.text,
            "crossing": "measured",
        }
    i = min(int(position), len(levels) - 2)
    a, b, share = levels[i], levels[i + 1], position - i
    rate = max(met.rate_low, min(_between(a.rate, b.rate_high, share), max(ceiling, met.rate_low)))
    concurrency = _between(a.concurrency, b.concurrency, share)
    return {
        "usable_rps": rate, "c_max": max(met.concurrency, concurrency), "binding_slo": slo.text,
        "crossing": "interpolated",
    }  # fmt: skip


def _load_of(level: Level, slo: Slo) -> float:
    """Percentile over limit; infinite where failures reach into it."""
    value = level.values[slo.text][0]
    return math.inf if value is None else value / slo.limit_s


def _where(levels: list[Level], slo: Slo) -> tuple[float, bool]:
    """Position (index plus share of the step) at which the SLO's percentile first passes its limit."""
    for i, (a, b) in enumerate(pairwise(levels)):
        (value_a, attained_a), (value_b, attained_b) = a.values[slo.text], b.values[slo.text]
        if value_a and value_b and value_a <= slo.limit_s < value_b:
            return i + math.log(slo.limit_s / value_a) / math.log(value_b / value_a), True
        if attained_a is not None and attained_b is not None and attained_a >= slo.quantile > attained_b:
            return i + (attained_a - slo.quantile) / (attained_a - attained_b), True
    return 0.0, False


def _between(low: float, high: float, share: float) -> float:
    if low <= 0 or high <= 0:
        return (1 - share) * low + share * high
    return math.exp((1 - share) * math.log(low) + share * math.log(high))
