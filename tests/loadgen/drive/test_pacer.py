"""Pacing: what is due when, in order, whatever the server does."""

import asyncio
import gc
import time
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampacity.loadgen.drive.pacer import YIELD_EVERY, due_count, pace
from ampacity.loadgen.drive.stage import StageRunner
from ampacity.loadgen.net.http import Client
from ampacity.loadgen.plan import StagePlan
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.send.endpoint import parse_endpoint
from ampacity.sleeper import Sleeper
from tests.support.servers.fault_server import FaultServer
from tests.support.stage_driving import (
    Driven,
    Made,
    check_complete,
    on_loop,
    request_bytes,
    schedule_at,
    served_stage,
)

pytestmark = pytest.mark.real_time  # needs the machine to itself

MS = 1_000_000
LOOPS = pytest.mark.parametrize("loop", ["uvloop", "asyncio"])


@pytest.mark.parametrize(
    ("deadlines", "released", "now", "due"),
    [
        ([], 0, 100, 0),
        ([10, 20, 30], 0, 9, 0),
        ([10, 20, 30], 0, 10, 1),  # due at its very nanosecond
        ([10, 20, 30], 0, 29, 2),
        ([10, 20, 30], 2, 29, 0),
        ([10, 20, 30], 1, 1000, 2),
        ([10, 20, 30], 3, 1000, 0),
        ([10, 10, 10, 20], 0, 10, 3),  # a burst is due at once
        ([0, 2**62], 0, 2**62 - 1, 1),
    ],
)
def test_how_many_are_due(deadlines: list[int], released: int, now: int, due: int) -> None:
    assert due_count(np.array(deadlines, dtype=np.int64), released, now) == due


@given(
    deadlines=st.lists(st.integers(0, 10**9), max_size=50).map(sorted),
    looks=st.lists(st.integers(0, 10**9), max_size=20).map(sorted),
)
def test_every_deadline_is_released_once_at_whatever_times_one_looks(
    deadlines: list[int], looks: list[int]
) -> None:
    array = np.array(deadlines, dtype=np.int64)
    released = 0
    for now in looks:
        due = due_count(array, released, now)
        assert due >= 0
        released += due
        assert released == sum(d <= now for d in deadlines)


def _paced(
    loop: str, deadlines_ms: list[float], stop_after: int | None = None
) -> tuple[int, list[tuple[int, int]], int]:
    """(released, [(index, ns after its deadline)], ns from start to return)."""
    calls: list[tuple[int, int]] = []

    async def main() -> tuple[int, int]:
        start = time.monotonic_ns() + 20 * MS
        deadlines = start + np.round(np.array(deadlines_ms) * MS).astype(np.int64)
        sleeper = Sleeper()
        try:
            released = await pace(
                deadlines,
                lambda index, now_ns: calls.append((index, now_ns - int(deadlines[index]))),
                lambda: stop_after is not None and len(calls) >= stop_after,
                sleeper,
            )
        finally:
            sleeper.close()
        return released, time.monotonic_ns() - start

    released, lasted = on_loop(loop, main())
    return released, calls, lasted


@LOOPS
def test_all_are_released_in_order_and_never_early(loop: str) -> None:
    rng = np.random.default_rng(1)
    deadlines = np.cumsum(rng.exponential(1.0, 300)).tolist()
    released, calls, _ = _paced(loop, deadlines)
    assert released == 300
    assert [index for index, _ in calls] == list(range(300))
    late = [ns for _, ns in calls]
    assert min(late) >= 0
    assert float(np.median(late)) < 20 * MS


@LOOPS
def test_the_whole_schedule_takes_as_long_as_it_says(loop: str) -> None:
    """Absolute deadlines: 200 gaps of 5 ms end after 1 s, not after 200 small errors more."""
    _, _, lasted = _paced(loop, [i * 5.0 for i in range(201)])
    assert 1000 * MS <= lasted < 1300 * MS


@LOOPS
def test_the_deadlines_are_forgotten_at_once(loop: str) -> None:
    """A soak has many windows: none of them waits for the garbage collector."""

    async def main() -> weakref.ref[Any]:
        deadlines = time.monotonic_ns() + np.arange(3, dtype=np.int64)
        sleeper = Sleeper()
        await pace(deadlines, lambda *_: None, lambda: False, sleeper)
        sleeper.close()
        return weakref.ref(deadlines)

    gc.disable()
    try:
        assert on_loop(loop, main())() is None
    finally:
        gc.enable()


