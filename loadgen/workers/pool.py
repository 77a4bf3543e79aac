"""Run stages over several worker processes.

The schedule is dealt round-robin by session or single request, so that each share is the same
process, thinned. All workers are prepared before any starts, and start at one absolute time. If a
worker dies, the other workers stop at once, the records it flushed are kept, and its other requests
become ``unfinished``; the caller reads ``lost``.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import ampacity
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
from ampacity.loadgen.workers.setup import Setup

START_TIMEOUT_S = 30.0
LEAD_S = 0.1  # between the last "prepared" and the first deadline
GRACE_S = 20.0 + STALL_MAX_S  # lateness of a result after which a worker is given up
END_S = 0.5  # for a process whose connection is closed to be gone


class WorkerError(ValueError):
    """No worker process could be started or is left."""


def _environment() -> dict[str, str]:
    """Return an environment in which the child imports the packages that run here."""
    root = str(Path(ampacity.__file__).resolve().parent.parent)
    paths = [root, os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else [root]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


A = TypeVar("A", bound=Answer)


class _Worker:
    """One child process and the channel to it."""

    def __init__(
        self,
        number: int,
        process: asyncio.subprocess.Process,
        channel: Channel[Command, Answer],
        stream: Path,
    ) -> None:
        self.number = number
        self.process = process
        self.send = channel.send
        self._received = channel.received
        self.stream = stream
        self.live = Live()
        self.died_ns: int | None = None  # or was given up

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
                while (message := await self._received.get()) is not None:
                    if isinstance(message, kind):
                        return message
                    if isinstance(message, Live):
                        self.live = message
        self.died_ns = time.monotonic_ns()
        return None


class Workers:
    """Runs stages over N processes; the same calls as a StageRunner."""

    def __init__(
        self,
        setup: Setup,
        stream_of: Callable[[int], Path],
        on_record: Callable[[RequestRecord], None],
    ) -> None:
        """``stream_of(k)``: the stream file of worker k; ``on_record`` gets the lost requests."""
        self._setup = setup
        self._stream_of = stream_of
        self._on_record = on_record
        self._workers: list[_Worker] = []
        self._started = 0
        self._stop_reason: str | None = None
        self.lost: list[str] = []  # one line for each worker that died
        self._plan: StagePlan | None = None
        self._buried: list[Live] = []  # last messages of the stage's workers that have died
        self._began_s = 0.0

    async def grow(self, count: int) -> None:
        """Start workers up to ``count``. Raises WorkerError if one does not start."""
        while len(self._workers) < count:
            self._workers.append(await self._start())
        if self._stop_reason:  # while they started
            self.stop(self._stop_reason)

    async def _start(self) -> _Worker:
        number, self._started = self._started, self._started + 1
        ours, theirs = Pipe()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "ampacity.loadgen.workers.worker"),
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=2,  # nothing that prints may mix with the report on stdout
                env=_environment(),
                pass_fds=[theirs.fileno()],
            )
        worker = _Worker(number, process, Channel(ours), self._stream_of(number))
        setup = self._setup
        if self._workers:  # the first one goes on with what was spent before
            setup = dataclasses.replace(setup, account=setup.account.unspent())
        begin = Begin(setup, number, worker.stream)
        if await worker.wait_for(Ready, START_TIMEOUT_S, after=begin) is None:
            await self._end(worker)
            raise WorkerError(f"worker process {number} did not start")
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

    @property
    def stopped(self) -> str | None:
        """Return why ``stop`` was called, or None."""
        return self._stop_reason

    async def run(
        self, plan: StagePlan, on_start: Callable[[int], None] | None = None
    ) -> StageResult:
        """Run a stage over all workers. Raises WorkerError if none is left."""
        if not self._workers:
            raise WorkerError("; ".join(self.lost) or "no worker process")
        dealt = list(zip(self._workers, deal(plan, len(self._workers)), strict=True))
        self._buried = []
        for worker in self._workers:
            worker.live = Live()
        await asyncio.gather(
            *(worker.wait_for(Prepared, START_TIMEOUT_S, Prepare(share)) for worker, share in dealt)
        )
        start_ns = time.monotonic_ns() + int(LEAD_S * 1e9)
        self._plan, self._began_s = plan, start_ns / 1e9
        if on_start is not None:
            on_start(start_ns)
        for worker, _ in dealt:
            worker.send(Go(start_ns))
        patience_s = LEAD_S + plan.duration_s + plan.drain_s + plan.answering_s + GRACE_S
        patience_s += plan.finish_s if plan.schedule.session is not None else 0.0
        answers = await asyncio.gather(*(self._finish(w, patience_s) for w, _ in dealt))
        results = [
            answer.result if answer is not None else self._bury(worker, share, start_ns)
            for (worker, share), answer in zip(dealt, answers, strict=True)
        ]
        measures = Measures(dated_by_kernel=True)
        for result in results:
            measures.merge(result.measures)
        most = max(result.ids_used for result in results)
        return StageResult(_merge(plan, start_ns, [r.meta for r in results]), measures, most)

    async def _finish(self, worker: _Worker, patience_s: float) -> Done | None:
        """Wait for the end of a worker's stage; if it died or is too late, stop the others."""
        if (answer := await worker.wait_for(Done, patience_s)) is None:
            self._workers.remove(worker)
            self._buried.append(worker.live)
            await self._end(worker)
            self.stop(f"worker {worker.number} {_end_text(worker.process.returncode)}")
        return answer

    def _bury(self, worker: _Worker, share: StagePlan, start_ns: int) -> StageResult:
        """Record the lost requests of a worker that died or did not answer."""
        why = f"worker {worker.number} {_end_text(worker.process.returncode)}"
        import pyarrow.compute as pc  # slow to import, rarely needed

        table = read_stream(worker.stream)
        here = table.filter(pc.equal(table["stage"], share.index))
        columns = (here[name].to_pylist() for name in ("request_id", "ended_ns"))
        recorded = dict(zip(*columns, strict=True))
        died_ns = worker.died_ns or time.monotonic_ns()
        owed = owed_by(share, start_ns, died_ns, recorded)
        for record in owed:
            record.error = why
            record.worker, record.target = worker.number, self._setup.targets[0]
            self._on_record(record)
        self.lost.append(
            f"{why} in stage {share.index}: {len(recorded)} of its requests are recorded, "
            f"{len(owed)} were under way or not yet written and are lost; the stage was stopped"
        )
        schedule = share.schedule
        meta: dict[str, Any] = {
            "scheduled_requests": len(owed) + len(recorded),
            "end_ns": min(start_ns + int(share.duration_s * 1e9), died_ns),
            "drained_ns": died_ns,
            "ended_early": self._stop_reason,
            "decided_early": None,
        }
        if schedule.session is not None:
            meta["sessions"] = sessions_of(share, recorded, owed)
        last = schedule.request_id(len(schedule) - 1) if len(schedule) else None
        used = 0 if last is None else last - schedule.first_request_id + 1
        return StageResult(meta, Measures(dated_by_kernel=True), used)  # no measurements

    async def _end(self, worker: _Worker) -> None:
        """Wait for a process that has died, else kill it.

        Not at once: kill() reaps a process that is dead already, and its exit status is lost.
        """
        try:
            async with asyncio.timeout(END_S):
                await worker.process.wait()
        except TimeoutError:
            worker.process.kill()
            await worker.process.wait()

    async def close(self) -> None:
        """Ask every worker to quit; kill those that do not."""
        for worker in self._workers:
            worker.send(Quit())
        for worker in self._workers:
            try:
                async with asyncio.timeout(5.0):
                    await worker.process.wait()
            except TimeoutError:
                await self._end(worker)


def _end_text(status: int | None) -> str:
    """Return how a process ended, by its exit status: ``died (SIGKILL)``."""
    try:
        how = signal.Signals(-(status or 0)).name
    except ValueError:
        how = f"exit status {status}"
    return f"died ({how})"


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
            "cut": sorted(name for p in parts for name in p["cut"]),
        }
    return merged
