"""Play stages on an endpoint, in real time."""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pyarrow as pa

from ampacity.experiments.stages.context import fit_context
from ampacity.experiments.stages.provenance import happened, with_run
from ampacity.experiments.stages.rig import GROW_CPU_FRACTION, Outcome, Watch
from ampacity.experiments.stages.rules import answers_in_history
from ampacity.loadgen.audit import Measures, Tolerance, judge
from ampacity.loadgen.generator import Generator
from ampacity.loadgen.host import busiest, cores_used, cpu_seconds
from ampacity.loadgen.plan import StagePlan
from ampacity.loadgen.probe.results import ProbeResult
from ampacity.loadgen.rundir.rotate import RotatingWriter
from ampacity.loadgen.rundir.write import RunWriter
from ampacity.loadgen.telemetry import Telemetry
from ampacity.progress import Progress
from ampacity.settings import Settings
from ampacity.workloads.schedule import Schedule

IDLE_WAIT_S = 15.0  # after an overload the server may still be busy with abandoned requests
CLOSED_REQUESTS_MAX = 200_000


class LivePlayer:
    """Plays stages with the load generator; the ``Player`` of real runs."""

    def __init__(
        self,
        settings: Settings,
        probe: ProbeResult,
        writer: RunWriter,
        generator: Generator,
        telemetry: Telemetry,
        progress: Progress,
    ) -> None:
        self.path, self.stages = writer.path, writer.meta["stages"]
        self._settings = settings
        self._probe = probe
        self._writer = writer
        self._generator = generator
        self._telemetry = telemetry
        self._progress = progress
        self._workers_wanted = settings.workers or writer.meta["workers"]
        self._may_grow = not (settings.workers or settings.in_one_process)
        self._tolerance = Tolerance.for_limits(_limits_by_metric(settings))
        self.typical_e2e_s = writer.meta["endpoint"]["answer_s"]

    def closed_counts(self, users: int) -> Iterable[int]:
        return (CLOSED_REQUESTS_MAX,)

    def stage_s(self, rate_rps: float) -> float:
        return self._settings.duration_s

    def fit(self, schedule: Schedule, begin_shorter: bool) -> tuple[Schedule, dict[str, int]]:
        context = self._probe.served.max_model_len
        if context is None:
            return schedule, {}
        spare = self._probe.calibration.margin_tokens(schedule.input_tokens)
        return fit_context(schedule, context, spare, begin_shorter=begin_shorter)

    async def settle(self) -> None:
        await self._telemetry.until_idle(IDLE_WAIT_S)

    async def play(
        self, plan: StagePlan, labels: dict[str, Any], cut: str | None, watch: Watch | None
    ) -> Outcome:
        others, began_s = cpu_seconds(), time.monotonic()
        burst = self._writer.meta.get("burst")
        showing = self._progress.stage(self._generator, plan, self._settings, burst)
        with showing, self._watched(plan, watch):
            result = await self._generator.run(
                plan, self._workers_wanted, lambda start_ns: self._announce(plan, start_ns, labels)
            )
        self._take_account()
        self._writer.flush()
        await asyncio.to_thread(self._writer.wait)  # a disk that stalls: Ctrl-C is heard
        other_work = busiest(cores_used(others, cpu_seconds(), time.monotonic() - began_s))
        table = self._writer.stage_table(plan.index)
        meta = {**result.meta, **labels, "audit": self._audit(result.measures)}
        if plan.whole and plan.kind == "open":  # its length depended on the answers
            length_s = (meta["end_ns"] - meta["start_ns"]) / 1e9
            meta["offered_rps"] = meta["scheduled_requests"] / length_s
        meta |= self._sharing(plan.schedule, table)
        self._writer.meta["stages"][-1] = meta
        if plan.kind == "open":
            meta["ended_early"] = meta["ended_early"] or cut
        ended = self._ended(meta["ended_early"], (cut, plan.used_up))
        return Outcome(meta, table, result.ids_used, ended, other_work)

    async def follow(self, plan: StagePlan, start_ns: int, labels: dict[str, Any]) -> int:
        """Play an open stage from ``start_ns`` on, while the one before ends; return the answered.

        Other than ``play`` it judges nothing, and its records have a file of their own.
        """
        self._announce(plan, start_ns, labels)
        result, answered = await self._generator.follow(plan, start_ns)
        meta = {**result.meta, **labels, "audit": self._audit(result.measures)}
        self._writer.meta["stages"][plan.index] = meta
        self._take_account()
        assert isinstance(self._writer, RotatingWriter)
        await self._writer.end_stage(plan.index, self._telemetry.take())
        self._writer.write_meta()
        return answered

    def _take_account(self) -> None:
        """Write down what is spent, and why keys could not be renewed."""
        live, meta = self._generator.live, self._writer.meta
        if live.spent_usd is not None:
            meta["spent_usd"] = live.spent_usd
        for why, tried_ns in live.key_failures.items():
            at_s = (tried_ns - meta["stages"][0]["start_ns"]) / 1e9
            text = f"at {at_s:.1f} s the API key could not be renewed, and the old one was used on"
            happened(meta, f"{text} ({why})", self._progress.note)

    def ended(self) -> tuple[str, str] | None:
        """Return how the run ended, if it did before its time."""
        return self._ended(None, (None, ""))

    def showing(self, plan: StagePlan) -> contextlib.AbstractContextManager[None]:
        """Show a stage on the terminal while the block runs."""
        return self._progress.stage(self._generator, plan, self._settings)

    def _ended(
        self, early: str | None, by_budget: tuple[str | None, str]
    ) -> tuple[str, str] | None:
        """Return how the run ended, if it did for another reason than its budget."""
        if stopped := self._generator.stopped:
            return "interrupted" if stopped.startswith("interrupted") else "aborted", stopped
        of_a_worker = early if early and early.startswith("--max-errors") else None
        if used_up := self._generator.used_up or of_a_worker:
            return "errors" if used_up.startswith("--max-errors") else "budget", used_up
        if early and early not in by_budget:  # a worker could not go on, e.g. the disk is full
            return "aborted", early
        return None

    @contextlib.contextmanager
    def _watched(self, plan: StagePlan, watch: Watch | None) -> Iterator[None]:
        """Judge the stage while the block runs, if there is a ``watch``."""
        watching = None
        if watch is not None:
            # imported neither before the first request nor under load
            from ampacity.experiments.stages.on_the_way import judge_so_far

            watching = asyncio.create_task(self._watch(plan, watch, judge_so_far))
        try:
            yield
        finally:
            if watching is not None:
                watching.cancel()

    async def _watch(self, plan: StagePlan, watch: Watch, judge_so_far: Callable[..., Any]) -> None:
        began_s = time.monotonic()
        for share, alpha in watch.each():
            await asyncio.sleep(max(0.0, began_s + share * plan.duration_s - time.monotonic()))
            meta = self._writer.meta["stages"][-1]
            if meta["index"] != plan.index:
                continue
            self._writer.flush()
            judged = await asyncio.to_thread(  # reading answers must not wait for it
                judge_so_far,
                self._writer,
                plan,
                with_run(meta, self._writer.meta) | alpha,
                self._settings.slos,
                self._settings.warmup_requests,
            )
            reason = judged and watch.enough(judged)
            if reason:
                self._generator.finish_stage(reason)
                return

    def _announce(self, plan: StagePlan, start_ns: int, labels: dict[str, Any]) -> None:
        """Write down what is about to run, so that a killed run can be reported."""
        self._writer.meta["stages"].append(
            {
                **plan.meta(start_ns),
                **labels,
                "drained_ns": None,
                "scheduled_requests": len(plan.schedule) if plan.kind == "open" else None,
                "ended_early": None,
                "audit": None,
                "played_sessions": plan.schedule.session is not None,
            }
        )
        self._writer.write_meta()

    def _audit(self, measures: Measures) -> dict[str, Any]:
        """Return the audit of the client; ask for more workers if it was busy."""
        audit = judge(measures, self._tolerance)
        for note in self._generator.take_notes():
            self._progress.note(note)
            self._writer.meta["notes"].append(note)
        if lost := self._generator.take_lost():  # its load was not sent
            self._progress.note(lost)
            audit = replace(audit, client_limited=True, client_limited_reason=lost)
        if self._may_grow and audit.cpu_fraction >= GROW_CPU_FRACTION:
            others = 1  # a core is left to everything else
            cores = len(self._settings.cpus) or max((os.cpu_count() or 1) - others, 1)
            self._workers_wanted = min(2 * self._workers_wanted, max(cores, self._workers_wanted))
            self._writer.meta["workers"] = self._workers_wanted
        return asdict(audit)

    def _sharing(self, schedule: Schedule, table: pa.Table) -> dict[str, Any]:
        """Return ``cached_share_planned``: of answered requests, with an infinite cache."""
        if schedule.shared is None and schedule.continues is None:
            return {}
        import pyarrow.compute as pc  # 40 ms that the first request need not wait for

        answered = table.filter(pc.equal(table["status"], "ok"))["request_id"].to_numpy()
        index = np.searchsorted(schedule.ids, answered)
        told = answers_in_history(self._settings.workload)
        cached = schedule.planned_cached_tokens(answers_too=told)[index]
        sent = int(schedule.input_tokens[index].sum())
        return {"cached_share_planned": float(cached.sum() / sent) if sent else None}


def _limits_by_metric(settings: Settings) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for slo in settings.slos:
        found.setdefault(slo.metric, []).append(slo.limit_s)
    return found
