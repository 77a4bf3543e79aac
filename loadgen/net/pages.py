"""Fetch pages beside the load (models, version, metrics) over the load's own client.

They take the same proxy, addresses and trust as the load. Whole pages are read up to a size;
redirects are not followed.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import httptools

from ampacity.loadgen.net.http import Client
from ampacity.loadgen.net.proxy import proxy_for
from ampacity.loadgen.receive.bodies import FRAMING_MAX_BYTES, FRAMING_TOO_LONG, Inflater
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.send.endpoint import Endpoint, EndpointError, Proxy, Tls

PAGE_MAX_BYTES = 8 * 2**20


class PageError(OSError):
    """The answer was not HTTP or was incomplete. One line."""


class NoConnectionError(PageError):
    """No connection, with the message of the system or of OpenSSL."""


@dataclass(frozen=True)
class Page:
    """An answer, its body cut at ``PAGE_MAX_BYTES``. Names of headers are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


class Pages:
    """Fetches pages; concurrent requests to a server use a connection each."""

    def __init__(self, tls: Tls = Tls()) -> None:  # noqa: B008 - immutable
        self._tls = tls
        self._clients: dict[str, tuple[Client, Proxy | None]] = {}
        self._closing = AsyncExitStack()

    async def __aenter__(self) -> Pages:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._closing.aclose()

    async def get(self, url: str, headers: Mapping[str, str], timeout_s: float) -> Page:
        """Get a page. Raises PageError, TimeoutError; EndpointError for an unusable proxy."""
        return await self._fetch("GET", url, headers, b"", timeout_s)

    async def post(
        self, url: str, headers: Mapping[str, str], body: bytes, timeout_s: float
    ) -> Page:
        """Post ``body`` and return the page. Raises as ``get`` does."""
        headers = {**headers, "Content-Length": str(len(body))}
        return await self._fetch("POST", url, headers, body, timeout_s)

    async def _fetch(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes, timeout_s: float
    ) -> Page:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        server = Endpoint(url, parts.scheme, parts.hostname or "", port, "")
        if server.root not in self._clients:
            self._clients[server.root] = self._connect(server)
        client, proxy = self._clients[server.root]
        target, through = (parts.path or "/") + (f"?{parts.query}" if parts.query else ""), ""
        if proxy is not None and server.scheme == "http":
            target, through = server.root + target, proxy.header()
        fields = {"Host": server.authority, "Accept-Encoding": "identity", **headers}
        lines = [f"{method} {target} HTTP/1.1", *(f"{n}: {v}" for n, v in fields.items())]
        head = "\r\n".join(lines) + f"\r\n{through}\r\n"
        request = _PageRequest(head.encode("latin-1") + body)
        client.dispatch(request)
        try:
            async with asyncio.timeout(timeout_s):
                return await request.page
        finally:
            client.forget(request)
            request.forget()

    def _connect(self, server: Endpoint) -> tuple[Client, Proxy | None]:
        """Return a client for the server, and the proxy that it uses."""
        try:
            addresses = server.addresses()
            proxy = proxy_for(server, addresses)
        except EndpointError as error:  # a name that at most a proxy can resolve
            addresses, proxy = [], proxy_for(server, [])
            if proxy is None:
                raise NoConnectionError(str(error.__cause__ or error)) from error
        context = self._context if server.scheme == "https" else None
        client = Client(server, addresses, context, proxy=proxy)
        self._closing.push_async_callback(client.close)
        return client, proxy

    @cached_property
    def _context(self) -> ssl.SSLContext:
        return self._tls.context()  # slow: reads a few hundred certificates


class _PageRequest:
    """One request on a ``Client``, which ends with its whole page or an error."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.record = RequestRecord(-1, -1, time.monotonic_ns(), "unfinished")
        self.page: asyncio.Future[Page] = asyncio.get_running_loop().create_future()
        self.retried = False
        self.close_after = True
        self.last_read_ns: int | None = None
        self._parser: Any = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._size = self._framing_bytes = 0

    @property
    def ended(self) -> bool:
        """True when the page or an error is there."""
        return self.page.done()

    def restart(self) -> None:
        """Note that the request is sent again; nothing was received yet."""
        self.retried = True

    def forget(self) -> None:
        """Free the body at once: the parser refers to this object, which refers to it."""
        self._parser, self._body = None, []

    def feed(self, at_ns: int, data: bytes) -> bool:
        """Parse a part of the answer; return whether it has ended."""
        self.last_read_ns = at_ns
        before = self._size
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.fail("protocol_error", f"not HTTP: {error}", at_ns)
        self._framing_bytes = 0 if self._size > before else self._framing_bytes + len(data)
        if self._framing_bytes > FRAMING_MAX_BYTES:
            self.fail("protocol_error", FRAMING_TOO_LONG, at_ns)
        return self.ended

    def eof(self, at_ns: int, error: str | None = None) -> None:
        """End the answer: one without length and chunks ends with its connection."""
        framed = "content-length" in self._headers or "transfer-encoding" in self._headers
        if error is None and self.record.headers_ns is not None and not framed:
            self._finish()
        else:
            why = error or "the connection was closed before the whole answer was there"
            self.fail("truncated", why, at_ns)

    def fail(self, status: str, error: str, at_ns: int) -> None:
        """End with an error, unless the page is there."""
        if not self.ended:
            kind = NoConnectionError if status == "connect_error" else PageError
            self.page.set_exception(kind(error))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        if self._parser.get_status_code() >= 200:
            self.record.headers_ns = self.last_read_ns

    def on_body(self, data: bytes) -> None:
        """Called by the parser."""
        self._body.append(data)
        self._size += len(data)
        if self._size >= PAGE_MAX_BYTES:  # perhaps endless: use what there is
            self._finish()

    def on_message_complete(self) -> None:
        """Called by the parser."""
        if self.record.headers_ns is None:  # as 100 Continue: the answer follows
            self._headers = {}
        elif not self.ended:
            self.close_after = not self._parser.should_keep_alive()
            self._finish()

    def _finish(self) -> None:
        if self.ended:
            return
        pieces, broken = self._body, None
        if self._headers.get("content-encoding", "").lower() in ("gzip", "x-gzip", "deflate"):
            pieces, broken = Inflater().all(pieces)  # some servers compress unasked
        if broken:
            self.fail("protocol_error", broken, 0)
            return
        body = b"".join(pieces)[:PAGE_MAX_BYTES]
        self.page.set_result(Page(self._parser.get_status_code(), self._headers, body))
