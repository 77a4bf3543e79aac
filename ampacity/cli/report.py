"""``ampacity report``: write summary.json and report.html of a run anew, also of one that was killed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ampacity.cli import options as o


def report(
    run: Annotated[Path, typer.Argument(help="Run directory.", show_default=False)],
    labels: Annotated[Path | None, typer.Option(metavar="FILE", help="What a checker said of the answers: JSONL or CSV with request_id and accepted. Goodput then counts accepted answers.")] = None,
    json: o.Json = False,
) -> None:  # fmt: skip
    """(Re)write summary.json and report.html of a run directory, and print the findings."""
    from ampacity.cli.experiment import finish

    finish(run, as_json=json, labels=labels)
