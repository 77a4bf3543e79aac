"""The rig of one experiment: endpoint probed, run directory open, client and telemetry going.

An experiment is a function that asks the rig for stages. ``conduct`` sets the rig up, lets the
experiment drive it and closes the run directory, whatever happened in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pyarrow as pa

from ampacity.config import Settings
from ampacity.experiments.provenance import announcement, run_meta, utc_now
from ampacity.progress import Progress
from analysis.stages import analyse_stage
from loadgen.audit import Tolerance
from loadgen.endpoint import is_loopback
from loadgen.host import raise_open_files_limit
from loadgen.http import Client
from loadgen.probe import Probe, ask, calibrate, choose_model, find_dialect, look
from loadgen.protocols import RequestShape
from loadgen.records import SCHEMA, to_batch
from loadgen.requests import RequestMaker
from loadgen.rundir import RunWriter, check_new
from loadgen.stage import StagePlan, StageRunner
from loadgen.telemetry import Telemetry
from workloads.prompts import PromptMaker
from workloads.schedule import Schedule, closed_schedule, open_schedule, trace_schedule
from workloads.tokenizers import load_tokenizer
from workloads.traces import Trace, read_trace

DRAIN_MIN_S = 5.0
DRAIN_DEFAULT_S = 30.0
IDLE_WAIT_S = 15.0  # after an overload the server may still be busy with requests that we gave up
CLOSED_REQUESTS_MAX = 200_000
REPEATS_MAX = 4  # stages run again in one experiment because the client was disturbed ...
BUSY_CPU_FRACTION = 0.5  # ... and not busy with the load itself

Drive = Callable[["Rig"], Awaitable[None]]


class Rig:
    """Runs stages and judges them. Made by ``conduct``."""

    def __init__(
        self,
        settings: Settings,
        probe: Probe,
        writer: RunWriter,
        runner: StageRunner,
        telemetry: Telemetry,
        progress: Progress,
        trace: Trace | None,
    ) -> None:
        self._trace = trace
        self.settings = settings
        self.probe = probe
        self.typical_e2e_s = 1.0
        self._writer = writer
        self._runner = runner
        self._telemetry = telemetry
        self._progress = progress
        self._first_request_id = 0
        self._repeats_left = REPEATS_MAX
        self._left_requests = settings.max_requests
        self._left_tokens = settings.max_tokens
        self.stages: list[dict[str, Any]] = []  # judged, in the order in which they ran
        self.ended: tuple[str, str] | None = None  # (status, reason): no further stage can run

    async def open_stage(self, rate_rps: float, duration_s: float | None = None) -> dict[str, Any] | None:
        """One open-loop stage at ``rate_rps``; its judgement (docs/summary.md), or None when the run is over."""
        return await self._undisturbed(
            lambda: self._open_once(rate_rps, duration_s or self.settings.duration_s)
        )

    async def closed_stage(self, concurrency: int) -> dict[str, Any] | None:
        """One closed-loop stage of ``concurrency`` virtual users without think time."""
        return await self._undisturbed(lambda: self._closed_once(concurrency))

    async def _undisturbed(
        self, once: Callable[[], Awaitable[dict[str, Any] | None]]
    ) -> dict[str, Any] | None:
        """Run a stage again when something else on this machine held the client up, a few times in a run.

        A client that was busy with the load itself would only be busy again.
        """
        judged = await once()
        while judged and not self.ended and self._disturbed() and self._repeats_left > 0:
            self._repeats_left -= 1
            self._progress.note(
                f"stage {judged['index']} is repeated: {judged['client_limited_reason']}, though the client was idle"
            )
            judged = await once()
        return judged

    def _disturbed(self) -> bool:
        audit = self._writer.meta["stages"][-1]["audit"]
        return bool(audit["client_limited"]) and audit["cpu_fraction"] < BUSY_CPU_FRACTION

    async def _open_once(self, rate_rps: float, duration_s: float) -> dict[str, Any] | None:
        schedule = open_schedule(
            self.settings.workload, rate_rps=rate_rps, duration_s=duration_s, seed=self.settings.seed,
            stage=len(self.stages), first_request_id=self._first_request_id,
        )  # fmt: skip
        return await self._run("open", schedule, duration_s, offered_rps=rate_rps)

    async def trace_stage(self) -> dict[str, Any] | None:
        """Replay the trace of the settings as one open stage."""
        assert self._trace is not None
        trace = self._trace
        schedule = trace_schedule(
            trace, time_scale=self.settings.time_scale, first_request_id=self._first_request_id
        )
        span_s = float(schedule.scheduled_s[-1]) if len(schedule) else 0.0
        duration_s = span_s + span_s / max(len(schedule) - 1, 1)  # one mean gap after the last arrival
        return await self._run(
            "open", schedule, max(duration_s, 1e-3), offered_rps=len(schedule) / max(duration_s, 1e-3)
        )

    async def _closed_once(self, concurrency: int) -> dict[str, Any] | None:
        schedule = closed_schedule(
            self.settings.workload, requests=CLOSED_REQUESTS_MAX, seed=self.settings.seed, stage=len(self.stages),
            first_request_id=self._first_request_id,
        )  # fmt: skip
        return await self._run("closed", schedule, self.settings.duration_s, concurrency=concurrency)

    async def _run(
        self,
        kind: str,
        schedule: Schedule,
        duration_s: float,
        offered_rps: float | None = None,
        concurrency: int | None = None,
    ) -> dict[str, Any] | None:
        if self.ended:
            return None
        schedule = self._fit_context(schedule)
        cut: str | None = None
        if kind == "open":
            schedule, cut = schedule.capped(self._left_requests, self._left_tokens)
            if cut:
                duration_s = min(duration_s, float(schedule.scheduled_s[-1]) if len(schedule) else 0.0)
        if not len(schedule) and cut:
            self.ended = ("budget", cut)
            return None
        plan = StagePlan(
            index=len(self.stages), kind="open" if kind == "open" else "closed", schedule=schedule, duration_s=duration_s,
            offered_rps=offered_rps, concurrency=concurrency, max_requests=self._left_requests,
            max_tokens=self._left_tokens, think_s=self.settings.think_s, drain_s=self._drain_s(),
        )  # fmt: skip
        with self._progress.stage(self._runner, plan):
            result = await self._runner.run(plan)
        self._spend(result.meta["scheduled_requests"], schedule)
        self._writer.flush()
        self._writer.meta["stages"].append(result.meta)
        if cut or self._runner.stopped or result.meta["ended_early"]:
            status = "interrupted" if self._runner.stopped else "budget"
            self.ended = (status, self._runner.stopped or cut or str(result.meta["ended_early"]))
            result.meta["ended_early"] = result.meta["ended_early"] or cut
        self._writer.write_meta()
        table = pa.Table.from_batches([to_batch(result.records)], schema=SCHEMA)
        judged: dict[str, Any] = analyse_stage(
            table, result.meta, self.settings.slos, self.settings.warmup_requests
        )
        self.stages.append(judged)
        self._progress.judged(judged)
        if result.records and all(r.status != "ok" for r in result.records) and not self.ended:
            first = next(r for r in result.records)
            self.ended = (
                "aborted",
                f"every request of stage {plan.index} failed, first with {first.status}: {first.error}",
            )
        if not self.ended and judged["errors"].get("unfinished"):
            await self._telemetry.until_idle(IDLE_WAIT_S)
        return judged

    def _spend(self, released: int, schedule: Schedule) -> None:
        self._first_request_id += released
        if self._left_requests is not None:
            self._left_requests -= released
        if self._left_tokens is not None:
            self._left_tokens -= int(
                schedule.input_tokens[:released].sum() + schedule.output_tokens[:released].sum()
            )

    def _fit_context(self, schedule: Schedule) -> Schedule:
        """Shorten inputs that would not fit the model's context beside their output, and count them."""
        context = self.probe.served.max_model_len
        if context is None:
            return schedule
        outputs = np.minimum(schedule.output_tokens, max(context // 2, 1))
        inputs = np.minimum(schedule.input_tokens, np.maximum(context - outputs - 8, 1))
        clipped = int(np.count_nonzero((inputs < schedule.input_tokens) | (outputs < schedule.output_tokens)))
        if clipped:
            workload = self._writer.meta["workload"]
            workload["clipped_to_context"] = workload.get("clipped_to_context", 0) + clipped
        return replace(schedule, input_tokens=inputs, output_tokens=outputs)

    def _drain_s(self) -> float:
        """Long enough that what is cut off has certainly missed its SLO."""
        limits = [slo.limit_s for slo in self.settings.slos if slo.metric in ("ttft", "e2e", "first_answer")]
        if not limits:
            return (
                max(DRAIN_DEFAULT_S, 3 * self.typical_e2e_s)
                if not self.settings.slos
                else max(DRAIN_MIN_S, 3 * self.typical_e2e_s)
            )
        return max(DRAIN_MIN_S, 1.5 * max(limits), 2 * self.typical_e2e_s)


async def conduct(
    settings: Settings, *, experiment: str, drive: Drive, command_line: list[str], progress: Progress
) -> Path:
    """Set up, drive, close. Gives the run directory back. Raises a ValueError of one line before the load begins."""
    endpoint = settings.endpoint
    out = _out_path(settings, experiment)
    check_new(out)
    addresses = endpoint.addresses()
    raise_open_files_limit()
    trace = read_trace(settings.trace) if settings.trace else None
    tokenizer = load_tokenizer(settings.tokenizer)
    client = Client(
        endpoint, addresses, endpoint.ssl_context(), stamps=settings.timestamps, reuse=settings.connections
    )
    try:
        async with aiohttp.ClientSession() as session:
            served = await look(session, endpoint)
            shape = RequestShape(
                settings.api, choose_model(served, settings.model, endpoint), extra=settings.extra_body
            )
            salt = secrets.token_hex(8)
            run_id = secrets.token_hex(6)
            probing = RequestMaker(endpoint, PromptMaker(tokenizer, f"{salt}-probe"), f"{run_id}-probe")
            shape, short, notes = await find_dialect(client, endpoint, shape, served, probing.numbered)
            calibration, record = await calibrate(client, shape, short, probing.numbered)
            if (
                tokenizer.name != "words"
            ):  # a real vocabulary: only what the chat template adds is the server's
                calibration = (
                    replace(calibration, tokens_per_word=1.0) if calibration.measured else calibration
                )
            prompts = PromptMaker(
                tokenizer,
                salt,
                tokens_per_word=calibration.tokens_per_word,
                overhead_tokens=calibration.overhead_tokens,
            )
            maker = RequestMaker(endpoint, prompts, run_id)
            typical = await ask(client, maker.make(shape, -1, *_typical_lengths(settings, trace)))
            probe = Probe(
                served, shape, calibration, typical if typical.status == "ok" else record, tuple(notes)
            )
            for note in notes:
                progress.note(note)
            if not is_loopback(addresses):
                progress.note(announcement(settings, trace))

            writer = RunWriter(
                out,
                run_meta(
                    settings, endpoint, probe, run_id, salt, experiment, command_line, trace, tokenizer.name
                ),
            )
            with writer:
                runner = StageRunner(
                    client,
                    lambda request_id, input_tokens, output_tokens: maker.make(
                        shape, request_id, input_tokens, output_tokens
                    ),
                    writer.append,
                    limits=settings.limits,
                    target=endpoint.url,
                    secrets=(endpoint.api_key,) if endpoint.api_key else (),
                    tolerance=Tolerance.for_limits(_limits_by_metric(settings)),
                )
                telemetry = Telemetry(session, f"{endpoint.root}/metrics", endpoint.all_headers())
                await telemetry.start()
                rig = Rig(settings, probe, writer, runner, telemetry, progress, trace)
                rig.typical_e2e_s = _e2e_s(probe)
                with _interruptible(runner, progress):
                    await drive(rig)
                status, reason = rig.ended or ("complete", None)
                writer.meta.update(status=status, status_reason=reason, ended_utc=utc_now())
                await telemetry.stop()
                writer.finish(telemetry.table())
    finally:
        await client.close()
    return writer.path


def _limits_by_metric(settings: Settings) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for slo in settings.slos:
        found.setdefault(slo.metric, []).append(slo.limit_s)
    return found


def _typical_lengths(settings: Settings, trace: Trace | None) -> tuple[int, int]:
    """(input, output) tokens of a middling request, for the one that is timed before the run."""
    if trace is not None:
        return int(np.median(trace.input_tokens)), int(np.median(trace.output_tokens))
    return round(settings.workload.input_tokens.quantile(0.5)), round(
        settings.workload.output_tokens.quantile(0.5)
    )


def _e2e_s(probe: Probe) -> float:
    record = probe.record
    if record.started_ns is None or record.ended_ns is None:
        return 1.0
    return max((record.ended_ns - record.started_ns) / 1e9, 1e-3)


def _out_path(settings: Settings, experiment: str) -> Path:
    if settings.out is not None:
        return settings.out
    return Path("runs") / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{experiment}"


@contextlib.contextmanager
def _interruptible(runner: StageRunner, progress: Progress) -> Iterator[None]:
    """The first Ctrl-C (or SIGTERM) ends the run cleanly, the second one at once."""
    loop = asyncio.get_running_loop()

    def on_signal(name: str) -> None:
        if runner.stopped:
            raise KeyboardInterrupt
        progress.note(f"{name}: ending the run, the report follows")
        runner.stop(f"interrupted by {name}")

    handled = [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")] if sys.platform != "win32" else []
    for number, name in handled:
        loop.add_signal_handler(number, on_signal, name)
    try:
        yield
    finally:
        for number, _ in handled:
            loop.remove_signal_handler(number)


def run_event_loop(main: Coroutine[Any, Any, Path]) -> Path:
    """Run on uvloop where there is one: it halves the cost of a token event."""
    gc.set_threshold(50_000, 20, 50)
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if sys.platform != "win32":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)
