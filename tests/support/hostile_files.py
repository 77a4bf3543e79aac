"""Read hostile files by command lines with little memory: ``python -m tests.support.hostile_files``.

The argument is a JSON file, {name: command line}. Printed is JSON: {name: (exit status, last line of
stderr, peak MiB)}.
"""

from __future__ import annotations

import contextlib
import io
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

from ampacity.cli import main

ROOM_BYTES = 3 << 30  # beside what the libraries have reserved


def one(arguments: list[str]) -> tuple[Any, str, float, float]:
    began, stderr = time.monotonic(), io.StringIO()
    sys.argv = ["ampacity", *arguments]
    status: Any = None
    with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
        try:
            main()
        except SystemExit as ended:
            status = ended.code
    text = Path("/proc/self/status").read_text()
    peak_mib = int(text.partition("VmHWM:")[2].split()[0]) / 1024
    return status, stderr.getvalue(), peak_mib, time.monotonic() - began


def run(path: Path) -> None:
    import pandas  # noqa: F401 - reserve memory
    import pyarrow.parquet  # noqa: F401
    import scipy.stats  # noqa: F401

    reserved = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (reserved + ROOM_BYTES,) * 2)
    print(json.dumps({name: one(words) for name, words in json.loads(path.read_text()).items()}))


if __name__ == "__main__":
    run(Path(sys.argv[1]))
