"""Rows of a trace file as mappings, whatever the format."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ampacity.workloads.traces.values import BadRow

Row = tuple[int, Mapping[str, Any] | BadRow]


class ColumnCounts:
    """The number of ``rows`` read, and of rows with each column; memory is bounded."""

    _SHAPES_MAX, _NAMES_MAX = 1000, 10_000

    def __init__(self) -> None:
        self.rows = 0
        self.is_full = False  # there are more names than are counted
        self._shapes: Counter[tuple[str, ...]] = Counter()
        self._names: Counter[str] = Counter()

    def add(self, names: tuple[str, ...], rows: int = 1) -> None:
        """Count ``rows`` rows that have these columns."""
        self.rows += rows
        self._shapes[names] += rows
        if len(self._shapes) > self._SHAPES_MAX:
            self.by_name()

    def add_unused(self, names: tuple[str, ...]) -> None:
        """Count fields of an entry that are beside its list of requests."""
        self._add(names, 1)

    def by_name(self) -> Counter[str]:
        """Return rows by column; of more than ten thousand names only the first ones."""
        for shape, rows in self._shapes.items():
            self._add(shape, rows)
        self._shapes.clear()
        return self._names

    def _add(self, names: tuple[str, ...], rows: int) -> None:
        for name in names:
            if name in self._names or len(self._names) < self._NAMES_MAX:
                self._names[name] += rows
            else:
                self.is_full = True


@dataclass(frozen=True)
class Records:
    """The rows of a file, each with its number in it."""

    names: list[str]  # of the columns
    first: int  # number of the line with the names
    rows: Iterator[Row]
    place: str  # what a row's number counts: ":" for a line, else " entry " or " row "
    read_share: Callable[[], float]  # progress of the reading, 0 to 1
    columns: ColumnCounts = field(default_factory=ColumnCounts)
    duplicate_keys: Counter[str] = field(default_factory=Counter)  # within one object
