"""The search: bracket the highest load that meets the SLOs, then narrow it to a given precision."""

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ampacity.analysis.capacity import next_load
from ampacity.analysis.capacity.levels import open_levels
from ampacity.analysis.capacity.pooled import estimate
from ampacity.analysis.contract.stage import Stage
from ampacity.analysis.slo import EXTREMES
from ampacity.durations import duration_text, rounded_up
from ampacity.experiments.stages.rig import Rig, Watch
from ampacity.live_panel import Outlook
from ampacity.settings import Settings
from ampacity.values import ConfigError

START = 1.0  # requests in flight at the first load
FILL_TIMES = 10.0  # shortest stage: this many requests, and this many times a request's duration
BRACKET_SHARE = 0.25  # of the time left, for a stage while one side of the limit is unknown
TYPICAL_STAGES = 14  # for the progress
STAGE_MAX_S = 3e7  # a year: a longer stage, of a load near 0, shows nothing that anybody waits for
MOST_TIMES = 3.0  # the announced requests; beyond it the user is told
CLOSED_SHARES = (0.5, 0.7, 0.85, 1.0, 1.2, 1.5)  # of C_max: the closed loop's levels


@dataclass(frozen=True)
class SearchPlan:
    """The options of a search, beside the settings that every experiment has."""

    precision: float = 0.1
    max_duration_s: float | None = None
    repeats: int = 0
    closed: bool = False
    ramp_s: float = 0.0  # of the closed stages


class Search:
    """Drives a rig from stage to stage; ``run`` is the experiment."""

    def __init__(self, plan: SearchPlan) -> None:
        self._plan = plan
        self._path: list[dict[str, Any]] = []
        self._expected = 0  # requests that were announced; 0 once it was reported as exceeded

    @staticmethod
    def check(settings: Settings) -> None:
        """Raise ConfigError if there is no SLO, or if loads are given."""
        if not settings.slos:
            raise ConfigError(
                "a search needs something to search for: give an SLO, as --slo ttft_p99=2s"
            )
        if extreme := next((s for s in settings.slos if s.quantile in EXTREMES), None):
            raise ConfigError(
                f"{extreme.name} is a fact of one run, and no load has it as its limit: search for "
                f"{extreme.metric}_p99.9, or judge a given load with --rates"
            )
        if settings.rates or settings.concurrency or settings.trace:
            raise ConfigError(
                "a search finds its loads itself: drop --rates, --concurrency and --trace"
            )

    async def run(self, rig: Rig) -> None:
        """Bracket, narrow, repeat. Raises ConfigError as ``check``, or if no stage fits."""
        settings = rig.settings
        self.check(settings)
        goal = next_load.Goal(
            settings.slos, self._plan.precision, float(f"{START / rig.typical_e2e_s:.3g}")
        )
        self._expected = next_load.expected_requests(goal)
        self._announce(rig, goal)
        rig.expect(Outlook(TYPICAL_STAGES, self._plan.max_duration_s, about=True))
        self._note(rig, None)
        while isinstance(step := next_load.next_step(rig.stages, goal), next_load.Step):
            over = await self._stage(rig, goal, step)
            if over:
                self._note(rig, next_load.cut_short(rig.stages, goal, over))
                return
        if step.reached:
            await self._repeat(rig, goal)
        if self._plan.closed and not rig.ended:
            await self._closed(rig, goal)
        sent = sum(int(stage.requests) for stage in rig.stages)
        if step.reached and sent < next_load.expected_requests(goal) / 2:
            rig.tell(f"done with {sent:,} requests, fewer than announced: the limit showed early")
        self._note(rig, step)

    def _announce(self, rig: Rig, goal: next_load.Goal) -> None:
        """Print the expected cost. Raises ConfigError if no stage fits --max-duration."""
        rig.tell(_expected(rig, goal))
        limit_s = self._plan.max_duration_s
        if limit_s is None:
            return
        shortest_s = FILL_TIMES * rig.typical_e2e_s
        if limit_s < shortest_s:
            raise ConfigError(
                f"--max-duration {duration_text(limit_s)}: not even one stage fits, which takes "
                f"{duration_text(rounded_up(shortest_s))} at least ({FILL_TIMES:g} times as long "
                "as a request); give more"
            )
        rig.tell(_enough_for(limit_s, goal))

    async def _stage(self, rig: Rig, goal: next_load.Goal, step: next_load.Step) -> str | None:
        """Run one stage; return why it is the last one, if the run is over or no time is left."""
        known = next_load.so_far(rig.stages, goal)
        in_flight_s = [_mean_e2e_s(stage) for stage in rig.stages[-1:]]
        fill_s = FILL_TIMES * max([1 / step.load_rps, rig.typical_e2e_s, *in_flight_s])
        duration_s = max(step.requests / step.load_rps, fill_s)
        if (limit_s := self._plan.max_duration_s) is not None:
            left_s = limit_s - rig.spent_s
            if lacking := _no_time(limit_s, left_s, duration_s, fill_s, step):
                return lacking
            duration_s = min(duration_s, left_s if known else max(fill_s, BRACKET_SHARE * left_s))
        if duration_s > STAGE_MAX_S:
            return f"a stage at {step.load_rps:g} req/s would take {duration_s:.2g} s"
        # most stages end earlier; arrivals are random, so only the time is a bound
        requests = float(f"{step.load_rps * duration_s:.2g}")
        rig.tell(
            f"{known + '; ' if known else ''}next {step.load_rps:g} req/s, at most "
            f"{float(f'{duration_s:.2g}'):,g} s, about {requests:,.0f} requests: {step.why}"
        )
        self._tell_exceeded(rig)
        before = list(rig.stages)
        judged = await rig.open_stage(
            step.load_rps,
            duration_s,
            Watch(lambda partial: next_load.is_decided(before, partial, goal)),
        )
        if judged is None:
            return rig.ended[1] if rig.ended else "the run is over"
        self._path.append({"stage": judged.index, "offered_rps": step.load_rps, "why": step.why})
        self._note(rig, None)
        return rig.ended and rig.ended[1]

    def _tell_exceeded(self, rig: Rig) -> None:
        """Report once that more requests were sent than announced, and why."""
        sent = sum(int(stage.requests) for stage in rig.stages)
        if not 0 < MOST_TIMES * self._expected < sent:
            return
        unused = sum(bool(stage.client_limited) for stage in rig.stages)
        why = (
            f"{unused} of {len(rig.stages)} stages cannot be used, this machine was the limit"
            if unused
            else "answers near the limit are more correlated than expected, or the interval is "
            f"still wider than {100 * self._plan.precision:.2g} %"
        )
        rig.tell(
            f"{sent:,} requests so far, more than {MOST_TIMES:g} times the "
            f"{float(f'{self._expected:.2g}'):,.0f} that were announced: {why}; "
            "Ctrl-C ends the search with what is known"
        )
        self._expected = 0

    async def _repeat(self, rig: Rig, goal: next_load.Goal) -> None:
        """Repeat both ends of the interval, in an order that the seed draws."""
        found = estimate(open_levels(rig.stages), goal.slos)
        if found is None or not self._plan.repeats:
            return
        loads = [load for load in found.capacity_rps_ci for _ in range(self._plan.repeats)]
        random.Random(rig.settings.seed).shuffle(loads)
        longest = max(int(stage.requests) for stage in rig.stages)
        for load in loads:
            step = next_load.Step(float(f"{load:.4g}"), longest, "repeat, in random order")
            if await self._stage(rig, goal, step):
                return

    async def _closed(self, rig: Rig, goal: next_load.Goal) -> None:
        """Run closed-loop stages around the C_max that the open loop found."""
        found = estimate(open_levels(rig.stages), goal.slos)
        if found is None or found.c_max is None:
            return
        if self._plan.ramp_s:
            rig.settings = replace(rig.settings, ramp_s=self._plan.ramp_s)
        limit_s, length_s = self._plan.max_duration_s, rig.settings.duration_s + self._plan.ramp_s
        for users in sorted({max(1, round(share * found.c_max)) for share in CLOSED_SHARES}):
            if limit_s is not None and limit_s - rig.spent_s < length_s:
                rig.tell(
                    f"--max-duration {duration_text(limit_s)} leaves no time for a closed loop of "
                    f"{users} users"
                )
                return
            judged = await rig.closed_stage(users)
            if judged is None or rig.ended:
                return

    def _note(self, rig: Rig, ended: next_load.Finished | None) -> None:
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


