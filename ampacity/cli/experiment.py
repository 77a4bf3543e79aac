"""Run an experiment for a command: from its settings to the report and the exit status."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ampacity.cli import EXIT, EXIT_INTERRUPTED, EXIT_OUTAGE, EXIT_USAGE
from ampacity.cli.output import console, print_folder, print_json, shown, writing

if TYPE_CHECKING:
    from ampacity.analysis.contract.summary import Summary
    from ampacity.experiments.decide import Engine


def run_experiment(
    raw: dict[str, Any],
    *,
    experiment: str,
    drive: Callable[..., Any],
    as_json: bool,
    located: Callable[[str], str] = str,
    check: Callable[[Any], None] | None = None,
    judge: Callable[[Path, Summary], int] | None = None,
    quiet: bool = False,
) -> None:
    """Run ``drive``, write summary and report, and print them unless ``quiet``.

    Exits 130 if interrupted; else with what ``judge`` returns, or 1 after an outage; where that
    would be 0 with 2 if aborted, and with 3 if ended by --max-errors before it was decided.
    ``located`` adds the position in a run file to a message about a setting; ``check`` can refuse
    Settings before the first request.
    """
    from dataclasses import replace

    from ampacity.cli.stub import left_at_once, no_stub
    from ampacity.config import check_steady, make_settings
    from ampacity.experiments.rerun import command_line
    from ampacity.experiments.stages.conduct import conduct, run_event_loop
    from ampacity.experiments.stages.provenance import out_path
    from ampacity.progress import Progress
    from ampacity.values import ConfigError

    try:
        settings = make_settings(raw)
    except ValueError as error:
        raise ConfigError(located(str(error))) from None
    if experiment in ("sweep", "search", "check"):
        check_steady(settings.workload, experiment)
    if check is not None:
        check(settings)
    settings = replace(settings, out=out_path(settings, experiment))
    with left_at_once(settings.out):
        with no_stub(settings.out), Progress(quiet=shown.quiet) as progress:
            how: dict[str, Any] = {"command_line": command_line(sys.argv), "progress": progress}
            how["resume"] = shown.resume
            path = run_event_loop(conduct(settings, experiment=experiment, drive=drive, **how))
        status, summary = finish(path, as_json=as_json and not quiet, quiet=quiet)
    if judge is not None:
        answer = judge(path, summary)
    else:
        down = any(stage.outage and not stage.client_limited for stage in summary.stages)
        answer = EXIT_OUTAGE if down else 0
    answer = answer or {"aborted": EXIT_USAGE, "errors": EXIT["inconclusive"]}.get(status, 0)
    raise typer.Exit(EXIT_INTERRUPTED if status == "interrupted" else answer)


def finish(
    path: Path,
    *,
    as_json: bool,
    labels: dict[int, bool] | None = None,
    quiet: bool = False,
    engine: Engine | None = None,
) -> tuple[str, Summary]:
    """Write summary.json and report.html of a run and print them; return (status, summary)."""
    from ampacity.analysis.contract.summary import to_json
    from ampacity.analysis.other_limits import capacity_at_limits
    from ampacity.analysis.summary import summarise
    from ampacity.analysis.timeline import timeline_of
    from ampacity.experiments.decide import Engine, hardware_text
    from ampacity.experiments.windows import summarise_soak
    from ampacity.loadgen.rundir.files import RunDirError, load_run, read_meta, write_json
    from ampacity.reports.pages.run_report import Beyond, write_report
    from ampacity.reports.pages.screen import render_screen
    from ampacity.reports.pages.terminal import render_table

    meta = read_meta(path)
    if by_window := bool(meta.get("soak")) and labels is None:
        run, summary = summarise_soak(path, meta)
    else:
        run = load_run(path)
        summary = summarise(run, labels)
    report, unwritten = path / "report.html", None
    try:
        hardware = hardware_text(run, summary, engine or Engine())
        limits = () if by_window else capacity_at_limits(run, summary)
        timeline = None if by_window else timeline_of(run)
        beyond = Beyond(timeline, limits, str(path), hardware)
        write_json(path / "summary.json", to_json(summary))
        with writing(report):
            write_report(report, summary, run.meta, beyond)
    except RunDirError as error:  # a full disk must not hide what was found
        unwritten = error
        with suppress(OSError):  # an old one must not stand beside a new summary
            report.unlink()
    with _printing(path):
        if as_json:
            print_json(to_json(summary))
        elif not quiet:
            shows = render_table if shown.full else render_screen
            shows(summary, console(), None if unwritten else report)
            print_folder(path)
    if unwritten:
        raise unwritten
    return str(run.meta.get("status")), summary


@contextmanager
def _printing(path: Path) -> Iterator[None]:
    """Raise RunDirError with the command that prints a run again, where stdout cannot be written."""
    from ampacity.loadgen.rundir.files import RunDirError

    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        left = f"'ampacity report {shlex.quote(str(path))}' prints it"
        raise RunDirError(f"the output cannot be written: {error.strerror}; {left}") from error


def read_labels(path: Path) -> dict[int, bool]:
    """Return {request_id: accepted}. Raises LabelsError."""
    from ampacity.analysis.stage.goodput import LabelsError, parse_labels
    from ampacity.files import read_text, why

    try:
        return parse_labels(read_text(path).splitlines(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise LabelsError(f"--labels {path} cannot be read: {why(error)}") from None
