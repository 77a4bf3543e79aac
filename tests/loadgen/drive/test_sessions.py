"""Sessions, cancellation, classes and several endpoints against the fault server."""

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ampacity.loadgen.drive.dependencies import SessionDependencies
from ampacity.loadgen.drive.options import RunnerOptions
from ampacity.loadgen.drive.stage import StageRunner
from ampacity.loadgen.net.http import Client
from ampacity.loadgen.plan import StagePlan
from ampacity.loadgen.probe.ask import count_message_overhead
from ampacity.loadgen.receive.answers import ANSWERS
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.send.endpoint import parse_endpoint
from ampacity.loadgen.send.history import AnswerContent
from ampacity.loadgen.send.protocols import Api, RequestShape
from ampacity.loadgen.send.requests import RequestMaker, ScheduledRequests
from ampacity.loadgen.workers.pool import deal
from ampacity.workloads.classes import RequestClass
from ampacity.workloads.lengths.parse import Fixed
from ampacity.workloads.profile import Workload
from ampacity.workloads.prompts.files import load_prompts
from ampacity.workloads.prompts.images import parse_images
from ampacity.workloads.prompts.prefixes import parse_prefixes
from ampacity.workloads.prompts.synthetic import PromptMaker
from ampacity.workloads.prompts.tokenizers import WORDS
from ampacity.workloads.schedule import Schedule, open_schedule
from ampacity.workloads.sessions import Sessions
from tests.streams.playing import json_response
from tests.support.servers.fault_server import FaultServer
from tests.support.stage_driving import Driven, on_loop, requests_to

FAULTY = tuple(
    RequestClass(fault, 1.0, Fixed(1), Fixed(1), headers=(("X-Fault", fault),))
    for fault in ("ok", "error_event", "stall")
)


def session(
    *turns: tuple[int, list[int], float], begin_s: float = 0.0, outputs: int = 3, **columns: Any
) -> Schedule:
    """One session; each turn: (whose conversation it continues, what it waits for, its pause)."""
    n = len(turns)
    return Schedule(
        scheduled_s=np.full(n, begin_s),
        input_tokens=np.full(n, 30),
        output_tokens=np.full(n, outputs),
        first_request_id=0,
        session=np.zeros(n, dtype=np.int64),
        turn=np.arange(n, dtype=np.int32),
        think_s=np.array([pause for *_, pause in turns]),
        continues=np.array([c for c, _, _ in turns]),
        new_tokens=np.full(n, 5),
        after_start=np.cumsum([0, *(len(a) for _, a, _ in turns)]),
        after=np.array([k for _, a, _ in turns for k in a], dtype=np.int64),
        **columns,
    )


CHAT = ((-1, [], 0.0), (0, [0], 0.15), (1, [1], 0.0))


def workload(inputs: int, outputs: int, turns: int | None = None, **more: Any) -> Workload:
    sessions = (
        None if turns is None else Sessions(turns=Fixed(turns), think_ms=more.pop("think", None))
    )
    return Workload("w", Fixed(inputs), Fixed(outputs), sessions=sessions, **more)


class Prepared:
    """Requests of a schedule to an endpoint that nobody calls."""

    def __init__(self, schedule: Schedule, api: Api = "chat", salt: str = "s", **how: Any) -> None:
        self.requests = requests_to(api=api, salt=salt, **how)
        self.requests.prepare(schedule)

    def body(self, index: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.requests.make(index).partition(b"\r\n\r\n")[2])
        return found


