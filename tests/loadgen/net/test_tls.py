"""TLS over the sockets of the load: what each fault of a peer comes to, and the times of tokens."""

import asyncio
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ampacity.loadgen.net import kernel_stamps
from ampacity.loadgen.net.http import Client
from ampacity.loadgen.net.tls import CLOSED_EARLY, UNSAID
from ampacity.loadgen.receive import hot_path
from ampacity.loadgen.receive.exchange import Exchange
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.send.endpoint import Tls, parse_endpoint
from tests.streams.playing import END, HEAD, http_chunk
from tests.support.servers.certificates import make_certificate
from tests.support.servers.kernel_wires import CLOCKS_NS
from tests.support.servers.tls_peer import Peer, Script, TlsServer
from tests.support.stage_driving import on_loop
from tests.support.waiting import until

TOKENS = 5
REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\n\r\n"


def event(text: str, reason: str = "null") -> bytes:
    choice = f'{{"index":0,"delta":{{"content":"{text}"}},"finish_reason":{reason}}}'
    return b'data: {"model":"m","choices":[%b]}\n\n' % choice.encode()


EVENTS = [*(event(f" {k}") for k in range(TOKENS)), event("", '"stop"'), b"data: [DONE]\n\n"]
CHUNKS = [HEAD, *map(http_chunk, EVENTS), END]
ANSWER = b"".join(CHUNKS)
UNFRAMED = HEAD.replace(b"Transfer-Encoding: chunked\r\n", b"") + b"".join(EVENTS)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificate(tmp_path_factory.mktemp("tls"), "IP:127.0.0.1")


