"""The search: bracket the load at which an SLO stops to hold, then narrow it until it is known well enough."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ampacity.analysis.capacity.next_load import (
    Finished,
    Goal,
    Step,
    cut_short,
    expected_requests,
    is_decided,
    next_step,
    so_far,
)
from ampacity.analysis.capacity.pooled import estimate
from ampacity.config import Settings
from ampacity.experiments.stages.rig import Rig
from ampacity.values import ConfigError, duration_text, rounded_up

START = 1.0  # requests in flight at the first load
FILL_TIMES = (
    10.0  # a stage lasts at least so many times as long as one request, and has about so many
)
BRACKET_SHARE = 0.25  # of the time left: what a stage may take of it while one side of the limit is still to be found
MOST_TIMES = 3.0  # the announced requests, which is what is said at most
CLOSED_SHARES = (0.5, 0.7, 0.85, 1.0, 1.2, 1.5)  # of C_max: the closed loop's levels


@dataclass(frozen=True)
class SearchPlan:
    """What is asked of a search, beside the settings that every experiment has."""

    precision: float = 0.1
    max_duration_s: float | None = None
    repeats: int = 0
    closed: bool = False
    ramp_s: float = 0.0  # of the closed stages


class Search:
    """Drives a rig, real or virtual, from stage to stage; ``run`` is the experiment."""

    def __init__(self, plan: SearchPlan) -> None:
        self._plan = plan
        self._path: list[dict[str, Any]] = []
        self._spent_s = 0.0
        self._expected = 0  # requests that were announced; 0 once it was said that they are passed

    @staticmethod
    def check(settings: Settings) -> None:
        """Raises ConfigError for settings that no search can have: no SLO, or loads that are given."""
        if not settings.slos:
            raise ConfigError(
                "a search needs something to search for: give an SLO, as --slo ttft_p99=2s"
            )
        if settings.rates or settings.concurrency or settings.trace:
            raise ConfigError(
                "a search finds its loads itself: drop --rates, --concurrency and --trace"
            )

    async def run(self, rig: Rig) -> None:
        """Bracket, narrow, repeat where that was asked for. Raises ConfigError as ``check`` does, and where no stage fits."""
        settings = rig.settings
        self.check(settings)
        goal = Goal(settings.slos, self._plan.precision, float(f"{START / rig.typical_e2e_s:.3g}"))
        self._expected = expected_requests(goal)
        rig.tell(_expected(rig, goal))
        if (limit_s := self._plan.max_duration_s) is not None:
            fewest_s = FILL_TIMES * rig.typical_e2e_s  # no stage is shorter
            if limit_s < fewest_s:
                raise ConfigError(
                    f"--max-duration {duration_text(limit_s)}: not even one stage fits, which takes {duration_text(rounded_up(fewest_s))} at least "
                    f"({FILL_TIMES:g} times as long as a request); give more"
                )
            rig.tell(_enough_for(limit_s, goal))
        self._note(rig, None)
        while isinstance(step := next_step(rig.stages, goal), Step):
            over = await self._stage(rig, goal, step)
            if over:
                self._note(rig, cut_short(rig.stages, goal, over))
                return
        if step.reached:
            await self._repeat(rig, goal)
        if self._plan.closed and not rig.ended:
            await self._closed(rig, goal)
        if (
            step.reached
            and (sent := sum(int(s["requests"]) for s in rig.stages)) < expected_requests(goal) / 2
        ):
            rig.tell(
                f"done with {sent:,} requests, fewer than announced: the limit showed itself early"
            )
        self._note(rig, step)

    async def _stage(self, rig: Rig, goal: Goal, step: Step) -> str | None:
        """One stage; gives why it is the last one, where the run is over or no time is left."""
        apart_s, last = 1 / step.load_rps, rig.stages[-1:]
        fill_s = FILL_TIMES * max([apart_s, rig.typical_e2e_s, *(_mean_e2e_s(s) for s in last)])
        duration_s = max(step.requests / step.load_rps, fill_s)
        limit_s, known = self._plan.max_duration_s, so_far(rig.stages, goal)
        if limit_s is not None:
            left_s = limit_s - self._spent_s
            if left_s < (least_s := min(duration_s, max(fill_s, 0.05 * limit_s))):
                if left_s < 0.05 * limit_s:
                    return f"--max-duration {duration_text(limit_s)} is used up"
                return (
                    f"{left_s:.2g} s are left of --max-duration {duration_text(limit_s)}, and a stage at {step.load_rps:g} req/s takes "
                    f"{duration_text(rounded_up(least_s))} at least ({FILL_TIMES:g} requests, and {FILL_TIMES:g} times as long as one)"
                )
            duration_s = min(duration_s, left_s if known else max(fill_s, BRACKET_SHARE * left_s))
        # mostly it ends before that; arrivals are random, so that only the time is a bound
        size = f"at most {float(f'{duration_s:.2g}'):,g} s, about {float(f'{step.load_rps * duration_s:.2g}'):,.0f} requests"
        rig.tell(f"{known + '; ' if known else ''}next {step.load_rps:g} req/s, {size}: {step.why}")
        self._tell_passed(rig)
        before, began_s = list(rig.stages), time.monotonic()
        judged = await rig.open_stage(
            step.load_rps, duration_s, lambda partial: is_decided(before, partial, goal)
        )
        if judged is None:
            return rig.ended[1] if rig.ended else "the run is over"
        self._spend(judged, began_s)
        self._path.append({"stage": judged["index"], "offered_rps": step.load_rps, "why": step.why})
        self._note(rig, None)
        return rig.ended and rig.ended[1]

    def _tell_passed(self, rig: Rig) -> None:
        """Once: that more requests were sent than were announced, and what took them."""
        sent, unused = (
            sum(int(s["requests"]) for s in rig.stages),
            [s for s in rig.stages if s["client_limited"]],
        )
        if not 0 < MOST_TIMES * self._expected < sent:
            return
        why = (
            f"{len(unused)} of {len(rig.stages)} stages tell nothing, this machine was the limit"
            if unused
            else (
                "answers near the limit hang together more than those that the estimate was made from, or the interval is "
                f"still wider than {100 * self._plan.precision:.2g} %"
            )
        )
        rig.tell(
            f"{sent:,} requests so far, more than {MOST_TIMES:g} times the {float(f'{self._expected:.2g}'):,.0f} that were announced: {why}; "
            "Ctrl-C ends the search with what is known"
        )
        self._expected = 0

    async def _repeat(self, rig: Rig, goal: Goal) -> None:
        """Both ends of the interval again, as often as was asked for, in an order that the seed draws."""
        found = estimate(rig.stages, goal.slos)
        if found is None or not self._plan.repeats:
            return
        loads = [load for load in found.capacity_rps_ci for _ in range(self._plan.repeats)]
        random.Random(rig.settings.seed).shuffle(loads)
        longest = max(int(s["requests"]) for s in rig.stages)
        for load in loads:
            if await self._stage(
                rig, goal, Step(float(f"{load:.4g}"), longest, "repeat, in random order")
            ):
                return

    async def _closed(self, rig: Rig, goal: Goal) -> None:
        """The closed view of C_max: set concurrencies around the one that the open loop found."""
        found = estimate(rig.stages, goal.slos)
        if found is None or found.c_max is None:
            return
        if self._plan.ramp_s:
            rig.settings = replace(rig.settings, ramp_s=self._plan.ramp_s)
        for users in sorted({max(1, round(share * found.c_max)) for share in CLOSED_SHARES}):
            limit_s, began_s = self._plan.max_duration_s, time.monotonic()
            if (
                limit_s is not None
                and limit_s - self._spent_s < rig.settings.duration_s + self._plan.ramp_s
            ):
                rig.tell(
                    f"--max-duration {duration_text(limit_s)} leaves no time for a closed loop of {users} users"
                )
                return
            judged = await rig.closed_stage(users)
            if judged is None or rig.ended:
                return
            self._spend(judged, began_s)

    def _spend(self, judged: dict[str, Any], began_s: float) -> None:
        """Engine time where it is virtual, else the clock's, drain included."""
        self._spent_s += max(judged["window"]["end_s"], time.monotonic() - began_s)

    def _note(self, rig: Rig, ended: Finished | None) -> None:
        rig.note_down(
            "search",
            {
                "precision": self._plan.precision,
                "max_duration_s": self._plan.max_duration_s,
                "repeats": self._plan.repeats,
                "path": self._path,
                "ended": ended and ended.why,
                "reached": bool(ended and ended.reached),
                "more_requests": ended and ended.more_requests,
            },
        )


