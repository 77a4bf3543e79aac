"""Endpoints that are odd and legal, on real sockets: query strings, localhost by IPv6 alone,
gateways, a missing key."""

import json
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ampacity.config import make_settings
from ampacity.experiments.stages import preflight
from ampacity.loadgen.net.pages import Pages
from ampacity.loadgen.probe.gateways import gateway_of
from ampacity.loadgen.probe.results import ProbeResult
from ampacity.loadgen.send.endpoint import Endpoint, EndpointError, parse_endpoint
from ampacity.loadgen.send.keys import Keys
from ampacity.progress import Progress
from tests.support.servers.faults import Request
from tests.support.stage_driving import on_loop

STREAMS = Path(__file__).parents[2] / "streams"
LIST = json.dumps({"data": [{"id": "m", "owned_by": "vllm"}]}).encode()
CHUNK = {"choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": None}]}
LAST = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
Respond = Callable[[Request], tuple[str, bytes, str]]  # (status, body, further header lines)


def whole(request: Request) -> bytes:
    """A good answer, in which every word of the prompt is a token."""
    n = len(request.body["messages"][0]["content"].split())
    tokens = request.body["max_tokens"]
    usage = {"choices": [], "usage": {"prompt_tokens": n, "completion_tokens": tokens}}
    events = [*[CHUNK] * tokens, LAST, usage]
    return (
        b"".join(b"data: " + json.dumps(e).encode() + b"\n\n" for e in events) + b"data: [DONE]\n\n"
    )


def good(headers: str = "") -> Respond:
    """Answers all of /models and /chat/completions well, with these header lines."""

    def respond(request: Request) -> tuple[str, bytes, str]:
        if request.method == "GET":
            known = request.path.partition("?")[0] == "/v1/models"
            return ("200 OK", LIST, headers) if known else ("404 Not Found", b"{}", headers)
        return "200 OK", whole(request), f"Content-Type: text/event-stream\r\n{headers}"

    return respond


