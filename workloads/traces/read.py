"""Read a trace or a log of real requests: arrival times and token counts."""

from array import array
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.traces.columns import Columns, column_notes, find_columns, missing_notes
from ampacity.workloads.traces.formats import open_records
from ampacity.workloads.traces.rows import ReadOptions, Rows
from ampacity.workloads.traces.times import span_notes, time_notes
from ampacity.workloads.traces.trace import Floats, Ints, Trace
from ampacity.workloads.traces.values import LOCAL, SECONDS, UNKNOWN, ZONED

_REPORT_EVERY = 200_000  # rows between two calls of progress
_TIED = 0.2  # from this share of requests that share a time, a clock may be coarse


def read_trace(
    path: Path,
    *,
    columns: Mapping[str, str] | None = None,
    time_unit: str | None = None,
    context: int | None = None,
    skip_bad_rows: bool = False,
    timed: bool = True,
    progress: Callable[[int, float], None] | None = None,
    count: Callable[[str], int] | None = None,
    keep_texts: bool = False,
) -> Trace:
    """Read a trace or a log row by row.

    Times keep their full precision and count from the earliest row. Rows with 0 output tokens are
    left out and noted where the format holds failed requests, else they are bad rows.

    columns: {role: name}, where the names in docs/fitting.md do not match
    context: maximum tokens of a request; more is an error of its row
    skip_bad_rows: count bad rows in the notes instead of raising
    timed: False accepts a file without times (all are 0)
    progress: called now and then with (rows, share read)
    count: tokens of a text, for rows without a count (default: four characters a token)
    keep_texts: keep recorded prompts, to be sent

    Raises WorkloadError that names file, line and column.
    """
    with open_records(path, frozenset((columns or {}).values())) as records:
        found = None
        if records.names:
            where = f"{path}{records.place}{records.first}" if records.first else str(path)
            found = find_columns(records.names, where, columns, time_unit, timed=timed)
        options = ReadOptions(context, skip_bad_rows, count, keep_texts)
        rows = Rows(path, records.place, found, options)
        for number, (place, record) in enumerate(records.rows, start=1):
            rows.add(place, record)
            if progress and number % _REPORT_EVERY == 0:
                progress(number, records.read_share())
        notes = []
        if columns:
            given = ", ".join(f"{role}={name}" for role, name in columns.items())
            notes.append(f"{path.name}: columns are taken as given: {given} (--column)")
        if time_unit:
            notes.append(
                f"{path.name}: times are taken for numbers of {time_unit}, as given (--time-unit)"
            )
        notes += column_notes(path.name, found, records)
    return _to_trace(rows, notes)


def _to_trace(rows: Rows, column_notes: list[str]) -> Trace:
    """Return the rows as a trace. Raises WorkloadError where there is none."""
    columns = rows.columns
    if columns is None or not len(rows):
        raise WorkloadError(f"{rows.path}: {_why_empty(rows)}")
    kept = _kept_rows(rows)
    values, optional = _take(rows.values, kept), _take(rows.optional, kept)
    known = partial(_known, optional)
    arrival_ns, end_ns, entry = (values[name] for name in ("arrival_ns", "end_ns", "entry"))
    as_schedule = columns.format == "schedule"
    zero_ns = 0 if as_schedule else int(arrival_ns.min())
    resolution_s = _resolution_s(arrival_ns, end_ns)
    from_start = _from_session_start(arrival_ns, known("session"))
    step_s = None if as_schedule or from_start else _clock_step_s(np.sort(arrival_ns))
    notes = [*_row_notes(rows, arrival_ns, known("session"), columns), *column_notes]
    optional_held = optional | _other_columns(rows, columns, kept, values, known("session"))
    notes += missing_notes(rows.path.name, columns, optional_held)
    if rows.clock and not (as_schedule or from_start):
        notes += _clock_notes(rows, columns, arrival_ns, is_coarse=step_s is not None)
    if (session := known("session")) is not None:
        notes += span_notes(rows.path.name, columns, session, resolution_s, values)
    shared, of = known("shared_blocks"), known("blocks")
    unsorted = Trace(
        arrival_s=(arrival_ns - zero_ns) / 1e9,
        input_tokens=values["input_tokens"],
        output_tokens=values["output_tokens"],
        source=f"{rows.path.name} ({columns.format} format)",
        notes=tuple(notes),
        session=known("session"),
        parent=known("parent"),
        client=known("client"),
        cached_tokens=known("cached"),
        blocks=rows.blocks.blocks(kept),
        block_tokens=next((size for size, _ in rows.block_sizes.most_common(1)), None),
        shared_blocks=None if shared is None or of is None else np.column_stack([shared, of]),
        end_s=_seconds(end_ns, zero_ns),
        pause_s=_seconds(values["pause_ns"]),
        entry=entry if entry.max() >= 0 else None,
        recorded=rows.recording.done(),
        clock=rows.clock,
        clock_step_s=step_s,
        resolution_s=resolution_s,
        place=values["place"],
        place_word=rows.place.strip(" :") or "line",
        as_schedule=as_schedule,
        from_session_start=from_start,
    )
    return unsorted.take(np.arange(len(kept)))


def _known(optional: Mapping[str, Ints], role: str) -> Ints | None:
    """Return the column of this role, if any row has a value in it."""
    column = optional.get(role)
    return column if column is not None and column.max(initial=-1) >= 0 else None


