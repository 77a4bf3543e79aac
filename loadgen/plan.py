"""Define a stage: its plan, limits, counters and result."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ampacity.loadgen.audit import Measures
from ampacity.loadgen.rundir.records import FAILED_STATUSES, RequestRecord, kind_of
from ampacity.loadgen.send.protocols import OVERLOAD
from ampacity.workloads.schedule import Schedule

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
LIVE_TIMES = ("ttft", "e2e", "itl", "client_lag", "tpot", "icl")  # the first two from the schedule
LIVE_BOUNDS_S = np.outer(10.0 ** np.arange(-4, 3), (1, 2, 5)).ravel()[:-1].round(4)  # to 200 s
PER_DOUBLING = 24  # fine buckets: each is 3 % wide
FINE = int(np.log2(LIVE_BOUNDS_S[-1] / LIVE_BOUNDS_S[0]) * PER_DOUBLING) + 1  # without the last
LIVE_BATCH = 32  # requests that are counted at once, which holds up the loop for 0.4 ms
MOSTLY_FAILED = "most of its requests failed"
FAILED_MIN = 20  # requests that have ended, before a share of them counts
RETRIED_HTTP = frozenset((408, 429, 500, 502, 503, 504, *range(520, 525), 529))
RETRY_PAUSE_S = 0.5  # doubled with each attempt, where the server names no Retry-After
RETRY_PAUSE_MAX_S = 60.0  # a request that is told to wait longer is not sent again
JITTER = 0.25  # a pause is longer by up to this share, so that refused requests do not come at once
TIMER_S = 0.002  # by which a timer of the event loop may be early


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
    ends_when_failing: bool = False  # once most of its requests have failed
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
    errors: float | None = None  # share of failed requests at which the run ends
    in_flight: int | None = None  # requests beyond it are shed: recorded, never sent
    retries: int = 0  # attempts after what may pass; each is a record

    def gives_up(self, began_ns: int, last_read_ns: int | None) -> tuple[float, str]:
        """Return when a silent request times out (monotonic ns; inf: never), and why."""
        total_s, idle_s = self.total_s or inf, self.idle_s or inf
        return min(
            (began_ns + total_s * 1e9, f"no complete answer within {total_s:g} s"),
            ((last_read_ns or began_ns) + idle_s * 1e9, f"nothing received for {idle_s:g} s"),
        )

    def retry_pause_s(self, failed: RequestRecord) -> float | None:
        """Return the pause before the next attempt; None: no further attempt.

        It is never shorter than what the refusal named; the error says where that is too long.
        """
        passing = failed.status in ("connect_error", "reset") or failed.http_status in RETRIED_HTTP
        overloaded = failed.status == "stream_error" and OVERLOAD.search(failed.error or "")
        if not (passing or overloaded) or failed.attempt >= self.retries:
            return None
        pause_s = failed.retry_after_s
        if pause_s is None:
            pause_s = min(RETRY_PAUSE_S * 2**failed.attempt, RETRY_PAUSE_MAX_S)
        if pause_s > RETRY_PAUSE_MAX_S:
            failed.error = f"{failed.error} (not sent again: it asks to wait {pause_s:,.0f} s)"
            return None
        return max(pause_s, 0.0) * random.uniform(1.0, 1.0 + JITTER) + TIMER_S


class LiveTimes:
    """Histograms of the times of finished requests, a row for each of LIVE_TIMES.

    ``counts``: by LIVE_BOUNDS_S; ``fine``: logarithmic, for percentiles to 2 %. Buckets are the
    same in every process, so that counts can be added. A failed request is beyond every bound; one
    that its user or the end of the run cut off is left out. ITL: a chunk of k tokens that came g
    after the last one is k samples of g / k; ICL: one of g.
    """

    def __init__(self) -> None:
        self.counts = np.zeros((len(LIVE_TIMES), len(LIVE_BOUNDS_S) + 1), dtype=np.int64)
        self.fine = np.zeros((len(LIVE_TIMES), FINE + 1), dtype=np.int64)
        self.sums_s = np.zeros(len(LIVE_TIMES))
        self._pending: list[RequestRecord] = []

    def add(self, record: RequestRecord) -> None:
        """Take a request that has ended; it is counted with the next LIVE_BATCH or ``flush``."""
        self._pending.append(record)
        if len(self._pending) >= LIVE_BATCH:
            self.flush()

    def flush(self) -> None:
        """Count the requests taken; only of the thread that takes them. Some 3 µs each."""
        records, self._pending = self._pending, []
        good = [r for r in records if r.status == "ok"]
        firsts = [r.first_token_ns - r.scheduled_ns for r in good if r.first_token_ns is not None]
        ends = [(r.last_token_ns or r.ended_ns or r.scheduled_ns) - r.scheduled_ns for r in good]
        lags = [r.dispatched_ns - r.scheduled_ns for r in records if r.dispatched_ns is not None]
        for row, values_ns in ((0, firsts), (1, ends), (3, lags)):
            self._count(row, np.array(values_ns) / 1e9)
        for counts in (self.counts, self.fine):
            counts[:2, -1] += sum(r.status in FAILED_STATUSES for r in records)
        if streamed := [r for r in good if len(r.chunk_at_us)]:
            self._count_gaps(streamed)
            spans = [r.chunk_at_us[-1] - r.chunk_at_us[0] for r in streamed]
            later = np.array(
                [
                    len(r.chunk_at_us) - 1 if r.chunk_tokens is None else sum(r.chunk_tokens[1:])
                    for r in streamed
                ]
            )
            self._count(4, np.array(spans)[later > 0] / (1e6 * later[later > 0]))

    def merge(self, other: LiveTimes) -> None:
        """Add the counts of another process or stage."""
        self.counts += other.counts
        self.fine += other.fine
        self.sums_s += other.sums_s

    def _count_gaps(self, records: Sequence[RequestRecord]) -> None:
        at_us = np.concatenate([np.asarray(r.chunk_at_us, dtype=np.int64) for r in records])
        sizes = np.array([len(r.chunk_at_us) for r in records])
        first = np.zeros(len(at_us), dtype=np.bool_)
        first[np.cumsum(sizes) - sizes] = True
        ones = np.ones(sizes.max(), dtype=np.int64)
        tokens = np.concatenate(
            [
                ones[: len(r.chunk_at_us)] if r.chunk_tokens is None else np.asarray(r.chunk_tokens)
                for r in records
            ]
        )
        kept = first | (tokens > 0)
        at_us, first, tokens = at_us[kept], first[kept], tokens[kept]
        gaps_us, each = np.diff(at_us)[~first[1:]], tokens[~first]
        self._count(2, gaps_us / (1e6 * each), each)
        self._count(5, gaps_us / 1e6)

    def bucket_s(self, index: int) -> float:
        """Return the middle of a fine bucket; infinite where it is beyond every bound."""
        middle_s = LIVE_BOUNDS_S[0] * 2 ** ((index + 0.5) / PER_DOUBLING)
        return inf if index >= FINE else float(middle_s)

    def _count(self, row: int, values_s: Floats, times: Ints | None = None) -> None:
        doublings = np.log2(np.maximum(values_s / LIVE_BOUNDS_S[0], 1.0))
        fine = np.minimum((doublings * PER_DOUBLING).astype(np.int64), FINE)
        for counts, buckets in (
            (self.counts, np.searchsorted(LIVE_BOUNDS_S, values_s)),
            (self.fine, fine),
        ):
            counts[row] += np.bincount(buckets, times, counts.shape[1]).astype(np.int64)
        self.sums_s[row] += values_s.sum() if times is None else values_s @ times


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
    tokens: int = 0
    kinds: Counter[str] = field(default_factory=Counter)  # how every attempt ended
    judged: int = 0  # requests that have ended; the first attempt counts
    failed: int = 0  # of these
    spent_usd: float | None = None  # in the whole run
    key_failures: dict[str, int] = field(default_factory=dict)  # of the whole run: Keys.failures
    times: LiveTimes | None = None  # only where they are shown

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
        self.tokens += other.tokens
        self.kinds += other.kinds
        self.judged += other.judged
        self.failed += other.failed
        self.key_failures = other.key_failures | self.key_failures
        if other.spent_usd is not None:
            self.spent_usd = (self.spent_usd or 0.0) + other.spent_usd
        if other.times is not None:
            self.times = self.times or LiveTimes()
            self.times.merge(other.times)

    def count(self, record: RequestRecord) -> None:
        """Count an attempt of a request that has ended."""
        self.ended += 1
        self.tokens += record.output_tokens or 0
        self.kinds[kind_of(record.status, record.http_status)] += 1
        if not record.attempt:
            self.judged += 1
            self.failed += record.status in FAILED_STATUSES
        if self.times is not None:
            self.times.add(record)

    def flush(self) -> None:
        """Count what waits in ``times``; only of the thread that counts."""
        if self.times is not None:
            self.times.flush()

    def mostly_failed(self, plan: StagePlan) -> bool:
        """Return whether most of the requests of a stage that ends then have failed."""
        most = 2 * self.failed > max(len(plan.schedule), FAILED_MIN)
        return most and plan.kind == "open" and plan.ends_when_failing

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
