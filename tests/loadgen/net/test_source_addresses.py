"""Connections from several local addresses, each with ports of its own."""

import errno
import json
import socket
import ssl
from collections import Counter, deque
from pathlib import Path
from typing import Any

import pytest

from ampacity.loadgen.net import kernel_connect, kernel_stamps
from ampacity.loadgen.net.http import Client
from ampacity.loadgen.receive.exchange import Exchange
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.send.endpoint import Tls, parse_endpoint
from ampacity.values import ConfigError, addresses
from tests.support.args import Cli
from tests.support.servers.certificates import make_certificate
from tests.support.servers.fault_server import FaultServer
from tests.support.servers.kernel_wires import listening
from tests.support.stage_driving import on_loop
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(not kernel_stamps.AVAILABLE, reason="needs Linux")

SOURCES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
PORT_RANGE = (40_002 << 16 | 40_000).to_bytes(4, "little")  # three ports; Linux 6.3 and newer
IP_LOCAL_PORT_RANGE = 51


class ThreePorts(socket.socket):
    """A socket of a system with three ports for each local address."""

    def bind(self, address: Any) -> None:
        try:
            self.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, PORT_RANGE)
        except OSError:
            pytest.skip("this kernel has no IP_LOCAL_PORT_RANGE")
        super().bind(address)


def test_a_source_without_a_free_port_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first has three ports at most; then all come from the second, until it has none."""
    monkeypatch.setattr(kernel_connect.socket, "socket", ThreePorts)
    with listening() as server:
        where, kept, why = server.getsockname()[:2], [], list[int | None]()

        def opened(*sources: str) -> list[str]:
            taken, turns = [], deque(sources)
            try:
                for _ in range(8):
                    kept.append(kernel_connect.begin_connect(where, turns)[0])
                    taken.append(kept[-1].getsockname()[0])
            except OSError as error:
                why.append(error.errno)
            return taken

        first, rest = opened(SOURCES[0]), opened(*SOURCES[:2])
        for connection in kept:
            connection.close()
    assert why == [errno.EADDRNOTAVAIL] * 2
    assert 0 < len(first) <= 3
    assert set(first) == {SOURCES[0]}
    assert 0 < len(rest) <= 3
    assert set(rest) == {SOURCES[1]}


@pytest.mark.parametrize("over_tls", [False, True])
def test_connections_come_from_the_addresses_in_turn(over_tls: bool, tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path, "IP:127.0.0.1")
    served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    served.load_cert_chain(certificate)

    async def main(url: str) -> None:
        endpoint = parse_endpoint(url, sources=SOURCES, tls=Tls(cacert=certificate))
        client = Client(
            endpoint, endpoint.addresses(), endpoint.ssl_context(), stamps="kernel", reuse="new"
        )
        for _ in range(6):
            record = RequestRecord(0, 0, 0, "unfinished")
            exchange = Exchange(record, b"GET /v1/models HTTP/1.1\r\n\r\n", lambda _: None)
            client.dispatch(exchange)
            await until(lambda sent=exchange: sent.ended, 10)
            assert record.http_status == 200
        await client.close()

    with FaultServer(tls=served if over_tls else None) as server:
        on_loop("uvloop", main(server.url))
    assert server.came_from == [*SOURCES, *SOURCES]


def test_workers_share_the_addresses_and_run_json_has_them(cli: Cli, tmp_path: Path) -> None:
    """Each worker takes turns of its own: of two, neither uses an address twice as often."""
    with FaultServer() as server:
        options = "--rates 40 --duration 1s --arrivals constant --connections new --workers 2"
        result = cli(
            *("run", server.url, "--model", "m", "--input-tokens", "5", "--output-tokens", "3"),
            *(*options.split(), "--source-address", "127.0.0.2-127.0.0.4", "--out"),
            tmp_path / "run",
        )
        count = Counter(server.came_from)
    assert result.returncode == 0, result.stderr
    count.pop("127.0.0.1")  # pages beside the load
    assert set(count) == set(SOURCES)
    assert max(count.values()) - min(count.values()) <= 3  # one for each of three clients
    meta = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
    assert meta["source_addresses"] == list(SOURCES)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("192.0.2.1", "--source-address 192.0.2.1: no address of this machine: add it (ip address"),
        ("::1", "--source-address ::1: nothing goes from there to 127.0.0.1"),
        *(
            (odd, f"--source-address {odd}: give")  # the kernel would take its own choice
            for odd in ("224.0.0.1", "255.255.255.255", "0.0.0.0", "")
        ),
        ("127.0.0.2,here", "--source-address here: give IP addresses, as"),
    ],
)
def test_an_address_that_cannot_be_used_is_one_line(
    given: str, said: str, cli: Cli, tmp_path: Path
) -> None:
    with FaultServer() as server:
        result = cli(
            *("run", server.url, "--model", "m", "--rates", "5", "--source-address", given),
            *("--out", tmp_path / "run"),
        )
        assert not server.requests
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"ampacity: {said}")
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_lists_and_ranges_of_addresses() -> None:
    assert addresses("10.0.0.254-10.0.1.1, 10.0.0.9", "--a") == (
        *("10.0.0.254", "10.0.0.255", "10.0.1.0", "10.0.1.1"),
        "10.0.0.9",
    )
    assert addresses(["::1", "fe80::1-fe80::2"], "--a") == ("::1", "fe80::1", "fe80::2")
    for wrong in (
        "1.2.3",
        "127.0.0.3-127.0.0.2",
        "127.0.0.2-9",
        "::1-127.0.0.1",
        "10.0.0.0-10.9.9.9",
    ):
        with pytest.raises(ConfigError, match=f"^--a {wrong}: give IP addresses, as"):
            addresses(wrong, "--a")
    with pytest.raises(ConfigError, match="give only IPv4 or only IPv6"):
        addresses("::1,127.0.0.1", "--a")
