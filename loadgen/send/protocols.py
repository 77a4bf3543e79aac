"""Request bodies by API, and the errors that servers report. Answers are read in ``receive``."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, TypeVar

import msgspec

from ampacity.loadgen.send.surrogates import ESCAPED_SURROGATE, with_joined_surrogates

T = TypeVar("T")
NESTED_MAX = 500  # brackets in a JSON text that Python may parse

Api = Literal["chat", "completions", "responses", "messages", "embeddings"]
BEARER = "Authorization: Bearer"


@dataclass(frozen=True)
class Protocol:
    """The traits that set an API apart, beside its bodies (below), its answers and its tool calls.

    ``conversation``: it takes a list of messages; ``system_apart``: the system prompt is a field of
    the body, no message; ``key_headers``: name, colon and scheme of the headers with the key.
    """

    path: str
    conversation: bool = False
    system_apart: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)
    key_headers: tuple[str, ...] = (BEARER,)


PROTOCOLS: dict[Api, Protocol] = {
    "chat": Protocol("/chat/completions", conversation=True),
    "completions": Protocol("/completions"),
    "responses": Protocol("/responses", conversation=True),  # OpenAI's Responses API
    "messages": Protocol(  # Anthropic's Messages API
        "/messages",
        conversation=True,
        system_apart=True,
        headers={"anthropic-version": "2023-06-01"},
        key_headers=(BEARER, "x-api-key"),
    ),
    "embeddings": Protocol("/embeddings"),
}


@dataclass(frozen=True)
class Dialect:
    """The optional request fields that the server accepts; found by the probe."""

    ignore_eos: bool = True
    stream_usage: bool = True
    continuous_usage: bool = True
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"


@dataclass(frozen=True)
class RequestShape:
    """A request without prompt and lengths. ``extra`` is the user's and wins."""

    api: Api
    model: str
    dialect: Dialect = Dialect()
    extra: dict[str, Any] = field(default_factory=dict)

    def body(self, prompt: str | msgspec.Raw, output_tokens: int) -> bytes:
        """Return the JSON body that asks for exactly ``output_tokens``, as far as the server can.

        ``prompt``: the text of one message, or the JSON array of all messages.
        """
        body: dict[str, Any] = {"model": self.model}
        if self.api == "embeddings":
            body["input"] = prompt
        elif self.api == "responses":
            body |= {"input": prompt, "max_output_tokens": output_tokens, "stream": True}
        else:
            if self.api == "completions":
                body["prompt"] = prompt
            else:
                whole = isinstance(prompt, msgspec.Raw)
                body["messages"] = prompt if whole else [{"role": "user", "content": prompt}]
            name = "max_tokens" if self.api == "messages" else self.dialect.max_tokens_field
            body |= {name: output_tokens, "stream": True}
        if self.api in ("chat", "completions") and self.dialect.stream_usage:
            body["stream_options"] = {"include_usage": True}
            if self.dialect.continuous_usage:
                body["stream_options"]["continuous_usage_stats"] = True
        if self.api != "embeddings" and self.dialect.ignore_eos:
            body["ignore_eos"] = True
        body.update(self.extra)
        return msgspec.json.encode(body)


def printable(text: str, limit: int = 200) -> str:
    """Return foreign text as one line without control characters."""
    if len(text) <= limit and text.isalnum():  # most finish reasons
        return text
    text = " ".join(text[: limit * 4].split())
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def excerpt(data: bytes) -> str:
    """Return the beginning of a body as one printable line."""
    return printable(data[:400].decode("utf-8", "replace"))


def with_lone_surrogates(data: bytes, kind: type[T]) -> T | None:
    """Decode JSON that ``msgspec`` refuses because a text has a lone surrogate, else None.

    A gateway that cuts an answer into events may cut between the two escapes of a character. The
    surrogates are kept, so that ``join_surrogates`` can join them.
    """
    if not ESCAPED_SURROGATE.search(data) or data.count(b"[") + data.count(b"{") > NESTED_MAX:
        return None
    try:
        return msgspec.convert(json.loads(data, parse_constant=_no_number), kind)
    except (ValueError, msgspec.ValidationError, RecursionError):
        return None


