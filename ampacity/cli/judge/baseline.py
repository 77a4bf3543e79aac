"""``ampacity baseline``: the facts about earlier runs that a gate needs, as a file to commit."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ampacity.cli import options as o
from ampacity.cli.output import write_text, writing

HEADS = "", "value", "tolerance", "finds", "longer", "more runs", "other seed: tolerance", "finds"
LEGEND = (
    "tolerance: the change that still passes. watched: noise above 15 %, so it never passes, and "
    "only a larger change is a regression. finds: the smallest change found in 95 of 100 runs; "
    "longer: with four times the --duration; more runs: with three times the baseline runs."
)


def baseline(
    runs: Annotated[
        list[Path],
        o.arg("Run directories of the same experiment; several show the noise between runs."),
    ],
    out: Annotated[
        Path,
        o.opt(
            "FILE",
            "Output: baseline file; only an older baseline is overwritten.",
            "-o",
            "--out",
            show_default=False,
        ),
    ],
) -> None:
    """Write a baseline for 'ampacity gate'. Better from several runs than from one.

    ampacity baseline runs/main -o base.json

    ampacity baseline runs/main-1 runs/main-2 runs/main-3 -o base.json
    """
    from ampacity.analysis.change.judged import prepare
    from ampacity.analysis.gate.baseline import NEAR_SATURATION, make_baseline, near_saturation
    from ampacity.analysis.gate.baseline_file import check_replaceable, write_baseline
    from ampacity.loadgen.rundir.files import load_run
    from ampacity.reports.change.gate import aligned

    with writing(out, own=True):
        check_replaceable(out)
    content = make_baseline([prepare(load_run(path)) for path in runs])
    write_text(out, write_baseline(content), own=True)
    for name, level in content["levels"].items():
        held = level["quantiles"]
        typer.echo(f"{name}: {sum(level['requests'])} requests, {len(held)} quantiles")
        rows = [HEADS, *(_row(metric, entry) for metric, entry in held.items())]
        typer.echo("\n".join(f"  {line}" for line in aligned(rows)))
        for metric, reason in level["untracked"].items():
            typer.echo(f"  {metric} is not tracked: {reason}")
    typer.echo(LEGEND)
    if near_saturation(content):
        typer.echo(NEAR_SATURATION)
    typer.echo(out)


def _row(metric: str, entry: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells of a quantile, for candidates with the same seed and with another."""
    finds, seconds = entry["finds"], entry["value_s"]
    value = f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
    same, other = (
        _tolerance(entry["tolerance"][kind]) for kind in ("same_schedule", "other_schedule")
    )
    found = [_change(finds["same_schedule"][k]) for k in ("now", "longer", "more_runs")]
    return metric, value, same, *found, other, _change(finds["other_schedule"]["now"])


def _tolerance(tolerance: float | None) -> str:
    from ampacity.analysis.change.quantiles import MOST_TOLERANCE

    if tolerance is None or tolerance > MOST_TOLERANCE:
        return "watched"
    return f"{100 * tolerance:.3g} %"


def _change(change: float | None) -> str:
    if change is None:
        return "-"
    return f"+{100 * change:.2g} %" if change < 1 else f"+{100 * change:.0f} %"
