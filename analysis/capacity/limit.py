"""Capacity in requests/s and C_max: the highest load that still meets the SLOs.

Of open stages the figure is the pooled estimate (``ampacity.analysis.capacity.pooled``) where its
interval is narrow enough, else the highest load that is shown to meet every SLO; of a closed loop
the highest set concurrency that is. Both ends of what was shown, the highest load that met the SLOs
and the lowest above it that violated them, are given beside it. The rate of an open stage is the
rate that was asked for, less the share that was not answered; how many arrived by chance is no
capacity.
"""

from collections.abc import Sequence

from msgspec.structs import asdict, replace

from ampacity.analysis.capacity.levels import (
    Level,
    level_of,
    levels_of,
    number_text,
    open_levels,
    rounded_down,
    without_outages,
)
from ampacity.analysis.capacity.next_load import non_monotone
from ampacity.analysis.capacity.pooled import (
    LONE_MISSES,
    NOT_ALL_MEASURED,
    POOLED,
    Estimate,
    estimate,
    unmeasured,
)
from ampacity.analysis.capacity.unmeetable import why_unmeetable
from ampacity.analysis.contract.capacity import Capacity, LoopCapacity
from ampacity.analysis.contract.part import with_nulls
from ampacity.analysis.contract.stage import Loop, Stage
from ampacity.analysis.slo import Slo
from ampacity.analysis.stage.throughput import all_failed

# half width of an interval over its figure, up to which the estimate is the published figure
PUBLISHED = 0.5
MEASURED_RATIO = 1.05
NOT_SHOWN = "no stage is shown to meet the SLO"
DOWN_IN_EACH = "no usable stage: the endpoint was down in each of them for a while"
SATURATED_RATIO = 1.01  # two levels of a closed loop whose rates are closer carry the same
ASSUMPTION = (
    "the SLOs are met up to the highest stage that met them and violated from the lowest that "
    "violated them (a bracket of tested loads, not a confidence interval); the rate of an open "
    "stage is its offered rate, less the share that was not answered; the upper end is the offered "
    "rate of the stage that violated them"
)
NO_SLO = "no SLO given: capacity is the highest load that still meets the SLOs (--slo ttft_p99=2s)"
TOO_WIDE = (
    "the estimate from all stages is {0} requests/s, known to {1} only: longer stages or a "
    "search tell more"
)
CONTRADICTED = (
    "a stage met the SLOs at {} requests/s, above what all stages together allow ({}): run these "
    "loads again"
)


def find_capacity(stages: Sequence[Stage], slos: Sequence[Slo]) -> Capacity:
    """Return the capacity, ``non_monotone`` where a stage violated the SLOs below one that met.

    Open stages are judged if there are any, else closed ones (then C_max is the set concurrency,
    or, where users pause between requests, the mean in flight at that number of ``users``); where
    there are both, ``closed`` is that other view.
    """
    undisturbed = without_outages(stages)
    shown = _shown(undisturbed, slos)
    if stages and not undisturbed and slos:
        shown = replace(shown, reason=DOWN_IN_EACH)
    closed = [s for s in undisturbed if s.kind == "closed"]
    other = _shown(closed, slos) if closed and shown.c_max_basis == "open" else None
    pooled = _pooled(open_levels(undisturbed), slos, shown)
    return Capacity(**asdict(pooled), closed=other)


def _pooled(levels: list[Level], slos: Sequence[Slo], shown: LoopCapacity) -> LoopCapacity:
    """Return ``shown`` with the estimate from all open stages, if they allow one."""
    other = replace(shown, lower_loads=[])  # what is lacking, if anything, is something else
    if unknown := unmeasured(levels, slos):
        return replace(other, reason=NOT_ALL_MEASURED.format(unknown))
    found = estimate(levels, slos)
    if found is None:
        return shown
    if doubtful := non_monotone(levels):
        known = any(level.met for level in levels)
        return replace(other, reason=doubtful.why, non_monotone=known)
    low, high = found.capacity_rps_ci
    ci, verified = (rounded_down(low), high), shown.verified_rps or 0.0
    if verified > high:  # stages that contradict each other name no load
        why = CONTRADICTED.format(number_text(verified), number_text(high))
        rate = found.capacity_rps
        return replace(other, estimate_rps=rate, estimate_rps_ci=ci, reason=why)
    estimated = replace(
        shown,
        estimate_rps=found.capacity_rps,
        estimate_rps_ci=ci,
        assumption=POOLED,
        binding_slo=found.binding[0].text,
        binding_or=[slo.text for slo in found.binding[1:]],
    )
    if found.relative_error > PUBLISHED or not ci[0]:
        return _too_wide(found, estimated)
    return replace(
        estimated,
        lower_loads=[],
        capacity_rps=found.capacity_rps,
        capacity_rps_ci=ci,
        c_max=found.c_max,
        c_max_ci=found.c_max_ci,
        crossing="pooled",
        stage=found.nearest,
        reason=None,
    )


def _too_wide(found: Estimate, shown: LoopCapacity) -> LoopCapacity:
    """Return ``shown`` with why the estimate is not published: its interval is too wide."""
    (low, high), rate = found.capacity_rps_ci, shown.capacity_rps
    width = f"a factor of {high / low:.2g}" if low else "at most its upper end"
    if high < 2 * low:
        width = f"{100 * found.relative_error:.2g} %"
    reason = TOO_WIDE.format(number_text(found.capacity_rps), width)
    if found.lone:
        reason = LONE_MISSES.format(found.lone.text)
    if rate is not None:
        return replace(shown, capacity_rps_ci=(min(low, rate), max(high, rate)), reason=reason)
    reason = f"{shown.reason}; {reason}" if shown.reason else reason
    return replace(shown, capacity_rps_ci=(low, high), reason=reason)


