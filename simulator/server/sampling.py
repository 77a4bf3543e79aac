"""Validate sampling parameters and the token limit as vLLM does. No I/O."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from ampacity.simulator.server.apierrors import invalid

DEFAULT_COMPLETION_TOKENS = 16  # of /v1/completions without max_tokens, as in vLLM
MAX_LOGPROBS = 20
MAX_CHOICES = 512  # answers of one request: n times its prompts


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Fields(msgspec.Struct):
    """The types of the fields of a request, without its prompt."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool | None = None
    top_logprobs: int | None = None


class ChatFields(Fields):
    logprobs: bool | None = None


class CompletionFields(Fields):
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    n: int
    seed: int | None
    min_tokens: int
    ignore_eos: bool
    stop: tuple[str, ...]
    include_stop: bool
    top_logprobs: int | None  # None: no log-probabilities


def read_fields(body: Mapping[str, Any], chat: bool) -> ChatFields | CompletionFields:
    """Check the types of all fields. Raises ApiError."""
    try:
        return (
            msgspec.convert(body, ChatFields) if chat else msgspec.convert(body, CompletionFields)
        )
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        raise invalid(f"body{path.rstrip('`')}", text) from error


def sampling(fields: ChatFields | CompletionFields) -> Sampling:
    """Check the values of the sampling parameters. Raises ApiError."""
    temperature, top_p, min_tokens = fields.temperature, fields.top_p, fields.min_tokens or 0
    n = 1 if fields.n is None else fields.n
    stop = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    for field, ok, demand in (
        ("temperature", temperature is None or temperature >= 0, "must be non-negative"),
        ("top_p", top_p is None or 0 < top_p <= 1, "must be in (0, 1]"),
        ("n", n >= 1, "must be at least 1"),
        ("min_tokens", min_tokens >= 0, "must be greater than or equal to 0"),
    ):
        if not ok:
            raise invalid(f"body.{field}", f"{field} {demand}, got {getattr(fields, field)}.")
    if "" in stop:
        raise invalid("body.stop", "stop cannot contain an empty string.")
    return Sampling(
        n=n,
        seed=fields.seed,
        min_tokens=min_tokens,
        ignore_eos=bool(fields.ignore_eos),
        stop=tuple(stop),
        include_stop=bool(fields.include_stop_str_in_output),
        top_logprobs=_top_logprobs(fields),
    )


def _top_logprobs(fields: ChatFields | CompletionFields) -> int | None:
    chat = isinstance(fields, ChatFields)
    field, top = ("top_logprobs", fields.top_logprobs) if chat else ("logprobs", fields.logprobs)
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        raise invalid(f"body.{field}", f"must be from 0 to {MAX_LOGPROBS}, got {top}")
    if chat and top and not fields.logprobs:
        raise invalid("body.top_logprobs", "`logprobs` must be set to true.")
    return (top or 0) if chat and fields.logprobs else None if chat else top


def output_limit(fields: Fields, prompt_tokens: int, max_model_len: int) -> int:
    """Return the maximum number of output tokens. Raises ApiError."""
    chat = isinstance(fields, ChatFields)
    modern = chat and fields.max_completion_tokens is not None
    field = "max_completion_tokens" if modern else "max_tokens"
    limit: int | None = getattr(fields, field)
    room = max_model_len - prompt_tokens
    if limit is None:
        limit = max(room if chat else min(DEFAULT_COMPLETION_TOKENS, room), 1)
    if limit < 1:
        raise invalid(f"body.{field}", f"{field} must be at least 1, got {limit}.")
    if limit > room:
        raise invalid(
            "body.messages" if chat else "body.prompt",
            f"This model's maximum context length is {max_model_len} tokens. However, you "
            f"requested {limit} output tokens and your prompt contains at least {prompt_tokens} "
            f"input tokens, for a total of at least {prompt_tokens + limit} tokens. Please reduce "
            "the length of the input prompt or the number of requested output tokens.",
        )
    if (fields.min_tokens or 0) > limit:
        raise invalid("body.min_tokens", f"must be at most {field}={limit}")
    return limit
