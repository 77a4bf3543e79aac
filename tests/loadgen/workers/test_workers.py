"""Several worker processes: the same schedule, the same records, and a worker's death is no end."""

import asyncio
import dataclasses
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest

from ampacity.loadgen.audit import Measures, Tolerance, judge
from ampacity.loadgen.drive.account import Account
from ampacity.loadgen.generator import Generator
from ampacity.loadgen.plan import Limits, StagePlan, StageResult
from ampacity.loadgen.probe.results import Calibration
from ampacity.loadgen.rundir.files import load_run
from ampacity.loadgen.rundir.write import RunWriter
from ampacity.loadgen.send.endpoint import parse_endpoint
from ampacity.loadgen.send.protocols import RequestShape
from ampacity.loadgen.workers import launch
from ampacity.loadgen.workers.launch import Launcher, Process, Processes
from ampacity.loadgen.workers.on_ray import join_cluster
from ampacity.loadgen.workers.pool import deal
from ampacity.loadgen.workers.setup import Route, Setup
from ampacity.simulator.server.launch import Started
from ampacity.workloads.lengths.parse import Fixed
from ampacity.workloads.profile import Workload, load_workload
from ampacity.workloads.schedule import Schedule, closed_schedule, open_schedule
from ampacity.workloads.sessions import Sessions


def setup_for(server: Started) -> Setup:
    endpoint = parse_endpoint(server.url)
    return Setup(
        routes=(Route(endpoint, endpoint.addresses()),),
        shape=RequestShape("chat", server.model),
        tokenizer="words",
        salt="s",
        calibration=Calibration(overhead_tokens=8),
        run_id="test",
        limits=Limits(),
        account=Account(),
        stamps="read",
        reuse="pool",
    )


def run_stages(
    server: Started,
    path: Path,
    plans: list[StagePlan],
    workers: int,
    kill_one: bool = False,
    hold_s: float = 0.0,
    launcher: Launcher | None = None,
    stamps: Any = "read",
) -> Any:
    """Run the plans over ``workers`` processes; gives (run as read back, results, lost).

    ``hold_s``: worker 1 is stopped until so long after the start of the first stage."""

    async def main() -> tuple[list[Any], str | None]:
        setup = dataclasses.replace(setup_for(server), stamps=stamps)
        clients = setup.clients()
        with RunWriter(path, {"stages": []}) as writer:
            generator = Generator(setup, clients, writer, writer.worker_stream, launcher)
            results = []
            for plan in plans:
                killer = (
                    asyncio.create_task(_kill_one_worker(generator))
                    if kill_one and plan is plans[0]
                    else None
                )
                hold = hold_s and workers > 1 and plan is plans[0]
                on_start = (
                    (lambda ns: _hold_one_back(generator, ns, hold_s)) if hold else lambda ns: None
                )
                results.append(await generator.run(plan, workers, on_start))
                writer.meta["stages"].append(results[-1].meta)
                if killer is not None:
                    await killer
            lost = generator.take_lost()
            await generator.close()
            await clients[0].close()
            writer.finish()
        return results, lost

    results, lost = asyncio.run(main())
    return load_run(path), results, lost


async def _kill_one_worker(generator: Generator) -> None:
    while generator.live.ended < 10:  # in the middle of its load
        await asyncio.sleep(0.02)
    os.kill(generator._workers._workers[0].launched._process.pid, signal.SIGKILL)


def _hold_one_back(generator: Generator, start_ns: int, hold_s: float) -> None:
    pid = generator._workers._workers[1].launched._process.pid
    os.kill(pid, signal.SIGSTOP)
    left_s = (start_ns - time.monotonic_ns()) / 1e9 + hold_s
    asyncio.get_running_loop().call_later(left_s + 0.002, os.kill, pid, signal.SIGCONT)


def open_plan(stage: int, rate_rps: float, duration_s: float, first: int) -> StagePlan:
    schedule = open_schedule(
        load_workload("chat-short"),
        rate_rps=rate_rps,
        duration_s=duration_s,
        seed=7,
        stage=stage,
        first_request_id=first,
    )
    return StagePlan(stage, "open", schedule, duration_s, offered_rps=rate_rps)


