"""An endpoint that is down for a while: said as such, charted, and the load outside of it judged
apart.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from ampacity.analysis.contract.summary import read_summary
from ampacity.cli.app import app
from ampacity.reports.charts.outage import outage_chart
from ampacity.reports.pages.findings import findings
from ampacity.reports.pages.run_report import render_report
from tests.support.contract import summarise
from tests.support.repeats import often
from tests.support.synthetic import Stage, at_ns, make_run, request, warned

RATE_RPS = 15.0


def stage(
    down: tuple[tuple[float, float], ...] = (),
    *,
    duration_s: float = 40.0,
    rate_rps: float = RATE_RPS,
    answer_s: float = 0.5,
    refused: float = 0.0,
    status: str = "connect_error",
    code: int | None = None,
    start_s: float = 0.0,
    seed: int = 0,
) -> Stage:
    """Poisson arrivals; answers of gamma lengths. Who is answered when the endpoint dies is cut
    off, who comes then is refused at once, and so is a share ``refused`` at any time."""
    rng = np.random.default_rng(seed)
    times = np.sort(rng.uniform(0, duration_s, rng.poisson(rate_rps * duration_s)))
    records = []
    for i, t in enumerate(times.tolist()):
        lasts = float(rng.gamma(8, answer_s / 8))
        hit = next((d for d in down if t < d[1] and t + lasts > d[0]), None)
        at = start_s + t
        if hit is not None and t < hit[0]:
            began = t + 0.2 * lasts < hit[0]
            records.append(
                request(
                    i,
                    at,
                    ttft_s=0.2 * lasts if began else None,
                    status="truncated" if began else "reset",
                    ended_ns=at_ns(start_s + hit[0]),
                )
            )
        elif hit is not None or rng.random() < refused:
            how = {"status": status, "http_status": code}
            records.append(request(i, at, ttft_s=None, tail_s=0.001, **how))
        else:
            records.append(request(i, at, ttft_s=0.2 * lasts, gaps_s=[0.8 * lasts]))
    return Stage(records, duration_s, start_s=start_s, offered_rps=rate_rps)


def frozen(
    silent: tuple[tuple[float, float], ...] = ((14.2, 18.3),),
    *,
    rate_rps: float = RATE_RPS,
    tokens: int = 30,
    status: str | None = None,
    seed: int = 0,
) -> Stage:
    """Poisson arrivals over 40 s, a token each 20 ms; in ``silent`` nobody gets one, and all go on
    after it: who streams then is late by its rest, who comes then begins at its end. With a status
    those who waited end with it."""
    rng = np.random.default_rng(seed)
    records = []
    for i, t in enumerate(np.sort(rng.uniform(0, 40, rng.poisson(rate_rps * 40))).tolist()):
        at, waited = t, False
        times = []
        for gap in (0.1, *[0.02] * (tokens - 1)):
            at += gap
            for start, end in silent:
                if at - gap <= end and at > start:
                    waited, at = True, max(end, at - gap) + gap
            times.append(at - t)
        if waited and status is not None:
            times = [a for a in times if all(t + a < start for start, _ in silent)]
        columns = {} if not (waited and status) else {"status": status, "ended_ns": at_ns(40.0)}
        records.append(
            request(i, t, ttft_s=times[0] if times else None, gaps_s=np.diff(times), **columns)
        )
    return Stage(records, 40.0, offered_rps=rate_rps)


def judged(
    tmp_path: Path, *stages: Stage, slos: Any = ("error_rate=5%",), **meta: Any
) -> dict[str, Any]:
    return summarise(make_run(tmp_path / "run", stages, slos, **meta))


@pytest.mark.parametrize(("status", "tokens"), [("truncated", 2), ("timeout", 9)])
def test_slow_failures_of_a_third_of_the_requests_are_no_outage(
    status: str, tokens: int, tmp_path: Path
) -> None:
    """When no more are sent only those that fail are left; the others were answered in between."""
    records = []
    for i in range(360):
        at, ttft_s, gaps = i / 180, 0.01, [0.08]
        fails: dict[str, Any] = {}
        if i % 3 == 0:  # all in step, as the client looks at its limits
            step_s = math.ceil(at * 10) / 10
            ttft_s, gaps = step_s + 0.05 - at, [0.1] * (tokens - 1)
            fails = {"status": status, "ended_ns": at_ns(step_s + 1)}
        records.append(request(i, at, ttft_s=ttft_s, gaps_s=gaps, **fails))
    (held,) = judged(tmp_path, Stage(records, 2.0, offered_rps=180.0))["stages"]
    assert held["outage"] is None


def test_a_server_that_was_killed_for_four_seconds_was_down(tmp_path: Path) -> None:
    summary = judged(tmp_path, stage(((14.2, 18.3),)))
    (held,) = summary["stages"]
    outage = held["outage"]
    records = stage(((14.2, 18.3),)).records
    failed = sum(r.status != "ok" for r in records)
    assert (outage["failed"], outage["requests"]) == (failed, len(records))
    (period,) = outage["periods"]
    assert period["start_s"] == pytest.approx(14.2, abs=1e-3)  # those in flight are cut off then
    assert 18.3 <= period["end_s"] <= 18.3 + 5 / RATE_RPS  # the first one after it that is answered
    assert held["slo_met"] is False
    assert held["slo_verdicts"][0]["verdict"] == "violated"
    said = f"from 14.2 s to {period['end_s']:.1f} s: {failed} of {len(records)} requests failed"
    assert summary["verdict"].startswith(f"Endpoint down {said}, SLO violated; outside of it met.")
    outside = outage["outside"]
    assert outside["slo_met"] is True
    assert outside["requests"] == outside["ok"] == len(records) - failed
    assert [w["code"] for w in summary["warnings"]][:1] == ["outage"]
    assert summary["capacity"]["capacity_rps"] is None
    assert findings(read_summary(summary))[0].label == "Outage"
    chart = outage_chart(read_summary(summary))
    assert said in chart.title
    assert said in render_report(read_summary(summary), {})


@pytest.mark.parametrize(
    ("down", "spans"),
    [
        (((0.0, 3.0),), [(0.0, 3.0)]),  # it comes up late
        (((30.0, 99.0),), [(30.0, None)]),  # it never comes back
        (((10.0, 12.0), (20.0, 24.0)), [(10.0, 12.0), (20.0, 24.0)]),
    ],
)
def test_outages_at_the_ends_and_two_of_them(tmp_path: Path, down: Any, spans: Any) -> None:
    held = judged(tmp_path, stage(down))["stages"][0]["outage"]
    for period, (start_s, end_s) in zip(held["periods"], spans, strict=True):
        assert period["start_s"] == pytest.approx(start_s, abs=0.5)
        assert period["end_s"] == (None if end_s is None else pytest.approx(end_s, abs=0.5))


@pytest.mark.parametrize(
    ("status", "code", "outages"),
    [
        ("http_error", 503, 1),
        ("timeout", None, 1),
        ("protocol_error", 200, 1),  # a page for the time of maintenance
        ("stream_error", 200, 1),  # an error event of a gateway, under 200
        ("http_error", 429, 0),  # a quota that is used up: the endpoint is alive
        ("http_error", 401, 0),  # a key that ran out for a while
    ],
)
def test_whatever_a_silent_endpoint_answers_with(
    tmp_path: Path, status: str, code: int | None, outages: int
) -> None:
    """A gateway says 503 while the server behind it restarts, or says nothing until the client
    gives up."""
    held = judged(tmp_path, stage(((14.0, 18.0),), status=status, code=code))["stages"][0]
    assert len((held["outage"] or {"periods": []})["periods"]) == outages
    assert held["slo_met"] is (False if outages else None)


@pytest.mark.parametrize("share", [0.02, 0.3, 0.7])
def test_requests_that_fail_at_random_are_no_outage(tmp_path: Path, share: float) -> None:
    for seed in range(often(4, 10)):
        summary = judged(tmp_path / str(seed), stage(refused=share, status="http_error", seed=seed))
        assert summary["stages"][0]["outage"] is None


def test_a_server_that_refuses_in_its_peaks_or_is_too_slow_is_not_down(tmp_path: Path) -> None:
    """M/D/2 with room for four refuses who comes then; the same without room answers after the
    client's time limit."""
    for seed in range(often(4, 10)):
        rng = np.random.default_rng(seed)
        for room, limit_s in ((4, np.inf), (10**6, 2.0)):
            times = np.sort(rng.uniform(0, 40, 1200)).tolist()
            free, waiting, records = [0.0, 0.0], [], []
            for i, t in enumerate(times):
                waiting = [begin for begin in waiting if begin > t]
                begin = max(t, min(free))
                if len(waiting) >= room:
                    records.append(request(i, t, ttft_s=None, status="http_error", tail_s=0.001))
                    continue
                free[free.index(min(free))] = begin + 0.1
                waiting.append(begin)
                late = begin + 0.1 - t > limit_s
                records.append(
                    request(i, t, ttft_s=None, status="timeout", tail_s=limit_s)
                    if late
                    else request(i, t, ttft_s=begin + 0.1 - t)
                )
            summary = judged(tmp_path / f"{seed}-{room}", Stage(records, 40.0, offered_rps=30.0))
            assert summary["stages"][0]["errors"]["http_error" if room == 4 else "timeout"] > 50
            assert summary["stages"][0]["outage"] is None