@LOOPS
def test_a_burst_is_released_at_once_and_lets_the_loop_breathe(loop: str) -> None:
    """3,000 at one instant: all out, and between batches other tasks get their turn."""
    turns = 0

    async def main() -> int:
        nonlocal turns

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        sleeper = Sleeper()
        deadlines = np.full(3000, time.monotonic_ns(), dtype=np.int64)
        released = await pace(deadlines, lambda index, now_ns: None, lambda: False, sleeper)
        sleeper.close()
        task.cancel()
        return released

    assert on_loop(loop, main()) == 3000
    assert turns >= 3000 // YIELD_EVERY - 2


@LOOPS
def test_it_stops_on_demand_even_in_a_long_gap(loop: str) -> None:
    released, calls, lasted = _paced(loop, [0.0, 1.0, 60_000.0], stop_after=2)
    assert (released, len(calls)) == (2, 2)
    assert lasted < 5000 * MS


@LOOPS
def test_an_empty_schedule_ends_at_once(loop: str) -> None:
    released, calls, _ = _paced(loop, [])
    assert (released, calls) == (0, [])


@LOOPS
def test_a_sleeper_never_wakes_early(loop: str) -> None:
    async def main() -> list[int]:
        sleeper = Sleeper()
        late = []
        for wait_us in (0, 1, 50, 400, 1500, 3333):
            deadline = time.monotonic_ns() + wait_us * 1000
            await sleeper.until(deadline)
            late.append(time.monotonic_ns() - deadline)
        await sleeper.until(time.monotonic_ns() - 10**9)
        sleeper.close()
        sleeper.close()
        return late

    assert min(on_loop(loop, main())) >= 0


def test_without_a_timerfd_the_coarse_way_is_not_early_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ampacity.sleeper._timerfd_create", lambda: None)
    released, calls, _ = _paced("asyncio", [0.0, 0.7, 5.0, 5.1, 9.0])
    assert (released, [i for i, _ in calls]) == (5, [0, 1, 2, 3, 4])
    assert min(ns for _, ns in calls) >= 0


# -- over real sockets ------------------------------------------------------------------------


def _slips_s(result: Driven) -> np.ndarray:
    return np.array([(r.dispatched_ns or 0) - r.scheduled_ns for r in result.records]) / 1e9


@LOOPS
def test_arrivals_go_on_as_scheduled_while_the_server_stalls(loop: str) -> None:
    """200 requests/s for 1.5 s, nobody is answered before 1 s has gone: dispatch does not notice."""
    times = [i * 0.005 for i in range(300)]
    stalled, server = served_stage(times, ["late"] * 200 + ["ok"] * 100, loop=loop, drain_s=20.0)
    arrived = sorted(r.at_ns for r in server.requests)
    assert {r.status for r in stalled.records} == {"ok"}
    assert len(stalled.records) == 300
    slips = _slips_s(stalled)
    assert slips.min() >= 0
    # a loop that waited for answers would be late by 1 s for most; this one is not late by a
    # quarter of it
    assert np.median(slips) < 0.05
    assert slips.max() < 0.5
    ttft = [
        (r.first_token_ns - r.scheduled_ns) / 1e9
        for r in stalled.records
        if r.first_token_ns and r.request_id < 200
    ]
    assert min(ttft) >= 1.0
    span_s = (arrived[-1] - arrived[0]) / 1e9  # as the server saw it
    assert span_s == pytest.approx(times[-1], abs=0.5)


@LOOPS
def test_a_burst_opens_as_many_connections_as_it_needs(loop: str) -> None:
    """400 at one instant on a server that answers nobody for a second: all are there together."""
    result, server = served_stage([0.0] * 400, "late", loop=loop, drain_s=30.0)
    assert server.connections == 400
    last_ns = max(r.at_ns for r in server.requests)
    assert last_ns < min(r.first_token_ns or 0 for r in result.records)  # before any answer
    assert {r.status for r in result.records} == {"ok"}


