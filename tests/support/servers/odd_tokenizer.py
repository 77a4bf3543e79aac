"""A server whose vocabulary nobody knows: a word is one to three tokens or more, and its chat
template adds seventeen.
"""

from __future__ import annotations

import json
import zlib
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler
from typing import Any, Literal

from tests.support.servers.http_server import http_server, reply, stream

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
        self._tokenize, self._most, self._context, self._listed = tokenize, most, context, listed
        self._first, self._drifts = first, drifts
        self._tokenize_most = tokenize_most or most
        self.asked: list[str] = []
        self._open = ExitStack()

    def __enter__(self) -> OddTokenizer:
        self.url = self._open.enter_context(http_server(self._models, self._post)) + "/v1"
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _models(self, handler: BaseHTTPRequestHandler) -> None:
        if handler.path != "/v1/models":
            handler.send_error(404)
            return
        length = {"max_model_len": self._context} if self._listed else {}
        _json(handler, {"data": [{"id": "odd", **length}]})

    def _post(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        if handler.path == "/v1/chat/completions":
            self._answer(handler, body)
        elif handler.path == "/tokenize" and self._tokenize:
            self._count(handler, body)
        else:
            handler.send_error(404)

    def _chat(self, messages: list[dict[str, Any]]) -> int:
        extra = self._first if len(messages[0]["content"].split()[0]) > 5 else 0
        extra += len(self.asked) % (self._drifts + 1)
        return TEMPLATE_TOKENS + extra + sum(tokens_of(m["content"], self._most) for m in messages)

    def _count(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        if "messages" in body:
            ids = [0] * self._chat(body["messages"])
        elif self._tokenize == "zeros":
            ids = [0] * tokens_of(body["prompt"], self._tokenize_most)
        else:
            ids = ids_of(body["prompt"], self._tokenize_most)
        _json(handler, {"count": len(ids), "tokens": ids})

    def _answer(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        wanted = int(body.get("max_tokens") or body.get("max_completion_tokens") or 1)
        self.asked.append(body["messages"][0]["content"])
        prompt = self._chat(body["messages"])
        if prompt + wanted > self._context:
            message = f"This model's maximum context length is {self._context} tokens, you asked for {prompt + wanted}"
            _json(handler, {"error": {"message": message, "code": 400}}, 400)
            return
        events = []
        for i in range(1, wanted + 1):
            usage = {"prompt_tokens": prompt, "completion_tokens": i, "total_tokens": prompt + i}
            end = "length" if i == wanted else None
            choice = {"index": 0, "delta": {"content": " a"}, "finish_reason": end}
            about = {"id": "x", "object": "chat.completion.chunk", "model": "odd"}
            events.append(json.dumps({**about, "choices": [choice], "usage": usage}).encode())
        stream(handler, *events)


def _json(handler: BaseHTTPRequestHandler, page: dict[str, Any], status: int = 200) -> None:
    reply(handler, json.dumps(page).encode(), status, Content_Type="application/json")