def test_a_short_outage_that_an_slo_allows_is_said_and_the_stage_counts(tmp_path: Path) -> None:
    summary = judged(tmp_path, stage(((14.0, 14.5),), answer_s=0.1, duration_s=120.0))
    (held,) = summary["stages"]
    assert held["outage"]["failed"] >= 5
    assert (held["slo_met"], held["slo_met_reason"]) == (True, None)
    assert "SLO met all the same" in summary["verdict"]
    assert summary["capacity"]["verified_rps"] is not None


def test_an_outage_at_a_low_load_is_not_its_limit_and_one_at_the_highest_is(tmp_path: Path) -> None:
    def sweep(down: int) -> dict[str, Any]:
        stages = [
            stage(((14.0, 18.0),) if i == down else (), rate_rps=rps, start_s=60.0 * i, seed=i)
            for i, rps in enumerate((5.0, 10.0, 15.0))
        ]
        return judged(tmp_path / str(down), *stages)

    low, high = sweep(0)["capacity"], sweep(2)["capacity"]
    assert (low["crossing"], low["capacity_rps"]) == ("lower_bound", pytest.approx(15.0))
    assert low["non_monotone"] is False
    assert (high["verified_rps"], high["violated_rps"]) == (
        pytest.approx(10.0),
        pytest.approx(15.0),
    )


