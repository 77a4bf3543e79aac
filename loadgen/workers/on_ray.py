"""Start workers as actors of a Ray cluster: the same worker, over calls of its actor.

Messages are pickled by Ray. All but the texts of prompts and long results are small enough that Ray
sends them inline: they enter neither its object store nor what that spills to disk.
"""

import asyncio
import copy
import io
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO

import ampacity
from ampacity.loadgen.host import raise_open_files_limit
from ampacity.loadgen.plan import Live
from ampacity.loadgen.send.endpoint import is_loopback
from ampacity.loadgen.workers.channel import Answer, Begin, Command, Stop
from ampacity.loadgen.workers.launch import WorkerError
from ampacity.loadgen.workers.setup import Route
from ampacity.loadgen.workers.worker import run

START_TIMEOUT_S = 60.0  # the first actor of a node unpacks the package
CONNECT_TIMEOUT_S = CLOCK_TIMEOUT_S = 5.0
PIECE_BYTES = 64 << 10  # Ray sends up to 100 KiB inline
PIECES_MAX = 64  # of records that wait for the parent; then they wait in the stream's writer


class _Stream(io.BytesIO):
    """A stream of records that is sent piece by piece, as fast as the parent takes it."""

    def __init__(self, send: Callable[[bytes], object]) -> None:
        super().__init__()
        self._send = send

    def flush(self) -> None:
        data = self.getvalue()
        self.seek(0)
        self.truncate()
        for at in range(0, len(data), PIECE_BYTES):
            self._send(data[at : at + PIECE_BYTES])


class Actor:
    """A worker on a node, and its end of the link."""

    def __init__(self) -> None:
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._answers: SimpleQueue[Answer | bytes | Exception | None] = SimpleQueue()
        self._room = threading.Semaphore(PIECES_MAX)
        self.recv = self._commands.get

    def post(self, command: Command, texts: Any = None) -> None:
        """Take a command; ``texts`` belong into the setup of the first one."""
        if isinstance(command, Begin):
            command = replace(command, setup=replace(command.setup, texts=texts))
        self._commands.put(command)

    def node(self) -> str:
        """Return the node's address and Ray's name of it."""
        import ray

        name: str = ray.get_runtime_context().get_node_id()
        return f"{ray.util.get_node_ip_address()}/{name[:8]}"

    def look(self) -> int:
        """Return this node's monotonic clock, ns."""
        return time.monotonic_ns()

    def answers(self) -> Iterator[Answer | bytes]:
        """Run the worker, and yield what it sends; bytes are of its stream of records."""
        threading.Thread(target=self._run, daemon=True).start()
        while (answer := self._answers.get()) is not None:
            if isinstance(answer, Exception):
                raise answer
            yield answer
            if isinstance(answer, bytes):
                self._room.release()

    def send(self, answer: Answer) -> None:
        """Have an answer sent; counters are copied, as they go on changing."""
        self._answers.put(copy.deepcopy(answer) if isinstance(answer, Live) else answer)

    def close(self) -> None:
        """Do nothing: the parent ends the actor."""

    def _run(self) -> None:
        try:
            raise_open_files_limit()
            begin = self._commands.get()
            assert isinstance(begin, Begin)
            run(begin, self, _Stream(self._send_records))
        except Exception as error:
            self._answers.put(error)
        self._answers.put(None)

    def _send_records(self, data: bytes) -> None:
        self._room.acquire()
        self._answers.put(data)


class _Link:
    """The parent's end; what it receives of records it writes to the worker's stream file."""

    def __init__(self, ray: Any, actor: Any, share: Callable[[Any], Any]) -> None:
        self._ray, self._share = ray, share
        # in a group of one thread, so that commands stay in their order
        self._post = actor.post.options(concurrency_group="commands").remote
        options = {"num_returns": "streaming", "_generator_backpressure_num_objects": PIECES_MAX}
        self._answers = actor.answers.options(**options).remote()
        self._file: BinaryIO | None = None
        self.why = "did not answer"

    def send(self, command: Command) -> None:
        texts = None
        if isinstance(command, Begin):
            self._file = command.stream.open("wb")
            texts = self._share(command.setup.texts)
            command = replace(command, setup=replace(command.setup, texts=None))
        self._post(command, texts)

    def recv(self) -> Answer:
        try:
            for sent in self._answers:
                answer: Answer | bytes = self._ray.get(sent)
                if not isinstance(answer, bytes):
                    return answer
                self._write(answer)
        except self._ray.exceptions.RayError as error:
            self.why = f"died ({_reason(error)})"
        raise EOFError

    def _write(self, data: bytes) -> None:
        try:
            if self._file is not None:
                self._file.write(data)
                self._file.flush()
        except OSError as error:
            self._file = None
            self.send(Stop(f"the records of a worker cannot be written: {error.strerror}"))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class RayWorker:
    """A worker that runs as an actor."""

    def __init__(self, ray: Any, actor: Any, node: str, share: Callable[[Any], Any]) -> None:
        self._ray, self._actor, self.node = ray, actor, node
        self.link = _Link(ray, actor, share)
        self._look = actor.look.options(concurrency_group="commands").remote

    def look(self) -> int:
        """Return the clock of its node. Raises OSError if it is gone."""
        try:
            return int(self._ray.get(self._look(), timeout=CLOCK_TIMEOUT_S))
        except self._ray.exceptions.RayError as error:
            raise OSError(_reason(error)) from None

    async def end(self) -> str:
        await asyncio.to_thread(self._ray.kill, self._actor)
        return self.link.why


