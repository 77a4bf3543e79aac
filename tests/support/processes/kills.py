"""Start runs, kill them at a moment, and see what they left."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from ampacity.loadgen.rundir.files import load_run, read_stream, streams_of
from tests.support.args import COMMAND
from tests.support.waiting import wait_until

WORKER = b"ampacity.loadgen.workers.worker"


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    """Start a command in a session of its own, as a terminal does."""
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finished(*arguments: str | Path, timeout_s: float = 100.0) -> tuple[int, str, str]:
    """Run a command; return (exit status, stdout, stderr)."""
    process = start(*arguments)
    out, err = process.communicate(timeout=timeout_s)
    return process.returncode, out, err


def stages_of(run: Path) -> list[dict[str, Any]]:
    """Return what run.json has of the stages; none where there is no run.json yet."""
    if not (run / "run.json").is_file():
        return []
    found: list[dict[str, Any]] = json.loads((run / "run.json").read_text())["stages"]
    return found


def wait_for_stage(run: Path, passed_s: float, within_s: float = 40.0) -> None:
    """Wait until the first stage has gone on for ``passed_s``."""

    def goes_on() -> bool:
        found = stages_of(run)
        return bool(found) and time.monotonic_ns() > found[0]["start_ns"] + passed_s * 1e9

    wait_until(goes_on, within_s)


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """Return the ids of a run's worker processes (Linux)."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children if WORKER in Path(f"/proc/{pid}/cmdline").read_bytes()]


def kill(process: subprocess.Popen[str], victim: str = "parent") -> int:
    """Kill the run, or its first worker, with SIGKILL; return when, monotonic ns."""
    pids = [process.pid] if victim == "parent" else workers_of(process)[:1]
    at_ns = time.monotonic_ns()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return at_ns


def lost_s(run: Path, killed_ns: int, passed_s: float = 0.5) -> float | None:
    """Return the time before a kill of which no record is left, at most over the processes.

    Less three mean pauses between two answers. None where no stage had gone on for ``passed_s``, or
    none was going on."""
    stages = stages_of(run)
    if not stages or stages[-1].get("drained_ns") or killed_ns > stages[-1]["end_ns"]:
        return None
    if killed_ns < stages[-1]["start_ns"] + passed_s * 1e9:
        return None
    tables = [read_stream(path) for path in streams_of(run)]
    last = [pc.max(table["ended_ns"]).as_py() or stages[-1]["start_ns"] for table in tables]
    # with workers the parent has a stream of its own, which is empty
    ends = [ns for ns, table in zip(last, tables, strict=True) if table.num_rows or len(last) == 1]
    pause_s = len(ends or last) / (stages[-1]["offered_rps"] or stages[-1]["concurrency"])
    return (killed_ns - min(ends or [stages[-1]["start_ns"]])) / 1e9 - 3 * pause_s


def by_id(run: Path) -> dict[int, tuple[int, int]]:
    """Return {id: (input tokens, output tokens)} of the requests that have a record."""
    columns = ("request_id", "input_tokens_planned", "output_tokens_planned")
    table = load_run(run).requests
    values = (table[name].to_pylist() for name in columns)
    return {number: (sent, received) for number, sent, received in zip(*values, strict=True)}


Planned = dict[tuple[int, int], tuple[int, int, int]]


def planned(run: Path) -> Planned:
    """Return {(schedule, place in it): (input tokens, output tokens, records)} of a run.

    Without the stages that were repeated because other work disturbed the client: their requests
    are the same once more, under other ids."""
    first: dict[int, int] = {}  # the stage with which a schedule began
    for stage in (stages := stages_of(run)):
        first.setdefault(stage["schedule"], stage["index"])
    counted = set(first.values())
    for stage in stages:
        if stage.get("continues") in counted:
            counted.add(stage["index"])
    schedules = {stage["index"]: stage["schedule"] for stage in stages}
    table = load_run(run).requests
    rows = table.filter(pc.equal(table["attempt"], 0)).select(
        ["stage", "request_id", "input_tokens_planned", "output_tokens_planned"]
    )
    rows = [tuple(row.values()) for row in rows.sort_by("request_id").to_pylist()]
    begins: dict[int, int] = {}
    found: Planned = {}
    for stage, number, sent, received in rows:
        if stage in counted:
            place = (schedules[stage], number - begins.setdefault(schedules[stage], number))
            found[place] = (sent, received, 1 + found.get(place, (0, 0, 0))[2])
    return found
