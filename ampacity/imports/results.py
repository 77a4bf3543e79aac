"""The common form of an imported file, and readers for its fields."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_LARGEST = 4e9  # seconds since 1970 until 2096
# differences of definition that all tools share: (what, theirs, ours)
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
FAILURE_ENDS = "When a failed request ended is not in the file: it is taken to end as it starts"


class ImportedFileError(ValueError):
    """A file that is no result of a known tool, or a damaged one; one line."""


@dataclass(frozen=True)
class Request:
    """One request, in seconds. ``scheduled_s`` and ``started_s`` share any origin."""

    started_s: float
    status: str  # one of ampacity.loadgen.rundir.records.STATUSES
    scheduled_s: float | None = None  # None: not in the file
    slip_known: bool = False  # scheduled_s is the schedule: the rest is the client's lateness
    ttft_s: float | None = None
    e2e_s: float | None = None  # to the last token
    ended_s: float | None = None  # duration of the request, where it differs from e2e_s
    gaps_s: Sequence[float] | None = None  # between chunks; None: not in the file
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
    definitions: Sequence[tuple[str, str, str]]  # in addition to those above
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
    """An object of a file, and its place for messages. Every reader raises ImportedFileError."""

    held: Mapping[str, Any]
    where: str

    def error(self, name: str, wanted: str) -> ImportedFileError:
        return ImportedFileError(
            f"{self.where}{name} is {self.held.get(name)!r:.60}, not {wanted}: "
            "the file is damaged or of another version"
        )

    def number(self, name: str) -> float | None:
        """Return a finite number of at least 0, or None where it is null or absent."""
        value = self.held.get(name)
        if value is not None and not _is_number(value):
            raise self.error(name, "a number of 0 or more")
        return None if value is None else float(value)

    def needed(self, name: str) -> float:
        """Return a finite number of at least 0."""
        value = self.number(name)
        if value is None:
            raise self.error(name, "a number of 0 or more")
        return value

    def tokens(self, name: str) -> int | None:
        """Return a whole number that fits 31 bits; a float is rounded."""
        value = self.number(name)
        if value is not None and value >= 2**31:
            raise self.error(name, "a count of tokens")
        return None if value is None else round(value)

    def text(self, name: str) -> str | None:
        value = self.held.get(name)
        return str(value) if isinstance(value, str | int | float) and value != "" else None

    def object(self, name: str) -> Fields:
        """Return an inner object; an absent one is empty."""
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
                f"{self.where}{name} has {len(value)} entries, {length} are due: "
                "the file is damaged"
            )
        return value

    def objects(self, name: str) -> list[Fields]:
        found = self.array(name)
        if not all(isinstance(item, Mapping) for item in found):
            raise self.error(name, "a list of objects")
        return [Fields(item, f"{self.where}{name}[{i}].") for i, item in enumerate(found)]

    def seconds(self, name: str, length: int | None = None) -> list[float]:
        return seconds(self.array(name, length), f"{self.where}{name}")

    def request_rate(self) -> float | None:
        """Return requests per second; None: unlimited, or by the times of a trace."""
        value = self.held.get("request_rate")
        if value in ("inf", "trace", None) or value == math.inf:
            return None
        rate = self.needed("request_rate")
        if rate <= 0:
            raise self.error("request_rate", "above 0")
        return rate


def _is_number(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value <= _LARGEST  # type: ignore[operator]


def seconds(values: object, where: str) -> list[float]:
    """Return a list of durations, finite and at least 0. Raises ImportedFileError."""
    if not isinstance(values, list) or not all(map(_is_number, values)):
        raise ImportedFileError(f"{where} is no list of durations: the file is damaged")
    return [float(v) for v in values]


class Lists(NamedTuple):
    """The parallel lists over the requests of vLLM's and SGLang's files."""

    ttfts: list[float]
    gaps: list[list[float]]
    errors: list[Any]
    rows: list[Fields]  # input, output and cached tokens


def read_lists(run: Fields, length: int | None = None) -> Lists:
    """Read the parallel lists of a run. Raises ImportedFileError."""
    ttfts = run.seconds("ttfts", length)
    n = len(ttfts)
    gaps = [seconds(g, f"{run.where}itls[{i}]") for i, g in enumerate(run.array("itls", n))]
    errors, inputs, outputs = (run.array(c, n) for c in ("errors", "input_lens", "output_lens"))
    cached = run.array("cached_tokens", n) if "cached_tokens" in run.held else [None] * n
    rows = [
        Fields({"input": a, "output": b, "cached": c}, f"{run.where}request {i}: ")
        for i, (a, b, c) in enumerate(zip(inputs, outputs, cached, strict=True))
    ]
    return Lists(ttfts, gaps, errors, rows)


def starts_of_users(durations_s: Sequence[float], users: int) -> list[float]:
    """Return the starts of requests in order, each as soon as one of ``users`` is free."""
    free, starts = [0.0] * min(users, len(durations_s)), []
    for lasts in durations_s:
        starts.append(heapq.heappop(free))
        heapq.heappush(free, starts[-1] + lasts)
    return starts


def layout_note(tool: str, how: str, rps: float, duration_s: float | None) -> str:
    """Return the note for a file without start times."""
    return (
        f"When a request began is not in the file: they are laid out in its order, {how}. "
        "Percentiles are as measured; rates, steady state, drift and requests in flight are only "
        f"as good as that. What {tool} measured over all: {rps:.4g} requests/s in "
        f"{duration_s or 0:.4g} s"
    )


def mean(values: Sequence[float]) -> float:
    """Return the mean, NaN of an empty sequence."""
    return math.fsum(values) / len(values) if values else math.nan


def agree(reported: Fields, **listed: float) -> None:
    """Raise ImportedFileError where a reported total differs from that of the listed requests."""
    for name, value in listed.items():
        figure = reported.number(name)
        if figure is not None and abs(value - figure) > 1e-6 * figure:
            raise ImportedFileError(
                f"{reported.where}{name} is {figure:.6g}, but {value:.6g} by the single requests: "
                "the file contradicts itself"
            )


_SIGNS = (
    ("timeout", ("timeout", "timed out")),
    ("connect_error", ("connect", "resolve host", "name or service")),
    ("empty", ("never received a", "no content", "empty response")),
    ("truncated", ("without a terminal", "incomplete", "payload is not completed")),
    ("reset", ("reset", "disconnected", "broken pipe", "traceback", "closed")),
)


def failure_status(text: str, code: int | None = None) -> str:
    """Return the status of a failure, guessed from the error text without an HTTP status."""
    lowered = text.lower()
    if code is None or not 400 <= code <= 599 or code == 499:
        for status, signs in _SIGNS:
            if any(sign in lowered for sign in signs):
                return status
    return "http_error"
