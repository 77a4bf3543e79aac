"""Recorded sessions: who waits for whom and for how long, what is sent, from each kind of file;
values worked out by hand.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ampacity.loadgen.drive.dependencies import SessionDependencies
from ampacity.loadgen.drive.options import RunnerOptions
from ampacity.loadgen.net.http import Client
from ampacity.loadgen.plan import StagePlan
from ampacity.loadgen.receive.answers import ANSWERS
from ampacity.loadgen.send.endpoint import parse_endpoint
from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.replay import Replayed, replayed
from ampacity.workloads.timetable import AFTER_END, AFTER_START, WITH_START, Schedule
from ampacity.workloads.trace_cuts import Replay
from ampacity.workloads.traces.read import read_trace
from tests.support import stage_driving
from tests.support.servers.fault_server import FaultServer
from tests.support.stage_driving import Driven, on_loop
from tests.support.traces import lines

DATA = Path(__file__).parents[2] / "data" / "traces"


def written(folder: Path, rows: list[Any], name: str = "t.jsonl") -> Path:
    return lines(folder / name, *rows)


def played(path: Path, rate: float | None = None, **how: Any) -> Replayed:
    return replayed(read_trace(path, timed=False, keep_texts=True), Replay(**how), 1, rate)


def turns(found: Replayed) -> list[tuple[float, int, list[int], float, int]]:
    """(earliest time, session, what it waits for, pause, what that counts from) of each request."""
    s = found.schedule
    return [
        (
            round(float(s.scheduled_s[i]), 6),
            int(s.session[i]),
            s.after[s.after_start[i] : s.after_start[i + 1]].tolist(),
            round(float(s.think_s[i]), 6),
            int(s.counts_from[i]),
        )
        for i in range(len(s))
    ]


def drive(url: str, found: Replayed, api: Any = "chat", **plan: Any) -> Driven:
    async def main() -> Driven:
        endpoint = parse_endpoint(url)
        client = Client(endpoint, endpoint.addresses(), None)
        requests = stage_driving.requests_to(endpoint, api, file=found.recorded)
        options = RunnerOptions(targets=["t"], answer=ANSWERS[api])
        known = {"kind": "open", "duration_s": 0.05, "drain_s": 20.0, "finish_s": 20.0}
        known |= {"index": 0, "schedule": found.schedule, "whole": True} | plan
        result = await stage_driving.played(client, requests, StagePlan(**known), options)
        return Driven(result.meta, sorted(result.records, key=lambda r: r.request_id))

    return on_loop("uvloop", main())


# --- who waits for whom, for how long ---


def test_delays_without_any_timestamp_count_from_the_answer(tmp_path: Path) -> None:
    """aiperf's rows: delay in ms. Two sessions; they begin when the caller says so."""
    path = written(
        tmp_path,
        [
            {"session_id": "a", "input_length": 30, "output_length": 3},
            {"session_id": "b", "input_length": 20, "output_length": 3},
            {"session_id": "a", "input_length": 40, "output_length": 3, "delay": 150},
            {"session_id": "a", "input_length": 50, "output_length": 3, "delay": 50},
        ],
    )
    found = played(path)
    assert not found.says_arrivals
    assert turns(found) == [
        (0.0, 0, [], 0.0, AFTER_END),
        (0.0, 1, [], 0.0, AFTER_END),
        (0.15, 0, [0], 0.15, AFTER_END),
        (0.2, 0, [2], 0.05, AFTER_END),
    ]
    assert turns(played(path, think_scale=2.0, max_think_s=0.2))[2:] == [
        (0.2, 0, [0], 0.2, AFTER_END),
        (0.3, 0, [2], 0.1, AFTER_END),
    ]
    expected = "1 pauses within sessions are cut to 0.2 s"
    assert expected in played(path, think_scale=2.0, max_think_s=0.2).notes[-1]
    at_random = played(path, rate=2.0).schedule
    assert at_random.turn is not None
    begun = at_random.scheduled_s[at_random.turn == 0]
    assert len(begun) == 2
    assert begun.min() > 0  # 2 requests/s of 2 requests a session: a session a second, at random
    with FaultServer() as server:
        driven = drive(server.url, found)
    zero, _, two, three = driven.records
    assert two.scheduled_ns == (zero.ended_ns or 0) + 150_000_000
    assert three.scheduled_ns == (two.ended_ns or 0) + 50_000_000
    # it lasts as long as there is something to send
    assert driven.meta["end_ns"] == three.scheduled_ns + 1
    assert driven.meta["sessions"] == {"begun": 2, "cut": []}


