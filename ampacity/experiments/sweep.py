"""The sweep: one stage per load level, given or found, until the endpoint is past saturation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from ampacity.experiments.stage_book import StageBook
from ampacity.values import duration_text
from analysis.next_load import Goal, Step, fewest_requests, narrowing, out_of_reach, told_enough
from analysis.pooled import is_over

START_IN_FLIGHT = 0.25  # the lowest rate of the grid: an idle endpoint most of the time
FIRST_REQUESTS = 20  # and sends at least so many in a stage
CARRIED = 2.0  # requests in flight that any endpoint is taken to carry
ROOM = 1.2  # over the fewest requests of a percentile: warm-up is cut, arrivals are random
GROWTH = 2.0
STAGES_MAX = 16
REFINE_STAGES = 3  # without an SLO: between the highest load that was carried and the lowest that was not
REFINE_UNTIL = 1.1  # their ratio at which the bracket is narrow enough
REFINE_TIMES = 5.0  # with SLOs: stage lengths that the loads near the limit get in all
PROLONGED = 3.0  # and one of them at most
PRECISION = 0.1  # of the usable rate, at which no more is asked for
DOWN_STEPS = 6  # how often the grid is halved below a start that was too high already


async def sweep(rig: StageBook, start_rps: float | None = None) -> None:
    """Run the levels of the settings, or the grid that finds itself; then again at each of the settings' ``lengths``."""
    if told := too_few(rig, start_rps):
        rig.tell(told)
    await _curve(rig, start_rps)
    settings = rig.settings
    for name in settings.lengths:
        if rig.ended:
            return
        rig.lengths = name
        rig.settings = replace(settings, workload=settings.workload.at_quantile(float(name[1:]) / 100))
        await _curve(rig, start_rps)


async def _curve(rig: StageBook, start_rps: float | None) -> None:
    settings = rig.settings
    if settings.concurrency:
        for concurrency in settings.concurrency:
            if await rig.closed_stage(concurrency) is None or rig.ended:
                return
        return
    if settings.rates:
        for given_rps in settings.rates:
            if await rig.open_stage(given_rps) is None or rig.ended:
                return
        return
    rate_rps: float | None = start_rps or begin_rate(rig, _least(rig)[0])
    while rate_rps is not None and await rig.open_stage(rate_rps) is not None and not rig.ended:
        rate_rps = next_rate(_of_curve(rig))
    if settings.slos and not rig.ended:
        await _near_the_limit(rig)


def _of_curve(rig: StageBook) -> list[dict[str, Any]]:
    return [s for s in rig.stages if s["lengths"] == rig.lengths]


async def _near_the_limit(rig: StageBook) -> None:
    """Loads on both sides of the limit that the stages so far tell of, as a search would take them, in the time that a sweep has."""
    goal = Goal(tuple(rig.settings.slos), PRECISION)
    left = REFINE_TIMES  # in lengths of a stage
    while left >= 1 and isinstance(step := narrowing(stages := _of_curve(rig), goal), Step):
        length_s = rig.stage_s(step.load_rps)
        times = min(max(step.requests / step.load_rps / length_s, 1.0), PROLONGED, left)
        times = left if left - times < 1 else times  # too short a stage says nothing
        judged = await rig.open_stage(
            _round(step.load_rps), times * length_s,
            lambda partial, before=stages: told_enough(before, partial, goal),  # type: ignore[misc]
        )  # fmt: skip
        if judged is None or rig.ended or len(rig.stages) >= STAGES_MAX:
            return
        left -= judged["window"]["end_s"] / length_s


