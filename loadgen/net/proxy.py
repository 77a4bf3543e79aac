"""Use the proxy of the environment (HTTP_PROXY, HTTPS_PROXY, NO_PROXY), as other tools do."""

import base64
import re
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from ampacity.loadgen.send.endpoint import Endpoint, EndpointError, Proxy, is_loopback


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
    return Proxy(usable, port, _authorization(url))


def proxy_secrets() -> tuple[str, ...]:
    """Return the credentials of the proxies of the environment, which may repeat them."""
    return tuple(found for url in getproxies().values() if (found := _authorization(url)))


def _authorization(url: str) -> str | None:
    given = re.match(r"(?:\w+://)?([^:/?#]+)(?::([^/?#]*))?@", url)
    if given is None:
        return None
    credentials = ":".join(unquote(part or "") for part in given.groups())
    return f"Basic {base64.b64encode(credentials.encode()).decode()}"


def connect_request(proxy: Proxy, endpoint: Endpoint) -> bytes:
    """Return the request for a tunnel to the endpoint."""
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    target = f"{host}:{endpoint.port}"
    head = f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n{proxy.header()}\r\n"
    return head.encode("latin-1")