async def drive(
    urls: Sequence[str],
    schedule: Schedule,
    *,
    stop_when: Callable[[], bool] | None = None,
    shape: RequestShape | None = None,
    classes: Sequence[RequestClass] = FAULTY,
    salt: str = "s",
    planned: bool = False,
    **plan: Any,
) -> Driven:
    endpoints = [parse_endpoint(url) for url in urls]
    clients = [Client(e, e.addresses(), None) for e in endpoints]
    shape = shape or RequestShape("chat", "m")
    requests = ScheduledRequests(
        [(e, None) for e in endpoints],
        shape,
        PromptMaker(WORDS, salt),
        "run",
        classes=classes,
        planned_histories=planned,
    )
    records: list[RequestRecord] = []
    runner = StageRunner(
        clients,
        requests,
        records.append,
        RunnerOptions(targets=[f"{e.host}:{e.port}" for e in endpoints], answer=ANSWERS[shape.api]),
    )
    usual = {"kind": "open", "duration_s": 0.3, "offered_rps": 1.0, "drain_s": 20, "finish_s": 20}
    plan = usual | plan

    async def interrupt() -> None:
        while not (stop_when and stop_when()):
            await asyncio.sleep(0.01)
        runner.stop("interrupted by Ctrl-C")

    watching = asyncio.create_task(interrupt())
    result = await runner.run(StagePlan(index=2, schedule=schedule, **plan))
    watching.cancel()
    for client in clients:
        await client.close()
    return Driven(result.meta, sorted(records, key=lambda r: r.request_id))


def said(server: FaultServer, k: int) -> list[tuple[str, int | str]]:
    """Role of each message, with an answer's text or the number of words of a prompt."""
    return [
        (
            m["role"],
            m["content"]
            if m["role"] == "assistant" or m["content"][0] in "(t"
            else len(m["content"].split()),
        )
        for m in server.requests[k].body["messages"]
    ]


def test_a_turn_waits_for_the_answer_and_tells_it_again() -> None:
    with FaultServer() as server:
        driven = on_loop("uvloop", drive([server.url], session(*CHAT)))
        assert [r.status for r in driven.records] == ["ok"] * 3
        answer = "assistant", "t0 t1 t2 "
        assert said(server, 2) == [("user", 30), answer, ("user", 5), answer, ("user", 5)]
        bodies = [r.body["messages"] for r in server.requests]
        assert bodies[2][: len(bodies[1])] == bodies[1]  # each is the beginning of the next
        assert bodies[1][: len(bodies[0])] == bodies[0]
    one, two, three = driven.records
    assert two.ended_ns is not None
    assert two.scheduled_ns == one.ended_ns + 150_000_000
    assert three.scheduled_ns == two.ended_ns
    assert [(r.session_id, r.turn) for r in driven.records] == [("2-0", 0), ("2-0", 1), ("2-0", 2)]
    assert driven.meta["scheduled_requests"] == 3
    assert driven.meta["sessions"] == {"begun": 1, "cut": []}


def test_sessions_begin_on_time_however_slow_the_answers_are() -> None:
    load = workload(20, 5, turns=3, arrivals="constant")
    schedule = open_schedule(load, rate_rps=60, duration_s=0.5, seed=1, stage=0)
    begins = {}
    for gap_s in (0.0, 0.03):
        with FaultServer(gap_s=gap_s) as server:
            driven = on_loop("uvloop", drive([server.url], schedule, duration_s=0.5))
        assert Counter(r.status for r in driven.records) == {"ok": 30}
        begins[gap_s] = [
            r.scheduled_ns - driven.meta["start_ns"] for r in driven.records if r.turn == 0
        ]
        ends = {(r.session_id, r.turn): r.ended_ns for r in driven.records}
        for r in driven.records:
            assert r.turn is not None
            assert not r.turn or r.scheduled_ns == ends[r.session_id, r.turn - 1]
    assert begins[0.0] == begins[0.03]
    assert len(begins[0.0]) == 10


@pytest.mark.parametrize("continues", [False, True])
def test_a_failed_turn_ends_its_session_or_not_as_asked(continues: bool) -> None:
    schedule = session(
        *CHAT, class_index=np.array([0, 1, 0], dtype=np.int16), class_names=("ok", "error_event")
    )
    with FaultServer() as server:
        driven = on_loop("uvloop", drive([server.url], schedule, end_on_failure=not continues))
        sent = len(server.requests)
        last = said(server, -1)
    statuses = [r.status for r in driven.records]
    assert [r.class_ for r in driven.records] == ["ok", "error_event", "ok"]
    if continues:
        assert statuses == ["ok", "stream_error", "ok"]
        assert last[3] == ("assistant", "t0 t1 ")  # as far as it came
    else:
        assert statuses == ["ok", "stream_error", "cancelled"]
        assert sent == 2
        gone = driven.records[2]
        assert gone.error == "turn 1 of its session failed"
        assert gone.dispatched_ns is None
        assert gone.scheduled_ns == driven.records[1].ended_ns
    assert driven.meta["scheduled_requests"] == 3
    assert driven.meta["sessions"] == {"begun": 1, "cut": []}  # it ended, it was not cut


