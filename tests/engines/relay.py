"""A TCP relay between the tool and an engine that keeps every byte, and an own reading of what it
kept.

What the tool wrote into its records is compared with what really went over the wire; so nothing
here uses the tool's parsers: HTTP is read by the standard library, events are split by hand.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class WireRequest:
    """One POST as it was on the wire."""

    id: str  # X-Request-Id
    body: dict[str, Any]
    status: int | None  # None: the connection ended without a whole response
    events: list[dict[str, Any]]
    done: bool  # [DONE] came
    connection: int  # which TCP connection carried it

    @property
    def usage(self) -> dict[str, Any]:
        """The last usage that the server sent. Raises IndexError where there was none."""
        usages: list[dict[str, Any]] = [
            event["usage"] for event in self.events if event.get("usage")
        ]
        return usages[-1]

    @property
    def text_events(self) -> int:
        """How many events carried text."""
        return sum(bool(text) for text in self._texts())

    @property
    def empty_events(self) -> int:
        """How many events had a choice without text."""
        return sum(not text for text in self._texts())

    def _texts(self) -> Iterator[str | None]:
        for event in self.events:
            for choice in event.get("choices", ()):
                yield choice.get("delta", {}).get("content")


class Relay:
    """Listens at ``url`` while its context is open; the connections are relayed to ``target``."""

    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        self._target = (parts.hostname, parts.port)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self._threads: list[threading.Thread] = []
        self._kept: list[tuple[list[bytes], list[bytes]]] = []
        self._sockets: list[socket.socket] = []
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}{parts.path}"

    def __enter__(self) -> Relay:
        self._start(self._accept)
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._listener.close()
        self._threads[0].join(CONNECT_TIMEOUT_S)
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join(CONNECT_TIMEOUT_S)
        for one in self._sockets:
            one.close()

    def _start(self, run: Any, *args: Any) -> None:
        self._threads.append(threading.Thread(target=run, args=args, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target, timeout=CONNECT_TIMEOUT_S)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            for one in (near, far):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets += [near, far]
            kept: tuple[list[bytes], list[bytes]] = ([], [])
            self._kept.append(kept)
            self._start(_pump, near, far, kept[0])
            self._start(_pump, far, near, kept[1])

    def requests(self) -> list[WireRequest]:
        """Everything that was POSTed so far, in the order of the connections."""
        found: list[WireRequest] = []
        for number, (sent, received) in enumerate(self._kept):
            found += _read_connection(number, b"".join(sent), b"".join(received))
        return found


def _pump(source: socket.socket, sink: socket.socket, kept: list[bytes]) -> None:
    try:
        while data := source.recv(65_536):
            kept.append(data)
            sink.sendall(data)
    except OSError:
        pass
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


class _Bytes(io.BytesIO):
    """Stands for a socket whose peer has said everything; one response after the other is read from
    it."""

    def makefile(self, _mode: str) -> _Bytes:
        return self

    def close(self) -> None:  # http.client closes after each response
        pass


def _read_connection(number: int, sent: bytes, received: bytes) -> Iterator[WireRequest]:
    requests, responses = io.BytesIO(sent), _Bytes(received)
    while line := requests.readline():
        method = line.split(b" ", 1)[0].decode()
        headers = http.client.parse_headers(requests)
        body = requests.read(int(headers.get("Content-Length", 0)))
        response = http.client.HTTPResponse(responses, method=method)
        try:
            response.begin()
            status, (events, done) = response.status, _read_events(response.read())
        except (http.client.HTTPException, ConnectionError):
            status, events, done = None, [], False
        if method == "POST":
            yield WireRequest(
                headers.get("X-Request-Id", ""), json.loads(body), status, events, done, number
            )


def _read_events(content: bytes) -> tuple[list[dict[str, Any]], bool]:
    """(JSON of the events, whether [DONE] came). Both engines end lines with LF and use one data
    line each."""
    data = [line[6:] for line in content.split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(text) for text in data if text != b"[DONE]"], b"[DONE]" in data
