"""Gaps worked out slice by slice, against every gap written out in plain Python."""

from itertools import pairwise

import numpy as np
import pytest

from ampacity.analysis.metrics import chunks as metrics
from ampacity.analysis.metrics.chunks import Chunks
from ampacity.analysis.metrics.gaps import GapSeries
from ampacity.analysis.metrics.observations import GapObservations


def made_up(rng: np.random.Generator, n: int, *, counted_tokens: bool) -> Chunks:
    count = rng.integers(0, 9, n)
    starts = np.concatenate([[0], np.cumsum(count)])
    length_us = rng.choice([0, 1, 999, 20_000, 20_000, 50_000, 50_001, 5_000_000], starts[-1])
    at = [np.zeros(0), *(np.cumsum(length_us[a:b]) for a, b in pairwise(starts))]
    tokens = rng.integers(0, 4, starts[-1]).astype(np.int32) if counted_tokens else None
    at_us, known = np.concatenate(at).astype(np.uint32), rng.random(n) < 0.9

    def read(low: int, high: int) -> tuple[np.ndarray, np.ndarray | None]:
        part = slice(starts[low], starts[high])
        return at_us[part], None if tokens is None else tokens[part]

    return Chunks(count, known, tokens is None, read)


def in_full(series: GapSeries) -> list[list[float]]:
    """The samples of each request, in s."""
    found: list[list[float]] = []
    c = series.chunks
    for i in range(len(c.known)):
        samples: list[float] = []
        a, b = int(c.starts[i]), int(c.starts[i + 1])
        if series.counted[i] and (c.known[i] or not series.per_token):
            last = a
            for j in range(a + 1, b):
                k = 1 if c.tokens is None or not series.per_token else int(c.tokens[j])
                if k:
                    samples += [(int(c.at_us[j]) - int(c.at_us[last])) * 1e-6 / k] * k
                    last = j
        found.append(samples)
    return found


@pytest.mark.parametrize("part_chunks", [1, 7, 10_000])
@pytest.mark.parametrize(
    ("counted_tokens", "per_token"), [(False, False), (False, True), (True, True)]
)
def test_slices_give_what_all_gaps_at_once_give(
    monkeypatch: pytest.MonkeyPatch, part_chunks: int, counted_tokens: bool, per_token: bool
) -> None:
    monkeypatch.setattr(metrics, "PART_CHUNKS", part_chunks)
    rng = np.random.default_rng(6)
    chunks = made_up(rng, 60, counted_tokens=counted_tokens)
    series = GapSeries(chunks, rng.random(60) < 0.8, per_token)
    each = in_full(series)
    samples = sorted(x for request in each for x in request)
    assert series.sizes().tolist() == [len(request) for request in each]
    # 20 and 50 ms occur: not longer
    limits = np.array([-1.0, 0.0, 0.02, 0.05, 0.0500005, 5.0, 1e9, np.inf])
    for limit_s, over in zip(limits, series.over(limits), strict=True):
        assert over.tolist() == [sum(x > limit_s for x in request) for request in each]
    values, weights = series.distinct()
    assert np.repeat(values, weights.astype(int)) == pytest.approx(samples, rel=1e-12)
    # 61: one record was lost
    observed = GapObservations(
        "gaps",
        values,
        np.empty(0, np.int64),
        weights,
        np.zeros(61),
        np.full(61, np.nan),
        series=series,
    )
    assert observed.n == len(samples)
    assert observed.quantile_bounds(0.9)[0] == samples[int(np.ceil(0.9 * len(samples) - 1e-9)) - 1]
    assert observed.misses(0.02).tolist() == [
        sum(x > 0.02 for x in request) for request in each
    ] + [0]


def test_no_requests_have_no_gaps() -> None:
    none = made_up(np.random.default_rng(0), 0, counted_tokens=False)
    series = GapSeries(none, np.zeros(0, np.bool_), per_token=False)
    assert len(series.distinct()[0]) == 0
    assert series.over(np.array([0.1])).shape == (1, 0)
