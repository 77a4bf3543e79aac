"""``ampacity soak``: one load for hours, in flat memory, and what changed since when."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ampacity.cli import EXIT
from ampacity.cli import options as o

if TYPE_CHECKING:
    from ampacity.analysis.contract.summary import Summary

SET_BY_SOAK = (
    *("rates", "concurrency", "lengths", "think_time", "ramp", "workers", "ray"),
    *("keep_answers", "peak_rps", "tp", "safety", "gpu_hour", "prompts", "skip_bad_rows"),
    "duration",  # one
)
WINDOWS = 48.0  # of a soak whose window is not given ...
WINDOW_S = (1.0, 600.0)  # ... within these lengths
Rps = Annotated[float, o.opt("R", "Load in requests/s.", show_default=False)]
Duration = Annotated[str, o.opt("T", "Length of a stage: of the whole soak.")]
Window = Annotated[
    str | None,
    o.opt(
        "T",
        "Length of a window. Summary and report are written anew after each. Default: a 48th "
        "of --duration, 10m at most.",
    ),
]


@o.shares(but=SET_BY_SOAK)
def soak(
    url: o.Url,
    raw: dict[str, Any],
    rps: Rps,
    duration: Duration = "8h",
    window: Window = None,
    json: o.Json = False,
) -> None:
    """Send one load for hours, and find what changed and since when.

    Exit status with an SLO: 0 met, 1 violated, 3 inconclusive.

    ampacity soak http://127.0.0.1:8000/v1 --rps 50 --slo ttft_p99=2s

    ampacity soak http://127.0.0.1:8000/v1 --rps 5 --duration 1h --window 1m
    """
    from ampacity.cli.experiment import run_experiment
    from ampacity.config import check_steady
    from ampacity.experiments.soak import SoakPlan
    from ampacity.settings import Settings
    from ampacity.values import ConfigError, parse_duration

    if not 0 < rps < 1e6:
        raise ConfigError(f"--rps {rps:g}: give a number above 0")
    raw |= {"duration": duration, "url": url, "rates": rps}
    duration_s = parse_duration(duration, "--duration")
    window_s = min(max(duration_s / WINDOWS, WINDOW_S[0]), WINDOW_S[1])
    if window is not None:
        window_s = parse_duration(window, "--window")
    plan = SoakPlan(rps, duration_s, window_s)

    def check(settings: Settings) -> None:
        check_steady(settings.workload, "soak")
        plan.check(settings.workload)

    def judge(_: Path, summary: Summary) -> int:
        verdict = summary.soak.verdict if summary.soak else "inconclusive"
        aborted = str(summary.partial or "").startswith("aborted")  # inconclusive: exits 2
        return 0 if not summary.slos or (aborted and verdict != "violated") else EXIT[verdict]

    how: dict[str, Any] = {"drive": plan.run, "check": check, "judge": judge}
    run_experiment(raw, experiment="soak", as_json=json, **how)
