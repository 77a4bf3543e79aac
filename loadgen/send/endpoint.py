"""Where requests go: the base URL, taken apart once, and the fixed part of every request."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import ssl
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlsplit

from ampacity.loadgen.send import protocols
from ampacity.loadgen.send.secrets import SECRET_MIN
from ampacity.workloads.class_spec import RESERVED_HEADERS

USER_AGENT = "ampacity"
_TOKEN_CHARACTERS = frozenset(
    "!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
)


_LOOPBACK = ("127.0.0.1", "::1")
_KEY_HEADERS = ("authorization", "x-api-key", "api-key")
_SECRET_NAMES = re.compile("key|token|secret|sig|auth|pass|pwd|code|credential", re.IGNORECASE)


class EndpointError(ValueError):
    """An endpoint that cannot be used; the message is one line that names the culprit and the mend."""


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible base URL such as ``http://127.0.0.1:8000/v1``."""

    url: str
    scheme: str
    host: str
    port: int
    path: str  # without a trailing slash
    query: str = ""  # of every request, without its question mark
    api_key: str | None = field(default=None, repr=False)
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @property
    def authority(self) -> str:
        """What stands in the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return (
            host if self.port == (443 if self.scheme == "https" else 80) else f"{host}:{self.port}"
        )

    @property
    def root(self) -> str:
        """The server's root URL, where /health and /metrics live."""
        return f"{self.scheme}://{self.authority}" + self.path.removesuffix("/v1")

    @property
    def models_url(self) -> str:
        """Where the list of models is."""
        return self.with_query(f"{self.url}/models")

    def with_query(self, url: str) -> str:
        """``url`` or a path with the query that the user gave."""
        return f"{url}?{self.query}" if self.query else url

    @property
    def secrets(self) -> tuple[str, ...]:
        """What must never be written down: the key and the values of the user's headers, longest first."""
        found = {self.api_key or "", *(value for _, value in self.headers)}
        found |= {
            value.split(" ", 1)[1] for _, value in self.headers if " " in value
        }  # "Bearer x": x alone as well
        return tuple(sorted((s for s in found if len(s) >= SECRET_MIN), key=len, reverse=True))

    @property
    def has_key(self) -> bool:
        """Whether a key goes with each request, as one or as a header of the user's."""
        return bool(self.api_key) or any(name.lower() in _KEY_HEADERS for name, _ in self.headers)

    def all_headers(self, api: protocols.Api = "chat") -> dict[str, str]:
        """The user's headers, and the key in the form that the API wants; the user's win."""
        found = {"User-Agent": USER_AGENT, **dict(self.headers)}
        ours = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        if api == "messages":
            ours = {"anthropic-version": protocols.ANTHROPIC_VERSION, **ours}
            if self.api_key:
                ours["x-api-key"] = self.api_key
        given = {name.lower() for name in found}
        return found | {name: value for name, value in ours.items() if name.lower() not in given}

    def request_prefix(self, api: protocols.Api, through_proxy: str | None = None) -> bytes:
        """Request line and headers up to, not including, X-Request-Id and Content-Length.

        ``through_proxy``: further header lines of a request that goes through a plain HTTP proxy.
        """
        path = self.with_query(f"{self.path}{protocols.PATHS[api]}")
        if through_proxy is not None:
            path = f"{self.scheme}://{self.authority}{path}"  # RFC 9112, 3.2.2: the absolute form
        lines = [
            f"POST {path} HTTP/1.1",
            f"Host: {self.authority}",
            "Accept: text/event-stream, application/json",
            "Accept-Encoding: identity",
            "Content-Type: application/json",
            *(f"{name}: {value}" for name, value in self.all_headers(api).items()),
        ]
        return ("\r\n".join(lines) + "\r\n" + (through_proxy or "")).encode("latin-1")

    def ssl_context(self) -> ssl.SSLContext | None:
        """System trust for https, None for http. SSL_CERT_FILE and SSL_CERT_DIR are honoured."""
        if self.scheme != "https":
            return None
        context = ssl.create_default_context()
        context.set_alpn_protocols(["http/1.1"])
        return context

    def addresses(self) -> list[str]:
        """IP addresses of the host, looked up once per run; localhost is this machine by either protocol (RFC 6761). Raises EndpointError."""
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise EndpointError(
                f"{self.url}: the host {self.host!r} has no address: {error}"
            ) from error
        addresses = [str(entry[4][0]) for entry in found]
        if self.host.lower().rstrip(".").rpartition(".")[2] == "localhost":
            addresses += _LOOPBACK
        return list(dict.fromkeys(addresses))


