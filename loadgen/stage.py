"""Runs one stage: an open-loop schedule, or a closed loop of a set concurrency, down to its records.

Every request that was released ends as exactly one record. In a closed loop a request is scheduled
at the moment the one before it (of the same virtual user) has ended.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from loadgen.answers import Answer
from loadgen.audit import Measures, StageWatch
from loadgen.endpoint import redact
from loadgen.exchange import Exchange
from loadgen.http import Client
from loadgen.pacer import Sleeper, pace
from loadgen.records import RequestRecord
from workloads.schedule import Schedule

LEAD_S = 0.1  # between the call and the first deadline
WATCH_S = 0.1  # how often time limits are looked at
FLUSH_TURNS = 10  # of the watch: what a kill may take is a second's records
RETRIED_HTTP = (429, 502, 503, 504)
RETRY_PAUSE_S = 0.5  # doubled with each attempt, where the server names no Retry-After
RETRY_PAUSE_MAX_S = 60.0
DEAD_SERVER_PAUSE_S = 0.1  # a virtual user of a closed loop that found no server
LIVE_TTFTS = 400  # first tokens that the live percentiles rest on
READY_MAX = 512  # requests prepared ahead of their deadline ...
READY_MAX_BYTES = 16 * 2**20  # ... and how much they may weigh


@dataclass(frozen=True)
class StagePlan:
    """One load level. ``offered_rps`` of an open stage, ``concurrency`` of a closed one."""

    index: int
    kind: Literal["open", "closed"]
    schedule: Schedule
    duration_s: float
    offered_rps: float | None = None
    concurrency: int | None = None
    max_requests: int | None = None  # closed loop: the budget's end
    max_tokens: int | None = None
    id_step: int = 1  # request i of the schedule has the id first_request_id + i * id_step
    think_s: float = 0.0  # closed loop: a virtual user's pause between an answer and its next request
    drain_s: float = 30.0  # how long answers are waited for after the last deadline


@dataclass(frozen=True)
class Limits:
    """The client's own time limits. None: no limit."""

    total_s: float | None = None
    idle_s: float | None = 120.0  # without a single byte from the server
    in_flight: int | None = None  # more than so many at once are shed: recorded, never sent
    retries: int = 0  # further attempts after 429, 502, 503, 504, no connection or a reset; each is a row


@dataclass
class Live:
    """Counters of the stage that is going on, for the progress line."""

    stage: int = 0
    kind: str = "open"
    level: float = 0.0  # offered requests/s, or the set concurrency
    began_s: float = 0.0
    duration_s: float = 0.0
    released: int = 0
    ended: int = 0
    failed: int = 0
    tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)

    def counts(self) -> tuple[int, int, int, int, list[float]]:
        """Released, ended, failed, tokens, and the latest TTFTs: what a worker tells its parent."""
        return self.released, self.ended, self.failed, self.tokens, self.ttft_s[-LIVE_TTFTS:]

    @property
    def in_flight(self) -> int:
        """Requests released and not ended."""
        return self.released - self.ended


@dataclass(frozen=True)
class StageResult:
    """``meta`` is the stage's object in run.json, but for its audit, which is judged from ``measures``.

    ``ids_used``: request ids from the schedule's first on that are taken now.
    """

    meta: dict[str, Any]
    measures: Measures
    ids_used: int


