"""Time the start of an endpoint: from this command to its first answer."""

import asyncio
import itertools
import secrets
import time
from dataclasses import dataclass

from ampacity.experiments.stages.preflight import route_to
from ampacity.loadgen.net.http import Client
from ampacity.loadgen.net.pages import Pages
from ampacity.loadgen.probe.ask import ask
from ampacity.loadgen.probe.diagnosis import seconds_between
from ampacity.loadgen.probe.look import choose_model, look
from ampacity.loadgen.probe.results import Served
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.send.endpoint import EndpointError
from ampacity.loadgen.send.protocols import RequestShape
from ampacity.loadgen.send.requests import RequestMaker
from ampacity.progress import Progress
from ampacity.settings import Settings
from ampacity.values import ConfigError
from ampacity.workloads.prompts.synthetic import PromptMaker
from ampacity.workloads.prompts.tokenizers import WORDS

EVERY_S = 0.2  # how long to wait before the next attempt
PROMPT_TOKENS, ANSWER_TOKENS = 16, 4


@dataclass(frozen=True)
class ColdStart:
    """Seconds from the start of the command, which is that of the endpoint.

    ``models_s``: its list of models is served; ``first_token_s``: the first answer began;
    ``warm_ttft_s``: TTFT of the answer after that.
    """

    models_s: float
    first_token_s: float
    warm_ttft_s: float | None
    attempts: int


async def measure_cold_start(settings: Settings, most_s: float, progress: Progress) -> ColdStart:
    """Wait for an endpoint that is being started, and time its first answer.

    Raises ConfigError where it answers at once, EndpointError where it does not within ``most_s``,
    also while an attempt waits for its answer.
    """
    endpoint, began_s = settings.endpoint, time.monotonic()
    route = route_to(endpoint)
    client = route.client(settings.timestamps, settings.connections)
    refused: list[str] = []  # why each attempt failed
    try:
        async with asyncio.timeout(most_s):
            served = await _models(settings, refused)
            models_s = time.monotonic() - began_s
            if not refused:
                raise ConfigError(
                    f"{endpoint.url} answers already: stop it, and start it together with this "
                    "command"
                )
            progress.note(f"its models are listed after {models_s:.1f} s")
            shape = RequestShape(settings.api, choose_model(served, settings.model, endpoint))
            salt = secrets.token_hex(8)
            maker = RequestMaker(endpoint, PromptMaker(WORDS, salt), salt, route.proxy)
            first = await _first_answer(client, maker, shape, refused)
        warm = await ask(client, shape.api, maker.make(shape, 0, PROMPT_TOKENS, ANSWER_TOKENS))
        return ColdStart(
            models_s,
            (first.first_token_ns or 0) / 1e9 - began_s,
            seconds_between(warm, "started_ns", "first_token_ns"),
            len(refused) + 2,  # and the list of models, and the answer
        )
    except TimeoutError:
        why = refused[-1] if refused else "it accepts connections and does not answer"
        raise EndpointError(
            f"no first answer in the {most_s:g} s that --wait-for-start gives: {why}"
        ) from None
    finally:
        await client.close()


async def _models(settings: Settings, refused: list[str]) -> Served:
    """Return what the endpoint serves: not before its list of models is there."""
    async with Pages(settings.endpoint.tls) as pages:
        while True:
            try:
                served = await look(pages, settings.endpoint, settings.model)
                if served.trouble is None:
                    return served
                refused.append(served.trouble)
            except EndpointError as error:
                refused.append(str(error))
            await asyncio.sleep(EVERY_S)


async def _first_answer(
    client: Client, maker: RequestMaker, shape: RequestShape, refused: list[str]
) -> RequestRecord:
    """Return the record of the first answer."""
    for attempt in itertools.count(1):
        request = maker.make(shape, attempt, PROMPT_TOKENS, ANSWER_TOKENS)
        record = await ask(client, shape.api, request)
        if record.status == "ok" and record.first_token_ns is not None:
            return record
        refused.append(f"{record.status}: {record.error}")
        await asyncio.sleep(EVERY_S)
    raise AssertionError
