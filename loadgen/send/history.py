"""The content of an answer, and the messages that put it into the next turn's history, by API."""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec

from ampacity.loadgen.send.protocols import NESTED_MAX, Api
from ampacity.loadgen.send.surrogates import join_surrogates, with_joined_surrogates

NO_ANSWER = "(no answer)"  # in the history for a turn that failed
NO_RESULT = "(no result)"  # of a tool call without a recorded or planned result


@dataclass(frozen=True)
class Call:
    """One tool call. ``arguments``: a JSON object as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class AnswerContent:
    """Text and tool calls of one answer."""

    text: str = ""
    calls: tuple[Call, ...] = ()

    @property
    def as_text(self) -> str:
        """Return all of it as text, for APIs without tool calls."""
        parts = [self.text, *(f"{call.name}({call.arguments})" for call in self.calls)]
        return "\n".join(part for part in parts if part) or NO_ANSWER


class CallPieces:
    """Collects the tool calls of one answer from its chunks."""

    def __init__(self) -> None:
        self._calls: list[list[str]] = []  # id, name, arguments
        self._at: dict[Any, int] = {}  # by the server's own index

    def add(self, key: Any, call_id: Any, name: Any, arguments: Any) -> None:
        """Add a piece of the call that the server numbers ``key``.

        A new id begins a new call, and so does a name after a call that is whole.
        """
        key = key if isinstance(key, int) else str(key)
        at = self._at.get(key)
        known_id, _, so_far = ("", "", "") if at is None else self._calls[at]
        again = name and not call_id and so_far[-1:] == "}" and _as_object(so_far) == so_far
        if at is None or again or (call_id and known_id not in ("", call_id)):
            at = self._at[key] = len(self._calls)
            self._calls.append(["", "", ""])
        for place, piece in enumerate((call_id, name, arguments)):
            if isinstance(piece, dict):  # complete: some gateways and the Messages API
                piece = json.dumps(piece)
            if isinstance(piece, str) and piece:
                self._calls[at][place] = piece if place < 2 else self._calls[at][place] + piece

    def add_pieces(self, key: Any, call_id: Any, name: Any, texts: list[str]) -> None:
        """Add pieces of the arguments of one call, at once where none of them can begin another."""
        for text in texts if name and not call_id else ["".join(texts)]:
            self.add(key, call_id, name, text)

    def add_chat(self, calls: Any) -> None:
        """Add the ``tool_calls`` of a chat's delta or message."""
        for position, call in enumerate(calls if isinstance(calls, list) else ()):
            if isinstance(call, dict):
                function = call.get("function")
                function = function if isinstance(function, dict) else {}
                key = call.get("index", position)
                self.add(key, call.get("id"), function.get("name"), function.get("arguments"))

    def calls(self) -> tuple[Call, ...]:
        """Return the calls with a name or arguments; truncated arguments become an object."""
        found = []
        for number, (call_id, name, arguments) in enumerate(self._calls):
            if name or arguments:
                pieces = call_id or f"call_{number}", name or "tool", arguments
                call_id, name, arguments = map(join_surrogates, pieces)
                found.append(Call(call_id, name, _as_object(arguments)))
        return tuple(found)


def _as_object(arguments: str) -> str:
    """Return arguments as a JSON object: servers refuse other histories, and lone surrogates."""
    if arguments.count("[") + arguments.count("{") <= NESTED_MAX:
        with contextlib.suppress(ValueError, RecursionError):
            parsed = json.loads(arguments or "{}")
            if isinstance(parsed, dict):
                joined = with_joined_surrogates(parsed)
                return arguments or "{}" if joined == parsed else json.dumps(joined)
    return json.dumps({"arguments": arguments})


def message(role: str, content: object) -> bytes:
    """Return one message as JSON; ``content`` is text or a list of parts."""
    return msgspec.json.encode({"role": role, "content": content})


def answer_messages(answer: AnswerContent, api: Api) -> list[bytes]:
    """Return the assistant's turn as JSON."""
    if not answer.calls or api == "completions":
        return [message("assistant", answer.as_text)]
    if api == "responses":
        calls = [
            {"type": "function_call", "call_id": c.id, "name": c.name, "arguments": c.arguments}
            for c in answer.calls
        ]
        text = [message("assistant", answer.text)] if answer.text else []
        return text + [msgspec.json.encode(call) for call in calls]
    if api == "messages":
        blocks: list[dict[str, Any]] = (
            [{"type": "text", "text": answer.text}] if answer.text else []
        )
        blocks += [
            {"type": "tool_use", "id": c.id, "name": c.name, "input": json.loads(c.arguments)}
            for c in answer.calls
        ]
        return [message("assistant", blocks)]
    functions = [
        {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
        for c in answer.calls
    ]
    turn = {"role": "assistant", "content": answer.text or None, "tool_calls": functions}
    return [msgspec.json.encode(turn)]


def result_messages(calls: Sequence[Call], results: Sequence[object], api: Api) -> list[bytes]:
    """Return the tools' results, one per call, as JSON; a missing one is ``NO_RESULT``."""
    contents = [*results, *[NO_RESULT] * (len(calls) - len(results))]
    pairs = list(zip(calls, contents, strict=False))
    if api == "responses":
        outputs = [
            {"type": "function_call_output", "call_id": call.id, "output": content}
            for call, content in pairs
        ]
        return [msgspec.json.encode(output) for output in outputs]
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


def split_words(text: str, parts: int) -> list[str]:
    """Split the words of a text into ``parts`` of about the same length."""
    words = text.split()
    ends = [k * len(words) // parts for k in range(parts + 1)]
    return [" ".join(words[a:b]) or NO_RESULT for a, b in pairwise(ends)]
