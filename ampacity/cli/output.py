"""Write results: JSON and screens to stdout, text to files."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

_OF_RUN = re.compile(r"(run|summary|\d+)\.json|answers-.*\.jsonl|.*\.(parquet|arrows)")
UNCUT = 100_000  # columns of what is no terminal: nothing is wrapped or left out


@dataclass
class Shown:
    """The way every command shows its results; ``options.prints`` sets it."""

    full: bool = False
    quiet: bool = False
    resume: bool = False  # the run in --out goes on


shown = Shown()


def console() -> Console:
    """Return stdout as a console."""
    from rich.console import Console

    cut = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, width=None if cut else UNCUT)


def print_folder(run: Path) -> None:
    """Print the directory of a run for scripts: the last line, where stdout is no terminal."""
    if not sys.stdout.isatty():
        print(run)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def print_part(part: Any) -> None:
    """Print a struct as JSON."""
    from ampacity.analysis.contract.part import plain

    print_json(plain(part))


@contextmanager
def writing(path: Path, *, own: bool = False) -> Iterator[None]:
    """Raise RunDirError if the block cannot write ``path``.

    ``own``: it may be a file that is like those of baselines.
    """
    from ampacity.files import why
    from ampacity.loadgen.rundir.files import RunDirError

    real = path.resolve()  # not a link to it
    alike = not own and real.suffix in (".json", ".parquet", ".arrows")
    in_run = any((folder / "run.json").exists() for folder in real.parents[:2])
    if real.is_file() and (alike or (in_run and _OF_RUN.fullmatch(real.name))):
        raise RunDirError(f"{path} may be of a run or a baseline: not overwritten; name another")
    try:
        yield
    except OSError as error:
        raise RunDirError(f"{path} cannot be written: {why(error)}") from error


def write_text(path: Path, text: str, *, append: bool = False, own: bool = False) -> None:
    """Write or append to a file, see ``writing``. Raises RunDirError if that fails."""
    with writing(path, own=own), path.open("a" if append else "w", encoding="utf-8") as file:
        file.write(text)
