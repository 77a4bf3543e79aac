"""What workers cost: this process alone, workers of this machine, workers of a Ray cluster, in turn.

    python -m benchmarks.load.workers [--rate 190] [--duration 20] [--workers 2] [--ray ADDRESS]

CPU is the kernel's, of the processes that send the load; README.md says how it is measured.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from ampacity.loadgen.rundir.files import load_run
from benchmarks.load.bench import ITL_S, TTFT_S
from benchmarks.load.clients import ROOT, Load, ampacity
from benchmarks.load.meter import run_metered
from benchmarks.load.mock import mock_server


def ray_cpu_s() -> float:
    """Return the CPU seconds so far of Ray's own processes, without those of workers."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes()
            if b"raylet" in words.split(b"\0")[0] or b"gcs_server" in words or b"/ray/" in words:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                total += int(fields[11]) + int(fields[12])
        except OSError:
            continue
    return total / os.sysconf("SC_CLK_TCK")


def measure(load: Load, workers: int, ray: str | None, core: int | None) -> dict[str, Any]:
    """Run the load once; CPU in ms per 1,000 tokens, times in s, lateness in ms."""
    words = [sys.executable, "-m", "ampacity"]
    more = ["--ray", ray, *(["--workers", "1"] if workers == 1 else [])] if ray else []
    with tempfile.TemporaryDirectory(prefix="ampacity-bench-") as folder:
        out, before_s = Path(folder) / "run", ray_cpu_s()
        with mock_server(core, ttft_ms=TTFT_S * 1e3, itl_ms=ITL_S * 1e3) as mock:
            command = [*ampacity(words, workers).command(mock.url, load, out), *more]
            done = run_metered(
                command, core=None, ahead=False, cwd=ROOT, timeout_s=load.duration_s + 120
            )
        if done.returncode:
            raise SystemExit(f"{done.stderr[-500:]}")
        of_ray_s, run = ray_cpu_s() - before_s, load_run(out)
        stage = json.loads((out / "run.json").read_text())["stages"][-1]
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
            "Ray": 1e3 * of_ray_s / thousands,
            "start": (begin_ns - done.launched_ns) / 1e9,
            "after": (done.exited_ns - end_ns) / 1e9,
            "slip p99": 1e3 * audit["slip_p99_s"],
            "server late": mock.stats["late_p99_ms"],
            "clocks": max((c["bound_ns"] / 1e6 for c in stage.get("clocks", ())), default=0.0),
        }


def main() -> None:
    """Print a row for each run."""
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--rate", type=float, default=190)
    given.add_argument("--duration", type=float, default=20)
    given.add_argument("--workers", type=int, default=2)
    given.add_argument("--ray", metavar="ADDRESS")
    given.add_argument("--repeat", type=int, default=3)
    given.add_argument("--server-core", type=int)
    options = given.parse_args()
    load = Load(options.rate, options.duration)
    kinds = [(1, None), (options.workers, None)]
    kinds += [(options.workers, options.ray)] if options.ray else []
    for number in range(options.repeat):
        for workers, ray in kinds:
            row = measure(load, workers, ray, options.server_core)
            if not number and (workers, ray) == kinds[0]:
                print("| " + " | ".join(row) + " |\n|" + " --- |" * len(row))
            shown = (v if isinstance(v, str) else f"{v:.2f}" for v in row.values())
            print("| " + " | ".join(shown) + " |", flush=True)


if __name__ == "__main__":
    main()
