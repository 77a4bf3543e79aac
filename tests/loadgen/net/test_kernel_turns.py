"""What goes first where there is more to do than time: requests, then reads, and nobody is called
silent for our own delay."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from ampacity.loadgen.drive.timeouts import TimeoutMonitor
from ampacity.loadgen.net import kernel_stamps
from ampacity.loadgen.net.kernel_stamps import READS_MAX, TURN_NS, KernelReader
from ampacity.loadgen.plan import Limits
from ampacity.loadgen.receive.exchange import Exchange
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.sleeper import Sleeper
from tests.support.servers.fault_server import FaultServer
from tests.support.servers.kernel_wires import Sink, connected, ended, listening
from tests.support.stage_driving import Driven, on_loop, run_stage, schedule_at
from tests.support.waiting import until

pytestmark = [
    pytest.mark.skipif(not kernel_stamps.AVAILABLE, reason="kernel time stamps need Linux"),
    pytest.mark.usefixtures("dated_by_the_kernel", "hot_path_either_way"),
]


def test_reading_makes_way_for_a_request_that_is_due_and_goes_on_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """64 sockets have something: 20 reads off a deadline 20 are made, at it eight; all where there
    is none, or it is long past."""

    began_ns = time.monotonic_ns()  # of every turn: a busy machine would pass the deadlines
    monkeypatch.setattr(kernel_stamps, "time", SimpleNamespace(monotonic_ns=lambda: began_ns))

    async def main() -> tuple[list[int], list[Sink]]:
        reader = KernelReader(date_by_kernel=True, on_delay=lambda _: None)
        # turns when the test says so
        asyncio.get_running_loop().remove_reader(reader._epoll.fileno())
        reader.pacer = pacer = Sleeper()
        with listening() as server:
            sinks, peers = await connected(reader, server, 64)

            def reads_of_turns() -> list[int]:
                for peer in peers:
                    peer.send(b"x")
                reads = []
                while not reads or reads[-1]:
                    reader._read_ns = 50_000_000
                    reads.append(reader.turn())
                return reads

            found = []
            for due_in_ns in (40_000_000, 1_040_000_000, -1, -1 - TURN_NS):
                pacer.call_at(began_ns + due_in_ns, lambda: None)
                found.append(reads_of_turns()[0])
            pacer.close()
            found.append(reads_of_turns()[0])
            await ended(reader, sinks, peers)
        return found, sinks

    found, sinks = on_loop("uvloop", main())
    assert found == [8, 20, 8, 64, 64]
    assert [sum(len(data) for _, data in sink.reads) for sink in sinks] == [5] * 64


def test_a_turn_is_as_long_as_96_reads_take_from_2_to_4_ms() -> None:
    """48 reads in 2 ms are 96 in 4 ms, and 128 in 4 ms are 96 in 3 ms; parts of a turn count together."""

    async def main() -> list[int]:
        reader = KernelReader(date_by_kernel=True, on_delay=lambda _: None)
        reader.patient = reader._apart = True
        due, begun, reads = [], 10_000_000, [0]
        reader._sleeper.call_at = lambda at_ns, _: due.append(at_ns - begun)  # type: ignore[method-assign]

        def turn() -> int:
            reader._turn_ns, reader.behind = begun, reads[0] == READS_MAX
            return reads[0]

        reader.turn = turn  # type: ignore[method-assign]
        for reads[0] in (96, 48, 96, 126, 32, 32, READS_MAX, 160 - READS_MAX, 8):
            reader._on_time()
        reader._turn_max_ns = TURN_NS
        reader._on_time()
        reader._more.cancel()
        reader.close()
        return due

    ms = 1_000_000
    assert on_loop("asyncio", main()) == [
        *(2 * ms, 4 * ms, 4 * ms, 4 * ms * 96 // 126, 4 * ms, 4 * ms),
        4 * ms * 96 // 160,  # of 64 and 96
        *(4 * ms, TURN_NS),
    ]


def test_catching_up_takes_as_many_reads_as_there_are_sockets() -> None:
    """Where more is always there, as a turn after each says, that ends: 100 sockets are two turns
    of 64."""

    async def main() -> int:
        reader = KernelReader(date_by_kernel=True, on_delay=lambda _: None)
        reader._wires = [None] * 100
        turns = 0

        def turn() -> int:
            nonlocal turns
            turns += 1
            reader.behind = True
            return READS_MAX

        reader.turn = turn
        reader.catch_up()
        reader.close()
        return turns

    assert on_loop("asyncio", main()) == 2


@pytest.mark.parametrize(("waited", "status"), [(True, "unfinished"), (False, "timeout")])
def test_what_had_waited_to_be_read_is_not_silence_however_old_it_is(
    waited: bool, status: str
) -> None:
    """The last byte was read 9 s ago, and the limit is one: unless a byte that came 8 s ago had
    only not been read."""
    began_ns = time.monotonic_ns() - 10_000_000_000
    exchange = Exchange(
        RequestRecord(0, 0, 0, "unfinished", dispatched_ns=began_ns), b"", lambda _: None
    )
    exchange.feed(
        began_ns + 1_000_000_000, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    )

    class Late:
        stamps = "kernel"

        async def catch_up(self) -> None:
            if waited:
                exchange.feed(began_ns + 2_000_000_000, b"6\r\ndata: ")

    async def main() -> None:
        await TimeoutMonitor(Limits(idle_s=1.0), [Late()], [exchange]).check()

    asyncio.run(main())
    assert exchange.record.status == status


@pytest.mark.parametrize("patient", [False, True])
def test_a_turn_that_was_full_and_left_nothing_is_not_behind_for_long(patient: bool) -> None:
    """As many sockets have something as a turn has reads, and then none: other work need not give
    way any more."""

    async def main() -> tuple[list[bool], list[Sink]]:
        reader = KernelReader(date_by_kernel=True, on_delay=lambda _: None)
        reader.patient, reader._apart = patient, patient
        turns: list[bool] = []
        real = reader.turn

        def turn() -> int:
            count = real()
            turns.append(reader.behind)
            return count

        reader.turn = turn
        with listening() as server:
            sinks, peers = await connected(reader, server, READS_MAX)
            for peer in peers:
                peer.send(b"x")
            await until(lambda: all(sink.reads for sink in sinks) and not reader.behind)
            await ended(reader, sinks, peers)
        return turns, sinks

    turns, sinks = on_loop("uvloop", main())
    assert True in turns
    assert all(len(sink.reads) == 1 for sink in sinks)


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_busy_client_does_not_take_what_it_has_not_read_for_silence(loop: str) -> None:
    """Something holds the event loop for 0.7 s, longer than the limit between tokens, which came
    all the while. There is more than a turn of reads."""

    async def main() -> Driven:
        asyncio.get_running_loop().call_later(0.4, time.sleep, 0.7)
        return await run_stage(
            server.url, schedule_at([0.0] * 100, output_tokens=60), limits=Limits(idle_s=0.5)
        )

    with FaultServer(gap_s=0.02) as server:
        driven = on_loop(loop, main())
    expected = [("ok", 60)] * 100
    assert [(record.status, record.output_tokens) for record in driven.records] == expected
