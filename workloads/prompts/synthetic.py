"""Generate prompts of an exact token count, unique from their first words on."""

import hashlib
import math
import string
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files

import numpy as np

from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.prompts.tokenizers import WORDS, Tokenizer

_ID_WORDS = 4  # the leading words that spell the request's number
SEGMENT_CACHE_CHARS = 32 * 2**20  # shared text that is kept ready
MIN_VOCABULARY = 256  # 256^4 = 4.3 billion requests before those words come again


@cache
def built_in_words() -> tuple[str, ...]:
    """Return 1,024 lower-case words.

    With and without a leading space, each is one token of cl100k_base, o200k_base and DeepSeek's
    vocabulary.
    """
    return tuple(
        (files("ampacity.workloads") / "data" / "words.txt").read_text(encoding="ascii").split()
    )


class PromptMaker:
    """Generates the prompts of a run. Raises WorkloadError.

    ``salt`` makes the text differ from that of other runs, stages and arms. ``tokens_per_word``
    (server tokens per token of ``tokenizer``) and ``overhead_tokens`` (of the server's chat
    template, per prompt) adapt it to the target's vocabulary.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        salt: str,
        *,
        tokens_per_word: float = 1.0,
        overhead_tokens: float = 0.0,
        words: Sequence[str] | None = None,
    ) -> None:
        """Set up; ``words``: the built-in words to use, where the tokenizer counts words."""
        if not (math.isfinite(tokens_per_word) and tokens_per_word > 0):
            raise WorkloadError(
                f"tokens_per_word is {tokens_per_word!r}: give a finite number above 0"
            )
        if overhead_tokens < 0:
            raise WorkloadError(f"overhead_tokens is {overhead_tokens}: give 0 or more")
        self.tokenizer = tokenizer
        self.salt = salt
        self.tokens_per_word = tokens_per_word
        self.overhead_tokens = overhead_tokens
        self._exact_words = tokenizer is WORDS
        single = (
            (words or built_in_words()) if self._exact_words else _single_token_words(tokenizer)
        )
        self._one_token_each = len(single) >= MIN_VOCABULARY
        used = single if self._one_token_each else built_in_words()
        self._bits = len(used).bit_length() - 1
        self._words = np.array(used[: 1 << self._bits], dtype=object)
        self._key = hashlib.blake2b(salt.encode(), digest_size=32).digest()
        self._segments: dict[tuple[int, int], str] = {}
        self._segments_chars = 0
        self._rounds = [int.from_bytes(self._key[i : i + 8], "little") for i in range(0, 32, 8)]

    def make(self, request_id: int, n_tokens: int) -> str:
        """Return the prompt of a request planned with ``n_tokens`` input tokens.

        It has round((n_tokens - overhead_tokens) / tokens_per_word) tokens under the tokenizer, at
        least 1, and depends on salt, request_id and n_tokens only. Two requests of 4 words or more
        never begin with the same 4 words (up to 4 billion requests). Raises WorkloadError where the
        tokenizer cannot make it.
        """
        return self.text(request_id, max(1, self.own_tokens(n_tokens - self.overhead_tokens)))

    def own_tokens(self, n_tokens: float) -> int:
        """Return how many tokens of our tokenizer are expected to be ``n_tokens`` on the server."""
        return round(n_tokens / self.tokens_per_word)

    def parts(
        self, request_id: int, n_tokens: int, shared: Sequence[tuple[int, int]]
    ) -> tuple[str, str]:
        """Return (shared beginning, own rest) of a prompt of ``n_tokens`` server tokens.

        ``shared``: (segment, server tokens) in order; a segment is the same text in every prompt.
        Where the segments fill the whole prompt, the rest is empty. Raises WorkloadError.
        """
        own = max(1, self.own_tokens(n_tokens - self.overhead_tokens))
        texts = []
        for segment, tokens in shared:
            length = min(max(1, self.own_tokens(tokens)), own)
            if length:
                texts.append(self._segment(segment, length))
            own -= length
        return " ".join(texts), self.text(request_id, own) if own or not texts else ""

    def _segment(self, segment: int, n_tokens: int) -> str:
        """Return the first ``n_tokens`` tokens of a segment's endless text, from a LRU cache."""
        key = (segment, n_tokens)
        text = self._segments.pop(key, None)
        if text is None:
            text = self._exact(f"segment {segment}".encode(), n_tokens, [])
            self._segments_chars += len(text)
            while self._segments and self._segments_chars > SEGMENT_CACHE_CHARS:
                self._segments_chars -= len(self._segments.pop(next(iter(self._segments))))
        self._segments[key] = text
        return text

    def text(self, request_id: int, n_tokens: int) -> str:
        """Return a request's own text of exactly ``n_tokens`` (at least 1) tokens."""
        if request_id < 0:
            raise WorkloadError(f"request_id is {request_id}: give 0 or more")
        n_tokens = max(1, n_tokens)
        n_words = min(n_tokens, _ID_WORDS) if self._one_token_each else _ID_WORDS
        return self._exact(
            request_id.to_bytes(16, "little"), n_tokens, self._id_words(request_id, n_words)
        )

    def _exact(self, name: bytes, target: int, first: list[str]) -> str:
        if self._one_token_each:
            text = self._text(name, target, first)
            if self._exact_words or self.tokenizer.count(text) == target:
                return text
        # words of several tokens, or that merge with their neighbours: write too many, then cut
        return self._fit(self._text(name, target + target // 4 + 8, first), target)

    def _text(self, name: bytes, n_words: int, first: list[str]) -> str:
        """Return ``n_words`` words: ``first``, then noise keyed by salt and name."""
        noise = hashlib.shake_128(self._key + name).digest(2 * n_words)
        index = np.frombuffer(noise, dtype="<u2") & np.uint16((1 << self._bits) - 1)
        words: list[str] = self._words[index].tolist()
        words[: len(first)] = first
        return " ".join(words)

    def _id_words(self, request_id: int, n_words: int) -> list[str]:
        """Return the request's number as words: a bijection below vocabulary^n_words."""
        width = self._bits * n_words
        mask = (1 << width) - 1
        x = request_id & mask
        for key in self._rounds:  # each step can be undone: xor, odd factor, shift to the right
            x = ((x ^ (key >> 7)) * (key | 1)) & mask
            x ^= x >> (width // 2)
        digit = (1 << self._bits) - 1
        return [self._words[(x >> shift) & digit] for shift in range(0, width, self._bits)]

    def _fit(self, text: str, target: int) -> str:
        """Adjust ``text`` (of at least ``target`` tokens) until it counts exactly ``target``."""
        count = self.tokenizer.count
        low, high = 1, target  # characters
        while high < len(text) and count(text[:high]) < target:
            low, high = high, high * 2
        while low < high:  # the shortest beginning with enough tokens
            middle = (low + high) // 2
            low, high = (middle + 1, high) if count(text[:middle]) < target else (low, middle)
        for candidate in _variants(text, low):
            if count(candidate) == target:
                return candidate
        raise WorkloadError(
            f"tokenizer {self.tokenizer.name}: no prompt of exactly {target} tokens was found: "
            "use the tokenizer words"
        )


def _single_token_words(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return built-in words that are one token alone and one more after another word."""
    words = built_in_words()
    first = next((word for word in words if tokenizer.count(word) == 1), None)
    if first is None:
        return ()
    return tuple(
        w for w in words if tokenizer.count(w) == 1 and tokenizer.count(f"{first} {w}") == 2
    )


def _variants(text: str, length: int) -> Iterator[str]:
    """Yield texts like the first ``length`` characters, none ending in a space."""
    for end in (length, *(length + d for i in range(1, 9) for d in (-i, i))):
        stem = text[: max(end, 1)].rstrip()
        yield stem
        yield from (stem + letter for letter in string.ascii_lowercase)
        yield from (stem[:-1] + letter for letter in string.ascii_lowercase if len(stem) > 1)
