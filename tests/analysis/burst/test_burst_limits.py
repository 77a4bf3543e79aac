"""A burst: its limit on recovery, backlogs that do not drain, runs that were cut or killed."""

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from ampacity.analysis.burst.backlog import further as further_of
from ampacity.analysis.burst.recovery import judge_recovery
from ampacity.analysis.burst.timeline import fallen_s
from ampacity.analysis.contract.burst import Backlog, Burst, Harm, MaxRecovery, Phase
from ampacity.analysis.contract.part import with_nulls
from ampacity.analysis.contract.stage import Server
from ampacity.analysis.stage.littles_law import against_server
from ampacity.cli.app import app
from ampacity.experiments.burst import BurstPlan
from ampacity.reports.charts.burst import burst_findings
from ampacity.values import ConfigError
from ampacity.workloads.arrivals.processes import arrival_times
from benchmarks.studies.burst_recovery import Case, judged, play, true_recovery_s
from tests.analysis.burst.test_burst import PLAN, burst_run
from tests.support.args import args_of
from tests.support.contract import summarise
from tests.support.synthetic import Stage, make_run, request

FAILING = Harm(slo="error_rate=1%", reason="96 of 897 requests failed")


SLOW = Harm(slo="ttft_p99=2s", reason="96 of 897 requests missed ttft_p99=2s")


@pytest.mark.parametrize(
    ("ci", "limit_s", "after", "verdict", "reason"),
    [
        ((8.0, 10.0), 10.0, None, "met", "recovered within 10 s after the burst"),
        ((8.0, 10.0), 9.0, None, "inconclusive", "recovered 8 to 10 s after the burst"),
        ((8.0, 10.0), 7.9, None, "violated", "not recovered for at least 8 s after the burst"),
        # longer for certain, how long is not known
        ((8.0, None), 7.9, None, "violated", "not recovered for at least 8 s after the burst"),
        ((8.0, None), 60.0, None, "inconclusive", "why not"),
        ((None, None), 1.0, None, "inconclusive", "why not"),
        # an endpoint that goes down later on has not recovered; a slow one may have found its level
        ((2.0, 3.0), 30.0, FAILING, "violated", f"of those due later {FAILING.reason}"),
        ((2.0, 3.0), 30.0, SLOW, "inconclusive", f"of those due later {SLOW.reason}"),
        (
            (40.0, None),
            30.0,
            FAILING,
            "violated",
            "not recovered for at least 40 s after the burst",
        ),
    ],
)
def test_a_limit_is_met_or_violated_only_for_certain(
    ci: tuple[float | None, float | None],
    limit_s: float,
    after: Harm | None,
    verdict: str,
    reason: str,
) -> None:
    found = judge_recovery(limit_s, ci, "why not", after)
    assert found == MaxRecovery(limit_s=limit_s, verdict=verdict, reason=reason)
    assert judge_recovery(None, ci, "why not", after) is None


def test_the_limit_is_judged_anew_from_the_run_directory(tmp_path: Path) -> None:
    run = burst_run(tmp_path / "run")  # recovered after 9.9 s
    assert summarise(run)["burst"]["max_recovery"] is None
    for limit_s, verdict in ((30.0, "met"), (5.0, "violated")):
        run.meta["burst"] = PLAN | {"max_recovery_s": limit_s}
        summary = summarise(run)
        assert summary["burst"]["max_recovery"]["verdict"] == verdict
        assert f"to get over it is {verdict}" in summary["verdict"]
        assert burst_findings(msgspec.convert(summary["burst"], Burst))[1].note.startswith("limit ")


def test_recovery_is_neither_said_too_early_nor_too_late_and_above_0_6_not_at_all() -> None:
    # a reduced form of the study burst_recovery, whose truth is exact by coupling: under 3 %
    # wrong there
    wrong = answers = 0
    for case in (Case("mm8", 0.4, 3.5), Case("mm1", 0.5, 3.0), Case("mg1", 0.5, 3.0)):
        for seed in range(20):
            run = play(case, seed)
            found, true_s = judged(case, run), true_recovery_s(case, run)
            said_s, bin_s = found.recovery_s, found.resolution_s
            answers += said_s is not None
            if said_s is not None:
                wrong += not true_s - bin_s <= said_s <= 1.5 * true_s + 3 * bin_s
                assert said_s >= found.backlog.drained_s
                assert found.backlog.served_rps > 0
    assert answers >= 50  # 95 % of 60 there
    assert wrong <= 4
    told = [
        judged(case, play(case, seed)) for seed in range(10) for case in [Case("mm8", 0.8, 2.0)]
    ]
    assert sum(b.recovery_s is None and "of the" in str(b.recovery_reason) for b in told) >= 9


