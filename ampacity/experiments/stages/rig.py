"""The rig of one experiment: runs stages on the endpoint that ``conduct`` has set up, and judges them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from ampacity.config import Settings
from ampacity.experiments.stages.base_rig import LOOKS, BaseRig, Enough, answers_told
from ampacity.experiments.stages.context import fit_context
from ampacity.loadgen.audit import Measures, Tolerance, judge
from ampacity.loadgen.generator import Generator
from ampacity.loadgen.host import busiest, cpu_seconds
from ampacity.loadgen.plan import StagePlan
from ampacity.loadgen.probe.look import ProbeResult
from ampacity.loadgen.rundir.files import RunWriter
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.telemetry import Telemetry
from ampacity.progress import Progress
from ampacity.workloads.profile import Workload
from ampacity.workloads.replay import Replayed
from ampacity.workloads.schedule import Schedule

DRAIN_MIN_S = 5.0
DRAIN_DEFAULT_S = 30.0
SLOWED = 5.0  # by other requests beside it
IDLE_WAIT_S = 15.0  # after an overload the server may still be busy with requests that we gave up
CLOSED_REQUESTS_MAX = 200_000
REPEATS_MAX = 3  # stages run again in one experiment because the client was disturbed ...
GROW_CPU_FRACTION = (
    0.45  # ... and not busy with the load; from here on the next stage gets more workers
)
REPLAY_FINISH_S = (
    1e6  # a trace's sessions are played to their end, however long a slow server takes
)


class Rig(BaseRig):
    """Runs stages and judges them. Made by ``conduct``."""

    def __init__(
        self,
        settings: Settings,
        probe: ProbeResult,
        writer: RunWriter,
        generator: Generator,
        telemetry: Telemetry,
        progress: Progress,
        trace: Replayed | None,
    ) -> None:
        super().__init__(settings, writer, progress)
        self._trace = trace
        self.probe = probe
        self.typical_e2e_s = e2e_s(probe.record)
        self._generator = generator
        self._workers_wanted = settings.workers or 1
        self._tolerance = Tolerance.for_limits(_limits_by_metric(settings))
        self._telemetry = telemetry
        self.repeats_left = REPEATS_MAX  # stages that may yet be run again after a disturbance

    async def open_stage(
        self, rate_rps: float, duration_s: float | None = None, enough: Enough | None = None
    ) -> dict[str, Any] | None:
        duration_s = duration_s or self.stage_s(rate_rps)
        return await self._undisturbed(
            lambda: self._run(
                "open",
                self._open_schedule(rate_rps, duration_s),
                duration_s,
                offered_rps=rate_rps,
                enough=enough,
            )
        )

    async def closed_stage(self, concurrency: int) -> dict[str, Any] | None:
        duration_s = self.settings.ramp_s + self.settings.duration_s
        return await self._undisturbed(
            lambda: self._run(
                "closed",
                self._closed_schedule(CLOSED_REQUESTS_MAX),
                duration_s,
                concurrency=concurrency,
            )
        )

    async def _undisturbed(
        self, once: Callable[[], Awaitable[dict[str, Any] | None]]
    ) -> dict[str, Any] | None:
        """Run a stage again when something else on this machine held the client up, a few times in a run.

        A client that was busy with the load itself would only be busy again.
        """
        judged = await once()
        while judged and not self.ended and self._disturbed(judged) and self.repeats_left > 0:
            self.repeats_left -= 1
            self._progress.note(
                f"stage {judged['index']} is repeated: {judged['client_limited_reason']}"
            )
            self._repetitions += 1
            judged = await once()
        return judged

    def _disturbed(self, judged: dict[str, Any]) -> bool:
        """Whether a repetition may tell more: not where the client was busy, short of something, or the server overloaded."""
        audit = self._writer.meta["stages"][-1]["audit"]
        idle = audit["cpu_fraction"] < GROW_CPU_FRACTION and not audit["shortages"]
        return bool(judged["client_limited"]) and idle and judged["stable"] is not False

    async def trace_stage(self) -> dict[str, Any] | None:
        """Replay the trace of the settings as one stage, open where it says when its requests arrive."""
        assert self._trace is not None
        schedule, users = self._trace.schedule, self.settings.concurrency
        from ampacity.analysis.capacity.next_load import fewest_requests

        least, slo = fewest_requests(self.settings.slos, {})
        if len(schedule) < least:
            self.tell(
                f"the trace is too short for {slo}: it takes {least:,} requests at least to be met, and has {len(schedule):,}"
            )
        span_s = float(schedule.scheduled_s[-1]) if len(schedule) else 0.0
        if users is not None:
            busy_s = _played_s(schedule) + len(schedule) * self.typical_e2e_s
            return await self._run(
                "closed", schedule, max(busy_s / users[0], 1e-3), concurrency=users[0]
            )
        duration_s = span_s + span_s / max(
            len(schedule) - 1, 1
        )  # one mean gap after the last arrival
        return await self._run(
            "open",
            schedule,
            max(duration_s, 1e-3),
            offered_rps=len(schedule) / max(duration_s, 1e-3),
        )

    async def _run(
        self,
        kind: Literal["open", "closed"],
        schedule: Schedule,
        duration_s: float,
        offered_rps: float | None = None,
        concurrency: int | None = None,
        enough: Enough | None = None,
    ) -> dict[str, Any] | None:
        if self.ended:
            return None
        if self.probe.served.max_model_len is not None:
            schedule, unfit = fit_context(
                schedule,
                self.probe.served.max_model_len,
                self.probe.calibration.margin_tokens(schedule.input_tokens),
                begin_shorter=self.settings.fit_context and self._trace is None,
            )
            self._count(unfit)
        self._note_sharing(schedule)
        schedule, cut = schedule.capped(self._left_requests, self._left_tokens)
        if cut and self._trace is not None:
            self._note(f"{self._trace.source.partition(' (')[0]}: {cut}")
        if cut and kind == "open":
            duration_s = min(
                duration_s, float(schedule.scheduled_s[-1]) + 1e-6 if len(schedule) else 0.0
            )
        if not len(schedule) and cut:
            self.ended = ("budget", self._budget_text(cut))
            return None
        plan = StagePlan(
            index=len(self.stages),
            kind=kind,
            schedule=schedule,
            duration_s=duration_s,
            offered_rps=offered_rps,
            concurrency=concurrency,
            used_up=cut or ("" if self._trace else StagePlan.used_up),
            think_s=self.settings.think_s,
            ramp_s=self.settings.ramp_s,
            drain_s=self._drain_s(),
            answering_s=self._answering_s(schedule),
            sticky=self.settings.sticky,
            **_session_rules(self.settings.workload, self._trace),
        )
        others, looked_s = cpu_seconds(), time.monotonic()
        with self._progress.stage(self._generator, plan), self._looking_on(plan, enough):
            result = await self._generator.run(
                plan, self._workers_wanted, lambda start_ns: self._announce(plan, start_ns)
            )
        others_since = busiest(others, cpu_seconds(), time.monotonic() - looked_s)
        table = self._writer.stage_table(plan.index)
        self._first_request_id += result.ids_used
        self._spend(table.num_rows, _planned_tokens(table))
        meta = {**result.meta, "lengths": self.lengths, "audit": self._audit(result.measures)}
        if plan.whole and kind == "open":  # how long it was to last depended on the answers
            meta["offered_rps"] = meta["scheduled_requests"] / (
                (meta["end_ns"] - meta["start_ns"]) / 1e9
            )
        meta |= self._sharing(schedule, table)
        self._writer.meta["stages"][-1] = meta
        stopped = self._generator.stopped
        if kind == "open":
            meta["ended_early"] = meta["ended_early"] or cut
        if stopped:
            self.ended = (
                "interrupted" if stopped.startswith("interrupted") else "aborted",
                stopped,
            )
        elif (early := meta["ended_early"]) and not self.ended:
            by_budget = early in (
                cut,
                plan.used_up,
            )  # else a worker process could not go on, as with a full disk
            self.ended = ("budget", self._budget_text(early)) if by_budget else ("aborted", early)
        self._writer.write_meta()
        from ampacity.analysis.stage.analyse import (
            analyse_stage,  # judging is loaded when there is something to judge
        )

        judged: dict[str, Any] = analyse_stage(
            table, self._diagnosed(meta), self.settings.slos, self.settings.warmup_requests
        )
        if judged["client_limited"] or judged["client_limited_metrics"]:
            meta["audit"]["busiest"] = others_since
            self._writer.write_meta()
        self.stages.append(judged)
        self._progress.judged(judged, burst="burst" in self._writer.meta)
        if not self.ended:
            self.ended = _all_failed(table, plan.index)
        if not self.ended and judged["errors"].get("unfinished"):
            await self._telemetry.until_idle(IDLE_WAIT_S)
        return judged

    @contextlib.contextmanager
    def _looking_on(self, plan: StagePlan, enough: Enough | None) -> Iterator[None]:
        """Look at the stage on its way while the block runs, where there is an ``enough`` to ask."""
        watching = None
        if enough is not None:
            # imported neither before the first request nor under load
            from ampacity.experiments.stages.on_the_way import judge_so_far

            watching = asyncio.create_task(self._look_on(plan, enough, judge_so_far))
        try:
            yield
        finally:
            if watching is not None:
                watching.cancel()

    async def _look_on(
        self, plan: StagePlan, enough: Enough, judge_so_far: Callable[..., Any]
    ) -> None:
        began_s = time.monotonic()
        for share in LOOKS:
            await asyncio.sleep(max(0.0, began_s + share * plan.duration_s - time.monotonic()))
            meta = self._diagnosed(self._writer.meta["stages"][-1])
            if meta["index"] != plan.index:
                continue
            self._writer.flush()
            slos, warmup = self.settings.slos, self.settings.warmup_requests
            judged = await asyncio.to_thread(  # so that the streams' time stamps do not wait for it
                judge_so_far, self._writer.path, plan.schedule, meta, slos, warmup
            )
            reason = judged and enough(judged)
            if reason:
                self._generator.finish_stage(reason)
                return

    def _diagnosed(self, stage: dict[str, Any]) -> dict[str, Any]:
        """A stage's entry of run.json with the endpoint's diagnosis, by which it is judged too."""
        return {**stage, "diagnosis": self._writer.meta.get("diagnosis")}

    def _budget_text(self, cut: str) -> str:
        """The user's own limit behind what was left of it for a stage."""
        if "planned tokens" in cut:
            return f"--max-tokens {self.settings.max_tokens} is used up"
        return (
            f"--max-requests {self.settings.max_requests} is used up"
            if self.settings.max_requests
            else cut
        )

    def _announce(self, plan: StagePlan, start_ns: int) -> None:
        """Write down what is about to run, so that a report can be made of it after a kill."""
        self._writer.meta["stages"].append(
            {
                **plan.meta(start_ns),
                "schedule": self._schedule,
                "lengths": self.lengths,
                "drained_ns": None,
                "scheduled_requests": len(plan.schedule) if plan.kind == "open" else None,
                "ended_early": None,
                "audit": None,
                "played_sessions": plan.schedule.session is not None,
            }
        )
        self._writer.write_meta()

    def _audit(self, measures: Measures) -> dict[str, Any]:
        """Judge the client in the stage that has just ended, and ask for more workers where it was busy."""
        audit = judge(measures, self._tolerance)
        lost = self._generator.take_lost()
        if lost:  # its load was not sent, and the next stage's processes may end as this one did
            self._progress.note(lost)
            audit = replace(audit, client_limited=True, client_limited_reason=lost)
            self.ended = ("aborted", lost)
        cores = len(self.settings.cpus) or max(
            (os.cpu_count() or 1) - 1, 1
        )  # one is left to everything else
        if self.settings.workers is None and audit.cpu_fraction >= GROW_CPU_FRACTION:
            self._workers_wanted = min(2 * self._workers_wanted, max(cores, self._workers_wanted))
            self._writer.meta["workers"] = self._workers_wanted
        return asdict(audit)

    def _sharing(self, schedule: Schedule, table: pa.Table) -> dict[str, Any]:
        """The stage's ``cached_share_planned``: of the requests that were answered, as an infinite cache would have it."""
        if schedule.shared is None and schedule.continues is None:
            return {}
        import pyarrow.compute as pc  # as above

        answered = (
            table.filter(pc.equal(table["status"], "ok"))["request_id"].to_numpy()
            - schedule.first_request_id
        )
        numbers = np.arange(len(schedule)) if schedule.numbers is None else schedule.numbers
        index = np.searchsorted(numbers, answered)
        cached = schedule.planned_cached_tokens(answers_too=answers_told(self.settings.workload))[
            index
        ]
        sent = int(schedule.input_tokens[index].sum())
        return {"cached_share_planned": float(cached.sum() / sent) if sent else None}

    def _drain_s(self) -> float:
        """Long enough that what is cut off has certainly missed its SLO."""
        limits = [
            slo.limit_s
            for slo in self.settings.slos
            if slo.metric in ("ttft", "e2e", "first_answer")
        ]
        if limits:
            return max(DRAIN_MIN_S, 1.5 * max(limits), 2 * self.typical_e2e_s)
        return max(DRAIN_MIN_S if self.settings.slos else DRAIN_DEFAULT_S, 3 * self.typical_e2e_s)

    def _answering_s(self, schedule: Schedule) -> float:
        """What the longest answer takes by the typical one, which is a middling one alone, and SLOWED times as slow."""
        middling = max(self.settings.workload.output_tokens.quantile(0.5), 1.0)
        return (
            SLOWED
            * self.typical_e2e_s
            * max(float(schedule.output_tokens.max(initial=1)) / middling, 1.0)
        )


