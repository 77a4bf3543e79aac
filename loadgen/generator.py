"""The load generator: one runner in this process, or several workers, here or on Ray."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ampacity.loadgen.drive.stage import StageRunner
from ampacity.loadgen.net.http import Client
from ampacity.loadgen.plan import Live, StagePlan, StageResult
from ampacity.loadgen.rundir.write import StreamWriter
from ampacity.loadgen.workers.launch import Launcher, Processes
from ampacity.loadgen.workers.pool import Workers
from ampacity.loadgen.workers.setup import Setup


class Generator:
    """Runs stages one after the other, each over the number of processes asked for."""

    def __init__(
        self,
        setup: Setup,
        clients: Sequence[Client],
        sink: StreamWriter,
        stream_of: Callable[[int], Path],
        cluster: Launcher | None = None,
    ) -> None:
        """``sink`` gets this process's records, ``stream_of(k)`` is the stream file of worker k.

        ``cluster``: where all load comes from, in place of this machine.
        """
        self._new_runner = partial(setup.runner, clients, sink)
        self._runner = self._new_runner()  # of the current stage
        self._idle, self._going = [self._runner], list[StageRunner]()  # of stages that overlap
        self._workers = Workers(setup, cluster or Processes(), stream_of, sink.append)
        self._fewest = 1 if cluster is None else 0  # workers that need no process of their own
        self._many, self._account = False, setup.account
        self._over: list[Live] = []  # of the stages that are over

    @property
    def live(self) -> Live:
        """Return the counters of the current stage."""
        return self._workers.live if self._many else self._runner.live

    @property
    def stages(self) -> list[Live]:
        """Return the counters of every stage so far, in their order; past ones may be one sum."""
        over, live = list(self._over), self.live
        if self._going:
            return [*over, *(runner.live for runner in self._going)]
        return over if any(live.stage == known.stage for known in over) else [*over, live]

    @property
    def stopped(self) -> str | None:
        """Return why ``stop`` was called, or None."""
        return next((runner.stopped for runner in self._runners if runner.stopped), None)

    @property
    def _runners(self) -> list[StageRunner]:
        return [self._runner, *self._idle, *self._going]

    @property
    def used_up(self) -> str | None:
        """Return why no more may be sent: the limit of spend or of failures that was reached."""
        return self._account.used_up

    def stop(self, reason: str) -> None:
        """End the current stage; later stages send nothing."""
        for runner in self._runners:
            runner.stop(reason)
        self._workers.stop(reason)

    def finish_stage(self, reason: str) -> None:
        """Send nothing more in the current stage, but wait for the answers in flight."""
        (self._workers if self._many else self._runner).finish_stage(reason)

    async def run(
        self, plan: StagePlan, workers: int, on_start: Callable[[int], None]
    ) -> StageResult:
        """Run one stage; ``on_start`` gets its start (monotonic ns) before the first deadline.

        Raises WorkerError if worker processes were asked for and none can be started.
        """
        workers = min(workers, plan.concurrency or workers)  # each has at least one user
        self._many = workers > self._fewest
        if self._many:
            await self._workers.grow(workers)
        try:
            return await (self._workers if self._many else self._runner).run(plan, on_start)
        finally:
            self.live.flush()
            self._over.append(self.live)

    async def follow(self, plan: StagePlan, start_ns: int) -> tuple[StageResult, int]:
        """Run an open stage in this process from ``start_ns`` on, while others still run.

        Returns its result, and how many requests were answered.
        """
        if len(self._idle) < 2 and not self._going:
            self._idle.append(self._new_runner())  # before there is load
        self._runner = runner = self._idle.pop(0) if self._idle else self._new_runner()
        self._going.append(runner)
        runner.prepare(plan, now=False)
        try:
            result = await runner.run_prepared(start_ns)
            return result, runner.live.kinds["ok"]
        finally:
            runner.live.flush()
            self._going.remove(runner)
            self._idle.append(runner)
            past = Live(runner.live.stage, level=runner.live.level)
            for live in (*self._over, runner.live):
                past.merge(live)
            self._over = [past]

    def take_lost(self) -> str | None:
        """Return a message about workers that died since the last call, or None."""
        lost, self._workers.lost = "; ".join(self._workers.lost), []
        return lost or None

    def take_notes(self) -> list[str]:
        """Return what else is to be known of the workers, since the last call."""
        notes, self._workers.notes = self._workers.notes, []
        return notes

    async def close(self) -> None:
        """End the worker processes."""
        await self._workers.close()