class RayCluster:
    """A cluster that was joined; it starts workers where it has a CPU free."""

    lead_s = 0.5  # a command is with its actor within some milliseconds

    def __init__(self, ray: Any) -> None:
        self._ray, self._texts = ray, dict[int, Any]()
        groups = {"commands": 1}
        self._actors = ray.remote(
            num_cpus=1, scheduling_strategy="SPREAD", concurrency_groups=groups
        )(Actor)

    async def room(self) -> int:
        return await asyncio.to_thread(_free_cpus, self._ray)

    async def start(self) -> RayWorker:
        return await asyncio.to_thread(self._start)

    def _start(self) -> RayWorker:
        actor = self._actors.remote()
        try:
            node = self._ray.get(actor.node.remote(), timeout=START_TIMEOUT_S)
        except self._ray.exceptions.RayError as error:
            self._ray.kill(actor)
            raise WorkerError(f"--ray: a worker did not start: {_reason(error)}") from None
        return RayWorker(self._ray, actor, node, self._share)

    def _share(self, texts: Any) -> Any:
        """Return a reference to texts in the object store, one for all workers; they have no key."""
        if texts is None:
            return None
        if id(texts) not in self._texts:
            self._texts[id(texts)] = self._ray.put(texts)
        return self._texts[id(texts)]

    async def close(self) -> None:
        await asyncio.to_thread(self._ray.shutdown)


async def join_cluster(address: str, workers: int, routes: Sequence[Route]) -> RayCluster:
    """Join the cluster at ``address`` (``auto`` or HOST:PORT). Raises WorkerError."""
    return await asyncio.to_thread(_join, address, workers, routes)


def _join(address: str, workers: int, routes: Sequence[Route]) -> RayCluster:
    host, _, port = address.rpartition(":")
    if address != "auto" and not (host and port.isdigit() and "/" not in host):
        raise WorkerError(f"--ray {address}: give auto or HOST:PORT, on a machine of the cluster")
    try:
        import ray
    except ImportError:
        raise WorkerError("--ray needs Ray: pip install '.[ray]' in ampacity's folder") from None
    try:
        if host:  # Ray itself tries for minutes
            socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level="error",
            runtime_env={"py_modules": [str(Path(ampacity.__file__).parent)]},
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise WorkerError(f"--ray {address}: {_reason(error)}") from None
    # Ray prints errors of its own to stdout, which is the report's
    ray._private.worker.print_to_stdstream = lambda *_, **__: None
    cpus = _free_cpus(ray)
    nodes = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    if cpus < workers:
        raise WorkerError(
            f"--ray {address}: {cpus} CPUs are free, --workers {workers} need {workers}"
        )
    here = [route for route in routes if route.addresses and is_loopback(route.addresses)]
    if here and nodes - {ray.util.get_node_ip_address()}:
        raise WorkerError(
            f"{here[0].endpoint.url} is each node's own address: give the one by which all of the "
            "cluster's nodes reach the endpoint"
        )
    return RayCluster(ray)


def _free_cpus(ray: Any) -> int:
    return int(ray.available_resources().get("CPU", 0))


def _reason(error: Exception) -> str:
    """Return why a worker is gone, or none can be had, in one line."""
    text = " ".join(str(getattr(error, "cause", None) or error).split()) or type(error).__name__
    if dead := re.search(r"because (its [\w ]+ has died)", text):
        return dead[1]
    return "it cannot be reached" if "temporarily unavailable" in text else text[:300]
