"""Use the proxy of the environment (HTTP_PROXY, HTTPS_PROXY, NO_PROXY), as other tools do."""

from __future__ import annotations

import asyncio
import base64
import ssl
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from ampacity.loadgen.send.endpoint import Endpoint, EndpointError, Proxy, is_loopback

ANSWER_MAX_BYTES = 16_384


def proxy_for(endpoint: Endpoint, addresses: list[str]) -> Proxy | None:
    """Return the proxy for an endpoint; none for this machine. Raises EndpointError."""
    if (addresses and is_loopback(addresses)) or proxy_bypass(endpoint.host):
        return None
    url = getproxies().get(endpoint.scheme) or getproxies().get("all")
    if not url:
        return None
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        usable, port = parts.scheme == "http" and parts.hostname, parts.port or 80
    except ValueError:  # of a port or an address that is none
        usable = None
    if not usable:
        raise EndpointError(
            f"the proxy for {endpoint.url} from the environment is no http:// proxy: "
            "correct it, or exempt the host in NO_PROXY"
        )
    authorization = None
    if parts.username:
        credentials = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        authorization = f"Basic {base64.b64encode(credentials).decode()}"
    return Proxy(usable, port, authorization)


class _Tunnel(asyncio.Protocol):
    """Waits for the proxy's answer to CONNECT."""

    def __init__(self) -> None:
        self.answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._received = b""

    def data_received(self, data: bytes) -> None:
        """Collect the headers of the answer."""
        self._received += data
        if not self.answered.done() and (
            b"\r\n\r\n" in self._received or len(self._received) > ANSWER_MAX_BYTES
        ):
            self.answered.set_result(self._received)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail if the proxy closed without an answer."""
        if not self.answered.done():
            self.answered.set_exception(OSError("the proxy closed the connection"))


async def open_tunnel(
    proxy: Proxy, endpoint: Endpoint, context: ssl.SSLContext, protocol: asyncio.Protocol
) -> asyncio.Transport:
    """CONNECT through the proxy, then start TLS; ``protocol`` gets the data. Raises OSError."""
    loop = asyncio.get_running_loop()
    transport, tunnel = await loop.create_connection(_Tunnel, proxy.host, proxy.port)
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    target = f"{host}:{endpoint.port}"
    try:
        transport.write(
            f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n{proxy.header()}\r\n".encode("latin-1")
        )
        answer = await tunnel.answered
        status = answer.split(b"\r\n", 1)[0].decode("latin-1")
        if status.split(" ")[1:2] != ["200"]:
            raise OSError(f"the proxy refused the tunnel: {status[:100]}")
        secured = await loop.start_tls(transport, protocol, context, server_hostname=endpoint.host)
    except BaseException:
        transport.abort()
        raise
    if secured is None:
        raise OSError("the proxy closed the connection")
    return secured
