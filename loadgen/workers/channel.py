"""Messages between the parent and a worker, over a link: a pipe, or the calls of a Ray actor.

They are pickled by the link: both ends are this program, and the rows of a trace hold numbers of
any precision (``Decimal``), which msgspec would turn into texts.
"""

import asyncio
import contextlib
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from ampacity.loadgen.plan import Live, StagePlan, StageResult
from ampacity.loadgen.workers.setup import Setup


@dataclass(frozen=True)
class Begin:
    """The parent's first message; ``stream`` is the parent's file of the worker's records."""

    setup: Setup
    worker: int
    stream: Path


@dataclass(frozen=True)
class Prepare:
    """Prepare this share of a stage."""

    plan: StagePlan


@dataclass(frozen=True)
class Go:
    """Run what was prepared from ``start_ns`` (monotonic, of the parent) on."""

    start_ns: int
    ahead_ns: int = 0  # of the parent's clock the worker's is ahead


@dataclass(frozen=True)
class Stop:
    """End the stage; with ``wait``, after the answers in flight."""

    reason: str
    wait: bool = False


@dataclass(frozen=True)
class Quit:
    """End the process."""


@dataclass(frozen=True)
class Ready:
    """The worker has started."""


@dataclass(frozen=True)
class Prepared:
    """The share is prepared."""


@dataclass(frozen=True)
class Done:
    """The share is over and its records are flushed."""

    result: StageResult


Command = Begin | Prepare | Go | Stop | Quit
Answer = Ready | Prepared | Live | Done
Sent = TypeVar("Sent", contravariant=True)
Received = TypeVar("Received", covariant=True)
S = TypeVar("S")
R = TypeVar("R")


class Link(Protocol[Sent, Received]):
    """One end of a connection; ``multiprocessing.connection.Connection`` is one."""

    def send(self, message: Sent, /) -> None:
        """Send a message. Raises OSError if the other end is gone."""

    def recv(self) -> Received:
        """Wait for the next message. Raises EOFError or OSError if the other end is gone."""

    def close(self) -> None:
        """Close this end."""


class Channel(Generic[S, R]):
    """Sends at once, and receives in a thread."""

    def __init__(self, link: Link[S, R]) -> None:
        """Start to receive; needs a running event loop."""
        self._link = link
        self._loop = asyncio.get_running_loop()
        self.received: asyncio.Queue[R | None] = asyncio.Queue()  # None: the end
        threading.Thread(target=self._receive, daemon=True).start()

    def send(self, message: S) -> None:
        """Send a message; to a process that has ended it does nothing, as ``received`` ends too.

        Waits while the other process does not read and the message is larger than the buffer.
        """
        with contextlib.suppress(OSError):
            self._link.send(message)

    def _receive(self) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            with contextlib.closing(self._link), contextlib.suppress(EOFError, OSError):
                while True:
                    message = self._link.recv()
                    self._loop.call_soon_threadsafe(self.received.put_nowait, message)
            self._loop.call_soon_threadsafe(self.received.put_nowait, None)
