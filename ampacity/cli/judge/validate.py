"""``ampacity validate``: compare production metrics with a benchmark's assumptions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ampacity.cli import options as o
from ampacity.cli.output import console, print_part

if TYPE_CHECKING:
    from ampacity.analysis.contract.stage import Stage
    from ampacity.analysis.contract.summary import Summary
    from ampacity.analysis.validate import Finding, Production, Validation
    from ampacity.reports.render.terminal import Screen

MARKS = {"violated": "✗", "met": "✓", "inconclusive": "?"}
ENGINE_TIMES = (
    "Latencies of metrics pages are the engine's own, without network and gateways: users wait "
    "longer."
)
Pages = Annotated[
    list[str],
    o.opt(
        "FILE|URL",
        "Metrics page (file or URL) of each replica, repeatable; or one request log.",
        show_default=False,
    ),
]
Before = Annotated[
    list[str] | None,
    o.opt(
        "FILE", "The same pages, scraped earlier by the time --over; only the difference counts."
    ),
]
Over = Annotated[
    str | None, o.opt("T", "Time between the two scrapes. URLs are scraped twice, this far apart.")
]
Replicas = Annotated[
    int | None, o.opt("N", "Number of replicas, behind the pages. Default: one per page.", min=1)
]
StageNumber = Annotated[
    int | None,
    o.opt(
        "N",
        "Stage to compare with. Default: the nearest to production's rate, else that at capacity.",
    ),
]


def validate(
    run: o.RunDir,
    production: Pages,
    before: Before = None,
    over: Over = None,
    replicas: Replicas = None,
    stage: StageNumber = None,
    json: o.Json = False,
) -> None:
    """Compare production metrics with a benchmark, and report which assumptions no longer hold.

    Exit status: 0 none is violated, 1 at least one is violated, 2 cannot compare.

    ampacity validate runs/search --production http://gpu1:8000/metrics --over 5m

    ampacity validate runs/search --production gateway.csv --stage 3
    """
    from ampacity.analysis.summary import summarise
    from ampacity.analysis.validate import Validation
    from ampacity.analysis.validate import validate as judge
    from ampacity.imports import production as source
    from ampacity.loadgen.rundir.files import load_run
    from ampacity.reports.render.terminal import show
    from ampacity.values import parse_duration

    replicas = replicas or len(production)
    loaded = load_run(run)
    summary = summarise(loaded)
    interval_s = parse_duration(over, "--over") if over else None
    observed = source.production(production, before or [], interval_s)
    chosen = _stage(run, summary, stage, observed.rps and observed.rps / replicas)
    findings = judge(_benchmark(loaded, chosen), observed, replicas)
    result = Validation(
        stage=chosen.index,
        production=observed.source,
        violated=[f.name for f in findings if f.verdict == "violated"],
        findings=findings,
        notes=list(observed.notes),
    )
    if json:
        print_part(result)
    else:
        show(_screen(run, result, chosen, observed), console())
    raise typer.Exit(1 if result.violated else 0)


def _stage(run: Path, summary: Summary, number: int | None, rate_rps: float | None) -> Stage:
    """Return stage ``number``, or the one that fits production's rate per instance best."""
    from ampacity.analysis.validate import ValidateError, choose_stage

    if number is None:
        return choose_stage(summary.stages, summary.capacity, rate_rps)
    found = [stage for stage in summary.stages if stage.index == number]
    if not found:
        raise ValidateError(f"{run} has no stage {number}")
    return found[0]


def _benchmark(run: Any, stage: Stage) -> Any:
    import numpy as np

    from ampacity.analysis.metrics.requests import read_requests
    from ampacity.analysis.validate import Benchmark

    requests = read_requests(run.requests, 0)
    requests = requests.take((requests.stage == stage.index) & (requests.attempt == 0))
    answers = requests.take(requests.has_status("ok"))
    sent, received = (v[~np.isnan(v)] for v in (answers.input_tokens, answers.output_tokens))
    gaps_s = np.diff(requests.scheduled_ns) * 1e-9 if stage.kind == "open" else np.empty(0)
    return Benchmark(stage, sent, received, gaps_s)


def _screen(run: Path, result: Validation, stage: Stage, observed: Production) -> Screen:
    """Return how many assumptions are violated, and each of them with its figures."""
    from shlex import join

    from ampacity.reports.render.table import Cell, Column, Rows
    from ampacity.reports.render.terminal import Entry, Screen

    violated, findings = result.violated, result.findings
    what = "assumption" if len(violated) == 1 else "assumptions"
    text = f"{len(violated) or 'no'} {what} violated{': ' * bool(violated)}{', '.join(violated)}"
    against = f"{observed.source} against stage {stage.index} ({stage.achieved_rps:.3g} req/s)"
    answers = [Entry("VERDICT", text, against, "bad" if violated else "good")]
    rows = Rows("", sorted(findings, key=lambda f: list(MARKS).index(f.verdict)))
    states = {"violated": "bad", "met": "good", "inconclusive": "unsure"}
    rows.column(Column("", text=True), lambda _, f: Cell(MARKS[f.verdict], state=states[f.verdict]))
    rows.words("assumption", lambda f: f.name)
    rows.column(Column("benchmark"), lambda _, f: Cell(_figure(f.name, f.benchmark)))
    rows.column(Column("production"), lambda _, f: Cell(_figure(f.name, f.production)))
    rows.column(Column("between", "", 2), lambda _, f: Cell(_between(f)))
    rows.column(Column("", text=True, cut=True), lambda _, f: Cell(f.reason or ""))
    rows.column(Column("assumed that", "", 1, text=True), lambda _, f: Cell(f.assumption))
    more = ["ampacity", "plan", str(run), "--peak-rps", f"{observed.rps or 0:.3g}"]
    following = join(more) if "load" in violated and observed.rps else None
    return Screen(
        answers, rows.done(), notes=[ENGINE_TIMES, *observed.notes], next_command=following, rows=12
    )


def _between(finding: Finding) -> str:
    """Return the bounds of a figure that is read off a histogram."""
    if finding.name == "load" or not finding.production_bounds:
        return ""
    return " to ".join(_figure(finding.name, x) for x in finding.production_bounds)


def _figure(name: str, value: float | None) -> str:
    from ampacity.reports.render.figures import rate, seconds, share, significant

    if value is None:
        return "not known"
    if name == "arrivals":
        return significant(value)
    if name.endswith("_tokens"):
        return f"{significant(value)} tokens"
    if name == "load":
        return rate(value)
    return seconds(value) if name.endswith(("p95", "p99")) else share(value)
