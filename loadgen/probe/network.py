"""Measure the network's part of latencies: a TCP connect, and a minimal request."""

import asyncio
import socket
import time
from dataclasses import asdict, dataclass

from ampacity.loadgen.net.pages import Pages
from ampacity.loadgen.send.endpoint import Endpoint, Proxy

TRIES = 5  # of each; the fastest is taken
TIMEOUT_S = 5.0


@dataclass(frozen=True)
class RoundTrip:
    """Times in s; None if not measured.

    ``connect_s``: TCP connect to the server or its proxy, one round trip. ``request_s``: the list
    of models on an open connection, with the server's handling: an upper bound of the network's
    share of every TTFT.
    """

    connect_s: float | None = None
    request_s: float | None = None

    def as_dict(self) -> dict[str, float | None]:
        """Return the entry of run.json."""
        return asdict(self)


async def measure_round_trip(
    pages: Pages, endpoint: Endpoint, addresses: list[str], proxy: Proxy | None, *, kept_alive: bool
) -> RoundTrip:
    """Connect and request TRIES times each; without keep-alive, subtract the connect time."""
    host, port = (addresses[0] if addresses else endpoint.host), endpoint.port
    if proxy is not None:
        host, port = proxy.host, proxy.port
    connects = [s for _ in range(TRIES) if (s := await _connect(host, port)) is not None]
    connect_s = min(connects, default=None)
    asked = [s for _ in range(TRIES) if (s := await _ask(pages, endpoint)) is not None]
    request_s = min(asked[1:], default=None)  # the first one may open the connection
    if request_s is not None and not kept_alive:
        request_s = max(request_s - (connect_s or 0.0), 0.0)
    return RoundTrip(connect_s, request_s)


async def _connect(host: str, port: int) -> float | None:
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            family, kind, number, _, address = found[0]
            with socket.socket(family, kind, number) as connection:
                connection.setblocking(False)
                began_s = time.monotonic()
                await loop.sock_connect(connection, address)
                return time.monotonic() - began_s
    except OSError:  # TimeoutError is one
        return None


async def _ask(pages: Pages, endpoint: Endpoint) -> float | None:
    began_s = time.monotonic()
    try:
        await pages.get(endpoint.models_url, endpoint.all_headers(), TIMEOUT_S)
    except OSError:
        return None
    return time.monotonic() - began_s