@pytest.fixture(params=["kernel", "read", "parsers", "asyncio"])
def stamps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How reads are dated; "parsers": without compiled code, "asyncio": as off Linux."""
    if request.param == "asyncio":
        monkeypatch.setattr(kernel_stamps, "AVAILABLE", False)
    elif not kernel_stamps.AVAILABLE:
        pytest.skip("kernel time stamps need Linux")
    if request.param == "parsers":
        monkeypatch.setattr(hot_path, "read_ready", hot_path.read_ready_in_python)
        monkeypatch.setattr(hot_path, "COMPILED", False)
    return "read" if request.param in ("asyncio", "read") else "kernel"


class Load:
    """Sends requests to ``url``, each when it is told to."""

    def __init__(self, url: str, certificate: Path, stamps: Any = "kernel") -> None:
        endpoint = parse_endpoint(url)
        context = Tls(cacert=certificate).context()
        self.client = Client(endpoint, endpoint.addresses(), context, stamps=stamps)

    def send(self) -> Exchange:
        record = RequestRecord(0, 0, time.monotonic_ns(), "unfinished")
        exchange = Exchange(record, REQUEST, lambda _: None)
        self.client.dispatch(exchange)
        return exchange

    async def answered(self) -> Exchange:
        exchange = self.send()
        await until(lambda: exchange.ended, 10)
        self.client.forget(exchange)
        return exchange


def records_of(
    script: Script, certificate: Path, stamps: str = "kernel", times: int = 1, **server: Any
) -> tuple[list[RequestRecord], TlsServer, Client]:
    """The records of requests that are sent one after the other."""

    async def main(url: str) -> tuple[list[RequestRecord], Client]:
        load = Load(url, certificate, stamps)
        records = [(await load.answered()).record for _ in range(times)]
        await load.client.close()
        return records, load.client

    with TlsServer(certificate, script, **server) as peer:
        records, client = on_loop("uvloop", main(peer.url))
    return records, peer, client


def answering(
    *answer: bytes, gap_s: float = 0.0, end: Callable[[Peer], Any] | None = None
) -> Script:
    """Answer each request with these records."""

    def script(peer: Peer) -> None:
        while True:
            peer.request()
            peer.send(*map(peer.encrypt, answer), gap_s=gap_s)
            if end is not None:
                end(peer)
                return

    return script


def dripped(peer: Peer) -> None:
    peer.request()
    data = b"".join(map(peer.encrypt, CHUNKS))
    for at in range(len(data)):
        peer.send(data[at : at + 1])
    peer.request()


def spanned(peer: Peer) -> None:
    peer.request()
    data = peer.encrypt(ANSWER)
    peer.send(*(data[at : at + 300] for at in range(0, len(data), 300)), gap_s=0.005)
    peer.request()


def all_at_once(peer: Peer) -> None:
    peer.request()
    peer.send(b"".join(map(peer.encrypt, CHUNKS)))
    peer.request()


def half_a_record(then: Callable[[Peer], None]) -> Script:
    def script(peer: Peer) -> None:
        peer.request()
        peer.send(
            b"".join(map(peer.encrypt, CHUNKS[:4])), peer.encrypt(CHUNKS[4])[:-10], gap_s=0.02
        )
        time.sleep(0.05)  # a reset may overtake what was not read yet
        then(peer)

    return script


def lying(change: Callable[[bytes], bytes]) -> Script:
    def script(peer: Peer) -> None:
        peer.request()
        peer.send(
            b"".join(map(peer.encrypt, CHUNKS[:4])), change(peer.encrypt(CHUNKS[4])), gap_s=0.02
        )
        peer.wait_for_close()

    return script


def goodbye(peer: Peer) -> None:
    peer.send(peer.say_goodbye())


def behind_a_record(more: Callable[[Peer], bytes]) -> Script:
    """Send a record and ``more`` in one segment, where records are decrypted by compiled code."""

    def script(peer: Peer) -> None:
        peer.request()
        peer.send(
            b"".join(map(peer.encrypt, CHUNKS[:2])),
            peer.encrypt(CHUNKS[2]),
            peer.encrypt(CHUNKS[3]) + more(peer),
            gap_s=0.02,
        )
        peer.wait_for_close()

    return script


def forged(peer: Peer) -> bytes:
    record = peer.encrypt(CHUNKS[4])
    return record[:-1] + bytes([record[-1] ^ 1])


def the_rest(peer: Peer) -> bytes:
    return b"".join(map(peer.encrypt, CHUNKS[4:]))


NOTHING: Callable[[Peer], None] = lambda peer: None  # noqa: E731 - the socket is closed
FAULTS: dict[str, tuple[Script, str, str | None]] = {  # script, status, words of the error
    "one record each": (answering(*CHUNKS, gap_s=0.002), "ok", None),
    "drips of one byte": (dripped, "ok", None),
    "one record in many segments": (spanned, "ok", None),
    "many records in one segment": (all_at_once, "ok", None),
    "whole, closed without close_notify": (answering(ANSWER, end=NOTHING), "ok", None),
    "whole, closed properly": (answering(ANSWER, end=goodbye), "ok", None),
    "no framing, closed properly": (answering(UNFRAMED, end=goodbye), "ok", None),
    "no framing, no close_notify": (answering(UNFRAMED, end=NOTHING), "truncated", UNSAID),
    "half an answer, no close_notify": (answering(*CHUNKS[:4], end=NOTHING), "truncated", UNSAID),
    "half an answer, close_notify": (
        answering(*CHUNKS[:4], end=goodbye),
        "truncated",
        "in the middle of the body",
    ),
    "nothing, close_notify": (answering(end=goodbye), "reset", "before the response headers"),
    "reset in a record": (half_a_record(Peer.reset), "truncated", "reset by peer"),
    "closed in a record": (half_a_record(NOTHING), "truncated", UNSAID),
    "a byte changed": (lying(lambda d: d[:-1] + bytes([d[-1] ^ 1])), "truncated", "bad record mac"),
    "a length too long": (
        lying(lambda d: d[:3] + b"\xff\xff" + d[5:]),
        "truncated",
        "too long|length",
    ),
    "a record and the rest": (behind_a_record(the_rest), "ok", None),
    "a record and a forged one": (behind_a_record(forged), "truncated", "bad record mac"),
    "a record and close_notify": (
        behind_a_record(Peer.say_goodbye),
        "truncated",
        "in the middle of the body",
    ),
    "plain text": (lying(lambda _: http_chunk(EVENTS[3])), "truncated", "(?i)version|record"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_peer_does_comes_to(fault: str, certificate: Path, stamps: str) -> None:
    script, status, why = FAULTS[fault]
    (record,), _, client = records_of(script, certificate, stamps)
    assert record.status == status, record.error
    tokens = TOKENS if status == "ok" or script is FAULTS["no framing, no close_notify"][0] else 3
    assert len(record.chunk_at_us or ()) == (0 if status == "reset" else tokens)
    if why is None:
        assert record.error is None
    else:
        import re

        assert re.search(why, record.error or ""), record.error
    assert client.connections_opened == 1
    assert not client.open


def test_a_handshake_that_breaks_off_is_a_connect_error(certificate: Path, stamps: str) -> None:
    class Closing(TlsServer):
        def _serve(self, connection: Any) -> None:
            connection.recv(1)
            connection.close()

    async def main(url: str) -> RequestRecord:
        load = Load(url, certificate, stamps)
        record = (await load.answered()).record
        await load.client.close()
        return record

    with Closing(certificate, NOTHING) as server:
        record = on_loop("uvloop", main(server.url))
    assert record.status == "connect_error"
    assert record.error in (CLOSED_EARLY, "Connection reset by peer")


@pytest.mark.skipif(not kernel_stamps.AVAILABLE, reason="kernel time stamps need Linux")
@pytest.mark.usefixtures("dated_by_the_kernel")
def test_a_token_has_the_time_of_the_segment_that_completed_its_record(certificate: Path) -> None:
    """Also where the read comes 5 ms late; half a record has no time of its own."""
    spans: list[tuple[int, int]] = []

    def script(peer: Peer) -> None:
        peer.request()
        peer.send(peer.encrypt(ANSWER))  # so that the connection is there
        peer.request()
        peer.send(peer.encrypt(HEAD))
        for chunk in CHUNKS[1 : TOKENS + 1]:
            record = peer.encrypt(chunk)
            peer.send(record[:50])
            time.sleep(0.01)  # the pace of the segments
            before_ns = time.monotonic_ns()
            peer.send(record[50:])
            spans.append((before_ns, time.monotonic_ns()))
        peer.send(b"".join(map(peer.encrypt, CHUNKS[TOKENS + 1 :])))
        peer.request()

    async def main(url: str) -> Exchange:
        load = Load(url, certificate)
        await load.answered()
        exchange = load.send()
        while not exchange.ended:
            await asyncio.sleep(0)
            time.sleep(0.005)  # noqa: ASYNC251 - the reads are late
        await load.client.close()
        return exchange

    with TlsServer(certificate, script) as server:
        exchange = on_loop("uvloop", main(server.url))
    times_ns = list(exchange._answer.chunk_at_ns)
    right = [
        before_ns - CLOCKS_NS <= at_ns <= after_ns + CLOCKS_NS
        for at_ns, (before_ns, after_ns) in zip(times_ns, spans, strict=True)
    ]
    assert sum(right) >= TOKENS - 1  # one may fall to an interruption of this process


@pytest.mark.parametrize("tls12", [False, True])
def test_a_new_connection_resumes_the_session(certificate: Path, tls12: bool, stamps: str) -> None:
    script = answering(ANSWER, end=goodbye)
    records, server, _ = records_of(script, certificate, stamps, times=3, tls12=tls12)
    assert [record.status for record in records] == ["ok"] * 3
    assert [peer.tls.session_reused for peer in server.peers] == [False, True, True]
    assert {peer.tls.selected_alpn_protocol() for peer in server.peers} == {"http/1.1"}


def test_connections_are_opened_before_they_are_due(certificate: Path) -> None:
    """A handshake takes 60 ms, and a request comes every 10: after the first ones none waits."""

    async def main(url: str) -> tuple[list[RequestRecord], int]:
        load = Load(url, certificate)
        load.client.be_patient(True)
        sent = []
        for _ in range(60):
            sent.append((time.monotonic_ns(), load.send()))
            await asyncio.sleep(0.01)
        await until(lambda: all(exchange.ended for _, exchange in sent), 10)
        await load.client.close()
        for due_ns, exchange in sent:
            exchange.record.dispatched_ns = due_ns
        return [exchange.record for _, exchange in sent], load.client.connections_opened

    with TlsServer(certificate, answering(*CHUNKS, gap_s=0.1), pause_s=0.06) as server:
        records, opened = on_loop("uvloop", main(server.url))
    assert {record.status for record in records} == {"ok"}
    waited = [(r.connected_ns or 0) - (r.dispatched_ns or 0) > 30e6 for r in records]
    assert all(waited[:5])
    assert sum(waited[20:]) <= 4  # on a busy machine
    assert opened < 2 * 60  # on a busy machine a few more than are needed


OPENSSL = shutil.which("openssl")


@pytest.fixture
def s_server(certificate: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Any, str]]:
    """OpenSSL's own server, whose input is sent: k and K update keys, r renegotiates."""
    import socket

    if OPENSSL is None:
        pytest.skip("needs the openssl command")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = f"{OPENSSL} s_server -accept 127.0.0.1:{port} -cert {certificate} -key {certificate}"
    process = subprocess.Popen(
        [*command.split(), request.param],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
    )
    said = b""
    while b"ACCEPT" not in said:
        said += process.stdout.read(4096)
    yield process, f"https://127.0.0.1:{port}/v1"
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