def test_a_first_timestamp_and_delays_behind_it(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        [
            {"session_id": "a", "timestamp": 1000, "input_length": 30, "output_length": 3},
            {"session_id": "a", "input_length": 40, "output_length": 3, "delay": 250},
            {"session_id": "b", "timestamp": 3000, "input_length": 30, "output_length": 3},
        ],
    )
    found = played(path)
    assert found.says_arrivals
    assert turns(found) == [
        (0.0, 0, [], 0.0, AFTER_END),
        (0.25, 0, [0], 0.25, AFTER_END),
        (2.0, 1, [], 0.0, AFTER_END),
    ]
    expected = "t.jsonl: 1 rows have no timestamp: they come a pause after the row above"
    assert expected in " ".join(found.notes)
    # every gap, pauses too
    assert [t[0] for t in turns(played(path, time_scale=2.0))] == [0.0, 0.125, 1.0]
    assert [t[0] for t in turns(played(path, time_scale=2.0, think_scale=1.0))] == [0.0, 0.25, 1.0]


def test_a_text_beside_an_output_length_has_times_in_ms(tmp_path: Path) -> None:
    rows = [
        {"timestamp": at, "text_input": text, "output_length": 3}
        for at, text in ((0, "One."), (250, "Two."))
    ]
    found = played(written(tmp_path, rows))
    assert found.schedule.scheduled_s.tolist() == [0.0, 0.25]
    assert "t.jsonl: column timestamp is read as milliseconds" in found.notes


def test_where_no_ends_are_recorded_starts_are_kept_apart(tmp_path: Path) -> None:
    """Mooncake's rows with a session: start to start as recorded, and never before the answer."""
    rows = [
        {"session_id": "a", "timestamp": at, "input_length": n, "output_length": 3}
        for at, n in ((0, 30), (200, 40), (250, 50))
    ]
    found = played(written(tmp_path, rows))
    assert turns(found) == [
        (0.0, 0, [], 0.0, AFTER_END),
        (0.2, 0, [0], 0.2, AFTER_START),
        (0.25, 0, [1], 0.05, AFTER_START),
    ]
    assert any("does not say when answers ended" in note for note in found.notes)
    with FaultServer(gap_s=0.03) as server:  # three tokens: about 0.06 s or more an answer
        first, second, third = drive(server.url, found).records
    assert second.scheduled_ns == max(first.scheduled_ns + 200_000_000, first.ended_ns or 0)
    assert third.scheduled_ns == max(second.scheduled_ns + 50_000_000, second.ended_ns or 0)


def test_burstgpt_counts_whole_seconds_and_how_long_answers_took(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        [
            "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type",
            "100.0,a,10,GPT-4,30,3,33,Conversation log",
            "109.0,a,5,GPT-4,40,3,43,Conversation log",  # the clock's seconds: it began when the first had ended
            "120.0,a,5,GPT-4,50,3,53,Conversation log",
            "121.0,,5,GPT-4,30,3,33,API log",
        ],
        "b.csv",
    )
    assert turns(played(path)) == [
        (0.0, 0, [], 0.0, AFTER_END),
        (0.0, 0, [0], 0.0, AFTER_END),
        (6.0, 0, [1], 6.0, AFTER_END),
        (21.0, -1, [], 0.0, AFTER_END),
    ]


def test_calls_that_ran_side_by_side_stay_side_by_side() -> None:
    """Spans 2 and 3 overlap (2.5-5 s, 3-5.5 s) behind the first (0-2 s); the fourth, at 6 s, waits
    for both."""
    found = played(DATA / "otel_agent_traces" / "parallel_requests.json")
    assert turns(found)[:4] == [
        (0.0, 0, [], 0.0, AFTER_END),
        (0.5, 0, [0], 0.5, AFTER_END),
        (1.0, 0, [0], 1.0, AFTER_END),
        (1.5, 0, [1, 2], 0.5, AFTER_END),
    ]


def test_a_call_beside_the_first_one_goes_with_its_start(tmp_path: Path) -> None:
    """A title is asked for 0.1 s after the first call, which runs for 2 s; the next turn waits for
    both."""
    rows = [
        {
            "session_id": "a",
            "start_time": at,
            "end_time": end,
            "input_tokens": n,
            "output_tokens": 3,
        }
        for at, end, n in ((0.0, 2.0, 30), (0.1, 0.6, 12), (2.5, 3.0, 40))
    ]
    found = played(written(tmp_path, rows))
    assert turns(found) == [
        (0.0, 0, [], 0.0, AFTER_END),
        (0.1, 0, [0], 0.1, WITH_START),
        (0.6, 0, [0, 1], 0.5, AFTER_END),
    ]
    with FaultServer(gap_s=0.1) as server:
        first, beside, third = drive(server.url, found).records
    assert beside.scheduled_ns == first.scheduled_ns + 100_000_000  # its answer takes 0.2 s or more
    assert beside.scheduled_ns < (first.ended_ns or 0)
    assert third.scheduled_ns == max(first.ended_ns or 0, beside.ended_ns or 0) + 500_000_000


