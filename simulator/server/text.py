"""The text of answers: one word is one token of five characters. No I/O.

The seed of a request determines its answer and the length of it.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

# words of equal length: a token's place in the text follows from its number
WORDS = tuple(
    f" {a}{b}{c}{d}" for a in "bdfgklmnprstvz" for b in "aeiou" for c in "lmnr" for d in "aeio"
)
WORD_BYTES = tuple(word.encode() for word in WORDS)
WORD_CHARACTERS = 5
STRIDE = 389  # coprime to the size of the vocabulary: every word is used
END_OF_TEXT = "<|im_end|>"


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of an answer. `tokens` counts the end-of-sequence token, which has no text."""

    tokens: int
    characters: int  # sent: without a stop string and what follows it
    finish_reason: str = "length"
    stop_reason: str | None = None


def word_index(seed: int, position: int) -> int:
    return (seed + position * STRIDE) % len(WORDS)


def characters(seed: int, start: int, end: int) -> str:
    """Return the text between two positions, in characters."""
    first, last = start // WORD_CHARACTERS, -(-end // WORD_CHARACTERS)
    text = "".join(WORDS[word_index(seed, position)] for position in range(first, last))
    return text[start - first * WORD_CHARACTERS : end - first * WORD_CHARACTERS]


def natural_length(seed: int, mean_tokens: float) -> int:
    """Return the tokens until the model would end its answer: geometric."""
    if mean_tokens <= 1:
        return 1
    uniform = 1.0 - random.Random(seed).random()  # in (0, 1]
    return max(1, math.ceil(math.log(uniform) / math.log1p(-1.0 / mean_tokens)))


def ending(
    seed: int,
    limit: int,
    *,
    min_tokens: int = 0,
    stop: Sequence[str] = (),
    include_stop: bool = False,
    mean_tokens: float | None = None,
) -> Ending:
    """Return the end of an answer: its limit, its natural end, or the first stop string.

    As in vLLM, neither the end-of-sequence token nor a stop string counts before min_tokens, and a
    stop string that ends in token k ends the answer there. mean_tokens None: no natural end.
    """
    found = Ending(limit, limit * WORD_CHARACTERS)
    if mean_tokens is not None:
        natural = max(natural_length(seed, mean_tokens), min_tokens + 1)
        if natural <= limit:
            found = Ending(natural, (natural - 1) * WORD_CHARACTERS, "stop")
    stopped = _stopped(seed, found.characters, min_tokens, stop, include_stop) if stop else None
    return stopped or found


def _stopped(
    seed: int, end: int, min_tokens: int, stop: Sequence[str], include_stop: bool
) -> Ending | None:
    """Return the first stop string in the first `end` characters complete after min_tokens."""
    free = min_tokens * WORD_CHARACTERS  # a stop string must end after this
    longest = max(map(len, stop))
    start = max(0, free - longest + 1)
    # the text repeats after the whole vocabulary, so the search can end there
    text = characters(seed, start, min(end, free + len(WORDS) * WORD_CHARACTERS + longest))
    best: Ending | None = None
    for string in stop:  # if two end with the same token, the first in the list counts
        at = text.find(string, max(0, free - len(string) + 1 - start))
        if at >= 0:
            behind = start + at + len(string)
            tokens = -(-behind // WORD_CHARACTERS)
            if best is None or tokens < best.tokens:
                best = Ending(tokens, behind if include_stop else start + at, "stop", string)
    return best


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token and its log-probability; `top`: the likeliest tokens, the chosen one first."""

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...]


def logprobs(seed: int, position: int, top: int, *, last: bool = False) -> TokenLogprobs:
    """Return a probability of 0.4 to 0.9; each further token has half of the rest."""
    index = word_index(seed, position)
    chance = 0.4 + 0.5 * (index * 577 % len(WORDS)) / len(WORDS)
    token = END_OF_TEXT if last else WORDS[index]
    others = (
        (WORDS[(index + rank) % len(WORDS)], math.log((1 - chance) * 0.5**rank))
        for rank in range(1, top)
    )
    alternatives = ((token, math.log(chance)), *others) if top else ()
    return TokenLogprobs(token, math.log(chance), alternatives)
