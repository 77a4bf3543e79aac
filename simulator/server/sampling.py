"""Validate sampling parameters and the token limit as vLLM does. No I/O."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
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


# type of msgspec -> pydantic's noun and error type
_TYPES = {
    "int": ("integer", "int_type"),
    "float": ("number", "float_type"),
    "bool": ("boolean", "bool_type"),
    "str": ("string", "string_type"),
    "object": ("dictionary", "dict_type"),
}


def read_fields(body: Mapping[str, Any], chat: bool) -> ChatFields | CompletionFields:
    """Check the types of all fields. Raises ApiError with vLLM's message."""
    try:
        return (
            msgspec.convert(body, ChatFields) if chat else msgspec.convert(body, CompletionFields)
        )
    except msgspec.ValidationError as error:
        found = re.match(r"Expected `(\w+).* - at `\$\.([\w.]+)", str(error))
        if found is None:
            raise invalid("body", str(error)) from error
        wanted, path = found.groups()
        value: Any = body
        for name in path.split("."):
            value = value[name]
        if path == "stop":
            text = "Input should be a string or a list of strings"
            raise invalid("body.stop", text, value, kind="list_type") from error
        noun, kind = _TYPES[wanted]
        text = f"Input should be a valid {noun}"
        raise invalid(f"body.{path}", text, value, kind=kind) from error


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
            value = getattr(fields, field)
            raise bad_value(field, value, f"{field} {demand}, got {value}.")
    if "" in stop:
        raise bad_value("stop", fields.stop, "stop cannot contain an empty string.")
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
    if top is not None and top < 0:
        raise bad_value(field, top, f"`{field}` must be a positive value.")
    if top is not None and top > MAX_LOGPROBS:
        message = (
            f"Requested sample logprobs of {top}, which is greater than max allowed: {MAX_LOGPROBS}"
        )
        raise bad_value(field, top, message)
    if chat and top and not fields.logprobs:
        message = "when using `top_logprobs`, `logprobs` must be set to true."
        raise bad_value("top_logprobs", top, message)
    return (top or 0) if chat and fields.logprobs else None if chat else top


def output_limit(fields: Fields, prompt_tokens: int, max_model_len: int) -> int:
    """Return the maximum number of output tokens. Raises ApiError."""
    if prompt_tokens >= max_model_len:
        rest = "leaves no room for an output token"
        if prompt_tokens > max_model_len:
            rest = "exceeds this limit even without any output tokens"
        what = f"your prompt contains at least {prompt_tokens} input tokens, which {rest}."
        raise _too_long(prompt_tokens, max_model_len, what)
    chat = isinstance(fields, ChatFields)
    modern = chat and fields.max_completion_tokens is not None
    field = "max_completion_tokens" if modern else "max_tokens"
    limit: int | None = getattr(fields, field)
    room = max_model_len - prompt_tokens
    if limit is None:
        limit = room if chat else min(DEFAULT_COMPLETION_TOKENS, room)
    if limit < 1:
        raise bad_value(field, limit, f"{field} must be at least 1, got {limit}.")
    if limit > max_model_len:
        message = (
            f"{field}={limit} cannot be greater than max_model_len={max_model_len}. "
            "Please request fewer output tokens."
        )
        raise bad_value(field, limit, message)
    if limit > room:
        what = (
            f"you requested {limit} output tokens and your prompt contains at least "
            f"{prompt_tokens} input tokens, "
            f"for a total of at least {prompt_tokens + limit} tokens."
        )
        raise _too_long(prompt_tokens, max_model_len, what)
    min_tokens = fields.min_tokens or 0
    if min_tokens > limit:
        message = f"min_tokens must be less than or equal to max_tokens={limit}, got {min_tokens}."
        raise bad_value("min_tokens", min_tokens, message)
    return limit


def _too_long(prompt_tokens: int, max_model_len: int, what: str) -> ApiError:
    message = f"This model's maximum context length is {max_model_len} tokens. However, {what} "
    advice = "Please reduce the length of the input prompt"
    advice += "." if "requested" not in what else " or the number of requested output tokens."
    return bad_value("input_tokens", prompt_tokens, message + advice)
