"""A search: stages that are judged on their way, repeats, and the time that it may take."""

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ampacity.analysis.contract.stage import Stage
from ampacity.cli.measure.search import make_search
from ampacity.config import make_settings
from ampacity.experiments.search import Search, SearchPlan
from ampacity.experiments.stages.on_the_way import judge_so_far
from ampacity.loadgen.plan import StagePlan
from ampacity.loadgen.rundir.write import RunWriter
from ampacity.values import ConfigError
from ampacity.workloads.profile import load_workload
from tests.experiments.search.test_search import (
    GOAL,
    SLOS,
    estimated,
    is_decided,
    stage,
    true_share,
)
from tests.support.contract import struct_of
from tests.support.servers.fault_server import FaultServer
from tests.support.stage_driving import schedule_at
from tests.support.synthetic import ORIGIN_NS, request, run_meta


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("--precision none", "--precision"),
        ("--max-duration 5", "--max-duration"),
        ("", "--slo"),
        ("--ramp 10s", "--ramp goes with --closed"),
        ("--closed --ramp 10", "--ramp 10"),
    ],
)
def test_what_cannot_be_searched_is_one_line(
    arguments: str,
    error: str,
    ampacity: Callable[..., object],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    slo = () if error == "--slo" else ("--slo", "ttft_p99=2s")
    with FaultServer() as server:
        status = ampacity("search", server.url, "--model", "m", *slo, *arguments.split())
    assert status == 2
    assert error in capsys.readouterr().err


def _judged_on_its_way(
    path: Path, length_s: float, times_s: Any, ended: list[Any]
) -> dict[str, Any]:
    """What is known ``length_s`` after the start of a stage, when the requests of ``ended`` have
    their records."""
    start_ns = time.monotonic_ns() - round(length_s * 1e9)
    with RunWriter(path / "run", run_meta([])) as writer:
        for record in ended:
            times = {k: v for k, v in asdict(record).items() if k.endswith("_ns") and v is not None}
            writer.append(
                replace(record, **{k: v + start_ns - ORIGIN_NS for k, v in times.items()})
            )
        writer.flush()
        meta = {
            "index": 0,
            "kind": "open",
            "offered_rps": 10.0,
            "concurrency": None,
            "start_ns": start_ns,
            "end_ns": 0,
            "drained_ns": None,
            "scheduled_requests": 600,
            "ended_early": None,
            "audit": None,
        }
        schedule = schedule_at(list(times_s))
        plan = StagePlan(0, "open", schedule, 60.0, offered_rps=10.0)
        judged = judge_so_far(writer, plan, meta, SLOS, 0)
        assert judge_so_far(writer, plan, meta | {"index": 1}, SLOS, 0) is None
    assert judged is not None
    return judged


@pytest.mark.parametrize(("served_s", "stable"), [(0.05, True), (0.4, False)])
def test_a_stage_is_judged_on_its_way_by_what_must_have_ended(
    tmp_path: Path, served_s: float, stable: bool
) -> None:
    """10/s for 30 s in front of one server: 0.05 s each is carried, 0.4 s each piles up. Only what
    has ended is recorded."""
    ended, times, free = [], np.arange(0, 60, 0.1).tolist(), 0.0
    for i, t in enumerate(times):
        free = max(free, t) + served_s
        if free < 30:
            ended.append(request(i, t, ttft_s=free - t))
    judged = _judged_on_its_way(tmp_path, 30.0, times, ended)
    assert judged.stable is stable
    if stable:
        assert judged.slo_verdicts[0].attainment == 1.0
        assert judged.requests == pytest.approx(300, abs=15)
    # 75 have ended, at 0.4 s to 30 s; the one due at t waited 3 t + 0.4 s: those due by 0.2 s were
    # in time
    else:
        assert judged.slo_verdicts[0].attainment == pytest.approx(3 / 75)
        assert "no steady state" in str(is_decided([], judged, GOAL))


@pytest.mark.parametrize(("hangs_from_s", "is_judged"), [(30.0, True), (29.5, True), (20.0, False)])
def test_a_server_that_ends_nothing_any_more_is_not_judged_by_what_went_well_before(
    tmp_path: Path, hangs_from_s: float, is_judged: bool
) -> None:
    """10/s, 0.1 s each, and from a time on no end: after 10 s of that nobody says that the SLO is met."""
    times = np.arange(0, 60, 0.1).tolist()
    ended = [
        request(i, t, ttft_s=0.02, tail_s=0.08)
        for i, t in enumerate(times)
        if t + 0.1 < hangs_from_s
    ]
    judged = _judged_on_its_way(tmp_path, 30.0, times, ended)
    assert bool(judged.slo_verdicts) is is_judged


@pytest.mark.parametrize(("first_long", "judged_requests"), [(200, 200), (100, None)])
def test_a_long_answer_in_flight_is_no_miss_of_the_first_token(
    tmp_path: Path, first_long: int, judged_requests: int | None
) -> None:
    """From one on every tenth answer takes minutes, the others 0.1 s. All had their first token in
    time, but no record says so of those in flight: judged is what was due before the first of them,
    if that is half of the time."""
    times = np.arange(0, 60, 0.1).tolist()
    sent = [i for i in range(298) if i < first_long or i % 10]
    ended = [request(i, times[i], ttft_s=0.02, tail_s=0.08) for i in sent]
    judged = _judged_on_its_way(tmp_path, 30.0, times, ended)
    assert is_decided([], judged, GOAL) is None
    if judged_requests is None:
        assert judged.slo_verdicts == []
    else:
        assert (judged.requests, judged.slo_verdicts[0].attainment) == (judged_requests, 1.0)


class ScriptedRig:
    """Stages by the law of ``true_share``, each worth a third of its requests."""

    def __init__(self, x_star: float = 10.0) -> None:
        self.x_star = x_star
        self.settings = SimpleNamespace(
            slos=tuple(SLOS),
            rates=None,
            concurrency=None,
            trace=None,
            seed=3,
            duration_s=30.0,
            workload=load_workload("chat-short"),
        )
        self.expect = lambda *_, **__: None
        self.stages: list[Stage] = []
        self.ended: tuple[str, str] | None = None
        self.typical_e2e_s = 0.1
        self.spent_s = 0.0
        self.noted: dict[str, Any] = {}
        self.told: list[str] = []
        self.tell = self.told.append
        self.closed: list[int] = []

    def note_down(self, name: str, value: Any) -> None:
        self.noted[name] = value

    async def open_stage(
        self, rate_rps: float, duration_s: float | None = None, enough: Any = None
    ) -> dict[str, Any]:
        n = round(rate_rps * (duration_s or 30.0))
        share = true_share(rate_rps, self.x_star)
        made = stage(rate_rps, share, n=n, effective=max(n // 3, 1), index=len(self.stages))
        judged = struct_of(Stage, made)
        self.stages.append(judged)
        self.spent_s += judged.window.end_s
        return judged

    async def closed_stage(self, concurrency: int) -> Stage:
        self.closed.append(concurrency)
        self.spent_s += self.settings.duration_s + getattr(self.settings, "ramp_s", 0.0)
        return struct_of(Stage, {"window": {"end_s": 30.0}})


def test_repeats_are_both_ends_in_random_order_and_the_closed_view_is_around_c_max() -> None:
    rig = ScriptedRig()
    asyncio.run(Search(SearchPlan(0.05, repeats=3, closed=True)).run(rig))
    noted = rig.noted["search"]
    assert noted["reached"] is True
    repeats = [step["offered_rps"] for step in noted["path"] if "repeat" in step["why"]]
    low, high = sorted(set(repeats))
    assert (repeats.count(low), repeats.count(high)) == (3, 3)
    assert repeats != sorted(repeats)
    assert low < 10 < high
    assert min(rig.closed) < 20 < max(rig.closed)  # C_max is 20 at 10/s


def test_the_closed_loops_of_a_search_end_with_its_time() -> None:
    """Two more of 30 s fit into what the open stages leave of 70 s more than they take; 12 s of
    ramp each leave room for one."""
    alone = ScriptedRig()
    asyncio.run(Search(SearchPlan(0.3)).run(alone))
    limit_s = sum(s.window.end_s for s in alone.stages) + 70
    for ramp_s, loops in ((0.0, 2), (12.0, 1)):
        rig = ScriptedRig()
        rig.settings = make_settings({"url": "http://127.0.0.1:9/v1", "slo": ["ttft_p95=1s"]})
        asyncio.run(Search(SearchPlan(0.3, limit_s, closed=True, ramp_s=ramp_s)).run(rig))
        assert rig.noted["search"]["reached"] is True
        assert len(rig.closed) == loops
        assert "leaves no time for a closed loop" in rig.told[-1]


def test_the_closed_loops_of_a_search_have_the_ramp() -> None:
    """C_max of the law is 20: six levels around it, each with the ramp, which no open stage has."""
    settings = make_settings({"url": "http://127.0.0.1:9/v1", "slo": ["ttft_p95=1s"]})
    ramps: list[tuple[str, float]] = []

    class RampedRig(ScriptedRig):
        async def open_stage(self, *arguments: Any, **named: Any) -> dict[str, Any]:
            ramps.append(("open", self.settings.ramp_s))
            return await super().open_stage(*arguments, **named)

        async def closed_stage(self, concurrency: int) -> Stage:
            ramps.append(("closed", self.settings.ramp_s))
            return await super().closed_stage(concurrency)

    rig = RampedRig()
    rig.settings = settings
    asyncio.run(make_search("5%", None, 0, True, "8s").run(rig))
    assert set(ramps) == {("open", 0.0), ("closed", 8.0)}
    assert ramps[-6:] == [("closed", 8.0)] * 6


def test_little_time_is_not_spent_on_the_first_stage() -> None:
    """60 requests take 60 s at 1 req/s: of 120 s the first stage gets 30, of the 90 left the second
    22.5, then ten times the 2 s that a request lasts are more than a quarter of what is left."""
    rig = ScriptedRig()
    rig.typical_e2e_s = 1.0
    asyncio.run(Search(SearchPlan(0.05, max_duration_s=120.0)).run(rig))
    # 8 misses for each 1/0.05^2, one request in twenty
    assert rig.told[0].startswith(
        "to 5 % a search takes about 64,000 requests, half to three times as many, and "
    )
    assert "enough for 2.0 stages of 60 requests, as the SLO takes them, at 1 req/s" in rig.told[1]
    assert rig.told[1].endswith(
        "a quarter of the time left, so the answer may be coarse or none: from --max-duration 4m "
        "on the first has them all"
    )
    assert [(s.offered_rps, s.requests) for s in rig.stages] == [
        (1, 30),
        (2, 45),
        (4, 80),
        (8, 160),
        (16, 320),
    ]
    found = estimated(rig.stages)
    low, high = found.capacity_rps_ci
    assert low < 10 < high  # the law's own limit
    assert sum(s.window.end_s for s in rig.stages) <= 121


def test_time_for_not_one_stage_is_refused_before_anything_is_sent() -> None:
    """At 1 s a request a stage is ten; one second less is refused. With the 15 s that fit there is
    one, and what is left is said."""
    rig = ScriptedRig()
    rig.typical_e2e_s = 1.0
    with pytest.raises(
        ConfigError, match=r"--max-duration 9s: not even one stage fits, which takes 10s at least"
    ):
        asyncio.run(Search(SearchPlan(0.05, max_duration_s=9.0)).run(rig))
    assert not rig.stages
    asyncio.run(Search(SearchPlan(0.05, max_duration_s=15.0)).run(rig))
    assert [s.offered_rps for s in rig.stages] == [1]
    ended = rig.noted["search"]["ended"]
    assert re.match(
        r"5 s are left of --max-duration 15s, and a stage at 2 req/s takes \d+s at least", ended
    )


def test_time_for_no_ten_requests_ends_it() -> None:
    """Every load is too much. A request lasts 1 s: of 60 s a quarter is for 1 req/s, ten requests
    at 0.5 take 20 s, at 0.25 40 s, and 25 are left."""
    rig = ScriptedRig(x_star=0.01)
    rig.typical_e2e_s = 1.0
    asyncio.run(Search(SearchPlan(0.05, max_duration_s=60.0)).run(rig))
    assert [(s.offered_rps, s.requests) for s in rig.stages] == [(1, 15), (0.5, 10)]
    assert re.match(
        r"25 s are left .* a stage at 0.25 req/s takes 40s at least \(10 req",
        rig.noted["search"]["ended"],
    )


def test_a_stage_of_more_than_a_year_ends_the_search() -> None:
    """Its times would not fit into a run directory, which holds nanoseconds in 64 bits."""
    rig = ScriptedRig()
    rig.typical_e2e_s = 1e9
    asyncio.run(Search(SearchPlan(0.2)).run(rig))
    assert not rig.stages
    assert rig.noted["search"]["ended"] == "a stage at 1e-09 req/s would take 6e+10 s"


def test_the_time_that_was_allowed_ends_it_with_what_is_lacking() -> None:
    rig, whole = ScriptedRig(), ScriptedRig()
    asyncio.run(Search(SearchPlan(0.05, max_duration_s=1500.0)).run(rig))
    asyncio.run(Search(SearchPlan(0.05)).run(whole))
    noted = rig.noted["search"]
    assert noted["reached"] is False
    assert noted["ended"] == "--max-duration 25m is used up"
    assert rig.told[
        1
    ] == (  # p95 with three misses: 60 requests, 6 s at one request of 0.1 s in flight
        "--max-duration 25m is enough for 250 stages of 60 requests, as the SLO takes them, at 10 "
        "req/s, where the search begins"
    )
    assert rig.told[2].startswith("next ")  # nothing is known yet
    line = re.fullmatch(
        r"capacity so far ([\d.]+) req/s, 95 % interval [\d.]+ to [\d.]+; about "
        r"([\d,]+) requests in all to 5 %; "
        r"next [\d.]+ req/s, at most [\d,.]+ s, about [\d,]+ requests: the capacity is known to .*",
        rig.told[-1],
    )
    assert float(line[1]) == pytest.approx(10.0, rel=0.1)  # the law's own limit
    took = sum(s.requests for s in whole.stages)
    assert took / 2 < int(line[2].replace(",", "")) < 2 * took
    assert took / 2 < sum(s.requests for s in rig.stages) + noted["more_requests"] < 2 * took
    assert sum(s.window.end_s for s in rig.stages) <= 1501
