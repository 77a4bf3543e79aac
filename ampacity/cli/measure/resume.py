"""``--resume RUN``: the command line with which a run began, once more."""

import json
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

COMMANDS = ("sweep", "search", "burst", "soak", "run", "ab")
KEY_B = "--api-key-env-b"  # of ab alone
KEYS = ("--api-key-env", "--api-key-file", "--api-key-command", KEY_B)
WITH_VALUE = (*KEYS, "--api-key-header", "--header", "--summary")
FLAGS = ("--yes", "--json", "--quiet", "-q")


def resumed(command: str, args: Iterable[str]) -> list[str]:
    """Return the arguments with which a run began, given ``--resume RUN`` and what may be added.

    Raises ConfigError, RunDirError.
    """
    from ampacity.analysis.next_run import again
    from ampacity.values import ConfigError

    run, given = _split(command, args)
    words = _began(command, run)
    options = given[::2]
    gone = {*KEYS, *options} if {*KEYS} & {*options} else {*options}
    flags = [option for option in options if option in FLAGS]
    words = shlex.split(again(words, dict.fromkeys(gone.difference(FLAGS)), flags))
    if any("***" in word for word in words):
        raise ConfigError(
            f"{run}: the value of a --header or --api-key-command and the query of a URL are not "
            "recorded: the options can be given again beside --resume, a query cannot"
        )
    return [*words[2:], *filter(None, given), "--out", run, "--resume", run]


def _split(command: str, args: Iterable[str]) -> tuple[str, list[str]]:
    """Return the run, and each other option with its value, which is "" for a flag."""
    from ampacity.values import ConfigError

    run, given, rest = "", list[str](), iter(args)
    for word in rest:
        option, assigned, value = word.partition("=")
        if option == "--resume" or option in WITH_VALUE:
            value = value if assigned else next(rest, "")
            if option == "--resume":
                run = value
            else:
                given += [option, value]
        elif word in FLAGS:
            given += [word, ""]
        else:
            what = option if option.startswith("-") else "the other arguments"
            allowed = ", ".join(
                o for o in (*FLAGS[:3], *WITH_VALUE) if command == "ab" or o != KEY_B
            )
            raise ConfigError(
                f"--resume RUN goes on as RUN began: drop {what}; what may be given is {allowed}"
            )
    return run, given


def _began(command: str, run: str) -> list[str]:
    from ampacity.analysis.next_run import resume_command
    from ampacity.experiments.rerun import command_line
    from ampacity.files import read_text
    from ampacity.loadgen.rundir.files import RunDirError
    from ampacity.values import ConfigError

    file = Path(run) / ("a/run.json" if command == "ab" else "run.json")
    try:
        meta: Any = json.loads(read_text(file))
        words = [str(word) for word in meta["command_line"]]
        began = words[1]
    except (OSError, ValueError, LookupError, TypeError) as error:
        why = getattr(error, "strerror", None) or "it does not say how the run began"
        raise RunDirError(f"--resume {run}: {file} cannot be used: {why}") from None
    if began != command or words[0] != "ampacity":
        advice = resume_command(words, run) or "start a new run"
        raise ConfigError(f"--resume {run}: that run is of 'ampacity {began}': {advice}")
    return command_line(words)  # nothing that someone else wrote there is executed
