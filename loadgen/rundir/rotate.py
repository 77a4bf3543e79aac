"""Records that rotate: a file for each stage, so that a run of hours needs no more memory."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pyarrow as pa

from ampacity.loadgen.rundir.files import (
    PARQUETS,
    STREAM_NAME,
    RunWriter,
    StreamWriter,
    part_of,
    read_server,
    read_stream,
    write_parquet,
)
from ampacity.loadgen.rundir.records import RequestRecord


class RotatingWriter(RunWriter):
    """Writes the records of each stage to a stream of its own, which ``end_stage`` closes."""

    def __init__(self, path: Path, meta: dict[str, Any]) -> None:
        super().__init__(path, meta)
        self._parts: dict[int, StreamWriter] = {}
        self._server: pa.RecordBatchStreamWriter | None = None

    def append(self, record: RequestRecord) -> None:
        if record.stage not in self._parts:
            self._parts[record.stage] = StreamWriter(part_of(self.path, record.stage))
        self._parts[record.stage].append(record)

    def flush(self) -> None:
        for part in self._parts.values():
            part.flush()
            self.failed = self.failed or part.failed

    def end_stage(self, stage: int, server: pa.Table) -> None:
        """Close the stream of a stage that is over; append the server's samples since the last."""
        if part := self._parts.pop(stage, None):
            part.close()
            self.failed = self.failed or part.failed
        try:
            if self._server is None:
                self._server_file = pa.OSFile(str(self.path / "server.arrows"), "wb")
                self._server = pa.ipc.new_stream(self._server_file, server.schema)
            self._server.write_table(server)
            self._server_file.flush()
        except OSError as error:
            self.failed = self.failed or f"server.arrows cannot be written: {error}"

    def finish(self, server: pa.Table | None = None) -> None:
        """Close what is open, and write server.parquet; ``keep_part`` writes the records."""
        self.close_parts()
        self.raise_failed()
        samples = read_server(self.path)
        if samples is not None and samples.num_rows:
            write_parquet(samples, self.path / PARQUETS[1])
        self.write_meta()
        for name in (STREAM_NAME, "server.arrows"):
            (self.path / name).unlink(missing_ok=True)

    def close_parts(self) -> None:
        """Close every stream."""
        for stage in list(self._parts):
            self._parts.pop(stage).close()
        if self._server is not None:
            with contextlib.suppress(OSError):
                self._server.close()
                self._server_file.close()
            self._server = None

    def close(self) -> None:
        self.close_parts()
        super().close()


def keep_part(path: Path, stage: int) -> None:
    """Turn the stream of a stage that is over into Parquet. Raises RunDirError."""
    stream = part_of(path, stage)
    if stream.exists():
        order = [("request_id", "ascending"), ("attempt", "ascending")]
        write_parquet(read_stream(stream).sort_by(order), stream.with_suffix(".parquet"))
        stream.unlink(missing_ok=True)
