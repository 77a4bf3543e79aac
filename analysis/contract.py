"""The typed contract of summary.json: frozen structs, read and written here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

Interval = tuple[float | None, float | None]


class ContractError(ValueError):
    """A summary.json does not have the fields of the contract."""


class Part(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """An object of summary.json. A field with a default may be left out of the file."""


class Warned(Part, frozen=True, kw_only=True):
    code: str
    text: str


class Check(Part, frozen=True, kw_only=True):
    name: str
    verdict: str
    found: str | None = None
    means: str | None = None
    spoils: list[str] = []


class Network(Part, frozen=True, kw_only=True):
    connect_s: float | None
    request_s: float | None
    ttft_p50_s: float | None
    share: float | None
    share_reason: str | None = None


class Imported(Part, frozen=True, kw_only=True):
    tool: str
    tool_version: str | None = None
    files: list[Any] = []
    definitions: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    notes: list[str] = []


class SloLimit(Part, frozen=True, kw_only=True):
    metric: str
    text: str
    quantile: float | None = None
    limit_s: float | None = None
    first_s: float | None = None
    source: str | None = None
    class_: str | None = msgspec.field(name="class", default=None)


class Window(Part, frozen=True, kw_only=True):
    start_s: float
    end_s: float
    warmup_requests: int
    method: str
    settled: bool | None
    reason: str | None = None


class Percentiles(Part, frozen=True, kw_only=True):
    """Percentiles of a metric; a null one has its reason, or the bounds that are known."""

    n: int
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    p99_ci: Interval | None = None
    mean: float | None = None
    infinite: int = 0
    censored: int = 0
    p50_reason: str | None = None
    p90_reason: str | None = None
    p95_reason: str | None = None
    p99_reason: str | None = None
    p50_bounds: Interval | None = None
    p90_bounds: Interval | None = None
    p95_bounds: Interval | None = None
    p99_bounds: Interval | None = None
    p99_ci_reason: str | None = None
    mean_reason: str | None = None
    assumption: str | None = None
    reason: str | None = None


class Curve(Part, frozen=True, kw_only=True):
    q: list[float]
    value: list[float | None]


class Spread(Part, frozen=True, kw_only=True):
    """Plain figures of a sample, without intervals."""

    n: int
    mean: float | None = None
    p50: float | None = None
    p95: float | None = None
    max: float | None = None
    reason: str | None = None


class Drift(Part, frozen=True, kw_only=True):
    drifting: bool | None
    p99_first_s: float | None
    p99_last_s: float | None
    change: float | None
    reason: str | None = None


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
    reason: str | None = None


class SloVerdict(Part, frozen=True, kw_only=True):
    slo: str
    verdict: str
    value_s: float | None = None
    value_s_reason: str | None = None
    value: float | None = None
    attainment: float | None = None
    requests_effective: float | None = None
    more_requests: int | None = None
    reason: str | None = None
    cause: str | None = None


class OutagePeriod(Part, frozen=True, kw_only=True):
    start_s: float
    end_s: float | None
    failed: int


class OutsideOutage(Part, frozen=True, kw_only=True):
    requests: int
    ok: int
    slo_met: bool | None
    slo_met_reason: str | None = None
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
    samples: int
    running: float | None
    waiting: float | None
    kv_cache_usage_max: float | None
    preemptions: float | None
    prefix_hit_rate: float | None
    spec_acceptance_rate: float | None
    gpu_utilization: float | None
    gpu_memory_used_bytes: float | None


class ServerLaw(Part, frozen=True, kw_only=True):
    server_l: float | None
    ratio: float | None
    ok: bool | None
    reason: str | None = None


class LittlesLaw(Part, frozen=True, kw_only=True):
    """Little's Law in one stage: L against lambda W."""

    l: float | None  # noqa: E741
    lambda_w: float | None
    consistency: float | None
    tolerance: float | None
    ok: bool | None
    reason: str | None = None
    server: ServerLaw | None = None


