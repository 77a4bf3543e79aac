"""The rig of an experiment: draws the schedule of a stage, has it played, judges it.

A ``Player`` plays it: ``live.LivePlayer`` on an endpoint, ``virtual.player.VirtualPlayer`` on a
simulated engine in virtual time.
"""

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import pyarrow as pa

from ampacity.analysis.contract.stage import Stage
from ampacity.analysis.next_run import again
from ampacity.experiments.stages.provenance import happened
from ampacity.experiments.stages.resume import Recorded
from ampacity.experiments.stages.rules import all_failed, answering_s, drain_s, session_rules
from ampacity.live_panel import Outlook
from ampacity.loadgen.plan import MOSTLY_FAILED, StagePlan
from ampacity.loadgen.rundir.meta import read_stage
from ampacity.loadgen.rundir.write import RunWriter
from ampacity.progress import Progress
from ampacity.settings import Settings
from ampacity.workloads.replay import Replayed
from ampacity.workloads.schedule import WHOLE, Schedule, closed_schedule, open_schedule

Enough = Callable[[Stage], str | None]
"""Return why a stage, judged so far, can end early; None: it must go on."""
REPEATS_MAX = 3  # stages of a run that are repeated because the client was disturbed ...
GROW_CPU_FRACTION = 0.45  # ... while less busy than this; from here on workers are added


@dataclass(frozen=True)
class Watch:
    """A condition that may end a stage early: ``enough`` is called after each of ``looks``, parts of it.

    ``alphas``: chances of a false verdict at each look and at the stage's end; none: 5 % at each.
    """

    enough: Enough
    looks: Sequence[float] = (0.15, 0.25, 0.4, 0.6, 0.8)
    alphas: Sequence[float] = ()

    def each(self) -> Iterator[tuple[float, dict[str, float]]]:
        """Yield the looks, each with what a verdict there must know."""
        for i, look in enumerate(self.looks):
            yield look, {"alpha": self.alphas[i]} if self.alphas else {}


@dataclass(frozen=True)
class Outcome:
    """A stage that was played."""

    meta: dict[str, Any]  # its object in run.json
    table: pa.Table  # its records
    ids_used: int  # request ids from the schedule's first on that are taken now
    ended: tuple[str, str] | None = None  # (status, reason) if the run is over
    busiest: list[dict[str, Any]] | None = None  # other processes on this machine
    used_up: bool = False  # closed loop: more requests were wanted than the schedule has


class Player(Protocol):
    """Plays stages; see the module."""

    typical_e2e_s: float  # of a median request, alone

    def closed_counts(self, users: int) -> Iterable[int]:
        """Return how many requests to draw for a closed stage; further counts if used up."""

    def stage_s(self, rate_rps: float) -> float:
        """Return the default length of an open stage."""

    def fit(self, schedule: Schedule, begin_shorter: bool) -> tuple[Schedule, dict[str, int]]:
        """Fit a schedule to the model's context, see ``context.fit_context``."""

    async def play(
        self, plan: StagePlan, labels: dict[str, Any], cut: str | None, watch: Watch | None
    ) -> Outcome | None:
        """Play a stage; None if there is nothing to keep of it."""

    async def settle(self) -> None:
        """Wait until the endpoint is idle again after requests that were cut off."""


