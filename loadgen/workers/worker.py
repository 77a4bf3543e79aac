"""A worker process: run its share of each stage and write the records to its own stream file.

Pickled commands come in on stdin, pickled messages go out on stdout; records stay in the file.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import pickle
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from ampacity.loadgen.drive.options import RunnerOptions
from ampacity.loadgen.drive.stage import StageRunner
from ampacity.loadgen.net.http import Client, Reuse, Stamps
from ampacity.loadgen.plan import Limits, StagePlan
from ampacity.loadgen.probe.results import Calibration
from ampacity.loadgen.receive.answers import ANSWERS
from ampacity.loadgen.receive.kept_answers import KeptAnswers
from ampacity.loadgen.rundir.files import StreamWriter
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.send.endpoint import Endpoint, Proxy
from ampacity.loadgen.send.protocols import RequestShape
from ampacity.loadgen.send.requests import ScheduledRequests
from ampacity.loadgen.send.secrets import SECRET_MIN
from ampacity.workloads.classes import RequestClass
from ampacity.workloads.prompts.files import read_prompts
from ampacity.workloads.prompts.images import Images
from ampacity.workloads.prompts.tokenizers import load_tokenizer
from ampacity.workloads.traces.recorded import Recorded

LIVE_EVERY_S = 0.25
_LENGTH = struct.Struct("<I")


class Sink(Protocol):
    """The destination of records: a stream, or the writer of a run directory."""

    def append(self, record: RequestRecord) -> None:
        """Add one finished request."""

    def flush(self) -> None:
        """Write pending records to the operating system."""

    @property
    def failed(self) -> str | None:
        """Return why nothing can be written any more, or None."""


def _flushed(sink: Sink) -> str | None:
    sink.flush()
    return sink.failed


@dataclass(frozen=True)
class Route:
    """One endpoint with its addresses and proxy."""

    endpoint: Endpoint
    addresses: list[str]
    proxy: Proxy | None = None


@dataclass(frozen=True)
class Setup:
    """What each process of a run needs to send its requests. Has secrets: never written to disk."""

    routes: tuple[Route, ...]  # one for each endpoint, used round-robin
    shape: RequestShape
    tokenizer: str
    salt: str
    calibration: Calibration
    run_id: str
    limits: Limits
    stamps: Stamps
    reuse: Reuse
    classes: tuple[RequestClass, ...] = ()
    planned_histories: bool = False  # text of planned length in place of the answers of a session
    prompt_file: str | None = None
    recorded: Recorded | None = None  # the messages of a trace
    images: Images | None = None
    answers_in: Path | None = None  # folder for the texts of answers
    answers_bytes: int = 0  # limit of each process
    counts_tokens: bool = False  # the tokenizer counts what the server does not
    thinks_until: str | None = None  # closing tag of thinking that has no opening tag

    def clients(self) -> list[Client]:
        """Return a client for each endpoint; needs a running event loop."""
        return [
            Client(
                route.endpoint,
                route.addresses,
                route.endpoint.ssl_context(),
                stamps=self.stamps,
                reuse=self.reuse,
                proxy=route.proxy,
            )
            for route in self.routes
        ]

    @property
    def secrets(self) -> tuple[str, ...]:
        """Return the strings to redact, longest first."""
        found = {secret for route in self.routes for secret in route.endpoint.secrets}
        found |= {value for c in self.classes for _, value in c.headers if len(value) >= SECRET_MIN}
        return tuple(sorted(found, key=len, reverse=True))

    @property
    def targets(self) -> tuple[str, ...]:
        """Return the names of the endpoints in the records: host:port."""
        return tuple(f"{route.endpoint.host}:{route.endpoint.port}" for route in self.routes)

    def runner(self, clients: Sequence[Client], stream: Sink, worker: int = 0) -> StageRunner:
        """Return a stage runner that sends this run's requests."""
        tokenizer = load_tokenizer(self.tokenizer)
        prompts = self.calibration.prompts(tokenizer, self.salt)
        requests = ScheduledRequests(
            [(route.endpoint, route.proxy) for route in self.routes],
            self.shape,
            prompts,
            self.run_id,
            classes=self.classes,
            planned_histories=self.planned_histories,
            images=self.images,
            # bad rows were refused, or skipped as asked, before the run
            file=self.recorded
            if self.prompt_file is None
            else read_prompts(Path(self.prompt_file), skip_bad_rows=True),
        )
        keep = None
        if self.answers_in is not None:
            path, asked = (
                self.answers_in / f"answers-{worker}.jsonl",
                self.prompt_file is not None or self.recorded is not None,
            )
            keep = KeptAnswers(path, self.answers_bytes, prompts=asked, secrets=self.secrets).keep
        return StageRunner(
            clients,
            requests,
            stream.append,
            RunnerOptions(
                limits=self.limits,
                targets=self.targets,
                secrets=self.secrets,
                worker=worker,
                flush=lambda: _flushed(stream),
                answer=partial(ANSWERS[self.shape.api], self.thinks_until),
                keep=keep,
                by_piece=tokenizer.by_piece if self.counts_tokens else None,
            ),
        )


