"""Binomial rules, ranks and effective sample size against tables and theory."""

from __future__ import annotations

import numpy as np
import pytest

from analysis.attainment import judge_slo
from analysis.intervals import (
    autocorrelation_time,
    clustered_at_least,
    clustered_at_most,
    effective_size,
    judge_share,
    order_statistic_ranks,
    prob_at_least,
    prob_at_most,
    smallest_n,
    unseen_tau,
)
from analysis.observations import Observations
from analysis.slo import parse_slo

Floats = np.ndarray


def observations(values: Floats) -> Observations:
    n = len(values)
    return Observations("requests", values, np.arange(n), None, np.zeros(n), np.full(n, np.nan))


@pytest.mark.parametrize(
    ("misses", "quantile", "n"),
    [
        (0, 0.90, 44), (0, 0.95, 90), (0, 0.97, 152), (0, 0.99, 459), (0, 0.999, 4603),
        (1, 0.90, 64), (1, 0.99, 662), (2, 0.97, 277), (5, 0.95, 259), (10, 0.99, 2010),
        (20, 0.999, 33097), (50, 0.97, 2293), (100, 0.90, 1246), (100, 0.999, 125826),
    ],
)  # fmt: skip
def test_early_stopping_table_at_99_percent(misses: int, quantile: float, n: int) -> None:
    assert smallest_n(quantile, misses, confidence=0.99) == n


@pytest.mark.parametrize(("quantile", "n"), [(0.90, 29), (0.95, 59), (0.99, 299), (0.999, 2995)])
def test_smallest_n_at_95_percent(quantile: float, n: int) -> None:
    assert smallest_n(quantile) == n


@pytest.mark.parametrize(
    ("n", "quantile", "ranks"),
    [
        (100, 0.5, (40, 61)), (1000, 0.5, (469, 532)), (300, 0.99, (293, None)), (500, 0.99, (490, 500)),
        (1000, 0.99, (983, 997)), (2000, 0.99, (1971, 1989)), (10000, 0.99, (9880, 9920)),
    ],
)  # fmt: skip
def test_order_statistic_ranks(n: int, quantile: float, ranks: tuple[int, int | None]) -> None:
    assert order_statistic_ranks(n, quantile) == ranks


def test_a_smaller_effective_sample_gives_wider_ranks() -> None:
    low, high = order_statistic_ranks(10000, 0.99, n_effective=1000)
    assert low is not None
    assert high is not None
    # the count over p99 has sd sqrt(10000 x 0.01 x 0.99 x 10) = 31, to the right more than two of them
    assert low == pytest.approx(10000 - 100 - 2.2 * 31, abs=5)
    assert 9970 < high < 10000
    assert order_statistic_ranks(10000, 0.99, n_effective=50)[1] is None


def test_binomial_tails_by_hand() -> None:
    assert prob_at_most(0, 2, 0.5) == pytest.approx(0.25)
    assert prob_at_least(2, 2, 0.5) == pytest.approx(0.25)
    assert prob_at_most(1, 3, 0.5) == pytest.approx(0.5)


def test_fault_37_one_slow_of_sixty_is_not_enough_evidence() -> None:
    values = np.full(60, 0.1)
    values[30] = 5.0
    verdict = judge_slo(observations(values), parse_slo("ttft_p99=2s"))
    assert verdict["verdict"] == "undecided"
    # p99 with 1 miss in 60 (1.7 %) is on the wrong side: it takes more requests to call it broken
    assert verdict["more_requests"] > 60


def test_verdicts_at_the_edge_of_the_binomial_rule() -> None:
    assert judge_share((0, 0), 299, 299, 0.99).verdict == "met"
    undecided = judge_share((0, 0), 298, 298, 0.99)
    assert undecided.verdict == "undecided"
    assert undecided.factor == pytest.approx(299 / 298, abs=0.01)
    assert judge_share((1, 1), 473, 473, 0.99).verdict == "met"  # P[Bin(473, 1 %) <= 1] = 0.0498
    assert judge_share((1, 1), 472, 472, 0.99).verdict == "undecided"
    assert judge_share((3, 3), 80, 80, 0.99).verdict == "broken"  # P[Bin(80, 1 %) >= 3] = 0.047
    assert judge_share((0, 4), 299, 299, 0.99).verdict == "undecided"  # four were cut off


