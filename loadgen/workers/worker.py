"""A worker: run its share of each stage and write the records to its own stream file."""

import asyncio
import contextlib
import gc
import io
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection

from ampacity.loadgen.drive.stage import StageRunner
from ampacity.loadgen.plan import StagePlan, StageResult
from ampacity.loadgen.rundir.write import StreamWriter
from ampacity.loadgen.workers.channel import (
    Answer,
    Begin,
    Channel,
    Command,
    Done,
    Go,
    Link,
    Prepare,
    Prepared,
    Ready,
    Stop,
)

LIVE_EVERY_S = 0.5  # 30 KB a message: a parent that is held up for some seconds holds up no load


async def _serve(begin: Begin, link: Link[Answer, Command], file: io.BytesIO | None) -> None:
    clients = begin.setup.clients()
    parent = Channel(link)
    with StreamWriter(begin.stream, file) as stream:
        runner = begin.setup.runner(clients, stream, begin.worker)
        stage: asyncio.Task[None] | None = None
        go: asyncio.Future[Go] = asyncio.get_running_loop().create_future()
        parent.send(Ready())
        while True:
            match await parent.received.get():
                case Prepare(plan):
                    go = asyncio.get_running_loop().create_future()
                    stage = asyncio.create_task(_run(runner, plan, go, stream, parent))
                case Go() as message:
                    go.set_result(message)
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
    go: asyncio.Future[Go],
    stream: StreamWriter,
    parent: Channel[Answer, Command],
) -> None:
    runner.prepare(plan)
    parent.send(Prepared())
    at = await go
    stream.ahead_ns = at.ahead_ns
    reporting = asyncio.create_task(_report(runner, parent))
    try:
        result = await runner.run_prepared(at.start_ns + at.ahead_ns)
    finally:
        reporting.cancel()
    _send_live(runner, parent)
    stream.flush()
    await asyncio.to_thread(stream.wait)
    parent.send(Done(_on_clock(result, at.ahead_ns)))


def _on_clock(result: StageResult, ahead_ns: int) -> StageResult:
    """Return a result with the times of a clock that is ``ahead_ns`` behind, the parent's."""
    for name in ("start_ns", "end_ns", "drained_ns"):
        result.meta[name] -= ahead_ns
    stalls = result.measures.stalls
    stalls[:] = [(k, due - ahead_ns, looked - ahead_ns) for k, due, looked in stalls]
    return result


async def _report(runner: StageRunner, parent: Channel[Answer, Command]) -> None:
    while True:
        await asyncio.sleep(LIVE_EVERY_S)
        _send_live(runner, parent)


def _send_live(runner: StageRunner, parent: Channel[Answer, Command]) -> None:
    runner.live.flush()
    parent.send(runner.live)


def run(begin: Begin, link: Link[Answer, Command], file: io.BytesIO | None = None) -> None:
    """Run a worker until its parent ends it; ``file`` gets the records, in place of the stream's."""
    gc.set_threshold(50_000, 20, 50)
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if sys.platform != "win32":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as loop:
        loop.run(_serve(begin, link, file))


def main() -> None:
    """Run a worker; the argument is the descriptor of its connection to the parent."""
    connection: Connection[Answer, Command] = Connection(int(sys.argv[1]))
    begin = connection.recv()
    assert isinstance(begin, Begin)
    if sys.platform != "win32":
        import signal

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # sent to the whole group: the parent decides
    run(begin, connection)


if __name__ == "__main__":
    main()
