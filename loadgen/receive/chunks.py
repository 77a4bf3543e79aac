"""Decode chunks of chat completions and completions: their text, kind and token counts."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from ampacity.loadgen.receive.templates import ChunkContent
from ampacity.loadgen.receive.thinking import Kind

TOKENS_MAX = 2**31 - 1  # the records' columns are int32
BAD_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Usage(msgspec.Struct, gc=False):
    prompt_tokens: Any = None
    completion_tokens: Any = None
    prompt_tokens_details: Any = None
    completion_tokens_details: Any = None
    reasoning_tokens: Any = None  # SGLang


class Delta(msgspec.Struct, gc=False):
    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: Any = None
    function_call: Any = None  # OpenAI's deprecated form
    refusal: Any = None
    error: Any = None  # of gateways that wrap an upstream's error


class _Entry(msgspec.Struct, gc=False):
    """A token's log-probabilities, which nobody reads."""


class Logprobs(msgspec.Struct, gc=False):
    """The log-probabilities of a choice: one entry for each token."""

    content: list[_Entry] | None = None
    tokens: list[Any] | None = None


L = TypeVar("L")


class _Choice(msgspec.Struct, Generic[L], gc=False):  # fields in the servers' order decode fastest
    index: Any = None
    delta: Delta | None = None
    message: Delta | None = None
    text: Any = None
    logprobs: L | None = None
    finish_reason: Any = None
    token_ids: Any = None
    error: Any = None  # OpenRouter


class _Chunk(msgspec.Struct, Generic[L], gc=False):
    choices: list[_Choice[L]] | None = None
    usage: Usage | None = None
    error: Any = None
    detail: Any = None


Choice = _Choice[Any]
Chunk = _Chunk[Any]
# entries of log-probabilities are not decoded, which would take half of the time
decode_chunk: Callable[[bytes], Chunk | None]
decode_chunk = msgspec.json.Decoder(_Chunk[Logprobs] | None).decode


def kind_and_text(choice: Choice) -> tuple[Kind, str] | None:
    """Return the content of a choice, or None where it carries no token.

    Text sent under two names counts once; tool calls carry tokens but no text.
    """
    delta = choice.delta or choice.message
    if delta is None:
        return ("answer", _first_text(choice.text)) if choice.text else None
    content = delta.content
    if content.__class__ is str and content:  # nearly every chunk
        return "answer", content
    if isinstance(content, list) and content:  # Mistral's content parts
        return _kind_and_text_of_parts(content)
    if content or delta.refusal:
        kind: Kind = "answer"
    elif delta.reasoning_content or delta.reasoning:
        kind = "reasoning"
    else:
        return ("answer", "") if delta.tool_calls or delta.function_call else None
    reasoning = delta.reasoning_content, delta.reasoning
    return kind, _first_text(content, delta.refusal, *reasoning, choice.text)


def _first_text(*candidates: Any) -> str:
    for text in candidates:
        if isinstance(text, str) and text:
            return text
    return ""


def _kind_and_text_of_parts(parts: list[Any]) -> tuple[Kind, str] | None:
    parts = [part for part in parts if isinstance(part, dict)]
    if not parts:
        return None
    thinks = {str(part.get("type")) for part in parts} <= {"thinking", "reasoning"}
    inner = [part.get("text", part.get("thinking")) for part in parts]
    flat = [piece for one in inner for piece in (one if isinstance(one, list) else [one])]
    texts = [piece.get("text") if isinstance(piece, dict) else piece for piece in flat]
    return "reasoning" if thinks else "answer", "".join(t for t in texts if isinstance(t, str))


def error_of(choice: Choice) -> Any:
    """Return the error object of a choice or of its delta or message, if it has one."""
    delta = choice.delta or choice.message
    return choice.error or (delta.error if delta is not None else None)


def tokens_in(choice: Choice) -> int | None:
    """Return the number of tokens that ``token_ids`` or logprobs list, or None."""
    tokens, listed = choice.token_ids, choice.logprobs
    if isinstance(tokens, list) and tokens:
        return len(tokens)
    if isinstance(listed, Logprobs):
        tokens = listed.content or listed.tokens
    elif isinstance(listed, dict):
        tokens = listed.get("content") or listed.get("tokens")
    return len(tokens) if isinstance(tokens, list) and tokens else None


def text_chunk_content(data: bytes) -> ChunkContent | None:
    """Return the content of an event with text, or a piece of a tool call, of one choice.

    None for everything else: such chunks cannot be matched by a template.
    """
    try:
        chunk = decode_chunk(data)
    except BAD_JSON:
        return None
    if chunk is None or chunk.error or not chunk.choices or len(chunk.choices) > 1:
        return None
    choice = chunk.choices[0]
    if choice.finish_reason or error_of(choice):
        return None
    if choice.token_ids is not None or (content := kind_and_text(choice)) is None:
        return None
    total = None if chunk.usage is None else token_count(chunk.usage.completion_tokens)
    (kind, text), call = content, None
    delta = choice.delta or choice.message
    if delta is not None and (delta.tool_calls or delta.function_call):
        piece = None if text else _piece_of_call(delta)
        if piece is None:
            return None
        call, text = piece
    return ChunkContent(kind, text, total or None, tokens_in(choice), call)


def _piece_of_call(delta: Delta) -> tuple[tuple[Any, Any, Any], str] | None:
    """Return key, id and name of the chunk's one tool call, and its arguments."""
    calls = delta.tool_calls
    if delta.function_call or not isinstance(calls, list) or len(calls) != 1:
        return None
    call = calls[0] if isinstance(calls[0], dict) else {}
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    if not isinstance(arguments := function.get("arguments"), str):
        return None
    return (call.get("index", 0), call.get("id"), function.get("name")), arguments


def token_count(value: Any) -> int | None:
    """Return ``value`` if it is a possible number of tokens, else None."""
    return value if type(value) is int and 0 <= value <= TOKENS_MAX else None  # a bool is no int


def token_detail(details: Any, name: str, default: int | None) -> int | None:
    """Return a count from usage's details, or ``default``."""
    value = token_count(details.get(name)) if isinstance(details, dict) else None
    return default if value is None else value