def test_a_backlog_that_does_not_drain_has_no_recovery_time(tmp_path: Path) -> None:
    # 1/0.19 = 5.26/s are served: (15 - 5.26) x 10 = 97 pile up, of which 0.26/s drain: 370 s, and
    # the run lasts 50
    b = summarise(burst_run(tmp_path / "run", service_s=0.19))["burst"]
    assert (b["recovery_s"], b["recovery_ci_s"]) == (None, [50.0, None])
    assert "the base load is 95% of the 5.2" in b["recovery_reason"]
    assert b["backlog"]["drained"] is False
    # of 97.4, 5 x 0.19 as in the base, 0.263 x 50 = 13.2 are gone after 50 s: 83.3 / 0.263 = 316 s
    # more
    assert b["backlog"]["fall_rps"] == pytest.approx(0.263, abs=0.03)
    assert b["backlog"]["at_end"] == pytest.approx(83.3, abs=1.5)
    assert b["backlog"]["further_s"] == pytest.approx(316, rel=0.06)
    note = burst_findings(msgspec.convert(b, Burst))[2].note
    assert (
        "waited for a first token when the burst ended, 0.95 at the base load; 50.0 s later 85 "
        "still did; " in note
    )
    assert "s more are needed (95 % interval " in note


def test_a_backlog_that_grows_at_the_base_load_does_not_drain(tmp_path: Path) -> None:
    # 4/s are served: 30 wait at 30 s, 110 more at 40 s, and 1/s more come than leave: 190 at 90 s
    b = summarise(burst_run(tmp_path / "run", service_s=0.25))["burst"]
    assert b["backlog"]["fall_rps"] == pytest.approx(-1, abs=0.05)
    assert (b["backlog"]["drained"], b["backlog"]["drains"], b["backlog"]["further_s"]) == (
        False,
        False,
        None,
    )
    finding = burst_findings(msgspec.convert(b, Burst))[2]
    assert finding.value in ("140 requests", "141 requests")
    said = finding.note
    assert "190 still did; at the base load it does not drain; 4.00 req/s were served" in said


def test_a_base_load_that_is_not_carried_is_told_in_the_verdict(tmp_path: Path) -> None:
    # 4/s of 5 are served: request i waits i x 0.05 s, 1.75 s at most within 2 s less its 0.25: 36
    # of 150
    summary = summarise(burst_run(tmp_path / "run", service_s=0.25))
    verdict = summary["verdict"]
    assert "the base load alone was not carried: 114 of 150 requests missed ttft_p99=2s" in verdict


def test_a_server_that_was_stuck_and_then_caught_up_has_drained(tmp_path: Path) -> None:
    # stuck from 35 to 50 s: 25 wait then, 100 when the burst ends, 150 at 50 s, and 5/s fewer from
    # then on: 80 s
    found = summarise(burst_run(tmp_path / "run", stuck=(35.0, 50.0)))["burst"]["backlog"]
    assert (found["drained"], found["drains"]) == (True, None)
    assert found["drained_s"] == pytest.approx(40, abs=0.5)
    assert found["fall_rps"] == pytest.approx(2.5, abs=0.1)
    assert found["served_rps"] == pytest.approx(10 * 30 / 45, rel=0.02)
    # seen to 70 s it falls by 5/s in the last five of eight parts: 50 / 5 = 10 s more
    short = summarise(burst_run(tmp_path / "short", stuck=(35.0, 50.0), recovery_s=30.0))["burst"]
    assert (short["backlog"]["drained"], short["backlog"]["drains"]) == (False, True)
    assert short["backlog"]["at_end"] == pytest.approx(50, abs=1.5)
    assert short["backlog"]["further_s"] == pytest.approx(10, rel=0.1)
    # seen to 48 s only, nothing is served: it grows by 5/s
    stuck = summarise(burst_run(tmp_path / "stuck", stuck=(35.0, 50.0), recovery_s=8.0))["burst"]
    assert stuck["backlog"]["drains"] is False


