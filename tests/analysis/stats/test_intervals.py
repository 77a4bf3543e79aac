"""Binomial rules, ranks and effective sample size against tables and theory."""

from typing import Any

import numpy as np
import pytest

from ampacity.analysis.metrics.observations import Observations
from ampacity.analysis.slo import parse_slo
from ampacity.analysis.stage.attainment import judge_slo
from ampacity.analysis.stats import intervals

Floats = np.ndarray


def observations(values: Floats) -> Observations:
    n = len(values)
    return Observations("requests", values, np.arange(n), None, np.zeros(n), np.full(n, np.nan))


@pytest.mark.parametrize(
    ("misses", "quantile", "n"),
    [
        (0, 0.90, 44),
        (0, 0.95, 90),
        (0, 0.97, 152),
        (0, 0.99, 459),
        (0, 0.999, 4603),
        (1, 0.90, 64),
        (1, 0.99, 662),
        (2, 0.97, 277),
        (5, 0.95, 259),
        (10, 0.99, 2010),
        (20, 0.999, 33097),
        (50, 0.97, 2293),
        (100, 0.90, 1246),
        (100, 0.999, 125826),
    ],
)
def test_early_stopping_table_at_99_percent(misses: int, quantile: float, n: int) -> None:
    assert intervals.smallest_n(quantile, misses, confidence=0.99) == n


@pytest.mark.parametrize(("quantile", "n"), [(0.90, 29), (0.95, 59), (0.99, 299), (0.999, 2995)])
def test_smallest_n_at_95_percent(quantile: float, n: int) -> None:
    assert intervals.smallest_n(quantile) == n


@pytest.mark.parametrize(
    ("n", "quantile", "ranks"),
    [
        (100, 0.5, (40, 61)),
        (1000, 0.5, (469, 532)),
        (300, 0.99, (293, None)),
        (500, 0.99, (490, 500)),
        (1000, 0.99, (983, 997)),
        (2000, 0.99, (1971, 1989)),
        (10000, 0.99, (9880, 9920)),
    ],
)
def test_order_statistic_ranks(n: int, quantile: float, ranks: tuple[int, int | None]) -> None:
    assert intervals.order_statistic_ranks(n, quantile) == ranks


def test_clusters_give_wider_intervals() -> None:
    """10,000 samples, every value ten times in a row: the count over p99 has s.d. sqrt(10000 x 0.01
    x 0.99 x 10) = 31."""
    rng = np.random.default_rng(6)
    values = np.sort(np.repeat(rng.random(1000), 10))  # only their ranks count
    o = observations(np.repeat(rng.permutation(values[::10]), 10))
    assert o.clustering(0.99)[0] == pytest.approx(10, rel=0.2)
    low, high = (np.searchsorted(values, x) for x in o.confidence_interval(0.99))
    assert low == pytest.approx(10_000 - 100 - 2.2 * 31, abs=12)
    assert 9940 < high < 10_000
    alone = observations(rng.permutation(values))
    low, high = (np.searchsorted(values, x) for x in alone.confidence_interval(0.99))
    assert low == pytest.approx(9880, abs=12)  # Conover's ranks are 9880 and 9920
    assert high == pytest.approx(9920, abs=12)


def test_binomial_tails_by_hand() -> None:
    assert intervals.prob_at_most(0, 2, 0.5) == pytest.approx(0.25)
    assert intervals.prob_at_least(2, 2, 0.5) == pytest.approx(0.25)
    assert intervals.prob_at_most(1, 3, 0.5) == pytest.approx(0.5)


def test_fault_37_one_slow_of_sixty_is_not_enough_evidence() -> None:
    values = np.full(60, 0.1)
    values[30] = 5.0
    verdict = judge_slo(observations(values), parse_slo("ttft_p99=2s"))
    assert verdict.verdict == "inconclusive"
    # p99 with 1 miss in 60 (1.7 %) is on the wrong side: it takes more requests to call it broken
    assert verdict.more_requests > 60


def test_verdicts_at_the_edge_of_the_binomial_rule() -> None:
    def met(misses: int, n: int) -> float:
        return float(intervals.few_by_chance(misses, n, 0.01, 1.0, 1.0))

    assert met(0, 299) <= 0.05 < met(0, 298)
    assert intervals.deciding_factor(0.0, 298, 0.01, 1.0, 1.0) == pytest.approx(299 / 298, abs=0.01)
    assert met(1, 473) == pytest.approx(0.0498, abs=1e-3)  # P[Bin(473, 1 %) <= 1]
    assert met(1, 472) > 0.05
    # P[Bin(80, 1 %) >= 3]
    assert float(intervals.many_by_chance(3, 80, 0.01, 1.0)) == pytest.approx(0.047, abs=1e-3)
    assert met(4, 299) > 0.05


def test_clustered_counts_are_binomial_poisson_and_geometric_in_their_limits() -> None:
    # independent: the binomial
    assert intervals.clustered_at_most(3, 400, 0.5, 1.0) == pytest.approx(
        intervals.prob_at_most(3, 400, 0.5)
    )
    # variance = mean: Poisson, P[0] = exp(-3)
    assert intervals.clustered_at_most(0, 300, 0.01, 1 / 0.99) == pytest.approx(
        np.exp(-3), rel=0.02
    )
    # mean 10, variance 110: negative binomial with r = 1, that is geometric with P[X <= k] = 1 -
    # (10/11)^(k+1)
    expected = pytest.approx(1 - (10 / 11) ** 5)
    assert intervals.clustered_at_most(4, 1000, 0.01, 11 / 0.99) == expected
    assert intervals.clustered_at_least(5, 1000, 0.01, 11 / 0.99) == pytest.approx((10 / 11) ** 5)


