"""The rig of one experiment: endpoint probed, run directory open, client and telemetry going.

An experiment is a function that asks the rig for stages. ``conduct`` sets the rig up, lets the
experiment drive it and closes the run directory, whatever happened in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ampacity.config import ConfigError, Settings
from ampacity.experiments.provenance import announcement, out_path, run_meta, utc_now
from ampacity.experiments.sweep import LOOKS, Enough
from ampacity.progress import Progress
from loadgen.audit import Measures, Tolerance, judge
from loadgen.endpoint import Endpoint, EndpointError, is_loopback
from loadgen.generator import Generator
from loadgen.host import OWN_FILES, raise_open_files_limit, room_for_connections
from loadgen.http import Client
from loadgen.pages import Pages
from loadgen.plan import StagePlan
from loadgen.probe import Probe, ask, calibrate, choose_model, count_message_overhead, find_dialect, look
from loadgen.protocols import RequestShape
from loadgen.proxy import proxy_for
from loadgen.records import RequestRecord
from loadgen.redirects import final_endpoint
from loadgen.requests import RequestMaker
from loadgen.rundir import RunWriter, check_new
from loadgen.telemetry import Telemetry
from loadgen.token_census import SLOWEST_S, by_vocabulary, census_by_tokenize, census_by_usage
from loadgen.worker import Route, Setup
from workloads.profile import Workload
from workloads.prompts import PromptMaker
from workloads.replay import prepare
from workloads.schedule import Schedule, closed_schedule, open_schedule, trace_schedule
from workloads.tokenizers import WORD_TOKENIZERS, load_tokenizer
from workloads.traces import Trace, read_trace

DRAIN_MIN_S = 5.0
DRAIN_DEFAULT_S = 30.0
SILENCE_S = 3.0  # of the endpoint, before the user is told what is waited for
IDLE_WAIT_S = 15.0  # after an overload the server may still be busy with requests that we gave up
CLOSED_REQUESTS_MAX = 200_000
REPEATS_MAX = 3  # stages run again in one experiment because the client was disturbed ...
GROW_CPU_FRACTION = (
    0.45  # ... and not busy with the load itself; from here on the next stage gets more workers
)

Drive = Callable[["Rig"], Awaitable[None]]

_going: list[Generator] = []  # what a signal ends: one, or both arms of an A/B


class Rig:
    """Runs stages and judges them. Made by ``conduct``."""

    def __init__(
        self,
        settings: Settings,
        probe: Probe,
        writer: RunWriter,
        generator: Generator,
        telemetry: Telemetry,
        progress: Progress,
        trace: Trace | None,
    ) -> None:
        self._trace = trace
        self.settings = settings
        self.probe = probe
        self.typical_e2e_s = _e2e_s(probe.record)
        self._writer = writer
        self._generator = generator
        self._workers_wanted = settings.workers or 1
        self._tolerance = Tolerance.for_limits(_limits_by_metric(settings))
        self._telemetry = telemetry
        self._progress = progress
        self._first_request_id = 0
        self.repeats_left = REPEATS_MAX  # stages that may yet be run again after a disturbance
        self._left_requests = settings.max_requests
        self._left_tokens = settings.max_tokens
        self.stages: list[dict[str, Any]] = []  # judged, in the order in which they ran
        self.ended: tuple[str, str] | None = None  # (status, reason): no further stage can run

    def note_down(self, name: str, value: Any) -> None:
        """Write an entry of run.json."""
        self._writer.meta[name] = value

    async def open_stage(
        self, rate_rps: float, duration_s: float | None = None, enough: Enough | None = None
    ) -> dict[str, Any] | None:
        """One open-loop stage at ``rate_rps``; its judgement (docs/summary.md), or None when the run is over.

        The stage is looked at on its way and ended, drained, as soon as there is ``enough``.
        """
        return await self._undisturbed(
            lambda: self._open_once(rate_rps, duration_s or self.settings.duration_s, enough)
        )

    async def closed_stage(self, concurrency: int) -> dict[str, Any] | None:
        """One closed-loop stage of ``concurrency`` virtual users, with the settings' think time and ramp."""
        return await self._undisturbed(lambda: self._closed_once(concurrency))

    async def _undisturbed(
        self, once: Callable[[], Awaitable[dict[str, Any] | None]]
    ) -> dict[str, Any] | None:
        """Run a stage again when something else on this machine held the client up, a few times in a run.

        A client that was busy with the load itself would only be busy again.
        """
        judged = await once()
        while judged and not self.ended and self._disturbed(judged) and self.repeats_left > 0:
            self.repeats_left -= 1
            self._progress.note(f"stage {judged['index']} is repeated: {judged['client_limited_reason']}")
            judged = await once()
        return judged

    def _disturbed(self, judged: dict[str, Any]) -> bool:
        """Whether a repetition may tell more: not where the client was busy, short of something, or the server overloaded."""
        audit = self._writer.meta["stages"][-1]["audit"]
        idle = audit["cpu_fraction"] < GROW_CPU_FRACTION and not audit["shortages"]
        return bool(audit["client_limited"]) and idle and judged["stable"] is not False

    async def _open_once(
        self, rate_rps: float, duration_s: float, enough: Enough | None = None
    ) -> dict[str, Any] | None:
        schedule = open_schedule(
            self.settings.workload, rate_rps=rate_rps, duration_s=duration_s, seed=self.settings.seed,
            stage=len(self.stages), first_request_id=self._first_request_id,
        )  # fmt: skip
        return await self._run("open", schedule, duration_s, offered_rps=rate_rps, enough=enough)

    async def trace_stage(self) -> dict[str, Any] | None:
        """Replay the trace of the settings as one open stage."""
        assert self._trace is not None
        trace = self._trace
        how: dict[str, Any] = {
            "time_scale": self.settings.time_scale,
            "first_request_id": self._first_request_id,
        }
        if trace.as_schedule and self.settings.trace is not None:
            from workloads.schedule_file import read_schedule

            schedule = read_schedule(self.settings.trace, **how)
        else:
            schedule = trace_schedule(trace, **how)
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
        duration_s = self.settings.ramp_s + self.settings.duration_s
        return await self._run("closed", schedule, duration_s, concurrency=concurrency)

    async def _run(
        self,
        kind: str,
        schedule: Schedule,
        duration_s: float,
        offered_rps: float | None = None,
        concurrency: int | None = None,
        enough: Enough | None = None,
    ) -> dict[str, Any] | None:
        if self.ended:
            return None
        schedule = self._fit_context(schedule)
        if schedule.shared is not None and schedule.shared.note and kind == "open":
            self._note(f"stage {len(self.stages)}: {schedule.shared.note}")
        cut: str | None = None
        if kind == "open":
            schedule, cut = schedule.capped(self._left_requests, self._left_tokens)
            if cut:
                duration_s = min(duration_s, float(schedule.scheduled_s[-1]) + 1e-6 if len(schedule) else 0.0)
        if not len(schedule) and cut:
            self.ended = ("budget", self._budget_text(cut))
            return None
        plan = StagePlan(
            index=len(self.stages), kind="open" if kind == "open" else "closed", schedule=schedule, duration_s=duration_s,
            offered_rps=offered_rps, concurrency=concurrency, max_requests=self._left_requests,
            max_tokens=self._left_tokens, think_s=self.settings.think_s, ramp_s=self.settings.ramp_s, drain_s=self._drain_s(),
            sticky=self.settings.sticky, **_session_rules(self.settings.workload),
        )  # fmt: skip
        with self._progress.stage(self._generator, plan), self._looking_on(plan, enough):
            result = await self._generator.run(
                plan, self._workers_wanted, lambda start_ns: self._announce(plan, start_ns)
            )
        table = self._writer.stage_table(plan.index)
        self._spend(result.ids_used, table)
        meta = {**result.meta, "audit": self._audit(result.measures)}
        meta |= self._sharing(schedule, table)
        self._writer.meta["stages"][-1] = meta
        stopped = self._generator.stopped
        meta["ended_early"] = meta["ended_early"] or cut
        if stopped:
            self.ended = ("interrupted" if stopped.startswith("interrupted") else "aborted", stopped)
        elif meta["ended_early"]:
            self.ended = ("budget", self._budget_text(meta["ended_early"]))
        self._writer.write_meta()
        from analysis.stages import analyse_stage  # judging is loaded when there is something to judge

        judged: dict[str, Any] = analyse_stage(table, meta, self.settings.slos, self.settings.warmup_requests)
        self.stages.append(judged)
        self._progress.judged(judged)
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
            from ampacity.experiments.on_the_way import judge_so_far

            watching = asyncio.create_task(self._look_on(plan, enough, judge_so_far))
        try:
            yield
        finally:
            if watching is not None:
                watching.cancel()

    async def _look_on(self, plan: StagePlan, enough: Enough, judge_so_far: Callable[..., Any]) -> None:
        began_s = time.monotonic()
        for share in LOOKS:
            await asyncio.sleep(max(0.0, began_s + share * plan.duration_s - time.monotonic()))
            meta = self._writer.meta["stages"][-1]
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

    def _budget_text(self, cut: str) -> str:
        """The user's own limit behind what was left of it for a stage."""
        if "planned tokens" in cut:
            return f"--max-tokens {self.settings.max_tokens} is used up"
        return (
            f"--max-requests {self.settings.max_requests} is used up" if self.settings.max_requests else cut
        )

    def _announce(self, plan: StagePlan, start_ns: int) -> None:
        """Write down what is about to run, so that a report can be made of it after a kill."""
        self._writer.meta["stages"].append({
            **plan.meta(start_ns), "drained_ns": None,
            "scheduled_requests": len(plan.schedule) if plan.kind == "open" else None, "ended_early": None, "audit": None, "played_sessions": plan.schedule.session is not None,
        })  # fmt: skip
        self._writer.write_meta()

    def _audit(self, measures: Measures) -> dict[str, Any]:
        """Judge the client in the stage that has just ended, and ask for more workers where it was busy."""
        audit = judge(measures, self._tolerance)
        lost = self._generator.take_lost()
        if lost:
            self._progress.note(lost)
            audit = replace(audit, client_limited=True, client_limited_reason=lost)
        cores = max((os.cpu_count() or 1) - 1, 1)  # one is left to everything else
        if self.settings.workers is None and audit.cpu_fraction >= GROW_CPU_FRACTION:
            self._workers_wanted = min(2 * self._workers_wanted, max(cores, self._workers_wanted))
            self._writer.meta["workers"] = self._workers_wanted
        return asdict(audit)

    def _spend(self, ids_used: int, table: pa.Table) -> None:
        import pyarrow.compute as pc  # here: 40 ms that the first request need not wait for

        self._first_request_id += ids_used
        if self._left_requests is not None:
            self._left_requests -= table.num_rows
        if self._left_tokens is not None:
            planned = (
                pc.sum(table[name]).as_py() or 0 for name in ("input_tokens_planned", "output_tokens_planned")
            )
            self._left_tokens -= sum(planned)

    def _fit_context(self, schedule: Schedule) -> Schedule:
        """Shorten inputs that would not fit the model's context beside their output, and count them."""
        context = self.probe.served.max_model_len
        if context is None:
            return schedule
        if schedule.continues is not None:  # a conversation ends before the turn that would not fit
            fitting = schedule.without(schedule.input_tokens + schedule.output_tokens + 8 > context)
            if len(fitting) < len(schedule):
                self._count("turns_beyond_context", len(schedule) - len(fitting))
            return fitting
        outputs = np.minimum(schedule.output_tokens, max(context // 2, 1))
        inputs = np.minimum(schedule.input_tokens, np.maximum(context - outputs - 8, 1))
        clipped = int(np.count_nonzero((inputs < schedule.input_tokens) | (outputs < schedule.output_tokens)))
        if clipped:
            self._count("clipped_to_context", clipped)
        return replace(schedule, input_tokens=inputs, output_tokens=outputs)

    def _note(self, text: str) -> None:
        self._progress.note(text)
        self._writer.meta["notes"].append(text)

    def _count(self, name: str, more: int) -> None:
        workload = self._writer.meta["workload"]
        workload[name] = workload.get(name, 0) + more

    def _sharing(self, schedule: Schedule, table: pa.Table) -> dict[str, Any]:
        """The stage's ``cached_share_planned``: of the requests that were answered, as an infinite cache would have it."""
        if schedule.shared is None and schedule.continues is None:
            return {}
        import pyarrow.compute as pc  # as above

        answered = (
            table.filter(pc.equal(table["status"], "ok"))["request_id"].to_numpy() - schedule.first_request_id
        )
        numbers = np.arange(len(schedule)) if schedule.numbers is None else schedule.numbers
        index = np.searchsorted(numbers, answered)
        cached = schedule.planned_cached_tokens(answers_too=_answers_told(self.settings.workload))[index]
        sent = int(schedule.input_tokens[index].sum())
        return {"cached_share_planned": float(cached.sum() / sent) if sent else None}

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
    out = out_path(settings, experiment)
    check_new(out)
    settings = await _followed(settings, progress)
    endpoint = settings.endpoint
    routes = tuple(_route(target) for target in (endpoint, *settings.replicas))
    addresses, proxy = routes[0].addresses, routes[0].proxy
    raise_open_files_limit()
    _check_open_files(settings)
    trace = None
    if settings.trace:
        read = read_trace(settings.trace, skip_bad_rows=settings.skip_bad_rows)
        trace = prepare(read, settings.replay, settings.seed)
        if trace.as_schedule:
            from workloads.schedule_file import read_schedule

            read_schedule(settings.trace)  # refused now, if it is to be refused
        for note in trace.notes:
            progress.note(note)
    tokenizer = load_tokenizer(settings.tokenizer)
    clients: list[Client] = []
    try:
        async with Pages() as pages:
            run_id, salt = secrets.token_hex(6), settings.salt or secrets.token_hex(8)
            clients = [_client(settings, route) for route in routes]
            clients[0].patience_s = settings.limits.total_s or clients[0].patience_s
            waiting = asyncio.get_running_loop().call_later(
                SILENCE_S, progress.note, f"waiting for a first answer, {clients[0].patience_s:g} s at most"
            )
            probe = await _probe(
                settings,
                pages,
                clients[0],
                RequestMaker(endpoint, PromptMaker(tokenizer, f"{salt}-probe"), f"{run_id}-probe", proxy),
                trace,
            )
            waiting.cancel()
            sessions = settings.workload.sessions
            if sessions is not None and sessions.message_tokens is None:
                say = RequestMaker(
                    endpoint, PromptMaker(tokenizer, salt), f"{run_id}-probe-messages", proxy
                ).saying
                extra = await count_message_overhead(clients[0], probe.shape, say)
                sessions = replace(sessions, message_tokens=extra)
                settings = replace(settings, workload=replace(settings.workload, sessions=sessions))
            for note in probe.notes:
                progress.note(note)
            if not addresses or not is_loopback(addresses):
                progress.note(announcement(settings, trace))
            for replica in settings.replicas:
                await look(pages, replica)  # raises where there is nothing
            setup = Setup(
                routes=routes, shape=probe.shape, tokenizer=settings.tokenizer, salt=salt,
                tokens_per_word=probe.calibration.tokens_per_word, overhead_tokens=probe.calibration.overhead_tokens,
                run_id=run_id, limits=settings.limits, stamps=settings.timestamps, reuse=settings.connections,
                prompt_file=settings.workload.prompts.file.path if settings.workload.prompts else None,
                classes=settings.workload.classes, images=settings.workload.images,
                planned_histories=not _answers_told(settings.workload),
            )  # fmt: skip
            meta = run_meta(settings, probe, run_id, salt, experiment, command_line, trace)
            with RunWriter(out, meta) as writer:
                generator = Generator(setup, clients, writer, writer.worker_stream)
                own = f"{endpoint.root}/metrics"  # the API key is for this page only
                metrics: dict[str, dict[str, str]] = {url: {} for url in settings.metrics_urls}
                metrics[own] = endpoint.all_headers()
                telemetry = Telemetry(pages, metrics)
                await telemetry.start()
                for url in set(settings.metrics_urls) & set(telemetry.silent):
                    progress.note(f"--metrics-url {url}: no metric there that is known; it is left alone")
                rig = Rig(settings, probe, writer, generator, telemetry, progress, trace)
                try:
                    with _interruptible(generator, progress):
                        await drive(rig)
                finally:
                    await generator.close()
                    await telemetry.stop()
                status, reason = rig.ended or ("complete", None)
                writer.meta.update(status=status, status_reason=reason, ended_utc=utc_now())
                writer.finish(telemetry.table())
    finally:
        for client in clients:
            await client.close()
    return out


def _check_open_files(settings: Settings) -> None:
    """Refuse a load that is known to need more connections than the system allows. Raises ConfigError."""
    wanted, room = max(settings.concurrency or (0,)), room_for_connections()
    if room is not None and wanted > room * (settings.workers or 1):
        raise ConfigError(
            f"--concurrency {wanted} needs {wanted + OWN_FILES} open files and the limit is {room + OWN_FILES} in each "
            f"process: raise it (ulimit -n {wanted + OWN_FILES}), or spread the load with --workers"
        )


async def _followed(settings: Settings, progress: Progress) -> Settings:
    """The settings with the URL that the endpoint redirects to, and a note of it. Raises EndpointError."""
    endpoint = settings.endpoint
    _route(endpoint)  # raises where there is no way to it
    async with Pages() as pages:
        final = await final_endpoint(pages, endpoint)
    if final != endpoint:
        progress.note(f"{endpoint.url} redirects: the load goes to {final.url}")
    return replace(settings, endpoint=final)


def _route(endpoint: Endpoint) -> Route:
    """The endpoint's addresses, and the proxy on the way; behind a proxy the name need not resolve here."""
    try:
        addresses = endpoint.addresses()
    except EndpointError:
        proxy = proxy_for(endpoint, [])
        if proxy is None:
            raise
        return Route(endpoint, [], proxy)
    return Route(endpoint, addresses, proxy_for(endpoint, addresses))


def _session_rules(workload: Workload) -> dict[str, Any]:
    """What a stage does with sessions."""
    sessions = workload.sessions
    if sessions is None:
        return {}
    return {
        "finish_s": sessions.finish_s, "end_on_failure": sessions.on_failed_turn == "end",
        "keep_reasoning": sessions.keep_reasoning,
    }  # fmt: skip


def _client(settings: Settings, route: Route) -> Client:
    return Client(
        route.endpoint,
        route.addresses,
        route.endpoint.ssl_context(),
        stamps=settings.timestamps,
        reuse=settings.connections,
        proxy=route.proxy,
    )


def _answers_told(workload: Workload) -> bool:
    """Whether histories have what the server answered."""
    return workload.sessions is None or workload.sessions.history == "answers"


async def _probe(
    settings: Settings, pages: Pages, client: Client, maker: RequestMaker, trace: Trace | None
) -> Probe:  # fmt: skip
    """Everything that is asked of the endpoint before the load begins. Raises EndpointError."""
    endpoint = settings.endpoint
    served = await look(pages, endpoint)
    shape = RequestShape(
        settings.api, choose_model(served, settings.model, endpoint), extra=settings.extra_body
    )
    send = maker.numbered
    shape, short, notes = await find_dialect(client, endpoint, shape, served, send)
    calibration, record = await calibrate(client, shape, short, send)
    if settings.tokenizer not in WORD_TOKENIZERS:
        calibration, said = by_vocabulary(calibration, settings.tokenizer)
        notes += said
    elif settings.tokenizer == "server":
        calibration = await census_by_tokenize(pages, endpoint, shape.model, calibration)
    elif calibration.measured and calibration.tokens_per_word != 1 and _e2e_s(short) <= SLOWEST_S:
        calibration = await census_by_usage(client, shape, calibration, served.max_model_len, maker.saying)
    lengths = _typical_lengths(settings, trace)
    typical = await ask(client, shape.api, send(shape, *lengths))
    return Probe(served, shape, calibration, typical if typical.status == "ok" else record, tuple(notes))


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


def _all_failed(table: pa.Table, stage: int) -> tuple[str, str] | None:
    """("aborted", reason) when not one request of a stage was answered: more load would say nothing."""
    if not table.num_rows or "ok" in table["status"].to_pylist():
        return None
    status, error = table["status"][0].as_py(), table["error"][0].as_py()
    return "aborted", f"every request of stage {stage} failed, first with {status}: {error}"


def _e2e_s(record: RequestRecord) -> float:
    if record.started_ns is None or record.ended_ns is None:
        return 1.0
    return max((record.ended_ns - record.started_ns) / 1e9, 1e-3)


@contextlib.contextmanager
def _interruptible(generator: Generator, progress: Progress) -> Iterator[None]:
    """The first Ctrl-C (or SIGTERM) ends the run cleanly, the second one at once."""
    loop = asyncio.get_running_loop()
    _going.append(generator)

    def on_signal(name: str) -> None:
        if generator.stopped:
            raise KeyboardInterrupt
        progress.note(f"{name}: ending the run, the report follows")
        for one in _going:
            one.stop(f"interrupted by {name}")

    handled = [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")] if sys.platform != "win32" else []
    for number, name in handled:
        loop.add_signal_handler(number, on_signal, name)
    try:
        yield
    finally:
        _going.remove(generator)
        for number, _ in handled if not _going else []:
            loop.remove_signal_handler(number)


def run_event_loop(main: Coroutine[Any, Any, Path]) -> Path:
    """Run on uvloop where there is one: it halves the cost of a token event."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if sys.platform != "win32":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)
