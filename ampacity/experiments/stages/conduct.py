"""Set up a run against an endpoint, let an experiment drive it, close the run directory.

An experiment is a function that asks the rig for stages.
"""

import asyncio
import contextlib
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from ampacity.experiments.stages.budget import account_of, approve, planned
from ampacity.experiments.stages.context import check_context
from ampacity.experiments.stages.live import LivePlayer
from ampacity.experiments.stages.live_export import live_export
from ampacity.experiments.stages.preflight import Probe, follow_redirects, prepare_machine, route_to
from ampacity.experiments.stages.provenance import out_path, run_meta, source_notes, utc_now
from ampacity.experiments.stages.resume import check_resumable, resumed_meta
from ampacity.experiments.stages.rig import Rig
from ampacity.experiments.stages.rules import answers_in_history
from ampacity.loadgen.generator import Generator
from ampacity.loadgen.net.http import Client
from ampacity.loadgen.net.pages import Pages
from ampacity.loadgen.probe.ask import count_message_overhead
from ampacity.loadgen.probe.look import look
from ampacity.loadgen.probe.results import ProbeResult
from ampacity.loadgen.rundir.files import Run
from ampacity.loadgen.rundir.rotate import RotatingWriter
from ampacity.loadgen.rundir.write import RunWriter, check_new, take_up
from ampacity.loadgen.send.requests import RequestMaker
from ampacity.loadgen.telemetry import Telemetry
from ampacity.loadgen.workers.launch import Launcher
from ampacity.loadgen.workers.setup import Route, Setup
from ampacity.progress import Progress
from ampacity.reports.render.figures import counted
from ampacity.settings import Settings
from ampacity.workloads.prompts.tokenizers import load_tokenizer
from ampacity.workloads.replay import Replayed

Drive = Callable[[Rig], Awaitable[Any]]
T = TypeVar("T")

INSECURE = "--insecure: nobody checked that the answers came from the endpoint itself"
ENDING = "{}: ending the run, the report follows (Ctrl-C again: leave without it)"
AT_ONCE_S = 0.3  # signals this near to the first are one: nobody decides twice in that time
_running: list[Generator] = []  # what a signal ends: one, or both arms of an A/B


@dataclass(frozen=True)
class _Connected:
    """An endpoint that was probed, and what is needed to load it."""

    settings: Settings
    pages: Pages
    clients: list[Client]
    setup: Setup
    probe: ProbeResult
    trace: Replayed | None
    notes: list[str]  # for run.json, beside those of the probe
    cluster: Launcher | None  # where the load comes from; None: from here


async def conduct(
    settings: Settings,
    *,
    experiment: str,
    drive: Drive,
    command_line: list[str],
    progress: Progress,
    times: int = 1,
    resume: bool = False,
) -> Path:
    """Run an experiment and return its run directory; ``times`` each load is run, about.

    With ``resume`` the run in --out goes on. Raises a ValueError of one line before the load begins.
    """
    out, held = out_path(settings, experiment), None
    async with contextlib.AsyncExitStack() as closing:
        if resume:
            held = closing.enter_context(take_up(out))
            check_resumable(held.run)
        else:
            check_new(out)
        before = held.run if held else None
        run = await _connect(settings, out, progress, closing, times, before)
        settings, meta = run.settings, _meta_of(run, experiment, command_line)
        if settings.max_cost or settings.max_tokens or settings.max_requests:
            meta["planned"] = planned(settings, run.trace, times * (1 + len(settings.lengths)))
        if before is not None:
            meta = resumed_meta(before, meta)
            part = "window" if experiment == "soak" else "stage"
            kept = counted(len(meta["stages"]), part)
            progress.note(f"{out} goes on: what is recorded is kept, {kept}")
        private = settings.keep_answers_bytes is not None
        kind = RotatingWriter if experiment == "soak" else RunWriter
        with kind(out, meta, held, private=private) as writer:
            generator = Generator(run.setup, run.clients, writer, writer.worker_stream, run.cluster)
            telemetry = await _start_telemetry(settings, run.pages, progress)
            player = LivePlayer(settings, run.probe, writer, generator, telemetry, progress)
            rig = Rig(settings, writer, progress, player, run.trace)
            if why := run.setup.account.used_up:  # by the probe
                rig.ended = ("budget", why)
            try:
                with interruptible(generator, progress):
                    async with live_export(settings, generator, run.pages, progress.note):
                        await drive(rig)
            finally:
                await generator.close()
                await telemetry.stop()
            close_run(writer, rig.ended, telemetry.table())
    return out


