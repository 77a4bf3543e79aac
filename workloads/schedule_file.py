"""A schedule as JSON lines, one request each, and back."""

import gzip
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.profile import Workload, workload_from_text
from ampacity.workloads.prompts.prefixes import SharedPrefixes
from ampacity.workloads.replay import Replayed
from ampacity.workloads.schedule import Schedule
from ampacity.workloads.text import mended
from ampacity.workloads.traces.formats import open_records
from ampacity.workloads.traces.read import read_trace
from ampacity.workloads.traces.values import BadRow

# Columns that a row holds where they are not as here: the type, and what is left out.
_PER_REQUEST: dict[str, tuple[Any, Any]] = {
    "cancel_after_s": (np.float64, np.nan),
    "cancel_after_tokens": (np.int64, 0),
    "session": (np.int64, -1),
    "turn": (np.int32, 0),
    "think_s": (np.float64, 0.0),
    "continues": (np.int64, -1),
    "new_tokens": (np.int64, 0),
}
_KNOWN = frozenset(
    {
        *_PER_REQUEST,
        "scheduled_s",
        "input_tokens",
        "output_tokens",
        "class",
        "model",
        "shared",
        "after",
    }
)
_SHOWN = 12
_HEAD = "schedule_of"  # the first line: the workload, as the text of its YAML file
_HEADERS = "headers_left_out"


def write_schedule(
    file: TextIO, schedule: Schedule, workload: tuple[str, list[str]] | None = None
) -> None:
    """One line a request: ``scheduled_s`` (to the nanosecond), lengths, and what else the schedule has of it.

    ``shared`` lists (id, tokens) of the segments that its prompt begins with, ``after`` the requests (by their
    number, from 0) whose answers it waits for. ``workload`` (``workload_text``) stands in a line before them
    where requests have classes or sessions, whose rules it holds.
    """
    if workload is not None:
        text, headers = workload
        file.write(json.dumps({_HEAD: text, **({_HEADERS: headers} if headers else {})}) + "\n")
    file.writelines(json.dumps(row, separators=(", ", ": ")) + "\n" for row in _rows(schedule))


def _rows(schedule: Schedule) -> Iterator[dict[str, Any]]:
    columns = {
        name: column for name in _PER_REQUEST if (column := getattr(schedule, name)) is not None
    }
    for i in range(len(schedule)):
        row: dict[str, Any] = {
            "scheduled_s": round(float(schedule.scheduled_s[i]), 9),
            "input_tokens": int(schedule.input_tokens[i]),
            "output_tokens": int(schedule.output_tokens[i]),
        }
        if schedule.class_index is not None:
            row["class"] = schedule.class_names[schedule.class_index[i]]
        if model := schedule.model_name(i):
            row["model"] = model
        for name, column in columns.items():
            value = column[i].item()
            if value == value and value != _PER_REQUEST[name][1]:
                row[name] = value
        if schedule.shared is not None:
            row["shared"] = schedule.shared.of(i)
        if schedule.after is not None and schedule.after_start is not None:
            row["after"] = schedule.after[
                schedule.after_start[i] : schedule.after_start[i + 1]
            ].tolist()
        yield row


def is_schedule(path: Path) -> bool:
    """Whether a file of lines is such a schedule. Raises WorkloadError where it cannot be read."""
    if (
        path.name.lower().removesuffix(".gz").endswith((".json", ".parquet", ".log"))
    ):  # read as a whole, or no lines
        return False
    with open_records(path) as records:
        return any(name.strip().lower() == "scheduled_s" for name in records.names)


def workload_of(path: Path) -> Workload | None:
    """The workload whose classes and sessions a schedule has; None: it names none, or is no schedule."""
    head = _head(path)
    return workload_from_text(str(head[_HEAD]), f"{path}:1") if _HEAD in head else None


def _head(path: Path) -> Mapping[str, Any]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            line = file.readline(64 * 2**20)
        found = json.loads(line) if line.startswith(b'{"' + _HEAD.encode()) else {}
    except (OSError, EOFError, ValueError):  # said when its rows are read
        return {}
    return found if isinstance(found, dict) else {}


