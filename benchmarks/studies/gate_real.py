"""How often does the gate cry wolf over runs in real time, on whatever else the machine is doing?

    .venv/bin/python -m benchmarks.studies.gate_real --pairs 20        # 70 s a run: 47 minutes

Each pair is two runs of the command line against one simulated engine on 127.0.0.1, with the same
seed: a baseline and a candidate. The noise is that of this machine. The last --changed pairs have
candidates on an engine whose steps are 10 % longer.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.options import parser

AMPACITY = str(Path(sys.executable).with_name("ampacity"))
WORKLOAD = [
    "--input-tokens",
    "lognormal:p50=300,p99=2000",
    "--output-tokens",
    "lognormal:p50=60,p99=300",
]
EQUAL = "llama3-8b@h100"
# factors of 0.8 and 0.5, and 0.002 s, each slower by 1.1
SLOWER = "llama3-8b@h100,bandwidth_factor=0.7273,compute_factor=0.4545,overhead_s=0.0022"


@contextmanager
def engine(preset: str) -> Iterator[str]:
    """Serve on a free port; yield the URL."""
    server = subprocess.Popen(
        [AMPACITY, "simulate", "--preset", preset, "--model", "m", "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        yield server.stdout.readline().split()[2]
    finally:
        server.terminate()
        server.wait()


def run(preset: str, options: argparse.Namespace, seed: int, out: Path) -> Path:
    load = [
        "--rates",
        f"{options.rate}",
        "--duration",
        f"{options.duration_s}s",
        "--seed",
        f"{seed}",
    ]
    with engine(preset) as url:
        command = [AMPACITY, "run", url, "--model", "m", *WORKLOAD, *load, "--out", str(out)]
        subprocess.run(command, check=True, capture_output=True)
    return out


def verdict(folder: Path, pair: int, options: argparse.Namespace, candidate: str) -> str:
    """Return pass, regression, inconclusive, or why the pair cannot be compared."""
    base = run(EQUAL, options, pair + 1, folder / f"{pair}-base")
    other = run(candidate, options, pair + 1, folder / f"{pair}-candidate")
    file = folder / f"{pair}.json"
    for command in (
        ["baseline", str(base), "-o", str(file)],
        ["gate", str(other), "--baseline", str(file), "--json"],
    ):
        done = subprocess.run([AMPACITY, *command], check=False, capture_output=True, text=True)
        if done.returncode == 2:
            print(
                f"pair {pair + 1}: {done.stderr.strip()} (load average {os.getloadavg()[0]:.1f})",
                flush=True,
            )
            return "refused"
    found = json.loads(done.stdout)
    print(
        f"pair {pair + 1}: {found['sentence']} (load average {os.getloadavg()[0]:.1f})", flush=True
    )
    return str(found["verdict"])


def main() -> None:
    given = parser(__doc__, pairs=20, duration_s=60.0)
    given.add_argument(
        "--changed", type=int, default=0, help="so many pairs more with a slower candidate"
    )
    given.add_argument(
        "--rate", type=float, default=34.0, help="requests/s; 60 %% of what the engine carries"
    )
    options = given.parse_args()
    with tempfile.TemporaryDirectory() as name:
        for kind, preset, first, pairs in (
            ("equal", EQUAL, 0, options.pairs),
            ("10 % slower", SLOWER, options.pairs, options.changed),
        ):
            verdicts = Counter(
                verdict(Path(name), first + i, options, preset) for i in range(pairs)
            )
            print(f"{kind}: {dict(verdicts)}", flush=True)


if __name__ == "__main__":
    main()
