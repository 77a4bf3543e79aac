"""The command line: one module per command; what is heavy is imported when a command runs."""

from __future__ import annotations

import sys
from typing import cast

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def main() -> None:
    """Entry point: runs a command and turns errors into one line on stderr and an exit status."""
    import typer

    from ampacity.cli.app import app

    usage_error = cast(
        "type[typer.BadParameter]", typer.BadParameter.__mro__[1]
    )  # click's own name is private in newer typer
    try:
        sys.exit(app(prog_name="ampacity", standalone_mode=False) or 0)
    except usage_error as error:
        command = error.ctx.command_path if error.ctx else "ampacity"
        message = " ".join(error.format_message().split())
        _refuse(f"{message.rstrip('.')}; see {command} --help" if message else f"see {command} --help")
    except (KeyboardInterrupt, typer.Abort):
        print("ampacity: interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except ValueError as error:
        # the rooms raise subclasses of ValueError with one line for people; anything else is our fault
        if type(error) is ValueError or isinstance(error, UnicodeError):
            raise
        _refuse(str(error))


def _refuse(message: str) -> None:
    print(f"ampacity: {message}", file=sys.stderr)
    sys.exit(EXIT_USAGE)
