"""``ampacity predict``: a sweep in virtual time, on hardware you do not have."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from ampacity.cli import options as o


@o.shares(o.VIRTUAL)
def predict(
    raw: dict[str, Any],
    preset: Annotated[
        str, typer.Option("--preset", help="Model and hardware, see 'ampacity simulate --preset list'.")
    ] = "llama3-8b-a100",
    max_num_seqs: Annotated[
        int | None, typer.Option("--max-num-seqs", help="Sequences that are decoded together at most.", min=1)
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option("--max-num-batched-tokens", help="Token budget of one step.", min=1)
    ] = None,
    json: o.Json = False,
) -> None:
    """Sweep a simulated engine without waiting for it; every figure of the report is marked as predicted.

    ampacity predict --preset llama3-70b-4xh100 --workload chat --slo ttft_p99=2s --slo itl_p99=50ms
    """
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
    settings = make_settings({"duration": "5m", **raw, "url": "http://predicted.invalid/v1"})
    progress = Progress(Console(stderr=True, highlight=False))
    path = asyncio.run(experiment(settings, config, command_line(sys.argv), progress))
    finish(path, as_json=json)
