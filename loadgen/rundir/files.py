"""Read a run directory: run.json, the crash-safe streams of records, or the Parquet files.

After a kill at any moment ``load_run`` reads every complete batch of the streams.
"""

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import pyarrow as pa

from ampacity.files import MOST_BYTES, open_file, read_text, why
from ampacity.loadgen.rundir.meta import StageMeta, fault_of, stages_of
from ampacity.loadgen.rundir.records import (
    SCHEMA,
    SCHEMA_VERSION,
    RequestRecord,
    complete,
    to_batch,
)
from ampacity.loadgen.rundir.streams import read_batches

if sys.platform != "win32":
    import fcntl

STREAM_NAME = "requests.arrows"
CUT_OFF = "in flight when the run was cut off"
SAMPLES = "server.arrows"
PARQUETS = ("requests.parquet", "server.parquet")


class RunDirError(ValueError):
    """A path that is no run directory, or that cannot be read or written."""


@dataclass(frozen=True)
class Run:
    """A run as read back: ``meta`` is run.json, ``requests`` has the columns of ``SCHEMA``.

    ``requests`` is a table, or ``StoredRecords`` where that would be large.
    """

    path: Path
    meta: dict[str, Any]
    requests: Any
    server: pa.Table | None
    complete: bool  # False: killed or still running; requests are what was recorded so far
    going_s: float | None = None  # of a running run: seconds since its last write
    before: Any = None  # of a window of a soak: rows of the windows before, still in flight in it
    damage: str | None = None  # of its streams: what could not be read

    @cached_property
    def stages(self) -> list[StageMeta]:
        """Return the stages of run.json."""
        return stages_of(self.meta)

    @property
    def origin_ns(self) -> int:
        """Return the run's zero: the start of its first stage."""
        return min((stage.start_ns for stage in self.stages if stage.start_ns), default=0)


