"""Recorded sessions: who waits for whom and for how long, what is sent, from each kind of file;
values worked out by hand.
"""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ampacity.loadgen.drive.dependencies import SessionDependencies
from ampacity.loadgen.drive.options import RunnerOptions
from ampacity.loadgen.drive.stage import StageRunner
from ampacity.loadgen.net.http import Client
from ampacity.loadgen.plan import StagePlan
from ampacity.loadgen.receive.answers import ANSWERS
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.send.endpoint import parse_endpoint
from ampacity.loadgen.send.history import AnswerContent
from ampacity.loadgen.send.protocols import RequestShape
from ampacity.loadgen.send.requests import ScheduledRequests
from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.prompts.synthetic import PromptMaker
from ampacity.workloads.prompts.tokenizers import WORDS
from ampacity.workloads.replay import Replayed, replayed
from ampacity.workloads.schedule import AFTER_END, AFTER_START, WITH_START, Schedule
from ampacity.workloads.trace_cuts import Replay
from ampacity.workloads.traces.read import read_trace
from tests.support.fault_server import FaultServer
from tests.support.stage_driving import Driven, on_loop

DATA = Path(__file__).parents[2] / "data" / "traces"


def written(folder: Path, rows: list[Any], name: str = "t.jsonl") -> Path:
    path = folder / name
    path.write_text(
        "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n"
    )
    return path


def played(path: Path, rate: float | None = None, **how: Any) -> Replayed:
    return replayed(read_trace(path, timed=False, keep_texts=True), Replay(**how), 1, rate)


def turns(found: Replayed) -> list[tuple[float, int, list[int], float, int]]:
    """(earliest time, session, what it waits for, pause, what that counts from) of each request."""
    s = found.schedule
    assert s.after_start is not None
    assert s.after is not None
    assert s.session is not None
    assert s.think_s is not None
    assert s.counts_from is not None
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
        shape = RequestShape(api, "m")
        requests = ScheduledRequests(
            [(endpoint, None)], shape, PromptMaker(WORDS, "s"), "run", file=found.recorded
        )
        records: list[RequestRecord] = []
        runner = StageRunner(
            [client],
            requests,
            records.append,
            RunnerOptions(targets=["t"], answer=ANSWERS[shape.api]),
        )
        known = {
            "kind": "open",
            "duration_s": 0.05,
            "drain_s": 20.0,
            "finish_s": 20.0,
            "whole": True,
        } | plan
        result = await runner.run(StagePlan(index=0, schedule=found.schedule, **known))
        await client.close()
        return Driven(result.meta, sorted(records, key=lambda r: r.request_id))

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
    assert (
        "1 pauses within sessions are cut to 0.2 s"
        in played(path, think_scale=2.0, max_think_s=0.2).notes[-1]
    )
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
    assert "t.jsonl: 1 rows have no timestamp: they come a pause after the row above" in " ".join(
        found.notes
    )
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
    for both.
    """
    found = played(DATA / "otel_agent_traces" / "parallel_requests.json")
    assert turns(found)[:4] == [
        (0.0, 0, [], 0.0, AFTER_END),
        (0.5, 0, [0], 0.5, AFTER_END),
        (1.0, 0, [0], 1.0, AFTER_END),
        (1.5, 0, [1, 2], 0.5, AFTER_END),
    ]


def test_a_call_beside_the_first_one_goes_with_its_start(tmp_path: Path) -> None:
    """A title is asked for 0.1 s after the first call, which runs for 2 s; the next turn waits for
    both.
    """
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
    assert found.counts is not None
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
    of 2 at least.
    """
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
    rows = [
        {
            "chat_id": 7,
            "parent_chat_id": -1,
            "timestamp": 0.0,
            "input_length": 20,
            "output_length": 5,
            "turn": 1,
        },
        {
            "chat_id": 8,
            "parent_chat_id": -1,
            "timestamp": 1.0,
            "input_length": 20,
            "output_length": 5,
            "turn": 1,
        },
        {
            "chat_id": 9,
            "parent_chat_id": 7,
            "timestamp": 9.0,
            "input_length": 40,
            "output_length": 5,
            "turn": 2,
        },
        {
            "chat_id": 11,
            "parent_chat_id": 9,
            "timestamp": 12.0,
            "input_length": 60,
            "output_length": 5,
            "turn": 3,
        },
    ]
    assert [(t[1], t[2]) for t in turns(played(written(tmp_path, rows)))] == [
        (0, []),
        (1, []),
        (0, [0]),
        (0, [2]),
    ]


