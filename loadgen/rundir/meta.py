"""The shape of run.json, as far as anything reads it; unnamed entries may hold anything.

A field that is missing or null is None.
"""

import json
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

Amount = Annotated[float, Meta(ge=0, le=2.0**62)]
Positive = Annotated[float, Meta(gt=0, le=2.0**62)]
Signed = Annotated[float, Meta(ge=-(2.0**62), le=2.0**62)]
Share = Annotated[float, Meta(gt=0, lt=1)]
Count = Annotated[int, Meta(ge=0, le=2 * 10**7)]  # of requests
Tokens = Annotated[int, Meta(ge=0, le=2**31)]
TimeNs = Annotated[int, Meta(ge=-(2**62), le=2**62)]
CountNs = Annotated[int, Meta(ge=0, le=2**62)]
PartS = Annotated[float, Meta(ge=0.1, le=30 * 86_400.0)]
Kind = Literal["open", "closed"]


class Busiest(Struct, frozen=True, kw_only=True):
    name: str
    cores: Amount


class WorkerAudit(Struct, frozen=True, kw_only=True):
    worker: Count
    node: str | None = None
    cpu_fraction: Amount | None = None


class ClientAudit(Struct, frozen=True, kw_only=True):
    """How well the load generator kept up during a stage."""

    slip_p50_s: Amount | None = None
    slip_p99_s: Amount | None = None
    slip_max_s: Amount | None = None
    loop_lag_p99_s: Amount | None = None
    receive_delay_p99_s: Amount | None = None
    busiest: list[Busiest] | None = None
    stalls: list[tuple[Count, TimeNs, TimeNs]] | None = None  # worker, look due, look
    dated_by_kernel: bool | None = None
    coalesced_share: Amount | None = None
    cpu_fraction: Amount | None = None
    rss_bytes: Amount | None = None
    resent: Count | None = None
    unsolicited: Count | None = None
    client_limited: bool | None = None
    client_limited_reason: str | None = None
    workers: list[WorkerAudit] | None = None


class NodeClock(Struct, frozen=True, kw_only=True):
    node: str
    ahead_ns: TimeNs | None = None
    bound_ns: CountNs | None = None


class CutSessions(Struct, frozen=True, kw_only=True):
    """The sessions that the end of a stage cut."""

    cut: list[str] | None = None


class StageEntry(Struct, frozen=True, kw_only=True):
    """An entry of ``stages`` as it may be written."""

    index: Count | None = None
    kind: Kind | None = None
    schedule: Count | None = None
    lengths: str | None = None
    offered_rps: Amount | None = None
    concurrency: Count | None = None
    start_ns: TimeNs
    end_ns: TimeNs
    drained_ns: TimeNs | None = None
    ramp_s: Amount | None = None
    scheduled_requests: Count | None = None
    played_sessions: bool | None = None
    sessions: CutSessions | None = None
    cached_share_planned: Amount | None = None
    ended_early: str | None = None
    clocks: list[NodeClock] | None = None
    planned_s: Amount | None = None
    interrupted: bool | None = None
    cut_ns: TimeNs | None = None
    decided_early: str | None = None
    alpha: Share | None = None
    continues: Count | None = None
    audit: ClientAudit | None = None
    from_s: Amount | None = None


class StageMeta(StageEntry, frozen=True, kw_only=True):
    """A stage as it is read: of some files its place and its load tell the first two."""

    index: Count
    kind: Kind


class Seam(Struct, frozen=True, kw_only=True):
    after_stage: int
    reason: str
    resumed_utc: str
    gap_s: Amount
    wall_gap_s: Signed
    in_flight: Count


class Step(Struct, frozen=True, kw_only=True):
    stage: Count
    offered_rps: Amount
    why: str


class Search(Struct, frozen=True, kw_only=True):
    precision: Amount
    reached: bool | None = None
    ended: str | None = None
    more_requests: Count | None = None
    path: list[Step] | None = None


class Lengths(Struct, frozen=True, kw_only=True):
    p50: Amount | None = None
    text: str | None = None


class TrafficClass(Struct, frozen=True, kw_only=True):
    name: str | None = None
    weight: Amount | None = None


class Trace(Struct, frozen=True, kw_only=True):
    requests: Count | None = None


