"""Tails that move, rounds of two kinds, and intervals of rates."""

import numpy as np
import pytest

from ampacity.analysis.metrics.observations import Observations
from ampacity.analysis.stage.drift import events_per_batch, rate_interval, tail_trend, two_modes
from ampacity.analysis.stage.steady import Window
from ampacity.analysis.stage.throughput import output_rates, tokens_per_batch
from tests.support.synthetic import cohort, request

Floats = np.ndarray


def observations(values: Floats) -> Observations:
    n = len(values)
    return Observations("requests", values, np.arange(n), None, np.zeros(n), np.full(n, np.nan))


def test_a_tail_that_doubles_while_the_median_stands_still_is_a_drift() -> None:
    rng = np.random.default_rng(1)
    slow = rng.random(3000) < 0.12
    values = rng.lognormal(-2, 0.3, 3000) * np.where(slow, np.linspace(2, 4, 3000), 1)
    found = tail_trend(observations(values))
    assert found.drifting is True
    # middles of the last and the first third
    assert found.change == pytest.approx(3.67 / 2.33, rel=0.2)
    still = tail_trend(observations(rng.permutation(values)))
    assert still.drifting is False


def test_no_drift_is_seen_in_steady_noise_and_few_requests_are_refused() -> None:
    rng = np.random.default_rng(2)
    drifts = [tail_trend(observations(rng.lognormal(0, 0.7, 2000))).drifting for _ in range(60)]
    assert sum(drifts) <= 1
    few = tail_trend(observations(np.ones(599)))
    assert few.drifting is None
    assert few.reason == "needs 600 requests, has 599"


def test_rounds_of_two_kinds_are_two_modes_and_one_step_is_not() -> None:
    rng = np.random.default_rng(3)
    values = rng.lognormal(0, 0.3, 3000)
    rounds = np.repeat([1, 1.6, 1, 1, 1.6, 1, 1, 1, 1.6, 1], 300)
    found = two_modes(observations(values * rounds))
    assert found.two is True
    assert found.slow_p50_s / found.fast_p50_s == pytest.approx(1.6, rel=0.05)
    assert (found.slow_share, found.switches) == (0.3, 6)
    # a shift, no mode
    assert two_modes(observations(values * np.repeat([1, 1.6], 1500))).two is False
    assert two_modes(observations(values)).two is False
    assert two_modes(observations(values[:100])).two is None


def test_interval_of_a_rate_by_hand() -> None:
    # batches of 2 s with 18, 20, 22 events: rates 9, 10, 11, s = 1, t(0.975, 2) = 4.3027
    low, high = rate_interval(np.array([18.0, 20.0, 22.0]), 2.0) or (0, 0)
    assert (low, high) == (
        pytest.approx(10 - 4.3027 / np.sqrt(3), abs=1e-3),
        pytest.approx(10 + 4.3027 / np.sqrt(3), abs=1e-3),
    )
    assert rate_interval(np.array([1.0]), 1.0) is None


def test_rate_intervals_cover_bursty_events() -> None:
    rng, covered = np.random.default_rng(4), 0
    for _ in range(200):  # clusters of five at 4/s: 20/s, five times the variance of Poisson
        at = np.repeat(rng.uniform(0, 100, rng.poisson(400)), 5)
        low, high = rate_interval(events_per_batch(at, 0, 100), 10.0) or (0, 0)
        covered += low <= 20 <= high
    assert covered >= 182


def test_tokens_count_in_the_batch_in_which_they_came() -> None:
    """Batches of 1 s over [10, 20): counts in the records; six tokens in three chunks; an answer
    without chunks; one over both edges."""
    c = cohort(
        request(0, 10.0, ttft_s=0.5, gaps_s=[1.0, 0.2], chunk_tokens=[1, 2, 3]),
        request(1, 12.0, ttft_s=0.2, gaps_s=[0.6, 0.3], output_tokens=6),
        request(2, 13.0, ttft_s=None, tail_s=1.4, output_tokens=5),
        request(3, 9.5, ttft_s=0.4, gaps_s=[0.3, 9.7, 0.2]),
        request(4, 3.0, ttft_s=0.4, gaps_s=[0.3]),
    )
    window = Window(10.0, 20.0, 0, "fixed", None, True)
    found = tokens_per_batch(c.requests, c.chunks, window)
    assert found.tolist() == pytest.approx([1 + 1, 2 + 3, 4, 2, 5, 0, 0, 0, 0, 1])
    rates = output_rates(c.requests, found, window, 3.0, False)
    assert rates.output_tokens_per_s == pytest.approx(1.9)
    low, high = rates.output_tokens_per_s_ci
    assert (low + high) / 2 == pytest.approx(1.9)


def test_drift_counts_failures_as_slow_and_leaves_cut_off_ones_out() -> None:
    records = [request(i, i * 0.1, status="timeout" if i % 5 == 0 else "ok") for i in range(700)]
    found = tail_trend(cohort(*records).ttft(from_schedule=True))
    assert found.drifting is None
    assert found.reason == "failures reach the tail"
