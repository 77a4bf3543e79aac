"""``ampacity search``: the capacity and C_max of an endpoint, to a given precision."""

from typing import Annotated, Any

from ampacity.cli import options as o

Precision = Annotated[
    str, o.opt("P", "Target half-width of the 95 % CI, relative to the capacity, e.g. 10%.")
]
Closed = Annotated[
    bool, o.opt(None, "Finally run closed-loop stages around C_max too.", "--closed")
]
SET_BY_SEARCH = ("rates", "concurrency", "lengths", "duration", "think_time")


def make_search(
    precision: str, max_duration: str | None, repeats: int, closed: bool, ramp: str | None = None
) -> Any:
    """Return the search of these options. Raises ConfigError."""
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
        raise ConfigError("--ramp goes with --closed: only closed-loop stages have users")
    ramp_s = 0.0 if ramp is None else parse_duration(ramp, "--ramp")
    return Search(SearchPlan(share, limit_s, repeats, closed, ramp_s))


@o.shares(but=SET_BY_SEARCH)
def search(
    url: o.Url,
    raw: dict[str, Any],
    precision: Precision = "10%",
    max_duration: Annotated[
        str | None, o.opt("T", "Time limit, e.g. 30m. The result so far is reported.")
    ] = None,
    repeats: Annotated[
        int,
        o.opt(
            "N",
            "Finally repeat both ends of the interval N times each, in random order.",
            min=0,
            max=20,
        ),
    ] = 0,
    closed: Closed = False,
    json: o.Json = False,
) -> None:
    """Find the highest load that still meets the SLOs. Brackets it, then narrows it to --precision.

    ampacity search http://127.0.0.1:8000/v1 --model M --slo ttft_p99=2s

    ampacity search http://127.0.0.1:8000/v1 --slo itl_p99=50ms --precision 5%
    """
    from ampacity.cli.experiment import run_experiment

    asked = make_search(precision, max_duration, repeats, closed, raw.pop("ramp", None))
    how: dict[str, Any] = {"drive": asked.run, "check": asked.check}
    run_experiment({"url": url, **raw}, experiment="search", as_json=json, **how)
