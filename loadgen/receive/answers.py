"""What comes back, by API: the class that reads each, and those whose events name their type."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Any

import msgspec

from ampacity.loadgen.receive.completions import BAD_JSON, Answer, token_count, token_detail
from ampacity.loadgen.receive.thinking import Kind
from ampacity.loadgen.send.protocols import (
    Api,
    decoded,
    error_text,
    excerpt,
    printable,
    stream_error,
    with_halves,
)


class _Event(msgspec.Struct, gc=False):
    type: Any = None
    index: Any = None
    delta: Any = None
    response: Any = None  # Responses API
    item: Any = None
    output_index: Any = None
    message: Any = None  # Messages API
    content_block: Any = None
    usage: Any = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event | None).decode
_RESPONSES_DELTAS: dict[str, Kind] = {
    "response.output_text.delta": "answer",
    "response.refusal.delta": "answer",
    "response.function_call_arguments.delta": "answer",
    "response.reasoning_text.delta": "reasoning",
    "response.reasoning_summary_text.delta": "reasoning",
}
_MESSAGES_DELTAS: dict[str, tuple[str, Kind]] = {
    "text_delta": ("text", "answer"),
    "input_json_delta": ("partial_json", "answer"),
    "thinking_delta": ("thinking", "reasoning"),
}
_ENDED = ("completed", "incomplete", "failed", "cancelled")  # status of a response


class _TypedAnswer(Answer, ABC):
    """An API whose events name their type; none of them says how many tokens a chunk holds."""

    __slots__ = ()
    repeats = False

    def on_whole(self, at_ns: int, body: bytes) -> None:
        """A body that is no stream: everything arrives at once."""
        super().on_whole(at_ns, body)
        value = decoded(body) if self.error is None else None
        if isinstance(value, dict):
            self._on_body(at_ns, value)

    def _on_json(self, at_ns: int, data: bytes) -> None:
        try:
            event = _decode_event(data) if data else None
        except BAD_JSON as error:
            event = with_halves(data, _Event)
            if event is None:
                self._on_bad_json(error, data)
                return
        if event is None:
            return
        if event.error or event.type in (None, "error"):
            self.error = self.error or stream_error(data)
        if self.error is None:
            self._on_typed(at_ns, event)

    @abstractmethod
    def _on_typed(self, at_ns: int, event: _Event) -> None:
        """One event that is neither empty nor an error."""

    @abstractmethod
    def _on_body(self, at_ns: int, body: dict[str, Any]) -> None:
        """A whole body that is no error."""

    def _bear(self, at_ns: int, kind: Kind, text: Any, *, is_text: bool = True) -> None:
        """A piece of the answer; ``is_text``: of what is read, not of a call's arguments."""
        said = text if isinstance(text, str) and is_text else ""
        if kind == "answer" and said:
            kind, said = self._heard(said)
        if self.said is not None:
            self.said.append((kind, said))
        if kind == "answer" and self.first_answer_ns is None:
            self.first_answer_ns = at_ns
        self._append(at_ns, None)

    def _call(self, key: Any, call_id: Any = None, name: Any = None, arguments: Any = None) -> None:
        """A piece of a tool's call."""
        if self.calls is not None:
            self.calls.add(key, call_id, name, arguments)

    def _total(self, usage: Any) -> None:
        """Tokens as ``usage`` says in either API; a value that is missing changes nothing."""
        if not isinstance(usage, dict):
            return
        total = token_count(usage.get("output_tokens"))
        if total is not None:
            self._usage_totals[:] = [total]
        self.input_tokens = token_count(usage.get("input_tokens")) or self.input_tokens
        self.cached_tokens = token_detail(
            usage.get("input_tokens_details"), "cached_tokens", self.cached_tokens
        )
        cached = token_count(usage.get("cache_read_input_tokens"))
        self.cached_tokens = self.cached_tokens if cached is None else cached
        self.reasoning_tokens = token_detail(
            usage.get("output_tokens_details"), "reasoning_tokens", self.reasoning_tokens
        )


