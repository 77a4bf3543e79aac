"""Answers by API: the class that reads each, and the APIs whose events name their type."""

import json
from abc import ABC, abstractmethod
from typing import Any

import msgspec

from ampacity.loadgen.receive.chunks import BAD_JSON, token_count, token_detail
from ampacity.loadgen.receive.completions import Answer
from ampacity.loadgen.receive.templates import ChunkContent
from ampacity.loadgen.receive.thinking import Kind
from ampacity.loadgen.send.protocols import Api, decoded, error_text, stream_error


class _Event(msgspec.Struct, gc=False):
    type: Any = None
    index: Any = None
    delta: Any = None
    response: Any = None  # Responses API
    item: Any = None
    output_index: Any = None
    sequence_number: Any = None
    text: Any = None
    refusal: Any = None
    arguments: Any = None
    message: Any = None  # Messages API
    content_block: Any = None
    usage: Any = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event | None).decode
_RESPONSES_TEXTS = ("text.delta", "refusal.delta")  # all other deltas are pieces of a call
_CALLS = ("function_call", "custom_tool_call")
_MESSAGES_DELTAS: dict[str, tuple[str, Kind]] = {
    "text_delta": ("text", "answer"),
    "input_json_delta": ("partial_json", "answer"),
    "thinking_delta": ("thinking", "reasoning"),
}
# Anthropic's input_tokens are without those that were read from, or written to, the cache
_INPUT_PARTS = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
_ENDED = ("completed", "incomplete", "failed", "cancelled")  # statuses of a response


def _messages_content(data: bytes) -> ChunkContent | None:
    """Return the content of an event of the Messages API: text, or a piece of a tool call."""
    event = _without_error(data)
    if event is None or event.type != "content_block_delta":
        return None
    delta = event.delta if isinstance(event.delta, dict) else {}
    name, kind = _MESSAGES_DELTAS.get(str(delta.get("type")), ("", "answer"))
    text = delta.get(name)
    if not isinstance(text, str):
        return None
    call = (event.index, None, None) if name == "partial_json" else None
    return ChunkContent(kind, text, call=call)


def _responses_content(data: bytes) -> ChunkContent | None:
    """Return the content of an event of the Responses API: text, or a piece of a tool call."""
    event = _without_error(data)
    name = "" if event is None else str(event.type)
    if event is None or not isinstance(event.delta, str) or not name.endswith(".delta"):
        return None
    total = token_count(event.sequence_number) or None
    if not name.endswith(_RESPONSES_TEXTS):
        return ChunkContent("answer", event.delta, total, call=(event.output_index, None, None))
    return ChunkContent("reasoning" if ".reasoning" in name else "answer", event.delta, total)


def _without_error(data: bytes) -> _Event | None:
    try:
        event = _decode_event(data)
    except BAD_JSON:
        return None
    return None if event is None or event.error else event


