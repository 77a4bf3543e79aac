"""A proxy from the environment: absolute-form requests for http, a CONNECT tunnel with TLS inside
for https."""

import asyncio
import base64
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ampacity.config import make_settings
from ampacity.loadgen.net.http import Client
from ampacity.loadgen.net.pages import Page, Pages
from ampacity.loadgen.net.proxy import proxy_for
from ampacity.loadgen.plan import StagePlan
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.send.endpoint import Endpoint, EndpointError, Proxy, parse_endpoint
from ampacity.loadgen.send.protocols import RequestShape
from ampacity.loadgen.send.requests import ScheduledRequests
from ampacity.loadgen.send.secrets import redact
from ampacity.workloads.prompts.synthetic import PromptMaker
from ampacity.workloads.prompts.tokenizers import load_tokenizer
from tests.support.servers.certificates import make_certificate
from tests.support.servers.fault_server import FaultServer
from tests.support.stage_driving import on_loop, played, schedule_at

SECRET = "Basic " + base64.b64encode(b"user:p@ss").decode()


class FakeProxy:
    """Takes CONNECT and absolute-form requests and pipes both to one upstream port on this
    machine."""

    def __init__(self, upstream_port: int, refuse: bool = False) -> None:
        self.upstream_port = upstream_port
        self.refuse = refuse
        self.heads: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        if self.refuse:
            writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")
            writer.close()
            return
        upstream_reader, upstream = await asyncio.open_connection("127.0.0.1", self.upstream_port)
        if head.startswith(b"CONNECT "):
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            first, rest = head.split(b"\r\n", 1)
            method, url, version = first.split(b" ")
            path = b"/" + url.split(b"/", 3)[3]
            upstream.write(b"%b %b %b\r\n%b" % (method, path, version, rest))
        await asyncio.gather(pipe(reader, upstream), pipe(upstream_reader, writer))


async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


