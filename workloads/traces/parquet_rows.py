"""Read the rows of a Parquet trace."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.traces.json_rows import expanded_records
from ampacity.workloads.traces.records import Records

_BATCH = 5_000


def parquet_records(file: Any, path: Path, keep: frozenset[str]) -> Records:
    """Return the rows of a Parquet file, as of JSON: structs are objects, lists are lists."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        parquet = pq.ParquetFile(file)
    except (pa.ArrowException, OSError) as error:
        raise WorkloadError(f"{path}: this is no Parquet file: {_first_line(error)}") from None
    names = Counter(name.strip().lower() for name in parquet.schema_arrow.names)
    if twice := [name for name, times in names.items() if times > 1]:
        raise WorkloadError(f"{path}: the column {twice[0]} stands there twice: keep one")
    total, done = max(parquet.metadata.num_rows, 1), 0

    def rows() -> Iterator[tuple[int, Any]]:
        nonlocal done
        try:
            for batch in parquet.iter_batches(_BATCH):
                columns = [
                    c.cast(pa.string()) if pa.types.is_timestamp(c.type) else c
                    for c in batch.columns
                ]
                for row in pa.Table.from_arrays(columns, batch.schema.names).to_pylist():
                    done += 1
                    yield done, row
        except (pa.ArrowException, ValueError) as error:
            message = f"{path}: the Parquet data are broken: {_first_line(error)}"
            raise WorkloadError(message) from None

    return expanded_records(rows(), " row ", lambda: done / total, keep, Counter())


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:120]
