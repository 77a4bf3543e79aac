"""Print to a terminal: tables, entries beside a label, and final screens that fit 80 x 24."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from ampacity.reports.render.plain import printable
from ampacity.reports.render.table import Cell, Column, Table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

SUPERSCRIPT = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
GAP = 2  # blanks between columns
STYLES = {"good": "green", "bad": "bold red", "unsure": "yellow", "": ""}
LABEL = 10  # columns of a screen's labels
LINES = 23  # of 24: the last is the shell's prompt
FEWEST = 3  # rows of a screen's table, at least
NOTES, NOTE_LINES = 3, 2
COMMAND_LINES = 4  # a longer one is not printed: it is in summary.json
SENTENCES = re.compile(r"(?<=[.!?]) (?=[A-Z])")
BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Entry:
    """A line of a screen: a label, what it says, and more of it in grey."""

    label: str
    text: str
    aside: str = ""
    state: str = ""  # good | bad | unsure, or empty


@dataclass(frozen=True)
class Screen:
    """The last screen of a command.

    Of a long table it shows the first and last row and those around ``near``; None: the first ones.
    """

    answers: Sequence[Entry]
    table: Table | None = None
    _: KW_ONLY
    near: int | None = None
    rows: int = 8  # at most
    drawn: Sequence[Entry] = ()
    notes: Sequence[str] = ()
    next_command: str | None = None
    path: object = None  # of the report


def show(screen: Screen, console: Console) -> None:
    """Print a screen; of long texts and tables only as much as fits."""
    table = screen.table if screen.table and screen.table.rows else None
    head = 1 + any(column.unit for column in table.columns) if table else 0
    for most in (3, 2, 1):  # lines of an answer
        above = [line for entry in screen.answers for line in _entry(console, entry, most)]
        below = _below(screen, console, min(most, NOTE_LINES))
        rows = sum(math.ceil(max(line.cell_len, 1) / console.width) for line in above + below)
        if rows + head + FEWEST < LINES:
            break
    _print(console, *above)
    if table:
        room = max(LINES - rows - head - 1, FEWEST)
        shortened = _shortened(screen, room)
        spare = max(room - len(shortened.rows), 0)
        print_table(console, shortened, notes=False, spare=spare)
    _print(console, *below)


def _below(screen: Screen, console: Console, most: int) -> list[Text]:
    """Return the lines below the table; a note has ``most`` lines."""
    lines = [line for entry in screen.drawn for line in _entry(console, entry, 1)]
    more = len(screen.notes) - NOTES
    for i, note in enumerate(screen.notes[:NOTES]):
        aside = f"+ {more} more with --summary full" if more > 0 and i == NOTES - 1 else ""
        first = SENTENCES.split(note, 1)[0]
        lines += _entry(console, Entry("NOTE", first, aside, "unsure"), most)
    if screen.next_command:
        lines += _next(console, screen.next_command)
    if screen.path:
        lines.append(_labelled(console, "REPORT", str(screen.path)))
    return lines


def _shortened(screen: Screen, most: int) -> Table:
    """Return the table with at most ``most`` rows, and how many more there are."""
    assert screen.table is not None
    rows, most, near = screen.table.rows, min(most, screen.rows), screen.near
    if len(rows) <= most:
        return screen.table
    kept = list(range(most))
    if near is not None:
        inner = sorted(range(1, len(rows) - 1), key=lambda i: (abs(i - near), i))
        kept = sorted([0, *inner[: most - 2], len(rows) - 1])
    blank = [Cell("")] * (len(screen.table.columns) - 1)
    more = Cell(f"{len(rows) - most} more with --summary full", heads=True)
    return Table("", screen.table.columns, [*(rows[i] for i in kept), [more, *blank]])


def _next(console: Console, command: str) -> list[Text]:
    """Return a command in one line, which a terminal wraps and still copies whole."""
    line = _labelled(console, "NEXT", command, "bold cyan")
    if line.cell_len > COMMAND_LINES * console.width:
        return _entry(console, Entry("NEXT", "next_command in summary.json: too long to show"), 2)
    return [line]


def _labelled(console: Console, label: str, text: str, style: str = "") -> Text:
    return text_of(console, f"{label:<{LABEL}}", "dim") + text_of(console, text, style)


def _entry(console: Console, entry: Entry, most: int) -> list[Text]:
    """Return the lines of an entry, ``most`` at most, wrapped beside its label."""
    from rich.text import Text

    text = text_of(console, entry.text)
    text.stylize("yellow" if entry.label == "NOTE" else STYLES[entry.state] or "bold")
    if entry.aside:
        text += text_of(console, "    " + " ".join(entry.aside.split()), "dim")
    lines = list(text.wrap(console, max(console.width - LABEL, 20)))
    lines = _first(console, lines, most, max(console.width - LABEL, 20))
    labels = [entry.label, *[""] * (len(lines) - 1)]
    found = [
        Text(f"{label:<{LABEL}}", "dim") + line for label, line in zip(labels, lines, strict=True)
    ]
    for line in found:
        line.rstrip()
    return found


def _first(console: Console, lines: list[Text], most: int, width: int) -> list[Text]:
    """Return ``most`` of the lines of a wrapped text; what is left out is left out word by word."""
    if len(lines) <= most:
        return lines
    kept = lines[:most]
    last = kept[-1]
    last.rstrip()
    while last.cell_len > width - 2 and " " in last.plain:
        last.right_crop(len(last.plain) - last.plain.rindex(" "))
    last.truncate(width - 2)
    return [*kept[:-1], last + text_of(console, " …", "dim")]


def text_of(console: Console, text: str, style: str = "") -> Text:
    """Return foreign text without control characters, in the characters of the console."""
    from rich.text import Text

    text, encoding = printable(text), console.encoding
    if not encoding.startswith("utf"):
        text = text.encode(encoding, "in_ascii").decode(encoding)
    return Text(text, style=style)


def _print(console: Console, *lines: Text) -> None:
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def say(console: Console, text: str, style: str = "") -> None:
    """Print a paragraph, as wide as the console."""
    console.print(text_of(console, text, style), highlight=False)


def print_entry(console: Console, label: str, value: str, note: str, state: str) -> None:
    """Print a label and its value, the note below it, both wrapped beside the label."""
    from rich.text import Text

    content = text_of(console, value, STYLES[state] or "bold")
    if note:
        content += text_of(console, "\n" + note, "dim")
    lines = content.wrap(console, max(console.width - 18, 20))
    for i, line in enumerate(lines):
        line.rstrip()
        _print(console, Text(f"{'' if i else label:<18}") + line)


def spark(values: Sequence[float | None], width: int) -> str:
    """Return ``values`` as bars from 0 to the highest, the highest of each part; blank: none."""
    width = min(width, len(values))
    parts = [
        values[len(values) * i // width : len(values) * (i + 1) // width] for i in range(width)
    ]
    tops = [max((v for v in part if v is not None), default=None) for part in parts]
    highest = max((top for top in tops if top is not None), default=0.0) or 1.0
    return "".join(" " if v is None else BARS[min(int(8 * v / highest), 7)] for v in tops)


def _width(console: Console, cell: Cell) -> int:
    return text_of(console, cell.text).cell_len + (len(str(cell.note)) if cell.note else 0)


def _widths(console: Console, columns: list[Column], rows: list[list[Cell]]) -> list[int]:
    """Return the width of each column; a head widens the last blank column it reaches over."""
    widths = [
        max(
            text_of(console, column.head).cell_len,
            text_of(console, column.unit).cell_len,
            *(0 if row[i].heads else _width(console, row[i]) for row in rows),
        )
        for i, column in enumerate(columns)
    ]
    for row in rows:
        for i in (i for i, cell in enumerate(row) if cell.heads):
            reach = _reach(row, i)
            lacking = _width(console, row[i]) - sum(widths[i:reach]) - GAP * (reach - 1 - i)
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
    return _total(_widths(console, table.columns, table.rows)) <= console.width


def _kept(console: Console, table: Table) -> list[int]:
    """Return the columns that fit, by priority."""
    columns, kept = table.columns, list(range(len(table.columns)))
    while len(kept) > 1 and _total(_widths(console, *_of(table, kept))) > console.width:
        last = max(kept, key=lambda i: (columns[i].priority, i))
        if any(column.cut for column in columns) and not columns[last].priority:
            break
        kept.remove(last)
    return kept


def _of(table: Table, kept: list[int]) -> tuple[list[Column], list[list[Cell]]]:
    return [table.columns[i] for i in kept], [[row[i] for i in kept] for row in table.rows]


def _aligned(text: Text, width: int, column: Column) -> Text:
    lacking = 0 if column.cut else max(width - text.cell_len, 0)
    if column.text:
        text.pad_right(lacking)
    else:
        text.pad_left(lacking)
    return text


def _print_line(console: Console, pieces: list[Text]) -> None:
    from rich.text import Text

    line = Text(" " * GAP).join(pieces)
    line.rstrip()
    console.print(line, highlight=False, no_wrap=True, overflow="ellipsis")


def print_table(
    console: Console, table: Table, *, notes: bool = True, spare: int | None = None
) -> None:
    """Print as many columns as fit, and the footnotes below.

    A last column that may be cut is wrapped, over ``spare`` further lines at most.
    """
    from rich.text import Text

    kept = _kept(console, table)
    columns, rows = _of(table, kept)
    widths = _widths(console, columns, rows)
    for heads in zip(*((column.head, column.unit) for column in columns), strict=True):
        pieces = [
            _aligned(text_of(console, head, "bold"), width, column)
            for head, width, column in zip(heads, widths, columns, strict=True)
        ]
        if any(heads):
            _print_line(console, pieces)
    used: list[int] = []  # footnotes of the columns shown, numbered as they appear
    for row in rows:
        pieces, i = [], 0
        while i < len(row):
            cell, reach = row[i], _reach(row, i)
            if notes and cell.note and cell.note not in used:
                used.append(cell.note)
            mark = _raised(used.index(cell.note) + 1) if notes and cell.note else ""
            text = text_of(console, cell.text + mark, STYLES[cell.state])
            column = Column("", text=True) if cell.heads else columns[i]
            pieces.append(_aligned(text, _total(widths[i:reach]), column))
            i = reach
        lines = [pieces]
        if columns[-1].cut and len(pieces) == len(columns):
            left = _total(widths[:-1]) + GAP if len(widths) > 1 else 0
            wide = max(console.width - left, LABEL)
            wrapped = list(pieces[-1].wrap(console, wide)) or pieces[-1:]
            most = len(wrapped) if spare is None else min(len(wrapped), 1 + spare)
            first, *more = _first(console, wrapped, most, wide)
            lines = [[*pieces[:-1], first], *([Text(" " * (left - GAP)), line] for line in more)]
            spare = spare and spare - len(more)
        for line in lines:
            _print_line(console, line)
    for number, note in enumerate(used, start=1):
        say(console, f"{_raised(number)} {table.notes[note - 1]}", "dim")
    left_out = [column.head for i, column in enumerate(table.columns) if i not in kept]
    if left_out and notes:
        say(console, f"Left out at this width: {', '.join(left_out)}", "dim")


def _raised(number: int) -> str:
    return str(number).translate(SUPERSCRIPT)