def test_an_agent_goes_on_when_all_its_helpers_have_answered() -> None:
    plan = session((-1, [], 0), (-1, [0], 0.02), (-1, [0], 0.05), (0, [1, 2], 0.0), outputs=4)
    with FaultServer() as server:
        driven = on_loop("asyncio", drive([server.url], plan))
        join = said(server, 3)
    answer = "t0 t1 t2 t3 "
    assert join == [("user", 30), ("assistant", answer), ("user", answer), ("user", answer)]
    ends = [r.ended_ns or 0 for r in driven.records]
    assert driven.records[3].scheduled_ns == max(ends[1:3])
    assert ends[2] > ends[1]


def test_planned_histories_have_the_planned_length() -> None:
    with FaultServer() as server:
        driven = on_loop("uvloop", drive([server.url], session(*CHAT, outputs=9), planned=True))
        history = server.requests[2].body["messages"]
    assert [r.input_tokens_planned for r in driven.records] == session(
        *CHAT, outputs=9
    ).input_tokens.tolist()
    assert [len(m["content"].split()) for m in history] == [30, 9, 5, 9, 5]
    assert "t0" not in json.dumps(history)


@pytest.mark.parametrize("api", ["completions", "responses", "messages"])
def test_other_apis_tell_the_whole_conversation_too(api: Any) -> None:
    prefixes = parse_prefixes([{"name": "system", "tokens": 7}], "p")
    load = workload(20, 3, turns=2, arrivals="constant", prefixes=prefixes)
    prepared = Prepared(open_schedule(load, rate_rps=2, duration_s=1, seed=1, stage=0), api)
    prepared.body(0)
    prepared.requests.answered(0, AnswerContent("the answer"))
    body = prepared.body(1)
    if api == "completions":
        assert len(body["prompt"].split()) == 7 + 20 + 2 + 20
        assert "the answer" in body["prompt"]
    else:
        told = body["input" if api == "responses" else "messages"]
        first = "system" if api == "responses" else "user"
        assert [m["role"] for m in told] == [first, "user", "assistant", "user"]


def test_users_who_leave_are_counted_apart_and_harm_nobody() -> None:
    n = 9
    schedule = Schedule(
        np.arange(n) * 0.01,
        np.full(n, 8),
        np.full(n, 60),
        0,
        cancel_after_tokens=np.array([5, 0, 0] * 3),
        cancel_after_s=np.array([np.nan, 0.15, np.nan] * 3),
    )
    with FaultServer(gap_s=0.01) as server:
        driven = on_loop("uvloop", drive([server.url], schedule))
    by_kind = [driven.records[k::3] for k in range(3)]
    for r in by_kind[0]:
        assert (r.status, r.error) == ("cancelled", "the user left after 5 tokens")
        assert len(r.chunk_at_us) == 5
    for r in by_kind[1]:
        assert (r.status, r.error) == ("cancelled", "the user left after 0.15 s")
        assert len(r.chunk_at_us) < 60
        assert (r.ended_ns or 0) - (r.dispatched_ns or 0) >= 149_000_000
    assert all(r.status == "ok" and r.output_tokens == 60 for r in by_kind[2])