class _TypedAnswer(Answer, ABC):
    """An API whose events name their type. None of them reports the tokens of a chunk."""

    def __init__(self, thinks_until: str | None = None) -> None:
        super().__init__(thinks_until)
        self._inputs: dict[str, int] = {}  # tokens by _INPUT_PARTS

    def on_whole(self, at_ns: int, body: bytes) -> None:
        super().on_whole(at_ns, body)
        value = decoded(body) if self.error is None else None
        if isinstance(value, dict):
            self._on_model(value)
            self._on_body(at_ns, value)

    def _on_json(self, at_ns: int, data: bytes) -> None:
        event = self._decoded(_decode_event, _Event, data)
        if event is None:
            return
        if event.error or event.type in (None, "error"):
            self.error = self.error or stream_error(data)
        if self.error is None and event.type is None:
            self._on_foreign(data)
        elif self.error is None:
            self._on_model(event.message or event.response)
            self._on_typed(at_ns, event)

    @abstractmethod
    def _on_typed(self, at_ns: int, event: _Event) -> None:
        """Read one event that is neither empty nor an error."""

    @abstractmethod
    def _on_body(self, at_ns: int, body: dict[str, Any]) -> None:
        """Read a whole body that is no error."""

    def _on_piece(self, at_ns: int, kind: Kind, text: Any = "") -> None:
        """Take a token-bearing piece; without a text it is a piece of a tool call."""
        text = text if isinstance(text, str) else ""
        if kind == "answer" and text:
            kind, text = self._classify(text)
        if self.texts is not None:
            self.texts.append((kind, text))
        if kind == "answer" and self.first_answer_ns is None:
            self.first_answer_ns = at_ns
        self.chunk_at_ns.append(at_ns)
        self.tally.chunk_counts.append(None)

    def _on_call(
        self, key: Any, call_id: Any = None, name: Any = None, arguments: Any = None
    ) -> None:
        if self.calls is not None:
            self.calls.add(key, call_id, name, arguments)

    def _on_usage(self, usage: Any) -> None:
        """Read the usage of either API; a missing value changes nothing."""
        if not isinstance(usage, dict):
            return
        tally = self.tally
        total = token_count(usage.get("output_tokens"))
        if total is not None:
            tally.totals[:] = [total]
        for name in _INPUT_PARTS:
            tokens = token_count(usage.get(name))
            if tokens is not None and (tokens or name not in self._inputs):  # no 0 at the end
                self._inputs[name] = tokens
        tally.input_tokens = sum(self._inputs.values()) or None
        details = usage.get("input_tokens_details")
        tally.cached_tokens = token_detail(details, "cached_tokens", tally.cached_tokens)
        tally.cached_tokens = token_detail(usage, "cache_read_input_tokens", tally.cached_tokens)
        details = usage.get("output_tokens_details")
        tally.reasoning_tokens = token_detail(details, "reasoning_tokens", tally.reasoning_tokens)


class ResponsesAnswer(_TypedAnswer):
    """OpenAI's Responses API: ``response.*`` events; ``response.completed`` carries usage."""

    content_of = staticmethod(_responses_content)
    _by_done = False  # the text comes in the events that end its parts

    def _on_typed(self, at_ns: int, event: _Event) -> None:
        name = event.type if isinstance(event.type, str) else ""
        if name.endswith(".delta"):
            if not event.delta:
                return
            if name.endswith(_RESPONSES_TEXTS):
                kind: Kind = "reasoning" if ".reasoning" in name else "answer"
                self._on_piece(at_ns, kind, event.delta)
            else:
                self._on_piece(at_ns, "answer")
                self._on_call(event.output_index, arguments=event.delta)
        elif name.endswith(".done") and (self._by_done or not self.chunk_at_ns):
            text, arguments = event.text or event.refusal, event.arguments
            if text or arguments:
                self._by_done = True  # nothing comes in pieces
                self._on_piece(at_ns, "reasoning" if ".reasoning" in name else "answer", text)
            if arguments:
                self._on_call(event.output_index, arguments=arguments)
        elif name == "response.output_item.added" and isinstance(event.item, dict):
            if event.item.get("type") in _CALLS:
                self._on_call(event.output_index, *_call_of(event.item))
        elif isinstance(event.response, dict) and not self.chunk_at_ns:
            self._on_body(at_ns, event.response)
        elif isinstance(event.response, dict):
            self._on_end(event.response)

    def _on_body(self, at_ns: int, body: dict[str, Any]) -> None:
        for number, item in enumerate(_objects(body.get("output"))):
            if item.get("type") in _CALLS:
                self._on_piece(at_ns, "answer")
                self._on_call(number, *_call_of(item))
            kind: Kind = "reasoning" if item.get("type") == "reasoning" else "answer"
            for part in [*_objects(item.get("content")), *_objects(item.get("summary"))]:
                if text := part.get("text") or part.get("refusal"):
                    self._on_piece(at_ns, kind, text)
        self._on_end(body)

    def _on_end(self, whole: dict[str, Any]) -> None:
        """Read the object of a response, ended or not."""
        status = whole.get("status")
        if status not in _ENDED:
            return
        self.done = True
        self._on_usage(whole.get("usage"))
        if status in ("failed", "cancelled"):
            error = whole.get("error") or {"message": f"the response is {status}"}
            self.error = error_text(json.dumps({"error": error}).encode())
            return
        details = whole.get("incomplete_details")
        reason = details.get("reason") if isinstance(details, dict) else None
        length = reason == "max_output_tokens"
        self._on_reason("length" if length else str(reason or "stop"))


