"""Examine an endpoint before a benchmark: the probe of every run, and a few requests more."""

import os
import secrets
import time
from dataclasses import dataclass, field

from ampacity.experiments.stages import preflight
from ampacity.experiments.stages.conduct import metrics_pages
from ampacity.loadgen.host import (
    busiest,
    cores_used,
    cpu_seconds,
    kernel_setting,
    room_for_connections,
)
from ampacity.loadgen.net.http import Client
from ampacity.loadgen.net.pages import Pages
from ampacity.loadgen.probe import kernel_room
from ampacity.loadgen.probe.ask import Asked, ask
from ampacity.loadgen.probe.diagnosis import answer_facts, seconds_between, stream_verdict
from ampacity.loadgen.probe.results import ProbeResult
from ampacity.loadgen.receive import hot_path
from ampacity.loadgen.receive.thinking import InlineThinking
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.send.endpoint import EndpointError, Proxy, is_loopback
from ampacity.loadgen.send.protocols import printable
from ampacity.loadgen.send.requests import RequestMaker
from ampacity.loadgen.telemetry import Telemetry
from ampacity.progress import Progress
from ampacity.settings import Settings
from ampacity.workloads.prompts.tokenizers import load_tokenizer

# 21 of the probe (6 dialects, 15 lengths), 3 of our own and REPEATS, each resent once if it fails
REQUESTS_MAX = 31
REPEATS = 2  # of the long answer, if its stream did not look as it should
BUSY = 0.75  # share of this machine's cores used by other processes
SHORT_TOKENS = 4  # of the answers to the prompt that is sent twice
ANSWER_TOKENS = (32, 256)  # bounds on the long answer, which else has the workload's median


@dataclass(frozen=True)
class DoctorResult:
    """Everything that the requests showed. Lengths are in tokens, as planned."""

    settings: Settings
    probe: ProbeResult
    answer: RequestRecord  # a new prompt and an answer of the typical lengths
    short: RequestRecord  # another new prompt of that length, with SHORT_TOKENS of answer
    again: RequestRecord  # the same as ``short``
    failures: tuple[str, ...]  # of all requests, but not those refused for a field
    asked: int  # requests in all
    bodies: int  # good answers that came as one JSON body
    good: int  # good answers in all
    kept_alive: bool
    closed_unannounced: bool  # the server closes connections without announcing it
    proxy: Proxy | None
    receive_delays_s: tuple[float, ...]  # read minus kernel time; empty without kernel stamps
    gauges: tuple[str, ...]  # known columns of /metrics
    room: int | None  # for connections in one process; None: no limit
    thinks: InlineThinking | None = None  # in the text of an answer
    answers: int = 1  # how often the long answer was requested; ``answer`` is the last
    alike: int = 1  # how many of them had the same stream verdict as ``answer``
    busy_with: tuple[str, ...] = ()  # other processes, if they used most of this machine
    compiled: bool = hot_path.COMPILED
    here: bool = False  # the endpoint is on this machine
    kernel: dict[str, list[int]] = field(default_factory=dict)  # its settings, by their names