def test_what_one_run_may_not_have_shown() -> None:
    """900 samples of which 9 may be slow, clusters of 9: one to expect, so tau - 1 = 8 counts 1 +
    1/sqrt(1) times."""
    few = intervals.few_by_chance
    expected = float(intervals.clustered_at_most(0, 900, 0.01, 17.0))
    assert float(few(0, 900, 0.01, 9.0, 1.0)) == pytest.approx(expected)
    # nothing was seen, but the queue is remembered over 60 requests: as if clusters of 60 had
    # been seen
    expected = float(few(0, 9000, 0.01, 60.0, 1.0))
    assert float(few(0, 9000, 0.01, 1.0, 60.0)) == pytest.approx(expected)
    # 108 that came one by one say more than that: (12 x 60 + 108) / (12 + 108) = 6.9
    expected = float(few(108, 20_000, 0.01, 6.9, 1.0))
    assert float(few(108, 20_000, 0.01, 1.0, 60.0)) == pytest.approx(expected)


def test_many_slow_ones_of_large_clusters_are_no_proof() -> None:
    """Three of 300 expected, 30 seen: beyond chance for single ones, but one cluster of 100
    explains it."""
    assert float(intervals.many_by_chance(30, 300, 0.01, 1.0)) < 1e-6
    assert float(intervals.many_by_chance(30, 300, 0.01, 100.0)) > 0.02
    # a larger tau makes few clusters likely and none likelier still: what counts is the size that
    # explains most
    least = float(intervals.clustered_at_least(5, 300, 0.01, 10.0))
    assert float(intervals.many_by_chance(5, 300, 0.01, 100.0)) >= least


def test_dependence_turns_met_into_inconclusive() -> None:
    few = [float(intervals.few_by_chance(0, 1000, 0.01, size, 1.0)) for size in (1.0, 20.0)]
    many = [float(intervals.many_by_chance(30, 1000, 0.01, size)) for size in (1.0, 50.0)]
    assert few[0] < 0.05 < few[1]
    assert many[0] < 0.05 < many[1]


def test_autocorrelation_time_of_a_known_process() -> None:
    rng = np.random.default_rng(3)
    x = np.empty(200_000)
    x[0], noise = 0.0, rng.normal(size=200_000)
    for i in range(1, len(x)):
        x[i] = 0.8 * x[i - 1] + noise[i]
    assert intervals.autocorrelation_time(x) == pytest.approx(9.0, rel=0.1)  # (1 + a)/(1 - a)
    assert intervals.autocorrelation_time(noise) == pytest.approx(1.0, abs=0.1)


def test_effective_size_of_clusters_is_the_number_of_clusters() -> None:
    # gaps: 400 requests of 100 gaps, every gap of one request alike: 400 independent samples, not
    # 40,000
    slow = (np.random.default_rng(5).random(400) < 0.2).astype(float)
    assert intervals.effective_size(slow * 100, np.full(400, 100.0)) == pytest.approx(400, rel=0.15)


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


@pytest.mark.parametrize(
    ("rate", "seconds", "seed", "stages", "right", "wrong", "most"),
    [
        # p99 of M/M/1's sojourn time is ln(100)/(100 - rate): 77 ms at 40/s, 184 ms at 75/s
        (40, 120, 17, 60, ("met", 30), "violated", 0),
        (75, 120, 17, 60, ("violated", 30), "met", 0),
        (60, 60, 19, 100, ("met", 0), "met", 8),  # above the 53.9/s at which p99 = 100 ms
    ],
)
def test_verdicts_of_a_queue_are_seldom_wrong(
    rate: float, seconds: float, seed: int, stages: int, right: Any, wrong: str, most: int
) -> None:
    rng, slo = np.random.default_rng(seed), parse_slo("ttft_p99=100ms")
    found = [observations(_queue(rng, rate, seconds)) for _ in range(stages)]
    verdicts = [judge_slo(each, slo).verdict for each in found]
    assert verdicts.count(wrong) <= most
    assert verdicts.count(right[0]) >= right[1]


def test_a_queue_far_shorter_than_the_limit_needs_is_no_chance() -> None:
    """Counts 1 to 100 once each; a share of 5 % at 149.5 or more is 22.4 % at 95 or more.

    The median is 50.5, half of the counts are at it or above: 0.5^(1/2) 0.05^(1/2) = 0.158 at 100.
    """
    found = np.arange(1.0, 101.0)
    expected = [
        intervals.few_by_chance(seen, 100, 0.5 * 0.1 ** ((count - 50.5) / 99.0), 1.0, 1.0)
        for seen, count in ((30, 70.3), (20, 80.2), (10, 90.1), (5, 95.05))
    ]
    assert intervals.short_by_chance(found, 149.5, 0.05, 1.0) == pytest.approx(
        min(map(float, expected))
    )
    assert (
        intervals.short_by_chance(found, 149.5, 0.05, 20.0) > 0.05
    )  # five counts that tell anything
    # no queue beyond what was seen: half of them are at 100 or more, in no sample
    assert intervals.short_by_chance(np.full(50, 3.0), 3.0, 0.05, 1.0) == 1.0