@dataclass(frozen=True)
class Proxy:
    """Where the proxy listens, and the header that opens it."""

    host: str
    port: int
    authorization: str | None = field(default=None, repr=False)

    def header(self) -> str:
        """The Proxy-Authorization line, or nothing."""
        return f"Proxy-Authorization: {self.authorization}\r\n" if self.authorization else ""


def shown_url(url: str) -> str:
    """A URL as it may be shown: without user name, password, query and fragment."""
    return re.split("[?#]", re.sub(r"//[^/?#]*@", "//", url), maxsplit=1)[0]


def is_loopback(addresses: list[str]) -> bool:
    """Whether every address is this machine's own."""
    return all(ipaddress.ip_address(address.split("%")[0]).is_loopback for address in addresses)


def parse_endpoint(
    url: str, *, api_key_env: str | None = None, headers: tuple[tuple[str, str], ...] = ()
) -> Endpoint:
    """Take a base URL apart; the key is read from the environment variable. Raises EndpointError."""
    if "@" in url:
        raise EndpointError(
            "the URL holds a user name or password: give secrets through --api-key-env"
        )
    bare = shown_url(url)
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError as error:
        raise EndpointError(f"{bare}: {error}") from error
    if parts.scheme not in ("http", "https"):
        raise EndpointError(f"{bare}: the URL must begin with http:// or https://")
    if not parts.hostname:
        raise EndpointError(f"{bare}: the URL names no host, as in http://127.0.0.1:8000/v1")
    if parts.fragment:
        raise EndpointError(f"{bare}: a base URL has no '#' part")
    for name, _ in parse_qsl(parts.query, keep_blank_values=True):
        if _SECRET_NAMES.search(name):
            raise EndpointError(
                f"{bare}: the query holds {protocols.printable(name)!r}, and URLs are written down: give it through --api-key-env or --header"
            )
    if not url.isascii() or not url.isprintable() or " " in url:
        raise EndpointError(
            f"{bare!a}: a URL is plain ASCII: write other characters as %XX, a host name as xn--..."
        )
    path = parts.path.rstrip("/")
    for known in protocols.PATHS.values():
        path = path.removesuffix(known)  # people paste the whole route
    api_key = None
    if api_key_env is not None:
        api_key = os.environ.get(api_key_env)
        if not api_key and not re.fullmatch(
            "[A-Z_][A-Z0-9_]*", api_key_env
        ):  # perhaps the key itself
            raise EndpointError(
                "--api-key-env: no environment variable of that name is set: give a variable's name, not the key"
            )
        if not api_key:
            raise EndpointError(
                f"--api-key-env {api_key_env}: that environment variable is not set or empty"
            )
        if any(ord(c) < 33 or ord(c) > 126 for c in api_key):
            raise EndpointError(
                f"--api-key-env {api_key_env}: the key holds a space, line end or non-ASCII character"
            )
    for name, value in headers:
        if not name or not set(name) <= _TOKEN_CHARACTERS:
            raise EndpointError(
                "--header: no valid name of an HTTP header before the colon: write it as 'Name: value'"
            )
        if name.lower() in RESERVED_HEADERS:
            raise EndpointError(f"--header {name}: that header is made for each request: drop it")
        if not all(c == "\t" or 32 <= ord(c) < 127 or 160 <= ord(c) < 256 for c in value):
            raise EndpointError(
                f"--header {name}: its value holds a control character or one beyond Latin-1"
            )
    return Endpoint(
        url=f"{parts.scheme}://{parts.netloc}{path}",
        scheme=parts.scheme,
        host=parts.hostname,
        port=port or (443 if parts.scheme == "https" else 80),
        path=path,
        query=parts.query,
        api_key=api_key,
        headers=headers,
    )
