"""Define a stage: its plan, limits, counters and result."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal, Protocol

import numpy as np

from ampacity.loadgen.audit import Measures
from ampacity.loadgen.rundir.records import FAILED_STATUSES, RequestRecord
from ampacity.loadgen.send.history import AnswerContent
from ampacity.workloads.schedule import Schedule

LIVE_TTFTS = 400  # first tokens that the live percentiles rest on
LIVE_TIMES = ("ttft", "e2e", "itl", "client_lag")  # the first two from the schedule
LIVE_BOUNDS_S = tuple(m * 10.0**e for e in range(-4, 3) for m in (1, 2, 5))[:-1]  # 100 µs to 200 s
RETRIED_HTTP = (429, 502, 503, 504)
RETRY_PAUSE_S = 0.5  # doubled with each attempt, where the server names no Retry-After
RETRY_PAUSE_MAX_S = 60.0


class Requests(Protocol):
    """Builds the requests of a schedule."""

    def prepare(self, schedule: Schedule) -> None:
        """Set the schedule of the next requests."""

    def make(self, index: int, target: int) -> bytes:
        """Return a whole request for endpoint ``target``."""

    def wanted(self, index: int) -> bool:
        """Return whether a later request repeats the text of the answer."""

    def answered(self, index: int, told: AnswerContent) -> None:
        """Take the answer of a request, if its text was wanted."""


@dataclass(frozen=True)
class StagePlan:
    """One load level. ``offered_rps`` of an open stage, ``concurrency`` of a closed one."""

    index: int
    kind: Literal["open", "closed"]
    schedule: Schedule
    duration_s: float  # the ramp included
    offered_rps: float | None = None
    concurrency: int | None = None
    used_up: str = "the schedule is used up"  # closed loop: why it ends without requests left
    think_s: float = 0.0  # closed loop: pause between an answer and the user's next request
    ramp_s: float = 0.0  # closed loop: time over which the virtual users start
    users_begin_s: Sequence[float] | None = None  # closed loop: of a worker's share of a stage
    drain_s: float = 30.0  # time to wait for answers after the last deadline
    answering_s: float = 0.0  # extra time for answers that have begun, if most have
    finish_s: float = 60.0  # time after the end in which sessions are continued
    whole: bool = False  # a replay: the stage lasts until the whole schedule is sent
    end_on_failure: bool = True  # a failed turn ends its session
    keep_reasoning: bool = False  # in the histories of sessions
    sticky: bool = False  # with several targets: a session stays with one of them

    def starts_s(self) -> Sequence[float]:
        """Return when each virtual user starts, s from the start of the stage, ascending."""
        if self.users_begin_s is not None:
            return self.users_begin_s
        return user_starts(self.concurrency or 0, self.ramp_s, self.think_s)

    def meta(self, start_ns: int) -> dict[str, Any]:
        """Return the stage's object in run.json as known at its start."""
        known = {
            "index": self.index,
            "kind": self.kind,
            "offered_rps": self.offered_rps,
            "concurrency": self.concurrency,
            "start_ns": start_ns,
            "end_ns": start_ns + int(self.duration_s * 1e9),
        }
        return known | ({"ramp_s": self.ramp_s} if self.ramp_s else {})


def user_starts(users: int, ramp_s: float, think_s: float) -> list[float]:
    """Return when each user starts, s: evenly over the ramp, or else over one think time."""
    return [(ramp_s or think_s) * user / users for user in range(users)]


@dataclass(frozen=True)
class Limits:
    """The client's own time limits. None: no limit."""

    total_s: float | None = None
    idle_s: float | None = 120.0  # without a single byte from the server
    in_flight: int | None = None  # requests beyond it are shed: recorded, never sent
    retries: int = 0  # attempts after 429, 502-504, connect_error or reset; each is a record

    def gives_up(self, began_ns: int, last_read_ns: int | None) -> tuple[float, str]:
        """Return when a silent request times out (monotonic ns; inf: never), and why."""
        total_s, idle_s = self.total_s or inf, self.idle_s or inf
        return min(
            (began_ns + total_s * 1e9, f"no complete answer within {total_s:g} s"),
            ((last_read_ns or began_ns) + idle_s * 1e9, f"nothing received for {idle_s:g} s"),
        )

    def retry_pause_s(self, failed: RequestRecord) -> float | None:
        """Return the pause before the next attempt; None: no further attempt."""
        passing = failed.status in ("connect_error", "reset") or failed.http_status in RETRIED_HTTP
        if not passing or failed.attempt >= self.retries:
            return None
        pause_s = failed.retry_after_s
        if pause_s is None:
            pause_s = RETRY_PAUSE_S * 2**failed.attempt
        return min(max(pause_s, 0.0), RETRY_PAUSE_MAX_S)


