"""Write a schedule as JSON lines, one request each, and read it back."""

import gzip
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from ampacity.files import open_file
from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.profile import Workload, workload_from_text
from ampacity.workloads.prompts.prefixes import SharedPrefixes
from ampacity.workloads.replay import Replayed
from ampacity.workloads.text import mended
from ampacity.workloads.timetable import Schedule
from ampacity.workloads.traces.formats import open_records
from ampacity.workloads.traces.read import read_trace
from ampacity.workloads.traces.trace import Trace
from ampacity.workloads.traces.values import BadRow

# Optional columns: their type, and the default that is not written.
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
    {"scheduled_s", "input_tokens", "output_tokens", "class", "model", "shared", "after"}
).union(_PER_REQUEST)
_SHOWN = 12
_HEAD = "schedule_of"  # key of the first line: the workload, as the text of its YAML file
_HEADERS = "headers_left_out"


def write_schedule(
    file: TextIO, schedule: Schedule, workload: tuple[str, list[str]] | None = None
) -> None:
    """Write one line a request: ``scheduled_s`` (to the nanosecond), lengths, and other columns.

    ``shared`` lists (id, tokens) of the segments that its prompt begins with, ``after`` the
    requests (by number from 0) whose answers it waits for. ``workload`` (``workload_text``) is
    written in a first line where requests have classes or sessions, whose rules it holds.
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
            begin, end = schedule.after_start[i : i + 2]
            row["after"] = schedule.after[begin:end].tolist()
        yield row


def is_schedule(path: Path) -> bool:
    """Return whether a file of lines is such a schedule. Raises WorkloadError if unreadable."""
    stem = path.name.lower().removesuffix(".gz")
    if stem.endswith((".json", ".parquet", ".log")):  # documents, or no lines
        return False
    with open_records(path) as records:
        return any(name.strip().lower() == "scheduled_s" for name in records.names)


def workload_of(path: Path) -> Workload | None:
    """Return the workload whose classes and sessions a schedule has; None: it has no such line."""
    head = _head(path)
    return workload_from_text(str(head[_HEAD]), f"{path}:1") if _HEAD in head else None


def _head(path: Path) -> Mapping[str, Any]:
    try:
        with open_file(path) as plain:
            file: Any = gzip.GzipFile(fileobj=plain) if path.suffix == ".gz" else plain
            line = file.readline(64 * 2**20)
        found = json.loads(line) if line.startswith(b'{"' + _HEAD.encode()) else {}
    except (OSError, EOFError, ValueError):  # reported when the rows are read
        return {}
    return found if isinstance(found, dict) else {}


@dataclass
class _Rows:
    """The columns of a schedule file beside times and lengths."""

    path: Path
    held: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in _PER_REQUEST})
    shared: list[list[tuple[int, int]]] = field(default_factory=list)
    after: list[list[int]] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    models: list[str] = field(default_factory=list)
    unused: Counter[str] = field(default_factory=Counter)

    def add(self, line: int, row: Mapping[str, Any] | BadRow) -> None:
        where = f"{self.path}:{line}"
        if isinstance(row, BadRow):
            raise WorkloadError(f"{where}: {row.reason}")
        row = {name.strip().lower(): value for name, value in row.items()}
        for name, (kind, missing) in _PER_REQUEST.items():
            self.held[name].append(_number(row.get(name), kind, missing, f"{where}: column {name}"))
        self.shared.append(_segments(row.get("shared"), where))
        self.after.append(_waited_for(row.get("after"), len(self.after), where))
        self.classes.append(str(row.get("class", "default")))
        self.models.append(str(row.get("model") or ""))
        self.unused.update(name for name in row if name not in _KNOWN)

    def schedule(self, workload: Workload | None, trace: Trace, time_scale: float) -> Schedule:
        """Return the schedule. Raises WorkloadError."""
        found = {
            name: np.array(self.held[name], dtype=kind)
            for name, (kind, missing) in _PER_REQUEST.items()
            if any(value == value and value != missing for value in self.held[name])
        }
        kinds = [kind.name for kind in workload.kinds] if workload else ["default"]
        models = ["", *dict.fromkeys(filter(None, self.models))]
        class_of, model_of = self._named("class", kinds), self._named("model", models)
        starts, ids, tokens = _lists(self.shared, 2)
        after_start, after = _lists(self.after, 1)
        waits = any(self.after)
        if waits:
            for name in ("session", "turn", "think_s"):
                kind, missing = _PER_REQUEST[name]
                found.setdefault(name, np.full(len(self.after), missing, dtype=kind))
        if "continues" in found:
            found.setdefault("new_tokens", trace.input_tokens)
        column = found.get
        return Schedule(
            trace.arrival_s / time_scale,
            trace.input_tokens,
            trace.output_tokens,
            class_names=tuple(kinds),
            class_index=None if kinds == ["default"] else class_of,
            model_names=tuple(models[1:]),
            model_index=None if len(models) == 1 else model_of - np.int16(1),
            cancel_after_s=column("cancel_after_s"),
            cancel_after_tokens=column("cancel_after_tokens"),
            session=column("session"),
            turn=column("turn"),
            think_s=column("think_s"),
            after_start=after_start if waits else None,
            after=after if waits else None,
            continues=column("continues"),
            new_tokens=column("new_tokens"),
            shared=SharedPrefixes(starts, ids, tokens) if any(self.shared) else None,
        )

    def _named(self, what: str, known: list[str]) -> NDArray[np.int16]:
        """Return the index of each request's class or model among the known ones."""
        of = self.classes if what == "class" else self.models
        if unknown := sorted(set(of) - set(known)):
            raise WorkloadError(
                f"{what} {unknown[0]!r} is not described in the first line of the schedule: "
                "let 'ampacity workload sample' write it, or run the workload itself, "
                "with --workload"
            )
        return np.array([known.index(name) for name in of], dtype=np.int16)


