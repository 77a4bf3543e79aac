"""Before the load: resolve and probe the endpoint, and check this machine's limits."""

import asyncio
import math
import os
import socket
from dataclasses import dataclass, replace

import numpy as np

from ampacity.loadgen.host import (
    OWN_FILES,
    address_space,
    raise_open_files_limit,
    room_for_connections,
)
from ampacity.loadgen.net.http import Client
from ampacity.loadgen.net.kernel_stamps import AVAILABLE
from ampacity.loadgen.net.pages import Pages
from ampacity.loadgen.net.proxy import proxy_for
from ampacity.loadgen.net.redirects import final_endpoint
from ampacity.loadgen.probe.ask import Asked, ask
from ampacity.loadgen.probe.diagnosis import Finding, diagnose, spoilt, warnings
from ampacity.loadgen.probe.dialect import find_dialect
from ampacity.loadgen.probe.gateways import gateway_of
from ampacity.loadgen.probe.look import choose_model, look
from ampacity.loadgen.probe.network import measure_round_trip
from ampacity.loadgen.probe.prompt_calibration import Counting, calibrate
from ampacity.loadgen.probe.results import Calibration, ProbeResult, Served
from ampacity.loadgen.receive.thinking import InlineThinking
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.send.endpoint import Endpoint, EndpointError
from ampacity.loadgen.send.protocols import RequestShape, printable
from ampacity.loadgen.send.requests import RequestMaker
from ampacity.loadgen.send.secrets import redact
from ampacity.loadgen.workers.setup import Route
from ampacity.progress import Progress
from ampacity.settings import Settings
from ampacity.values import ConfigError
from ampacity.workloads.prompts.synthetic import PromptMaker
from ampacity.workloads.prompts.tokenizers import WORD_TOKENIZERS, load_tokenizer
from ampacity.workloads.replay import Replayed

SEE_CLOSED_S = 0.05  # after the last answer: a server without keep-alive has closed by then
ADDRESS_MIN_BYTES = 2 << 30  # below it a library may wait for ever for a thread or a mapping
SILENCE_S = 3.0  # of the endpoint, before the user is told what is waited for


async def follow_redirects(settings: Settings, progress: Progress) -> Settings:
    """Return the settings with the URL that the endpoint redirects to. Raises EndpointError."""
    endpoint = settings.endpoint
    route_to(endpoint)  # raises if it cannot be reached
    async with Pages(endpoint.tls) as pages:
        final = await final_endpoint(pages, endpoint)
    if final != endpoint:
        progress.note(f"{endpoint.url} redirects: the load goes to {final.url}")
    return replace(settings, endpoint=final)


def route_to(endpoint: Endpoint) -> Route:
    """Return the endpoint's addresses and proxy; with a proxy the name need not resolve here."""
    try:
        addresses = endpoint.addresses()
    except EndpointError:
        proxy = proxy_for(endpoint, [])
        if proxy is None:
            raise
        addresses = []
    else:
        proxy = proxy_for(endpoint, addresses)
    for source in endpoint.sources:
        _check_source(source, [] if proxy else addresses, endpoint)
    return Route(endpoint, addresses, proxy)


def _check_source(source: str, addresses: list[str], endpoint: Endpoint) -> None:
    """Raise ConfigError unless connections to one of ``addresses`` can come from ``source``."""
    if not AVAILABLE:
        raise ConfigError("--source-address: needs 64-bit Linux: drop it")
    family = socket.AF_INET6 if ":" in source else socket.AF_INET
    why = None
    with socket.socket(family, socket.SOCK_DGRAM) as found:
        try:
            found.bind((source, 0))
        except OSError:
            raise ConfigError(
                f"--source-address {source}: no address of this machine: add it "
                f"(ip address add {source} dev DEVICE), or leave it out"
            ) from None
        for address in addresses:
            try:
                found.connect((address, endpoint.port))  # sends nothing
                return
            except OSError as error:  # socket.gaierror: of the other family
                why = why or error.strerror
    if why:
        raise ConfigError(
            f"--source-address {source}: nothing goes from there to {endpoint.host}: {why}"
        )


def prepare_machine(settings: Settings) -> None:
    """Raise the limit of open files, pin the cores, refuse a load that the machine cannot hold.

    Worker processes inherit the cores. Raises ConfigError.
    """
    raise_open_files_limit()
    if (room := address_space()) is not None and room < ADDRESS_MIN_BYTES:
        raise ConfigError(
            f"memory is limited to {room >> 20} MiB (ulimit -v), and a run with its report needs "
            f"{ADDRESS_MIN_BYTES >> 20}: raise the limit (ulimit -v {ADDRESS_MIN_BYTES >> 10})"
        )
    if settings.cpus:
        os.sched_setaffinity(0, settings.cpus)
    wanted, room = max(settings.concurrency or (0,)), room_for_connections()
    if room is not None and wanted > room * (settings.workers or 1):
        raise ConfigError(
            f"--concurrency {wanted} needs {wanted + OWN_FILES} open files and the limit is "
            f"{room + OWN_FILES} in each process: raise it (ulimit -n {wanted + OWN_FILES}), "
            "or spread the load with --workers"
        )