@contextmanager
def serving(respond: Respond, host: str = "127.0.0.1") -> Iterator[tuple[int, list[Request]]]:
    """(port, requests that came) of a server on this address alone."""
    came: list[Request] = []

    class Handler(socketserver.StreamRequestHandler):
        timeout = 10

        def handle(self) -> None:
            while first := self.rfile.readline():
                method, path, _ = first.decode().split(" ", 2)
                headers = {}
                while (line := self.rfile.readline().decode().strip()) != "":
                    name, _, value = line.partition(":")
                    headers[name.lower()] = value.strip()
                data = self.rfile.read(int(headers.get("content-length", 0)))
                request = Request(method, path, headers, json.loads(data) if data else {}, 0, 0)
                came.append(request)
                status, body, more = respond(request)
                head = f"HTTP/1.1 {status}\r\n{more}Content-Length: {len(body)}\r\n\r\n"
                self.wfile.write(head.encode() + body)

    class Server(socketserver.ThreadingTCPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        daemon_threads = True
        block_on_close = False

    with Server((host, 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server.server_address[1], came
        server.shutdown()


def probed(url: str, **raw: Any) -> ProbeResult:
    async def main() -> ProbeResult:
        settings = make_settings({"url": url, "input_tokens": "40", "output_tokens": "4", **raw})
        settings = await preflight.follow_redirects(settings, Progress())
        route = preflight.route_to(settings.endpoint)
        client = route.client(settings.timestamps, settings.connections)
        try:
            async with Pages() as pages:
                return await preflight.Probe(
                    settings, pages, client, route, "salt", None, Progress()
                ).run()
        finally:
            await client.close()

    found: ProbeResult = on_loop("uvloop", main())
    return found


# -- query strings ---------------------------------------------------------------------------------


def test_a_query_goes_with_every_request_to_the_api() -> None:
    with serving(good()) as (port, came):
        probed(f"http://127.0.0.1:{port}/v1?api-version=2024-10-21&tier=a%20b")
    asked = [r.path for r in came if r.path.startswith("/v1/")]
    assert set(asked) == {
        "/v1/models?api-version=2024-10-21&tier=a%20b",
        "/v1/chat/completions?api-version=2024-10-21&tier=a%20b",
    }


@pytest.mark.parametrize(
    ("url", "base", "query"),
    [
        ("http://h/v1?a=1", "http://h/v1", "a=1"),
        (
            "http://h/v1/chat/completions?a=1",
            "http://h/v1",
            "a=1",
        ),  # the whole route, as it is pasted
        ("http://h?a", "http://h", "a"),
        ("http://h/v1/?", "http://h/v1", ""),
    ],
)
def test_the_query_is_apart_from_the_base(url: str, base: str, query: str) -> None:
    endpoint = parse_endpoint(url)
    assert (endpoint.url, endpoint.query) == (base, query)
    assert b"/chat/completions?a" in endpoint.request_prefix("chat") or not query


@pytest.mark.parametrize("name", ["key", "api-key", "access_token", "X-Amz-Signature", "code"])
def test_a_secret_in_a_query_is_refused_and_not_repeated(name: str) -> None:
    with pytest.raises(EndpointError, match="--api-key-env or --header") as refused:
        parse_endpoint(f"http://h/v1?a=1&{name}=hush-4711")
    assert "4711" not in str(refused.value)


@pytest.mark.parametrize("value", ["sk-PLANTED-123", "eyJhbGciOi.x", "of-the-variable"])
@pytest.mark.parametrize(
    ("url", "where"),
    [
        ("http://h/v1?k={}", "query's 'k'"),
        ("http://h/{}/v1", "path's part 1"),
        ("http://h/hook/{}/v1/chat/completions", "path's part 2"),
    ],
)
def test_a_secret_in_a_url_is_refused(
    url: str, where: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED", "of-the-variable")
    with pytest.raises(EndpointError, match=f"the {where} holds a key") as refused:
        parse_endpoint(url.format(value), keys=Keys("api_key_env", "PLANTED"))
    assert value not in str(refused.value)


@pytest.mark.parametrize("value", ["sk-PLANTED-123", "eyJhbGciOi.x"])
@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("path", "/v2/{}/chat"),
        ("path", "{}"),
        ("otlp", "http://h/{}/v1/metrics"),
        ("metrics_url", "http://h/{}/metrics"),
        ("lock", "note={}"),
    ],
)
def test_a_secret_in_what_is_written_down_is_refused(option: str, text: str, value: str) -> None:
    with pytest.raises(ValueError, match="holds a key") as refused:
        make_settings({"url": "http://h/v1", option: text.format(value)})
    assert value not in str(refused.value)


def test_names_that_begin_like_keys_are_none() -> None:
    given = {"lock": ["engine=hf-transformers", "tokenizer_mode=auto"], "path": "/v2/chat"}
    settings = make_settings({"url": "http://h/v1", "otlp": "http://h:4318", **given})
    assert settings.locked == {"engine": "hf-transformers", "tokenizer_mode": "auto"}


# -- localhost -------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize(
    ("name", "stamps"),
    [
        ("localhost", "kernel"),
        ("localhost", "read"),
        ("LocalHost.", "kernel"),
        ("api.localhost", "kernel"),
    ],
)
def test_localhost_is_found_at_either_address(host: str, name: str, stamps: str) -> None:
    try:
        with serving(good(), host) as (port, came):
            found = probed(f"http://{name}:{port}/v1", timestamps=stamps)
    except OSError:
        pytest.skip(f"no {host} on this machine")
    assert found.record.status == "ok"
    assert found.network.connect_s is not None
    assert len(came) > 5


def test_the_address_that_answers_is_asked_first_from_then_on() -> None:
    """Not refused once for each connection: the dead one is the second after the first connection."""
    endpoint = Endpoint("http://localhost:1/v1", "http", "localhost", 1, "/v1")
    assert {"127.0.0.1", "::1"} <= set(endpoint.addresses())
    with serving(good(), "::1") as (port, _):
        settings = make_settings({"url": f"http://localhost:{port}/v1"})
        route = preflight.route_to(settings.endpoint)
        route.addresses[:] = ["127.0.0.1", "::1"]

        async def main() -> None:
            client = route.client(settings.timestamps, settings.connections)
            async with Pages() as pages:
                await preflight.Probe(
                    settings, pages, client, route, "salt", None, Progress()
                ).run()
            await client.close()

        on_loop("uvloop", main())
    assert route.addresses == ["::1", "127.0.0.1"]


# -- gateways --------------------------------------------------------------------------------------


def headers_of(stream: str) -> dict[str, str]:
    head = (STREAMS / stream).read_bytes().partition(b"\r\n\r\n")[0].decode("latin-1")
    lines = (line.partition(":") for line in head.split("\r\n")[1:])
    return {name.lower(): value.strip() for name, _, value in lines}


ROUTER = {  # as vllm-router 0.1.17 answered
    "server": "uvicorn",
    "content-type": "text/event-stream",
    "x-request-id": "chatcmpl-b96YX6rBDzq3EBCkXu1mPuC1",
    "vary": "origin, access-control-request-method, access-control-request-headers",
    "access-control-expose-headers": "*",
}


@pytest.mark.parametrize(
    ("headers", "engine", "name"),
    [
        (headers_of("litellm-chat-stream-usage.http"), "openai", "LiteLLM"),
        ({"x-litellm-call-id": "9", "x-litellm-version": "1.106.12"}, "openai", "LiteLLM 1.106.12"),
        (ROUTER, "vllm", "vLLM router"),
        (ROUTER | {"x-request-id": "req-0Avnb6bej331639WeDDyCvXt"}, "sglang", "SGLang router"),
        (ROUTER, None, "vLLM or SGLang router"),
        ({"server": "nginx/1.25.3"}, "vllm", "nginx 1.25.3"),
        ({"server": "envoy", "x-envoy-upstream-service-time": "7"}, "vllm", "Envoy"),
        ({"server": "uvicorn", "x-envoy-upstream-service-time": "7"}, "vllm", "Envoy"),
        ({"server": "istio-envoy"}, None, "Envoy (Istio)"),
        ({"server": "OpenResty/1.25.3.1"}, None, "nginx (OpenResty) 1.25.3.1"),
        ({"server": "uvicorn", "x-kong-proxy-latency": "0"}, "vllm", "Kong"),
        ({"server": "cloudflare", "cf-ray": "8"}, None, "Cloudflare"),
        ({"server": "uvicorn", "via": "1.1 kong/3.6.1"}, None, "Kong 3.6.1"),
        ({"server": "uvicorn", "x-request-id": "req_0123456789abcdef0123456789abcdef"}, None, None),
        (headers_of("vllm-chat-stream-usage.http"), "vllm", None),
        (headers_of("llamacpp-chat-stream-usage.http"), "llamacpp", None),
        (headers_of("sglang-chat-stream-usage.http"), "sglang", None),
    ],
)
def test_a_gateway_is_named_by_its_headers(
    headers: dict[str, str], engine: str | None, name: str | None
) -> None:
    assert gateway_of(headers, engine) == name


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        ("Server: nginx/1.2\r\n", "nginx 1.2"),
        ("X-Litellm-Version: 1.9\r\n", "LiteLLM 1.9"),
        ("Server: uvicorn\r\n", None),
    ],
)
def test_the_probe_looks_at_the_headers_of_answers_too(lines: str, name: str | None) -> None:
    """LiteLLM's list of models has none of its own."""

    respond = lambda request: good(lines * (request.method == "POST"))(request)  # noqa: E731
    with serving(respond) as (port, _):
        assert probed(f"http://127.0.0.1:{port}/v1").served.gateway == name


