"""The findings as text for a terminal: the verdict, a table of stages, the key figures, the warnings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reports.burst import phases_table
from reports.families import curve_tables
from reports.figures import NO_FAILURES, count, cut_off, ended_otherwise, failures, printable
from reports.findings import error_bound, findings
from reports.sessions import session_findings
from reports.tables import Cell, Column, Table, accepted_table, stages_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

SUPERSCRIPT = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
GAP = 2  # blanks between columns
STYLES = {"good": "green", "bad": "bold red", "unsure": "yellow", "": ""}


def render_table(summary: dict[str, Any], console: Console) -> None:
    """Print ``summary`` to ``console``, as wide as the console is; readable without colour."""
    _print(console, str(summary.get("verdict") or "no verdict"), "bold")
    if summary.get("partial"):
        _print(console, f"Partial: {summary['partial']}", "yellow")
    if summary.get("predicted"):
        _print(console, "Predicted: every figure comes from a simulation, none was measured.", "yellow")
    table = phases_table(summary["burst"]) if summary.get("burst") else stages_table(summary)
    if table.rows:
        console.print()
        print_table(console, table)
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
    errors = {name: n for name, n in (summary.get("errors") or {}).items() if n}
    failed = failures(errors)
    said = [f"{count(failed)} of {count(summary.get('requests') or 0)} requests", *ended_otherwise(errors)]
    by_cause = ", ".join(f"{name} {count(n)}" for name, n in errors.items() if name not in NO_FAILURES)
    state = "bad" if failed else "unsure" if cut_off(errors) else ""
    _print_entry(console, "Errors", "; ".join(said), by_cause, STYLES[state])
    for warning in summary.get("warnings") or []:
        console.print()
        _print(console, f"Warning [{warning.get('code')}] {warning.get('text')}", "yellow")


def _text(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(printable(text), style=style)


def _print(console: Console, text: str, style: str = "") -> None:
    console.print(_text(text, style), highlight=False)


def _print_entry(console: Console, label: str, value: str, note: str, style: str) -> None:
    """A label and its value, the note below it, both wrapped beside the label."""
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


def _widths(table: Table) -> list[int]:
    from rich.cells import cell_len

    def width(cell: Cell) -> int:
        return cell_len(printable(cell.text)) + (len(str(cell.note)) if cell.note else 0)

    return [
        max(cell_len(column.head), cell_len(column.unit), *(width(row[i]) for row in table.rows))
        for i, column in enumerate(table.columns)
    ]


def _kept(columns: list[Column], widths: list[int], room: int) -> list[int]:
    """Which columns fit into ``room`` cells: the least wanted are left out until they do."""
    kept = list(range(len(columns)))
    while len(kept) > 1 and sum(widths[i] + GAP for i in kept) - GAP > room:
        kept.remove(max(kept, key=lambda i: (columns[i].priority, i)))
    return kept


def print_table(console: Console, table: Table) -> None:
    """As many columns as fit; footnotes below."""
    from rich.table import Table as Grid

    kept = _kept(table.columns, _widths(table), console.width)
    grid = Grid(box=None, padding=(0, GAP, 0, 0), pad_edge=False, show_edge=False, header_style="bold")
    for column in (table.columns[i] for i in kept):
        head = _text(f"{column.head}\n{column.unit}")
        grid.add_column(head, justify="left" if column.text else "right", no_wrap=True)
    used: list[int] = []  # footnotes of the columns shown, numbered as they appear
    for row in table.rows:
        texts = []
        for cell in (row[i] for i in kept):
            if cell.note and cell.note not in used:
                used.append(cell.note)
            mark = _raised(used.index(cell.note) + 1) if cell.note else ""
            texts.append(_text(cell.text + mark, STYLES[cell.state]))
        grid.add_row(*texts)
    console.print(grid, highlight=False)
    for number, note in enumerate(used, start=1):
        _print(console, f"{_raised(number)} {table.notes[note - 1]}", "dim")
    left_out = [column.head for i, column in enumerate(table.columns) if i not in kept]
    if left_out:
        _print(console, f"Left out at this width: {', '.join(left_out)}", "dim")