def decoded(data: bytes) -> Any:
    """Decode a JSON text, with U+FFFD for lone surrogates; None where it is no JSON."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return with_joined_surrogates(with_lone_surrogates(data, object))


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


_ERRORS = ("error", "detail", "errors", "message", "base_resp", "msg", "status_msg", "title")
_STATUSES = ("code", "status", "status_code", "statusCode")


def error_text(body: bytes) -> str:
    """Return the message of an error body: JSON of any provider's shape, plain text or HTML."""
    value = decoded(body)
    if value is None:
        return excerpt(body)
    if isinstance(value, list) and value and isinstance(value[0], dict) and "error" in value[0]:
        value = value[0]  # Gemini's
    if isinstance(value, dict):
        inner = next((value[name] for name in _ERRORS if value.get(name)), None)
        if isinstance(inner, list) and inner and isinstance(inner[0], dict):
            inner = inner[0].get("message", inner)
        if isinstance(inner, dict):
            inner = inner.get("message", inner.get("status_msg", inner))
        if inner is not None:
            value = inner
    return excerpt(value.encode() if isinstance(value, str) else msgspec.json.encode(value))


_TOO_LONG = re.compile(
    r"context.?(length|size|window|limit)"
    r"|(prompt|input|inputs|tokens)\b.{0,80}(too long|too large|longer than|larger than|exceed)"
    r"|(maximum|range of) (prompt|input) length|reduce the length of|token limit exceeded"
    r"|tokens.{0,40}must be <=|must have less than \d+ tokens",
    re.IGNORECASE,
)
REFUSING = (400, 413, 422)


def exceeds_context(status: int, text: str) -> bool:
    """Tell whether a refusal reports that prompt and answer exceed the model's context.

    Knows OpenAI, Anthropic, vLLM, SGLang, llama.cpp, TGI, TensorRT-LLM, Mistral, Gemini,
    LiteLLM, Groq, xAI, MLC, DashScope.
    """
    return status in REFUSING and _TOO_LONG.search(text) is not None


OVERLOAD = re.compile(r"overload|rate.?limit|too many requests|capacity|try again", re.IGNORECASE)


def stream_error(data: bytes) -> str | None:
    """Return the message where an event of a 200 stream is an error, else None.

    Shapes: ``error`` (OpenAI, SGLang, LiteLLM, Anthropic), ``object`` or ``type`` "error" (vLLM
    before 0.10, Responses), ``detail`` (FastAPI), ``errors`` (Cloudflare), a bare ``message`` (AWS,
    Azure), a status of 400 or more or ``success`` false (RFC 9457, Baidu), ``base_resp`` (MiniMax),
    and any of them in a list (Gemini).
    """
    value = decoded(data)
    if isinstance(value, list):
        value = next((item for item in value if isinstance(item, dict)), None)
    if not isinstance(value, dict):
        return None
    named = any(value.get(name) for name in ("error", "errors", "detail"))
    typed = "error" in (value.get("object"), value.get("type"))
    bare = isinstance(value.get("message"), str) and "choices" not in value
    status = next((s for name in _STATUSES if isinstance(s := value.get(name), int)), 0)
    failed = "choices" not in value and (status >= 400 or value.get("success") is False)
    base = value.get("base_resp")
    refused = isinstance(base, dict) and bool(base.get("status_code"))
    is_error = named or typed or bare or failed or refused
    if not is_error:
        return None
    whole = json.dumps(value)
    text = error_text(whole.encode())
    by_type = OVERLOAD.search(whole) and not OVERLOAD.search(text)
    return f"{text} (overloaded)" if by_type else text