def _expected(rig: Rig, goal: Goal) -> str:
    """Requests, tokens and time of the whole search, as searches of servers with a known law took them."""
    requests = expected_requests(goal)
    tokens = requests * sum(
        _mean_tokens(getattr(rig.settings.workload, side))
        for side in ("input_tokens", "output_tokens")
    )
    at = [
        f"{duration_text(rounded_up(float(f'{requests / rps:.2g}')))} at {rps:g} req/s"
        for rps in (goal.first_rps, 10 * goal.first_rps)
    ]
    return (
        f"to {100 * goal.precision:.2g} % a search takes about {float(f'{requests:.2g}'):,.0f} requests, half to three times as many, and "
        f"{float(f'{tokens:.2g}'):,.0f} tokens; how long depends on the rate that is found: {at[0]}, {at[1]}"
    )


def _mean_tokens(lengths: Any) -> float:
    return float(np.mean([lengths.quantile(q) for q in np.arange(0.025, 1, 0.05)]))


def _enough_for(limit_s: float, goal: Goal) -> str:
    """What the time of a search is worth at its first load, where stages take the longest."""
    stage_s = goal.few / goal.first_rps
    stages = limit_s / stage_s
    text = (
        f"--max-duration {duration_text(limit_s)} is enough for {stages:,.{0 if stages > 10 else 1 if stages > 1 else 2}f} stages of {goal.few:,} requests, as the "
        f"SLO takes them, at {goal.first_rps:g} req/s, where the search begins"
    )
    if BRACKET_SHARE * stages >= 1:
        return text
    return (
        f"{text}; until a load is found on both sides of the limit a stage gets a quarter of the time left, so the answer "
        f"may be coarse or none: from --max-duration {duration_text(rounded_up(stage_s / BRACKET_SHARE))} on the first has them all"
    )


def _mean_e2e_s(stage: dict[str, Any]) -> float:
    """Mean time in flight, by Little's law; of an unstable stage it says nothing."""
    if stage["stable"] is False or not stage["achieved_rps"]:
        return 0.0
    return float(stage["concurrency"] / stage["achieved_rps"])
