"""Recorded load: arrival times and token counts of real requests, from a trace or a log."""

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workloads.errors import WorkloadError
from workloads.prefixes import take_lists
from workloads.trace_columns import column_notes, missing_notes
from workloads.trace_fields import LOCAL, ZONED, Columns, find_columns, time_ns, tokens
from workloads.trace_formats import BadRow, open_records
from workloads.trace_times import time_notes

_REPORT_EVERY = 200_000  # rows between two calls of progress
# logs in which an answer of 0 tokens is a failed request
WITH_FAILED_REQUESTS = (
    "BurstGPT", "LiteLLM spend log", "OpenAI usage", "OpenTelemetry", "agentic coding",
)  # fmt: skip
_TIED = 0.2  # share of requests with the time of an earlier one, from which on a clock may be coarse


@dataclass(frozen=True, eq=False)
class Blocks:
    """Prompts as chains of block ids: those of request i are ``ids[start[i]:start[i + 1]]``, int64."""

    ids: NDArray[np.int64]
    start: NDArray[np.int64]

    def take(self, index: NDArray[np.int64]) -> "Blocks":
        """The chains of the requests ``index``, in that order."""
        places, start = take_lists(self.start, index)
        return Blocks(self.ids[places], start)


@dataclass(frozen=True, eq=False)
class Trace:
    """n requests by arrival: ``arrival_s`` float64[n] in seconds from 0, token counts int64[n] of at least 1.

    ``notes``: what a reader of the results should know about the file, one line each. ``session`` and ``client``
    int64[n] number them from 0 (-1: none). ``clock_step_s``: of a clock so coarse that requests share their
    times.
    """

    arrival_s: NDArray[np.float64]
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    source: str
    notes: tuple[str, ...] = ()
    session: NDArray[np.int64] | None = None
    client: NDArray[np.int64] | None = None
    cached_tokens: NDArray[np.int64] | None = None  # -1: not known
    blocks: Blocks | None = None
    shared_blocks: NDArray[np.int64] | None = None  # int64[n, 2]: shared with the turn before, of how many
    clock: str = ""  # how the times were written
    clock_step_s: float | None = None
    as_schedule: bool = False  # written by ``workload sample``: times count from the start of the stage
    from_session_start: bool = False  # times count from the start of each session: there are no arrivals

    def __len__(self) -> int:
        return len(self.arrival_s)

    def take(self, index: NDArray[np.int64], arrival_s: NDArray[np.float64] | None = None) -> "Trace":
        """The requests ``index`` (int64), sorted by ``arrival_s`` (default: their own times, not shifted)."""
        arrival_s = self.arrival_s[index] if arrival_s is None else arrival_s
        order = np.argsort(arrival_s, kind="stable")
        index = index[order]
        names = ("input_tokens", "output_tokens", "session", "client", "cached_tokens", "shared_blocks")
        taken: dict[str, Any] = {
            name: None if getattr(self, name) is None else getattr(self, name)[index] for name in names
        }
        blocks = self.blocks.take(index) if self.blocks else None
        return replace(self, arrival_s=arrival_s[order], blocks=blocks, **taken)


def read_trace(
    path: Path,
    *,
    columns: Mapping[str, str] | None = None,
    time_unit: str | None = None,
    context: int | None = None,
    skip_bad_rows: bool = False,
    timed: bool = True,
    progress: Callable[[int, float], None] | None = None,
) -> Trace:
    """Read a trace or a log, row by row; columns are found by name (docs/fitting.md), or given as {role: name}.

    Times keep their full precision and count from the earliest row. Rows with 0 output tokens are
    left out and noted in a log that holds failed requests, else they are bad rows.
    ``context``: more tokens than that in a request are an error of its row; ``skip_bad_rows`` counts bad rows in
    the notes; ``timed`` False takes a file without times (all are 0); ``progress(rows, share)`` is called now
    and then. Raises WorkloadError with one line that names
    file, line and column.
    """
    with open_records(path, frozenset((columns or {}).values())) as records:
        found = None
        if records.names:
            where = f"{path}{records.place}{records.first}" if records.first else str(path)
            found = find_columns(records.names, where, columns, time_unit, timed=timed)
        rows = _Rows(path, records.place, found, context, skip_bad_rows)
        for number, (place, record) in enumerate(records.rows, start=1):
            rows.add(place, record)
            if progress and number % _REPORT_EVERY == 0:
                progress(number, records.read_share())
        rows.of_columns = tuple(column_notes(path.name, found, records))
    return rows.trace()


