"""Read with kernel time stamps: SO_TIMESTAMPNS and recvmsg, on TCP on Linux.

The kernel notes when a segment arrived, exact to some 10 µs even while the event loop is busy.
Asyncio's transports give no ancillary data, hence bare sockets and our own reader.

As the stamps do not depend on the time of reading, many streams can be read in turns, 2 to 4 ms
apart, when no request depends on an answer; that saves most wake-ups of the process. The kernel
merges segments of one stream that wait together and keeps the newest stamp, so streams whose tokens
are not well further apart than the turns are read at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import struct
import sys
import time
from collections.abc import Callable

from ampacity.loadgen.net.interfaces import Receiver
from ampacity.loadgen.receive import hot_path
from ampacity.sleeper import Sleeper

TURN_NS = 2_000_000  # from one turn to the next ...
TURN_MAX_NS = 4_000_000  # ... or as long as it takes for so many reads, but no longer than this:
TURN_READS = 96  # a turn costs the same whatever it reads, and workers have turns of their own
OFTEN_NS = 125_000  # reads closer together than this change to reading in turns ...
FEW = 4  # ... until a turn has fewer reads
READS_MAX = 64  # of a turn, before requests may be sent; fewer if one is due soon ...
READS_MIN = 8  # ... but at least these
READ_NS = 7_000  # first estimate of one read's time ...
READ_NS_MAX = 50_000  # ... and its maximum: longer means the process was interrupted
NEAR_TURNS = 2  # reads of a stream closer than so many turns might be merged by them
NEAR_SHARE_MAX = 1 / 16  # of near reads among the LATEST; with more, the next are read at once
LATEST = 256
LOOK_EVERY = 64  # one in so many batches is read at once: merged reads are not seen to be near
AUDIT_EVERY = 31  # reads, of which one's delay is noted; prime, so as not to follow the turns
_EDGES = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET  # edge-triggered

AVAILABLE: bool = sys.platform.startswith("linux") and struct.calcsize("P") == 8


class KernelReader:
    """Reads the sockets of one event loop, each at once or all in turns."""

    def __init__(self, *, date_by_kernel: bool, on_delay: Callable[[float], None]) -> None:
        """``on_delay`` gets read time − kernel time of a sample, s."""
        self._loop = asyncio.get_running_loop()
        self._by_kernel = date_by_kernel
        self._on_delay = on_delay
        self._wires: list[KernelWire | None] = []  # by file descriptor
        self._epoll = select.epoll()
        self._sleeper = Sleeper()
        self.patient = False  # whether reads may be delayed to a turn
        self.pacer: Sleeper | None = None  # sends requests, which come first
        self._read_ns = READ_NS  # of the latest turns
        self.behind = False  # whether the latest turn reached its maximum of reads
        self._more: asyncio.Handle | None = None
        self._turn_ns = 0  # start of the latest turn
        # the latest reads, by the time since the previous read of their stream
        self._near = self._far = 0
        self._apart = False  # whether most reads were far apart ...
        self._turn_max_ns = TURN_MAX_NS  # ... for turns of this length
        self._next_ns = TURN_NS  # from the latest turn to the next
        self._reads = 0  # of the latest turn, if it is not over
        self._looks = 0
        self._audit_at = 0  # index of the next turn's audited read
        self._loop.add_reader(self._epoll.fileno(), self._on_readable)

    def add(self, wire: KernelWire) -> None:
        """Start to read a socket."""
        self._wires += [None] * (wire.fd + 1 - len(self._wires))
        self._wires[wire.fd] = wire
        self._epoll.register(wire.fd, _EDGES)

    def remove(self, wire: KernelWire) -> None:
        """Stop reading a socket."""
        if wire.fd < len(self._wires) and self._wires[wire.fd] is wire:
            self._wires[wire.fd] = None
            self._epoll.unregister(wire.fd)

    def close(self) -> None:
        """Stop reading."""
        self._wires.clear()
        self._sleeper.close()
        if self._more is not None:
            self._more.cancel()
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()

    def _on_readable(self) -> None:
        before_ns = self._turn_ns
        self.turn()
        if self._turn_ns - before_ns < OFTEN_NS and self._may_wait():
            self._loop.remove_reader(self._epoll.fileno())
            self._next_ns = TURN_NS
            self._sleeper.call_at(self._turn_ns + TURN_NS, self._on_time)
        elif self.behind:  # to see whether anything is left
            self._more = self._loop.call_soon(self._on_readable)

    def _on_time(self) -> None:
        self._reads += self.turn()
        if self.behind:
            self._more = self._loop.call_soon(self._on_time)
            return
        reads, self._reads = self._reads, 0
        if reads < FEW or not self._may_wait():
            self._loop.add_reader(self._epoll.fileno(), self._on_readable)
        else:
            wanted_ns = self._next_ns * TURN_READS // reads
            self._next_ns = min(max(wanted_ns, TURN_NS), self._turn_max_ns)
            self._sleeper.call_at(self._turn_ns + self._next_ns, self._on_time)

    def _may_wait(self) -> bool:
        return self.patient and self._by_kernel and self._apart

    def turn(self) -> int:
        """Read what is available and return the number of reads."""
        wires = self._wires
        self._turn_ns = time.monotonic_ns()
        most = self._reads_now()
        found = hot_path.read_ready(
            *(self._epoll, wires, most, NEAR_TURNS * self._turn_max_ns),
            *(self._audit_at, AUDIT_EVERY, self._by_kernel),
        )
        ready, near, reads, again, delays_ns = found
        self.behind = ready == most
        self._audit_at = (self._audit_at - ready) % AUDIT_EVERY
        for delay_ns in delays_ns:
            self._on_delay(delay_ns / 1e9)
        for wire, at_ns, data in reads:
            if wires[wire.fd] is wire:  # not closed by a read of this turn
                try:
                    self.hand_on(wire, at_ns, data)
                except Exception as error:  # affects one stream only
                    self._tell(error)
        for wire in again:  # there may be more, or the end, and no new edge
            if wires[wire.fd] is wire:
                self._epoll.modify(wire.fd, _EDGES)
        self._note_distances(near, ready - near)
        if ready:
            took_ns = (time.monotonic_ns() - self._turn_ns) // ready
            self._read_ns += (min(took_ns, READ_NS_MAX) - self._read_ns) // 8
        return ready

    def hand_on(self, wire: KernelWire, at_ns: int, data: bytes | OSError) -> None:
        """Give a read to the exchange of its connection."""
        receiver = wire.receiver
        exchange = receiver.exchange
        if isinstance(data, OSError):
            wire.lose(data)
        elif not data:
            wire.lose(None)
        elif exchange is None or at_ns < wire.last_ns:  # read before its request was written
            receiver.unsolicited()
        elif exchange.feed(at_ns, data):
            receiver.over(exchange)

    def _reads_now(self) -> int:
        """Return how many reads fit before the next request is due."""
        if self.pacer is None:
            return READS_MAX
        left_ns = self.pacer.deadline_ns - self._turn_ns
        if left_ns < -TURN_NS:  # behind: unread answers would delay requests further
            return READS_MAX
        return min(max(left_ns // self._read_ns, READS_MIN), READS_MAX)

    def catch_up(self) -> None:
        """Read what waits now, at most one read per socket."""
        left = len(self._wires)
        while left > 0:
            left -= self.turn()
            if not self.behind:
                break

    def _tell(self, error: Exception) -> None:
        self._loop.call_exception_handler(
            {"message": "a read could not be used", "exception": error}
        )

    def _note_distances(self, near: int, far: int) -> None:
        self._near += near
        self._far += far
        if (latest := self._near + self._far) >= LATEST:
            self._looks += 1
            look = self._looks % LOOK_EVERY == 0
            far_apart = self._near <= NEAR_SHARE_MAX * latest
            self._apart = far_apart and not look
            if look:
                self._turn_max_ns = TURN_MAX_NS
            elif not far_apart:  # perhaps for shorter turns, which the next reads tell
                self._turn_max_ns = TURN_NS
            self._near = self._far = 0


class KernelWire:
    """A connected non-blocking socket of a KernelReader."""

    __slots__ = (
        *("_buffer", "_loop", "_poll", "_reader", "_socket"),
        *("fd", "last_ns", "receiver", "recvmsg"),
    )

    def __init__(self, reader: KernelReader, connected: socket.socket, receiver: Receiver) -> None:
        self._loop = asyncio.get_running_loop()
        self._reader = reader
        self._socket = connected
        self._buffer = b""
        self.recvmsg = connected.recvmsg
        self.fd = connected.fileno()
        self.receiver = receiver
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)
        self.last_ns = 0  # latest read or write: the lower bound of the next time stamp
        reader.add(self)

    def write(self, data: bytes) -> None:
        """Write what fits at once, the rest when the socket is writable."""
        self.last_ns = time.monotonic_ns()
        if self._buffer:
            self._buffer += data
            return
        try:
            sent = self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as error:
            self._loop.call_soon(self.lose, error)  # not within the caller's send
            return
        if sent < len(data):
            self._buffer = data[sent:]
            self._loop.add_writer(self.fd, self._on_writable)

    def get_write_buffer_size(self) -> int:
        """Return the number of buffered bytes."""
        return len(self._buffer)

    def read_waiting(self) -> None:
        """Read once, if there is anything."""
        if self._poll.poll(0):
            try:
                data: bytes | OSError = self._socket.recv(hot_path.READ_BYTES)
            except OSError as error:
                data = error.with_traceback(None)  # it would hold this frame
            self._reader.hand_on(self, time.monotonic_ns(), data)

    def abort(self) -> None:
        """Close at once; connection_lost follows in a later turn of the loop, as in asyncio."""
        if self._release():
            self._loop.call_soon(self.receiver.connection_lost, None)

    def lose(self, error: OSError | None) -> None:
        """Handle a connection closed or broken by the peer."""
        if self._release():
            self.receiver.connection_lost(error)

    def _on_writable(self) -> None:
        try:
            sent = self._socket.send(self._buffer)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.lose(error)
            return
        self._buffer = self._buffer[sent:]
        if not self._buffer:
            self._loop.remove_writer(self.fd)
            self.receiver.resume_writing()

    def _release(self) -> bool:
        """Close the socket; return whether it was open."""
        if self._socket.fileno() < 0:
            return False
        self._reader.remove(self)
        if self._buffer:
            self._loop.remove_writer(self.fd)
            self._buffer = b""
        with contextlib.suppress(OSError):
            self._socket.close()
        return True
