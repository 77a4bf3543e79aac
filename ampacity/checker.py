"""A quality gate: an own command says which of the kept answers of a run it accepts."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from pathlib import Path

from analysis.goodput import LabelsError, parse_labels
from loadgen.kept_answers import read_answers


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
    if missing:
        raise LabelsError(
            f"--checker printed nothing of {len(missing)} of {len(kept)} answers, as of request {missing[0]}"
        )
    if unknown:
        raise LabelsError(f"--checker printed request {unknown[0]}, which has no kept answer")
    return labels


def _printed(command: str, answers: bytes, limit_s: float) -> bytes:
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            shlex.split(command), stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
    except (OSError, ValueError, IndexError) as error:
        raise LabelsError(f"--checker {command!r} cannot be run: {error}") from None
    with process:
        try:
            printed, said = process.communicate(answers, timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise LabelsError(
                f"--checker {command!r} took more than {limit_s:g} s: see --checker-timeout"
            ) from None
        finally:
            if process.poll() is None:  # with all that it began: those would hold the pipes open
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        last = (said.decode("utf-8", "replace").strip().splitlines() or ["it said nothing"])[-1]
        raise LabelsError(f"--checker {command!r} ended with status {process.returncode}: {last:.200}")
    return printed
