"""The endpoint: its base URL, and the fixed part of every request."""

import ipaddress
import re
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from ampacity.files import MIB, open_file
from ampacity.loadgen.send import protocols
from ampacity.loadgen.send.keys import EndpointError as EndpointError
from ampacity.loadgen.send.keys import Keys
from ampacity.loadgen.send.secrets import KNOWN, told_by
from ampacity.workloads.class_spec import RESERVED_HEADERS

T = TypeVar("T")
USER_AGENT = "ampacity"
_LOOPBACK = ("127.0.0.1", "::1")
_KEY_HEADERS = ("authorization", "x-api-key", "api-key")
_SECRET_NAMES = re.compile(
    "key|token|secret|sig|auth|pass|pwd|code|credential|jwt|sas|bearer", re.IGNORECASE
)

_SECRET_VALUES = re.compile(r"(sk|pk|gsk|ghp|xox.)[-_]|hf_|eyJ")  # keys of known kinds, and JWTs
WRITTEN = "URLs are written down, give it through --api-key-env or --header"
_AZURE = r"//[^/]*\.(openai|services\.ai|cognitiveservices)\.azure\.com\b|/openai/deployments/"
# how a provider wants its key, by the base URL; the others take it as the API has it
KEY_HEADERS = (
    (re.compile(_AZURE), "api-key"),
    (re.compile(r"//[^/]*\.anthropic\.com\b"), "x-api-key"),
)


@dataclass(frozen=True)
class Tls:
    """Trust in TLS: ``cacert`` (PEM) replaces the system's authorities, ``insecure`` trusts anyone.

    ``cert`` (PEM) is this client's own certificate with its key.
    """

    cacert: Path | None = None
    cert: Path | None = None
    insecure: bool = False

    def context(self) -> ssl.SSLContext:
        """Return a context; without ``cacert`` SSL_CERT_FILE and _DIR count. Raises EndpointError."""
        context = _used("--cacert", self.cacert, lambda p: ssl.create_default_context(cafile=p))
        if self.cert is not None:
            load = partial(context.load_cert_chain, password=_no_password)
            _used("--cert", self.cert, load, private=True)
        if self.insecure:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["http/1.1"])
        return context


def _used(option: str, path: Path | None, use: Callable[[Any], T], *, private: bool = False) -> T:
    try:
        if path is not None:
            open_file(path, MIB, private=private).close()
        return use(path)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        why = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise EndpointError(f"{option} {path}: cannot be used: {why}") from None


