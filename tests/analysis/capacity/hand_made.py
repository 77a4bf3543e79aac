"""A fleet, and stages with what capacity reads of them, made by hand."""

from typing import Any

from ampacity.analysis.capacity.fleet_figures import FleetInputs
from ampacity.analysis.capacity.limit import find_capacity as of_structs
from ampacity.analysis.contract.capacity import Capacity
from ampacity.analysis.slo import parse_slos
from tests.support.contract import on_stages

find_capacity = on_stages(of_structs)

SLOS = parse_slos(["ttft_p99=1s"])
# 52 GPUs at $2 carry 156/s: $104 an hour, at 40 % of use 224,640 requests
FLEET = FleetInputs(
    peak_rps=120,
    capacity_rps=12,
    safety_factor=1.3,
    tensor_parallel=4,
    gpu_hour_usd=2.0,
    utilisation=0.4,
    input_tokens=1000,
    cached_tokens=400,
    output_tokens=250,
)


def verdict(slo: str, value_s: float | None, share: float, n: float = 1000) -> dict[str, Any]:
    return {"slo": slo, "value_s": value_s, "attainment": share, "requests_effective": n}


def stage(
    index: int,
    load: float,
    p99: float | None,
    met: bool | None,
    *,
    kind: str = "open",
    achieved: float | None = None,
    p50: float = 0.1,
    share: float | None = None,
    effective: float = 1000,
    slo: str = "ttft_p99=1s",
    **changes: Any,
) -> dict[str, Any]:
    """A stage object with what capacity reads; ``share``: within the limit."""
    rate, is_open = load if achieved is None else achieved, kind == "open"
    figures = {"p50": p50, "p95": p99, "p99": p99}
    default = 1.0 if p99 is not None and p99 <= 1 else 0.9
    return {
        "index": index,
        "kind": kind,
        "offered_rps": load if is_open else None,
        "concurrency_set": None if is_open else int(load),
        "requests": 1000,
        "achieved_rps": rate,
        "arrived_rps": load if is_open else rate,
        "carried_rps": rate,
        "ended_early": None,
        "concurrency": load * 2,
        "client_limited": False,
        "stable": True,
        "slo_met": met,
        "slo_met_reason": "inconclusive: ttft_p99=1s: few",
        "ttft_from_schedule_s": figures,
        "e2e_from_schedule_s": figures,
        "slo_verdicts": [verdict(slo, p99, default if share is None else share, effective)],
        "classes": {},
        "window": {"start_s": 0.0, "end_s": 30.0, "warmup_requests": 0},
        "goodput_rps": rate if met else 0.0,
    } | changes


def capacity_of(*stages: dict[str, Any]) -> Capacity:
    return find_capacity(stages, SLOS)


LIMITED = stage(1, 20, 9.0, False, client_limited=True)
