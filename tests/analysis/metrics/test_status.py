"""The status table: what each status counts as in percentiles, verdicts and goodput."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from ampacity.analysis.capacity.next_load import fewest_requests
from ampacity.analysis.metrics.cohort import Cohort, observations_for_slo
from ampacity.analysis.metrics.percentiles import percentiles
from ampacity.analysis.slo import Slo, parse_slo, parse_slos
from ampacity.analysis.stage.attainment import judge_slo, observe_slos, requests_meeting
from ampacity.experiments.search import Search
from ampacity.loadgen.rundir.records import FAILED_STATUSES, RequestRecord
from ampacity.values import ConfigError
from tests.support.contract import summarise
from tests.support.synthetic import Stage, at_ns, cohort, make_run, request

TTFT = parse_slo("ttft_p99=2s")


def good(n: int, first: int = 0, ttft_s: float = 0.5) -> list[RequestRecord]:
    return [
        request(first + i, 0.01 * (first + i), ttft_s=ttft_s, gaps_s=[0.01] * 4) for i in range(n)
    ]


def meeting(c: Cohort, *slos: str) -> int:
    return int(requests_meeting(c, observe_slos(c, parse_slos(slos))).sum())


@pytest.mark.parametrize("status", sorted(FAILED_STATUSES))
@pytest.mark.parametrize("got_tokens", [False, True])
def test_failed_is_infinitely_slow_and_misses(status: str, got_tokens: bool) -> None:
    failed = request(999, 5.0, ttft_s=0.01 if got_tokens else None, status=status)
    c = cohort(*good(99), failed)
    for metric in ("ttft", "first_answer", "e2e", "tpot"):
        o = observations_for_slo(c, Slo(metric, 0.99, 1.0))
        assert (o.n, o.n_infinite) == (100, 1), metric
        assert o.quantile_bounds(0.995) == (float("inf"), float("inf")), metric
    assert o.quantile_bounds(0.99)[1] < 1
    assert meeting(c, "ttft_p99=2s") == 99


def test_an_http_error_is_counted_by_its_code(tmp_path: Path) -> None:
    """Name each kind, with the first error as its example."""
    codes = {"rate_limited": (429, 529), "auth": (401, 403), "overloaded": (503,)}
    codes |= {"bad_request": (400, 404, 422), "upstream": (500, 502, 524), "redirect": (307,)}
    wanted = [(kind, code) for kind, listed in codes.items() for code in listed]
    wanted += [("http_error", None), ("rate_limited", 429)]
    records = good(60) + [
        request(900 + i, 0.3, ttft_s=None, status="http_error", http_status=code, error=f"n {code}")
        for i, (_, code) in enumerate(wanted)
    ]
    found = summarise(make_run(tmp_path / "run", [Stage(records, 1.0)], [], warmup_requests=0))
    counted = {kind: len(listed) for kind, listed in codes.items()} | {"http_error": 1}
    assert {k: n for k, n in found["errors"].items() if n} == counted | {"rate_limited": 3}
    assert found["error_examples"] == {k: f"n {codes.get(k, (None,))[0]}" for k in counted}


def test_failures_that_reach_into_a_percentile_make_it_null_with_the_reason() -> None:
    failed = [request(500 + i, 0.495 * i, ttft_s=None, status="timeout") for i in range(10)]
    records = good(490) + failed
    figures = percentiles(cohort(*records).ttft(from_schedule=True))
    assert figures.p99 is None
    assert figures.p99_reason == "infinite: 10 of 500 requests failed"
    assert figures.p95 == pytest.approx(0.5)
    assert (figures.n, figures.infinite) == (500, 10)
    assert judge_slo(cohort(*records).ttft(from_schedule=True), TTFT).verdict == "violated"


def test_ok_without_text_has_no_ttft_but_ends() -> None:
    silent = request(999, 5.0, ttft_s=None, tail_s=1.5, output_tokens=3)
    c = cohort(*good(9), silent)
    assert (c.ttft(from_schedule=True).n, c.ttft(from_schedule=True).n_censored) == (10, 1)
    assert c.e2e(from_schedule=True).n == 10
    assert c.e2e(from_schedule=True).values[-1] == pytest.approx(1.5)
    assert meeting(c, "ttft_p99=2s") == 9  # of three tokens nobody saw the first come
    assert meeting(c, "e2e_p99=2s") == 10


def test_cancelled_is_left_out() -> None:
    c = cohort(*good(9), request(999, 5.0, ttft_s=3.0, gaps_s=[9.0], status="cancelled"))
    for metric in ("ttft", "e2e", "tpot", "itl", "icl"):
        assert observations_for_slo(c, Slo(metric, 0.99, 1.0)).n in (9, 36), metric
    assert meeting(c, "ttft_p99=2s") == 9


def test_unfinished_past_the_limit_is_a_miss_else_bounds_are_given() -> None:
    def cut(age_s: float) -> RequestRecord:
        return request(999, 50.0, ttft_s=None, status="unfinished", ended_ns=at_ns(50.0 + age_s))

    old, young = cohort(*good(999), cut(2.5)), cohort(*good(999), cut(1.0))
    assert old.ttft(from_schedule=True).misses(2.0).sum() == 1
    assert young.ttft(from_schedule=True).misses(2.0).sum() == 0
    assert young.ttft(from_schedule=True).inconclusive(2.0) == 1
    assert meeting(old, "ttft_p99=2s") == meeting(young, "ttft_p99=2s") == 999
    # 1 of 1000 does not reach p99
    assert percentiles(young.ttft(from_schedule=True)).p99 == pytest.approx(0.5)


def test_censored_percentile_gives_bounds() -> None:
    cut = [
        request(900 + i, 50.0, ttft_s=None, status="unfinished", ended_ns=at_ns(50.7 + i / 100))
        for i in range(10)
    ]
    figures = percentiles(cohort(*good(490), *cut).ttft(from_schedule=True))
    assert figures.p99 is None
    # the fifth of ten ages 0.70 ... 0.79
    assert figures.p99_bounds == [pytest.approx(0.74), None]
    assert "10 of 500 requests were cut off, or gave no token" in figures.p99_reason
    assert figures.censored == 10


def test_unfinished_with_a_first_token_has_its_ttft_but_no_e2e() -> None:
    cut = request(999, 50.0, ttft_s=0.4, gaps_s=[0.01], status="unfinished", tail_s=8.0)
    c = cohort(*good(9), cut)
    assert c.ttft(from_schedule=True).values[-1] == pytest.approx(0.4)
    assert c.e2e(from_schedule=True).misses(5.0).sum() == 1  # 8.41 s old
    assert c.itl.misses(1.0).sum() == 1  # silent for 8 s


def test_rows_lost_in_a_kill_are_censored_at_age_zero() -> None:
    c = cohort(*good(400), missing=10)
    verdict = judge_slo(c.ttft(from_schedule=True), TTFT)
    assert verdict.verdict == "inconclusive"
    assert "10 were cut off" in verdict.reason
    assert verdict.cause == "requests were cut off that may have met its limit or not"
    assert verdict.attainment == pytest.approx(400 / 410)
    # a longer stage loses no more of them: 299 without a miss decide, 43 are there
    short = judge_slo(cohort(*good(40), missing=3).ttft(from_schedule=True), TTFT)
    assert short.more_requests == pytest.approx(256, abs=2)


def test_on_the_edge_no_length_decides_but_too_few_requests_say_how_many() -> None:
    # 5 of 500 miss a p99: exactly the share allowed, which no number of requests tells from 1 %
    edge = judge_slo(
        cohort(*good(495), *good(5, first=495, ttft_s=3.0)).ttft(from_schedule=True), TTFT
    )
    assert (edge.verdict, edge.more_requests) == ("inconclusive", None)
    expected = "the share of misses is on the edge of the SLO: no length is likely to decide"
    assert edge.cause == expected
    assert edge.reason.endswith(edge.cause)
    # none of 9: 299 independent ones without a miss would decide
    few = judge_slo(cohort(*good(9)).ttft(from_schedule=True), TTFT)
    assert few.verdict == "inconclusive"
    assert few.more_requests == pytest.approx(290, abs=2)
    assert few.cause == "p99 needs 299 requests"
    # 8 of 500 are 1.6 %: over the limit, but by chance in one sample of eight (P[Poisson(5) >= 8]
    # = 0.13)
    near = judge_slo(
        cohort(*good(492), *good(8, first=492, ttft_s=3.0)).ttft(from_schedule=True), TTFT
    )
    assert near.verdict == "inconclusive"
    assert near.cause == "so near its limit that more requests are needed"
    met = judge_slo(cohort(*good(400)).ttft(from_schedule=True), TTFT)
    assert (met.verdict, met.cause) == ("met", None)


def test_a_failed_request_adds_its_missing_gaps() -> None:
    # 3 of 50 tokens came
    broken_off = request(
        999,
        5.0,
        gaps_s=[0.01] * 2,
        chunk_tokens=[1] * 3,
        status="truncated",
        output_tokens_planned=50,
    )
    nothing = request(998, 5.1, ttft_s=None, status="http_error", output_tokens_planned=None)
    c = cohort(*good(10), broken_off, nothing)
    for o in (c.itl, c.icl):
        assert o.n_infinite == 47 + 1
        assert o.n == 10 * 4 + 2 + 48


def test_a_request_meets_itl_when_the_percentile_of_its_own_gaps_does() -> None:
    def with_slow(i: int, slow: int) -> RequestRecord:
        return request(i, i * 0.1, gaps_s=[0.01] * (100 - slow) + [0.2] * slow)

    c = cohort(with_slow(0, 0), with_slow(1, 1), with_slow(2, 2), request(3, 1.0))
    met = requests_meeting(c, observe_slos(c, [parse_slo("itl_p99=50ms")]))
    # 2 of 100 gaps slow: its p99 is 200 ms; one token: no gap
    assert met.tolist() == [True, True, False, True]
    assert c.itl.misses(0.05).tolist() == [0, 1, 2, 0]


def test_ttft_and_e2e_are_judged_from_schedule() -> None:
    late = request(0, 0.0, ttft_s=0.1, start_delay_s=3.0)
    c = cohort(late)
    assert meeting(c, "ttft_p99=2s") == 0
    assert meeting(c, "e2e_p99=2s") == 0
    assert percentiles(c.ttft(from_schedule=False)).mean == pytest.approx(0.1)


def test_fault_35_failed_requests_are_in_the_denominator() -> None:
    records = good(50) + good(30, first=50, ttft_s=3.0)
    records += [request(100 + i, 2.0, ttft_s=None, status="http_error") for i in range(20)]
    c = cohort(*records)
    assert meeting(c, "ttft_p99=2s") / len(c.requests) == pytest.approx(0.5)


def test_fault_33_no_p99_from_a_hundred_requests() -> None:
    figures = percentiles(cohort(*good(100)).ttft(from_schedule=False))
    assert figures.p99 is None
    assert figures.p99_reason == "needs 299 requests, has 100"
    assert figures.p95 == pytest.approx(0.5)


def test_all_failed_and_nothing_at_all() -> None:
    dead = cohort(*(request(i, i, ttft_s=None, status="connect_error") for i in range(20)))
    figures = percentiles(dead.ttft(from_schedule=True))
    assert figures.p50 is None
    assert figures.p50_reason == "infinite: 20 of 20 requests failed"
    assert figures.mean is None
    empty = percentiles(cohort().ttft(from_schedule=True))
    assert (empty.n, empty.reason) == (0, "no request has a value")


def test_fault_29_an_empty_answer_is_a_failure_and_no_zero() -> None:
    c = cohort(*good(80), *(request(100 + i, i, ttft_s=None, status="empty") for i in range(20)))
    figures = percentiles(c.ttft(from_schedule=False))
    assert figures.p50 == pytest.approx(0.5)
    assert figures.p90_reason == "infinite: 20 of 100 requests failed"
    assert c.ttft(from_schedule=False).rank_bounds(1)[0] == pytest.approx(0.5)


def test_fault_34_cold_outliers_move_the_mean_not_the_headline() -> None:
    def level(n: int, ttft_s: float) -> Cohort:
        cold = [request(10**6 + i, 0.0, ttft_s=20.0) for i in range(5)]
        return cohort(*cold, *good(n, ttft_s=ttft_s))

    low, high = (
        percentiles(level(n, t).ttft(from_schedule=True)) for n, t in ((100, 0.1), (1000, 0.2))
    )
    assert low.mean > high.mean  # the mean falls as load rises
    assert low.p50 == pytest.approx(0.1)
    assert high.p50 == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("slo", "slow_s", "verdict", "value_s"),
    [
        ("ttft_max=1s", 0.9, "met", 0.9),
        ("ttft_max=1s", 1.1, "violated", 1.1),  # one of 200 is enough
        ("ttft_min=400ms", 1.1, "violated", 0.5),
        ("ttft_min=600ms", 1.1, "met", 0.5),
        ("ttft_p99.9=1s", 0.9, "inconclusive", 0.9),  # 2,995 requests show it, not 200
        ("ttft_p99.9=1s", 1.1, "inconclusive", 1.1),
    ],
)
def test_extremes_are_facts_of_the_run_and_a_far_percentile_is_none(
    slo: str, slow_s: float, verdict: str, value_s: float
) -> None:
    o = cohort(*good(199), *good(1, 199, slow_s)).ttft(from_schedule=True)
    found = judge_slo(o, parse_slo(slo))
    assert (found.verdict, found.value_s) == (verdict, pytest.approx(value_s))
    if "p99.9" in slo:
        assert found.value_s_ci[1] is None  # a lower bound, nothing more
        assert percentiles(o).p99_9 is None
        assert percentiles(o).p99_9_reason == "needs 2995 requests, has 200"
    else:  # 1 - 0.05^(1/200) = 0.0149
        assert found.value_s_ci is None
        assert (verdict, "max" in slo) != ("met", True) or "up to 0.015 of all" in str(found.reason)
    assert (percentiles(o).min, percentiles(o).max) == pytest.approx((0.5, max(0.5, slow_s)))


def test_a_largest_sample_that_was_cut_off_or_failed_is_no_figure() -> None:
    cut = request(999, 5.0, ttft_s=None, status="unfinished", ended_ns=at_ns(5.2))
    o = cohort(*good(99), cut).ttft(from_schedule=True)
    assert judge_slo(o, parse_slo("ttft_max=1s")).verdict == "inconclusive"
    assert judge_slo(o, parse_slo("ttft_max=100ms")).verdict == "violated"
    assert percentiles(o).max_bounds == [pytest.approx(0.5), None]
    failed = cohort(*good(99), request(999, 5.0, ttft_s=None, status="timeout"))
    expected = "violated"
    assert judge_slo(failed.ttft(from_schedule=True), parse_slo("ttft_max=9s")).verdict == expected


def test_loads_are_bracketed_by_an_extreme_without_an_estimate() -> None:
    slos = parse_slos(["ttft_max=1s"])
    assert fewest_requests(slos, {}) == (0, "")
    with pytest.raises(ConfigError, match=r"search for ttft_p99\.9"):
        Search.check(SimpleNamespace(slos=slos, rates=None, concurrency=None, trace=None))
