"""A simulated server on a real socket, and readers of its answers."""

import asyncio
import functools
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from ampacity.simulator.engine.engine import EngineConfig
from ampacity.simulator.models.hardware import linear_config
from ampacity.simulator.server.answers import Stream
from ampacity.simulator.server.face import Face
from ampacity.simulator.server.protocol import CHAT_OVERHEAD_TOKENS, Call
from ampacity.simulator.server.server import Server

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"
FAST = linear_config(0.002, 0.0, max_num_seqs=8, max_model_len=4096)
HELLO = [{"role": "user", "content": "Say hello"}]
PROMPT_TOKENS = 2 + CHAT_OVERHEAD_TOKENS


@asynccontextmanager
async def served(
    config: EngineConfig = FAST, **options: Any
) -> AsyncIterator[tuple[Server, str, aiohttp.ClientSession]]:
    server = Server(config, model_name="tiny", **options)
    port = await server.start("127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
            yield server, f"http://127.0.0.1:{port}", session
    finally:
        await server.stop()


def run(body: Callable[[], Awaitable[None]]) -> None:
    """Run a coroutine to its end, within 30 s."""
    asyncio.run(asyncio.wait_for(body(), 30))


def on_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Make an ordinary test of a coroutine."""

    @functools.wraps(test)
    def whole(**arguments: Any) -> None:
        run(functools.partial(test, **arguments))

    return whole


async def events(
    session: aiohttp.ClientSession, url: str, payload: dict[str, Any], **options: Any
) -> list[str]:
    """The data of each server-sent event."""
    async with session.post(url, json=payload, **options) as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        text = (await response.read()).decode()
    parts = text.split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") for part in parts)
    return [part.removeprefix("data: ") for part in parts]


def metric(text: str, name: str, **labels: str) -> float:
    for line in text.splitlines():
        if line.startswith(name + "{") and all(
            f'{key}="{value}"' in line for key, value in labels.items()
        ):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"{name} {labels} not in /metrics")


async def metrics(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(f"{url}/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return await response.text()


def read_frames(call: Call, face: Face) -> tuple[dict[int, str], dict[int, str]]:
    """Text and finish reason by choice, of a stream whose choices advance together."""
    frames = Stream(call, face, 0).choices()
    stream = b""
    for position in range(call.limit_tokens):
        stream += b"".join(
            one.push()
            for one, choice in zip(frames, call.choices, strict=True)
            if position < choice.ending.tokens
        )
    texts: dict[int, str] = defaultdict(str)
    reasons: dict[int, str] = {}
    for line in stream.split(b"\r\n"):
        if not line.startswith(b"data: {"):
            continue
        for choice in json.loads(line.removeprefix(b"data: "))["choices"]:
            index = choice["index"]
            assert index not in reasons, "a chunk after the last"
            delta = choice["delta"] if call.chat else {"content": choice["text"]}
            texts[index] += "".join(
                delta.get(name) or "" for name in ("reasoning", "reasoning_content", "content")
            )
            if choice["finish_reason"]:
                reasons[index] = choice["finish_reason"]
    return texts, reasons
