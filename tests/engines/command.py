"""The command line, driven as a user drives it, and what it leaves behind."""

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tests.engines.relay import Relay, WireRequest
from tests.support.args import COMMAND_ONCE, args_of

RUN_LIMIT_S = 100.0


@dataclass(frozen=True)
class Run:
    """What one call of the command line left behind; times of ``requests`` as in
    docs/run-directory.md."""

    path: Path
    exit_status: int
    stdout: str
    stderr: str

    @property
    def requests(self) -> list[dict[str, Any]]:
        return _rows(self.path / "requests.parquet")

    @property
    def server(self) -> list[dict[str, Any]]:
        return _rows(self.path / "server.parquet")

    @property
    def meta(self) -> dict[str, Any]:
        return _object(self.path / "run.json")

    @property
    def summary(self) -> dict[str, Any]:
        return _object(self.path / "summary.json")


def _rows(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return rows


def _object(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def ampacity_command(*args: object) -> list[str]:
    """The command line as a process of its own."""
    return [*COMMAND_ONCE, *args_of(*args)]


def ampacity(
    out: Path, command: str, *args: object, check: bool = True, limit_s: float = RUN_LIMIT_S
) -> Run:
    """Run ``ampacity COMMAND ARGS --out OUT`` for at most ``limit_s``; with ``check`` it must
    succeed."""
    done = subprocess.run(
        ampacity_command(command, *args, "--out", out),
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert not check or done.returncode == 0, done.stderr
    return Run(out, done.returncode, done.stdout, done.stderr)


def answered(run: Run, relay: Relay) -> dict[int, WireRequest]:
    """What was answered on the wire for each request_id of the run; probing requests are left out."""
    pattern = re.compile(re.escape(run.meta["run_id"]) + r"-(\d+)")
    found = [
        (pattern.fullmatch(wire.id), wire) for wire in relay.requests() if wire.status is not None
    ]
    numbered = {int(match[1]): wire for match, wire in found if match}
    assert len(numbered) == sum(match is not None for match, _ in found), (
        "a request was answered twice"
    )
    return numbered