def test_each_class_has_its_fields_headers_and_model_on_the_wire() -> None:
    one, own = Fixed(1), {"extra_body": {"temperature": 0.5}, "headers": (("X-Tenant", "gold"),)}
    classes = (
        RequestClass("chat", 1, one, one, **own),
        RequestClass("batch", 1, one, one, priority=9),
    )
    schedule = Schedule(
        np.zeros(4),
        np.full(4, 8),
        np.full(4, 2),
        0,
        class_names=("chat", "batch"),
        class_index=np.array([0, 1, 0, 1], dtype=np.int16),
        model_names=("lora-a",),
        model_index=np.array([-1, -1, 0, 0], dtype=np.int16),
    )
    shape = RequestShape("chat", "m", extra={"temperature": 1.0, "top_k": 3})
    with FaultServer(models=("m", "lora-a")) as server:
        driven = on_loop("uvloop", drive([server.url], schedule, classes=classes, shape=shape))
        found = {int(r.headers["x-request-id"].split("-")[1]): r for r in server.requests}
    assert [r.class_ for r in driven.records] == ["chat", "batch", "chat", "batch"]
    assert [found[i].body["model"] for i in range(4)] == ["m", "m", "lora-a", "lora-a"]
    assert [found[i].body["temperature"] for i in range(4)] == [0.5, 1.0, 0.5, 1.0]
    assert [found[i].body.get("priority") for i in range(4)] == [None, 9, None, 9]
    assert [found[i].headers.get("x-tenant") for i in range(4)] == ["gold", None, "gold", None]
    assert all(found[i].body["top_k"] == 3 for i in range(4))


@pytest.mark.parametrize("sticky", [False, True])
def test_requests_go_round_the_endpoints_or_stay_with_their_session(sticky: bool) -> None:
    load = workload(20, 2, turns=3, arrivals="constant")
    schedule = open_schedule(load, rate_rps=60, duration_s=0.5, seed=1, stage=0)
    with FaultServer() as a, FaultServer() as b:
        driven = on_loop("uvloop", drive([a.url, b.url], schedule, sticky=sticky, duration_s=0.5))
        assert len(a.requests) + len(b.requests) == 30
    assert Counter(r.target for r in driven.records) == {
        f"127.0.0.1:{a.port}": 15,
        f"127.0.0.1:{b.port}": 15,
    }
    sessions: dict[str | None, set[str | None]] = {}
    for r in driven.records:
        sessions.setdefault(r.session_id, set()).add(r.target)
    assert all(len(targets) == 1 for targets in sessions.values()) == sticky


def test_ctrl_c_leaves_one_row_for_every_request_that_was_due_and_names_what_was_cut() -> None:
    schedule = session(
        *CHAT,
        class_index=np.array([0, 2, 0], dtype=np.int16),
        class_names=("ok", "error_event", "stall"),
    )
    with FaultServer() as server:
        driven = on_loop(
            "uvloop",
            drive(
                [server.url], schedule, stop_when=lambda: len(server.requests) == 2, duration_s=30.0
            ),
        )
    assert [r.status for r in driven.records] == ["ok", "unfinished"]
    assert driven.meta["scheduled_requests"] == 2
    assert driven.meta["ended_early"] == "interrupted by Ctrl-C"
    assert driven.meta["sessions"] == {"begun": 1, "cut": ["2-0"]}


def test_turns_that_would_come_too_late_after_the_stage_are_not_sent() -> None:
    late = session((-1, [], 0), (0, [0], 0.05), (1, [1], 60.0))
    with FaultServer() as server:
        driven = on_loop("uvloop", drive([server.url], late, duration_s=0.1, finish_s=20.0))
        assert len(server.requests) == 2
    assert driven.meta["scheduled_requests"] == len(driven.records) == 2
    assert driven.meta["sessions"] == {"begun": 1, "cut": ["2-0"]}


@pytest.mark.parametrize("limits", [{"max_requests": 2}, {"max_tokens": 70}])
def test_a_session_that_a_limit_shortens_is_cut_off(limits: dict[str, int]) -> None:
    whole = session((-1, [], 0), (0, [0], 0.01), (1, [1], 0.01))
    part, _ = whole.capped(**limits)
    assert 0 < len(part) < len(whole)
    with FaultServer() as server:
        driven = on_loop("uvloop", drive([server.url], part, duration_s=0.1, finish_s=20.0))
    assert len(driven.records) == len(part)
    assert driven.meta["sessions"] == {"begun": 1, "cut": ["2-0"]}


