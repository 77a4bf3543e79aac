"""Streams of Arrow batches that outlive a kill, and in which a damaged block is found."""

import re
import zlib
from pathlib import Path

import pyarrow as pa

from ampacity.files import open_file

_BEGIN = re.compile(rb"(?=\xff{4})")  # of each message, at a multiple of 8 bytes
_SUM = re.compile(rb"crc32:([0-9a-f]{8})")


def write_batch(stream: pa.RecordBatchStreamWriter, batch: pa.RecordBatch) -> None:
    """Write a batch with its checksum."""
    body = pa.ipc.read_message(batch.serialize()).body
    stream.write_batch(batch, custom_metadata={f"crc32:{zlib.crc32(body):08x}": ""})


def read_batches(path: Path) -> tuple[list[pa.RecordBatch], int]:
    """Return all whole batches of a stream, and how many damaged bytes there are beside them.

    A torn last batch, as a kill leaves it, is no damage. Raises OSError.
    """
    batches, damaged, torn, schema = list[pa.RecordBatch](), 0, False, None
    with open_file(path), pa.memory_map(str(path)) as file:  # what is read can be given back
        size, end = file.size(), 0  # end: of the last whole message
        while True:
            at = file.tell()
            try:
                if schema is None:
                    schema = pa.ipc.read_schema(file)
                else:
                    batches.append(_read_batch(file, schema))
                damaged, end = damaged + at - end, file.tell()
            except (EOFError, ValueError, OSError) as error:
                if at == end:  # torn, or the mark of the end
                    torn = file.tell() == size and not isinstance(error, _ChecksumError)
                if schema is None or not _seek_next(file, at):
                    return batches, damaged + (0 if torn else size - end)


class _ChecksumError(ValueError):
    """A batch is not as it was written."""


def _read_batch(file: pa.NativeFile, schema: pa.Schema) -> pa.RecordBatch:
    message = pa.ipc.read_message(file)
    found = _SUM.search(message.metadata)  # older runs have none
    if found and int(found[1], 16) != zlib.crc32(message.body):
        raise _ChecksumError
    return pa.ipc.read_record_batch(message, schema)


def _seek_next(file: pa.NativeFile, at: int) -> bool:
    """Go to where the next message after ``at`` may begin; return False where none does."""
    file.seek(at + 8 if at + 8 < file.size() else file.size())
    begin = file.tell()
    for found in _BEGIN.finditer(file.read_buffer()):
        if (begin + found.start()) % 8 == 0:
            file.seek(begin + found.start())
            return True
    return False
