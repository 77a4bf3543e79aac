"""Sets a rig up, lets an experiment drive it, and closes the run directory, whatever happened in between.

An experiment is a function that asks the rig for stages.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ampacity.config import Settings
from ampacity.experiments.stages.base_rig import answers_told
from ampacity.experiments.stages.context import check_context
from ampacity.experiments.stages.provenance import (
    announcement,
    out_path,
    run_meta,
    source_notes,
    utc_now,
)
from ampacity.experiments.stages.rig import Rig
from ampacity.loadgen.generator import Generator
from ampacity.loadgen.host import OWN_FILES, raise_open_files_limit, room_for_connections
from ampacity.loadgen.net.http import Client
from ampacity.loadgen.net.pages import Pages
from ampacity.loadgen.net.proxy import proxy_for
from ampacity.loadgen.net.redirects import final_endpoint
from ampacity.loadgen.probe.diagnosis import Finding, diagnose, spoilt, warnings
from ampacity.loadgen.probe.gateways import gateway_of
from ampacity.loadgen.probe.look import (
    Asked,
    ProbeResult,
    ask,
    choose_model,
    count_message_overhead,
    find_dialect,
    look,
)
from ampacity.loadgen.probe.network import measure_round_trip
from ampacity.loadgen.probe.prompt_calibration import Counting, calibrate
from ampacity.loadgen.receive.thinking import InlineThinking
from ampacity.loadgen.rundir.files import RunWriter, check_new
from ampacity.loadgen.send.endpoint import Endpoint, EndpointError, is_loopback
from ampacity.loadgen.send.protocols import RequestShape, printable
from ampacity.loadgen.send.requests import RequestMaker
from ampacity.loadgen.send.secrets import redact
from ampacity.loadgen.telemetry import Telemetry
from ampacity.loadgen.workers.worker import Route, Setup
from ampacity.progress import Progress
from ampacity.settings import REPLAY
from ampacity.values import ConfigError
from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.prompts.synthetic import PromptMaker
from ampacity.workloads.prompts.tokenizers import WORD_TOKENIZERS, load_tokenizer
from ampacity.workloads.replay import Replayed
from ampacity.workloads.traces.times import check_replay_length

SEE_CLOSED_S = (
    0.05  # behind the last answer, in which a server that keeps no connection has closed it
)
SILENCE_S = 3.0  # of the endpoint, before the user is told what is waited for
Drive = Callable[[Rig], Awaitable[Any]]
T = TypeVar("T")

_going: list[Generator] = []  # what a signal ends: one, or both arms of an A/B


async def conduct(
    settings: Settings,
    *,
    experiment: str,
    drive: Drive,
    command_line: list[str],
    progress: Progress,
) -> Path:
    """Set up, drive, close. Gives the run directory back. Raises a ValueError of one line before the load begins."""
    out = out_path(settings, experiment)
    check_new(out)
    settings = await followed(settings, progress)
    routes = tuple(route_to(target) for target in (settings.endpoint, *settings.replicas))
    raise_open_files_limit()
    if settings.cpus:
        os.sched_setaffinity(0, settings.cpus)  # of the worker processes, too
    check_open_files(settings)
    trace = read_replay(settings.trace, settings) if settings.trace else None
    for note in source_notes(settings, trace):
        progress.note(note)
    tokenizer = load_tokenizer(settings.tokenizer)
    run_id, salt = secrets.token_hex(6), settings.salt or secrets.token_hex(8)
    async with contextlib.AsyncExitStack() as closing:
        pages = await closing.enter_async_context(Pages())
        clients = [client_to(settings, route) for route in routes]
        for client in clients:
            closing.push_async_callback(client.close)

        probe = await probed(settings, pages, clients[0], routes[0], salt, trace, progress)
        sessions = settings.workload.sessions
        if sessions is not None and sessions.message_tokens is None and trace is None:
            prompts = probe.calibration.prompts(tokenizer, salt)
            say = RequestMaker(
                settings.endpoint, prompts, f"{run_id}-probe", routes[0].proxy
            ).saying
            extra = await count_message_overhead(clients[0], probe.shape, say)
            sessions = replace(sessions, message_tokens=extra)
            settings = replace(settings, workload=replace(settings.workload, sessions=sessions))
        reuse = settings.connections
        if probe.keeps_alive is False:  # each request would race against the close
            reuse = "new"
            for client in clients:
                client.reuse = False
        notes = [*probe.notes, *filter(None, [check_context(settings, probe, trace)])]
        for note in notes:
            progress.note(note)
        if not routes[0].addresses or not is_loopback(routes[0].addresses):
            progress.note(announcement(settings, trace))
        for replica in settings.replicas:
            await look(pages, replica)  # raises where there is nothing
        setup = Setup(
            routes=routes,
            shape=probe.shape,
            tokenizer=settings.tokenizer,
            salt=salt,
            calibration=probe.calibration,
            run_id=run_id,
            limits=settings.limits,
            stamps=settings.timestamps,
            reuse=reuse,
            recorded=trace.recorded if trace else None,
            prompt_file=settings.workload.prompts.file.path if settings.workload.prompts else None,
            classes=settings.workload.classes,
            images=settings.workload.images,
            planned_histories=not answers_told(settings.workload),
            counts_tokens=probe.record.chunk_tokens is None,
            thinks_until=probe.thinks.closing if probe.thinks and not probe.thinks.opened else None,
            answers_in=None if settings.keep_answers_bytes is None else out,
            answers_bytes=settings.keep_answers_bytes or 0,
        )
        meta = run_meta(settings, probe, run_id, salt, experiment, command_line, trace)
        meta["notes"] += notes[len(probe.notes) :]
        with RunWriter(out, meta) as writer:
            generator = Generator(setup, clients, writer, writer.worker_stream)
            telemetry = await _telemetry(settings, pages, progress)
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
    return out


def read_replay(path: Path, settings: Settings) -> Replayed:
    """The trace, or the schedule, as it is to be played. Raises WorkloadError, ConfigError."""
    from ampacity.workloads.replay import replayed
    from ampacity.workloads.schedule_file import is_schedule, read_schedule
    from ampacity.workloads.trace_cuts import Replay
    from ampacity.workloads.traces.read import read_trace

    levels, timed = (
        settings.rates or settings.concurrency or (),
        replace(settings.replay, time_scale=1.0),
    )
    if is_schedule(path):
        if timed != Replay():
            played = ("trace", "time_scale", "column", "time_unit")
            names = [f"--{n.replace('_', '-')}" for n in REPLAY if n not in played]
            raise WorkloadError(f"{path}: a schedule is played as it is: drop {', '.join(names)}")
        found = read_schedule(path, time_scale=settings.replay.time_scale)
    else:
        named = settings.tokenizer not in WORD_TOKENIZERS
        trace = read_trace(
            path,
            columns=settings.columns,
            time_unit=settings.time_unit,
            skip_bad_rows=settings.skip_bad_rows,
            timed=False,
            keep_texts=True,
            count=load_tokenizer(settings.tokenizer).count if named else None,
        )
        found = replayed(
            trace, settings.replay, settings.seed, next(iter(settings.rates or ()), None)
        )
    if found.says_arrivals and levels:
        raise ConfigError(
            "--trace brings its own arrival times: drop --rates or --concurrency, or use --time-scale"
        )
    if not found.says_arrivals and len(levels) != 1:
        raise ConfigError(
            f"{found.source}: the file does not say when its requests, or its sessions, arrived: give --rates R (requests/s; "
            "they begin at random) or --concurrency N (so many at once)"
        )
    lasts_s, pauses_s = float(found.schedule.scheduled_s[-1]), found.schedule.think_s
    check_replay_length(
        found.source,
        lasts_s,
        lasts_s * settings.replay.time_scale,
        settings.replay.to_s is not None or settings.replay.max_think_s < math.inf,
        0.0 if pauses_s is None else float(pauses_s.max()),
    )
    return found


async def _telemetry(settings: Settings, pages: Pages, progress: Progress) -> Telemetry:
    """Sampling of the server's own page and of those that were given has begun."""
    metrics: dict[str, dict[str, str]] = {url: {} for url in settings.metrics_urls}
    metrics[f"{settings.endpoint.root}/metrics"] = (
        settings.endpoint.all_headers()
    )  # no other gets the API key
    telemetry = Telemetry(pages, metrics)
    await telemetry.start()
    for url in set(settings.metrics_urls) & set(telemetry.silent):
        progress.note(
            f"--metrics-url {url.partition('?')[0]}: no metric there that is known; it is left alone"
        )
    return telemetry


