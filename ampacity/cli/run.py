"""``ampacity run``: one stage, a trace replay, or whatever a run file describes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ampacity.cli import options as o


def run(
    url: Annotated[
        str | None,
        typer.Argument(
            help="Base URL, as http://127.0.0.1:8000/v1 (or 'url' in the run file)", show_default=False
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "-c", "--config", metavar="FILE", help="YAML run file: the options' own names; flags win."
        ),
    ] = None,
    model: o.Model = None,
    trace: o.Trace = None,
    time_scale: o.TimeScale = None,
    workload: o.WorkloadName = None,
    slo: o.SloTexts = None,
    rates: o.Rates = None,
    concurrency: o.Concurrency = None,
    duration: o.Duration = None,
    arrivals: o.Arrivals = None,
    think_time: o.ThinkTime = None,
    warmup: o.Warmup = None,
    input_tokens: o.InputTokens = None,
    output_tokens: o.OutputTokens = None,
    tokenizer: o.Tokenizer = "words",
    api: o.ApiName = "chat",
    api_key_env: o.ApiKeyEnv = None,
    header: o.Header = None,
    extra_body: o.ExtraBody = None,
    lock: o.Lock = None,
    max_requests: o.MaxRequests = None,
    max_tokens: o.MaxTokens = None,
    timeout: o.Timeout = None,
    idle_timeout: o.IdleTimeout = None,
    max_in_flight: o.MaxInFlight = None,
    retries: o.Retries = None,
    workers: o.Workers = None,
    connections: o.Connections = "pool",
    timestamps: o.Timestamps = "read",
    seed: o.Seed = 1,
    peak_rps: o.PeakRps = None,
    tp: o.TensorParallel = 1,
    safety: o.Safety = 1.2,
    gpu_hour: o.GpuHour = None,
    out: o.Out = None,
    json: o.Json = False,
) -> None:
    """Run one load level (--rates 5), a trace (--trace FILE), or the experiment of a run file (-c bench.yaml).

    ampacity run http://127.0.0.1:8000/v1 --model M --trace azure_conv.csv --time-scale 0.5
    """
    raw: dict[str, Any] = {k: v for k, v in locals().items() if k not in ("json", "config")}
    from ampacity.cli.experiment import run_experiment
    from ampacity.config import ConfigError, read_run_file
    from ampacity.experiments import sweep as experiment

    if config is not None:
        given = {k: v for k, v in raw.items() if v not in (None, [], *_DEFAULTS.get(k, ()))}
        raw = {**read_run_file(config), **given}
    elif not (trace or rates or concurrency):
        raise ConfigError(
            "say what to run: --rates R, --concurrency N, --trace FILE or -c FILE ('ampacity sweep' finds the rates itself)"
        )
    drive = experiment.replay if raw.get("trace") else experiment.sweep
    run_experiment(raw, experiment="run", drive=drive, as_json=json)


_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "tokenizer": ("words",), "api": ("chat",), "seed": (1,), "tp": (1,), "safety": (1.2,),
    "connections": ("pool",), "timestamps": ("read",),
}  # fmt: skip
