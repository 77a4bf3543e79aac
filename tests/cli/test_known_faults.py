"""Faults that users of other load generators reported and that no other test holds
(docs/known-faults.md).
"""

import asyncio
import errno
import json
import re
import socket
import struct
import subprocess
import sys
import time
import tomllib
from array import array
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ampacity.loadgen.drive.prefetch import READY_MAX, READY_MAX_BYTES
from ampacity.loadgen.drive.slices import in_slices
from ampacity.loadgen.drive.stage import StageRunner
from ampacity.loadgen.net import kernel_connect, kernel_stamps
from ampacity.loadgen.net.http import Client
from ampacity.loadgen.plan import Limits, StagePlan
from ampacity.loadgen.receive import hot_path
from ampacity.loadgen.receive.completions import Answer
from ampacity.loadgen.receive.exchange import Exchange
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.send.endpoint import parse_endpoint
from tests.support import stage_driving
from tests.support.args import args_of
from tests.support.servers.fault_server import FaultServer
from tests.support.stage_driving import Driven, Made, on_loop, plain, schedule_at

S = 1_000_000_000


def played(server: FaultServer, plan: StagePlan, **how: Any) -> Driven:
    endpoint = parse_endpoint(server.url)

    async def main() -> Driven:
        client = Client(endpoint, endpoint.addresses(), None, **how)
        return await stage_driving.played(client, plain(endpoint), plan)

    result: Driven = on_loop("uvloop", main())
    return result


