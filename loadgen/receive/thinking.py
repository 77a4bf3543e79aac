"""Tell inline thinking, as ``<think>…</think>`` in the text of an answer, from the answer itself.

Harmony without a parser (gpt-oss) has ``<|channel|>analysis<|message|>`` and
``<|channel|>final<|message|>`` instead. Where the chat template already has the opening tag, only
the closing one arrives: all text before it was thinking.
"""

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
    ("<|begin_of_thought|>", "<|end_of_thought|>"),  # OpenThinker, Sky-T1
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),  # Apriel
)
WORDED: tuple[tuple[str, str], ...] = (
    ("Here is my thought process:", "Here is my response:"),  # Granite
    ("Here's my thought process:", "Here's my response:"),
)
"""Pairs that may also occur in an answer: the closing one counts only after its opening one."""
LONE = ("assistantfinal",)  # harmony without its special tokens: no opening tag

_CLOSING_OF = dict((*TAGS, *WORDED))
_MARKS = [*LONE, *(tag for pair in TAGS for tag in pair)]
_ANY = re.compile("|".join(map(re.escape, _MARKS)))
MARKS = tuple(mark.encode() for mark in _MARKS)
"""The ends and beginnings of thinking, UTF-8."""
_FIRST = {opening[0] for opening in _CLOSING_OF}
_LONGEST = max(map(len, (*_MARKS, *_CLOSING_OF.values())))

Kind = Literal["answer", "reasoning"]
State = Literal["begin", "thinking", "over", "answer", "plain"]
"""``begin``: undecided; ``over``: thinking ended, and may begin again; ``plain``: tags are text."""


@dataclass(frozen=True)
class InlineThinking:
    """Inline thinking: its closing tag, and whether an opening tag came before it."""

    closing: str
    opened: bool


class Thinking:
    """Classifies the text of one answer, chunk by chunk."""

    def __init__(self, until: str | None = None) -> None:
        """Begin an answer.

        ``until``: the closing tag of a model that begins with thinking and no opening tag.
        """
        self.state: State = "thinking" if until else "begin"
        self.thought = InlineThinking(until, opened=False) if until else None  # once seen
        self.all_was_thinking = False  # the "answer" so far was thinking; the caller resets it
        self.watches = False  # for a closing tag in pieces that had no opening one
        self._close = until or ""
        self._head = self._tail = ""

    @property
    def must_scan(self) -> bool:
        """Tell whether the next text must be classified, even without a whole tag in it."""
        return self.state in ("begin", "thinking", "over") or (
            self.watches and self.state == "answer"
        )

    def classify(self, text: str) -> tuple[Kind, str]:
        """Return the kind of a text, and the text; of one that ends the thinking only the rest."""
        if self.state in ("begin", "over"):
            return self._begin(text)
        if self.state == "thinking":
            return self._until_closed(text)
        return self._look(text) if self.state == "answer" else ("answer", text)

    def _begin(self, text: str) -> tuple[Kind, str]:
        self._head += text
        head = self._head.lstrip()
        if not head or (head[0] in _FIRST and any(o.startswith(head) for o in _CLOSING_OF)):
            return ("answer" if head or self.thought is None else "reasoning"), text
        for opening, closing in _CLOSING_OF.items():
            if head.startswith(opening):
                self.state, self._close, self.all_was_thinking = "thinking", closing, True
                self.thought = self.thought or InlineThinking(closing, opened=True)
                return self._until_closed(head[len(opening) :])
        self.state = "answer" if self.thought is None else "plain"
        return self._look(text) if self.thought is None else ("answer", text)

    def _until_closed(self, text: str) -> tuple[Kind, str]:
        seen = self._tail + text
        _, closed, behind = seen.partition(self._close)
        self._tail = seen[-_LONGEST:]
        return self._closed(behind) if closed else ("reasoning", text)

    def _look(self, text: str) -> tuple[Kind, str]:
        """Search an answer: a closing tag makes it thinking, unless an opening tag is quoted."""
        seen = self._tail + text if self.watches else text
        found = _ANY.search(seen)
        if found is None:
            self._tail = seen[-_LONGEST:] if self.watches else ""
            return "answer", text
        if found[0] in _CLOSING_OF:
            self.state = "plain"
            return "answer", text
        self.thought, self.all_was_thinking = InlineThinking(found[0], opened=False), True
        return self._closed(seen[found.end() :])

    def _closed(self, behind: str) -> tuple[Kind, str]:
        self.state, self._head, self._tail = "over", "", ""
        return self._begin(behind)
