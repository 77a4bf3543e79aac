"""What a run does about a server's connections: found out by the probe, written down, acted upon."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from ampacity.analysis.contract.summary import Summary
from ampacity.analysis.stage_warnings import Facts
from ampacity.analysis.stage_warnings import resent as resent_rule
from ampacity.analysis.stage_warnings import unsolicited as unsolicited_rule
from tests.support.args import Cli, args_of
from tests.support.contract import struct_of
from tests.support.servers.fault_server import FaultServer

LOAD = args_of("--rates 60 --duration 1s --input-tokens 5 --output-tokens 4 --seed 1")


def played(
    cli: Cli, server: FaultServer, out: Path, *options: str
) -> tuple[list[dict[str, Any]], dict[str, Any], int]:
    """(rows, run.json, connections of the run's own requests) of a run against a server of one
    fault."""
    done = cli("run", server.url, *LOAD, *options, "--out", out)
    assert done.returncode == 0, done.stderr
    meta = json.loads((out / "run.json").read_text())
    name = meta["run_id"] + "-"
    own = [r for r in server.requests if r.headers.get("x-request-id", "").startswith(name)]
    rows = pq.read_table(out / "requests.parquet").to_pylist()
    return rows, meta, len({r.connection for r in own})


def statuses(rows: list[dict[str, Any]]) -> Mapping[str, int]:
    return Counter(row["status"] for row in rows)


@pytest.mark.parametrize(
    ("fault", "workers"),
    [("close_after_answer", "1"), ("says_close", "1"), ("http_10", "1"), ("http_10", "2")],
)
def test_a_server_that_closes_after_each_answer_gets_a_connection_for_each_request(
    cli: Cli, fault: str, workers: str, tmp_path: Path
) -> None:
    """Closed without a word, with one, or because HTTP/1.0 has no other end of a body: nothing is
    sent twice."""
    with FaultServer(models=(f"fault:{fault}",)) as server:
        rows, meta, connections = played(cli, server, tmp_path / "run", "--workers", workers)
    assert statuses(rows) == {"ok": len(rows)}
    assert len(rows) > 40
    assert connections == len(rows)
    assert meta["endpoint"]["keeps_alive"] is False
    assert meta["stages"][0]["audit"]["resent"] == 0
    assert any("each request opens its own" in note for note in meta["notes"])


@pytest.mark.parametrize("options", [(), ("--connections", "new")])
def test_a_server_that_keeps_connections_keeps_them_unless_each_is_asked_to_be_new(
    cli: Cli, options: tuple[str, ...], tmp_path: Path
) -> None:
    with FaultServer() as server:
        rows, meta, connections = played(cli, server, tmp_path / "run", *options)
    assert (connections < len(rows)) is not bool(options)
    assert connections <= len(rows)
    assert meta["endpoint"]["keeps_alive"] is (None if options else True)
    assert options or not any("connection" in note for note in meta["notes"])


@pytest.mark.parametrize(
    ("resent", "said"),
    [(1, "was closing the connection just then"), (30, "the server drops connections")],
)
def test_many_dropped_connections_are_the_servers_doing_and_few_are_a_race(
    resent: int, said: str
) -> None:
    def told(*stages: tuple[int, int]) -> str | None:
        listed = [{"resent": again, "requests": n} for again, n in stages]
        return resent_rule(Facts(struct_of(Summary, {"stages": listed})))

    text = told((resent, 60), (0, 40))
    assert text is not None
    assert said in text
    assert f"{resent} of 100 requests ({resent / 100:.1%}) were sent a second time" in text
    assert told((0, 60)) is None


@pytest.mark.parametrize("n", [0, 3])
def test_answers_that_nobody_asked_for_are_said(n: int) -> None:
    listed = [{"unsolicited": n, "requests": 60}, {"unsolicited": 0, "requests": 40}]
    text = unsolicited_rule(Facts(struct_of(Summary, {"stages": listed})))
    assert (text is None) == (n == 0)
    assert text is None or "something came 3 times that no request had asked for" in text