def test_a_closed_loop_plays_so_many_sessions_at_once() -> None:
    load = workload(20, 2, turns=3, think=Fixed(20))
    schedule, _ = open_schedule(load, rate_rps=900, duration_s=1, seed=1, stage=0).capped(50)
    closed = {"kind": "closed", "offered_rps": None, "concurrency": 4, "duration_s": 0.5}
    with FaultServer(gap_s=0.002) as server:
        driven = on_loop("uvloop", drive([server.url], schedule, **closed))
    spans: dict[str, tuple[int, int]] = {}
    for r in driven.records:
        low, high = spans.get(str(r.session_id), (r.scheduled_ns, 0))
        spans[str(r.session_id)] = min(low, r.scheduled_ns), max(high, r.ended_ns or 0)
    changes = sorted(
        [(low, 1) for low, _ in spans.values()] + [(high, -1) for _, high in spans.values()]
    )
    assert np.cumsum([change for _, change in changes]).max() == 4
    # every session is whole
    assert Counter(r.session_id for r in driven.records).most_common()[-1][1] == 3
    assert len(driven.records) <= 50


def test_a_dead_workers_turns_are_owed_when_all_that_they_wait_for_has_a_row() -> None:
    from ampacity.loadgen.drive.cut import owed_by, sessions_of

    schedule = session(*CHAT)
    share = StagePlan(2, "open", schedule, 10.0, offered_rps=1.0)
    assert [r.request_id for r in owed_by(share, 0, 10**9, {})] == [0]
    owed = owed_by(share, 0, 10**9, {0: 5 * 10**8})
    assert [(r.request_id, r.scheduled_ns, r.turn) for r in owed] == [(1, 650_000_000, 1)]
    assert sessions_of(share, {0}, [owed[0].session_id]) == {"begun": 1, "cut": ["2-0"]}
    alone = replace(share, schedule=replace(schedule, session=np.array([-1, 0, 0])))
    assert sessions_of(alone, {0, 1}, [None, "2-0"]) == {"begun": 1, "cut": ["2-0"]}
    assert sessions_of(alone, {0}, [None]) == {"begun": 0, "cut": []}
    assert owed_by(share, 0, 6 * 10**8, {0: 5 * 10**8}) == []  # its pause was not over
    assert owed_by(share, 0, 10**9, {0: 1, 1: 2, 2: 3}) == []
    assert sessions_of(share, {0: 1, 1: 2, 2: 3}, []) == {"begun": 1, "cut": []}


def prompts_of(schedule: Schedule, salt: str) -> dict[int, str]:
    """A hash of the messages of every request that begins a conversation."""
    prepared, found = Prepared(schedule, salt=salt), {}
    for i in schedule.first_requests().tolist():
        messages = json.dumps(prepared.body(i)["messages"]).encode()
        found[schedule.request_id(i)] = hashlib.sha256(messages).hexdigest()
    return found


def test_any_number_of_workers_says_the_same_and_another_salt_says_all_else() -> None:
    load = workload(40, 3, turns=2)
    how = {"rate_rps": 200.0, "duration_s": 2, "seed": 1}
    stages = [open_schedule(load, **how, stage=k, first_request_id=1000 * k) for k in (0, 1)]
    whole = [prompts_of(stage, "salt") for stage in stages]
    for workers in (3, 8):
        shares = deal(StagePlan(0, "open", stages[0], 2.0, offered_rps=200.0), workers)
        dealt: dict[int, str] = {}
        for share in shares:
            dealt |= prompts_of(share.schedule, "salt")
        assert dealt == whole[0]
    hashes = [h for stage in [*whole, prompts_of(stages[0], "other")] for h in stage.values()]
    assert len(set(hashes)) == len(hashes) > 500
    again = open_schedule(load, **how, stage=0)
    for column in "scheduled_s input_tokens output_tokens session turn think_s after".split():
        assert getattr(again, column).tobytes() == getattr(stages[0], column).tobytes()


