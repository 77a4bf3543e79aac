"""Write results: JSON to stdout, text to files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def print_part(part: Any) -> None:
    """Print a struct as JSON."""
    from ampacity.analysis.contract.part import plain

    print_json(plain(part))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise RunDirError if the block cannot write ``path``."""
    from ampacity.loadgen.rundir.files import RunDirError

    try:
        yield
    except OSError as error:
        raise RunDirError(f"{path} cannot be written: {error.strerror or error}") from error


def write_text(path: Path, text: str, *, append: bool = False) -> None:
    """Write or append to a file. Raises RunDirError if that fails."""
    with writing(path), path.open("a" if append else "w", encoding="utf-8") as file:
        file.write(text)