class StageClass(Part, frozen=True, kw_only=True):
    """One class of requests in a stage."""

    requests: int
    ok: int
    errors: dict[str, int]
    goodput_rps: float | None
    slo_attainment: float | None
    slo_met: bool | None
    slo_met_reason: str | None = None
    goodput_rps_reason: str | None = None
    slo_verdicts: list[SloVerdict]
    ttft_from_schedule_s: Percentiles
    tpot_s: Percentiles
    icl_s: Percentiles
    e2e_from_schedule_s: Percentiles


class Stage(Part, frozen=True, kw_only=True):
    name: str
    index: int
    kind: str
    lengths: str | None
    offered_rps: float | None
    concurrency_set: int | None
    achieved_rps: float | None
    arrived_rps: float | None
    carried_rps: float | None
    window: Window
    requests: int
    ok: int
    errors: dict[str, int]
    missing: int
    ended_early: str | None
    concurrency: float | None
    concurrency_se: float | None
    concurrency_max: int | None
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
    input_tokens_per_s: float | None
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
    slo_met_by_all: bool | None = None
    slo_verdicts: list[SloVerdict]
    outage: Outage | None
    resent: int
    slip_s: Slip
    client_limited: bool | None
    client_limited_reason: str | None
    client_limited_metrics: dict[str, str]
    busiest: list[Process]
    server: Server | None
    littles_law: LittlesLaw


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


class Turns(Part, frozen=True, kw_only=True):
    turns: tuple[int, int | None]
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
    reason: str | None = None


class Sessions(Part, frozen=True, kw_only=True):
    stages: list[SessionStage]
    fit: SessionFit


class KneeMethod(Part, frozen=True, kw_only=True):
    concurrency: float | None
    rps: float | None
    range: Interval | None
    range_rps: Interval | None
    reason: str | None
    definition: str | None


class Knee(Part, frozen=True, kw_only=True):
    concurrency: float | None
    rps: float | None
    region: Interval | None
    region_rps: Interval | None
    reason: str | None
    methods: dict[str, KneeMethod]


class Capacity(Part, frozen=True, kw_only=True):
    c_max: float | None
    c_max_ci: Interval | None
    c_max_basis: str | None
    capacity_rps: float | None
    capacity_rps_ci: Interval | None
    verified_rps: float | None
    violated_rps: float | None
    estimate_rps: float | None
    estimate_rps_ci: Interval | None
    binding_slo: str | None
    binding_or: list[str]
    crossing: str | None
    assumption: str | None
    reason: str | None
    non_monotone: bool
    stage: int | None
    users: float | None
    closed: Capacity | None = None


class ClassCapacity(Part, frozen=True, kw_only=True):
    """The load of all classes up to which this class meets its SLOs."""

    name: str
    slos: list[str]
    c_max: float | None = None
    c_max_ci: Interval | None = None
    c_max_basis: str | None = None
    capacity_rps: float | None = None
    capacity_rps_ci: Interval | None = None
    verified_rps: float | None = None
    violated_rps: float | None = None
    estimate_rps: float | None = None
    estimate_rps_ci: Interval | None = None
    binding_slo: str | None = None
    binding_or: list[str] = []
    crossing: str | None = None
    reason: str | None = None
    non_monotone: bool | None = None
    stage: int | None = None
    users: float | None = None


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
    basis: str | None
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
    safety_factor: float | None
    safety_reason: str | None
    instances_before_safety: int | None
    instances: int | None
    instances_ci: tuple[int | None, int | None] | None
    gpus: int | None
    one_replica_down: int | None
    tensor_parallel: int
    gpu_hour_usd: float | None
    cost_per_million_output_tokens: float | None
    reason: str | None


class Audit(Part, frozen=True, kw_only=True):
    slip_p99_s: float | None
    loop_lag_p99_s: float | None
    receive_delay_p99_s: float | None
    dated_by_kernel: bool
    coalesced_share: float | None
    cpu_fraction: float | None
    client_limited: bool | None
    client_limited_reason: str | None = None
    client_limited_stages: list[int]
    repeated_stages: list[int]


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
    requests: int | None
    more_requests: int | None
    reason: str | None
    path: list[SearchStep]


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
    ttft_s: Spread
    e2e_s: Spread
    slo_misses: int | None
    slo_attainment: float | None