def test_helpers_begin_in_their_callers_session_and_are_waited_for(tmp_path: Path) -> None:
    """A sub-agent's times count from its beginning (at 10 s); blocks are local to the whole run."""
    turn = {"in": 128, "out": 5, "hash_ids": [1, 2], "api_time": 1.0}
    run = {
        "id": "r",
        "block_size": 64,
        "hash_id_scope": "local",
        "requests": [
            {**turn, "t": 0.0},
            {
                "t": 10.0,
                "type": "subagent",
                "agent_id": "h",
                "requests": [
                    {**turn, "t": 0.0, "think_time": 0.0},
                    {**turn, "t": 4.0, "think_time": 3.0},
                ],
            },
            {**turn, "t": 20.0, "think_time": 19.0},
        ],
    }
    pq.write_table(pa.Table.from_pylist([run]), tmp_path / "t.parquet")
    assert turns(played(tmp_path / "t.parquet")) == turns(played(written(tmp_path, [run])))
    found = played(written(tmp_path, [run]))
    # the helper begins 9 s after the first answer; the caller goes on 5 s after the helper's
    # last, at 15 s
    assert [(after, pause) for _, _, after, pause, _ in turns(found)] == [
        ([], 0.0),
        ([0], 9.0),
        ([1], 3.0),
        ([0, 2], 5.0),
    ]
    assert [t[1] for t in turns(found)] == [0, 0, 0, 0]
    # 127 of 128, in blocks of 16
    assert found.schedule.planned_cached_tokens().tolist() == [0, 112, 112, 112]


def test_the_public_agent_runs_are_sessions_with_their_helpers() -> None:
    found = played(DATA / "agentic_coding_sessions_raw.jsonl.gz")
    assert found.counts["sessions"] == 6
    assert len(found.schedule) == 116
    own = [t for t in turns(found) if len(t[2]) > 1]
    # The first helper ends at 1,192.853 s, the caller goes on at 1,209 s; the second ends while
    # that call runs, and
    # the next one has waited 11 s for it, as the file says.
    assert [t[3] for t in own] == [16.147, 11.0]
    with pytest.raises(WorkloadError, match="does not say when its sessions arrived"):
        played(DATA / "agentic_coding_sessions_raw.jsonl.gz", from_s=1.0)


def test_turns_counts_pauses_from_ends_or_starts() -> None:
    """By hand, in ns: 1 goes with the start of 0; 2 waits for 0 and 1; 3 comes 5 s after the start
    of 2 at least."""
    n = 4
    schedule = Schedule(
        np.zeros(n),
        np.full(n, 9),
        np.full(n, 2),
        0,
        session=np.zeros(n, dtype=np.int64),
        turn=np.arange(n, dtype=np.int32),
        think_s=np.array([0.0, 1.0, 2.0, 5.0]),
        after_start=np.array([0, 0, 1, 3, 4]),
        after=np.array([0, 0, 1, 2]),
        counts_from=np.array([AFTER_END, WITH_START, AFTER_END, AFTER_START], dtype=np.int8),
    )
    second = 10**9
    turns = SessionDependencies(schedule)
    assert turns.released(0, 7) == [(1, 7 + second)]
    assert turns.ended(0, 100 * second, False) == ([], [])
    assert turns.released(1, 7 + second) == []
    # two seconds after the later end
    assert turns.ended(1, 30 * second, False) == ([(2, 102 * second)], [])
    assert turns.released(2, 102 * second) == []
    # five after its start, not before its end
    assert turns.ended(2, 103 * second, False) == ([(3, 107 * second)], [])
    assert not turns.over(3)
    slow = SessionDependencies(schedule)
    slow.released(2, 102 * second)
    assert slow.ended(2, 110 * second, False) == ([(3, 110 * second)], [])
    failed = SessionDependencies(schedule)
    assert failed.released(0, 0) == [(1, second)]
    assert failed.ended(0, 5, True) == ([], [2, 3])  # what went with its start goes on
    assert failed.ended(1, 9, False) == ([], [])
    assert failed.over(0)