async def probed(
    settings: Settings,
    pages: Pages,
    client: Client,
    route: Route,
    salt: str,
    trace: Replayed | None,
    progress: Progress,
) -> ProbeResult:
    """What the endpoint says of itself; who waits for a first answer is told so."""
    client.patience_s = settings.limits.total_s or client.patience_s
    waiting = asyncio.get_running_loop().call_later(
        SILENCE_S, progress.note, f"waiting for a first answer, {client.patience_s:g} s at most"
    )
    return await _probe(settings, pages, client, route, salt, trace, waiting)


def check_open_files(settings: Settings) -> None:
    """Refuse a load that is known to need more connections than the system allows. Raises ConfigError."""
    wanted, room = max(settings.concurrency or (0,)), room_for_connections()
    if room is not None and wanted > room * (settings.workers or 1):
        raise ConfigError(
            f"--concurrency {wanted} needs {wanted + OWN_FILES} open files and the limit is {room + OWN_FILES} in each "
            f"process: raise it (ulimit -n {wanted + OWN_FILES}), or spread the load with --workers"
        )


async def followed(settings: Settings, progress: Progress) -> Settings:
    """The settings with the URL that the endpoint redirects to, and a note of it. Raises EndpointError."""
    endpoint = settings.endpoint
    route_to(endpoint)  # raises where there is no way to it
    async with Pages() as pages:
        final = await final_endpoint(pages, endpoint)
    if final != endpoint:
        progress.note(f"{endpoint.url} redirects: the load goes to {final.url}")
    return replace(settings, endpoint=final)


