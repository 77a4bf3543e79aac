"""How long a schedule of a million requests takes, and how much memory: ``python -m
benchmarks.workloads.schedule_speed``.
"""

import resource
import sys
import tempfile
import time
from pathlib import Path

from ampacity.workloads.profile import load_workload
from ampacity.workloads.schedule import open_schedule

REQUESTS, DURATION_S = 1_000_000, 1000.0
BAR_S, BAR_BYTES = 15.0, 2**30
FILES = {
    "a mix of three classes": "classes:\n  a: {weight: 7, like: chat}\n  b: {weight: 2, like: "
    "rag, correlation: 0.3, "
    "cancel: {share: 0.1, after_ms: 500}}\n  c: {like: code, adapters: {count: 100, zipf: 1.1}}\n",
    "300 bursty clients": "like: chat\nclients: {count: 300, zipf: 1.2, arrivals: 'gamma:cv=3'}\n",
}


def main() -> int:
    """Print a line for each workload; 1 where a bar is broken."""
    broken = False
    with tempfile.TemporaryDirectory() as folder:
        names = {"chat": "chat"}
        for k, (title, text) in enumerate(FILES.items()):
            names[title] = str(Path(folder, f"{k}.yaml"))
            Path(names[title]).write_text(text)
        for title, name in names.items():
            workload = load_workload(name)
            began_s = time.perf_counter()
            plan = open_schedule(
                workload, rate_rps=REQUESTS / DURATION_S, duration_s=DURATION_S, seed=1, stage=0
            )
            took_s = time.perf_counter() - began_s
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
                1 if sys.platform == "darwin" else 1024
            )
            broken |= took_s > BAR_S or peak > BAR_BYTES
            print(
                f"{title:24} {len(plan):,} requests in {took_s:.2f} s, at most "
                f"{peak / 1e6:.0f} MB of the process so far"
            )
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
