"""Repeat a run: execute the command that run.json recorded."""

import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ampacity.analysis.next_run import again

_COMMANDS = ("run", "sweep", "predict")


class RerunError(ValueError):
    """A run that cannot be repeated from what it recorded."""


def command_of(meta: Mapping[str, Any], out: Path, seed: int) -> list[str]:
    """Return the recorded command with another ``seed`` and ``out``. Raises RerunError."""
    words = [str(w) for w in meta.get("command_line") or []]
    if len(words) < 2 or words[0] != "ampacity" or words[1] not in _COMMANDS:
        known = " ".join(words[:2]) or "none"
        raise RerunError(
            f"run.json names no command that can be repeated ({known}): take another sample as "
            "the first was taken"
        )
    return shlex.split(again(words, {"--seed": str(seed), "--out": str(out)}))


def repeatable(command: list[str]) -> bool:
    """Return whether the command is complete: the values of some options are not recorded."""
    return not any("***" in word for word in command)


def rerun(command: list[str]) -> None:
    """Run the command, with progress on stderr. Raises RerunError.

    Relative paths start at the current directory; keys come from the environment.
    """
    done = subprocess.run([sys.executable, "-m", *command], stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        text = " ".join(command)[:200]
        raise RerunError(f"the repeated run ended with exit status {done.returncode}: {text}")