def _meta_of(run: _Connected, experiment: str, command_line: list[str]) -> dict[str, Any]:
    setup, record = run.setup, run.probe.record
    ids = setup.run_id, setup.salt
    meta = run_meta(run.settings, run.probe, *ids, experiment, command_line, run.trace)
    meta["notes"] += run.notes
    answer_s = 1.0
    if record.started_ns is not None and record.ended_ns is not None:
        answer_s = max((record.ended_ns - record.started_ns) / 1e9, 1e-3)
    meta["endpoint"]["answer_s"] = answer_s  # of the typical lengths, alone
    return meta


def close_run(
    writer: RunWriter, ended: tuple[str, str] | None, server: pa.Table | None = None
) -> None:
    """Write how the run ended, and finish its directory."""
    status, reason = ended or ("complete", None)
    writer.meta.update(status=status, status_reason=reason, ended_utc=utc_now())
    writer.finish(server)


async def _connect(
    settings: Settings,
    out: Path,
    progress: Progress,
    closing: contextlib.AsyncExitStack,
    times: int,
    before: Run | None,
) -> _Connected:
    """Reach and probe the endpoint, and check that the load can be sent.

    A run that goes on after ``before`` sends the texts that it would have sent.
    """
    account = account_of(settings)
    settings, trace, routes = await _approved(settings, progress, times)
    known, fresh = before.meta if before else {}, secrets.token_hex(8)
    run_id = known.get("run_id") or secrets.token_hex(6)
    salt = known.get("salt") or settings.salt or fresh
    if before:
        account.spent_before(before.requests)
    pages = await closing.enter_async_context(Pages(settings.endpoint.tls))
    clients = [route.client(settings.timestamps, settings.connections) for route in routes]
    for client in clients:
        closing.push_async_callback(client.close)
    probe = await Probe(
        settings, pages, clients[0], routes[0], fresh if before else salt, trace, progress
    ).run()
    setup = Setup(
        routes=routes,
        shape=probe.shape,
        tokenizer=settings.tokenizer,
        salt=salt,
        calibration=probe.calibration,
        run_id=run_id,
        limits=settings.limits,
        account=account,
        stamps=settings.timestamps,
        reuse=settings.connections,
        timed=bool(settings.prometheus or settings.otlp or not progress.quiet),
        **_sent(settings, probe, trace, out),
    )
    settings = await _with_message_overhead(settings, setup, clients[0], trace)
    if probe.keeps_alive is False:  # a kept connection would race against the server's close
        setup = replace(setup, reuse="new")
        for client in clients:
            client.reuse = False
    unsafe = INSECURE if settings.endpoint.tls.insecure else None
    notes = [*filter(None, [check_context(settings, probe, trace), unsafe])]
    for note in [*probe.notes, *notes]:
        progress.note(note)
    for record in clients[0].asked:
        account.ended(record)
    for replica in settings.replicas:
        await look(pages, replica)  # raises if it does not answer
    cluster = None
    if settings.ray is not None:
        from ampacity.loadgen.workers.on_ray import join_cluster

        cluster = await join_cluster(settings.ray, settings.workers or 1, routes)
        closing.push_async_callback(cluster.close)
    return _Connected(settings, pages, clients, setup, probe, trace, notes, cluster)


async def _approved(
    settings: Settings, progress: Progress, times: int
) -> tuple[Settings, Replayed | None, tuple[Route, ...]]:
    """Return the settings behind redirects, what they replay, and the routes, once approved."""
    trace = None
    if settings.trace:
        from ampacity.experiments.stages.replay import read_replay

        trace = read_replay(settings.trace, settings)
    routes = _routes(settings)
    approve(settings, trace, routes, progress, times)
    host, settings = settings.endpoint.host, await follow_redirects(settings, progress)
    if settings.endpoint.host != host:
        routes = _routes(settings)
        approve(settings, trace, routes, progress, times)
    prepare_machine(settings)
    for note in source_notes(settings, trace):
        progress.note(note)
    return settings, trace, routes