def test_sessions_with_a_list_of_their_calls(tmp_path: Path) -> None:
    session = {
        "session_id": "a",
        "user": "u",
        "timing_events": [
            {"timestamp": 5.0, "duration_ms": 1500, "input_tokens": 20, "output_tokens": 5},
            {"timestamp": 8.0, "duration_ms": 500, "input_tokens": 40, "output_tokens": 5},
        ],
    }
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
    any name.
    """
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


# --- what is sent ---


def test_counts_alone_make_prompts_that_begin_with_the_one_before(tmp_path: Path) -> None:
    rows = [
        {
            "session_id": "a",
            "timestamp": float(k),
            "latency_s": 0.5,
            "input_tokens": n,
            "output_tokens": 3,
        }
        for k, n in enumerate((30, 50, 20, 64))
    ]
    found = played(written(tmp_path, rows), think_scale=0.01)
    assert found.prompts == "made-up text of the recorded lengths, each turn behind the one before"
    assert any(
        "1 later turns are shorter than every turn before them" in note for note in found.notes
    )
    with FaultServer() as server:
        drive(server.url, found)
        texts = [r.body["messages"] for r in server.requests]
    said = [[m["content"].split() for m in messages] for messages in texts]
    assert [[len(words) for words in messages] for messages in said] == [[30], [50], [20], [64]]
    assert said[1][0][:30] == said[0][0]
    assert said[3][0][:50] == said[1][0]  # the longest that is no longer
    assert said[2][0][:4] != said[0][0][:4]
    assert {m["role"] for messages in texts for m in messages} == {"user"}


def test_reported_cached_tokens_are_what_is_shared(tmp_path: Path) -> None:
    """64 of the first prompt's tokens are known from elsewhere, 96 of the second's 160 are the
    first's.
    """
    rows = [
        {
            "session_id": s,
            "timestamp": at,
            "latency_s": 0.1,
            "input_tokens": n,
            "output_tokens": 3,
            "cached_tokens": c,
        }
        for s, at, n, c in (
            ("b", 0.0, 128, 64),
            ("a", 1.0, 128, 64),
            ("a", 2.0, 160, 96),
            ("b", 3.0, 128, 0),
        )
    ]
    s = played(written(tmp_path, rows)).schedule
    assert s.planned_cached_tokens().tolist() == [0, 64, 96, 0]


@pytest.mark.parametrize("sessions", ["none", "one each", "some"])
def test_lone_requests_share_their_reported_cached_tokens(tmp_path: Path, sessions: str) -> None:
    """The first one's come from before the log; each later one finds its own, or all before it."""
    rows = [
        {"timestamp": at, "input_tokens": 160, "output_tokens": 3, "cached_tokens": cached}
        for at, cached in enumerate((128, 64, 0, 144, 96))
    ]
    for k, row in enumerate(rows):
        if sessions == "one each" or (sessions == "some" and k == 2):
            row["session_id"] = k
    found = played(written(tmp_path, rows))
    assert found.schedule.planned_cached_tokens().tolist() == [0, 64, 0, 128, 96]
    if sessions == "none":
        assert found.prompts == "made-up text that shares as many tokens as were cached"


def test_of_two_accounts_of_what_is_shared_the_one_taken_is_named(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_tokens": 64, "output_tokens": 3, "cached_tokens": 9}
    said = "what prompts share is that of their"
    for more, first in (
        ({"hash_ids": [1, 2], "block_size": 32}, "hash_ids; counts of cached tokens are used only"),
        ({"prompt": "Hi"}, "recorded messages; counts of cached tokens are used only"),
        ({"prompt": "Hi", "hash_ids": [1]}, "recorded messages; hash_ids and counts of cached"),
    ):
        notes = " ".join(played(written(tmp_path, [row | more])).notes)
        assert f"{said} {first}" in notes
    assert said not in " ".join(played(written(tmp_path, [row])).notes)


MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "What is this?"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        ],
    },
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "look", "arguments": '{"n": 1.5}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "a cat"},
]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def sent(path: Path, api: Any = "chat", **how: Any) -> tuple[Replayed, list[dict[str, Any]]]:
    found = played(path, **how)
    with FaultServer() as server:
        driven = drive(server.url, found, api)
        assert [r.status for r in driven.records] == ["ok"] * len(driven.records)
        return found, [r.body for r in server.requests]