def _no_password() -> str:
    raise ValueError("its key needs a password: give one without")


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible base URL such as ``http://127.0.0.1:8000/v1``."""

    url: str
    scheme: str
    host: str
    port: int
    path: str  # without a trailing slash
    query: str = ""  # of every request, without its question mark
    route: str | None = None  # of the requests, below ``path``; None: the API's
    key_header: str | None = None  # header of the key and its scheme; None: the provider's
    keys: Keys | None = field(default=None, repr=False, compare=False)
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    hidden: tuple[str, ...] = field(default=(), repr=False)  # of the body and of proxies
    tls: Tls = Tls()
    sources: tuple[str, ...] = ()  # local addresses of its connections; empty: the system's choice

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        default = 443 if self.scheme == "https" else 80
        return host if self.port == default else f"{host}:{self.port}"

    @property
    def root(self) -> str:
        """Return the server's root URL, parent of /health and /metrics."""
        return f"{self.scheme}://{self.authority}" + self.path.removesuffix("/v1")

    @property
    def models_url(self) -> str:
        return self.with_query(f"{self.url}/models")

    def with_query(self, url: str) -> str:
        """Append the user's query to a URL or path."""
        return f"{url}?{self.query}" if self.query else url

    @property
    def secrets(self) -> tuple[str, ...]:
        """Return the keys and the header values, never to be written to disk; longest first."""
        keys, headers = self.keys.known if self.keys else (), (value for _, value in self.headers)
        found = frozenset[str]().union(*map(told_by, (*keys, *headers, *self.hidden)))
        return tuple(sorted(found, key=len, reverse=True))

    @property
    def has_key(self) -> bool:
        """Tell whether each request carries a key, as a setting or in a header."""
        return bool(self.keys) or any(name.lower() in _KEY_HEADERS for name, _ in self.headers)

    def all_headers(self, api: protocols.Api = "chat", turn: int = 0) -> dict[str, str]:
        """Return the user's headers and the key whose ``turn`` it is; the user's win."""
        found = {"User-Agent": USER_AGENT, **dict(self.headers)}
        ours = dict(protocols.PROTOCOLS[api].headers)
        if self.keys is not None:
            key = self.keys.current[turn % len(self.keys.current)]
            for header in self._key_headers(api):
                name, _, scheme = header.partition(":")
                ours[name] = f"{scheme.strip()} {key}".lstrip()
        given = {name.lower() for name in found}
        return found | {name: value for name, value in ours.items() if name.lower() not in given}

    def _key_headers(self, api: protocols.Api) -> list[str]:
        known = (header for pattern, header in KEY_HEADERS if pattern.search(self.url))
        if header := self.key_header or next(known, None):
            return [header]
        return list(protocols.PROTOCOLS[api].key_headers)

    def request_prefix(
        self, api: protocols.Api, through_proxy: str | None = None, turn: int = 0
    ) -> bytes:
        """Return request line and headers up to X-Request-Id and Content-Length.

        ``through_proxy``: further header lines of a request through a plain HTTP proxy; ``turn``:
        which of several keys.
        """
        path = self.with_query(f"{self.path}{self.route or protocols.PROTOCOLS[api].path}")
        if through_proxy is not None:
            path = f"{self.scheme}://{self.authority}{path}"  # RFC 9112, 3.2.2: the absolute form
        lines = [
            f"POST {path} HTTP/1.1",
            f"Host: {self.authority}",
            "Accept: text/event-stream, application/json",
            "Accept-Encoding: identity",
            "Content-Type: application/json",
            *(f"{name}: {value}" for name, value in self.all_headers(api, turn).items()),
        ]
        return ("\r\n".join(lines) + "\r\n" + (through_proxy or "")).encode("latin-1")

    def ssl_context(self) -> ssl.SSLContext | None:
        """Return the trust for https, None for http. Raises EndpointError."""
        return self.tls.context() if self.scheme == "https" else None

    def addresses(self) -> list[str]:
        """Look up the IP addresses of the host. Raises EndpointError.

        localhost, and any name that ends so, is this machine by IPv4 and IPv6 (RFC 6761), whether
        the resolver knows it or not.
        """
        here = self.host.lower().rstrip(".").rpartition(".")[2] == "localhost"
        addresses = list(_LOOPBACK) if here else []
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            if here:
                return addresses
            raise EndpointError(
                f"{self.url}: the host {self.host!r} has no address: {error}"
            ) from error
        return list(dict.fromkeys([*(str(entry[4][0]) for entry in found), *addresses]))


@dataclass(frozen=True)
class Proxy:
    """The address of a proxy, and its credentials."""

    host: str
    port: int
    authorization: str | None = field(default=None, repr=False)

    def header(self) -> str:
        """Return the Proxy-Authorization line, or an empty text."""
        return f"Proxy-Authorization: {self.authorization}\r\n" if self.authorization else ""


def shown_url(url: str) -> str:
    """Return a URL without user name, password, query and fragment."""
    return re.split("[?#]", re.sub(r"//[^/?#]*@", "//", url), maxsplit=1)[0]


def is_loopback(addresses: list[str]) -> bool:
    return all(ipaddress.ip_address(address.split("%")[0]).is_loopback for address in addresses)


def is_private(addresses: list[str]) -> bool:
    """Return whether no address is reached over the public internet."""
    return not any(ipaddress.ip_address(address.split("%")[0]).is_global for address in addresses)


