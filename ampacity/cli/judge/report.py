"""``ampacity report``: (re)write the report of a run, even if it was killed or is still running."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ampacity.cli import options as o
from ampacity.cli.judge.engine import ENGINE, engine_of

if TYPE_CHECKING:
    from ampacity.analysis.contract.summary import Summary


@o.gathers("engine", ENGINE)
def report(
    engine: dict[str, Any],
    run: Annotated[Path, o.arg("Run directory.")],
    labels: Annotated[
        Path | None,
        o.opt(
            "FILE",
            "Accepted answers (JSONL or CSV: request_id, accepted). Goodput then counts these "
            "only.",
        ),
    ] = None,
    checker: Annotated[
        str | None,
        o.opt(
            "COMMAND",
            "Program that checks the answers kept by --keep-answers. Reads JSON lines "
            "(request_id, answer), prints JSON lines (request_id, accepted).",
        ),
    ] = None,
    checker_timeout: Annotated[str, o.opt("T", "Time limit of the checker.")] = "10m",
    svg: Annotated[
        Path | None, o.opt("DIR", "Write each chart of the report as an SVG file.")
    ] = None,
    json: o.Json = False,
) -> None:
    """Write summary.json and report.html of a run again, and print the findings.

    ampacity report runs/chat

    ampacity report runs/chat --labels accepted.csv --json
    """
    from ampacity.checker import check_answers
    from ampacity.cli.experiment import finish, read_labels
    from ampacity.values import ConfigError, parse_duration

    if labels is not None and checker is not None:
        raise ConfigError("--labels and --checker exclude each other: give one of them")
    found = None if labels is None else read_labels(labels)
    if checker is not None:
        found = check_answers(run, checker, parse_duration(checker_timeout, "--checker-timeout"))
    _, summary = finish(run, as_json=json, labels=found, engine=engine_of(engine))
    if svg is not None:
        _write_svgs(run, summary, svg)


def _write_svgs(run: Path, summary: Summary, folder: Path) -> None:
    from ampacity.analysis.timeline import timeline_of
    from ampacity.cli.output import writing
    from ampacity.loadgen.rundir.files import load_run
    from ampacity.reports.charts.svg import write_svgs
    from ampacity.reports.pages.run_report import report_charts

    found = report_charts(summary, timeline_of(load_run(run)))
    with writing(folder):
        paths = write_svgs(folder, {chart.name: chart.spec for chart in found})
    typer.echo(f"charts: {len(paths)} in {folder}", err=True)