def test_an_openai_batch_is_sent_as_it_stands(tmp_path: Path) -> None:
    body = {
        "model": "gpt",
        "messages": MESSAGES,
        "tools": TOOLS,
        "tool_choice": "auto",
        "max_tokens": 7,
        "temperature": 0.2,
    }
    path = written(
        tmp_path,
        [{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}],
    )
    found, (got,) = sent(path)
    assert (got["messages"], got["tools"], got["tool_choice"], got["max_tokens"]) == (
        MESSAGES,
        TOOLS,
        "auto",
        7,
    )
    assert got["model"] == "m"  # the run's own
    assert "temperature" not in got
    assert not found.says_arrivals
    assert found.prompts == "messages as recorded (1 of 1 requests)"
    assert any(
        "columns that are not used" in n and "body.temperature" in n and "body.model" in n
        for n in found.notes
    )
    assert any("1 rows have no count of input tokens" in n for n in found.notes)
    assert any(
        "1 rows have no count of output tokens: the request's own limit" in n for n in found.notes
    )


def test_a_litellm_log_with_its_messages_is_played_as_a_session(tmp_path: Path) -> None:
    first = [{"role": "user", "content": "Hello"}]
    more = [*first, {"role": "assistant", "content": "Hi!"}, {"role": "user", "content": "Bye"}]
    rows = [
        {
            "request_id": "x",
            "session_id": "s",
            "startTime": f"2025-03-01T10:00:0{a}Z",
            "endTime": f"2025-03-01T10:00:0{b}Z",
            "prompt_tokens": n,
            "completion_tokens": 2,
            "messages": json.dumps(said),
            "response": "{}",
        }
        for a, b, n, said in ((0, 1, 8, first), (3, 4, 16, more))
    ]
    found, bodies = sent(written(tmp_path, rows), think_scale=0.05)
    assert [b["messages"] for b in bodies] == [first, more]
    assert [t[2:4] for t in turns(found)] == [([], 0.0), ([0], 0.1)]  # 2 s, a twentieth of it
    assert found.schedule.input_tokens.tolist() == [8, 16]


def test_a_langfuse_export_plays_its_generations_alone(tmp_path: Path) -> None:
    generation = {
        "id": "g1",
        "traceId": "t",
        "type": "GENERATION",
        "startTime": "2025-03-01T10:00:00.000Z",
        "endTime": "2025-03-01T10:00:01.000Z",
        "input": {"messages": MESSAGES[:2]},
        "output": {"role": "assistant", "content": "A cat."},
        "usageDetails": {"input": 20, "output": 4, "total": 24},
        "modelParameters": {"max_tokens": 100},
    }
    later = {
        **generation,
        "id": "g2",
        "startTime": "2025-03-01T10:00:01.100Z",
        "endTime": "2025-03-01T10:00:02Z",
        "input": MESSAGES,
    }
    span = {
        "id": "x",
        "traceId": "t",
        "type": "SPAN",
        "name": "tool",
        "startTime": "2025-03-01T10:00:01.000Z",
    }
    for path in (
        written(
            tmp_path,
            [{"id": "t", "sessionId": "s", "observations": [generation, span, later]}],
            "whole.jsonl",
        ),
        written(tmp_path, [generation, span, later], "rows.jsonl"),
    ):
        found, bodies = sent(path)
        assert [b["messages"] for b in bodies] == [MESSAGES[:2], MESSAGES]
        assert [t[1:4] for t in turns(found)] == [(0, [], 0.0), (0, [0], 0.1)]
        assert found.schedule.output_tokens.tolist() == [4, 4]
        assert any("1 entries are no calls of a model" in note for note in found.notes)


