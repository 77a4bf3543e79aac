"""Recorded load: arrival times and token counts of real requests, from CSV or JSON lines, plain or gzipped."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import zlib
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from workloads.errors import WorkloadError
from workloads.trace_fields import NUMBER, Columns, find_columns, time_ns, tokens

_JSON_ENDINGS = (".jsonl", ".ndjson", ".json")


@dataclass(frozen=True, eq=False)
class Trace:
    """n requests by arrival: ``arrival_s`` float64[n] in seconds from 0, token counts int64[n] of at least 1.

    ``notes``: what a reader of the results should know about the file, one line each.
    """

    arrival_s: NDArray[np.float64]
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    source: str
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.arrival_s)


def read_trace(path: Path, *, limit: int | None = None) -> Trace:
    """Read a trace; columns are found by name (Azure, Mooncake, BurstGPT or generic, see docs/workloads.md).

    Times keep their full precision and count from the earliest row. Rows with 0 output tokens (failed
    requests in BurstGPT) are left out and noted. ``limit`` keeps the first so many rows in the order of the
    file. Raises WorkloadError with one line that names file, line and column.
    """
    if limit is not None and limit < 1:
        raise WorkloadError(f"the limit of rows is {limit}: give 1 or more")
    rows = _Rows(path)
    with _plain_errors(path), _text(path) as text:
        for line, columns, record in _records(text, path):
            rows.add(line, columns, record)
            if len(rows.arrival_ns) == limit:
                break
    return rows.trace()


def scale_time(trace: Trace, factor: float) -> Trace:
    """The same requests, ``factor`` times as fast: every gap is divided by ``factor``. Raises WorkloadError."""
    if not (math.isfinite(factor) and factor > 0):
        raise WorkloadError(f"time scale is {factor!r}: give a finite number above 0 (2 plays twice as fast)")
    return trace if factor == 1 else replace(trace, arrival_s=trace.arrival_s / factor)


class _Rows:
    """The rows read so far, and what is to be said about them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.arrival_ns = array("q")
        self.input_tokens = array("q")
        self.output_tokens = array("q")
        self.columns: Columns | None = None
        self.clock = ""  # how the times of this file are written
        self.no_output = 0

    def add(self, line: int, columns: Columns, record: Mapping[str, Any]) -> None:
        self.columns = columns
        column = columns.input
        try:
            input_tokens = tokens(record.get(columns.input))
            column = columns.output
            output_tokens = tokens(record.get(columns.output))
            column = columns.time
            at_ns, clock = time_ns(record.get(columns.time), milliseconds=columns.milliseconds)
            if clock != (self.clock or clock):
                raise ValueError(f"this time is {clock}, those before it are {self.clock}: use one form")
            column = columns.input
            if input_tokens == 0 and output_tokens > 0:
                raise ValueError("0 is too few tokens: a prompt has at least 1")
        except ValueError as error:
            raise WorkloadError(
                f"{self.path}:{line}: column {column.strip()}: {error}; mend or remove the row"
            ) from None
        self.clock = clock
        if output_tokens == 0:
            self.no_output += 1
            return
        self.arrival_ns.append(at_ns)
        self.input_tokens.append(input_tokens)
        self.output_tokens.append(output_tokens)

    def trace(self) -> Trace:
        if self.columns is None:
            raise WorkloadError(f"{self.path}: the file holds no rows: a trace needs at least one request")
        if not self.arrival_ns:
            raise WorkloadError(f"{self.path}: every row has 0 output tokens: there is nothing to replay")
        arrival_ns = np.frombuffer(self.arrival_ns, dtype=np.int64)
        order = np.argsort(arrival_ns, kind="stable")
        sorted_ns = arrival_ns[order]
        return Trace(
            arrival_s=(sorted_ns - sorted_ns[0]) / 1e9,
            input_tokens=np.frombuffer(self.input_tokens, dtype=np.int64)[order],
            output_tokens=np.frombuffer(self.output_tokens, dtype=np.int64)[order],
            source=f"{self.path.name} ({self.columns.format} format)",
            notes=tuple(self._notes(arrival_ns, sorted_ns)),
        )

    def _notes(self, arrival_ns: NDArray[np.int64], sorted_ns: NDArray[np.int64]) -> Iterator[str]:
        if self.columns and self.columns.milliseconds and self.clock == NUMBER:
            yield f"{self.path.name}: column {self.columns.time} is read as milliseconds"
        if self.no_output:
            yield f"{self.path.name}: {self.no_output} rows with 0 output tokens are left out (failed requests)"
        late = int(np.count_nonzero(np.diff(arrival_ns) < 0))
        if late:
            yield f"{self.path.name}: the rows are not in the order of time ({late} come before the row above them); they are sorted"
        steps = np.diff(np.unique(sorted_ns))
        distinct = len(steps) + 1
        if len(sorted_ns) >= 10 and distinct * 2 < len(sorted_ns):
            step = f", {np.median(steps) / 1e9:.3g} s apart" if len(steps) else ""
            yield (
                f"{self.path.name}: coarse clock: {distinct} distinct arrival times{step} for {len(sorted_ns)} requests; "
                "they are replayed as written, so requests of one time arrive as a burst"
            )