def too_few(rig: StageBook, start_rps: float | None = None) -> str | None:
    """Which loads have fewer requests in a stage than an SLO takes to be met, and what to do; None where none has.

    A closed loop is expected to send as many as an idle endpoint would answer.
    """
    settings = rig.settings
    least, slo = _least(rig)
    unit, rps = "req/s", 1.0  # requests/s of one unit of load
    if settings.concurrency:
        unit, rps = "users", 1 / (rig.typical_e2e_s + settings.think_s)
    given = settings.concurrency or settings.rates
    loads = given or (start_rps or begin_rate(rig, least),)
    low = min(loads)

    def requests(load: float) -> float:
        return load * rps * (settings.duration_s if settings.concurrency else rig.stage_s(load))

    if not least or requests(low) >= least:
        return None
    few = [f"{requests(x):,.0f} at {x:g} {unit}" for x in loads if requests(x) < least]
    return (
        f"stages are too short for {slo} below {least / settings.duration_s / rps:.4g} {unit} (--duration {settings.duration_s:g} s): "
        f"it takes {least:,} requests at least to be met, and they have about {', '.join(few)}"
        f"{'' if given else ', where the sweep begins'}; --duration {duration_text(ROOM * least / low / rps)} is enough from {low:g} {unit} on"
    )


def _least(rig: StageBook) -> tuple[int, str]:
    """Requests that a stage needs to show that it meets the SLOs, and the SLO that takes so many."""
    classes = rig.settings.workload.classes
    weights = sum(kind.weight for kind in classes)
    return fewest_requests(rig.settings.slos, {kind.name: kind.weight / weights for kind in classes})


def begin_rate(rig: StageBook, least: int) -> float:
    """Where the grid starts: as low as that is, where a stage has twice ``least`` requests, but at ``CARRIED`` in flight at most."""
    low = first_rate(rig.typical_e2e_s, rig.settings.duration_s)
    enough = 2 * least / rig.stage_s(low)  # up to half of a stage may be cut as warm-up
    return max(low, _round(min(enough, CARRIED / rig.typical_e2e_s)))


def first_rate(typical_e2e_s: float, duration_s: float) -> float:
    """The lowest rate worth a stage, requests/s: low, but with enough requests to say something."""
    return _round(max(START_IN_FLIGHT / typical_e2e_s, FIRST_REQUESTS / duration_s))


def next_rate(stages: Sequence[dict[str, Any]]) -> float | None:
    """The next offered rate of the grid given the judged stages so far, or None when it is done.

    Doubles until a stage is saturated (or two broke the SLO), goes down while even the lowest one seems to be over.
    Without SLOs it then halves (geometrically) the widest gap between the highest rate that was carried and the
    lowest that was not.
    """
    if len(stages) >= STAGES_MAX or (stages[-1]["client_limited"] and stages[-1]["stable"] is not False):
        return None  # beyond a limited client more load would only measure the client
    level = {float(s["offered_rps"]): _judge(s) for s in stages}
    rates = sorted(level)
    over = [rate for rate in rates if level[rate] in ("over", "saturated")]
    if "saturated" not in level.values() and len(over) < 2:
        return _round(rates[-1] * GROWTH)
    lowest = next(s for s in stages if s["offered_rps"] == rates[0])
    if over[0] == rates[0] or (lowest["slo_verdicts"] and is_over(lowest)):
        worth_a_look = rates[0] > rates[-1] / GROWTH**DOWN_STEPS and not out_of_reach(stages)
        return _round(rates[0] / GROWTH) if worth_a_look else None
    if lowest["slo_verdicts"]:
        return None  # what is between the two is for the estimate to say
    within = [rate for rate in rates if rate < over[0]]
    return _refine([within[-1], over[0]], _refined(stages))


def _judge(stage: dict[str, Any]) -> Literal["within", "over", "saturated", "undecided"]:
    if stage["stable"] is False:
        return "saturated"
    if not stage["slo_verdicts"] or stage["slo_met"]:
        return "within"
    return "over" if stage["slo_met"] is False else "undecided"


def _refined(stages: Sequence[dict[str, Any]]) -> int:
    """How many stages so far lay between rates that had been tried before them."""
    rates = [float(s["offered_rps"]) for s in stages if not s["client_limited"]]
    return sum(min(rates[:i]) < rates[i] < max(rates[:i]) for i in range(1, len(rates)))


def _refine(bracket: list[float], refined: int) -> float | None:
    low, high = bracket
    if refined >= REFINE_STAGES or high / low <= REFINE_UNTIL:
        return None
    return _round((low * high) ** 0.5)


def _round(rate_rps: float) -> float:
    return float(f"{rate_rps:.3g}")
