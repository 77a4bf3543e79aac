"""Read prompts from a file: messages, OpenAI batch lines, ShareGPT conversations, plain text.

Rows without a prompt are left out and counted; damaged rows raise, or are skipped and counted.
"""

import json
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ampacity.files import MIB, read_bytes
from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.prompts.conversations import (
    CHARACTERS_PER_TOKEN,
    Entry,
    Message,
    NoPromptError,
    Tally,
    parse_entry,
    text_of_content,
)
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

LARGEST_BYTES = 1024 * MIB


@dataclass(frozen=True)
class PromptFile:
    """The prompts of a file in order. ``notes``: what is not sent, or is changed, one line each."""

    path: str
    entries: tuple[Entry, ...]
    notes: tuple[str, ...] = ()

    def turn(self, entry: int, turn: int) -> tuple[Message, ...]:
        """Return the messages that one turn of a conversation adds."""
        return self.entries[entry % len(self.entries)].turns[turn]

    def describe(self) -> dict[str, Any]:
        """Return a JSON-able description."""
        turns = [len(entry.turns) for entry in self.entries]
        return {"file": Path(self.path).name, "prompts": len(self.entries), "turns": sum(turns)}

    def reuse_factor(self, conversations: int) -> float:
        """Return how often each prompt is used on average, at least 1: above 1 caches may hit."""
        return max(1.0, conversations / len(self.entries))


def read_prompts(path: Path, *, skip_bad_rows: bool = False) -> PromptFile:
    """Read a prompt file; ``skip_bad_rows`` counts damaged rows in the notes instead of raising.

    Raises WorkloadError with one line that names the line.
    """
    try:
        data = read_bytes(path, LARGEST_BYTES)
        text = data.decode(encoding_of(data), errors=DECODE_ERRORS)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or f"the gzip data are broken ({error})"
        raise WorkloadError(f"prompts {path} cannot be read: {reason}") from None
    except UnicodeDecodeError as error:
        raise WorkloadError(f"prompts {path}: this is no text: {error.reason}") from None
    except MemoryError:
        raise WorkloadError(
            f"prompts {path}: the file does not fit into this machine's memory"
        ) from None
    tally, entries, twice = Tally(), [], Counter[str]()
    for value, where in _values(text, path, twice):
        held = Counter(tally.parts), Counter(tally.fields)
        try:
            if isinstance(value, ValueError):
                raise value
            entries.append(parse_entry(value, tally))
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
    """Yield each prompt as parsed JSON, text or ValueError, and its place.

    ``twice`` counts the duplicate keys of objects.
    """
    decoder = json.JSONDecoder(object_pairs_hook=counting_pairs(twice))
    ending = Path(path.name.lower().removesuffix(".gz")).suffix
    if ending in (".csv", ".tsv", ".parquet"):
        raise WorkloadError(
            f"prompts {path}: prompts are read from .jsonl, .json and .txt (each also with .gz): "
            "write one JSON object a line"
        )
    if ending == ".json":
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
    plain = ending == ".txt"
    for number, line in enumerate(text.split("\n"), 1):  # U+2028 in a prompt is no end of line
        if line.strip():
            yield _value(line.strip("\r"), None if plain else decoder), f"prompts {path}:{number}"


def _value(line: str, decoder: json.JSONDecoder | None) -> object:
    """Parse a line of JSON, or of text without a ``decoder``."""
    if is_broken(line):
        return ValueError(BROKEN_BYTES)
    try:
        return decoder.decode(line) if decoder else line
    except (ValueError, RecursionError):
        return ValueError("a line that is no JSON (plain text goes into a .txt file)")


@dataclass(frozen=True, eq=False)
class Prompts:
    """A prompt file with token counts by entry and turn; 0: no recorded answer."""

    file: PromptFile
    new_tokens: tuple[tuple[int, ...], ...]
    answer_tokens: tuple[tuple[int, ...], ...]
    counted_by: str

    @property
    def mean_turns(self) -> float:
        """Return the mean number of requests per prompt of the file."""
        return sum(map(len, self.new_tokens)) / len(self.new_tokens)

    def describe(self) -> dict[str, Any]:
        """Return a JSON-able description."""
        return {**self.file.describe(), "counted_by": self.counted_by}


def load_prompts(path: Path, tokenizer: Tokenizer, *, skip_bad_rows: bool = False) -> Prompts:
    """Read a prompt file and count its tokens (without a vocabulary 4 characters each).

    Raises WorkloadError.
    """
    file = read_prompts(path, skip_bad_rows=skip_bad_rows)
    by_words = tokenizer is WORDS
    new, answers = [], []

    def count(content: str | list[Any]) -> int:
        text = text_of_content(content)
        return max(1, -(-len(text) // CHARACTERS_PER_TOKEN) if by_words else tokenizer.count(text))

    for entry in file.entries:
        new.append(tuple(sum(count(m["content"]) for m in turn) for turn in entry.turns))
        answers.append(tuple(0 if a is None else count(a) for a in entry.answers))
    return Prompts(
        file, tuple(new), tuple(answers), "4 characters a token" if by_words else tokenizer.name
    )