class MessagesAnswer(_TypedAnswer):
    """Anthropic's Messages API; usage comes in message_start and message_delta."""

    content_of = staticmethod(_messages_content)

    def _on_typed(self, at_ns: int, event: _Event) -> None:
        delta = event.delta if isinstance(event.delta, dict) else {}
        if event.type == "content_block_delta":
            name, kind = _MESSAGES_DELTAS.get(str(delta.get("type")), ("", "answer"))
            if name and delta.get(name):
                is_call = name == "partial_json"
                self._on_piece(at_ns, kind, "" if is_call else delta[name])
                if is_call:
                    self._on_call(event.index, arguments=delta[name])
        elif event.type == "content_block_start" and isinstance(event.content_block, dict):
            self._on_block(at_ns, event.index, event.content_block)
        elif event.type == "message_start" and isinstance(event.message, dict):
            self._on_usage(event.message.get("usage"))
            self.tally.totals.clear()  # output_tokens are not final here
        elif event.type == "message_delta":
            self._on_usage(event.usage)
            self._on_stop(delta)
        elif event.type == "message_stop":
            self.done = True

    def _on_body(self, at_ns: int, body: dict[str, Any]) -> None:
        for number, block in enumerate(_objects(body.get("content"))):
            self._on_block(at_ns, number, block, whole=True)
        self._on_usage(body.get("usage"))
        self._on_stop(body)

    def _on_block(
        self, at_ns: int, number: Any, block: dict[str, Any], *, whole: bool = False
    ) -> None:
        """Read a block of content: a whole one, or the beginning of one, mostly empty."""
        is_call = block.get("type") == "tool_use"
        given = block.get("input") if whole else block.get("input") or None
        if is_call:
            self._on_call(number, block.get("id"), block.get("name"), given)
        if text := block.get("text") or block.get("thinking") or given or (whole and is_call):
            kind: Kind = "reasoning" if block.get("type") == "thinking" else "answer"
            self._on_piece(at_ns, kind, text)

    def _on_stop(self, holder: dict[str, Any]) -> None:
        if holder.get("stop_reason"):
            self._on_reason(str(holder["stop_reason"]))


def _call_of(item: dict[str, Any]) -> tuple[Any, Any, Any]:
    return item.get("call_id"), item.get("name"), item.get("arguments") or item.get("input")


def _objects(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _is_vector(value: Any) -> bool:
    """Tell whether an embedding is numbers, base64, or several of them (a list, or by type)."""
    if isinstance(value, str):
        return bool(value)
    parts = [*value.values()] if isinstance(value, dict) else value
    if not isinstance(parts, list) or not parts:
        return False
    return {*map(type, parts)} <= {int, float} or all(map(_is_vector, parts))


class EmbeddingsAnswer(Answer):
    """A vector: the whole body is the answer, and no token is generated."""

    content_of = None

    def _on_json(self, at_ns: int, data: bytes) -> None:
        body: Any = self._decoded(msgspec.json.decode, object, data)
        if self.bad_json is not None:
            return
        if not isinstance(body, dict) or body.get("error"):
            self.error = error_text(data)
            return
        self._on_model(body)
        usage = body.get("usage")
        self.tally.input_tokens = token_detail(usage, "prompt_tokens", None)
        items = body["data"] if isinstance(body.get("data"), list) else []
        found = [isinstance(item, dict) and _is_vector(item.get("embedding")) for item in items]
        if False in found:
            self.error = stream_error(json.dumps(items[found.index(False)]).encode())
        elif found:
            self.finish_reason = "stop"
            self.whole_ns = at_ns


ANSWERS: dict[Api, type[Answer]] = {
    "chat": Answer,
    "completions": Answer,
    "responses": ResponsesAnswer,
    "messages": MessagesAnswer,
    "embeddings": EmbeddingsAnswer,
}