class StageRunner:
    """Carries out stages one after the other over one client."""

    def __init__(
        self,
        client: Client,
        make_request: Callable[[int, int, int], bytes],
        on_record: Callable[[RequestRecord], None],
        *,
        limits: Limits | None = None,
        target: str | None = None,
        secrets: tuple[str, ...] = (),
        flush: Callable[[], str | None] = lambda: None,
        worker: int = 0,
        answer: type[Answer] = Answer,
    ) -> None:
        """``make_request(request_id, input_tokens, output_tokens)`` gives the bytes of a whole request.

        ``flush`` is called about once a second; a reason that it gives back ends the stage.
        """
        self._client = client
        self._make_request = make_request
        self._on_record = on_record
        self._limits = limits or Limits()
        self._target = target
        self._secrets = secrets
        self._flush = flush
        self._worker = worker
        self._answer = answer
        self._in_flight: set[Exchange] = set()
        self._stop_reason: str | None = None
        self._decided: str | None = None  # why the stage that is going on need not go on
        self._refill: Callable[[RequestRecord], None] | None = None
        self._live = Live()

    @property
    def live(self) -> Live:
        """Counters of the stage that is going on."""
        return self._live

    def stop(self, reason: str) -> None:
        """End the stage that is going on: nothing more is sent, what is in flight becomes unfinished."""
        self._stop_reason = self._stop_reason or reason

    def finish_stage(self, reason: str) -> None:
        """Send nothing more in this stage: it has told enough. What is in flight is waited for."""
        self._decided = self._decided or reason

    @property
    def stopped(self) -> str | None:
        """Why ``stop`` was called, or None."""
        return self._stop_reason

    def prepare(self, plan: StagePlan) -> None:
        """Make the first requests of a stage ready, before its clock starts."""
        self._plan = plan
        self._ready: deque[bytes] = deque()
        self._ready_bytes = self._prepared = 0
        self._measures = Measures()
        self._retrying = 0  # attempts that wait for their turn
        self._decided = None
        self._closing = False
        self._client.receive_delays_s = self._measures.receive_delays_s
        self._prepare(READY_MAX)

    async def run(self, plan: StagePlan, on_start: Callable[[int], None] | None = None) -> StageResult:
        """Run one stage to its end, drained."""
        self.prepare(plan)
        start_ns = time.monotonic_ns() + int(LEAD_S * 1e9)
        if on_start is not None:
            on_start(start_ns)
        return await self.run_prepared(start_ns)

    async def run_prepared(self, start_ns: int) -> StageResult:
        """Run the stage that ``prepare`` was called for; its clock starts at ``start_ns``."""
        plan = self._plan
        level = plan.offered_rps if plan.kind == "open" else plan.concurrency
        self._live = Live(
            stage=plan.index, kind=plan.kind, level=float(level or 0), began_s=start_ns / 1e9,
            duration_s=plan.duration_s,
        )  # fmt: skip
        gc.collect()
        gc.freeze()  # what lives now is not looked at again in every collection of the stage
        shortages = self._client.shortages
        pacing, beating = Sleeper(), Sleeper()
        try:
            async with StageWatch(beating, self._measures):
                watcher = asyncio.create_task(self._watch())
                drive = self._drive_open if plan.kind == "open" else self._drive_closed
                released, ended_early = await drive(start_ns, pacing)
                end_ns = start_ns + int(plan.duration_s * 1e9)
                if ended_early or self._decided:
                    end_ns = min(end_ns, time.monotonic_ns())
                await self._drain(plan.drain_s)
                watcher.cancel()
            self._measures.shortages = self._client.shortages - shortages
        finally:
            gc.unfreeze()
            pacing.close()
            beating.close()
        meta = {
            "index": plan.index, "kind": plan.kind, "offered_rps": plan.offered_rps, "concurrency": plan.concurrency,
            "start_ns": start_ns, "end_ns": end_ns, "scheduled_requests": released,
            "drained_ns": time.monotonic_ns(), "ended_early": ended_early, "decided_early": self._decided,
        }  # fmt: skip
        return StageResult(meta=meta, measures=self._measures, ids_used=released)

    # -- the two loops ---------------------------------------------------------------------------

    async def _drive_open(self, start_ns: int, sleeper: Sleeper) -> tuple[int, str | None]:
        schedule = self._plan.schedule
        scheduled_ns = start_ns + np.round(schedule.scheduled_s * 1e9).astype(np.int64)

        def release(index: int, now_ns: int) -> None:
            self._send(index, int(scheduled_ns[index]), now_ns)

        released = await pace(
            scheduled_ns, release, lambda: bool(self._stop_reason or self._decided), sleeper
        )
        if not self._stop_reason:
            await self._sleep_until(start_ns + int(self._plan.duration_s * 1e9))
        return released, self._stop_reason

    async def _drive_closed(self, start_ns: int, sleeper: Sleeper) -> tuple[int, str | None]:
        plan = self._plan
        end_ns = start_ns + int(plan.duration_s * 1e9)
        total = len(plan.schedule.scheduled_s)
        sent = tokens = 0
        reason: str | None = None

        def next_request() -> None:
            nonlocal sent, tokens, reason
            now_ns = time.monotonic_ns()
            if reason or self._stop_reason or self._decided or now_ns >= end_ns:
                return
            if sent >= total or (plan.max_requests is not None and sent >= plan.max_requests):
                reason = (
                    f"the limit of {plan.max_requests} requests"
                    if sent < total
                    else "the schedule is used up"
                )
                return
            need = int(plan.schedule.input_tokens[sent] + plan.schedule.output_tokens[sent])
            if plan.max_tokens is not None and tokens + need > plan.max_tokens:
                reason = f"the limit of {plan.max_tokens} planned tokens"
                return
            index, sent, tokens = sent, sent + 1, tokens + need
            self._send(index, now_ns, now_ns)

        await sleeper.until(start_ns)
        loop = asyncio.get_running_loop()

        def refill(after: RequestRecord) -> None:
            # later, not now: an error that ends at once must neither recurse nor spin on a dead server
            loop.call_later(
                max(plan.think_s, DEAD_SERVER_PAUSE_S if after.status == "connect_error" else 0.0),
                next_request,
            )

        self._refill = refill
        for user in range(plan.concurrency or 1):  # with think time the users come in spread over one pause
            loop.call_later(plan.think_s * user / (plan.concurrency or 1), next_request)
        while time.monotonic_ns() < end_ns and not (reason or self._stop_reason or self._decided):
            await asyncio.sleep(min(0.05, max((end_ns - time.monotonic_ns()) / 1e9, 0.0)))
        self._refill = None
        return sent, self._stop_reason or reason

    async def _sleep_until(self, deadline_ns: int) -> None:
        while (left_s := (deadline_ns - time.monotonic_ns()) / 1e9) > 0 and not (
            self._stop_reason or self._decided
        ):
            await asyncio.sleep(min(left_s, 0.1))

    async def _drain(self, drain_s: float) -> None:
        give_up_s = time.monotonic() + drain_s
        while (self._in_flight or self._retrying) and not self._stop_reason and time.monotonic() < give_up_s:
            await asyncio.sleep(0.02)
        self._closing = True
        why = self._stop_reason or f"not answered within {drain_s:g} s after the stage"
        for exchange in list(self._in_flight):
            exchange.fail("unfinished", why, time.monotonic_ns())
        await asyncio.sleep(0)

    # -- one request -----------------------------------------------------------------------------

    def _prepare(self, count: int) -> None:
        """Make the next requests ready, so that at their deadline they only have to be written."""
        schedule = self._plan.schedule
        total = len(schedule.scheduled_s)
        while (
            count > 0
            and self._prepared < total
            and len(self._ready) < READY_MAX
            and (self._ready_bytes < READY_MAX_BYTES or not self._ready)
        ):
            i = self._prepared
            request = self._make_request(
                schedule.first_request_id + i * self._plan.id_step,
                int(schedule.input_tokens[i]),
                int(schedule.output_tokens[i]),
            )
            self._ready.append(request)
            self._ready_bytes += len(request)
            self._prepared += 1
            count -= 1

    def _send(self, index: int, scheduled_ns: int, now_ns: int) -> None:
        schedule = self._plan.schedule
        if not self._ready:
            self._prepare(1)
        request = self._ready.popleft()
        self._ready_bytes -= len(request)
        record = RequestRecord(
            request_id=schedule.first_request_id + index * self._plan.id_step,
            stage=self._plan.index,
            scheduled_ns=scheduled_ns,
            status="unfinished",
            worker=self._worker,
            target=self._target,
            dispatched_ns=now_ns,
            input_tokens_planned=int(schedule.input_tokens[index]),
            output_tokens_planned=int(schedule.output_tokens[index]),
        )
        self._dispatch(record, request)
        self._prepare(2)

    def _dispatch(self, record: RequestRecord, request: bytes) -> None:
        exchange = Exchange(record, request, self._ended, self._answer)
        self._in_flight.add(exchange)
        self._live.released += 1
        most = self._limits.in_flight
        if most is not None and len(self._in_flight) > most:
            exchange.fail("shed", f"{most} requests were in flight", time.monotonic_ns())
        else:
            self._client.dispatch(exchange)

    def _again(self, failed: RequestRecord, request: bytes) -> bool:
        """Plan a further attempt of a request that may be tried again. False: there is none."""
        passing = failed.status in ("connect_error", "reset") or failed.http_status in RETRIED_HTTP
        if not passing or failed.attempt >= self._limits.retries or self._stop_reason:
            return False
        pause_s = failed.retry_after_s
        if pause_s is None:
            pause_s = RETRY_PAUSE_S * 2**failed.attempt
        self._retrying += 1

        def send() -> None:
            self._retrying -= 1
            if not self._stop_reason and not self._closing:
                again = RequestRecord(
                    request_id=failed.request_id, stage=failed.stage, scheduled_ns=failed.scheduled_ns, status="unfinished",
                    attempt=failed.attempt + 1, worker=failed.worker, target=failed.target,
                    dispatched_ns=time.monotonic_ns(), input_tokens_planned=failed.input_tokens_planned,
                    output_tokens_planned=failed.output_tokens_planned,
                )  # fmt: skip
                self._dispatch(again, request)

        asyncio.get_running_loop().call_later(min(max(pause_s, 0.0), RETRY_PAUSE_MAX_S), send)
        return True

    def _ended(self, exchange: Exchange) -> None:
        self._in_flight.discard(exchange)
        self._client.forget(exchange)
        record = exchange.record
        if self._secrets:  # a server may echo them anywhere
            for name in ("error", "finish_reason", "server_request_id"):
                text = getattr(record, name)
                if text is not None:
                    setattr(record, name, redact(text, self._secrets))
        if record.attempt == 0:
            slip_ns = (record.dispatched_ns or record.scheduled_ns) - record.scheduled_ns
            self._measures.slips_s.append(slip_ns / 1e9)
        self._measures.events += max(len(record.chunk_at_us) - 1, 0)
        self._measures.merged += exchange.merged_events
        self._on_record(record)
        live = self.live
        live.ended += 1
        live.tokens += record.output_tokens or 0
        if record.status not in ("ok", "unfinished", "cancelled"):
            live.failed += 1
        if record.first_token_ns is not None:
            live.ttft_s.append((record.first_token_ns - record.scheduled_ns) / 1e9)
        again = self._limits.retries and self._again(record, exchange.request)
        if self._refill is not None and not again:
            self._refill(record)

    async def _watch(self) -> None:
        """Give up requests that are past the client's own limits."""
        turns = 0
        while True:
            await asyncio.sleep(WATCH_S)
            turns += 1
            if turns % FLUSH_TURNS == 0 and (trouble := self._flush()):
                self.stop(trouble)
            now_ns = time.monotonic_ns()
            for exchange in list(self._in_flight):
                why = _overdue(exchange, self._limits, now_ns)
                if why is not None:
                    exchange.fail("timeout", why, now_ns)


def _overdue(exchange: Exchange, limits: Limits, now_ns: int) -> str | None:
    began_ns = exchange.record.dispatched_ns or exchange.record.scheduled_ns
    if limits.total_s is not None and now_ns - began_ns > limits.total_s * 1e9:
        return f"no complete answer within {limits.total_s:g} s"
    last_ns = exchange.last_read_ns or began_ns
    if limits.idle_s is not None and now_ns - last_ns > limits.idle_s * 1e9:
        return f"nothing received for {limits.idle_s:g} s"
    return None
