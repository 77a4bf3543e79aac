"""Sockets that are dated by the kernel: the dates are right however late they are read, and reads
wait only where that harms nobody."""

import asyncio
import socket
import struct
import threading
import time
from typing import Any

import pytest

from ampacity.loadgen.audit import Measures, Tolerance, judge
from ampacity.loadgen.drive import stage
from ampacity.loadgen.drive.stage import StageRunner
from ampacity.loadgen.net import kernel_stamps
from ampacity.loadgen.net.http import Client
from ampacity.loadgen.net.kernel_stamps import LATEST, TURN_NS, KernelReader
from ampacity.loadgen.plan import Limits, StagePlan, StageResult
from ampacity.loadgen.receive.hot_path import READ_BYTES
from ampacity.loadgen.rundir.records import RequestRecord
from tests.support.servers import kernel_wires
from tests.support.stage_driving import on_loop, schedule_at
from tests.support.waiting import until

pytestmark = [
    pytest.mark.skipif(not kernel_stamps.AVAILABLE, reason="kernel time stamps need Linux"),
    pytest.mark.usefixtures("dated_by_the_kernel", "hot_path_either_way"),
]


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_what_is_read_5_ms_late_has_the_date_of_its_arrival(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_stamps, "AUDIT_EVERY", 1)  # of every read
    delays_s: list[float] = []

    async def main() -> None:
        reader = KernelReader(date_by_kernel=True, on_delay=delays_s.append)
        with kernel_wires.listening() as server:
            sinks, peers = await kernel_wires.connected(reader, server, 30)
            spans = kernel_wires.written_and_read_late(peers, reader)
            for sink, (before_ns, after_ns) in zip(sinks, spans, strict=True):
                at_ns, data = sink.reads[-1]
                assert data == b"x" * 250
                assert (
                    before_ns - kernel_wires.CLOCKS_NS <= at_ns <= after_ns + kernel_wires.CLOCKS_NS
                )
            await kernel_wires.ended(reader, sinks, peers)

    on_loop(loop, main())
    assert len(delays_s) == 30
    assert all(delay_s >= 0.005 - kernel_wires.CLOCKS_NS / 1e9 for delay_s in delays_s)


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_megabyte_and_the_end_behind_it_are_read_whole(loop: str) -> None:
    """More than one read holds, and no news after it: a socket is told of only once."""
    sent = bytes(range(256)) * 4096

    async def main() -> kernel_wires.Sink:
        reader = KernelReader(date_by_kernel=True, on_delay=lambda _: None)
        with kernel_wires.listening() as server:
            sinks, peers = await kernel_wires.connected(reader, server, 1)
            sending = threading.Thread(target=lambda: (peers[0].sendall(sent), peers[0].close()))
            sending.start()
            async with asyncio.timeout(20):
                while not sinks[0].lost:
                    await asyncio.sleep(0.005)
            sending.join()
            await kernel_wires.ended(reader, sinks, [])
        return sinks[0]

    sink = on_loop(loop, main())
    assert len(sent) > READ_BYTES
    assert b"".join(data for _, data in sink.reads) == sent
    assert sink.lost == [None]


def test_a_read_that_cannot_be_used_harms_no_other() -> None:
    """An error of our own in one stream is told to the event loop, as one of a callback; the
    others go on."""
    told: list[str] = []

    async def main() -> list[kernel_wires.Sink]:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: told.append(str(context["exception"]))
        )
        reader = KernelReader(date_by_kernel=True, on_delay=lambda _: None)
        with kernel_wires.listening() as server:
            sinks, peers = await kernel_wires.connected(reader, server, 4)

            def broken(at_ns: int, data: bytes) -> bool:
                raise RuntimeError("broken")

            def not_lost(error: Exception | None) -> None:
                raise RuntimeError("not lost either")

            sinks[1].feed = broken
            sinks[3].connection_lost = not_lost
            peers[3].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            peers[3].close()  # a reset
            for peer in peers[:3]:
                peer.send(b"x" * (READ_BYTES + 1))  # one read does not hold it
            async with asyncio.timeout(10):
                while len(told) < 3 or any(
                    sum(len(d) for _, d in sinks[k].reads) <= READ_BYTES for k in (0, 2)
                ):
                    await asyncio.sleep(0.001)
            await kernel_wires.ended(reader, sinks, peers)
        return sinks

    on_loop("uvloop", main())
    assert sorted(told) == ["broken", "broken", "not lost either"]


