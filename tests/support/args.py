"""Command lines as text, and what came of one."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Command = Callable[..., None]
"""The fixture ``command``."""

QUICK_DRAW = Path(__file__).with_name("quick_draw.py")
_QUICK = (
    "import pathlib; from ampacity.reports.charts import svg; "
    f"svg._DRAW = pathlib.Path({str(QUICK_DRAW)!r}); "
)
_ONCE = "from ampacity.experiments.stages import rig; rig.REPEATS_MAX = 0; "
_MAIN = "from ampacity.cli import main; main()"
COMMAND = [sys.executable, "-c", _QUICK + _MAIN]
"""The command line as a process, with the pictures of the fixture ``quickly``."""
COMMAND_ONCE = [sys.executable, "-c", _QUICK + _ONCE + _MAIN]
"""It also repeats no stage because the machine was busy."""


@dataclass(frozen=True)
class Result:
    """What a command line in this process gave."""

    returncode: object
    stdout: str
    stderr: str


Cli = Callable[..., Result]
"""The fixture ``cli``."""


def args_of(*parts: object) -> list[str]:
    """Return the arguments of a command line; text is split at blanks, other parts are not."""
    return [
        word for part in parts for word in (part.split() if isinstance(part, str) else [str(part)])
    ]