@pytest.mark.parametrize(
    "none",
    [
        *(
            "nan",
            "None",
            "null",
            "-",
            "NULL",
            " n/a ",
            "<none>",
            "[null]",
            "#N/A",
            r"\N",
            "-1",
            "—",
        ),
        *("unknown", False, "0" * 32, "00000000-0000-0000-0000-000000000000"),
    ],
)
def test_what_stands_for_no_id_is_none(tmp_path: Path, none: str) -> None:
    rows = [
        {"session_id": name, "timestamp": 1.0 + k, "input_tokens": 10, "output_tokens": 3}
        for k, name in enumerate([none, none, "a", "a"])
    ]
    found = played(written(tmp_path, rows))
    assert [t[1] for t in turns(found)] == [-1, -1, 0, 0]
    assert any("2 rows have the session_id" in note for note in found.notes)


@pytest.mark.parametrize("name", ["0", 0, "00000000", "Nana", "na-1", "-10", "none-of-us", "{a}"])
def test_what_looks_like_no_id_may_be_one(tmp_path: Path, name: object) -> None:
    rows = [
        {"session_id": name, "timestamp": at, "input_tokens": 10, "output_tokens": 3}
        for at in (1, 2)
    ]
    assert [t[1] for t in turns(played(written(tmp_path, rows)))] == [0, 0]


def test_a_chat_whose_requests_name_the_one_before(tmp_path: Path) -> None:
    """Qwen-Bailian: every request has a chat_id of its own, and the parent's."""
    rows = json.loads("""[{"chat_id": 7, "parent_chat_id": -1, "timestamp": 0.0,
        "input_length": 20, "output_length": 5, "turn": 1}, {"chat_id": 8,
        "parent_chat_id": -1, "timestamp": 1.0, "input_length": 20, "output_length": 5,
        "turn": 1}, {"chat_id": 9, "parent_chat_id": 7, "timestamp": 9.0,
        "input_length": 40, "output_length": 5, "turn": 2}, {"chat_id": 11,
        "parent_chat_id": 9, "timestamp": 12.0, "input_length": 60, "output_length": 5,
        "turn": 3}]""")
    assert [(t[1], t[2]) for t in turns(played(written(tmp_path, rows)))] == [
        (0, []),
        (1, []),
        (0, [0]),
        (0, [2]),
    ]


def test_sessions_with_a_list_of_their_calls(tmp_path: Path) -> None:
    session = json.loads("""{"session_id": "a", "user": "u",
        "timing_events": [{"timestamp": 5.0, "duration_ms": 1500, "input_tokens": 20,
        "output_tokens": 5}, {"timestamp": 8.0, "duration_ms": 500, "input_tokens": 40,
        "output_tokens": 5}]}""")
    later = {
        **session,
        "session_id": "b",
        "timing_events": [
            {"timestamp": 6.0, "duration_ms": 1000, "input_tokens": 20, "output_tokens": 5}
        ],
    }
    assert turns(played(written(tmp_path, [session, later]))) == [
        (0.0, 0, [], 0.0, AFTER_END),
        (1.0, 1, [], 0.0, AFTER_END),
        (1.5, 0, [0], 1.5, AFTER_END),
    ]


def test_a_list_of_events_says_when_a_call_began_and_ended(tmp_path: Path) -> None:
    """A call with a list of timed events; the calls may be rows, or nested in their session under
    any name."""
    calls = [
        {
            "usage": {"prompt_tokens": n, "completion_tokens": 5},
            "events": [
                {"timestamp": at, "event": "sent"},
                {"timestamp": at + 0.2, "event": "first"},
                {"timestamp": at + 1.0, "event": "done"},
            ],
        }
        for at, n in ((5.0, 20), (8.5, 40))
    ]
    wanted = [(0.0, 0, [], 0.0, AFTER_END), (2.5, 0, [0], 2.5, AFTER_END)]
    assert (
        turns(played(written(tmp_path, [{"session_id": "a", **call} for call in calls]))) == wanted
    )
    assert (
        turns(played(written(tmp_path, [{"conversation_id": "a", "model_calls": calls}]))) == wanted
    )


def test_spreading_thinning_and_looping_keep_sessions_whole(tmp_path: Path) -> None:
    rows = [
        {
            "session_id": f"s{k // 4 % 50}",
            "timestamp": 3000 * (k // 40),
            "input_length": 10 + k % 4,
            "output_length": 3,
        }
        for k in range(200)
    ]
    path = written(tmp_path, rows)
    assert read_trace(path).clock_step_s == 3.0
    found = played(path, loops=2, keep=0.5)
    s = found.schedule
    assert s.session is not None
    assert s.turn is not None
    sizes = np.bincount(s.session)
    assert set(sizes.tolist()) <= {0, 4}
    for session in np.unique(s.session):
        mine = s.session == session
        assert s.turn[mine].tolist() == [0, 1, 2, 3]
        assert s.input_tokens[mine].tolist() == [10, 11, 12, 13]
