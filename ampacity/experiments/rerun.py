"""Repeat a run: execute the command that run.json recorded."""

import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from ampacity.analysis.next_run import again

_COMMANDS = ("run", "sweep", "predict")
# their values are neither written down nor taken from run.json
HIDDEN = ("--header", "--api-key-command")


class RerunError(ValueError):
    """A run that cannot be repeated from what it recorded."""


def command_line(argv: list[str]) -> list[str]:
    """Return argv for run.json: the program's bare name, no values of HIDDEN, no URL queries."""
    found = ["ampacity"]
    for before, word in pairwise(argv):
        option, equals, value = word.partition("=")
        if before in HIDDEN:
            word = _hidden(before, word)
        elif equals and option in HIDDEN:
            word = f"{option}={_hidden(option, value)}"
        else:
            word = re.sub(r"(https?://[^?\s]*\?).*", r"\1***", word)
        found.append(word)
    return found


def _hidden(option: str, value: str) -> str:
    """Return what is written down of a value: of a header its name."""
    return f"{value.partition(':')[0]}: ***" if option == "--header" else "***"


def command_of(meta: Mapping[str, Any], out: Path, seed: int) -> list[str]:
    """Return the recorded command with another ``seed`` and ``out``. Raises RerunError."""
    words = [str(w) for w in meta.get("command_line") or []]
    if len(words) < 2 or words[0] != "ampacity" or words[1] not in _COMMANDS:
        known = " ".join(words[:2]) or "none"
        raise RerunError(
            f"run.json names no command that can be repeated ({known}): take another sample as "
            "the first was taken"
        )
    return shlex.split(again(command_line(words), {"--seed": str(seed), "--out": str(out)}))


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
