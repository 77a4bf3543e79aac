"""Parse recorded messages in many forms, keep each once, and send them unchanged."""

import ast
import contextlib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ampacity.workloads.prompts.conversations import (
    CHARACTERS_PER_TOKEN,
    ROLES_OF_MESSAGES,
    is_part,
    is_visible,
)
from ampacity.workloads.prompts.prefixes import SharedPrefixes, take_lists

Ints = NDArray[np.int64]
Message = dict[str, Any]
SENT_FIELDS = (
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "functions",
    "function_call",
)
"""Fields of a recorded body that are sent with its messages."""
# others are named as these
_SENT_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_ROLES = {**ROLES_OF_MESSAGES, "ai": "assistant", **{role: role for role in _SENT_ROLES}}
_SEGMENTS = 1 << 61  # message k is the segment _SEGMENTS + k of the prompts that begin with it
_SYSTEM = b'{"role":"system"'
_encode = msgspec.json.Encoder(decimal_format="number").encode
# how messages begin; such a text that is no JSON was truncated, as by a limit
_LIKE_MESSAGES = re.compile(
    r"""\s*(\[\s*)*\{\s*["'](role|from|content|value|parts|messages|type|id|name|tool_calls)["']\s*:"""
)
_PRINTED = re.compile(r"\s*(\[\s*)*\{\s*'\w+'\s*:")  # as pandas writes a list into a CSV file
CUT_OFF = "JSON that is cut off or damaged"


@dataclass(frozen=True)
class Unreadable:
    """Placeholder for messages that cannot be read, with the reason."""

    reason: str


@dataclass(frozen=True, eq=False)
class Recorded:
    """Messages of n requests, each distinct one once, as JSON.

    Request r has the messages ``ids[start[r]:start[r + 1]]`` and the further body fields
    ``fields[field_of[r]]``. ``is_text`` bool[n]: the file has one text, not a list of messages.
    ``tokens`` are estimates.
    """

    messages: Sequence[bytes]
    tokens: Ints
    start: Ints
    ids: Ints
    fields: tuple[dict[str, Any], ...]
    field_of: Ints
    is_text: NDArray[np.bool_]

    def turn(self, entry: int, _turn: int = 0, *, system_apart: bool = False) -> list[msgspec.Raw]:
        """Return a request's messages; ``system_apart``: without leading system messages."""
        first = int(self.start[entry]) + (len(self._system(entry)) if system_apart else 0)
        return [msgspec.Raw(self.messages[k]) for k in self.ids[first : self.start[entry + 1]]]

    def body_fields(
        self, entry: int, *, system_apart: bool = False
    ) -> tuple[object, dict[str, Any]]:
        """Return (cache key, further body fields such as tools).

        ``system_apart``: including the system prompt, as in Anthropic's API.
        """
        system = self._system(entry) if system_apart else ()
        fields = self.fields[int(self.field_of[entry])]
        if system:
            said = [msgspec.json.decode(self.messages[k])["content"] for k in system]
            text = (
                said[0]
                if len(said) == 1
                else "\n".join(text_of({"content": content}) for content in said)
            )
            fields = {"system": text, **fields}
        return (int(self.field_of[entry]), system), fields

    def _system(self, entry: int) -> tuple[int, ...]:
        held = self.ids[self.start[entry] : self.start[entry + 1]].tolist()
        return tuple(itertools.takewhile(lambda k: self.messages[k].startswith(_SYSTEM), held))

    def begins_with(self, entry: int, earlier: int) -> bool:
        """Return whether a request's messages, or its text, begin with all of an earlier one's."""
        mine, theirs = (self.ids[self.start[e] : self.start[e + 1]] for e in (entry, earlier))
        if self.is_text[entry]:  # one message each: behind the text stand a quote and a bracket
            begun: bytes = self.messages[theirs[0]][:-2]
            return bool(self.messages[mine[0]].startswith(begun))
        return len(theirs) <= len(mine) and bool((mine[: len(theirs)] == theirs).all())

    def shared(self, entry: Ints, input_tokens: Ints) -> SharedPrefixes:
        """Return prompts (``entry``; -1: none) as chains of messages that sum to their tokens."""
        known = np.flatnonzero(entry >= 0)
        places, start = take_lists(self.start, entry[known])
        length = np.zeros(len(entry), dtype=np.int64)
        length[known] = np.diff(start)
        ids = self.ids[places]
        sums = np.maximum(np.diff(np.concatenate([[0], np.cumsum(self.tokens[ids])])[start]), 1)
        scale = np.repeat(input_tokens[known] / sums, np.diff(start))
        tokens = np.floor(self.tokens[ids] * scale).astype(np.int64)
        return SharedPrefixes(np.concatenate([[0], np.cumsum(length)]), _SEGMENTS + ids, tokens)


