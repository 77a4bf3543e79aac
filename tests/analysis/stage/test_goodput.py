"""Goodput of classes, error rates, accepted answers, offline throughput; worked values."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampacity.analysis.capacity.goodput_peak import peak_goodput
from ampacity.analysis.contract import stage as contract
from ampacity.analysis.contract.stage import Accepted, SloVerdict
from ampacity.analysis.contract.summary import read_summary
from ampacity.analysis.slo import SloError, parse_slo, parse_slos
from ampacity.analysis.stage.attainment import judge_slo, observe_slos, requests_meeting
from ampacity.analysis.stage.goodput import (
    LabelsError,
    accepted_goodput,
    goodput_rps,
    offline_throughput,
    parse_labels,
)
from ampacity.analysis.stage.steady import Stability
from ampacity.analysis.stage.verdicts import Judge, Judged
from tests.support.contract import struct_of, summarise
from tests.support.synthetic import Stage, cohort, make_run, request


def route(accepted: int, cost_usd: float) -> Accepted:
    labels = [i < accepted for i in range(100)]
    meets, tokens = np.ones(100, dtype=bool), np.full(100, 200.0)
    return accepted_goodput(labels, meets, tokens, 10.0, cost_usd)


def test_two_routes_the_one_with_more_accepted_results_wins() -> None:
    a, b = route(58, 1.10), route(85, 1.45)
    assert (a.rps, b.rps) == (5.8, 8.5)
    assert a.cost_per_result_usd == pytest.approx(0.0190, abs=5e-5)
    assert b.cost_per_result_usd == pytest.approx(0.0171, abs=5e-5)
    assert b.output_tokens_per_s == 1700


def test_a_peak_that_is_not_known_says_why() -> None:
    assert peak_goodput([], []).reason == "no stage was measured"
    unknown = {"goodput_rps": None, "goodput_rps_reason": "no answer had two tokens"}
    expected = "no answer had two tokens"
    assert peak_goodput([struct_of(contract.Stage, unknown)], []).reason == expected


def test_accepted_needs_the_slo_too_and_unlabelled_answers_are_counted() -> None:
    meets = np.array([True, True, False, True])
    found = accepted_goodput([True, False, True, None], meets, np.ones(4), 2.0, None)
    assert (found.requests, found.rps, found.share, found.unlabelled) == (1, 0.5, 0.25, 1)
    assert found.cost_per_result_usd is None
    nobody = accepted_goodput(None, meets, np.ones(4), 2.0, None)
    assert nobody.reason
    assert "nobody judged" in nobody.reason


def test_labels_are_read_from_json_lines_and_csv() -> None:
    assert parse_labels(
        ['{"request_id": 3, "accepted": true}', "", '{"request_id": 4, "accepted": false}'], "f"
    ) == {3: True, 4: False}
    assert parse_labels(["request_id,accepted,who", "3,yes,a", "4,0,b"], "f") == {3: True, 4: False}


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "f: the file is empty"),
        (["a,b", "1,2"], "f:1: the header must name request_id and accepted"),
        (['{"request_id": 1}'], "f:1: needs request_id"),
        (['{"request_id": 1, "accepted": 2}'], "accepted is '2'"),
        (
            ['{"request_id": 1, "accepted": true}', '{"request_id": 1, "accepted": false}'],
            "f:2: request 1 is labelled twice",
        ),
        (["{", "{"], "f:1: this is no JSON"),
    ],
)
def test_bad_labels_are_refused_in_one_line(lines: list[str], says: str) -> None:
    with pytest.raises(LabelsError) as caught:
        parse_labels(lines, "f")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.lists(st.text(max_size=30), max_size=4))
def test_any_labels_are_read_or_refused_in_one_line(lines: list[str]) -> None:
    try:
        parse_labels(lines, "f")
        message = ""
    except LabelsError as refused:
        message = str(refused)
    assert "\n" not in message


def test_fault_35_goodput_counts_failures_and_leaves_cancelled_out() -> None:
    records = [request(i, i * 0.1, ttft_s=0.5) for i in range(50)]
    records += [request(50 + i, i * 0.1, ttft_s=3.0) for i in range(30)]
    records += [request(80 + i, i * 0.1, ttft_s=None, status="http_error") for i in range(20)]
    c = cohort(*records)
    met = requests_meeting(c, observe_slos(c, parse_slos(["ttft_p99=2s"])))
    assert int(met.sum()) / len(c.requests) == 0.5
    assert goodput_rps(int(met.sum()), 10.0) == 5.0


def test_each_class_is_judged_by_its_own_slos_and_those_of_all() -> None:
    records = [request(i, i * 0.1, ttft_s=1.5, class_="chat") for i in range(40)]
    records += [request(40 + i, i * 0.1, ttft_s=20.0, class_="batch") for i in range(60)]
    c = cohort(*records)
    slos = parse_slos(["chat:ttft_p90=2s", "batch:ttft_p90=30s"])
    assert requests_meeting(c, observe_slos(c, slos)).all()
    tight = parse_slos(["chat:ttft_p90=1s", "batch:ttft_p90=30s"])
    assert int(requests_meeting(c, observe_slos(c, tight)).sum()) == 60
    both = parse_slos(["ttft_p90=2s", "batch:ttft_p90=30s"])
    # an SLO without a class is everybody's
    assert int(requests_meeting(c, observe_slos(c, both)).sum()) == 40
    verdicts = {s.text: judge_slo(o, s).verdict for s, o in observe_slos(c, tight)}
    assert verdicts == {"chat:ttft_p90=1s": "violated", "batch:ttft_p90=30s": "met"}


def test_error_rate_is_a_share_of_all_requests() -> None:
    slo = parse_slo("error_rate=5%")

    def verdict(failed: int, n: int = 400) -> SloVerdict:
        c = cohort(*[request(i, i * 0.1, status="reset" if i < failed else "ok") for i in range(n)])
        return judge_slo(observe_slos(c, [slo])[0][1], slo)

    assert verdict(0).verdict == "met"
    assert verdict(0).value_s is None
    broken = verdict(200)
    assert (broken.verdict, broken.attainment) == ("violated", 0.5)
    assert broken.reason == "200 of 400 requests failed"
    assert verdict(1, 40).verdict == "inconclusive"


def test_offline_batch_finds_the_highest_throughput_and_its_cost(tmp_path: Path) -> None:
    def stage(concurrency: int, gap_s: float, start_s: float) -> Stage:
        records = [
            request(i, start_s + (i // concurrency) * 0.5, ttft_s=0.1, gaps_s=[gap_s] * 4)
            for i in range(40 * concurrency)
        ]
        return Stage(records, 20.0, start_s=start_s, concurrency=concurrency)

    fleet = {"peak_rps": None, "tensor_parallel": 2, "safety_factor": 1.2, "gpu_hour_usd": 3.6}
    run = make_run(
        tmp_path / "r",
        [stage(1, 0.05, 0.0), stage(4, 0.06, 40.0)],
        ["error_rate=1%"],
        fleet_inputs=fleet,
        warmup_requests=0,
    )
    summary = summarise(run, {i: i % 2 == 0 for i in range(200)})
    found = summary["offline"]
    # 4 in flight, a round each 0.5 s: 8 requests/s of 5 tokens; two GPUs at $3.6/h are $0.002/s
    assert found["stage"] == 1
    assert found["output_tokens_per_s"] == pytest.approx(40, rel=0.03)
    assert found["cost_per_million_output_tokens"] == pytest.approx(50, rel=0.03)
    assert found["cost_per_thousand_requests"] == pytest.approx(0.25, rel=0.03)
    low, high = summary["stages"][1]["achieved_rps_ci"]
    assert low - 1e-9 <= 8 <= high + 1e-9
    half = summary["stages"][1]["accepted"]
    assert half["requests"] == 80
    assert half["cost_per_result_usd"] == pytest.approx(0.002 * 20 / 80, rel=0.03)
    refused = offline_throughput(read_summary(summary).stages, parse_slos(["ttft_p99=2s"]), fleet)
    assert refused.reason == "a latency SLO is given: see capacity"


@pytest.mark.parametrize(
    ("arrive", "goodput"),
    [
        (95, 9.5),
        (110, 10.0),
        (200, 20.0),
    ],  # fewer; more than 10/s by chance; a rate that moved by design
)
def test_goodput_is_a_share_of_what_was_offered(
    tmp_path: Path, arrive: int, goodput: float
) -> None:
    stage = Stage([request(i, i * 10 / arrive) for i in range(arrive)], 10.0, offered_rps=10.0)
    found = summarise(make_run(tmp_path / "run", [stage], ["ttft_p50=1s"], warmup_requests=0))[
        "stages"
    ][0]
    assert (found["slo_attainment"], found["goodput_rps"]) == (1.0, pytest.approx(goodput))


@pytest.mark.parametrize(
    ("lasts_s", "think_s", "rps"),
    [(5.005, 0.0, 1.6), (50.0, 0.0, 0.16), (0.3, 0.0, 26.67), (5.005, 5.0, 0.8)],
)
def test_a_closed_loop_is_carried_at_users_per_answer_time(
    tmp_path: Path, lasts_s: float, think_s: float, rps: float
) -> None:
    """Issue 18 I: eight users of 5 s answers, 20 s: 1.6 requests/s (24 answers end in them, 1.2
    requests/s), cost likewise; half of it where each thinks for as long."""
    rounds = int(np.ceil(20.0 / (lasts_s + think_s)))
    records = [
        request(8 * k + u, (lasts_s + think_s) * k, ttft_s=lasts_s - 0.1, gaps_s=[0.1])
        for k in range(rounds)
        for u in range(8)
    ]
    fleet = {"peak_rps": 16.0, "tensor_parallel": 1, "safety_factor": 1.0, "gpu_hour_usd": 3.6}
    stage = Stage(records, 20.0, concurrency=8)
    found = summarise(
        make_run(
            tmp_path / "run",
            [stage],
            ["ttft_p50=60s"],
            fleet_inputs=fleet,
            warmup_requests=0,
            locked={"think_s": think_s},
        )
    )
    low, high = found["stages"][0]["achieved_rps_ci"] or (0.0, np.inf)
    assert found["stages"][0]["achieved_rps"] == pytest.approx(rps, rel=2e-3)
    assert low - 1e-9 <= found["stages"][0]["achieved_rps"] <= high + 1e-9
    assert found["capacity"]["capacity_rps"] == found["stages"][0]["achieved_rps"]
    # two tokens an answer at $0.001/s
    expected = pytest.approx(0.001 / (2 * rps) * 1e6, rel=2e-3)
    assert found["fleet"]["cost_per_million_output_tokens"] == expected


@pytest.mark.parametrize("lasts_s", [5.0, 9.0])
def test_an_open_stage_has_no_rate_before_an_answer_could_have_ended(
    tmp_path: Path, lasts_s: float
) -> None:
    """Two requests/s for 20 s, each answered after 5 s: 30 answers end in the stage, all in its
    last 15 s."""
    records = [request(i, 0.1 + i * 0.5, ttft_s=lasts_s - 0.1, gaps_s=[0.1]) for i in range(40)]
    stage = Stage(records, 20.0, offered_rps=2.0)
    found = summarise(make_run(tmp_path / "run", [stage], ["ttft_p50=60s"], warmup_requests=0))[
        "stages"
    ][0]
    assert found["achieved_rps"] == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize(("duration_s", "known"), [(0.002, False), (0.5, False), (3.0, True)])
def test_a_stage_shorter_than_an_answer_has_no_tokens_per_second(
    tmp_path: Path, duration_s: float, known: bool
) -> None:
    """16 requests at once, a budget's end after 2 ms, and the first token 1 s later: not 0/s."""
    records = [request(i, 1e-4 * i, ttft_s=1.0, gaps_s=[0.1] * 4) for i in range(16)]
    stage = Stage(records, duration_s, concurrency=16)
    summary = summarise(make_run(tmp_path / "run", [stage], [], warmup_requests=0))
    found = summary["stages"][0]
    assert (found["output_tokens_per_s"] is not None) is known
    assert known or "shorter than an answer" in found["output_tokens_per_s_reason"]
    assert " 0 output tokens/s" not in summary["verdict"]