def test_without_an_slo_the_outage_is_said_all_the_same(tmp_path: Path) -> None:
    summary = judged(tmp_path, stage(((14.0, 18.0),)), slos=[])
    assert summary["verdict"].startswith("Endpoint down from 14 s to 18")
    assert "requests/s and" in summary["verdict"]  # what was carried follows
    assert summary["stages"][0]["slo_met"] is None


@pytest.mark.parametrize(("down", "code"), [(((14.0, 18.0),), 1), ((), 0)])
def test_a_run_with_an_outage_exits_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, down: Any, code: int
) -> None:
    run = make_run(tmp_path / "run", [stage(down)], ["error_rate=5%"])
    monkeypatch.setattr("ampacity.experiments.stages.conduct.conduct", lambda *_, **__: None)
    monkeypatch.setattr("ampacity.experiments.stages.conduct.run_event_loop", lambda _: run.path)
    args = ["run", "http://127.0.0.1:1/v1", "--rates", "15", "--out", str(tmp_path / "other")]
    assert CliRunner().invoke(app, args).exit_code == code


def test_users_who_are_refused_again_and_again_are_one_outage(tmp_path: Path) -> None:
    """Eight users of a closed loop, each back 5 ms after it was refused: some 3,100 failures, one
    outage, though answers that are under way come until 8.2 s."""
    records = []
    for user in range(8):
        t = user * 0.01
        while t < 20:
            down = 8.0 <= t < 10.0
            records.append(
                request(len(records), t, ttft_s=None, status="connect_error", tail_s=0.005)
                if down
                else request(len(records), t, ttft_s=0.1, gaps_s=[0.1])
            )
            t += 0.005 if down else 0.2
    records.sort(key=lambda r: r.scheduled_ns)
    for i, r in enumerate(records):
        r.request_id = i
    summary = judged(tmp_path, Stage(records, 20.0, concurrency=8))
    (held,) = summary["stages"]
    (period,) = held["outage"]["periods"]
    assert period["failed"] == sum(r.status != "ok" for r in records)
    assert (period["start_s"], period["end_s"]) == (
        pytest.approx(8.0, abs=0.2),
        pytest.approx(10.0, abs=0.2),
    )
    assert held["slo_met"] is False
    assert held["outage"]["outside"]["slo_met"] is True


