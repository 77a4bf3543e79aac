"""Parse one row of a prompt file into a conversation."""

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ampacity.workloads.lengths.distributions import MAX_TOKENS
from ampacity.workloads.text import mended

Message = dict[str, Any]
ROLES_OF_MESSAGES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(
        ("gpt", "chatgpt", "bing", "bard", "assistant", "model", "function_call", "tool_call"),
        "assistant",
    ),
    **dict.fromkeys(("tool", "function", "observation", "tool_response", "ipython"), "tool"),
}
CHARACTERS_PER_TOKEN = 4  # of English text, in the vocabularies of today's models, roughly
FAR = 5.0  # in languages without spaces a character is a token, and not four
_FAR_TOKENS = 100  # a chat template's, and more
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_LIST, _TEXT = "a list of messages", "a text"
_HOLDERS: dict[str, tuple[str, ...]] = {  # where a prompt stands, and what may stand there
    **dict.fromkeys(("messages", "conversations", "conversation"), (_LIST,)),
    **dict.fromkeys(("prompt", "input"), (_TEXT, _LIST)),
    **dict.fromkeys(("text", "instruction"), (_TEXT,)),
}
_A_ROW = re.compile(rf'\s*\{{\s*"({"|".join(_HOLDERS)})"\s*:')
_OF_A_MESSAGE = frozenset({"role", "from", "content", "value"})
_SHOWN = 8  # names of fields in a note


class NoPromptError(ValueError):
    """A readable row without a prompt."""


@dataclass(frozen=True)
class Entry:
    """One conversation: the messages that each turn adds, and the recorded answers."""

    turns: tuple[tuple[Message, ...], ...]
    answers: tuple[str | None, ...]  # as recorded; None: not in the file
    limit_tokens: int | None = None  # the file's own limit on the answer


@dataclass
class Tally:
    """Counts of what is not sent, or not as in the file."""

    rows: Counter[str] = field(default_factory=Counter)  # left out, by reason
    bad_rows: Counter[str] = field(default_factory=Counter)  # left out because it was asked for
    parts: Counter[str] = field(default_factory=Counter)  # of rows that are sent
    fields: Counter[str] = field(default_factory=Counter)

    def notes(self, name: str, sent: int) -> tuple[str, ...]:
        """Return one line for each kind of note."""
        total = sent + self.rows.total() + self.bad_rows.total()
        found = []
        for what, held in (("rows without a prompt", self.rows), ("bad rows", self.bad_rows)):
            why = ", ".join(f"{count} with {reason}" for reason, count in held.most_common())
            if held:
                found.append(f"{name}: {held.total()} {what} of {total} are left out: {why}")
        found += [f"{name}: {count} {what}" for what, count in self.parts.most_common()]
        if self.fields:
            shown = ", ".join(
                f"{key} ({count} rows)" for key, count in self.fields.most_common(_SHOWN)
            )
            more = len(self.fields) - _SHOWN
            found.append(
                f"{name}: fields that are not sent: {shown}"
                + (f" and {more} more" if more > 0 else "")
            )
        return tuple(found)


def parse_entry(value: object, tally: Tally) -> Entry:
    """Return the conversation of a row. Raises NoPromptError, or ValueError for a damaged row."""
    if isinstance(value, str):
        if _A_ROW.match(value):
            tally.parts[
                "texts are JSON objects, sent as they stand: are they rows of a .jsonl?"
            ] += 1
        return _conversation(value, tally)
    if not isinstance(value, Mapping):
        raise ValueError("a value that is neither an object nor a text")
    body = value.get("body")
    if isinstance(body, Mapping):  # a line of an OpenAI batch file
        tally.fields.update(str(name) for name in value if name != "body")
        value = body
    limit = _limit(value, tally)
    known = [name for name in _HOLDERS if name in value]
    if not known:
        raise ValueError(f"none of {', '.join(_HOLDERS)}")
    taken = next((name for name in known if _holds_something(value[name])), None)
    if taken is None:
        raise NoPromptError(f"no {'turns' if known[0].startswith(('conv', 'mess')) else 'text'}")
    for name in (taken, "instruction") if taken == "input" else (taken,):
        _check_shape(name, value.get(name))
    used, told = {taken, *_LIMITS}, value[taken]
    both = value.get("instruction"), value.get("input")
    if taken == "input" and all(
        isinstance(part, str) and part.strip() for part in both
    ):  # of Alpaca
        used, told = {*used, "instruction"}, "\n\n".join(map(str, both))
    tally.fields.update(str(name) for name in value if name not in used)
    return _conversation(told, tally, limit)