def test_spans_in_each_convention_are_sent_as_openai_messages(tmp_path: Path) -> None:
    """OpenTelemetry's parts, and the numbered attributes of OpenLLMetry."""
    parts = [
        {"role": "user", "parts": [{"type": "text", "content": "What is this?"}]},
        {
            "role": "assistant",
            "parts": [{"type": "tool_call", "id": "c1", "name": "look", "arguments": {"n": 1}}],
        },
        {
            "role": "tool",
            "parts": [{"type": "tool_call_response", "id": "c1", "response": "a cat"}],
        },
    ]
    wanted = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is this?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "look", "arguments": '{"n":1}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "a cat"},
    ]
    held = {
        "gen_ai.operation.name": "chat",
        "gen_ai.usage.input_tokens": 9,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.input.messages": json.dumps(parts),
        "gen_ai.system_instructions": json.dumps([{"type": "text", "content": "Be brief."}]),
        "gen_ai.tool.definitions": json.dumps(
            [{"type": "function", "name": "look", "parameters": {}}]
        ),
    }
    numbered = {
        "gen_ai.usage.prompt_tokens": 9,
        "gen_ai.usage.completion_tokens": 3,
        "gen_ai.prompt.0.role": "system",
        "gen_ai.prompt.0.content": "Be brief.",
        "gen_ai.prompt.1.role": "user",
        "gen_ai.prompt.1.content": "What is this?",
    }
    spans = [
        {
            "trace_id": f"t{k}",
            "start_time": f"2026-02-25T10:00:0{k}Z",
            "end_time": f"2026-02-25T10:00:0{k}.5Z",
            "attributes": a,
        }
        for k, a in enumerate((held, numbered))
    ]
    _, bodies = sent(written(tmp_path, spans), time_scale=20.0)
    assert bodies[0]["messages"] == wanted
    assert bodies[0]["tools"] == [
        {"type": "function", "function": {"name": "look", "parameters": {}}}
    ]
    assert bodies[1]["messages"] == wanted[:2]
    assert "tools" not in bodies[1]


def test_texts_of_turns_go_on_with_the_answers_of_this_run(tmp_path: Path) -> None:
    """aiperf's text_input: what each turn adds. A text that holds the one before is sent alone."""
    rows = [
        {"session_id": s, "text_input": text, "output_length": 3, "delay": 10}
        for s, text in (
            ("a", "Name a city."),
            ("a", "And another?"),
            ("b", "One."),
            ("b", "One. Two."),
        )
    ]
    found, bodies = sent(written(tmp_path, rows), rate=50.0)
    said = sorted([m["content"] for m in b["messages"]] for b in bodies)
    assert said == [
        ["Name a city."],
        ["Name a city.", "t0 t1 t2 ", "And another?"],
        ["One."],
        ["One. Two."],
    ]
    s = found.schedule
    # 12 characters are 3 tokens; the second prompt has 3 + 3 of the answer + 3
    by_turn = {(int(e)): int(n) for e, n in zip(s.entry, s.input_tokens, strict=True)}  # type: ignore[arg-type]
    assert by_turn == {0: 3, 1: 9, 2: 1, 3: 3}
    assert (
        found.prompts
        == "messages as recorded (4 of 4 requests); histories with the answers of this run"
    )


def test_texts_that_go_on_with_an_answer_wait_for_it_even_where_calls_overlapped(
    tmp_path: Path,
) -> None:
    rows = [
        {
            "session_id": "a",
            "start_time": at,
            "end_time": end,
            "text_input": text,
            "output_length": 3,
        }
        for at, end, text in ((0.0, 2.0, "One."), (0.5, 1.5, "Two."), (2.5, 3.0, "Three."))
    ]
    found, bodies = sent(written(tmp_path, rows), think_scale=0.1)
    assert [t[2] for t in turns(found)] == [[], [0], [1]]
    assert [m["content"] for m in bodies[2]["messages"]] == [
        "One.",
        "t0 t1 t2 ",
        "Two.",
        "t0 t1 t2 ",
        "Three.",
    ]


