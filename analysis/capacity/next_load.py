"""The search's decision: which load to run next, and for how long, from the judged stages. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from ampacity.analysis.capacity import pooled
from ampacity.analysis.capacity.levels import (
    Level,
    level_of,
    met_quota,
    open_levels,
    violations_above_met,
)
from ampacity.analysis.capacity.posterior import NEAR
from ampacity.analysis.capacity.search import TOO_EARLY, requests_in_all
from ampacity.analysis.capacity.unmeetable import why_unmeetable
from ampacity.analysis.contract.stage import Stage
from ampacity.analysis.slo import EXTREMES, GAP_METRICS, WAITS, Slo
from ampacity.analysis.stats.intervals import smallest_n

GROWTH = 2.0
DOWN_STEPS = 8  # how often the first load is halved
STAGES_MAX = 60
SAME_LOAD = 1.02  # loads closer than this are one load
LATE_KNOWN = 300  # requests of which the p99 of how late they left is not about the worst
BEHIND = 3  # stages in a row in which the client was the limit: no more of them say more
# chance of being wrong at which a stage is ended early: it is looked at several times
CLEAR = 0.001
APART = 0.7  # in log-odds of a miss: how far from the limit the loads are
# loads on both sides of the limit that are further apart have the next one between them
SPLIT = 1.2
# intervals up to so many times the precision asked for show how many requests it takes
# (docs/methods/search.md)
EXTRAPOLATED = 2.0
WIDE = 2.0  # upper over lower end of an interval that does not yet show where the limit is not
LASTS = 3.0  # a stage lasts so many times as long as an overload of its size takes to show
# misses for each 1/precision^2, where the SLO is just kept: 5 to 11 on the servers of
# benchmarks/servers/
EXPECTED = 8.0
# of the requests that a precision takes in the mean, before which no interval counts as so narrow
LEAST = 0.75
STEP_MAX = 1.0  # a stage takes at most this many times the requests of all stages near the limit


@dataclass(frozen=True)
class Goal:
    """The aim of a search. ``precision``: half the 95 % interval over the capacity."""

    slos: tuple[Slo, ...]
    precision: float = 0.05
    first_rps: float = 1.0

    @property
    def allowed(self) -> float:
        """Return the share of misses that the strictest SLO allows."""
        return 1 - max(slo.quantile for slo in self.slos)

    @property
    def few(self) -> int:
        """Return the requests of a stage that only has to show its side of the limit."""
        return math.ceil(3 / self.allowed)

    @property
    def least(self) -> float:
        """Return the requests near the limit before which no interval is narrow but by luck."""
        return LEAST * expected_requests(self)


def expected_requests(goal: Goal) -> int:
    """Return the requests of a search (docs/methods/search.md)."""
    return math.ceil(EXPECTED / goal.allowed / goal.precision**2)


def fewest_requests(slos: Sequence[Slo], shares: Mapping[str, float]) -> tuple[int, str]:
    """Return (fewest requests that can show all SLOs met, the SLO that needs them), or (0, "").

    ``shares``: of all requests, by class. Gaps are not counted: a request has many.
    """
    taken = [
        (math.ceil(smallest_n(slo.quantile) / shares.get(slo.class_ or "", 1.0)), slo.text)
        for slo in slos
        if slo.metric not in GAP_METRICS and slo.quantile not in EXTREMES
    ]
    return max(taken, default=(0, ""))


@dataclass(frozen=True)
class Step:
    """The next stage: its load, its requests, and why."""

    load_rps: float
    requests: int
    why: str


@dataclass(frozen=True)
class Finished:
    """The end of a search and its reason.

    ``more_requests``: those that would reach the precision, if known.
    """

    why: str
    reached: bool = False
    more_requests: int | None = None


def next_step(stages: Sequence[Stage], goal: Goal) -> Step | Finished:
    """Return the next stage, given all judged stages so far, or why there is none."""
    if stages and stages[-1].client_limited and stages[-1].stable is not False:
        last = level_of(stages[-1])
        load = _rate(last.load)
        if last.requests + last.warmup < LATE_KNOWN and len(stages) < STAGES_MAX:
            return Step(load, 2 * LATE_KNOWN, "so few requests that a single late one counts")
        return Finished(f"the client could not keep up with {load:g} requests/s")
    if behind := client_behind(stages):
        return Finished(behind)
    levels = open_levels(stages)
    if not levels:
        return Step(_rate(goal.first_rps), goal.few, "start")
    unknown, bracket = pooled.unmeasured(levels, goal.slos), _bracket(levels, goal)
    if unknown and (bracket is None or sum(level.requests for level in levels) >= goal.few):
        return Finished(pooled.NOT_ALL_MEASURED.format(unknown))
    if end_or_step := bracket or non_monotone(levels):
        return end_or_step
    lowest_over = violations_above_met(levels)[0]
    if quota := met_quota(lowest_over.figures):
        return Finished(quota)
    found = pooled.estimate(levels, goal.slos)
    assert found is not None  # loads on both sides have been tried
    if reached(levels, found, goal):
        text = f"{found.capacity_rps:.3g} requests/s to within {100 * found.relative_error:.2g} %"
        return Finished(text, reached=True, more_requests=0)
    if found.lone and near_requests(levels, found.capacity_rps) >= expected_requests(goal):
        return Finished(pooled.LONE_MISSES.format(found.lone.text))
    if len(stages) >= STAGES_MAX:
        return _unfinished(f"{STAGES_MAX} stages are enough", levels, found, goal, 1)
    return _narrow(levels, found, goal)


def client_behind(stages: Sequence[Stage]) -> str | None:
    """Return why no further stage is run after several in which the client was the limit."""
    last = stages[-BEHIND:]
    if len(last) < BEHIND or not all(stage.client_limited for stage in last):
        return None
    load = _rate(level_of(last[-1]).load)
    return (
        f"the client could not keep up in {BEHIND} stages in a row, the last at {load:g} requests/s"
    )


def narrowing(stages: Sequence[Stage], goal: Goal) -> Step | None:
    """Return the next stage near the limit.

    None where there is no estimate of it, or one that is precise enough.
    """
    levels = open_levels(stages)
    found, over = pooled.estimate(levels, goal.slos), violations_above_met(levels)
    quota = met_quota(over[0].figures) if over else None
    if found is None or isinstance(non_monotone(levels), Finished) or reached(levels, found, goal):
        return None
    if quota:
        return None
    return _narrow(levels, found, goal)


def cut_short(stages: Sequence[Stage], goal: Goal, why: str) -> Finished:
    """Return the end of a search that is ended before its precision, with what it lacks."""
    end = next_step(stages, goal)
    if isinstance(end, Finished):
        return end
    levels = open_levels(stages)
    found = pooled.estimate(levels, goal.slos)
    return _unfinished(why, levels, found, goal, end.requests) if found else Finished(why)


def _unfinished(
    why: str, levels: Sequence[Level], found: pooled.Estimate, goal: Goal, least: int
) -> Finished:
    """Return the end of a search, with the requests still needed where the interval shows them."""
    if not reached(levels, found, goal, EXTRAPOLATED) or found.is_wide(WIDE):
        return Finished(why + TOO_EARLY)
    return Finished(why, more_requests=max(_lacking(levels, found, goal), least))


def so_far(stages: Sequence[Stage], goal: Goal) -> str | None:
    """Return one line on the capacity so far; None before both sides have been tried."""
    found = pooled.estimate(open_levels(stages), goal.slos)
    if found is None:
        return None
    low, high = found.capacity_rps_ci
    more = cut_short(stages, goal, "").more_requests
    sent = sum(level.requests + level.warmup for level in map(level_of, stages))
    takes = f"; {requests_in_all(sent, more)} to {100 * goal.precision:.2g} %" if more else ""
    return (
        f"capacity so far {found.capacity_rps:.3g} req/s, 95 % interval {low:.3g} to "
        f"{high:.3g}{takes}"
    )


def _lacking(levels: Sequence[Level], found: pooled.Estimate, goal: Goal) -> int:
    """Return requests near the limit that the precision still takes.

    The interval narrows with the square root.
    """
    near = near_requests(levels, _centre(levels, found))
    needed = math.ceil(near * (found.relative_error / goal.precision) ** 2)
    return max(needed, math.ceil(goal.least)) - near


def _bracket(levels: Sequence[Level], goal: Goal) -> Step | Finished | None:
    """Return the next step while one side of the limit is unknown."""
    over, lowest, top = violations_above_met(levels), levels[0], levels[-1]
    if not over:  # a growing queue is that of a stage that fills up, else it were over
        filling = ", while the stage fills up," if top.stable is False else ""
        holds = "holds" if top.met else f"seems to hold{filling}"
        why = f"the SLO {holds} at {_rate(top.load):g} requests/s"
        return _step(levels, goal, top.load * GROWTH, goal.few, 1.0, why)
    if len(over) < len(levels):
        return None
    if hopeless := why_unmeetable(levels):
        return Finished(hopeless)
    if lowest.load <= goal.first_rps / GROWTH**DOWN_STEPS:
        return Finished(f"even {_rate(lowest.load):g} requests/s are too many")
    seems = "are" if lowest.met is False else "seem"
    why = f"{_rate(lowest.load):g} requests/s {seems} too many"
    return _step(levels, goal, lowest.load / GROWTH, goal.few, 1.0, why)


def non_monotone(levels: Sequence[Level]) -> Step | Finished | None:
    """Return a repeat where an SLO was violated below a load that met it, or why to stop.

    Where both show the same a second time, or the misses do not come with the load at all, there is
    no limit to look for.
    """
    # a short stage without a miss, which shows nothing, does not make up for the others
    if not any(level.met for level in levels) and (hopeless := why_unmeetable(levels)):
        return Finished(hopeless)
    groups: list[list[Level]] = []
    for level in levels:
        if groups and level.load <= SAME_LOAD * groups[-1][0].load:
            groups[-1].append(level)
        else:
            groups.append([level])
    for low, high in combinations(groups, 2):
        if any(level.met is not False for level in low) or not all(level.met for level in high):
            continue
        why = f"the SLO broke at {low[0].load:g} requests/s and held at {high[0].load:g}"
        for group in (low, high):
            if len(group) < 2:
                return Step(group[0].load, group[0].requests, f"{why}: once more")
        return Finished(
            f"{why}, twice each: the answer does not fall with the load, so no limit is named"
        )
    return None


def near(levels: Sequence[Level], rps: float) -> list[Level]:
    """Return the levels near a load."""
    return [level for level in levels if abs(math.log(level.load / rps)) <= NEAR]


def near_requests(levels: Sequence[Level], rps: float) -> int:
    """Return the requests of the levels near a load."""
    return sum(level.requests for level in near(levels, rps))


def _centre(levels: Sequence[Level], found: pooled.Estimate) -> float:
    """Return the best guess of the limit: between the loads tried, or the estimate."""
    held = max(level.load for level in levels if not level.is_over)
    broke = min(level.load for level in violations_above_met(levels))
    low, high = found.capacity_rps_ci
    if not low <= held < broke <= high:
        return found.capacity_rps
    if broke > SPLIT * held:
        return math.sqrt(held * broke)
    return min(max(found.capacity_rps, held), broke)


def reached(
    levels: Sequence[Level], found: pooled.Estimate, goal: Goal, times: float = 1.0
) -> bool:
    """Return whether the interval is narrow enough and rests on enough requests near the limit.

    ``times`` the precision; at least two stages near the limit and ``LEAST`` of the requests that
    it takes in the mean: narrow before that it is by luck, as few jams were seen.
    """
    close = near(levels, found.capacity_rps)
    enough = times > 1 or sum(level.requests for level in close) >= goal.least
    return len(close) >= 2 and enough and found.relative_error <= times * goal.precision


def _narrow(levels: Sequence[Level], found: pooled.Estimate, goal: Goal) -> Step:
    """Return the stage near the limit, on the side with fewer requests, that narrows the interval.

    Nearer to the limit the slope would not be learned, without which a share of misses shows little
    about a load.
    """
    centre = _centre(levels, found)
    seen = near_requests(levels, centre)
    below = near_requests([level for level in levels if level.load <= centre], centre)
    apart = min(APART / found.slope, 0.75 * NEAR)
    load = centre * (1 - apart if 2 * below <= seen else 1 + apart / 2)
    requests = max(_lacking(levels, found, goal), seen // 10, 2 * goal.few)
    requests = min(requests, max(4 * goal.few, math.ceil(STEP_MAX * seen)))
    why = f"the capacity is known {_known(found)}"
    return _step(levels, goal, load, requests, found.relative_error, why)


def _step(
    levels: Sequence[Level], goal: Goal, load: float, requests: int, overload: float, why: str
) -> Step:
    """Return a stage so long that an ``overload`` (share of the load) violates the SLO."""
    waits_s = [slo.limit_s for slo in goal.slos if slo.metric in WAITS]
    steady = [level for level in levels if level.stable is not False and level.achieved_rps]
    nearest = min(steady, key=lambda level: abs(math.log(level.load / load)), default=None)
    stays_s = nearest.concurrency / nearest.achieved_rps if nearest else 0.0
    share = min(max(overload, goal.precision), 1.0)
    lasting_s = LASTS * (min(waits_s, default=0.0) + stays_s) / share
    return Step(_rate(load), max(requests, math.ceil(load * lasting_s)), why)


def _known(found: pooled.Estimate) -> str:
    """Return how well the capacity is known, in words."""
    low, high = found.capacity_rps_ci
    if not low:
        return "from above only"
    if found.is_wide(WIDE):
        return f"to a factor of {high / low:.2g} only"
    return f"to {100 * found.relative_error:.2g} %"


def is_decided(stages: Sequence[Stage], partial: Stage, goal: Goal) -> str | None:
    """Return why a running stage can stop: unstable, clearly violated, or precise enough."""
    level = level_of(partial)
    if level.stable is False and level.is_over:
        return f"no steady state: {partial.stable_reason}"
    verdicts = [v for v in level.verdicts if v.attainment is not None]
    if not verdicts:
        return None
    levels = open_levels([*stages, partial])
    found = pooled.estimate(levels, goal.slos)
    if found is None or found.is_wide(WIDE):
        broken = next((v.text for v in verdicts if v.clearly_violated(CLEAR)), None)
        return broken and f"{broken} is clearly broken"
    if reached(levels, found, goal):
        return f"the capacity is known {_known(found)}"
    low, high = found.capacity_rps_ci
    if not low / (1 + goal.precision) <= level.load <= high * (1 + goal.precision):
        return f"the limit is elsewhere: between {low:.3g} and {high:.3g} requests/s"
    return None


def _rate(load_rps: float) -> float:
    return float(f"{load_rps:.4g}")
