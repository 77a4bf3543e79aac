"""A schedule as JSON lines, one request each, and back."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from workloads.errors import WorkloadError
from workloads.prefixes import SharedPrefixes
from workloads.schedule import Schedule
from workloads.trace_formats import BadRow, open_records
from workloads.traces import read_trace

_PER_REQUEST = (
    "cancel_after_s", "cancel_after_tokens", "session", "turn", "think_s", "continues", "new_tokens",
)  # fmt: skip


def write_schedule(file: TextIO, schedule: Schedule) -> None:
    """One line a request: ``scheduled_s`` (to the nanosecond), lengths, and what else the schedule has of it.

    ``shared`` lists (id, tokens) of the segments that its prompt begins with, ``after`` the requests (by line,
    from 0) whose answers it waits for.
    """
    file.writelines(json.dumps(row, separators=(", ", ": ")) + "\n" for row in _rows(schedule))


def _rows(schedule: Schedule) -> Iterator[dict[str, Any]]:
    columns = {name: column for name in _PER_REQUEST if (column := getattr(schedule, name)) is not None}
    for i in range(len(schedule)):
        row: dict[str, Any] = {
            "scheduled_s": round(float(schedule.scheduled_s[i]), 9),
            "input_tokens": int(schedule.input_tokens[i]),
            "output_tokens": int(schedule.output_tokens[i]),
        }
        if schedule.class_index is not None:
            row["class"] = schedule.class_names[schedule.class_index[i]]
        for name, column in columns.items():
            value = column[i].item()
            if value == value and value not in ((-1,) if name in ("session", "continues") else (0,)):
                row[name] = value
        if schedule.shared is not None:
            row["shared"] = schedule.shared.of(i)
        if schedule.after is not None and schedule.after_start is not None:
            row["after"] = schedule.after[schedule.after_start[i] : schedule.after_start[i + 1]].tolist()
        yield row


def read_schedule(path: Path, *, time_scale: float = 1.0, first_request_id: int = 0) -> Schedule:
    """The schedule that ``write_schedule`` wrote. Raises WorkloadError with one line.

    Requests of classes and sessions depend on more than the schedule: they are refused, with the way to run them.
    """
    trace = read_trace(path)
    shared: list[list[tuple[int, int]]] = []
    cancel_s: list[float] = []
    cancel_tokens: list[int] = []
    with open_records(path) as records:
        for line, row in records.rows:
            if isinstance(row, BadRow) or row.get("after") or row.get("class", "default") != "default":
                raise WorkloadError(
                    f"{path}:{line}: this request belongs to a class or a session, of which the schedule holds only the "
                    "times and lengths: run the workload itself, with --workload"
                )
            shared.append(_segments(row.get("shared"), f"{path}:{line}"))
            try:
                cancel_s.append(float(row.get("cancel_after_s", "nan")))
                cancel_tokens.append(int(row.get("cancel_after_tokens", 0)))
            except (TypeError, ValueError, OverflowError):
                raise WorkloadError(
                    f"{path}:{line}: column cancel_after_s or cancel_after_tokens: give numbers"
                ) from None
    if np.any(np.diff(trace.arrival_s) < 0) or len(shared) != len(trace):
        raise WorkloadError(f"{path}: the requests are not in the order of their times")
    columns: dict[str, Any] = {}
    if any(shared):
        start = np.concatenate([[0], np.cumsum([len(s) for s in shared])]).astype(np.int64)
        flat = np.array([pair for s in shared for pair in s], dtype=np.int64).reshape(-1, 2)
        columns["shared"] = SharedPrefixes(start, flat[:, 0], flat[:, 1])
    if any(c == c for c in cancel_s):
        columns["cancel_after_s"] = np.array(cancel_s)
    if any(cancel_tokens):
        columns["cancel_after_tokens"] = np.array(cancel_tokens, dtype=np.int64)
    times_s = trace.arrival_s / time_scale
    return Schedule(times_s, trace.input_tokens, trace.output_tokens, first_request_id, **columns)


def _segments(held: object, where: str) -> list[tuple[int, int]]:
    pairs = held if isinstance(held, list) else []
    if not all(
        isinstance(p, list) and len(p) == 2 and all(isinstance(n, int) and n >= 0 for n in p) for p in pairs
    ):
        raise WorkloadError(f"{where}: column shared: write it as [[id, tokens], ...]")
    return [(p[0], p[1]) for p in pairs]
