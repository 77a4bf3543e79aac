"""Usable requests/s and C_max: where, going up in load, the SLOs stop to hold.

Of open stages the figure is the pooled estimate (``ampacity.analysis.capacity.pooled``) where its
interval is narrow enough, else the highest load that is shown to meet every SLO; of a closed loop
the highest set concurrency that is. Both ends of what was shown, the highest load that met the SLOs
and the lowest above it that broke them, are given beside it. An open stage stands at the rate that
was asked for, less the share that was not answered; how many arrived by chance is no capacity.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ampacity.analysis.capacity.judged import judged_open
from ampacity.analysis.capacity.levels import Level, levels_of, number_text
from ampacity.analysis.capacity.next_load import non_monotone
from ampacity.analysis.capacity.pooled import (
    LONE_TELLS,
    NOT_ALL_SEEN,
    POOLED,
    Estimate,
    estimate,
    unseen,
)
from ampacity.analysis.capacity.reach import out_of_reach
from ampacity.analysis.slo import Slo
from ampacity.analysis.stage.throughput import all_failed

# half width of an interval over its figure, up to which the estimate is the published figure
PUBLISHED = 0.5
MEASURED_RATIO = 1.05
DOWN_IN_EACH = "no usable stage: the endpoint was down in each of them for a while"
SATURATED_RATIO = 1.01  # two levels of a closed loop whose rates are closer carry the same
ASSUMPTION = (
    "the SLOs hold below the highest stage that met them and fail above the lowest that broke "
    "them (a bracket of "
    "tested loads, not a confidence interval); an open stage stands at its offered rate, less "
    "the share that was not "
    "answered, the upper end is the offered rate of the stage that broke"
)
TOO_WIDE = (
    "the estimate from all stages is {0} requests/s, known to {1} only: longer stages or a "
    "search tell more"
)


CONTRADICTED = (
    "a stage met the SLOs at {} requests/s, above what all stages together allow ({}): run these "
    "loads again"
)


def find_capacity(stages: Sequence[dict[str, Any]], slos: Sequence[Slo]) -> dict[str, Any]:
    """Return the ``capacity`` object, with ``non_monotone`` where a stage broke below one that met.

    Open stages are judged if there are any, else closed ones (then C_max is the set concurrency,
    or, where users pause between requests, the mean in flight at that number of ``users``); where
    there are both, ``closed`` is that other view.
    """
    given, stages = stages, without_outages(stages)
    result = _shown(stages, slos)
    if given and not stages and slos:
        result["reason"] = DOWN_IN_EACH
    result["closed"] = None
    if result["c_max_basis"] == "open" and any(s["kind"] == "closed" for s in stages):
        result["closed"] = _shown([s for s in stages if s["kind"] == "closed"], slos)
    return result | _pooled(stages, slos, result)


def without_outages(stages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the stages without those whose SLOs an outage violated, but for overloads."""
    top = {
        kind: max(
            (_load(s) for s in stages if s["kind"] == kind and s["slo_met"]), default=math.inf
        )
        for kind in ("open", "closed")
    }
    return [s for s in stages if s["slo_met"] or not s.get("outage") or _load(s) > top[s["kind"]]]


def _load(stage: Mapping[str, Any]) -> float:
    return float(stage["offered_rps" if stage["kind"] == "open" else "concurrency_set"] or 0.0)


