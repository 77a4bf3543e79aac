"""Open a trace file: CSV, JSON, JSON lines, Parquet or vLLM's log, each also gzipped."""

import csv
import gzip
import io
import itertools
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ampacity.files import GIB, open_file
from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.text import BROKEN_BYTES, DECODE_ERRORS, encoding_of, is_broken
from ampacity.workloads.traces.columns import ROLES
from ampacity.workloads.traces.json_rows import json_records
from ampacity.workloads.traces.parquet_rows import parquet_records
from ampacity.workloads.traces.records import ColumnCounts, Records, Row
from ampacity.workloads.traces.values import BadRow
from ampacity.workloads.traces.vllm_log import log_records

_JSON_ENDINGS = (".jsonl", ".ndjson", ".json")
LINE_MAX = 1 << 27  # characters of a line
LINES_MAX = 50_000_000  # of which a compressed file may hold any number
PACKED_MAX_BYTES = 2 * GIB  # of a compressed Parquet file
_FIELD_MAX = 1 << 24  # characters of a CSV field; Python's 128 KiB are too few for a prompt
_DELIMITERS = (",", ";", "\t", "|")
_SEPARATOR = re.compile(r"sep=(.)\s*", re.IGNORECASE)  # what Excel writes above the header


@contextmanager
def open_records(path: Path, keep: frozenset[str] = frozenset()) -> Iterator[Records]:
    """Open the rows of ``path``. Raises WorkloadError with one line.

    ``keep`` names columns wanted beside the known ones, including paths into lists. The ending
    gives the format, a CSV header its delimiter, and the first bytes whether it is UTF-16.
    """
    with _as_workload_errors(path), _unchanged(path), open_file(path) as file:
        size = max(file.seek(0, io.SEEK_END), 1)
        file.seek(0)
        zipped = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        binary: Any = gzip.GzipFile(fileobj=file) if zipped else file
        stem = path.name.lower().removesuffix(".gz")
        if stem.endswith(".parquet"):
            held = io.BytesIO(binary.read(PACKED_MAX_BYTES)) if zipped else binary
            yield parquet_records(held, path, keep)
            return
        encoding = encoding_of(binary.peek(4))
        with io.TextIOWrapper(binary, encoding=encoding, errors=DECODE_ERRORS, newline="") as text:

            def read_share() -> float:
                return file.tell() / size

            def lines() -> Iterator[str]:
                return _lines(text, path)

            if stem.endswith(_JSON_ENDINGS):
                yield json_records(text, lines, path, read_share, keep)
            elif stem.endswith((".csv", ".tsv")):
                yield _csv_records(lines(), path, read_share, keep)
            elif stem.endswith(".log"):
                yield log_records(lines(), read_share)
            else:
                raise WorkloadError(
                    f"{path}: the ending is none of .csv, .tsv, .jsonl, .json, .parquet and .log "
                    "(each also with .gz): rename it"
                )


@contextmanager
def _unchanged(path: Path) -> Iterator[None]:
    """Raise WorkloadError where the file was written to in the meantime."""
    before = path.stat()
    yield
    after = path.stat()
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise WorkloadError(f"{path}: the file changed while it was read: copy it first")


@contextmanager
def _as_workload_errors(path: Path) -> Iterator[None]:
    """Turn the errors of reading a file into WorkloadError with one line."""
    try:
        yield
    except WorkloadError:
        raise
    except UnicodeDecodeError as error:
        encoding = error.encoding.upper()
        message = f"{path}: this is no {encoding} text ({error.reason}): give a CSV or JSONL file"
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        message = f"{path}: the gzip data are broken ({error}): fetch the file again"
    except OSError as error:
        message = f"trace {path} cannot be read: {error.strerror or error}"
    except MemoryError:
        message = (
            f"{path}: the file does not fit into this machine's memory: "
            "split it, or leave out columns that are not needed"
        )
    else:
        return
    raise WorkloadError(message)


def _lines(text: io.TextIOWrapper, path: Path) -> Iterator[str]:
    """Yield the lines of a file. Raises WorkloadError beyond LINE_MAX or LINES_MAX."""
    number = 0
    while line := text.readline(LINE_MAX):
        number += 1
        if number > LINES_MAX:
            raise WorkloadError(f"{path} has more than {LINES_MAX:,} lines: split it")
        if len(line) == LINE_MAX and line[-1] not in "\r\n":
            raise WorkloadError(
                f"{path}:{number}: this line has more than {LINE_MAX:,} characters: "
                "is it a log with a request in each line?"
            )
        yield line.lstrip("\ufeff")  # files with byte order marks, one behind the other


def _csv_records(
    lines: Iterator[str], path: Path, read_share: Callable[[], float], keep: frozenset[str]
) -> Records:
    broken: list[int] = []  # lines with undecodable bytes
    lines = _watched(lines, broken)
    first = next(lines, "")
    has_separator = _SEPARATOR.fullmatch(first) is not None
    kept = [] if has_separator else [first]
    csv.field_size_limit(_FIELD_MAX)
    delimiter = _delimiter(first, keep)
    reader = csv.reader(itertools.chain(kept, lines), delimiter=delimiter, strict=True)
    skipped = int(has_separator)
    try:
        header: list[str] = next((row for row in reader if row), [])
    except csv.Error as error:
        raise WorkloadError(f"{path}:{reader.line_num}: this is no CSV: {error}") from None
    columns = ColumnCounts()

    def rows() -> Iterator[Row]:
        width, last, good = len(header), reader.line_num + skipped, 0
        try:
            for row in reader:
                line = reader.line_num + skipped
                if broken and broken[-1] > last:
                    yield line, BadRow(BROKEN_BYTES)
                elif len(row) == width:
                    good += 1
                    yield line, dict(zip(header, row, strict=True))
                elif row:
                    yield line, BadRow(f"the row has {len(row)} fields, the header has {width}")
                last = line
        except csv.Error as error:
            raise WorkloadError(f"{path}:{last + 1}: this is no CSV: {error}") from None
        finally:
            columns.add(tuple(dict.fromkeys(header)), good)

    return Records(header, reader.line_num + skipped, rows(), ":", read_share, columns)


def _delimiter(header: str, keep: frozenset[str]) -> str:
    """Return the delimiter that gives the header the most known names, else the most names."""
    if found := _SEPARATOR.fullmatch(header):
        return found[1]
    known = {name for names in ROLES.values() for name in names}
    known |= {name.strip().lower() for name in keep}

    def score(delimiter: str) -> tuple[int, int]:
        names = [name.strip(' "\r\n').lower() for name in header.split(delimiter)]
        return len(known.intersection(names)), len(names)

    return max(_DELIMITERS, key=score)


def _watched(lines: Iterable[str], broken: list[int]) -> Iterator[str]:
    """Yield the lines; append the numbers of those with undecodable bytes to ``broken``."""
    for number, line in enumerate(lines, start=1):
        if is_broken(line):
            broken.append(number)
        yield line
