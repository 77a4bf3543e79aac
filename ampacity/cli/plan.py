"""``ampacity plan``: from a measured run to a number of instances and GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

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
    tp: o.TensorParallel = None,
    safety: o.Safety = None,
    gpu_hour: o.GpuHour = None,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Size a fleet for a peak load from what one instance carried in a sweep.

    ampacity plan runs/sweep --peak-rps 120 --tp 4 --gpu-hour 2.50
    """
    import json as json_module
    from dataclasses import replace

    from ampacity.config import fleet_inputs
    from analysis.fleet import FleetError, size_fleet
    from analysis.summary import summarise
    from loadgen.rundir import load_run

    inputs = fleet_inputs(peak_rps=peak_rps, tp=tp or 1, safety=safety or 1.2, gpu_hour=gpu_hour)
    loaded = load_run(run)
    summary = summarise(replace(loaded, meta={**loaded.meta, "fleet_inputs": inputs}))
    fleet, capacity = summary["fleet"], summary["capacity"]
    if fleet["instances"] is None:
        raise FleetError(f"{run}: no fleet can be sized from this run: {fleet['reason']}")
    low, high = capacity["usable_rps_ci"] or (None, None)
    if low:  # the careful end of the interval buys the most instances
        careful = size_fleet(peak_rps, low, inputs["safety_factor"], inputs["tensor_parallel"])
        fleet = {
            **fleet,
            "usable_rps": capacity["usable_rps"],
            "usable_rps_ci": [low, high],
            "instances_at_low_end": careful.instances,
        }
    if json:
        typer.echo(json_module.dumps(fleet, indent=2, allow_nan=False))
        return
    for line in _lines(fleet, capacity):
        typer.echo(line)


def _lines(fleet: dict[str, Any], capacity: dict[str, Any]) -> list[str]:
    """The plan in words, with the arithmetic shown."""
    low, high = fleet.get("usable_rps_ci", (None, None))
    between = f" (between {low:.3g} and {'?' if high is None else format(high, '.3g')})" if low else ""
    lines = [
        f"{fleet['instances']} instances, {fleet['gpus']} GPUs for {fleet['peak_rps']:g} requests/s",
        f"  one instance carries {capacity['usable_rps']:.3g} requests/s{between}, {capacity['crossing'].replace('_', ' ')}",
        f"  {fleet['instances_before_safety']} instances carry the peak, × {fleet['safety_factor']:g} safety = {fleet['instances']}"
        f", × {fleet['tensor_parallel']} GPUs each = {fleet['gpus']}",
        f"  with one replica down: {fleet['one_replica_down']} instances",
    ]
    if fleet.get("instances_at_low_end", fleet["instances"]) != fleet["instances"]:
        lines.append(f"  at the low end of the interval: {fleet['instances_at_low_end']} instances")
    cost = fleet["cost_per_million_output_tokens"]
    if cost is not None:
        lines.append(f"  ${cost:.3g} for a million output tokens, every instance at its usable rate")
    return lines
