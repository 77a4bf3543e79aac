"""The common form of an imported file."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
