"""Thinking that a model writes into the text of its answer, as ``<think>…</think>``, told from the answer behind it.

So does harmony without a parser: ``<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>``.

Where the template of a chat has the opening tag already, only the closing one comes: then all before it was thinking.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

TAGS: tuple[tuple[str, str], ...] = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),  # Mistral
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),  # ByteDance
    ("◁think▷", "◁/think▷"),  # Kimi
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Cohere
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),  # harmony, of gpt-oss
    ("<|channel>thought", "<channel|>"),  # Gemma 4
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),  # Apriel
)
WORDED: tuple[tuple[str, str], ...] = (
    ("Here is my thought process:", "Here is my response:"),  # Granite
    ("Here's my thought process:", "Here's my response:"),
)
"""Pairs of words that an answer may hold as well: the closing one ends only what the opening one began."""
LONE = (
    "assistantfinal",
)  # closing ones without an opening one: harmony, its special tokens left out

_OPENINGS = dict((*TAGS, *WORDED))
_MARKS = [*LONE, *(tag for pair in TAGS for tag in pair)]
_ANY = re.compile("|".join(map(re.escape, _MARKS)))
MARKS = re.compile(_ANY.pattern.encode())
_FIRST = {opening[0] for opening in _OPENINGS}
_LONGEST = max(map(len, (*_MARKS, *_OPENINGS.values())))

Kind = Literal["answer", "reasoning"]
State = Literal["begin", "thinking", "over", "answer", "plain"]
"""``begin``: nothing that says which; ``over``: the thinking, and no answer yet; ``plain``: tags are text from here on."""


@dataclass(frozen=True)
class InlineThinking:
    """Thinking in the text of an answer: the tag that ends it, and whether another one had opened it."""

    closing: str
    opened: bool


class Thinking:
    """Follows the text of one answer, chunk by chunk."""

    __slots__ = ("_close", "_head", "_tail", "all_thought", "state", "thought", "watches")

    def __init__(self, until: str | None = None) -> None:
        """``until``: the closing tag of a model whose answers begin with thinking and no opening tag."""
        self.state: State = "thinking" if until else "begin"
        self.thought = InlineThinking(until, opened=False) if until else None  # once it is seen
        self.all_thought = (
            False  # what was taken for an answer so far was thinking: for the caller to reset
        )
        self.watches = (
            False  # for a closing tag that comes in pieces, and of which no opening one told
        )
        self._close = until or ""
        self._head = self._tail = ""

    @property
    def parsed(self) -> bool:
        """Whether the next text must be looked at before its time is noted."""
        return self.state in ("begin", "over")

    @property
    def followed(self) -> bool:
        """Whether the next texts have to be looked at, for what they hold."""
        return self.state == "thinking" or (self.watches and self.state == "answer")

    def goes_on(self, text: str) -> bool:
        """Take a text that changes nothing, in a state that is ``followed``; False: it does, and was not taken."""
        seen = self._tail + text
        if self._close in seen if self.state == "thinking" else _ANY.search(seen):
            return False
        self._tail = seen[-_LONGEST:]
        return True

    def take(self, text: str) -> tuple[Kind, str]:
        """What a text is, and of one that ends the thinking what comes behind it."""
        if self.state == "begin":
            return self._begin(text)
        if self.state == "thinking":
            return self._until_closed(text)
        if self.state == "over":
            if not text.strip():
                return "reasoning", text
            self.state = "plain"
        elif self.state == "answer":
            return self._look(text)
        return "answer", text

    def _begin(self, text: str) -> tuple[Kind, str]:
        self._head += text
        head = self._head.lstrip()
        if head and head[0] not in _FIRST:
            self.state = "answer"
            return self._look(text)
        if any(opening.startswith(head) for opening in _OPENINGS):  # an empty one too
            return "answer", text
        for opening, closing in _OPENINGS.items():
            if head.startswith(opening):
                self.state, self._close, self.all_thought = "thinking", closing, True
                self.thought = InlineThinking(closing, opened=True)
                return self._until_closed(head[len(opening) :])
        self.state = "answer"
        return self._look(text)

    def _until_closed(self, text: str) -> tuple[Kind, str]:
        seen = self._tail + text
        _, closed, behind = seen.partition(self._close)
        self._tail = seen[-_LONGEST:]
        return self._closed(behind) if closed else ("reasoning", text)

    def _look(self, text: str) -> tuple[Kind, str]:
        """An answer goes on. A closing tag says that it was none, unless the text is about such tags."""
        seen = self._tail + text if self.watches else text
        found = _ANY.search(seen)
        if found is None:
            self._tail = seen[-_LONGEST:] if self.watches else ""
            return "answer", text
        if found[0] in _OPENINGS:
            self.state = "plain"
            return "answer", text
        self.thought, self.all_thought = InlineThinking(found[0], opened=False), True
        return self._closed(seen[found.end() :])

    def _closed(self, behind: str) -> tuple[Kind, str]:
        self.state = "plain" if behind.strip() else "over"
        return ("answer" if behind.strip() else "reasoning"), behind
