"""Sockets that the kernel dates, with what notes their reads, and a stage over them."""

import asyncio
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ampacity.loadgen.drive.options import RunnerOptions
from ampacity.loadgen.drive.stage import StageRunner
from ampacity.loadgen.net import kernel_connect
from ampacity.loadgen.net.http import Client
from ampacity.loadgen.net.kernel_stamps import KernelReader, KernelWire
from ampacity.loadgen.plan import Limits
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.send.endpoint import parse_endpoint
from tests.support.servers.fault_server import FaultServer
from tests.support.stage_driving import on_loop, plain
from tests.support.waiting import wait_until

SO_TIMESTAMPNS = 35
CLOCKS_NS = 100_000  # how far apart two readings of different clocks may be, with room


class Sink:
    """A connection whose exchange notes every read."""

    def __init__(self) -> None:
        self.reads: list[tuple[int, bytes]] = []
        self.lost: list[Exception | None] = []
        self.exchange: Any = self

    @property
    def size(self) -> int:
        return sum(len(data) for _, data in self.reads)

    def feed(self, at_ns: int, data: bytes) -> bool:
        self.reads.append((at_ns, data))
        return False

    def attach(self, wire: KernelWire) -> None:
        self.wire = wire

    def over(self, exchange: Any) -> None:
        raise AssertionError("feed never says so")

    def unsolicited(self) -> None:
        self.wire.abort()

    def resume_writing(self) -> None: ...

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.append(exc)


@contextmanager
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=256) as server:
        yield server


@contextmanager
def stamping() -> Iterator[None]:
    """Wait until the kernel dates what arrives, and have it go on: it begins some time after the
    first socket of the machine has asked for it, and ends with the last one."""
    with listening() as server, socket.create_connection(server.getsockname()[:2]) as near:
        near.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        with server.accept()[0] as far:
            far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

            def dated() -> list[Any]:
                far.send(b"x")
                return near.recvmsg(1, 64)[1]

            wait_until(dated, why=lambda: "the kernel dated nothing")
            yield


async def connected(
    reader: KernelReader, server: socket.socket, n: int
) -> tuple[list[Sink], list[socket.socket]]:
    sinks, peers = [Sink() for _ in range(n)], []
    for sink in sinks:
        await kernel_connect.connect(reader, server.getsockname()[:2], sink, deque())
        peers.append(server.accept()[0])
        peers[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sinks, peers


def written_and_read_late(
    peers: list[socket.socket], reader: KernelReader
) -> list[tuple[int, int]]:
    """Before and after each write; on the loopback device what is written arrives within it."""
    spans = []
    for peer in peers:
        before_ns = time.monotonic_ns()
        peer.send(b"x" * 250)
        spans.append((before_ns, time.monotonic_ns()))
    time.sleep(0.005)
    reader.turn()
    return spans


async def ended(reader: KernelReader, sinks: list[Sink], peers: list[socket.socket]) -> None:
    for sink in sinks:
        sink.wire.abort()
    for peer in peers:
        peer.close()
    await asyncio.sleep(0)
    reader.close()


def with_runner(
    use: Callable[[StageRunner, Client], Any],
    limits: Limits | None = None,
    on_record: Callable[[RequestRecord], None] = lambda _: None,
) -> Any:
    with FaultServer() as server:
        endpoint = parse_endpoint(server.url)

        async def main() -> Any:
            client = Client(endpoint, endpoint.addresses(), None, stamps="kernel")
            made = plain(endpoint)
            try:
                options = RunnerOptions(limits=limits or Limits())
                return await use(StageRunner([client], made, on_record, options), client)
            finally:
                await client.close()

        return on_loop("uvloop", main())
