"""How long a user waits: launch to the end of ``--help``, and launch to the first request at the
server.

python -m benchmarks.load.cli_start [--repeat 5]

CPU is given beside the time: on a machine that others use it is the figure to compare. Byte code is
cached, as it is for a user: PYTHONDONTWRITEBYTECODE in the environment would cost 0.2 s.
"""

import bisect
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.load.clients import ROOT, Load, ampacity
from benchmarks.load.mock import MockError, exit_with, mock_server
from benchmarks.options import parser

FIRST_REQUEST_MAX_S = 0.7
SAMPLE_EVERY_S = 0.004

Waited = tuple[float, float]  # wall time and CPU, seconds from the launch


def watched(command: list[str]) -> tuple[int, list[int], list[float]]:
    """Run a command to its end: its launch, and samples of its CPU seconds so far. Times monotonic
    ns."""
    began_ns = time.monotonic_ns()
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    at_ns, cpu_s = [began_ns], [0.0]
    while process.poll() is None:
        with contextlib.suppress(OSError):  # it has just ended
            cpu_s.append(sum(_cpu_s(task) for task in Path(f"/proc/{process.pid}/task").iterdir()))
            at_ns.append(time.monotonic_ns())
        time.sleep(SAMPLE_EVERY_S)
    if process.returncode:
        raise MockError(f"{command[0]} ended with status {process.returncode}")
    return began_ns, [*at_ns, time.monotonic_ns()], [*cpu_s, cpu_s[-1]]


def _cpu_s(task: Path) -> float:
    return int((task / "schedstat").read_text().split()[0]) / 1e9


def help_s(start: list[str]) -> Waited:
    """Measure from launch to exit of ``--help``."""
    began_ns, at_ns, cpu_s = watched([*start, "--help"])
    return (at_ns[-1] - began_ns) / 1e9, cpu_s[-1]


def first_request_s(start: list[str]) -> tuple[Waited, Waited]:
    """Measure from launch to the first request of any kind, and to the first of the load."""
    with tempfile.TemporaryDirectory(prefix="ampacity-start-") as directory:
        out = Path(directory) / "run"
        with mock_server(ttft_ms=5, itl_ms=1) as mock:
            command = ampacity(start).command(mock.url, Load(20, 0.5, output_tokens=8), out)
            began_ns, at_ns, cpu_s = watched(command)
    arrived_ns = {name: found[0].arrival_ns for name, found in mock.served.items()}
    of_load = [
        at for name, at in arrived_ns.items() if "-probe-" not in name and not name.endswith("--1")
    ]

    def waited(until_ns: int) -> Waited:
        return (until_ns - began_ns) / 1e9, cpu_s[bisect.bisect_left(at_ns, until_ns)]

    return waited(min(arrived_ns.values())), waited(min(of_load))


def main() -> int:
    given = parser(__doc__, repeat=5)
    given.add_argument(
        "--check", action="store_true", help=f"exit 1 beyond {FIRST_REQUEST_MAX_S} s"
    )
    options = given.parse_args()
    start = [str(Path(sys.executable).with_name("ampacity"))]
    with tempfile.TemporaryDirectory(prefix="ampacity-byte-code-") as byte_code:
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = byte_code
        help_s(start)
        first_request_s(start)  # compiles everything, and warms the disk cache
        helps = [help_s(start) for _ in range(options.repeat)]
        firsts, loads = zip(*[first_request_s(start) for _ in range(options.repeat)], strict=True)
    for name, waits in (
        ("--help", helps),
        ("first request (a probe)", firsts),
        ("first request of the load", loads),
    ):
        for kind, values in zip(("time", "CPU"), zip(*waits, strict=True), strict=True):
            print(
                f"{name:26} {kind:4} median {statistics.median(values):.2f} s, best "
                f"{min(values):.2f} s"
            )
    median_s = statistics.median(wall_s for wall_s, _ in firsts)
    return 1 if options.check and median_s > FIRST_REQUEST_MAX_S else 0


if __name__ == "__main__":
    exit_with(main)
