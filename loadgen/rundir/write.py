"""Write a run directory: run.json, the crash-safe streams of records, the Parquet files.

Finished requests are appended to ``requests.arrows`` (an Arrow IPC stream, batch by batch).
``finish`` turns the streams into ``requests.parquet``. A run that is resumed adds streams.
"""

import contextlib
import io
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

import numpy as np
import pyarrow as pa

from ampacity.files import why
from ampacity.loadgen.rundir.files import (
    PARQUETS,
    STREAM_NAME,
    Run,
    RunDirError,
    explained,
    json_text,
    load_run,
    lock,
    notes_of,
    read_meta,
    read_note,
    read_stream,
    read_streams,
    replacing,
    streams_of,
    write_json,
    write_whole,
)
from ampacity.loadgen.rundir.records import SCHEMA, SCHEMA_VERSION, RequestRecord, earlier, to_batch
from ampacity.loadgen.rundir.streams import BatchStream

PARQUET: dict[str, Any] = {"compression": "zstd"}
GROUP_ROWS = 1 << 16  # of a group of rows, which is read at a time
FLUSH_ROWS = 256  # making a batch takes 1 to 2 ms of the event loop, mostly whatever its rows
WAITING_MAX_BYTES = 256 * 2**20  # of records, where the disk stalls
ENDING_MAX_S = 5.0  # workers write for a moment after their parent was killed
STALL_MAX_S = 60.0  # to wait for the disk where no load waits


def check_new(path: Path) -> None:
    """Raise RunDirError unless ``path`` is new or empty."""
    with explained(f"{path} cannot be used", "; choose another --out"):
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise RunDirError(f"{path} exists and is not an empty directory: choose another --out")


class StreamWriter:
    """Appends records to a crash-safe stream file; a context manager.

    It is called from the receive path: a thread writes, so that a disk that stalls holds up no
    load. A full or lost disk does not raise there: it sets ``failed``.
    """

    ahead_ns = 0  # of the clock that the file is for the records' clock is ahead

    def __init__(self, path: Path, file: io.BytesIO | None = None) -> None:
        """``file``: what is written to in place of the file at ``path``, which is elsewhere."""
        self._stream_path = path
        self._pending: list[RequestRecord] = []
        self._file = file or pa.OSFile(str(path), "wb")
        self._stream = BatchStream(self._file, SCHEMA)
        self._file.flush()  # a reader finds the schema from the start
        self._locked = None if file else path.open("r+b")
        if self._locked:
            lock(self._locked, shared=False)  # until the process ends
        self.failed: str | None = None  # why records can no longer be written
        # Arrow's first conversion imports for 60 ms: now, not under load
        to_batch([RequestRecord(0, 0, 0, "ok")])
        self._handed_bytes = self._written_bytes = 0
        self._notes: dict[str, pa.RecordBatch] = {}  # of what is in flight, to be written
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._writing = threading.Thread(target=self._work, daemon=True)
        self._writing.start()

    def append(self, record: RequestRecord) -> None:
        """Add one finished request; it reaches the disk with its batch."""
        self._pending.append(record)
        if len(self._pending) >= FLUSH_ROWS:
            self.flush()

    def flush(self) -> None:
        """Have the pending records written: they then survive a crash of this process."""
        if not self._pending or self.failed or not self._writing.is_alive():
            return
        batch = earlier(to_batch(self._pending), self.ahead_ns)
        self._pending.clear()
        self._handed_bytes += batch.nbytes
        self.later(partial(self._write, batch))
        if self._handed_bytes - self._written_bytes > WAITING_MAX_BYTES:
            self.wait()

    def note(self, name: str, in_flight: pa.RecordBatch) -> None:
        """Have what is in flight written to a file of this name, in place of its last note."""
        if self._locked and not self.failed:  # without a lock the stream is elsewhere
            self._notes[name] = in_flight
            self.later(partial(self._write_note, self._stream_path.with_name(name)))

    def later(self, job: Callable[[], object]) -> None:
        """Run a job in the writing thread; an error sets ``failed``."""
        self._jobs.put(job)

    def wait(self) -> None:
        """Wait until all that was flushed is written; STALL_MAX_S at most, then it has failed."""
        done = threading.Event()
        self.later(done.set)
        if self._writing.is_alive() and not done.wait(STALL_MAX_S):
            self.failed = self.failed or (
                f"{self._stream_path} cannot be written: the disk did not answer for "
                f"{STALL_MAX_S:g} s"
            )

    def close(self) -> None:
        """Flush and close, after an error too: what was measured is kept."""
        self.flush()
        self.wait()
        self._jobs.put(None)
        self._writing.join(1.0 if self.failed else STALL_MAX_S)
        if not self._writing.is_alive() and not self._file.closed:
            with contextlib.suppress(OSError):
                self._file.close()
        if self._locked:
            self._locked.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _work(self) -> None:
        for job in iter(self._jobs.get, None):
            try:
                job()
            except RunDirError as error:
                self.failed = self.failed or str(error)
            except Exception as error:  # else the thread ends, and all wait for the disk
                reason = f"{self._stream_path} cannot be written: {why(error)}"
                self.failed = self.failed or reason

    def _write_note(self, path: Path) -> None:
        """Write a note; a missing descriptor or a full disk ends no run that can go on without."""
        in_flight = self._notes.pop(
            path.name, None
        )  # None: the disk had stalled, and it is written
        with contextlib.suppress(OSError, RunDirError):
            if in_flight is not None and not in_flight.num_rows:
                path.unlink(missing_ok=True)
            elif in_flight is not None:
                with replacing(path) as temporary, pa.OSFile(str(temporary), "wb") as file:
                    BatchStream(file, in_flight.schema).write(in_flight)

    def _write(self, batch: pa.RecordBatch) -> None:
        if not self.failed:
            if (
                self._locked and not self._stream_path.exists()
            ):  # what is open takes more in silence
                raise RunDirError(f"{self._stream_path} was removed")
            self._stream.write(batch)
            self._file.flush()
            self._written_bytes += batch.nbytes


