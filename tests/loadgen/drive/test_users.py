"""Virtual users of a closed loop: when each begins, alone and dealt over workers, and what the
stage says of it."""

from typing import Any

import numpy as np
import pytest

from ampacity.loadgen.plan import StagePlan, user_starts
from ampacity.loadgen.workers.pool import deal
from ampacity.workloads.lengths.parse import Fixed
from ampacity.workloads.profile import Workload
from ampacity.workloads.schedule import Schedule, closed_schedule
from ampacity.workloads.sessions import Sessions
from tests.support.servers.fault_server import FaultServer
from tests.support.stage_driving import Driven, schedule_at, served_stage

pytestmark = pytest.mark.real_time  # needs the machine to itself

S = 1_000_000_000


@pytest.mark.parametrize(
    ("users", "ramp_s", "think_s", "starts"),
    [
        (5, 10.0, 0.0, [0.0, 2.0, 4.0, 6.0, 8.0]),
        (
            4,
            10.0,
            30.0,
            [0.0, 2.5, 5.0, 7.5],
        ),  # a ramp that was asked for beats the spread over one pause
        (4, 0.0, 2.0, [0.0, 0.5, 1.0, 1.5]),
        (3, 0.0, 0.0, [0.0, 0.0, 0.0]),
        (1, 10.0, 0.0, [0.0]),
        (0, 10.0, 0.0, []),
    ],
)
def test_users_begin_evenly_over_the_ramp(
    users: int, ramp_s: float, think_s: float, starts: list[float]
) -> None:
    assert user_starts(users, ramp_s, think_s) == starts


@pytest.mark.parametrize(
    ("users", "shares"),
    [(5, [[0.0, 4.0, 8.0], [2.0, 6.0]]), (4, [[0.0, 5.0], [2.5, 7.5]]), (1, [[0.0], []])],
)
def test_workers_share_the_users_and_their_starts(users: int, shares: list[list[float]]) -> None:
    plan = StagePlan(0, "closed", schedule_at([0.0] * 20), 30.0, concurrency=users, ramp_s=10.0)
    assert [list(share.starts_s()) for share in deal(plan, 2)] == shares


def played(schedule: Schedule, **plan: Any) -> Driven:
    """A closed stage; every answer lasts 0.4 s at least."""
    result, _ = served_stage(schedule, server=FaultServer(gap_s=0.1), **plan)
    assert {r.status for r in result.records} == {"ok"}
    return result


def begun_s(result: Driven) -> np.ndarray:
    """When each request was scheduled, s after the stage began, in order."""
    return np.sort([r.scheduled_ns - result.meta["start_ns"] for r in result.records]) / S


def test_a_ramp_lets_the_users_in_one_after_the_other() -> None:
    """Four over 0.4 s, and nobody is answered before that has gone: what is sent till then is each
    user's first."""
    result = played(schedule_at([0.0] * 100), concurrency=4, ramp_s=0.4, duration_s=0.7)
    span_s = (result.meta["end_ns"] - result.meta["start_ns"]) / S
    assert (result.meta["ramp_s"], span_s) == (0.4, 0.7)  # the stage's length has the ramp in it
    begun = begun_s(result)
    assert np.all(begun[:4] >= [0.0, 0.1, 0.2, 0.3])
    assert len(begun) > 4
    assert begun[-1] < 0.7
    edges = sorted(
        [(r.scheduled_ns, 1) for r in result.records]
        + [(r.ended_ns or 0, -1) for r in result.records]
    )
    assert np.cumsum([step for _, step in edges]).max() == 4


def test_without_a_ramp_all_begin_at_once_and_nothing_is_said() -> None:
    result = played(schedule_at([0.0] * 50), concurrency=9, duration_s=0.35)
    assert len(result.records) == 9  # before anybody was answered
    assert "ramp_s" not in result.meta


def test_with_a_ramp_think_time_is_still_between_an_answer_and_the_next_request() -> None:
    """Users begin at 0 and 0.25 s; the first one's second request comes 0.2 s after its answer, so
    after 0.6 s."""
    begun = begun_s(
        played(schedule_at([0.0] * 50), concurrency=2, ramp_s=0.5, think_s=0.2, duration_s=0.8)
    )
    assert np.all(begun[:3] >= [0.0, 0.25, 0.6 - 0.002])  # a timer of libuv counts in ms


def test_users_of_sessions_begin_over_the_ramp_too() -> None:
    """Two users, sessions of two turns: the second user's session begins half a ramp after the
    first one's."""
    workload = Workload("w", Fixed(8), Fixed(4), sessions=Sessions(turns=Fixed(2)))
    result = played(
        closed_schedule(workload, requests=40, seed=1, stage=0),
        concurrency=2,
        ramp_s=0.4,
        duration_s=0.5,
    )
    # played to their end after the stage's
    assert result.meta["sessions"] == {"begun": 2, "cut": []}
    first = sorted(
        (r.scheduled_ns - result.meta["start_ns"]) / S for r in result.records if r.turn == 0
    )
    assert len(first) == 2
    assert first[1] >= 0.2
    assert len(result.records) == 4


def test_a_share_without_users_sends_nothing() -> None:
    result, server = served_stage([0.0] * 9, concurrency=0, duration_s=0.2)
    assert server.requests == []
    assert (result.records, result.meta["scheduled_requests"]) == ([], 0)