def test_an_outage_in_a_burst_is_said_before_the_burst(tmp_path: Path) -> None:
    """It dies under the burst, and is back 3 s later: the limit on the recovery is not the only
    thing that is said."""
    plan = json.loads("""{"base_rps": 15.0, "factor": 1.0, "base_s": 15.0, "burst_s": 10.0,
        "recovery_s": 15.0, "shape": "step", "max_recovery_s": 5.0}""")
    summary = judged(
        tmp_path, stage(((20.0, 23.0),)), slos=["ttft_p99=2s"], burst=plan, warmup_requests=0
    )
    assert summary["verdict"].startswith("Endpoint down from 20 s to 23")
    assert "A burst from" in summary["verdict"]
    assert summary["burst"]["lost"] > 30


def test_two_that_are_down_by_turns_are_no_outage_of_the_endpoint(tmp_path: Path) -> None:
    """One of two replicas is down for 10 s: half of the requests are answered; that is an error
    rate, not an outage."""
    whole = stage()
    rng = np.random.default_rng(3)
    for r in whole.records:
        due_s = (r.scheduled_ns - whole.records[0].scheduled_ns) / 1e9
        if 10 <= due_s < 20 and rng.random() < 0.5:
            r.status, r.first_token_ns, r.last_token_ns, r.chunk_at_us, r.output_tokens = (
                "connect_error",
                None,
                None,
                [],
                None,
            )
            r.ended_ns = r.scheduled_ns + 1_000_000
    held = judged(tmp_path, whole)["stages"][0]
    assert held["errors"]["connect_error"] > 50
    assert held["outage"] is None


SLO = ("ttft_p95=1s", "itl_p99=100ms")


def test_a_server_that_hangs_from_the_burst_on_is_down_and_its_base_no_queue(
    tmp_path: Path,
) -> None:
    """15/s are answered for 15 s; nothing from 20 s on, in the middle of the burst."""
    plan = json.loads("""{"base_rps": 15.0, "factor": 1.0, "base_s": 15.0, "burst_s": 20.0,
        "recovery_s": 5.0, "shape": "step"}""")
    hangs = frozen(((20.0, 99.0),), tokens=1, status="unfinished")
    summary = judged(tmp_path, hangs, slos=["ttft_p99=2s"], burst=plan, warmup_requests=0)
    assert summary["verdict"].startswith("Endpoint silent, no token from 20 s on")
    assert "the endpoint broke down" in summary["burst"]["recovery_reason"]
    assert "queues of its own" not in summary["verdict"]


@pytest.mark.parametrize("end_s", [99.0, 35.0], ids=["for good", "for 25 of 40 s"])
def test_a_server_that_hangs_for_most_of_a_stage_makes_no_load_too_high(
    end_s: float, tmp_path: Path
) -> None:
    """Every queue grows while it hangs: before it all are answered in 0.1 s."""
    hangs = frozen(((10.0, end_s),), tokens=8, status="unfinished" if end_s > 40 else None)
    summary = judged(tmp_path, hangs, slos=["ttft_p50=1s"])
    assert "silent, no token from 10" in summary["verdict"]
    assert "SLO violated; outside of it met." in summary["verdict"]
    assert warned(summary, "unstable_lowest") is None


