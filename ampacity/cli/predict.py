"""``ampacity predict``: a sweep of a simulated engine in virtual time."""

import sys
from typing import Annotated, Any

import typer

from ampacity.cli import EXIT_INTERRUPTED
from ampacity.cli import options as o
from ampacity.cli.engine_options import Preset, full_preset, with_engine
from ampacity.cli.measure.search import Closed, Precision, make_search

# the settings that a run without a network has
VIRTUAL = (
    *("workload", "input_tokens", "output_tokens", "rates", "concurrency", "lengths", "think_time"),
    *("ramp", "duration", "arrivals", "warmup", "seed", "max_requests", "max_tokens", "slo"),
    *("peak_rps", "tp", "safety", "gpu_hour", "out"),
)

SearchInstead = Annotated[
    bool,
    o.opt(
        None, "Search for the capacity, as 'ampacity search' does, instead of sweeping.", "--search"
    ),
]


@o.shares(VIRTUAL, duration="5m")
@with_engine
def predict(
    raw: dict[str, Any],
    engine: dict[str, Any],
    preset: Preset = "llama3-8b-a100",
    search: SearchInstead = False,
    precision: Precision = "10%",
    closed: Closed = False,
    json: o.Json = False,
) -> None:
    """Predict the curve of hardware you do not have, with a simulated engine in virtual time.

    Every figure of the report is marked as predicted.

    ampacity predict --preset llama3-70b-4xh100 --workload chat --slo ttft_p99=2s

    ampacity predict --preset qwen3-32b@2xh200 --search --slo ttft_p95=2s
    """
    import asyncio
    from dataclasses import replace

    from ampacity.cli.experiment import finish
    from ampacity.cli.output import shown
    from ampacity.cli.stub import left_at_once, no_stub
    from ampacity.config import check_steady, gpus_named, make_settings
    from ampacity.experiments.rerun import command_line
    from ampacity.experiments.stages.provenance import out_path
    from ampacity.experiments.virtual.predict import predict as experiment
    from ampacity.progress import Progress
    from ampacity.simulator.models.hardware import find_deployment
    from ampacity.values import ConfigError

    deployment = find_deployment(full_preset(preset, engine))
    ramp = raw.pop("ramp", None) if search else None
    defaults = {"duration": "5m", "tp": (gpus_named(preset) or 1) * deployment.engines}
    settings = make_settings({**defaults, **raw, "url": "http://predicted.invalid/v1"})
    check_steady(settings.workload, "predict")
    how: dict[str, Any] = {}
    if search:
        if settings.lengths:
            raise ConfigError("--lengths goes with a sweep: drop --search")
        wanted = make_search(precision, None, 0, closed, ramp)
        wanted.check(settings)
        how = {"drive": wanted.run, "experiment": "search"}
    settings = replace(settings, out=out_path(settings, how.get("experiment", "predict")))
    with left_at_once(settings.out):
        with no_stub(settings.out), Progress(quiet=shown.quiet) as progress:
            run = experiment(settings, deployment, command_line(sys.argv), progress, **how)
            path = asyncio.run(run)
        status, _ = finish(path, as_json=json)
    if status == "interrupted":
        raise typer.Exit(EXIT_INTERRUPTED)