def _limit(body: Mapping[str, Any], tally: Tally) -> int | None:
    """Return the body's limit on its answer, in tokens. Raises ValueError."""
    given = [body[name] for name in _LIMITS if body.get(name) is not None]
    if not all(isinstance(tokens, int) and not isinstance(tokens, bool) for tokens in given):
        raise ValueError("a limit on the answer that is no whole number")
    if any(tokens > MAX_TOKENS for tokens in given):
        raise ValueError(f"a limit on the answer of more than {MAX_TOKENS} tokens")
    useful = [tokens for tokens in given if tokens > 0]
    if len(useful) < len(given):
        tally.parts["limits on the answer are below 1: they are not used"] += 1
    return useful[-1] if useful else None


def _holds_something(value: object) -> bool:
    return is_visible(value) if isinstance(value, str) else value not in (None, [])


def _check_shape(name: str, value: object) -> None:
    """Raise ValueError where the field ``name`` cannot hold ``value``."""
    shape = _TEXT if isinstance(value, str) else _LIST if isinstance(value, list) else ""
    if value is not None and shape not in _HOLDERS[name]:
        may = " nor ".join(_HOLDERS[name])
        raise ValueError(f"a field {name} that is {'neither' if ' nor ' in may else 'not'} {may}")


def _conversation(messages: str | list[Any], tally: Tally, limit: int | None = None) -> Entry:
    """Split a list of messages, or a single text, into turns."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    found: list[tuple[tuple[Message, ...], str | None]] = []  # what a turn adds, and its answer
    waiting: list[Message] = []
    empty = 0
    for item in messages:
        role, content = _message(item, tally)
        if role == "assistant":
            if not any(m["role"] == "user" for m in waiting):
                tally.parts["answers without a message of a user before them are left out"] += 1
                continue
            if _blank(content):
                tally.parts["recorded answers have no text: their lengths are drawn"] += 1
            found.append((tuple(waiting), None if _blank(content) else text_of_content(content)))
            waiting = []
        elif _blank(content):
            empty += 1
            tally.parts["empty messages are left out"] += 1
        else:
            if role == "tool":
                tally.parts["results of tools are sent as messages of a user"] += 1
            waiting.append({"role": "user" if role == "tool" else role, "content": content})
    if any(m["role"] == "user" for m in waiting):
        found.append((tuple(waiting), None))
    elif waiting and found:
        tally.parts["conversations end with messages of the system: they are left out"] += 1
    if not found:
        raise NoPromptError("empty messages only" if empty else "no message of a user")
    turns, answers = zip(*found, strict=True)
    return Entry(turns, answers, limit)


def _message(item: object, tally: Tally) -> tuple[str, Any]:
    """Return (role, content as text, list of parts or None) of a message. Raises ValueError."""
    if not isinstance(item, Mapping):
        raise ValueError("a message that is no object")
    said = item.get("role", item.get("from"))
    role = ROLES_OF_MESSAGES.get(str(said).lower())
    if role is None:
        raise ValueError(f"the unknown role {said!r:.40} of a message")
    content = item.get("content", item.get("value"))
    parts = content if isinstance(content, list) else []
    if not isinstance(content, str | list | None) or not all(map(is_part, parts)):
        raise ValueError("a content of a message that is neither text nor a list of parts")
    tally.fields.update(f"{name} of a message" for name in item if name not in _OF_A_MESSAGE)
    whole = mended(content)
    if whole is not content:
        tally.parts[
            "messages hold half of a character (a lone surrogate): U+FFFD is sent for it"
        ] += 1
    return role, whole


def is_part(part: object) -> bool:
    """Return whether an item of a content list has a type, and a text if it is of that type."""
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        return False
    return part["type"] != "text" or isinstance(part.get("text"), str)


def _blank(content: Any) -> bool:
    """Return whether there is nothing to send: no parts, or white space only."""
    if isinstance(content, list):
        return all(
            set(part) <= {"type", "text"} and not is_visible(str(part.get("text") or ""))
            for part in content
        )
    return content is None or not is_visible(content)


def is_visible(text: str) -> bool:
    """Return whether a text has a character other than spaces, controls and zero-width marks."""
    return any(not c.isspace() and unicodedata.category(c) not in ("Cc", "Cf") for c in text)


def is_far(messages: Sequence[Message], estimate: int, counted: int) -> bool:
    """Return whether the text of messages cannot have so many tokens; images have some without."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    low, high = sorted((estimate, counted))
    is_text = all(part.get("text") or part.get("content") for part in parts)
    return is_text and high > FAR * low + _FAR_TOKENS


def text_of_content(content: str | list[Any]) -> str:
    if isinstance(content, str):
        return content
    return " ".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
