"""Validate sampling parameters and the token limit as vLLM does. No I/O."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ampacity.simulator.server.apierrors import ApiError, bad_value, invalid

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
    top_logprobs: int | None = None


class ChatFields(Fields):
    logprobs: bool | None = None


class CompletionFields(Fields):
    logprobs: int | None = None


_RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (  # field, its test, the demand
    ("temperature", lambda x: x >= 0, "must be non-negative"),
    ("top_p", lambda x: 0 < x <= 1, "must be in (0, 1]"),
    ("n", lambda x: x >= 1, "must be at least 1"),
    ("min_tokens", lambda x: x >= 0, "must be greater than or equal to 0"),
)


def read_fields(body: Mapping[str, Any], chat: bool) -> ChatFields | CompletionFields:
    """Check the types of all fields and the values of the sampling parameters. Raises ApiError."""
    fields: ChatFields | CompletionFields
    try:
        if chat:
            fields = msgspec.convert(body, ChatFields)
        else:
            fields = msgspec.convert(body, CompletionFields)
    except msgspec.ValidationError as error:
        raise invalid("body", str(error)) from error
    for field, holds, demand in _RANGES:
        value = getattr(fields, field)
        if value is not None and not holds(value):
            raise bad_value(field, value, f"{field} {demand}, got {value}.")
    return fields


def top_logprobs(fields: ChatFields | CompletionFields) -> int | None:
    """Return the number of log-probabilities of each token; None: none. Raises ApiError."""
    chat = isinstance(fields, ChatFields)
    field, top = ("top_logprobs", fields.top_logprobs) if chat else ("logprobs", fields.logprobs)
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        raise bad_value(field, top, f"{field} must be from 0 to {MAX_LOGPROBS}.")
    if chat and top and not fields.logprobs:
        message = "when using `top_logprobs`, `logprobs` must be set to true."
        raise bad_value("top_logprobs", top, message)
    return (top or 0) if chat and fields.logprobs else None if chat else top


def output_limit(fields: Fields, prompt_tokens: int, max_model_len: int) -> int:
    """Return the maximum number of output tokens. Raises ApiError."""
    chat, room = isinstance(fields, ChatFields), max_model_len - prompt_tokens
    modern = chat and fields.max_completion_tokens is not None
    field = "max_completion_tokens" if modern else "max_tokens"
    limit: int | None = getattr(fields, field)
    if room < 1:
        what = f"your prompt contains at least {prompt_tokens} input tokens"
        raise _too_long(prompt_tokens, max_model_len, f"{what}, which leaves no room for an output")
    if limit is None:
        limit = room if chat else min(DEFAULT_COMPLETION_TOKENS, room)
    if limit < 1:
        raise bad_value(field, limit, f"{field} must be at least 1, got {limit}.")
    if limit > room:
        what = f"you requested {limit} output tokens and your prompt contains at least "
        total = f"{prompt_tokens} input tokens, for a total of at least {prompt_tokens + limit}"
        raise _too_long(prompt_tokens, max_model_len, what + total)
    if (min_tokens := fields.min_tokens or 0) > limit:
        message = f"min_tokens must be less than or equal to max_tokens={limit}, got {min_tokens}."
        raise bad_value("min_tokens", min_tokens, message)
    return limit


def _too_long(prompt_tokens: int, max_model_len: int, what: str) -> ApiError:
    message = (
        f"This model's maximum context length is {max_model_len} tokens. However, {what} tokens. "
        "Please reduce the length of the input prompt or the number of requested output tokens."
    )
    return bad_value("input_tokens", prompt_tokens, message)
