"""The sweep: one stage per load level, given or found, from low load to saturation."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from ampacity.analysis.capacity import next_load
from ampacity.analysis.capacity.goodput_peak import estimate_peak
from ampacity.analysis.capacity.levels import level_of, no_higher, open_levels
from ampacity.analysis.capacity.limit import PUBLISHED, find_capacity
from ampacity.analysis.capacity.pooled import estimate, unmeasured
from ampacity.analysis.capacity.unmeetable import why_unmeetable
from ampacity.analysis.contract.stage import Stage
from ampacity.analysis.slo import Slo
from ampacity.durations import duration_text, rounded_up
from ampacity.experiments.stages.rig import Enough, Rig, Watch
from ampacity.live_panel import Outlook

MAX_DURATION_S = 600.0  # of a curve, if neither loads nor stage lengths are given
STAGE_SHARE = 0.05  # of that time, for a stage of the grid
START_IN_FLIGHT = 0.25  # at the lowest rate: the endpoint is idle most of the time
SURELY_LOW = 0.5  # most requests in flight at the first rate
FIRST_REQUESTS = 20  # in a stage, which may be up to doubled for them
GROWTH = 2.0
STAGES_MAX = 16
TYPICAL_STAGES = 9  # of a curve, for the progress
REFINE_STAGES = 3  # without SLOs: between the highest stable and the lowest unstable load
REFINE_UNTIL = 1.1  # ratio of those two at which the bracket is narrow enough
REFINE_TIMES = 5.0  # with SLOs and no time given: stage lengths spent near the limit in all
PEAK_TIMES = 2.0  # of these, at the load with the highest goodput
PROLONGED = 3.0  # stage lengths of one stage near the limit, at most
PRECISION = 0.1  # of the capacity, at which the sweep ends
DOWN_STEPS = 6  # halvings of a first rate that was too high, from what was served of it
ROOM = 1.2  # over the fewest requests: warm-up is cut, arrivals are random


class _Clock:
    """The time left for a curve: engine time if virtual, else wall-clock time with the drain."""

    def __init__(self, rig: Rig, limit_s: float | None) -> None:
        self.limit_s = limit_s
        self._rig, self._before_s = rig, rig.spent_s

    @property
    def spent_s(self) -> float:
        return self._rig.spent_s - self._before_s

    @property
    def left_s(self) -> float:
        return float("inf") if self.limit_s is None else self.limit_s - self.spent_s

    async def stage(
        self, rate_rps: float, length_s: float, enough: Enough | None = None
    ) -> Stage | None:
        """Run an open stage; None if the run is over."""
        judged = await self._rig.open_stage(rate_rps, length_s, enough and Watch(enough))
        return None if self._rig.ended else judged


async def sweep(
    rig: Rig, start_rps: float | None = None, max_duration_s: float | None = None
) -> None:
    """Run the given load levels, or find them within ``max_duration_s``.

    Each of the settings' ``lengths`` adds a curve; all curves get the same time. Without a
    capacity, the sweep ends by printing the command that is likely to find one.
    """
    if warning := too_few(rig):
        rig.tell(warning)
    settings = rig.settings
    limit_s = max_duration_s and max_duration_s / (1 + len(settings.lengths))
    if limit_s is not None:
        rig.tell(
            f"up to {duration_text(limit_s)} of load, in stages of "
            f"{duration_text(settings.duration_s)} (longer near the limit); disturbed stages are "
            "repeated on top"
        )
    curves, loads = 1 + len(settings.lengths), settings.loads
    rig.expect(Outlook(curves * (len(loads) or TYPICAL_STAGES), max_duration_s, about=not loads))
    await _curve(rig, start_rps, limit_s)
    for name in settings.lengths:
        if rig.ended:
            return
        rig.lengths = name
        rig.settings = replace(
            settings, workload=settings.workload.at_quantile(float(name[1:]) / 100)
        )
        await _curve(rig, start_rps, limit_s)


async def _curve(rig: Rig, start_rps: float | None, limit_s: float | None) -> None:
    settings = rig.settings
    run: Any = rig.closed_stage if settings.concurrency else rig.open_stage
    several, highest = len(settings.durations_s) > 1, float("inf")
    for load, length_s in settings.loads:
        if load < highest:
            if await run(load, length_s if several else None) is None or rig.ended:
                return
            highest = load if _is_the_last(rig) else highest
    if settings.loads:
        return
    clock = _Clock(rig, limit_s)
    rate_rps: float | None = start_rps or begin_rate(rig, _least(rig)[0])
    while rate_rps is not None:
        length_s = rig.stage_s(rate_rps)
        length_s = min(max(length_s, FIRST_REQUESTS / rate_rps), 2 * length_s)
        if clock.left_s < length_s:
            break
        if await clock.stage(rate_rps, length_s) is None:
            return
        rate_rps = next_rate(_of_curve(rig))
    _is_the_last(rig)
    if settings.slos and await _near_the_limit(rig, clock):
        _recommend(rig, clock)


def _is_the_last(rig: Rig) -> bool:
    """Tell why no higher load is run, if the last stage shows that it would find nothing."""
    if why := no_higher(_of_curve(rig)):
        rig.tell(f"no higher load is run: {why}")
    return why is not None


def _of_curve(rig: Rig) -> list[Stage]:
    return [s for s in rig.stages if s.lengths == rig.lengths]


async def _near_the_limit(rig: Rig, clock: _Clock) -> bool:
    """Run stages on both sides of the limit, as a search would, in the time left.

    Returns False if the run is over.
    """
    goal = next_load.Goal(tuple(rig.settings.slos), PRECISION)
    left = REFINE_TIMES  # in lengths of a stage
    peak = estimate_peak(open_levels(_of_curve(rig)), goal.slos)
    if peak is not None:  # between limit and saturation, where no other stage is
        peak_s = PEAK_TIMES * rig.stage_s(peak[2])
        if clock.left_s >= peak_s and await clock.stage(_round(peak[2]), peak_s) is None:
            return False
        left -= PEAK_TIMES
    while len(rig.stages) < 2 * STAGES_MAX and (step := next_load.narrowing(_of_curve(rig), goal)):
        if behind := next_load.client_behind(rig.stages):
            rig.tell(f"no more stages are run near the limit: {behind}")
            break
        length_s = rig.stage_s(step.load_rps)
        longest = PROLONGED
        if clock.limit_s is not None:
            left = clock.left_s / length_s
            longest = max(PROLONGED, left / 2)
        if left < 1:
            break
        times = min(max(step.requests / step.load_rps / length_s, 1.0), longest, left)
        times = left if left - times < 1 else times  # no stage is too short to judge
        enough = partial(next_load.is_decided, _of_curve(rig), goal=goal)
        judged = await clock.stage(_round(step.load_rps), times * length_s, enough)
        if judged is None:
            return False
        left -= judged.window.end_s / length_s
    return True


def _recommend(rig: Rig, clock: _Clock) -> None:
    """If no capacity is known, print and write down the command that is likely to find one."""
    lacking_s = _lacking_s(_of_curve(rig), rig.settings.slos)
    if lacking_s is None:
        return
    enough_s = max(
        MAX_DURATION_S, 2 * (clock.limit_s or clock.spent_s), ROOM * (clock.spent_s + lacking_s)
    )
    command = rig.again("--max-duration", duration_text(rounded_up(enough_s)))
    rig.tell(f"no load is known yet that meets the SLOs; this is likely to find one: {command}")
    rig.note_down("next_command", command)


def _lacking_s(stages: Sequence[Stage], slos: Sequence[Slo]) -> float | None:
    """Return how many seconds of load near the limit a capacity still takes.

    None if one is known or if time would not help: no load meets the SLOs, they cannot be
    measured, or the client is the limit.
    """
    levels = open_levels(stages)
    known = find_capacity(stages, slos).capacity_rps is not None
    if known or not levels or unmeasured(levels, slos):
        return None
    lowest, found = levels[0], estimate(levels, slos)
    if (
        (lowest.is_over and lowest.load <= _lowest_rps(stages))
        or why_unmeetable(levels)
        or isinstance(next_load.non_monotone(levels), next_load.Finished)
    ):
        return None
    if found is None:
        return 0.0
    times = (found.relative_error / PUBLISHED) ** 2 - 1
    return (
        max(times, 0.0) * next_load.near_requests(levels, found.capacity_rps) / found.capacity_rps
    )


def too_few(rig: Rig, option: str = "--duration") -> str | None:
    """Return a warning if stages of the given loads have too few requests to meet an SLO.

    A closed loop is assumed to send as many as an idle endpoint would answer.
    """
    settings = rig.settings
    least, slo = _least(rig)
    unit, rps = "req/s", 1.0  # requests/s of one unit of load
    if settings.concurrency:
        unit, rps = "users", 1 / (rig.typical_e2e_s + settings.think_s)
    few = sorted((load, s) for load, s in settings.loads if load * rps * s < least)
    if not few:
        return None
    named = ", ".join(f"{load * rps * s:,.0f} at {load:g} {unit}" for load, s in few)
    enough = duration_text(rounded_up(ROOM * least / few[0][0] / rps))
    return (
        f"stages are too short for {slo}: it takes {least:,} requests at least to be met, "
        f"and they have about {named}; that takes {option} {enough} from {few[0][0]:g} {unit} on"
    )


def _least(rig: Rig) -> tuple[int, str]:
    """Return the fewest requests that can show that the SLOs are met, and the SLO that needs it."""
    classes = rig.settings.workload.classes
    weights = sum(kind.weight for kind in classes)
    return next_load.fewest_requests(
        rig.settings.slos, {kind.name: kind.weight / weights for kind in classes}
    )


def begin_rate(rig: Rig, least: int) -> float:
    """Return the first rate of the grid.

    A stage has twice ``least`` requests, as half may be cut as warm-up, and FIRST_REQUESTS, but
    no more than SURELY_LOW are in flight.
    """
    idle_rps = START_IN_FLIGHT / rig.typical_e2e_s
    enough_rps = max(2 * least, FIRST_REQUESTS) / rig.stage_s(_round(idle_rps))
    return _round(min(max(idle_rps, enough_rps), SURELY_LOW / rig.typical_e2e_s))


def next_rate(stages: Sequence[Stage]) -> float | None:
    """Return the next rate of the grid given the judged stages, or None when it is done.

    Goes down while even the lowest rate violates an SLO, then doubles until a stage is saturated
    or two violate an SLO. Without SLOs it then bisects (geometrically) between the highest stable
    and the lowest unstable rate.
    """
    if len(stages) >= STAGES_MAX or (stages[-1].client_limited and stages[-1].stable is not False):
        return None  # more load would only measure the client
    verdicts = {_rate(s): _judge(s) for s in stages}
    rates = sorted(verdicts)
    over = [rate for rate in rates if verdicts[rate] in ("over", "saturated")]
    lowest = next(level_of(s) for s in stages if _rate(s) == rates[0])
    if rates[0] in over or (lowest.verdicts and lowest.is_over):
        if rates[0] <= _lowest_rps(stages) or why_unmeetable([level_of(s) for s in stages]):
            return None
        served_rps = lowest.achieved_rps if verdicts[rates[0]] == "saturated" else rates[0]
        return _round(min(rates[0], served_rps or rates[0]) / GROWTH)
    if no_higher(stages):
        return None
    if "saturated" not in verdicts.values() and len(over) < 2:
        return _round(rates[-1] * GROWTH)
    if lowest.verdicts:
        return None  # the estimate covers what is between the two
    low, high = max(rate for rate in rates if rate < over[0]), over[0]
    if _refined(stages) >= REFINE_STAGES or high / low <= REFINE_UNTIL:
        return None
    return _round((low * high) ** 0.5)


def _lowest_rps(stages: Sequence[Stage]) -> float:
    """Return the lowest rate worth a try: DOWN_STEPS below the first one, as far as it was served."""
    first_rps = _rate(stages[0])
    served_rps = stages[0].achieved_rps if stages[0].stable is False else 0.0
    return min(first_rps, served_rps or first_rps) / GROWTH**DOWN_STEPS


def _judge(stage: Stage) -> Literal["within", "over", "saturated", "inconclusive"]:
    if stage.stable is False:
        return "saturated"
    if not stage.slo_verdicts or stage.slo_met:
        return "within"
    return "over" if stage.slo_met is False else "inconclusive"


def _refined(stages: Sequence[Stage]) -> int:
    """Return how many stages lay between rates tried before them."""
    rates = [_rate(s) for s in stages if not s.client_limited]
    return sum(min(rates[:i]) < rates[i] < max(rates[:i]) for i in range(1, len(rates)))


def _rate(stage: Stage) -> float:
    assert stage.offered_rps is not None  # the grid has open stages only
    return stage.offered_rps


def _round(rate_rps: float) -> float:
    return float(f"{rate_rps:.3g}")
