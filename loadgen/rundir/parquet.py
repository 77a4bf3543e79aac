"""Read the Parquet files of a run directory: small ones whole, large ones column by column."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ampacity.files import GIB, MIB, memory_bytes, open_file
from ampacity.loadgen.rundir.files import RunDirError, explained
from ampacity.loadgen.rundir.lists import LISTS, ListScan, scan_lists
from ampacity.loadgen.rundir.records import SCHEMA, complete

HELD_BYTES = 256 * MIB  # of a table: a larger requests.parquet is read column by column
HELD_VALUES = 2**28  # of a list column, kept: a stage of a million answers of 250 tokens
ROW_BYTES = 200  # of a request while it is analysed, beside its lists
BATCH_ROWS = 1 << 14
ROWS_BACK = 1 << 16  # kept before the row that was asked for: rows are nearly in scheduled order


@contextmanager
def _opened(path: Path, remedy: str = "", **how: Any) -> Iterator[Any]:
    import pyarrow.parquet as pq

    with (
        explained(f"{path} cannot be read", remedy),
        open_file(path),  # refuses what is no file
        pq.ParquetFile(path, **how) as file,
    ):
        yield file


def read_parquet(path: Path, remedy: str = "") -> pa.Table:
    """Return all rows and columns of a file. Raises RunDirError, which ends with the remedy."""
    with _opened(path, remedy, memory_map=True) as file:
        _check_memory(sum(_unfolded_bytes(file).values()))
        return pa.Table.from_batches(file.iter_batches(use_threads=False), schema=file.schema_arrow)


def read_requests(path: Path) -> pa.Table | StoredRecords:
    """Return the rows of requests.parquet; those of a large file stay in it. Raises RunDirError."""
    stored = StoredRecords(path)
    return stored if stored.unfolded_bytes > HELD_BYTES else stored.slice()


def scan_of(table: pa.Table | StoredRecords) -> ListScan:
    """Return what is known of the lists of each row."""
    if isinstance(table, StoredRecords):
        return table.scan
    return scan_lists(table.select(LISTS).to_batches(BATCH_ROWS))


def lists_between(
    table: pa.Table | StoredRecords, name: str, low: int, high: int, span: tuple[int, int]
) -> pa.ChunkedArray:
    """Return the lists of rows low ... high - 1; ``span``: the rows that are asked for next."""
    if isinstance(table, StoredRecords):
        return table.lists(name, low, high, span)
    return table[name].slice(low, high - low)


def cast_column(table: pa.Table, name: str, kind: pa.DataType, path: Path) -> pa.ChunkedArray:
    """Return a column as ``kind``. Raises RunDirError."""
    with explained(f"{path}: column {name} is of a wrong type"):
        return table[name].cast(kind)


def _unfolded_bytes(file: Any) -> dict[str, int]:
    """Return the memory that each column of a Parquet file needs, by its footer."""
    found: dict[str, int] = {}
    for k in range(file.num_row_groups):
        # a damaged footer raises here; in pyarrow's ``RowGroupMetaData.column`` it ends the process
        next(file.iter_batches(1, [k], use_threads=False), None)
        group = file.metadata.row_group(k)
        for column in map(group.column, range(group.num_columns)):
            size = max(column.total_uncompressed_size, 8 * column.num_values)
            name = column.path_in_schema.partition(".")[0]
            found[name] = found.get(name, 0) + size
    return found


def _check_memory(needed: int) -> None:
    """Raise ValueError where so many bytes are more than the memory."""
    if needed > (memory := memory_bytes() or needed):
        raise ValueError(
            f"it unfolds to {needed / GIB:,.1f} GiB, the memory has {memory / GIB:,.1f}"
        )


class StoredRecords:
    """The rows of a requests.parquet, of which a column is read when it is asked for.

    It has what the analysis uses of ``pa.Table``. Of each list column the rows that were read last
    are kept.
    """

    column_names = SCHEMA.names

    def __init__(self, path: Path, rows: npt.NDArray[np.int64] | None = None) -> None:
        """Look at a file, or at some of its rows. Raises RunDirError."""
        self.path, self._rows = path, rows
        self._kept: dict[str, tuple[int, pa.ChunkedArray]] = {}
        with _opened(path, memory_map=True) as file:
            footer, self._names = file.metadata, file.schema_arrow.names
            groups = [footer.row_group(k).num_rows for k in range(footer.num_row_groups)]
            bytes_of = _unfolded_bytes(file)
            self.unfolded_bytes = sum(bytes_of.values())
            columns = [n for name, n in bytes_of.items() if name not in LISTS]
            kept = min(self.unfolded_bytes - sum(columns), 8 * HELD_VALUES)
            needed = ROW_BYTES * footer.num_rows + max(columns, default=0) + kept
            _check_memory(min(needed, self.unfolded_bytes))
        self._first_rows = np.cumsum([0, *groups])
        self.num_rows = footer.num_rows if rows is None else len(rows)
        known = complete(pa.table({name: [] for name in self._names})).column_names
        if missing := [name for name in SCHEMA.names if name not in known]:
            raise RunDirError(f"{path} lacks the column {missing[0]!r}")

    def __getitem__(self, name: str) -> pa.ChunkedArray:
        return self.select([name])[name]

    def select(self, names: Sequence[str]) -> pa.Table:
        """Return some columns of all rows."""
        self._kept.clear()  # whoever looks at all rows is done with the lists of a stage
        found = self._read(names, 0, int(self._first_rows[-1]))
        return found if self._rows is None else found.take(pa.array(self._rows))

    def filter(self, mask: Any) -> StoredRecords:
        """Return the rows under a mask; null is False."""
        rows = np.flatnonzero(np.asarray(mask.fill_null(False)))
        return StoredRecords(self.path, rows if self._rows is None else self._rows[rows])

    def slice(self, low: int = 0, length: int | None = None) -> pa.Table:
        """Return rows as a table with all columns."""
        high = self.num_rows if length is None else min(low + length, self.num_rows)
        if self._rows is None:
            return self._read(SCHEMA.names, low, high)
        rows = self._rows[low:high]
        first = int(rows.min(initial=self._first_rows[-1]))
        found = self._read(SCHEMA.names, first, int(rows.max(initial=first - 1)) + 1)
        return found.take(pa.array(rows - first))

    @cached_property
    def scan(self) -> ListScan:
        """Return the facts about all lists, which takes as long as to read them."""
        found = scan_lists(self._batches(LISTS, 0, int(self._first_rows[-1])))
        return found if self._rows is None else found.take(self._rows)

    def lists(self, name: str, low: int, high: int, span: tuple[int, int]) -> pa.ChunkedArray:
        """Return the lists of rows low ... high - 1.

        All of ``span`` are read and kept, or as many from there on as ``HELD_VALUES`` are in.
        """
        begin, kept = self._kept.get(name, (0, pa.chunked_array([], SCHEMA.field(name).type)))
        if not begin <= low <= high <= begin + len(kept):
            self._kept.pop(name, None)
            del kept
            ends = np.cumsum(self.scan.count[slice(*span)], dtype=np.int64)
            begin, end = span
            if len(ends) and ends[-1] > HELD_VALUES:
                begin = max(begin, low - ROWS_BACK)
                before = ends[begin - span[0] - 1] if begin > span[0] else 0
                within = int(np.searchsorted(ends, before + HELD_VALUES, "right"))
                end = max(high, span[0] + within)
            kept = self._list_rows(name, begin, end)
            self._kept[name] = begin, kept
        return kept.slice(low - begin, high - low)

    def _list_rows(self, name: str, low: int, high: int) -> pa.ChunkedArray:
        if self._rows is None:
            return self._read([name], low, high)[name]
        rows = self._rows[low:high]
        first = int(rows[0])
        return self._read([name], first, int(rows[-1]) + 1)[name].take(pa.array(rows - first))

    def _read(self, names: Sequence[str], low: int, high: int) -> pa.Table:
        """Return rows low ... high - 1 of the file."""
        kinds = {name: SCHEMA.field(name).type for name in names}
        schema = pa.schema(kinds, metadata=SCHEMA.metadata)
        return pa.Table.from_batches(self._batches(names, low, high), schema=schema)

    def _batches(self, names: Sequence[str], low: int, high: int) -> Iterator[pa.RecordBatch]:
        """Return rows low ... high - 1 of the file in parts, of the types of ``SCHEMA``."""
        first = self._first_rows
        groups = [k for k in range(len(first) - 1) if first[k] < high and first[k + 1] > low]
        held = [name for name in names if name in self._names]
        # no memory map: what is mapped counts as memory
        with _opened(self.path, buffer_size=MIB) as file:
            at = int(first[groups[0]]) if groups else high
            # each group by itself: a reader keeps the levels of all lists that it has read
            of_groups = (
                file.iter_batches(BATCH_ROWS, [k], held, use_threads=False) for k in groups
            )
            for batch in chain.from_iterable(of_groups):
                part = batch.slice(max(low - at, 0), max(high - max(low, at), 0))
                at += batch.num_rows
                if not part.num_rows:
                    continue
                table = complete(pa.Table.from_batches([part]), names)
                columns = [
                    cast_column(table, name, SCHEMA.field(name).type, self.path) for name in names
                ]
                yield from pa.Table.from_arrays(columns, names).to_batches()
