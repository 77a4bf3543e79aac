"""The findings as text for a terminal: verdict, table of stages, key figures, warnings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ampacity.analysis.contract.summary import Summary
from ampacity.reports.charts.burst import phases_table
from ampacity.reports.charts.families import curve_tables
from ampacity.reports.pages.findings import error_bound, findings
from ampacity.reports.render.figures import (
    count,
    cut_off,
    ended_otherwise,
    failures,
    failures_by_cause,
    printable,
)
from ampacity.reports.render.sessions import session_findings
from ampacity.reports.render.table import Cell, Column, Table
from ampacity.reports.render.tables import accepted_table, stages_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

SUPERSCRIPT = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
AT_LEAST = "≥ is a lower bound: what was seen, in a stage too short to know how high it may be."
GAP = 2  # blanks between columns
STYLES = {"good": "green", "bad": "bold red", "unsure": "yellow", "": ""}


def render_table(summary: Summary, console: Console) -> None:
    """Print ``summary``, as wide as the console is; readable without colour."""
    _print(console, summary.verdict or "no verdict", "bold")
    if summary.partial:
        _print(console, f"Partial: {summary.partial}", "yellow")
    if summary.predicted:
        text = "Predicted: every figure comes from a simulation, none was measured."
        _print(console, text, "yellow")
    table = phases_table(summary.burst) if summary.burst else stages_table(summary)
    if table.rows:
        console.print()
        print_table(console, table)
        if any("≥" in cell.text for row in table.rows for cell in row):
            _print(console, AT_LEAST, "dim")
        if bound := error_bound(summary):
            _print(console, bound, "dim")
    for further in (*curve_tables(summary), accepted_table(summary)):
        if further:
            console.print()
            print_table(console, further)
    console.print()
    for finding in [*findings(summary), *session_findings(summary)]:
        value = f"{finding.value} ({finding.interval})" if finding.interval else finding.value
        _print_entry(console, finding.label, value, finding.note, STYLES[finding.state])
    errors, failed = summary.errors, failures(summary.errors)
    text = f"{count(failed)} of {count(summary.requests)} requests of the whole run"
    text = "; ".join([text, *ended_otherwise(errors)])
    state = "bad" if failed else "unsure" if cut_off(errors) else ""
    _print_entry(console, "Errors", text, failures_by_cause(summary), STYLES[state])
    for warning in summary.warnings:
        console.print()
        _print(console, f"Warning [{warning.code}] {warning.text}", "yellow")


def _text(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(printable(text), style=style)


def _print(console: Console, text: str, style: str = "") -> None:
    console.print(_text(text, style), highlight=False)


def _print_entry(console: Console, label: str, value: str, note: str, style: str) -> None:
    """Print a label and its value, the note below it, both wrapped beside the label."""
    from rich.table import Table as Grid

    grid = Grid.grid(padding=(0, GAP, 0, 0))
    grid.add_column(width=16, no_wrap=True)
    grid.add_column(overflow="fold")
    content = _text(value, style or "bold")
    if note:
        content = content + _text("\n" + note, "dim")
    grid.add_row(_text(label), content)
    console.print(grid, highlight=False)


def _raised(number: int) -> str:
    return str(number).translate(SUPERSCRIPT)


def _width(cell: Cell) -> int:
    from rich.cells import cell_len

    return cell_len(printable(cell.text)) + (len(str(cell.note)) if cell.note else 0)


def _widths(columns: list[Column], rows: list[list[Cell]]) -> list[int]:
    """Return the width of each column; a head widens the last blank column it reaches over."""
    from rich.cells import cell_len

    widths = [
        max(
            cell_len(column.head),
            cell_len(column.unit),
            *(0 if row[i].heads else _width(row[i]) for row in rows),
        )
        for i, column in enumerate(columns)
    ]
    for row in rows:
        for i in (i for i, cell in enumerate(row) if cell.heads):
            reach = _reach(row, i)
            lacking = _width(row[i]) - sum(widths[i:reach]) - GAP * (reach - 1 - i)
            widths[reach - 1] += max(lacking, 0)
    return widths


def _reach(row: list[Cell], i: int) -> int:
    """Return the column up to which cell ``i`` may reach: a head reaches over blank ones."""
    if not row[i].heads:
        return i + 1
    return next((j for j in range(i + 1, len(row)) if row[j].text), len(row))


def _total(widths: list[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)


def fits(console: Console, table: Table) -> bool:
    """Return whether no column has to be left out."""
    return _total(_widths(table.columns, table.rows)) <= console.width


def _kept(table: Table, room: int) -> list[int]:
    """Return the columns that fit into ``room`` cells, by priority."""
    columns, kept = table.columns, list(range(len(table.columns)))
    while len(kept) > 1 and _total(_widths(*_of(table, kept))) > room:
        kept.remove(max(kept, key=lambda i: (columns[i].priority, i)))
    return kept


def _of(table: Table, kept: list[int]) -> tuple[list[Column], list[list[Cell]]]:
    return [table.columns[i] for i in kept], [[row[i] for i in kept] for row in table.rows]


def _aligned(text: Text, width: int, column: Column) -> Text:
    lacking = max(width - text.cell_len, 0)
    if column.text:
        text.pad_right(lacking)
    else:
        text.pad_left(lacking)
    return text


def _print_line(console: Console, pieces: list[Text]) -> None:
    from rich.text import Text

    console.print(Text(" " * GAP).join(pieces), highlight=False, no_wrap=True, overflow="ellipsis")


def print_table(console: Console, table: Table) -> None:
    """Print as many columns as fit, and the footnotes below."""
    kept = _kept(table, console.width)
    columns, rows = _of(table, kept)
    widths = _widths(columns, rows)
    for heads in zip(*((column.head, column.unit) for column in columns), strict=True):
        pieces = [
            _aligned(_text(head, "bold"), width, column)
            for head, width, column in zip(heads, widths, columns, strict=True)
        ]
        _print_line(console, pieces)
    used: list[int] = []  # footnotes of the columns shown, numbered as they appear
    for row in rows:
        pieces, i = [], 0
        while i < len(row):
            cell, reach = row[i], _reach(row, i)
            if cell.note and cell.note not in used:
                used.append(cell.note)
            mark = _raised(used.index(cell.note) + 1) if cell.note else ""
            text = _text(cell.text + mark, STYLES[cell.state])
            pieces.append(_aligned(text, _total(widths[i:reach]), columns[i]))
            i = reach
        _print_line(console, pieces)
    for number, note in enumerate(used, start=1):
        _print(console, f"{_raised(number)} {table.notes[note - 1]}", "dim")
    left_out = [column.head for i, column in enumerate(table.columns) if i not in kept]
    if left_out:
        _print(console, f"Left out at this width: {', '.join(left_out)}", "dim")