@pytest.mark.parametrize(
    ("leave", "came", "fell", "drains", "further"),
    [
        # 86 / (8 - 6.5) = 57.3 s, in which chance is 1.96 sqrt(6.5 / 57.3) = 0.66/s: 86 / 2.16 and
        # 86 / 0.84
        ([8.0] * 8, 195, True, True, (57.3, 39.8, 102.4)),
        # s = 0.5345 x 2: t(7) s / sqrt(8) = 0.894/s, and 1.96 sqrt((6.5 + 1.143 x 3.75) / 57.3) =
        # 0.850: 1.233/s
        ([7.0, 9.0] * 4, 195, True, True, (57.3, 31.5, 322.0)),
        ([6.6] * 8, 195, True, True, (860.0, 318.0, None)),  # 1.96 sqrt(6.5 / 860) = 0.17 > 0.1
        ([6.5] * 8, 195, False, False, None),
        ([5.0] * 8, 195, False, False, None),
        ([6.0] * 8, 171, True, None, None),  # it fell because fewer came, by chance
        ([7.0] * 8, 219, False, None, None),  # and the other way round
        ([4.0, 10.0] * 4, 195, True, None, None),
        ([8.0] * 8, 300, False, False, None),  # 105 more than planned, 3 sqrt(195) = 42: 10/s come
    ],
)
def test_when_the_rest_drains(
    leave: list[float],
    came: int,
    fell: bool,
    drains: bool | None,
    further: tuple[float, float, float] | None,
) -> None:
    span: dict[str, Any] = {"start_s": 40.0, "end_s": 70.0}
    after = with_nulls(Phase, requests=came, offered_rps=came / 30, **span)
    left = with_nulls(Backlog, at_end=86.0)
    found = further_of(left, np.array(leave), after, 6.5, fell=fell)
    assert found.drains is drains
    if further:
        told = zip([found.further_s, *(found.further_s_ci or ())], further, strict=True)
        assert all(a is b or a == pytest.approx(b, rel=0.01) for a, b in told)
    else:
        assert found.further_s is None


def test_what_was_refused_is_lost_and_misses_its_slo(tmp_path: Path) -> None:
    b = summarise(burst_run(tmp_path / "run", fail_above_s=1.05))["burst"]
    # ten may wait, which takes 2 s to come to; then a third of 15/s is refused for 8 s
    assert b["lost"] == pytest.approx(5 * 8, abs=5)
    assert b["slo_misses"] == b["lost"]
    assert b["phases"][1]["errors"] == {"http_error": b["lost"]}
    assert b["phases"][1]["ttft_s"]["max"] is None  # a refusal is infinitely slow
    # refused at once, 5/s: from the middle of the burst, 35 s, to its end
    assert b["backlog"]["unanswered"] == pytest.approx(25, abs=2)
    assert "requests ended unanswered" in burst_findings(msgspec.convert(b, Burst))[2].note
    assert b["peak_ttft_s"] == pytest.approx(1.05, abs=0.1)  # of those that were answered


@pytest.mark.parametrize(
    ("shape", "mean"),
    [("step", 3.0), ("ramp", (5 / 3 + 7 / 3 + 3 + 7 / 3 + 5 / 3) / 5), ("2/4", 3.0)],
)
def test_the_plan_is_one_stage_with_the_right_rates(shape: str, mean: float) -> None:
    plan = BurstPlan(base_rps=50, factor=3, base_s=100, burst_s=100, recovery_s=100, shape=shape)
    assert plan.mean_rps == pytest.approx(50 * (1 + mean + 1) / 3)
    times = arrival_times(plan.arrivals, plan.mean_rps, plan.duration_s, np.random.default_rng(1))
    counts = np.histogram(times, [0, 100, 200, 300])[0]
    expected = np.array([5000, 5000 * mean, 5000])
    assert np.all(np.abs(counts - expected) < 4 * np.sqrt(expected))
    with pytest.raises(ConfigError, match="factors above 0"):
        _ = BurstPlan(base_rps=5, shape="2/-1").factors


def test_a_run_that_was_killed_in_the_base_phase_is_still_reported(tmp_path: Path) -> None:
    stage = Stage([request(i, i * 0.2) for i in range(20)], 90.0, offered_rps=10.0)
    found: dict[str, Any] = summarise(
        make_run(tmp_path / "run", [stage], ["ttft_p99=2s"], killed=True, burst=PLAN)
    )["burst"]
    assert [p["requests"] for p in found["phases"]] == [20, 0, 0]
    assert found["known_until_s"] == pytest.approx(3.8, abs=0.002)  # 20 requests, 0.2 s apart


