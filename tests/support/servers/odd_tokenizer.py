"""A server whose vocabulary nobody knows: a word is one to three tokens or more, and its chat
template adds seventeen.
"""

from __future__ import annotations

import asyncio
import json
import threading
import zlib
from types import TracebackType
from typing import Any, Literal

from aiohttp import web

TEMPLATE_TOKENS = 17


def tokens_of(text: str, most: int = 3) -> int:
    """Tokens of ``text``, one to ``most`` a word."""
    return sum(1 + zlib.crc32(word.encode()) % most for word in text.split())


def ids_of(text: str, most: int) -> list[int]:
    """The same as numbers: 0 for each end of a line, and for a word as many of its own as it has
    tokens."""
    found = []
    for line in text.splitlines(keepends=True):
        for word in line.split():
            found += [
                zlib.crc32(word.encode()) % 30000 + 1 + k for k in range(tokens_of(word, most))
            ]
        found += [0] * line.endswith("\n")
    return found


class OddTokenizer:
    """Serves /v1/chat/completions with usage on a free port; a word is one to ``most`` tokens.

    ``tokenize``: what its /tokenize gives: the "ids" of tokens, as many "zeros", or None where
    there is none. Prompts beyond ``context`` are refused, which the list of models names where
    ``listed``. ``first``: tokens more of a prompt whose first word is longer than five letters;
    ``drifts``: up to so many more in turn; ``tokenize_most``: ``most`` of a /tokenize that is
    another model's. The prompts are kept in ``asked``."""

    def __init__(
        self,
        *,
        tokenize: Literal["ids", "zeros"] | None = "zeros",
        most: int = 3,
        context: int = 32768,
        listed: bool = True,
        first: int = 0,
        drifts: int = 0,
        tokenize_most: int | None = None,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._tokenize, self._most, self._context, self._listed = tokenize, most, context, listed
        self._first, self._drifts = first, drifts
        self._tokenize_most = tokenize_most or most
        self.asked: list[str] = []
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> OddTokenizer:
        self._thread.start()
        port = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(20)
        self.url = f"http://127.0.0.1:{port}/v1"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
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
        length = {"max_model_len": self._context} if self._listed else {}
        return web.json_response({"data": [{"id": "odd", **length}]})

    def _chat(self, messages: list[dict[str, Any]]) -> int:
        extra = self._first if len(messages[0]["content"].split()[0]) > 5 else 0
        extra += len(self.asked) % (self._drifts + 1)
        return TEMPLATE_TOKENS + extra + sum(tokens_of(m["content"], self._most) for m in messages)

    async def _count(self, request: web.Request) -> web.Response:
        body = await request.json()
        if "messages" in body:
            count = self._chat(body["messages"])
            return web.json_response({"count": count, "tokens": [0] * count})
        ids = ids_of(body["prompt"], self._tokenize_most)
        if self._tokenize == "zeros":
            ids = [0] * tokens_of(body["prompt"], self._tokenize_most)
        return web.json_response({"count": len(ids), "tokens": ids})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        wanted = int(body.get("max_tokens") or body.get("max_completion_tokens") or 1)
        self.asked.append(body["messages"][0]["content"])
        prompt = self._chat(body["messages"])
        if prompt + wanted > self._context:
            message = f"This model's maximum context length is {self._context} tokens, you asked for {prompt + wanted}"
            return web.json_response({"error": {"message": message, "code": 400}}, status=400)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for i in range(wanted):
            usage = {
                "prompt_tokens": prompt,
                "completion_tokens": i + 1,
                "total_tokens": prompt + i + 1,
            }
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
