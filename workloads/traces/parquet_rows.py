"""Read the rows of a Parquet trace."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.traces.json_rows import expanded_records
from ampacity.workloads.traces.records import Records
from ampacity.workloads.traces.values import UNITS, span_unit

_BATCH = 5_000


def parquet_records(file: Any, path: Path, keep: frozenset[str]) -> Records:
    """Return the rows of a Parquet file, as of JSON: structs are objects, lists are lists."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        parquet = pq.ParquetFile(file)
    except (pa.ArrowException, OSError) as error:
        raise WorkloadError(f"{path}: this is no Parquet file: {_first_line(error)}") from None
    names = Counter(parquet.schema_arrow.names)
    if twice := [name for name, times in names.items() if times > 1]:
        raise WorkloadError(f"{path}: the column {twice[0]} stands there twice: keep one")
    total, done = max(parquet.metadata.num_rows, 1), 0

    def rows() -> Iterator[tuple[int, Any]]:
        nonlocal done
        try:
            for batch in parquet.iter_batches(_BATCH):
                columns = map(_plain, batch.columns, batch.schema.names)
                for row in pa.Table.from_arrays([*columns], batch.schema.names).to_pylist():
                    done += 1
                    yield done, row
        except (pa.ArrowException, ValueError) as error:
            message = f"{path}: the Parquet data are broken: {_first_line(error)}"
            raise WorkloadError(message) from None

    return expanded_records(rows(), " row ", lambda: done / total, keep, Counter())


def _plain(column: Any, name: str) -> Any:
    """Return timestamps as texts, durations as numbers in the unit that the name says."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_timestamp(column.type):
        return column.cast(pa.string())
    if not pa.types.is_duration(column.type):
        return column
    ns = column.cast(pa.duration("ns")).cast(pa.int64()).cast(pa.float64(), safe=False)
    return pc.divide(ns, 10.0 ** UNITS[span_unit(name)[0]])


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:120]
