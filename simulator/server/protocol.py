"""Parse and validate requests to the OpenAI-compatible endpoints as vLLM does. No I/O.

A token is one word: a prompt has as many tokens as white-space separated words, and
CHAT_OVERHEAD_TOKENS more for a chat's template. Features that are not simulated are rejected.
"""

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from ampacity.simulator.server.apierrors import ApiError, bad_json, bad_value, invalid
from ampacity.simulator.server.sampling import (
    MAX_CHOICES,
    Sampling,
    StreamOptions,
    output_limit,
    read_fields,
    sampling,
)
from ampacity.simulator.server.text import Ending, characters, ending

Api = Literal["chat", "completions", "responses", "messages", "embeddings"]
CONVERSATIONS = ("chat", "responses", "messages")
_ID_PREFIX = {"chat": "chatcmpl-", "completions": "cmpl-", "messages": "msg_"}
CHAT_OVERHEAD_TOKENS = 8
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_CHOICE_STRIDE = 7919  # the seeds of the choices of one request lie this far apart
# Fields that are not simulated, with their neutral values.
_NOT_SIMULATED: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "prompt_logprobs": (None,),
    "echo": (None, False),
    "suffix": (None, ""),
    "stop_token_ids": (None, []),
    "tools": (None, []),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "use_beam_search": (None, False),
}


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer: seed and ending determine its text."""

    index: int
    seed: int
    prompt: int  # which of the request's prompts it answers
    ending: Ending


@dataclass(frozen=True, slots=True)
class Call:
    """One validated request for tokens."""

    api: Api
    request_id: str
    model: str
    prompts: tuple[Sequence[Any], ...]  # words or token ids, with a chat's template
    choices: tuple[Choice, ...]
    limit_tokens: int  # of each choice
    stream: bool
    include_usage: bool
    continuous_usage: bool
    top_logprobs: int | None  # None: no log-probabilities
    held_characters: int  # of a stream: a possible start of a stop string

    @property
    def chat(self) -> bool:
        """True for a conversation, which has a chat's template."""
        return self.api in CONVERSATIONS

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        return sum(choice.ending.tokens for choice in self.choices)


def block_hashes(call: Call, choice: Choice, block_tokens: int) -> list[int]:
    """Return names of the full KV blocks of prompt and answer: hashes of all words up to their end.

    The next turn of a conversation finds the blocks of the answer too.
    """
    answered = characters(choice.seed, 0, choice.ending.characters).split()
    words = [*call.prompts[choice.prompt], *answered]
    hashes = []
    name = hash(call.model)
    for start in range(0, len(words) - block_tokens + 1, block_tokens):
        name = hash((name, *words[start : start + block_tokens]))
        hashes.append(name)
    return hashes


