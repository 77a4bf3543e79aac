"""Records that rotate: a file for each stage, so that a run of hours needs no more memory."""

import asyncio
import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from ampacity.loadgen.rundir.files import (
    PARQUETS,
    SAMPLES,
    part_of,
    read_part,
    read_server,
    streams_of,
    write_json,
)
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.rundir.streams import BatchStream
from ampacity.loadgen.rundir.write import Held, RunWriter, StreamWriter, write_parquet


class RotatingWriter(RunWriter):
    """Writes the records of each stage to a stream of its own, which ``end_stage`` closes."""

    def __init__(
        self, path: Path, meta: dict[str, Any], held: Held | None = None, *, private: bool = False
    ) -> None:
        self._parts: dict[int, StreamWriter] = {}
        self._samples: BatchStream | None = None
        super().__init__(path, meta, held, private=private)

    def _open_again(self, held: Held) -> None:
        """Leave the parts as they are: what is added to one has a stream of its own."""

    def append(self, record: RequestRecord) -> None:
        """Add one finished request; it reaches the disk with its batch."""
        if record.stage not in self._parts:
            name = part_of(self.path, record.stage).stem + self._name.removeprefix("requests")
            self._parts[record.stage] = StreamWriter(self.path / f"{name}.arrows")
        self._parts[record.stage].append(record)

    def flush(self) -> None:
        """Have the pending records written: they then survive a crash of this process."""
        for part in self._parts.values():
            part.flush()
            self.failed = self.failed or part.failed

    def stage_table(self, stage: int) -> pa.Table:
        """Return the rows of one stage that are written."""
        if part := self._parts.get(stage):
            part.flush()
            part.wait()
        return read_part(self.path, stage)

    async def end_stage(self, stage: int, server: pa.Table) -> None:
        """Close the stream of a stage that is over; append the server's samples since the last."""
        if part := self._parts.pop(stage, None):
            await asyncio.to_thread(part.close)
            self.failed = self.failed or part.failed
        self.later(partial(self._add_samples, server))

    def _add_samples(self, server: pa.Table) -> None:
        if self._samples is None:
            part = self.path / f".{SAMPLES}"
            self._samples_file = pa.OSFile(str(part), "wb")
            self._samples = BatchStream(self._samples_file, server.schema)
            if self._server is not None:  # of a run that goes on: mapped from the file replaced
                self._samples.write_table(self._server.select(server.column_names))
            part.replace(self.path / SAMPLES)
        self._samples.write_table(server)
        self._samples_file.flush()

    def finish(self, server: pa.Table | None = None) -> None:
        """Close what is open, and write server.parquet; ``keep_part`` writes the records."""
        if server is not None:
            self.later(partial(self._add_samples, server))
        self.close()
        self.raise_failed()
        samples = read_server(self.path)
        if samples is not None and samples.num_rows:
            write_parquet(samples, self.path / PARQUETS[1])
        write_json(self.path / "run.json", self.meta)
        (self.path / SAMPLES).unlink(missing_ok=True)
        for stream in streams_of(self.path):
            if not stream.stem.startswith("requests-w"):  # a part, which ``keep_part`` turns
                stream.unlink()

    def close(self) -> None:
        """Flush and close, after an error too: what was measured is kept."""
        for stage in list(self._parts):
            self._parts.pop(stage).close()
        super().close()
        if self._samples is not None:
            with contextlib.suppress(OSError):
                self._samples_file.close()
            self._samples = None


def part_summary(path: Path, stage: int) -> Path:
    """Return the file with the summary of one stage, which is written once it is over."""
    return path / "windows" / f"{stage:05d}.json"


def keep_part(path: Path, stage: int) -> None:
    """Turn the streams of a stage that is over into Parquet. Raises RunDirError."""
    part = part_of(path, stage)
    if streams := list(path.glob(f"{part.stem}*.arrows")):
        order = [("request_id", "ascending"), ("attempt", "ascending")]
        write_parquet(read_part(path, stage).sort_by(order), part)
        for stream in streams:
            stream.unlink(missing_ok=True)