@pytest.mark.parametrize(("gap_ns", "turn_max_ns"), [(6_000_000, TURN_NS), (10_000_000, 4_000_000)])
def test_reads_wait_for_their_turn_only_while_streams_are_not_read_twice_in_two_turns(
    gap_ns: int, turn_max_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """6 ms are two turns of 2 ms, but not of 4: that is seen by the first reads after each look."""
    monkeypatch.setattr(kernel_stamps, "LOOK_EVERY", 12)
    seen: list[bool] = []
    looked: list[bool] = []
    longest: list[int] = []

    async def main() -> None:
        reader = KernelReader(date_by_kernel=True, on_delay=lambda _: None)
        with kernel_wires.listening() as server:
            sinks, peers = await kernel_wires.connected(reader, server, 32)

            def play(rounds: int, gap_s: float) -> None:
                for _ in range(rounds):
                    for peer in peers:
                        peer.send(b"x")
                    reader.turn()
                    time.sleep(gap_s)  # the subject: the pace of the reads

            rounds = LATEST // 32
            reader.patient = True
            play(2 * rounds, gap_ns / 1e9)
            seen.append(reader._may_wait())
            reader.patient = False
            seen.append(reader._may_wait())
            reader.patient = True
            play(rounds, 0.0)
            seen.append(reader._may_wait())
            play(2 * rounds, gap_ns / 1e9)
            seen.append(reader._may_wait())
            for _ in range(
                12
            ):  # merged, near reads are not to be seen: all are made at once now and then
                play(rounds, gap_ns / 1e9)
                looked.append(not reader._may_wait())
            longest.append(reader._turn_max_ns)
            await kernel_wires.ended(reader, sinks, peers)

    on_loop("uvloop", main())
    assert seen == [True, False, False, True]
    assert sum(looked) == (1 if gap_ns > 8_000_000 else 2)
    assert longest == [turn_max_ns]


def test_many_streams_are_read_in_turns_and_each_date_is_that_of_its_arrival() -> None:
    """200 streams with a token every 20 ms, 10,000 a second, from another thread; turns 2 ms apart
    have 20 of them."""
    streams, tokens, gap_s = 200, 25, 0.02
    spans: list[list[tuple[int, int]]] = [[] for _ in range(streams)]
    turns: list[int] = []

    async def main() -> list[kernel_wires.Sink]:
        reader = KernelReader(date_by_kernel=True, on_delay=lambda _: None)
        reader.patient = True
        real = reader.turn
        reader.turn = lambda: turns.append(real()) or turns[-1]
        with kernel_wires.listening() as server:
            sinks, peers = await kernel_wires.connected(reader, server, streams)

            def write() -> None:
                begin_s = time.monotonic()
                for k in range(tokens * streams):
                    if (wait_s := begin_s + k * gap_s / streams - time.monotonic()) > 0:
                        time.sleep(wait_s)  # the pace of the tokens
                    before_ns = time.monotonic_ns()
                    peers[k % streams].send(b"x")
                    spans[k % streams].append((before_ns, time.monotonic_ns()))

            await asyncio.to_thread(write)
            await until(lambda: all(sink.size == tokens for sink in sinks))
            await kernel_wires.ended(reader, sinks, peers)
        return sinks

    sinks = on_loop("uvloop", main())
    assert max(turns) >= 8  # several in one turn
    right = total = 0
    for sink, written in zip(sinks, spans, strict=True):
        assert sink.size == tokens
        dates = [at_ns for at_ns, data in sink.reads for _ in data]
        for at_ns, (before_ns, after_ns) in zip(dates, written, strict=True):
            right += (
                before_ns - kernel_wires.CLOCKS_NS <= at_ns <= after_ns + kernel_wires.CLOCKS_NS
            )
            total += 1
    # dates of the reads would be right in one of twenty; what is not is merged, while this machine
    # did something else
    assert right >= 0.5 * total


# -- the stage above it ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "retries", "patient"), [("open", 0, True), ("open", 1, False), ("closed", 0, False)]
)
def test_reads_may_wait_only_where_no_request_follows_from_an_answer(
    kind: Any, retries: int, patient: bool
) -> None:
    async def use(runner: StageRunner, client: Client) -> bool:
        level: Any = {"offered_rps": 1.0} if kind == "open" else {"concurrency": 1}
        runner.prepare(StagePlan(0, kind, schedule_at([0.0, 0.1]), 0.2, **level))
        return client._kernel_reader().patient

    assert kernel_wires.with_runner(use, Limits(retries=retries)) is patient


