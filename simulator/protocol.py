"""What a request to the OpenAI-compatible endpoints asks for, checked as vLLM checks it. No I/O.

A token is one word: a prompt has as many tokens as white-space separated words, and CHAT_OVERHEAD_TOKENS
more for a chat's template. What is not simulated is refused, not ignored.
"""

import json
import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

CHAT_OVERHEAD_TOKENS = 8
DEFAULT_COMPLETION_TOKENS = 16  # of /v1/completions without max_tokens, as in vLLM
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
# Fields that would change the answer in a way that is not simulated, with the values that ask for nothing.
_NOT_SIMULATED: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "prompt_logprobs": (None,),
    "echo": (None, False),
    "stop": (None, [], ""),
    "stop_token_ids": (None, []),
    "tools": (None, []),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
}


class ApiError(Exception):
    """An answer other than 200, with vLLM's body."""

    def __init__(self, status: int, message: str, kind: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = json.dumps(
            {"error": {"message": message, "type": kind, "param": param, "code": status}}, ensure_ascii=False
        ).encode("utf-8", "replace")


def _invalid(field: str, message: str) -> ApiError:
    return ApiError(
        400, f"1 validation error:\n  {{'loc': '{field}', 'msg': '{message}'}}", "Bad Request", field
    )


def _bad_value(field: str, value: object, message: str) -> ApiError:
    return ApiError(400, f"{message} (parameter={field}, value={value})", "BadRequestError", field)


@dataclass(frozen=True, slots=True)
class Call:
    """One validated request for tokens."""

    chat: bool
    request_id: str
    prompt_tokens: int
    output_tokens: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    text_seed: int


def decode(body: bytes) -> dict[str, Any]:
    """The JSON object in a body. Raises ApiError."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise _invalid("body", f"JSON decode error: {error}") from error
    if not isinstance(value, dict):
        raise _invalid("body", "Input should be a valid dictionary")
    return value


def count_words(body: Mapping[str, Any]) -> int:
    """Prompt tokens of a body with `messages` or `prompt`. Raises ApiError."""
    if "messages" in body:
        return CHAT_OVERHEAD_TOKENS + _message_words(body["messages"])
    return _prompt_words(body.get("prompt"))


def _message_words(messages: object) -> int:
    if not isinstance(messages, list):
        raise _invalid("body.messages", "Input should be a valid list")
    if not messages:
        raise _invalid("body.messages", "List should have at least 1 item")
    words = 0
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _invalid(f"body.messages.{index}", "Input should be an object with a role")
        content = message.get("content")
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
            if isinstance(text, str):
                words += len(text.split())
            elif text is not None:
                raise _invalid(f"body.messages.{index}.content", "Only text is simulated")
    return words


def _prompt_words(prompt: object) -> int:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return max(1, len(prompt.split()))
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return len(prompt)
    if prompt is None:
        raise _invalid("body.prompt", "Field required")
    raise _invalid(
        "body.prompt", "Input should be one string or one list of token ids; batches are not simulated"
    )


def parse(
    body: Mapping[str, Any],
    *,
    chat: bool,
    model: str,
    max_model_len: int,
    default_id: str,
    header_id: str | None,
) -> Call:
    """Check a request as vLLM does. Raises ApiError: 400 for bad fields and lengths, 404 for another model."""
    required = "messages" if chat else "prompt"
    if required not in body:
        raise _invalid(f"body.{required}", "Field required")
    prompt_tokens = (
        _message_words(body["messages"]) + CHAT_OVERHEAD_TOKENS if chat else _prompt_words(body["prompt"])
    )
    stream = _flag(body, "stream")
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise _invalid("body.stream_options", "Input should be a valid dictionary")
    if options and not stream:
        raise _invalid("body.stream_options", "Stream options can only be defined when `stream=True`.")
    _flag(body, "ignore_eos")
    _check_sampling(body)
    asked = body.get("model")
    if asked is not None and not isinstance(asked, str):
        raise _invalid("body.model", "Input should be a valid string")
    if asked not in (None, model):
        message = f"The model `{asked}` does not exist. Valid aliases: {model}."
        raise ApiError(404, message, "NotFoundError", "model")
    for field, neutral in _NOT_SIMULATED.items():
        if field in body and not any(
            type(body[field]) is type(value) and body[field] == value for value in neutral
        ):
            raise _bad_value(field, body[field], f"{field} is not simulated; leave it out.")
    usage = options or {}
    include_usage = _flag(usage, "include_usage")
    seed = body.get("seed")
    identity = header_id if header_id and _REQUEST_ID.fullmatch(header_id) else default_id
    return Call(
        chat=chat,
        request_id=("chatcmpl-" if chat else "cmpl-") + identity,
        prompt_tokens=prompt_tokens,
        output_tokens=_output_tokens(body, chat, prompt_tokens, max_model_len),
        stream=stream,
        include_usage=include_usage,
        continuous_usage=include_usage and _flag(usage, "continuous_usage_stats"),
        text_seed=zlib.crc32(default_id.encode()) if seed is None else seed,
    )


def _flag(body: Mapping[str, Any], field: str) -> bool:
    value = body.get(field)
    if value is not None and not isinstance(value, bool):
        raise _invalid(f"body.{field}", "Input should be a valid boolean")
    return bool(value)


def _number(body: Mapping[str, Any], field: str) -> float | None:
    value = body.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _invalid(f"body.{field}", "Input should be a valid number")
    return float(value)


def _integer(body: Mapping[str, Any], field: str) -> int | None:
    value = body.get(field)
    if value is not None and type(value) is not int:
        raise _invalid(f"body.{field}", "Input should be a valid integer")
    return value


def _check_sampling(body: Mapping[str, Any]) -> None:
    temperature, top_p = _number(body, "temperature"), _number(body, "top_p")
    if temperature is not None and temperature < 0:
        raise _bad_value("temperature", temperature, f"temperature must be non-negative, got {temperature}.")
    if top_p is not None and not 0 < top_p <= 1:
        raise _bad_value("top_p", top_p, f"top_p must be in (0, 1], got {top_p}.")
    _integer(body, "seed")


def _output_tokens(body: Mapping[str, Any], chat: bool, prompt_tokens: int, max_model_len: int) -> int:
    if prompt_tokens >= max_model_len:
        raise _bad_value(
            "input_tokens",
            prompt_tokens,
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains at least "
            f"{prompt_tokens} input tokens, which leaves no room for an output token. "
            "Please reduce the length of the input prompt.",
        )
    field = (
        "max_completion_tokens" if chat and body.get("max_completion_tokens") is not None else "max_tokens"
    )
    limit = _integer(body, field)
    min_tokens = _integer(body, "min_tokens") or 0
    room = max_model_len - prompt_tokens
    if limit is None:
        limit = room if chat else min(DEFAULT_COMPLETION_TOKENS, room)
    if limit < 1:
        raise _bad_value(field, limit, f"{field} must be at least 1, got {limit}.")
    if limit > max_model_len:
        raise _bad_value(
            field,
            limit,
            f"{field}={limit} cannot be greater than max_model_len={max_model_len}. Please request fewer output tokens.",
        )
    if limit > room:
        raise _bad_value(
            "input_tokens",
            prompt_tokens,
            f"This model's maximum context length is {max_model_len} tokens. However, you requested {limit} output "
            f"tokens and your prompt contains at least {prompt_tokens} input tokens, for a total of at least "
            f"{prompt_tokens + limit} tokens. Please reduce the length of the input prompt or the number of "
            "requested output tokens.",
        )
    if not 0 <= min_tokens <= limit:
        raise _bad_value(
            "min_tokens", min_tokens, f"min_tokens must be in [0, max_tokens={limit}], got {min_tokens}."
        )
    return limit
