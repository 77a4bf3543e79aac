"""Every fault of a server is one status in the records, and harms no other request."""

import asyncio
import gc
import os
import random
import socket
import ssl
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ampacity.loadgen.drive.options import RunnerOptions
from ampacity.loadgen.net.http import Client, Connection, Stamps
from ampacity.loadgen.plan import Limits, StagePlan
from ampacity.loadgen.rundir.files import load_run
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.rundir.write import RunWriter
from ampacity.loadgen.send.endpoint import parse_endpoint
from tests.support.args import args_of
from tests.support.contract import summarise
from tests.support.repeats import often
from tests.support.servers.certificates import make_certificate
from tests.support.servers.fault_server import FaultServer
from tests.support.servers.faults import FAULTS, Call, drop, ok
from tests.support.stage_driving import (
    Driven,
    Made,
    check_complete,
    on_loop,
    plain,
    played,
    request_bytes,
    run_stage,
    schedule_at,
    served_stage,
)

pytestmark = pytest.mark.real_time  # needs the machine to itself

TOKENS = 4
EACH = 3  # requests with each fault
SLOW = [name for name, fault in FAULTS.items() if fault.status == "timeout"]
LARGE = ("big_event", "line_without_end")
QUICK = [name for name in FAULTS if name not in ("ok", *LARGE, *SLOW)]
LIMITS = Limits(total_s=2.0, idle_s=1.0)


