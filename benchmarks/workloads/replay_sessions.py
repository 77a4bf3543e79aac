"""Replays recorded agent sessions against the simulator with a prefix cache, and compares turn for
turn.

python -m benchmarks.workloads.replay_sessions [--sessions 200] [--below 100000] [--users 20] [--virtual]

The sessions are those of tests/data/traces/agentic_coding_requests.csv.gz (kv-cache-tester, 710
recorded sessions of a coding agent and 63 of its helpers) whose largest prompt has fewer tokens
than ``--below``. Printed: cached tokens on the wire beside those that the trace itself counts as
shared with the turn before, planned and realised pauses, and the order within every session.
"""

import contextlib
import csv
import gzip
import io
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from benchmarks.options import parser

TRACE = Path(__file__).parents[2] / "tests" / "data" / "traces" / "agentic_coding_requests.csv.gz"
FACE = {"prompt_tokens_details": True, "chunk_tokens": 32}
BLOCK = 64  # of the trace's counts
ENGINE = (
    "linear:0.0005,0.000005,prefix_caching=on"  # no answer waits long, and no prefix is thrown out
)


def chosen(sessions: int, below: int) -> dict[str, list[dict[str, str]]]:
    """The first ``sessions`` sessions of the trace whose prompts all have fewer than ``below``
    tokens; the rows that a replay plays: those with an answer."""
    held: dict[str, list[dict[str, str]]] = defaultdict(list)
    with gzip.open(TRACE, "rt", newline="") as file:
        for row in csv.DictReader(file):
            if int(row["output_tokens"]) > 0:
                held[row["session"]].append(row)
    small = {
        s: rows for s, rows in held.items() if max(int(r["input_tokens"]) for r in rows) < below
    }
    return dict(list(small.items())[:sessions])


def written(held: dict[str, list[dict[str, str]]], folder: Path) -> Path:
    """The sessions as a trace of their own."""
    path = folder / "sessions.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(next(iter(held.values()))[0]))
        writer.writeheader()
        writer.writerows(row for rows in held.values() for row in rows)
    return path


def replay_virtually(
    held: dict[str, list[dict[str, str]]], users: int, folder: Path
) -> dict[str, Any]:
    """As ``replay``, in virtual time and with all pauses as recorded."""
    from ampacity.experiments.virtual.playback import play
    from ampacity.simulator.models.hardware import find_deployment
    from ampacity.workloads.replay import replayed
    from ampacity.workloads.trace_cuts import Replay
    from ampacity.workloads.traces.read import read_trace

    deployment = find_deployment(ENGINE)
    deployment = replace(deployment, config=replace(deployment.config, block_tokens=BLOCK))
    schedule = replayed(read_trace(written(held, folder), timed=False), Replay(), 1).schedule
    played = play(deployment, schedule, seed=1, users=users)
    sent, outcome = played.schedule, played.outcome
    assert sent.session is not None
    assert sent.turn is not None
    columns = {
        "session_id": np.char.mod("%d", sent.session),
        "turn": sent.turn,
        "input_tokens_planned": sent.input_tokens,
        "output_tokens_planned": sent.output_tokens,
        "input_tokens": sent.input_tokens,
        "cached_tokens": outcome.cached_tokens,
        "scheduled_ns": np.rint(sent.scheduled_s * 1e9).astype(np.int64),
        "dispatched_ns": np.rint(sent.scheduled_s * 1e9).astype(np.int64),
        "ended_ns": np.rint(outcome.finish_s * 1e9).astype(np.int64),
    }
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    records = [dict(zip(columns, row, strict=True)) | {"status": "ok"} for row in rows]
    return compared(list(held.values()), records, float("inf"))


