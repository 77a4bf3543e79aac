"""The summary of odd runs, its verdict in words, and its warnings."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ampacity.analysis.capacity.fleet import instances_text
from ampacity.analysis.contract.summary import Summary, read_summary
from ampacity.analysis.stage_warnings import Facts
from ampacity.analysis.verdict import write_verdict
from ampacity.analysis.warnings import RULES
from tests.support.contract import struct_of, summarise
from tests.support.synthetic import (
    FLEET,
    SLOS,
    Stage,
    fixed,
    make_run,
    queue_sweep,
    request,
    strict,
    summary_of,
    warned,
)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    stages = queue_sweep(
        np.random.default_rng(1), [25, 50, 100, 150, 220, 300], 20.0, service_rps=200
    )
    path = tmp_path_factory.mktemp("runs") / "sweep"
    return summarise(make_run(path, stages, SLOS, fleet_inputs=FLEET))


def test_the_verdict_says_rate_limit_c_max_and_fleet(sweep: dict[str, Any]) -> None:
    verdict = sweep["verdict"]
    assert verdict.startswith("One instance carries ")
    assert "(95 % interval " in verdict
    assert "ttft_p99 ≤ 200 ms (itl_p99 ≤ 50 ms does not limit it)" in verdict
    assert " in flight; " in verdict
    fleet = sweep["fleet"]
    said = f"900 req/s need {instances_text(fleet['instances'], fleet['instances_ci'])}, {fleet['gpus']} GPUs, with a safety factor of 1.3."
    assert verdict.endswith(said)
    low, high = sweep["capacity"]["capacity_rps_ci"]
    assert fleet["instances_ci"] == [math.ceil(math.ceil(900 / rate) * 1.3) for rate in (high, low)]
    assert fleet["gpus"] == 4 * fleet["instances"]
    assert sweep["littles_law"]["consistency"] == pytest.approx(1.0, abs=0.02)


def test_verdict_in_words_for_given_figures(sweep: dict[str, Any]) -> None:
    summary = json.loads(json.dumps(sweep))
    summary["slos"] = [{"metric": "ttft", "quantile": 0.99, "limit_s": 2.0, "text": "ttft_p99=2s"}]
    summary["capacity"] |= json.loads("""{"capacity_rps": 6.43, "capacity_rps_ci": [6.0,
        7.0], "c_max": 14.2, "c_max_ci": [11.0, 19.6], "binding_slo": "ttft_p99=2s",
        "binding_or": [], "verified_rps": null}""")
    # 120 / 7 = 17.1 and 120 / 6 = 20, x 1.3
    summary["fleet"] |= {"instances": 25, "instances_ci": [24, 26], "gpus": 100, "peak_rps": 120}
    assert write_verdict(read_summary(summary)) == (
        "One instance carries an estimated 6.43 req/s (95 % interval 6 to 7; no stage alone verifies a load) with ttft_p99 ≤ 2 s; C_max 14.2 (11 to 19.6) in flight; "
        "120 req/s need 25 instances (24 to 26), 100 GPUs, with a safety factor of 1.3."
    )
    summary["capacity"] |= {"crossing": "pooled", "verified_rps": 6.2}
    assert write_verdict(read_summary(summary)).startswith(
        "One instance carries an estimated 6.43 req/s (95 % interval 6 to 7; verified to 6.2) with ttft_p99 ≤ 2 s; "
    )
    summary["capacity"]["crossing"] = "lower_bound"
    summary["fleet"]["instances"] = None
    assert write_verdict(read_summary(summary)) == (
        "One instance carries at least 6.43 req/s with ttft_p99 ≤ 2 s; no stage violated the SLO; "
        "C_max at least 14.2 in flight."
    )


def test_an_empty_run(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, slos=SLOS)
    assert summary["verdict"] == "Nothing was measured: no request was recorded."
    assert warned(summary, "no_requests")
    empty = summary_of(tmp_path, Stage([], 5.0, offered_rps=4.0), slos=SLOS)
    assert empty["stages"][0]["requests"] == 0
    assert empty["stages"][0]["ttft_s"]["reason"] == "no request has a value"


def test_a_killed_run_counts_what_was_lost(tmp_path: Path) -> None:
    """Requests 400 to 499 had been due, of which 19 are not recorded: unfinished. Later ones never
    were due."""
    recorded = [
        r
        for r in fixed(100, 0.02, first=400, start_s=10.0)
        if r.request_id % 5 or r.request_id == 400
    ]
    stages = [
        Stage(fixed(400, 0.02), 8.0),
        Stage(recorded, 8.0, start_s=10.0, scheduled_requests=400),
    ]
    summary = summary_of(tmp_path, *stages, slos=SLOS, killed=True, status="running")
    assert summary["requests"] == 500
    assert summary["errors"]["unfinished"] == 19
    assert summary["stages"][1]["missing"] == summary["stages"][1]["errors"]["unfinished"] == 19
    said = "killed at stage 1 (10.12 req/s)"
    assert summary["partial"] == f"{said}: only what had been recorded is here"
    assert summary["verdict"].startswith(f"Partial run ({said}")
    assert summary["stages"][0]["slo_met"] is True


def test_a_run_that_ended_within_its_ramp_says_so_and_judges_nothing(tmp_path: Path) -> None:
    ramp = Stage(
        [request(i, i * 0.5) for i in range(60)],
        40.0,
        concurrency=4,
        ended_early="interrupted by Ctrl-C",
        extra={"ramp_s": 30.5},
    )
    for ended in ({"killed": True}, {"status": "interrupted"}):
        found = summary_of(tmp_path, ramp, slos=["ttft_p99=1s"], **ended)
        (stage,) = found["stages"]
        assert (stage["requests"], stage["slo_met"]) == (0, None)
        assert stage["window"]["warmup_requests"] == 60
        said = "very stage ended within its ramp, which does not count: 60 of 60 requests"
        assert said in found["verdict"]


def test_what_was_answered_is_counted_over_the_whole_run(sweep: dict[str, Any]) -> None:
    summary = json.loads(json.dumps(sweep))
    for stage in summary["stages"]:
        stage |= {"ok": 0, "missing": 0}
    summary |= {
        "requests": 4962,
        "errors": dict.fromkeys(summary["errors"], 0) | {"unfinished": 3900},
    }
    assert write_verdict(read_summary(summary)) == (
        "No request that was due in a stage's window was answered, 1062 of 4962 in the whole run were: "
        "3900 of 4962 were cut off unfinished. Start at a much lower load."
    )
    killed_early = summary | {"errors": dict.fromkeys(summary["errors"], 0), "stages": []}
    expected = "Nothing is judged: of 4962 requests there are records, and of no stage to which they belong."
    assert write_verdict(read_summary(killed_early)) == expected
    summary["errors"]["unfinished"] = 4962
    expected = "No request was answered: 4962 of 4962 were cut off unfinished."
    assert write_verdict(read_summary(summary)) == expected
    summary["stages"][0]["missing"] = 4900  # records lost in a kill may have been answers
    assert write_verdict(read_summary(summary)) == (
        "No record of an answer was left: 4900 of 4962 requests have no record (62 of 4962 were cut off "
        "unfinished), so nothing is judged."
    )


@pytest.mark.parametrize(
    ("status", "reason", "said"),
    [
        ("interrupted", "interrupted by Ctrl-C", "interrupted at stage 0 (50 req/s) by Ctrl-C"),
        (
            "budget",
            "--max-requests 12 is used up",
            "ended by its budget at stage 0 (50 req/s): --max-requests 12 is used up",
        ),
        (
            "errors",
            "--max-errors 5%: 2 of 34 requests failed",
            "ended at stage 0 (50 req/s) by --max-errors 5%: 2 of 34 requests failed",
        ),
        ("aborted", None, "aborted after stage 0 (50 req/s)"),
        ("running", None, "killed after stage 0 (50 req/s): only what had been recorded is here"),
    ],
)
def test_why_a_run_is_partial(tmp_path: Path, status: str, reason: str | None, said: str) -> None:
    stage = Stage(fixed(40, 0.02), 0.8, ended_early=reason)
    found = summary_of(tmp_path, stage, status=status, status_reason=reason)
    assert found["partial"] == said


def test_a_run_that_is_still_going_on_is_not_said_to_be_killed(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "run", [Stage(fixed(40, 0.02), 0.8)], SLOS, killed=True, status="running"
    )
    summary = summarise(replace(run, going_s=2.6))
    said = "still running at stage 0 (50 req/s), last written 3 s ago: only what had been recorded by then is here"
    assert summary["partial"] == said
    assert summary["verdict"].startswith(f"Partial run ({said})")


def test_the_verdict_rounds_no_c_max_to_nothing_and_names_lower_rates(
    sweep: dict[str, Any],
) -> None:
    summary = json.loads(json.dumps(sweep))
    summary["capacity"] |= {"c_max": 0.0412, "crossing": "lower_bound"}
    assert "C_max at least 0.0412 in flight" in write_verdict(read_summary(summary))
    summary["capacity"] |= {"c_max": 1}
    assert "C_max at least 1 in flight" in write_verdict(read_summary(summary))
    summary["capacity"] |= {"capacity_rps": None, "capacity_rps_ci": [0.0, 40.0]}
    summary["capacity"]["reason"] = "REASON"
    expected = "No stage alone was shown to meet ttft_p99 ≤ 200 ms and itl_p99 ≤ 50 ms; the capacity is below 40 requests/s: REASON."
    assert write_verdict(read_summary(summary)) == expected


def test_no_slos(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, Stage(fixed(400, 0.02), 8.0))
    stage = summary["stages"][0]
    assert (stage["slo_met"], stage["goodput_rps"], stage["slo_verdicts"]) == (None, None, [])
    assert summary["capacity"]["capacity_rps"] is None
    assert "no SLO given" in summary["capacity"]["reason"]
    assert "no SLO was given" in summary["verdict"]
    assert summary["littles_law"]["gap"] is None


def test_a_stage_shorter_than_its_answers_names_no_rate(tmp_path: Path) -> None:
    """25 requests in 5 s, three of them answered at once and the rest in 0.1 + 7.9 s: 3 / 5 s is no
    rate of anything.

    None ends in the second half, from which a rate by completions counts where answers take so
    long."""
    records = [request(i, i * 0.2, gaps_s=[0.1 if i < 3 else 7.9]) for i in range(25)]
    short = summary_of(tmp_path, Stage(records, 5.0))
    assert short["stages"][0]["achieved_rps"] == 0
    expected = "Too short to tell: an answer takes 8 s and no stage is twice as long, so no rate is known. Use a longer --duration."
    assert short["verdict"] == expected
    other = Stage(fixed(400, 0.02, first=25, start_s=20.0), 8.0, start_s=20.0)
    both = summary_of(tmp_path, Stage(records, 5.0), other)
    assert both["verdict"].startswith("Up to 50 requests/s")


def test_a_stage_in_which_nothing_ended_names_no_rate_of_zero(tmp_path: Path) -> None:
    """Two of its requests are answered, after it: too few for a median, none within 1 s."""
    records = [request(i, i * 0.5, ttft_s=0.1, gaps_s=[1.5]) for i in range(2)]
    verdict = summary_of(tmp_path, Stage(records, 1.0))["verdict"]
    assert verdict.startswith("Too short to tell: no answer ended in the part of the load that")


def test_each_undecided_stage_is_named_with_its_own_reason(tmp_path: Path) -> None:
    """15 and 19 requests are too few to tell, and 400 that never end are too long for 8 s."""
    endless = [
        request(i, 20 + i * 0.02, status="unfinished", ended_ns=None, last_token_ns=None)
        for i in range(400)
    ]
    stages = [
        Stage(fixed(15, 0.1, first=400), 1.5),
        Stage(fixed(15, 0.05, first=415, start_s=5.0), 0.75, start_s=5.0),
        Stage(endless, 8.0, start_s=20.0),
    ]
    text = str(warned(summary_of(tmp_path, *stages), "too_short"))
    assert text.startswith(
        "Stability is not known at 10 req/s, 20 req/s: 15 requests are too few to tell (needs 20); at 50 req/s: requests last"
    )


def test_everything_failed(tmp_path: Path) -> None:
    records = [request(i, i * 0.02, ttft_s=None, status="http_error") for i in range(400)]
    summary = summary_of(tmp_path, Stage(records, 8.0), slos=SLOS)
    assert summary["verdict"] == "No request was answered: 400 of 400 ended as http_error."
    assert "400 of 400 requests failed (400 http_error)" in str(warned(summary, "errors"))


def test_client_limited_everywhere(tmp_path: Path) -> None:
    stages = [Stage(fixed(400, 0.02), 8.0, client_limited=True)]
    summary = summary_of(tmp_path, *stages, slos=SLOS)
    assert summary["verdict"] == (
        "No finding: the client could not keep up at any load, so the server's limit was not "
        "measured."
    )
    assert summary["capacity"]["capacity_rps"] is None
    assert summary["audit"] | {"slip_p99_s": None} == json.loads("""{"slip_p99_s": null,
        "loop_lag_p99_s": 0.0004, "cpu_fraction": 0.2, "client_limited": true,
        "client_limited_stages": [0], "repeated_stages": [], "receive_delay_p99_s": null,
        "dated_by_kernel": false, "coalesced_share": null}""")


def test_a_disturbed_stage_that_was_repeated_limits_nothing(tmp_path: Path) -> None:
    stages = [
        Stage(fixed(400, 0.02), 8.0, client_limited=True),
        Stage(fixed(400, 0.02), 8.0),
        Stage(fixed(800, 0.02), 8.0, client_limited=True),
    ]
    summary = summary_of(tmp_path, *stages, slos=SLOS)
    assert summary["audit"]["client_limited_stages"] == [0, 2]
    assert summary["audit"]["repeated_stages"] == [0]
    assert summary["audit"]["client_limited"] is True  # stage 2 was not
    text = str(warned(summary, "client_limited"))
    assert text.startswith("This machine could not keep up with the schedule at 100 req/s: ")
    summary = summary_of(tmp_path, *stages[:2], slos=SLOS)
    assert summary["audit"]["client_limited"] is False
    assert warned(summary, "client_limited") is None


def test_the_audit_is_that_of_the_stages_that_count(tmp_path: Path) -> None:
    """Of four stages the second was disturbed and repeated, the last could not be sent in time:
    both are no findings."""

    def stage(slip_s: float, limited: bool = False) -> Stage:
        audit = {
            "slip_p50_s": 0.0,
            "slip_p99_s": slip_s,
            "loop_lag_p99_s": slip_s / 2,
            "receive_delay_p99_s": slip_s / 4,
            "coalesced_share": slip_s / 8,
            "cpu_fraction": slip_s * 4,
            "dated_by_kernel": not limited,
            "client_limited": limited,
            "client_limited_reason": "late" if limited else None,
        }
        return Stage(fixed(400, 0.02), 8.0, extra={"audit": audit})

    stages = [stage(0.002), stage(0.2, limited=True), stage(0.008), stage(0.172, limited=True)]
    stages[3].offered_rps = 100.0
    audit = summary_of(tmp_path, *stages, slos=SLOS)["audit"]
    assert (audit["client_limited_stages"], audit["repeated_stages"]) == ([1, 3], [1])
    figures = (
        "slip_p99_s loop_lag_p99_s receive_delay_p99_s coalesced_share dated_by_kernel".split()
    )
    assert [audit[name] for name in figures] == [0.008, 0.004, 0.002, 0.001, True]
    # 4 x 0.172: of the stage that was limited, to say what helps
    assert audit["cpu_fraction"] == pytest.approx(0.688)
    # where each was limited there are no others
    audit = summary_of(tmp_path, stages[1], stages[3], slos=SLOS)["audit"]
    assert [audit[name] for name in figures] == [0.2, 0.1, 0.05, 0.025, False]


def test_a_single_stage_that_meets_is_a_lower_bound(tmp_path: Path) -> None:
    records = fixed(1000, 0.02)
    summary = summary_of(tmp_path, Stage(records, 20.0), slos=SLOS)
    assert summary["capacity"]["crossing"] == "lower_bound"
    assert summary["verdict"].startswith("One instance carries at least 50 req/s")
    assert summary["knee"]["reason"] == "needs 4 usable stages, has 1"


def test_a_trace_replay_is_one_open_stage(tmp_path: Path) -> None:
    stage = Stage(fixed(500, 0.02), 10.0, extra={"offered_rps": None})
    summary = summary_of(tmp_path, stage, slos=SLOS)
    assert summary["stages"][0]["offered_rps"] == pytest.approx(50.0)
    assert summary["capacity"]["capacity_rps"] is not None


def test_a_closed_sweep(tmp_path: Path) -> None:
    stages, start, first = [], 0.0, 0
    for users in (1, 2, 4, 8):
        service = 0.05 * users  # the server works one after the other: 20 a second
        answer: dict[str, Any] = {"ttft_s": service - 0.004, "gaps_s": [0.001] * 4}
        records = [
            request(first + i * users + k, start + i * service, **answer)
            for i in range(round(20 / service))
            for k in range(users)
        ]
        first += len(records)
        stages.append(Stage(records, 20.0, start_s=start, concurrency=users))
        start += 25.0
    summary = summary_of(tmp_path, *stages, slos=SLOS)
    capacity = summary["capacity"]
    found = [capacity[name] for name in ("c_max_basis", "c_max", "c_max_ci")]
    assert found == ["closed", 4, [4, 8]]
    assert capacity["capacity_rps"] == pytest.approx(20, rel=0.05)


@pytest.mark.parametrize(
    ("counted", "said"),
    [
        ({"turns_beyond_context": 100}, "100 of 500 planned turns were left out"),
        ({"clipped_to_context": 8}, "8 of 400 requests were shortened"),
        ({"turns_beyond_context": 4}, None),  # 4 of 404: not one in a hundred
        # of a trace that was not played to its end
        ({"turns_beyond_context": 100, "trace": {"requests": 1000}}, "100 of 1"),
        ({"turns_beyond_context": 5, "trace": {"requests": 1000}}, None),  # 5 of 1,000, not of 405
    ],
)
def test_a_workload_that_does_not_fit_the_context_is_warned_of(
    tmp_path: Path, counted: dict[str, Any], said: str | None
) -> None:
    run = make_run(tmp_path / "run", [Stage(fixed(400, 0.02), 8.0)], SLOS)
    run = replace(run, meta={**run.meta, "workload": {**run.meta["workload"], **counted}})
    text = warned(strict(summarise(run)), "beyond_context")
    assert (text and text.partition(",")[0]) == said


def test_warnings_about_lengths_cache_and_chunks(tmp_path: Path) -> None:
    records = fixed(400, 0.02, output_tokens_planned=20, cached_tokens=50, output_tokens=10)
    summary = summary_of(tmp_path, Stage(records, 8.0), slos=SLOS)
    assert all(warned(summary, code) for code in ("lengths_off", "cached", "tokens_per_chunk"))
    realised = summary["workload"]["realised"]
    assert realised["cached_token_share"] == pytest.approx(0.5)
    assert realised["tokens_per_chunk"] == pytest.approx(2.0)
    assert realised["output_tokens"]["received"]["p50"] == 10
    assert realised["output_tokens"]["planned"]["mean"] == 20
    assert realised["token_source"] == {"usage": 400}
    workload = {"name": "x", "prompts": "shared"}
    shared = summary_of(tmp_path, Stage(records, 8.0), slos=SLOS, workload=workload)
    assert warned(shared, "cached") is None


def test_what_to_do_about_too_few_requests(tmp_path: Path) -> None:
    """299 without a miss are needed: 269 more, at 10 a second."""

    def hint(*stages: Stage, **changes: Any) -> str:
        summary = summary_of(tmp_path, *stages, slos=["ttft_p99=200ms"], **changes)
        return str(warned(summary, "too_few_requests"))

    stage = Stage(fixed(30, 0.1), 3.0)
    assert hint(stage) == (
        "At 10 req/s an SLO is inconclusive (ttft_p99=200ms: 0 of 30 requests over the limit "
        "(p99 needs 299 requests)). Use a longer --duration: about 269 more requests, 27 s of that load, decide it."
    )
    text = hint(stage, workload={"trace": {"file": "day.csv"}})
    assert "--duration" not in text
    assert "Replay a longer trace: about 269 more requests" in text
    assert text.endswith("or use a laxer percentile.")
    missed = fixed(1980, 0.02) + fixed(20, 0.02, first=1980, start_s=39.6, ttft_s=0.3)
    on_edge = hint(Stage(missed, 40.0), warmup_requests=0)
    assert "no length is likely to decide" in on_edge
    assert "more requests" not in on_edge
    # at 10/s 269 of 299 are lacking, at 50/s 99: the lesser is named, by its load, with one in
    # flight at a time
    quick = fixed(200, 0.02, first=30, start_s=10.0, ttft_s=0.01, gaps_s=[0.001] * 4)
    assert hint(stage, Stage(quick, 4.0, start_s=10.0), warmup_requests=0) == (
        "At 10 req/s, 50 req/s an SLO is inconclusive; least is lacking for ttft_p99=200ms at 50 req/s: 0 of 200 requests over "
        "the limit (p99 needs 299 requests). Use a longer --duration: about 99 more requests, 2 s of "
        "that load, decide it."
    )


def undecided_at(
    load: float, *verdicts: tuple[float, int | None], met: bool | None = None
) -> dict[str, Any]:
    """A stage of the summary with (attainment, more_requests) of ttft_p99=1s and itl_p99=1s, both
    inconclusive."""
    rates = dict.fromkeys(("offered_rps", "achieved_rps", "arrived_rps", "carried_rps"), load)
    known = {"verdict": "inconclusive", "reason": "few"}
    each = [
        known | {"slo": f"{name}_p99=1s", "attainment": share, "more_requests": more}
        for name, (share, more) in zip(("ttft", "itl"), verdicts, strict=False)
    ]
    stage = {"kind": "open", "requests": 60, "client_limited": False, "slo_met": met}
    return stage | rates | {"slo_verdicts": each}


def hint_about(*stages: dict[str, Any]) -> str:
    capacity = {"capacity_rps": None, "capacity_rps_ci": None}
    named = [stage | {"name": f"{stage['offered_rps']:g} req/s"} for stage in stages]
    summary = struct_of(Summary, {"stages": named, "capacity": capacity, "workload": {}})
    return str(RULES["too_few_requests"](Facts(summary)))


def test_more_requests_are_asked_for_where_the_slo_may_yet_be_met() -> None:
    """At 3/s 2 % miss a p99 and 40 more requests would show it: no load is found by that, but by
    250 more at 2/s."""
    low, middle = undecided_at(1, (1.0, 280), (1.0, 10)), undecided_at(2, (1.0, 250))
    over = undecided_at(3, (1.0, 5), (0.98, 40))
    hint = hint_about(low, middle, over)
    assert "least is lacking for ttft_p99=1s at 2 req/s: few" in hint
    assert "about 250 more requests, 125 s of that load, decide it." in hint
    only = hint_about(low)  # the stage is decided when its last SLO is
    assert "At 1 req/s an SLO is inconclusive (ttft_p99=1s: few)" in only
    assert "280 more requests, 280 s" in only
    beyond = hint_about(undecided_at(2, (0.5, None), met=False), undecided_at(3, (1.0, 5)), low)
    assert beyond.startswith("At 1 req/s an SLO")  # neither at the load that is broken nor above it


def test_where_every_undecided_load_leans_to_broken_the_lowest_is_named_with_that() -> None:
    hint = hint_about(undecided_at(3, (0.9, 5)), undecided_at(1, (1.0, 300), (0.98, 60)))
    assert "even the lowest load seems too high for itl_p99=1s at 1 req/s" in hint
    assert (
        "about 60 more requests, 60 s of that load, decide it, as violated if that share stays."
        in hint
    )


SETTINGS_OF_LOADS = ("--duration", "--rates", "--concurrency")


@pytest.mark.parametrize(
    "kind",
    [
        {"search": {"precision": 0.05, "reached": True, "more_requests": 0, "path": []}},
        {
            "search": {"precision": 0.05, "reached": False, "more_requests": 900, "path": []}
            | {"ended": "interrupted by SIGTERM"}
        },
        {"imported": {"tool": "vllm bench", "definitions": []}},
    ],
)
def test_advice_names_no_setting_that_the_experiment_lacks(
    tmp_path: Path, kind: dict[str, Any]
) -> None:
    """Stages of 30 and 15 requests: too few to decide p99 and, the latter, to tell stability; one
    is broken from the start."""
    stages = [
        Stage(fixed(30, 0.1), 3.0),
        Stage(fixed(15, 0.1, first=30, start_s=10.0), 1.5, start_s=10.0),
        Stage(fixed(400, 0.02, first=45, start_s=20.0, ttft_s=0.3), 8.0, start_s=20.0),
    ]
    summary = summary_of(tmp_path, *stages, slos=["ttft_p99=200ms"], **kind)
    text = json.dumps([summary["warnings"], summary["verdict"], summary["capacity"]["reason"]])
    assert not [name for name in SETTINGS_OF_LOADS if name in text]
    if "search" in kind:
        assert "inconclusive" not in json.dumps(summary["warnings"])
        assert ("was not reached" in summary["verdict"]) is not kind["search"]["reached"]
    else:
        assert "Measure longer with that tool" in str(warned(summary, "too_short"))
    too_high = summary_of(tmp_path, *stages[2:], slos=["ttft_p99=200ms"], **kind)
    assert "try 12, 25, 38 requests/s" in too_high["capacity"]["reason"]


@pytest.mark.parametrize(
    ("cpu", "reason", "advice"),
    [
        (
            0.1,
            "slip p99 80 ms",
            "Stop (or nice) other work on this machine, or pin the client with --cpus: its CPU was idle "
            "(10% of a core), so others held it up.",
        ),
        (
            0.97,
            "the generator used 97% of its core",
            "Use a faster client, or more --workers where the command has them.",
        ),
        (
            0.03,
            "worker 1 died (exit status -9) in stage 0",
            "Find out what ended that process or node (memory?).",
        ),
        (
            0.1,
            "3 connections failed for want of file descriptors or ports on this machine (see ulimit -n "
            "and --source-address)",
            "Raise the limit that 'ampacity doctor' names (ulimit -n), or use more machines.",
        ),
    ],
)
def test_what_helps_a_limited_client(tmp_path: Path, cpu: float, reason: str, advice: str) -> None:
    audit = {"client_limited": True, "client_limited_reason": reason, "cpu_fraction": cpu}
    stage = Stage(fixed(400, 0.02), 8.0, extra={"audit": audit})
    text = warned(summary_of(tmp_path, stage, slos=SLOS), "client_limited")
    assert str(text).endswith(advice)


def test_a_good_run_has_no_warnings(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    due_s, ttft_s = np.sort(rng.uniform(0, 80, 8000)), rng.uniform(0.05, 0.1, 8000)
    records = [request(i, due_s[i], ttft_s=ttft_s[i], gaps_s=[0.01] * 9) for i in range(len(due_s))]
    assert summary_of(tmp_path, Stage(records, 80.0), slos=SLOS)["warnings"] == []
