"""From usable requests/s to instances, GPUs and cost; rounding is exact."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any


class FleetError(ValueError):
    """Inputs from which no fleet can be computed; the message is one line."""


@dataclass(frozen=True)
class Fleet:
    """Whole instances, each of ``tensor_parallel`` GPUs."""

    instances_before_safety: int
    instances: int
    gpus: int
    one_replica_down: int


def _exact(value: float) -> Fraction:
    """The number as it is written: 1.1 is 11/10, so that 10 instances x 1.1 is 11 and not 12."""
    return Fraction(Decimal(repr(value)))


def size_fleet(
    peak_rps: float, usable_rps: float, safety_factor: float = 1.2, tensor_parallel: int = 1
) -> Fleet:
    """instances = ceil(ceil(peak / usable) x safety); one replica down = max(that, ceil(peak / usable) + 1).

    Raises FleetError where an input is not positive or the safety factor is below 1.
    """
    for name, value in (
        ("peak_rps", peak_rps),
        ("usable_rps", usable_rps),
        ("tensor_parallel", tensor_parallel),
    ):
        if not (math.isfinite(value) and value > 0):
            raise FleetError(f"{name} is {value}: it must be above zero")
    if not (math.isfinite(safety_factor) and safety_factor >= 1):
        raise FleetError(f"safety_factor is {safety_factor}: it must be 1 or more (1.2 adds 20 %)")
    before = math.ceil(_exact(peak_rps) / _exact(usable_rps))
    instances = math.ceil(before * _exact(safety_factor))
    return Fleet(before, instances, instances * tensor_parallel, max(instances, before + 1))


def cost_per_million_output_tokens(gpu_hour_usd: float, gpus: int, output_tokens_per_s: float) -> float:
    """Dollars per million output tokens of ``gpus`` GPUs that deliver that rate all the time. Raises FleetError."""
    if not output_tokens_per_s > 0:
        raise FleetError("output_tokens_per_s is zero: no cost per token")
    return gpu_hour_usd * gpus / (output_tokens_per_s * 3600) * 1e6


@dataclass(frozen=True)
class QueueDepth:
    """Requests that may wait, and where a circuit breaker should open (80-90 % of it)."""

    max_depth: int
    breaker_low: int
    breaker_high: int


def queue_depth(rate_rps: float, budget_s: float) -> QueueDepth:
    """Deepest queue that still empties within ``budget_s`` at ``rate_rps``: rate x budget. Raises FleetError."""
    if not (rate_rps > 0 and budget_s > 0):
        raise FleetError("rate and queue budget must be above zero")
    depth = math.floor(_exact(rate_rps) * _exact(budget_s))
    return QueueDepth(depth, depth * 8 // 10, depth * 9 // 10)


def summarise_fleet(
    inputs: dict[str, Any], usable_rps: float | None, output_tokens_per_s: float | None
) -> dict[str, Any]:
    """The ``fleet`` object from run.json's ``fleet_inputs`` and the measured capacity of one instance."""
    peak, safety = inputs.get("peak_rps"), inputs.get("safety_factor") or 1.2
    tensor_parallel, gpu_hour = inputs.get("tensor_parallel") or 1, inputs.get("gpu_hour_usd")
    result: dict[str, Any] = {
        "peak_rps": peak, "instances": None, "instances_before_safety": None, "gpus": None,
        "tensor_parallel": tensor_parallel, "safety_factor": safety, "one_replica_down": None,
        "cost_per_million_output_tokens": None, "reason": None,
    }  # fmt: skip
    if not usable_rps:
        return result | {"reason": "no usable rate inside an SLO was found"}
    try:
        if gpu_hour is not None and output_tokens_per_s:
            result["cost_per_million_output_tokens"] = cost_per_million_output_tokens(
                gpu_hour, tensor_parallel, output_tokens_per_s
            )
        if peak is None:
            return result | {"reason": "no peak rate given (--peak-rps)"}
        fleet = size_fleet(peak, usable_rps, safety, tensor_parallel)
    except FleetError as error:
        return result | {"reason": str(error)}
    return result | {
        "instances": fleet.instances, "instances_before_safety": fleet.instances_before_safety, "gpus": fleet.gpus,
        "one_replica_down": fleet.one_replica_down,
    }  # fmt: skip