def route_to(endpoint: Endpoint) -> Route:
    """The endpoint's addresses, and the proxy on the way; behind a proxy the name need not resolve here."""
    try:
        addresses = endpoint.addresses()
    except EndpointError:
        proxy = proxy_for(endpoint, [])
        if proxy is None:
            raise
        return Route(endpoint, [], proxy)
    return Route(endpoint, addresses, proxy_for(endpoint, addresses))


def client_to(settings: Settings, route: Route) -> Client:
    return Client(
        route.endpoint,
        route.addresses,
        route.endpoint.ssl_context(),
        stamps=settings.timestamps,
        reuse=settings.connections,
        proxy=route.proxy,
    )


async def _probe(
    settings: Settings,
    pages: Pages,
    client: Client,
    route: Route,
    salt: str,
    trace: Replayed | None,
    waiting: asyncio.TimerHandle,
) -> ProbeResult:
    """Everything that is asked of the endpoint before the load begins. Raises EndpointError."""
    endpoint, tokenizer = settings.endpoint, load_tokenizer(settings.tokenizer)
    served = await look(pages, endpoint, settings.model)
    shape = RequestShape(
        settings.api, choose_model(served, settings.model, endpoint), extra=settings.extra_body
    )
    # the same prompts in every run, so that they are counted the same
    probing = RequestMaker(endpoint, PromptMaker(tokenizer, "probe"), f"{salt}-probe", route.proxy)
    shape, short, notes = await find_dialect(client, endpoint, shape, served, probing.numbered)
    waiting.cancel()
    counting = Counting(
        pages,
        client,
        endpoint,
        shape,
        served.max_model_len,
        tokenizer,
        settings.tokenizer,
        probing.saying,
    )
    calibration, record, said = await calibrate(counting, short)
    notes += said
    prompts = calibration.prompts(tokenizer, f"{salt}-typical")
    maker = RequestMaker(endpoint, prompts, f"{salt}-probe-typical", route.proxy)
    input_tokens, output_tokens = typical_lengths(settings, trace)
    if served.max_model_len is not None:
        room = (
            served.max_model_len
            - output_tokens
            - math.ceil(calibration.margin_tokens(input_tokens))
        )
        input_tokens = max(min(input_tokens, room), 1)
    vocabulary = None if settings.tokenizer in WORD_TOKENIZERS else settings.tokenizer
    found: tuple[Finding, ...] = ()
    thinks: InlineThinking | None = None

    def heard(exchange: Asked) -> None:
        nonlocal found, thinks, served
        if gateway := gateway_of(
            exchange.headers, served.engine
        ):  # LiteLLM shows itself in answers alone
            served = replace(served, gateway=redact(printable(gateway), endpoint.secrets))
        answer, thinks = exchange.record, exchange.thought or thinks
        if answer.status == "ok":
            answer.input_tokens_planned, answer.output_tokens_planned = input_tokens, output_tokens
            found = diagnose(answer, shape, vocabulary, thinks)

    typical = await ask(
        client, shape.api, maker.numbered(shape, input_tokens, output_tokens), heard
    )
    if spoilt(found):  # by chance? A second answer tells
        await ask(client, shape.api, maker.numbered(shape, input_tokens, output_tokens), heard)
    notes += warnings(found)
    if client.asked_failed:
        kinds = "; ".join(dict.fromkeys(client.asked_failed))
        notes.append(
            f"{len(client.asked_failed)} of {client.asked} requests before the run failed: {kinds}"
        )
    await asyncio.sleep(SEE_CLOSED_S)
    if client.keeps_alive is False:
        notes.append(
            "the server closes its connection after each answer: each request gets one of its own, and TTFT from "
            "schedule has the time that takes"
        )
    record = typical if typical.status == "ok" else record
    network = await measure_round_trip(
        pages, endpoint, route.addresses, route.proxy, kept_alive=client.keeps_alive is not False
    )
    return ProbeResult(
        served, shape, calibration, record, tuple(notes), found, thinks, client.keeps_alive, network
    )


def typical_lengths(settings: Settings, trace: Replayed | None) -> tuple[int, int]:
    """(input, output) tokens of a middling request, for the one that is timed before the run."""
    if trace is not None:
        return int(np.median(trace.schedule.input_tokens)), int(
            np.median(trace.schedule.output_tokens)
        )
    return round(settings.workload.input_tokens.quantile(0.5)), round(
        settings.workload.output_tokens.quantile(0.5)
    )


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

    handled = (
        [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")] if sys.platform != "win32" else []
    )
    for number, name in handled:
        loop.add_signal_handler(number, on_signal, name)
    try:
        yield
    finally:
        _going.remove(generator)
        for number, _ in handled if not _going else []:
            loop.remove_signal_handler(number)


def run_event_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run on uvloop where there is one: it halves the cost of a token event."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if sys.platform != "win32":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)
