"""A command that is refused after its run directory was made leaves none: nothing was measured, and nothing is left to read."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

MADE = (
    "run.json",
    "requests*.arrows",
    "answers-*.jsonl",
)  # what a run directory holds before its first stage


@contextlib.contextmanager
def no_stub(*outs: Path | None) -> Iterator[None]:
    """Where the block raises a ValueError (a refusal), the run directories ``outs`` that have no stage yet are removed.

    Only what was new or empty before is touched, of it only what a run directory holds, and folders only where that
    leaves them empty: those that stood there before stay.
    """
    from ampacity.loadgen.rundir.files import RunDirError

    wanted = [out for out in outs if out is not None and _is_new(out)]
    made = dict.fromkeys(
        folder for out in wanted for folder in (out, *out.parents) if not folder.exists()
    )
    try:
        yield
    except RunDirError:  # the directory is not ours, or cannot be written
        raise
    except ValueError:
        for out in wanted:
            _empty(out)
        for folder in sorted(made, key=lambda folder: len(folder.parts), reverse=True):
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def _is_new(out: Path) -> bool:
    from ampacity.loadgen.rundir.files import RunDirError, check_new

    try:
        check_new(out)
    except RunDirError:
        return False
    return True


def _empty(out: Path) -> None:
    """Remove what was begun of a run without a stage; whatever else is there stays."""
    with contextlib.suppress(OSError, ValueError):
        if not json.loads((out / "run.json").read_text(encoding="utf-8"))["stages"]:
            for path in [path for pattern in MADE for path in out.glob(pattern)]:
                path.unlink()
