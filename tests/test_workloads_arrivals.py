"""Arrival processes against their laws."""

import numpy as np
import pytest
from scipy import stats

from workloads.arrivals import ARRIVALS, arrival_times
from workloads.errors import WorkloadError


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_poisson_gaps_are_exponential() -> None:
    times = arrival_times("poisson", 7.3, 14_000, rng())
    gaps = np.diff(times, prepend=0.0)  # the first request is one gap late as well
    assert stats.kstest(gaps, "expon", args=(0, 1 / 7.3)).pvalue > 0.001
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(1, abs=0.02)
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 4.5 / np.sqrt(len(gaps))


def test_poisson_counts_have_the_mean_and_variance_of_the_law() -> None:
    counts = np.array([len(arrival_times("poisson", 4, 25, rng(seed))) for seed in range(2000)])
    # N ~ Poisson(100): mean 100 with standard error 10/sqrt(2000) = 0.22; the variance of the sample variance
    # is about 2 * 100^2 / 1999, standard error 3.2.
    assert counts.mean() == pytest.approx(100, abs=1.0)
    assert counts.var(ddof=1) == pytest.approx(100, abs=15)


def test_poisson_dispersion_is_one_at_every_time_scale() -> None:
    times = arrival_times("poisson", 20, 10_000, rng(3))
    for window_s in (0.1, 1, 10):
        counts = np.histogram(times, bins=np.arange(0, 10_000 + window_s / 2, window_s))[0]
        assert counts.var() / counts.mean() == pytest.approx(1, abs=6 * np.sqrt(2 / len(counts)))


def test_times_are_sorted_and_inside_the_stage() -> None:
    for kind in ARRIVALS:
        times = arrival_times(kind, 50, 20, rng())
        assert times.dtype == np.float64
        assert (np.diff(times) > 0).all()
        assert times[0] >= 0
        assert times[-1] < 20


def test_constant_is_exact() -> None:
    assert arrival_times("constant", 4, 1, rng()).tolist() == [0, 0.25, 0.5, 0.75]
    assert arrival_times("constant", 10, 0.31, rng()).tolist() == [0, 0.1, 0.2, 0.3]
    assert len(arrival_times("constant", 3, 1 / 3, rng())) == 1  # the end does not belong to the stage
    assert arrival_times("constant", 0.1, 5, rng()).tolist() == [0]


def test_same_state_gives_the_same_times_and_another_rate_stretches_them() -> None:
    slow = arrival_times("poisson", 2, 100, rng(9))
    assert slow.tolist() == arrival_times("poisson", 2, 100, rng(9)).tolist()
    fast = arrival_times("poisson", 8, 100, rng(9))
    n = min(len(slow), len(fast))
    assert fast[:n] * 4 == pytest.approx(slow[:n], rel=1e-12)
    assert arrival_times("poisson", 2, 50, rng(9)).tolist() == slow[slow < 50].tolist()


def test_a_short_stage_may_have_no_request() -> None:
    assert len(arrival_times("poisson", 1e-9, 1, rng())) == 0


@pytest.mark.parametrize(
    ("kind", "rate_rps", "duration_s", "culprit"),
    [
        ("bursty", 1, 1, "'bursty' are not known: use poisson or constant"),
        ("poisson", 0, 1, "rate is 0"),
        ("poisson", -1, 1, "rate is -1"),
        ("poisson", float("nan"), 1, "rate is nan"),
        ("constant", 1, 0, "duration is 0"),
        ("constant", 1, float("inf"), "duration is inf"),
        ("poisson", 1e6, 1e6, "more than 50000000 requests"),
    ],
)
def test_bad_load_is_one_line(kind: str, rate_rps: float, duration_s: float, culprit: str) -> None:
    with pytest.raises(WorkloadError, match=culprit) as caught:
        arrival_times(kind, rate_rps, duration_s, rng())
    assert "\n" not in str(caught.value)
