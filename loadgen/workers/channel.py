"""Messages between the parent and a worker process, over a ``multiprocessing`` connection.

They are pickled: both ends are this program, and the rows of a trace hold numbers of any precision
(``Decimal``), which msgspec would turn into texts. Records do not travel here but stay in files.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Generic, TypeVar

from ampacity.loadgen.plan import Live, StagePlan, StageResult
from ampacity.loadgen.workers.setup import Setup


@dataclass(frozen=True)
class Begin:
    """The parent's first message; the worker writes its records to ``stream``."""

    setup: Setup
    worker: int
    stream: Path


@dataclass(frozen=True)
class Prepare:
    """Prepare this share of a stage."""

    plan: StagePlan


@dataclass(frozen=True)
class Go:
    """Run what was prepared from ``start_ns`` (monotonic) on."""

    start_ns: int


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
Sent = TypeVar("Sent")
Received = TypeVar("Received")


class Channel(Generic[Sent, Received]):
    """Sends at once, and receives in a thread."""

    def __init__(self, connection: Connection[Sent, Received]) -> None:
        """Start to receive; needs a running event loop."""
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self.received: asyncio.Queue[Received | None] = asyncio.Queue()  # None: the end
        threading.Thread(target=self._receive, daemon=True).start()

    def send(self, message: Sent) -> None:
        """Send a message; to a process that has ended it does nothing, as ``received`` ends too.

        Waits while the other process does not read and the message is larger than the buffer.
        """
        with contextlib.suppress(OSError):
            self._connection.send(message)

    def _receive(self) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            with self._connection, contextlib.suppress(EOFError, OSError):
                while True:
                    message = self._connection.recv()
                    self._loop.call_soon_threadsafe(self.received.put_nowait, message)
            self._loop.call_soon_threadsafe(self.received.put_nowait, None)
