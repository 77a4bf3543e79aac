"""The text of answers: one word is one token of five characters. No I/O.

The seed of a request determines its answer and the length of it.
"""

import math
import random
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
    characters: int
    finish_reason: str = "length"


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


def ending(seed: int, limit: int, min_tokens: int = 0, mean_tokens: float | None = None) -> Ending:
    """Return the end of an answer: its natural end, after min_tokens, or its limit.

    mean_tokens None: no natural end.
    """
    if mean_tokens is not None:
        natural = max(natural_length(seed, mean_tokens), min_tokens + 1)
        if natural <= limit:
            return Ending(natural, (natural - 1) * WORD_CHARACTERS, "stop")
    return Ending(limit, limit * WORD_CHARACTERS)


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