class BaseLevel(Part, frozen=True, kw_only=True):
    waiting: float | None = None
    in_flight: float | None = None
    ttft_s: float | None = None


class MaxRecovery(Part, frozen=True, kw_only=True):
    limit_s: float
    verdict: str
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
    unanswered: float | None
    drained: bool | None
    drained_s: float | None
    fall_rps: float | None
    at_end: float | None
    drains: bool | None
    further_s: float | None
    further_s_ci: Interval | None
    reason: str | None


class Headroom(Part, frozen=True, kw_only=True):
    needed_rps: float | None
    factor: float | None
    enough: bool | None
    reason: str | None


class Breaker(Part, frozen=True, kw_only=True):
    acceptable_wait_s: float | None
    rate_rps: float | None
    max_depth: int | None
    open_at: Interval | None
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
    factor: float
    shape: str
    resolution_s: float | None
    phases: list[Phase]
    base_level: BaseLevel
    recovery_s: float | None
    recovery_ci_s: Interval | None
    recovery_reason: str | None
    max_recovery: MaxRecovery | None
    peak_ttft_s: float | None
    peak_ttft_at_s: float | None
    peak_in_flight: float | None
    peak_in_flight_at_s: float | None
    later_ttft_s: float | None
    later_ttft_at_s: float | None
    known_until_s: float | None
    slo_misses: int | None
    lost: int
    unfinished: int
    harm: HarmByPhase
    slo_misses_of_base: float | None
    backlog: Backlog
    headroom: Headroom
    breaker: Breaker
    series: BurstSeries


class Summary(Part, frozen=True, kw_only=True):
    """The whole of summary.json."""

    schema_version: int
    verdict: str
    partial: str | None
    predicted: bool
    imported: Imported | None
    warnings: list[Warned]
    diagnosis: list[Check] | None
    diagnosis_reason: str | None = None
    network: Network
    workload: dict[str, Any]
    slos: list[SloLimit]
    interval_assumption: str
    requests: int
    errors: dict[str, int]
    stages: list[Stage]
    sharing: list[Sharing] | None
    traffic: list[Traffic]
    sessions: Sessions | None
    sessions_reason: str | None = None
    knee: Knee
    capacity: Capacity
    classes: list[ClassCapacity]
    families: list[Family]
    littles_law: LittlesLawGap
    goodput: Goodput
    offline: Offline
    fleet: Fleet
    audit: Audit
    next_command: str | None = None
    search: Search | None = None
    burst: Burst | None = None


def read_summary(source: Mapping[str, Any] | Path) -> Summary:
    """Convert a summary, or the file of one, to its struct; ContractError names the field."""
    try:
        if isinstance(source, Path):
            return msgspec.json.decode(source.read_bytes(), type=Summary)
        return msgspec.convert(source, Summary)
    except msgspec.MsgspecError as error:
        where = f"{source}: " if isinstance(source, Path) else ""
        raise ContractError(f"{where}not a summary.json of this version: {error}") from error


def to_json(summary: Summary) -> dict[str, Any]:
    """Return the dict that summary.json holds."""
    plain: dict[str, Any] = msgspec.to_builtins(summary)
    return plain


def describe_fields() -> str:
    """Return the structs as Markdown: the section of docs/summary.md that lists every field."""
    lines = []
    for part in Part.__subclasses__():
        lines += [f"### {part.__name__}", "", "| field | type | may be left out |", "|---|---|---|"]
        for field in msgspec.structs.fields(part):
            kind = str(part.__annotations__[field.name]).replace("|", "\\|")
            left_out = "" if field.required else "yes"
            lines.append(f"| `{field.encode_name}` | {kind} | {left_out} |")
        lines.append("")
    return "\n".join(lines)


def with_nulls(value: Any) -> Any:
    """Return a part, or a dict or list of parts, as plain objects with every field, null or not."""
    if isinstance(value, Part):
        fields = msgspec.structs.fields(value)
        return {f.encode_name: with_nulls(getattr(value, f.name)) for f in fields}
    if isinstance(value, dict):
        return {key: with_nulls(v) for key, v in value.items()}
    return [with_nulls(v) for v in value] if isinstance(value, (list, tuple)) else value
