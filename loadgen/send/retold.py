"""What an answer said, and how the next turn of its conversation tells it again, by API."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import msgspec

from ampacity.loadgen.send.halves import whole_characters, with_whole_characters
from ampacity.loadgen.send.protocols import NESTED_MAX, Api

NO_ANSWER = "(no answer)"  # stands in the history for a turn that failed
NO_RESULT = "(no result)"  # of a tool that was called, where neither the file nor the plan has one


@dataclass(frozen=True)
class Call:
    """One call of a tool. ``arguments``: a JSON object as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class AnswerContent:
    """An answer as the history has it."""

    text: str = ""
    calls: tuple[Call, ...] = ()

    @property
    def as_text(self) -> str:
        """All of it where only text can be told."""
        said = [self.text, *(f"{call.name}({call.arguments})" for call in self.calls)]
        return "\n".join(part for part in said if part) or NO_ANSWER


class CallPieces:
    """The calls of one answer, collected from its chunks."""

    def __init__(self) -> None:
        self._calls: list[list[str]] = []  # id, name, arguments
        self._at: dict[Any, int] = {}  # by the server's own index

    def add(self, key: Any, call_id: Any, name: Any, arguments: Any) -> None:
        """A piece of the call that the server numbers ``key``; another id under the same number is another call."""
        key = key if isinstance(key, int) else str(key)
        at = self._at.get(key)
        if at is None or (call_id and self._calls[at][0] not in ("", call_id)):
            at = self._at[key] = len(self._calls)
            self._calls.append(["", "", ""])
        for place, piece in enumerate((call_id, name, arguments)):
            if isinstance(piece, dict):  # whole, as some gateways and the Messages API have it
                piece = json.dumps(piece)
            if isinstance(piece, str) and piece:
                self._calls[at][place] = piece if place < 2 else self._calls[at][place] + piece

    def add_chat(self, calls: Any) -> None:
        """The ``tool_calls`` of a chat's delta or message."""
        for position, call in enumerate(calls if isinstance(calls, list) else ()):
            if isinstance(call, dict):
                function = call.get("function")
                function = function if isinstance(function, dict) else {}
                key = call.get("index", position)
                self.add(key, call.get("id"), function.get("name"), function.get("arguments"))

    def calls(self) -> tuple[Call, ...]:
        """Those that have a name or arguments; what was cut off in the middle is told as a text in an object."""
        found = []
        for number, (call_id, name, arguments) in enumerate(self._calls):
            if name or arguments:
                known = map(
                    whole_characters, (call_id or f"call_{number}", name or "tool", arguments)
                )
                found.append(Call(*known))
        return tuple(replace(call, arguments=_as_object(call.arguments)) for call in found)


def _as_object(arguments: str) -> str:
    """Arguments as a JSON object: servers refuse histories with others, and with halves of characters."""
    try:
        held = (
            None
            if arguments.count("[") + arguments.count("{") > NESTED_MAX
            else json.loads(arguments or "{}")
        )
        if isinstance(held, dict):
            whole = with_whole_characters(held)
            return arguments or "{}" if whole == held else json.dumps(whole)
    except (ValueError, RecursionError):
        pass
    return json.dumps({"arguments": arguments})


def message(role: str, content: object) -> bytes:
    """One message as JSON; ``content`` is text, or a list of parts."""
    return msgspec.json.encode({"role": role, "content": content})


def answer_messages(told: AnswerContent, api: Api) -> list[bytes]:
    """The assistant's turn, as JSON."""
    if not told.calls or api == "completions":
        return [message("assistant", told.as_text)]
    if api == "responses":
        calls = [
            {"type": "function_call", "call_id": c.id, "name": c.name, "arguments": c.arguments}
            for c in told.calls
        ]
        said = [message("assistant", told.text)] if told.text else []
        return said + [msgspec.json.encode(call) for call in calls]
    if api == "messages":
        blocks: list[dict[str, Any]] = [{"type": "text", "text": told.text}] if told.text else []
        blocks += [
            {"type": "tool_use", "id": c.id, "name": c.name, "input": json.loads(c.arguments)}
            for c in told.calls
        ]
        return [message("assistant", blocks)]
    functions = [
        {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
        for c in told.calls
    ]
    turn = {"role": "assistant", "content": told.text or None, "tool_calls": functions}
    return [msgspec.json.encode(turn)]


def result_messages(calls: Sequence[Call], results: Sequence[object], api: Api) -> list[bytes]:
    """What the tools gave back, one for each call, as JSON; a missing result is ``NO_RESULT``."""
    contents = [*results, *[NO_RESULT] * (len(calls) - len(results))]
    pairs = list(zip(calls, contents, strict=False))
    if api == "responses":
        return [
            msgspec.json.encode(
                {"type": "function_call_output", "call_id": call.id, "output": content}
            )
            for call, content in pairs
        ]
    if api == "messages":
        blocks = [
            {"type": "tool_result", "tool_use_id": call.id, "content": content}
            for call, content in pairs
        ]
        return [message("user", blocks)]
    return [
        msgspec.json.encode({"role": "tool", "tool_call_id": call.id, "content": content})
        for call, content in pairs
    ]


def in_parts(text: str, parts: int) -> list[str]:
    """The words of a text in so many parts of about the same length."""
    words = text.split()
    ends = [k * len(words) // parts for k in range(parts + 1)]
    return [" ".join(words[a:b]) or NO_RESULT for a, b in pairwise(ends)]
