"""Run command lines in one process with little memory: ``python -m tests.support.processes.command_lines``.

The argument is a JSON file, {name: words}. Printed is JSON: {name: [exit status, stdout, stderr,
peak of the process in MiB, seconds of CPU]}.
"""

import contextlib
import io
import json
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ampacity.cli import main

ROOM_BYTES = 3 << 30  # beside what the libraries have reserved


class Ended(NamedTuple):
    """How a command line ended."""

    status: int
    out: str
    err: str
    peak_mib: float
    took_s: float  # of CPU, whatever else this machine does


def run_all(lines: Mapping[str, list[str]], table: Path) -> dict[str, Ended]:
    """Run command lines in another process; ``table`` is where it finds them."""
    table.write_text(json.dumps(lines))
    command = [sys.executable, "-m", "tests.support.processes.command_lines", str(table)]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    return {name: Ended(*found) for name, found in json.loads(done.stdout).items()}


def peak_mib() -> float:
    text = Path("/proc/self/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0]) / 1024


def run_here(words: list[str]) -> Ended:
    """Run a command line in this process."""
    began_s, out, err = time.process_time(), io.StringIO(), io.StringIO()
    status: Any = 0
    sys.argv = ["ampacity", *words]
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(out):
        try:
            main()
        except SystemExit as ended:
            status = ended.code
    took_s = time.process_time() - began_s
    return Ended(status, out.getvalue(), err.getvalue(), peak_mib(), took_s)


def _main(table: Path) -> None:
    import pandas  # noqa: F401 - reserve memory
    import pyarrow.parquet  # noqa: F401
    import scipy.stats  # noqa: F401

    reserved = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (reserved + ROOM_BYTES,) * 2)
    print(
        json.dumps({name: run_here(words) for name, words in json.loads(table.read_text()).items()})
    )


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
