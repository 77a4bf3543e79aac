"""A server whose vocabulary nobody knows: a word is one to three tokens, and its chat template adds seventeen."""

from __future__ import annotations

import asyncio
import json
import threading
import zlib
from types import TracebackType
from typing import Any

from aiohttp import web

TEMPLATE_TOKENS = 17


def tokens_of(text: str) -> int:
    """Tokens of ``text``, two a word on average."""
    return sum(1 + zlib.crc32(word.encode()) % 3 for word in text.split())


def _chat(messages: list[dict[str, Any]]) -> int:
    return TEMPLATE_TOKENS + sum(tokens_of(m["content"]) for m in messages)


class OddTokenizer:
    """Serves /v1/chat/completions with usage, and /tokenize unless ``tokenize`` is False, on a free port."""

    def __init__(self, *, tokenize: bool = True) -> None:
        self._loop = asyncio.new_event_loop()
        self._tokenize = tokenize
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> OddTokenizer:
        self._thread.start()
        port = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(20)
        self.url = f"http://127.0.0.1:{port}/v1"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()

    async def _start(self) -> int:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._answer)
        if self._tokenize:
            app.router.add_post("/tokenize", self._count)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return int(self._runner.addresses[0][1])

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "odd", "max_model_len": 32768}]})

    async def _count(self, request: web.Request) -> web.Response:
        body = await request.json()
        count = _chat(body["messages"]) if "messages" in body else tokens_of(body["prompt"])
        return web.json_response({"count": count, "tokens": [0] * count})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        wanted = int(body.get("max_tokens") or body.get("max_completion_tokens") or 1)
        prompt = _chat(body["messages"])
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for i in range(wanted):
            usage = {"prompt_tokens": prompt, "completion_tokens": i + 1, "total_tokens": prompt + i + 1}
            end = "length" if i + 1 == wanted else None
            choice = {"index": 0, "delta": {"content": " a"}, "finish_reason": end}
            event = {
                "id": "x",
                "object": "chat.completion.chunk",
                "model": "odd",
                "choices": [choice],
                "usage": usage,
            }
            await answer.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await answer.write(b"data: [DONE]\n\n")
        return answer
