"""The ``burst`` object of summary.json."""

from __future__ import annotations

from ampacity.analysis.contract.part import Interval, Part
from ampacity.analysis.contract.stage import Verdict


class PhaseLatency(Part, frozen=True, kw_only=True):
    n: int
    p50: float | None
    p95: float | None
    max: float | None


class Phase(Part, frozen=True, kw_only=True):
    name: str
    start_s: float
    end_s: float
    requests: int
    ok: int
    errors: dict[str, int]
    offered_rps: float | None
    achieved_rps: float | None
    concurrency: float | None
    ttft_s: PhaseLatency
    e2e_s: PhaseLatency
    slo_misses: int | None
    slo_attainment: float | None


class BaseLevel(Part, frozen=True, kw_only=True):
    waiting: float | None = None
    in_flight: float | None = None
    ttft_s: float | None = None


class MaxRecovery(Part, frozen=True, kw_only=True):
    limit_s: float
    verdict: Verdict
    reason: str | None


class Harm(Part, frozen=True, kw_only=True):
    slo: str
    reason: str


class HarmByPhase(Part, frozen=True, kw_only=True):
    base: Harm | None
    burst: Harm | None
    after: Harm | None


class Backlog(Part, frozen=True, kw_only=True):
    at_end_of_burst: float | None
    base_waiting: float | None
    served_rps: float | None
    unanswered: int | None
    drained: bool | None
    drained_s: float | None
    fall_rps: float | None
    at_end: float | None
    drains: bool | None
    further_s: float | None
    further_s_ci: Interval | None
    reason: str | None
    piled_up: int | None = None


class Headroom(Part, frozen=True, kw_only=True):
    needed_rps: float | None
    factor: float | None
    enough: bool | None
    reason: str | None


class Breaker(Part, frozen=True, kw_only=True):
    acceptable_wait_s: float | None
    rate_rps: float | None
    max_depth: int | None
    open_at: tuple[int, int] | None
    reason: str | None


class BurstSeries(Part, frozen=True, kw_only=True):
    start_s: list[float]
    end_s: list[float]
    ttft_s: list[float | None]
    in_flight: list[float | None]
    offered_rps: list[float | None]
    server_queue: list[float | None] | None = None


class Burst(Part, frozen=True, kw_only=True):
    base_rps: float
    factor: float | None
    shape: str | None
    resolution_s: float | None
    phases: list[Phase]
    base_level: BaseLevel
    recovery_s: float | None
    recovery_ci_s: Interval
    recovery_reason: str | None
    max_recovery: MaxRecovery | None
    peak_ttft_s: float | None
    peak_ttft_at_s: float | None
    peak_in_flight: int | None
    peak_in_flight_at_s: float | None
    later_ttft_s: float | None
    later_ttft_at_s: float | None
    known_until_s: float | None
    slo_misses: int | None
    lost: int
    unfinished: int
    harm: HarmByPhase
    slo_misses_of_base: float
    backlog: Backlog
    headroom: Headroom
    breaker: Breaker
    base_too_short: bool  # to know what to come back to
    series: BurstSeries
