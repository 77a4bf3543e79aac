"""``ampacity workload``: list and show workloads, fit one to a log, write a schedule."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ampacity.cli import options as o
from ampacity.cli.help import Command, Group
from ampacity.cli.output import writing

if TYPE_CHECKING:
    from ampacity.workloads.profile import Workload
    from ampacity.workloads.schedule import Schedule

app = typer.Typer(
    help="List and show workloads, fit one to a log, write a schedule.",
    cls=Group,
    no_args_is_help=True,
)

Name = Annotated[str, o.arg("Name of a built-in workload, or a YAML file.")]


@app.command("list", cls=Command)
def list_() -> None:
    """List the built-in workloads.

    ampacity workload list

    ampacity workload list | grep chat
    """
    from ampacity.workloads.archetypes import ARCHETYPES
    from ampacity.workloads.profile import load_workload

    width = max(map(len, ARCHETYPES))
    for name in ARCHETYPES:
        workload = load_workload(name)
        typer.echo(
            f"{name:<{width}} input {workload.input_tokens.describe()['text']}; "
            f"output {workload.output_tokens.describe()['text']}"
        )


@app.command("show", cls=Command)
def show(name: Name, html: o.Html = None) -> None:
    """Show one workload: lengths, arrivals, source, and the measurements of a fit.

    ampacity workload show chat

    ampacity workload show gateway.yaml --html gateway.html
    """
    from ampacity.workloads.fit.view import read_measured, view
    from ampacity.workloads.profile import load_workload

    workload = load_workload(name)
    _draw(view(workload, read_measured(name)), html)


Log = Annotated[Path, o.arg("Trace or log: .csv, .jsonl, .json, .parquet or .log, optionally .gz.")]
ProfileOut = Annotated[
    Path | None,
    o.opt(
        "FILE", "Output: workload file. Default: NAME.yaml in the current folder.", "-o", "--out"
    ),
]
Context = Annotated[int | None, o.opt("N", "Report a row with more tokens than this as an error.")]


@app.command("fit", cls=Command)
@o.shares(("column", "time_unit", "skip_bad_rows"))
def fit(
    raw: dict[str, Any],
    file: Log,
    out: ProfileOut = None,
    context: Context = None,
    html: o.Html = None,
) -> None:
    """Make a workload file from a trace or a log, without prompts or user names, safe to share.

    ampacity workload fit gateway.jsonl.gz --html gateway.html

    ampacity workload fit gateway.csv --column time=ts --column input=tokens_in
    """
    from ampacity.settings import read_settings
    from ampacity.workloads.errors import WorkloadError
    from ampacity.workloads.fit.profile import write_profile
    from ampacity.workloads.fit.servegen import fit_servegen, is_servegen
    from ampacity.workloads.fit.view import view
    from ampacity.workloads.profile import load_workload

    options = read_settings(raw)
    if context is not None and context < 1:
        raise WorkloadError(f"--context {context}: give 1 or more")
    path = out or Path(f"{_stem(file)}.yaml")
    if path.exists() and (out is None or path.resolve() == file.resolve()):
        raise WorkloadError(f"{path} exists already: name another file with -o")
    if is_servegen(file):
        if raw or context:
            raise WorkloadError(
                f"{file} is a client of ServeGen: drop --column, --time-unit, --context and "
                "--skip-bad-rows"
            )
        profile = fit_servegen(file)
    else:
        profile = _fit_trace(file, options, context)
    write_profile(path, profile)
    _draw(view(load_workload(str(path)), profile["measured"]), html)
    typer.echo(path)


def _stem(file: Path) -> str:
    return file.name.split(".")[0] or "profile"


def _fit_trace(file: Path, options: dict[str, Any], context: int | None) -> dict[str, Any]:
    from ampacity.workloads.fit.profile import fit as fit_trace
    from ampacity.workloads.traces.read import read_trace

    trace = read_trace(
        file,
        columns=options.get("column", {}),
        time_unit=options.get("time_unit"),
        context=context,
        skip_bad_rows=options.get("skip_bad_rows", False),
        timed=False,
        progress=_progress(),
    )
    profile = fit_trace(trace, _stem(file))
    if not trace.clock:
        note = f"{file.name}: no column of time: nothing is known of arrivals"
        profile["measured"].setdefault("notes", []).append(note)
    return profile


Count = Annotated[int | None, o.opt("N", "Number of requests to write.", "-n", "--requests")]
ScheduleOut = Annotated[
    Path | None, o.opt("FILE", "Output: JSONL file. Default: stdout.", "-o", "--out")
]


@app.command("sample", cls=Command)
@o.shares(
    ("rates", "duration", "seed"), rates="the rate that a fit measured, else 1", duration=False
)
def sample(
    raw: dict[str, Any], name: Name, requests: Count = None, out: ScheduleOut = None
) -> None:
    """Write the schedule of a workload as JSONL, which 'ampacity run --trace FILE' replays exactly.

    ampacity workload sample chat --rates 5 --duration 2m -o schedule.jsonl

    ampacity workload sample agent.yaml -n 1000 --seed 7 | gzip > day.jsonl.gz
    """
    from ampacity.settings import Settings, read_settings
    from ampacity.workloads.errors import WorkloadError
    from ampacity.workloads.profile import load_workload, workload_text
    from ampacity.workloads.schedule_file import write_schedule

    given = read_settings(raw)
    duration_s, *further = given.get("duration") or [None]
    if (requests is None) == (duration_s is None):
        raise WorkloadError("give -n N requests, or --duration T (one of them)")
    if requests is not None and requests < 1:
        raise WorkloadError(f"-n {requests}: give 1 or more")
    workload = load_workload(name)
    rate, *others = given.get("rates") or [_measured_rate(name)]
    if others or further:
        raise WorkloadError("a schedule has one rate (--rates R) and one length (--duration T)")
    seed = given.get("seed", Settings.seed)
    schedule = _schedule(workload, rate, duration_s, requests or 0, seed)
    if schedule.shared is not None and schedule.shared.note:
        typer.echo(schedule.shared.note, err=True)
    described = None
    if workload.classes or workload.sessions or workload.images:
        described = workload_text(name)
        for header in described[1]:
            note = f"the value of the header {header} is left out: give it to run, with --header"
            typer.echo(note, err=True)
    if out is None:
        write_schedule(sys.stdout, schedule, described)
        return
    with writing(out, own=True), out.open("w", encoding="utf-8") as file:
        write_schedule(file, schedule, described)
    typer.echo(f"{len(schedule)} requests at {rate:g} req/s, {schedule.planned_tokens():,} tokens")
    typer.echo(out)


def _measured_rate(name: str) -> float:
    from ampacity.workloads.fit.view import read_measured

    arrivals = read_measured(name).get("arrivals")
    measured = arrivals.get("mean_rps") if isinstance(arrivals, dict) else None
    return float(measured) if isinstance(measured, int | float) else 1.0


def _schedule(
    workload: Workload, rate_rps: float, duration_s: float | None, requests: int, seed: int
) -> Schedule:
    """Draw a schedule of ``duration_s``, or one of exactly ``requests``."""
    from ampacity.workloads.schedule import open_schedule

    def draw(length_s: float) -> Schedule:
        return open_schedule(workload, rate_rps=rate_rps, duration_s=length_s, seed=seed, stage=0)

    if duration_s is not None:
        return draw(duration_s)
    length_s = requests / rate_rps
    schedule = draw(length_s)
    while len(schedule) < requests:  # the number in a given time is random
        length_s *= 1.3
        schedule = draw(length_s)
    return schedule.capped(max_requests=requests)[0]


def _draw(view: dict[str, Any], html: Path | None) -> None:
    from rich.console import Console

    from ampacity.reports.pages.profile import facts, render_profile, write_profile_page
    from ampacity.workloads.errors import WorkloadError

    try:
        facts(view)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WorkloadError(
            f"workload {view['name']}: 'measured' is not as 'ampacity workload fit' wrote it "
            f"({type(error).__name__} {error}): fit it again or drop it"
        ) from None
    render_profile(view, Console(highlight=False))
    if html is not None:
        with writing(html):
            write_profile_page(html, view)


def _progress() -> Any:
    """Return a callback that prints the progress of reading, on one line of a terminal."""

    def report(rows: int, read_share: float) -> None:
        end = "\r" if sys.stderr.isatty() else "\n"
        print(f"{rows:,} rows read, {read_share:.0%}", end=end, file=sys.stderr, flush=True)

    return report
