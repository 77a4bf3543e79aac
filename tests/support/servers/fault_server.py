"""An OpenAI-compatible server that misbehaves on request.

Each request chooses its fault: by the header ``X-Fault: NAME``, the field ``"fault": "NAME"`` of
its body, or a model called ``fault:NAME``; without one it is answered well. ``FAULTS`` lists them
with the status that a client must give each. Use it as ``with FaultServer() as server`` (a thread
of its own), ``async with FaultServer() as server`` (this event loop), or by hand:

    python -m tests.support.servers.fault_server --port 8000
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import ssl
import threading
import time
from collections.abc import Mapping
from typing import Any

from tests.support.servers.faults import FAULTS, Call, Request

Refusals = Mapping[str, tuple[str, str]]


class FaultServer:
    """Listens on 127.0.0.1. ``requests`` are those that arrived, in their order.

    ``refuses`` maps a field of the body to the (status, body) that a request with it gets, as
    ``{"ignore_eos": ("422 Unprocessable Entity", '{"detail":"extra field"}')}``. ``pages`` gives
    (status, body) of GET paths; ``api_key`` is wanted from everyone; ``models`` other than these
    are answered 404. ``on_accept`` breaks every connection before it is read: "reset", "close",
    "silent"."""

    def __init__(
        self,
        *,
        port: int = 0,
        gap_s: float = 0.0,
        models: tuple[str, ...] = ("m",),
        pages: Mapping[str, tuple[str, str]] | None = None,
        refuses: Refusals | None = None,
        api_key: str | None = None,
        on_accept: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.requests: list[Request] = []
        self.connections = 0
        self.came_from: list[str] = []  # address of each connection
        self.port = port
        self._gap_s = gap_s
        self._models = models
        listed = json.dumps(
            {"object": "list", "data": [{"id": m, "owned_by": "faults"} for m in models]}
        )
        self._pages = {"/v1/models": ("200 OK", listed), **(pages or {})}
        self._refuses = refuses or {}
        self._api_key = api_key
        self._on_accept = on_accept
        self._tls = tls
        self._open: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """The base URL, /v1 included."""
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}/v1"

    # -- one connection ------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        self._writers.append(writer)
        self.connections += 1
        self.came_from.append(writer.get_extra_info("peername")[0])
        number = self.connections
        # a cancelled task is a stopped server; what the peer breaks is the peer's business
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            if self._on_accept is not None:
                await self._break(Call(Request("", "", {}, {}, number, 0), writer))
            while self._on_accept is None:
                request = await self._read(reader, number)
                if not await self._answer(Call(request, writer, self._gap_s)):
                    break
        writer.close()
        self._open.discard(task)

    async def _break(self, call: Call) -> None:
        if self._on_accept == "reset":
            call.reset()
        elif self._on_accept == "silent":
            await asyncio.sleep(3600)

    async def _read(self, reader: asyncio.StreamReader, connection: int) -> Request:
        first = await reader.readexactly(1)
        if not first.isalpha():  # a TLS greeting, say
            raise ConnectionAbortedError
        head = (first + await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ", 2)
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in head[1:])
        }
        data = await reader.readexactly(int(headers.get("content-length", 0)))
        body: dict[str, Any] = json.loads(data) if data else {}
        request = Request(method, path, headers, body, connection, time.monotonic_ns())
        request.fault = headers.get("x-fault") or body.get("fault") or "ok"
        if str(body.get("model", "")).startswith("fault:"):
            request.fault = body["model"].removeprefix("fault:")
        self.requests.append(request)
        return request

    async def _answer(self, call: Call) -> bool:
        request = call.request
        if self._api_key and request.headers.get("authorization") != f"Bearer {self._api_key}":
            said = request.headers.get("authorization", "")
            await call.answer(
                "401 Unauthorized", json.dumps({"error": f"wrong key: {said}"}).encode()
            )
            return True
        if request.method == "GET":
            status, page = self._pages.get(
                request.path, ("404 Not Found", '{"detail":"Not Found"}')
            )
            more = (
                f"Location: {page}\r\n"
                if status.startswith("3")
                else "Content-Type: application/json\r\n"
            )
            await call.answer(status, page.encode(), more)
            return True
        refused = next(
            (answer for name, answer in self._refuses.items() if name in request.body), None
        )
        if refused is not None:
            await call.answer(refused[0], refused[1].encode())
            return True
        model = str(request.body.get("model"))
        if model not in self._models and not model.startswith("fault:"):
            await call.answer(
                "404 Not Found", json.dumps({"error": {"message": f"no model {model}"}}).encode()
            )
            return True
        return await FAULTS[request.fault].play(call)

    # -- start and stop --------------------------------------------------------------------------

    async def __aenter__(self) -> FaultServer:
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", self.port, ssl=self._tls, backlog=4096
        )
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in list(self._open):
            task.cancel()
        while self._open:
            await asyncio.sleep(0.01)
        for writer in self._writers:  # one that nobody reads any more would never be closed
            writer.transport.abort()
        await asyncio.sleep(0)  # where each is told that its connection is lost
        await self._server.wait_closed()

    def start(self) -> FaultServer:
        """Listen in a thread of its own."""
        ready = threading.Event()

        async def main() -> None:
            self._loop = asyncio.get_running_loop()
            self._stop = asyncio.Event()
            async with self:
                ready.set()
                await self._stop.wait()

        self._thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
        self._thread.start()
        if not ready.wait(10):
            raise RuntimeError("the fault server did not start")
        return self

    def stop(self) -> None:
        """Break every connection and end the thread."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def __enter__(self) -> FaultServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def main() -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(description="Faults: " + ", ".join(FAULTS))
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--gap-ms", type=float, default=10.0, help="between two tokens")
    chosen = parser.parse_args()
    server = FaultServer(port=chosen.port, gap_s=chosen.gap_ms / 1e3).start()
    print(
        f"{server.url}  model m; faults by a model named fault:NAME: {', '.join(FAULTS)}",
        flush=True,
    )
    with contextlib.suppress(KeyboardInterrupt):
        threading.Event().wait()
    server.stop()


if __name__ == "__main__":
    main()
