"""Read the objects of another tool's file as a table: a row each, a column for each inner field."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ampacity.imports.results import ImportedFileError, Request

if TYPE_CHECKING:
    import pandas as pd

_LARGEST = 4e9  # seconds since 1970 until 2096
_DEEPEST = 5  # names in the path of a field
_TO_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0}


class Kind(NamedTuple):
    """A kind of values: which are valid, how a message names them, and the dtype of a column."""

    fits: Callable[[Any], bool]
    convert: Callable[[Any], Any]
    wanted: str
    dtype: str = "object"  # Int64 keeps whole numbers beside nulls, as times in ns need


class Column(NamedTuple):
    """A field of ``Request``: the path of its value in a row, names joined by dots.

    Of several paths the first with a value counts. ``unit``: the factor to seconds, or the path of
    a unit's name.
    """

    paths: str | tuple[str, ...]
    kind: str = "number"
    unit: float | str = 1.0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= _LARGEST


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_number, value))


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, Mapping) for item in value)


def _text(value: Any) -> str | None:
    return str(value) if isinstance(value, str | int | float) and value != "" else None


KINDS = {
    "number": Kind(_is_number, float, "a number of 0 or more", "float64"),
    "tokens": Kind(lambda v: _is_number(v) and v < 2**31, round, "a count of tokens", "Int64"),
    "ns": Kind(lambda v: type(v) is int and 0 < v < 2**63, int, "a time in ns", "Int64"),
    "durations": Kind(_are_numbers, lambda v: list(map(float, v)), "a list of durations"),
    "unit": Kind(
        lambda v: isinstance(v, str) and v in _TO_SECONDS,
        lambda v: _TO_SECONDS[v],
        f"one of {', '.join(_TO_SECONDS)}",
        "float64",
    ),
    "list": Kind(lambda v: isinstance(v, list), list, "a list"),
    "objects": Kind(_are_objects, list, "a list of objects"),
    "text": Kind(lambda v: True, _text, "a text"),
    "any": Kind(lambda v: True, lambda v: v, "a value"),
}


def _flat(value: Mapping[str, Any], prefix: str = "", depth: int = 1) -> Iterator[tuple[str, Any]]:
    for name, inner in value.items():
        if isinstance(inner, Mapping) and depth < _DEEPEST:
            yield from _flat(inner, f"{prefix}{name}.", depth + 1)
        else:
            yield prefix + name, inner


class Table:
    """Objects of a file. Every reader raises ImportedFileError with the row and the field."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], where: str, row: str, first: int = 0):
        """``where``: the file; ``row``: the place of a row in it, counted from ``first``."""
        import pandas as pd

        # json_normalize makes floats of integers beside nulls: times in ns would lose digits
        index = range(first, first + len(rows))
        self.frame = pd.DataFrame([dict(_flat(r)) for r in rows], index, dtype=object)
        self.where, self._row = where, row

    def refuse(self, bad: pd.Series[bool], path: str, wanted: str) -> None:
        """Raise ImportedFileError for the first of the bad rows."""
        if bad.any():
            row: Any = bad.idxmax()
            value = self._cells(path)[row]
            shown = "missing" if value is None or value != value else f"{value!r:.60}"
            raise ImportedFileError(
                f"{self.where}{self._row.format(row)}{path} is {shown}, not {wanted}: "
                "the file is damaged or of another version"
            )

    def _cells(self, path: str) -> pd.Series[Any]:
        """Return a column as in the file, None where null or absent."""
        import pandas as pd

        if path not in self.frame:
            return pd.Series(None, self.frame.index, dtype=object)
        return self.frame[path].where(self.frame[path].notna(), None)

    def values(self, path: str, kind: str, needed: bool | pd.Series[bool] = False) -> list[Any]:
        """Return the values at a path, None if null or absent; ``needed``: rows without null."""
        fits, convert, wanted, _ = KINDS[kind]
        parts = path.split(".")
        for outer in (".".join(parts[:n]) for n in range(1, len(parts))):
            self.refuse(self._cells(outer).notna(), outer, "an object")
        column = self._cells(path)
        null = column.isna()
        self.refuse(~column.map(fits).astype(bool) & (~null | needed), path, wanted)
        return [None if n else convert(v) for v, n in zip(column, null, strict=True)]

    def column(
        self, column: Column | str, kind: str = "number", needed: bool | pd.Series[bool] = False
    ) -> pd.Series[Any]:
        """Return a column, times in seconds."""
        import pandas as pd

        paths, kind, unit = Column(column, kind) if isinstance(column, str) else column
        dtype, index = KINDS[kind].dtype, self.frame.index
        first, *others = (paths,) if isinstance(paths, str) else paths
        found = pd.Series(self.values(first, kind, needed), index, dtype)
        for path in others:
            found = found.fillna(pd.Series(self.values(path, kind), index, dtype))
        if unit == 1.0:
            return found
        if isinstance(unit, str):
            factor = pd.Series(self.values(unit, "unit", found.notna()), index, "float64")
        else:
            factor = pd.Series(unit, index)
        if kind == "durations":
            pairs = zip(found, factor, strict=True)
            return pd.Series([v and [f * g for g in v] for v, f in pairs], index, dtype)
        return found * factor

    def read(self, columns: Mapping[str, Column]) -> pd.DataFrame:
        """Return the fields of ``Request`` that the table of a tool lists."""
        import pandas as pd

        return pd.DataFrame({field: self.column(column) for field, column in columns.items()})