def content(run: Any, results: list[Any]) -> list[tuple[Any, ...]]:
    """What does not depend on the clock: the schedule and what came of it."""
    columns = (
        "request_id stage attempt input_tokens_planned output_tokens_planned status "
        "output_tokens input_tokens"
    ).split()
    starts = {r.meta["index"]: r.meta["start_ns"] for r in results}
    rows = run.requests.select([*columns, "scheduled_ns"]).to_pylist()
    return [
        (*(row[c] for c in columns), row["scheduled_ns"] - starts[row["stage"]]) for row in rows
    ]


def test_records_are_the_same_for_any_number_of_workers_even_if_one_starts_late(
    server: Started, tmp_path: Path
) -> None:
    """One absolute start for all: a worker that is held up for half a second sends late by its own
    record, no later timetable."""
    first = open_plan(0, 30.0, 1.5, 0)
    plans = [first, open_plan(1, 20.0, 1.0, len(first.schedule))]
    found = {}
    for workers in (1, 3):
        run, results, lost = run_stages(server, tmp_path / str(workers), plans, workers, hold_s=0.5)
        assert lost is None
        found[workers] = content(run, results)
        assert sum(r.meta["scheduled_requests"] for r in results) == len(found[workers])
        assert set(pc.unique(run.requests["worker"]).to_pylist()) == set(range(workers))
    assert len(found[1]) == sum(len(p.schedule) for p in plans)
    assert found[1] == found[3]
    due_s = [  # of those that the worker could not send in time, counted from the start of all
        (r["scheduled_ns"] - results[0].meta["start_ns"]) / 1e9
        for r in run.requests.to_pylist()
        if r["worker"] == 1
        and r["stage"] == 0
        and r["dispatched_ns"] >= results[0].meta["start_ns"] + 500_000_000
    ]
    assert min(due_s) < 0.3
    audit = judge(results[0].measures, Tolerance())
    assert audit.slip_max_s >= 0.5 - min(due_s)
    assert audit.client_limited


