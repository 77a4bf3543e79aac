"""The command line: one module per command; heavy modules are imported when a command runs."""

import errno
import gc
import os
import re
import sys
import traceback
from contextlib import suppress
from typing import cast

from ampacity.cli.streams import secure_streams
from ampacity.process import protect

EXIT_OUTAGE = 1  # the endpoint was down for a while
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT = {"met": 0, "violated": 1, "inconclusive": 3}  # of a verdict on an SLO
MESSAGE_MAX = 600
_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
_NO_ROOM = re.compile("(?i)can't start new thread|failed to map segment|allocate memory")
_KEPT = "what a run had recorded is kept: ampacity report RUN"
_OURS = ("ampacity", "workloads", "loadgen", "analysis", "reports", "simulator")


def main() -> None:
    """Run a command; turn errors into one line on stderr and an exit status."""
    try:
        _run_command()
    except KeyboardInterrupt:  # also while modules are imported
        print("ampacity: interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)


def _run_command() -> None:
    secure_streams()
    protect()
    # its threads would take cores from the load, and wait for ever where memory is short
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # neither imports nor stages make much garbage: collect it less often
    gc.set_threshold(50_000, 20, 50)
    import typer

    from ampacity.cli.app import app
    from ampacity.cli.synonyms import our_name

    # click's own name is private in newer typer
    usage_error = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[1])
    try:
        sys.exit(app(prog_name="ampacity", standalone_mode=False) or 0)
    except usage_error as error:
        command = error.ctx.command_path if error.ctx else "ampacity"
        message = our_name(error) or " ".join(error.format_message().split())
        if "unexpected extra" in message and "--header" in sys.argv:  # it may be a secret
            message = (
                "unexpected arguments: put the value of --header into quotes, as 'Name: value'"
            )
        _refuse(
            f"{message.rstrip('.')}; see {command} --help" if message else f"see {command} --help"
        )
    except typer.Abort:
        raise KeyboardInterrupt from None
    except Exception as error:
        # our packages raise their own exceptions, with one line for people; others are bugs
        if lacking := _shortage(error):
            _refuse(lacking)
        if type(error).__module__.split(".")[0] not in _OURS:
            print(_without_secrets(traceback.format_exc()), file=sys.stderr)
            sys.exit(EXIT_USAGE)  # 1 would be a result, as of a gate
        _refuse(str(error))


def _without_secrets(text: str) -> str:
    from ampacity.loadgen.send.secrets import KNOWN, redact

    return redact(text, tuple(KNOWN))


def _shortage(error: Exception) -> str | None:
    """Return what the machine was short of, where an error is due to that."""
    number = getattr(error, "errno", None)
    if number in _FULL:
        return f"the output cannot be written: {os.strerror(number)}"
    if number in (errno.EMFILE, errno.ENFILE):
        return f"too many open files: raise the limit (ulimit -n); {_KEPT}"
    if isinstance(error, MemoryError) or number == errno.ENOMEM or _NO_ROOM.search(str(error)):
        return f"no memory is left for this ({error}): raise its limit (ulimit -v); {_KEPT}"
    return None


def _refuse(message: str) -> None:
    """Print one line, whatever it contains, and exit."""
    line = " ".join(message.split())
    line = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)
    with suppress(OSError):  # the status tells, even where nothing can be written
        print(f"ampacity: {line[:MESSAGE_MAX]}", file=sys.stderr, flush=True)
    sys.exit(EXIT_USAGE)
