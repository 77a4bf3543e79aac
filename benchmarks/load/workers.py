"""What workers cost: this process alone, workers of this machine, workers of a Ray cluster, in turn.

    python -m benchmarks.load.workers [--rate 190] [--duration 20] [--workers 2] [--ray ADDRESS]

`--ahead` (root) gives all of them the same priority, above other work on the machine: else Linux
shares the cores among sessions, and each node of Ray is one of its own.

CPU is the kernel's, of the processes that send the load; README.md says how it is measured.
"""

import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from ampacity.loadgen.rundir.files import load_run
from benchmarks.load.bench import ITL_S, TTFT_S
from benchmarks.load.clients import ROOT, Load, ampacity
from benchmarks.load.meter import put_ahead, run_metered
from benchmarks.load.mock import mock_server
from benchmarks.options import parser


def raylets() -> list[int]:
    """Return the processes that start Ray's workers, which have the priority of their node."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (folder / "comm").read_text().strip() == "raylet":
                found.append(int(folder.name))
    return found


def measure(load: Load, workers: int, ray: str | None, ahead: bool) -> dict[str, Any]:
    """Run the load once; CPU in ms per 1,000 tokens, times in s, lateness in ms."""
    words = [sys.executable, "-m", "ampacity"]
    more = ["--ray", ray, *(["--workers", "1"] if workers == 1 else [])] if ray else []
    with tempfile.TemporaryDirectory(prefix="ampacity-bench-") as folder:
        out = Path(folder) / "run"
        with mock_server(ttft_ms=TTFT_S * 1e3, itl_ms=ITL_S * 1e3) as mock:
            for pid in [mock.pid, *raylets()] if ahead else ():
                put_ahead(pid)
            command = [*ampacity(words, workers).command(mock.url, load, out), *more]
            done = run_metered(
                command, core=None, ahead=ahead, cwd=ROOT, timeout_s=load.duration_s + 120
            )
        if done.returncode:
            raise SystemExit(f"{done.stderr[-500:]}")
        run = load_run(out)
        first, *_, stage = json.loads((out / "run.json").read_text())["stages"] * 2
        table = run.requests.filter(pc.equal(run.requests["stage"], stage["index"]))
        thousands = pc.sum(table["output_tokens"]).as_py() / 1e3
        begin_ns, end_ns = stage["start_ns"], stage["drained_ns"]
        audit, length_s = stage["audit"], (end_ns - begin_ns) / 1e9
        senders_s = length_s * sum(w["cpu_fraction"] for w in audit["workers"] or [audit])
        tree_s = done.cpu_between_s(begin_ns, end_ns) - (0.0 if ray else senders_s)
        return {
            "where": f"{workers} on Ray" if ray else f"{workers} here",
            "senders": 1e3 * senders_s / thousands,
            "parent": 1e3 * tree_s / thousands if ray or workers > 1 else 0.0,
            "start": (first["start_ns"] - done.launched_ns) / 1e9,
            "after": (done.exited_ns - end_ns) / 1e9,
            "slip p99": 1e3 * audit["slip_p99_s"],
            "server late": mock.stats["late_p99_ms"],
            "clocks": max((c["bound_ns"] / 1e6 for c in stage.get("clocks", ())), default=0.0),
        }


def main() -> None:
    """Print a row for each run."""
    given = parser(__doc__, workers=2, repeat=3)
    given.add_argument("--rate", type=float, default=190)
    given.add_argument("--duration", type=float, default=20)
    given.add_argument("--ray", metavar="ADDRESS")
    given.add_argument("--ahead", action="store_true")
    options = given.parse_args()
    load = Load(options.rate, options.duration)
    kinds = [(1, None), (options.workers, None)]
    kinds += [(options.workers, options.ray)] if options.ray else []
    for number in range(options.repeat):
        for workers, ray in kinds:
            row = measure(load, workers, ray, options.ahead)
            if not number and (workers, ray) == kinds[0]:
                print("| " + " | ".join(row) + " |\n|" + " --- |" * len(row))
            shown = (v if isinstance(v, str) else f"{v:.2f}" for v in row.values())
            print("| " + " | ".join(shown) + " |", flush=True)


if __name__ == "__main__":
    main()
