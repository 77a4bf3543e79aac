"""``ampacity plan``: from a measured run to a number of instances and GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ampacity.cli import options as o


def plan(
    run: Annotated[Path, typer.Argument(help="Run directory of a sweep.", show_default=False)],
    peak_rps: Annotated[
        float,
        typer.Option(
            "--peak-rps", metavar="R", help="Peak load that the fleet has to carry.", show_default=False
        ),
    ],
    tp: o.TensorParallel = 1,
    safety: o.Safety = 1.2,
    gpu_hour: o.GpuHour = None,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Size a fleet for a peak load from what one instance carried in a sweep.

    ampacity plan runs/sweep --peak-rps 120 --tp 4 --gpu-hour 2.50
    """
    raise SystemExit(f"{run} {peak_rps} {tp} {safety} {gpu_hour} {json}")