def test_a_closed_loop_has_no_more_goodput_than_it_achieves(tmp_path: Path) -> None:
    # four users in a window of 10 s, whose requests last 4 s: 12 begin, 8 of them end; one user's
    # all fail at once
    records = [request(4 * k + u, 4.0 * k, ttft_s=4.0) for k in range(3) for u in range(3)]
    records += [request(100 + k, 4.0 * k, ttft_s=None, status="http_error") for k in range(3)]
    run = make_run(
        tmp_path / "run", [Stage(records, 10.0, concurrency=4)], ["ttft_p50=5s"], warmup_requests=0
    )
    found = summarise(run)["stages"][0]
    assert (found["requests"], found["slo_attainment"]) == (12, 0.75)
    # three users who are answered once in 4 s; completions by the end, six in 10 s, are too few
    assert found["achieved_rps"] == pytest.approx(0.75)
    assert found["goodput_rps"] == pytest.approx(0.75)  # all nine answers are good


def test_goodput_is_the_share_that_meets_every_other_slo() -> None:
    """Of 100: 10 late by TTFT, 10 others by E2E, 5 failed; 75 are good."""
    records = [request(i, i * 0.1, ttft_s=3.0 if i < 10 else 0.5) for i in range(85)]
    records += [request(85 + i, 8.5 + i * 0.1, ttft_s=0.5, gaps_s=[9.0]) for i in range(10)]
    records += [request(95 + i, 9.5 + i * 0.1, ttft_s=None, status="reset") for i in range(5)]
    c = cohort(*records)
    slos = parse_slos(["goodput=75%", "ttft_p50=2s", "e2e_p50=5s"])
    (slo, found), *_ = observe_slos(c, slos)
    assert (slo.name, slo.text) == ("goodput", "goodput=75%")
    assert int(found.misses(slo.limit_s).sum()) == 25
    verdict = judge_slo(found, slo)
    assert (verdict.attainment, verdict.value_s) == (0.75, None)
    assert parse_slo(slo.text) == slo