def json_text(value: Any) -> str:
    """Return JSON as files have it. Raises ValueError on NaN."""
    # json's own indenting is in Python, and leaves cycles behind, which a soak would collect
    text = json.dumps(value, allow_nan=False, ensure_ascii=False).encode("utf-8", "replace")
    return msgspec.json.format(text, indent=2).decode() + "\n"


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically. Raises ValueError on NaN, RunDirError."""
    write_whole(path, json_text(value))


def write_whole(path: Path, text: str, *, durable: bool = True) -> None:
    """Write a text atomically; ``durable``: it outlives the machine too. Raises RunDirError."""
    with (
        replacing(path) as temporary,
        temporary.open("w", encoding="utf-8", errors="replace") as f,
    ):
        f.write(text)
        f.flush()
        if durable:
            os.fsync(f.fileno())


_UNREADABLE = (OSError, ValueError, LookupError, RecursionError, MemoryError, pa.ArrowException)


@contextlib.contextmanager
def explained(problem: str, remedy: str = "") -> Iterator[None]:
    """Raise RunDirError with ``problem``, reason and remedy where files or Arrow raise an error."""
    try:
        yield
    except RunDirError:
        raise
    except _UNREADABLE as error:
        raise RunDirError(f"{problem}: {why(error)}{remedy}") from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path that replaces ``path`` at the end. Raises RunDirError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with explained(f"{path} cannot be written"):
        try:
            yield temporary
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


def lock(file: BinaryIO, *, shared: bool) -> bool:
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
    resumed = (p for p in streams_of(path) if re.fullmatch(r"requests-resumed\d+", p.stem))
    for stream in (path / STREAM_NAME, *resumed):
        # the run may be finishing just now
        with contextlib.suppress(OSError), open_file(stream) as file:
            if not lock(file, shared=True):
                written_s = max(p.stat().st_mtime for p in (path / "run.json", *streams_of(path)))
                return max(time.time() - written_s, 0.0)
    return None


def streams_of(path: Path) -> list[Path]:
    return sorted(path.glob("requests*.arrows"))


def part_of(path: Path, stage: int) -> Path:
    """Return requests.parquet of one stage, in a run directory with a file for each."""
    return path / f"requests-w{stage:05d}.parquet"


def read_part(path: Path, stage: int) -> Any:
    """Return the rows of one stage, in a run directory with files for each."""
    part = part_of(path, stage)
    streams = sorted(path.glob(f"{part.stem}*.arrows"))
    rows = pa.concat_tables([SCHEMA.empty_table(), *map(read_stream, streams)])
    if not part.is_file():
        return rows
    stored = _read_requests(part)
    if not streams:
        return stored
    import pyarrow.compute as pc

    kept = stored.slice()
    # its streams remain for a moment, or where a kill came before they were deleted
    known = pc.is_in(rows["request_id"], kept["request_id"].combine_chunks())
    return pa.concat_tables([kept, rows.filter(pc.invert(known))])


def read_streams(path: Path) -> pa.Table:
    """Return all rows of the crash-safe streams in a run directory."""
    return pa.concat_tables([SCHEMA.empty_table(), *map(read_stream, streams_of(path))])


def notes_of(path: Path) -> list[Path]:
    """Return the files with what was in flight in each process and stage of a run."""
    return sorted(path.glob("in-flight-*.arrows"))


def read_note(path: Path, rows: Any) -> list[RequestRecord]:
    """Return records of what was in flight at the last note before a kill and is not in ``rows``."""
    known = set(zip(*(rows[name].to_pylist() for name in ("request_id", "attempt")), strict=True))
    return [r for r in _noted(path) or () if (r.request_id, r.attempt) not in known]


def _noted(path: Path) -> list[RequestRecord] | None:
    """Return the records of a note; None where it is damaged."""
    with contextlib.suppress(*_UNREADABLE, TypeError, ArithmeticError):
        batches, damaged = read_batches(path)
        records = [record for batch in batches for record in _records(batch)]
        if records and not damaged and to_batch(records).num_rows:
            return records
    return None


def _records(batch: pa.RecordBatch) -> Iterator[RequestRecord]:
    facts = json.loads(batch["facts"][0].as_py())
    for values in batch.drop_columns(["facts"]).to_pylist():
        row: dict[str, Any] = {name: None if value < 0 else value for name, value in values.items()}
        session = row["session"]
        yield RequestRecord(
            request_id=row["numbers"],
            **{name: facts[name] for name in ("stage", "worker", "ended_ns")},
            **{name: row[name] for name in row if name.endswith("_ns")},
            **{name: row[name] for name in ("attempt", "turn")},
            status="unfinished",
            error=CUT_OFF,
            class_=facts["classes"][row["class_index"] or 0],
            target=facts["targets"][row["target"]],
            session_id=None if session is None else f"{facts['stage']}-{session}",
            input_tokens_planned=row["input_tokens"],
            output_tokens_planned=row["output_tokens"],
        )


def _with_notes(path: Path, rows: pa.Table, stage: int | None = None) -> pa.Table:
    """Add what was in flight when a run was cut off to its rows, or to those of one stage."""
    noted = [record for note in notes_of(path) for record in read_note(note, rows)]
    kept = [record for record in noted if stage in (None, record.stage)]
    return pa.concat_tables([rows, pa.Table.from_batches([to_batch(kept)])])


def read_stream(path: Path) -> pa.Table:
    """Return every complete batch of a crash-safe stream; a torn last batch is left out."""
    batches = _batches(path, SCHEMA)
    table = pa.Table.from_batches(batches, schema=batches[0].schema if batches else SCHEMA)
    with explained(f"{path} cannot be read"):
        return complete(table).select(SCHEMA.names).cast(SCHEMA)


def _batches(path: Path, schema: pa.Schema | None = None) -> list[pa.RecordBatch]:
    with explained(f"{path} cannot be read"):
        return read_batches(path, schema)[0]


def damage_of(path: Path) -> str | None:
    """Return which streams of a run have damaged blocks; what stood there is lost."""
    with explained(f"a stream in {path} cannot be read"):
        found = [(stream, read_batches(stream, SCHEMA)[1]) for stream in streams_of(path)]
        found += [(samples, read_batches(samples)[1]) for samples in path.glob(SAMPLES)]
    damaged = [f"{n:,} bytes of {stream} cannot be read" for stream, n in found if n]
    damaged += [f"{note} cannot be read" for note in notes_of(path) if _noted(note) is None]
    return "; ".join([*damaged, "what was recorded there is lost"]) if damaged else None


def read_meta(path: Path) -> dict[str, Any]:
    """Return run.json of a run directory. Raises RunDirError."""
    meta_path = path / "run.json"
    if not meta_path.is_file():
        why = (
            "is a file" if path.is_file() else "has no run.json" if path.exists() else "is missing"
        )
        raise RunDirError(f"{path} is no run directory: it {why}")
    meta: dict[str, Any]
    with explained(f"{meta_path} cannot be read"):
        meta = json.loads(read_text(meta_path))
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

    ``stage``: only the records of this one.
    """
    meta, parquet, streams = read_meta(path), path / PARQUETS[0], streams_of(path)
    parts = [stream.stem.startswith("requests-w") for stream in streams]
    complete = parquet.is_file() or bool(meta.get("soak") and meta["stages"] and all(parts))
    if not complete and not streams:
        missing = f"neither requests.parquet nor {STREAM_NAME}"
        raise RunDirError(f"{path} has {missing}: nothing was recorded")
    return Run(
        path,
        meta,
        _read_records(path, meta, stage),
        read_server(path),
        complete,
        None if complete else _going_s(path),
        damage=None if complete else damage_of(path),
    )