def test_kept_connections_of_an_earlier_stage_are_audited_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel_stamps, "AUDIT_EVERY", 1)

    async def use(runner: StageRunner, client: Client) -> list[StageResult]:
        plan = StagePlan(0, "open", schedule_at([0.0] * 20), 0.1, offered_rps=200.0, drain_s=5)
        return [await runner.run(plan), await runner.run(plan)]

    first, second = kernel_wires.with_runner(use)
    assert len(first.measures.receive_delays_s) > 0
    assert len(second.measures.receive_delays_s) > 0


@pytest.mark.parametrize("whole_max", [stage.WHOLE_MAX, 0])
def test_an_error_while_answers_are_judged_ends_the_stage_and_says_so(
    whole_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether they are judged when there is time, or because there are too many."""
    monkeypatch.setattr(stage, "WHOLE_MAX", whole_max)

    def refuse(record: RequestRecord) -> None:
        if record.request_id == 2:
            raise OSError("no room")

    async def use(runner: StageRunner, client: Client) -> Any:
        # long, as a busy machine may judge the third one late
        times_s = [0.01 * k for k in range(1000)]
        return await runner.run(
            StagePlan(0, "open", schedule_at(times_s), 10.0, offered_rps=100.0, drain_s=5)
        )

    meta = kernel_wires.with_runner(use, on_record=refuse).meta
    assert meta["ended_early"] == "an answer could not be parsed or a request built: no room"
    assert meta["scheduled_requests"] < 1000


def test_answers_that_wait_to_be_judged_are_few_though_there_is_never_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(stage, "WHOLE_MAX", 3)
    monkeypatch.setattr(stage, "in_slices", never)
    waiting: list[int] = []

    async def use(runner: StageRunner, client: Client) -> Any:
        runner._on_record = lambda record: waiting.append(len(runner._whole))
        times_s = [0.005 * k for k in range(40)]
        return await runner.run(
            StagePlan(0, "open", schedule_at(times_s), 0.2, offered_rps=200.0, drain_s=5)
        )

    kernel_wires.with_runner(use)
    assert waiting == [3] * 37 + [2, 1, 0]


@pytest.mark.parametrize(
    ("by_kernel", "delay_s", "merged", "reason"),
    [
        (True, 0.0051, 300, None),  # whether that moved a figure is worked out from the records
        (True, 0.03, 0, None),  # late, and yet every date is right
        (False, 0.0051, 300, None),  # the delay is in the times, and said beside them
        (False, 0.03, 0, "the event loop was 30.0 ms late at p99, more than 20.0 ms"),
    ],
)
def test_how_late_reads_may_be(
    by_kernel: bool, delay_s: float, merged: int, reason: str | None
) -> None:
    measures = Measures(dated_by_kernel=by_kernel, events=1000, merged=merged, cpu_fraction=0.5)
    measures.receive_delays_s.extend([delay_s] * 100)
    audit = judge(measures, Tolerance())
    assert (audit.client_limited, audit.client_limited_reason) == (reason is not None, reason)


@pytest.mark.parametrize(
    ("by_kernel", "lag_s", "reason"),
    [
        # an SLO of 50 ms between tokens leaves 5 ms, one of 2 s for the first token 200
        (False, 0.0051, "the event loop was 5.1 ms late at p99, more than 5.0 ms"),
        (False, 0.0049, None),
        (True, 0.19, None),  # a late loop spoils no date of the kernel: only requests leave late
        (True, 0.21, "the event loop was 210.0 ms late at p99, more than 200.0 ms"),
    ],
)
def test_how_late_the_loop_may_be_is_what_that_spoils(
    by_kernel: bool, lag_s: float, reason: str | None
) -> None:
    measures = Measures(dated_by_kernel=by_kernel)
    measures.loop_lags_s.extend([lag_s] * 100)
    assert (
        judge(measures, Tolerance.for_limits({"itl": [0.05], "ttft": [2.0]})).client_limited_reason
        == reason
    )
