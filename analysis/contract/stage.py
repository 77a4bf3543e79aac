"""A stage of summary.json."""

from __future__ import annotations

from typing import Literal

import msgspec

from ampacity.analysis.contract.figures import Curve, Percentiles
from ampacity.analysis.contract.part import Interval, Part

Loop = Literal["open", "closed"]
Verdict = Literal["met", "violated", "inconclusive"]


class Window(Part, frozen=True, kw_only=True):
    start_s: float
    end_s: float
    warmup_requests: int
    method: str
    settled: bool | None
    reason: str | None


class Drift(Part, frozen=True, kw_only=True):
    drifting: bool | None
    p99_first_s: float | None
    p99_last_s: float | None
    change: float | None
    reason: str | None


class Modes(Part, frozen=True, kw_only=True):
    two: bool | None
    fast_p50_s: float | None
    slow_p50_s: float | None
    slow_share: float | None
    switches: int | None


class Fluidity(Part, frozen=True, kw_only=True):
    slo: str | None
    mean_index: float | None
    share_smooth: float | None = msgspec.field(name="share_at_least_0.9")


class Accepted(Part, frozen=True, kw_only=True):
    requests: int | None
    rps: float | None
    share: float | None
    output_tokens_per_s: float | None
    unlabelled: int | None
    cost_per_result_usd: float | None
    cost_per_million_output_tokens: float | None
    reason: str | None


class SloVerdict(Part, frozen=True, kw_only=True):
    slo: str
    verdict: Verdict
    value_s: float | None
    value_s_reason: str | None = None
    value_s_ci: Interval | None = None
    value: float | None = None
    attainment: float | None
    undecided: float = 0.0
    requests_effective: int | None
    more_requests: int | None
    reason: str | None
    cause: str | None


class OutagePeriod(Part, frozen=True, kw_only=True):
    start_s: float
    end_s: float | None
    failed: int
    waited: int


class OutsideOutage(Part, frozen=True, kw_only=True):
    requests: int
    ok: int
    slo_met: bool | None
    slo_met_reason: str | None
    slo_verdicts: list[SloVerdict]


class OutageSeries(Part, frozen=True, kw_only=True):
    end_s: list[float]
    answered_rps: list[float]
    failed_rps: list[float]


class Outage(Part, frozen=True, kw_only=True):
    text: str
    requests: int
    failed: int
    periods: list[OutagePeriod]
    outside: OutsideOutage
    series: OutageSeries


class Slip(Part, frozen=True, kw_only=True):
    p50: float | None
    p99: float | None


class Process(Part, frozen=True, kw_only=True):
    name: str
    cores: float


class Server(Part, frozen=True, kw_only=True):
    """The server's own metrics; ``reason`` of those that are None."""

    samples: int
    engines: float | None
    running: float | None
    running_max: float | None
    waiting: float | None
    kv_cache_usage_max: float | None
    preemptions: float | None
    prefix_hit_rate: float | None
    cached_tokens: float | None
    kv_block_lifetime_s: float | None
    spec_acceptance_rate: float | None
    adapter_slots: float | None
    adapter_slots_used_max: float | None
    gpu_utilization: float | None
    tensor_active: float | None
    memory_active: float | None
    gpu_memory_used_bytes: float | None
    reason: str | None


class ServerLaw(Part, frozen=True, kw_only=True):
    server_l: float | None
    ratio: float | None
    ok: bool | None
    reason: str | None


class LittlesLaw(Part, frozen=True, kw_only=True):
    """Little's Law in one stage: L against lambda W."""

    l: float | None  # noqa: E741
    lambda_w: float | None
    consistency: float | None
    tolerance: float | None
    ok: bool | None
    reason: str | None
    server: ServerLaw | None


class StageClass(Part, frozen=True, kw_only=True):
    """One class of requests in a stage."""

    requests: int
    ok: int
    errors: dict[str, int]
    goodput_rps: float | None
    slo_attainment: float | None
    slo_met: bool | None
    slo_met_reason: str | None
    goodput_rps_reason: str | None = None
    slo_verdicts: list[SloVerdict]
    ttft_from_schedule_s: Percentiles
    tpot_s: Percentiles
    icl_s: Percentiles
    e2e_from_schedule_s: Percentiles


class Stage(Part, frozen=True, kw_only=True):
    name: str
    index: int
    kind: Loop
    lengths: str | None
    offered_rps: float | None
    concurrency_set: int | None
    achieved_rps: float
    arrived_rps: float
    carried_rps: float
    window: Window
    requests: int
    ok: int
    errors: dict[str, int]
    missing: int
    ended_early: str | None
    concurrency: float
    concurrency_se: float | None
    concurrency_max: int
    users_pause: bool
    ttft_s: Percentiles
    ttft_from_schedule_s: Percentiles
    first_answer_s: Percentiles
    itl_s: Percentiles
    icl_s: Percentiles
    tpot_s: Percentiles
    e2e_s: Percentiles
    e2e_from_schedule_s: Percentiles
    curves: dict[str, Curve]
    output_tokens_per_s: float | None
    output_tokens_per_s_reason: str | None = None
    input_tokens_per_s: float
    achieved_rps_ci: Interval | None
    output_tokens_per_s_ci: Interval | None
    drift: Drift
    modes: Modes
    classes: dict[str, StageClass]
    fluidity: Fluidity
    accepted: Accepted
    goodput_rps: float | None
    goodput_rps_reason: str | None = None
    slo_attainment: float | None
    stable: bool | None
    stable_reason: str | None
    growth_rps: float | None
    slo_met: bool | None
    slo_met_reason: str | None
    slo_met_by_all: bool | None
    slo_verdicts: list[SloVerdict]
    outage: Outage | None
    resent: int
    unsolicited: int
    slip_s: Slip
    client_limited: bool | None
    client_limited_reason: str | None
    client_limited_metrics: dict[str, str]
    busiest: list[Process]
    server: Server | None
    littles_law: LittlesLaw