@dataclass(frozen=True)
class Held:
    """A run that goes on: as it was, and the open files whose locks keep other processes out."""

    run: Run
    files: contextlib.ExitStack


@contextlib.contextmanager
def take_up(path: Path) -> Iterator[Held]:
    """Lock a run that has ended, to go on with it; its workers may end yet. Raises RunDirError."""
    with contextlib.ExitStack() as closing:
        with explained(f"{path} cannot be resumed"):
            names = [name for name in (path / PARQUETS[0], *streams_of(path)) if name.exists()]
            files = [closing.enter_context(name.open("r+b")) for name in names]
        give_up_s = time.monotonic() + ENDING_MAX_S
        while not all(lock(file, shared=False) for file in files):
            if time.monotonic() > give_up_s:
                raise RunDirError(f"{path} is still being written, by another process")
            time.sleep(0.05)
        _clear_halves(path)
        meta = read_meta(path)
        last = len(meta["stages"]) - 1 if meta.get("soak") else None  # which has files for each
        yield Held(load_run(path, last), closing)


def _clear_halves(path: Path) -> None:
    """Remove halves of files of a run (``replacing``) that processes left which were killed."""
    for half in path.rglob(".*.*.*") if sys.platform != "win32" else ():
        if named := re.fullmatch(r"\.[-\w]+\.(?:json|html|parquet|arrows)\.(\d{1,9})", half.name):
            with contextlib.suppress(OSError):  # it runs, as another user
                try:
                    os.kill(int(named[1]), 0)  # sends nothing
                except ProcessLookupError:
                    half.unlink()


