"""``ampacity workload``: what the built-in workloads and workload files send."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(help="Look at workloads.", no_args_is_help=True)


@app.command("list")
def list_() -> None:
    """The built-in workloads, one line each."""
    from workloads.archetypes import ARCHETYPES
    from workloads.profile import load_workload

    for name in ARCHETYPES:
        workload = load_workload(name)
        typer.echo(
            f"{name:12} input {workload.input_tokens.describe()['text']}; output {workload.output_tokens.describe()['text']}"
        )


@app.command("show")
def show(
    name: Annotated[
        str, typer.Argument(help="Name of a built-in workload, or a YAML file.", show_default=False)
    ],
) -> None:
    """Quantiles, arrivals and source of one workload."""
    from workloads.profile import load_workload

    workload = load_workload(name)
    typer.echo(f"{workload.name}: {workload.source}")
    typer.echo(f"arrivals: {workload.arrivals}")
    for side, lengths in (("input", workload.input_tokens), ("output", workload.output_tokens)):
        quantiles = ", ".join(f"p{q * 100:g} {lengths.quantile(q):.0f}" for q in (0.01, 0.1, 0.5, 0.9, 0.99))
        typer.echo(f"{side} tokens: mean {lengths.mean():.0f}, {quantiles}")
