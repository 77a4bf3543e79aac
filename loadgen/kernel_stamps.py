"""Reads dated by the kernel: SO_TIMESTAMPNS with recvmsg, on plain TCP on Linux.

The kernel notes when a segment arrived, so that the date stays right to some 10 µs while the event
loop is busy with something else. Asyncio's transports hand out no ancillary data, hence a reader
of our own on the bare socket: it costs about 1.4 times the CPU per read. Segments that wait
together are merged by the kernel and carry the stamp of the newest.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import sys
import time
from array import array
from typing import Protocol

READ_BYTES = 65_536
_BUFFER = memoryview(bytearray(READ_BYTES))  # one for all: it is copied from before the next read
_BUFFERS = [_BUFFER]
_SO_TIMESTAMPNS = 35
_TIMESPEC = struct.Struct("@qq")
_ANCILLARY_BYTES = 64  # one cmsg header and a timespec, with room
DELAY_MAX_NS = 60_000_000_000  # a stamp further off than this is no stamp of this read

AVAILABLE: bool = sys.platform.startswith("linux") and struct.calcsize("P") == 8


class Receiver(Protocol):
    """The connection above the socket."""

    def attach(self, wire: KernelWire) -> None:
        """The socket is connected."""

    def received(self, at_ns: int, data: bytes) -> None:
        """Bytes and their receive time, monotonic ns."""

    def resume_writing(self) -> None:
        """Everything has been handed to the socket."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Closed, by whom ever."""


class KernelWire:
    """A connected non-blocking socket on the event loop, read with recvmsg."""

    __slots__ = (
        "_buffer",
        "_by_kernel",
        "_closed",
        "_delays_s",
        "_fd",
        "_last_ns",
        "_loop",
        "_receiver",
        "_socket",
    )

    def __init__(
        self, loop: asyncio.AbstractEventLoop, connected: socket.socket, receiver: Receiver,
        date_by_kernel: bool, delays_s: array[float],
    ) -> None:  # fmt: skip
        self._loop = loop
        self._socket = connected
        self._fd = connected.fileno()
        self._receiver = receiver
        self._by_kernel = date_by_kernel
        self._delays_s = delays_s
        self._buffer = b""
        self._closed = False
        self._last_ns = 0  # before which nothing can be dated: the latest read, or the write that it answers
        loop.add_reader(self._fd, self._on_readable)

    def write(self, data: bytes) -> None:
        """Hand over what fits at once; the rest as the socket takes it."""
        self._last_ns = time.monotonic_ns()
        if self._buffer:
            self._buffer += data
            return
        try:
            sent = self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as error:
            self._loop.call_soon(self._lose, error)  # not from within the caller's send
            return
        if sent < len(data):
            self._buffer = data[sent:]
            self._loop.add_writer(self._fd, self._on_writable)

    def get_write_buffer_size(self) -> int:
        """Bytes that the socket has not taken yet."""
        return len(self._buffer)

    def abort(self) -> None:
        """Close at once; connection_lost follows in a later turn of the loop, as with asyncio's transports."""
        if not self._closed:
            self._release()
            self._loop.call_soon(self._receiver.connection_lost, None)

    def _on_readable(self) -> None:
        try:
            size, ancillary, _, _ = self._socket.recvmsg_into(_BUFFERS, _ANCILLARY_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._lose(error)
            return
        at_ns = time.monotonic_ns()
        if not size:
            self._lose(None)
            return
        data = bytes(_BUFFER[:size])
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == _SO_TIMESTAMPNS:
                seconds, nanoseconds = _TIMESPEC.unpack_from(content)
                # the difference of two readings of one clock: a step of the wall clock does no harm
                delay_ns = time.time_ns() - (seconds * 1_000_000_000 + nanoseconds)
                if 0 <= delay_ns < DELAY_MAX_NS:
                    self._delays_s.append(delay_ns / 1e9)
                    if self._by_kernel:
                        at_ns -= delay_ns
        # two clocks are read one after the other, and one may be set: no later read has an earlier date
        at_ns = self._last_ns = max(at_ns, self._last_ns)
        self._receiver.received(at_ns, data)

    def _on_writable(self) -> None:
        try:
            sent = self._socket.send(self._buffer)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._lose(error)
            return
        self._buffer = self._buffer[sent:]
        if not self._buffer:
            self._loop.remove_writer(self._fd)
            self._receiver.resume_writing()

    def _lose(self, error: OSError | None) -> None:
        if not self._closed:
            self._release()
            self._receiver.connection_lost(error)

    def _release(self) -> None:
        self._closed = True
        self._loop.remove_reader(self._fd)
        if self._buffer:
            self._loop.remove_writer(self._fd)
            self._buffer = b""
        with contextlib.suppress(OSError):
            self._socket.close()


async def connect(
    loop: asyncio.AbstractEventLoop, address: tuple[str, int], receiver: Receiver, *,
    date_by_kernel: bool, delays_s: array[float],
) -> None:  # fmt: skip
    """Connect to (IP address, port) and attach the wire to ``receiver``. Raises OSError.

    ``delays_s`` collects read time − kernel time; with ``date_by_kernel`` reads carry the kernel's time.
    """
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    connected = socket.socket(family, socket.SOCK_STREAM)
    try:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        await loop.sock_connect(connected, address)
    except BaseException:
        connected.close()
        raise
    receiver.attach(KernelWire(loop, connected, receiver, date_by_kernel, delays_s))
