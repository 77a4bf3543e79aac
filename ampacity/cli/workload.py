"""``ampacity workload``: list and show workloads, fit one to a log, write a schedule."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ampacity.cli.options import Html
from ampacity.cli.output import writing
from ampacity.settings import SETTINGS

if TYPE_CHECKING:
    from ampacity.workloads.profile import Workload
    from ampacity.workloads.schedule import Schedule

app = typer.Typer(
    help="List and show workloads, fit one to a log, write a schedule.", no_args_is_help=True
)

Name = Annotated[
    str, typer.Argument(help="Name of a built-in workload, or a YAML file.", show_default=False)
]


@app.command("list")
def list_() -> None:
    """List the built-in workloads."""
    from ampacity.workloads.archetypes import ARCHETYPES
    from ampacity.workloads.profile import load_workload

    width = max(map(len, ARCHETYPES))
    for name in ARCHETYPES:
        workload = load_workload(name)
        typer.echo(
            f"{name:<{width}} input {workload.input_tokens.describe()['text']}; "
            f"output {workload.output_tokens.describe()['text']}"
        )


@app.command("show")
def show(name: Name, html: Html = None) -> None:
    """Show one workload: lengths, arrivals, source, and the measurements of a fit."""
    from ampacity.workloads.fit.view import read_measured, view
    from ampacity.workloads.profile import load_workload

    workload = load_workload(name)
    _draw(view(workload, read_measured(name)), html)


Log = Annotated[
    Path,
    typer.Argument(
        help="Trace or log: .csv, .jsonl, .json, .parquet or .log, optionally .gz.",
        show_default=False,
    ),
]
ProfileOut = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--out",
        metavar="FILE",
        help="Workload file to write. Default: NAME.yaml in the current folder.",
    ),
]
Columns = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ROLE=NAME",
        help="Column with this role: time, input, output, session, client, cached or hash_ids. "
        "E.g. time=ts or input=usage.in; repeatable.",
    ),
]
TimeUnit = Annotated[
    str | None, typer.Option(metavar="s|ms|us|ns", help=SETTINGS["time_unit"].help)
]
Context = Annotated[
    int | None,
    typer.Option(metavar="N", help="Report a row with more tokens than this as an error."),
]
SkipBadRows = Annotated[
    bool, typer.Option("--skip-bad-rows", help="Skip and count rows that cannot be read.")
]


@app.command("fit")
def fit(
    file: Log,
    out: ProfileOut = None,
    column: Columns = None,
    time_unit: TimeUnit = None,
    context: Context = None,
    skip_bad_rows: SkipBadRows = False,
    html: Html = None,
) -> None:
    """Make a workload file from a trace or a log, without prompts or user names, safe to share.

    ampacity workload fit gateway.csv --column time=ts --column input=tokens_in
    """
    from ampacity.settings import read_settings
    from ampacity.workloads.errors import WorkloadError
    from ampacity.workloads.fit.profile import write_profile
    from ampacity.workloads.fit.servegen import fit_servegen, is_servegen
    from ampacity.workloads.fit.view import view
    from ampacity.workloads.profile import load_workload

    raw = {"column": column or [], "time_unit": time_unit}
    options = read_settings({name: value for name, value in raw.items() if value is not None})
    if context is not None and context < 1:
        raise WorkloadError(f"--context {context}: give 1 or more")
    path = out or Path(f"{_stem(file)}.yaml")
    if path.exists() and (out is None or path.resolve() == file.resolve()):
        raise WorkloadError(f"{path} exists already: name another file with -o")
    if is_servegen(file):
        if column or time_unit or context or skip_bad_rows:
            raise WorkloadError(
                f"{file} is a client of ServeGen: drop --column, --time-unit, --context and "
                "--skip-bad-rows"
            )
        profile = fit_servegen(file)
    else:
        profile = _fit_trace(file, options, context, skip_bad_rows)
    write_profile(path, profile)
    _draw(view(load_workload(str(path)), profile["measured"]), html)
    typer.echo(path)


def _stem(file: Path) -> str:
    return file.name.split(".")[0] or "profile"


def _fit_trace(
    file: Path, options: dict[str, Any], context: int | None, skip_bad_rows: bool
) -> dict[str, Any]:
    from ampacity.workloads.fit.profile import fit as fit_trace
    from ampacity.workloads.traces.read import read_trace

    trace = read_trace(
        file,
        columns=options["column"],
        time_unit=options.get("time_unit"),
        context=context,
        skip_bad_rows=skip_bad_rows,
        timed=False,
        progress=_progress(),
    )
    profile = fit_trace(trace, _stem(file))
    if not trace.clock:
        note = f"{file.name}: no column of time: nothing is known of arrivals"
        profile["measured"].setdefault("notes", []).append(note)
    return profile


Count = Annotated[
    int | None, typer.Option("-n", "--requests", metavar="N", help="Number of requests to write.")
]
Rates = Annotated[
    float | None,
    typer.Option(
        "--rates", metavar="R", help="Requests/s. Default: the rate that a fit measured, else 1."
    ),
]
Duration = Annotated[
    str | None, typer.Option(metavar="T", help="Length of the schedule, e.g. 30s.")
]
Seed = Annotated[int, typer.Option(metavar="N", help="Fixes lengths and arrival times.")]
ScheduleOut = Annotated[
    Path | None,
    typer.Option("-o", "--out", metavar="FILE", help="JSONL file to write. Default: stdout."),
]


@app.command("sample")
def sample(
    name: Name,
    requests: Count = None,
    rate: Rates = None,
    duration: Duration = None,
    seed: Seed = 1,
    out: ScheduleOut = None,
) -> None:
    """Write the schedule of a workload as JSONL, which 'ampacity run --trace FILE' replays exactly.

    ampacity workload sample chat --rates 5 --duration 2m -o schedule.jsonl
    """
    from ampacity.workloads.errors import WorkloadError
    from ampacity.workloads.profile import load_workload, workload_text
    from ampacity.workloads.schedule_file import write_schedule

    if (requests is None) == (duration is None):
        raise WorkloadError("give -n N requests, or --duration T (one of them)")
    if requests is not None and requests < 1:
        raise WorkloadError(f"-n {requests}: give 1 or more")
    workload = load_workload(name)
    rate = _measured_rate(name) if rate is None else rate
    if not 0 < rate < float("inf"):
        raise WorkloadError(f"--rates {rate:g}: give requests/s above 0")
    schedule = _schedule(workload, rate, requests, duration, seed)
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
    with writing(out), out.open("w", encoding="utf-8") as file:
        write_schedule(file, schedule, described)
    typer.echo(f"{len(schedule)} requests at {rate:g} req/s, {schedule.planned_tokens():,} tokens")
    typer.echo(out)


def _measured_rate(name: str) -> float:
    from ampacity.workloads.fit.view import read_measured

    arrivals = read_measured(name).get("arrivals")
    measured = arrivals.get("mean_rps") if isinstance(arrivals, dict) else None
    return float(measured) if isinstance(measured, int | float) else 1.0


def _schedule(
    workload: Workload, rate_rps: float, requests: int | None, duration: str | None, seed: int
) -> Schedule:
    """Draw a schedule of ``duration``, or one of exactly ``requests``."""
    from ampacity.values import parse_duration
    from ampacity.workloads.schedule import open_schedule

    def draw(duration_s: float) -> Schedule:
        return open_schedule(workload, rate_rps=rate_rps, duration_s=duration_s, seed=seed, stage=0)

    if duration is not None:
        return draw(parse_duration(duration, "--duration"))
    duration_s = (requests or 0) / rate_rps
    schedule = draw(duration_s)
    while len(schedule) < (requests or 0):  # the number in a given time is random
        duration_s *= 1.3
        schedule = draw(duration_s)
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