class RunWriter(StreamWriter):
    """Writes one run directory; a context manager. Without ``finish`` the streams remain."""

    def __init__(
        self, path: Path, meta: dict[str, Any], held: Held | None = None, *, private: bool = False
    ) -> None:
        """Create ``path`` (it must be new or empty), or go on with the run that is ``held``.

        ``private``: only the owner may access it. Raises RunDirError.
        """
        self.path = path
        self.meta: dict[str, Any] = {"schema_version": SCHEMA_VERSION, **meta}
        self._server: pa.Table | None = None
        self._name = Path(STREAM_NAME).stem
        if held is None:
            check_new(path)
            with explained(f"{path} cannot be made", "; choose another --out"):
                path.mkdir(parents=True, exist_ok=True)
                if private:
                    path.chmod(0o700)
        else:
            # a resume that ended before any request is no seam, and may have recorded what was cut
            taken = (path.glob(f"requests*-resumed{k}*.arrows") for k in count(1))
            number = next(k for k, files in enumerate(taken, 1) if not any(files))
            self._name += f"-resumed{number}"
            self._server = held.run.server
            write_json(path / "run.json", self.meta)  # before there is a stream of this name
            self._open_again(held)
        super().__init__(path / f"{self._name}.arrows")
        write_json(path / "run.json", self.meta)
        self._take_notes()

    def _open_again(self, held: Held) -> None:
        """Turn Parquet into a stream again, and cut off what a kill left of a line."""
        run = held.run
        for path in self.path.glob("answers-*.jsonl"):
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        if not run.complete:
            return
        for stream in streams_of(self.path):  # of a finish that was killed
            stream.unlink()
        whole = self.path / STREAM_NAME
        with replacing(whole) as temporary, pa.OSFile(str(temporary), "wb") as file:
            again = BatchStream(file, SCHEMA)
            for low in range(0, run.requests.num_rows, GROUP_ROWS):
                rows = run.requests.slice(low, GROUP_ROWS)
                for batch in rows.to_batches(max_chunksize=FLUSH_ROWS):
                    again.write(batch)
        lock(held.files.enter_context(whole.open("r+b")), shared=False)
        (self.path / PARQUETS[0]).unlink()

    def _take_notes(self) -> None:
        """Record what was in flight when the run that goes on was cut off."""
        for note in notes_of(self.path):
            noted = read_note(note, read_streams(self.path))
            for record in noted:
                self.append(record)
            if noted:
                self.stage_table(noted[0].stage)  # they are written
            note.unlink()

    def write_meta(self) -> None:
        """Have run.json written as it is now. Raises ValueError on NaN.

        Records that come after it do not wait for the disk itself, which may take seconds.
        """
        path, text = self.path / "run.json", json_text(self.meta)
        self.later(partial(write_whole, path, text, durable=False))

    def worker_stream(self, worker: int) -> Path:
        return self.path / f"{self._name}-{worker}.arrows"

    def stage_table(self, stage: int) -> pa.Table:
        """Return the rows of one stage that are written, of all processes."""
        import pyarrow.compute as pc  # slow to import: after the first request

        self.flush()
        self.wait()
        table = read_streams(self.path)
        # by a mask: a filter by an expression waits for ever where no thread can be started
        return table.filter(pc.equal(table["stage"], stage))

    def finish(self, server: pa.Table | None = None) -> None:
        """Write requests.parquet, sorted, and server.parquet; delete the streams."""
        super().close()
        self.raise_failed()
        write_sorted([read_stream(stream) for stream in streams_of(self.path)], self.path)
        parts = [part for part in (self._server, server) if part is not None and part.num_rows]
        if parts:
            whole = pa.concat_tables(parts, promote_options="default")
            write_parquet(whole, self.path / PARQUETS[1])
        write_json(self.path / "run.json", self.meta)
        for stream in streams_of(self.path):
            stream.unlink()

    def raise_failed(self) -> None:
        """Raise RunDirError if records could not be written."""
        if self.failed:
            kept = f"; what had been written is kept: ampacity report {self.path}"
            raise RunDirError(self.failed + kept * self.path.exists())


def write_sorted(tables: Sequence[pa.Table], path: Path) -> None:
    """Write requests.parquet in the order of the requests, of some rows at a time.

    Raises RunDirError. Each table is nearly in that order: only neighbours are copied.
    """
    import pyarrow.parquet as pq

    keys = (np.concatenate([t[n].to_numpy() for t in tables]) for n in ("attempt", "request_id"))
    order = np.lexsort(tuple(keys))
    starts = np.cumsum([0, *(table.num_rows for table in tables)])
    with (
        replacing(path / PARQUETS[0]) as temporary,
        pq.ParquetWriter(temporary, SCHEMA, **PARQUET) as file,
    ):
        for low in range(0, len(order), GROUP_ROWS):
            rows, parts, places = order[low : low + GROUP_ROWS], [], []
            for table, start in zip(tables, starts, strict=False):
                mine = np.flatnonzero((rows >= start) & (rows < start + table.num_rows))
                if len(mine):
                    own = rows[mine] - start
                    near = table.slice(own.min(), own.max() - own.min() + 1)
                    parts.append(near.take(own - own.min()))
                    places.append(mine)
            file.write_table(pa.concat_tables(parts).take(np.argsort(np.concatenate(places))))


def write_parquet(table: pa.Table, path: Path) -> None:
    """Write a table atomically. Raises RunDirError."""
    import pyarrow.parquet as pq

    with replacing(path) as temporary:
        pq.write_table(table, temporary, **PARQUET, row_group_size=GROUP_ROWS)
