"""What the probe finds out about a server, and what it says where nothing can follow."""

import asyncio
import contextlib
import json
import socket
import socketserver
import ssl
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from ampacity.loadgen.net.http import Client
from ampacity.loadgen.net.pages import Pages
from ampacity.loadgen.probe.ask import ask
from ampacity.loadgen.probe.dialect import find_dialect
from ampacity.loadgen.probe.look import _hint, choose_model, look
from ampacity.loadgen.probe.results import Served
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.send.endpoint import Endpoint, EndpointError, is_loopback, parse_endpoint
from ampacity.loadgen.send.keys import Keys
from ampacity.loadgen.send.protocols import Dialect, RequestShape
from tests.support.servers.certificates import make_certificate
from tests.support.servers.fault_server import FaultServer
from tests.support.servers.faults import DONE, Call
from tests.support.stage_driving import on_loop

KEY = "sk-very-secret-42"
T = TypeVar("T")


def looked(endpoint: Endpoint, model: str | None = None) -> Served:
    async def main() -> Served:
        async with Pages() as pages:
            return await look(pages, endpoint, model)

    return on_loop("uvloop", main())


def sender(endpoint: Endpoint, words: list[int]) -> Callable[[RequestShape, int, int], bytes]:
    """Requests with as many words as asked for, noted in ``words``."""

    def send(shape: RequestShape, input_tokens: int, output_tokens: int) -> bytes:
        words.append(input_tokens)
        body = shape.body(" ".join(["word"] * input_tokens), output_tokens)
        head = endpoint.request_prefix(shape.api) + b"Content-Length: %d\r\n\r\n" % len(body)
        return head + body

    return send


def on_client(endpoint: Endpoint, use: Callable[[Client], Awaitable[T]]) -> T:
    """Return what ``use`` returns for a client of the endpoint."""

    async def main() -> T:
        client = Client(endpoint, endpoint.addresses(), None)
        try:
            return await use(client)
        finally:
            await client.close()

    return on_loop("uvloop", main())


def dialect_of(
    endpoint: Endpoint, model: str = "m", served: Served | None = None
) -> tuple[RequestShape, RequestRecord, list[str]]:
    shape, listed = RequestShape("chat", model), served or Served(("m",))
    send = sender(endpoint, [])
    return on_client(endpoint, lambda c: find_dialect(c, endpoint, shape, listed, send))