def interleaved(faults: list[str]) -> Callable[[int], str]:
    """Every second request is healthy; the others go through the faults in turn."""
    return lambda request_id: faults[request_id // 2 % len(faults)] if request_id % 2 else "ok"


def run_interleaved(way: tuple[str, Stamps], faults: list[str], limits: Limits) -> Driven:
    """One stage with every fault three times, among as many healthy requests."""
    times = [i * 0.004 for i in range(2 * EACH * len(faults))]
    how: dict[str, Any] = {"loop": way[0], "stamps": way[1], "limits": limits, "drain_s": 60.0}
    return served_stage(times, interleaved(faults), **how)[0]


WAYS = [(loop, stamps) for loop in ("uvloop", "asyncio") for stamps in ("read", "kernel")]


@pytest.fixture(scope="module", params=WAYS, ids=" ".join)
def quick(request: pytest.FixtureRequest) -> Driven:
    return run_interleaved(request.param, QUICK, Limits())


@pytest.fixture(scope="module", params=WAYS, ids=" ".join)
def slow(request: pytest.FixtureRequest) -> Driven:
    return run_interleaved(request.param, SLOW, LIMITS)


def check_fault(name: str, record: RequestRecord) -> None:
    fault = FAULTS[name]
    assert (record.status, record.http_status) == (fault.status, fault.http), record
    if fault.tokens == -2:
        assert (record.output_tokens or 0) > 0
    else:
        assert record.output_tokens == (TOKENS if fault.tokens == -1 else fault.tokens), record
    assert "\n" not in (record.error or "")


def records_of(result: Driven, faults: list[str], name: str) -> list[RequestRecord]:
    return [r for r in result.records if interleaved(faults)(r.request_id) == name]


@pytest.mark.parametrize("name", QUICK)
def test_each_fault_has_its_status(quick: Driven, name: str) -> None:
    found = records_of(quick, QUICK, name)
    assert len(found) == EACH
    for record in found:
        check_fault(name, record)


def test_all_other_requests_are_unharmed(quick: Driven) -> None:
    healthy = records_of(quick, QUICK, "ok")
    assert len(healthy) == EACH * len(QUICK)
    for record in healthy:
        check_fault("ok", record)


def test_a_retry_hint_is_recorded(quick: Driven) -> None:
    assert {r.retry_after_s for r in records_of(quick, QUICK, "rate_limited")} == {3.0}
    assert {r.retry_after_s for r in records_of(quick, QUICK, "unavailable")} == {2.0}


def test_time_limits_are_those_of_the_client_and_harm_nobody_else(slow: Driven) -> None:
    for record in records_of(slow, SLOW, "ok"):
        check_fault("ok", record)
    for name in SLOW:
        limit_s = LIMITS.total_s if name in ("endless", "slow_drip") else LIMITS.idle_s
        assert limit_s is not None
        found = records_of(slow, SLOW, name)
        assert len(found) == EACH
        for record in found:
            check_fault(name, record)
            assert limit_s <= (record.ended_ns - record.dispatched_ns) / 1e9 < limit_s + 3.0


def test_an_event_of_ten_megabytes_is_one_token_and_harms_nobody_else() -> None:
    faults = ["big_event", "ok", "ok", "ok", "big_event", "ok", "ok", "ok"]
    result, _ = served_stage([i * 0.02 for i in range(len(faults))], faults)
    assert len(result.records) == 8
    for record in result.records:
        check_fault(faults[record.request_id], record)


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
@pytest.mark.parametrize(
    ("on_accept", "statuses"),
    # a connection that is gone before the request was handed over never was a connection to use
    [
        ("reset", {"reset", "connect_error"}),
        ("close", {"reset", "connect_error"}),
        ("silent", {"timeout"}),
    ],
)
def test_a_server_that_breaks_every_connection(
    loop: str, on_accept: str, statuses: set[str]
) -> None:
    began = time.monotonic()
    times, server = [i * 0.002 for i in range(100)], FaultServer(on_accept=on_accept)
    result, _ = served_stage(times, loop=loop, server=server, limits=Limits(idle_s=0.6), drain_s=5)
    assert {r.status for r in result.records} <= statuses
    assert time.monotonic() - began < 8


def test_each_fault_is_a_count_of_the_summary(quick: Driven, tmp_path: Path) -> None:
    """What the report counts, by status, is what the table says: EACH of every fault, and nothing
    else."""
    with RunWriter(tmp_path / "run", {"stages": [quick.meta]}) as writer:
        for record in quick.records:
            writer.append(record)
        writer.finish()
    summary = summarise(load_run(tmp_path / "run"))
    expected = Counter(FAULTS[name].status for name in QUICK for _ in range(EACH))
    kinds = {"reset", "truncated", "http_error", "stream_error", "protocol_error", "empty"}
    assert expected.keys() >= kinds
    del expected["ok"]
    found = Counter({status: count for status, count in summary["errors"].items() if count})
    by_code = {"rate_limited", "auth", "overloaded", "redirect", "bad_request", "upstream"}
    found["http_error"] += sum(found.pop(kind) for kind in by_code & found.keys())
    assert found == expected
    assert summary["requests"] == 2 * EACH * len(QUICK)


UNREACHABLE = {  # and what the error says
    "nobody listens": ("refused", "connect call failed"),  # of uvloop, of asyncio
    "the name has no address": ("not known", "no address", "name resolution"),
    "TLS to a plain port": ("ssl", "tls handshake"),
    "a certificate that nobody signed": ("certificate",),
}


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_endpoints_that_cannot_be_reached_are_connect_errors_and_harm_no_other(
    loop: str, tls_server: ssl.SSLContext
) -> None:
    """Requests in turn over five endpoints, one of them good."""

    async def main(good: str, tls: str) -> Driven:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            closed = sock.getsockname()[1]
        urls = {
            "good": good,
            "nobody listens": f"http://127.0.0.1:{closed}/v1",
            "the name has no address": "http://no-such-host.invalid/v1",
            "TLS to a plain port": good.replace("http:", "https:"),
            "a certificate that nobody signed": tls,
        }
        ends = [parse_endpoint(url) for url in urls.values()]
        # by name, as a proxy's is looked up for each connection; of an endpoint it is looked up
        # before the run
        clients = [Client(end, [end.host], end.ssl_context()) for end in ends]
        made = Made(lambda number, tokens: request_bytes(ends[number % len(ends)], tokens))
        schedule = schedule_at([0.01 * i for i in range(50)])
        plan = StagePlan(0, "open", schedule, 0.5, offered_rps=100.0, drain_s=10)
        result: Driven = await played(clients, made, plan, RunnerOptions(targets=tuple(urls)))
        return result

    with FaultServer() as server, FaultServer(tls=tls_server) as over_tls:
        result = on_loop(loop, main(server.url, over_tls.url))
    check_complete(result)
    assert Counter(r.target for r in result.records) == dict.fromkeys(["good", *UNREACHABLE], 10)
    for record in result.records:
        if record.target == "good":
            check_fault("ok", record)
            continue
        assert record.status == "connect_error"
        assert record.http_status is record.output_tokens is None
        assert record.connected_ns is record.started_ns is None
        said = (record.error or "").lower()
        assert any(words in said for words in UNREACHABLE[record.target or ""]), record


@pytest.mark.skipif(not Path("/dev/fd").is_dir(), reason="counts open files in /dev/fd")
def test_requests_that_find_no_descriptor_are_counted_as_the_clients_and_harm_no_other() -> None:
    """60 at once with room for some 20 connections; the server is another process, with
    descriptors of its own."""
    import resource

    faulty = "-m tests.support.servers.fault_server --port 0 --gap-ms 100"
    command, root = args_of(sys.executable, faulty), Path(__file__).parents[3]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root)
    url = server.stdout.readline().split()[0]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def main() -> Driven:
        end = parse_endpoint(url)
        client = Client(end, end.addresses(), None)
        times = [0.0] * 60 + [1.5 + 0.01 * i for i in range(10)]
        plan = StagePlan(0, "open", schedule_at(times), 1.6, offered_rps=40.0, drain_s=10)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 25, limits[1]))
        try:
            return await played(client, plain(end), plan)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    try:
        result = on_loop("uvloop", main())
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
    check_complete(result)
    short = [r for r in result.records if r.status != "ok"]
    assert {(r.status, r.error) for r in short} == {("connect_error", "Too many open files")}
    assert 30 <= len(short) <= 55
    assert result.measures.shortages == len(short)
    for record in result.records:
        if record.status == "ok":
            check_fault("ok", record)
    assert all(r.request_id < 60 for r in short)  # there was room again for the later ones


