"""What a stage is and what it gives back: its plan, limits and counters, and the row of a request before it is sent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from loadgen.audit import Measures
from loadgen.records import RequestRecord
from workloads.schedule import Schedule

LIVE_TTFTS = 400  # first tokens that the live percentiles rest on


class Requests(Protocol):
    """Makes the bytes of a schedule's requests."""

    def prepare(self, schedule: Schedule) -> None:
        """The schedule that the next requests are of."""

    def make(self, index: int, target: int) -> bytes:
        """A whole request for endpoint ``target``."""

    def wanted(self, index: int) -> bool:
        """Whether the text of the answer will be told again."""

    def answered(self, index: int, text: str) -> None:
        """The request is over; ``text`` is what the server answered, if it was wanted."""


@dataclass(frozen=True)
class StagePlan:
    """One load level. ``offered_rps`` of an open stage, ``concurrency`` of a closed one."""

    index: int
    kind: Literal["open", "closed"]
    schedule: Schedule
    duration_s: float
    offered_rps: float | None = None
    concurrency: int | None = None
    max_requests: int | None = None  # closed loop: the budget's end
    max_tokens: int | None = None
    think_s: float = 0.0  # closed loop: a virtual user's pause between an answer and its next request
    drain_s: float = 30.0  # how long answers are waited for after the last deadline
    finish_s: float = 60.0  # how long after its end sessions are played on
    end_on_failure: bool = True  # a failed turn ends its session
    keep_reasoning: bool = False  # in the histories of sessions
    sticky: bool = False  # with several targets: a session stays with one of them


@dataclass(frozen=True)
class Limits:
    """The client's own time limits. None: no limit."""

    total_s: float | None = None
    idle_s: float | None = 120.0  # without a single byte from the server
    in_flight: int | None = None  # more than so many at once are shed: recorded, never sent
    retries: int = 0  # further attempts after 429, 502, 503, 504, no connection or a reset; each is a row


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
        request_id=schedule.request_id(index), stage=plan.index, scheduled_ns=scheduled_ns, status="unfinished",
        class_=schedule.class_name(index),
        session_id=f"{plan.index}-{session}" if session >= 0 else None,
        turn=int(schedule.turn[index]) if session >= 0 and schedule.turn is not None else None,
        input_tokens_planned=int(schedule.input_tokens[index]),
        output_tokens_planned=int(schedule.output_tokens[index]),
    )  # fmt: skip