@pytest.mark.parametrize(
    ("kill_s", "known_s", "said"),
    [
        # 10/s are answered from 30 s on: by 44 s 140 of the burst's 150, by 47 s all of them and 20
        # more, of the 4 s after it
        (
            44.05,
            30 + 139 / 15,
            "when it recovered is not known: what is known of the run ends before the burst does",
        ),
        (
            47.05,
            40 + 19 / 5,
            "not for 3.8 s, and 0 or fewer waiting for a first token (the base's mean of 0.5",
        ),
        (
            20.05,
            19.8,
            "nothing is known of the burst: what is known of the run ends 19.8 s after its start",
        ),
    ],
)
def test_of_a_killed_run_nothing_is_known_from_the_first_lost_record_on(
    tmp_path: Path, kill_s: float, known_s: float, said: str
) -> None:
    summary = summarise(burst_run(tmp_path / "run", kill_s=kill_s))
    b = summary["burst"]
    assert b["known_until_s"] == pytest.approx(known_s, abs=0.25)
    assert said in summary["verdict"]
    assert b["recovery_s"] is None
    assert not b["backlog"]["drained"]
    assert b["headroom"]["enough"] is (False if known_s > 40 else None)
    assert b["phases"][1]["offered_rps"] == (pytest.approx(15, rel=0.01) if known_s > 30 else 0)


def test_a_record_that_lacks_ends_what_is_known_of_a_killed_run(tmp_path: Path) -> None:
    records = [request(i, i * 0.2) for i in range(300) if i != 200]
    stage = Stage(records, 90.0, offered_rps=10.0)
    run = make_run(tmp_path / "run", [stage], ["ttft_p99=2s"], killed=True, burst=PLAN)
    assert summarise(run)["burst"]["known_until_s"] == pytest.approx(39.8, abs=0.002)


@pytest.mark.parametrize(
    ("client", "running", "waiting", "ok", "why"),
    [
        (10.0, 8.0, 1.5, True, None),
        (1.0, 2.5, 0.0, True, None),  # two more or less say nothing
        (10.0, 8.0, 7.0, False, "another client is using it"),
        (20.0, 8.0, None, False, "before it counts them"),
    ],
)
def test_littles_law_against_the_servers_own_count(
    client: float, running: float, waiting: float | None, ok: bool, why: str | None
) -> None:
    gauges = with_nulls(Server, samples=30, running=running, waiting=waiting)
    found = against_server(client, gauges)
    assert found.ok is ok
    assert found.reason is None if why is None else why in str(found.reason)
    assert against_server(client, None) is None
    assert against_server(client, with_nulls(Server, samples=3)) is None


def test_a_burst_is_no_drift_and_no_second_mode(tmp_path: Path) -> None:
    codes = {w["code"] for w in summarise(burst_run(tmp_path / "run"))["warnings"]}
    assert not codes & {"drift", "two_modes", "never_settled"}


def test_rates_of_a_phase_that_was_cut_are_over_what_there_was_of_it(tmp_path: Path) -> None:
    phases = summarise(burst_run(tmp_path / "run", cut_s=60))["burst"]["phases"]
    assert [p["end_s"] for p in phases] == pytest.approx([30, 40, 60], abs=0.2)  # the last event
    assert phases[2]["offered_rps"] == pytest.approx(5, rel=0.02)  # 100 requests in 20 s, not in 50


@pytest.mark.parametrize(
    ("cut_s", "why"),
    [(46.0, "were not seen before the load ended"), (37.0, "ends before the burst does")],
)
def test_a_run_that_was_cut_before_the_queue_was_gone_has_no_recovery_time(
    tmp_path: Path, cut_s: float, why: str
) -> None:
    # the queue lasts until 50 s
    found = summarise(burst_run(tmp_path / "run", cut_s=cut_s))["burst"]
    assert found["recovery_s"] is None
    assert why in found["recovery_reason"]


@pytest.mark.parametrize("after_s", [0.0, 7.1e-15, 1e-6, 4e-4])
@pytest.mark.parametrize("at_s", [0.0, 30.0, 40.0])
def test_a_run_that_was_cut_in_the_first_instants_of_a_phase_names_no_tiny_durations(
    tmp_path: Path, at_s: float, after_s: float
) -> None:
    """40.0000000000000071 - 40 is no 0.00000000000000711 s."""
    summary = summarise(burst_run(tmp_path / "run", cut_s=at_s + after_s + 1e-12))
    findings = (
        " ".join(
            f"{f.value} {f.note}" for f in burst_findings(msgspec.convert(summary["burst"], Burst))
        )
        if at_s
        else ""
    )
    reasons = [summary["burst"]["recovery_reason"], summary["burst"]["backlog"]["reason"]]
    said = " ".join(filter(None, [summary["verdict"], findings, *reasons]))
    assert not re.search(r"0\.000\d|\de-\d", said), said


