"""``ampacity baseline``: what a gate has to know of earlier runs, as a small file to commit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ampacity.cli.output import write_text, writing


def baseline(
    runs: Annotated[list[Path], typer.Argument(help="Run directories of one experiment; several show the noise.", show_default=False)],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="The baseline file. An older baseline is replaced, any other file kept.", show_default=False)],
) -> None:  # fmt: skip
    """Write a baseline file from one run or, better, several runs of the same command.

    ampacity baseline runs/main-1 runs/main-2 runs/main-3 -o base.json
    """
    from analysis.baseline import make_baseline
    from analysis.baseline_file import check_replaceable, write_baseline
    from analysis.comparable import prepare
    from loadgen.rundir import load_run

    with writing(out):
        check_replaceable(out)
    content = make_baseline([prepare(load_run(path)) for path in runs])
    write_text(out, write_baseline(content))
    for name, level in content["levels"].items():
        wide = [f"{m} {_said(e['tolerance'])}" for m, e in level["quantiles"].items() if m.endswith("p99")]
        told = ", ".join(["tolerance 3 % at p50 and p90", *wide])
        typer.echo(f"{name}: {sum(level['requests'])} requests, {len(level['quantiles'])} quantiles; {told}")
        for metric, reason in level["untracked"].items():
            typer.echo(f"  {metric} is not tracked: {reason}")
    typer.echo(out)


def _said(tolerance: dict[str, float | None]) -> str:
    """How much slower a p99 may be, which depends on whether the candidate sends the same requests."""
    same, other = (
        "more than a doubling only" if tolerance[kind] is None else f"{100 * (tolerance[kind] or 0):.3g} %"
        for kind in ("same_schedule", "other_schedule")
    )
    return same if same == other else f"{same} (with another seed {other})"