def test_rows_whose_messages_cannot_be_read_are_made_up_and_counted(tmp_path: Path) -> None:
    rows = [
        {"timestamp": float(k), "input_tokens": 12, "output_tokens": 3, "messages": said}
        for k, said in enumerate(
            (
                [*MESSAGES[:1], {"role": "user", "content": "Hi"}],
                [{"content": "who?"}],
                [1, 2],
                None,
            )
        )
    ]
    found, bodies = sent(written(tmp_path, rows), time_scale=100.0)
    assert [len(b["messages"]) for b in bodies] == [2, 1, 1, 1]
    assert all(len(b["messages"][0]["content"].split()) == 12 for b in bodies[1:])
    assert (
        found.prompts
        == "messages as recorded (1 of 4 requests); made-up text of the recorded lengths"
    )
    told = [note for note in found.notes if "cannot be read" in note]
    assert len(told) == 2
    assert all(note.startswith("t.jsonl: 1 rows have prompts that cannot be read") for note in told)


def test_half_a_character_in_a_recorded_prompt_is_mended_and_counted(tmp_path: Path) -> None:
    rows = [
        '{"timestamp": 0.0, "output_tokens": 3, "messages": [{"role": "user", "content": "a\\ud83d"}]}',
        '{"timestamp": 0.1, "output_tokens": 3, "messages": [{"role": "user", "content": "\\ud83d\\ude00"}]}',
    ]
    found, bodies = sent(written(tmp_path, rows))
    assert [b["messages"][0]["content"] for b in bodies] == ["a\ufffd", "\U0001f600"]
    assert (
        "t.jsonl: 1 prompts hold half of a character (a lone surrogate): U+FFFD is sent for it"
        in found.notes
    )


def test_messages_in_a_parquet_file_are_sent_as_they_are(tmp_path: Path) -> None:
    said = [[{"role": "user", "content": "Hi"}], MESSAGES[2:]]
    table = pa.table(
        {
            "timestamp": [0.0, 0.1],
            "output_tokens": [3, 3],
            "session_id": ["a", None],
            "messages": [
                [{"name": None, "tool_calls": None, "tool_call_id": None, **m} for m in messages]
                for messages in said
            ],
        }
    )
    pq.write_table(table, tmp_path / "t.parquet")
    _, bodies = sent(tmp_path / "t.parquet")
    assert [b["messages"] for b in bodies] == said


def test_recorded_messages_are_text_for_an_api_without_messages(tmp_path: Path) -> None:
    rows = [{"timestamp": 0.0, "output_tokens": 3, "prompt": "Once upon a time"}]
    _, (body,) = sent(written(tmp_path, rows), "completions")
    assert body["prompt"] == "Once upon a time"


def test_what_the_system_says_stands_apart_where_the_api_has_it_so(tmp_path: Path) -> None:
    """Anthropic's bodies have ``system`` beside the messages; each is sent in the form of the run's
    API.
    """
    anthropic = {"system": "Be brief.", "messages": [{"role": "user", "content": "Hi"}]}
    openai = {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    }
    rows = [
        {"timestamp": float(k), "output_tokens": 3, "body": body}
        for k, body in enumerate((anthropic, openai))
    ]
    found = played(written(tmp_path, rows))
    for api in ("chat", "messages"):
        requests = ScheduledRequests(
            [(parse_endpoint("http://127.0.0.1:1/v1"), None)],
            RequestShape(api, "m"),
            PromptMaker(WORDS, "s"),
            "run",
            file=found.recorded,
        )
        requests.prepare(found.schedule)
        bodies = [json.loads(requests.make(i).split(b"\r\n\r\n", 1)[1]) for i in range(2)]
        wanted = anthropic if api == "messages" else openai
        assert [
            {k: v for k, v in body.items() if k in ("system", "messages")} for body in bodies
        ] == [wanted] * 2


def test_the_whole_recording_travels_to_worker_processes(tmp_path: Path) -> None:
    import pickle

    rows = [
        {
            "session_id": "a",
            "timestamp": float(k),
            "output_tokens": 3,
            "messages": MESSAGES[: k + 2],
        }
        for k in range(3)
    ]
    found = played(written(tmp_path, rows))
    assert found.recorded is not None
    again = pickle.loads(pickle.dumps(found.recorded))
    assert [json.loads(bytes(m)) for m in again.turn(2)] == MESSAGES
    assert len(again.messages) == 4  # each once, however many histories it stands in