def test_a_server_that_froze_for_four_seconds_was_silent(tmp_path: Path) -> None:
    """Nobody fails; who was in flight at 14.2 s or came until 18.3 s waited."""
    summary = judged(tmp_path, frozen(tokens=8), slos=SLO)
    records = frozen(tokens=8).records
    first, last = at_ns(14.2), at_ns(18.3)
    assert first is not None
    assert last is not None
    waited = sum(r.scheduled_ns < last and (r.last_token_ns or 0) > first + 10**7 for r in records)
    (held,) = summary["stages"]
    (period,) = held["outage"]["periods"]
    assert period["start_s"] == pytest.approx(14.2, abs=0.02)  # the last token before it
    assert period["end_s"] == pytest.approx(18.3, abs=0.03)  # the first one after it
    assert (period["failed"], period["waited"]) == (0, waited)
    said = f"silent, no token from 14.2 s to 18.3 s: {waited} of {len(records)} requests waited"
    assert summary["verdict"].startswith(f"Endpoint {said}, SLO violated; outside of it met.")
    outside = held["outage"]["outside"]
    assert outside["slo_met"] is True
    assert 0.9 * (len(records) - waited) < outside["requests"] <= len(records) - waited
    assert [w["code"] for w in summary["warnings"]][:1] == ["outage"]
    assert summary["capacity"]["capacity_rps"] is None
    chart = outage_chart(read_summary(summary))
    assert said in chart.title
    expected = f" s, {waited} of {len(records)} requests waited"
    assert expected in findings(read_summary(summary))[0].value


@pytest.mark.parametrize(
    ("silent", "status", "spans"),
    [
        (((5.0, 7.5), (20.0, 28.0)), None, [(5.0, 7.5), (20.0, 28.0)]),
        (((30.0, 99.0),), "unfinished", [(30.0, None)]),  # it hangs; cut off at the end
        (((30.0, 99.0),), "timeout", [(30.0, None)]),  # the same, given up by the client
        (((10.0, 11.5),), None, []),  # too short to be told from a long prompt's prefill
        (tuple((float(t), t + 2.5) for t in range(2, 38, 4)), None, []),  # it answers in turns
    ],
)
def test_silences_of_several_kinds(tmp_path: Path, silent: Any, status: Any, spans: Any) -> None:
    outage = judged(tmp_path, frozen(silent, status=status), slos=SLO)["stages"][0]["outage"]
    periods = [] if outage is None else outage["periods"]
    assert len(periods) == len(spans)
    for period, (start_s, end_s) in zip(periods, spans, strict=True):
        assert period["start_s"] == pytest.approx(start_s, abs=0.1)
        assert period["end_s"] == (None if end_s is None else pytest.approx(end_s, abs=0.1))


def test_a_server_that_hangs_with_nobody_in_the_middle_of_an_answer_is_silent(
    tmp_path: Path,
) -> None:
    """None of those who wait has had a token, and none ever gets one."""
    stage = frozen(((30.0, 99.0),), tokens=1, status="unfinished")
    outage = judged(tmp_path, stage, slos=SLO)["stages"][0]["outage"]
    (period,) = outage["periods"]
    assert period["start_s"] == pytest.approx(30.0, abs=0.3)
    assert period["end_s"] is None


def test_silences_in_which_nobody_or_one_alone_waits_are_none(tmp_path: Path) -> None:
    """One user who thinks for 3 s, and whose prompts take 3 s; eight in step whose prompts do;
    answers in two halves that are 8 s apart."""
    alone = [request(i, 6.5 * i, ttft_s=3.0, gaps_s=[0.02] * 20) for i in range(20)]
    step = [request(i, 10.0 * (i // 8), ttft_s=3.0, gaps_s=[0.02] * 300) for i in range(64)]
    halves = [request(i, 0.2 * i, gaps_s=[0.1 if i < 3 else 7.9]) for i in range(25)]
    for name, records, users in (("alone", alone, 1), ("step", step, 8), ("halves", halves, 25)):
        held = judged(tmp_path / name, Stage(records, 130.0, concurrency=users))["stages"][0]
        assert held["outage"] is None


def test_a_server_that_was_down_comes_before_a_client_that_was_late(tmp_path: Path) -> None:
    made = stage(((10.0, 20.0),))
    made.client_limited = True
    summary = summarise(make_run(tmp_path / "run", [made], ["e2e_p95=2s"]))
    assert summary["verdict"].startswith("No finding: the endpoint was down from 10 s to 20")
    assert "failed; the client could not keep up at any load" in summary["verdict"]