class Workload(Struct, frozen=True, kw_only=True):
    input_tokens: Lengths | None = None
    output_tokens: Lengths | None = None
    classes: list[TrafficClass] | None = None
    trace: Trace | None = None
    turns_beyond_context: Count | None = None
    clipped_to_context: Count | None = None


class Finding(Struct, frozen=True, kw_only=True):
    name: str
    verdict: Literal["ok", "note", "bad"]
    found: str
    means: str
    spoils: list[str] | None = None


class Definition(Struct, frozen=True, kw_only=True):
    what: str
    theirs: str
    ours: str | None = None


class Imported(Struct, frozen=True, kw_only=True):
    tool: str
    definitions: list[Definition] | None = None
    missing: dict[str, str] | None = None


class Burst(Struct, frozen=True, kw_only=True):
    base_rps: Positive
    base_s: PartS
    burst_s: PartS
    recovery_s: PartS
    factor: Amount | None = None
    shape: str | None = None


class Soak(Struct, frozen=True, kw_only=True):
    rate_rps: Amount
    duration_s: PartS
    window_s: PartS


class AB(Struct, frozen=True, kw_only=True):
    pair: str
    arm: Literal["a", "b"]
    rounds: Count | None = None
    aa: bool | None = None


class FleetInputs(Struct, frozen=True, kw_only=True):
    peak_rps: Amount | None = None
    tensor_parallel: Count | None = None
    safety_factor: Amount | None = None
    gpu_hour_usd: Amount | None = None


class Clock(Struct, frozen=True, kw_only=True):
    monotonic_ns: TimeNs
    utc: datetime


class Locked(Struct, frozen=True, kw_only=True):
    max_model_len: Tokens | str | None = None  # str: of --lock
    think_s: Amount | None = None


class Host(Struct, frozen=True, kw_only=True):
    cpus: Count | None = None


class RunMeta(Struct, frozen=True, kw_only=True):
    status: str | None = None
    status_reason: str | None = None
    predicted: bool | None = None
    started_utc: str | None = None
    tool: dict[str, Any] | None = None
    clock: Clock | None = None
    endpoint: dict[str, Any] | None = None
    locked: Locked | None = None
    host: Host | None = None
    workers: Count | None = None
    seed: Annotated[int, Meta(ge=0)] | None = None
    slos: list[dict[str, Any]] | None = None
    notes: list[str] | None = None
    events: list[str] | None = None
    diagnosis: list[Finding] | None = None
    warmup_requests: Count | None = None
    spent_usd: Amount | None = None
    command_line: list[str] | None = None
    stages: list[StageEntry] | None = None
    seams: list[Seam] | None = None
    workload: Workload | None = None
    imported: Imported | None = None
    search: Search | None = None
    burst: Burst | None = None
    soak: Soak | None = None
    ab: AB | None = None
    fleet_inputs: FleetInputs | None = None


def read_stage(stage: Mapping[str, Any]) -> StageMeta:
    """Return the typed form of a stage that is still in memory: as run.json will have it."""
    return _typed(json.loads(json.dumps(stage)))  # numpy's floats are none to msgspec


def stages_of(meta: Mapping[str, Any]) -> list[StageMeta]:
    """Return the stages of run.json, which ``fault_of`` has checked."""
    return [_typed(stage, i) for i, stage in enumerate(meta.get("stages") or [])]


def _typed(stage: Mapping[str, Any], position: int = 0) -> StageMeta:
    kind = stage.get("kind") or ("closed" if stage.get("concurrency") else "open")
    index = stage.get("index")
    known = {"index": position if index is None else index, "kind": kind}
    return msgspec.convert({**stage, **known}, StageMeta)


def fault_of(meta: Mapping[str, Any]) -> str | None:
    """Return the first invalid entry in one line: name, value, what is expected; else None."""
    try:
        msgspec.convert(meta, RunMeta)
    except msgspec.ValidationError as error:
        expected, _, where = str(error).replace("`", "").partition(" - at $.")
        value: Any = meta
        for name, position in re.findall(r"(\w+)|\[(\d+)\]", where):
            value = value[name] if name else value[int(position)]
        fault = f"{where} is {repr(value)[:60]}: {expected[0].lower()}{expected[1:]}"
        return f"{fault}; no run writes that: the file was changed or is damaged"
    return None