def parse_endpoint(
    url: str,
    *,
    keys: Keys | None = None,
    key_header: str | None = None,
    route: str | None = None,
    headers: tuple[tuple[str, str], ...] = (),
    hidden: tuple[str, ...] = (),
    tls: Tls = Tls(),
    sources: tuple[str, ...] = (),
) -> Endpoint:
    """Parse a base URL. Raises EndpointError."""
    parts, port = _split_url(url)
    path = parts.path.rstrip("/")
    for known in (protocol.path for protocol in protocols.PROTOCOLS.values()):
        path = path.removesuffix(known)  # users paste the whole route
    assert parts.hostname is not None
    places = {
        f"query's {protocols.printable(name)!r}": value
        for name, value in parse_qsl(parts.query, keep_blank_values=True)
    }
    for name, text in (("path", path), ("--path", route or "")):
        parts_of = enumerate(text.lstrip("/").split("/"), 1)
        places |= {f"{name}'s part {i}": unquote(part) for i, part in parts_of}
    for where, value in places.items():
        if any(key in value for key in (keys.known if keys else ())) or _SECRET_VALUES.match(value):
            raise EndpointError(f"the {where} holds a key: {WRITTEN}")
    for name, value in headers:
        _check_header("--header", name, value)
    if key_header is not None:
        _check_header("--api-key-header", *map(str.strip, key_header.partition(":")[::2]))
    if route is not None and not re.fullmatch(r"(/[!$&-;=@-Z_a-z~%]+)+", route):
        raise EndpointError(f"--path {route}: write a path of plain ASCII, as /v2/chat")
    found = Endpoint(
        url=f"{parts.scheme}://{parts.netloc}{path}",
        scheme=parts.scheme,
        host=parts.hostname,
        port=port or (443 if parts.scheme == "https" else 80),
        path=path,
        query=parts.query,
        route=route,
        key_header=key_header,
        keys=keys,
        headers=headers,
        hidden=hidden,
        tls=tls,
        sources=sources,
    )
    KNOWN.update(found.secrets)
    return found


def holds_key(text: str) -> bool:
    """Return whether a part of a text is a key by its form."""
    return any(map(_SECRET_VALUES.match, re.split(r"[^!-~]|[/,;:=?&#@]", unquote(text))))


def secrets_in(body: Any, name: str = "") -> Iterator[str]:
    """Yield the texts of a JSON value that are secrets by their form or the name of their field."""
    if isinstance(body, dict):
        for key, value in body.items():
            yield from secrets_in(value, key)
    elif isinstance(body, list):
        for value in body:
            yield from secrets_in(value, name)
    elif (
        isinstance(body, str)
        and re.fullmatch(r"\S{8,}", body)
        and (_SECRET_VALUES.match(body) or _SECRET_NAMES.search(name))
    ):
        yield body


def _split_url(url: str) -> tuple[SplitResult, int | None]:
    bare = shown_url(url)
    if "@" in url:
        raise EndpointError(
            "the URL holds a user name or password: give secrets through --api-key-env"
        )
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError as error:
        raise EndpointError(f"{bare}: {error}") from error
    names = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True)]
    secret = next(filter(_SECRET_NAMES.search, names), None)
    plain = url.isascii() and url.isprintable() and " " not in url
    if parts.scheme not in ("http", "https"):
        wrong = "the URL must begin with http:// or https://"
    elif not parts.hostname:
        wrong = "the URL names no host, as in http://127.0.0.1:8000/v1"
    elif parts.fragment:
        wrong = "a base URL has no '#' part"
    elif secret is not None:
        wrong = f"the query holds {protocols.printable(secret)!r}: {WRITTEN}"
    elif not plain:
        bare = ascii(bare)
        wrong = "a URL is plain ASCII: write other characters as %XX, a host name as xn--..."
    else:
        return parts, port
    raise EndpointError(f"{bare}: {wrong}")


def _check_header(option: str, name: str, value: str) -> None:
    if not re.fullmatch(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+", name):  # RFC 9110, 5.6.2
        wrong = ": no valid name of an HTTP header before the colon: write it as 'Name: value'"
    elif name.lower() in RESERVED_HEADERS:
        wrong = f" {name}: that header is made for each request: drop it"
    elif not re.fullmatch(r"[\t\x20-\x7e\xa0-\xff]*", value):
        wrong = f" {name}: its value holds a control character or one beyond Latin-1"
    else:
        return
    raise EndpointError(f"{option}{wrong}")
