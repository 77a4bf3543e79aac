"""What a file of another tool holds, whichever tool wrote it, and how its fields are read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_LARGEST = 4e9  # seconds since 1970 until 2096
# differences of definition that all four tools share: (what, theirs, ours)
CONNECTING = (
    "TTFT begins",
    "when the client calls its HTTP library: waiting for a connection and connecting are inside",
    "when the first byte is handed to a connected socket",
)
FAILURES_LEFT_OUT = (
    "Failed requests",
    "left out of every percentile",
    "infinitely slow in every percentile: the run directory keeps them as failed",
)


class ImportedFileError(ValueError):
    """A file that is no result of a known tool, or a damaged one; one line."""


@dataclass(frozen=True)
class Request:
    """One request; seconds. ``scheduled_s`` and ``started_s`` count from any common moment."""

    started_s: float
    status: str  # one of ampacity.loadgen.rundir.records.STATUSES
    scheduled_s: float | None = None  # None: the file does not say
    slip_known: bool = (
        False  # scheduled_s is the schedule: started - scheduled is the client's lateness
    )
    ttft_s: float | None = None
    e2e_s: float | None = None  # to the last token
    ended_s: float | None = None  # how long until the request ended, where that is another moment
    gaps_s: Sequence[float] | None = (
        None  # between chunks, the first one excepted; None: not in the file
    )
    input_tokens: int | None = None
    output_tokens: int | None = None
    reasoning_tokens: int | None = None
    cached_tokens: int | None = None
    token_source: str | None = None
    http_status: int | None = None
    error: str | None = None


@dataclass(frozen=True)
class Stage:
    """One load level, with the requests in the order of the file."""

    requests: Sequence[Request]
    offered_rps: float | None = None  # None in a closed loop
    concurrency: int | None = None  # None in an open loop
    duration_s: float | None = None  # by the file's own clock


@dataclass(frozen=True)
class Result:
    """One file. ``missing``: column of requests.parquet -> why it is null."""

    tool: str
    stages: Sequence[Stage]
    definitions: Sequence[tuple[str, str, str]]  # beside those above
    missing: Mapping[str, str]
    version: str | None = None
    model: str | None = None
    url: str | None = None
    api: str | None = None
    started_utc: str | None = None
    workload: str | None = None
    arrivals: str | None = None
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Fields:
    """An object of a file, with the place that messages name."""

    held: Mapping[str, Any]
    where: str

    def error(self, name: str, wanted: str) -> ImportedFileError:
        return ImportedFileError(
            f"{self.where}{name} is {self.held.get(name)!r:.60}, not {wanted}: the file is damaged or of another version"
        )

    def number(self, name: str) -> float | None:
        """A finite number of at least 0, or None where it is null or absent. Raises ImportedFileError."""
        value = self.held.get(name)
        if value is None:
            return None
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 <= value <= _LARGEST
        ):
            raise self.error(name, "a number of 0 or more")
        return float(value)

    def needed(self, name: str) -> float:
        value = self.number(name)
        if value is None:
            raise self.error(name, "a number of 0 or more")
        return value

    def tokens(self, name: str) -> int | None:
        """A whole number that fits 31 bits; a float is rounded."""
        value = self.number(name)
        if value is not None and value >= 2**31:
            raise self.error(name, "a count of tokens")
        return None if value is None else round(value)

    def text(self, name: str) -> str | None:
        value = self.held.get(name)
        return str(value) if isinstance(value, str | int | float) and value != "" else None

    def object(self, name: str) -> Fields:
        """An object inside; an absent one is empty."""
        value = self.held.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.error(name, "an object")
        return Fields(value or {}, f"{self.where}{name}.")

    def array(self, name: str, length: int | None = None) -> list[Any]:
        value = self.held.get(name)
        if not isinstance(value, list):
            raise self.error(name, "a list")
        if length is not None and len(value) != length:
            raise ImportedFileError(
                f"{self.where}{name} has {len(value)} entries, {length} are due: the file is damaged"
            )
        return value

    def objects(self, name: str) -> list[Fields]:
        found = self.array(name)
        if not all(isinstance(item, Mapping) for item in found):
            raise self.error(name, "a list of objects")
        return [Fields(item, f"{self.where}{name}[{i}].") for i, item in enumerate(found)]


def seconds(values: Sequence[Any], where: str) -> list[float]:
    """A list of durations, finite and at least 0. Raises ImportedFileError."""
    if not isinstance(values, list) or not all(
        isinstance(v, int | float)
        and not isinstance(v, bool)
        and math.isfinite(v)
        and 0 <= v <= _LARGEST
        for v in values
    ):
        raise ImportedFileError(f"{where} is no list of durations: the file is damaged")
    return [float(v) for v in values]


def mean(values: Sequence[float]) -> float:
    """NaN of none."""
    return math.fsum(values) / len(values) if values else math.nan


def agree(told: Fields, **listed: float) -> None:
    """Raises ImportedFileError where a figure that the file tells of all requests is not that of those in it."""
    for name, value in listed.items():
        figure = told.number(name)
        if figure is not None and abs(value - figure) > 1e-6 * figure:
            raise ImportedFileError(
                f"{told.where}{name} is {figure:.6g}, but {value:.6g} by the single requests: the file contradicts itself"
            )


def failure_status(text: str, code: int | None = None) -> str:
    """The status of a failure from what another tool wrote of it; a guess where there is no HTTP status."""
    lowered = text.lower()
    if code is not None and 400 <= code <= 599 and code != 499:
        return "http_error"
    for status, signs in (
        ("timeout", ("timeout", "timed out")),
        ("connect_error", ("connect", "resolve host", "name or service")),
        ("empty", ("never received a", "no content", "empty response")),
        ("truncated", ("without a terminal", "incomplete", "payload is not completed")),
        ("reset", ("reset", "disconnected", "broken pipe", "traceback", "closed")),
    ):
        if any(sign in lowered for sign in signs):
            return status
    return "http_error"
