"""A table as rows of text, for the terminal and for the page alike.

A null figure is a dash with the number of a footnote, which gives the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ampacity.analysis.contract.figures import Percentiles
from ampacity.reports.render.figures import DASH, NO_REASON, Quantile, quantile_text, why_null

R = TypeVar("R")
V = TypeVar("V")


@dataclass(frozen=True)
class Cell:
    text: str
    note: int | None = None  # number of a footnote
    state: str = ""  # good | bad | unsure, or empty
    heads: bool = False  # in a terminal it may reach over the blank cells that follow


@dataclass(frozen=True)
class Column:
    head: str
    unit: str = ""
    priority: int = 0  # the terminal drops the highest numbers first
    text: bool = False  # words (aligned left), not figures
    cut: bool = False  # never left out: its words, in the last column that fits, end with …


@dataclass
class Table:
    """``rows`` hold one cell for each of ``columns``; ``notes`` are footnotes, numbered from 1."""

    title: str
    columns: list[Column]
    rows: list[list[Cell]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def footnote(self, reason: str) -> int:
        """Return the number of the footnote ``reason``; equal reasons share one."""
        if reason not in self.notes:
            self.notes.append(reason)
        return self.notes.index(reason) + 1

    def last_second(self) -> Table:
        """Return the table with its last column second: a narrow page shows the verdict."""

        def moved(row: list[V]) -> list[V]:
            return [row[0], row[-1], *row[1:-1]]

        return Table(self.title, moved(self.columns), [moved(row) for row in self.rows], self.notes)

    def cell(self, value: V | None, text: Callable[[V], str], why: str | None = NO_REASON) -> Cell:
        """Return a figure, or a dash with the footnote ``why`` (none where that is empty)."""
        if value is None:
            return Cell(DASH, self.footnote(why) if why else None)
        return Cell(text(value))


class Rows(Generic[R]):
    """A table with a row for each of ``items``; its columns are added one by one."""

    def __init__(self, title: str, items: Iterable[R]) -> None:
        self.table, self._items = Table(title, []), items
        self._cells: list[Callable[[Table, R], Cell]] = []

    def column(self, column: Column, cell: Callable[[Table, R], Cell]) -> None:
        self.table.columns.append(column)
        self._cells.append(cell)

    def words(self, head: str, text: Callable[[R], str]) -> None:
        self.column(Column(head, text=True), lambda _, item: Cell(text(item)))

    def figure(
        self,
        head: str,
        unit: str,
        value: Callable[[R], V | None],
        text: Callable[[V], str],
        priority: int = 0,
        why: str | Callable[[R], str | None] = NO_REASON,
    ) -> None:
        """Add a figure's column. ``why`` it is null; empty: a dash without a footnote."""

        def cell(table: Table, item: R) -> Cell:
            return table.cell(
                value(item), text, why if isinstance(why, str) else why(item) or NO_REASON
            )

        self.column(Column(head, unit, priority), cell)

    def percentile(
        self,
        head: str,
        unit: str,
        held: Callable[[R], Percentiles],
        name: Quantile,
        priority: int = 0,
    ) -> None:
        """Add the column of a latency's percentile."""

        def cell(table: Table, item: R) -> Cell:
            of = held(item)
            if getattr(of, name) is None:
                return Cell(DASH, table.footnote(why_null(of, name)))
            return Cell(quantile_text(of, name))

        self.column(Column(head, unit, priority), cell)

    def done(self) -> Table:
        """Return the table with all its rows."""
        self.table.rows = [[cell(self.table, item) for cell in self._cells] for item in self._items]
        return self.table