def _played_s(schedule: Schedule) -> float:
    """How long all sessions take together, but for the answers."""
    if schedule.think_s is None:
        return 0.0
    return float(schedule.think_s.sum())


def _session_rules(workload: Workload, trace: Replayed | None) -> dict[str, Any]:
    """What a stage does with sessions."""
    sessions = workload.sessions
    if (
        sessions is None
        and trace is not None
        and (trace.schedule.session is not None or not trace.says_arrivals)
    ):
        return {"finish_s": REPLAY_FINISH_S, "whole": True}
    if sessions is None:
        return {}
    return {
        "finish_s": sessions.finish_s,
        "end_on_failure": sessions.on_failed_turn == "end",
        "keep_reasoning": sessions.keep_reasoning,
    }


def _limits_by_metric(settings: Settings) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for slo in settings.slos:
        found.setdefault(slo.metric, []).append(slo.limit_s)
    return found


def _all_failed(table: pa.Table, stage: int) -> tuple[str, str] | None:
    """("aborted", reason) when not one request of a stage was answered: more load would say nothing."""
    if not table.num_rows or "ok" in table["status"].to_pylist():
        return None
    status, error = table["status"][0].as_py(), table["error"][0].as_py()
    return "aborted", f"every request of stage {stage} failed, first with {status}: {error}"


def _planned_tokens(table: pa.Table) -> int:
    import pyarrow.compute as pc  # here: 40 ms that the first request need not wait for

    return sum(
        pc.sum(table[name]).as_py() or 0
        for name in ("input_tokens_planned", "output_tokens_planned")
    )


def e2e_s(record: RequestRecord) -> float:
    if record.started_ns is None or record.ended_ns is None:
        return 1.0
    return max((record.ended_ns - record.started_ns) / 1e9, 1e-3)