def _no_time(
    limit_s: float, left_s: float, stage_s: float, fill_s: float, step: next_load.Step
) -> str | None:
    """Return why the time left is too short for a stage; None if it is not."""
    least_s = min(stage_s, max(fill_s, 0.05 * limit_s))
    if left_s >= least_s:
        return None
    if left_s < 0.05 * limit_s:
        return f"--max-duration {duration_text(limit_s)} is used up"
    return (
        f"{left_s:.2g} s are left of --max-duration {duration_text(limit_s)}, and a stage at "
        f"{step.load_rps:g} req/s takes {duration_text(rounded_up(least_s))} at least "
        f"({FILL_TIMES:g} requests, and {FILL_TIMES:g} times as long as one)"
    )


def _expected(rig: Rig, goal: next_load.Goal) -> str:
    """Return requests, tokens and time of the search, from searches of servers with a known law."""
    requests, workload = next_load.expected_requests(goal), rig.settings.workload
    tokens = requests * (_mean_tokens(workload.input_tokens) + _mean_tokens(workload.output_tokens))
    times = [
        f"{duration_text(rounded_up(float(f'{requests / rps:.2g}')))} at {rps:g} req/s"
        for rps in (goal.first_rps, 10 * goal.first_rps)
    ]
    return (
        f"to {100 * goal.precision:.2g} % a search takes about "
        f"{float(f'{requests:.2g}'):,.0f} requests, half to three times as many, and "
        f"{float(f'{tokens:.2g}'):,.0f} tokens; how long depends on the rate that is found: "
        f"{', '.join(times)}"
    )


def _mean_tokens(lengths: Any) -> float:
    return float(np.mean([lengths.quantile(q) for q in np.arange(0.025, 1, 0.05)]))


def _enough_for(limit_s: float, goal: next_load.Goal) -> str:
    """Return how many stages the time allows at the first load, where they take the longest."""
    stage_s = goal.few / goal.first_rps
    stages = limit_s / stage_s
    decimals = 0 if stages > 10 else 1 if stages > 1 else 2
    text = (
        f"--max-duration {duration_text(limit_s)} is enough for {stages:,.{decimals}f} stages of "
        f"{goal.few:,} requests, as the SLO takes them, at {goal.first_rps:g} req/s, where the "
        "search begins"
    )
    if BRACKET_SHARE * stages >= 1:
        return text
    enough = duration_text(rounded_up(stage_s / BRACKET_SHARE))
    return (
        f"{text}; until a load is found on both sides of the limit a stage gets a quarter of the "
        f"time left, so the answer may be coarse or none: from --max-duration {enough} on the "
        "first has them all"
    )


def _mean_e2e_s(stage: Stage) -> float:
    """Return the mean time in flight, by Little's law; 0 for an unstable stage, where it fails."""
    if stage.stable is False or not stage.achieved_rps:
        return 0.0
    return stage.concurrency / stage.achieved_rps
