"""The whole of summary.json: read and written here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from ampacity.analysis.contract.burst import Burst
from ampacity.analysis.contract.capacity import (
    Capacity,
    ClassCapacity,
    Family,
    Fleet,
    Goodput,
    Knee,
    LittlesLawGap,
    Offline,
    Search,
)
from ampacity.analysis.contract.limits import Limit, Quota
from ampacity.analysis.contract.part import ContractError, Part
from ampacity.analysis.contract.soak import Soak
from ampacity.analysis.contract.stage import Stage
from ampacity.analysis.contract.traffic import Sessions, Sharing, Traffic
from ampacity.files import read_text


class Warned(Part, frozen=True, kw_only=True):
    code: str
    text: str


class Check(Part, frozen=True, kw_only=True):
    name: str
    verdict: Literal["ok", "note", "bad"]
    found: str
    means: str
    spoils: list[str] | None = None


class Network(Part, frozen=True, kw_only=True):
    connect_s: float | None
    request_s: float | None
    ttft_p50_s: float | None
    share: float | None
    share_reason: str | None


class Definition(Part, frozen=True, kw_only=True):
    """A figure that the other tool defines otherwise."""

    what: str
    theirs: str
    ours: str | None = None


class Imported(Part, frozen=True, kw_only=True):
    tool: str
    tool_version: str | None
    files: list[Any]
    definitions: list[Definition]
    missing: dict[str, str]
    notes: list[str]


class SloLimit(Part, frozen=True, kw_only=True):
    metric: str
    text: str
    quantile: float | None
    limit_s: float | None
    first_s: float | None = None
    source: str | None = None
    class_: str | None = msgspec.field(name="class", default=None)


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


class Seam(Part, frozen=True, kw_only=True):
    """The place where a run was cut off and resumed."""

    after_stage: int
    reason: str
    resumed_utc: str
    gap_s: float
    wall_gap_s: float
    in_flight: int


class Summary(Part, frozen=True, kw_only=True):
    """The whole of summary.json."""

    schema_version: int
    verdict: str
    partial: str | None
    predicted: bool
    simulated: bool
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
    error_examples: dict[str, str]
    retries: int = 0
    spent_usd: float | None = None
    quota: Quota | None = None
    seams: tuple[Seam, ...] = ()
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
    limits: tuple[Limit, ...] = ()
    audit: Audit
    next_command: str | None = None
    search: Search | None = None
    burst: Burst | None = None
    soak: Soak | None = None


def read_summary(source: Mapping[str, Any] | Path) -> Summary:
    """Convert a summary, or the file of one. Raises ContractError, which names the field."""
    try:
        if isinstance(source, Path):
            return msgspec.json.decode(read_text(source), type=Summary)
        return msgspec.convert(source, Summary)
    except (msgspec.MsgspecError, OSError, UnicodeDecodeError, RecursionError) as error:
        where = f"{source}: " if isinstance(source, Path) else ""
        raise ContractError(f"{where}not a summary.json of this version: {error}") from error


def to_json(part: Part) -> dict[str, Any]:
    """Return a struct as the object that summary.json holds."""
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(part))
    return plain
