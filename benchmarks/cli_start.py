"""How long a user waits: launch to the end of ``--help``, and launch to the first request at the server.

python -m benchmarks.cli_start [--repeat 5]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.clients import ROOT, Load, ampacity
from benchmarks.mock import MockError, mock_server

FIRST_REQUEST_MAX_S = 0.7


def help_s(start: list[str]) -> float:
    """Seconds from launch to exit of ``--help``."""
    began_ns = time.monotonic_ns()
    subprocess.run([*start, "--help"], stdout=subprocess.DEVNULL, check=True)
    return (time.monotonic_ns() - began_ns) / 1e9


def first_request_s(start: list[str]) -> tuple[float, float]:
    """Seconds from launch to the arrival of the first request of any kind, and of the first of the load."""
    with tempfile.TemporaryDirectory(prefix="ampacity-start-") as directory:
        out = Path(directory) / "run"
        with mock_server(ttft_ms=5, itl_ms=1) as mock:
            command = ampacity(start).command(mock.url, Load(20, 0.5, output_tokens=8), out)
            began_ns = time.monotonic_ns()
            subprocess.run(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True, cwd=ROOT
            )
    arrived_ns = {name: found[0].arrival_ns for name, found in mock.served.items()}
    of_load = [at for name, at in arrived_ns.items() if "-probe-" not in name and not name.endswith("--1")]
    return (min(arrived_ns.values()) - began_ns) / 1e9, (min(of_load) - began_ns) / 1e9


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--check", action="store_true", help=f"exit 1 beyond {FIRST_REQUEST_MAX_S} s")
    options = parser.parse_args()
    start = [str(Path(sys.executable).with_name("ampacity"))]
    helps = [help_s(start) for _ in range(options.repeat)]
    firsts, loads = zip(*[first_request_s(start) for _ in range(options.repeat)], strict=True)
    for name, values in (
        ("--help", helps),
        ("first request (a probe)", firsts),
        ("first request of the load", loads),
    ):
        print(f"{name:26} median {statistics.median(values):.2f} s, best {min(values):.2f} s")
    return 1 if options.check and statistics.median(firsts) > FIRST_REQUEST_MAX_S else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MockError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        sys.exit(2)
