"""Connections whose reads the kernel dates: there at once on one machine, waited for elsewhere,
and none is left behind."""

import asyncio
import errno
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from ampacity.loadgen.drive.stage import StageRunner
from ampacity.loadgen.net import kernel_connect, kernel_stamps
from ampacity.loadgen.net.http import Client
from ampacity.loadgen.net.kernel_stamps import KernelReader
from ampacity.loadgen.plan import StagePlan
from ampacity.loadgen.receive.exchange import Exchange
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.send.endpoint import parse_endpoint
from tests.streams.playing import END, HEAD, http_chunk, json_response
from tests.support.servers.kernel_wires import Sink, ended, listening, with_runner
from tests.support.stage_driving import on_loop, schedule_at
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(not kernel_stamps.AVAILABLE, reason="kernel time stamps need Linux")


def connecting_slowly(monkeypatch: pytest.MonkeyPatch) -> list[socket.socket]:
    """From here on every connection is under way at first, as over a network; the sockets, as they
    come."""
    begun: list[socket.socket] = []

    def under_way(address: tuple[str, int], *_: Any) -> tuple[socket.socket, bool]:
        begun.append(socket.socket())
        begun[-1].setblocking(False)
        assert begun[-1].connect_ex(address) == errno.EINPROGRESS  # and not asked again
        return begun[-1], False

    monkeypatch.setattr(kernel_connect, "begin_connect", under_way)
    return begun


def test_a_server_that_accepts_nobody_is_waited_for() -> None:
    """Its queue is full, so the kernel drops what comes: the connection is there a second later,
    when it is asked again."""

    async def main() -> tuple[bool, int, float]:
        reader = KernelReader(date_by_kernel=True, on_delay=lambda _: None)
        sink, waiting = Sink(), []
        with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
            while True:
                begun = kernel_connect.connect_at_once(
                    reader, server.getsockname()[:2], sink, deque()
                )
                if begun is not None:
                    break
                waiting.append(sink)
                sink = Sink()
            began_s = time.monotonic()
            for _ in waiting:
                server.accept()[0].close()
            async with asyncio.timeout(10):
                await kernel_connect.connect(reader, server.getsockname()[:2], sink, deque(), begun)
            took_s = time.monotonic() - began_s
            sink.wire.write(b"here")
            async with asyncio.timeout(10):
                peer = (await asyncio.to_thread(server.accept))[0]
            got = len(peer.recv(100))
            await ended(reader, [*waiting, sink], [peer])
        return begun.fileno() == -1, got, took_s

    closed, got, took_s = on_loop("uvloop", main())
    assert (closed, got) == (True, 4)
    assert 0.5 < took_s < 5


def test_a_connection_on_one_machine_is_there_at_once_and_the_request_has_left() -> None:
    """Not a turn of the event loop lies between the deadline and the write, however much there is
    to read."""

    async def use(runner: StageRunner, client: Client) -> list[bool]:
        plan = StagePlan(0, "open", schedule_at([0.0] * 3), 0.2, offered_rps=15.0, drain_s=5)
        left: list[bool] = []
        real = client.dispatch

        def dispatch(exchange: Any) -> None:
            real(exchange)
            left.append(exchange.record.sent_ns is not None)

        client.dispatch = dispatch
        await runner.run(plan)
        assert (client.connections_opened, len(client._connecting)) == (3, 0)
        return left

    assert with_runner(use) == [True] * 3


def test_a_server_that_takes_its_time_to_connect_is_waited_for_with_one_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As over a network: ``connect`` says that it is under way, and the same socket is waited for."""
    begun = connecting_slowly(monkeypatch)
    records: list[RequestRecord] = []

    async def use(runner: StageRunner, client: Client) -> int:
        plan = StagePlan(0, "open", schedule_at([0.0] * 5), 0.2, offered_rps=25.0, drain_s=5)
        await runner.run(plan)
        return client.connections_opened

    assert with_runner(use, on_record=records.append) == len(begun) == 5
    assert [record.status for record in records] == ["ok"] * 5


def test_a_request_given_up_before_its_connection_leaves_no_socket_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the same turn of the loop: the task that would wait for the connection never takes a
    step."""
    begun = connecting_slowly(monkeypatch)

    async def use(runner: StageRunner, client: Client) -> None:
        real_dispatch = client.dispatch

        def dispatch(exchange: Any) -> None:
            real_dispatch(exchange)
            exchange.fail("cancelled", "at once", time.monotonic_ns())

        client.dispatch = dispatch
        plan = StagePlan(0, "open", schedule_at([0.0] * 4), 0.2, offered_rps=20.0, drain_s=5)
        await runner.run(plan)
        await asyncio.sleep(0)

    records: list[RequestRecord] = []
    with_runner(use, on_record=records.append)
    assert [record.status for record in records] == ["cancelled"] * 4
    assert [each.fileno() for each in begun] == [-1] * 4


def answer(text: str) -> bytes:
    event = b'data: {"choices":[{"delta":{"content":"%b"},"finish_reason":"stop"}]}\n\n'
    return HEAD + http_chunk(event % text.encode()) + END


@pytest.mark.parametrize("stamps", ["read", "kernel"])
@pytest.mark.parametrize(
    ("waiting", "unsolicited"),
    [
        (answer("stale"), 1),
        (json_response(b"{}").replace(b"200 OK", b"408 Request Timeout"), 1),
        (b"H", 1),
        (b"", 0),  # closed and nothing else
    ],
)
def test_what_lies_in_an_idle_connection_is_no_answer_to_the_next_request(
    waiting: bytes, unsolicited: int, stamps: Any
) -> None:
    """It came before that request left, which takes another connection and its own answer."""

    async def answered(client: Client, text: str, peer_of: Callable[[], socket.socket]) -> str:
        record = RequestRecord(0, 0, time.monotonic_ns(), "unfinished")
        exchange = Exchange(record, b"GET / HTTP/1.1\r\n\r\n", lambda _: None)
        exchange.keep_text()
        client.dispatch(exchange)
        with peer_of() as peer:
            assert peer.recv(100)
            peer.sendall(answer(text))
            await until(lambda: exchange.ended, 5)
            peer.sendall(waiting)  # it is there when this returns, and nobody reads it yet
            return f"{record.status} {exchange.text()}"

    async def main(server: socket.socket) -> tuple[list[str], int, int]:
        host, port = server.getsockname()[:2]
        client = Client(parse_endpoint(f"http://{host}:{port}/v1"), [host], None, stamps=stamps)
        texts = [await answered(client, text, lambda: server.accept()[0]) for text in ("a", "b")]
        await client.close()
        return texts, client.unsolicited, client.resent

    with listening() as server:
        server.settimeout(5)
        found = on_loop("uvloop", main(server))
    assert found == (["ok a", "ok b"], unsolicited, 0)
