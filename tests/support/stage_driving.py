"""Runs one stage over real sockets, with a request maker that the test chooses."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ampacity.loadgen.audit import Measures
from ampacity.loadgen.drive.options import RunnerOptions
from ampacity.loadgen.drive.stage import StageRunner
from ampacity.loadgen.net.http import Client, Stamps
from ampacity.loadgen.plan import Limits, StagePlan
from ampacity.loadgen.rundir.records import STATUSES, RequestRecord
from ampacity.loadgen.send.endpoint import Endpoint, parse_endpoint
from ampacity.loadgen.send.history import AnswerContent
from ampacity.loadgen.send.protocols import Api, RequestShape
from ampacity.loadgen.send.requests import ScheduledRequests
from ampacity.workloads.prompts.synthetic import PromptMaker
from ampacity.workloads.prompts.tokenizers import WORDS
from ampacity.workloads.schedule import Schedule
from tests.support.servers.fault_server import FaultServer


@dataclass(frozen=True)
class Driven:
    """What came of a stage: its object in run.json, and its records in the order of their ends."""

    meta: dict[str, Any]
    records: list[RequestRecord]
    measures: Measures = field(default_factory=Measures)

    @property
    def resent(self) -> int:
        return self.measures.resent


NOBODY = parse_endpoint("http://127.0.0.1:1/v1")


def requests_to(
    endpoint: Endpoint = NOBODY, api: Api = "chat", salt: str = "s", **how: Any
) -> ScheduledRequests:
    """Requests of made-up words for model m; ``how``: of ScheduledRequests."""
    prompts = PromptMaker(WORDS, salt)
    return ScheduledRequests([(endpoint, None)], RequestShape(api, "m"), prompts, "run", **how)


def schedule_at(
    times_s: Sequence[float], output_tokens: int = 4, first_request_id: int = 0
) -> Schedule:
    n = len(times_s)
    return Schedule(
        scheduled_s=np.asarray(times_s, dtype=np.float64),
        input_tokens=np.full(n, 8, dtype=np.int64),
        output_tokens=np.full(n, output_tokens, dtype=np.int64),
        first_request_id=first_request_id,
    )


def plan_of(kind: Any, times_s: Sequence[float], duration_s: float, **more: Any) -> StagePlan:
    """Stage 3, of requests 10, 11, ...; ``more``: of the plan, or columns of its schedule."""
    columns = {name: more.pop(name) for name in ("after_start", "after", "session") if name in more}
    schedule = replace(schedule_at(times_s, first_request_id=10), **columns)
    return StagePlan(3, kind, schedule, duration_s, **more)


class Made:
    """Requests from a function of (request id, output tokens); nobody goes on with their answers."""

    def __init__(self, make: Callable[[int, int], bytes]) -> None:
        self._make = make

    def prepare(self, schedule: Schedule) -> None:
        self._schedule = schedule

    def make(self, index: int, target: int) -> bytes:
        return self._make(
            self._schedule.request_id(index), int(self._schedule.output_tokens[index])
        )

    def wanted(self, index: int) -> bool:
        return False

    def answered(self, index: int, told: AnswerContent) -> None:
        assert told == AnswerContent()  # nobody asked


def request_bytes(
    endpoint: Endpoint, output_tokens: int, fault: str = "ok", model: str = "m"
) -> bytes:
    body = RequestShape("chat", model).body("Hello", output_tokens)
    head = f"X-Fault: {fault}\r\nContent-Length: {len(body)}\r\n\r\n"
    return endpoint.request_prefix("chat") + head.encode() + body


def plain(endpoint: Endpoint) -> Made:
    """Requests without a fault."""
    return Made(lambda _, output_tokens: request_bytes(endpoint, output_tokens))


async def played(
    clients: Client | Sequence[Client],
    requests: Made | ScheduledRequests,
    plan: StagePlan,
    options: RunnerOptions | None = None,
) -> Driven:
    """Run one stage with ``clients``, which are closed then."""
    each = [clients] if isinstance(clients, Client) else list(clients)
    records: list[RequestRecord] = []
    try:
        runner = StageRunner(each, requests, records.append, options or RunnerOptions())
        result = await runner.run(plan)
    finally:
        for client in each:
            await client.close()
    return Driven(result.meta, records, result.measures)


async def run_stage(
    url: str,
    schedule: Schedule,
    faults: Callable[[int], str] | None = None,
    *,
    limits: Limits | None = None,
    drain_s: float = 10.0,
    context: Any = None,
    stamps: Stamps = "kernel",
    **plan: Any,
) -> Driven:
    """One open stage (``concurrency=N`` makes it closed); ``faults(request_id)`` names each
    request's fault."""
    endpoint = parse_endpoint(url)
    client = Client(
        endpoint, endpoint.addresses(), context or endpoint.ssl_context(), stamps=stamps
    )
    made = Made(lambda i, output: request_bytes(endpoint, output, faults(i) if faults else "ok"))
    if "concurrency" not in plan:
        plan.setdefault("offered_rps", 1.0)
    plan.setdefault("duration_s", float(schedule.scheduled_s[-1]) if len(schedule) else 0.0)
    kind: Any = "closed" if "concurrency" in plan else "open"
    options = RunnerOptions(limits=limits or Limits())
    return await played(
        client, made, StagePlan(0, kind, schedule, drain_s=drain_s, **plan), options
    )


def served_stage(
    schedule: Schedule | Sequence[float],
    faults: str | Sequence[str] | Callable[[int], str] = "ok",
    *,
    loop: str = "uvloop",
    server: FaultServer | None = None,
    **how: Any,
) -> tuple[Driven, FaultServer]:
    """Run a stage against a fault server, check its records, and return it with the server.

    ``schedule`` may be times in s; ``faults``: of all requests, of each, or by request id."""
    fault_of = (lambda _: faults) if isinstance(faults, str) else faults
    of_each = fault_of if callable(fault_of) else fault_of.__getitem__
    plan = schedule if isinstance(schedule, Schedule) else schedule_at(schedule)
    with server or FaultServer() as running:
        result = on_loop(loop, run_stage(running.url, plan, of_each, **how))
    check_complete(result)
    return result, running


def on_loop(name: str, main: Any) -> Any:
    """Run a coroutine on a fresh loop of asyncio or uvloop."""
    if name == "uvloop":
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(main)
    return asyncio.run(main)


def check_complete(result: Driven, first_request_id: int = 0) -> None:
    """As many rows as were released, each request once, each with one final status."""
    ids = Counter(r.request_id for r in result.records)
    released = result.meta["scheduled_requests"]
    assert set(ids) == set(range(first_request_id, first_request_id + released))
    assert set(ids.values()) <= {1}
    assert {r.status for r in result.records} <= set(STATUSES)
    for record in result.records:
        assert record.ended_ns is not None
        assert (record.status == "ok") == (record.error is None), record
        assert (record.output_tokens is None) == (record.token_source is None)
        times = [
            record.dispatched_ns,
            record.connected_ns,
            record.started_ns,
            record.headers_ns,
            record.first_event_ns,
            record.first_token_ns,
            record.last_token_ns,
            record.ended_ns,
        ]
        known = [t for t in times if t is not None]
        assert known == sorted(known), record