# -- a key that is wanted --------------------------------------------------------------------------


@pytest.mark.parametrize("listed", [True, False])
def test_a_500_for_want_of_a_key_asks_for_one(
    listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As LiteLLM without a database answers: "Internal Server Error", in plain text. With a key it
    is no question."""

    def respond(request: Request) -> tuple[str, bytes, str]:
        if listed and request.method == "GET":
            return good()(request)
        return "500 Internal Server Error", b"Internal Server Error", "Content-Type: text/plain\r\n"

    monkeypatch.setenv("A_KEY", "sk-hush")
    with serving(respond) as (port, _):
        url = f"http://127.0.0.1:{port}/v1"
        asked = r"HTTP 500: Internal Server Error; key[?] .*--api-key-env"
        with pytest.raises(EndpointError, match=asked):
            probed(url)
        with pytest.raises(EndpointError) as with_one:
            probed(url, api_key_env="A_KEY")
        with pytest.raises(EndpointError) as with_header:
            probed(url, header=["Authorization: Basic abcdef"])
    assert "key?" not in f"{with_one.value}{with_header.value}"


NO_KEY = b'{"error": {"message": "API key not valid. Please pass a valid API key."}}'


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        ("400 Bad Request", NO_KEY, "application/json"),  # Gemini
        ("200 OK", b"data: " + NO_KEY + b"\n\n", "text/event-stream"),
        ("400 Bad Request", b'{"detail": "unknown key: ignore_eos"}', "application/json"),
    ],
)
def test_other_refusals_for_want_of_a_key_ask_for_one_too(
    status: str, body: bytes, kind: str
) -> None:
    answer = status, body, f"Content-Type: {kind}\r\n"
    respond = lambda request: good()(request) if request.method == "GET" else answer  # noqa: E731
    with serving(respond) as (port, _), pytest.raises(EndpointError) as refused:
        probed(f"http://127.0.0.1:{port}/v1")
    assert ("--api-key-env" in str(refused.value)) is ("valid" in body.decode())


def test_a_list_that_fails_is_no_reason_to_stop_where_a_model_is_named() -> None:
    failed = "500 Internal Server Error", b"", ""
    respond = lambda request: failed if request.method == "GET" else good()(request)  # noqa: E731
    with serving(respond) as (port, _):
        assert probed(f"http://127.0.0.1:{port}/v1", model="m").record.status == "ok"


def test_a_proxy_that_wants_a_password_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def respond(request: Request) -> tuple[str, bytes, str]:
        if request.headers.get("proxy-authorization") != "Basic dXNlcjpwYXNz":  # user:pass
            return "407 Proxy Authentication Required", b"", "Proxy-Authenticate: Basic\r\n"
        request.path = "/" + request.path.split("/", 3)[3]
        return good()(request)

    with serving(respond) as (port, _):
        for who, fine in (("", False), ("user:wrong@", False), ("user:pass@", True)):
            monkeypatch.setenv("http_proxy", f"http://{who}127.0.0.1:{port}")
            if fine:
                assert probed("http://llm.test/v1").record.status == "ok"
                continue
            with pytest.raises(
                EndpointError, match=r"proxy on the way wants .*HTTP 407"
            ) as refused:
                probed("http://llm.test/v1")
            assert "wrong" not in str(refused.value)
