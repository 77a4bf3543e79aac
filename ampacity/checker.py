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
    printed = _printed(command, b"".join(kept.values()), limit_s)
    lines = printed.decode("utf-8", "replace").splitlines()
    where = "--checker, what it printed"
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith("{"):
            raise LabelsError(f"{where}:{number}: this is no JSON object: {line.strip()!r:.60}")
    labels = parse_labels(lines, where) if any(map(str.strip, lines)) else {}
    missing, unknown = sorted(kept.keys() - labels), sorted(labels.keys() - kept)
    if missing:
        raise LabelsError(
            f"{where}: nothing of {len(missing)} of {len(kept)} answers, as of request {missing[0]}"
        )
    if unknown:
        raise LabelsError(f"{where}: request {unknown[0]} has no kept answer")
    return labels


def _printed(command: str, answers: bytes, limit_s: float) -> bytes:
    try:
        words = shlex.split(command)
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )  # fmt: skip
    except (OSError, ValueError, IndexError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise LabelsError(f"--checker {command!r} cannot be run: {reason}") from None
    with process:
        try:
            printed, said = process.communicate(answers, timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise LabelsError(
                f"--checker {command!r} took more than {limit_s:g} s: see --checker-timeout"
            ) from None
        finally:
            if process.poll() is None:
                _kill(process)
    if process.returncode:
        last = (said.decode("utf-8", "replace").strip().splitlines() or ["it said nothing"])[-1]
        raise LabelsError(f"--checker {command!r} ended with status {process.returncode}: {last:.200}")
    return printed


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With all that it began: those would hold the pipes open."""
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
