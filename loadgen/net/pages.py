"""Fetch pages beside the load (models, version, metrics), over the same proxy and addresses.

A small HTTP client that imports fast: it reads whole pages up to a size and follows no redirects.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import httptools

from ampacity.loadgen.net.proxy import open_tunnel, proxy_for
from ampacity.loadgen.receive.bodies import FRAMING_MAX_BYTES, FRAMING_TOO_LONG, Inflater
from ampacity.loadgen.send.endpoint import Endpoint, Proxy

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

    def __init__(self) -> None:
        self._idle: dict[tuple[str, str, int], list[_Connection]] = {}
        self._proxies: dict[tuple[str, str, int], Proxy | None] = {}

    async def __aenter__(self) -> Pages:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        await asyncio.sleep(0)  # the transports close in the next turn of the loop

    async def get(self, url: str, headers: Mapping[str, str], timeout_s: float) -> Page:
        """Get a page. Raises PageError, TimeoutError; EndpointError for an unusable proxy."""
        return await self._fetch("GET", url, headers, b"", timeout_s)

    async def post(
        self, url: str, headers: Mapping[str, str], body: bytes, timeout_s: float
    ) -> Page:
        """Post ``body`` and return the page. Raises as ``get`` does."""
        return await self._fetch("POST", url, headers, body, timeout_s)

    async def _fetch(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes, timeout_s: float
    ) -> Page:
        server, path = _server_of(url)
        key = server.scheme, server.host, server.port
        if key not in self._proxies:
            self._proxies[key] = _proxy_of(server)
        proxy = self._proxies[key]
        request = _request(method, server, path, headers, body, proxy)
        idle = self._idle.setdefault(key, [])
        async with asyncio.timeout(timeout_s):
            while idle:
                connection = idle.pop()
                try:
                    page = await connection.ask(request)
                    break
                except PageError:  # the server had closed it
                    continue
            else:
                connection = await self._connect(server, proxy)
                page = await connection.ask(request)
        if connection.reusable:
            idle.append(connection)
        return page

    async def _connect(self, server: Endpoint, proxy: Proxy | None) -> _Connection:
        connection, failed = _Connection(), None
        context = self._context if server.scheme == "https" else None
        try:
            if proxy is not None and context is not None:
                connection.connection_made(await open_tunnel(proxy, server, context, connection))
                return connection
            port = server.port if proxy is None else proxy.port
            for host in _addresses_of(server) if proxy is None else [proxy.host]:
                try:
                    await asyncio.get_running_loop().create_connection(
                        lambda: connection,
                        host,
                        port,
                        ssl=context,
                        server_hostname=server.host if context else None,
                    )
                    return connection
                except ConnectionRefusedError as error:  # the next address may accept
                    failed = error
            raise failed or OSError("no address")
        except TimeoutError:
            raise
        except (OSError, UnicodeError) as error:
            raise NoConnectionError(_why(error)) from error

    @cached_property
    def _context(self) -> ssl.SSLContext:
        return ssl.create_default_context()  # slow: reads a few hundred certificates


class _Connection(asyncio.Protocol):
    """One socket, and the page that is being read from it."""

    def __init__(self) -> None:
        self._transport: asyncio.BaseTransport | None = None
        self._answer: asyncio.Future[Page] | None = None
        self.reusable = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = transport

    async def ask(self, request: bytes) -> Page:
        """Send a request and wait for its page. Raises PageError."""
        transport: Any = self._transport
        if transport is None or transport.is_closing():
            raise PageError("the connection was closed")
        self._answer = asyncio.get_running_loop().create_future()
        self._parser: Any = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._headers_complete = False
        self._body: list[bytes] = []
        self._size = self._framing_bytes = 0
        self.reusable = False
        transport.write(request)
        try:
            return await self._answer
        finally:
            if not self.reusable:
                self.close()

    def close(self) -> None:
        """Close the socket."""
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        """Parse a part of the answer."""
        if self._answer is None or self._answer.done():
            self.close()  # unsolicited
            return
        before = self._size
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(PageError(f"not HTTP: {error}"))
        self._framing_bytes = 0 if self._size > before else self._framing_bytes + len(data)
        if self._framing_bytes > FRAMING_MAX_BYTES:
            self._fail(PageError(FRAMING_TOO_LONG))

    def connection_lost(self, exc: Exception | None) -> None:
        """End the answer: one without length and chunks ends with its connection."""
        self.reusable = False
        self._transport = None
        if self._answer is None or self._answer.done():
            return
        framed = "content-length" in self._headers or "transfer-encoding" in self._headers
        if exc is None and self._headers_complete and not framed:
            self._finish()
        else:
            why = str(exc or "the connection was closed before the whole answer was there")
            self._fail(PageError(why))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self._headers_complete = self._parser.get_status_code() >= 200

    def on_body(self, data: bytes) -> None:
        """Called by the parser."""
        self._body.append(data)
        self._size += len(data)
        if self._size >= PAGE_MAX_BYTES:  # perhaps endless: use what there is
            self._finish()

    def on_message_complete(self) -> None:
        """Called by the parser."""
        if self._parser.get_status_code() < 200:  # as 100 Continue: the answer follows
            self._headers = {}
            return
        self.reusable = self._parser.should_keep_alive()
        self._finish()

    def _finish(self) -> None:
        if self._answer is None or self._answer.done():
            return
        body = b"".join(self._body)[:PAGE_MAX_BYTES]
        encoding = self._headers.get("content-encoding", "").lower()
        if encoding in ("gzip", "x-gzip", "deflate"):  # some servers compress unasked
            try:
                body = Inflater()(body)[:PAGE_MAX_BYTES]
            except zlib.error as error:
                self._fail(PageError(f"broken compressed body: {error}"))
                return
        self._answer.set_result(Page(self._parser.get_status_code(), self._headers, body))

    def _fail(self, error: PageError) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)


def _server_of(url: str) -> tuple[Endpoint, str]:
    """Return the server and the path of a URL."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Endpoint(url, parts.scheme, parts.hostname or "", port, ""), path


def _addresses_of(server: Endpoint) -> list[str]:
    try:
        return server.addresses()
    except ValueError:  # reported when connecting
        return [server.host]


def _proxy_of(server: Endpoint) -> Proxy | None:
    """Return the proxy from the environment; none for this machine."""
    try:
        return proxy_for(server, server.addresses())
    except ValueError:  # a name that only the proxy can resolve
        return proxy_for(server, [])


def _request(
    method: str,
    server: Endpoint,
    path: str,
    headers: Mapping[str, str],
    body: bytes,
    proxy: Proxy | None,
) -> bytes:
    plain_proxy = proxy if server.scheme == "http" else None
    target = f"http://{server.authority}{path}" if plain_proxy else path
    lines = [
        f"{method} {target} HTTP/1.1",
        f"Host: {server.authority}",
        "Accept-Encoding: identity",
    ]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body:
        lines.append(f"Content-Length: {len(body)}")
    through = plain_proxy.header() if plain_proxy else ""
    return ("\r\n".join(lines) + f"\r\n{through}\r\n").encode("latin-1") + body


def _why(error: Exception) -> str:
    number = (
        error.errno if isinstance(error, OSError) and not isinstance(error, ssl.SSLError) else None
    )
    return os.strerror(number) if number and number > 0 else str(error) or type(error).__name__
