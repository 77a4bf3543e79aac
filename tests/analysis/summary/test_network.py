"""The network's round trip beside TTFT: measured on real sockets with a known delay."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from pathlib import Path

import pytest

from ampacity.analysis.contract import stage as contract
from ampacity.analysis.contract.summary import Network, read_summary
from ampacity.analysis.network import network_share
from ampacity.experiments import checkup
from ampacity.loadgen.net.pages import Pages
from ampacity.loadgen.probe.network import RoundTrip, measure_round_trip
from ampacity.loadgen.send.endpoint import parse_endpoint
from ampacity.reports.pages.findings import findings
from tests.support.args import Cli, args_of
from tests.support.contract import struct_of
from tests.support.servers.fault_server import FaultServer
from tests.support.stage_driving import on_loop

EACH_WAY_S = 0.04


class Distant:
    """Relays to a port of this machine, each byte ``EACH_WAY_S`` later in either direction, as a
    far proxy does."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Distant:
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"
        return self

    def __exit__(self, *_: object) -> None:
        async def stop() -> None:
            self._server.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _start(self) -> asyncio.Server:
        return await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        beyond, back = await asyncio.open_connection("127.0.0.1", self._target)
        try:
            await asyncio.gather(self._later(reader, back), self._later(beyond, writer))
        finally:
            writer.close()
            back.close()

    async def _later(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                self._loop.call_later(
                    EACH_WAY_S, lambda data=data: writer.is_closing() or writer.write(data)
                )
            await asyncio.sleep(EACH_WAY_S)
            writer.close()


def measured(url: str, *, kept_alive: bool = True) -> RoundTrip:
    endpoint = parse_endpoint(url)

    async def main() -> RoundTrip:
        async with Pages() as pages:
            return await measure_round_trip(
                pages, endpoint, endpoint.addresses(), None, kept_alive=kept_alive
            )

    found: RoundTrip = on_loop("uvloop", main())
    return found


def test_what_a_proxy_adds_is_in_the_request_and_not_in_the_connection() -> None:
    with FaultServer() as server, Distant(server.port) as distant:
        near, far = measured(server.url), measured(distant.url)
    assert near.connect_s is not None
    assert far.connect_s is not None
    assert near.request_s < 0.03
    assert 2 * EACH_WAY_S <= far.request_s < 2 * EACH_WAY_S + 0.05
    assert max(near.connect_s, far.connect_s) < 0.03


def test_without_an_answer_there_is_no_figure() -> None:
    with FaultServer(on_accept="close") as server:
        found = measured(server.url)
        assert found.connect_s is not None
    assert found.request_s is None
    assert measured(server.url) == RoundTrip(None, None)  # nobody listens any more


def test_a_connections_time_is_taken_off_where_each_request_needs_a_new_one() -> None:
    with FaultServer() as server:
        found = measured(server.url, kept_alive=False)
    assert 0 <= found.request_s < 0.03


def test_the_share_is_of_the_lowest_ttft() -> None:
    """81 ms of 90 ms are 90 %; a request that takes longer than a TTFT shows no share."""
    endpoint = {"connect_s": 0.0001, "request_s": 0.081}
    stages = [struct_of(contract.Stage, {"ttft_s": {"p50": p50}}) for p50 in (0.2, 0.09, None)]
    found = network_share(endpoint, stages)
    assert (found.ttft_p50_s, found.share) == (0.09, pytest.approx(0.9))
    slow_list = network_share({"request_s": 0.3}, stages)
    assert (slow_list.request_s, slow_list.share) == (0.3, None)
    assert "the server's work is in it" in (slow_list.share_reason or "")
    assert network_share({}, stages) == Network(
        connect_s=None,
        request_s=None,
        ttft_p50_s=0.09,
        share=None,
        share_reason="the probe measured no round trip",
    )
    assert network_share(endpoint, []).share_reason == "no stage has a TTFT"


@pytest.mark.parametrize(
    ("trip_s", "verdict", "means"),
    [
        (None, "note", "the network's share of TTFT is unknown"),
        (0.01, "ok", "TTFT and E2E include it"),
        (0.05, "note", "TTFT and E2E include the way there and back"),
        (0.5, "note", "the server works on the list of models"),  # longer than a TTFT
    ],
)
def test_doctor_tells_the_way_from_a_slow_list(
    trip_s: float | None, verdict: str, means: str
) -> None:
    facts = {"round_trip_s": trip_s, "tcp_connect_s": 1e-4, "ttft_new_s": 0.1, "ttft_again_s": 0.1}
    found = checkup.network(facts)
    assert (found.verdict, found.spoils) == (verdict, ())
    assert found.means.startswith(means)


def test_a_run_shows_it_beside_ttft(cli: Cli, tmp_path: Path) -> None:
    """A server that answers at once, 80 ms away: that is nearly all of its TTFT, and nothing is
    taken off."""
    with FaultServer(gap_s=0.005) as server, Distant(server.port) as distant:
        load = args_of("--rates 60 --duration 2s --input-tokens 5 --output-tokens 4")
        done = cli("run", distant.url, *load, "--summary", "full", "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    endpoint = json.loads((tmp_path / "run" / "run.json").read_text())["endpoint"]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert endpoint["request_s"] == summary["network"]["request_s"] >= 2 * EACH_WAY_S
    assert summary["network"]["ttft_p50_s"] >= 2 * EACH_WAY_S
    assert summary["network"]["share"] > 0.6
    (shown,) = [f for f in findings(read_summary(summary)) if f.label == "Network"]
    assert shown.state == "unsure"
    assert "of the lowest TTFT p50" in shown.note
    assert "Network" in done.stdout
    assert "for the smallest request" in (tmp_path / "run" / "report.html").read_text()
