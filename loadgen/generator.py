"""The load generator as an experiment sees it: one runner in this process, or several workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ampacity.loadgen.net.http import Client
from ampacity.loadgen.plan import Live, StagePlan, StageResult
from ampacity.loadgen.workers.pool import Workers
from ampacity.loadgen.workers.worker import Setup, Sink


class Generator:
    """Runs stages one after the other, each over as many processes as it is asked for."""

    def __init__(
        self,
        setup: Setup,
        clients: Sequence[Client],
        sink: Sink,
        stream_of: Callable[[int], Path],
    ) -> None:
        """``sink`` gets the rows made in this process, ``stream_of(k)`` is the stream file of worker k."""
        self._runner = setup.runner(clients, sink)
        self._workers = Workers(setup, stream_of, sink.append)
        self._many = False

    @property
    def live(self) -> Live:
        """Counters of the stage that is going on."""
        return self._workers.live if self._many else self._runner.live

    @property
    def stopped(self) -> str | None:
        """Why ``stop`` was called, or None."""
        return self._runner.stopped

    def stop(self, reason: str) -> None:
        """End the stage that is going on; no further one sends anything."""
        self._runner.stop(reason)
        self._workers.stop(reason)

    def finish_stage(self, reason: str) -> None:
        """Send nothing more in the stage that is going on: it has told enough."""
        (self._workers if self._many else self._runner).finish_stage(reason)

    async def run(
        self, plan: StagePlan, workers: int, on_start: Callable[[int], None]
    ) -> StageResult:
        """Run one stage; ``on_start`` is told its start, monotonic ns, before the first deadline.

        Raises WorkerError when worker processes were asked for and none can be had.
        """
        workers = min(workers, plan.concurrency or workers)  # nobody is left without a virtual user
        self._many = workers > 1
        if not self._many:
            return await self._runner.run(plan, on_start)
        await self._workers.grow(workers)
        return await self._workers.run(plan, on_start)

    def take_lost(self) -> str | None:
        """What there is to say about workers that died since the last call."""
        lost, self._workers.lost = "; ".join(self._workers.lost), []
        return lost or None

    async def close(self) -> None:
        """End the worker processes."""
        await self._workers.close()