class Record(Table):
    """One object of a file."""

    def __init__(self, value: Mapping[str, Any], where: str) -> None:
        super().__init__([value], where, "")

    def get(self, path: str, kind: str = "number", *, needed: bool = False) -> Any:
        """Return the value at a path, None where null or absent."""
        return self.values(path, kind, needed)[0]

    def has(self, path: str) -> bool:
        return path in self.frame

    def rows(self, path: str) -> Table:
        """Return a list of objects as a table."""
        return Table(self.get(path, "objects", needed=True), self.where, path + "[{}].")

    def lists(self, *names: str) -> Table:
        """Return parallel lists over the requests as a table, as long as the first of them."""
        lists = [self.get(name, "list", needed=True) for name in names]
        length = len(lists[0])
        for name, values in zip(names, lists, strict=True):
            if len(values) != length:
                raise ImportedFileError(
                    f"{self.where}{name} has {len(values)} entries, {length} are due: "
                    "the file is damaged"
                )
        rows = [dict(zip(names, row, strict=True)) for row in zip(*lists, strict=True)]
        return Table(rows, self.where, "request {}: ")

    def request_rate(self) -> float | None:
        """Return requests per second; None: unlimited, or by the times of a trace."""
        if self.get("request_rate", "any") in ("inf", "trace", None, math.inf):
            return None
        rate: float = self.get("request_rate", needed=True)
        self.refuse(self.column("request_rate") <= 0, "request_rate", "above 0")
        return rate

    def check(self, listed: Mapping[str, float]) -> None:
        """Raise ImportedFileError where a total, by its path, is not that of the requests."""
        for path, value in listed.items():
            total = self.get(path)
            if total is not None and abs(value - total) > 1e-6 * total:
                raise ImportedFileError(
                    f"{self.where}{path} is {total:.6g}, but {value:.6g} by the single requests: "
                    "the file contradicts itself"
                )


def read_lists(run: Record, *further: str) -> tuple[Table, pd.DataFrame]:
    """Return the parallel lists of vLLM's and SGLang's files, and the fields that both have."""
    optional = [name for name in (*further, "cached_tokens") if run.has(name)]
    table = run.lists("ttfts", "itls", "errors", "input_lens", "output_lens", *optional)
    import pandas as pd

    fields = pd.DataFrame(
        {
            "ttft_s": table.column("ttfts", needed=True),
            "gaps_s": table.column("itls", "durations", needed=True),
            "input_tokens": table.column("input_lens", "tokens"),
            "output_tokens": table.column("output_lens", "tokens"),
            "cached_tokens": table.column("cached_tokens", "tokens"),
            "error": [str(e) if e else None for e in table.values("errors", "any")],
        }
    )
    fields["e2e_s"] = fields.ttft_s + fields.gaps_s.map(math.fsum)
    return table, fields


def requests_of(frame: pd.DataFrame) -> list[Request]:
    """Return the rows of a frame whose columns are fields of ``Request``."""
    known = frame.astype(object).where(frame.notna(), None)
    return [Request(**{str(k): v for k, v in row.items()}) for row in known.to_dict("records")]