def scale_time(trace: Trace, factor: float) -> Trace:
    """The same requests, ``factor`` times as fast: every gap is divided by ``factor``. Raises WorkloadError."""
    if not (math.isfinite(factor) and factor > 0):
        raise WorkloadError(f"time scale is {factor!r}: give a finite number above 0 (2 plays twice as fast)")
    return trace if factor == 1 else replace(trace, arrival_s=trace.arrival_s / factor)


class _Rows:
    """The rows read so far, and what is to be said about them."""

    def __init__(
        self, path: Path, place: str, columns: Columns | None, context: int | None, skip_bad_rows: bool
    ) -> None:
        self.path, self.place, self.context, self.skip = path, place, context, skip_bad_rows
        self.arrival_ns, self.input_tokens, self.output_tokens = array("q"), array("q"), array("q")
        self.optional = {
            role: array("q") for role in ("session", "client", "cached", "blocks", "shared_blocks")
        }
        self.block_ids, self.block_start = array("q"), array("q", [0])
        self.numbers: dict[str, dict[str, int]] = {"session": {}, "client": {}, "hash_ids": {}}
        self.columns = columns
        self.clock = ""  # how the times of this file are written
        self.no_output = 0
        self.bad: Counter[str] = Counter()
        self.of_columns: tuple[str, ...] = ()

    def add(self, place: int, record: Mapping[str, Any] | BadRow) -> None:
        column, columns = "", self.columns
        try:
            if isinstance(record, BadRow):
                raise ValueError(record.reason)
            if columns is None:
                raise ValueError("there are no columns")
            column = columns["input"]
            input_tokens = tokens(record.get(column))
            column = columns["output"]
            output_tokens = tokens(record.get(column))
            at_ns, clock = 0, ""
            if "time" in columns.by_role:
                column = columns["time"]
                at_ns, clock = time_ns(record.get(column), columns.unit)
            if clock != (self.clock or clock):
                raise ValueError(f"this time is {clock}, those before it are {self.clock}: use one form")
            column = columns["input"]
            if input_tokens == 0 and output_tokens > 0:
                raise ValueError("0 is too few tokens: a prompt has at least 1")
            if output_tokens == 0 and columns.format not in WITH_FAILED_REQUESTS:
                column = columns["output"]
                raise ValueError("0 is too few tokens: an answer has at least 1")
            if self.context is not None and input_tokens + output_tokens > self.context:
                raise ValueError(
                    f"{input_tokens} tokens and {output_tokens} of output are more than the context of {self.context}"
                )
            optional = self._optional(record, columns) if output_tokens else {}
        except ValueError as error:
            self._bad(place, column, str(error))
            return
        self.clock = clock
        if output_tokens == 0:
            self.no_output += 1
            return
        self.arrival_ns.append(at_ns)
        self.input_tokens.append(input_tokens)
        self.output_tokens.append(output_tokens)
        for role, value in optional.items():
            self.optional[role].append(value)
        if "hash_ids" in columns.by_role:
            self._add_blocks(record, columns["hash_ids"])

    def _bad(self, place: int, column: str, reason: str) -> None:
        if not self.skip:
            where = f"column {column.strip()}: " if column else ""
            raise WorkloadError(
                f"{self.path}{self.place}{place}: {where}{reason}; mend or remove the row, or give --skip-bad-rows"
            )
        self.bad[f"column {column.strip()}" if column else "not readable"] += 1

    def _optional(self, record: Mapping[str, Any], columns: Columns) -> dict[str, int]:
        found: dict[str, int] = {}
        for role in self.optional.keys() & columns.by_role.keys():
            value = record.get(columns[role])
            if role in ("session", "client"):
                numbers = self.numbers[role]
                found[role] = -1 if value in (None, "") else numbers.setdefault(str(value), len(numbers))
            else:
                found[role] = -1 if value in (None, "") else tokens(value)
        return found

    def _add_blocks(self, record: Mapping[str, Any], column: str) -> None:
        ids = record.get(column)
        base = (self.optional["session"][-1] + 1) << 40 if record.get("hash_id_scope") == "local" else 0
        numbers = self.numbers["hash_ids"]
        for block in ids if isinstance(ids, list) else ():
            whole = isinstance(block, int) and 0 <= block < 1 << 40
            self.block_ids.append(base + block if whole else ~numbers.setdefault(str(block), len(numbers)))
        self.block_start.append(len(self.block_ids))

    def trace(self) -> Trace:
        if self.columns is None:
            raise WorkloadError(f"{self.path}: the file holds no rows: a trace needs at least one request")
        if not self.arrival_ns:
            if self.bad:
                raise WorkloadError(
                    f"{self.path}: all {self.bad.total()} rows are bad: nothing is left of the trace"
                )
            some = "every row has 0 output tokens" if self.no_output else "the file holds no rows"
            raise WorkloadError(f"{self.path}: {some}: a trace needs at least one request")
        arrival_ns = np.frombuffer(self.arrival_ns, dtype=np.int64)
        as_schedule = self.columns.format == "schedule"
        step_s = None if as_schedule else _clock_step_s(np.sort(arrival_ns))
        from_start = _from_session_start(arrival_ns, self._array("session"))
        notes = [*self._notes(arrival_ns, self.columns), *self.of_columns]
        chain_lengths = np.diff(np.frombuffer(self.block_start, dtype=np.int64)) - 1  # -1: none
        notes += missing_notes(self.path.name, self.columns, {**self.optional, "hash_ids": chain_lengths})
        if self.clock and not (as_schedule or from_start):
            notes += time_notes(self.path.name, arrival_ns, self.columns, self.clock)
        tied = len(arrival_ns) - len(np.unique(arrival_ns))  # rows whose time an earlier row has too
        if self.clock and tied and not (step_s or as_schedule or from_start):
            notes.append(
                f"{self.path.name}: {tied} rows have the very time of another row; they are kept and arrive together"
            )
        chains = np.array(self.block_ids, dtype=np.int64), np.array(self.block_start, dtype=np.int64)
        shared, of = self._array("shared_blocks"), self._array("blocks")
        unsorted = Trace(
            arrival_s=(arrival_ns - (0 if as_schedule else arrival_ns.min())) / 1e9,
            input_tokens=np.frombuffer(self.input_tokens, dtype=np.int64),
            output_tokens=np.frombuffer(self.output_tokens, dtype=np.int64),
            source=f"{self.path.name} ({self.columns.format} format)",
            notes=tuple(notes),
            session=self._array("session"),
            client=self._array("client"),
            cached_tokens=self._array("cached"),
            blocks=Blocks(*chains) if self.block_ids else None,
            shared_blocks=None if shared is None or of is None else np.column_stack([shared, of]),
            clock=self.clock,
            clock_step_s=None if from_start else step_s,
            from_session_start=from_start,
            as_schedule=as_schedule,
        )
        return unsorted.take(np.arange(len(arrival_ns)))

    def _array(self, role: str) -> NDArray[np.int64] | None:
        held = self.optional[role]
        return np.frombuffer(held, dtype=np.int64) if held and max(held) >= 0 else None

    def _notes(self, arrival_ns: NDArray[np.int64], columns: Columns) -> Iterator[str]:
        name = self.path.name
        if self.clock not in ("", LOCAL, ZONED, "a number of seconds"):
            yield f"{name}: column {columns['time']} is read as {self.clock.removeprefix('a number of ')}"
        if self.no_output:
            yield f"{name}: {self.no_output} rows with 0 output tokens are left out (failed requests)"
        if self.bad:
            reasons = ", ".join(f"{count} for {reason}" for reason, count in self.bad.most_common())
            yield f"{name}: {self.bad.total()} bad rows of {self.bad.total() + len(arrival_ns) + self.no_output} are left out: {reasons}"
        late = int(np.count_nonzero(np.diff(arrival_ns) < 0))
        if late and "session" not in columns.by_role:
            yield f"{name}: the rows are not in the order of time ({late} come before the row above them); they are sorted"


def _clock_step_s(sorted_ns: NDArray[np.int64]) -> float | None:
    """The step of a coarse clock: many requests share their times, and the times lie a step or more apart."""
    if len(sorted_ns) < 10:
        return None
    gaps = np.diff(np.unique(sorted_ns))
    if len(gaps) == 0 or (len(gaps) + 1) > (1 - _TIED) * len(sorted_ns):
        return None
    smallest, middle = np.quantile(gaps, [0.01, 0.5])
    return float(middle if smallest > 0.9 * middle else smallest) / 1e9 if smallest >= 0.3 * middle else None


def _from_session_start(arrival_ns: NDArray[np.int64], session: NDArray[np.int64] | None) -> bool:
    """Whether there are sessions, and most of them begin at the very time 0."""
    if session is None or (session < 0).any() or session.max() < 1:
        return False
    first = np.full(session.max() + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, session, arrival_ns)
    return bool(np.count_nonzero(first == 0) * 2 > len(first))
