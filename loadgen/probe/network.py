"""The network's part of every latency: how long a connection takes, and the smallest request with its answer."""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import asdict, dataclass

from ampacity.loadgen.net.pages import Pages
from ampacity.loadgen.send.endpoint import Endpoint, Proxy

TRIES = 5  # of each, of which the quickest counts: the others waited for something
TIMEOUT_S = 5.0


@dataclass(frozen=True)
class RoundTrip:
    """Seconds, None where it could not be measured.

    ``connect_s``: of TCP to the first that answers, perhaps a proxy, which is one round trip to that. ``request_s``: of
    the list of models on an open connection, which goes all the way and has the server's handling of it: what every TTFT holds at most.
    """

    connect_s: float | None = None
    request_s: float | None = None

    def as_dict(self) -> dict[str, float | None]:
        """As it stands in run.json."""
        return asdict(self)


async def measure_round_trip(
    pages: Pages, endpoint: Endpoint, addresses: list[str], proxy: Proxy | None, *, kept_alive: bool
) -> RoundTrip:
    """Connect and ask TRIES times, one after the other. Where connections are not ``kept_alive`` a connection's time is taken off the request."""
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
