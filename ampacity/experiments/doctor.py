"""What an endpoint shows of itself before a benchmark: the probe of every run, and a few requests more."""

from __future__ import annotations

import math
import os
import secrets
import time
from dataclasses import dataclass

from ampacity.config import Settings
from ampacity.experiments.stages import conduct
from ampacity.loadgen.host import busiest, cpu_seconds, raise_open_files_limit, room_for_connections
from ampacity.loadgen.net.pages import Pages
from ampacity.loadgen.probe.diagnosis import answer_facts, seconds_between, stream_verdict
from ampacity.loadgen.probe.look import ProbeResult, ask
from ampacity.loadgen.receive import hot_path
from ampacity.loadgen.receive.exchange import Exchange
from ampacity.loadgen.receive.thinking import InlineThinking
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.send.endpoint import EndpointError, Proxy
from ampacity.loadgen.send.protocols import printable
from ampacity.loadgen.send.requests import RequestMaker
from ampacity.loadgen.telemetry import Telemetry
from ampacity.progress import Progress
from ampacity.workloads.prompts.tokenizers import load_tokenizer

REQUESTS_MAX = 31  # 21 of the probe (6 dialects, 15 lengths); ours 3 and REPEATS, each sent again where it fails
REPEATS = 2  # of the long answer, where its stream was not seen as it should be
BUSY = 0.75  # of this machine's cores, that other processes took
SHORT_TOKENS = 4  # of the answers to the prompt that is sent twice
ANSWER_TOKENS = (32, 256)  # the other answer has the workload's median, within these


@dataclass(frozen=True)
class DoctorResult:
    """What came of it. Lengths are in tokens, as planned."""

    settings: Settings
    probe: ProbeResult
    answer: RequestRecord  # a prompt and an answer of the planned lengths, not seen before
    short: RequestRecord  # another prompt of that length, SHORT_TOKENS asked for
    again: RequestRecord  # the same as ``short``
    failures: tuple[
        str, ...
    ]  # of requests, the probe's among them; not what was refused for a field
    asked: int  # requests in all
    kept_alive: bool
    closed_unannounced: bool  # where it is not kept alive: nothing had said so
    proxy: Proxy | None
    receive_delays_s: tuple[float, ...]  # read − kernel time; empty where the kernel cannot tell
    gauges: tuple[str, ...]  # known columns of /metrics
    room: int | None  # for connections in one process; None: no limit
    thinks: InlineThinking | None = None  # in the text of an answer
    answers: int = 1  # that ``answer`` is the last of ...
    alike: int = (
        1  # ... and how many of them had a stream that was as it should be, or was not, as its is
    )
    busy_with: tuple[
        str, ...
    ] = ()  # what else ran on this machine, where that took nearly all of it
    compiled: bool = hot_path.COMPILED


async def examine(settings: Settings, progress: Progress) -> DoctorResult:
    """Probe the endpoint and ask it REQUESTS_MAX times at most. Raises EndpointError where it cannot be benchmarked."""
    settings = await conduct.followed(settings, progress)
    route = conduct.route_to(settings.endpoint)
    raise_open_files_limit()
    conduct.check_open_files(settings)
    tokenizer, salt = load_tokenizer(settings.tokenizer), secrets.token_hex(8)
    client = conduct.client_to(settings, route)
    others, began_s = cpu_seconds(), time.monotonic()
    try:
        async with Pages() as pages:
            probe = await conduct.probed(settings, pages, client, route, salt, None, progress)
            metrics: dict[str, dict[str, str]] = {url: {} for url in settings.metrics_urls}
            metrics[f"{settings.endpoint.root}/metrics"] = settings.endpoint.all_headers()
            gauges = await Telemetry(pages, metrics).sample()
        prompts = probe.calibration.prompts(tokenizer, salt)
        maker = RequestMaker(settings.endpoint, prompts, salt, route.proxy)
        input_tokens, output_tokens = _lengths(settings, probe)
        thinks = probe.thinks

        def heard(exchange: Exchange) -> None:
            nonlocal thinks
            thinks = exchange.thought or thinks

        async def asked(number: int, tokens: int) -> RequestRecord:
            for _ in range(2):
                request = maker.make(probe.shape, number, input_tokens, tokens)
                record = await ask(client, settings.api, request, heard)
                if record.status == "ok":
                    break
            else:
                raise EndpointError(
                    f"{settings.endpoint.url}: a request of {input_tokens} input and {tokens} output tokens failed "
                    f"twice as {record.status}: {record.error}"
                )
            record.input_tokens_planned, record.output_tokens_planned = input_tokens, tokens
            return record

        short = await asked(1, SHORT_TOKENS)
        again = await asked(1, SHORT_TOKENS)
        first_s = max(_ttft_s(short), _ttft_s(again))

        def as_it_should_be(record: RequestRecord) -> bool:
            facts = answer_facts(record, probe.shape, None, None)
            return stream_verdict(facts | {"ttft_grew_s": _ttft_s(record) - first_s}) == "ok"

        answers = [await asked(2, output_tokens)]
        while (
            not as_it_should_be(answers[-1]) and len(answers) <= REPEATS
        ):  # chance does not do it again
            answers.append(await asked(2 + len(answers), output_tokens))
        answer = answers[-1]
        alike = sum(as_it_should_be(record) is as_it_should_be(answer) for record in answers)
        return DoctorResult(
            settings,
            probe,
            answer,
            short,
            again,
            tuple(client.asked_failed),
            client.asked,
            probe.keeps_alive is not False,
            client.closed_unsaid > client.closed_said,
            route.proxy,
            tuple(client.receive_delays_s),
            tuple(gauges),
            room_for_connections(),
            thinks,
            len(answers),
            alike,
            _busy_with(others, time.monotonic() - began_s),
        )
    finally:
        await client.close()


def _ttft_s(record: RequestRecord) -> float:
    return seconds_between(record, "started_ns", "first_token_ns") or 0.0


def _busy_with(before: dict[tuple[int, str], float], elapsed_s: float) -> tuple[str, ...]:
    """The busiest processes beside this one, as "make 1.9 cores", where all together took most of this machine."""
    after = cpu_seconds()
    cores = sum(total - before.get(key, 0.0) for key, total in after.items()) / max(elapsed_s, 1e-9)
    if cores < BUSY * (os.cpu_count() or 1):
        return ()
    most = busiest(before, after, elapsed_s)
    return tuple(f"{printable(process['name'])} {process['cores']:g} cores" for process in most)


def _lengths(settings: Settings, probe: ProbeResult) -> tuple[int, int]:
    """(input, output) tokens of the middling request, such that it fits into the model's context."""
    input_tokens, output_tokens = conduct.typical_lengths(settings, None)
    low, high = ANSWER_TOKENS
    output_tokens = min(max(output_tokens, low), high)
    context = probe.served.max_model_len
    if context is not None:
        room = context - output_tokens - math.ceil(probe.calibration.margin_tokens(input_tokens))
        input_tokens = max(min(input_tokens, room), 1)
    return input_tokens, output_tokens
