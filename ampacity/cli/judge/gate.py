"""``ampacity gate``: has this run become worse than the baseline, or broken an SLO?"""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ampacity.cli.output import print_json, write_text

MOST_SAMPLES = 20
EXIT = {"pass": 0, "regression": 1, "cannot_compare": 2, "inconclusive": 3}


def gate(
    run: Annotated[
        list[Path],
        typer.Argument(
            help="Run directory of the candidate; further samples of it after it.",
            show_default=False,
        ),
    ],
    baseline: Annotated[
        Path,
        typer.Option(
            "--baseline", metavar="FILE", help="From 'ampacity baseline'.", show_default=False
        ),
    ],
    tolerance: Annotated[
        list[str] | None,
        typer.Option(
            "--tolerance",
            metavar="METRIC=N%",
            help="As ttft_p99=10%, p90=5% or error_rate=0.5%; repeatable. Default: what the baseline's noise allows.",
        ),
    ] = None,
    slo: Annotated[
        list[str] | None,
        typer.Option(
            "--slo",
            metavar="METRIC_pQ=LIMIT",
            help="Absolute limit, beside those of the baseline; repeatable.",
        ),
    ] = None,
    max_samples: Annotated[
        int | None,
        typer.Option(
            "--max-samples",
            metavar="N",
            help="While inconclusive, run the candidate's command again, up to N samples in all.",
            min=1,
            max=20,
            show_default="1",
        ),
    ] = None,
    max_duration: Annotated[
        str | None,
        typer.Option(
            "--max-duration",
            metavar="TIME",
            help="As long as further samples may take together, as 30m.",
            show_default=False,
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            metavar="N",
            help="As many tokens as further samples may cost together, prompts and answers.",
            min=1,
            show_default=False,
        ),
    ] = None,
    self_test: Annotated[
        bool,
        typer.Option(
            "--self-test",
            help="Make the candidate twice as slow and demand that the gate turns red.",
        ),
    ] = False,
    junit: Annotated[
        Path | None,
        typer.Option("--junit", metavar="FILE", help="Write JUnit XML.", show_default=False),
    ] = None,
    summary: Annotated[
        Path | None,
        typer.Option(
            "--summary",
            metavar="FILE",
            help="Append Markdown, as to $GITHUB_STEP_SUMMARY.",
            show_default=False,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Judge a run against a baseline. Exit 0: pass; 1: regression or SLO violated; 3: inconclusive; 2: cannot compare.

    ampacity gate runs/candidate --baseline base.json --tolerance ttft_p99=10% --junit gate.xml
    """
    from ampacity.analysis.change.baseline_file import read_baseline
    from ampacity.analysis.change.checks import parse_tolerances, slos_of
    from ampacity.reports.pages.gate import gate_markdown, junit_xml, lines, workflow_commands
    from ampacity.values import parse_duration

    failure: Exception | None = None
    try:
        base = read_baseline(baseline)
        seconds = None if max_duration is None else parse_duration(max_duration, "--max-duration")
        budget = Budget(max_samples, seconds, max_tokens)
        result = _judge(
            run,
            base,
            parse_tolerances(tolerance or []),
            slos_of(base, slo or []),
            budget,
            self_test,
        )
    except (
        Exception
    ) as error:  # said in the CI's files too, so that no answer does not look like a good one
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


@dataclass(frozen=True)
class Budget:
    """Of samples in all, and of seconds and tokens that further samples may take together; None: no such limit."""

    samples: int | None
    seconds: float | None
    tokens: int | None

    def looks(self, given: int, run_s: float, run_tokens: int) -> int:
        """How many samples there can be, where ``given`` are there and each takes as much as the first did."""
        limits = [MOST_SAMPLES if self.samples is None else self.samples]
        if self.seconds is not None:
            limits.append(given + int(self.seconds // max(run_s, 1e-9)))
        if self.tokens is not None:
            limits.append(given + self.tokens // max(run_tokens, 1))
        if (self.samples, self.seconds, self.tokens) == (None, None, None):
            return 1
        return max(min(*limits, MOST_SAMPLES), given)


def _judge(
    paths: list[Path],
    base: dict[str, Any],
    tolerances: dict[str, float],
    slos: list[Any],
    budget: Budget,
    self_test: bool,
) -> dict[str, Any]:
    """The answer; while it is inconclusive and the budget lasts, after further samples of the candidate."""
    from ampacity.analysis.change.comparable import CompareError, prepare
    from ampacity.analysis.change.gate import cost_of, judge_gate, twice_as_slow
    from ampacity.experiments.rerun import RerunError, command_of, repeatable, rerun
    from ampacity.loadgen.rundir.files import RunDirError, load_run

    loaded = [load_run(path) for path in paths]
    runs = [prepare(twice_as_slow(run) if self_test else run, slos) for run in loaded]
    looks = budget.looks(len(runs), *cost_of(runs[0]))
    result = judge_gate(base, runs, tolerances, look=min(len(runs), looks), looks=looks)
    while True:
        look = min(len(runs), looks)
        if self_test or result["verdict"] != "inconclusive" or look == looks:
            return result
        meta = loaded[0].meta
        # virtual time repeats itself to the last digit
        fresh = not result["same_schedule"] or meta.get("predicted")
        seed = int(meta.get("seed") or 0) + (len(runs) if fresh else 0)
        out = _free(paths[0].with_name(f"{paths[0].name}-sample-{len(runs) + 1}"))
        try:
            command = command_of(meta, out, seed)
        except RerunError as error:
            result["notes"].append(
                f"Up to {looks} samples may be taken: {error}, then give both directories to ampacity gate."
            )
            return result
        if not repeatable(command):
            again = shlex.join([*map(str, paths), str(out)])
            result["notes"].append(
                f"Up to {looks} samples may be taken, but the value of --header is not written down. Put it in and run: "
                f"{shlex.join(command)} && ampacity gate {again} --baseline FILE --max-samples {looks}"
            )
            return result
        print(f"{result['sentence']} Sample {len(runs) + 1} of at most {looks}.", file=sys.stderr)
        try:
            rerun(command)
            runs.append(prepare(load_run(out), slos))
            result = judge_gate(base, runs, tolerances, look=min(len(runs), looks), looks=looks)
        except (RerunError, CompareError, RunDirError) as error:  # what was answered so far stands
            result["notes"].append(
                f"Sample {look + 1} of at most {looks} could not be taken: {error}"
            )
            return result


def _free(path: Path) -> Path:
    found, number = path, 2
    while found.exists():
        found, number = path.with_name(f"{path.name}-{number}"), number + 1
    return found