def typical_lengths(settings: Settings, trace: Replayed | None) -> tuple[int, int]:
    """Return the median (input, output) tokens of the workload or the trace."""
    if trace is not None:
        schedule = trace.schedule
        return int(np.median(schedule.input_tokens)), int(np.median(schedule.output_tokens))
    workload = settings.workload
    return round(workload.input_tokens.quantile(0.5)), round(workload.output_tokens.quantile(0.5))


def fitted_input(input_tokens: int, output_tokens: int, served: Served, how: Calibration) -> int:
    """Return ``input_tokens``, shortened if needed to fit the context together with the answer."""
    if served.max_model_len is None:
        return input_tokens
    margin = math.ceil(how.margin_tokens(input_tokens))
    room: int = served.max_model_len - output_tokens - margin
    return max(min(input_tokens, room), 1)


@dataclass
class Probe:
    """Requests to an endpoint before the load; ``run`` sends them all."""

    settings: Settings
    pages: Pages
    client: Client
    route: Route
    salt: str
    trace: Replayed | None
    progress: Progress

    async def run(self) -> ProbeResult:
        """Probe the endpoint. Raises EndpointError if it cannot be benchmarked."""
        settings, client, endpoint = self.settings, self.client, self.settings.endpoint
        client.patience_s = settings.limits.total_s or client.patience_s
        waiting = asyncio.get_running_loop().call_later(
            SILENCE_S,
            self.progress.note,
            f"waiting for a first answer, {client.patience_s:g} s at most",
        )
        tokenizer = load_tokenizer(settings.tokenizer)
        served = await look(self.pages, endpoint, settings.model)
        model = choose_model(served, settings.model, endpoint)
        shape = RequestShape(settings.api, model, extra=settings.extra_body)
        # the same prompts in every run, so that every run counts them the same
        same = PromptMaker(tokenizer, "probe")
        maker = RequestMaker(endpoint, same, f"{self.salt}-probe", self.route.proxy)
        shape, short, notes = await find_dialect(client, endpoint, shape, served, maker.numbered)
        waiting.cancel()
        counting = Counting(
            self.pages,
            client,
            endpoint,
            shape,
            served.max_model_len,
            tokenizer,
            settings.tokenizer,
            maker.saying,
        )
        calibration, record, more = await calibrate(counting, short)
        typical = _TypicalAnswer(self, served, shape, calibration)
        record = await typical.measure(record)
        notes += [*more, *warnings(typical.findings), *await self._connection_notes()]
        if record.answered_by not in (None, model):
            notes.append(
                f"{model} was asked for, and the answer is from {record.answered_by}, by its own account"
            )
        kept_alive = client.keeps_alive is not False
        network = await measure_round_trip(
            self.pages, endpoint, self.route.addresses, self.route.proxy, kept_alive=kept_alive
        )
        return ProbeResult(
            typical.served,
            shape,
            calibration,
            record,
            tuple(notes),
            typical.findings,
            typical.thinks,
            client.keeps_alive,
            network,
        )

    async def _connection_notes(self) -> list[str]:
        client, notes = self.client, []
        if client.asked_failed:
            kinds = "; ".join(dict.fromkeys(client.asked_failed))
            notes.append(
                f"{len(client.asked_failed)} of {len(client.asked)} requests before the run failed: "
                f"{kinds}"
            )
        await asyncio.sleep(SEE_CLOSED_S)
        if client.keeps_alive is False:
            notes.append(
                "the server closes its connection after each answer: each request opens its own, "
                "and TTFT from schedule includes that time"
            )
        return notes


class _TypicalAnswer:
    """Measure and diagnose an answer of the typical lengths."""

    def __init__(
        self, probe: Probe, served: Served, shape: RequestShape, calibration: Calibration
    ) -> None:
        settings, endpoint = probe.settings, probe.settings.endpoint
        prompts = calibration.prompts(load_tokenizer(settings.tokenizer), f"{probe.salt}-typical")
        self._maker = RequestMaker(
            endpoint, prompts, f"{probe.salt}-probe-typical", probe.route.proxy
        )
        self._client, self._endpoint, self._shape = probe.client, endpoint, shape
        input_tokens, output_tokens = typical_lengths(settings, probe.trace)
        input_tokens = fitted_input(input_tokens, output_tokens, served, calibration)
        self._lengths = input_tokens, output_tokens
        self._vocabulary = None if settings.tokenizer in WORD_TOKENIZERS else settings.tokenizer
        self.served = served
        self.findings: tuple[Finding, ...] = ()
        self.thinks: InlineThinking | None = None

    async def measure(self, otherwise: RequestRecord) -> RequestRecord:
        """Return the record of the answer, or ``otherwise`` if it failed."""
        typical = await self._ask()
        if spoilt(self.findings):  # a second answer shows whether it was chance
            await self._ask()
        return typical if typical.status == "ok" else otherwise

    async def _ask(self) -> RequestRecord:
        request = self._maker.numbered(self._shape, *self._lengths)
        return await ask(self._client, self._shape.api, request, self._heard)

    def _heard(self, exchange: Asked) -> None:
        # LiteLLM identifies itself only in answers
        if gateway := gateway_of(exchange.headers, self.served.engine):
            shown = redact(printable(gateway), self._endpoint.secrets)
            self.served = replace(self.served, gateway=shown)
        answer, self.thinks = exchange.record, exchange.thought or self.thinks
        if answer.status == "ok":
            answer.input_tokens_planned, answer.output_tokens_planned = self._lengths
            self.findings = diagnose(answer, self._shape, self._vocabulary, self.thinks)
