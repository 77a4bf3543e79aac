"""Write the reference of all commands from their own help.

``python -m ampacity.cli.reference > docs/cli.md``
"""

import re
from collections.abc import Iterator
from typing import Any

import typer.main

from ampacity.cli.app import app
from ampacity.cli.help import options, parts, record

HEAD = """# Commands

Written by `python -m ampacity.cli.reference`. Every option is also a key of a run file
(`ampacity run -c bench.yaml`); options on the command line win. Exit statuses: 0 done, 2 bad input
or aborted (one line names the mistake and the fix), 3 ended by --max-errors with nothing violated,
130 interrupted. Ctrl-C still writes the report of what was measured.
"""


def reference() -> str:
    """Return docs/cli.md: each command with its arguments and options."""
    root = typer.main.get_command(app)
    return "\n".join([HEAD, *_of_group(root, typer.Context(root), "ampacity")]).rstrip() + "\n"


# typer brings its own copy of click's classes, so they are told apart by what they have
def _of_group(group: Any, context: typer.Context, path: str) -> Iterator[str]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _of_group(command, context, f"{path} {name}")
        elif not command.hidden:
            yield from _of_command(command, context, f"{path} {name}")


def _of_command(command: Any, context: typer.Context, path: str) -> Iterator[str]:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    usage = " ".join([path, *(record(a, context)[0] for a in arguments)])
    about, examples = parts(command)
    yield f"## {path}\n\n{' '.join(map(_one_line, about))}\n"
    yield "".join(f"    {line}\n" for line in (f"{usage} [OPTIONS]", *examples))
    if shown := options(command, context):
        rows = "\n".join(_row(option, context) for option in shown)
        yield f"| option | |\n|---|---|\n{rows}\n"


def _row(option: Any, context: typer.Context) -> str:
    names, text = record(option, context)
    return f"| `{_one_line(names)}` | {_one_line(text)} |"


def _one_line(text: str | None) -> str:
    return re.sub(r"\s+", " ", text or "").strip().replace("|", "\\|")


if __name__ == "__main__":
    print(reference(), end="")
