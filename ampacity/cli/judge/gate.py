"""``ampacity gate``: judge a run against a baseline and SLOs, for CI."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ampacity.cli import options as o
from ampacity.cli.judge.ci import hand_over
from ampacity.cli.output import console, shown, writing

if TYPE_CHECKING:
    from ampacity.analysis.change.results import GateResult

EXIT = {"pass": 0, "regression": 1, "cannot_compare": 2, "inconclusive": 3}

MORE_SAMPLES = 2  # that are recommended where a result is inconclusive

Runs = Annotated[
    list[Path], o.arg("Run directory of the candidate, then of further samples of it.")
]
Baseline = Annotated[Path, o.opt("FILE", "File from 'ampacity baseline'.", show_default=False)]
Tolerance = Annotated[
    list[str] | None,
    o.opt(
        "METRIC=N%",
        "Allowed change, e.g. ttft_p99=10%, p90=5% or error_rate=0.5%; repeatable. Default: "
        "from the baseline's noise.",
    ),
]
MaxSamples = Annotated[
    int | None,
    o.opt(
        "N",
        "While inconclusive, repeat the candidate's run, up to N samples in all. Default: 1.",
        min=1,
        max=20,
    ),
]
MaxDuration = Annotated[
    str | None, o.opt("T", "Time limit, e.g. 30m. Of all further samples together.")
]
MaxTokens = Annotated[
    int | None, o.opt("N", "Limit of tokens, input plus output. Of all further samples.", min=1)
]
SelfTest = Annotated[
    bool,
    o.opt(None, "Make the candidate twice as slow and check that the gate fails.", "--self-test"),
]


@o.shares(("slo",))
def gate(
    raw: dict[str, Any],
    run: Runs,
    baseline: Baseline,
    tolerance: Tolerance = None,
    max_samples: MaxSamples = None,
    max_duration: MaxDuration = None,
    max_tokens: MaxTokens = None,
    self_test: SelfTest = False,
    html: o.Html = None,
    junit: o.JUnit = None,
    markdown: o.Markdown = None,
    json: o.Json = False,
) -> None:
    """Judge a run against a baseline, for CI.

    Exit status: 0 pass, 1 regression or SLO violated, 2 cannot compare, 3 inconclusive.

    ampacity gate runs/new --baseline base.json --tolerance ttft_p99=10%

    ampacity gate runs/new --baseline base.json --max-samples 3 --junit gate.xml
    """
    from ampacity.analysis.gate.baseline_file import read_baseline
    from ampacity.analysis.gate.checks import parse_tolerances, slos_of
    from ampacity.experiments.samples import Budget, judge_samples
    from ampacity.reports.change.gate import gate_screen, lines
    from ampacity.reports.change.gate_page import write_gate_page
    from ampacity.reports.render.terminal import show
    from ampacity.values import parse_duration

    failure: Exception | None = None
    try:
        base = read_baseline(baseline)
        seconds = None if max_duration is None else parse_duration(max_duration, "--max-duration")
        budget = Budget(max_samples, seconds, max_tokens)
        tolerances, slos = parse_tolerances(tolerance or []), slos_of(base, raw.get("slo", []))
        result = judge_samples(run, base, tolerances, slos, budget, self_test)
    except Exception as error:  # CI's files must show it too, or no answer looks like a good one
        failure, result = error, _cannot_compare(error)
    following = _next_command(result, len(run))

    def screen() -> None:
        if failure:
            return
        if shown.full:
            print(*lines(result), sep="\n")
        else:
            show(gate_screen(result, following), console())

    try:
        hand_over(result, junit, markdown, annotate=not self_test, as_json=json, show=screen)
        if html:
            with writing(html):
                write_gate_page(html, result, following)
            if not json:
                print(f"report: {html}")
    finally:
        if failure:  # rather than that a file cannot be written
            raise failure
    if self_test:
        raise typer.Exit(_self_test_status(result))
    raise typer.Exit(EXIT[result.verdict])


def _next_command(result: GateResult, samples: int) -> str | None:
    """Return the command that was given, with further samples or with every check printed.

    None where all samples are taken that the command allowed.
    """
    from ampacity.analysis.next_run import again
    from ampacity.experiments.rerun import command_line

    more = {
        "inconclusive": {"--max-samples": str(samples + MORE_SAMPLES)},
        "regression": {"--summary": "full"},
    }.get(result.verdict)
    all_taken = result.looks != 1 and result.look == result.looks
    return None if more is None or all_taken else again(command_line(sys.argv), more)


def _cannot_compare(error: Exception) -> GateResult:
    from ampacity.analysis.change.results import GateResult

    sentence = f"Cannot compare: {error or type(error).__name__}"
    empty: dict[str, Any] = {"notes": [], "untracked": {}, "checks": []}
    return GateResult(verdict="cannot_compare", sentence=sentence, **empty)


def _self_test_status(result: GateResult) -> int:
    found = any(c.verdict == "regression" and c.kind == "change" for c in result.checks)
    outcome = "passed: twice as slow is found" if found else "FAILED: twice as slow is not found"
    print(f"self-test {outcome}", file=sys.stderr)
    return 0 if found else 1
