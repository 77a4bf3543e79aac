"""What a stage is and what it gives back: its plan, limits and counters, and the row of a request before it is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal, Protocol

from ampacity.loadgen.audit import Measures
from ampacity.loadgen.rundir.records import FAILED_STATUSES, RequestRecord
from ampacity.loadgen.send.history import AnswerContent
from ampacity.workloads.schedule import Schedule

LIVE_TTFTS = 400  # first tokens that the live percentiles rest on
RETRIED_HTTP = (429, 502, 503, 504)
RETRY_PAUSE_S = 0.5  # doubled with each attempt, where the server names no Retry-After
RETRY_PAUSE_MAX_S = 60.0


class Requests(Protocol):
    """Makes the bytes of a schedule's requests."""

    def prepare(self, schedule: Schedule) -> None:
        """The schedule that the next requests are of."""

    def make(self, index: int, target: int) -> bytes:
        """A whole request for endpoint ``target``."""

    def wanted(self, index: int) -> bool:
        """Whether the text of the answer will be told again."""

    def answered(self, index: int, told: AnswerContent) -> None:
        """The request is over; ``text`` is what the server answered, if it was wanted."""


@dataclass(frozen=True)
class StagePlan:
    """One load level. ``offered_rps`` of an open stage, ``concurrency`` of a closed one."""

    index: int
    kind: Literal["open", "closed"]
    schedule: Schedule
    duration_s: float  # the ramp included
    offered_rps: float | None = None
    concurrency: int | None = None
    used_up: str = "the schedule is used up"  # closed loop: why it ends where no request is left
    think_s: float = (
        0.0  # closed loop: a virtual user's pause between an answer and its next request
    )
    ramp_s: float = (
        0.0  # closed loop: the time over which the virtual users begin, at the start of the stage
    )
    users_begin_s: Sequence[float] | None = (
        None  # closed loop: of a share of a stage; None: as ``user_starts`` has it
    )
    drain_s: float = 30.0  # how long answers are waited for after the last deadline
    answering_s: float = 0.0  # and how much longer those that have begun, where most have
    finish_s: float = 60.0  # how long after its end sessions are played on
    whole: bool = False  # a replay: the stage lasts until all of the schedule has been sent
    end_on_failure: bool = True  # a failed turn ends its session
    keep_reasoning: bool = False  # in the histories of sessions
    sticky: bool = False  # with several targets: a session stays with one of them

    def starts_s(self) -> Sequence[float]:
        """When each virtual user begins, seconds from the start of the stage, ascending."""
        if self.users_begin_s is not None:
            return self.users_begin_s
        return user_starts(self.concurrency or 0, self.ramp_s, self.think_s)

    def meta(self, start_ns: int) -> dict[str, Any]:
        """What is known of the stage's object in run.json when it starts."""
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
    """When each of ``users`` begins, s: evenly spread over the ramp, or else over one think time (all at once without)."""
    return [(ramp_s or think_s) * user / users for user in range(users)]


@dataclass(frozen=True)
class Limits:
    """The client's own time limits. None: no limit."""

    total_s: float | None = None
    idle_s: float | None = 120.0  # without a single byte from the server
    in_flight: int | None = None  # more than so many at once are shed: recorded, never sent
    retries: int = (
        0  # further attempts after 429, 502, 503, 504, no connection or a reset; each is a row
    )

    def gives_up(self, began_ns: int, last_read_ns: int | None) -> tuple[float, str]:
        """When a request is given up that nothing more is read of, monotonic ns, and why; inf: never."""
        total_s, idle_s = self.total_s or inf, self.idle_s or inf
        return min(
            (began_ns + total_s * 1e9, f"no complete answer within {total_s:g} s"),
            ((last_read_ns or began_ns) + idle_s * 1e9, f"nothing received for {idle_s:g} s"),
        )

    def retry_pause_s(self, failed: RequestRecord) -> float | None:
        """How long to wait before a further attempt; None: there is none."""
        passing = failed.status in ("connect_error", "reset") or failed.http_status in RETRIED_HTTP
        if not passing or failed.attempt >= self.retries:
            return None
        pause_s = failed.retry_after_s
        if pause_s is None:
            pause_s = RETRY_PAUSE_S * 2**failed.attempt
        return min(max(pause_s, 0.0), RETRY_PAUSE_MAX_S)


@dataclass
class Live:
    """Counters of the stage that is going on, for the progress line."""

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

    @classmethod
    def of(cls, plan: StagePlan, began_s: float) -> Live:
        """Those of a stage that begins now."""
        level = plan.offered_rps if plan.kind == "open" else plan.concurrency
        return cls(plan.index, plan.kind, float(level or 0), began_s, plan.duration_s)

    def count(self, record: RequestRecord) -> None:
        """A request that has ended."""
        self.ended += 1
        self.tokens += record.output_tokens or 0
        self.failed += record.status in FAILED_STATUSES
        if record.first_token_ns is not None:
            self.ttft_s.append((record.first_token_ns - record.scheduled_ns) / 1e9)

    def counts(self) -> tuple[int, int, int, int, list[float]]:
        """Released, ended, failed, tokens, and the latest TTFTs: what a worker tells its parent."""
        return self.released, self.ended, self.failed, self.tokens, self.ttft_s[-LIVE_TTFTS:]

    @property
    def in_flight(self) -> int:
        """Requests released and not ended."""
        return self.released - self.ended


@dataclass(frozen=True)
class StageResult:
    """``meta`` is the stage's object in run.json, but for its audit, which is judged from ``measures``.

    ``ids_used``: request ids from the schedule's first on that are taken now.
    """

    meta: dict[str, Any]
    measures: Measures
    ids_used: int


def record_of(plan: StagePlan, index: int, scheduled_ns: int) -> RequestRecord:
    """The row of a request of the schedule, before anything has happened to it."""
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
