"""Token deadlines: worked by hand after Etalon's definition."""

import math

import numpy as np
import pytest

from ampacity.analysis.metrics.fluidity import fluidity_of, needed_pace_s
from ampacity.analysis.slo import parse_slo, parse_slos
from ampacity.analysis.stage.attainment import judge_slo, observe_slos, requests_meeting
from tests.support.synthetic import cohort, request


def fluidity_index(gaps_s: list[float], first_s: float, each_s: float) -> float:
    """Of one request, token by token: the time to its first one, then the gap before each further
    one."""
    slack, missed, total = 0.0, 0, 0
    for i, gap in enumerate(gaps_s):
        over = gap - slack - (each_s if i else first_s)
        late = math.floor(over / each_s + 1e-9) + 1 if over > 1e-12 else 0
        missed, total, slack = missed + late, total + (late or 1), 0.0 if late else -over
    return 1 - missed / total


def test_fluidity_index_by_hand() -> None:
    # due 1 s, then every 0.1 s. TTFT 0.8 leaves 0.2 s of slack, which a gap of 0.25 eats: in time
    # (0.05 left)
    assert fluidity_index([0.8, 0.25, 0.1], 1.0, 0.1) == 1.0
    # a gap of 0.5 with 0.05 s of slack misses floor((0.5 - 0.05 - 0.1)/0.1) + 1 = 4 of 4 + 3
    # deadlines
    assert fluidity_index([0.8, 0.25, 0.5, 0.1], 1.0, 0.1) == pytest.approx(1 - 4 / 7)
    # a late first token: floor((1.35 - 1)/0.1) + 1 = 4 missed, one more in time
    assert fluidity_index([1.35, 0.05], 1.0, 0.1) == pytest.approx(1 - 4 / 5)


def test_many_requests_at_once_are_each_as_one() -> None:
    rng = np.random.default_rng(1)
    records, expected = [], []
    for i in range(40):
        gaps = rng.exponential(0.1, rng.integers(1, 30))
        ttft = float(rng.uniform(0.2, 1.8))
        records.append(request(i, float(i), ttft_s=ttft, gaps_s=gaps.tolist()))
        expected.append(fluidity_index([ttft, *gaps], 1.0, 0.1))
    c = cohort(*records)
    assert fluidity_of(c.requests, c.chunks, 1.0, 0.1) == pytest.approx(expected, abs=1e-3)


def test_a_chunk_is_due_with_its_first_token_and_buys_time_with_the_others() -> None:
    in_time = cohort(request(0, 0.0, ttft_s=0.5, gaps_s=[0.1, 0.5], chunk_tokens=[1, 5, 5]))
    assert fluidity_of(in_time.requests, in_time.chunks, 0.5, 0.1).tolist() == [1.0]
    # a gap of 0.5 where 0.1 was due misses 5; 5 + 4 of that chunk, 1 before and 5 after it are 15
    # deadlines
    late = cohort(request(0, 0.0, ttft_s=0.5, gaps_s=[0.5, 0.5], chunk_tokens=[1, 5, 5]))
    assert fluidity_of(late.requests, late.chunks, 0.5, 0.1).tolist() == [pytest.approx(1 - 5 / 15)]


def test_needed_pace_is_the_deadline_that_every_token_keeps() -> None:
    c = cohort(
        request(0, 0.0, ttft_s=0.8, gaps_s=[0.1, 0.5]),  # tokens at 0.8, 0.9, 1.4: (1.4 - 1)/2
        request(1, 0.0, ttft_s=0.9, gaps_s=[0.05]),  # all before the first is due
        request(2, 0.0, ttft_s=1.2, gaps_s=[0.1]),  # late from the start
        request(3, 0.0, ttft_s=0.8, gaps_s=[0.1], start_delay_s=0.4),  # the schedule counts: 1.2 s
    )
    pace = needed_pace_s(c.requests, c.chunks, 1.0)
    assert pace.tolist() == [pytest.approx(0.2), 0.0, np.inf, np.inf]


def test_a_burst_after_a_stall_meets_gap_percentiles_but_not_its_deadlines() -> None:
    # 99 gaps of 10 ms and one of 3 s: p95 of its gaps is fine, the reader waits
    gaps = [0.01] * 50 + [3.0] + [0.01] * 49
    c = cohort(*[request(i, float(i), ttft_s=0.5, gaps_s=gaps) for i in range(10)])
    met = requests_meeting(c, observe_slos(c, parse_slos(["itl_p95=50ms"])))
    on_time = requests_meeting(c, observe_slos(c, parse_slos(["fluidity_p95=1s+50ms"])))
    assert met.all()
    assert not on_time.any()
    # 51 tokens after the first are due by 1 + 51 x 0.1 s: 5 s are enough
    assert requests_meeting(c, observe_slos(c, parse_slos(["fluidity_p95=1s+100ms"]))).all()


def test_verdict_names_late_first_tokens() -> None:
    slo = parse_slo("fluidity_p90=1s+50ms")
    c = cohort(*[request(i, float(i), ttft_s=2.0, gaps_s=[0.01]) for i in range(60)])
    found = judge_slo(observe_slos(c, [slo])[0][1], slo)
    assert (found.verdict, found.value_s) == ("violated", None)
    assert "the first token of 60 of 60 requests was late" in found.reason