async def through(
    proxy: FakeProxy, endpoint: Endpoint, context: ssl.SSLContext | None, named: Proxy | None = None
) -> list[RequestRecord]:
    """The records of three requests through the proxy, or through what is ``named`` instead."""
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    named = named or Proxy("127.0.0.1", server.sockets[0].getsockname()[1], SECRET)
    client = Client(endpoint, [], context, proxy=named)
    prompts = PromptMaker(load_tokenizer("words"), "s")
    requests = ScheduledRequests([(endpoint, named)], RequestShape("chat", "m"), prompts, "run")
    plan = StagePlan(0, "open", schedule_at([0.0, 0.01, 0.02]), 0.1, offered_rps=1.0, drain_s=5)
    result = await played(client, requests, plan)
    server.close()
    return result.records


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_http_goes_in_absolute_form_with_the_proxys_own_password(loop: str) -> None:
    with FaultServer() as server:
        port = int(server.url.rsplit(":", 1)[1].split("/")[0])
        proxy = FakeProxy(port)
        records = on_loop(loop, through(proxy, parse_endpoint("http://llm.example:8000/v1"), None))
    assert [(r.status, r.output_tokens) for r in records] == [("ok", 4)] * 3
    assert proxy.heads[0].startswith(
        b"POST http://llm.example:8000/v1/chat/completions HTTP/1.1\r\n"
    )
    assert f"Proxy-Authorization: {SECRET}\r\n".encode() in proxy.heads[0]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for llm.example, key included."""
    return make_certificate(tmp_path_factory.mktemp("tls"), "DNS:llm.example")


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_https_goes_through_a_tunnel_and_checks_the_endpoints_name(
    loop: str, certificate: Path
) -> None:
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(certificate)
    names: set[str | None] = set()
    theirs.sni_callback = lambda _, name, __: names.add(name)
    ours = ssl.create_default_context(cafile=str(certificate))
    with FaultServer(tls=theirs) as server:
        port = int(server.url.rsplit(":", 1)[1].split("/")[0])
        proxy = FakeProxy(port)
        good = on_loop(loop, through(proxy, parse_endpoint("https://llm.example/v1"), ours))
        other = on_loop(
            loop, through(FakeProxy(port), parse_endpoint("https://other.example/v1"), ours)
        )
    assert [(r.status, r.output_tokens) for r in good] == [("ok", 4)] * 3
    assert proxy.heads[0].startswith(b"CONNECT llm.example:443 HTTP/1.1\r\n")
    assert SECRET.encode() in proxy.heads[0]
    assert {r.status for r in other} == {"connect_error"}
    assert names == {"llm.example", "other.example"}


def test_a_proxy_that_refuses_is_a_connect_error(certificate: Path) -> None:
    ours = ssl.create_default_context(cafile=str(certificate))
    records = asyncio.run(
        through(FakeProxy(1, refuse=True), parse_endpoint("https://llm.example/v1"), ours)
    )
    assert {r.status for r in records} == {"connect_error"}
    assert all("407" in (r.error or "") for r in records)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def put(**values: str) -> None:
        for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
            monkeypatch.delenv(name.upper(), raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return put


def test_which_proxy(environment: Any) -> None:
    http, https = parse_endpoint("http://llm.example/v1"), parse_endpoint("https://llm.example/v1")
    environment()
    assert proxy_for(http, ["10.0.0.1"]) is None
    environment(
        http_proxy="http://user:p%40ss@proxy.example:3128", https_proxy="proxy.example:8080"
    )
    assert proxy_for(http, ["10.0.0.1"]) == Proxy("proxy.example", 3128, SECRET)
    assert proxy_for(https, []) == Proxy("proxy.example", 8080, None)
    # this very machine is never reached through a proxy
    assert proxy_for(http, ["127.0.0.1"]) is None
    environment(http_proxy="http://proxy.example:3128", no_proxy="llm.example")
    assert proxy_for(http, ["10.0.0.1"]) is None
    for unusable in "socks5://p:1080 http://p:abc http://p:99999 http://[::1 http://:8".split():
        environment(http_proxy=unusable)
        with pytest.raises(EndpointError, match="NO_PROXY"):
            proxy_for(http, ["10.0.0.1"])


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_proxy_that_is_not_there_is_named(scheme: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    endpoint = parse_endpoint(f"{scheme}://llm.example/v1")
    context = ssl.create_default_context() if scheme == "https" else None
    records = asyncio.run(through(FakeProxy(1), endpoint, context, Proxy("127.0.0.1", port)))
    assert {r.status for r in records} == {"connect_error"}
    assert all((r.error or "").startswith(f"through the proxy 127.0.0.1:{port}: ") for r in records)


def test_the_password_is_not_shown() -> None:
    assert SECRET not in repr(Proxy("proxy.example", 3128, SECRET))


def test_the_password_is_hidden_where_a_proxy_repeats_it(environment: Any) -> None:
    environment(https_proxy="user:p%40ss@proxy.example:8080", http_proxy="http://proxy/a@b")
    endpoint = make_settings({"url": "http://llm.example/v1"}).endpoint
    assert redact(f"{SECRET} is user:p@ss", endpoint.secrets) == "*** is ***"
    assert redact("user p@ss", endpoint.secrets) == "user ***"


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_pages_take_the_same_way(
    scheme: str,
    environment: Callable[..., None],
    certificate: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The list of models is asked for as the load is: by proxy and, of https, with the system's
    trust."""
    theirs = None
    if scheme == "https":
        theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        theirs.load_cert_chain(certificate)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))

    async def main(port: int) -> tuple[Page, list[bytes]]:
        proxy = FakeProxy(port)
        server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
        environment(
            **{
                f"{scheme}_proxy": f"http://user:p%40ss@127.0.0.1:{server.sockets[0].getsockname()[1]}"
            }
        )
        async with server, Pages() as pages:
            return await pages.get(
                f"{scheme}://llm.example/v1/models", {"X-Key": "k"}, 10.0
            ), proxy.heads

    with FaultServer(tls=theirs) as server:
        page, heads = on_loop("uvloop", main(int(server.url.rsplit(":", 1)[1].split("/")[0])))
    assert page.status == 200
    assert b"data" in page.body
    first = {"http": b"GET http://llm.example/v1/models ", "https": b"CONNECT llm.example:443 "}[
        scheme
    ]
    assert heads[0].startswith(first)
    assert f"Proxy-Authorization: {SECRET}\r\n".encode() in heads[0]
    assert (b"X-Key" in heads[0]) == (scheme == "http")