def _pooled(
    stages: Sequence[dict[str, Any]], slos: Sequence[Slo], shown: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the changes that the estimate from all open stages makes to ``shown``.

    Empty where they do not allow one.
    """
    judged = judged_open(stages)
    if unknown := unseen(judged, slos):
        return {"reason": NOT_ALL_SEEN.format(unknown)}
    found = estimate(judged, slos)
    if found is None:
        return {}
    doubtful = non_monotone(judged)
    if doubtful is not None:  # no load is within reach, or one that broke lies below one that met
        return {"reason": doubtful.why, "non_monotone": any(s["slo_met"] for s in judged)}
    ends = {"estimate_rps": found.capacity_rps, "estimate_rps_ci": list(found.capacity_rps_ci)}
    if (shown["verified_rps"] or 0.0) > found.capacity_rps_ci[
        1
    ]:  # stages that contradict each other name no load
        return ends | {
            "reason": CONTRADICTED.format(
                number_text(shown["verified_rps"]), number_text(found.capacity_rps_ci[1])
            )
        }
    if found.relative_error > PUBLISHED or not found.capacity_rps_ci[0]:
        return ends | _too_wide(found, shown)
    return ends | {
        "capacity_rps": found.capacity_rps,
        "capacity_rps_ci": list(found.capacity_rps_ci),
        "c_max": found.c_max,
        "c_max_ci": found.c_max_ci and list(found.c_max_ci),
        "crossing": "pooled",
        "assumption": POOLED,
        "stage": found.nearest,
        **_binding(found),
        "reason": None,
    }


def _binding(found: Estimate) -> dict[str, Any]:
    return {
        "binding_slo": found.binding[0].text,
        "binding_or": [slo.text for slo in found.binding[1:]],
    }


def _too_wide(found: Estimate, shown: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result where the estimate's interval is too wide to publish."""
    (low, high), rate = found.capacity_rps_ci, shown["capacity_rps"]
    if found.lone:
        reason = LONE_TELLS.format(found.lone.text)
    else:
        width = (
            f"{100 * found.relative_error:.2g} %"
            if high < 2 * low
            else f"a factor of {high / low:.2g}"
            if low
            else "at most its upper end"
        )
        reason = TOO_WIDE.format(number_text(found.capacity_rps), width)
    if rate is None:
        if shown["reason"]:
            reason = f"{shown['reason']}; {reason}"
        return {
            "reason": reason,
            "capacity_rps_ci": [low, high],
            "assumption": POOLED,
            **_binding(found),
        }
    return {
        "capacity_rps_ci": [min(low, rate), max(high, rate)],
        "assumption": POOLED,
        "reason": reason,
        **_binding(found),
    }


def _nothing_shown(kind: str) -> dict[str, Any]:
    return {
        "c_max": None,
        "c_max_ci": None,
        "c_max_basis": kind,
        "capacity_rps": None,
        "capacity_rps_ci": None,
        "verified_rps": None,
        "violated_rps": None,
        "estimate_rps": None,
        "estimate_rps_ci": None,
        "binding_slo": None,
        "binding_or": [],
        "crossing": "none",
        "assumption": ASSUMPTION,
        "reason": None,
        "non_monotone": False,
        "stage": None,
        "users": None,
    }


def _shown(stages: Sequence[dict[str, Any]], slos: Sequence[Slo]) -> dict[str, Any]:
    """Return the capacity that single stages show.

    The highest load that met every SLO, the lowest above it that broke one.
    """
    kind = "open" if any(s["kind"] == "open" for s in stages) else "closed"
    result = _nothing_shown(kind)
    levels = levels_of(stages, kind)
    if not slos:
        return result | {
            "reason": (
                "no SLO given: capacity is the load at which an SLO stops to hold (--slo "
                "ttft_p99=2s)"
            )
        }
    if not levels:
        return result | {"reason": _no_level(stages)}
    broken = next((level for level in levels if level.verdict == "violated"), None)
    below = [v for v in levels if v.verdict == "met" and (broken is None or v.load < broken.load)]
    top_met = max((v.load for v in levels if v.verdict == "met"), default=0.0)
    upper = next((v for v in levels if v.verdict == "violated" and v.load > top_met), None)
    result["non_monotone"] = broken is not None and top_met >= broken.load
    result["violated_rps"] = broken and broken.rate_high
    if not below:
        nothing = result | _none_met(levels, broken, upper)
        hopeless = (
            out_of_reach([s for s in stages if s["kind"] == kind]) if broken is levels[0] else None
        )
        return nothing | ({"reason": hopeless} if hopeless else {})
    met = below[-1]
    # a queue that grows has no number in flight that stands for its load
    steady = [
        v.concurrency for v in levels if upper and met.load <= v.load <= upper.load and v.stable
    ]
    top = max(steady) if upper and upper.stable else None
    result |= {
        "stage": met.index,
        "users": None if met.is_open else round(met.load),
        "verified_rps": met.rate,
        "capacity_rps": met.rate,
        "capacity_rps_ci": [met.rate, max(met.rate, upper.rate_high) if upper else None],
        "c_max": met.concurrency,
        "c_max_ci": [met.concurrency, top],
    }
    if broken is None:
        why = "no stage violated an SLO: the capacity is higher than what was tried"
        return result | {"crossing": "lower_bound", "reason": why}
    saturated = kind == "closed" and broken.rate <= SATURATED_RATIO * met.rate
    crossing = "saturated" if saturated else "measured" if kind == "closed" else "verified"
    return result | {"crossing": crossing, "binding_slo": _first_broken(broken, slos).text}


def _first_broken(level: Level, slos: Sequence[Slo]) -> Slo:
    """Return the SLO that is furthest over its limit."""

    def times(slo: Slo) -> float:
        value, attainment = level.values[slo.text]
        missed = 0.0 if attainment is None else (1 - attainment) / (1 - slo.quantile)
        return missed if value is None else max(value / slo.limit_s, missed)

    return max(slos, key=times)


def _no_level(stages: Sequence[dict[str, Any]]) -> str:
    if not stages:
        return "no stage"
    tried = [s for s in stages if s["requests"]]
    if tried and all(s["client_limited"] for s in tried):
        return "no usable stage: the client was the limit in all of them"
    if tried and all(all_failed(s) for s in tried):
        return "no usable stage: every request failed in all of them"
    if any(s["ended_early"] for s in tried):
        return "no usable stage: those that the client kept up with ended early"
    return "no usable stage: none holds a request in its window"


def _none_met(levels: list[Level], broken: Level | None, upper: Level | None) -> dict[str, Any]:
    if broken is None:
        return {"reason": f"no stage is decided ({levels[-1].why})"}
    low, top = levels[0], upper or broken
    if low.verdict == "inconclusive":
        reason = (
            f"no stage is shown to meet the SLO, and {broken.load:.3g} breaks it: use longer "
            "stages or lower loads"
        )
    else:
        reason = (
            f"the lowest load tried, {_load_text(low)}, is already too high: "
            f"{number_text(low.served)} requests/s were answered there"
        )
        reason += f"; try {_lower_loads(low)}"
    return {
        "c_max_ci": [0.0, top.concurrency],
        "capacity_rps_ci": [0.0, top.rate_high],
        "reason": reason,
    }


def _load_text(level: Level) -> str:
    return (
        f"{number_text(level.load)} requests/s" if level.is_open else f"{level.load:.0f} in flight"
    )


def _lower_loads(level: Level) -> str:
    """Return loads to try below one that was too high.

    Quarters of what it answered, or halves of its concurrency.
    """
    if level.is_open:
        top = min(level.load, level.served) or level.load / 4  # nothing answered: far lower
        return ", ".join(number_text(top * share, 2) for share in (0.25, 0.5, 0.75)) + " requests/s"
    lower = sorted({int(level.load) // 4, int(level.load) // 2} - {0})
    return ", ".join(map(str, lower)) + " in flight" if lower else "shorter prompts or a laxer SLO"


def met_by_all(stage: Mapping[str, Any], capacity: Mapping[str, Any]) -> bool | None:
    """Return whether a stage's load meets the SLOs by the pooled estimate; None where not known.

    A stage alone may be too short to have seen its worst, while those at higher loads show where
    the limit is.
    """
    if stage["slo_met"] is not None:
        return bool(stage["slo_met"])
    if (
        capacity["crossing"] != "pooled"
        or stage["kind"] != "open"
        or stage["client_limited"]
        or not stage["requests"]
    ):
        return None
    low, high = capacity["capacity_rps_ci"]
    return True if stage["offered_rps"] <= low else False if stage["offered_rps"] >= high else None
