"""``ampacity baseline``: the facts about earlier runs that a gate needs, as a file to commit."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ampacity.cli import options as o
from ampacity.cli.output import UNCUT, console, print_folder, write_text, writing

if TYPE_CHECKING:
    from ampacity.reports.render.table import Cell, Table
    from ampacity.reports.render.terminal import Screen

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
    summary: o.Summary = o.Amount.short,
) -> None:
    """Write a baseline for 'ampacity gate'. Better from several runs than from one.

    ampacity baseline runs/main -o base.json

    ampacity baseline runs/main-1 runs/main-2 runs/main-3 -o base.json
    """
    from ampacity.analysis.change.judged import prepare
    from ampacity.analysis.gate.baseline import make_baseline
    from ampacity.analysis.gate.baseline_file import check_replaceable, write_baseline
    from ampacity.loadgen.rundir.files import load_run
    from ampacity.reports.render.terminal import show

    with writing(out, own=True):
        check_replaceable(out)
    content = make_baseline([prepare(load_run(path)) for path in runs])
    write_text(out, write_baseline(content), own=True)
    if summary is o.Amount.short and console().width < UNCUT:
        show(_screen(content, out), console())
        print_folder(out)
        return
    _print_all(content)
    typer.echo(out)


def _screen(content: Mapping[str, Any], out: Path) -> Screen:
    """Return what a gate will find, and the quantiles whose tolerance is the loosest first."""
    from ampacity.analysis.gate.baseline import NEAR_SATURATION, near_saturation
    from ampacity.reports.render.figures import counted
    from ampacity.reports.render.table import Column, Rows
    from ampacity.reports.render.terminal import Entry, Screen

    levels, runs = content["levels"], len(content["runs"])
    requests = sum(sum(level["requests"]) for level in levels.values())
    held = [
        (f"{metric} at {name}" if len(levels) > 1 else metric, entry)
        for name, level in levels.items()
        for metric, entry in level["quantiles"].items()
    ]
    judged = [entry for _, entry in held if not _watched(_same_seed(entry))]
    finds = [x for _, e in held if (x := e["finds"]["same_schedule"]["now"]) is not None]
    found = f"{_change(min(finds))} to {_change(max(finds))}" if finds else "nothing for sure"
    never = f"{len(held) - len(judged)} more are watched: too noisy to pass"
    answers = [
        Entry("BASELINE", str(out), f"{counted(runs, 'run')}, {requests:,} requests"),
        Entry("LOADS", ", ".join(levels)),
        Entry("FINDS", found, "slower, by quantile: in 95 of 100 runs of the same --seed"),
        Entry("JUDGES", counted(len(judged), "quantile"), never * (len(judged) < len(held))),
    ]
    held.sort(key=lambda named: _same_seed(named[1]) or 0.0, reverse=True)
    held.sort(key=lambda named: _watched(_same_seed(named[1])))
    rows = Rows("", [(name, *_row("", entry)[1:]) for name, entry in held])
    rows.words("loosest first", lambda row: row[0])
    for i, head in enumerate(HEADS[1:], 1):
        rows.column(Column(head, "", max(i - 3, 0)), partial(_cell, i))
    notes = [NEAR_SATURATION] if near_saturation(content) else []
    if runs == 1:
        notes.append("One run does not show the noise between runs: give several.")
    untracked = [name for level in levels.values() for name in level["untracked"]]
    if untracked:
        notes.append(f"{len(untracked)} not tracked: {', '.join(untracked)}.")
    return Screen(answers, rows.done(), notes=notes)


def _cell(i: int, _: Table, row: tuple[str, ...]) -> Cell:
    from ampacity.reports.render.table import Cell

    return Cell(row[i])


def _print_all(content: Mapping[str, Any]) -> None:
    """Print every quantile, and what its columns mean."""
    from ampacity.analysis.gate.baseline import NEAR_SATURATION, near_saturation
    from ampacity.reports.change.gate import aligned

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


def _row(metric: str, entry: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells of a quantile, for candidates with the same seed and with another."""
    finds, seconds = entry["finds"], entry["value_s"]
    value = f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
    same, other = (
        _tolerance(entry["tolerance"][kind]) for kind in ("same_schedule", "other_schedule")
    )
    found = [_change(finds["same_schedule"][k]) for k in ("now", "longer", "more_runs")]
    return metric, value, same, *found, other, _change(finds["other_schedule"]["now"])


def _same_seed(entry: Mapping[str, Any]) -> float | None:
    tolerance: float | None = entry["tolerance"]["same_schedule"]
    return tolerance


def _watched(tolerance: float | None) -> bool:
    from ampacity.analysis.change.quantiles import MOST_TOLERANCE

    return tolerance is None or tolerance > MOST_TOLERANCE


def _tolerance(tolerance: float | None) -> str:
    if tolerance is None or _watched(tolerance):
        return "watched"
    return f"{100 * tolerance:.3g} %"


def _change(change: float | None) -> str:
    if change is None:
        return "-"
    return f"+{100 * change:.2g} %" if change < 1 else f"+{100 * change:.0f} %"
