"""What is asked of a server, by API; how it is answered is in ``answers``."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, TypeVar

import msgspec

from ampacity.loadgen.send.halves import ESCAPED_HALF, with_whole_characters

T = TypeVar("T")
NESTED_MAX = 500  # brackets

Api = Literal["chat", "completions", "responses", "messages", "embeddings"]
PATHS: dict[Api, str] = {
    "chat": "/chat/completions",
    "completions": "/completions",
    "responses": "/responses",  # OpenAI's Responses API
    "messages": "/messages",  # Anthropic's Messages API
    "embeddings": "/embeddings",
}
ANTHROPIC_VERSION = "2023-06-01"


@dataclass(frozen=True)
class Dialect:
    """Which optional request fields this server takes; found by the probe."""

    ignore_eos: bool = True
    stream_usage: bool = True
    continuous_usage: bool = True
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"


@dataclass(frozen=True)
class RequestShape:
    """All of a request but its prompt and lengths. ``extra`` is the user's and wins."""

    api: Api
    model: str
    dialect: Dialect = Dialect()
    extra: dict[str, Any] = field(default_factory=dict)

    def body(self, prompt: str | msgspec.Raw, output_tokens: int) -> bytes:
        """The JSON body that asks for exactly ``output_tokens`` tokens, as far as the server can.

        ``prompt``: the text of the one message, or (where the API has messages) the JSON array of all of them.
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
    """Foreign text as one line that no terminal takes for a command."""
    if len(text) <= limit and text.isalnum():  # most reasons of an end
        return text
    text = " ".join(text[: limit * 4].split())
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def excerpt(data: bytes, limit: int = 200) -> str:
    """The beginning of a body as one printable line."""
    return printable(data[: limit * 2].decode("utf-8", "replace"), limit)


def with_halves(data: bytes, kind: type[T]) -> T | None:
    """JSON that ``msgspec`` refuses because one of its texts holds half of a character; None where it is no such JSON.

    A gateway that cuts an answer into events cuts between the two escapes of a character too. The halves stay in the
    texts as they are, so that ``whole_characters`` can join them.
    """
    if not ESCAPED_HALF.search(data):
        return None
    if (
        data.count(b"[") + data.count(b"{") > NESTED_MAX
    ):  # which may be nested too deep to be looked at
        return None
    try:
        return msgspec.convert(json.loads(data, parse_constant=_no_number), kind)
    except (ValueError, msgspec.ValidationError, RecursionError):
        return None


def decoded(data: bytes) -> Any:
    """The value of a JSON text, with U+FFFD for halves of characters; None where it is none."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return with_whole_characters(with_halves(data, object))


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


_ERRORS = ("error", "detail", "errors", "message", "base_resp", "msg", "status_msg", "title")
_STATUSES = ("code", "status", "status_code", "statusCode")


def error_text(body: bytes) -> str:
    """The server's own message in an error body: objects, strings, ``detail``, plain text or HTML."""
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
    r"context.?(length|size|window|limit)|(prompt|input|inputs|tokens)\b.{0,80}(too long|too large|longer than|exceed)"
    r"|tokens.{0,40}must be <=|must have less than \d+ tokens",
    re.IGNORECASE,
)
REFUSING = (400, 413, 422)


def exceeds_context(status: int, text: str) -> bool:
    """Whether a refusal says that prompt and answer are longer than the model's context: the client's doing.

    In the words of OpenAI, Anthropic, vLLM, SGLang, llama.cpp, TGI, TensorRT-LLM, Mistral, Gemini and LiteLLM.
    """
    return status in REFUSING and _TOO_LONG.search(text) is not None


def stream_error(data: bytes) -> str | None:
    """The server's words where an event of a 200 stream is an error, by any provider's shape; None where it is none.

    An object named ``error`` (OpenAI, SGLang, LiteLLM, Anthropic), ``object`` or ``type`` "error" (vLLM before 0.10,
    Responses), ``detail`` (FastAPI), ``errors`` (Cloudflare), a bare ``message`` (AWS, Azure), a status of 400 or more or no
    ``success``, whatever the words are named (RFC 9457, Baidu), ``base_resp`` (MiniMax), and any of them in a list (Gemini).
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
    told = named or typed or bare or failed or refused
    return error_text(json.dumps(value).encode()) if told else None


def retry_after_s(value: bytes) -> float | None:
    """Seconds, also where the server names a date (RFC 9110, 10.2.3); None where it is neither."""
    from datetime import UTC, datetime
    from email.utils import parsedate_to_datetime  # here: only failures need it

    try:
        seconds = float(value)
        return seconds if 0 <= seconds < float("inf") else None
    except ValueError:
        pass
    try:
        due = parsedate_to_datetime(value.decode("latin-1"))
        return max(0.0, (due.replace(tzinfo=due.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
    except (ValueError, OverflowError):
        return None
