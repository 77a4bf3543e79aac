"""Read by asyncio where the kernel dates no reads: off Linux."""

import asyncio
import time
from typing import cast

from ampacity.loadgen.net.interfaces import Receiver


async def connect(address: tuple[str, int], receiver: Receiver) -> None:
    """Connect to (IP, port) and attach the transport to ``receiver``. Raises OSError."""
    await asyncio.get_running_loop().create_connection(lambda: _Reads(receiver), *address)


class _Wire:
    def __init__(self, transport: asyncio.Transport) -> None:
        self.write, self.abort = transport.write, transport.abort
        self.get_write_buffer_size = transport.get_write_buffer_size

    def read_waiting(self) -> None:
        """Do nothing: asyncio reads in turns of its own."""


class _Reads(asyncio.Protocol):
    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop has its own class
        transport.set_write_buffer_limits(high=0)  # so that resume_writing means: all handed over
        self._receiver.attach(_Wire(transport))

    def data_received(self, data: bytes) -> None:
        at_ns = time.monotonic_ns()
        exchange = self._receiver.exchange
        if exchange is None:
            self._receiver.unsolicited()
        elif exchange.feed(at_ns, data):
            self._receiver.over(exchange)

    def resume_writing(self) -> None:
        self._receiver.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._receiver.connection_lost(exc)