def assert_refused(call: Callable[[], Any], *words: str) -> str:
    """The one line of an EndpointError, which must hold these words and never the key."""
    with pytest.raises(EndpointError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert KEY not in message
    for word in words:
        assert word in message, message
    return message


# -- look -----------------------------------------------------------------------------------------


def test_what_a_server_says_about_itself() -> None:
    listed = json.dumps({"data": [{"id": "llama", "owned_by": "vllm", "max_model_len": 8192}]})
    pages = {"/v1/models": ("200 OK", listed), "/version": ("200 OK", '{"version": "0.32.0"}')}
    with FaultServer(pages=pages) as server:
        served = looked(parse_endpoint(server.url))
    assert served == Served(("llama",), "vllm", "0.32.0", None, 8192)


def test_llama_cpp_tells_its_context_in_meta() -> None:
    listed = json.dumps(
        {"data": [{"id": "a.gguf", "owned_by": "llamacpp", "meta": {"n_ctx": 4096}}]}
    )
    with FaultServer(pages={"/v1/models": ("200 OK", listed)}) as server:
        served = looked(parse_endpoint(server.url))
    assert (served.engine, served.max_model_len, served.engine_version) == ("llamacpp", 4096, None)


@pytest.mark.parametrize(
    "page",
    [
        *("", "[]", "{}", "null", "<html>", '{"data": null}'),
        *('{"data": [null, 5, {"id": 7}]}', '{"data": [{"x": 1}]}'),
    ],
)
def test_a_models_list_that_is_none_is_no_reason_to_stop(page: str) -> None:
    pages = dict.fromkeys(("/v1/models", "/version"), ("200 OK", page))
    with FaultServer(pages=pages) as server:
        assert looked(parse_endpoint(server.url)).models == ()


def test_a_server_without_a_models_list_is_no_reason_to_stop() -> None:
    with FaultServer(pages={"/v1/models": ("404 Not Found", "{}")}) as server:
        assert looked(parse_endpoint(server.url)) == Served(listed=False)


def test_a_missing_key_is_said_with_the_mend() -> None:
    with FaultServer(api_key=KEY) as server:
        assert_refused(
            lambda: looked(parse_endpoint(server.url)), server.url, "401", "--api-key-env"
        )


def test_a_wrong_key_is_said_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server echoes the key that it refuses."""
    monkeypatch.setenv("MY_KEY", KEY)
    with FaultServer(api_key="another") as server:
        endpoint = parse_endpoint(server.url, keys=Keys("api_key_env", "MY_KEY"))
        assert_refused(lambda: looked(endpoint), "refuses the API key", "401", "Bearer ***")
        assert_refused(lambda: dialect_of(endpoint), "refuses the API key", "401", "***")
    assert KEY not in repr(endpoint)


def test_what_a_server_repeats_of_the_secrets_is_taken_out() -> None:
    """From all that is said, but for the name of the model that the user gives."""
    entries = [{"id": KEY, "owned_by": f"Bearer {KEY}"}, {"id": "llama"}]
    pages = {
        "/v1/models": ("200 OK", json.dumps({"data": entries})),
        "/version": ("200 OK", json.dumps({"version": f"0.3 {KEY}"})),
    }
    with FaultServer(pages=pages) as server:
        endpoint = parse_endpoint(server.url, headers=(("X-Key", KEY), ("X-Model", "llama")))
        assert looked(endpoint) == Served(("***", "***"), "Bearer ***", "0.3 ***")
        assert looked(endpoint, "llama").models == ("***", "llama")
    with pytest.raises(EndpointError, match="name a model with --model"):  # *** is none to ask for
        choose_model(Served(("***",)), None, endpoint)


def test_a_probing_record_holds_no_secret() -> None:
    refuses = {"ignore_eos": ("400 Bad Request", json.dumps({"error": f"you sent {KEY}"}))}
    with FaultServer(refuses=refuses) as server:
        endpoint = parse_endpoint(server.url, headers=(("X-Key", KEY),))
        request = sender(endpoint, [])(RequestShape("chat", "m"), 4, 4)
        record = on_client(endpoint, lambda client: ask(client, "chat", request))
    assert record.error == "HTTP 400: you sent ***"


def test_the_right_key_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    with FaultServer(api_key=KEY) as server:
        endpoint = parse_endpoint(server.url, keys=Keys("api_key_env", "MY_KEY"))
        assert looked(endpoint).models == ("m",)
        assert dialect_of(endpoint)[1].status == "ok"


@pytest.mark.parametrize(
    ("place", "shown"),
    [
        ("https://elsewhere.test/v1/models", "https://elsewhere.test/v1/models"),
        (f"https://b.test/{KEY}/models?k={KEY}", "https://b.test/***/models: give"),
    ],
)
def test_a_redirect_names_the_place(place: str, shown: str) -> None:
    with FaultServer(pages={"/v1/models": ("301 Moved", place)}) as server:
        endpoint = parse_endpoint(server.url, headers=(("X-Key", KEY),))
        assert_refused(lambda: looked(endpoint), f"redirects to {shown}")


def test_a_server_that_is_down() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}/v1"
        words = (f"cannot connect to {url}", "is the server running?")
        assert_refused(lambda: looked(parse_endpoint(url)), *words)


@pytest.mark.parametrize("on_accept", ["close", "reset"])
def test_something_that_speaks_no_http(on_accept: str) -> None:
    with FaultServer(on_accept=on_accept) as server:
        said = assert_refused(lambda: looked(parse_endpoint(server.url)), server.url)
    # a reset may come before the connection is there, or after
    assert "does not speak HTTP" in said or (on_accept == "reset" and "cannot connect" in said)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1 that nobody signed, key included."""
    return make_certificate(tmp_path_factory.mktemp("tls"), "IP:127.0.0.1")


class Port(socketserver.ThreadingTCPServer):
    """Answers plain HTTP with ``plain``; over TLS with 404, or breaks off where it has no
    certificate."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, certificate: Path | None, plain: bytes) -> None:
        self.context, self.plain = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), plain
        if certificate:
            self.context.load_cert_chain(certificate)
        super().__init__(("127.0.0.1", 0), socketserver.BaseRequestHandler)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"

    def finish_request(self, request: Any, client_address: Any) -> None:
        with contextlib.suppress(OSError):
            request.settimeout(5)
            if request.recv(1, socket.MSG_PEEK) != b"\x16":
                request.recv(65536)
                request.sendall(self.plain)
                return
            with self.context.wrap_socket(request, server_side=True) as tls:
                tls.recv(65536)
                tls.sendall(
                    b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                )


@pytest.mark.parametrize(
    ("plain", "said"), [(b"", "does not speak HTTP"), (b"\x15\x03\x01\x00\x02\x02\x16", "not HTTP")]
)
def test_a_url_of_the_other_scheme_is_named(certificate: Path, plain: bytes, said: str) -> None:
    with Port(certificate, plain) as server:
        assert_refused(
            lambda: looked(parse_endpoint(server.url)), said, f"is it https{server.url[4:]}?"
        )
        server.shutdown()
    with Port(None, b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n") as server:
        https = server.url.replace("http:", "https:")
        hint = f"is it {server.url}?"
        assert_refused(lambda: looked(parse_endpoint(https)), f"cannot connect to {https}", hint)
        server.shutdown()


def test_a_certificate_that_is_not_trusted_is_named(certificate: Path) -> None:
    with Port(certificate, b"") as server:
        https = server.url.replace("http:", "https:")
        words = ("certificate verify failed", "this machine trusts (--cacert or SSL_CERT_FILE")
        assert_refused(lambda: looked(parse_endpoint(https)), *words)
        server.shutdown()


def test_a_400_is_no_list_of_models() -> None:
    with FaultServer(pages={"/v1/models": ("400 Bad Request", "no")}) as server:
        assert not looked(parse_endpoint(server.url)).listed


def test_a_server_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampacity.loadgen.probe.look.LOOK_TIMEOUT_S", 0.3)
    with FaultServer(on_accept="silent") as server:
        assert_refused(lambda: looked(parse_endpoint(server.url)), server.url, "within 0.3 s")


# -- choose_model ---------------------------------------------------------------------------


def test_which_model_is_asked_for() -> None:
    endpoint = parse_endpoint("127.0.0.1:8000/v1")
    assert choose_model(Served(("only",)), None, endpoint) == "only"
    assert choose_model(Served(("a", "b")), "mine", endpoint) == "mine"
    assert_refused(
        lambda: choose_model(Served(("a", "b")), None, endpoint), "--model", "it serves: a, b"
    )
    assert_refused(lambda: choose_model(Served(), None, endpoint), "--model", "lists no models")


# -- find_dialect --------------------------------------------------------------------------

UNPROCESSABLE, BAD = "422 Unprocessable Entity", "400 Bad Request"
EXTRA = '{"detail":[{"type":"extra_forbidden"}]}'
RENAMED = (
    '{"error":{"message":"max_tokens is not supported with this model, use max_completion_tokens"}}'
)


@pytest.mark.parametrize(
    ("refuses", "dialect", "notes"),
    [
        ({}, Dialect(), []),
        ({"ignore_eos": (UNPROCESSABLE, EXTRA)}, Dialect(ignore_eos=False), ["ignore_eos"]),
        (
            {"stream_options": (BAD, EXTRA), "ignore_eos": (BAD, EXTRA)},
            Dialect(ignore_eos=False, continuous_usage=False, stream_usage=False),
            ["ignore_eos", "stream_options"],
        ),
        ({"max_tokens": (BAD, RENAMED)}, Dialect(max_tokens_field="max_completion_tokens"), []),
        (
            {"max_tokens": (BAD, RENAMED), "ignore_eos": (UNPROCESSABLE, EXTRA)},
            Dialect(ignore_eos=False, max_tokens_field="max_completion_tokens"),
            ["ignore_eos"],
        ),
    ],
)
def test_the_fullest_dialect_that_is_taken_is_used(
    refuses: dict[str, tuple[str, str]], dialect: Dialect, notes: list[str]
) -> None:
    with FaultServer(refuses=refuses) as server:
        shape, record, said = dialect_of(parse_endpoint(server.url))
        assert len(server.requests) <= 8
    assert shape.dialect == dialect
    assert (record.status, record.output_tokens) == ("ok", 4)
    assert len(said) == len(notes)
    for note, word in zip(said, notes, strict=True):
        assert word in note


def test_a_model_that_is_not_served_is_named_with_those_that_are() -> None:
    with FaultServer(models=("a", "b")) as server:
        endpoint = parse_endpoint(server.url)
        words = ("--model x", "no model x", "it serves: a, b")
        assert_refused(lambda: dialect_of(endpoint, "x", Served(("a", "b"))), *words)
        assert_refused(lambda: dialect_of(endpoint, "x", Served()), "404", "--model x", "/v1")
        assert len(server.requests) == 2  # nothing to be gained by asking more plainly


def test_a_server_that_names_the_other_field_again_and_again_is_asked_six_times() -> None:
    """Five dialects, and one of them a second time with the field by its new name."""
    refuses = {"max_tokens": (BAD, RENAMED), "max_completion_tokens": (BAD, RENAMED)}
    with FaultServer(refuses=refuses) as server:
        with pytest.raises(EndpointError):
            dialect_of(parse_endpoint(server.url))
        assert len(server.requests) == 6


def test_a_model_that_is_not_listed_is_not_blamed_for_another_failure() -> None:
    with FaultServer() as server:
        with pytest.raises(EndpointError) as raised:
            dialect_of(parse_endpoint(server.url), "fault:empty_500", Served(("a", "b")))
        assert "HTTP 500" in str(raised.value)
        assert "--model" not in str(raised.value)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("empty_500", ["HTTP 500"]),
        ("error_event", ["stream_error", "out of memory"]),
        ("not_found_html", ["404", "/v1"]),
        ("redirect", ["give the final URL"]),
        ("reset_before_headers", ["reset"]),
        ("three_choices", ["protocol_error", "several choices came"]),
        ("endless_headers", ["protocol_error", "more than 64 KiB of headers"]),
        ("error_field", ["stream_error", "out of memory"]),
        ("garbage", ["protocol_error", "not HTTP"]),
        ("empty", ["empty", "no token"]),
        ("bad_request", ["http_error", "x is wrong"]),
    ],
)
def test_a_first_request_that_fails_is_told_in_the_servers_words(
    fault: str, words: list[str]
) -> None:
    with FaultServer() as server:
        model = f"fault:{fault}"
        endpoint = parse_endpoint(server.url)
        assert_refused(lambda: dialect_of(endpoint, model, Served((model,))), server.url, *words)
        assert len(server.requests) <= 8


def test_ask_gives_up_in_time() -> None:
    async def impatient(client: Client) -> RequestRecord:
        client.patience_s = 0.3
        return await ask(client, "chat", request)

    with FaultServer() as server:
        endpoint = parse_endpoint(server.url)
        request = sender(endpoint, [])(RequestShape("chat", "fault:slow_headers"), 3, 4)
        record = on_client(endpoint, impatient)
    assert (record.status, record.request_id) == ("timeout", -1)
    assert "0.3 s" in (record.error or "")


# -- the endpoint itself -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://10.0.0.1:8000/v1", "http://10.0.0.1:8000/v1 10.0.0.1 8000 /v1 10.0.0.1:8000"),
        ("10.0.0.1:8000/v1/", "http://10.0.0.1:8000/v1 10.0.0.1 8000 /v1 10.0.0.1:8000"),
        ("https://a.test/v1/chat/completions", "https://a.test/v1 a.test 443 /v1 a.test"),
        ("http://h/v1/completions", "http://h/v1 h 80 /v1 h"),
        ("http://[::1]:80/v1", "http://[::1]:80/v1 ::1 80 /v1 [::1]"),
        ("http://h:8080", "http://h:8080 h 8080  h:8080"),
    ],
)
def test_a_base_url_taken_apart(url: str, expected: str) -> None:
    found = parse_endpoint(url)
    parts = f"{found.url} {found.host} {found.port} {found.path} {found.authority}"
    assert parts == expected


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("ftp://h/v1", "http:// or https://"),
        ("http://", "names no host"),
        ("http://h:99999/v1", "http://h:99999/v1"),
        ("http://h:x/v1", "http://h:x/v1"),
        (f"http://me:{KEY}@h/v1", "--api-key-env"),
        ("http://h/v1?key=1", "--api-key-env"),
        ("http://h/v1#x", "base URL"),
    ],
)
def test_urls_that_are_none(url: str, word: str) -> None:
    assert_refused(lambda: parse_endpoint(url), word)


def test_keys_and_headers_that_cannot_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    unset = "NO_SUCH_VARIABLE"
    assert_refused(lambda: Keys("api_key_env", unset), unset)
    for bad in (f"{KEY}\t{KEY}", f"{KEY} x", f"{KEY}é"):
        monkeypatch.setenv("BAD_KEY", bad)
        assert_refused(lambda: Keys("api_key_env", "BAD_KEY"), "BAD_KEY")
    for name, value in (("", "x"), ("a b", "x"), ("a", "x\r\nHost: evil"), ("a:", "x")):
        assert_refused(
            lambda n=name, v=value: parse_endpoint("http://h", headers=((n, v),)), "--header"
        )


def test_the_head_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    team = (("X-Team", "a"),)
    keyed = parse_endpoint("http://h:8000/v1", keys=Keys("api_key_env", "MY_KEY"), headers=team)
    lines = keyed.request_prefix("chat").decode().split("\r\n")
    assert lines[0] == "POST /v1/chat/completions HTTP/1.1"
    ours = {"Host: h:8000", f"Authorization: Bearer {KEY}", "Accept-Encoding: identity"}
    assert {"X-Team: a", *ours} <= set(lines)
    plain = parse_endpoint("http://h/v1").request_prefix("completions")
    assert plain.startswith(b"POST /v1/completions HTTP/1.1\r\n")
    own = parse_endpoint(
        "http://h", keys=Keys("api_key_env", "MY_KEY"), headers=(("authorization", "Basic x"),)
    )
    assert KEY.encode() not in own.request_prefix("chat")


def test_a_host_without_an_address() -> None:
    assert_refused(
        lambda: parse_endpoint("http://no-such-host.invalid/v1").addresses(), "no-such-host.invalid"
    )


def test_loopback() -> None:
    assert is_loopback(["127.0.0.1", "::1", "127.1.2.3"])
    assert not is_loopback(["127.0.0.1", "10.0.0.1"])


class _Endless(FaultServer):
    """Answers with all tokens, finish reason and usage, then with comments for ever."""

    async def _answer(self, call: Call) -> bool:
        await call.head()
        await call.chunk(call.whole().removesuffix(DONE))
        while True:
            await call.chunk(b": heartbeat\n\n")
            await asyncio.sleep(0.2)


def test_the_probe_takes_an_answer_whose_body_does_not_end() -> None:
    with _Endless() as server:
        began_s = time.monotonic()
        _, record, _ = dialect_of(parse_endpoint(server.url))
    assert (record.status, record.output_tokens, record.finish_reason) == ("ok", 4, "length")
    assert time.monotonic() - began_s < 20  # of 120 s that the probe waits for an answer


class _TooLong(FaultServer):
    """Refuses its first requests as too long for the model, whatever their fields."""

    left = 1

    async def _answer(self, call: Call) -> bool:
        if self.left == 0:
            return await super()._answer(call)
        self.left -= 1
        text = "This model's maximum context length is 16 tokens, you requested 36"
        await call.answer("400 Bad Request", json.dumps({"error": {"message": text}}).encode())
        return True


@pytest.mark.parametrize("refused", [1, 2, 3])
def test_a_request_that_is_refused_as_too_long_is_no_refusal_of_a_field(refused: int) -> None:
    """Sent again twice; ignore_eos stays, which nobody refused."""
    with _TooLong() as server:
        server.left = refused
        endpoint = parse_endpoint(server.url)
        if refused == 3:
            assert_refused(lambda: dialect_of(endpoint), "too_long", "maximum context length is 16")
            return
        shape, record, notes = dialect_of(endpoint)
    assert (record.status, shape.dialect.ignore_eos, notes) == ("ok", True, [])


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("certificate has expired", "renew the server's certificate, or set this machine's clock"),
        ("certificate is not yet valid", "renew the server's certificate, or set this machine's"),
        ("unable to get local issuer certificate", "its certificate must be one that this machine"),
        ("certificate is not valid for 'h'", "use the name that its certificate was issued for"),
    ],
)
def test_the_remedy_is_that_of_the_certificates_fault(reason: str, remedy: str) -> None:
    failed = OSError(f"[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: {reason}")
    assert _hint(parse_endpoint("https://h/v1"), failed).startswith(remedy)
