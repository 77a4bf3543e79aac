"""``ampacity gate``: has this run become worse than the baseline, or broken an SLO?"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ampacity.cli.output import print_json, write_text

EXIT = {"pass": 0, "regression": 1, "cannot_compare": 2, "inconclusive": 3}


def gate(
    run: Annotated[Path, typer.Argument(help="Run directory of the candidate.", show_default=False)],
    baseline: Annotated[Path, typer.Option("--baseline", metavar="FILE", help="From 'ampacity baseline'.", show_default=False)],
    tolerance: Annotated[
        list[str] | None,
        typer.Option("--tolerance", metavar="METRIC=N%", help="As ttft_p99=10%, p90=5% or error_rate=0.5%; repeatable. Default: 3% at p50 and p90; p99 as its noise allows."),
    ] = None,
    slo: Annotated[
        list[str] | None,
        typer.Option("--slo", metavar="METRIC_pQ=LIMIT", help="Absolute limit, beside those of the baseline; repeatable."),
    ] = None,
    retry: Annotated[int, typer.Option("--retry", metavar="N", help="While inconclusive, run the candidate's command again, up to N times.", min=0, max=20)] = 0,
    self_test: Annotated[bool, typer.Option("--self-test", help="Make the candidate twice as slow and demand that the gate turns red.")] = False,
    junit: Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="Write JUnit XML.", show_default=False)] = None,
    summary: Annotated[Path | None, typer.Option("--summary", metavar="FILE", help="Append Markdown, as to $GITHUB_STEP_SUMMARY.", show_default=False)] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:  # fmt: skip
    """Judge a run against a baseline. Exit 0: pass; 1: regression or SLO broken; 3: inconclusive; 2: cannot compare.

    ampacity gate runs/candidate --baseline base.json --tolerance ttft_p99=10% --junit gate.xml
    """
    from analysis.baseline_file import read_baseline
    from analysis.gate import slos_of
    from analysis.tolerances import parse_tolerances
    from reports.gate import gate_markdown, junit_xml, lines, workflow_commands

    failure: Exception | None = None
    try:
        base = read_baseline(baseline)
        result = _judge(
            run, base, parse_tolerances(tolerance or []), slos_of(base, slo or []), retry, self_test
        )
    except Exception as error:  # said in the CI's files too, so that no answer does not look like a good one
        failure = error
        result = {
            "verdict": "cannot_compare",
            "sentence": f"Cannot compare: {error or type(error).__name__}",
            "checks": [],
            "notes": [],
            "untracked": {},
        }
    if junit:
        write_text(junit, junit_xml(result))
    if summary:
        write_text(summary, gate_markdown(result), append=True)
    if os.environ.get("GITHUB_ACTIONS") == "true" and not self_test:
        print(*workflow_commands(result), sep="\n", file=sys.stderr if json else sys.stdout)
    if json:
        print_json(result)
    if failure:
        raise failure
    if not json:
        print(*lines(result), sep="\n")
    if self_test:
        red = any(c["verdict"] == "regression" and c["kind"] == "change" for c in result["checks"])
        print(
            f"self-test {'passed: twice as slow is found' if red else 'FAILED: twice as slow is not found'}",
            file=sys.stderr,
        )
        raise typer.Exit(0 if red else 1)
    raise typer.Exit(EXIT[result["verdict"]])


def _judge(path: Path, base: dict[str, Any], tolerances: dict[str, float], slos: list[Any], retry: int, self_test: bool) -> dict[str, Any]:  # fmt: skip
    """The answer; while it is inconclusive, further samples of the candidate."""
    from ampacity.experiments.rerun import rerun
    from analysis.comparable import prepare
    from analysis.gate import judge_gate
    from analysis.twice_as_slow import twice_as_slow
    from loadgen.rundir import load_run

    first = load_run(path)
    runs = [prepare(twice_as_slow(first) if self_test else first, slos)]
    result = judge_gate(base, runs, tolerances, looks=1 + retry)
    for number in range(1, 0 if self_test else retry + 1):
        if result["verdict"] != "inconclusive":
            break
        print(f"{result['sentence']} Sample {number + 1} of at most {retry + 1}.", file=sys.stderr)
        seed = int(first.meta.get("seed") or 0) + (0 if result["same_schedule"] else number)
        again = rerun(first.meta, _free(path.with_name(f"{path.name}-retry-{number}")), seed)
        runs.append(prepare(load_run(again), slos))
        result = judge_gate(base, runs, tolerances, looks=1 + retry)
    return result


def _free(path: Path) -> Path:
    found, number = path, 2
    while found.exists():
        found, number = path.with_name(f"{path.name}-{number}"), number + 1
    return found