def test_turns_without_a_clock() -> None:
    turns = SessionDependencies(
        session((-1, [], 0), (-1, [0], 1.0), (-1, [0], 2.0), (0, [1, 2], 3.0))
    )
    assert turns.ended(0, 10, False) == ([(1, 10 + 10**9), (2, 10 + 2 * 10**9)], [])
    assert turns.ended(2, 50, False) == ([], [])
    assert turns.ended(1, 40, False) == ([(3, 50 + 3 * 10**9)], [])
    failing = SessionDependencies(session((-1, [], 0), (-1, [0], 0), (-1, [0], 0), (0, [1, 2], 0)))
    failing.released(0, 0)
    failing.ended(0, 1, False)
    assert failing.ended(1, 2, True) == ([], [3])
    assert not failing.over(1)
    assert failing.ended(2, 3, True) == ([], [])  # the join is given up once
    assert failing.over(2)
    assert failing.cut() == []


def bodies(schedule: Schedule, **how: Any) -> list[Any]:
    """The bodies of a schedule's requests in their order, every answer "said"."""
    prepared, found = Prepared(schedule, **how), []
    for i in range(len(schedule)):
        found.append(prepared.body(i))
        wanted = prepared.requests.wanted(i)
        prepared.requests.answered(i, AnswerContent("said" if wanted else ""))
    return found


@pytest.mark.parametrize("planned", [False, True])
def test_every_turn_of_a_recorded_conversation_is_the_beginning_of_the_next(
    tmp_path: Path, planned: bool
) -> None:
    told = ["one two", "recorded answer", "three", "recorded too", "four"]
    turns = [
        {"from": "human" if k % 2 == 0 else "gpt", "value": text} for k, text in enumerate(told)
    ]
    (tmp_path / "p.jsonl").write_text(json.dumps({"conversations": turns}))
    prompts = load_prompts(tmp_path / "p.jsonl", WORDS)
    load = workload(5, 5, arrivals="constant", prompts=prompts)
    schedule = open_schedule(load, rate_rps=3, duration_s=1, seed=1, stage=0)
    found = [b["messages"] for b in bodies(schedule, file=prompts.file, planned_histories=planned)]
    assert [len(m) for m in found] == [1, 3, 5]
    assert found[2][:3] == found[1]
    assert found[1][:1] == found[0]
    answers = ["recorded answer", "recorded too"] if planned else ["said", "said"]
    assert [m["content"] for m in found[2]] == ["one two", answers[0], "three", answers[1], "four"]


def test_images_are_parts_of_the_message() -> None:
    schedule = Schedule(np.zeros(2), np.full(2, 9), np.full(2, 2), 0)
    found = bodies(schedule, images=parse_images({"count": 2, "sizes": ["8x8"]}, "images"))
    (message,) = found[0]["messages"]
    assert [part["type"] for part in message["content"]] == ["text", "image_url", "image_url"]
    assert len(message["content"][0]["text"].split()) == 9
    urls = [
        part["image_url"]["url"] for body in found for part in body["messages"][0]["content"][1:]
    ]
    assert len(set(urls)) == 4
    assert all(url.startswith("data:image/png;base64,") for url in urls)


@pytest.mark.parametrize(("each", "expected"), [(0, 0), (5, 5), (None, 0)])
def test_the_templates_tokens_for_each_message_are_measured(
    each: int | None, expected: int
) -> None:
    """A server that counts words, 3 for the whole, ``each`` per message; None: it does not."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        messages = json.loads(await reader.readexactly(length))["messages"]
        words = sum(len(m["content"].split()) for m in messages)
        prompt = words + 3 + (each or 0) * len(messages)
        usage = None if each is None else {"prompt_tokens": prompt, "completion_tokens": 1}
        choice = {"message": {"role": "assistant", "content": "x"}, "finish_reason": "length"}
        writer.write(json_response(json.dumps({"choices": [choice], "usage": usage}).encode()))
        await writer.drain()
        writer.close()

    async def main() -> int:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        endpoint = parse_endpoint(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")
        client = Client(endpoint, endpoint.addresses(), None)
        maker = RequestMaker(endpoint, PromptMaker(WORDS, "s"), "run")
        found = await count_message_overhead(client, RequestShape("chat", "m"), maker.saying)
        await client.close()
        server.close()
        return found

    assert on_loop("asyncio", main()) == expected