def _nothing_shown(kind: Loop, reason: str | None) -> LoopCapacity:
    return with_nulls(
        LoopCapacity,
        c_max_basis=kind,
        binding_or=[],
        lower_loads=[],
        crossing="none",
        reason=reason,
        assumption=ASSUMPTION,
        non_monotone=False,
    )


def _shown(stages: Sequence[Stage], slos: Sequence[Slo]) -> LoopCapacity:
    """Return the capacity that single stages show.

    The highest load that met every SLO, the lowest above it that violated one.
    """
    kind: Loop = "open" if any(s.kind == "open" for s in stages) else "closed"
    levels = levels_of(stages, kind)
    if not slos or not levels:
        return _nothing_shown(kind, NO_SLO if not slos else _no_level(stages))
    violated = next((v for v in levels if v.met is False), None)
    below = [v for v in levels if v.met and (violated is None or v.load < violated.load)]
    top_met = max((v.load for v in levels if v.met), default=0.0)
    upper = next((v for v in levels if v.met is False and v.load > top_met), None)
    result = replace(
        _nothing_shown(kind, None),
        non_monotone=violated is not None and top_met >= violated.load,
        violated_rps=violated and violated.highest_rate,
    )
    if not below:
        of_kind = [level_of(s) for s in stages if s.kind == kind]
        hopeless = why_unmeetable(of_kind) if violated is levels[0] else None
        if violated is None:
            why = str(levels[-1].figures.slo_met_reason).removeprefix("inconclusive: ")
            return replace(result, reason=f"no stage is decided ({why})")
        top, lower = upper or violated, [] if hopeless else _lower_loads(levels[0])
        return replace(
            result,
            c_max_ci=(0.0, top.in_flight),
            capacity_rps_ci=(0.0, top.highest_rate),
            reason=hopeless or _all_too_high(levels[0], violated, lower),
            lower_loads=lower,
        )
    met = below[-1]
    # a queue that grows has no number in flight that stands for its load
    between = [v for v in levels if upper and met.load <= v.load <= upper.load]
    steady = [v.in_flight for v in between if v.stable is not False]
    result = replace(
        result,
        stage=met.index,
        users=None if met.is_open else round(met.load),
        verified_rps=met.rate,
        capacity_rps=met.rate,
        capacity_rps_ci=(met.rate, max(met.rate, upper.highest_rate) if upper else None),
        c_max=met.in_flight,
        c_max_ci=(met.in_flight, max(steady) if upper and upper.stable is not False else None),
    )
    if violated is None:
        why = "no stage violated an SLO: the capacity is higher than what was tried"
        return replace(result, crossing="lower_bound", reason=why)
    saturated = kind == "closed" and violated.rate <= SATURATED_RATIO * met.rate
    crossing = "saturated" if saturated else "measured" if kind == "closed" else "verified"
    return replace(result, crossing=crossing, binding_slo=_furthest_over(violated, slos).text)


def _furthest_over(level: Level, slos: Sequence[Slo]) -> Slo:
    """Return the SLO that is furthest over its limit."""

    def times(slo: Slo) -> float:
        verdict = level.verdict(slo)
        assert verdict is not None
        missed, value_s = verdict.missed / max(1 - slo.quantile, 1e-9), verdict.value_s
        return missed if value_s is None else max(value_s / slo.limit_s, missed)

    return max(slos, key=times)


def _no_level(stages: Sequence[Stage]) -> str:
    if not stages:
        return "no stage"
    tried = [s for s in stages if s.requests]
    if tried and all(s.client_limited for s in tried):
        return "no usable stage: the client was the limit in all of them"
    if tried and all(all_failed(s) for s in tried):
        return "no usable stage: every request failed in all of them"
    if any(s.ended_early for s in tried):
        return "no usable stage: those that the client kept up with ended early"
    return "no usable stage: none holds a request in its window"


def _lower_loads(low: Level) -> list[float]:
    """Return loads to try below the lowest one, if that violated an SLO."""
    if low.met is None:
        return []
    if low.is_open:  # quarters of what it answered; far lower where that was nothing
        top = min(low.load, low.achieved_rps) or low.load / 4
        return [float(number_text(top * part, 2)) for part in (0.25, 0.5, 0.75)]
    return [float(users) for users in sorted({int(low.load) // 4, int(low.load) // 2} - {0})]


def _all_too_high(low: Level, violated: Level, lower: Sequence[float]) -> str:
    """Return why no load is shown to meet the SLOs, and that ``lower`` ones are to be tried."""
    if low.met is None:
        return f"{NOT_SHOWN}, and {violated.load:.3g} breaks it: use longer stages or lower loads"
    served = f"{number_text(low.achieved_rps)} requests/s were answered there"
    unit = "requests/s" if low.is_open else "in flight"
    tried = ", ".join(f"{load:g}" for load in lower)
    tried = f"{tried} {unit}" if lower else "shorter prompts or a laxer SLO"
    load = f"{number_text(low.load) if low.is_open else round(low.load)} {unit}"
    return f"the lowest load tried, {load}, is already too high: {served}; try {tried}"


def met_by_all(stage: Stage, capacity: Capacity) -> bool | None:
    """Return whether a stage's load meets the SLOs by the pooled estimate; None where not known.

    A stage alone may be too short to have seen its worst, while those at higher loads show where
    the limit is.
    """
    if stage.slo_met is not None:
        return stage.slo_met
    if (
        capacity.crossing != "pooled"
        or stage.kind != "open"
        or stage.client_limited
        or not stage.requests
    ):
        return None
    low, high = capacity.capacity_rps_ci or (None, None)
    rate = stage.offered_rps
    assert low is not None
    assert high is not None
    assert rate is not None
    return True if rate <= low else False if rate >= high else None
