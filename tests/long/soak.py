"""A soak against the embedded simulator: memory, arrivals and windows over minutes.

    python -m tests.long.soak --minutes 20

Exit status 1 where a check fails; each is printed with its figure.
"""

import argparse
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np

from ampacity.loadgen.rundir.files import load_run
from ampacity.simulator.server.launch import start_in_process

RPS, WINDOW_S = 50, 60
GROWTH_MAX = 0.01  # of the client's memory ...
SETTLED_AFTER = 0.5  # ... after this part of the soak, and no earlier than a window


def soak(run: Path, minutes: float) -> int:
    """Run the soak; return its exit status."""
    load = f"--rps {RPS} --duration {minutes}m --window {WINDOW_S}s --input-tokens 200"
    with start_in_process("linear:0.01,0.0001") as server:
        words = f"soak {server.url} {load} --output-tokens 40 --slo ttft_p50=1s --out".split()
        return subprocess.call([sys.executable, "-m", "ampacity", *words, str(run)])


def checks(path: Path, minutes: float) -> dict[str, tuple[bool, str]]:
    """Return, by its name, whether each check holds, and its figure."""
    run = load_run(path)
    stages, rows = run.meta["stages"], run.requests
    rss = np.array([stage["audit"]["rss_bytes"] for stage in stages]) / 1e6
    first = max(1, round(SETTLED_AFTER * len(rss)) - 1)
    growth = rss[first:].max() / rss[first] - 1
    ids, due_ns = np.sort(rows["request_id"].to_numpy()), np.sort(rows["scheduled_ns"].to_numpy())
    bounds = [(a["end_ns"], b["start_ns"]) for a, b in pairwise(stages)]
    expected = RPS * 60 * minutes
    failed = len(rows) - rows["status"].to_pylist().count("ok")
    seam_s = max(np.diff(due_ns).max() / 1e9, 0.0)
    return {
        "memory": (growth <= GROWTH_MAX, f"{growth:+.2%}: " + " ".join(f"{mb:.1f}" for mb in rss)),
        "nothing lost": (bool((ids == np.arange(len(ids))).all()), f"{len(ids)} requests"),
        "rate": (abs(len(ids) - expected) < 5 * expected**0.5, f"{len(ids)} of {expected:.0f}"),
        "answered": (failed == 0, f"{failed} failed"),
        "no gap between windows": (all(a == b for a, b in bounds), f"{len(stages)} windows"),
        "no pause in arrivals": (seam_s < 20 / RPS, f"{seam_s:.3f} s at most"),
    }


def main() -> int:
    """Run the soak and print the checks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=20.0)
    minutes = parser.parse_args().minutes
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        status = soak(run, minutes)
        found = checks(run, minutes) | {"exit status": (status in (0, 3), str(status))}
    for name, (holds, figure) in found.items():
        print(f"{'ok' if holds else 'FAILED'}  {name}: {figure}")
    return not all(holds for holds, _ in found.values())


if __name__ == "__main__":
    sys.exit(main())