def decode(body: bytes) -> dict[str, Any]:
    """Decode the JSON object in a body. Raises ApiError."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise bad_json(body, error) from error
    if not isinstance(value, dict):
        raise invalid(
            "body", "Input should be a valid dictionary or object to extract fields from", value
        )
    return value


def words_of(body: Mapping[str, Any]) -> Sequence[Any]:
    """Return the words of a body with `messages` or `prompt`. Raises ApiError."""
    if "messages" in body:
        return _chat_words(body["messages"])
    return _one_prompt("body.prompt", body.get("prompt"))


def _chat_words(messages: object) -> list[str]:
    if not isinstance(messages, list):
        raise invalid("body.messages", "Input should be a valid list", messages, kind="list_type")
    if not messages:
        raise invalid(
            "body.messages", "List should have at least 1 item", messages, kind="too_short"
        )
    words = ["<template>"] * CHAT_OVERHEAD_TOKENS
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise invalid(
                f"body.messages.{index}", "Input should be an object with a role", message
            )
        content = message.get("content")
        for part in content if isinstance(content, list) else [content]:
            text = (
                part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
            )
            if isinstance(text, str):
                words += text.split()
            elif text is not None:
                raise invalid(f"body.messages.{index}.content", "Only text is simulated", text)
    return words


def _prompts(prompt: object) -> list[Sequence[Any]]:
    """Parse a string, token ids, or a list of either."""
    if prompt is None:
        raise invalid("body.prompt", "Field required", kind="missing")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return [_one_prompt(f"body.prompt.{index}", one) for index, one in enumerate(prompt)]
    return [_one_prompt("body.prompt", prompt)]


def _one_prompt(field: str, prompt: object) -> Sequence[Any]:
    if isinstance(prompt, str):
        return prompt.split() or [""]
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return prompt
    raise invalid(field, "Input should be a string or a list of token ids, not empty", prompt)


def parse(
    body: Mapping[str, Any],
    *,
    api: Api,
    models: Sequence[str],
    max_model_len: int,
    default_id: str,
    header_id: str | None,
    natural_tokens: float | None = None,
) -> Call:
    """Validate a request. Raises ApiError: 400 for bad fields and lengths, 404 for another model.

    models: the names served, the default first. natural_tokens: see Face. Bodies of other APIs are
    converted by ``ampacity.simulator.server.other_apis`` before.
    """
    chat = api in CONVERSATIONS
    required = "messages" if chat else "prompt"
    if required not in body:
        raise invalid(f"body.{required}", "Field required", body, kind="missing")
    prompts = [_chat_words(body["messages"])] if chat else _prompts(body["prompt"])
    fields = read_fields(body, chat)
    stream, options = bool(fields.stream), fields.stream_options or StreamOptions()
    if body.get("stream_options") and not stream:
        text = "Stream options can only be defined when `stream=True`."
        raise invalid("body.stream_options", text, body["stream_options"])
    include_usage = bool(options.include_usage)
    asked = sampling(fields)
    model = _model(fields.model, models)
    for field, neutral in _NOT_SIMULATED.items():
        if field in body and not any(
            type(body[field]) is type(value) and body[field] == value for value in neutral
        ):
            raise bad_value(field, body[field], f"{field} is not simulated; leave it out.")
    limit = output_limit(fields, max(map(len, prompts)), max_model_len)
    if len(prompts) * asked.n > MAX_CHOICES:
        raise bad_value(
            "n", asked.n, f"at most {MAX_CHOICES} answers in one request are simulated."
        )
    seed = zlib.crc32(default_id.encode()) if asked.seed is None else asked.seed
    name = header_id if header_id and _REQUEST_ID.fullmatch(header_id) else default_id
    held = 0 if asked.include_stop else max(map(len, asked.stop), default=1) - 1  # as vLLM
    return Call(
        api=api,
        request_id=_ID_PREFIX.get(api, "") + name,
        model=model,
        prompts=tuple(prompts),
        choices=_choices(prompts, asked, seed, limit, natural_tokens),
        limit_tokens=limit,
        stream=stream,
        include_usage=include_usage,
        continuous_usage=include_usage and bool(options.continuous_usage_stats),
        top_logprobs=asked.top_logprobs,
        held_characters=held,
    )


def _choices(
    prompts: Sequence[Sequence[Any]],
    asked: Sampling,
    seed: int,
    limit: int,
    natural_tokens: float | None,
) -> tuple[Choice, ...]:
    choices = []
    for number, prompt in enumerate(prompts):
        # Other prompts have other answers, also with the same seed.
        own_seed = seed + zlib.crc32(" ".join(map(str, prompt)).encode("utf-8", "replace"))
        for index in range(number * asked.n, (number + 1) * asked.n):
            choice_seed = own_seed + (index - number * asked.n) * _CHOICE_STRIDE
            end = ending(
                choice_seed,
                limit,
                min_tokens=asked.min_tokens,
                stop=asked.stop,
                include_stop=asked.include_stop,
                mean_tokens=None if asked.ignore_eos else natural_tokens,
            )
            choices.append(Choice(index, choice_seed, number, end))
    return tuple(choices)


def _model(asked: str | None, models: Sequence[str]) -> str:
    if asked is None or asked in models:
        return asked or models[0]
    message = f"The model `{asked}` does not exist. Valid aliases: {', '.join(models)}."
    raise ApiError(404, message, "NotFoundError", "model")
