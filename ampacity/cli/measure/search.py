"""``ampacity search``: the capacity and C_max of an endpoint, as precisely as was asked for."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ampacity.cli import options as o

Precision = Annotated[
    str, typer.Option(metavar="P", help="Half the 95 % interval, as a share of the capacity: 10%")
]
Closed = Annotated[
    bool,
    typer.Option(
        "--closed", help="At the end run closed loops around C_max too: the other view of it."
    ),
]
LOADS = (
    "rates",
    "concurrency",
    "lengths",
    "duration",
    "think_time",
    "ramp",
)  # a search finds these itself


def make_search(
    precision: str, max_duration: str | None, repeats: int, closed: bool, ramp: str | None = None
) -> Any:
    """The search that was asked for. Raises ConfigError."""
    from ampacity.experiments.search import Search, SearchPlan
    from ampacity.values import ConfigError, parse_duration

    try:
        share = float(precision.strip().removesuffix("%")) / (100 if "%" in precision else 1)
    except ValueError:
        share = 0.0
    if not 0.005 <= share <= 0.5:
        raise ConfigError(f"--precision {precision}: write a share from 0.5% to 50%, as 5%")
    limit_s = None if max_duration is None else parse_duration(max_duration, "--max-duration")
    if ramp is not None and not closed:
        raise ConfigError(
            "--ramp goes with --closed: only the closed loops of a search have users who begin"
        )
    ramp_s = 0.0 if ramp is None else parse_duration(ramp, "--ramp")
    return Search(SearchPlan(share, limit_s, repeats, closed, ramp_s))


@o.shares(but=LOADS)
def search(
    url: o.Url,
    raw: dict[str, Any],
    precision: Precision = "10%",
    max_duration: Annotated[
        str | None,
        typer.Option(metavar="T", help="Stop after this time, as 30m, with what is known then."),
    ] = None,
    repeats: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            max=20,
            help="At the end run both ends of the interval N times more each, in random order.",
        ),
    ] = 0,
    closed: Closed = False,
    ramp: Annotated[
        str | None,
        typer.Option(
            metavar="T",
            help="With --closed: the users of a closed loop begin one after the other over this time, which does not count.",
        ),
    ] = None,
    json: o.Json = False,
) -> None:
    """Find the load at which an SLO stops to hold: bracket it, then narrow it until it is known well enough.

    ampacity search http://127.0.0.1:8000/v1 --model M --workload chat --slo ttft_p99=2s --max-duration 1h
    """
    from ampacity.cli.experiment import run_experiment

    asked = make_search(precision, max_duration, repeats, closed, ramp)
    how: dict[str, Any] = {"drive": asked.run, "check": asked.check}
    run_experiment({"url": url, **raw}, experiment="search", as_json=json, **how)
