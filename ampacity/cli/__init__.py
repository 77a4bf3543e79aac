"""The command line: one module per command, loaded when the command is used."""

from __future__ import annotations

import sys

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def main() -> None:
    """Entry point: runs a command and turns errors into one line on stderr and an exit status."""
    from ampacity.cli.app import app

    try:
        app(prog_name="ampacity", standalone_mode=True)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except ValueError as error:
        # the rooms raise subclasses of ValueError with one line for people; anything else is our fault
        if type(error) is ValueError or isinstance(error, UnicodeError):
            raise
        print(f"ampacity: {error}", file=sys.stderr)
        sys.exit(EXIT_USAGE)