def _routes(settings: Settings) -> tuple[Route, ...]:
    return tuple(route_to(target) for target in (settings.endpoint, *settings.replicas))


def _sent(
    settings: Settings, probe: ProbeResult, trace: Replayed | None, out: Path
) -> dict[str, Any]:
    """Return the fields of Setup about what requests contain and what is kept of answers."""
    workload, thinks = settings.workload, probe.thinks
    return {
        "texts": trace.recorded if trace else workload.prompts and workload.prompts.file,
        "classes": workload.classes,
        "images": workload.images,
        "planned_histories": not answers_in_history(workload),
        "counts_tokens": probe.record.chunk_tokens is None,
        "thinks_until": thinks.closing if thinks and not thinks.opened else None,
        "answers_in": None if settings.keep_answers_bytes is None else out,
        "answers_bytes": settings.keep_answers_bytes or 0,
    }


async def _with_message_overhead(
    settings: Settings, setup: Setup, client: Client, trace: Replayed | None
) -> Settings:
    """Measure the tokens that a further message costs, if the workload's sessions need to know."""
    sessions = settings.workload.sessions
    if sessions is None or sessions.message_tokens is not None or trace is not None:
        return settings
    prompts = setup.calibration.prompts(load_tokenizer(settings.tokenizer), setup.salt)
    name, proxy = f"{setup.run_id}-probe", setup.routes[0].proxy
    maker = RequestMaker(settings.endpoint, prompts, name, proxy)
    extra = await count_message_overhead(client, setup.shape, maker.saying)
    sessions = replace(sessions, message_tokens=extra)
    return replace(settings, workload=replace(settings.workload, sessions=sessions))


def metrics_pages(settings: Settings) -> dict[str, dict[str, str]]:
    """Return {URL: headers} of the metrics pages; only the endpoint's own gets the API key."""
    pages: dict[str, dict[str, str]] = {url: {} for url in settings.metrics_urls}
    pages[f"{settings.endpoint.root}/metrics"] = settings.endpoint.all_headers()
    return pages


async def _start_telemetry(settings: Settings, pages: Pages, progress: Progress) -> Telemetry:
    telemetry = Telemetry(pages, metrics_pages(settings))
    await telemetry.start()
    for url in set(settings.metrics_urls) & set(telemetry.silent):
        progress.note(
            f"--metrics-url {url.partition('?')[0]}: no known metric there; it is not sampled"
        )
    return telemetry


def end_signals() -> dict[int, str]:
    """Return the signals that end a run cleanly, and their names.

    A hang-up of the terminal is one, unless ``nohup`` has it ignored.
    """
    found: dict[int, str] = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
    hang_up = getattr(signal, "SIGHUP", None)
    if hang_up is not None and signal.getsignal(hang_up) is not signal.SIG_IGN:
        found[hang_up] = "SIGHUP"
    return found


@contextlib.contextmanager
def interruptible(generator: Generator, progress: Progress) -> Iterator[None]:
    """End the run cleanly at the first of ``end_signals``, immediately at a later one.

    Some programs send one twice at once, to the process and to its group (``timeout -s INT``).
    """
    loop = asyncio.get_running_loop()
    _running.append(generator)
    first_s: list[float] = []

    def on_signal(name: str) -> None:
        first_s.append(loop.time())
        if generator.stopped and first_s[-1] - first_s[0] < AT_ONCE_S:
            return
        if generator.stopped:
            raise KeyboardInterrupt
        progress.note(ENDING.format(name))
        for one in _running:
            one.stop(f"interrupted by {name}")

    handled = end_signals() if sys.platform != "win32" else {}
    for number, name in handled.items():
        loop.add_signal_handler(number, on_signal, name)
    try:
        yield
    finally:
        _running.remove(generator)
        for number in handled if not _running else ():
            loop.remove_signal_handler(number)


def run_event_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run on uvloop if it is available: it halves the cost of a token event.

    Signals do afterwards what they did before.
    """
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if sys.platform != "win32":
        import uvloop

        factory = uvloop.new_event_loop
    before = {number: signal.getsignal(number) for number in end_signals()}
    try:
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(main)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
