"""Where the commands put what they found: JSON on stdout, files of the user's choice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises RunDirError where the block cannot write ``path``."""
    from ampacity.loadgen.rundir.files import RunDirError

    try:
        yield
    except OSError as error:
        raise RunDirError(f"{path} cannot be written: {error.strerror or error}") from error


def write_text(path: Path, text: str, *, append: bool = False) -> None:
    """Raises RunDirError where the file cannot be written."""
    with writing(path), path.open("a" if append else "w", encoding="utf-8") as file:
        file.write(text)