def read_schedule(path: Path, *, time_scale: float = 1.0, first_request_id: int = 0) -> Replayed:
    """The schedule that ``write_schedule`` wrote. Raises WorkloadError with one line."""
    trace, workload = read_trace(path), workload_of(path)
    held: dict[str, list[Any]] = {name: [] for name in _PER_REQUEST}
    shared: list[list[tuple[int, int]]] = []
    after: list[list[int]] = []
    classes: list[str] = []
    models: list[str] = []
    unused: Counter[str] = Counter()
    with open_records(path) as records:
        for line, row in records.rows:
            where = f"{path}:{line}"
            if isinstance(row, BadRow):
                raise WorkloadError(f"{where}: {row.reason}")
            for name, (kind, missing) in _PER_REQUEST.items():
                held[name].append(_number(row.get(name), kind, missing, f"{where}: column {name}"))
            shared.append(_segments(row.get("shared"), where))
            after.append(_waited_for(row.get("after"), len(after), where))
            classes.append(str(row.get("class", "default")))
            models.append(str(row.get("model") or ""))
            unused.update(name for name in row if name.strip().lower() not in _KNOWN)
    assert trace.place is not None
    if np.any(np.diff(trace.place) < 0) or len(shared) != len(trace):
        raise WorkloadError(f"{path}: the requests are not in the order of their times")
    if trace.arrival_s[0] < 0:
        raise WorkloadError(
            f"{path}: a request is scheduled at {trace.arrival_s[0]:g} s, before the stage begins"
        )
    columns: dict[str, Any] = {
        name: np.array(held[name], dtype=kind)
        for name, (kind, missing) in _PER_REQUEST.items()
        if any(value == value and value != missing for value in held[name])
    }
    columns |= _named(
        path, "class", classes, [kind.name for kind in workload.kinds] if workload else ["default"]
    )
    columns |= _named(path, "model", models, ["", *dict.fromkeys(filter(None, models))])
    if any(shared):
        start, ids, tokens = _lists(shared, 2)
        columns["shared"] = SharedPrefixes(start, ids, tokens)
    if any(after):
        columns["after_start"], columns["after"] = _lists(after, 1)
        for name in ("session", "turn", "think_s"):
            kind, missing = _PER_REQUEST[name]
            columns.setdefault(name, np.full(len(after), missing, dtype=kind))
    if "continues" in columns:
        columns.setdefault("new_tokens", trace.input_tokens)
    try:
        schedule = Schedule(
            trace.arrival_s / time_scale,
            trace.input_tokens,
            trace.output_tokens,
            first_request_id,
            **columns,
        )
    except ValueError as error:
        raise WorkloadError(f"{path}: {error}") from None
    if schedule.shared is not None and (schedule.shared.totals() > trace.input_tokens).any():
        raise WorkloadError(
            f"{path}: column shared: a request shares more tokens than its prompt has"
        )
    prompts = [
        text
        for text, there in (
            ("conversations that grow", schedule.continues),
            ("shared prefixes as in the schedule", schedule.shared),
        )
        if there is not None
    ]
    left_out = _head(path).get(_HEADERS) or []
    notes = (
        [
            f"{path.name}: the values of {', '.join(map(str, left_out))} are not in a schedule: give --header"
        ]
        if left_out
        else []
    )
    if unused:
        named = ", ".join(
            f"{mended(name)} (of {count} rows)" for name, count in unused.most_common(_SHOWN)
        )
        more = f" and {len(unused) - _SHOWN} more" if len(unused) > _SHOWN else ""
        notes.append(f"{path.name}: columns that are not used: {named}{more}")
    if time_scale != 1:
        span_s = float(trace.arrival_s[-1])
        notes.append(
            f"{path.name}: arrivals are played {time_scale:g} times as fast as written (--time-scale): those over "
            f"{span_s:.6g} s come within {span_s / time_scale:.6g} s"
        )
    return Replayed(schedule, trace.source, (*trace.notes, *notes), ", ".join(prompts) or "unique")


def _number(value: object, kind: Any, missing: Any, where: str) -> Any:
    """The value of a row, a finite number that is whole where the column is, or what stands for none."""
    if value is None:
        return missing
    try:
        found = int(str(value)) if kind is not np.float64 else float(str(value))
        if abs(found) < (2**31 if kind is np.int32 else 2**63):
            return found
    except ValueError:
        pass
    raise WorkloadError(f"{where}: give {'numbers' if kind is np.float64 else 'whole numbers'}")


def _waited_for(value: object, here: int, where: str) -> list[int]:
    """The earlier requests of a row's ``after``."""
    found = [] if value is None else value
    if not isinstance(found, list) or not all(isinstance(k, int) and 0 <= k < here for k in found):
        raise WorkloadError(
            f"{where}: column after: write the numbers of earlier requests, as [0, 1]"
        )
    return found


def _named(path: Path, what: str, of: list[str], known: list[str]) -> dict[str, Any]:
    """The index column of names, where there is more than the first one."""
    if unknown := sorted(set(of) - set(known)):
        raise WorkloadError(
            f"{path}: {what} {unknown[0]!r} is not described in the first line of the schedule: let 'ampacity workload sample' "
            "write it, or run the workload itself, with --workload"
        )
    if what == "model":
        index = np.array([known.index(name) - 1 for name in of], dtype=np.int16)
        return {"model_names": tuple(known[1:]), "model_index": index} if len(known) > 1 else {}
    index = np.array([known.index(name) for name in of], dtype=np.int16)
    return {"class_names": tuple(known), "class_index": index} if known != ["default"] else {}


def _lists(held: list[list[Any]], width: int) -> tuple[NDArray[np.int64], ...]:
    """Lists of numbers, or of pairs, laid end to end: their starts, and a column for each part."""
    start = np.concatenate([[0], np.cumsum([len(items) for items in held])]).astype(np.int64)
    flat = np.array([item for items in held for item in items], dtype=np.int64).reshape(-1, width)
    return start, *(flat[:, k] for k in range(width))


def _segments(held: object, where: str) -> list[tuple[int, int]]:
    pairs = held if isinstance(held, list) else []
    if not all(
        isinstance(p, list) and len(p) == 2 and all(isinstance(n, int) and n >= 0 for n in p)
        for p in pairs
    ):
        raise WorkloadError(f"{where}: column shared: write it as [[id, tokens], ...]")
    return [(p[0], p[1]) for p in pairs]
