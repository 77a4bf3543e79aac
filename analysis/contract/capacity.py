"""Findings from all stages: knee, capacity, goodput, fleet, search."""

from __future__ import annotations

from typing import Literal

from ampacity.analysis.contract.part import Interval, Part
from ampacity.analysis.contract.stage import Loop, ServerLaw, Stage

Crossing = Literal[
    "measured", "verified", "interpolated", "saturated", "pooled", "lower_bound", "none"
]


class KneeMethod(Part, frozen=True, kw_only=True):
    concurrency: float | None
    rps: float | None
    range: tuple[float, float] | None
    range_rps: tuple[float, float] | None
    reason: str | None
    definition: str | None


class Knee(Part, frozen=True, kw_only=True):
    concurrency: float | None
    rps: float | None
    region: tuple[float, float] | None
    region_rps: tuple[float, float] | None
    reason: str | None
    methods: dict[str, KneeMethod]


class Limit(Part, frozen=True, kw_only=True):
    """The highest load that still meets the SLOs."""

    c_max: float | None
    c_max_ci: Interval | None
    capacity_rps: float | None
    capacity_rps_ci: Interval | None
    binding_slo: str | None
    binding_or: list[str]
    crossing: Crossing
    reason: str | None
    stage: int | None
    users: int | None

    @property
    def binding_text(self) -> str:
        """Return the SLO that limits, or each that may: ``ttft_p95=300ms or itl_p99=50ms``."""
        return " or ".join(filter(None, (self.binding_slo, *self.binding_or)))


class ClassCapacity(Limit, frozen=True, kw_only=True):
    """The load of all classes up to which this class meets its SLOs."""

    name: str
    slos: list[str]


class LoopCapacity(Limit, frozen=True, kw_only=True):
    """The capacity by the stages of one loop: open, or closed."""

    c_max_basis: Loop | None
    verified_rps: float | None
    violated_rps: float | None
    estimate_rps: float | None
    estimate_rps_ci: Interval | None
    assumption: str | None
    non_monotone: bool
    lower_loads: list[float]  # to try where the lowest was too high; users if closed


class Capacity(LoopCapacity, frozen=True, kw_only=True):
    closed: LoopCapacity | None


class FamilyTokens(Part, frozen=True, kw_only=True):
    input_tokens: float | None
    output_tokens: float | None


class Family(Part, frozen=True, kw_only=True):
    lengths: str
    input_tokens: float | None
    output_tokens: float | None
    classes: dict[str, FamilyTokens]
    stages: list[Stage]
    capacity: Capacity
    knee: Knee


class LittlesLawGap(Part, frozen=True, kw_only=True):
    """Capacity against the ceiling that Little's Law gives."""

    ceiling_rps: float | None
    limit_s: float | None
    limit_metric: str | None
    gap: float | None
    representative: bool | None
    reason: str | None
    consistency: float | None
    server: ServerLaw | None


class Goodput(Part, frozen=True, kw_only=True):
    peak_rps: float | None
    peak_rps_ci: Interval | None
    at_offered_rps: float | None
    basis: Literal["stage", "pooled"] | None
    reason: str | None


class Offline(Part, frozen=True, kw_only=True):
    stage: int | None
    achieved_rps: float | None
    output_tokens_per_s: float | None
    output_tokens_per_s_ci: Interval | None
    cost_per_million_output_tokens: float | None
    cost_per_thousand_requests: float | None
    reason: str | None


class Fleet(Part, frozen=True, kw_only=True):
    input_tokens_mean: float | None
    output_tokens_mean: float | None
    peak_rps: float | None
    peak_rps_ci: Interval | None
    peak_reason: str | None
    safety_factor: float
    safety_reason: str
    instances_before_safety: int | None
    instances: int | None
    instances_ci: tuple[int | None, int | None] | None
    gpus: int | None
    one_replica_down: int | None
    tensor_parallel: int
    gpu_hour_usd: float | None
    cost_per_million_output_tokens: float | None
    reason: str | None


class SearchStep(Part, frozen=True, kw_only=True):
    stage: int
    offered_rps: float | None
    why: str
    requests: int | None
    slo_met: bool | None
    capacity_rps: float | None
    capacity_rps_ci: Interval | None


class Search(Part, frozen=True, kw_only=True):
    precision: float
    reached: bool
    requests: int
    more_requests: int | None
    reason: str
    path: list[SearchStep]