def test_clustered_counts_are_binomial_poisson_and_geometric_in_their_limits() -> None:
    # independent: the binomial
    assert clustered_at_most(3, 400, 0.5, 1.0) == pytest.approx(prob_at_most(3, 400, 0.5))
    # variance = mean: Poisson, P[0] = exp(-3)
    assert clustered_at_most(0, 300, 0.01, 1 / 0.99) == pytest.approx(np.exp(-3), rel=0.02)
    # mean 10, variance 110: negative binomial with r = 1, that is geometric with P[X <= k] = 1 - (10/11)^(k+1)
    assert clustered_at_most(4, 1000, 0.01, 11 / 0.99) == pytest.approx(1 - (10 / 11) ** 5)
    assert clustered_at_least(5, 1000, 0.01, 11 / 0.99) == pytest.approx((10 / 11) ** 5)


def test_what_one_run_may_not_have_shown() -> None:
    assert unseen_tau(1.0, 300, 0.01) == 1.0
    # m = 900 x 0.01 / 9 = 1 cluster's worth: tau - 1 = 8 counts 2 + 3 times
    assert unseen_tau(9.0, 900, 0.01) == pytest.approx(41.0)


def test_dependence_turns_met_into_undecided() -> None:
    assert judge_share((0, 0), 1000, 1000, 0.99).verdict == "met"
    assert judge_share((0, 0), 1000, 50, 0.99).verdict == "undecided"
    assert judge_share((30, 30), 1000, 1000, 0.99).verdict == "broken"
    assert judge_share((30, 30), 1000, 20, 0.99).verdict == "undecided"


def test_autocorrelation_time_of_a_known_process() -> None:
    rng = np.random.default_rng(3)
    x = np.empty(200_000)
    x[0], noise = 0.0, rng.normal(size=200_000)
    for i in range(1, len(x)):
        x[i] = 0.8 * x[i - 1] + noise[i]
    assert autocorrelation_time(x) == pytest.approx(9.0, rel=0.1)  # (1 + a)/(1 - a)
    assert autocorrelation_time(noise) == pytest.approx(1.0, abs=0.1)


def test_effective_size_of_clusters_is_the_number_of_clusters() -> None:
    # gaps: 400 requests of 100 gaps, every gap of one request alike: 400 independent samples, not 40,000
    slow = (np.random.default_rng(5).random(400) < 0.2).astype(float)
    assert effective_size(slow * 100, np.full(400, 100.0)) == pytest.approx(400, rel=0.15)


def test_interval_covers_at_low_load() -> None:
    rng = np.random.default_rng(11)
    truth = np.log(100)
    covered, runs = 0, 300
    for _ in range(runs):
        low, high = observations(rng.exponential(size=1500)).confidence_interval(0.99)
        covered += not (low > truth) and not (high < truth)
    assert covered / runs >= 0.92


def _queue(rng: np.random.Generator, rate: float, seconds: float) -> Floats:
    """Sojourn times of M/M/1 with mu = 100/s after 5 s of warm-up."""
    n = rng.poisson(rate * (seconds + 5))
    arrival, service = np.sort(rng.uniform(0, seconds + 5, n)), rng.exponential(0.01, n)
    done = np.cumsum(service)
    return (done + np.maximum.accumulate(arrival - (done - service)) - arrival)[arrival >= 5]


@pytest.mark.parametrize(("rate", "right", "wrong"), [(40, "met", "broken"), (75, "broken", "met")])
def test_verdicts_of_a_queue_are_seldom_wrong(rate: float, right: str, wrong: str) -> None:
    # p99 of M/M/1's sojourn time is ln(100)/(100 - rate): 77 ms at 40/s, 184 ms at 75/s
    rng = np.random.default_rng(17)
    verdicts = [
        judge_slo(observations(_queue(rng, rate, 120)), parse_slo("ttft_p99=100ms"))["verdict"]
        for _ in range(60)
    ]
    assert verdicts.count(wrong) == 0
    assert verdicts.count(right) >= 30


def test_a_wrong_met_just_above_capacity_is_rare() -> None:
    rng = np.random.default_rng(19)  # 60/s is above the 53.9/s at which p99 = 100 ms
    verdicts = [
        judge_slo(observations(_queue(rng, 60, 60)), parse_slo("ttft_p99=100ms"))["verdict"]
        for _ in range(100)
    ]
    assert verdicts.count("met") <= 8