def replay(
    held: dict[str, list[dict[str, str]]],
    users: int,
    max_think_s: float,
    folder: Path,
    seed: int = 1,
) -> dict[str, Any]:
    """Play the sessions with ``ampacity run``; what came of it beside what the trace says.

    The trace and the run directory stay in ``folder``."""
    from typer.main import get_command

    from ampacity.cli.app import app
    from ampacity.simulator.server.launch import start_in_process

    path, out = written(held, folder), folder / "run"
    began_s = time.monotonic()
    with start_in_process(ENGINE, face=FACE) as server, apart(server.process.pid):
        arguments: list[object] = [
            "run",
            server.url,
            "--trace",
            path,
            "--concurrency",
            users,
            "--out",
            out,
        ]
        arguments += ["--seed", seed, "--max-think", f"{max_think_s}s", "--workers", 1]
        with contextlib.redirect_stdout(io.StringIO()):
            get_command(app).main(list(map(str, arguments)), standalone_mode=False)
    run = json.loads((out / "run.json").read_text())
    rows = pq.read_table(out / "requests.parquet").to_pylist()
    return {
        **compared(list(held.values()), rows, max_think_s),
        "took_s": time.monotonic() - began_s,
        "run": run,
    }


@contextlib.contextmanager
def apart(server_pid: int) -> Iterator[None]:
    """Give the server one core and this process the others for a while, where there are two.

    Else the two take the same core from each other, and a turn waits for it."""
    mine = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(mine) < 2:
        yield
        return
    for thread in Path(f"/proc/{server_pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), mine[:1])
    os.sched_setaffinity(0, mine[1:])
    try:
        yield
    finally:
        os.sched_setaffinity(0, mine)


def compared(
    held: list[list[dict[str, str]]], rows: list[dict[str, Any]], max_think_s: float
) -> dict[str, Any]:
    """The records of a replay beside the recorded sessions, turn for turn; sessions that were not
    answered as a whole are left out and show in ``played_whole``."""
    played: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        played[row["session_id"] or f"lone {row['request_id']}"].append(row)
    for turns in played.values():
        turns.sort(key=lambda row: row["turn"] or 0)

    def lengths(turns: Any, *names: str) -> tuple[Any, ...]:
        return tuple(tuple(int(turn[name]) for name in names) for turn in turns)

    planned = "input_tokens_planned", "output_tokens_planned"
    by_lengths = {lengths(turns, *planned): turns for turns in played.values()}
    off_ns, slip_ns, in_order, whole = [], [], True, 0
    cached = sent = own = asked = 0
    for recorded in held:
        turns = by_lengths.get(lengths(recorded, "input_tokens", "output_tokens"))
        if turns is None or any(turn["status"] != "ok" for turn in turns):
            continue
        whole += 1
        for k, (said, got) in enumerate(zip(recorded, turns, strict=True)):
            cached, sent = cached + (got["cached_tokens"] or 0), sent + got["input_tokens"]
            asked += int(said["input_tokens"])
            if k:
                own += min(
                    int(said["blocks_shared_with_prev_turn"]) * BLOCK, int(said["input_tokens"])
                )
                slip_ns.append(got["dispatched_ns"] - got["scheduled_ns"])
                in_order &= got["dispatched_ns"] >= turns[k - 1]["ended_ns"]
                if said["think_time_s"]:
                    pause_ns = round(min(float(said["think_time_s"]), max_think_s) * 1e9)
                    off_ns.append(got["scheduled_ns"] - turns[k - 1]["ended_ns"] - pause_ns)
    late = np.array(slip_ns or [0])
    return {
        "sessions": len(held),
        "played_whole": whole,
        "requests": len(rows),
        "tokens": sent,
        "own_share": own / max(asked, 1),
        "wire_share": cached / max(sent, 1),
        "in_order": in_order,
        "pauses": len(off_ns),
        "pause_off_s": float(np.abs(off_ns).max(initial=0)) / 1e9,
        "late_s": {f"p{q:g}": float(np.quantile(late, q / 100)) / 1e9 for q in (50, 90, 99)},
        "late_within_1ms": float(np.mean(late <= 1_000_000)),
    }


def main() -> None:
    made = parser(__doc__, sessions=200, below=100_000, users=20, max_think=0.5)
    made.add_argument("--virtual", action="store_true", help="in virtual time, all pauses whole")
    given = made.parse_args()
    held = chosen(given.sessions, given.below)
    with tempfile.TemporaryDirectory() as folder:
        if given.virtual:
            found = replay_virtually(held, given.users, Path(folder))
        else:
            found = replay(held, given.users, given.max_think, Path(folder))
    found.pop("run", None)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
