"""A worker process: run its share of each stage and write the records to its own stream file."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection

from ampacity.loadgen.drive.stage import StageRunner
from ampacity.loadgen.plan import StagePlan
from ampacity.loadgen.rundir.write import StreamWriter
from ampacity.loadgen.workers.channel import (
    Answer,
    Begin,
    Channel,
    Command,
    Done,
    Go,
    Prepare,
    Prepared,
    Ready,
    Stop,
)

LIVE_EVERY_S = 0.5  # 30 KB a message: a parent that is held up for some seconds holds up no load


async def _serve(begin: Begin, connection: Connection[Answer, Command]) -> None:
    clients = begin.setup.clients()
    parent = Channel(connection)
    with StreamWriter(begin.stream) as stream:
        runner = begin.setup.runner(clients, stream, begin.worker)
        stage: asyncio.Task[None] | None = None
        go: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        parent.send(Ready())
        while True:
            match await parent.received.get():
                case Prepare(plan):
                    go = asyncio.get_running_loop().create_future()
                    stage = asyncio.create_task(_run(runner, plan, go, stream, parent))
                case Go(start_ns):
                    go.set_result(start_ns)
                case Stop(reason, wait):
                    (runner.finish_stage if wait else runner.stop)(reason)
                case _:
                    break
        if stage is not None and not stage.done():  # the parent is gone: keep the records
            runner.stop("the coordinating process is gone")
            if not go.done():
                stage.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await stage
        for client in clients:
            await client.close()


async def _run(
    runner: StageRunner,
    plan: StagePlan,
    go: asyncio.Future[int],
    stream: StreamWriter,
    parent: Channel[Answer, Command],
) -> None:
    runner.prepare(plan)
    parent.send(Prepared())
    start_ns = await go
    reporting = asyncio.create_task(_report(runner, parent))
    try:
        result = await runner.run_prepared(start_ns)
    finally:
        reporting.cancel()
    _send_live(runner, parent)
    stream.flush()
    await asyncio.to_thread(stream.wait)
    parent.send(Done(result))


async def _report(runner: StageRunner, parent: Channel[Answer, Command]) -> None:
    while True:
        await asyncio.sleep(LIVE_EVERY_S)
        _send_live(runner, parent)


def _send_live(runner: StageRunner, parent: Channel[Answer, Command]) -> None:
    runner.live.flush()
    parent.send(runner.live)


def main() -> None:
    """Run a worker; the argument is the descriptor of its connection to the parent."""
    gc.set_threshold(50_000, 20, 50)
    connection: Connection[Answer, Command] = Connection(int(sys.argv[1]))
    begin = connection.recv()
    assert isinstance(begin, Begin)
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if sys.platform != "win32":
        import signal

        import uvloop

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # sent to the whole group: the parent decides
        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as loop:
        loop.run(_serve(begin, connection))


if __name__ == "__main__":
    main()