async def examine(settings: Settings, progress: Progress) -> DoctorResult:
    """Send at most REQUESTS_MAX requests. Raises EndpointError if no benchmark is possible."""
    settings = await preflight.follow_redirects(settings, progress)
    route = preflight.route_to(settings.endpoint)
    preflight.prepare_machine(settings)
    salt, client = secrets.token_hex(8), route.client(settings.timestamps, settings.connections)
    others, began_s = cpu_seconds(), time.monotonic()
    try:
        async with Pages(settings.endpoint.tls) as pages:
            probe = await preflight.Probe(
                settings, pages, client, route, salt, None, progress
            ).run()
            gauges = await Telemetry(pages, metrics_pages(settings)).sample()
        prompts = probe.calibration.prompts(load_tokenizer(settings.tokenizer), salt)
        maker = RequestMaker(settings.endpoint, prompts, salt, route.proxy)
        answers = _Answers(settings, probe, client, maker)
        short, again = await answers.ask(1, SHORT_TOKENS), await answers.ask(1, SHORT_TOKENS)
        answer, count, alike = await answers.long_answer(max(_ttft_s(short), _ttft_s(again)))
        return DoctorResult(
            settings,
            probe,
            answer,
            short,
            again,
            failures=tuple(client.asked_failed),
            asked=len(client.asked),
            bodies=client.asked_bodies,
            good=sum(record.status == "ok" for record in client.asked),
            kept_alive=probe.keeps_alive is not False,
            closed_unannounced=client.closed_unsaid > client.closed_said,
            proxy=route.proxy,
            receive_delays_s=tuple(client.receive_delays_s),
            gauges=tuple(gauges),
            room=room_for_connections(),
            thinks=answers.thinks,
            answers=count,
            alike=alike,
            busy_with=_busy_with(others, time.monotonic() - began_s),
            here=bool(route.addresses) and is_loopback(route.addresses),
            kernel={name: kernel_setting(name) for name in kernel_room.READ},
        )
    finally:
        await client.close()


class _Answers:
    """Request answers of the workload's typical lengths."""

    def __init__(
        self, settings: Settings, probe: ProbeResult, client: Client, maker: RequestMaker
    ) -> None:
        self._settings, self._probe, self._client, self._maker = settings, probe, client, maker
        input_tokens, output_tokens = preflight.typical_lengths(settings, None)
        self._output = min(max(output_tokens, ANSWER_TOKENS[0]), ANSWER_TOKENS[1])
        self._input = preflight.fitted_input(
            input_tokens, self._output, probe.served, probe.calibration
        )
        self.thinks = probe.thinks

    async def ask(self, number: int, tokens: int) -> RequestRecord:
        """Send prompt ``number``, twice if it fails. Raises EndpointError if both fail."""
        for _ in range(2):
            request = self._maker.make(self._probe.shape, number, self._input, tokens)
            record = await ask(self._client, self._settings.api, request, self._heard)
            if record.status == "ok":
                break
        else:
            raise EndpointError(
                f"{self._settings.endpoint.url}: a request of {self._input} input and {tokens} "
                f"output tokens failed twice as {record.status}: {record.error}"
            )
        record.input_tokens_planned, record.output_tokens_planned = self._input, tokens
        return record

    async def long_answer(self, first_s: float) -> tuple[RequestRecord, int, int]:
        """Return (the last answer, how many were requested, how many had its stream verdict).

        ``first_s`` is the TTFT of a short answer. An odd stream is requested again.
        """

        def is_ok(record: RequestRecord) -> bool:
            facts = answer_facts(record, self._probe.shape, None, None)
            return stream_verdict(facts | {"ttft_grew_s": _ttft_s(record) - first_s}) == "ok"

        answers = [await self.ask(2, self._output)]
        while not is_ok(answers[-1]) and len(answers) <= REPEATS:
            answers.append(await self.ask(2 + len(answers), self._output))
        alike = sum(is_ok(record) is is_ok(answers[-1]) for record in answers)
        return answers[-1], len(answers), alike

    def _heard(self, exchange: Asked) -> None:
        self.thinks = exchange.thought or self.thinks


def _ttft_s(record: RequestRecord) -> float:
    return seconds_between(record, "started_ns", "first_token_ns") or 0.0


def _busy_with(before: dict[int, tuple[str, float]], elapsed_s: float) -> tuple[str, ...]:
    """Return the busiest other processes ("make 1.9 cores") if they used most of the machine."""
    used = cores_used(before, cpu_seconds(), elapsed_s)
    if sum(cores for cores, _ in used) < BUSY * (os.cpu_count() or 1):
        return ()
    return tuple(f"{printable(p['name'])} {p['cores']:g} cores" for p in busiest(used))