def test_a_stopped_stage_ends_soon_with_what_was_in_flight_unfinished() -> None:
    async def main(url: str) -> tuple[Driven, float]:
        endpoint = parse_endpoint(url)
        client = Client(endpoint, endpoint.addresses(), None)
        records: list[RequestRecord] = []
        made = Made(lambda _, output: request_bytes(endpoint, output, "stall"))
        runner = StageRunner([client], made, records.append)
        asyncio.get_running_loop().call_later(0.4, runner.stop, "interrupted")
        began = time.monotonic()
        schedule = schedule_at([i * 0.01 for i in range(6000)])
        result = await runner.run(StagePlan(0, "open", schedule, 60.0, offered_rps=100.0))
        await client.close()
        return Driven(result.meta, records), time.monotonic() - began

    with FaultServer() as server:
        result, lasted_s = on_loop("uvloop", main(server.url))
    assert lasted_s < 10
    check_complete(result)
    assert result.meta["ended_early"] == "interrupted"
    assert 0 < len(result.records) < 2000
    assert {r.status for r in result.records} == {"unfinished"}
    assert {r.error for r in result.records} == {"interrupted"}


def test_a_stage_is_not_waited_for_beyond_its_drain() -> None:
    """Ten requests that are never answered: 0.2 s of stage, 0.3 s of drain."""
    times = [0.02 * i for i in range(10)]
    result, _ = served_stage(times, "stall", drain_s=0.3, duration_s=0.2)
    assert {r.status for r in result.records} == {"unfinished"}
    assert {r.error for r in result.records} == {"not answered within 0.3 s after the stage"}
    assert 0.5 <= (result.meta["drained_ns"] - result.meta["start_ns"]) / 1e9 < 5


@pytest.mark.parametrize(
    ("silent", "statuses"),
    [
        # six answers come, one stops in the middle, one never begins
        (1, ["ok"] * 6 + ["unfinished"] * 2),
        # eight of fifteen have not begun: a queue, for which nobody waits
        (8, ["unfinished"] * 15),
    ],
)
def test_answers_that_come_are_waited_for_unless_most_have_not_begun(
    silent: int, statuses: list[str]
) -> None:
    """Six answers of 0.9 s and more, where beginnings are waited for 0.4 s after the stage."""
    faults = ["ok"] * 6 + ["stall"] + ["headers_then_nothing"] * silent
    how = {"drain_s": 0.4, "answering_s": 30.0, "duration_s": 0.1}
    result, _ = served_stage([0.0] * len(faults), faults, server=FaultServer(gap_s=0.3), **how)
    found = sorted(result.records, key=lambda r: r.request_id)
    assert [r.status for r in found] == statuses
    assert found[-1].error == "not answered within 0.4 s after the stage"
    lasted_s = (result.meta["drained_ns"] - result.meta["end_ns"]) / 1e9
    assert lasted_s < 10  # 30 s are for those that come


def test_a_closed_loop_keeps_its_concurrency() -> None:
    how = {"concurrency": 5, "duration_s": 0.8}
    result, _ = served_stage([0.0] * 1000, server=FaultServer(gap_s=0.01), **how)
    edges = sorted(
        [(r.dispatched_ns or 0, 1) for r in result.records]
        + [(r.ended_ns or 0, -1) for r in result.records]
    )
    level = np.cumsum([step for _, step in edges])
    assert level.max() == 5
    assert {r.status for r in result.records} == {"ok"}


@pytest.mark.parametrize(
    ("limits", "reason", "count"),
    [
        ({"max_requests": 7}, "limit of 7 requests", 7),
        ({"max_tokens": 12 * 5 + 11}, "planned tokens", 5),
    ],  # 8 + 4 tokens each
)
def test_a_closed_loop_stops_at_its_budget(limits: dict[str, int], reason: str, count: int) -> None:
    schedule, cut = schedule_at([0.0] * 50).capped(**limits)
    assert cut is not None
    result, _ = served_stage(schedule, concurrency=3, duration_s=20.0, used_up=cut)
    assert len(result.records) == count
    assert reason in result.meta["ended_early"]
    assert {r.status for r in result.records} == {"ok"}
