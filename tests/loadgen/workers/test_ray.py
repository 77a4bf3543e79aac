"""Workers on a Ray cluster of several nodes: the same requests, and what is lost with what dies."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from ampacity.loadgen.rundir.files import load_run
from ampacity.simulator.server.launch import Started
from tests.support.args import COMMAND_ONCE, args_of
from tests.support.processes.kills import by_id, finished, start, wait_for_stage
from tests.support.processes.ray_cluster import actors, add_node, ray_cluster
from tests.support.servers.http_server import http_server, reply
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
KEY = "sk-4f9bd1c27ae85036aa19"
SHORT = "--workload chat-short --seed 7 --salt s"
PLANNED = ["request_id", "stage", "attempt", "class", "session_id", "turn"]
PLANNED += ["input_tokens_planned", "output_tokens_planned"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
    with ray_cluster(nodes=2, cpus=2) as found:
        yield found


@pytest.fixture
def address(cluster: Any) -> str:
    return str(cluster.address)


Bodies = dict[str, dict[int, bytes]]
"""What an endpoint was asked, by run and number of the request."""


def heard_into(bodies: Bodies) -> Callable[[BaseHTTPRequestHandler], None]:
    """Return an answer to each request, of one chunk, that keeps the body."""
    piece = {"choices": [{"delta": {"content": "a b"}, "finish_reason": "stop"}]}
    usage = {"choices": [], "usage": {"prompt_tokens": 20, "completion_tokens": 2}}
    events = b"".join(b"data: %s\n\n" % json.dumps(e).encode() for e in (piece, usage))

    def post(handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers["Content-Length"]))
        if not handler.path.endswith("/chat/completions"):
            return reply(handler, status=404)
        run, _, number = handler.headers["X-Request-Id"].rpartition("-")
        bodies.setdefault(run, {})[int(number)] = body
        return reply(handler, events + b"data: [DONE]\n\n", Content_Type="text/event-stream")

    return post


def planned_of(run: Path) -> pa.Table:
    """Return the schedule's columns of a run, times from the start of their stage."""
    table = load_run(run).requests.sort_by([("request_id", "ascending")])
    starts = [stage["start_ns"] for stage in json.loads((run / "run.json").read_text())["stages"]]
    since = pc.subtract(table["scheduled_ns"], pc.take(pa.array(starts), table["stage"]))
    return table.select(PLANNED).append_column("since_ns", since)


def sent(url: str, bodies: Bodies, out: Path, options: str) -> tuple[pa.Table, dict[int, bytes]]:
    load = args_of(f"--rates 30,40 --duration 1s {SHORT} --quiet --api-key-env THE_KEY", options)
    command = [*COMMAND_ONCE, "run", url, *load, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    run_id = json.loads((out / "run.json").read_text())["run_id"]
    return planned_of(out), bodies[run_id]


@pytest.mark.parametrize("on_ray", [False, True], ids=["4 here", "4 on 2 nodes of Ray"])
def test_any_workers_send_the_same_requests(
    on_ray: bool, request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids, lengths, texts and times are those of one worker, byte for byte; no key is left."""
    monkeypatch.setenv("THE_KEY", KEY)
    bodies: Bodies = {}
    models = b'{"data": [{"id": "m"}]}'
    ray = f"--ray {request.getfixturevalue('address')}" if on_ray else ""
    with http_server(lambda handler: reply(handler, models), heard_into(bodies)) as root:
        one = sent(f"{root}/v1", bodies, tmp_path / "one", "")
        four = sent(f"{root}/v1", bodies, tmp_path / "four", f"--workers 4 {ray}")
    assert len(one[1]) > 40
    assert four[0].equals(one[0])
    assert four[1] == one[1]
    stage = json.loads((tmp_path / "four" / "run.json").read_text())["stages"][0]
    assert len(stage["audit"]["workers"]) == 4
    assert len({worker["node"] for worker in stage["audit"]["workers"]}) == (2 if on_ray else 1)
    if on_ray:
        for clock in stage["clocks"]:  # of one machine: they are one clock
            assert abs(clock["ahead_ns"]) <= clock["bound_ns"] < 20e6
        session = Path(request.getfixturevalue("cluster").head_node.get_session_dir_path())
        written = [path for path in session.rglob("*") if path.is_file()]
        assert len(written) > 10
        assert not [path for path in written if KEY.encode() in path.read_bytes()]


@pytest.mark.parametrize("victim", ["node", "worker"])
def test_what_dies_leaves_its_share_unfinished_and_the_run_goes_on(
    victim: str, cluster: Any, address: str, server: Started, tmp_path: Path
) -> None:
    node, run = add_node(cluster, 2), tmp_path / "run"
    load = args_of(f"--rates 20,30 --duration 4s {SHORT} --workers 5 --ray {address}")
    process = start("run", server.url, *load, "--out", run)
    wait_for_stage(run, 1.5)
    raylet = node.all_processes["raylet"][0].process.pid
    ours = [pid for pid, parent in actors().items() if parent == raylet]
    assert ours
    if victim == "node":
        cluster.remove_node(node, allow_graceful=False)
    else:
        os.kill(ours[0], signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    if victim == "worker":
        cluster.remove_node(node)
    assert process.returncode == 0, err
    meta = json.loads((run / "run.json").read_text())
    lost = meta["stages"][0]
    assert meta["status"] == "complete"
    assert "died" in lost["audit"]["client_limited_reason"]
    assert (lost["ended_early"], {s["offered_rps"] for s in meta["stages"]}) == (None, {20.0, 30.0})
    table = load_run(run).requests
    rows = table.filter(pc.equal(table["stage"], 0)).to_pylist()
    assert len(rows) == lost["scheduled_requests"]
    assert len({r["request_id"] for r in rows}) == len(rows)
    owed = {r["worker"] for r in rows if r["status"] == "unfinished"}
    assert len(owed) == (len(ours) if victim == "node" else 1)
    assert {r["status"] for r in rows if r["worker"] not in owed} == {"ok"}
    for worker in owed:  # what it had sent back is kept
        assert any(r["status"] == "ok" for r in rows if r["worker"] == worker)


def test_a_driver_that_is_killed_ends_the_load_and_keeps_its_records(
    address: str, server: Started, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    load = args_of(f"--rates 40 --duration 6s {SHORT} --workers 2 --ray {address}")
    process = start("run", server.url, *load, "--out", run)
    wait_for_stage(run, 2.0)
    process.kill()
    killed_ns = time.monotonic_ns()
    process.communicate(timeout=60)
    wait_until(lambda: not actors(), 20.0)
    assert time.monotonic_ns() - killed_ns < 10e9
    table = load_run(run).requests
    assert (killed_ns - pc.max(table["ended_ns"]).as_py()) / 1e9 < 1.0
    status, _, err = finished("run", "--resume", run)
    assert status == 0, err
    assert set(by_id(run)) > set(table["request_id"].to_pylist())
