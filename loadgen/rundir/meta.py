"""The shape of run.json, as far as anything reads it; unnamed entries may hold anything."""

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta


def _object(needs: tuple[str, ...] = (), **fields: Any) -> Any:
    """Return a JSON object type; ``needs`` are required, other fields may be missing or null."""
    must = [(name, fields[name]) for name in needs]
    can = [(name, kind | None, None) for name, kind in fields.items() if name not in needs]
    return msgspec.defstruct("Object", [*must, *can])


def _list(kind: Any) -> Any:  # list[_STAGE] is no valid type for mypy
    return list[kind]


_AMOUNT: Any = Annotated[float, Meta(ge=0, le=2.0**62)]
_COUNT: Any = Annotated[int, Meta(ge=0, le=2 * 10**7)]  # of requests
_TIME_NS: Any = Annotated[int, Meta(ge=-(2**62), le=2**62)]
_COUNT_NS: Any = Annotated[int, Meta(ge=0, le=2**62)]
_PART_S: Any = Annotated[float, Meta(ge=0.1, le=30 * 86_400.0)]
_ANY_OBJECT: Any = dict[str, Any]
_AUDIT = _object(
    slip_p50_s=_AMOUNT,
    slip_p99_s=_AMOUNT,
    slip_max_s=_AMOUNT,
    loop_lag_p99_s=_AMOUNT,
    receive_delay_p99_s=_AMOUNT,
    busiest=_list(_object(("name", "cores"), name=str, cores=_AMOUNT)),
    stalls=_list(tuple[_COUNT, _TIME_NS, _TIME_NS]),
    dated_by_kernel=bool,
    coalesced_share=_AMOUNT,
    cpu_fraction=_AMOUNT,
    rss_bytes=_AMOUNT,
    resent=_COUNT,
    unsolicited=_COUNT,
    client_limited=bool,
    client_limited_reason=str,
    workers=_list(_object(("worker",), worker=_COUNT, node=str, cpu_fraction=_AMOUNT)),
)
_TOKENS: Any = Annotated[int, Meta(ge=0, le=2**31)]
_STAGE = _object(
    ("start_ns", "end_ns"),
    index=_COUNT,
    kind=Literal["open", "closed"],
    schedule=_COUNT,
    lengths=str,
    offered_rps=_AMOUNT,
    concurrency=_COUNT,
    start_ns=_TIME_NS,
    end_ns=_TIME_NS,
    drained_ns=_TIME_NS,
    ramp_s=_AMOUNT,
    scheduled_requests=_COUNT,
    sessions=_object(cut=list[str]),
    cached_share_planned=_AMOUNT,
    ended_early=str,
    clocks=_list(_object(("node",), node=str, ahead_ns=_TIME_NS, bound_ns=_COUNT_NS)),
    planned_s=_AMOUNT,
    interrupted=bool,
    cut_ns=_TIME_NS,
    decided_early=str,
    alpha=Annotated[float, Meta(gt=0, lt=1)],
    continues=_COUNT,
    audit=_AUDIT,
    from_s=_AMOUNT,
)
_SEAM = _object(
    ("after_stage", "reason", "resumed_utc", "gap_s", "wall_gap_s", "in_flight"),
    after_stage=int,
    reason=str,
    resumed_utc=str,
    gap_s=_AMOUNT,
    wall_gap_s=Annotated[float, Meta(ge=-(2.0**62), le=2.0**62)],
    in_flight=_COUNT,
)
_STEP = _object(("stage", "offered_rps", "why"), stage=_COUNT, offered_rps=_AMOUNT, why=str)
_LENGTHS = _object(p50=_AMOUNT, text=str)
_FINDING = _object(
    ("name", "verdict", "found", "means"),
    name=str,
    verdict=Literal["ok", "note", "bad"],
    found=str,
    means=str,
    spoils=list[str],
)
_DEFINITION = _object(("what", "theirs"), what=str, theirs=str, ours=str)
_RUN_JSON = _object(
    status=str,
    status_reason=str,
    predicted=bool,
    started_utc=str,
    tool=_ANY_OBJECT,
    clock=_object(("monotonic_ns", "utc"), monotonic_ns=_TIME_NS, utc=datetime),
    endpoint=_ANY_OBJECT,
    locked=_object(max_model_len=_TOKENS | str, think_s=_AMOUNT),  # str: of --lock
    host=_object(cpus=_COUNT),
    workers=_COUNT,
    seed=Annotated[int, Meta(ge=0)],
    slos=_list(_ANY_OBJECT),
    notes=list[str],
    events=list[str],
    diagnosis=_list(_FINDING),
    warmup_requests=_COUNT,
    spent_usd=_AMOUNT,
    command_line=list[str],
    stages=_list(_STAGE),
    seams=_list(_SEAM),
    workload=_object(
        input_tokens=_LENGTHS,
        output_tokens=_LENGTHS,
        classes=_list(_object(name=str, weight=_AMOUNT)),
        trace=_object(requests=_COUNT),
        turns_beyond_context=_COUNT,
        clipped_to_context=_COUNT,
    ),
    imported=_object(("tool",), tool=str, definitions=_list(_DEFINITION), missing=dict[str, str]),
    search=_object(
        ("precision",),
        precision=_AMOUNT,
        reached=bool,
        ended=str,
        more_requests=_COUNT,
        path=_list(_STEP),
    ),
    burst=_object(
        ("base_rps", "base_s", "burst_s", "recovery_s"),
        base_rps=Annotated[float, Meta(gt=0, le=2.0**62)],
        base_s=_PART_S,
        burst_s=_PART_S,
        recovery_s=_PART_S,
        factor=_AMOUNT,
        shape=str,
    ),
    soak=_object(
        ("rate_rps", "duration_s", "window_s"),
        rate_rps=_AMOUNT,
        duration_s=_PART_S,
        window_s=_PART_S,
    ),
    ab=_object(("pair", "arm"), pair=str, arm=Literal["a", "b"], rounds=_COUNT, aa=bool),
    fleet_inputs=_object(
        peak_rps=_AMOUNT, tensor_parallel=_COUNT, safety_factor=_AMOUNT, gpu_hour_usd=_AMOUNT
    ),
)


def fault_of(meta: Mapping[str, Any]) -> str | None:
    """Return the first invalid entry in one line: name, value, what is expected; else None."""
    try:
        msgspec.convert(meta, _RUN_JSON)
    except msgspec.ValidationError as error:
        expected, _, where = str(error).replace("`", "").partition(" - at $.")
        value: Any = meta
        for name, position in re.findall(r"(\w+)|\[(\d+)\]", where):
            value = value[name] if name else value[int(position)]
        fault = f"{where} is {repr(value)[:60]}: {expected[0].lower()}{expected[1:]}"
        return f"{fault}; no run writes that: the file was changed or is damaged"
    return None
