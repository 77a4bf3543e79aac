"""Where a simulated answer ends, against a reading token by token."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampacity.simulator.server.text import (
    WORDS,
    Ending,
    characters,
    ending,
    logprobs,
    natural_length,
    word_index,
)


def word(seed: int, position: int) -> str:
    return WORDS[word_index(seed, position)]


@pytest.mark.parametrize(
    ("limit", "min_tokens", "mean_tokens", "expected"),
    [
        (10, 0, None, Ending(10, 50)),
        (10, 0, 1, Ending(1, 0, "stop")),  # the end-of-sequence token counts and has no text
        (10, 4, 1, Ending(5, 20, "stop")),
        (4, 4, 1, Ending(4, 20)),
    ],
)
def test_an_answer_ends_by_itself_or_at_its_limit(
    limit: int, min_tokens: int, mean_tokens: float | None, expected: Ending
) -> None:
    assert ending(7, limit, min_tokens, mean_tokens) == expected


def test_natural_lengths_are_geometric() -> None:
    lengths = np.array([natural_length(seed, 50.0) for seed in range(4000)])
    # mean 50, standard deviation 49.5, that of the mean of 4000: 0.78; P(> 50) = 0.98**50 = 0.364
    assert lengths.min() == 1
    assert abs(lengths.mean() - 50.0) < 3.0
    assert abs((lengths > 50).mean() - 0.98**50) < 0.03


@given(st.integers(0, 5000), st.integers(0, 300), st.integers(0, 300))
def test_characters_is_a_piece_of_the_whole(seed: int, start: int, length: int) -> None:
    whole = "".join(word(seed, n) for n in range(130))
    assert characters(seed, start, start + length) == whole[start : start + length]


@pytest.mark.parametrize("top", [0, 1, 5, 20])
def test_logprobs_are_a_distribution_with_the_chosen_token_first(top: int) -> None:
    for position in range(200):
        found = logprobs(3, position, top)
        assert found.token == word(3, position)
        assert len(found.top) == top
        assert len({token for token, _ in found.top}) == top
        values = [value for _, value in found.top]
        assert values == sorted(values, reverse=True)
        assert math.fsum(map(math.exp, values)) <= 1.0
        if top:
            assert found.top[0] == (found.token, found.logprob)