@pytest.mark.parametrize("stamps", ["read", "kernel"])
def test_a_step_of_the_wall_clock_moves_no_latency(
    stamps: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 20: the clock is set back by 5 s in the middle of a stage."""
    if stamps == "kernel" and not kernel_stamps.AVAILABLE:
        pytest.skip("kernel time stamps need Linux")
    real_ns, began_ns = time.time_ns, time.monotonic_ns()

    def stepped_ns() -> int:
        return real_ns() - (5 * S if time.monotonic_ns() - began_ns > 0.25 * S else 0)

    monkeypatch.setattr(time, "time_ns", stepped_ns)
    monkeypatch.setattr(time, "time", lambda: stepped_ns() / 1e9)
    with FaultServer() as server:
        plan = StagePlan(
            0, "open", schedule_at([0.02 * k for k in range(20)]), 0.4, offered_rps=50.0, drain_s=10
        )
        # a connection each, or all would use the first one, whose reads are audited and take a way
        # of their own
        records = played(server, plan, stamps=stamps, reuse="new").records
    assert [record.status for record in records] == ["ok"] * 20
    for record in records:
        times = [
            record.scheduled_ns,
            record.dispatched_ns,
            record.started_ns,
            record.first_token_ns,
            record.ended_ns,
        ]
        known = [at for at in times if at is not None]
        assert len(known) == 5
        # two reads of the wall clock and one of the kernel's: a stamp may be off by microseconds,
        # never by the step
        assert all(-0.001 * S < later - sooner < 4 * S for sooner, later in pairwise(known))


def test_dates_of_the_kernel_never_fall(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream is read at 10, 11 and 12 ms; the wall clock, 95 ms ahead, seems 97 ahead at the
    second.

    So the stamps at 100 and 104 ms are dated 5 and 7 ms, that at 103 6: it stays 7. A fourth, at 21
    ms, has a stamp of before the request that was written at 20: it cannot be its answer's date. A
    fifth has none."""
    if not kernel_stamps.AVAILABLE:
        pytest.skip("kernel time stamps need Linux")
    now_ms, ahead_ms, stamps_ms = 0, 95, 0
    clocks = SimpleNamespace(
        monotonic_ns=lambda: now_ms * 1_000_000, time_ns=lambda: (now_ms + ahead_ms) * 1_000_000
    )
    for module in (kernel_stamps, hot_path):
        monkeypatch.setattr(module, "time", clocks)
    # which these clocks can be given to
    monkeypatch.setattr(hot_path, "read_ready", hot_path.read_ready_in_python)
    monkeypatch.setattr(kernel_stamps, "AUDIT_EVERY", 1)

    class Socket(socket.socket):
        def recvmsg(self, *sizes: int) -> Any:
            data, _, flags, address = super().recvmsg(*sizes)
            stamp = (socket.SOL_SOCKET, 35, struct.pack("@qq", 0, stamps_ms * 1_000_000))
            return data, [stamp] if stamps_ms else [], flags, address

    read: list[int] = []
    receiver = SimpleNamespace(
        exchange=SimpleNamespace(feed=lambda at_ns, _: read.append(at_ns)),
        connection_lost=lambda _: None,
    )
    delays_s = array("d")

    async def main() -> None:
        nonlocal now_ms, ahead_ms, stamps_ms
        reader = kernel_stamps.KernelReader(date_by_kernel=True, on_delay=delays_s.append)
        far, near = socket.socketpair()
        near.setblocking(False)
        wire = kernel_stamps.KernelWire(reader, Socket(fileno=near.detach()), receiver)
        for step in (
            (10, 95, 100),
            (11, 97, 104),
            (12, 97, 103),
            (20, 95, 0),
            (21, 95, 114),
            (22, 95, 0),
        ):
            now_ms, ahead_ms, stamps_ms = step
            if now_ms == 20:
                wire.write(b"a request")
            else:
                far.send(b"x")
                assert reader.turn() == 1
        wire.abort()
        reader.close()
        far.close()
        await asyncio.sleep(0)

    on_loop("uvloop", main())
    assert read == [5_000_000, 7_000_000, 7_000_000, 20_000_000, 22_000_000]
    assert delays_s.tolist() == [0.005, 0.004, 0.006, 0.002]


def test_by_default_an_answer_may_last_as_long_as_its_tokens_come() -> None:
    """Fault 58: 200 s of steady tokens are no timeout; 121 s of silence are."""
    record = RequestRecord(0, 0, 0, "unfinished", dispatched_ns=0)
    exchange = Exchange(record, b"", lambda _: None)
    exchange.feed(199 * S, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    assert Limits().gives_up(0, exchange.last_read_ns) == (319 * S, "nothing received for 120 s")


@pytest.mark.parametrize(
    ("size", "window"), [(100, READY_MAX), (READY_MAX_BYTES // 8, 8), (2 * READY_MAX_BYTES, 1)]
)
def test_requests_are_made_ahead_in_a_bounded_window(size: int, window: int) -> None:
    """Fault 64: of 50,000 prompts only the first 512, or 16 MiB of them, are made before the
    start."""
    made: list[int] = []

    def make(number: int, tokens: int) -> bytes:
        made.append(number)
        return bytes(size)

    with FaultServer() as server:
        endpoint = parse_endpoint(server.url)

        async def main() -> None:
            client = Client(endpoint, endpoint.addresses(), None)
            runner = StageRunner([client], Made(make), lambda _: None)
            schedule = schedule_at(np.arange(50_000) * 1e-3)
            runner.prepare(StagePlan(0, "open", schedule, 50.0, offered_rps=1000.0))
            await client.close()
            assert made == list(range(window))
            for _ in range(50):  # as they are sent
                runner._ahead.take()
            making = asyncio.create_task(in_slices(runner._work, runner._reads_wait))
            async with asyncio.timeout(10):
                while len(made) < 50 + window:
                    await asyncio.sleep(0)
            await asyncio.sleep(0.01)  # full, it makes no more
            making.cancel()

        on_loop("uvloop", main())
    assert made == list(range(50 + window))


def test_ports_that_are_used_up_are_this_machines_shortage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 57: a class of its own, not the server's failure."""

    def connect(*_: Any, **__: Any) -> None:
        raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    monkeypatch.setattr(kernel_connect, "begin_connect", connect)
    with FaultServer() as server:
        plan = StagePlan(
            0, "open", schedule_at([0.0, 0.001, 0.002]), 0.1, offered_rps=30.0, drain_s=2
        )
        result = played(server, plan, stamps="kernel")
    expected = {("connect_error", "Cannot assign requested address")}
    assert {(record.status, record.error) for record in result.records} == expected
    assert result.measures.shortages == 3


def test_a_shortage_on_the_first_address_is_not_hidden_by_a_refusal_of_the_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fault 57 again: localhost is ::1 and 127.0.0.1, and only one of them may be listened on."""
    begin = kernel_connect.begin_connect

    def connect(address: tuple[str, int], *sources: Any) -> tuple[socket.socket, bool]:
        if address[0] == "127.0.0.1":
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        return begin(address, *sources)

    monkeypatch.setattr(kernel_connect, "begin_connect", connect)
    with FaultServer() as server:
        endpoint = parse_endpoint(server.url)

        async def main() -> list[RequestRecord]:
            client = Client(endpoint, ["127.0.0.1", "127.0.0.2"], None, stamps="kernel")
            plan = StagePlan(0, "open", schedule_at([0.0] * 3), 0.1, offered_rps=30.0, drain_s=2)
            result = await stage_driving.played(client, plain(endpoint), plan)
            assert client.shortages == 3
            return result.records

        records = on_loop("uvloop", main())
    assert {record.error for record in records} == {"Cannot assign requested address"}


def test_a_finished_stage_keeps_no_request() -> None:
    """Fault 63: what was recorded is let go."""
    with FaultServer() as server:
        endpoint = parse_endpoint(server.url)

        async def main() -> tuple[StageRunner, Client]:
            client = Client(endpoint, endpoint.addresses(), None)
            runner = StageRunner([client], plain(endpoint), lambda _: None)
            await runner.run(
                StagePlan(0, "open", schedule_at([0.0] * 50), 0.2, offered_rps=250.0, drain_s=5)
            )
            held = (len(runner._in_flight), len(client._connecting), len(client._carrying))
            await client.close()
            assert held == (0, 0, 0)
            return runner, client

        on_loop("uvloop", main())


def test_connecting_is_no_part_of_ttft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 23: a connection that takes 150 ms is seen as such; the request counts from when it has
    one."""
    finish = kernel_connect.connect

    def begin(*_: Any) -> tuple[socket.socket, bool]:
        begun = socket.socket()
        begun.setblocking(False)
        return begun, False

    async def slowly(*args: Any, **how: Any) -> None:
        await asyncio.sleep(0.15)
        await finish(*args, **how)

    monkeypatch.setattr(kernel_connect, "begin_connect", begin)
    monkeypatch.setattr(kernel_connect, "connect", slowly)
    with FaultServer() as server:
        plan = StagePlan(0, "open", schedule_at([0.0] * 3), 0.1, offered_rps=30.0, drain_s=5)
        records = played(server, plan, stamps="kernel").records
    for record in records:
        assert (record.connected_ns or 0) - (record.dispatched_ns or 0) >= 0.149 * S
        assert (record.started_ns or 0) >= (record.connected_ns or S)


WORDS = [f"w{k:02} " for k in range(50)]  # fifty tokens of four characters
CUTS = {
    "a token each": WORDS,
    "two tokens each": ["".join(pair) for pair in zip(WORDS[::2], WORDS[1::2], strict=True)],
    "cut inside of tokens": ["".join(WORDS)[at : at + 7] for at in range(0, 200, 7)],
    "a character each": list("".join(WORDS)),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("usage", [True, False])
def test_how_a_text_is_cut_does_not_change_its_tokens(cut: str, usage: bool) -> None:
    """Faults 52, 53: fifty are fifty in whatever pieces; where the server does not count, chunks
    are counted, by name."""
    answer = Answer()
    for at_ns, piece in enumerate(CUTS[cut]):
        answer.on_event(at_ns, json.dumps({"choices": [{"delta": {"content": piece}}]}).encode())
    if usage:
        answer.on_event(
            300, b'{"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 50}}'
        )
    answer.finish()
    assert answer.tally.output == ((50, "usage") if usage else (len(CUTS[cut]), "chunks"))
    assert answer.tally.per_chunk() is None  # nobody said how many tokens a chunk holds
    assert len(answer.chunk_at_ns) == len(CUTS[cut])


ROOT = Path(__file__).parents[2]
IN_A_CORE_INSTALLATION = """
import runpy, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in FOREIGN:
            raise ModuleNotFoundError(f"not in the core: {name}", name=name)

sys.meta_path.insert(0, Missing())
from ampacity.cli import main
for words in (["--help"], ["predict", *LOAD, "--out", RUN]):
    sys.argv = ["ampacity", *words]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, (words, ended.code)
"""


def test_the_core_is_all_that_is_needed_and_all_of_it_is_used(tmp_path: Path) -> None:
    """Fault 83: help, a run in virtual time and its report, where nothing but the core's
    dependencies can be imported."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    modules: dict[str, set[str]] = {}  # of each distribution
    for module, names in metadata.packages_distributions().items():
        for name in names:
            modules.setdefault(_plain(name), set()).add(module)
    core, waiting = {"ampacity"}, [_plain(line) for line in declared]
    while waiting:
        name = waiting.pop()
        if name in modules and name not in core:
            core.add(name)
            waiting += [
                _plain(line) for line in metadata.requires(name) or [] if "extra ==" not in line
            ]
    allowed = set[str]().union(*(modules[name] for name in core if name in modules))
    foreign = {module for found in modules.values() for module in found} - allowed
    assert {"pytest", "hypothesis", "mypy"} <= foreign  # this environment has more than the core
    run = tmp_path / "run"
    load = args_of(
        "--preset linear:0.02,0 --input-tokens 10 --output-tokens 5 --rates 1 --max-requests 50"
    )
    program = f"FOREIGN, LOAD, RUN = {foreign!r}, {load!r}, {str(run)!r}\n{IN_A_CORE_INSTALLATION}"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert (run / "report.html").stat().st_size > 10_000
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "packages"
    ]
    source = "\n".join(
        file.read_text(encoding="utf-8")
        for name in packages
        for file in (ROOT / name.replace(".", "/")).glob("*.py")
    )
    for name in map(_plain, declared):
        imported = "|".join(re.escape(module) for module in modules.get(name, {name}))
        used = rf"^\s*(import|from) ({imported})\b|import_module\(\"({imported})\"\)"
        assert re.search(used, source, re.M), f"{name} is demanded and never used"


def _plain(requirement: str) -> str:
    """The name in a requirement, as distributions are compared."""
    return (
        re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
        .lower()
        .replace("_", "-")
        .replace(".", "-")
    )


def test_every_fault_has_a_row_and_every_test_that_is_named_exists() -> None:
    tests = Path(__file__).parents[1]
    text = (tests.parent / "docs" / "known-faults.md").read_text(encoding="utf-8")
    rows = {int(n) for row in re.findall(r"^\| ([\d, ]+) \|", text, re.M) for n in row.split(",")}
    assert rows == set(range(1, 84))
    file = ""
    for found in re.finditer(r"`([\w/]*test_\w+\.py)?::(test_\w+)`", text):
        file = found[1] or file
        assert f"def {found[2]}(" in (tests / file).read_text(encoding="utf-8"), found[0]