class LiveTimes:
    """Histograms of the times of finished requests: counts of LIVE_TIMES by LIVE_BOUNDS_S.

    A failed request is beyond every bound; one that its user or the end of the run cut off is left
    out. A chunk of k tokens that came g after the last one is k samples of g / k.
    """

    def __init__(self) -> None:
        self.counts = np.zeros((len(LIVE_TIMES), len(LIVE_BOUNDS_S) + 1), dtype=np.int64)
        self.sums_s = np.zeros(len(LIVE_TIMES))

    def add(self, record: RequestRecord) -> None:
        """Count a request that has ended; takes about 15 µs."""
        due_ns = record.scheduled_ns
        if record.status == "ok":
            self._one(0, record.first_token_ns, due_ns)
            self._one(1, record.last_token_ns or record.ended_ns, due_ns)
            self._gaps(record)
        elif record.status in FAILED_STATUSES:
            self.counts[:2, -1] += 1
        self._one(3, record.dispatched_ns, due_ns)

    def merge(self, other: LiveTimes) -> None:
        """Add the counts of another process or stage."""
        self.counts += other.counts
        self.sums_s += other.sums_s

    def _one(self, row: int, at_ns: int | None, since_ns: int) -> None:
        if at_ns is not None:
            value_s = (at_ns - since_ns) / 1e9
            self.counts[row, bisect_left(LIVE_BOUNDS_S, value_s)] += 1
            self.sums_s[row] += value_s

    def _gaps(self, record: RequestRecord) -> None:
        at_us, tokens = np.asarray(record.chunk_at_us, dtype=np.int64), None
        if record.chunk_tokens is not None:
            tokens = np.asarray(record.chunk_tokens)
            kept = tokens > 0
            kept[:1] = True
            at_us, tokens = at_us[kept], tokens[kept][1:]
        gaps_s = np.diff(at_us) / 1e6
        self.sums_s[2] += gaps_s.sum()
        each_s = gaps_s if tokens is None else gaps_s / tokens
        buckets = np.searchsorted(LIVE_BOUNDS_S, each_s)
        self.counts[2] += np.bincount(buckets, tokens, len(LIVE_BOUNDS_S) + 1).astype(np.int64)


@dataclass
class Live:
    """Counters of the current stage, for the progress line and the live exporters."""

    stage: int = 0
    kind: str = "open"
    level: float = 0.0  # offered requests/s, or the set concurrency
    began_s: float = 0.0
    duration_s: float = 0.0
    released: int = 0
    ended: int = 0
    failed: int = 0
    tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)  # of the requests that have ended
    times: LiveTimes | None = None  # only where an exporter shows them

    @classmethod
    def of(cls, plan: StagePlan, began_s: float, *, timed: bool = False) -> Live:
        """Return the counters of a stage that begins now."""
        level = plan.offered_rps if plan.kind == "open" else plan.concurrency
        live = cls(plan.index, plan.kind, float(level or 0), began_s, plan.duration_s)
        live.times = LiveTimes() if timed else None
        return live

    def merge(self, other: Live) -> None:
        """Add the counters of another process or stage."""
        self.released += other.released
        self.ended += other.ended
        self.failed += other.failed
        self.tokens += other.tokens
        self.ttft_s += other.ttft_s
        self.statuses += other.statuses
        if other.times is not None:
            self.times = self.times or LiveTimes()
            self.times.merge(other.times)

    def count(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        self.ended += 1
        self.tokens += record.output_tokens or 0
        self.failed += record.status in FAILED_STATUSES
        self.statuses[record.status] += 1
        if self.times is not None:
            self.times.add(record)
        if record.first_token_ns is not None:
            self.ttft_s.append((record.first_token_ns - record.scheduled_ns) / 1e9)

    @property
    def in_flight(self) -> int:
        """Return the number of requests released and not ended."""
        return self.released - self.ended


@dataclass(frozen=True)
class StageResult:
    """``meta``: the stage's object in run.json without its audit, which ``measures`` gives.

    ``ids_used``: number of request ids used, from the schedule's first.
    """

    meta: dict[str, Any]
    measures: Measures
    ids_used: int


def record_of(plan: StagePlan, index: int, scheduled_ns: int) -> RequestRecord:
    """Return the record of a scheduled request before it is sent."""
    schedule = plan.schedule
    session = -1 if schedule.session is None else int(schedule.session[index])
    return RequestRecord(
        request_id=schedule.request_id(index),
        stage=plan.index,
        scheduled_ns=scheduled_ns,
        status="unfinished",
        class_=schedule.class_name(index),
        session_id=f"{plan.index}-{session}" if session >= 0 else None,
        turn=int(schedule.turn[index]) if session >= 0 and schedule.turn is not None else None,
        input_tokens_planned=int(schedule.input_tokens[index]),
        output_tokens_planned=int(schedule.output_tokens[index]),
    )
