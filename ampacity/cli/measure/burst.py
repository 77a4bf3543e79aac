"""``ampacity burst``: the effect of a sudden load, and how long an endpoint takes to recover."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ampacity.cli import EXIT
from ampacity.cli import options as o

if TYPE_CHECKING:
    from ampacity.analysis.contract.summary import Summary

SET_BY_BURST = (
    "rates",
    "concurrency",
    "lengths",
    "duration",
    "think_time",
    "ramp",
    "arrivals",
    "warmup",
)

BaseRps = Annotated[
    float, o.opt("R", "Load in requests/s before and after the burst.", show_default=False)
]
Factor = Annotated[float, o.opt("F", "Load of the burst, as a multiple of the base load.")]
Before = Annotated[str, o.opt("T", "Length of the base load before.")]
Length = Annotated[str, o.opt("T", "Length of the burst.")]
After = Annotated[str, o.opt("T", "Length of the base load after.")]
Shape = Annotated[
    str, o.opt("SHAPE", "step, ramp, or load factors of equal parts of the burst, e.g. 2/3/2.")
]
MaxRecovery = Annotated[
    str | None,
    o.opt("T", "Limit on recovery for CI. Exit status 1 if it takes longer, 3 if inconclusive."),
]


@o.shares(but=SET_BY_BURST)
def burst(
    url: o.Url,
    raw: dict[str, Any],
    base_rps: BaseRps,
    factor: Factor = 3.0,
    base_duration: Before = "60s",
    burst_duration: Length = "30s",
    recovery_duration: After = "2m",
    shape: Shape = "step",
    max_recovery: MaxRecovery = None,
    json: o.Json = False,
) -> None:
    """Measure how a sudden load is served, and how long TTFT and queue take to recover.

    Exit status with --max-recovery: 0 recovered in time, 1 did not, 3 inconclusive.

    ampacity burst http://127.0.0.1:8000/v1 --base-rps 5 --slo ttft_p99=2s

    ampacity burst http://127.0.0.1:8000/v1 --base-rps 5 --max-recovery 30s
    """
    from ampacity.cli.experiment import run_experiment
    from ampacity.experiments.burst import BurstPlan
    from ampacity.values import ConfigError, parse_duration

    for name, value, least in (("--base-rps", base_rps, 0.0), ("--factor", factor, 1.0)):
        if not least < value < 1e6:
            raise ConfigError(f"{name} {value:g}: give a number above {least:g}")
    limit_s = None if max_recovery is None else parse_duration(max_recovery, "--max-recovery")
    plan = BurstPlan(
        base_rps=base_rps,
        factor=factor,
        base_s=parse_duration(base_duration, "--base-duration"),
        burst_s=parse_duration(burst_duration, "--burst-duration"),
        recovery_s=parse_duration(recovery_duration, "--recovery-duration"),
        shape=shape,
        max_recovery_s=limit_s,
    )
    if limit_s is not None and limit_s > plan.recovery_s:
        raise ConfigError(
            f"--max-recovery {max_recovery}: --recovery-duration {recovery_duration} is too short "
            "to tell"
        )
    if limit_s is not None and (short := plan.too_short()):
        raise ConfigError(f"--max-recovery {max_recovery} could not be judged: {short}")
    own = {"url": url, "rates": plan.mean_rps, "arrivals": plan.arrivals, "warmup": 0}
    own["duration"] = f"{plan.duration_s:.12g}s"
    how: dict[str, Any] = {"drive": plan.run, "judge": None if limit_s is None else _recovered}
    run_experiment({**raw, **own}, experiment="burst", as_json=json, **how)


def _recovered(_: Path, summary: Summary) -> int:
    """Return the exit status of --max-recovery."""
    recovery = summary.burst.max_recovery if summary.burst else None
    return EXIT[recovery.verdict if recovery else "inconclusive"]
