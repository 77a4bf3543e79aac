"""The run directory of a command that is refused before its first stage, or left at once."""

import contextlib
import json
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from ampacity.files import read_text

# files of a run directory before its first stage
MADE = ("run.json", "requests*.arrows", "answers-*.jsonl")


@contextlib.contextmanager
def no_stub(*outs: Path | None) -> Iterator[None]:
    """If the block raises a ValueError (a refusal), remove run directories without a stage.

    Only directories that were new or empty are touched, only files of MADE are removed, and only
    folders that were created and are then empty.
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


@contextlib.contextmanager
def left_at_once(out: Path | None, makes: str = "report", run: str = "") -> Iterator[None]:
    """Print the command that writes the report of ``out``, if a signal ends the block.

    ``run``: a folder in it that has a run.json once there is something to report.

    While load runs, the first one ends only that; the second, or one while the report is made,
    ends the block.
    """
    from ampacity.experiments.stages.conduct import end_signals

    before = {
        number: signal.signal(number, _leave) for number in end_signals().keys() - {signal.SIGINT}
    }
    try:
        yield
    except KeyboardInterrupt:
        said = "interrupted before the first request"
        if out is not None and (out / run / "run.json").is_file():
            report = f"'ampacity {makes} {shlex.quote(str(out))}' writes it"
            said = f"left at once, without the report: {report}"
        print(f"ampacity: {said}", file=sys.stderr)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(*_: object) -> None:
    raise KeyboardInterrupt


def _is_new(out: Path) -> bool:
    from ampacity.loadgen.rundir.files import RunDirError
    from ampacity.loadgen.rundir.write import check_new

    try:
        check_new(out)
    except RunDirError:
        return False
    return True


def _empty(out: Path) -> None:
    """Remove the files of a run without a stage."""
    with contextlib.suppress(OSError, ValueError):
        if not json.loads(read_text(out / "run.json"))["stages"]:
            for path in [path for pattern in MADE for path in out.glob(pattern)]:
                path.unlink()
