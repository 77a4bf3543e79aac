"""The traffic that was sent: prefix sharing, classes and sessions of each stage."""

from __future__ import annotations

from ampacity.analysis.contract.figures import Percentiles, Spread
from ampacity.analysis.contract.part import Part


class Sharing(Part, frozen=True, kw_only=True):
    stage: int
    planned: float | None
    realised: float | None
    realised_reason: str | None = None


class TrafficClass(Part, frozen=True, kw_only=True):
    name: str
    planned_share: float | None
    share: float | None
    requests: int
    ok: int
    failed: int
    cancelled: int
    unfinished: int
    input_tokens: Spread
    output_tokens: Spread
    cached_share: float | None
    ttft_from_schedule_s: Spread


class Traffic(Part, frozen=True, kw_only=True):
    stage: int
    arrivals: int
    gap_cv: float | None
    classes: list[TrafficClass]


class Concurrent(Part, frozen=True, kw_only=True):
    mean: float | None
    max: int | None
    reason: str | None = None


class Turns(Part, frozen=True, kw_only=True):
    turns: tuple[int, int]
    requests: int
    ok: int
    input_tokens: Spread
    output_tokens: Spread | None = None
    cached_share: float | None
    ttft_from_schedule_s: Spread
    e2e_from_schedule_s: Spread


class SessionStage(Part, frozen=True, kw_only=True):
    index: int
    sessions: int
    complete: int
    failed: int
    cut: int
    cut_reason: str | None = None
    arrived_per_s: float | None
    concurrent: Concurrent
    session_s: Percentiles
    busy_s: Percentiles
    requests: Spread
    input_tokens: Spread
    output_tokens: Spread
    largest_prompt_tokens: Spread
    goodput_per_s: float | None
    goodput_per_s_reason: str | None = None
    attainment: float | None
    per_turn: list[Turns]


class SessionFit(Part, frozen=True, kw_only=True):
    concurrent_sessions: float | None
    sessions_per_s: float | None
    stage: int | None
    reason: str | None


class Sessions(Part, frozen=True, kw_only=True):
    stages: list[SessionStage]
    fit: SessionFit
