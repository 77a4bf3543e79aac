"""The run directory: run.json, the crash-safe stream of records, requests.parquet, server.parquet.

While a run is going, finished requests are appended to ``requests.arrows`` (an Arrow IPC stream,
flushed batch by batch). ``finish`` turns the stream into ``requests.parquet``. After a kill at any
moment ``load_run`` reads every complete batch of the stream.
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
from types import TracebackType
from typing import Any, BinaryIO

import pyarrow as pa

from ampacity.loadgen.rundir.meta import fault_of
from ampacity.loadgen.rundir.records import SCHEMA, SCHEMA_VERSION, RequestRecord, to_batch

if sys.platform != "win32":
    import fcntl

STREAM_NAME = "requests.arrows"
FLUSH_ROWS = (
    256  # a batch holds the event loop up for a millisecond or two, most of it whatever its rows
)


class RunDirError(ValueError):
    """A path that is no run directory, or one that this version cannot read."""


@dataclass(frozen=True)
class Run:
    """A run as read back: ``meta`` is run.json, ``requests`` has the columns of ``SCHEMA``."""

    path: Path
    meta: dict[str, Any]
    requests: pa.Table
    server: pa.Table | None
    complete: bool  # False: the run did not finish, or has not yet; requests are what was recorded
    going_s: float | None = (
        None  # of a run that is still going on: s since something was written to it
    )


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a reader sees the old file or the whole new one. Raises ValueError on NaN, RunDirError."""
    text = json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8", errors="replace") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise RunDirError(f"{path} cannot be written: {error.strerror or error}") from error


def check_new(path: Path) -> None:
    """Raises RunDirError unless ``path`` can become a run directory: it must be new or empty."""
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise RunDirError(f"{path} exists and is not an empty directory: choose another --out")
    except OSError as error:
        raise RunDirError(
            f"{path} cannot be used: {error.strerror}; choose another --out"
        ) from error