class Recording:
    """Collects the messages of a trace's rows."""

    def __init__(self, count: Callable[[str], int] | None = None) -> None:
        """Set up; ``count``: tokens of a text. Default: a token for four characters."""
        self.count = count or (lambda text: max(1, -(-len(text) // CHARACTERS_PER_TOKEN)))
        self.counted_by = (
            "they are counted by the tokenizer"
            if count
            else f"a token is taken for {CHARACTERS_PER_TOKEN} characters (--tokenizer counts)"
        )
        self._number: dict[bytes, int] = {}
        self._tokens: list[int] = []
        self._ids: list[int] = []
        self._start = [0]
        self._fields: dict[bytes, int] = {}
        self._field_of: list[int] = []
        self._is_text: list[bool] = []

    def add(
        self, messages: Sequence[Message], fields: Mapping[str, Any], *, is_text: bool
    ) -> tuple[int, int]:
        """Add one request; return (its number, its estimated tokens)."""
        first = len(self._ids)
        for message in messages:
            content = _encode(message)
            number = self._number.setdefault(content, len(self._number))
            if number == len(self._tokens):
                self._tokens.append(self.count(text_of(message)))
            self._ids.append(number)
        self._start.append(len(self._ids))
        held = _encode(dict(fields))
        self._field_of.append(self._fields.setdefault(held, len(self._fields)))
        self._is_text.append(is_text)
        more = self.count(held.decode()) if fields else 0
        return len(self._field_of) - 1, more + sum(self._tokens[k] for k in self._ids[first:])

    def done(self) -> Recorded | None:
        """Return all requests; None where there were none."""
        if not self._field_of:
            return None
        ints = (np.array(held, dtype=np.int64) for held in (self._tokens, self._start, self._ids))
        tokens, start, ids = ints
        return Recorded(
            tuple(self._number),
            tokens,
            start,
            ids,
            tuple(msgspec.json.decode(held) for held in self._fields),
            np.array(self._field_of, dtype=np.int64),
            np.array(self._is_text, dtype=bool),
        )


def text_of(message: Mapping[str, Any]) -> str:
    """Return all text of a message: content and tool calls. Images have none."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    said = [
        str(p.get("text") or p.get("content") or "") if isinstance(p, Mapping) else str(p or "")
        for p in parts
    ]
    if message.get("tool_calls"):
        said.append(_encode(message["tool_calls"]).decode())
    return " ".join(text for text in said if text)


def read_messages(value: Any, *, listed: bool = False) -> tuple[list[Message], bool] | None:
    """Parse a recorded prompt as (messages, whether it is one text); None: there is none.

    A text (unless ``listed``), a list of messages (OpenAI's, Anthropic's, or OpenTelemetry's with
    ``parts``), or either as JSON in a text. Raises ValueError.
    """
    if isinstance(value, Unreadable):
        raise ValueError(value.reason)
    if isinstance(value, str):
        held = _json(value)
        if held in ([], {}) or not is_visible(value):
            return None
        if held is None and (
            _LIKE_MESSAGES.match(value) or (listed and value.lstrip()[:1] in "[{")
        ):
            raise ValueError(CUT_OFF)
        if not _is_conversation(held):
            if listed:
                raise ValueError("a text where a list of messages is due")
            return [{"role": "user", "content": value}], True
        value = held
    if isinstance(value, Mapping):
        value = value.get("messages", [value] if "role" in value else None)
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    if value in (None, [], {}):
        return None
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise ValueError("neither a text nor a list of messages")
    messages = [_message(item) for item in value]
    if not any(map(_says_something, messages)):
        raise ValueError("empty messages only")
    return messages, False


def answer_text(value: Any) -> tuple[str, int]:
    """Return (the text of a recorded answer, of several choices the first; how many there are).

    An answer is a text, a message (with or without its role), or a list of messages or choices.
    """
    is_list, choices = isinstance(value, list) and bool(value), 1
    if is_list and all(isinstance(v, Mapping) and "message" in v for v in value):
        value, choices = value[0]["message"], len(value)
    if isinstance(value, Mapping) and "content" in value:
        value = {"role": "assistant", **value}
    try:
        found = read_messages(value)
    except ValueError as error:
        return "" if str(error) == CUT_OFF else json.dumps(value, default=str), choices
    return " ".join(map(text_of, found[0])) if found else "", choices


def _is_conversation(value: Any) -> bool:
    """Return whether a JSON value is a request, a message, or a list of messages."""
    if isinstance(value, Mapping):
        return bool({"messages", "role"} & value.keys())
    listed = value[0] if value and isinstance(value[0], list) else value
    return bool(listed) and all(isinstance(item, Mapping) for item in listed)


def read_system(told: Any) -> list[Message]:
    """Return the message of a separate system field, if there is one. Raises ValueError."""
    return [] if told in (None, "", []) else [_message({"role": "system", "content": told})]


def _says_something(message: Message) -> bool:
    """Return whether a message has a text, a part of another type, or tool calls."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    return (
        any(part["type"] != "text" or is_visible(part["text"]) for part in parts)
        or len(message) > 2
    )


def _json(text: str) -> Any:
    """Parse a text as an object or list, of JSON or as Python prints it; None: it is plain text."""
    if text.lstrip()[:1] not in ("[", "{"):
        return None
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text)
    if _PRINTED.match(text):
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return ast.literal_eval(text.strip())
    return None


def _whole_json(text: Any, what: str) -> Any:
    """Parse a text as ``_json`` does. Raises ValueError where JSON is cut off."""
    if not isinstance(text, str):
        return None
    held = _json(text)
    if held is None and text.lstrip()[:2] in ("[{", "[ ", "[\n", '{"', "{ ", "{\n"):
        raise ValueError(f"{what}: {CUT_OFF}")
    return held


def _message(item: Mapping[str, Any]) -> Message:
    said = item.get("role", item.get("from"))
    if not isinstance(said, str):
        raise ValueError("a message has no role")
    role = _ROLES.get(said.lower(), "")
    if not role:
        raise ValueError(f"a message has the unknown role {said!r:.40}")
    if isinstance(item.get("parts"), list):
        return _of_parts(role, item["parts"])
    message = {  # a column of a Parquet file has every key in every message
        key: value
        for key, value in item.items()
        if key not in ("role", "from", "value") and (value is not None or key == "content")
    }
    if "content" not in message and "value" in item:
        message["content"] = item["value"]
    if not isinstance(message.get("content"), str | list) and not (
        message.get("tool_calls") or message.get("function_call") or role == "assistant"
    ):
        raise ValueError(f"a message of the role {role} has no content")
    if isinstance(message.get("content"), list) and not all(map(is_part, message["content"])):
        raise ValueError(f"a message of the role {role} has a content that is no list of parts")
    return {"role": role, **message}


def _of_parts(role: str, parts: Sequence[Any]) -> Message:
    """Convert OpenTelemetry's form of a message to OpenAI's."""
    texts, calls, message = [], [], {"role": role}
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text":
            texts.append(str(part.get("content", "")))
        elif kind == "tool_call":
            arguments = part.get("arguments", "")
            text = arguments if isinstance(arguments, str) else _encode(arguments).decode()
            function = {"name": str(part.get("name", "")), "arguments": text}
            calls.append({"id": str(part.get("id", "")), "type": "function", "function": function})
        elif kind == "tool_call_response":
            response = part.get("response", part.get("result", ""))
            texts.append(response if isinstance(response, str) else _encode(response).decode())
            message |= {"role": "tool", "tool_call_id": str(part.get("id", ""))}
        else:
            raise ValueError(f"a part of a message is of the type {kind!r:.40}, which is not known")
    content = "\n".join(texts)
    return message | (
        {"content": content or None, "tool_calls": calls} if calls else {"content": content}
    )


def span_messages(held: Mapping[str, Any]) -> list[Message] | None:
    """Return the messages in a span's attributes; None: it has none. Raises ValueError.

    Forms: OpenTelemetry, OpenLLMetry, OpenInference.
    """
    listed = held.get("gen_ai.input.messages")
    found = read_messages(listed, listed=True) if listed else read_messages(held.get("input.value"))
    messages = found[0] if found else _numbered(held)
    system = held.get("gen_ai.system_instructions")
    if isinstance(system, str):
        system = _whole_json(system, "system instructions") or [{"type": "text", "content": system}]
    if messages and isinstance(system, list):
        messages = [_of_parts("system", system), *messages]
    return messages or None


def _numbered(held: Mapping[str, Any]) -> list[Message]:
    """Return messages with numbered attributes: gen_ai.prompt.0.content, llm.input_messages.0..."""
    for prefix, between in (("gen_ai.prompt.", "."), ("llm.input_messages.", ".message.")):
        found: list[Message] = []
        while (role := held.get(f"{prefix}{len(found)}{between}role")) is not None:
            at = f"{prefix}{len(found)}{between}"
            message: Message = {"role": role, "content": held.get(f"{at}content")}
            if f"{at}tool_call_id" in held:
                message["tool_call_id"] = held[f"{at}tool_call_id"]
            calls: list[Message] = []
            while f"{at}tool_calls.{len(calls)}.name" in held:
                here = f"{at}tool_calls.{len(calls)}."
                arguments = held.get(f"{here}arguments", "")
                _whole_json(arguments, "arguments of a tool")
                function = {"name": held[f"{here}name"], "arguments": arguments}
                calls.append(
                    {"id": held.get(f"{here}id", ""), "type": "function", "function": function}
                )
            found.append(_message(message | ({"tool_calls": calls} if calls else {})))
        numbers = {
            name[len(prefix) :].partition(".")[0] for name in held if name.startswith(prefix)
        }
        if len({number for number in numbers if number.isdecimal()}) > len(found):
            raise ValueError("some of the numbered messages are missing")
        if found:
            return found
    return []


def read_fields(record: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the further fields of a recorded body under ``prefix``. Raises ValueError."""
    found = {name: record.get(prefix + name) for name in SENT_FIELDS}
    parsed = {name: _whole_json(value, name) or value for name, value in found.items()}
    for name in ("tools", "functions"):
        held = parsed[name]
        if held and not (
            isinstance(held, list) and all(isinstance(item, Mapping) for item in held)
        ):
            raise ValueError(f"{name} that are no list of objects")
    return {name: value for name, value in parsed.items() if value not in (None, "", [], {})}


def span_tools(definitions: Any) -> Any:
    """Return the tools of a span in OpenAI's form; None: it has none. Raises ValueError."""
    held = _whole_json(definitions, "tools") if isinstance(definitions, str) else definitions
    if not isinstance(held, list):
        return None
    return [
        {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
        if isinstance(tool, Mapping) and "name" in tool
        else tool
        for tool in held
    ]