ODD: list[Any] = [
    0,
    5,
    1000,
    -3,
    10**20,
    2.5,
    1e300,
    True,
    None,
    "a",
    "nan",
    "-",
    "",
    "Hello",
    "2026-02-25T10:00:00Z",
    "[1,2]",
    "{}",
    "\ud83d x",
    "SPAN",
    "local",
    [],
    [1],
    {},
    {"a": 1},
    [{"role": "user", "content": "x"}],
    [{"role": "user", "parts": [{"type": "text"}]}],
    {"messages": [{"content": 5}]},
    [{"input_tokens": 5, "output_tokens": 2}],
]
FIELDS: dict[str, list[Any]] = {
    "end_time": [1, 4, 10],
    "delay": [0, 100],
    "think_time": [0, 1.5],
    "latency_ms": [0, 3000],
    "hash_ids": [[], [1], [1, 2, 3]],
    "messages": [[{"role": "user", "content": "x" * n}] for n in (1, 30)],
    "text_input": ["word", "word word"],
    "cached_tokens": [0, 16, 90],
    "block_size": [16],
    "max_tokens": [4],
    "parent_session": ["a", "b"],
    "parent_chat_id": ["a"],
    "chat_id": ["a", "b"],
    "requests": [[{"t": 1, "in": 5, "out": 2}]],
    "spans": [[{"attributes": {}}]],
    "tools": [TOOLS],
    "system": ["Be brief."],
    "type": ["TOOL"],
    "hash_id_scope": ["local"],
    "body": [{"messages": MESSAGES}],
    "timing_events": [[{"timestamp": 1}, {"timestamp": 2}]],
    "attributes": [{"gen_ai.usage.input_tokens": 5}],
    "class": ["a"],
    "input_blocks64": [1],
    "blocks_shared_with_prev_turn": [0, 1],
    "scheduled_s": [0.5],
    "after": [[0]],
}


def test_whatever_stands_in_a_file_is_played_or_refused_in_one_line(tmp_path: Path) -> None:
    """Four hundred files with up to five further fields, a third of whose values are odd, and
    columns that lack.
    """
    refused = 0
    for seed in range(400):
        rng = random.Random(seed)
        fields, lacks = (
            rng.sample(list(FIELDS), rng.randint(0, 5)),
            rng.choice(["", "timestamp", "session_id", "input_tokens"]),
        )
        rows = []
        for _ in range(rng.randint(1, 12)):
            row = {
                "session_id": rng.choice("abc"),
                "timestamp": rng.choice([0.5, 1, 2, 3.5, 9]),
                "input_tokens": rng.randint(1, 90),
                "output_tokens": rng.randint(1, 9),
            }
            row |= {
                name: rng.choice(ODD if rng.random() < 0.3 else FIELDS[name])
                for name in fields
                if rng.random() < 0.8
            }
            row.pop(lacks, None)
            rows.append(row)
        try:
            trace = read_trace(
                written(tmp_path, rows), timed=False, keep_texts=True, skip_bad_rows=seed % 4 > 0
            )
            for how in (Replay(), Replay(loops=2, keep=0.7, max_think_s=1.0)):
                found = replayed(trace, how, seed, 2.0)
                assert (
                    found.schedule.shared is None
                    or (found.schedule.shared.totals() <= found.schedule.input_tokens).all()
                )
                requests = ScheduledRequests(
                    [(parse_endpoint("http://127.0.0.1:1/v1"), None)],
                    RequestShape("chat", "m"),
                    PromptMaker(WORDS, "s"),
                    "run",
                    file=found.recorded,
                )
                requests.prepare(found.schedule)
                for i in range(len(found.schedule)):
                    assert json.loads(requests.make(i).split(b"\r\n\r\n", 1)[1])["messages"]
                    requests.answered(i, AnswerContent())
        except WorkloadError as error:
            refused += 1
            assert len(str(error).splitlines()) == 1  # noqa: PT017 - whether it raises is up to the file
    assert 20 < refused < 350