def _read_requests(path: Path) -> Any:
    from ampacity.loadgen.rundir.parquet import read_requests  # which needs this module

    return read_requests(path)


def _read_records(path: Path, meta: dict[str, Any], stage: int | None) -> Any:
    if not (path / PARQUETS[0]).is_file():
        if not meta.get("soak"):
            return _with_notes(path, read_streams(path))
        if stage is not None:
            return _with_notes(path, read_part(path, stage).slice(), stage)
        count = len(meta["stages"])
        parts = (_with_notes(path, read_part(path, k).slice(), k) for k in range(count))
        return pa.concat_tables([SCHEMA.empty_table(), *parts])
    table = _read_requests(path / PARQUETS[0])
    if stage is None:
        return table
    import pyarrow.compute as pc

    return table.filter(pc.equal(table["stage"], stage))


def read_server(run: Path) -> pa.Table | None:
    """Read the server's samples; files of older versions have fewer columns."""
    from ampacity.loadgen.rundir.parquet import cast_column, read_parquet

    path = run / SAMPLES
    if path.is_file():
        batches = _batches(path)
        table = pa.Table.from_batches(batches) if batches else None
    else:
        path = run / PARQUETS[1]
        apart = f"; without it the run is read, but not the server's own gauges: rm {path}"
        table = read_parquet(path, apart) if path.exists() else None
    if table is None:
        return None
    if "at_ns" not in table.column_names or table["at_ns"].null_count:
        raise RunDirError(
            f"{path}: a sample has no at_ns, its time: the file was changed or is damaged"
        )
    kinds = {name: pa.int64() if name == "at_ns" else pa.float64() for name in table.column_names}
    return pa.table({name: cast_column(table, name, kind, path) for name, kind in kinds.items()})


def read_answers(run: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (request_id, line) of each kept answer but a torn last line. Raises RunDirError."""
    for path in sorted(run.glob("answers-*.jsonl")):
        with explained(f"{path} cannot be read"), open_file(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(MOST_BYTES), b""), 1):
                if not line.endswith(b"\n"):
                    continue
                try:
                    yield int(json.loads(line)["request_id"]), line
                except (ValueError, TypeError, KeyError, RecursionError):
                    raise RunDirError(
                        f"{path}:{number}: this is no kept answer: the file is damaged"
                    ) from None