def read_schedule(path: Path, *, time_scale: float = 1.0) -> Replayed:
    """Read the schedule that ``write_schedule`` wrote. Raises WorkloadError with one line."""
    trace, workload, rows = read_trace(path), workload_of(path), _Rows(path)
    with open_records(path) as records:
        for line, row in records.rows:
            rows.add(line, row)
    assert trace.place is not None
    if np.any(np.diff(trace.place) < 0) or len(rows.shared) != len(trace):
        raise WorkloadError(f"{path}: the requests are not in the order of their times")
    if trace.arrival_s[0] < 0:
        raise WorkloadError(
            f"{path}: a request is scheduled at {trace.arrival_s[0]:g} s, before the stage begins"
        )
    try:
        schedule = rows.schedule(workload, trace, time_scale)
    except ValueError as error:
        raise WorkloadError(f"{path}: {error}") from None
    if schedule.shared is not None and (schedule.shared.totals() > trace.input_tokens).any():
        raise WorkloadError(
            f"{path}: column shared: a request shares more tokens than its prompt has"
        )
    prompts = []
    if schedule.continues is not None:
        prompts.append("conversations that grow")
    if schedule.shared is not None:
        prompts.append("shared prefixes as in the schedule")
    notes = (*trace.notes, *_notes(path, trace, rows.unused, time_scale))
    return Replayed(schedule, trace.source, notes, ", ".join(prompts) or "unique")


def _notes(path: Path, trace: Trace, unused: Counter[str], time_scale: float) -> Iterator[str]:
    if left_out := _head(path).get(_HEADERS):
        names = ", ".join(map(str, left_out))
        yield f"{path.name}: the values of {names} are not in a schedule: give --header"
    if unused:
        shown = unused.most_common(_SHOWN)
        named = ", ".join(f"{mended(name)} (of {count} rows)" for name, count in shown)
        more = f" and {len(unused) - _SHOWN} more" if len(unused) > _SHOWN else ""
        yield f"{path.name}: columns that are not used: {named}{more}"
    if time_scale != 1:
        span_s = float(trace.arrival_s[-1])
        yield (
            f"{path.name}: arrivals are played {time_scale:g} times as fast as written "
            f"(--time-scale): those over {span_s:.6g} s come within {span_s / time_scale:.6g} s"
        )


def _number(value: object, kind: Any, missing: Any, where: str) -> Any:
    """Return a finite number of at least 0 (-1 where that means none), or ``missing`` for None.

    Whole where the column is.
    """
    if value is None:
        return missing
    least = -1 if missing == -1 else 0
    try:
        found = int(str(value)) if kind is not np.float64 else float(str(value))
        if least <= found < (2**31 if kind is np.int32 else 2**63):
            return found
    except ValueError:
        pass
    numbers = "numbers" if kind is np.float64 else "whole numbers"
    raise WorkloadError(f"{where}: give {numbers} of at least {least}")


def _waited_for(value: object, here: int, where: str) -> list[int]:
    found = [] if value is None else value
    if not isinstance(found, list) or not all(isinstance(k, int) and 0 <= k < here for k in found):
        raise WorkloadError(
            f"{where}: column after: write the numbers of earlier requests, as [0, 1]"
        )
    return found


def _lists(held: list[list[Any]], width: int) -> tuple[NDArray[np.int64], ...]:
    """Concatenate lists of numbers or pairs: return their starts, and a column for each part."""
    start = np.concatenate([[0], np.cumsum([len(items) for items in held])]).astype(np.int64)
    flat = np.array([item for items in held for item in items], dtype=np.int64).reshape(-1, width)
    return start, *(flat[:, k] for k in range(width))


def _segments(held: object, where: str) -> list[tuple[int, int]]:
    pairs: list[Any] = held if isinstance(held, list) else [] if held is None else [held]
    for pair in pairs:
        is_pair = isinstance(pair, list) and len(pair) == 2
        if not is_pair or not all(isinstance(n, int) and 0 <= n < 2**63 for n in pair):
            raise WorkloadError(f"{where}: column shared: write it as [[id, tokens], ...]")
    return [(p[0], p[1]) for p in pairs]
