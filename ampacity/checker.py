"""Run the user's own command that checks the kept answers of a run (``report --checker``)."""

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
    """Return {request_id: accepted}.

    ``command`` reads the kept answers as JSON lines from stdin and prints one line for each.
    Raises LabelsError if it does not do so within ``limit_s``.
    """
    kept = dict(read_answers(run))
    if not kept:
        raise LabelsError(f"{run} has no answer texts: run it again with --keep-answers MIB")
    printed = _printed(command, b"".join(kept.values()), limit_s).decode("utf-8", "replace")
    labels = parse_labels(printed.splitlines(), "--checker printed")
    missing, unknown = sorted(kept.keys() - labels), sorted(labels.keys() - kept)
    if unknown:
        raise LabelsError(f"--checker printed request {unknown[0]!s:.40}, which has no kept answer")
    if missing:
        raise LabelsError(
            f"--checker printed nothing of {len(missing)} of {len(kept)} answers, as of request "
            f"{missing[0]}"
        )
    return labels


def _printed(command: str, answers: bytes, limit_s: float) -> bytes:
    """Return what ``command`` printed until it ended; its own children are ended too."""
    # files instead of pipes: a child that outlives the command would hold a pipe open
    with TemporaryFile() as stdin, TemporaryFile() as stdout, TemporaryFile() as stderr:
        stdin.write(answers)
        stdin.seek(0)
        try:
            if not (words := shlex.split(command)):
                raise ValueError("give a command, as in --checker 'python check.py'")
            process = subprocess.Popen(
                words, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True
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
            # no process is left, or on macOS only a dead one
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        stdout.seek(0)
        stderr.seek(0)
        if status:
            lines = stderr.read().decode("utf-8", "replace").strip().splitlines()
            last = lines[-1] if lines else "it printed no error"
            raise LabelsError(f"--checker {command!r} ended with status {status}: {last:.200}")
        return stdout.read()