def test_a_server_that_appears_during_the_stage_is_used_from_then_on() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]

    async def main() -> Driven:

        async def late() -> FaultServer:
            await asyncio.sleep(0.3)
            return FaultServer(port=port).start()

        starting = asyncio.create_task(late())
        result = await run_stage(
            f"http://127.0.0.1:{port}/v1", schedule_at([i * 0.01 for i in range(80)])
        )
        (await starting).stop()
        return result

    result = on_loop("uvloop", main())
    check_complete(result)
    ordered = [r.status for r in sorted(result.records, key=lambda r: r.request_id)]
    assert ordered[0] == "connect_error"
    assert ordered[-1] == "ok"
    assert set(ordered) == {"connect_error", "ok"}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for 127.0.0.1, key included."""
    return make_certificate(tmp_path_factory.mktemp("tls"), "IP:127.0.0.1")


@pytest.fixture
def tls_server(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_tls_works_and_a_certificate_that_nobody_signed_does_not(
    loop: str, certificate: Path, tls_server: ssl.SSLContext
) -> None:
    trusting = ssl.create_default_context(cafile=str(certificate))
    with FaultServer(tls=tls_server) as server:
        good = on_loop(loop, run_stage(server.url, schedule_at([0.0] * 10), context=trusting))
        bad = on_loop(loop, run_stage(server.url, schedule_at([0.0] * 10)))
        http = server.url.replace("https", "http")
        plain = on_loop(loop, run_stage(http, schedule_at([0.0] * 10)))
    for result in (good, bad, plain):
        check_complete(result)
    assert {(r.status, r.output_tokens) for r in good.records} == {("ok", TOKENS)}
    assert {r.status for r in bad.records} == {"connect_error"}
    assert all("certificate" in (r.error or "").lower() for r in bad.records)
    assert {r.status for r in plain.records} <= {"reset", "protocol_error"}


def test_a_kept_alive_connection_closed_by_the_server_costs_no_request() -> None:
    """Every answer ends with a silent close: a request sent meanwhile goes out again, once."""
    result, server = served_stage([i * 0.01 for i in range(100)], "close_after_answer")
    assert {r.status for r in result.records} == {"ok"}
    assert len(server.requests) == 100


@pytest.mark.parametrize("stamps", ["read", "kernel"])
def test_a_close_without_a_byte_on_a_used_connection_is_the_idle_race(stamps: Stamps) -> None:
    """However late it is seen: sent once more, timed from its schedule, and counted. The first
    time after 50 ms."""
    served: set[int] = set()  # connections

    async def drop_reused(x: Call) -> bool:
        used = x.request.connection in served
        served.add(x.request.connection)
        return await (drop(x) if used else ok(x))

    times = [i * 0.02 for i in range(50)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(FAULTS, "ok", FAULTS["ok"]._replace(play=drop_reused))
        result, server = served_stage(times, stamps=stamps)
    assert {r.status for r in result.records} == {"ok"}
    assert result.resent == len(server.requests) - 50 > 10
    late = [r for r in result.records if (r.started_ns or 0) - r.scheduled_ns >= 50e6]
    assert len(late) >= result.resent
    assert sum((r.dispatched_ns or 0) - r.scheduled_ns < 50e6 for r in late) >= 0.9 * result.resent


@pytest.mark.parametrize("how", ["reset_before_headers", "close_before_headers"])
@pytest.mark.parametrize("answers", [1, 3])
def test_a_server_that_ends_a_connection_after_some_answers_fails_no_request(
    how: str, answers: int
) -> None:
    """Every so many answers, with RST or FIN, announced by nothing: sent once more, and counted."""
    served: Counter[int] = Counter()  # answers by connection

    async def limited(x: Call) -> bool:
        served[x.request.connection] += 1
        over = served[x.request.connection] > answers
        return await (FAULTS[how].play(x) if over else ok(x))

    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(FAULTS, "ok", FAULTS["ok"]._replace(play=limited))
        result, server = served_stage([i * 0.01 for i in range(40)])
    assert {r.status for r in result.records} == {"ok"}
    assert 0 < result.resent == len(server.requests) - 40


@pytest.mark.parametrize("fault", ["drop", "close_before_headers", "reset_before_headers"])
def test_what_a_server_drops_again_on_a_new_connection_is_a_failure(fault: str) -> None:
    faults = [fault if i % 10 == 9 else "ok" for i in range(50)]
    result, server = served_stage([i * 0.02 for i in range(50)], faults)
    assert [r.request_id for r in result.records if r.status == "reset"] == [*range(9, 50, 10)]
    assert 0 < result.resent == len(server.requests) - 50 <= 5  # a fault may meet a new connection


@pytest.mark.parametrize("fault", ["close_before_headers", "reset_mid_headers"])
def test_nothing_is_sent_again_from_a_new_connection_or_after_a_byte(fault: str) -> None:
    """All at once, so that each has a new connection; and of one by one, those cut in the headers."""
    one_by_one = [i * 0.02 for i in range(20)]
    times = one_by_one if fault == "reset_mid_headers" else [0.0] * 20
    result, server = served_stage(times, lambda i: fault if i % 2 or not i else "ok")
    assert sum(r.status == "reset" for r in result.records) == 11
    assert (len(server.requests), result.resent) == (20, 0)


def test_connections_are_kept_alive() -> None:
    result, server = served_stage([i * 0.02 for i in range(30)])
    assert {r.status for r in result.records} == {"ok"}
    assert server.connections < 30  # one would do, but for a slow answer now and then


def test_a_closed_loop_survives_every_fault() -> None:
    """Eight virtual users over all faults: rows as released, ids in one piece, and it ends in time.

    Without two_responses: what arrives unasked after the next request has left is taken for its
    answer."""
    faults = [name for name in QUICK if name != "two_responses"]
    began = time.monotonic()
    of_each = [faults[i % len(faults)] for i in range(300)]
    result, _ = served_stage([0.0] * 300, of_each, concurrency=8, duration_s=20.0)
    assert time.monotonic() - began < 30
    assert len(result.records) == 300
    for record in result.records:
        check_fault(faults[record.request_id % len(faults)], record)


def assert_each_fault_is_recorded(count: int, rate_rps: float) -> None:
    """``count`` requests, 5 % of them with a random fault of any kind."""
    dice = random.Random(7)
    kinds = QUICK + SLOW
    faults = [dice.choice(kinds) if dice.random() < 0.05 else "ok" for _ in range(count)]
    times = [i / rate_rps for i in range(count)]
    began = time.monotonic()
    result, _ = served_stage(times, faults, limits=Limits(total_s=4.0, idle_s=3.0), drain_s=60.0)
    assert time.monotonic() - began < times[-1] + 60
    assert result.meta["scheduled_requests"] == len(result.records) == count
    for record in result.records:
        check_fault(faults[record.request_id], record)


@pytest.mark.slow
def test_many_requests_with_five_per_cent_faults() -> None:
    assert_each_fault_is_recorded(often(3_000, 20_000), 600.0)


@pytest.mark.parametrize("stamps", ["read", "kernel"])
@pytest.mark.parametrize(
    "fault", ["ok", "reset_before_headers", "reset_mid_stream", "garbage", "refused"]
)
def test_what_a_request_leaves_behind_goes_without_the_garbage_collector(
    fault: str, stamps: Stamps
) -> None:
    """Its pauses would be the client's own. Cycles of a stage as a whole may stay, but none for
    each request."""
    gc.collect()
    gc.disable()
    try:
        with FaultServer() as server:
            url = server.url
            if fault != "refused":
                on_loop(
                    "uvloop",
                    run_stage(url, schedule_at([0.0] * 50), lambda _: fault, stamps=stamps),
                )
        if fault == "refused":  # nobody listens there any more
            on_loop("uvloop", run_stage(url, schedule_at([0.0] * 50), stamps=stamps))
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = Counter(type(each).__name__ for each in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    ours = ("Exchange", "Answer", "Connection", "KernelWire", "Task", "frame")
    assert sum(left[name] for name in ours) < 10, left


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_connection_lost_between_connecting_and_sending_is_a_reset(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_connection = Client._open

    async def open_and_lose(client: Client, begun: socket.socket | None) -> Connection:
        connection = await open_connection(client, begun)
        while not connection.lost:
            await asyncio.sleep(0.01)
        return connection

    monkeypatch.setattr(Client, "_open", open_and_lose)
    how: dict[str, Any] = {"limits": Limits(idle_s=0.5), "stamps": "read"}
    result, _ = served_stage([0.0] * 3, loop=loop, server=FaultServer(on_accept="close"), **how)
    assert {r.status for r in result.records} <= {"reset", "connect_error"}
