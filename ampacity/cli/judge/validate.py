"""``ampacity validate``: compare production metrics with a benchmark's assumptions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ampacity.cli.output import print_json


def validate(
    run: Annotated[
        Path, typer.Argument(help="Run directory of the benchmark.", show_default=False)
    ],
    production: Annotated[
        list[str],
        typer.Option(
            "--production",
            metavar="FILE|URL",
            help="Metrics page (file or URL) of each replica, repeatable; or one request log.",
            show_default=False,
        ),
    ],
    before: Annotated[
        list[str] | None,
        typer.Option(
            "--before",
            metavar="FILE",
            help="The same pages, scraped earlier by the time --over; only the difference counts.",
        ),
    ] = None,
    over: Annotated[
        str | None,
        typer.Option(
            "--over",
            metavar="T",
            help="Time between the two scrapes. URLs are scraped twice, this far apart.",
        ),
    ] = None,
    instances: Annotated[
        int | None,
        typer.Option(
            "--instances",
            metavar="N",
            help="Replicas behind the given pages. Default: one per page.",
            min=1,
        ),
    ] = None,
    stage: Annotated[
        int | None,
        typer.Option(
            "--stage",
            metavar="N",
            help="Stage to compare with. Default: the nearest to production's rate, else that at capacity.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Compare production metrics with a benchmark, and report which assumptions no longer hold.

    Exit status: 0 none is violated, 1 at least one is violated, 2 cannot compare.

    ampacity validate runs/search --production http://127.0.0.1:8000/metrics --over 5m
    """
    from ampacity.analysis.slo import parse_duration
    from ampacity.analysis.summary import summarise
    from ampacity.analysis.validate import ValidateError, choose_stage
    from ampacity.analysis.validate import validate as judge
    from ampacity.imports import production as source
    from ampacity.loadgen.rundir.files import load_run

    instances = instances or len(production)
    loaded = load_run(run)
    summary = summarise(loaded)
    held = source.production(
        production, before or [], parse_duration(over, "--over") if over else None
    )
    if stage is not None and not any(s["index"] == stage for s in summary["stages"]):
        raise ValidateError(f"{run} has no stage {stage}")
    chosen = next((s for s in summary["stages"] if s["index"] == stage), None) or choose_stage(
        summary["stages"], summary["capacity"], held.rps and held.rps / instances
    )
    findings = judge(_benchmark(loaded, chosen), held, instances)
    broken = [f for f in findings if f["verdict"] == "violated"]
    if json:
        answer = {
            "stage": chosen["index"],
            "production": held.source,
            "violated": [f["name"] for f in broken],
            "findings": findings,
            "notes": list(held.notes),
        }
        print_json(answer)
    else:
        print(*_lines(findings, chosen, held.source), *held.notes, sep="\n")
    raise typer.Exit(1 if broken else 0)


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
    marks = {"violated": "BROKEN ", "met": "kept   ", "inconclusive": "inconclusive"}
    found = [f"{source} against stage {stage['index']} ({stage['achieved_rps']:.3g} requests/s)"]
    for f in sorted(
        findings, key=lambda f: ("violated", "met", "inconclusive").index(f["verdict"])
    ):
        found.append(f"{marks[f['verdict']]} {f['name']}: assumed that {f['assumption']}")
        benchmark, figure, *bounds = (
            _figure(f["name"], x)
            for x in (f["benchmark"], f["production"], *(f["production_bounds"] or ()))
        )
        between = f" (between {' and '.join(bounds)})" if bounds and f["name"] != "load" else ""
        figures = f"benchmark {benchmark}, production {figure}{between}; "
        found.append(f"        {figures if f['benchmark'] is not None else ''}{f['reason']}")
    broken = sum(f["verdict"] == "violated" for f in findings)
    found.append(
        "Latencies of metrics pages are the engine's own, without network and gateways: users wait longer than that."
    )
    found.append(
        f"{broken} assumptions broke" if broken else "No assumption that can be told broke"
    )
    return found


def _figure(name: str, value: float | None) -> str:
    from ampacity.reports.render.figures import rate, seconds, share, significant

    if value is None:
        return "not known"
    if name == "arrivals":
        return significant(value)
    if name.endswith("_tokens"):
        return f"{significant(value)} tokens"
    return (
        rate(value)
        if name == "load"
        else seconds(value)
        if name.endswith(("p95", "p99"))
        else share(value)
    )
