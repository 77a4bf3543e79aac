"""``ampacity sweep``: the latency-throughput curve of an endpoint."""

from typing import Annotated, Any

from ampacity.cli import options as o

MaxDuration = Annotated[
    str | None,
    o.opt(
        "T",
        "Time limit, e.g. 30m, if the loads are found automatically. Default: 10m.",
    ),
]


@o.shares(duration="a twentieth of --max-duration; 30s if loads are given")
def sweep(
    url: o.Url, raw: dict[str, Any], max_duration: MaxDuration = None, json: o.Json = False
) -> None:
    """Measure latency from low load to saturation, and find the capacity (needs --slo).

    ampacity sweep http://127.0.0.1:8000/v1 --slo ttft_p99=2s --slo itl_p99=50ms

    ampacity sweep http://127.0.0.1:8000/v1 --concurrency 1,4,16 --duration 1m
    """
    from ampacity.cli.experiment import run_experiment

    raw, drive = timed_sweep({"url": url, **raw}, max_duration)
    run_experiment(raw, experiment="sweep", drive=drive, as_json=json)


def timed_sweep(raw: dict[str, Any], max_duration: str | None = None) -> tuple[dict[str, Any], Any]:
    """Return (settings, sweep function) of a sweep within ``max_duration``. Raises ConfigError."""
    from contextlib import suppress
    from functools import partial

    from ampacity.experiments.sweep import MAX_DURATION_S, STAGE_SHARE, sweep
    from ampacity.values import ConfigError, parse_duration, quantile_names

    curves = 1
    with suppress(ConfigError):  # make_settings reports it, with file and line
        curves += len(quantile_names(raw.get("lengths", ())))
    given = {"rates", "concurrency", "duration"} & raw.keys()
    if max_duration is None:
        if given:
            return raw, sweep
        limit_s = MAX_DURATION_S * curves
    elif given - {"duration"}:
        raise ConfigError(
            f"--max-duration goes with a sweep that finds its loads: drop --{min(given)}"
        )
    else:
        limit_s = parse_duration(max_duration, "--max-duration")
    return {"duration": f"{STAGE_SHARE * limit_s / curves:g}s", **raw}, partial(
        sweep, max_duration_s=limit_s
    )
