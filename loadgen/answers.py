"""What comes back, by API: the class that reads each, and those whose events name their type."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import msgspec

from loadgen.completions import BAD_JSON, Answer, token_count, token_detail
from loadgen.protocols import Api, error_text, excerpt, printable, with_halves
from loadgen.thinking import Kind


class _Event(msgspec.Struct, gc=False):
    type: Any = None
    delta: Any = None
    response: Any = None  # Responses API
    message: Any = None  # Messages API
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


class _TypedAnswer(Answer, ABC):
    """An API whose events name their type; none of them says how many tokens a chunk holds."""

    __slots__ = ()
    repeats = False

    def _on_json(self, at_ns: int, data: bytes) -> None:
        try:
            event = _decode_event(data) if data else None
        except BAD_JSON as error:
            event = with_halves(data, _Event)
            if event is None:
                self.bad_json = self.bad_json or f"{error}: {excerpt(data)}"
                return
        if event is None:
            return
        if event.error is not None or event.type == "error":
            self.error = self.error or error_text(data)
            return
        self._on_typed(at_ns, event)

    @abstractmethod
    def _on_typed(self, at_ns: int, event: _Event) -> None:
        """One event that is neither empty nor an error."""

    def _bear(self, at_ns: int, kind: Kind, text: Any) -> None:
        if kind == "answer" and isinstance(text, str):
            kind, text = self._heard(text)
        if self.said is not None and isinstance(text, str):
            self.said.append((kind, text))
        if kind == "answer" and self.first_answer_ns is None:
            self.first_answer_ns = at_ns
        self._append(at_ns, None)

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
                self._bear(at_ns, kind, event.delta)
            return
        whole = event.response if isinstance(event.response, dict) else None
        if whole is None or whole.get("status") not in ("completed", "incomplete", "failed"):
            return
        self._total(whole.get("usage"))
        if whole.get("status") == "failed":
            self.error = error_text(msgspec.json.encode(whole))
            return
        why = whole.get("incomplete_details")
        reason = why.get("reason") if isinstance(why, dict) else None
        self.finish_reason = "length" if reason == "max_output_tokens" else printable(str(reason or "stop"))


class MessagesAnswer(_TypedAnswer):
    """Anthropic's Messages API: content_block_delta events; usage in message_start and message_delta."""

    __slots__ = ()

    def _on_typed(self, at_ns: int, event: _Event) -> None:
        delta = event.delta if isinstance(event.delta, dict) else {}
        if event.type == "content_block_delta":
            name, kind = _MESSAGES_DELTAS.get(str(delta.get("type")), ("", "answer"))
            if name and delta.get(name):
                self._bear(at_ns, "reasoning" if kind == "reasoning" else "answer", delta.get(name))
        elif event.type == "message_start" and isinstance(event.message, dict):
            self._total(event.message.get("usage"))
            self._usage_totals.clear()  # of the prompt's tokens only the input is final here
        elif event.type == "message_delta":
            self._total(event.usage)
            if delta.get("stop_reason"):
                self.finish_reason = printable(str(delta["stop_reason"]))
        elif event.type == "message_stop":
            self.done = True


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
        if not isinstance(body, dict) or body.get("error") is not None:
            self.error = error_text(data)
            return
        usage = body.get("usage")
        self.input_tokens = token_count(usage.get("prompt_tokens")) if isinstance(usage, dict) else None
        if isinstance(body.get("data"), list) and body["data"]:
            self.finish_reason = "stop"
            self.whole_ns = at_ns


ANSWERS: dict[Api, type[Answer]] = {
    "chat": Answer, "completions": Answer, "responses": ResponsesAnswer, "messages": MessagesAnswer,
    "embeddings": EmbeddingsAnswer,
}  # fmt: skip
