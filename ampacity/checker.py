"""A quality gate: an own command says which of the kept answers of a run it accepts."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

from ampacity.analysis.stage.goodput import LabelsError, parse_labels
from ampacity.loadgen.rundir.files import read_answers


def check_answers(run: Path, command: str, limit_s: float) -> dict[int, bool]:
    """request_id -> accepted. ``command`` gets the kept answers as JSON lines on stdin and prints one for each of them.

    Raises LabelsError where it does not do that, within ``limit_s``.
    """
    kept = dict(read_answers(run))
    if not kept:
        raise LabelsError(f"{run} keeps no text of an answer: run it again with --keep-answers MIB")
    printed = _printed(command, b"".join(kept.values()), limit_s).decode("utf-8", "replace")
    labels = parse_labels(printed.splitlines(), "--checker printed")
    missing, unknown = sorted(kept.keys() - labels), sorted(labels.keys() - kept)
    if unknown:
        raise LabelsError(f"--checker printed request {unknown[0]!s:.40}, which has no kept answer")
    if missing:
        raise LabelsError(
            f"--checker printed nothing of {len(missing)} of {len(kept)} answers, as of request {missing[0]}"
        )
    return labels


def _printed(command: str, answers: bytes, limit_s: float) -> bytes:
    """What ``command`` printed until it ended; what it began and left behind is ended then."""
    with (
        TemporaryFile() as asked,
        TemporaryFile() as printed,
        TemporaryFile() as said,
    ):  # a pipe would be held open
        asked.write(answers)
        asked.seek(0)
        try:
            if not (words := shlex.split(command)):
                raise ValueError("give a command, as in --checker 'python check.py'")
            process = subprocess.Popen(
                words, stdin=asked, stdout=printed, stderr=said, start_new_session=True
            )
        except (OSError, ValueError) as error:
            raise LabelsError(f"--checker {command!r} cannot be run: {error}") from None
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise LabelsError(
                f"--checker {command!r} took more than {limit_s:g} s: see --checker-timeout"
            ) from None
        finally:
            with suppress(
                ProcessLookupError, PermissionError
            ):  # nobody is left; macOS: only the dead one
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        printed.seek(0)
        said.seek(0)
        if status:
            last = (
                said.read().decode("utf-8", "replace").strip().splitlines() or ["it said nothing"]
            )[-1]
            raise LabelsError(f"--checker {command!r} ended with status {status}: {last:.200}")
        return printed.read()
