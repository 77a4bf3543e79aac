"""``doctor --cold-start``: the time from the command to the first answer of an endpoint."""

import asyncio
import socket
import time

import pytest

from ampacity.config import make_settings
from ampacity.experiments.cold_start import ColdStart, measure_cold_start
from ampacity.loadgen.send.endpoint import EndpointError
from ampacity.progress import Progress
from ampacity.simulator.models.hardware import linear_config
from ampacity.simulator.server.server import Server
from ampacity.values import ConfigError

ENGINE = linear_config(0.02, 0.0, max_num_seqs=8, max_model_len=4096)


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


async def timed(port: int, starts_after_s: float, most_s: float = 20.0) -> tuple[ColdStart, float]:
    """Return (the result, when the server listened after the beginning)."""
    settings = make_settings({"url": f"http://127.0.0.1:{port}/v1"})
    began_s = time.monotonic()
    task = asyncio.create_task(measure_cold_start(settings, most_s, Progress()))
    await asyncio.sleep(starts_after_s)
    server = Server(ENGINE, model_name="tiny")
    await server.start("127.0.0.1", port)
    listening_s = time.monotonic() - began_s
    try:
        return await task, listening_s
    finally:
        await server.stop()


def test_an_endpoint_that_comes_up_after_a_while_is_timed_from_the_beginning() -> None:
    """It listens after 0.7 s or so; looked for every 0.2 s; a first token takes one step, 20 ms."""
    found, listening_s = asyncio.run(timed(free_port(), 0.7))
    assert listening_s <= found.models_s <= listening_s + 2
    assert found.models_s <= found.first_token_s <= found.models_s + 2
    assert 0.015 <= found.warm_ttft_s <= 1
    assert found.attempts >= 4  # some refused ones, the list of models, the answer


def test_an_endpoint_that_is_up_already_has_no_cold_start() -> None:
    async def measured() -> None:
        server = Server(ENGINE, model_name="tiny")
        port = await server.start("127.0.0.1", 0)
        settings = make_settings({"url": f"http://127.0.0.1:{port}/v1"})
        try:
            await measure_cold_start(settings, 10, Progress())
        finally:
            await server.stop()

    with pytest.raises(ConfigError, match="answers already: stop it"):
        asyncio.run(measured())


def test_an_endpoint_that_does_not_come_up_is_given_up() -> None:
    began_s = time.monotonic()
    with pytest.raises(EndpointError, match="no first answer in the 1 s"):
        asyncio.run(timed(free_port(), 3.0, most_s=1.0))
    assert time.monotonic() - began_s < 10


def test_the_time_limit_ends_an_attempt_that_waits_for_its_answer() -> None:
    """It accepts connections and never answers; a request alone would wait for its timeout."""

    async def measured() -> None:
        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        settings = make_settings({"url": f"http://127.0.0.1:{port}/v1"})
        try:
            await measure_cold_start(settings, 0.5, Progress())
        finally:
            server.close()

    began_s = time.monotonic()
    with pytest.raises(EndpointError, match=r"no first answer in the 0\.5 s .* does not answer"):
        asyncio.run(measured())
    assert time.monotonic() - began_s < 5
