"""Where a simulated answer ends, against a reading token by token."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
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
from tests.support.repeats import often


def word(seed: int, position: int) -> str:
    return WORDS[word_index(seed, position)]


def by_reading(
    seed: int, limit: int, min_tokens: int, stop: list[str], natural: int | None
) -> Ending:
    """vLLM's rule: after each token, search where the new characters can complete a match."""
    text = ""
    for tokens in range(1, limit + 1):
        if natural is not None and tokens >= natural and tokens > min_tokens:
            return Ending(tokens, len(text), "stop")
        text += word(seed, tokens - 1)
        if tokens > min_tokens:
            for string in stop:
                at = text.find(string, max(0, len(text) - 5 - len(string) + 1))
                if at >= 0:
                    return Ending(tokens, at, "stop", string)
    return Ending(limit, len(text))


pieces = st.text(alphabet="aeiolmnr bdz", min_size=1, max_size=7)


@settings(deadline=None, max_examples=often(37, 150))
@given(
    st.integers(0, 2000),
    st.integers(1, 2600),
    st.integers(0, 2600),
    st.lists(pieces, max_size=3),
    st.none() | st.integers(1, 400),
)
def test_the_end_is_where_a_reader_finds_it(
    seed: int, limit: int, min_tokens: int, stop: list[str], mean_tokens: int | None
) -> None:
    min_tokens = min(min_tokens, limit)
    natural = None if mean_tokens is None else natural_length(seed, mean_tokens)
    found = ending(seed, limit, min_tokens=min_tokens, stop=stop, mean_tokens=mean_tokens)
    assert found == by_reading(seed, limit, min_tokens, stop, natural)


def test_a_stop_string_can_be_kept() -> None:
    third = word(7, 2)
    assert ending(7, 10, stop=[third]) == Ending(3, 10, "stop", third)
    assert ending(7, 10, stop=[third], include_stop=True) == Ending(3, 15, "stop", third)


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
