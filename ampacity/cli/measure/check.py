"""``ampacity check``: does an endpoint meet its SLOs at one load? For CI, without a baseline."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ampacity.cli import EXIT
from ampacity.cli import options as o

if TYPE_CHECKING:
    from ampacity.analysis.contract.summary import Summary

SET_BY_CHECK = (
    *("concurrency", "lengths", "duration", "think_time", "ramp"),
    *("peak_rps", "tp", "safety", "gpu_hour"),
)
MaxDuration = Annotated[
    str, o.opt("T", "Time limit, e.g. 30m. The check ends as soon as it knows.")
]


@o.shares(but=SET_BY_CHECK, rates=False)
def check(
    url: o.Url,
    raw: dict[str, Any],
    max_duration: MaxDuration = "10m",
    junit: o.JUnit = None,
    markdown: o.Markdown = None,
    json: o.Json = False,
) -> None:
    """Check whether an endpoint meets its SLOs at a given rate, and end as soon as that is known.

    Exit status: 0 met, 1 violated, 3 inconclusive, 2 not checked.

    ampacity check http://127.0.0.1:8000/v1 --rates 5 --slo ttft_p95=250ms

    ampacity check http://127.0.0.1:8000/v1 --rates 5 --slo itl_p99=50ms --json
    """
    from ampacity.analysis.change.results import CheckResult
    from ampacity.analysis.next_run import again
    from ampacity.cli.experiment import run_experiment
    from ampacity.cli.judge.ci import hand_over
    from ampacity.cli.output import console, print_folder
    from ampacity.experiments.check import check as experiment
    from ampacity.experiments.check import refuse, result_of
    from ampacity.experiments.rerun import command_line
    from ampacity.reports.change.gate import check_screen
    from ampacity.reports.render.terminal import show

    judged = False

    def judge(path: Path, summary: Summary) -> int:
        nonlocal judged
        judged, result = True, result_of(summary, str(path))
        advised = re.search(r"--max-duration (\w+)", result.sentence)
        longer = advised and again(command_line(sys.argv), {"--max-duration": advised[1]})

        def screen() -> None:
            show(check_screen(result, longer, path / "report.html"), console())
            print_folder(path)

        hand_over(result, junit, markdown, as_json=json, show=screen)
        return EXIT[result.verdict]

    how: dict[str, Any] = {"drive": experiment, "check": refuse, "judge": judge, "quiet": True}
    raw = {**raw, "url": url, "duration": max_duration}
    try:
        run_experiment(raw, experiment="check", as_json=json, **how)
    except typer.Exit:
        raise
    except Exception as error:  # CI's files must show it too, or no answer looks like a good one
        if judged:
            raise
        text = f"Not checked: {error or type(error).__name__}"
        failed = CheckResult(
            verdict="not_checked", sentence=text, notes=[], untracked={}, checks=[]
        )
        hand_over(failed, junit, markdown, as_json=json)
        raise