class Rig:
    """Runs the stages of one experiment, within its budget of requests and tokens."""

    def __init__(
        self,
        settings: Settings,
        writer: RunWriter,
        progress: Progress,
        player: Player,
        trace: Replayed | None = None,
    ) -> None:
        self.recorded = Recorded(writer)
        self.spent_s = 0.0  # by the stages so far, with their drains; engine time if virtual
        self.settings = settings
        self.player = player
        self.typical_e2e_s = player.typical_e2e_s
        self.lengths: str | None = None  # of the curve that the next stages belong to
        self.stages: list[Stage] = []
        self.ended: tuple[str, str] | None = None  # (status, reason): no further stage can run
        self.repeats_left = REPEATS_MAX
        self._writer = writer
        self._progress = progress
        self._trace = trace
        self._first_request_id = 0
        self._repetitions = 0  # of disturbed stages: same lengths and times, other texts
        self._left_requests = settings.max_requests
        self._left_tokens = settings.max_tokens

    async def open_stage(
        self, rate_rps: float, duration_s: float | None = None, watch: Watch | None = None
    ) -> Stage | None:
        """Run an open-loop stage, until ``watch`` has seen enough; None if the run is over."""
        planned_s = self.recorded.planned_s(len(self.stages))
        duration_s = planned_s or duration_s or self.stage_s(rate_rps)

        async def once() -> Stage | None:
            schedule = open_schedule(
                self.settings.workload, rate_rps=rate_rps, duration_s=duration_s, **self._next()
            )
            return await self._run("open", schedule, duration_s, offered_rps=rate_rps, watch=watch)

        return await self._undisturbed(once)

    async def closed_stage(self, concurrency: int, length_s: float | None = None) -> Stage | None:
        """Run a closed-loop stage of ``concurrency`` users; None if the run is over."""
        duration_s = self.settings.ramp_s + (length_s or self.settings.duration_s)

        async def once() -> Stage | None:
            schedules = (
                closed_schedule(self.settings.workload, requests=count, **self._next())
                for count in self.player.closed_counts(concurrency)
            )
            return await self._run("closed", schedules, duration_s, concurrency=concurrency)

        return await self._undisturbed(once)

    async def trace_stage(self) -> Stage | None:
        """Replay the trace as one stage, open if it says when its requests arrive."""
        assert self._trace is not None
        schedule, users = self._trace.schedule, self.settings.concurrency
        self.expect(Outlook(1))
        from ampacity.analysis.capacity.next_load import fewest_requests

        least, slo = fewest_requests(self.settings.slos, {})
        if len(schedule) < least:
            self.tell(
                f"the trace is too short for {slo}: it takes {least:,} requests at least to be "
                f"met, and has {len(schedule):,}"
            )
        if users is not None:
            pauses_s = 0.0 if schedule.think_s is None else float(schedule.think_s.sum())
            busy_s = pauses_s + len(schedule) * self.typical_e2e_s
            length_s = max(busy_s / users[0], 1e-3)
            return await self._run("closed", schedule, length_s, concurrency=users[0])
        span_s = float(schedule.scheduled_s[-1]) if len(schedule) else 0.0
        mean_gap_s = span_s / max(len(schedule) - 1, 1)
        length_s = max(span_s + mean_gap_s, 1e-3)
        return await self._run("open", schedule, length_s, offered_rps=len(schedule) / length_s)

    def stage_s(self, rate_rps: float) -> float:
        """Return the default length of an open stage."""
        return self.player.stage_s(rate_rps)

    def tell(self, text: str) -> None:
        """Print a line of progress."""
        self._progress.note(text)

    def expect(self, outlook: Outlook) -> None:
        """Set how many stages the run has, and its seconds at most."""
        self._progress.expect(outlook)

    def again(self, option: str, value: str) -> str:
        """Return the command of this run with another value of ``option``."""
        return again(self._writer.meta["command_line"], {option: value})

    def note_down(self, name: str, value: Any) -> None:
        """Write an entry of run.json."""
        self._writer.meta[name] = value
        self._writer.write_meta()

    async def _undisturbed(self, once: Callable[[], Awaitable[Stage | None]]) -> Stage | None:
        """Run a stage; repeat it a few times if other work on this machine disturbed the client.

        A client that was busy with the load itself would only be busy again.
        """
        judged = await once()
        while judged and not self.ended and self._disturbed(judged) and self.repeats_left > 0:
            self.repeats_left -= 1
            self._progress.repeated()
            self.tell(
                f"stage {judged.index} is repeated: {judged.client_limited_reason or 'it was cut off'}"
            )
            self._repetitions += 1
            judged = await once()
        return judged

    def _disturbed(self, judged: Stage) -> bool:
        """Return whether a repetition may help: the client was limited, but not by the load.

        It lost a worker, or other work on its machine held it up. An interrupted burst is played
        again too, as a whole.
        """
        meta = self._writer.meta["stages"][judged.index]
        audit = meta["audit"]
        if meta.get("interrupted") or audit is None:
            return "burst" in self._writer.meta
        if meta.get("decided_early") == MOSTLY_FAILED:
            return False
        if (judged.client_limited_reason or "").startswith("worker "):
            return True
        idle = audit["cpu_fraction"] < GROW_CPU_FRACTION and not audit["shortages"]
        return bool(judged.client_limited) and idle and judged.stable is not False

    async def _run(
        self,
        kind: Literal["open", "closed"],
        schedules: Schedule | Iterable[Schedule],
        duration_s: float,
        *,
        offered_rps: float | None = None,
        concurrency: int | None = None,
        watch: Watch | None = None,
    ) -> Stage | None:
        outcome: Outcome | None = None
        planned_s = duration_s
        for drawn in (schedules,) if isinstance(schedules, Schedule) else schedules:
            if self.ended:
                return None
            schedule, cut, unfit = self._within_limits(drawn)
            if not len(schedule) and cut:
                self.ended = ("budget", self.budget_text(cut))
                return None
            if cut and kind == "open":
                duration_s = min(duration_s, float(schedule.scheduled_s[-1]) + 1e-6)
            plan = self._plan(kind, schedule, duration_s, offered_rps, concurrency, cut)
            labels = {
                "schedule": self._schedule_number,
                "lengths": self.lengths,
                "planned_s": planned_s,
            }
            self.add_counts(unfit)  # before it is played, for the report of a killed run
            outcome = await self._play(plan, labels, cut, watch)
            if outcome is None or cut or not outcome.used_up:
                break
            self.add_counts({name: -n for name, n in unfit.items()})
        judged = None
        while outcome is not None:
            if watch and watch.alphas and not outcome.meta["decided_early"]:
                outcome.meta["alpha"] = watch.alphas[-1]
            judged = await self._judge(outcome, plan)
            rest = self.recorded.rest(plan, outcome.table)
            if rest is None or self.ended:
                break
            self._repetitions += 1
            plan = rest
            outcome = await self._play(plan, labels | {"continues": judged.index}, cut, watch)
        played = self.recorded.planned_s(plan.index) is None
        if judged and played and not self.ended and judged.errors.get("unfinished"):
            began_s = time.monotonic()
            await self.player.settle()
            self.spent_s += time.monotonic() - began_s
        return judged

    async def _play(
        self, plan: StagePlan, labels: dict[str, Any], cut: str | None, watch: Watch | None
    ) -> Outcome | None:
        """Play a stage, or take it from its records, and count its time."""
        if (known := self.recorded.recall(plan)) is not None:
            self.spent_s += self.recorded.took_s(plan.index)
            meta, table = known
            ids = table["request_id"].to_numpy()
            first = plan.schedule.first_request_id
            return Outcome(meta, table, int(ids.max(initial=first - 1)) + 1 - first)
        began_s = time.monotonic()
        outcome = await self.player.play(plan, labels, cut, watch)
        if outcome is not None and outcome.meta:
            stage_s = (outcome.meta["end_ns"] - outcome.meta["start_ns"]) / 1e9
            self.spent_s += max(stage_s, time.monotonic() - began_s)
        return outcome

    def _within_limits(self, schedule: Schedule) -> tuple[Schedule, str | None, dict[str, int]]:
        """Return (what fits context and budget, what the budget cut, what the context cut)."""
        begin_shorter = self.settings.fit_context and self._trace is None
        schedule, unfit = self.player.fit(schedule, begin_shorter)
        note = schedule.shared and schedule.shared.note
        if note and not any(": prefixes: " in known for known in self._writer.meta["notes"]):
            self._note(f"stage {len(self.stages)}: {note}")
        schedule, cut = schedule.capped(self._left_requests, self._left_tokens)
        if cut and self._trace is not None:
            self._note(f"{self._trace.source.partition(' (')[0]}: {cut}")
        return schedule, cut, unfit

    def _plan(
        self,
        kind: Literal["open", "closed"],
        schedule: Schedule,
        duration_s: float,
        offered_rps: float | None,
        concurrency: int | None,
        cut: str | None,
    ) -> StagePlan:
        return StagePlan(
            index=len(self.stages),
            kind=kind,
            schedule=schedule,
            duration_s=duration_s,
            offered_rps=offered_rps,
            concurrency=concurrency,
            used_up=cut or ("" if self._trace else StagePlan.used_up),
            think_s=self.settings.think_s,
            ramp_s=self.settings.ramp_s,
            drain_s=drain_s(self.settings.slos, self.typical_e2e_s),
            answering_s=answering_s(self.settings.workload, self.typical_e2e_s, schedule),
            sticky=self.settings.sticky,
            ends_when_failing=self._trace is None and "burst" not in self._writer.meta,
            **session_rules(self.settings.workload, self._trace),
        )

    async def _judge(self, outcome: Outcome, plan: StagePlan) -> Stage:
        """Write the stage down, take it from the budget, and judge it."""
        table, meta = outcome.table, outcome.meta
        first = plan.schedule.first_request_id
        self._first_request_id = max(self._first_request_id, first + outcome.ids_used)
        self._spend(table)
        early = meta["ended_early"]
        if outcome.ended:
            self.ended = outcome.ended
            status, reason = outcome.ended
            self._writer.meta.update(
                status=status, status_reason=reason
            )  # if no end can be written
        elif early and not self.ended and not meta.get("interrupted"):
            self.ended = ("budget", self.budget_text(early))
        self._writer.write_meta()  # from here on the stage survives a kill
        from ampacity.analysis.stage import analyse  # not needed for the first one

        slos, warmup = self.settings.slos, self.settings.warmup_requests
        stage = read_stage(meta)
        records = analyse.read_records(table, stage.start_ns, self._writer.meta)
        judged: Stage = analyse.analyse_stage(records, stage, slos, warmup)
        limited = judged.client_limited or judged.client_limited_metrics
        if limited and outcome.busiest is not None:
            meta["audit"]["busiest"] = outcome.busiest
            self._writer.write_meta()
        self.stages.append(judged)
        if meta.get("decided_early") == MOSTLY_FAILED:
            sent = f"{meta['scheduled_requests']} of {len(plan.schedule)} requests"
            ended = f"stage {plan.index} was ended after {sent}: {MOSTLY_FAILED}"
            happened(self._writer.meta, ended, self.tell)
        self._progress.judged(judged, burst="burst" in self._writer.meta)
        if not meta.get("interrupted"):
            self.ended = self.ended or all_failed(table, plan.index)
        return judged

    def _note(self, text: str) -> None:
        self._progress.note(text)
        self._writer.meta["notes"].append(text)

    def add_counts(self, more: dict[str, int]) -> None:
        """Add to the counts of run.json's ``workload``."""
        workload = self._writer.meta["workload"]
        workload |= {name: workload.get(name, 0) + n for name, n in more.items() if n}

    def _spend(self, table: pa.Table) -> None:
        import pyarrow.compute as pc  # 40 ms that the first request need not wait for

        planned = (table["input_tokens_planned"], table["output_tokens_planned"])
        if self._left_requests is not None:
            self._left_requests -= table.num_rows
        if self._left_tokens is not None:
            self._left_tokens -= sum(pc.sum(tokens).as_py() or 0 for tokens in planned)

    @property
    def _schedule_number(self) -> int:
        return len(self.stages) - self._repetitions

    def _next(self) -> dict[str, Any]:
        """Return what distinguishes the next stage's schedule from the others'."""
        return {
            "seed": self.settings.seed,
            "stage": self._schedule_number,
            "first_request_id": self._first_request_id,
        }

    def budget_text(self, cut: str) -> str:
        """Return the user's own limit, not what was left of it for this stage."""
        how = "has no room for the next session" if WHOLE in cut else "is used up"
        if "planned tokens" in cut:
            return f"--max-tokens {self.settings.max_tokens} {how}"
        limit = self.settings.max_requests
        return f"--max-requests {limit} {how}" if limit else cut
