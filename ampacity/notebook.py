"""Measure, predict and compare from Python, also where an event loop runs already (docs/python.md).

A load is sent by a process of its own, as from the command line: a notebook's threads and garbage
would disturb its timing.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ampacity.analysis.change.comparable import by_option, differences
from ampacity.analysis.change.judged import CompareError
from ampacity.analysis.change.results import Comparison
from ampacity.analysis.compare.pairs import compared_run
from ampacity.analysis.compare.scorecard import compare as compare_runs
from ampacity.frames import Run, load, run_path
from ampacity.settings import SETTINGS

WITH_RESULT = (0, 1, 130)  # exit statuses of a run: complete, with an outage, interrupted


class CommandError(RuntimeError):
    """A command was refused or ended without a result; the message is its own."""


def sweep(url: str, *, quiet: bool = False, **options: Any) -> Run:
    """Load an endpoint as ``ampacity sweep URL`` does, and return the run.

    ``options`` are those of the command with ``_`` for ``-``: ``slo=["ttft_p95=300ms"]``,
    ``rates=[1, 2, 4]``, ``duration="60s"``, ``api_key_env="KEY"``. ``quiet``: no progress on
    stderr. Blocks until the run is over; an interrupt ends it cleanly with what was measured. In a
    coroutine: ``await asyncio.to_thread(ampacity.sweep, url)``. Raises CommandError.
    """
    return _run("sweep", [url], options, quiet=quiet)


def predict(preset: str, *, quiet: bool = False, **options: Any) -> Run:
    """Sweep a simulated engine in virtual time, as ``ampacity predict`` does; return the run.

    ``preset``: as ``llama3-8b-a100``. Otherwise as ``sweep``.
    """
    return _run("predict", ["--preset", preset], options, quiet=quiet)


def compare(*runs: Run | str | Path, force: bool = False) -> Comparison:
    """Compare runs, named A, B, C ... in this order, as ``ampacity compare`` does.

    ``force``: also runs that are not comparable. Raises CompareError with what differs.
    """
    compared = [compared_run(chr(ord("A") + i), run_path(run)) for i, run in enumerate(runs)]
    unlike = differences([run.judged for run in compared]) if compared else []
    if unlike and not force:
        raise CompareError(
            f"the runs are not comparable, they differ in {', '.join(by_option(unlike))} "
            "(force=True compares them regardless)"
        )
    return compare_runs(compared)


def _run(command: str, arguments: list[str], options: dict[str, Any], *, quiet: bool) -> Run:
    """Run a command in a process of its own and read the run that it leaves."""
    given = options.pop("out", None)
    out = Path(given or f"runs/{datetime.now(UTC):%Y%m%d-%H%M%S-%f}-{command}")
    words = [sys.executable, "-m", "ampacity", command, *map(str, arguments), *_words(options)]
    process = subprocess.Popen(
        [*words, "--out", str(out)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="replace",
    )
    said, interrupted = "", False
    with process:
        assert process.stderr is not None
        while True:
            try:
                for line in process.stderr:
                    said = line
                    if not quiet:
                        print(line, end="", file=sys.stderr, flush=True)
                break
            except KeyboardInterrupt:  # a terminal and Jupyter send it to the process as well
                if interrupted:
                    process.terminate()
                interrupted = True
    if process.returncode not in WITH_RESULT or not (out / "run.json").is_file():
        raise CommandError(said.strip() or f"ampacity {command}: exit {process.returncode}")
    return load(out)


def _words(options: Mapping[str, Any]) -> list[str]:
    """Return the options of a command line: ``slo=["a", "b"]`` is ``--slo a --slo b``."""
    words = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is None or value is False:
            continue
        setting = SETTINGS.get(name)
        repeated = setting is not None and setting.kind.type == list[str]
        if value is True:
            words.append(flag)
        elif isinstance(value, Mapping) and not repeated:
            words += [flag, json.dumps(value)]
        elif isinstance(value, Mapping):
            words += [word for key, of in value.items() for word in (flag, f"{key}={of}")]
        elif isinstance(value, list | tuple) and repeated:
            words += [word for one in value for word in (flag, str(one))]
        else:
            listed = value if isinstance(value, list | tuple) else [value]
            words += [flag, ",".join(map(str, listed))]
    return words
