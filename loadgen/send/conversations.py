"""The messages of each request in a session: the history, the answers, and the new turn.

A history is kept as JSON, so that a long one costs a copy and no encoding.
"""

from typing import Any

import msgspec
import numpy as np

from ampacity.loadgen.send.history import (
    AnswerContent,
    answer_messages,
    message,
    result_messages,
    split_words,
)
from ampacity.loadgen.send.protocols import PROTOCOLS, Api
from ampacity.workloads.prompts.files import PromptFile
from ampacity.workloads.prompts.synthetic import PromptMaker
from ampacity.workloads.schedule import Schedule
from ampacity.workloads.traces.recorded import Recorded

_ANSWER_KEY = 1 << 96  # offset of request ids that make planned answers' text unique


class Conversations:
    """The conversations of one stage. Histories without a next turn are dropped."""

    def __init__(
        self,
        prompts: PromptMaker,
        schedule: Schedule,
        *,
        planned: bool = False,
        api: Api = "chat",
        file: PromptFile | Recorded | None = None,
    ) -> None:
        """With ``planned`` histories get text of the planned length, not the server's answers.

        ``file`` has the messages of requests with an ``entry``.
        """
        self._prompts, self._schedule, self._file = prompts, schedule, file
        self._planned, self._api = planned, api
        self._system_role = "user" if PROTOCOLS[api].system_apart else "system"
        self._histories: dict[int, bytes] = {}  # messages of a request, comma-separated
        self._answers: dict[int, AnswerContent] = {}
        continues = schedule.continues
        assert continues is not None
        self._continued = set(continues[continues >= 0].tolist())
        self._joined: set[int] = set()
        if schedule.after is not None and schedule.after_start is not None:
            previous = np.repeat(continues, np.diff(schedule.after_start))
            joins = (previous >= 0) & (previous != schedule.after)
            self._joined = set(schedule.after[joins].tolist())

    def messages(self, index: int) -> bytes:
        """Return the messages of a request as JSON without brackets."""
        assert self._schedule.continues is not None
        previous = int(self._schedule.continues[index])
        if previous < 0:
            messages = b",".join(self._recorded(index) or self._first_messages(index))
        else:
            new = self._next_messages(index, previous)
            messages = b",".join([self._histories.pop(previous), *new])
        if index in self._continued:
            self._histories[index] = messages
        return messages

    def _first_messages(self, index: int) -> list[bytes]:
        schedule = self._schedule
        shared = schedule.shared.of(index) if schedule.shared is not None else []
        tokens = int(schedule.input_tokens[index])
        common, own = self._prompts.parts(schedule.request_id(index), tokens, shared)
        first_role = self._system_role if own else "user"
        return [message(role, text) for role, text in ((first_role, common), ("user", own)) if text]

    def _next_messages(self, index: int, previous: int) -> list[bytes]:
        """Return the previous answer, the results of its tool calls, and the new user messages."""
        schedule = self._schedule
        answer = self._answers.pop(previous, AnswerContent())
        joined = [
            message("user", self._answers.pop(k, AnswerContent()).as_text)
            for k in self._awaited(index)
            if k != previous
        ]
        new = joined or self._recorded(index)
        results: list[object] = []
        if new and answer.calls:
            results, new = _split_results(new)
        elif not new:
            assert schedule.new_tokens is not None
            tokens = self._prompts.own_tokens(int(schedule.new_tokens[index]))
            words = max(tokens, len(answer.calls))
            text = self._prompts.text(schedule.request_id(index), words)
            if answer.calls:  # the turn's new tokens are the results of the tools
                results = [*split_words(text, len(answer.calls))]
            else:
                new = [message("user", text)]
        if answer.calls:
            new = [*result_messages(answer.calls, results, self._api), *new]
        return [*answer_messages(answer, self._api), *new]

    def _recorded(self, index: int) -> list[bytes]:
        """Return the messages of a prompt file or trace for this turn."""
        entry, turns = entry_of(self._schedule, index), self._schedule.turn
        if entry < 0 or self._file is None or turns is None:
            return []
        return [msgspec.json.encode(m) for m in self._file.turn(entry, int(turns[index]))]

    def answered(self, index: int, answer: AnswerContent) -> None:
        """Keep the answer of a request where a later one needs it."""
        if index in self._continued or index in self._joined:
            planned = AnswerContent(self._planned_answer(index)) if self._planned else None
            self._answers[index] = planned or answer

    def wanted(self, index: int) -> bool:
        """Tell whether a later request needs the server's answer to this one."""
        return not self._planned and (index in self._continued or index in self._joined)

    def _planned_answer(self, index: int) -> str:
        """Return the recorded answer of a prompt file, else text of the planned length."""
        schedule, file = self._schedule, self._file
        entry, turns = entry_of(schedule, index), schedule.turn
        if isinstance(file, PromptFile) and entry >= 0 and turns is not None:
            recorded = file.entries[entry].answers[int(turns[index])]
            if recorded:
                return recorded
        tokens = self._prompts.own_tokens(int(schedule.output_tokens[index]))
        return self._prompts.text(schedule.request_id(index) + _ANSWER_KEY, tokens)

    def _awaited(self, index: int) -> list[int]:
        after, start = self._schedule.after, self._schedule.after_start
        assert after is not None
        assert start is not None
        found: list[int] = after[start[index] : start[index + 1]].tolist()
        return found


def entry_of(schedule: Schedule, index: int) -> int:
    """Return the index of a request into the prompts of a file; -1: none."""
    return -1 if schedule.entry is None else int(schedule.entry[index])


def _split_results(messages: list[bytes]) -> tuple[list[object], list[bytes]]:
    """Return the recorded results of tools, and the other messages."""
    parsed: list[tuple[bytes, Any]] = [(text, msgspec.json.decode(text)) for text in messages]
    tools = [m.get("content") for _, m in parsed if m.get("role") == "tool"]
    return tools, [text for text, m in parsed if m.get("role") != "tool"]
