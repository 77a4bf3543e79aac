"""Start workers: the seam between the pool and where they run, and processes of this machine."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Protocol

import ampacity
from ampacity.loadgen.workers.channel import Answer, Command, Link

END_S = 0.5  # for a process whose connection is closed to be gone


class WorkerError(ValueError):
    """Workers cannot be started, or none is left; one line."""


@dataclass(frozen=True)
class Clock:
    """The monotonic clock of a node against the parent's, and the error of that at most."""

    node: str
    ahead_ns: int
    bound_ns: int


def compare_clocks(node: str, look: Callable[[], int], trips: int) -> Clock:
    """Return a node's clock; ``look`` asks for it, and its answer was right between both ends.

    Of several round trips the shortest counts: Cristian, Distributed Computing 3 (1989).
    """
    seen = []
    for _ in range(trips):
        before_ns, theirs_ns, after_ns = time.monotonic_ns(), look(), time.monotonic_ns()
        seen.append((after_ns - before_ns, theirs_ns - (before_ns + after_ns) // 2))
    trip_ns, ahead_ns = min(seen)
    return Clock(node, ahead_ns, trip_ns // 2 + 1)


class Launched(Protocol):
    """A worker that was started."""

    @property
    def link(self) -> Link[Command, Answer]:
        """Return the parent's end of the connection."""

    @property
    def node(self) -> str:
        """Return the name of its machine; empty: this one."""

    @property
    def look(self) -> Callable[[], int] | None:
        """Return what reads its machine's clock, or raises OSError; None: it is the parent's."""

    async def end(self) -> str:
        """Wait for a worker that is gone, else kill it; return how it ended: ``died (SIGKILL)``."""


class Launcher(Protocol):
    """The place where workers run."""

    @property
    def lead_s(self) -> float:
        """Return the time between the last "prepared" and the first deadline."""

    async def room(self) -> int:
        """Return how many can be started now."""

    async def start(self) -> Launched:
        """Start one. Raises WorkerError."""

    async def close(self) -> None:
        """Leave; all workers have ended."""


class Process:
    """A worker process of this machine, over a pipe."""

    node = ""
    look: Callable[[], int] | None = None

    def __init__(self, process: asyncio.subprocess.Process, link: Link[Command, Answer]) -> None:
        self._process, self.link = process, link

    async def end(self) -> str:
        # not killed at once: kill() reaps a process that is dead already, and its status is lost
        try:
            async with asyncio.timeout(END_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        status = self._process.returncode
        try:
            how = signal.Signals(-(status or 0)).name
        except ValueError:
            how = f"exit status {status}"
        return f"died ({how})"


class Processes:
    """Starts workers as processes of this machine."""

    lead_s = 0.1

    async def room(self) -> int:
        return sys.maxsize

    async def start(self) -> Process:
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
        return Process(process, ours)

    async def close(self) -> None:
        pass


def _environment() -> dict[str, str]:
    """Return an environment in which the child imports the packages that run here."""
    root = str(Path(ampacity.__file__).resolve().parent.parent)
    paths = [root, os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else [root]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
