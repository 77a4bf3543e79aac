"""Run stages over several workers.

The schedule is dealt round-robin by session or single request, so that each share is the same
process, thinned. All workers are prepared before any starts, and start at one absolute time. If a
worker dies, the others go on, the records it flushed are kept, and all its other requests of the
stage become ``unfinished``; the caller reads ``lost``. The next stage starts another in its place.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ampacity.loadgen.audit import Measures
from ampacity.loadgen.drive.cut import owed_by, sessions_of
from ampacity.loadgen.plan import Live, StagePlan, StageResult
from ampacity.loadgen.rundir.files import read_stream
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.rundir.write import STALL_MAX_S
from ampacity.loadgen.workers.channel import (
    Answer,
    Begin,
    Channel,
    Command,
    Done,
    Go,
    Prepare,
    Prepared,
    Quit,
    Ready,
    Stop,
)
from ampacity.loadgen.workers.launch import Clock, Launched, Launcher, WorkerError, compare_clocks
from ampacity.loadgen.workers.setup import Setup

START_TIMEOUT_S = 30.0
GRACE_S = 20.0 + STALL_MAX_S  # lateness of a result after which a worker is given up
QUIT_S = 5.0
CLOCK_TRIPS = 20  # round trips to each node before each stage

A = TypeVar("A", bound=Answer)


class _Worker:
    """One worker and the channel to it."""

    def __init__(self, number: int, launched: Launched, stream: Path) -> None:
        self.number, self.launched, self.stream = number, launched, stream
        channel: Channel[Command, Answer] = Channel(launched.link)
        self.send, self._received = channel.send, channel.received
        self.live = Live()
        self.gone = False  # or given up

    async def wait_for(
        self, kind: type[A], timeout_s: float, after: Command | None = None
    ) -> A | None:
        """Return the next message of a kind; None if the worker died or is too late.

        ``after`` may be large: it is sent first, in a thread.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                if after is not None:
                    await asyncio.to_thread(self.send, after)
                while not self.gone and (message := await self._received.get()) is not None:
                    if isinstance(message, kind):
                        return message
                    if isinstance(message, Live):
                        self.live = message
        self.gone = True
        return None


