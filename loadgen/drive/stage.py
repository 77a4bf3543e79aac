"""Runs one stage: an open-loop schedule, or the virtual users of a closed loop, down to its records.

Every request that was released ends as exactly one record. A request that waits for others is scheduled at the
end of the last of them, plus its think time.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from ampacity.loadgen.audit import Measures, StageWatch
from ampacity.loadgen.drive.dependencies import SessionDependencies
from ampacity.loadgen.drive.dependents import DependentSender
from ampacity.loadgen.drive.pacer import pace
from ampacity.loadgen.drive.prefetch import RequestPrefetcher
from ampacity.loadgen.drive.slices import in_slices
from ampacity.loadgen.drive.users import VirtualUsers
from ampacity.loadgen.host import widen_descriptor_table
from ampacity.loadgen.net.http import Client
from ampacity.loadgen.plan import Limits, Live, Requests, StagePlan, StageResult, record_of
from ampacity.loadgen.receive.completions import Answer
from ampacity.loadgen.receive.exchange import Exchange
from ampacity.loadgen.receive.token_counts import ByPiece, count_tokens
from ampacity.loadgen.rundir.records import FAILED_STATUSES, RequestRecord
from ampacity.loadgen.send.secrets import redact_record
from ampacity.loadgen.sleeper import Sleeper

LEAD_S = 0.1  # between the call and the first deadline
WHOLE_MAX = 1000  # whole answers that wait to be judged
NO_RECORD = "an answer could not be judged or a request made"
WATCH_S = 0.1  # how often time limits are looked at
FLUSH_TURNS = 10  # of the watch: what a kill may take is a second's records


class StageRunner:
    """Carries out stages one after the other over one client."""

    def __init__(
        self,
        clients: Sequence[Client],
        requests: Requests,
        on_record: Callable[[RequestRecord], None],
        *,
        limits: Limits | None = None,
        targets: Sequence[str | None] = (None,),
        secrets: tuple[str, ...] = (),
        flush: Callable[[], str | None] = lambda: None,
        worker: int = 0,
        answer: Callable[[], Answer] = Answer,
        keep: Callable[[Exchange], None] | None = None,
        by_piece: ByPiece | None = None,
    ) -> None:
        """``clients`` and their names ``targets``: one for each endpoint; requests go round them.

        ``flush`` is called about once a second; a reason that it gives back ends the stage. ``keep`` is shown every
        exchange with the text of its answer. ``by_piece`` counts tokens where the server does not.
        """
        self._clients = clients
        self._requests = requests
        self._on_record = on_record
        self._limits = limits or Limits()
        self._targets = targets
        self._secrets = secrets
        self._flush = flush
        self._worker = worker
        self._answer = answer
        self._keep = keep
        self._by_piece = by_piece
        self._in_flight: dict[Exchange, int] = {}  # and the request's index in the schedule
        self._whole: dict[
            Exchange, int
        ] = {}  # those with all of their answer, which is not judged yet
        self._stop_reason: str | None = None
        self._decided: str | None = None  # why the stage that is going on need not go on
        self._users: VirtualUsers | None = None  # of the closed stage that is going on
        self._live = Live()
        widen_descriptor_table()

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
        self._first = plan.schedule.first_requests()  # that wait for no other
        self._turns = SessionDependencies(plan.schedule, plan.end_on_failure)
        # nobody waits for what an answer says: it is judged when there are several
        self._patient = (
            plan.kind == "open" and plan.schedule.after_start is None and not self._limits.retries
        )
        self._follower = DependentSender(self._prepared, self._send)
        self._rows = self._ids_used = 0
        self._requests.prepare(plan.schedule)
        self._measures = Measures(
            dated_by_kernel=all(client.stamps == "kernel" for client in self._clients),
            worker=self._worker,
        )
        if plan.kind == "closed":
            self._users = VirtualUsers(plan, self._first, self._send_first, self._sends_no_more)
        self._last_due_ns = 0  # of those that were sent
        self._retrying = 0  # attempts that wait for their turn
        self._decided = None
        self._closing = False
        for client in self._clients:
            client.receive_delays_s = self._measures.receive_delays_s
            client.be_patient(self._patient)
        self._ahead = RequestPrefetcher(self._prepared, self._first)

    async def run(
        self, plan: StagePlan, on_start: Callable[[int], None] | None = None
    ) -> StageResult:
        """Run one stage to its end, drained."""
        self.prepare(plan)
        start_ns = time.monotonic_ns() + int(LEAD_S * 1e9)
        if on_start is not None:
            on_start(start_ns)
        return await self.run_prepared(start_ns)

    async def run_prepared(self, start_ns: int) -> StageResult:
        """Run the stage that ``prepare`` was called for; its clock starts at ``start_ns``."""
        plan = self._plan
        self._live = Live.of(plan, start_ns / 1e9)
        gc.collect()
        gc.freeze()  # what lives now is not looked at again in every collection of the stage
        before = self._counted()
        pacing, beating = Sleeper(), Sleeper()
        for client in self._clients:
            client.make_way(pacing)
        try:
            with StageWatch(beating, self._measures):
                watcher = asyncio.create_task(self._watch())
                working = asyncio.create_task(in_slices(self._work, self._reads_wait))
                working.add_done_callback(partial(self._broke, NO_RECORD))
                following = asyncio.create_task(self._follower.run())
                following.add_done_callback(partial(self._broke, "a later turn could not be made"))
                drive = self._drive_open if plan.kind == "open" else self._drive_closed
                ended_early = await drive(start_ns, pacing)
                meta = plan.meta(start_ns)
                if ended_early or self._decided:
                    meta["end_ns"] = min(meta["end_ns"], time.monotonic_ns())
                await self._finish_sessions(meta["end_ns"] + int(plan.finish_s * 1e9))
                if plan.whole:  # it lasts as long as there is something to send
                    last_ns = max(self._last_due_ns + 1, start_ns + 1)
                    closed = plan.kind == "closed"
                    meta["end_ns"] = last_ns if closed else max(meta["end_ns"], last_ns)
                following.cancel()
                await self._drain()
                watcher.cancel()
                working.cancel()
            after = self._counted()
            self._measures.shortages, self._measures.resent = (
                after[0] - before[0],
                after[1] - before[1],
            )
        finally:
            gc.unfreeze()
            pacing.close()
            beating.close()
        meta |= {
            "scheduled_requests": self._rows,
            "drained_ns": time.monotonic_ns(),
            "ended_early": ended_early,
            "decided_early": self._decided,
        }
        if plan.schedule.session is not None:
            cut = [f"{plan.index}-{session}" for session in self._turns.cut()]
            meta["sessions"] = {"begun": self._turns.begun, "cut": cut}
        return StageResult(meta=meta, measures=self._measures, ids_used=self._ids_used)

    def _reads_wait(self) -> bool:
        return any(client.behind for client in self._clients)

    def _counted(self) -> tuple[int, int]:
        return sum(client.shortages for client in self._clients), sum(
            client.resent for client in self._clients
        )

    # -- the two loops ---------------------------------------------------------------------------

    async def _drive_open(self, start_ns: int, sleeper: Sleeper) -> str | None:
        first = self._first
        scheduled_ns = start_ns + np.round(self._plan.schedule.scheduled_s[first] * 1e9).astype(
            np.int64
        )

        def release(k: int, now_ns: int) -> None:
            self._send_first(int(first[k]), int(scheduled_ns[k]), now_ns)

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
        return bool(self._stop_reason or self._decided)

    # -- requests that wait for others -------------------------------------------------------------

    def _broke(self, what: str, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.stop(f"{what}: {error}")

    def _answered(self, index: int, exchange: Exchange) -> None:
        """The last attempt at a request has ended: whoever waited for it goes on, or never will."""
        record = exchange.record
        failed = (
            record.status in FAILED_STATUSES or record.status == "too_long"
        )  # so is what follows
        self._requests.answered(index, exchange.content(self._plan.keep_reasoning))
        ended_ns = record.ended_ns or time.monotonic_ns()
        due, given_up = self._turns.ended(index, ended_ns, failed)
        if self._closing or record.status == "unfinished":
            return
        self._follower.push(due)
        for later in given_up:  # a row each: they were in the schedule
            given = self._record(later, ended_ns)
            self._count_row(given)
            given.status, given.ended_ns = "cancelled", ended_ns
            given.error = f"turn {record.turn} of its session failed"
            self._live.ended += 1
            self._on_record(given)

    async def _finish_sessions(self, until_ns: int) -> None:
        """Play sessions on that have begun, but nothing that is due after ``until_ns``."""
        while not self._sends_no_more() and time.monotonic_ns() < until_ns:
            waiting = any(self._turns.followed(index) for index in self._in_flight.values()) or (
                self._retrying and self._plan.schedule.after_start is not None
            )
            if not waiting and not self._follower.due_before(until_ns):
                return
            await asyncio.sleep(0.02)

    async def _sleep_until(self, deadline_ns: int) -> None:
        while (
            left_s := (deadline_ns - time.monotonic_ns()) / 1e9
        ) > 0 and not self._sends_no_more():
            await asyncio.sleep(min(left_s, 0.1))

    async def _drain(self) -> None:
        """Wait for answers: longer for those that come, unless most have not begun, which is a queue."""
        plan, ended_s = self._plan, time.monotonic()
        await self._sleep_while(
            lambda: bool(self._in_flight or self._retrying), ended_s + plan.drain_s
        )
        self._closing = True
        coming = [exchange for exchange in self._in_flight if exchange.answering]
        if 2 * len(coming) >= len(self._in_flight):
            self._cut_off(plan.drain_s, keep=coming)
            await self._sleep_while(self._comes, ended_s + plan.drain_s + plan.answering_s)
        self._cut_off(time.monotonic() - ended_s)
        while self._judge_one():
            pass
        await asyncio.sleep(0)

    async def _sleep_while(self, waiting: Callable[[], bool], give_up_s: float) -> None:
        while waiting() and not self._stop_reason and time.monotonic() < give_up_s:
            await asyncio.sleep(0.02)

    def _comes(self) -> bool:
        """Whether an answer goes on: one that said nothing for as long as is waited for a beginning does not."""
        since_ns = time.monotonic_ns() - int(self._plan.drain_s * 1e9)
        return any((exchange.last_read_ns or 0) > since_ns for exchange in self._in_flight)

    def _cut_off(self, after_s: float, keep: Sequence[Exchange] = ()) -> None:
        why = self._stop_reason or f"not answered within {round(after_s, 1):g} s after the stage"
        kept = set(keep)
        for exchange in [
            exchange for exchange in self._in_flight if exchange not in kept
        ]:  # in their order
            exchange.fail("unfinished", why, time.monotonic_ns())

    # -- one request -----------------------------------------------------------------------------

    def _work(self) -> bool:
        """Something that can wait; False: there is nothing."""
        return self._judge_one() or self._ahead.make_one()

    def _judge_one(self) -> bool:
        exchange = next(iter(self._whole), None)
        if exchange is not None:
            exchange.judge()
        return exchange is not None

    def _prepared(self, index: int) -> Exchange:
        """A request that has only to be sent; it does not know yet when."""
        return self._exchange(
            self._record(index, 0), self._requests.make(index, self._target_of(index)), index
        )

    def _target_of(self, index: int) -> int:
        """Which endpoint a request goes to: in turn by its number, or by its session's."""
        if len(self._clients) == 1:
            return 0
        session = self._turns.session_of(index) if self._plan.sticky else None
        number = self._plan.schedule.request_id(index) if session is None else session
        return number % len(self._clients)

    def _send_first(self, index: int, scheduled_ns: int, now_ns: int) -> None:
        self._send(index, scheduled_ns, now_ns, self._ahead.take())

    def _send(self, index: int, scheduled_ns: int, now_ns: int, exchange: Exchange) -> None:
        record = exchange.record
        record.scheduled_ns, record.dispatched_ns = scheduled_ns, now_ns
        self._count_row(record)
        self._follower.push(self._turns.released(index, scheduled_ns))
        self._last_due_ns = max(self._last_due_ns, scheduled_ns)
        self._dispatch(exchange, index)

    def _record(self, index: int, scheduled_ns: int) -> RequestRecord:
        """The row of a request, as the schedule has it."""
        record = record_of(self._plan, index, scheduled_ns)
        record.worker, record.target = self._worker, self._targets[self._target_of(index)]
        return record

    def _count_row(self, record: RequestRecord) -> None:
        self._rows += 1
        self._live.released += 1
        self._ids_used = max(
            self._ids_used, record.request_id - self._plan.schedule.first_request_id + 1
        )

    def _exchange(self, record: RequestRecord, request: bytes, index: int) -> Exchange:
        leaves_after = self._plan.schedule.cancel_after_tokens
        on_whole = self._on_whole if self._patient and leaves_after is None else None
        exchange = Exchange(record, request, self._ended, self._answer, on_whole)
        if self._keep is not None or self._by_piece is not None or self._requests.wanted(index):
            exchange.keep_text()
        if leaves_after is not None:
            exchange.cancel_after_tokens = int(leaves_after[index])
        return exchange

    def _dispatch(self, exchange: Exchange, index: int) -> None:
        self._in_flight[exchange] = index
        leaves_after_s = self._plan.schedule.cancel_after_s
        if leaves_after_s is not None and leaves_after_s[index] >= 0:  # NaN: stays
            self._leave_after(exchange, float(leaves_after_s[index]))
        most = self._limits.in_flight
        if most is not None and len(self._in_flight) > most:
            exchange.fail("shed", f"{most} requests were in flight", time.monotonic_ns())
        else:
            self._clients[self._target_of(index)].dispatch(exchange)

    def _leave_after(self, exchange: Exchange, after_s: float) -> None:
        why = f"the user left after {after_s:.3g} s"
        asyncio.get_running_loop().call_later(
            after_s, lambda: exchange.fail("cancelled", why, time.monotonic_ns())
        )

    def _again(self, failed: RequestRecord, request: bytes, index: int) -> bool:
        """Plan a further attempt of a request that may be tried again. False: there is none."""
        pause_s = self._limits.retry_pause_s(failed)
        if pause_s is None or self._stop_reason:
            return False
        self._retrying += 1

        def send() -> None:
            self._retrying -= 1
            if not self._stop_reason and not self._closing:
                again = record_of(self._plan, index, failed.scheduled_ns)
                again.worker, again.target, again.attempt = (
                    failed.worker,
                    failed.target,
                    failed.attempt + 1,
                )
                again.dispatched_ns = time.monotonic_ns()
                self._live.released += 1
                self._dispatch(self._exchange(again, request, index), index)

        asyncio.get_running_loop().call_later(pause_s, send)
        return True

    def _on_whole(self, exchange: Exchange) -> None:
        index = self._whole[exchange] = self._in_flight.pop(exchange)
        self._clients[self._target_of(index)].forget(exchange)
        if len(self._whole) > WHOLE_MAX:  # a client at its limit has no time that is left over
            try:
                self._judge_one()
            except Exception as error:  # not the stream's that is being read
                self.stop(f"{NO_RECORD}: {error}")

    def _ended(self, exchange: Exchange) -> None:
        index = self._whole.pop(exchange, None)
        if index is None:
            index = self._in_flight.pop(exchange)
            self._clients[self._target_of(index)].forget(exchange)
        record = exchange.record
        redact_record(record, self._secrets)
        self._measures.add(record, exchange.merged_events)
        if self._by_piece is not None:
            count_tokens(exchange, self._by_piece)
        self._on_record(record)
        if self._keep is not None:
            self._keep(exchange)
        self._live.count(record)
        if self._limits.retries and self._again(record, exchange.request, index):
            return
        self._answered(index, exchange)
        if self._users is not None and self._turns.over(index):
            self._users.finished(record.status)

    async def _watch(self) -> None:
        """Give up requests that are past the client's own limits."""
        turns, next_ns = 0, 0.0
        while True:
            await asyncio.sleep(WATCH_S)
            turns += 1
            if turns % FLUSH_TURNS == 0 and (trouble := self._flush()):
                self.stop(trouble)
            now_ns = time.monotonic_ns()
            if now_ns < next_ns:  # nothing that is in flight can have come to its limit
                continue
            seen_ns = {exchange: exchange.last_read_ns for exchange in self._in_flight}
            for client in self._clients:  # what waits to be read is not the server's silence
                await client.catch_up()
            now_ns = time.monotonic_ns()  # behind what was read
            next_ns, _ = self._limits.gives_up(now_ns, None)  # of those that are still to come
            for exchange in list(self._in_flight):
                began_ns = exchange.record.dispatched_ns or exchange.record.scheduled_ns
                last_ns = exchange.last_read_ns
                if last_ns != seen_ns.get(exchange):  # it had waited to be read, perhaps for long
                    last_ns = now_ns
                limit_ns, why = self._limits.gives_up(began_ns, last_ns)
                if limit_ns < now_ns:
                    exchange.fail("timeout", why, now_ns)
                else:
                    next_ns = min(next_ns, limit_ns)