@pytest.mark.parametrize(
    ("s_server", "command"),
    [("-tls1_3", b"k\n"), ("-tls1_3", b"K\n"), ("-tls1_2", b"r\n")],
    indirect=["s_server"],
    ids=["KeyUpdate", "KeyUpdate asked back", "renegotiation"],
)
def test_keys_that_change_in_the_middle_of_an_answer(
    s_server: tuple[Any, str], command: bytes, certificate: Path
) -> None:
    """Both directions go on: the next request is read with the new keys."""
    process, url = s_server

    def wait_for_request() -> None:
        said = b""
        while REQUEST.splitlines()[0] not in said:
            piece = process.stdout.read(4096)
            assert piece, said
            said += piece

    async def main() -> list[RequestRecord]:
        load = Load(url, certificate)
        records = []
        for _ in range(2):
            exchange = load.send()
            await asyncio.to_thread(wait_for_request)
            for piece in (b"".join(CHUNKS[:3]), command, b"".join(CHUNKS[3:])):
                process.stdin.write(piece)
                await asyncio.sleep(0.1)
            await until(lambda: exchange.ended, 10)  # noqa: B023 - awaited here
            load.client.forget(exchange)
            records.append(exchange.record)
        assert load.client.connections_opened == 1
        await load.client.close()
        return records

    records = on_loop("uvloop", main())
    assert [(r.status, len(r.chunk_at_us or ())) for r in records] == [("ok", TOKENS)] * 2
