"""Validate sampling parameters and the token limit as vLLM does. No I/O."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from ampacity.simulator.server.apierrors import ApiError, bad_value, invalid

DEFAULT_COMPLETION_TOKENS = 16  # of /v1/completions without max_tokens, as in vLLM
MAX_LOGPROBS = 20
MAX_CHOICES = 512  # answers of one request: n times its prompts


@dataclass(frozen=True, slots=True)
class Sampling:
    n: int
    seed: int | None
    min_tokens: int
    ignore_eos: bool
    stop: tuple[str, ...]
    include_stop: bool
    top_logprobs: int | None  # None: no log-probabilities


@dataclass(frozen=True, slots=True)
class _Check:
    """The type and the range of a number, and vLLM's words for a value outside of it."""

    read: Callable[[Mapping[str, Any], str], float | None]
    within: Callable[[float], bool]
    demand: str


def sampling(body: Mapping[str, Any], chat: bool) -> Sampling:
    """Parse the sampling parameters. Raises ApiError."""
    for field in ("temperature", "top_p"):  # both types are checked before either range
        _number(body, field)
    values = {field: _checked(body, field) for field in _CHECKS}
    n, min_tokens = values["n"], values["min_tokens"]
    return Sampling(
        n=1 if n is None else int(n),
        seed=integer(body, "seed"),
        min_tokens=int(min_tokens or 0),
        ignore_eos=flag(body, "ignore_eos"),
        stop=_stop(body),
        include_stop=flag(body, "include_stop_str_in_output"),
        top_logprobs=_chat_logprobs(body) if chat else _logprobs(body, "logprobs"),
    )


def _checked(body: Mapping[str, Any], field: str) -> float | None:
    check = _CHECKS[field]
    value = check.read(body, field)
    if value is not None and not check.within(value):
        raise bad_value(field, value, f"{field} {check.demand}, got {value}.")
    return value


def _stop(body: Mapping[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop")
    strings = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, list) or not all(isinstance(string, str) for string in strings):
        raise invalid(
            "body.stop", "Input should be a string or a list of strings", stop, kind="list_type"
        )
    if "" in strings:
        raise bad_value("stop", stop, "stop cannot contain an empty string.")
    return tuple(strings)


def _chat_logprobs(body: Mapping[str, Any]) -> int | None:
    top = _logprobs(body, "top_logprobs")
    if not flag(body, "logprobs"):
        if top:
            raise bad_value(
                "top_logprobs", top, "when using `top_logprobs`, `logprobs` must be set to true."
            )
        return None
    return top or 0


def _logprobs(body: Mapping[str, Any], field: str) -> int | None:
    top = integer(body, field)
    if top is not None and top < 0:
        raise bad_value(field, top, f"`{field}` must be a positive value.")
    if top is not None and top > MAX_LOGPROBS:
        message = (
            f"Requested sample logprobs of {top}, which is greater than max allowed: {MAX_LOGPROBS}"
        )
        raise bad_value(field, top, message)
    return top


def output_limit(
    body: Mapping[str, Any], chat: bool, prompt_tokens: int, max_model_len: int
) -> int:
    """Return the maximum number of output tokens. Raises ApiError."""
    if prompt_tokens >= max_model_len:
        rest = "leaves no room for an output token"
        if prompt_tokens > max_model_len:
            rest = "exceeds this limit even without any output tokens"
        what = f"your prompt contains at least {prompt_tokens} input tokens, which {rest}."
        raise _too_long(prompt_tokens, max_model_len, what)
    modern = chat and body.get("max_completion_tokens") is not None
    field = "max_completion_tokens" if modern else "max_tokens"
    limit = integer(body, field)
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
    min_tokens = integer(body, "min_tokens") or 0
    if min_tokens > limit:
        message = f"min_tokens must be less than or equal to max_tokens={limit}, got {min_tokens}."
        raise bad_value("min_tokens", min_tokens, message)
    return limit


def _too_long(prompt_tokens: int, max_model_len: int, what: str) -> ApiError:
    message = f"This model's maximum context length is {max_model_len} tokens. However, {what} "
    advice = "Please reduce the length of the input prompt"
    advice += "." if "requested" not in what else " or the number of requested output tokens."
    return bad_value("input_tokens", prompt_tokens, message + advice)


def flag(body: Mapping[str, Any], field: str, parent: str = "body.") -> bool:
    return bool(
        _typed(body, field, "boolean", "bool_type", lambda value: isinstance(value, bool), parent)
    )


def integer(body: Mapping[str, Any], field: str) -> int | None:
    value: int | None = _typed(body, field, "integer", "int_type", lambda value: type(value) is int)
    return value


def _number(body: Mapping[str, Any], field: str) -> float | None:
    def finite(value: object) -> bool:
        return type(value) in (int, float) and math.isfinite(cast(float, value))

    value = _typed(body, field, "number", "float_type", finite)
    return None if value is None else float(value)


def _typed(
    body: Mapping[str, Any],
    field: str,
    noun: str,
    kind: str,
    fits: Callable[[object], bool],
    parent: str = "body.",
) -> Any:
    value = body.get(field)
    if value is not None and not fits(value):
        raise invalid(parent + field, f"Input should be a valid {noun}", value, kind=kind)
    return value


# The first violation is the one reported.
_CHECKS = {
    "temperature": _Check(_number, lambda value: value >= 0, "must be non-negative"),
    "top_p": _Check(_number, lambda value: 0 < value <= 1, "must be in (0, 1]"),
    "n": _Check(integer, lambda value: value >= 1, "must be at least 1"),
    "min_tokens": _Check(integer, lambda value: value >= 0, "must be greater than or equal to 0"),
}