def test_a_departure_at_the_very_end_of_the_burst_is_zero_seconds_after_it() -> None:
    at, left = np.array([1.0, 2.0]), np.array([40.0000000000000071, 60.0])
    assert fallen_s(at, left, 1.0, 40.0, 90.0) == 0.0


def test_a_base_that_is_too_short_is_said_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 10 s at 2/s the last 8 s count: 16 requests, and 30 are needed, which take 15 s; half as
    many again in all 80 %."""
    short = BurstPlan(base_rps=2, base_s=10)
    said = short.too_short()
    assert said.startswith(
        "--base-duration 10s is too short: about 16 requests are due once it has settled; 30 "
        "requests"
    )
    assert said.endswith("--base-duration 29s")
    assert BurstPlan(base_rps=2, base_s=29).too_short() is None
    slow = BurstPlan(base_rps=5, base_s=60).too_short(answer_s=6.0)  # 48 s are 8 answers
    assert slow is not None
    assert "8.0 answers long" in slow
    assert BurstPlan(base_rps=5, base_s=60).too_short(answer_s=4.8) is None
    args = args_of(
        "burst http://127.0.0.1:1/v1 --base-rps 2 --base-duration 10s --max-recovery 30s"
    )
    refused = CliRunner().invoke(app, args)
    expected = "--max-recovery 30s could not be judged: --base-duration 10s is too short"
    assert expected in str(refused.exception)

    told: list[str] = []

    class Rig:
        typical_e2e_s = 0.1

        def tell(self, text: str) -> None:
            told.append(text)

        def note_down(self, *_: Any) -> None:
            pass

        expect = note_down

        async def open_stage(self, *_: Any) -> None:
            pass

    asyncio.run(short.run(Rig()))
    asyncio.run(BurstPlan(base_rps=5).run(Rig()))
    assert told == [
        f"the recovery time will not be known: {said}",
        "the run takes 160s: 10s base, 30s burst, 2m recovery",
        "the run takes 210s: 60s base, 30s burst, 2m recovery",
    ]


@pytest.mark.parametrize(
    ("cut", "limited", "taken"),
    [
        ((), (0, 2), 1),
        ((0, 2), (), 1),
        ((0, 2), (1,), 1),  # a whole one, although the client was late
        ((0,), (1,), 2),
        ((2,), (1,), 0),
    ],
)
def test_of_repeated_bursts_the_undisturbed_one_counts(
    cut: tuple[int, ...], limited: tuple[int, ...], taken: int, tmp_path: Path
) -> None:
    """A stage that was killed has no audit, and is not whole."""
    stages = [
        Stage([request(i, i * 0.2, ttft_s=ttft_s) for i in range(450)], 90.0, offered_rps=5.0)
        for ttft_s in (0.3, 0.1, 0.5)
    ]
    run = make_run(tmp_path / "run", stages, ["ttft_p99=2s"], burst=PLAN, warmup_requests=0)
    for index in limited:
        run.meta["stages"][index]["audit"]["client_limited"] = True
    for index in cut:
        run.meta["stages"][index] |= {"audit": None, "ended_early": "killed"}
    assert summarise(run)["burst"]["peak_ttft_s"] == pytest.approx((0.3, 0.1, 0.5)[taken])


@pytest.mark.parametrize(("verdict", "code"), [("met", 0), ("violated", 1), ("inconclusive", 3)])
def test_the_exit_status_is_the_verdict(
    verdict: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drive(raw: dict[str, Any], **how: Any) -> None:
        assert how["drive"].__self__.max_recovery_s == 30.0
        burst = SimpleNamespace(max_recovery=SimpleNamespace(verdict=verdict))
        raise typer.Exit(how["judge"](tmp_path, SimpleNamespace(burst=burst)))

    monkeypatch.setattr("ampacity.cli.experiment.run_experiment", drive)
    args = ["burst", "http://127.0.0.1:1/v1", "--base-rps", "5"]
    assert CliRunner().invoke(app, [*args, "--max-recovery", "30s"]).exit_code == code
    found = CliRunner().invoke(app, [*args, "--max-recovery", "3m"])
    assert "too short to tell" in str(found.exception)
