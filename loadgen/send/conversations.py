"""What is said in a session: each request's messages, grown from those before it and from what was answered.

A conversation is kept as the JSON of its messages, so that a long history costs a copy and no encoding.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from ampacity.loadgen.send.history import (
    AnswerContent,
    answer_messages,
    in_parts,
    message,
    result_messages,
)
from ampacity.loadgen.send.protocols import Api
from ampacity.workloads.prompts.files import PromptFile
from ampacity.workloads.prompts.synthetic import PromptMaker
from ampacity.workloads.schedule import Schedule
from ampacity.workloads.traces.recorded import Recorded

_ANSWER_KEY = 1 << 96  # request numbers of planned answers: theirs is text of its own


class Conversations:
    """The conversations of one stage. What nobody goes on with is not kept."""

    def __init__(
        self,
        prompts: PromptMaker,
        schedule: Schedule,
        *,
        planned: bool = False,
        api: Api = "chat",
        file: PromptFile | Recorded | None = None,
    ) -> None:
        """``planned``: histories have text of the planned length instead of what the server answered.

        ``file`` has the messages of requests with an ``entry``.
        """
        self._file = file
        self._prompts = prompts
        self._schedule = schedule
        self._planned = planned
        self._api = api
        self._system_role = "user" if api == "messages" else "system"
        self._told: dict[int, bytes] = {}  # all messages of a request, comma between them
        self._answers: dict[int, AnswerContent] = {}
        continues = schedule.continues
        assert continues is not None
        self._continued = set(continues[continues >= 0].tolist())
        self._joined: set[int] = set()
        if schedule.after is not None and schedule.after_start is not None:
            goes_on = np.repeat(continues, np.diff(schedule.after_start))
            self._joined = set(
                schedule.after[(goes_on >= 0) & (goes_on != schedule.after)].tolist()
            )

    def messages(self, index: int) -> bytes:
        """The messages of a request, without brackets."""
        schedule, prompts = self._schedule, self._prompts
        assert schedule.continues is not None
        assert schedule.new_tokens is not None
        before, request_id = int(schedule.continues[index]), schedule.request_id(index)
        given = self._given(index)
        if before < 0 and given:
            told = b",".join(given)
        elif before < 0:
            shared = schedule.shared.of(index) if schedule.shared is not None else []
            common, own = prompts.parts(request_id, int(schedule.input_tokens[index]), shared)
            first = self._system_role if own else "user"
            told = b",".join(
                message(role, text) for role, text in ((first, common), ("user", own)) if text
            )
        else:
            answer = self._answers.pop(before, AnswerContent())
            helpers = [k for k in self._after(index) if k != before]
            said = [
                message("user", self._answers.pop(k, AnswerContent()).as_text) for k in helpers
            ] or given
            results: list[object] = []
            if said and answer.calls:
                results, said = _results_in(said)
            elif not said:
                tokens = prompts.own_tokens(int(schedule.new_tokens[index]))
                text = prompts.text(request_id, max(tokens, len(answer.calls)))
                if answer.calls:  # what is new in this turn is what the tools gave back
                    results = [*in_parts(text, len(answer.calls))]
                else:
                    said = [message("user", text)]
            if answer.calls:
                said = [*result_messages(answer.calls, results, self._api), *said]
            told = b",".join([self._told.pop(before), *answer_messages(answer, self._api), *said])
        if index in self._continued:
            self._told[index] = told
        return told

    def _given(self, index: int) -> list[bytes]:
        """The messages that a prompt file has for this turn."""
        entry = -1 if self._schedule.entry is None else int(self._schedule.entry[index])
        if entry < 0 or self._file is None or self._schedule.turn is None:
            return []
        return [
            msgspec.json.encode(m) for m in self._file.turn(entry, int(self._schedule.turn[index]))
        ]

    def answered(self, index: int, told: AnswerContent) -> None:
        """Remember the answer of a request, where it will be needed."""
        if index not in self._continued and index not in self._joined:
            return
        self._answers[index] = AnswerContent(self._planned_answer(index)) if self._planned else told

    def wanted(self, index: int) -> bool:
        """Whether what the server answers to this request is going to be told again."""
        return not self._planned and (index in self._continued or index in self._joined)

    def _planned_answer(self, index: int) -> str:
        """The recorded answer of a prompt file, else text of the planned length."""
        schedule = self._schedule
        if (
            isinstance(self._file, PromptFile)
            and schedule.entry is not None
            and schedule.turn is not None
        ):
            answers = self._file.entries[int(schedule.entry[index])].answers
            if recorded := answers[int(schedule.turn[index])]:
                return recorded
        tokens = self._prompts.own_tokens(int(schedule.output_tokens[index]))
        return self._prompts.text(schedule.request_id(index) + _ANSWER_KEY, tokens)

    def _after(self, index: int) -> list[int]:
        schedule = self._schedule
        assert schedule.after is not None
        assert schedule.after_start is not None
        found: list[int] = schedule.after[
            schedule.after_start[index] : schedule.after_start[index + 1]
        ].tolist()
        return found


def _results_in(said: list[bytes]) -> tuple[list[object], list[bytes]]:
    """What tools gave back, as recorded, and the other messages."""
    messages: list[tuple[bytes, Any]] = [(text, msgspec.json.decode(text)) for text in said]
    tools = [m.get("content") for _, m in messages if m.get("role") == "tool"]
    return tools, [text for text, m in messages if m.get("role") != "tool"]
