"""Streams of Arrow batches that outlive a kill, and in which a damaged block is found."""

import re
import zlib
from pathlib import Path
from typing import IO

import pyarrow as pa

from ampacity.files import open_file

_BEGIN = re.compile(rb"(?=\xff{4})")  # of each message, at a multiple of 8 bytes
_SUM = re.compile(rb"sum32:([0-9a-f]{8})")
_NO_SUM = b"sum32:00000000"


class BatchStream:
    """A stream of Arrow batches, each with a checksum of itself and of the stream's schema."""

    def __init__(self, file: IO[bytes], schema: pa.Schema) -> None:
        head = schema.serialize()
        self._file, self._head_bytes, self._sum = (
            file,
            head.size,
            _sum_of(pa.ipc.read_message(head)),
        )
        file.write(head)

    def write(self, batch: pa.RecordBatch) -> None:
        sink = pa.BufferOutputStream()
        stream = pa.ipc.new_stream(sink, batch.schema)
        stream.write_batch(batch, custom_metadata={_NO_SUM: ""})
        message = sink.getvalue()[self._head_bytes :]
        number = f"{_sum_of(pa.ipc.read_message(message), self._sum):08x}".encode()
        data = message.to_pybytes()
        at = data.index(_NO_SUM) + len(_NO_SUM)
        self._file.write(data[: at - len(number)] + number + data[at:])

    def write_table(self, table: pa.Table) -> None:
        for batch in table.combine_chunks().to_batches():
            self.write(batch)


def _sum_of(message: pa.Message, schema_sum: int = 0) -> int:
    metadata = _SUM.sub(_NO_SUM, message.metadata.to_pybytes())
    return zlib.crc32(message.body or b"", zlib.crc32(metadata, schema_sum))


def read_batches(path: Path, schema: pa.Schema | None = None) -> tuple[list[pa.RecordBatch], int]:
    """Return all whole batches of a stream, and how many damaged bytes there are beside them.

    ``schema``: that it was probably written with, should that be damaged. A torn last batch, as a
    kill leaves it, is no damage. Raises OSError.
    """
    found, damaged, torn = list[_Found](), 0, False
    schemas = [pa.ipc.read_message((schema or pa.schema([])).serialize())]
    with open_file(path), pa.memory_map(str(path)) as file:  # what is read can be given back
        size, end = file.size(), 0  # end: of the last whole message
        while True:
            at = file.tell()
            try:
                message = pa.ipc.read_message(file)
                if at or message.type != "schema":  # Arrow takes anything for a schema
                    batch, summed = _read_batch(message, schemas)
                    found.append((batch, summed, file.tell() - at))
                else:
                    pa.ipc.read_schema(message)
                    schemas.insert(0, message)
                damaged, end = damaged + at - end, file.tell()
            except (EOFError, ValueError, OSError, pa.ArrowException) as error:
                if at == end:  # torn, or the mark of the end
                    torn = file.tell() == size and not isinstance(error, _ChecksumError)
                if not _seek_next(file, at):
                    break
    any_summed = any(summed for _, summed, _ in found)  # one without has lost its sum
    whole = [batch for batch, summed, _ in found if summed or not any_summed]
    damaged += sum(bytes_ for _, summed, bytes_ in found if summed < any_summed)
    return whole, damaged + (0 if torn else size - end)


_Found = tuple[pa.RecordBatch, bool, int]  # whether it has a checksum, and its bytes


class _ChecksumError(ValueError):
    """A batch is not as it was written."""


def _read_batch(message: pa.Message, schemas: list[pa.Message]) -> tuple[pa.RecordBatch, bool]:
    found = _SUM.search(message.metadata)
    for schema in schemas if found else schemas[:-1]:  # older runs have no sum, but a schema
        if not found or int(found[1], 16) == _sum_of(message, _sum_of(schema)):
            batch = pa.ipc.read_record_batch(message, pa.ipc.read_schema(schema))
            if not found:
                batch.validate(full=True)
            return batch, found is not None
    raise _ChecksumError


def _seek_next(file: pa.NativeFile, at: int) -> bool:
    """Go to where the next message after ``at`` may begin; return False where none does."""
    file.seek(at + 8 if at + 8 < file.size() else file.size())
    begin = file.tell()
    for found in _BEGIN.finditer(file.read_buffer()):
        if (begin + found.start()) % 8 == 0:
            file.seek(begin + found.start())
            return True
    return False
