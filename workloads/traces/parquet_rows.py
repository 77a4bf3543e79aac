"""Read the rows of a Parquet trace."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.traces.columns import ROLES, reach
from ampacity.workloads.traces.records import ColumnCounts, Records, Row

_BATCH = 20_000


def parquet_records(file: Any, path: Path, keep: frozenset[str]) -> Records:
    """Return the rows of a Parquet file; field b of the struct a is the column ``a.b``."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        parquet = pq.ParquetFile(file)
    except (pa.ArrowException, OSError) as error:
        raise WorkloadError(f"{path}: this is no Parquet file: {_first_line(error)}") from None
    wanted_names = {name for names in ROLES.values() for name in names}
    wanted_names |= {name.strip().lower() for name in keep}
    columns_of = _leaves(parquet.schema_arrow)
    nested = [name.strip() for name in keep if "." in name and name.strip() not in columns_of]
    wanted = {top for leaf, top in columns_of.items() if leaf.strip().lower() in wanted_names}
    wanted |= {
        top
        for top in columns_of.values()
        if any(name.lower().startswith(f"{top.lower()}.") for name in nested)
    }
    total, done = max(parquet.metadata.num_rows, 1), 0
    counts = ColumnCounts()

    def rows() -> Iterator[Row]:
        nonlocal done
        try:
            for batch in parquet.iter_batches(_BATCH, columns=sorted(wanted)):
                table = pa.Table.from_batches([batch])
                while any(pa.types.is_struct(column.type) for column in table.schema):
                    table = table.flatten()
                columns = [
                    (c.cast(pa.string()) if pa.types.is_timestamp(c.type) else c).to_pylist()
                    for c in table.columns
                ]
                counts.add(tuple(columns_of), len(table))
                for values in zip(*columns, strict=True):
                    done += 1
                    row = dict(zip(table.column_names, values, strict=True))
                    yield done, row | {name: reach(row, name) for name in nested}
        except pa.ArrowException as error:
            message = f"{path}: the Parquet data are broken: {_first_line(error)}"
            raise WorkloadError(message) from None

    tops_read = tuple(f"{top.lower()}." for top in wanted)
    reached = [name for name in nested if name.lower().startswith(tops_read)]
    return Records([*columns_of, *reached], 0, rows(), " row ", lambda: done / total, counts)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:120]


def _leaves(schema: Any) -> dict[str, str]:
    """Return {leaf: top-level column} of a Parquet schema."""
    import pyarrow as pa

    def inner(name: str, kind: Any) -> Iterator[str]:
        if pa.types.is_struct(kind):
            for i in range(kind.num_fields):
                yield from inner(f"{name}.{kind.field(i).name}", kind.field(i).type)
        else:
            yield name

    return {
        leaf: str(column.name) for column in schema for leaf in inner(str(column.name), column.type)
    }
