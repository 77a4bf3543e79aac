"""Stage figures by hand: windows, rates by the time of the event, concurrency, Little's law."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ampacity.analysis.contract.capacity import Capacity
from ampacity.analysis.contract.summary import read_summary, to_json
from ampacity.analysis.slo import parse_slos
from ampacity.analysis.stage.analyse import analyse_stage, read_records
from ampacity.analysis.stage.littles_law import consistency, gap, summarise_gap
from ampacity.analysis.stage_warnings import Facts
from ampacity.analysis.warnings import find_warnings
from benchmarks.studies.littles_law import open_stage
from tests.support.contract import struct_of, summarise
from tests.support.synthetic import Stage, at_ns, make_run, request

SLOS = parse_slos(["ttft_p99=2s"])


def analyse(
    tmp_path: Path, stage: Stage, warmup: int | None = 0, slos: Any = SLOS, **options: Any
) -> dict[str, Any]:
    run = make_run(tmp_path / "run", [stage])
    return to_json(analyse_stage(run.requests, run.stages[0], slos, warmup, **options))


def steady(n: int = 100, every_s: float = 0.1, **options: Any) -> list[Any]:
    """A request every ``every_s``: first token after 100 ms, ten tokens 20 ms apart (280 ms in
    all)."""
    return [request(i, i * every_s, ttft_s=0.1, gaps_s=[0.02] * 9, **options) for i in range(n)]


def jam(first: int, last: int) -> list[Any]:
    """10 requests/s for 60 s, all answered after 100 ms but those of a jam, which wait 3 s."""
    return [request(i, i / 10, ttft_s=3.0 if first <= i < last else 0.1) for i in range(600)]


def test_a_verdict_that_rests_on_the_start_up_is_inconclusive(tmp_path: Path) -> None:
    """A cold start of 60 requests: at most 5 % may be slow, 10 % of all are and none of those after
    it."""
    slos = parse_slos(["ttft_p95=1s"])
    stage = analyse(tmp_path / "cold", Stage(jam(0, 60), 60.0), None, slos)
    (verdict,) = stage["slo_verdicts"]
    cut = stage["window"]["warmup_requests"]
    assert 60 <= cut <= 95  # those of the cold start are in flight for 3 s more
    assert (verdict["verdict"], stage["slo_met"]) == ("inconclusive", None)
    assert (
        f"met without the first {cut} requests, a start-up, and not with them: --warmup {cut}"
        in verdict["reason"]
    )
    asked = analyse(tmp_path / "asked", Stage(jam(0, 60), 60.0), cut, slos)
    assert asked["slo_met"] is True  # who says that they are a warm-up is believed


@pytest.mark.parametrize("outage_s", [3.0, 6.0])
def test_an_outage_at_the_start_is_never_cut_away(tmp_path: Path, outage_s: float) -> None:
    """Half of the requests of the first seconds are refused; whatever of it is cut, the error rate
    is not met."""
    rng = np.random.default_rng(5)
    records = [
        request(i, i / 50, ttft_s=None, status="http_error", tail_s=0.01)
        if i / 50 < outage_s and rng.random() < 0.5
        else request(i, i / 50, ttft_s=0.1, gaps_s=[2.9])
        for i in range(1000)
    ]
    stage = analyse(tmp_path, Stage(records, 20.0), None, parse_slos(["error_rate=1%"]))
    assert stage["slo_met"] is not True


def test_a_jam_is_no_warm_up(tmp_path: Path) -> None:
    """The same 60 slow requests, but 15 s after the start: none of them is cut, and the SLO is
    violated."""
    stage = analyse(tmp_path, Stage(jam(150, 210), 60.0), None, parse_slos(["ttft_p95=1s"]))
    assert stage["window"]["warmup_requests"] <= 5
    assert stage["slo_verdicts"][0]["attainment"] == pytest.approx(0.9, abs=0.002)
    assert stage["slo_met"] is not True


@pytest.mark.parametrize(
    ("stable", "limited", "said"),
    [(True, False, True), (None, False, True), (False, False, False), (True, True, False)],
)
def test_a_warning_of_a_steady_load_names_no_stage_that_has_none(
    tmp_path: Path, stable: bool | None, limited: bool, said: bool
) -> None:
    """Its tail moved, it has two modes: where it counts, that is said."""
    summary = summarise(make_run(tmp_path / "run", [Stage(steady(), 10.0)]))
    (stage,) = summary["stages"]
    stage |= {
        "stable": stable,
        "client_limited": limited,
        "client_limited_reason": "late",
        "slo_met": None,
    }
    stage["drift"] |= {"drifting": True, "change": 2.0, "p99_first_s": 0.1, "p99_last_s": 0.2}
    stage["modes"] |= json.loads("""{"two": true, "fast_p50_s": 1.0, "slow_p50_s": 2.0,
        "slow_share": 0.5, "switches": 6}""")
    codes = {w.code for w in find_warnings(Facts(read_summary(summary)))}
    assert codes & {"drift", "two_modes"} == ({"drift", "two_modes"} if said else set())


def test_rates_concurrency_and_latency_by_hand(tmp_path: Path) -> None:
    s = analyse(tmp_path, Stage(steady(), 10.0), warmup=20)
    assert s["window"] | {"settled": None} == {
        "start_s": pytest.approx(2.0),
        "end_s": pytest.approx(10.0),
        "warmup_requests": 20,
        "method": "fixed",
        "settled": None,
        "reason": None,
    }
    assert s["requests"] == s["ok"] == 80
    assert s["offered_rps"] == pytest.approx(10.0)
    # ended at 0.28, 0.38, ...: 1.98 is before, 2.08 ... 9.98 are 80
    assert s["achieved_rps"] == pytest.approx(80 / 8)
    assert s["arrived_rps"] == s["carried_rps"] == pytest.approx(10.0)
    assert s["concurrency"] == pytest.approx(2.8, rel=0.01)
    assert s["littles_law"]["lambda_w"] == pytest.approx(2.8, rel=1e-6)
    assert s["littles_law"]["ok"] is True
    assert s["output_tokens_per_s"] == pytest.approx(100, rel=0.02)
    assert s["input_tokens_per_s"] == pytest.approx(1000, rel=0.02)
    assert s["e2e_s"]["mean"] == pytest.approx(0.28, abs=1e-6)
    assert s["ttft_s"]["p50"] == pytest.approx(0.1, abs=1e-6)
    assert s["tpot_s"]["p50"] == pytest.approx(0.02, abs=1e-6)
    assert s["itl_s"]["p50"] == pytest.approx(0.02, abs=1e-6)
    assert s["itl_s"]["n"] == 80 * 9
    # what the client itself says of the stage, by which it is judged
    assert s["slip_s"] == {"p50": 1e-4, "p99": 5e-4}
    assert (s["goodput_rps"], s["slo_attainment"]) == (pytest.approx(10.0), 1.0)


def test_how_late_requests_left_is_of_the_whole_stage_also_where_the_client_made_no_audit(
    tmp_path: Path,
) -> None:
    """Ten of 100 left 50 ms late, all of them in the warm-up: by rank the p99 of the 99th."""
    late = [
        request(i, i * 0.1, ttft_s=0.1, dispatched_ns=at_ns(i * 0.1 + (0.05 if i < 10 else 0.0)))
        for i in range(100)
    ]
    s = analyse(tmp_path, Stage(late, 10.0, extra={"audit": None}), warmup=20)
    assert s["slip_s"] == {"p50": 0.0, "p99": pytest.approx(0.05)}


def bunches(gap_s: float, together: int, reads: int) -> list[float]:
    """Gaps of an answer in so many reads with ``together`` chunks each."""
    return ([0.0] * (together - 1) + [gap_s]) * (reads - 1) + [0.0] * (together - 1)


@pytest.mark.parametrize(
    ("gaps_s", "known"),
    [
        (
            bunches(0.3, 30, 4),
            ["tpot"],
        ),  # a gateway that flushes now and then: 116 of 119 gaps are none
        (bunches(0.3, 60, 2), []),  # TPOT is half a guess
        (bunches(0.0, 120, 1), []),  # the whole answer in one read
        (
            bunches(0.02, 8, 15),
            ["itl", "icl", "tpot"],
        ),  # eight tokens of speculation a step: 105 of 119
        (bunches(0.001, 30, 4), ["itl", "icl", "tpot"]),  # so fast an engine that reads have many
        (bunches(0.01, 1, 120), ["itl", "icl", "tpot"]),
    ],
)
def test_gaps_of_a_stream_that_is_held_back_are_no_finding(
    gaps_s: list[float], known: list[str], tmp_path: Path
) -> None:
    """Their p99 would be 0 s and any SLO met, whatever the engine does and the user sees."""
    records = [request(i, i * 0.05, ttft_s=0.02, gaps_s=gaps_s) for i in range(400)]
    assert len(records[0].chunk_at_us or ()) == 120
    s = analyse(
        tmp_path, Stage(records, 20.0), warmup=100, slos=parse_slos(["itl_p90=50ms", "ttft_p90=1s"])
    )
    assert [name for name in ("itl", "icl", "tpot") if s[f"{name}_s"]["n"]] == known
    verdicts = {v["slo"].partition("_")[0]: (v["verdict"], v["reason"]) for v in s["slo_verdicts"]}
    # then the first token came with the last, and is no TTFT to judge
    in_one_piece = max(gaps_s) == 0
    assert verdicts["ttft"][0] == ("inconclusive" if in_one_piece else "met")
    expected = (s["ttft_s"]["n"], s["ttft_from_schedule_s"]["n"])
    assert expected == (0, 0) if in_one_piece else (300, 300)
    if "itl" in known:
        assert verdicts["itl"][0] != "inconclusive"
    else:
        assert verdicts["itl"][0] == "inconclusive"
        assert "of the chunks came together with the one before" in verdicts["itl"][1]
        assert s["slo_met"] is None


@pytest.mark.parametrize(
    ("late_s", "slo", "limited"),
    [
        (0.0201, "", "20.1 ms late at p99, more than 20.0"),
        (0.0199, "", None),
        (0.199, "ttft_p99=2s", None),  # a tenth of the limit is 200 ms, as of an audit
        (0.201, "ttft_p99=2s", "201.0 ms late at p99, more than 200.0"),
        (0.0201, "itl_p99=2s", "20.1 ms late at p99, more than 20.0"),  # which no slip moves
    ],
)
@pytest.mark.parametrize("resumed", [False, True])
def test_of_a_stage_without_an_audit_the_requests_tell_whether_the_client_kept_up(
    late_s: float, slo: str, limited: str | None, resumed: bool, tmp_path: Path
) -> None:
    """Two of 100 left late in a stage that was killed, whether the run went on or not."""
    late = [
        request(i, i * 0.1, ttft_s=0.3, dispatched_ns=at_ns(i * 0.1 + (late_s if i > 97 else 0.0)))
        for i in range(100)
    ]
    cut = {"cut_ns": at_ns(9.9), "drained_ns": at_ns(9.9), "ended_early": "killed"}
    extra = {"audit": None, "drained_ns": None, **(cut if resumed else {})}
    s = analyse(tmp_path, Stage(late, 10.0, extra=extra), slos=parse_slos([slo] if slo else []))
    assert s["client_limited"] is (limited is not None)
    said = f"requests left {limited} ms; by its records, as it has no account of its own"
    assert s["client_limited_reason"] == (said if limited else None)


def test_requests_of_the_window_before_are_in_flight_and_nothing_else(tmp_path: Path) -> None:
    """5 requests from 5 s before the window to 4 s after its begin: 2 more in flight over 10 s."""
    run = make_run(tmp_path / "run", [Stage(steady(), 10.0)])
    before = pa.table({"started_ns": [at_ns(-5.0)] * 5, "ended_ns": [at_ns(4.0)] * 5})
    meta = run.stages[0]
    alone, beside = (
        analyse_stage(read_records(run.requests, meta.start_ns, None, b), meta, [], 0)
        for b in (None, before)
    )
    assert beside.concurrency - alone.concurrency == pytest.approx(2.0)
    assert beside.littles_law.l == beside.concurrency
    assert (beside.requests, beside.ok) == (alone.requests, alone.ok) == (100, 100)


def test_fault_31_tokens_of_requests_that_are_cut_off_count_when_they_came(tmp_path: Path) -> None:
    # ten streams of 100 tokens/s for the whole stage of 5 s, never finished
    records = [
        request(i, 0.0, ttft_s=0.01, gaps_s=[0.01] * 599, status="unfinished", output_tokens=None)
        for i in range(10)
    ]
    s = analyse(tmp_path, Stage(records, 5.0))
    assert s["output_tokens_per_s"] == pytest.approx(1000, rel=0.02)
    assert s["achieved_rps"] == 0
    assert s["errors"]["unfinished"] == 10
    assert s["concurrency"] == pytest.approx(10.0)


def test_tokens_are_counted_per_chunk_where_known_and_evenly_where_not(tmp_path: Path) -> None:
    records = [
        request(0, 0.0, ttft_s=1.0, gaps_s=[1.0, 1.0], chunk_tokens=[1, 2, 4]),
        request(1, 0.0, ttft_s=1.0, gaps_s=[1.0], output_tokens=6),
    ]
    # up to 2.5 s: 1 + 2 tokens of the first, 3 + 3 of the second
    assert analyse(tmp_path, Stage(records, 2.5))["output_tokens_per_s"] == pytest.approx(9 / 2.5)


def test_requests_scheduled_in_the_window_are_waited_for(tmp_path: Path) -> None:
    records = [*steady(50), request(99, 4.99, ttft_s=30.0, gaps_s=[0.02] * 9)]
    s = analyse(tmp_path, Stage(records, 5.0))
    assert s["requests"] == 51
    assert s["curves"]["ttft_s"]["q"][-1] < 0.99  # no curve beyond what 51 requests show
    assert s["slo_attainment"] == pytest.approx(50 / 51)


def test_fault_36_failures_by_class_and_all_failed(tmp_path: Path) -> None:
    records = [
        request(i, i * 0.1, ttft_s=None, status=("timeout", "http_error")[i % 2]) for i in range(50)
    ]
    s = analyse(tmp_path, Stage(records, 5.0))
    assert (s["ok"], s["errors"]["timeout"], s["errors"]["http_error"]) == (0, 25, 25)
    assert s["ttft_s"]["p50"] is None
    assert s["slo_met"] is False
    assert (s["goodput_rps"], s["slo_attainment"]) == (0.0, 0.0)


def test_a_stage_that_ended_early_ends_with_its_last_event(tmp_path: Path) -> None:
    cut = [
        request(
            100 + i,
            6.0 + i,
            ttft_s=None,
            status="unfinished",
            started_ns=None,
            dispatched_ns=None,
            ended_ns=at_ns(5.3),
        )
        for i in range(4)
    ]
    s = analyse(tmp_path, Stage([*steady(50), *cut], 10.0, ended_early="interrupted"))
    assert s["window"]["end_s"] == pytest.approx(5.3)
    assert s["requests"] == 50  # what was not due yet is no miss


def test_rows_lost_in_a_kill_are_counted(tmp_path: Path) -> None:
    s = analyse(tmp_path, Stage(steady(50), 5.0, scheduled_requests=60), run_complete=False)
    assert (s["requests"], s["errors"]["unfinished"], s["missing"]) == (60, 10, 10)
    assert s["slo_met"] is None
    assert s["slo_attainment"] == pytest.approx(50 / 60)


def test_an_unstable_or_client_limited_stage_is_no_met_slo(tmp_path: Path) -> None:
    n = 1500  # 150/s at a server of 100/s, ten seconds
    records = [request(i, i / 150, ttft_s=0.01 + i / 100 - i / 150) for i in range(n)]
    s = analyse(tmp_path, Stage(records, 10.0), slos=parse_slos(["ttft_p99=60s"]))
    assert s["stable"] is False
    assert s["slo_met"] is False
    assert "unstable" in s["slo_met_reason"]
    assert s["slo_verdicts"][0]["verdict"] != "violated"  # so far
    limited = Stage(steady(400, 0.02), 8.0, client_limited=True)
    s = analyse(tmp_path / "limited", limited)
    assert (s["slo_met"], s["client_limited"], s["client_limited_reason"]) == (
        None,
        True,
        "slip p99 80 ms",
    )


def test_closed_stages_are_stable_by_construction(tmp_path: Path) -> None:
    records = [
        request(4 * i + k, i * 0.28, ttft_s=0.1, gaps_s=[0.02] * 9)
        for i in range(30)
        for k in range(4)
    ]
    s = analyse(tmp_path, Stage(records, 8.4, concurrency=4))
    assert (s["kind"], s["stable"], s["concurrency_set"], s["offered_rps"]) == (
        "closed",
        True,
        4,
        None,
    )
    assert s["concurrency"] == pytest.approx(4.0)
    assert s["achieved_rps"] == pytest.approx(4 / 0.28, rel=0.05)


def test_goodput_is_null_when_an_slo_cannot_be_judged(tmp_path: Path) -> None:
    records = steady(50, output_tokens=20)  # ten chunks, twenty tokens
    s = analyse(tmp_path, Stage(records, 5.0), slos=parse_slos(["itl_p99=50ms"]))
    assert s["goodput_rps"] is None
    assert "tokens per chunk unknown" in s["goodput_rps_reason"]
    assert s["slo_met"] is None


@pytest.mark.parametrize(("lasting_s", "goodput"), [(2.0, None), (0.9, 5.0)])
def test_no_goodput_stands_beside_an_achieved_rate_of_nothing(
    tmp_path: Path, lasting_s: float, goodput: float | None
) -> None:
    """Five requests in one second, all within the SLO; after 2 s none has ended within the stage,
    after 0.9 s the first."""
    s = analyse(
        tmp_path, Stage([request(i, i * 0.2, tail_s=lasting_s - 0.1) for i in range(5)], 1.0)
    )
    answers_rps = 0.0 if goodput is None else 1 / 0.5  # counted from the half of the stage on
    assert (s["achieved_rps"], s["goodput_rps"], s["slo_attainment"]) == (answers_rps, goodput, 1.0)
    assert ("goodput_rps_reason" in s) is (goodput is None)


def test_retries_are_load_but_not_schedule(tmp_path: Path) -> None:
    records = steady(50)
    retry = request(0, 0.0, attempt=1, ttft_s=0.1, gaps_s=[0.02] * 9)
    s = analyse(tmp_path, Stage([*records, retry], 5.0))
    assert s["requests"] == 50
    assert s["concurrency"] == pytest.approx(2.8 + 0.28 / 5 - 0.18 * 0.28 / 5 / 0.28, rel=0.05)


def test_littles_law_is_off_where_the_queue_grows() -> None:
    begin = np.arange(0.0, 100.0, 0.1)
    steady_end, growing_end = begin + 1.0, begin + 1.0 + begin
    level = float(np.sum(np.minimum(growing_end, 100.0) - begin)) / 100.0
    assert consistency(10.0, 90.0, 10.0, begin, steady_end).ok is True
    found = consistency(0.0, 100.0, level, begin, growing_end)
    assert found.ok is False
    assert found.consistency < 0.8


def test_littles_law_holds_at_constant_users_and_in_a_queue_that_only_varies() -> None:
    """Users who ask again at once, equal answers of 1 s, for 10.1 to 30 s: no edge of the window is
    a drift."""
    for users in (1, 16, 256):
        for length_s in (10.1, 20.9, 21.0, 29.97):
            begin = np.repeat(np.arange(0.0, length_s, 1.0), users)
            assert consistency(0.0, length_s, float(users), begin, begin + 1.0).ok is True


def test_steady_stages_are_consistent_and_an_overloaded_one_is_not() -> None:
    """600 stages a cell: docs/methods.md."""
    rng = np.random.default_rng(4)
    steady = sum(
        open_stage(name, 0.9, 1000, rng)
        for name in ("mm1", "mg1", "mm8", "batch")
        for _ in range(20)
    )
    drifts = sum(open_stage(name, 1.2, 3000, rng) for name in ("mm1", "mm8") for _ in range(10))
    assert steady <= 4  # of 80
    assert drifts >= 16  # of 20


def test_gap_of_the_worked_example_has_both_outcomes() -> None:
    found = gap(c_max=48, limit_s=2.0, capacity_rps=12)
    assert (found.ceiling_rps, found.gap, found.representative) == (24.0, 2.0, True)
    assert gap(24, 2.0, 12).representative is True  # in flight for exactly the limit
    found = gap(49, 2.0, 12)
    assert found.representative is False
    assert "requests last 2.04 times the limit on average (a queue" in str(found.reason)


def test_a_ceiling_below_the_measured_rate_is_representative_and_said_to_be_no_bound() -> None:
    found = gap(c_max=6, limit_s=2.0, capacity_rps=12)  # half a second in flight
    assert (found.ceiling_rps, found.gap, found.representative) == (3.0, 0.25, True)
    assert (
        "requests last 0.25 of the limit on average, so the server carries more than the ceiling"
        in str(found.reason)
    )


@pytest.mark.parametrize(
    ("slo", "crossing", "why"),
    [
        ("e2e_p95=2s", "lower_bound", "C_max is a lower bound"),
        ("e2e_p95=2s", "saturated", "the closed loop is saturated"),
        ("ttft_p99=2s", "interpolated", "ttft_p99=2s is no limit on all whole requests"),
        ("tpot_p99=50ms", "pooled", "tpot_p99=50ms is no limit"),
        (
            "chat:e2e_p95=2s",
            "pooled",
            "chat:e2e_p95=2s is no limit on all whole requests",
        ),
        ("e2e_p95=2s", "none", "no capacity"),
    ],
)
def test_the_gap_is_void_where_it_rests_on_a_bound_or_another_latency(
    slo: str, crossing: str, why: str
) -> None:
    slos = parse_slos([slo])
    held = {"c_max": 60.0, "capacity_rps": 4.0, "binding_slo": slos[0].text, "crossing": crossing}
    found = summarise_gap(struct_of(Capacity, held), slos, [0.99, 1.0])
    assert (found.gap, found.representative) == (None, None)
    assert found.consistency == pytest.approx(0.995)
    assert why in found.reason


def test_the_gap_of_a_measured_crossing_on_whole_requests() -> None:
    slos = parse_slos(["ttft_p99=1s", "e2e_p50=5s"])
    held = {"c_max": 60.0, "capacity_rps": 4.0, "binding_slo": slos[1].text}
    held |= {"crossing": "interpolated"}
    found = summarise_gap(struct_of(Capacity, held), slos, [])
    assert (found.ceiling_rps, found.gap, found.representative) == (12.0, 3.0, False)
    assert (found.limit_s, found.limit_metric) == (5.0, "e2e")