def test_an_answer_whose_tokens_nobody_saw_is_not_good() -> None:
    """Of 20: 12 with text, 5 of eight tokens without any text, 3 that ended at once (one token)."""
    records = [request(i, i * 0.1, ttft_s=0.5) for i in range(12)]
    records += [request(12 + i, 1.2, ttft_s=None, output_tokens=8) for i in range(5)]
    records += [request(17 + i, 1.7, ttft_s=None, output_tokens=1) for i in range(3)]
    for limits, good in (("ttft_p50=2s", 15), ("itl_p50=2s", 20)):
        (_, found), *_ = observe_slos(cohort(*records), parse_slos(["goodput=75%", limits]))
        assert found.n - int(found.misses(1.0).sum()) == good


def test_a_bound_is_written_the_right_way_round() -> None:
    found = [slo.bound_text for slo in parse_slos(["ttft_p99=2s", "goodput=95%", "error_rate=1%"])]
    assert found == ["ttft_p99 ≤ 2 s", "goodput ≥ 95 %", "error_rate ≤ 1 %"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("goodput=95%", "goodput counts requests that meet the other SLOs"),
        ("goodput=4", "write goodput=95%"),
        ("goodput=30%", "a share from 50% to 99.9%"),
    ],
)
def test_a_goodput_that_is_no_slo_is_refused(text: str, says: str) -> None:
    with pytest.raises(SloError, match=says):
        parse_slos([text])


def test_a_check_leaves_less_to_chance_and_shares_it_among_its_slos() -> None:
    """Without a miss among n, p95 is met by chance 0.95^n: 4.6 % of 60, 0.6 % of 100."""
    slos = parse_slos(["ttft_p95=2s", "e2e_p95=9s"])

    def met(n: int, alpha: float | None) -> bool | None:
        c = cohort(*[request(i, i * 0.1, ttft_s=0.5) for i in range(n)])
        judge = Judge(slos, Stability(True, None), False, 1.0, alpha)
        return judge.stage_findings(Judged(c))[0]["slo_met"]

    assert [met(60, None), met(60, 0.01), met(100, 0.01)] == [True, None, True]
    # 3 of 20 missed: by chance 7.5 % at p95; 4 of 20 1.6 %, which two SLOs share
    c = cohort(*[request(i, i * 0.1, ttft_s=3.0 if i % 5 == 0 else 0.5) for i in range(20)])
    words = [
        Judge(slos, Stability(True, None), False, 1.0, alpha).stage_findings(Judged(c))[0][
            "slo_met"
        ]
        for alpha in (0.02, 0.04)
    ]
    assert words == [None, False]
