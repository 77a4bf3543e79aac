"""``ampacity workload``: list and show workloads, fit one to a log, write a schedule."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ampacity.cli.output import writing

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
            f"{name:<{width}} input {workload.input_tokens.describe()['text']}; output {workload.output_tokens.describe()['text']}"
        )


@app.command("show")
def show(
    name: Name,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write it as an HTML page.")
    ] = None,
) -> None:
    """Show one workload: lengths, arrivals, source, and the measurements of a fit."""
    from ampacity.workloads.fit.view import read_measured, view
    from ampacity.workloads.profile import load_workload

    workload = load_workload(name)
    _draw(view(workload, read_measured(name)), html)


@app.command("fit")
def fit(
    file: Annotated[
        Path,
        typer.Argument(
            help="Trace or log: .csv, .jsonl, .json, .parquet or .log, optionally .gz.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            metavar="FILE",
            help="Workload file to write. Default: NAME.yaml in the current folder.",
            show_default=False,
        ),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROLE=NAME",
            help="Column with this role: time, input, output, session, client, cached or hash_ids. E.g. time=ts or input=usage.in; repeatable.",
        ),
    ] = None,
    time_unit: Annotated[
        str | None,
        typer.Option(
            metavar="s|ms|us|ns",
            help="Unit of the times. Default: from the column's name or the size of the numbers.",
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(metavar="N", help="Report a row with more tokens than this as an error."),
    ] = None,
    skip_bad_rows: Annotated[
        bool, typer.Option("--skip-bad-rows", help="Skip and count rows that cannot be read.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write it as an HTML page.")
    ] = None,
) -> None:
    """Make a workload file from a trace or a log, without prompts or user names, safe to share.

    ampacity workload fit gateway.csv --column time=ts --column input=tokens_in --column output=tokens_out
    """
    from ampacity.workloads.errors import WorkloadError
    from ampacity.workloads.fit.profile import fit as fit_trace
    from ampacity.workloads.fit.profile import write_profile
    from ampacity.workloads.fit.servegen import fit_servegen, is_servegen
    from ampacity.workloads.fit.view import view
    from ampacity.workloads.profile import load_workload
    from ampacity.workloads.traces.fields import parse_columns
    from ampacity.workloads.traces.read import read_trace

    columns = parse_columns(column or [])
    if time_unit is not None and time_unit not in ("s", "ms", "us", "ns"):
        raise WorkloadError(f"--time-unit {time_unit}: choose one of s, ms, us, ns")
    if context is not None and context < 1:
        raise WorkloadError(f"--context {context}: give 1 or more")
    stem = file.name.split(".")[0] or "profile"
    path = out or Path(f"{stem}.yaml")
    if path.exists() and (out is None or path.resolve() == file.resolve()):
        raise WorkloadError(f"{path} is there already: name another file with -o")
    if is_servegen(file):
        if columns or time_unit or context or skip_bad_rows:
            raise WorkloadError(
                f"{file} is a client of ServeGen: drop --column, --time-unit, --context and --skip-bad-rows"
            )
        profile = fit_servegen(file)
    else:
        trace = read_trace(
            file,
            columns=columns,
            time_unit=time_unit,
            context=context,
            skip_bad_rows=skip_bad_rows,
            timed=False,
            progress=_progress(),
        )
        profile = fit_trace(trace, stem)
        if not trace.clock:
            profile["measured"].setdefault("notes", []).append(
                f"{file.name}: no column of time: nothing is known of arrivals"
            )
    write_profile(path, profile)
    _draw(view(load_workload(str(path)), profile["measured"]), html)
    typer.echo(path)


@app.command("sample")
def sample(
    name: Name,
    requests: Annotated[
        int | None,
        typer.Option("-n", "--requests", metavar="N", help="Number of requests to write."),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            "--rates",
            metavar="R",
            help="Requests/s. Default: the rate that a fit measured, else 1.",
        ),
    ] = None,
    duration: Annotated[
        str | None, typer.Option(metavar="T", help="Length of the schedule, e.g. 30s.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Fixes lengths and arrival times.")] = 1,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="FILE", help="JSONL file to write. Default: stdout."),
    ] = None,
) -> None:
    """Write the schedule of a workload as JSONL, which 'ampacity run --trace FILE' replays exactly.

    ampacity workload sample chat --rates 5 --duration 2m -o schedule.jsonl
    """
    from ampacity.values import parse_duration
    from ampacity.workloads.errors import WorkloadError
    from ampacity.workloads.fit.view import read_measured
    from ampacity.workloads.profile import load_workload, workload_text
    from ampacity.workloads.schedule import open_schedule
    from ampacity.workloads.schedule_file import write_schedule

    if (requests is None) == (duration is None):
        raise WorkloadError("give -n N requests, or --duration T (one of them)")
    if requests is not None and requests < 1:
        raise WorkloadError(f"-n {requests}: give 1 or more")
    workload = load_workload(name)
    if rate is None:
        arrivals = read_measured(name).get("arrivals")
        held = arrivals.get("mean_rps") if isinstance(arrivals, dict) else None
        rate = float(held) if isinstance(held, int | float) else 1.0
    if not 0 < rate < float("inf"):
        raise WorkloadError(f"--rates {rate:g}: give requests/s above 0")
    duration_s = (
        (requests or 0) / rate if duration is None else parse_duration(duration, "--duration")
    )
    schedule = open_schedule(workload, rate_rps=rate, duration_s=duration_s, seed=seed, stage=0)
    while len(schedule) < (requests or 0):  # the number in a given time is random
        duration_s *= 1.3
        schedule = open_schedule(workload, rate_rps=rate, duration_s=duration_s, seed=seed, stage=0)
    schedule, _ = schedule.capped(max_requests=requests)
    if schedule.shared is not None and schedule.shared.note:
        typer.echo(schedule.shared.note, err=True)
    described = None
    if workload.classes or workload.sessions or workload.images:
        described = workload_text(name)
        for header in described[1]:
            typer.echo(
                f"the value of the header {header} is left out: give it to run, with --header",
                err=True,
            )
    if out is None:
        write_schedule(sys.stdout, schedule, described)
        return
    with writing(out), out.open("w", encoding="utf-8") as file:
        write_schedule(file, schedule, described)
    typer.echo(f"{len(schedule)} requests at {rate:g} req/s, {schedule.planned_tokens():,} tokens")
    typer.echo(out)


def _draw(view: dict[str, Any], html: Path | None) -> None:
    from rich.console import Console

    from ampacity.reports.pages.profile import facts, render_profile, write_profile_page
    from ampacity.workloads.errors import WorkloadError

    try:
        facts(view)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WorkloadError(
            f"workload {view['name']}: 'measured' is not as 'ampacity workload fit' wrote it ({type(error).__name__} {error}): fit anew or drop it"
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
