"""Time and memory of ``ampacity workload fit`` on a log of two million rows: python -m
benchmarks.workloads.large_log [ROWS].
"""

import resource
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np


def write_log(path: Path, rows: int) -> None:
    """Write Poisson arrivals at 20/s and log-normal lengths, as the Azure 2024 traces have it."""
    rng = np.random.default_rng(1)
    times = np.cumsum(rng.exponential(0.05, rows))
    inputs, outputs = (np.maximum(rng.lognormal(mu, 1, rows), 1).astype(int) for mu in (7, 5))
    start = datetime(2024, 5, 10, tzinfo=UTC)
    with path.open("w", encoding="ascii") as file:
        file.write("TIMESTAMP,ContextTokens,GeneratedTokens\n")
        for at, n, m in zip(times.tolist(), inputs, outputs, strict=True):
            file.write(f"{start + timedelta(seconds=at):%Y-%m-%d %H:%M:%S.%f}0+00:00,{n},{m}\n")


def main() -> None:
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 2_000_000
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "big.csv"
        write_log(log, rows)
        began = time.monotonic()
        command = [
            sys.executable,
            "-m",
            "ampacity",
            "workload",
            "fit",
            str(log),
            "-o",
            f"{folder}/big.yaml",
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(
            f"{rows:,} rows, {log.stat().st_size / 1e6:.0f} MB: {time.monotonic() - began:.1f} "
            f"s, {used.ru_utime:.1f} s of CPU, "
            f"{used.ru_maxrss / 1024:.0f} MB"
        )


if __name__ == "__main__":
    main()
