"""The search's decision: which load to run next, and for how long. Pure.

What it knows is the judged stages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from ampacity.analysis.capacity.judged import (
    WAITS,
    clearly_violated,
    is_over,
    judged_open,
    violations_above_met,
)
from ampacity.analysis.capacity.pooled import LONE_TELLS, NOT_ALL_SEEN, Estimate, estimate, unseen
from ampacity.analysis.capacity.posterior import NEAR
from ampacity.analysis.capacity.reach import out_of_reach
from ampacity.analysis.capacity.search import TOO_EARLY, requests_in_all
from ampacity.analysis.slo import GAP_METRICS, Slo
from ampacity.analysis.stats.intervals import smallest_n

GROWTH = 2.0
DOWN_STEPS = 8  # how often the first load is halved
STAGES_MAX = 60
SAME_LOAD = 1.02  # loads closer than this are one load
LATE_KNOWN = 300  # requests of which the p99 of how late they left is not about the worst
# chance of being wrong at which a stage is ended early: it is looked at several times
CLEAR = 0.001
APART = 0.7  # in log-odds of a miss: how far from the limit the loads are
# loads on both sides of the limit that are further apart have the next one between them
SPLIT = 1.2
# intervals up to so many times the precision asked for tell how many requests it takes
# (docs/methods/search.md)
TOLD = 2.0
WIDE = 2.0  # upper over lower end of an interval that says nothing yet of where the limit is not
LASTS = 3.0  # a stage lasts so many times as long as an overload of its size takes to show
# misses for each 1/precision^2, where the SLO is just kept: 5 to 11 on the servers of
# benchmarks/servers/
EXPECTED = 8.0
# of the requests that a precision takes in the mean, before which no interval counts as so narrow
LEAST = 0.75
STEP_MAX = 1.0  # a stage takes at most this many times the requests of all stages near the limit


@dataclass(frozen=True)
class Goal:
    """What the search is asked for. ``precision``: half the 95 % interval over the capacity."""

    slos: tuple[Slo, ...]
    precision: float = 0.05
    first_rps: float = 1.0

    @property
    def few(self) -> int:
        """Return the requests of a stage that only has to show its side of the limit."""
        return math.ceil(3 / (1 - max(slo.quantile for slo in self.slos)))


def expected_requests(goal: Goal) -> int:
    """Return the requests of a search: EXPECTED misses for each 1/precision^2 (docs/methods/search.md)."""
    return math.ceil(EXPECTED / (1 - max(slo.quantile for slo in goal.slos)) / goal.precision**2)


def fewest_requests(slos: Sequence[Slo], shares: Mapping[str, float]) -> tuple[int, str]:
    """Return (fewest requests that can show all SLOs met, the SLO that needs them), or (0, "").

    ``shares``: of all requests, by class. Gaps are not counted: a request has many.
    """
    taken = [
        (math.ceil(smallest_n(slo.quantile) / shares.get(slo.class_ or "", 1.0)), slo.text)
        for slo in slos
        if slo.metric not in GAP_METRICS
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
    """Why the search ends; ``more_requests``: those that would reach the precision, if known."""

    why: str
    reached: bool = False
    more_requests: int | None = None


def next_step(stages: Sequence[Mapping[str, Any]], goal: Goal) -> Step | Finished:
    """Return the next stage, given all judged stages so far, or why there is none."""
    if stages and stages[-1]["client_limited"] and stages[-1]["stable"] is not False:
        load = _rate(stages[-1]["offered_rps"])
        sent = stages[-1]["requests"] + stages[-1]["window"]["warmup_requests"]
        if sent < LATE_KNOWN and len(stages) < STAGES_MAX:
            return Step(load, 2 * LATE_KNOWN, "so few requests that a single late one counts")
        return Finished(f"the client could not keep up with {load:g} requests/s")
    judged = judged_open(stages)
    if not judged:
        return Step(_rate(goal.first_rps), goal.few, "start")
    unknown, bracket = unseen(judged, goal.slos), _bracket(judged, goal)
    if unknown and (bracket is None or sum(int(s["requests"]) for s in judged) >= goal.few):
        return Finished(NOT_ALL_SEEN.format(unknown))
    if bracket is not None:
        return bracket
    doubtful = non_monotone(judged)
    if doubtful is not None:
        return doubtful
    found = estimate(judged, goal.slos)
    assert found is not None  # loads on both sides have been tried
    if reached(judged, found, goal):
        text = f"{found.capacity_rps:.3g} requests/s to within {100 * found.relative_error:.2g} %"
        return Finished(text, reached=True, more_requests=0)
    if found.lone and near_requests(judged, found.capacity_rps) >= expected_requests(goal):
        return Finished(LONE_TELLS.format(found.lone.text))
    lacking = _lacking(judged, found, goal)
    if len(stages) >= STAGES_MAX:
        return _unfinished(f"{STAGES_MAX} stages are enough", judged, found, goal, 1)
    return _narrow(judged, found, lacking, goal)


def narrowing(stages: Sequence[Mapping[str, Any]], goal: Goal) -> Step | None:
    """Return the next stage near the limit.

    None where there is no estimate of it, or one that is precise enough.
    """
    judged = judged_open(stages)
    found = estimate(judged, goal.slos)
    if found is None or isinstance(non_monotone(judged), Finished) or reached(judged, found, goal):
        return None
    return _narrow(judged, found, _lacking(judged, found, goal), goal)


def cut_short(stages: Sequence[Mapping[str, Any]], goal: Goal, why: str) -> Finished:
    """Return (answers that may have been cut off, all good answers)."""
    end = next_step(stages, goal)
    if isinstance(end, Finished):
        return end
    judged = judged_open(stages)
    found = estimate(judged, goal.slos)
    return _unfinished(why, judged, found, goal, end.requests) if found else Finished(why)


def _unfinished(
    why: str, judged: Sequence[Mapping[str, Any]], found: Estimate, goal: Goal, least: int
) -> Finished:
    """Return the end of a search, with the requests still needed where the interval tells them."""
    if (
        not reached(judged, found, goal, TOLD)
        or found.capacity_rps_ci[1] > WIDE * found.capacity_rps_ci[0]
    ):
        return Finished(why + TOO_EARLY)
    return Finished(why, more_requests=max(_lacking(judged, found, goal), least))


def so_far(stages: Sequence[Mapping[str, Any]], goal: Goal) -> str | None:
    """Return one line on the capacity so far; None before both sides have been tried."""
    found = estimate(judged_open(stages), goal.slos)
    if found is None:
        return None
    low, high = found.capacity_rps_ci
    more = cut_short(stages, goal, "").more_requests
    sent = sum(int(s["requests"] + s["window"]["warmup_requests"]) for s in stages)
    takes = f"; {requests_in_all(sent, more)} to {100 * goal.precision:.2g} %" if more else ""
    return (
        f"capacity so far {found.capacity_rps:.3g} req/s, 95 % interval {low:.3g} to "
        f"{high:.3g}{takes}"
    )


def _lacking(judged: Sequence[Mapping[str, Any]], found: Estimate, goal: Goal) -> int:
    """Return requests near the limit that the precision still takes.

    The interval narrows with the square root.
    """
    near = near_requests(judged, _centre(judged, found))
    needed = math.ceil(near * (found.relative_error / goal.precision) ** 2)
    return max(needed, math.ceil(LEAST * expected_requests(goal))) - near


def _bracket(judged: Sequence[Mapping[str, Any]], goal: Goal) -> Step | Finished | None:
    over = violations_above_met(judged)
    top, bottom = float(judged[-1]["offered_rps"]), float(judged[0]["offered_rps"])
    if not over:
        filling = (
            ", while the stage fills up," if judged[-1]["stable"] is False else ""
        )  # else it were over
        holds = "holds" if judged[-1]["slo_met"] else f"seems to hold{filling}"
        return _step(
            judged,
            goal,
            top * GROWTH,
            goal.few,
            1.0,
            f"the SLO {holds} at {_rate(top):g} requests/s",
        )
    if len(over) == len(judged):
        hopeless = out_of_reach(judged)
        if hopeless:
            return Finished(hopeless)
        if bottom <= goal.first_rps / GROWTH**DOWN_STEPS:
            return Finished(f"even {_rate(bottom):g} requests/s are too many")
        seems = "are" if judged[0]["slo_met"] is False else "seem"
        why = f"{_rate(bottom):g} requests/s {seems} too many"
        return _step(judged, goal, bottom / GROWTH, goal.few, 1.0, why)
    return None


def non_monotone(judged: Sequence[Mapping[str, Any]]) -> Step | Finished | None:
    """Return a repeat where an SLO was violated below a load that met it, or why to stop.

    Where both say the same a second time, or the misses do not come with the load at all, there is
    no limit to look for.
    """
    hopeless = None if any(s["slo_met"] for s in judged) else out_of_reach(judged)
    if (
        hopeless
    ):  # a short stage without a miss, which shows nothing, does not make up for the others
        return Finished(hopeless)
    groups: list[list[Mapping[str, Any]]] = []
    for stage in judged:
        if groups and stage["offered_rps"] <= SAME_LOAD * groups[-1][0]["offered_rps"]:
            groups[-1].append(stage)
        else:
            groups.append([stage])
    for low, high in combinations(groups, 2):
        if not (all(s["slo_met"] is False for s in low) and all(s["slo_met"] for s in high)):
            continue
        a, b = float(low[0]["offered_rps"]), float(high[0]["offered_rps"])
        why = f"the SLO broke at {a:g} requests/s and held at {b:g}"
        for group, load in ((low, a), (high, b)):
            if len(group) < 2:
                return Step(load, max(int(s["requests"]) for s in group), f"{why}: once more")
        return Finished(
            f"{why}, twice each: the answer does not fall with the load, so no limit is named"
        )
    return None


def near_requests(judged: Sequence[Mapping[str, Any]], rps: float) -> int:
    """Return requests of the stages near a load."""
    return sum(int(s["requests"]) for s in judged if abs(math.log(s["offered_rps"] / rps)) <= NEAR)


def _centre(judged: Sequence[Mapping[str, Any]], found: Estimate) -> float:
    """Return the best guess of the limit: between the loads tried, or the estimate."""
    held = max(float(s["offered_rps"]) for s in judged if not is_over(s))
    broke = min(float(s["offered_rps"]) for s in violations_above_met(judged))
    low, high = found.capacity_rps_ci
    if not low <= held < broke <= high:
        return found.capacity_rps
    return (
        math.sqrt(held * broke)
        if broke > SPLIT * held
        else min(max(found.capacity_rps, held), broke)
    )


def reached(
    judged: Sequence[Mapping[str, Any]], found: Estimate, goal: Goal, times: float = 1.0
) -> bool:
    """Return whether the interval is narrow enough and rests on enough requests near the limit.

    ``times`` the precision; at least two stages near the limit and ``LEAST`` of the requests that
    it takes in the mean: narrow before that it is by luck, as few jams were seen.
    """
    near = [s for s in judged if abs(math.log(s["offered_rps"] / found.capacity_rps)) <= NEAR]
    seen = sum(int(s["requests"]) for s in near)
    enough = times > 1 or seen >= LEAST * expected_requests(goal)
    return len(near) >= 2 and enough and found.relative_error <= times * goal.precision


def _narrow(judged: Sequence[Mapping[str, Any]], found: Estimate, lacking: int, goal: Goal) -> Step:
    """Return the stage near the limit, on the side with fewer requests, that narrows the interval.

    Nearer to the limit the slope would not be learned, without which a share of misses says little
    about a load.
    """
    centre = _centre(judged, found)
    near = near_requests(judged, centre)
    below = near_requests([s for s in judged if s["offered_rps"] <= centre], centre)
    apart = min(APART / found.slope, 0.75 * NEAR)
    load = centre * (1 - apart if 2 * below <= near else 1 + apart / 2)
    requests = min(
        max(lacking, near // 10, 2 * goal.few), max(4 * goal.few, math.ceil(STEP_MAX * near))
    )
    return _step(
        judged,
        goal,
        load,
        requests,
        found.relative_error,
        f"the capacity is known {_known(found)}",
    )


def _step(
    judged: Sequence[Mapping[str, Any]],
    goal: Goal,
    load: float,
    requests: int,
    overload: float,
    why: str,
) -> Step:
    """Return a stage so long that an ``overload`` (share of the load) violates the SLO."""
    waits_s = [slo.limit_s for slo in goal.slos if slo.metric in WAITS]
    steady = [s for s in judged if s["stable"] is not False and s["achieved_rps"]]
    nearest = min(steady, key=lambda s: abs(math.log(s["offered_rps"] / load)), default=None)
    stays_s = nearest["concurrency"] / nearest["achieved_rps"] if nearest else 0.0
    lasting_s = (
        LASTS * (min(waits_s, default=0.0) + stays_s) / min(max(overload, goal.precision), 1.0)
    )
    return Step(_rate(load), max(requests, math.ceil(load * lasting_s)), why)


def _known(found: Estimate) -> str:
    """Return how well the capacity is known, in words."""
    low, high = found.capacity_rps_ci
    if not low:
        return "from above only"
    if high > WIDE * low:
        return f"to a factor of {high / low:.2g} only"
    return f"to {100 * found.relative_error:.2g} %"


def is_decided(
    stages: Sequence[Mapping[str, Any]], partial: Mapping[str, Any], goal: Goal
) -> str | None:
    """Return why a running stage can stop: unstable, clearly violated, or precise enough."""
    if partial["stable"] is False and is_over(partial):
        return f"no steady state: {partial['stable_reason']}"
    verdicts = [v for v in partial["slo_verdicts"] if v["attainment"] is not None]
    if not verdicts:
        return None
    together = judged_open([*stages, partial])
    found = estimate(together, goal.slos)
    if found is None or found.capacity_rps_ci[1] > WIDE * found.capacity_rps_ci[0]:
        broken = next((v["slo"] for v in verdicts if clearly_violated(v, CLEAR)), None)
        return broken and f"{broken} is clearly broken"
    load, (low, high) = float(partial["offered_rps"]), found.capacity_rps_ci
    if reached(together, found, goal):
        return f"the capacity is known {_known(found)}"
    if not low / (1 + goal.precision) <= load <= high * (1 + goal.precision):
        return f"the limit is elsewhere: between {low:.3g} and {high:.3g} requests/s"
    return None


def _rate(load_rps: float) -> float:
    return float(f"{load_rps:.4g}")
