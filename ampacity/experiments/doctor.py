"""What an endpoint shows of itself before a benchmark: the probe of every run, and a few requests more."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass

from ampacity.config import Settings
from ampacity.experiments import conduct
from ampacity.progress import Progress
from loadgen import hot_path
from loadgen.endpoint import EndpointError
from loadgen.exchange import Exchange
from loadgen.host import raise_open_files_limit, room_for_connections
from loadgen.pages import Pages
from loadgen.probe import Probe, ask
from loadgen.proxy import Proxy
from loadgen.records import RequestRecord
from loadgen.requests import RequestMaker
from loadgen.telemetry import Telemetry
from loadgen.thinking import Thought
from workloads.tokenizers import load_tokenizer

REQUESTS_MAX = 27  # 21 of the probe (6 dialects, 14 lengths, an answer looked at again); ours 3, each sent again where it fails
SHORT_TOKENS = 4  # of the answers to the prompt that is sent twice
ANSWER_TOKENS = (32, 256)  # the other answer has the workload's median, within these


@dataclass(frozen=True)
class Seen:
    """What came of it. Lengths are in tokens, as planned."""

    settings: Settings
    probe: Probe
    answer: RequestRecord  # a prompt and an answer of the planned lengths, not seen before
    short: RequestRecord  # another prompt of that length, SHORT_TOKENS asked for
    again: RequestRecord  # the same as ``short``
    failures: tuple[str, ...]  # of requests that were sent again
    kept_alive: bool
    closed_unannounced: bool  # where it is not kept alive: nothing had said so
    proxy: Proxy | None
    receive_delays_s: tuple[float, ...]  # read − kernel time; empty where the kernel cannot tell
    gauges: tuple[str, ...]  # known columns of /metrics
    room: int | None  # for connections in one process; None: no limit
    thinks: Thought | None = None  # in the text of an answer
    compiled: bool = hot_path.COMPILED


async def examine(settings: Settings, progress: Progress) -> Seen:
    """Probe the endpoint and ask it REQUESTS_MAX times at most. Raises EndpointError where it cannot be benchmarked."""
    settings = await conduct.followed(settings, progress)
    route = conduct.route_to(settings.endpoint)
    raise_open_files_limit()
    conduct.check_open_files(settings)
    tokenizer, salt = load_tokenizer(settings.tokenizer), secrets.token_hex(8)
    client = conduct.client_to(settings, route)
    try:
        async with Pages() as pages:
            probe = await conduct.probed(settings, pages, client, route, salt, None, progress)
            metrics: dict[str, dict[str, str]] = {url: {} for url in settings.metrics_urls}
            metrics[f"{settings.endpoint.root}/metrics"] = settings.endpoint.all_headers()
            gauges = await Telemetry(pages, metrics).sample()
        prompts = probe.calibration.prompts(tokenizer, salt)
        maker = RequestMaker(settings.endpoint, prompts, salt, route.proxy)
        input_tokens, output_tokens = _lengths(settings, probe)
        failures: list[str] = []
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
                failures.append(f"{record.status}: {record.error}")
            else:
                raise EndpointError(
                    f"{settings.endpoint.url}: a request of {input_tokens} input and {tokens} output tokens failed "
                    f"twice as {failures[-1]}"
                )
            record.input_tokens_planned, record.output_tokens_planned = input_tokens, tokens
            return record

        short = await asked(1, SHORT_TOKENS)
        again = await asked(1, SHORT_TOKENS)
        answer = await asked(2, output_tokens)
        return Seen(
            settings, probe, answer, short, again, tuple(failures), probe.keeps_alive is not False, client.closed_unsaid > client.closed_said, route.proxy,
            tuple(client.receive_delays_s), tuple(gauges), room_for_connections(), thinks,
        )  # fmt: skip
    finally:
        await client.close()


def _lengths(settings: Settings, probe: Probe) -> tuple[int, int]:
    """(input, output) tokens of the middling request, such that it fits into the model's context."""
    input_tokens, output_tokens = conduct.typical_lengths(settings, None)
    low, high = ANSWER_TOKENS
    output_tokens = min(max(output_tokens, low), high)
    context = probe.served.max_model_len
    if context is not None:
        room = context - output_tokens - math.ceil(probe.calibration.margin_tokens(input_tokens))
        input_tokens = max(min(input_tokens, room), 1)
    return input_tokens, output_tokens
