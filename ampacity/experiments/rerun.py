"""The same run once more: the command that run.json recorded, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_COMMANDS = ("run", "sweep", "predict")


class RerunError(ValueError):
    """A run that cannot be repeated from what it recorded."""


def rerun(meta: Mapping[str, Any], out: Path, seed: int) -> Path:
    """Repeat a run into ``out`` with ``seed``; its progress goes to stderr. Raises RerunError.

    Relative paths of the command are taken from the present directory; keys come from the environment.
    """
    words = [str(w) for w in meta.get("command_line") or []]
    if len(words) < 2 or words[0] != "ampacity" or words[1] not in _COMMANDS:
        raise RerunError(f"--retry: run.json names no command that can be repeated ({' '.join(words[:2]) or 'none'}); take the samples yourself")  # fmt: skip
    if any("***" in w for w in words):
        raise RerunError(
            "--retry: the command had a --header, whose value is not written down: take the samples yourself"
        )
    command = [sys.executable, "-m", "ampacity", *words[1:], "--seed", str(seed), "--out", str(out)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise RerunError(
            f"--retry: the repeated run ended with exit status {done.returncode}: {' '.join(words)[:200]}"
        )
    return out
