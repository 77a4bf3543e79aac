"""OpenAI's Responses, Anthropic's Messages and embeddings, served as chats. No I/O."""

import zlib
from collections.abc import Mapping
from typing import Any

import msgspec

from ampacity.simulator.server.answers import Stream, answer, chunk, reasoning_tokens
from ampacity.simulator.server.apierrors import invalid
from ampacity.simulator.server.face import Face
from ampacity.simulator.server.protocol import Api, Call, Choice
from ampacity.simulator.server.text import WORD_CHARACTERS, characters

DIMENSIONS = 8  # of an embedding
_SHARED = ("model", "stream", "temperature", "top_p", "ignore_eos", "seed")
_LIMITS = {"responses": "max_output_tokens", "messages": "max_tokens"}


def as_known(api: Api, body: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the body to that of a chat, or (embeddings) of a completion. Raises ApiError."""
    if api == "embeddings":
        if "input" not in body:
            raise invalid("body.input", "Field required", body, kind="missing")
        return {"model": body.get("model"), "prompt": body["input"], "max_tokens": 1}
    if api == "messages" and "max_tokens" not in body:
        raise invalid("body.max_tokens", "Field required", body, kind="missing")
    items, system = ("input", "instructions") if api == "responses" else ("messages", "system")
    messages, instructions = body.get(items), body.get(system)
    if api == "responses" and isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if isinstance(messages, list):
        opening = [{"role": "system", "content": instructions}] if instructions else []
        messages = [*opening, *map(_as_message, messages)]
    return {name: body[name] for name in _SHARED if name in body} | {
        "messages": messages,
        "max_tokens": body.get(_LIMITS[api]),
        "stop": body.get("stop_sequences"),
    }


def _as_message(item: object) -> object:
    """Return an item of a conversation as a message with its text."""
    if not isinstance(item, dict):
        return item
    if "role" not in item:  # a function_call, or its output
        return {"role": "tool", "content": str(item.get("arguments") or item.get("output") or "")}
    content = item.get("content")
    return {**item, "content": _plain(content) if isinstance(content, list) else content}


def _plain(parts: list[Any]) -> list[Any]:
    found = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("text", "input_text", "output_text"):
            part = {"type": "text", "text": part.get("text")}
        elif kind == "tool_use":
            part = {"type": "text", "text": msgspec.json.encode(part.get("input")).decode()}
        elif kind == "tool_result":
            part = {"type": "text", "text": str(part.get("content") or "")}
        found.append(part)
    return found


def _event(name: str, **fields: Any) -> bytes:
    data = msgspec.json.encode({"type": name, **fields})
    return chunk(b"event: %b\ndata: %b\n\n" % (name.encode(), data))


def _texts(call: Call, face: Face) -> tuple[str, str]:
    """Return (reasoning, answer) of a call's only choice."""
    choice = call.choices[0]
    end = choice.ending.characters
    cut = min(end, reasoning_tokens(call, choice, face) * WORD_CHARACTERS)
    return characters(choice.seed, 0, cut), characters(choice.seed, cut, end)


class MessagesStream(Stream):
    """Events of the Messages API: a block of thinking, if any, and one of text."""

    def opening(self) -> bytes:
        if self._opened:
            return b""
        self._opened = True
        shell = {**_message(self.call), "content": [], "stop_reason": None, "stop_sequence": None}
        shell["usage"] = self._usage(0)
        thinks = reasoning_tokens(self.call, self.call.choices[0], self.face) > 0
        return _event("message_start", message=shell) + self._block_start(thinks) + _event("ping")

    def _block_start(self, thinks: bool) -> bytes:
        kind = "thinking" if thinks else "text"
        block = {"type": kind, kind: ""}
        return _event("content_block_start", index=self._index, content_block=block)

    def turn(self) -> bytes:
        stop = _event("content_block_stop", index=self._index)
        self._index += 1
        return stop + self._block_start(False)

    _index = 0

    def text(self, choice: Choice, field: str, text: str, shown: int, **_: object) -> bytes:
        kind = "text" if field == "content" else "thinking"
        delta = {"type": f"{kind}_delta", kind: text}
        return _event("content_block_delta", index=self._index, delta=delta) if text else b""

    def tail(self) -> bytes:
        delta = {
            "stop_reason": _stop_reason(self.call),
            "stop_sequence": self.call.choices[0].ending.stop_reason,
        }
        return (
            _event("content_block_stop", index=self._index)
            + _event("message_delta", delta=delta, usage=self._usage(self.call.output_tokens))
            + _event("message_stop")
        )

    def error(self, message: str) -> bytes:
        return _event("error", error={"type": "api_error", "message": message})

    def _usage(self, output_tokens: int) -> dict[str, int]:
        return _messages_usage(self.call, output_tokens, self.cached())


def _message(call: Call) -> dict[str, Any]:
    return {"id": call.request_id, "type": "message", "role": "assistant", "model": call.model}


def _stop_reason(call: Call) -> str:
    end = call.choices[0].ending
    reasons = {"length": "max_tokens", "stop": "end_turn"}
    return "stop_sequence" if end.stop_reason is not None else reasons[end.finish_reason]


def _messages_usage(call: Call, output_tokens: int, cached: int) -> dict[str, int]:
    new = {"input_tokens": call.prompt_tokens - cached, "output_tokens": output_tokens}
    return new | ({"cache_read_input_tokens": cached} if cached else {})


class ResponsesStream(Stream):
    """Events of the Responses API, for one message."""

    def opening(self) -> bytes:
        if self._opened:
            return b""
        self._opened = True
        shell = {
            **_response(self.call, self.created),
            "status": "in_progress",
            "output": [],
            "usage": None,
        }
        item = {
            "id": f"msg_{self.call.request_id}",
            "type": "message",
            "role": "assistant",
            "content": [],
        }
        return (
            _event("response.created", response=shell)
            + _event("response.in_progress", response=shell)
            + _event("response.output_item.added", output_index=0, item=item)
            + _event(
                "response.content_part.added",
                output_index=0,
                content_index=0,
                item_id=item["id"],
                part=_part(""),
            )
        )

    def text(self, choice: Choice, field: str, text: str, shown: int, **_: object) -> bytes:
        if not text:
            return b""
        name = f"response.{'output' if field == 'content' else 'reasoning'}_text.delta"
        item_id = f"msg_{self.call.request_id}"
        return _event(name, item_id=item_id, output_index=0, content_index=0, delta=text)

    def tail(self) -> bytes:
        whole = response_body(self.call, self.face, self.created, self.cached())
        text = whole["output"][-1]["content"][0]["text"]
        return _event(
            "response.output_text.done", output_index=0, content_index=0, text=text
        ) + _event(f"response.{whole['status']}", response=whole)

    def error(self, message: str) -> bytes:
        failed = {"status": "failed", "error": {"code": "server_error", "message": message}}
        return _event("response.failed", response=_response(self.call, self.created) | failed)


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


def _response(call: Call, created: int) -> dict[str, Any]:
    return {
        "id": f"resp_{call.request_id}",
        "object": "response",
        "created_at": created,
        "model": call.model,
        "error": None,
        "incomplete_details": None,
    }


def response_body(call: Call, face: Face, created: int, cached: int) -> dict[str, Any]:
    """Return the body of a response."""
    thought, text = _texts(call, face)
    cut = call.choices[0].ending.finish_reason == "length"
    item = {
        "id": f"msg_{call.request_id}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [_part(text)],
    }
    thinking = {
        "type": "reasoning",
        "content": [{"type": "reasoning_text", "text": thought}],
        "summary": [],
    }
    reasoned = reasoning_tokens(call, call.choices[0], face)
    return _response(call, created) | {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": [*([thinking] if thought else []), item],
        "usage": {
            "input_tokens": call.prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": call.output_tokens,
            "output_tokens_details": {"reasoning_tokens": reasoned},
            "total_tokens": call.prompt_tokens + call.output_tokens,
        },
    }


def message_body(call: Call, face: Face, cached: int) -> dict[str, Any]:
    """Return the body of a message."""
    thought, text = _texts(call, face)
    blocks = [{"type": "thinking", "thinking": thought}] if thought else []
    return _message(call) | {
        "content": [*blocks, {"type": "text", "text": text}],
        "stop_reason": _stop_reason(call),
        "stop_sequence": call.choices[0].ending.stop_reason,
        "usage": _messages_usage(call, call.output_tokens, cached),
    }


def embeddings_body(call: Call) -> dict[str, Any]:
    """Return the body with a vector for each prompt; equal words have equal vectors."""
    data = [
        {"object": "embedding", "index": number, "embedding": _vector(" ".join(map(str, words)))}
        for number, words in enumerate(call.prompts)
    ]
    tokens = {"prompt_tokens": call.prompt_tokens, "total_tokens": call.prompt_tokens}
    return {"object": "list", "data": data, "model": call.model, "usage": tokens}


STREAMS: dict[Api, type[Stream]] = {"messages": MessagesStream, "responses": ResponsesStream}


def whole(call: Call, face: Face, created: int, cached: int) -> bytes:
    """Return the body of an answer that is not streamed."""
    if call.api == "messages":
        return msgspec.json.encode(message_body(call, face, cached))
    if call.api == "responses":
        return msgspec.json.encode(response_body(call, face, created, cached))
    if call.api == "embeddings":
        return msgspec.json.encode(embeddings_body(call))
    return answer(call, face, created, cached)


def _vector(text: str) -> list[float]:
    seed = text.encode("utf-8", "replace")
    return [zlib.crc32(seed + bytes([k])) / 2**31 - 1 for k in range(DIMENSIONS)]
