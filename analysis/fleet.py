"""From usable requests/s to instances, GPUs and cost; rounding is exact."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

AT_USABLE = "one instance at its usable rate"  # what a cost is of; a plan's is of the whole fleet


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
    for name, value in {
        "--peak-rps": peak_rps,
        "the usable rate": usable_rps,
        "--tp": tensor_parallel,
    }.items():
        if not (math.isfinite(value) and value > 0):
            raise FleetError(f"{name} is {value}: it must be above zero")
    if not (math.isfinite(safety_factor) and safety_factor >= 1):
        raise FleetError(f"--safety is {safety_factor}: it must be 1 or more (1.2 adds 20 %)")
    before = math.ceil(_exact(peak_rps) / _exact(usable_rps))
    instances = math.ceil(before * _exact(safety_factor))
    return Fleet(before, instances, instances * tensor_parallel, max(instances, before + 1))


def cost_per_million_output_tokens(gpu_hour_usd: float, gpus: int, output_tokens_per_s: float) -> float:
    """Dollars per million output tokens of ``gpus`` GPUs that deliver that rate all the time. Raises FleetError."""
    if not output_tokens_per_s > 0:
        raise FleetError("no output tokens were delivered: no cost per token")
    return gpu_hour_usd * gpus / (output_tokens_per_s * 3600) * 1e6


def queue_depth(rate_rps: float, budget_s: float) -> int:
    """Deepest queue that still empties within ``budget_s`` at ``rate_rps``: rate x budget. Raises FleetError."""
    if not (rate_rps > 0 and budget_s > 0):
        raise FleetError("rate and queue budget must be above zero")
    return math.floor(_exact(rate_rps) * _exact(budget_s))


def summarise_fleet(
    inputs: dict[str, Any], usable_rps: float | None, output_tokens: float | None
) -> dict[str, Any]:
    """The ``fleet`` object from run.json's ``fleet_inputs``, the capacity of one instance and the mean tokens of an answer."""
    peak, safety = inputs.get("peak_rps"), inputs.get("safety_factor") or 1.2
    tensor_parallel, gpu_hour = inputs.get("tensor_parallel") or 1, inputs.get("gpu_hour_usd")
    result: dict[str, Any] = {
        "peak_rps": peak, "instances": None, "instances_before_safety": None, "gpus": None,
        "tensor_parallel": tensor_parallel, "safety_factor": safety, "one_replica_down": None,
        "gpu_hour_usd": gpu_hour, "cost_per_million_output_tokens": None, "reason": None,
    }  # fmt: skip
    if not usable_rps:
        return result | {"reason": "no usable rate inside an SLO was found"}
    try:
        if gpu_hour is not None and output_tokens:
            result["cost_per_million_output_tokens"] = cost_per_million_output_tokens(
                gpu_hour, tensor_parallel, usable_rps * output_tokens
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


STEADY, BURSTY = 1.2, 1.5
STEADY_CV = 0.3  # of the requests/s of whole minutes
HISTORY_S = 7 * 86_400.0  # less does not show a week's own rhythm
PROFILE_REQUESTS = 100  # fewer show neither a rate nor how it varies
PEAK_WINDOWS_S = (10, 60)  # a second is shorter than a request: what one second brings is no load


@dataclass(frozen=True)
class Traffic:
    """What the fleet has to carry. Rates in requests/s; None: not known."""

    peak_rps: float
    mean_rps: float | None = None
    rate_cv: float | None = None  # of the rate over whole minutes (or the longest windows that there are)
    history_s: float | None = None
    source: str = "given"
    peak_reason: str = "as given"


def traffic_of_profile(profile: Mapping[str, Any], peak_rps: float | None = None) -> Traffic:
    """Peak, mean and variance from a profile of ``workload fit``. Raises FleetError.

    The peak is comparable with a usable rate, which is a mean of Poisson arrivals and contains their crowded seconds: the
    rate of Poisson arrivals that have such a P99 over windows as the profile, the higher one of ``PEAK_WINDOWS_S`` (a
    second, where the profile has no longer ones), the mean at least. With index of dispersion I = variance / mean of
    the counts in windows of w seconds, the rate's own coefficient of variation is sqrt((I - 1) / (rate w)).
    """
    measured = profile.get("measured") if isinstance(profile, Mapping) else None
    held = (measured or {}).get("arrivals") if isinstance(measured or {}, Mapping) else None
    if not isinstance(held, Mapping) or not all(_positive(held.get(k)) for k in ("mean_rps", "rps_p99")):
        raise FleetError(
            "the profile holds no measured arrivals (measured: arrivals: mean_rps, rps_p99): make one with 'ampacity workload fit'"
        )
    requests = float((measured or {}).get("requests") or math.inf)
    if requests < PROFILE_REQUESTS:
        raise FleetError(
            f"the profile rests on {requests:g} requests, which show neither peak nor variance: fit at least "
            f"{PROFILE_REQUESTS}, or give --peak-rps alone"
        )
    mean, dispersion, cv = float(held["mean_rps"]), held.get("dispersion") or {}, None
    for name in ("1s", "10s", "60s"):
        if isinstance(dispersion, Mapping) and _positive(dispersion.get(name)):
            cv = math.sqrt(max(0.0, float(dispersion[name]) - 1) / (mean * float(name[:-1])))
    span = held.get("span_s") or 0.0
    history = float(span) if _positive(span) else None
    if peak_rps:
        return Traffic(peak_rps, mean, cv, history, "profile")
    p99 = held.get("p99_rps") or {}
    seen = {w: float(p99[f"{w}s"]) for w in PEAK_WINDOWS_S if _positive(p99.get(f"{w}s"))}
    seen = seen or {1: float(held["rps_p99"])}
    peaks = {w: max(mean, poisson_rate_rps(at, w)) for w, at in seen.items()}
    width = max(peaks, key=lambda w: peaks[w])
    why = (
        f"{peaks[width]:.3g} requests/s of Poisson arrivals, as the usable rate was measured with, have such a P99 of the rate over "
        f"windows of {width} s as the profile: {seen[width]:.3g}; its mean is {mean:.3g}"
    )
    return Traffic(peaks[width], mean, cv, history, "profile", why)


def poisson_rate_rps(p99_rps: float, window_s: float) -> float:
    """The rate of a Poisson process whose P99 of the rate over windows is ``p99_rps``: m with P[N <= p99 w; m w] = 0.99."""
    from scipy.special import pdtri

    return float(pdtri(round(p99_rps * window_s), 0.99)) / window_s


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def choose_safety(traffic: Traffic) -> tuple[float, str]:
    """(1.2 or 1.5, why): 20 % on top where a week of history shows a steady rate, 50 % where it does not."""
    if traffic.rate_cv is None and traffic.history_s is None:
        return (
            STEADY,
            "20 %: nothing is known of the traffic's variance (--profile); take 1.5 where it comes in bursts",
        )
    if traffic.rate_cv is None:
        return BURSTY, "50 %: the history is too short to show how much the rate varies"
    varies = f"the rate varies by {100 * traffic.rate_cv:.0f} % (coefficient of variation over windows of up to a minute)"
    if traffic.rate_cv > STEADY_CV:
        return BURSTY, f"50 %: {varies}, more than {100 * STEADY_CV:.0f} %"
    if traffic.history_s is None or traffic.history_s < HISTORY_S:
        days = (traffic.history_s or 0.0) / 86_400
        return BURSTY, f"50 %: {varies}, but {days:.2g} days of history do not show a week"
    return STEADY, f"20 %: {varies}, over {traffic.history_s / 86_400:.3g} days of history"


@dataclass(frozen=True)
class Carried:
    """What one instance carries at its usable rate. Tokens are means of a request, ``good_share`` those within the SLOs."""

    usable_rps: float
    usable_rps_ci: tuple[float | None, float | None]
    input_tokens: float | None
    output_tokens: float | None
    good_share: float | None


def plan_fleet(
    traffic: Traffic,
    carried: Carried,
    tensor_parallel: int = 1,
    safety: float | None = None,
    gpu_hour_usd: float | None = None,
) -> dict[str, Any]:
    """The fleet for a peak, its interval (an end that is None or 0 is not known), utilisation and cost. Raises FleetError.

    utilisation = mean load / (instances x usable rate); the fleet is paid for whether it is used or not, so a cost
    per token is hourly cost / tokens really served in an hour. Input, output and all tokens each bear the whole cost.
    """
    chosen, why = choose_safety(traffic)
    factor, why = (chosen, why) if safety is None else (safety, "as given")
    fleet = size_fleet(traffic.peak_rps, carried.usable_rps, factor, tensor_parallel)
    ends = [size_fleet(traffic.peak_rps, end, factor, tensor_parallel) if end else None for end in carried.usable_rps_ci]  # fmt: skip
    load = traffic.peak_rps if traffic.mean_rps is None else traffic.mean_rps
    result: dict[str, Any] = {
        "peak_rps": traffic.peak_rps, "peak_reason": traffic.peak_reason, "mean_rps": traffic.mean_rps, "traffic": traffic.source, "usable_rps": carried.usable_rps,
        "usable_rps_ci": list(carried.usable_rps_ci), "safety_factor": factor, "safety_reason": why,
        "instances_before_safety": fleet.instances_before_safety, "instances": fleet.instances,
        "instances_ci": [ends[1] and ends[1].instances, ends[0] and ends[0].instances],  # the high end needs the fewest
        "tensor_parallel": tensor_parallel, "gpus": fleet.gpus, "one_replica_down": fleet.one_replica_down,
        "one_replica_down_gpus": fleet.one_replica_down * tensor_parallel, "gpu_hours_per_day": 24 * fleet.gpus,
        "utilisation": load / (fleet.instances * carried.usable_rps),
        "utilisation_at": "the peak: no mean load is known" if traffic.mean_rps is None else "the mean load",
    }  # fmt: skip
    return result | _costs(fleet.gpus, gpu_hour_usd, load, carried)


def _costs(gpus: int, gpu_hour_usd: float | None, load_rps: float, carried: Carried) -> dict[str, Any]:
    hourly = None if gpu_hour_usd is None else gpus * gpu_hour_usd
    tokens = {"input_tokens": carried.input_tokens, "output_tokens": carried.output_tokens}
    both = [t for t in tokens.values() if t is not None]
    tokens["tokens"] = sum(both) if len(both) == 2 else None
    costs: dict[str, Any] = {"gpu_hour_usd": gpu_hour_usd, "cost_per_hour": hourly}
    for name, each in tokens.items():
        costs[f"cost_per_million_{name}"] = hourly / (3600 * load_rps * each) * 1e6 if hourly and each else None  # fmt: skip
    good = carried.good_share
    return costs | {"cost_per_thousand_good_requests": hourly / (3600 * load_rps * good) * 1e3 if hourly and good else None}  # fmt: skip