class StreamWriter:
    """Appends records to a crash-safe stream file; a context manager that flushes and closes it.

    It is called from the receive path, so a disk that is full or gone does not raise there: ``failed``
    says so, and what could not be written stays pending.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pending: list[RequestRecord] = []
        self._file = pa.OSFile(str(path), "wb")
        self._stream = pa.ipc.new_stream(self._file, SCHEMA)
        self._file.flush()  # a reader finds the schema from the first moment on
        self.failed: str | None = None
        to_batch(
            [RequestRecord(0, 0, 0, "ok")]
        )  # Arrow's first conversion imports for 60 ms: now, not under load

    def append(self, record: RequestRecord) -> None:
        """Add one finished request; it reaches the disk with its batch."""
        self._pending.append(record)
        if len(self._pending) >= FLUSH_ROWS:
            self.flush()

    def flush(self) -> None:
        """Hand what is pending to the operating system: from here on it survives our own death."""
        if not self._pending or self.failed or self._file.closed:
            return
        try:
            self._stream.write_batch(to_batch(self._pending))
            self._file.flush()
        except OSError as error:
            self.failed = f"{self._path} cannot be written: {_one_line(error)}"
        else:
            self._pending.clear()

    def close(self) -> None:
        """Flush and close; calling it again does no harm."""
        self.flush()
        if not self._file.closed:
            with contextlib.suppress(OSError):
                self._stream.close()
            with contextlib.suppress(OSError):
                self._file.close()

    def __enter__(self) -> StreamWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class RunWriter:
    """Writes one run directory. A context manager; without ``finish`` what was recorded stays as streams."""

    def __init__(self, path: Path, meta: dict[str, Any]) -> None:
        """Create ``path`` (it must be new or empty) and write run.json. Raises RunDirError."""
        check_new(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunDirError(
                f"{path} cannot be made: {error.strerror}; choose another --out"
            ) from error
        self.path = path
        self.meta: dict[str, Any] = {"schema_version": SCHEMA_VERSION, **meta}
        self._stream = StreamWriter(path / STREAM_NAME)
        self.write_meta()
        self._held = (path / STREAM_NAME).open("r+b")
        _lock(self._held, shared=False)  # until the end, or our death

    def append(self, record: RequestRecord) -> None:
        """Add one finished request of this process."""
        self._stream.append(record)

    def flush(self) -> None:
        """Hand what is pending to the operating system."""
        self._stream.flush()

    def write_meta(self) -> None:
        """Bring run.json up to date with ``self.meta``."""
        write_json(self.path / "run.json", self.meta)

    @property
    def failed(self) -> str | None:
        """Why records cannot be written any more, or None."""
        return self._stream.failed

    def worker_stream(self, worker: int) -> Path:
        """The stream file of one worker process."""
        return self.path / f"requests-{worker}.arrows"

    def stage_table(self, stage: int) -> pa.Table:
        """The rows of one stage that have been flushed, by whichever process."""
        import pyarrow.compute as pc  # here, and Parquet below: the first request need not wait for them

        self.flush()
        table = read_streams(self.path)
        return table.filter(pc.equal(table["stage"], stage))

    def finish(self, server: pa.Table | None = None) -> None:
        """Write requests.parquet (by request_id and attempt) and server.parquet, then drop the stream."""
        self._stream.close()
        if self._stream.failed:
            raise RunDirError(
                f"{self._stream.failed}; what had been written is kept: ampacity report {self.path}"
            )
        table = read_streams(self.path).sort_by(
            [("request_id", "ascending"), ("attempt", "ascending")]
        )
        _write_parquet(table, self.path / "requests.parquet")
        if server is not None and server.num_rows:
            _write_parquet(server, self.path / "server.parquet")
        self.write_meta()
        for stream in _streams(self.path):
            stream.unlink()

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stream.close()  # also after an error in the run: what was measured stays
        self._held.close()


def _lock(file: BinaryIO, *, shared: bool) -> bool:
    """Take the lock of a run, which its writer has; False where another has it."""
    if sys.platform != "win32":
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            pass
    return True


def _going_s(path: Path) -> float | None:
    """Seconds since the last write where the process that writes the run is alive, else None."""
    with (
        contextlib.suppress(OSError),
        (path / STREAM_NAME).open("rb") as file,
    ):  # it may be finishing just now
        if not _lock(file, shared=True):
            written_s = max(p.stat().st_mtime for p in (path / "run.json", *_streams(path)))
            return max(time.time() - written_s, 0.0)
    return None


def _write_parquet(table: pa.Table, path: Path) -> None:
    import pyarrow.parquet as pq

    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        pq.write_table(table, temporary, compression="zstd")
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise RunDirError(f"{path} cannot be written: {_one_line(error)}") from error


def _streams(path: Path) -> list[Path]:
    return sorted(path.glob("requests*.arrows"))


def read_streams(path: Path) -> pa.Table:
    """All rows of the crash-safe streams in a run directory."""
    return pa.concat_tables(
        [SCHEMA.empty_table(), *(read_stream(stream) for stream in _streams(path))]
    )


def read_stream(path: Path) -> pa.Table:
    """Every complete batch of a crash-safe stream; a torn last batch is left out."""
    batches: list[pa.RecordBatch] = []
    try:
        with pa.OSFile(str(path), "rb") as file, pa.ipc.open_stream(file) as reader:
            while True:
                batches.append(reader.read_next_batch())
    except (StopIteration, pa.ArrowInvalid, OSError):
        pass
    return pa.Table.from_batches(batches, schema=SCHEMA)


def load_run(path: Path) -> Run:
    """Read a run directory, complete, killed or going on. Raises RunDirError with one line that names the culprit."""
    meta_path = path / "run.json"
    if not meta_path.is_file():
        raise RunDirError(f"{path} is no run directory: it has no run.json")
    try:
        meta = json.loads(meta_path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RunDirError(f"{meta_path} cannot be read: {_one_line(error)}") from error
    version = meta.get("schema_version") if isinstance(meta, dict) else None
    if version != SCHEMA_VERSION:
        raise RunDirError(
            f"{meta_path} has schema_version {version!r}, this ampacity reads {SCHEMA_VERSION}"
        )
    fault = fault_of(meta)
    if fault:
        raise RunDirError(f"{meta_path}: {fault}")
    parquet = path / "requests.parquet"
    if parquet.is_file():
        requests = _read_requests(parquet)
    elif _streams(path):
        requests = read_streams(path)
    else:
        raise RunDirError(
            f"{path} has neither requests.parquet nor {STREAM_NAME}: nothing was recorded"
        )
    server_path = path / "server.parquet"
    server = _read_server(server_path) if server_path.is_file() else None
    complete = parquet.is_file()
    return Run(path, meta, requests, server, complete, None if complete else _going_s(path))


def _read_parquet(path: Path, columns: Collection[str] | None = None) -> pa.Table:
    """All columns, or those of ``columns`` that the file has."""
    import pyarrow.parquet as pq

    try:
        # batch by batch from a memory map: half the time, and a third of the memory, of pq.read_table
        with pq.ParquetFile(path, memory_map=True) as file:
            schema = pa.schema(
                [f for f in file.schema_arrow if columns is None or f.name in columns]
            )
            return pa.Table.from_batches(
                file.iter_batches(use_threads=False, columns=schema.names), schema=schema
            )
    except (pa.ArrowInvalid, OSError) as error:
        raise RunDirError(f"{path} cannot be read: {_one_line(error)}") from error


def _read_requests(path: Path) -> pa.Table:
    """The table of requests.parquet, each column in one piece where its offsets allow it.

    A stage's part of a column is then no copy. A list column needs its room twice while it is read, so each is read
    alone, and Arrow does not keep what is free.
    """
    import pyarrow.compute as pc

    columns: dict[str, pa.ChunkedArray] = {}
    lists = [field.name for field in SCHEMA if pa.types.is_list(field.type)]
    for part in [*([name] for name in lists), [name for name in SCHEMA.names if name not in lists]]:
        table = _read_parquet(path, part)
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


def _read_server(path: Path) -> pa.Table:
    """The samples: their time, and figures; an older version has fewer columns."""
    table = _read_parquet(path)
    if "at_ns" not in table.column_names or table["at_ns"].null_count:
        raise RunDirError(
            f"{path}: a sample has no at_ns, its time: the file was changed or is damaged"
        )
    kinds = {name: pa.int64() if name == "at_ns" else pa.float64() for name in table.column_names}
    return pa.table({name: _column(table, name, kind, path) for name, kind in kinds.items()})


def _column(table: pa.Table, name: str, kind: pa.DataType, path: Path) -> pa.ChunkedArray:
    try:
        return table[name].cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise RunDirError(
            f"{path}: column {name} is of a wrong type: {_one_line(error)}"
        ) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def read_answers(run: Path) -> Iterator[tuple[int, bytes]]:
    """(request_id, the line) of each kept answer; a torn last line is left out. Raises RunDirError."""
    for path in sorted(run.glob("answers-*.jsonl")):
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n"):
                    try:
                        yield int(json.loads(line)["request_id"]), line
                    except (ValueError, TypeError, KeyError, RecursionError):
                        raise RunDirError(
                            f"{path}:{number}: this is no kept answer: the file is damaged"
                        ) from None
