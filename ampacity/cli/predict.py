"""``ampacity predict``: a sweep in virtual time, on hardware you do not have."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from ampacity.cli import options as o


def predict(
    preset: Annotated[
        str, typer.Option("--preset", help="Model and hardware, see 'ampacity simulate --preset list'.")
    ] = "llama3-8b-a100",
    workload: o.WorkloadName = None,
    slo: o.SloTexts = None,
    rates: o.Rates = None,
    duration: o.Duration = None,
    arrivals: o.Arrivals = None,
    warmup: o.Warmup = None,
    input_tokens: o.InputTokens = None,
    output_tokens: o.OutputTokens = None,
    max_num_seqs: Annotated[
        int | None, typer.Option("--max-num-seqs", help="Sequences that are decoded together at most.", min=1)
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option("--max-num-batched-tokens", help="Token budget of one step.", min=1)
    ] = None,
    max_requests: o.MaxRequests = None,
    max_tokens: o.MaxTokens = None,
    seed: o.Seed = 1,
    peak_rps: o.PeakRps = None,
    tp: o.TensorParallel = 1,
    safety: o.Safety = 1.2,
    gpu_hour: o.GpuHour = None,
    out: o.Out = None,
    json: o.Json = False,
) -> None:
    """Sweep a simulated engine without waiting for it; every figure of the report is marked as predicted.

    ampacity predict --preset llama3-70b-4xh100 --workload chat --slo ttft_p99=2s --slo itl_p99=50ms
    """
    own = {"json", "preset", "max_num_seqs", "max_num_batched_tokens"}
    raw: dict[str, Any] = {k: v for k, v in locals().items() if k not in own and k != "own"}
    import asyncio
    from dataclasses import replace

    from rich.console import Console

    from ampacity.cli.experiment import command_line, finish
    from ampacity.config import make_settings
    from ampacity.experiments.predict import predict as experiment
    from ampacity.progress import Progress
    from simulator.hardware import find_config

    config = find_config(preset)
    config = replace(
        config,
        max_num_seqs=max_num_seqs or config.max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens or config.max_num_batched_tokens,
    )
    settings = make_settings({**raw, "url": "http://predicted.invalid/v1", "duration": duration or "5m"})
    progress = Progress(Console(stderr=True, highlight=False))
    path = asyncio.run(experiment(settings, config, command_line(sys.argv), progress))
    finish(path, as_json=json)
