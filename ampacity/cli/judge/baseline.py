"""``ampacity baseline``: what a gate has to know of earlier runs, as a small file to commit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ampacity.cli.output import write_text, writing


def baseline(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Run directories of one experiment; several show the noise.", show_default=False
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "-o",
            "--out",
            metavar="FILE",
            help="The baseline file. An older baseline is replaced, any other file kept.",
            show_default=False,
        ),
    ],
) -> None:
    """Write a baseline file from one run or, better, several runs of the same command.

    ampacity baseline runs/main-1 runs/main-2 runs/main-3 -o base.json
    """
    from ampacity.analysis.change.baseline import NEAR_SATURATION, make_baseline, near_saturation
    from ampacity.analysis.change.baseline_file import check_replaceable, write_baseline
    from ampacity.analysis.change.comparable import prepare
    from ampacity.loadgen.rundir.files import load_run

    with writing(out):
        check_replaceable(out)
    content = make_baseline([prepare(load_run(path)) for path in runs])
    write_text(out, write_baseline(content))
    for name, level in content["levels"].items():
        typer.echo(
            f"{name}: {sum(level['requests'])} requests, {len(level['quantiles'])} quantiles"
        )
        typer.echo("\n".join(_table(level["quantiles"])))
        for metric, reason in level["untracked"].items():
            typer.echo(f"  {metric} is not tracked: {reason}")
    typer.echo(
        "tolerance: what an equal run passes with; watched: it may differ by more than 15 %, so nothing passes, and only more is a regression. "
        "finds: the smallest change that is called a regression in 95 of 100 runs, then about "
        "what it would be with four times the --duration, and with three times the baseline runs."
    )
    if near_saturation(content):
        typer.echo(NEAR_SATURATION)
    typer.echo(out)


def _table(quantiles: Mapping[str, Any]) -> list[str]:
    """One row for each quantile, with figures for candidates of the same seed and of another."""
    rows: list[tuple[str, ...]] = [
        ("", "value", "tolerance", "finds", "longer", "more runs", "other seed: tolerance", "finds")
    ]
    for name, entry in quantiles.items():
        same, other = entry["finds"]["same_schedule"], entry["finds"]["other_schedule"]
        tolerance = entry["tolerance"]
        seconds = entry["value_s"]
        value = f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
        rows.append(
            (
                name,
                value,
                _tolerance(tolerance["same_schedule"]),
                *(_change(same[k]) for k in ("now", "longer", "more_runs")),
                _tolerance(tolerance["other_schedule"]),
                _change(other["now"]),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _tolerance(tolerance: float | None) -> str:
    from ampacity.analysis.change.quantiles import MOST_TOLERANCE

    return (
        "watched" if tolerance is None or tolerance > MOST_TOLERANCE else f"{100 * tolerance:.3g} %"
    )


def _change(change: float | None) -> str:
    return (
        "-"
        if change is None
        else f"+{100 * change:.2g} %"
        if change < 1
        else f"+{100 * change:.0f} %"
    )