def pack_message(message: Any) -> bytes:
    """Return a pickled message after its length."""
    content = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(content)) + content


def unpack_length(head: bytes) -> int:
    """Return the length of the message that follows these four bytes."""
    return int(_LENGTH.unpack(head)[0])


def unpack_message(content: bytes) -> Any:
    """Return the message; both ends of the pipe are this program."""
    return pickle.loads(content)


def write_message(pipe: BinaryIO, message: Any) -> None:
    """Send one message."""
    pipe.write(pack_message(message))
    pipe.flush()


def read_message(fd: int) -> Any:
    """Return the next message. Raises EOFError if the other side is gone.

    Reads the bare descriptor: a buffered reader that a thread waits in cannot be closed at exit.
    """
    return unpack_message(_read_exactly(fd, unpack_length(_read_exactly(fd, _LENGTH.size))))


def _read_exactly(fd: int, count: int) -> bytes:
    pieces = []
    while count:
        piece = os.read(fd, count)
        if not piece:
            raise EOFError
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)


async def _serve(setup: Setup, worker: int, stream_path: Path, answers: BinaryIO) -> None:
    loop = asyncio.get_running_loop()
    commands: asyncio.Queue[Any] = asyncio.Queue()

    def listen() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                loop.call_soon_threadsafe(commands.put_nowait, read_message(0))
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            loop.call_soon_threadsafe(commands.put_nowait, ("quit",))

    threading.Thread(target=listen, daemon=True).start()
    clients = setup.clients()
    with StreamWriter(stream_path) as stream:
        runner = setup.runner(clients, stream, worker)
        stage: asyncio.Task[None] | None = None
        write_message(answers, ("ready",))
        while True:
            command, *arguments = await commands.get()
            if command == "prepare":
                go: asyncio.Future[int] = loop.create_future()
                stage = asyncio.create_task(_run(runner, arguments[0], go, stream, answers))
            elif command == "go":
                go.set_result(arguments[0])
            elif command == "stop":
                runner.stop(arguments[0])
            elif command == "finish_stage":
                runner.finish_stage(arguments[0])
            elif command == "quit":
                break
        if stage is not None and not stage.done():  # the parent is gone: keep the records
            runner.stop("the coordinating process is gone")
            if not go.done():
                stage.cancel()
            with contextlib.suppress(asyncio.CancelledError, BrokenPipeError):
                await stage
        for client in clients:
            await client.close()


async def _run(
    runner: StageRunner,
    plan: StagePlan,
    go: asyncio.Future[int],
    stream: StreamWriter,
    answers: BinaryIO,
) -> None:
    runner.prepare(plan)
    write_message(answers, ("prepared",))
    start_ns = await go
    telling = asyncio.create_task(_tell(runner, answers))
    try:
        result = await runner.run_prepared(start_ns)
    finally:
        telling.cancel()
    stream.flush()
    write_message(answers, ("done", result))


async def _tell(runner: StageRunner, answers: BinaryIO) -> None:
    while True:
        await asyncio.sleep(LIVE_EVERY_S)
        write_message(answers, ("live", runner.live.counts()))


def main() -> None:
    """Run a worker; the parent first sends (setup, worker number, stream file)."""
    gc.set_threshold(50_000, 20, 50)
    setup, worker, stream_path = read_message(0)
    answers, sys.stdout = (
        sys.stdout.buffer,
        sys.stderr,
    )  # a stray print must not garble the messages
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if sys.platform != "win32":
        import signal

        import uvloop

        signal.signal(signal.SIGINT, signal.SIG_IGN)  # sent to the whole group: the parent decides
        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as loop:
        loop.run(_serve(setup, worker, stream_path, answers))


if __name__ == "__main__":
    main()