@contextmanager
def _text(path: Path) -> Iterator[io.TextIOWrapper]:
    with path.open("rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        binary = gzip.GzipFile(fileobj=file) if zipped else file
        with io.TextIOWrapper(binary, encoding="utf-8-sig", newline="") as text:
            yield text


@contextmanager
def _plain_errors(path: Path) -> Iterator[None]:
    """Turn what reading a file can raise into one line."""
    try:
        yield
    except WorkloadError:
        raise
    except UnicodeDecodeError as error:
        raise WorkloadError(
            f"{path}: this is no UTF-8 text ({error.reason}): give a CSV or JSONL file"
        ) from None
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise WorkloadError(f"{path}: the gzip data are broken ({error}): fetch the file again") from None
    except OSError as error:
        raise WorkloadError(f"trace {path} cannot be read: {error.strerror or error}") from None


def _records(text: io.TextIOWrapper, path: Path) -> Iterator[tuple[int, Columns, Mapping[str, Any]]]:
    """(line in the file, its columns, the row by column name) for every row that is not blank."""
    stem = path.name.lower().removesuffix(".gz")
    if stem.endswith(_JSON_ENDINGS):
        yield from _json_records(text, path)
    elif stem.endswith(".csv"):
        yield from _csv_records(text, path)
    else:
        raise WorkloadError(
            f"{path}: the ending says neither .csv nor .jsonl (nor either with .gz): rename it"
        )


def _csv_records(text: io.TextIOWrapper, path: Path) -> Iterator[tuple[int, Columns, Mapping[str, Any]]]:
    reader = csv.reader(text)
    header: list[str] | None = None
    columns: Columns | None = None
    try:
        for row in reader:
            if not row:
                continue
            if header is None or columns is None:
                header, columns = row, find_columns(row, f"{path}:{reader.line_num}")
                continue
            if len(row) != len(header):
                raise WorkloadError(
                    f"{path}:{reader.line_num}: the row has {len(row)} fields, the header has {len(header)}; "
                    "mend or remove the row"
                )
            yield reader.line_num, columns, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise WorkloadError(f"{path}:{reader.line_num}: this is no CSV: {error}") from None


def _json_records(text: io.TextIOWrapper, path: Path) -> Iterator[tuple[int, Columns, Mapping[str, Any]]]:
    columns: Columns | None = None
    for line, content in enumerate(text, start=1):
        if not content.strip():
            continue
        where = f"{path}:{line}"
        try:
            record = json.loads(content, parse_float=Decimal, parse_constant=_no_constant)
        except (ValueError, ArithmeticError, RecursionError) as error:
            reason = (
                str(error)
                if isinstance(error, ValueError)
                else "a number is too large, or it is nested too deep"
            )
            raise WorkloadError(f"{where}: this is no JSON: {reason}; mend or remove the row") from None
        if not isinstance(record, dict):
            raise WorkloadError(f"{where}: this is no JSON object with one request; mend or remove the row")
        if columns is None:
            columns = find_columns(list(record), where)
        yield line, columns, record


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")
