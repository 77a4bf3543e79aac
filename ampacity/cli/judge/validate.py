"""``ampacity validate``: compare production metrics with a benchmark's assumptions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ampacity.cli import options as o
from ampacity.cli.output import print_json

Production = Annotated[
    list[str],
    typer.Option(
        metavar="FILE|URL",
        help="Metrics page (file or URL) of each replica, repeatable; or one request log.",
        show_default=False,
    ),
]
Before = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FILE",
        help="The same pages, scraped earlier by the time --over; only the difference counts.",
    ),
]
Over = Annotated[
    str | None,
    typer.Option(
        metavar="T", help="Time between the two scrapes. URLs are scraped twice, this far apart."
    ),
]
Replicas = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Number of replicas, behind the pages.",
        min=1,
        show_default="one per page",
    ),
]
StageNumber = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Stage to compare with.",
        show_default="the nearest to production's rate, else that at capacity",
    ),
]


def validate(
    run: o.RunDir,
    production: Production,
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
    from ampacity.analysis.contract.summary import to_json
    from ampacity.analysis.summary import summarise
    from ampacity.analysis.validate import validate as judge
    from ampacity.imports import production as source
    from ampacity.loadgen.rundir.files import load_run
    from ampacity.values import parse_duration

    replicas = replicas or len(production)
    loaded = load_run(run)
    summary = to_json(summarise(loaded))
    interval_s = parse_duration(over, "--over") if over else None
    observed = source.production(production, before or [], interval_s)
    chosen = _stage(run, summary, stage, observed.rps and observed.rps / replicas)
    findings = judge(_benchmark(loaded, chosen), observed, replicas)
    violated = [f["name"] for f in findings if f["verdict"] == "violated"]
    if json:
        result = {
            "stage": chosen["index"],
            "production": observed.source,
            "violated": violated,
            "findings": findings,
            "notes": list(observed.notes),
        }
        print_json(result)
    else:
        print(*_lines(findings, chosen, observed.source), *observed.notes, sep="\n")
    raise typer.Exit(1 if violated else 0)


def _stage(
    run: Path, summary: dict[str, Any], number: int | None, rate_rps: float | None
) -> dict[str, Any]:
    """Return stage ``number``, or the one that fits production's rate per instance best."""
    from ampacity.analysis.validate import ValidateError, choose_stage

    if number is None:
        nearest: dict[str, Any]
        nearest = choose_stage(summary["stages"], summary["capacity"], rate_rps)
        return nearest
    stages: list[dict[str, Any]] = summary["stages"]
    found = [stage for stage in stages if stage["index"] == number]
    if not found:
        raise ValidateError(f"{run} has no stage {number}")
    return found[0]


def _benchmark(run: Any, stage: dict[str, Any]) -> Any:
    import numpy as np

    from ampacity.analysis.metrics.requests import read_requests
    from ampacity.analysis.validate import Benchmark

    requests = read_requests(run.requests, 0)
    requests = requests.take((requests.stage == stage["index"]) & (requests.attempt == 0))
    answers = requests.take(requests.has_status("ok"))
    sent, received = (v[~np.isnan(v)] for v in (answers.input_tokens, answers.output_tokens))
    gaps_s = np.diff(requests.scheduled_ns) * 1e-9 if stage["kind"] == "open" else np.empty(0)
    return Benchmark(stage, sent, received, gaps_s)


def _lines(findings: list[dict[str, Any]], stage: dict[str, Any], source: str) -> list[str]:
    order = ("violated", "met", "inconclusive")
    lines = [f"{source} against stage {stage['index']} ({stage['achieved_rps']:.3g} requests/s)"]
    for f in sorted(findings, key=lambda f: order.index(f["verdict"])):
        lines.append(f"{f['verdict']:12} {f['name']}: assumed that {f['assumption']}")
        benchmark, figure, *bounds = (
            _figure(f["name"], x)
            for x in (f["benchmark"], f["production"], *(f["production_bounds"] or ()))
        )
        between = f" (between {' and '.join(bounds)})" if bounds and f["name"] != "load" else ""
        figures = f"benchmark {benchmark}, production {figure}{between}; "
        lines.append(f"{'':13}{figures if f['benchmark'] is not None else ''}{f['reason']}")
    violated = sum(f["verdict"] == "violated" for f in findings)
    lines.append(
        "Latencies of metrics pages are the engine's own, without network and gateways: users wait "
        "longer than that."
    )
    lines.append(f"{violated or 'No'} {'assumption' if violated == 1 else 'assumptions'} violated")
    return lines


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
