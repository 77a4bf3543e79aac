"""Real prompts from a JSONL or JSON file: messages, lines of an OpenAI batch file, ShareGPT conversations, plain text."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workloads.errors import WorkloadError
from workloads.lengths import Lengths
from workloads.prefixes import SharedPrefixes, in_time_order
from workloads.tokenizers import WORDS, Tokenizer

Message = dict[str, Any]
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
          "assistant": "assistant", "system": "system", "tool": "user", "developer": "system"}  # fmt: skip
CHARACTERS_PER_TOKEN = 4  # of English text, in the vocabularies of today's models, roughly
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


@dataclass(frozen=True)
class Entry:
    """One conversation: the messages that each turn adds, and what the answer to it was or may be long."""

    turns: tuple[tuple[Message, ...], ...]
    answers: tuple[str | None, ...]  # as recorded; None: not in the file
    limit_tokens: int | None = None  # the file's own limit on the answer


@dataclass(frozen=True)
class PromptFile:
    """The prompts of a file, in its order."""

    path: str
    entries: tuple[Entry, ...]

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


def read_prompts(path: Path) -> PromptFile:
    """Read a prompt file. Raises WorkloadError with one line that names the line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise WorkloadError(f"prompts {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise WorkloadError(f"prompts {path}: this is no UTF-8 text") from None
    entries = tuple(_entry(value, where) for value, where in _values(text, path))
    if not entries:
        raise WorkloadError(f"prompts {path}: there is no prompt in it")
    return PromptFile(str(path), entries)


def _values(text: str, path: Path) -> Iterator[tuple[object, str]]:
    """Each prompt as parsed JSON (or text), and where it stands."""
    if text.lstrip().startswith("[") and path.suffix.lower() == ".json":
        try:
            whole = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise WorkloadError(f"prompts {path}: this is no JSON: {error}") from None
        yield from ((value, f"prompts {path}: item {k + 1}") for k, value in enumerate(whole))
        return
    plain = path.suffix.lower() == ".txt"
    for number, line in enumerate(text.split("\n"), 1):  # U+2028 in a prompt is no end of line
        if not line.strip():
            continue
        where = f"prompts {path}:{number}"
        if plain:
            yield line.strip("\r"), where
            continue
        try:
            yield json.loads(line), where
        except (ValueError, RecursionError):
            raise WorkloadError(f"{where}: this line is no JSON (plain text goes into a .txt file)") from None


def _entry(value: object, where: str) -> Entry:
    if isinstance(value, str):
        return _conversation(value, where)
    if not isinstance(value, Mapping):
        raise WorkloadError(f"{where}: neither an object nor a text")
    limit, body = None, value.get("body")
    if isinstance(body, Mapping):  # a line of an OpenAI batch file
        value = body
    for name in _LIMITS:
        given = value.get(name)
        if isinstance(given, int) and not isinstance(given, bool) and given > 0:
            limit = given
    for name in ("messages", "conversations", "conversation", "prompt", "input", "text", "instruction"):
        if value.get(name):
            return _conversation(value[name], where, limit)
    raise WorkloadError(f"{where}: it has none of messages, conversations, prompt, input, text")


def _conversation(messages: object, where: str, limit: int | None = None) -> Entry:
    """messages: those of a list, or the text of a single one."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list):
        raise WorkloadError(f"{where}: the messages are no list")
    found: list[tuple[tuple[Message, ...], str | None]] = []  # what a turn adds, and its answer
    waiting: list[Message] = []
    for item in messages:
        if not isinstance(item, Mapping):
            raise WorkloadError(f"{where}: a message is no object")
        said = item.get("role", item.get("from"))
        role = _ROLES.get(str(said).lower())
        if role is None:
            raise WorkloadError(f"{where}: the role {said!r} of a message is not known")
        content = item.get("content", item.get("value"))
        if not isinstance(content, str | list):
            raise WorkloadError(f"{where}: a message has no content")
        if role == "assistant":
            if any(m["role"] == "user" for m in waiting):
                found.append((tuple(waiting), _text(content)))
                waiting = []
            continue  # an answer that nobody asked for opens the conversation: left out
        waiting.append({"role": role, "content": content})
    if any(m["role"] == "user" for m in waiting):
        found.append((tuple(waiting), None))
    if not found:
        raise WorkloadError(f"{where}: no message of a user is in it")
    turns, answers = zip(*found, strict=True)
    return Entry(turns, answers, limit)


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
        self, arrivals_s: NDArray[np.float64], output_tokens: Lengths, think_ms: Lengths | None, order: np.random.Generator,
        draws: np.random.Generator,
    ) -> dict[str, Any]:  # fmt: skip
        """Columns of a schedule in which the k-th prompt begins at ``arrivals_s[k]``: each once in a drawn order, then again.

        An answer is as long as the recorded one, else as the file's own limit, else drawn from ``output_tokens``.
        """
        n, size = len(arrivals_s), len(self.file.entries)
        chosen = order.permutation(size)[np.arange(n) % size]
        turns = np.array([len(self.new_tokens[e]) for e in chosen], dtype=np.int64)
        entry, session = np.repeat(chosen, turns), np.repeat(np.arange(n), turns)
        turn = np.arange(len(entry)) - np.repeat(np.cumsum(turns) - turns, turns)
        new = np.fromiter((t for e in chosen for t in self.new_tokens[e]), dtype=np.int64, count=len(entry))
        known = np.fromiter(
            (t for e in chosen for t in self.answer_tokens[e]), dtype=np.int64, count=len(entry)
        )
        limit = np.array([entry.limit_tokens or 0 for entry in self.file.entries], dtype=np.int64)[entry]
        drawn = output_tokens.sample(draws, len(entry))
        outputs = np.where(known > 0, known, np.where(limit > 0, limit, drawn))
        pause_s = np.zeros(len(entry)) if think_ms is None else think_ms.sample(draws, len(entry)) / 1e3
        pause_s[turn == 0] = 0.0
        inputs, due_s = new.copy(), np.repeat(np.asarray(arrivals_s, dtype=np.float64), turns)
        for i in np.flatnonzero(turn):
            inputs[i] += inputs[i - 1] + outputs[i - 1]
            due_s[i] = due_s[i - 1] + pause_s[i]
        columns = {"scheduled_s": due_s, "input_tokens": inputs, "output_tokens": outputs, "entry": entry}
        # a prompt that comes again is known to a cache
        shared = SharedPrefixes(np.arange(len(entry) + 1), entry, new)
        if turns.max(initial=1) == 1:
            return columns | {"shared": shared}
        columns |= {"new_tokens": new, "session": session, "turn": turn.astype(np.int32), "think_s": pause_s}
        before = np.where(turn > 0, np.arange(len(entry)) - 1, -1)
        return in_time_order(columns, before, [[b] if b >= 0 else [] for b in before.tolist()], shared)


def load_prompts(path: Path, tokenizer: Tokenizer) -> Prompts:
    """A prompt file with its tokens counted; without a vocabulary a token is taken as four characters. Raises WorkloadError."""
    file = read_prompts(path)
    by_words = tokenizer is WORDS
    new, answers = [], []

    def count(content: str | list[Any]) -> int:
        text = _text(content)
        return max(1, -(-len(text) // CHARACTERS_PER_TOKEN) if by_words else tokenizer.count(text))

    for entry in file.entries:
        new.append(tuple(sum(count(m["content"]) for m in turn) for turn in entry.turns))
        answers.append(tuple(0 if a is None else count(a) for a in entry.answers))
    return Prompts(file, tuple(new), tuple(answers), "4 characters a token" if by_words else tokenizer.name)
