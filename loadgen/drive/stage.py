"""Run one stage: an open-loop schedule or the virtual users of a closed loop.

Every released request ends as exactly one record. A request that depends on others is scheduled at
the end of the last of them, plus its think time.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from ampacity.loadgen.audit import Measures, StageWatch
from ampacity.loadgen.drive.dependencies import SessionDependencies
from ampacity.loadgen.drive.dependents import DependentSender
from ampacity.loadgen.drive.in_flight import InFlightNotes
from ampacity.loadgen.drive.options import RunnerOptions
from ampacity.loadgen.drive.pacer import pace
from ampacity.loadgen.drive.prefetch import RequestPrefetcher
from ampacity.loadgen.drive.slices import in_slices
from ampacity.loadgen.drive.timeouts import CHECK_EVERY_S, TimeoutMonitor, leave_after
from ampacity.loadgen.drive.users import VirtualUsers
from ampacity.loadgen.host import widen_descriptor_table
from ampacity.loadgen.net.http import Client
from ampacity.loadgen.plan import MOSTLY_FAILED, Live, StagePlan, StageResult, record_of
from ampacity.loadgen.receive.exchange import Exchange
from ampacity.loadgen.receive.token_counts import count_tokens
from ampacity.loadgen.rundir.records import FAILED_STATUSES, RequestRecord
from ampacity.loadgen.send.requests import ScheduledRequests
from ampacity.loadgen.send.secrets import redact_record
from ampacity.sleeper import Sleeper

LEAD_S = 0.1  # between the call and the first deadline
WHOLE_MAX = 1000  # complete answers that wait to be parsed
NO_RECORD = "an answer could not be parsed or a request built"
FLUSH_EVERY_S = 0.5  # a kill loses at most one second of records, on a busy machine too


class StageRunner:
    """Runs stages one after the other, each over the same clients."""

    def __init__(
        self,
        clients: Sequence[Client],
        requests: ScheduledRequests,
        on_record: Callable[[RequestRecord], None],
        options: RunnerOptions | None = None,
    ) -> None:
        """``clients``: one for each endpoint, used round-robin. ``on_record`` gets every record."""
        self._clients = clients
        self._requests = requests
        self._on_record = on_record
        self._options = options or RunnerOptions()
        self._account = self._options.account
        self._in_flight: dict[Exchange, int] = {}  # and the request's index in the schedule
        self._whole: dict[Exchange, int] = {}  # complete answers that are not parsed yet
        self._timeouts = TimeoutMonitor(self._options.limits, clients, self._in_flight)
        self._stop_reason: str | None = None
        self._decided: str | None = None  # why the current stage may end early
        self._users: VirtualUsers | None = None  # of the current stage, if it is closed
        self._live = Live()
        widen_descriptor_table()

    @property
    def live(self) -> Live:
        """Return the counters of the current stage."""
        return self._live

    def stop(self, reason: str) -> None:
        """End the current stage: send nothing more, record what is in flight as unfinished."""
        self._stop_reason = self._stop_reason or reason

    def finish_stage(self, reason: str) -> None:
        """Send nothing more in this stage, but wait for the answers in flight."""
        self._decided = self._decided or reason

    @property
    def stopped(self) -> str | None:
        """Return why ``stop`` was called, or None."""
        return self._stop_reason

    def prepare(self, plan: StagePlan, *, now: bool = True) -> None:
        """Build the first requests of a stage before its clock starts; ``now``: all at once."""
        self._plan = plan
        self._first = plan.schedule.first_requests()  # that depend on no other
        self._sessions = SessionDependencies(plan.schedule, plan.end_on_failure)
        # nothing depends on an answer's content: answers are parsed in batches
        waits_for_answers = plan.schedule.after_start is not None or self._options.limits.retries
        self._patient = plan.kind == "open" and not waits_for_answers
        self._dependents = DependentSender(self._build, self._send)
        options = self._options
        self._notes = InFlightNotes(plan, self._in_flight, options.targets, options.worker)
        self._rows = self._ids_used = self._last_due_ns = 0
        self._retrying = 0  # requests that wait for their next attempt
        self._requests.prepare(plan.schedule)
        self._measures = Measures(
            dated_by_kernel=all(client.stamps == "kernel" for client in self._clients),
            worker=self._options.worker,
        )
        if plan.kind == "closed":
            self._users = VirtualUsers(plan, self._first, self._send, self._sends_no_more)
        self._decided, self._closing = None, False
        for client in self._clients:
            client.receive_delays_s = self._measures.receive_delays_s
            client.be_patient(self._patient)
        self._ahead = RequestPrefetcher(self._build, self._first, now=now)

    async def run(
        self, plan: StagePlan, on_start: Callable[[int], None] | None = None
    ) -> StageResult:
        """Run one stage and wait for its answers."""
        self.prepare(plan)
        start_ns = time.monotonic_ns() + int(LEAD_S * 1e9)
        if on_start is not None:
            on_start(start_ns)
        return await self.run_prepared(start_ns)

    async def run_prepared(self, start_ns: int) -> StageResult:
        """Run the stage that was prepared; its clock starts at ``start_ns``."""
        plan = self._plan
        self._live = Live.of(plan, start_ns / 1e9, timed=self._options.timed)
        pacing, beating = Sleeper(), Sleeper()
        for client in self._clients:
            client.make_way(pacing)
        try:
            with StageWatch(beating, self._measures, self._clients):
                watcher = asyncio.create_task(self._watch())
                working = asyncio.create_task(in_slices(self._work, self._reads_wait))
                working.add_done_callback(partial(self._broke, NO_RECORD))
                following = asyncio.create_task(self._dependents.run())
                following.add_done_callback(partial(self._broke, "a later turn could not be built"))
                drive = self._drive_open if plan.kind == "open" else self._drive_closed
                ended_early = await drive(start_ns, pacing)
                meta = plan.meta(start_ns)
                ended_early = ended_early or self._account.used_up
                if ended_early or self._decided:
                    meta["end_ns"] = min(meta["end_ns"], time.monotonic_ns())
                await self._finish_sessions(meta["end_ns"] + int(plan.finish_s * 1e9))
                if plan.whole:  # lasts until all is sent
                    last_ns = max(self._last_due_ns + 1, start_ns + 1)
                    closed = plan.kind == "closed"
                    meta["end_ns"] = last_ns if closed else max(meta["end_ns"], last_ns)
                following.cancel()
                await self._drain()
                watcher.cancel()
                working.cancel()
                self._options.flush(self._notes.take())
        finally:
            pacing.close()
            beating.close()
        meta |= {
            "scheduled_requests": self._rows,
            "drained_ns": time.monotonic_ns(),
            "ended_early": ended_early,
            "decided_early": self._decided,
        }
        if plan.schedule.session is not None:
            shortened = {*self._sessions.cut(), *plan.schedule.shortened}
            cut = [f"{plan.index}-{session}" for session in sorted(shortened)]
            meta["sessions"] = {"begun": self._sessions.begun, "cut": cut}
        return StageResult(meta=meta, measures=self._measures, ids_used=self._ids_used)

    def _reads_wait(self) -> bool:
        return any(client.behind for client in self._clients)

    async def _drive_open(self, start_ns: int, sleeper: Sleeper) -> str | None:
        first, scheduled_s = self._first, self._plan.schedule.scheduled_s
        scheduled_ns = start_ns + np.round(scheduled_s[first] * 1e9).astype(np.int64)

        def release(k: int, now_ns: int) -> None:
            self._send(int(first[k]), int(scheduled_ns[k]), now_ns)

        await pace(scheduled_ns, release, self._sends_no_more, sleeper)
        if not self._stop_reason:
            await self._sleep_until(start_ns + int(self._plan.duration_s * 1e9))
        return self._stop_reason

    async def _drive_closed(self, start_ns: int, sleeper: Sleeper) -> str | None:
        assert self._users is not None
        reason = await self._users.play(start_ns, sleeper)
        self._users = None
        return self._stop_reason or reason or None

    def _sends_no_more(self) -> bool:
        return bool(self._stop_reason or self._decided or self._account.used_up)

    def _broke(self, what: str, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.stop(f"{what}: {error}")

    def _answered(self, index: int, exchange: Exchange) -> None:
        """Schedule, or cancel, what depends on a request whose last attempt has ended."""
        record = exchange.record
        failed = record.status in FAILED_STATUSES or record.status == "too_long"
        self._requests.answered(index, exchange.content(self._plan.keep_reasoning))
        ended_ns = max(record.ended_ns or time.monotonic_ns(), exchange.last_read_ns or 0)
        due, given_up = self._sessions.ended(index, ended_ns, failed)
        if self._closing or record.status == "unfinished":
            return
        self._dependents.push(due)
        for later in given_up:  # each gets a record: it was in the schedule
            given = self._record(later, ended_ns)
            self._count_row(given)
            self._live.released += 1
            given.status, given.ended_ns = "cancelled", ended_ns
            given.error = f"turn {record.turn} of its session failed"
            self._live.count(given)
            self._on_record(given)

    async def _finish_sessions(self, until_ns: int) -> None:
        """Continue sessions that have begun, but send nothing that is due after ``until_ns``."""
        while not self._sends_no_more() and time.monotonic_ns() < until_ns:
            waiting = any(self._sessions.followed(index) for index in self._in_flight.values()) or (
                self._retrying and self._plan.schedule.after_start is not None
            )
            if not waiting and not self._dependents.due_before(until_ns):
                return
            await asyncio.sleep(0.02)

    async def _sleep_until(self, deadline_ns: int) -> None:
        while (left_ns := deadline_ns - time.monotonic_ns()) > 0 and not self._sends_no_more():
            await asyncio.sleep(min(left_ns / 1e9, 0.1))

    async def _drain(self) -> None:
        """Wait for answers; longer for those that have begun, if most have."""
        plan, ended_s = self._plan, time.monotonic()
        await self._sleep_while(
            lambda: bool(self._in_flight or self._retrying), ended_s + plan.drain_s
        )
        self._closing = True
        coming = [exchange for exchange in self._in_flight if exchange.first_token_ns]
        if 2 * len(coming) >= len(self._in_flight):
            self._timeouts.cut_off(self._stop_reason, plan.drain_s, keep=coming)
            still_comes = partial(self._timeouts.comes, plan.drain_s)
            await self._sleep_while(still_comes, ended_s + plan.drain_s + plan.answering_s)
        self._timeouts.cut_off(self._stop_reason, time.monotonic() - ended_s)
        while self._judge_one():
            pass
        await asyncio.sleep(0)

    async def _sleep_while(self, waiting: Callable[[], bool], give_up_s: float) -> None:
        while waiting() and not self._stop_reason and time.monotonic() < give_up_s:
            await asyncio.sleep(0.02)

    def _work(self) -> bool:
        """Do one piece of deferrable work; return False if there is none."""
        return self._judge_one() or self._ahead.make_one()

    def _judge_one(self) -> bool:
        if exchange := next(iter(self._whole), None):
            exchange.judge()
        return exchange is not None

    def _build(self, index: int) -> Exchange:
        """Return a request that is ready to send; its schedule time is set when it is sent."""
        request = self._requests.make(index, self._target_of(index))
        return self._exchange(self._record(index, 0), request, index)

    def _target_of(self, index: int) -> int:
        """Return the endpoint of a request: round-robin by its id, or by its session if sticky."""
        if len(self._clients) == 1:
            return 0
        session = self._sessions.session_of(index) if self._plan.sticky else None
        number = self._plan.schedule.request_id(index) if session is None else session
        return number % len(self._clients)

    def _send(
        self, index: int, scheduled_ns: int, now_ns: int, exchange: Exchange | None = None
    ) -> None:
        """Send a request: the next one that was built ahead, or ``exchange``."""
        if exchange is not None and self._account.used_up:
            return
        exchange = exchange or self._ahead.take()
        record, schedule = exchange.record, self._plan.schedule
        record.scheduled_ns, record.dispatched_ns = scheduled_ns, now_ns
        self._live.released += 1
        if not record.attempt:
            self._count_row(record)
            self._dependents.push(self._sessions.released(index, scheduled_ns))
            self._last_due_ns = max(self._last_due_ns, scheduled_ns)
        self._in_flight[exchange] = index
        leaves_after_s = schedule.cancel_after_s
        if leaves_after_s is not None and leaves_after_s[index] >= 0:  # NaN: never
            leave_after(exchange, float(leaves_after_s[index]))
        most = self._options.limits.in_flight
        if most is not None and len(self._in_flight) > most:
            exchange.fail("shed", f"{most} requests were in flight", time.monotonic_ns())
        else:
            self._account.sending(exchange)
            self._clients[self._target_of(index)].dispatch(exchange)

    def _record(self, index: int, scheduled_ns: int) -> RequestRecord:
        record = record_of(self._plan, index, scheduled_ns)
        record.worker = self._options.worker
        record.target = self._options.targets[self._target_of(index)]
        return record

    def _count_row(self, record: RequestRecord) -> None:
        self._rows += 1
        used = record.request_id - self._plan.schedule.first_request_id + 1
        self._ids_used = max(self._ids_used, used)

    def _exchange(self, record: RequestRecord, request: bytes, index: int) -> Exchange:
        leaves_after = self._plan.schedule.cancel_after_tokens
        on_whole = self._on_whole if self._patient and leaves_after is None else None
        exchange = Exchange(record, request, self._ended, self._options.answer, on_whole)
        wanted = self._options.keep or self._options.by_piece or self._requests.wanted(index)
        if wanted:
            exchange.keep_text()
        if leaves_after is not None:
            exchange.cancel_after_tokens = int(leaves_after[index])
        return exchange

    def _retry(self, failed: RequestRecord, request: bytes, index: int, pause_s: float) -> bool:
        """Schedule a further attempt of a request; return False if nothing is sent any more."""
        if self._stop_reason:
            return False
        self._retrying += 1

        def send() -> None:
            self._retrying -= 1
            if not self._stop_reason and not self._closing:
                record = self._record(index, failed.scheduled_ns)
                record.attempt = failed.attempt + 1
                self._notes.forget(index)
                exchange = self._exchange(record, request, index)
                self._send(index, failed.scheduled_ns, time.monotonic_ns(), exchange)

        asyncio.get_running_loop().call_later(pause_s, send)
        return True

    def _on_whole(self, exchange: Exchange) -> None:
        index = self._whole[exchange] = self._in_flight.pop(exchange)
        self._clients[self._target_of(index)].forget(exchange)
        if len(self._whole) > WHOLE_MAX:  # a busy client has no idle time to parse in
            try:
                self._judge_one()
            except Exception as error:  # of another stream than the one being read
                self.stop(f"{NO_RECORD}: {error}")

    def _ended(self, exchange: Exchange) -> None:
        index = self._whole.pop(exchange, None)
        if index is None:
            index = self._in_flight.pop(exchange)
            self._clients[self._target_of(index)].forget(exchange)
        record = exchange.record
        redact_record(record, self._options.secrets())
        self._measures.add(record, exchange.merged_events)
        if self._options.by_piece is not None:
            count_tokens(exchange, self._options.by_piece)
        limits = self._options.limits
        pause_s = limits.retry_pause_s(record) if limits.retries else None
        self._on_record(record)
        if self._options.keep is not None:
            self._options.keep(exchange)
        self._live.count(record)
        self._account.ended(record, self._live)
        if pause_s is not None and self._retry(record, exchange.request, index, pause_s):
            return
        self._answered(index, exchange)
        if self._users is not None and self._sessions.over(index):
            self._users.finished(record.status)

    async def _watch(self) -> None:
        flushed_s, flushes = time.monotonic(), 0
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            if time.monotonic() - flushed_s >= FLUSH_EVERY_S:
                flushed_s = time.monotonic()
                self._live.flush()
                flushes += 1
                note = self._notes.take() if flushes % 2 else None  # once a second
                if trouble := self._options.flush(note):
                    self.stop(trouble)
            self._account.look(self._live, self._options.limits.errors)
            if self._live.mostly_failed(self._plan):
                self.finish_stage(MOSTLY_FAILED)
            await self._timeouts.check()
