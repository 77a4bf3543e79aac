"""The run directory: run.json, the crash-safe stream of records, requests.parquet, server.parquet.

During a run finished requests are appended to ``requests.arrows`` (an Arrow IPC stream, flushed
batch by batch). ``finish`` turns the stream into ``requests.parquet``. After a kill at any moment
``load_run`` reads every complete batch of the stream.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import pyarrow as pa

from ampacity.loadgen.rundir.meta import fault_of
from ampacity.loadgen.rundir.records import (
    SCHEMA,
    SCHEMA_VERSION,
    RequestRecord,
    complete,
    to_batch,
)

if sys.platform != "win32":
    import fcntl

STREAM_NAME = "requests.arrows"
PARQUETS = ("requests.parquet", "server.parquet")
FLUSH_ROWS = 256  # a batch blocks the event loop for 1 to 2 ms, mostly independent of its rows


class RunDirError(ValueError):
    """A path that is no run directory, or that cannot be read or written."""


@dataclass(frozen=True)
class Run:
    """A run as read back: ``meta`` is run.json, ``requests`` has the columns of ``SCHEMA``."""

    path: Path
    meta: dict[str, Any]
    requests: pa.Table
    server: pa.Table | None
    complete: bool  # False: killed or still running; requests are what was recorded so far
    going_s: float | None = None  # of a running run: seconds since its last write


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically. Raises ValueError on NaN, RunDirError."""
    text = json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False)
    with (
        _replacing(path) as temporary,
        temporary.open("w", encoding="utf-8", errors="replace") as f,
    ):
        f.write(text + "\n")
        f.flush()
        os.fsync(f.fileno())


@contextlib.contextmanager
def _explained(problem: str, remedy: str = "") -> Iterator[None]:
    """Raise RunDirError with ``problem``, reason and remedy where files or Arrow raise an error."""
    try:
        yield
    except RunDirError:
        raise
    except (OSError, ValueError, RecursionError, pa.ArrowException) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise RunDirError(f"{problem}: {reason}{remedy}") from error


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path that replaces ``path`` at the end. Raises RunDirError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with _explained(f"{path} cannot be written"):
        try:
            yield temporary
            temporary.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


def check_new(path: Path) -> None:
    """Raise RunDirError unless ``path`` is new or empty."""
    with _explained(f"{path} cannot be used", "; choose another --out"):
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise RunDirError(f"{path} exists and is not an empty directory: choose another --out")


class StreamWriter:
    """Appends records to a crash-safe stream file; a context manager.

    It is called from the receive path, so a full or lost disk does not raise there: it sets
    ``failed``, and the records stay pending.
    """

    def __init__(self, path: Path) -> None:
        self._stream_path = path
        self._pending: list[RequestRecord] = []
        self._file = pa.OSFile(str(path), "wb")
        self._stream = pa.ipc.new_stream(self._file, SCHEMA)
        self._file.flush()  # a reader finds the schema from the start
        self.failed: str | None = None  # why records can no longer be written
        # Arrow's first conversion imports for 60 ms: now, not under load
        to_batch([RequestRecord(0, 0, 0, "ok")])

    def append(self, record: RequestRecord) -> None:
        """Add one finished request; it reaches the disk with its batch."""
        self._pending.append(record)
        if len(self._pending) >= FLUSH_ROWS:
            self.flush()

    def flush(self) -> None:
        """Hand pending records to the system: they then survive a crash of this process."""
        if not self._pending or self.failed or self._file.closed:
            return
        try:
            self._stream.write_batch(to_batch(self._pending))
            self._file.flush()
        except OSError as error:
            self.failed = f"{self._stream_path} cannot be written: {' '.join(str(error).split())}"
        else:
            self._pending.clear()

    def close(self) -> None:
        """Flush and close, after an error too: what was measured is kept."""
        self.flush()
        if not self._file.closed:
            for closing in (self._stream.close, self._file.close):
                with contextlib.suppress(OSError):
                    closing()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class RunWriter(StreamWriter):
    """Writes one run directory; a context manager. Without ``finish`` the streams remain."""

    def __init__(self, path: Path, meta: dict[str, Any]) -> None:
        """Create ``path`` (it must be new or empty) and write run.json. Raises RunDirError."""
        check_new(path)
        with _explained(f"{path} cannot be made", "; choose another --out"):
            path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.meta: dict[str, Any] = {"schema_version": SCHEMA_VERSION, **meta}
        super().__init__(path / STREAM_NAME)
        self.write_meta()
        self._held = (path / STREAM_NAME).open("r+b")
        _lock(self._held, shared=False)  # until the process ends

    def write_meta(self) -> None:
        write_json(self.path / "run.json", self.meta)

    def worker_stream(self, worker: int) -> Path:
        return self.path / f"requests-{worker}.arrows"

    def stage_table(self, stage: int) -> pa.Table:
        """Return the flushed rows of one stage, of all processes."""
        import pyarrow.compute as pc  # slow to import: after the first request

        self.flush()
        return read_streams(self.path).filter(pc.field("stage") == stage)

    def finish(self, server: pa.Table | None = None) -> None:
        """Write requests.parquet, sorted, and server.parquet; delete the streams."""
        super().close()
        self.raise_failed()
        order = [("request_id", "ascending"), ("attempt", "ascending")]
        table = read_streams(self.path).sort_by(order)
        write_parquet(table, self.path / PARQUETS[0])
        if server is not None and server.num_rows:
            write_parquet(server, self.path / PARQUETS[1])
        self.write_meta()
        for stream in _streams(self.path):
            stream.unlink()

    def raise_failed(self) -> None:
        """Raise RunDirError if records could not be written."""
        if self.failed:
            kept = f"what had been written is kept: ampacity report {self.path}"
            raise RunDirError(f"{self.failed}; {kept}")

    def close(self) -> None:
        super().close()
        self._held.close()