def test_sessions_over_workers_are_the_same_and_stay_with_one(
    server: Started, tmp_path: Path
) -> None:
    workload = Workload(
        "w", Fixed(60), Fixed(4), sessions=Sessions(turns=Fixed(3), think_ms=Fixed(50))
    )
    schedule = open_schedule(workload, rate_rps=60, duration_s=1.5, seed=7, stage=0)
    found = {}
    for workers in (1, 3):
        plan = StagePlan(0, "open", schedule, 1.5, offered_rps=60.0)
        run, results, _ = run_stages(server, tmp_path / f"sessions{workers}", [plan], workers)
        rows = run.requests.to_pylist()
        names = tuple(
            "request_id session_id turn status input_tokens_planned input_tokens output_tokens".split()
        )
        found[workers] = [tuple(row[name] for name in names) for row in rows]
        assert len(rows) == results[0].meta["scheduled_requests"] == len(schedule)
        assert results[0].meta["sessions"] == {"begun": len(rows) // 3, "cut": []}
        assert len({(row["session_id"], row["worker"]) for row in rows}) == len(rows) // 3
        ends = {(row["session_id"], row["turn"]): row["ended_ns"] for row in rows}
        for row in rows:
            before = ends.get((row["session_id"], row["turn"] - 1))
            assert before is None or row["scheduled_ns"] == before + 50_000_000
    assert found[1] == found[3]
    assert {row[3] for row in found[1]} == {"ok"}


def test_closed_loop_over_workers_keeps_its_concurrency_and_its_ids(
    server: Started, tmp_path: Path
) -> None:
    plans = []
    for stage in (0, 1):
        schedule = closed_schedule(
            load_workload("chat-short"),
            requests=1000,
            seed=7,
            stage=stage,
            first_request_id=1000 * stage,
        )
        plans.append(StagePlan(stage, "closed", schedule, 1.5, concurrency=5, ramp_s=stage * 0.5))
    run, results, _ = run_stages(server, tmp_path / "run", plans, 2)
    ids = Counter(run.requests["request_id"].to_pylist())
    assert set(ids.values()) == {1}
    for result in results:
        assert result.ids_used <= 1000
    rows = run.requests.filter(pc.equal(run.requests["stage"], 0)).to_pylist()
    begins = sorted((r["started_ns"], 1) for r in rows)
    ends = sorted((r["ended_ns"], -1) for r in rows)
    in_flight = np.cumsum([change for _, change in sorted([*begins, *ends])])
    assert in_flight.max() == 5
    assert [result.meta.get("ramp_s") for result in results] == [None, 0.5]
    of_ramp = run.requests.filter(pc.equal(run.requests["stage"], 1)).to_pylist()
    for worker, first_s in ((0, 0.0), (1, 0.1)):  # users 0, 2, 4 and 1, 3 of five over 0.5 s
        begun_ns = min(r["scheduled_ns"] for r in of_ramp if r["worker"] == worker)
        assert begun_ns - results[1].meta["start_ns"] >= first_s * 1e9


def test_a_worker_that_dies_leaves_its_share_unfinished_and_the_others_go_on(
    server: Started, tmp_path: Path
) -> None:
    """All of the stage has its row; a stage after it is sent whole, by a worker in its place."""
    first = open_plan(0, 20.0, 3.0, 0)
    plans = [first, open_plan(1, 20.0, 1.0, len(first.schedule))]
    run, (result, after), lost = run_stages(server, tmp_path / "run", plans, 2, kill_one=True)
    assert "worker 0 died (SIGKILL) in stage 0" in lost
    assert (result.meta["ended_early"], after.meta["ended_early"]) == (None, None)
    assert [one.requests for one in result.measures.each] == [0, len(first.schedule) // 2]
    rows = run.requests.to_pylist()
    assert [r["request_id"] for r in rows] == list(range(sum(len(p.schedule) for p in plans)))
    of_first, of_second = ([r for r in rows if r["stage"] == stage] for stage in (0, 1))
    assert result.meta["scheduled_requests"] == len(of_first)
    owed = [r for r in of_first if r["status"] == "unfinished"]
    assert len(owed) > 20
    assert all("worker 0 died (SIGKILL)" in r["error"] and not r["request_id"] % 2 for r in owed)
    assert {r["status"] for r in of_first if r["request_id"] % 2} == {"ok"}
    assert {(r["status"], r["worker"]) for r in of_second} == {("ok", 1), ("ok", 2)}


class Elsewhere(Processes):
    """Workers in a time namespace, whose monotonic clock is an hour ahead."""

    async def start(self) -> Process:
        worker = await super().start()
        worker.node, worker.look = "far", lambda: time.monotonic_ns() + 3600 * 10**9
        return worker


@pytest.mark.skipif(
    sys.platform != "linux" or os.system("unshare -T --monotonic 9 true 2>/dev/null") != 0,
    reason="needs the right to make a time namespace",
)
def test_records_of_a_clock_that_is_ahead_are_on_the_parents(
    server: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec unshare -T --monotonic 3600 --fork {sys.executable} "$@"\n')
    python.chmod(0o755)
    plan = open_plan(0, 30.0, 1.5, 0)
    run, results, _ = run_stages(server, tmp_path / "here", [plan], 2)
    here = content(run, results)
    monkeypatch.setattr(sys, "executable", str(python))
    for stamps in ("kernel", "read"):
        run, results, lost = run_stages(
            server, tmp_path / stamps, [plan], 2, launcher=Elsewhere(), stamps=stamps
        )
        assert lost is None
        assert content(run, results) == here
        (clock,) = results[0].meta["clocks"]
        assert clock["node"] == "far"
        assert abs(clock["ahead_ns"] - 3600 * 10**9) <= clock["bound_ns"] < 1e6
        start_ns, end_ns = results[0].meta["start_ns"], results[0].meta["drained_ns"]
        assert 0 <= time.monotonic_ns() - end_ns < 60e9
        for name in ("dispatched_ns", "started_ns", "first_token_ns", "ended_ns"):
            times_ns = run.requests[name].to_pylist()
            assert all(start_ns - 1e6 <= ns <= end_ns + 1e6 for ns in times_ns)
        assert all(abs(due - start_ns) < 60e9 for _, due, _ in results[0].measures.stalls)


@pytest.mark.parametrize(
    ("trips_ns", "ahead_ns", "bound_ns"),
    [
        ([(100, 100)], 7_000, 101),
        ([(300, 0), (40, 60), (0, 900)], 6_990, 51),  # the shortest counts, not symmetric: 10 off
        ([(0, 200)], 6_900, 101),  # the whole error is within the bound
    ],
)
def test_the_clock_of_a_node_is_known_to_half_the_shortest_round_trip(
    trips_ns: list[tuple[int, int]], ahead_ns: int, bound_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of trips that take so long to the node, and back, to a clock that is 7,000 ns ahead."""
    now_ns, back_ns, trips = 0, 0, iter(trips_ns)

    def ours() -> int:
        nonlocal now_ns, back_ns
        now_ns, back_ns = now_ns + back_ns, 0
        return now_ns

    def look() -> int:
        nonlocal now_ns, back_ns
        there_ns, back_ns = next(trips)
        now_ns += there_ns
        return now_ns + 7_000

    monkeypatch.setattr(launch.time, "monotonic_ns", ours)
    clock = launch.compare_clocks("n", look, len(trips_ns))
    assert (clock.ahead_ns, clock.bound_ns) == (ahead_ns, bound_ns)
    assert abs(clock.ahead_ns - 7_000) <= clock.bound_ns


def test_workers_that_start_after_a_stop_send_nothing(server: Started, tmp_path: Path) -> None:
    """Ctrl-C while worker processes start: those that come up later were never told to stop."""

    async def main() -> StageResult:
        setup = setup_for(server)
        clients = setup.clients()
        with RunWriter(tmp_path / "run", {"stages": []}) as writer:
            generator = Generator(setup, clients, writer, writer.worker_stream)
            generator.stop("interrupted by Ctrl-C")
            result = await generator.run(open_plan(0, 20.0, 20.0, 0), 2, lambda _: None)
            await generator.close()
            await clients[0].close()
            writer.finish()
        return result

    result = asyncio.run(main())
    assert result.meta["ended_early"] == "interrupted by Ctrl-C"
    assert result.meta["scheduled_requests"] <= 2
    assert result.meta["end_ns"] - result.meta["start_ns"] < 5e9


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("auto", r"pip install '\.\[ray\]' in ampacity's folder"),
        ("ray://h:1", "give auto or HOST:PORT"),
        ("h", "HOST:PORT"),
    ],
)
def test_a_cluster_that_cannot_be_joined_is_one_line(
    address: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(launch.WorkerError, match=expected) as refused:
        asyncio.run(join_cluster(address, 2, ()))
    assert "\n" not in str(refused.value)


def test_the_worst_worker_is_named_where_the_client_is_the_limit() -> None:
    """Of three workers with 100 requests each, the one on node b is 80 ms late: 1/3 of all."""
    pooled = Measures()
    for worker, slip_s in enumerate((0.001, 0.08, 0.002)):
        one = Measures(worker=worker, node="abc"[worker], cpu_fraction=0.2)
        one.slips_s.extend([slip_s] * 100)
        pooled.merge(one)
    audit = judge(pooled, Tolerance())
    assert [(w.worker, w.node, w.requests) for w in audit.workers] == [
        (0, "a", 100),
        (1, "b", 100),
        (2, "c", 100),
    ]
    assert audit.client_limited_reason == (
        "requests left 80.0 ms late at p99, more than 20.0 ms; the worst is worker 1 on b: "
        "20% of its core, requests 80.0 ms late at p99"
    )


def test_deal_thins_the_schedule() -> None:
    n = 7
    schedule = Schedule(
        np.arange(n, dtype=float), np.arange(n) + 1, np.arange(n) + 11, first_request_id=100
    )
    plan = StagePlan(0, "open", schedule, 7.0, offered_rps=1.0)
    shares = deal(plan, 3)
    ids = [[s.schedule.request_id(i) for i in range(len(s.schedule))] for s in shares]
    assert ids == [[100, 103, 106], [101, 104], [102, 105]]
    assert [list(s.schedule.scheduled_s) for s in shares] == [[0, 3, 6], [1, 4], [2, 5]]
    assert sum(s.offered_rps or 0 for s in shares) == pytest.approx(1.0)
    assert [
        deal(StagePlan(0, "closed", schedule, 1.0, concurrency=5), 3)[k].concurrency
        for k in range(3)
    ] == [2, 2, 1]
