"""Real prompts from a JSONL or JSON file: messages, lines of an OpenAI batch file, ShareGPT conversations, plain text.

Rows without a prompt are left out and counted; damaged ones end the reading, or are counted too where that is asked for.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.lengths.parse import Lengths
from ampacity.workloads.prompts.prefixes import SharedPrefixes, in_time_order
from ampacity.workloads.prompts.tokenizers import WORDS, Tokenizer
from ampacity.workloads.text import (
    BROKEN_BYTES,
    DECODE_ERRORS,
    counting_pairs,
    duplicate_key_notes,
    encoding_of,
    is_broken,
    mended,
)

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
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_LIST, _TEXT = "a list of messages", "a text"
_HOLDERS: dict[str, tuple[str, ...]] = {  # where a prompt stands, and what may stand there
    **dict.fromkeys(("messages", "conversations", "conversation"), (_LIST,)),
    **dict.fromkeys(("prompt", "input"), (_TEXT, _LIST)),
    **dict.fromkeys(("text", "instruction"), (_TEXT,)),
}
_OF_A_MESSAGE = frozenset({"role", "from", "content", "value"})
_SHOWN = 8  # names of fields in a note


class NoPromptError(ValueError):
    """A row that can be read and holds no prompt."""


@dataclass(frozen=True)
class Entry:
    """One conversation: the messages that each turn adds, and what the answer to it was or may be long."""

    turns: tuple[tuple[Message, ...], ...]
    answers: tuple[str | None, ...]  # as recorded; None: not in the file
    limit_tokens: int | None = None  # the file's own limit on the answer


@dataclass(frozen=True)
class PromptFile:
    """The prompts of a file, in its order. ``notes``: what of the file is not sent, or not as it is, one line each."""

    path: str
    entries: tuple[Entry, ...]
    notes: tuple[str, ...] = ()

    def turn(self, entry: int, turn: int) -> tuple[Message, ...]:
        """What one turn of a conversation adds."""
        return self.entries[entry % len(self.entries)].turns[turn]

    def describe(self) -> dict[str, Any]:
        """JSON-able description."""
        turns = [len(entry.turns) for entry in self.entries]
        return {"file": Path(self.path).name, "prompts": len(self.entries), "turns": sum(turns)}

    def reuse_factor(self, conversations: int) -> float:
        """How often each prompt comes on average, 1 or more: above 1 the later ones may be cache hits."""
        return max(1.0, conversations / len(self.entries))


@dataclass
class _Tally:
    """What is not sent, or not as it stands in the file, counted by what it is."""

    rows: Counter[str] = field(default_factory=Counter)  # left out, by reason
    bad_rows: Counter[str] = field(default_factory=Counter)  # left out because it was asked for
    parts: Counter[str] = field(default_factory=Counter)  # of rows that are sent
    fields: Counter[str] = field(default_factory=Counter)

    def notes(self, name: str, sent: int) -> tuple[str, ...]:
        """One line of each kind that there is."""
        total = sent + self.rows.total() + self.bad_rows.total()
        found = [
            f"{name}: {held.total()} {what} of {total} are left out: {_listed(held)}"
            for what, held in (("rows without a prompt", self.rows), ("bad rows", self.bad_rows))
            if held
        ]
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


def _listed(held: Counter[str]) -> str:
    return ", ".join(f"{count} with {reason}" for reason, count in held.most_common())


def read_prompts(path: Path, *, skip_bad_rows: bool = False) -> PromptFile:
    """Read a prompt file; ``skip_bad_rows`` leaves damaged rows out and counts them in the notes.

    Raises WorkloadError with one line that names the line.
    """
    try:
        data = path.read_bytes()
        text = data.decode(encoding_of(data), errors=DECODE_ERRORS)
    except OSError as error:
        raise WorkloadError(f"prompts {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise WorkloadError(f"prompts {path}: this is no text: {error.reason}") from None
    except MemoryError:
        raise WorkloadError(
            f"prompts {path}: the file does not fit into this machine's memory"
        ) from None
    tally, entries, twice = _Tally(), [], Counter[str]()
    for value, where in _values(text, path, twice):
        held = Counter(tally.parts), Counter(tally.fields)
        try:
            if isinstance(value, ValueError):
                raise value
            entries.append(_entry(value, tally))
            continue
        except NoPromptError as error:
            tally.rows[str(error)] += 1
        except (ValueError, RecursionError) as error:
            reason = str(error) if isinstance(error, ValueError) else "it is nested too deep"
            if not skip_bad_rows:
                raise WorkloadError(
                    f"{where}: {reason}; mend or remove the row, or give --skip-bad-rows"
                ) from None
            tally.bad_rows[reason] += 1
        tally.parts, tally.fields = held  # those of a row that is left out do not count
    notes = (*tally.notes(path.name, len(entries)), *duplicate_key_notes(path.name, twice))
    if not entries:
        raise WorkloadError("; ".join([f"prompts {path}: there is no prompt in it", *notes]))
    return PromptFile(str(path), tuple(entries), notes)


def _values(text: str, path: Path, twice: Counter[str]) -> Iterator[tuple[object, str]]:
    """Each prompt as parsed JSON (or text, or what is wrong with it), and where it stands.

    ``twice`` counts the keys that stand twice in an object.
    """
    decoder = json.JSONDecoder(object_pairs_hook=counting_pairs(twice))
    if path.suffix.lower() == ".json":
        try:
            whole = decoder.decode(text)
        except (ValueError, RecursionError) as error:
            twice.clear()
            if text.lstrip().startswith("["):
                raise WorkloadError(f"prompts {path}: this is no JSON: {error}") from None
        else:
            items = whole if isinstance(whole, list) else [whole]
            if is_broken(text):  # bytes that are no text are in some of them
                items = [
                    item if mended(item) is item else ValueError(BROKEN_BYTES) for item in items
                ]
            yield from ((value, f"prompts {path}: item {k}") for k, value in enumerate(items, 1))
            return
    plain = path.suffix.lower() == ".txt"
    for number, line in enumerate(text.split("\n"), 1):  # U+2028 in a prompt is no end of line
        if line.strip():
            yield _value(line.strip("\r"), None if plain else decoder), f"prompts {path}:{number}"


def _value(line: str, decoder: json.JSONDecoder | None) -> object:
    """A line of JSON, or of text where there is no ``decoder``."""
    if is_broken(line):
        return ValueError(BROKEN_BYTES)
    try:
        return decoder.decode(line) if decoder else line
    except (ValueError, RecursionError):
        return ValueError("a line that is no JSON (plain text goes into a .txt file)")


def _entry(value: object, tally: _Tally) -> Entry:
    """The conversation of a row. Raises NoPromptError, and ValueError for a damaged one."""
    if isinstance(value, str):
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


def _limit(body: Mapping[str, Any], tally: _Tally) -> int | None:
    """The limit that a body has on its answer, in tokens. Raises ValueError."""
    given = [body[name] for name in _LIMITS if body.get(name) is not None]
    if not all(isinstance(tokens, int) and not isinstance(tokens, bool) for tokens in given):
        raise ValueError("a limit on the answer that is no whole number")
    useful = [tokens for tokens in given if tokens > 0]
    if len(useful) < len(given):
        tally.parts["limits on the answer are below 1: they are not used"] += 1
    return useful[-1] if useful else None


def _holds_something(value: object) -> bool:
    return bool(value.strip()) if isinstance(value, str) else value not in (None, [])


def _check_shape(name: str, value: object) -> None:
    """Raise ValueError where ``value`` is none of what may stand in the field ``name``."""
    shape = _TEXT if isinstance(value, str) else _LIST if isinstance(value, list) else ""
    if value is not None and shape not in _HOLDERS[name]:
        may = " nor ".join(_HOLDERS[name])
        raise ValueError(f"a field {name} that is {'neither' if ' nor ' in may else 'not'} {may}")


def _conversation(messages: str | list[Any], tally: _Tally, limit: int | None = None) -> Entry:
    """messages: those of a list, or the text of a single one."""
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
            found.append((tuple(waiting), None if _blank(content) else _text(content)))
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
    if not found:
        raise NoPromptError("empty messages only" if empty else "no message of a user")
    turns, answers = zip(*found, strict=True)
    return Entry(turns, answers, limit)


def _message(item: object, tally: _Tally) -> tuple[str, Any]:
    """(role, content) of a message; content is a text, a list of parts, or None. Raises ValueError."""
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
    """Whether an item of a list of contents has a type, and a text where that is its type."""
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        return False
    return part["type"] != "text" or isinstance(part.get("text"), str)


def _blank(content: Any) -> bool:
    """Whether there is nothing to send: no parts, or only texts of white space."""
    if isinstance(content, list):
        return all(
            set(part) <= {"type", "text"} and not str(part.get("text") or "").strip()
            for part in content
        )
    return content is None or not content.strip()


def _text(content: str | list[Any]) -> str:
    if isinstance(content, str):
        return content
    return " ".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))


@dataclass(frozen=True, eq=False)
class Prompts:
    """A prompt file and its lengths in tokens: of what each turn adds, of each recorded answer (0: none), by entry."""

    file: PromptFile
    new_tokens: tuple[tuple[int, ...], ...]
    answer_tokens: tuple[tuple[int, ...], ...]
    counted_by: str

    @property
    def mean_turns(self) -> float:
        """Requests that a prompt of the file makes, on average."""
        return sum(map(len, self.new_tokens)) / len(self.new_tokens)

    def describe(self) -> dict[str, Any]:
        """JSON-able description."""
        return {**self.file.describe(), "counted_by": self.counted_by}

    def draw(
        self,
        arrivals_s: NDArray[np.float64],
        output_tokens: Lengths,
        think_ms: Lengths | None,
        order: np.random.Generator,
        draws: np.random.Generator,
    ) -> dict[str, Any]:
        """Columns of a schedule in which the k-th prompt begins at ``arrivals_s[k]``: each once in a drawn order, then again.

        An answer is as long as the recorded one, else as the file's own limit, else drawn from ``output_tokens``.
        """
        n, size = len(arrivals_s), len(self.file.entries)
        chosen = order.permutation(size)[np.arange(n) % size]
        turns = np.array([len(self.new_tokens[e]) for e in chosen], dtype=np.int64)
        entry, session = np.repeat(chosen, turns), np.repeat(np.arange(n), turns)
        turn = np.arange(len(entry)) - np.repeat(np.cumsum(turns) - turns, turns)
        new = np.fromiter(
            (t for e in chosen for t in self.new_tokens[e]), dtype=np.int64, count=len(entry)
        )
        known = np.fromiter(
            (t for e in chosen for t in self.answer_tokens[e]), dtype=np.int64, count=len(entry)
        )
        limit = np.array([entry.limit_tokens or 0 for entry in self.file.entries], dtype=np.int64)[
            entry
        ]
        drawn = output_tokens.sample(draws, len(entry))
        outputs = np.where(known > 0, known, np.where(limit > 0, limit, drawn))
        pause_s = (
            np.zeros(len(entry)) if think_ms is None else think_ms.sample(draws, len(entry)) / 1e3
        )
        pause_s[turn == 0] = 0.0
        inputs, due_s = new.copy(), np.repeat(np.asarray(arrivals_s, dtype=np.float64), turns)
        for i in np.flatnonzero(turn):
            inputs[i] += inputs[i - 1] + outputs[i - 1]
            due_s[i] = due_s[i - 1] + pause_s[i]
        columns = {
            "scheduled_s": due_s,
            "input_tokens": inputs,
            "output_tokens": outputs,
            "entry": entry,
        }
        # a prompt that comes again is known to a cache
        shared = SharedPrefixes(np.arange(len(entry) + 1), entry, new)
        if turns.max(initial=1) == 1:
            return columns | {"shared": shared}
        columns |= {
            "new_tokens": new,
            "session": session,
            "turn": turn.astype(np.int32),
            "think_s": pause_s,
        }
        before = np.where(turn > 0, np.arange(len(entry)) - 1, -1)
        return in_time_order(
            columns, before, [[b] if b >= 0 else [] for b in before.tolist()], shared
        )


def load_prompts(path: Path, tokenizer: Tokenizer, *, skip_bad_rows: bool = False) -> Prompts:
    """A prompt file with its tokens counted; without a vocabulary a token is taken as four characters. Raises WorkloadError."""
    file = read_prompts(path, skip_bad_rows=skip_bad_rows)
    by_words = tokenizer is WORDS
    new, answers = [], []

    def count(content: str | list[Any]) -> int:
        text = _text(content)
        return max(1, -(-len(text) // CHARACTERS_PER_TOKEN) if by_words else tokenizer.count(text))

    for entry in file.entries:
        new.append(tuple(sum(count(m["content"]) for m in turn) for turn in entry.turns))
        answers.append(tuple(0 if a is None else count(a) for a in entry.answers))
    return Prompts(
        file, tuple(new), tuple(answers), "4 characters a token" if by_words else tokenizer.name
    )
