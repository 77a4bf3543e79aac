"""Run an experiment for a command: from its settings to the report and the exit status."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ampacity.cli import EXIT_INTERRUPTED, EXIT_OUTAGE, EXIT_USAGE
from ampacity.cli.output import console, print_json, shown, writing

if TYPE_CHECKING:
    from ampacity.analysis.contract.summary import Summary


def run_experiment(
    raw: dict[str, Any],
    *,
    experiment: str,
    drive: Callable[..., Any],
    as_json: bool,
    located: Callable[[str], str] = str,
    check: Callable[[Any], None] | None = None,
) -> Path:
    """Run ``drive``, write summary and report, print them, and return the run directory.

    Exits 130 if interrupted, 1 after an outage, 2 if aborted. ``located`` adds the position in a
    run file to a message about a setting; ``check`` can refuse Settings before the first request.
    """
    from dataclasses import replace

    from ampacity.cli.stub import no_stub
    from ampacity.config import check_steady, make_settings
    from ampacity.experiments.stages.conduct import conduct, run_event_loop
    from ampacity.experiments.stages.provenance import out_path
    from ampacity.progress import Progress
    from ampacity.values import ConfigError

    try:
        settings = make_settings(raw)
    except ValueError as error:
        raise ConfigError(located(str(error))) from None
    if experiment in ("sweep", "search"):
        check_steady(settings.workload, experiment)
    if check is not None:
        check(settings)
    settings = replace(settings, out=out_path(settings, experiment))
    how: dict[str, Any] = {"command_line": command_line(sys.argv), "progress": Progress()}
    with no_stub(settings.out):
        path = run_event_loop(conduct(settings, experiment=experiment, drive=drive, **how))
    status, summary = finish(path, as_json=as_json)
    if status == "interrupted":
        raise typer.Exit(EXIT_INTERRUPTED)
    if any(stage.outage and not stage.client_limited for stage in summary.stages):
        raise typer.Exit(EXIT_OUTAGE)
    if status == "aborted":
        raise typer.Exit(EXIT_USAGE)
    return path


def finish(
    path: Path, *, as_json: bool, labels: dict[int, bool] | None = None, quiet: bool = False
) -> tuple[str, Summary]:
    """Write summary.json and report.html of a run and print them; return (status, summary)."""
    from ampacity.analysis.contract.summary import to_json
    from ampacity.analysis.summary import summarise
    from ampacity.loadgen.rundir.files import load_run, write_json
    from ampacity.reports.pages.run_report import write_report
    from ampacity.reports.pages.screen import render_screen
    from ampacity.reports.pages.terminal import render_table

    run = load_run(path)
    summary = summarise(run, labels)
    report = path / "report.html"
    write_json(path / "summary.json", to_json(summary))
    with writing(report):
        write_report(report, summary, run.meta)
    if as_json:
        print_json(to_json(summary))
    elif not quiet:
        (render_table if shown.full else render_screen)(summary, console(), report)
        if not sys.stdout.isatty():
            print(path)  # for scripts: the last line
    return str(run.meta.get("status")), summary


def read_labels(path: Path) -> dict[int, bool]:
    """Return {request_id: accepted}. Raises LabelsError."""
    from ampacity.analysis.stage.goodput import LabelsError, parse_labels

    try:
        return parse_labels(path.read_text(encoding="utf-8-sig").splitlines(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise LabelsError(f"--labels {path} cannot be read: {error}") from None


def command_line(argv: list[str]) -> list[str]:
    """Return argv for run.json: the program's bare name, no header values, no URL queries."""
    found, hide = ["ampacity"], False
    for word in argv[1:]:
        if hide or word.startswith("--header="):
            name = word.removeprefix("--header=").partition(":")[0]
            word = f"--header={name}: ***" if word.startswith("--header=") else f"{name}: ***"
            hide = False
        else:
            hide = word == "--header"
            word = re.sub(r"(https?://[^?\s]*\?).*", r"\1***", word)
        found.append(word)
    return found