def _lock(file: BinaryIO, *, shared: bool) -> bool:
    """Take the lock of a run; return False where another process has it."""
    if sys.platform != "win32":
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            pass
    return True


def _going_s(path: Path) -> float | None:
    """Return the seconds since the last write of a run that is still being written, else None."""
    # the run may be finishing just now
    with contextlib.suppress(OSError), (path / STREAM_NAME).open("rb") as file:
        if not _lock(file, shared=True):
            written_s = max(p.stat().st_mtime for p in (path / "run.json", *_streams(path)))
            return max(time.time() - written_s, 0.0)
    return None


def write_parquet(table: pa.Table, path: Path) -> None:
    import pyarrow.parquet as pq

    with _replacing(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def _streams(path: Path) -> list[Path]:
    return sorted(path.glob("requests*.arrows"))


def part_of(path: Path, stage: int) -> Path:
    """Return the stream of one stage's records, where a file is kept for each; see ``rotate``."""
    return path / f"requests-w{stage:05d}.arrows"


def read_streams(path: Path) -> pa.Table:
    """Return all rows of the crash-safe streams in a run directory."""
    return pa.concat_tables([SCHEMA.empty_table(), *map(read_stream, _streams(path))])


def read_stream(path: Path) -> pa.Table:
    """Return every complete batch of a crash-safe stream; a torn last batch is left out."""
    batches = _batches(path)
    table = pa.Table.from_batches(batches, schema=batches[0].schema if batches else SCHEMA)
    return complete(table).select(SCHEMA.names).cast(SCHEMA)


def _batches(path: Path) -> list[pa.RecordBatch]:
    batches: list[pa.RecordBatch] = []
    with (
        contextlib.suppress(pa.ArrowInvalid, OSError),
        pa.OSFile(str(path), "rb") as file,
        pa.ipc.open_stream(file) as reader,
    ):
        for batch in reader:
            batches.append(batch)
    return batches


def read_meta(path: Path) -> dict[str, Any]:
    """Return run.json of a run directory. Raises RunDirError."""
    meta_path = path / "run.json"
    if not meta_path.is_file():
        why = (
            "is a file" if path.is_file() else "has no run.json" if path.exists() else "is missing"
        )
        raise RunDirError(f"{path} is no run directory: it {why}")
    meta: dict[str, Any]
    with _explained(f"{meta_path} cannot be read"):
        meta = json.loads(meta_path.read_text(encoding="utf-8"))
        # lone surrogates, as of an argument that is no UTF-8, cannot be printed
        meta = json.loads(json.dumps(meta, ensure_ascii=False).encode(errors="replace"))
    version = meta.get("schema_version") if isinstance(meta, dict) else None
    if version != SCHEMA_VERSION:
        found = f"{meta_path} has schema_version {version!r}"
        raise RunDirError(f"{found}, this ampacity reads {SCHEMA_VERSION}")
    if fault := fault_of(meta):
        raise RunDirError(f"{meta_path}: {fault}")
    return meta


def load_run(path: Path, stage: int | None = None) -> Run:
    """Read a run directory: complete, killed or still running. Raises RunDirError.

    ``stage``: read the records of this one alone, where each has a file.
    """
    meta, parquet = read_meta(path), path / PARQUETS[0]
    parts = sorted(path.glob("requests-w*.parquet"))
    complete = parquet.is_file() or (bool(parts) and not (path / STREAM_NAME).exists())
    if not complete and not _streams(path):
        missing = f"neither requests.parquet nor {STREAM_NAME}"
        raise RunDirError(f"{path} has {missing}: nothing was recorded")
    return Run(
        path,
        meta,
        _read_records(path, parquet, parts, stage),
        read_server(path),
        complete,
        None if complete else _going_s(path),
    )


def _read_records(path: Path, whole: Path, parts: list[Path], stage: int | None) -> pa.Table:
    if whole.is_file():
        import pyarrow.compute as pc

        table = _read_requests(whole)
        return table if stage is None else table.filter(pc.equal(table["stage"], stage))
    if stage is None:
        return pa.concat_tables([*map(_read_requests, parts), read_streams(path)])
    stream = part_of(path, stage)
    part = stream.with_suffix(".parquet")
    return _read_requests(part) if part.is_file() else read_stream(stream)


def _read_parquet(path: Path, columns: Collection[str] | None = None) -> pa.Table:
    """Read all columns, or those of ``columns`` that the file has."""
    import pyarrow.parquet as pq

    # by batch from a memory map: half the time, a third of the memory of pq.read_table
    with _explained(f"{path} cannot be read"), pq.ParquetFile(path, memory_map=True) as file:
        schema = pa.schema([f for f in file.schema_arrow if columns is None or f.name in columns])
        batches = file.iter_batches(use_threads=False, columns=schema.names)
        return pa.Table.from_batches(batches, schema=schema)


def _read_requests(path: Path) -> pa.Table:
    """Read requests.parquet, each column in one chunk where its offsets allow it.

    A stage's slice of a column is then no copy. A list column needs twice its memory while it is
    read, so each is read alone and freed memory is given back.
    """
    import pyarrow.compute as pc

    columns: dict[str, pa.ChunkedArray] = {}
    lists = [field.name for field in SCHEMA if pa.types.is_list(field.type)]
    for part in [*([name] for name in lists), [name for name in SCHEMA.names if name not in lists]]:
        table = complete(_read_parquet(path, part), part)
        missing = [name for name in part if name not in table.column_names]
        if missing:
            raise RunDirError(f"{path} lacks the column {missing[0]!r}")
        for name in part:
            column = _column(table, name, SCHEMA.field(name).type, path)
            values = pc.sum(pc.list_value_length(column)).as_py() if name in lists else 0
            columns[name] = column.combine_chunks() if (values or 0) < 2**31 else column
        del table, column
        pa.default_memory_pool().release_unused()
    return pa.Table.from_arrays([columns[name] for name in SCHEMA.names], schema=SCHEMA)


def read_server(run: Path) -> pa.Table | None:
    """Read the server's samples; files of older versions have fewer columns."""
    path = run / PARQUETS[1]
    if path.is_file():
        table = _read_parquet(path)
    elif batches := _batches(run / "server.arrows"):
        table = pa.Table.from_batches(batches)
    else:
        return None
    if "at_ns" not in table.column_names or table["at_ns"].null_count:
        raise RunDirError(
            f"{path}: a sample has no at_ns, its time: the file was changed or is damaged"
        )
    kinds = {name: pa.int64() if name == "at_ns" else pa.float64() for name in table.column_names}
    return pa.table({name: _column(table, name, kind, path) for name, kind in kinds.items()})


def _column(table: pa.Table, name: str, kind: pa.DataType, path: Path) -> pa.ChunkedArray:
    with _explained(f"{path}: column {name} is of a wrong type"):
        return table[name].cast(kind)


def read_answers(run: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (request_id, line) of each kept answer but a torn last line. Raises RunDirError."""
    for path in sorted(run.glob("answers-*.jsonl")):
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    continue
                try:
                    yield int(json.loads(line)["request_id"]), line
                except (ValueError, TypeError, KeyError, RecursionError):
                    raise RunDirError(
                        f"{path}:{number}: this is no kept answer: the file is damaged"
                    ) from None
