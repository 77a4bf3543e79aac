"""The interfaces between a request, its connection and the connection's socket."""

from collections.abc import Callable
from typing import Any, Protocol

from ampacity.loadgen.rundir.records import RequestRecord


class Reads(Protocol):
    """Takes the reads of a connection."""

    @property
    def feed(self) -> Callable[[int, bytes], bool]:
        """Take (time of the read in ns, data); return whether the exchange has ended."""


class Exchange(Reads, Protocol):
    """One request and its answer, as the client needs it: of the load, or for a page."""

    record: RequestRecord
    request: bytes
    close_after: bool

    @property
    def ended(self) -> bool:
        """True when there is a result."""

    @property
    def retried(self) -> bool:
        """True when ``restart`` was called."""

    @property
    def last_read_ns(self) -> int | None:
        """Time of the latest read, or None."""

    def eof(self, at_ns: int, error: str | None = None) -> None:
        """End after the peer closed or broke the connection."""

    def fail(self, status: str, error: str, at_ns: int) -> None:
        """End with ``status``, unless there is a result."""

    def restart(self) -> None:
        """Forget an attempt that received nothing on a dead kept-alive connection."""


class Wire(Protocol):
    """The transport of one connection: asyncio's, a socket with kernel time stamps, or TLS."""

    def write(self, data: bytes) -> None:
        """Write ``data`` to the socket, and buffer what does not fit."""

    def get_write_buffer_size(self) -> int:
        """Return the number of buffered bytes."""

    def abort(self) -> None:
        """Close at once."""

    def read_waiting(self) -> None:
        """Hand on what lies in the socket before a request is written: it answers no such one."""


class Receiver(Protocol):
    """The user of a socket's reads: a connection, or the TLS below one."""

    @property
    def exchange(self) -> Reads | None:
        """Return what gets the next read."""

    def attach(self, wire: Wire) -> None:
        """Start to use a connected socket."""

    def over(self, exchange: Any) -> None:
        """Handle the end of the exchange by what was read."""

    def unsolicited(self) -> None:
        """Close the socket after bytes that answer no request."""

    def resume_writing(self) -> None:
        """Note that all buffered data is written."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the connection."""