def _take(columns: dict[str, "array[int]"], kept: Ints) -> dict[str, Ints]:
    return {name: np.frombuffer(held, np.int64)[kept] for name, held in columns.items() if held}


def _other_columns(
    rows: Rows, columns: Columns, kept: Ints, values: dict[str, Ints], session: Ints | None
) -> dict[str, Ints]:
    """Return ends, pauses of later turns and block chains by role, -1 for none, for the notes."""
    ends, pauses = (np.where(values[n] == UNKNOWN, -1, 0) for n in ("end_ns", "pause_ns"))
    found = {"end" if "end" in columns.by_role else "duration": ends}
    if session is not None:
        pauses[session < 0] = 0
        pauses[np.unique(session, return_index=True)[1]] = 0  # first turns need none
        found["pause"] = pauses
    if "hash_ids" in columns.by_role:
        found["hash_ids"] = rows.blocks.lengths()[kept] - 1
    return found


def _clock_notes(
    rows: Rows, columns: Columns, arrival_ns: Ints, *, is_coarse: bool
) -> Iterator[str]:
    yield from time_notes(rows.path.name, arrival_ns, columns, rows.clock)
    tied = len(arrival_ns) - len(np.unique(arrival_ns))
    if tied and not is_coarse:
        yield (
            f"{rows.path.name}: {tied} rows have the very time of another row; "
            "they are kept and arrive together"
        )


def _kept_rows(rows: Rows) -> Ints:
    """Return the indices of rows that are not spans whose calls are rows too."""
    counts = [np.frombuffer(rows.values[n], np.int64) for n in ("input_tokens", "output_tokens")]
    left_out, span_notes = rows.spans.redundant(rows.optional["span"], np.column_stack(counts))
    rows.note_counts.update(span_notes)
    return np.flatnonzero(~left_out)


def _why_empty(rows: Rows) -> str:
    if rows.columns is not None and rows.bad:
        return f"all {rows.bad.total()} rows are bad: nothing is left of the trace"
    noted = "; ".join(f"{count} {text}" for text, count in rows.note_counts.items())
    some = "every row has 0 output tokens" if rows.no_output else noted or "the file holds no rows"
    return f"{some}: a trace needs at least one request"


def _row_notes(
    rows: Rows, arrival_ns: Ints, session: Ints | None, columns: Columns
) -> Iterator[str]:
    name = rows.path.name
    if rows.clock not in ("", LOCAL, ZONED, SECONDS):
        unit = rows.clock.removeprefix("a number of ")
        yield f"{name}: column {columns['time']} is read as {unit}"
    if rows.no_output:
        yield f"{name}: {rows.no_output} rows with 0 output tokens are left out (failed requests)"
    if len(rows.block_sizes) > 1:
        sizes = rows.block_sizes.most_common(3)
        shown = ", ".join(f"{size} ({count} rows)" for size, count in sizes)
        yield (
            f"{name}: column {columns['block_size'].strip()} has several values ({shown}): "
            "the first is taken for all"
        )
    if rows.bad:
        reasons = ", ".join(f"{count} for {reason}" for reason, count in rows.bad.most_common())
        bad = rows.bad.total()
        total = bad + len(arrival_ns) + rows.no_output
        yield f"{name}: {bad} bad rows of {total} are left out: {reasons}"
    for text, count in (rows.note_counts + rows.blocks.notes).items():
        first = rows.blocks.first_odd.get(text)
        yield f"{name}: {count} {text}{f' (first {first})' if first else ''}"
    by_session = slice(None) if session is None else np.argsort(session, kind="stable")
    late = np.diff(arrival_ns[by_session]) < 0
    if session is not None:
        late &= np.diff(session[by_session]) == 0
    if late.any():
        where = "" if session is None else " of their session"
        yield (
            f"{name}: the rows{where} are not in the order of time "
            f"({np.count_nonzero(late)} come before the row above them); they are sorted"
        )


def _seconds(ns: Ints, zero_ns: int = 0) -> Floats | None:
    """Return times from ``zero_ns``, NaN where unknown; None where all are unknown."""
    known = ns != UNKNOWN
    return np.where(known, (ns - zero_ns) / 1e9, np.nan) if known.any() else None


def _resolution_s(*times_ns: Ints) -> float:
    """Return the coarsest of 1 s, 1 ms and 1 us of which all times are multiples, else 0."""
    step_ns = 1e9
    for times in times_ns:
        known = times[times != UNKNOWN]
        while step_ns > 1 and (known % int(step_ns)).any():
            step_ns /= 1000
    return step_ns / 1e9 if step_ns > 1 else 0.0


def _clock_step_s(sorted_ns: Ints) -> float | None:
    """Return the step of a coarse clock: many requests share times, which are a step apart."""
    if len(sorted_ns) < 10:
        return None
    gaps = np.diff(np.unique(sorted_ns))
    if len(gaps) == 0 or (len(gaps) + 1) > (1 - _TIED) * len(sorted_ns):
        return None
    smallest, middle = np.quantile(gaps, [0.01, 0.5])
    if smallest < 0.3 * middle:
        return None
    return float(middle if smallest > 0.9 * middle else smallest) / 1e9


def _from_session_start(arrival_ns: NDArray[np.int64], session: Ints | None) -> bool:
    """Return whether most sessions begin at time 0 exactly."""
    if session is None or (session < 0).any() or session.max() < 1:
        return False
    first = np.full(session.max() + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, session, arrival_ns)
    return bool(np.count_nonzero(first == 0) * 2 > len(first))
