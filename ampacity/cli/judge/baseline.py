"""``ampacity baseline``: the facts about earlier runs that a gate needs, as a file to commit."""

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
            help="Run directories of the same experiment; several show the noise between runs.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "-o",
            "--out",
            metavar="FILE",
            help="Baseline file to write; only an older baseline is overwritten.",
            show_default=False,
        ),
    ],
) -> None:
    """Write a baseline for 'ampacity gate' from one or, better, several runs of the same command.

    ampacity baseline runs/main-1 runs/main-2 runs/main-3 -o base.json
    """
    from ampacity.analysis.change.baseline import NEAR_SATURATION, make_baseline, near_saturation
    from ampacity.analysis.change.baseline_file import check_replaceable, write_baseline
    from ampacity.analysis.change.judged import prepare
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
        "tolerance: the change that still passes. watched: noise above 15 %, so it never passes, "
        "and "
        "only a larger change is a regression. finds: the smallest change found in 95 of 100 runs; "
        "longer: with four times the --duration; more runs: with three times the baseline runs."
    )
    if near_saturation(content):
        typer.echo(NEAR_SATURATION)
    typer.echo(out)


def _table(quantiles: Mapping[str, Any]) -> list[str]:
    """Return one row per quantile, for candidates with the same seed and with another."""
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