class Workers:
    """Runs stages over N workers; the same calls as a StageRunner."""

    def __init__(
        self,
        setup: Setup,
        launcher: Launcher,
        stream_of: Callable[[int], Path],
        on_record: Callable[[RequestRecord], None],
    ) -> None:
        """``stream_of(k)``: the stream file of worker k; ``on_record`` gets the lost requests."""
        self._setup = setup
        self._launcher = launcher
        self._stream_of = stream_of
        self._on_record = on_record
        self._workers: list[_Worker] = []
        self._started = 0
        self._stop_reason: str | None = None
        self.lost: list[str] = []  # one line for each worker that died
        self.notes: list[str] = []  # other lines for the user
        self._plan: StagePlan | None = None
        self._buried: list[Live] = []  # last messages of the stage's workers that have died
        self._began_s = 0.0

    async def grow(self, count: int) -> None:
        """Start workers up to ``count``, or go on with those that are left.

        Raises WorkerError if there is none.
        """
        if (lacking := count - len(self._workers)) <= 0:
            return
        first, room = self._started, await self._launcher.room()
        if room < lacking:
            self.notes.append(
                f"{room} CPUs of the cluster are free, and {lacking} workers lack one"
            )
        self._started += min(lacking, room)
        starting = map(self._start, range(first, self._started))
        for begun in await asyncio.gather(*starting, return_exceptions=True):
            if isinstance(begun, _Worker):
                self._workers.append(begun)
            elif isinstance(begun, WorkerError):
                self.notes.append(str(begun))
            else:
                raise begun
        if not self._workers:
            raise WorkerError(self.notes.pop())
        if self._stop_reason:  # while they started
            self.stop(self._stop_reason)

    async def _start(self, number: int) -> _Worker:
        worker = _Worker(number, await self._launcher.start(), self._stream_of(number))
        setup = self._setup
        if number:  # the first one goes on with what was spent before
            setup = dataclasses.replace(setup, account=setup.account.unspent())
        begin = Begin(setup, number, worker.stream)
        if await worker.wait_for(Ready, START_TIMEOUT_S, after=begin) is None:
            raise WorkerError(f"worker {number} did not start: {await worker.launched.end()}")
        return worker

    @property
    def live(self) -> Live:
        """Return the sum of the workers' counters as of their latest messages."""
        if self._plan is None:
            return Live()
        live = Live.of(self._plan, self._began_s)
        for part in (*self._buried, *(worker.live for worker in self._workers)):
            live.merge(part)
        return live

    def stop(self, reason: str) -> None:
        """End the current stage in every worker."""
        self._stop_reason = self._stop_reason or reason
        for worker in self._workers:
            worker.send(Stop(reason))

    def finish_stage(self, reason: str) -> None:
        """Send nothing more in this stage, but wait for the answers in flight."""
        for worker in self._workers:
            worker.send(Stop(reason, wait=True))

    async def run(self, plan: StagePlan, on_start: Callable[[int], None]) -> StageResult:
        """Run a stage over all workers."""
        dealt = list(zip(self._workers, deal(plan, len(self._workers)), strict=True))
        self._buried = []
        for worker in self._workers:
            worker.live = Live()
        await asyncio.gather(
            *(worker.wait_for(Prepared, START_TIMEOUT_S, Prepare(share)) for worker, share in dealt)
        )
        clocks = await self._clocks()
        if clocks and self._plan is None:  # the first stage
            worst_ms = max(clock.bound_ns for clock in clocks.values()) / 1e6
            self.notes.append(
                f"{len(dealt)} workers on Ray (nodes: {len(clocks)}), whose clocks are known to "
                f"{worst_ms:.2g} ms: arrivals of different nodes may be skewed by that, latencies "
                "do not depend on it"
            )
        start_ns = time.monotonic_ns() + int(self._launcher.lead_s * 1e9)
        self._plan, self._began_s = plan, start_ns / 1e9
        on_start(start_ns)
        for worker, _ in dealt:
            clock = clocks.get(worker.launched.node)
            worker.send(Go(start_ns, clock.ahead_ns if clock else 0))
        patience_s = self._launcher.lead_s + plan.duration_s + plan.drain_s + plan.answering_s
        patience_s += plan.finish_s if plan.schedule.session is not None else 0.0
        done = await asyncio.gather(*(self._finish(w, patience_s + GRACE_S) for w, _ in dealt))
        ended = [answer.result.meta["end_ns"] for answer in done if answer is not None]
        until_ns = max(ended, default=time.monotonic_ns())
        results = [
            await self._bury(worker, share, start_ns, until_ns) if answer is None else answer.result
            for (worker, share), answer in zip(dealt, done, strict=True)
        ]
        measures = Measures(dated_by_kernel=True)
        for (worker, _), result in zip(dealt, results, strict=True):
            result.measures.node = worker.launched.node
            measures.merge(result.measures)
        meta = _merge(plan, start_ns, [r.meta for r in results])
        if clocks:
            meta["clocks"] = [asdict(clock) for clock in clocks.values()]
        return StageResult(meta, measures, max(result.ids_used for result in results))

    async def _clocks(self) -> dict[str, Clock]:
        """Compare the clock of each other node, one after the other, so that none waits."""
        found: dict[str, Clock] = {}
        for node, look in ((w.launched.node, w.launched.look) for w in self._workers if not w.gone):
            if look is not None and node not in found:
                with contextlib.suppress(OSError):  # it died just now
                    found[node] = await asyncio.to_thread(compare_clocks, node, look, CLOCK_TRIPS)
        return found

    async def _finish(self, worker: _Worker, patience_s: float) -> Done | None:
        """Wait for the end of a worker's stage; None if it died or is too late."""
        if (answer := await worker.wait_for(Done, patience_s)) is None:
            self._workers.remove(worker)
            self._buried.append(worker.live)
        return answer

    async def _bury(
        self, worker: _Worker, share: StagePlan, start_ns: int, until_ns: int
    ) -> StageResult:
        """Record the lost requests of a worker that died, up to the end of the stage."""
        import pyarrow.compute as pc  # slow to import, rarely needed

        why = f"worker {worker.number} {await worker.launched.end()}"
        table = read_stream(worker.stream)
        here = table.filter(pc.equal(table["stage"], share.index))
        columns = (here[name].to_pylist() for name in ("request_id", "ended_ns"))
        recorded = dict(zip(*columns, strict=True))
        owed = owed_by(share, start_ns, until_ns, recorded)
        for record in owed:
            record.error = why
            record.worker, record.target = worker.number, self._setup.targets[0]
            self._on_record(record)
        self.lost.append(
            f"{why} in stage {share.index}: {len(recorded)} of its requests are recorded, "
            f"{len(owed)} are lost: under way, not yet written, or due later in the stage"
        )
        schedule = share.schedule
        meta: dict[str, Any] = {
            "scheduled_requests": len(owed) + len(recorded),
            "end_ns": until_ns,
            "drained_ns": until_ns,
            "ended_early": self._stop_reason,
            "decided_early": None,
        }
        if schedule.session is not None:
            meta["sessions"] = sessions_of(share, recorded, [record.session_id for record in owed])
        last = schedule.request_id(len(schedule) - 1) if len(schedule) else None
        used = 0 if last is None else last - schedule.first_request_id + 1
        return StageResult(meta, Measures(dated_by_kernel=True, worker=worker.number), used)

    async def close(self) -> None:
        """Ask every worker to quit; kill those that do not."""
        for worker in self._workers:
            worker.send(Quit())
        await asyncio.gather(*(worker.wait_for(Done, QUIT_S) for worker in self._workers))
        for worker in self._workers:
            await worker.launched.end()
        await self._launcher.close()


def deal(plan: StagePlan, workers: int) -> list[StagePlan]:
    """Split a stage: session or single request k, and user k, go to worker k mod N."""
    schedule, shares = plan.schedule, []
    units = schedule.units()
    for k in range(workers):
        shares.append(
            dataclasses.replace(
                plan,
                schedule=schedule.take(np.flatnonzero(units % workers == k)),
                offered_rps=None if plan.offered_rps is None else plan.offered_rps / workers,
                concurrency=None if plan.concurrency is None else len(plan.starts_s()[k::workers]),
                users_begin_s=plan.starts_s()[k::workers],
            )
        )
    return shares


def _merge(plan: StagePlan, start_ns: int, metas: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the shares' objects to the stage's object in run.json."""
    merged: dict[str, Any] = {
        **plan.meta(start_ns),
        "end_ns": max(m["end_ns"] for m in metas),
        "scheduled_requests": sum(m["scheduled_requests"] for m in metas),
        "drained_ns": max(m["drained_ns"] for m in metas),
        "ended_early": next((m["ended_early"] for m in metas if m["ended_early"]), None),
        "decided_early": next((m["decided_early"] for m in metas if m["decided_early"]), None),
    }
    parts = [m["sessions"] for m in metas if "sessions" in m]
    if parts:
        merged["sessions"] = {
            "begun": sum(p["begun"] for p in parts),
            "cut": sorted({name for p in parts for name in p["cut"]}),
        }
    return merged