class ResponsesAnswer(_TypedAnswer):
    """OpenAI's Responses API: ``response.*`` events; ``response.completed`` carries usage."""

    __slots__ = ()

    def _on_typed(self, at_ns: int, event: _Event) -> None:
        kind = _RESPONSES_DELTAS.get(event.type) if isinstance(event.type, str) else None
        if kind is not None:
            if event.delta:
                of_call = event.type == "response.function_call_arguments.delta"
                self._bear(at_ns, kind, event.delta, is_text=not of_call)
                if of_call:
                    self._call(event.output_index, arguments=event.delta)
        elif event.type == "response.output_item.added" and isinstance(event.item, dict):
            if event.item.get("type") == "function_call":
                item = event.item
                self._call(
                    event.output_index, item.get("call_id"), item.get("name"), item.get("arguments")
                )
        elif isinstance(event.response, dict):
            self._on_end(event.response)

    def _on_body(self, at_ns: int, body: dict[str, Any]) -> None:
        for number, item in enumerate(_objects(body.get("output"))):
            if item.get("type") == "function_call":
                self._bear(at_ns, "answer", item.get("arguments"), is_text=False)
                self._call(number, item.get("call_id"), item.get("name"), item.get("arguments"))
            kind: Kind = "reasoning" if item.get("type") == "reasoning" else "answer"
            for part in [*_objects(item.get("content")), *_objects(item.get("summary"))]:
                if text := part.get("text") or part.get("refusal"):
                    self._bear(at_ns, kind, text)
        self._on_end(body)

    def _on_end(self, whole: dict[str, Any]) -> None:
        """The object of a response, which has ended or not."""
        status = whole.get("status")
        if status not in _ENDED:
            return
        self._total(whole.get("usage"))
        if status in ("failed", "cancelled"):
            known = whole.get("error") or {"message": f"the response is {status}"}
            self.error = error_text(json.dumps({"error": known}).encode())
            return
        why = whole.get("incomplete_details")
        reason = why.get("reason") if isinstance(why, dict) else None
        self.finish_reason = (
            "length" if reason == "max_output_tokens" else printable(str(reason or "stop"))
        )


class MessagesAnswer(_TypedAnswer):
    """Anthropic's Messages API: content_block_delta events; usage in message_start and message_delta."""

    __slots__ = ()

    def _on_typed(self, at_ns: int, event: _Event) -> None:
        delta = event.delta if isinstance(event.delta, dict) else {}
        if event.type == "content_block_delta":
            name, kind = _MESSAGES_DELTAS.get(str(delta.get("type")), ("", "answer"))
            if name and delta.get(name):
                self._bear(at_ns, kind, delta.get(name), is_text=name != "partial_json")
                if name == "partial_json":
                    self._call(event.index, arguments=delta.get(name))
        elif event.type == "content_block_start" and isinstance(event.content_block, dict):
            if event.content_block.get("type") == "tool_use":
                self._call(
                    event.index, event.content_block.get("id"), event.content_block.get("name")
                )
        elif event.type == "message_start" and isinstance(event.message, dict):
            self._total(event.message.get("usage"))
            self._usage_totals.clear()  # of the prompt's tokens only the input is final here
        elif event.type == "message_delta":
            self._total(event.usage)
            self._on_stop(delta)
        elif event.type == "message_stop":
            self.done = True

    def _on_body(self, at_ns: int, body: dict[str, Any]) -> None:
        for number, block in enumerate(_objects(body.get("content"))):
            if block.get("type") == "tool_use":
                self._bear(at_ns, "answer", "", is_text=False)
                self._call(number, block.get("id"), block.get("name"), block.get("input"))
            elif text := block.get("text") or block.get("thinking"):
                self._bear(
                    at_ns, "reasoning" if block.get("type") == "thinking" else "answer", text
                )
        self._total(body.get("usage"))
        self._on_stop(body)

    def _on_stop(self, holder: dict[str, Any]) -> None:
        if holder.get("stop_reason"):
            self.finish_reason = printable(str(holder["stop_reason"]))


def _objects(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


class EmbeddingsAnswer(Answer):
    """A vector: no token comes out, and the whole body is the answer."""

    __slots__ = ()
    repeats = False

    def _on_json(self, at_ns: int, data: bytes) -> None:
        try:
            body = msgspec.json.decode(data)
        except BAD_JSON as error:
            self.bad_json = f"{error}: {excerpt(data)}"
            return
        if not isinstance(body, dict) or body.get("error"):
            self.error = error_text(data)
            return
        usage = body.get("usage")
        self.input_tokens = (
            token_count(usage.get("prompt_tokens")) if isinstance(usage, dict) else None
        )
        if isinstance(body.get("data"), list) and body["data"]:
            self.finish_reason = "stop"
            self.whole_ns = at_ns


ANSWERS: dict[Api, type[Answer]] = {
    "chat": Answer,
    "completions": Answer,
    "responses": ResponsesAnswer,
    "messages": MessagesAnswer,
    "embeddings": EmbeddingsAnswer,
}
