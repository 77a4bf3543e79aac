"""A reduced form of benchmarks/studies/coverage.py: intervals and verdicts of a batching server
against its truth.
"""

from dataclasses import replace

import numpy as np
import pytest

from ampacity.analysis.metrics.percentiles import percentiles
from ampacity.analysis.slo import Slo
from ampacity.analysis.stage.attainment import judge_slo
from benchmarks.servers import SERVERS, batch_server
from benchmarks.studies.coverage import LOADS, cover, measure, observations
from benchmarks.studies.verdict_rates import judge
from tests.support.repeats import often

TRUTH_S = {0.5: 0.1129, 0.7: 0.9489, 0.85: 3.674}  # p99 TTFT, 4 runs of 1,000,000 requests each
REQUESTS, RUNS = 8000, often(8, 16)


def test_the_server_of_the_study_obeys_birth_and_death() -> None:
    # 16 slots, 10 + b ms a step, 100 tokens exponential, at 0.7 of 6.1538/s: E[T] = 1.9508 s,
    # P[wait] = 0.0503
    server = batch_server("batch", 16, heavy=False)
    assert server.most_rps == pytest.approx(6.1538, rel=1e-4)
    _, ttft, e2e = server.run(4.3077, 120_000, np.random.default_rng(4))
    assert e2e.mean() == pytest.approx(1.9508, rel=0.03)
    waited = np.mean(ttft - 0.011 > 0.2)  # the added prefill is hardly ever that long
    assert waited == pytest.approx(0.0503, abs=0.02)


@pytest.mark.parametrize(("load", "least_given"), [(0.5, 0.5), (0.7, 0.0)])
def test_intervals_hold_below_the_knee(load: float, least_given: float) -> None:
    found = cover(SERVERS["batch"](), load, REQUESTS, RUNS, TRUTH_S[load])
    # 0.96 in the study: of 8 runs 2 or more miss in 4 % of cases, of 16 runs 4 or more in 0.4 %
    assert found.right >= 0.8
    assert 1 - found.refused >= least_given


def test_a_run_too_short_for_its_load_says_so() -> None:
    server = SERVERS["batch"]()
    refused = 0
    for seed in range(8):
        o, _ = measure(server, 0.95, 4000, seed)
        found = percentiles(o)
        refused += found.p99_ci[1] is None and "are too few to have seen" in found.p99_ci_reason
    assert refused >= 7
    assert LOADS[-1] == 0.95


def test_verdicts_beside_the_capacity_are_right() -> None:
    server, slo = SERVERS["batch"](), Slo("ttft", 0.99, TRUTH_S[0.7])
    low = [judge_slo(measure(server, 0.7 * 0.8, REQUESTS, s)[0], slo).verdict for s in range(8)]
    high = [judge_slo(measure(server, 0.7 * 1.2, REQUESTS, s)[0], slo).verdict for s in range(8)]
    assert low.count("met") >= 5  # 6 in 8 in the mean: benchmarks/studies/verdict_rates.py
    assert "violated" not in low
    assert high.count("violated") >= 6
    assert "met" not in high


def test_independent_samples_need_no_long_run() -> None:
    rng = np.random.default_rng(8)
    refused = covered = 0
    for _ in range(100):
        low, high = observations(rng.exponential(size=1500)).confidence_interval(0.99)
        refused += bool(np.isnan(high))
        covered += bool(low <= np.log(100) <= high)
    assert refused <= 3
    assert covered >= 90


def test_a_limit_far_beyond_the_queue_is_met_by_few_correlation_times() -> None:
    """64 slots at 0.7 of saturation: requests stay so long that 3,000 are 17 to 58 correlation times
    of the in-flight count; TTFT is at most 0.2 s; at 0.92 some 5 % are over 0.9 s, at 0.95 18 %."""
    server, slo = batch_server("slots", 64, heavy=False), Slo("ttft", 0.95, 0.9)
    seen = [measure(server, 0.7, 3000, seed)[0] for seed in range(8)]
    assert [judge_slo(o, slo).verdict for o in seen].count("met") >= 5
    assert {judge_slo(replace(o, queue=None), slo).verdict for o in seen} == {"inconclusive"}
    assert [o.far_by_chance(0.95, 2.4 * o.values.max()) for o in seen] == [1.0] * 8  # not far
    high = [judge_slo(measure(server, 0.95, 3000, seed)[0], slo).verdict for seed in range(8)]
    assert "met" not in high


def test_a_stage_of_few_request_times_has_not_shown_its_queue() -> None:
    """16 slots at 0.864 of saturation, from idle: 7 % wait for more than 2 s in long runs, none in
    six of ten stages of 300 requests, which are 21 request times."""
    n = often(50, 100)
    seen = [judge("batch", 0.864, Slo("ttft", 0.95, 2.0), 300, seed) for seed in range(n)]
    assert sum(s.misses == 0 for s in seen) > n / 2
    # 1.0 % in 600 of the study, and 8 % without what is asked of the length
    assert [s.verdict for s in seen].count("met") <= n / 25
