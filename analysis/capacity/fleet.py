"""From the capacity of an instance to instances, GPUs and cost; rounding is exact."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from ampacity.analysis.capacity.fleet_figures import (
    FleetError,
    FleetFigures,
    FleetInputs,
    exact,
    fleet_figures,
)
from ampacity.analysis.capacity.levels import good_share_at
from ampacity.analysis.contract.capacity import Capacity, Fleet
from ampacity.analysis.contract.part import with_nulls
from ampacity.analysis.contract.stage import Stage

AT_USABLE = "one instance at its capacity"  # what a cost is of; a plan's is of the whole fleet
NO_PEAK = "no peak rate given (--peak-rps)"
AT_FULL_LOAD = "at full load"
NO_ARRIVALS = (
    "the profile holds no measured arrivals (measured: arrivals: mean_rps, rps_p99): make one with "
    "'ampacity workload fit'"
)
DAMAGED = "measured: arrivals: busy_hour is not as 'ampacity workload fit' wrote it: fit anew"
SIZED = ("instances_before_safety", "instances", "gpus", "one_replica_down")
STEADY, BURSTY = 1.2, 1.5
LONG_REQUESTS = 4  # P95 / P50 of the lengths
STEADY_CV = 0.3  # of the requests/s of whole minutes
HISTORY_S = 7 * 86_400.0  # less does not show a week's own rhythm
PROFILE_REQUESTS = 100  # fewer show neither a rate nor how it varies
PEAK_WINDOWS_S = (10, 60)  # a second is shorter than a request: what one second brings is no load


def cost_per_million_output_tokens(
    gpu_hour_usd: float, gpus: int, output_tokens_per_s: float
) -> float:
    """Return the dollars per million output tokens of ``gpus`` GPUs that deliver that rate all the
    time. Raises FleetError.
    """
    if not output_tokens_per_s > 0:
        raise FleetError("no output tokens were delivered: no cost per token")
    return gpu_hour_usd * gpus / (output_tokens_per_s * 3600) * 1e6


def queue_depth(rate_rps: float, budget_s: float) -> int:
    """Return the deepest queue that still empties within ``budget_s`` at ``rate_rps``.

    Rate x budget. Raises FleetError.
    """
    if not (rate_rps > 0 and budget_s > 0):
        raise FleetError("rate and queue budget must be above zero")
    return math.floor(exact(rate_rps) * exact(budget_s))


@dataclass(frozen=True)
class Traffic:
    """Traffic that the fleet has to carry. Rates in requests/s; None: not known."""

    peak_rps: float
    mean_rps: float | None = None
    # of the rate over whole minutes (or the longest windows that there are)
    rate_cv: float | None = None
    history_s: float | None = None
    source: str = "given"
    mean_reason: str | None = None
    peak_reason: str = "as given"
    # 95 %; None: the peak is a number that was given
    peak_rps_ci: tuple[float, float] | None = None
    # Poisson arrivals that fill short windows as this traffic does
    crowded_rps: float | None = None
    # how long some requests are against the median; None: not so much
    long_requests: str | None = None

    def share(self, share: float) -> Traffic:
        """Return the traffic of a part of the requests."""
        low_high = self.peak_rps_ci and (share * self.peak_rps_ci[0], share * self.peak_rps_ci[1])
        return dataclasses.replace(
            self,
            peak_rps=share * self.peak_rps,
            peak_rps_ci=low_high,
            mean_rps=self.mean_rps and share * self.mean_rps,
            crowded_rps=self.crowded_rps and share * self.crowded_rps,
        )


_Positive = Annotated[float, Meta(gt=0, le=1e300)]


class _BusyHour(msgspec.Struct):
    rps: _Positive
    rps_ci: tuple[float, float]
    window_s: _Positive


class _Arrivals(msgspec.Struct):
    mean_rps: _Positive
    rps_p99: _Positive
    p99_rps: dict[str, float | None] = {}
    dispersion: dict[str, float | None] = {}
    span_s: float | None = None
    busy_hour: _BusyHour | None = None


class _Measured(msgspec.Struct):
    arrivals: _Arrivals
    requests: float | None = None


class _Profile(msgspec.Struct):
    measured: _Measured


def traffic_of_profile(profile: Mapping[str, Any], peak_rps: float | None = None) -> Traffic:
    """Return the peak, mean and variance from a profile of ``workload fit``. Raises FleetError.

    The peak is the rate of the busiest hour with its interval
    (``ampacity.workloads.fit.busy_hour``); of a profile without one ``crowded_rps`` replaces it.
    With index of dispersion I = variance / mean of the counts in windows of w seconds, the rate's
    own coefficient of variation is sqrt((I - 1) / (rate w)).
    """
    try:
        measured = msgspec.convert(profile, _Profile).measured
    except msgspec.ValidationError as error:
        raise FleetError(DAMAGED if "busy_hour" in str(error) else NO_ARRIVALS) from None
    if 0 < (measured.requests or 0) < PROFILE_REQUESTS:
        raise FleetError(
            f"the profile rests on {measured.requests:g} requests, which show neither peak nor "
            f"variance: fit at least {PROFILE_REQUESTS}, or give --peak-rps alone"
        )
    held, cv = measured.arrivals, None
    for window_s in (1, 10, 60):
        if (dispersion := held.dispersion.get(f"{window_s}s") or 0.0) > 0:
            cv = math.sqrt(max(0.0, dispersion - 1) / (held.mean_rps * window_s))
    crowded_rps, why = _crowded(held)
    known = Traffic(
        crowded_rps,
        held.mean_rps,
        rate_cv=cv,
        history_s=held.span_s or None,
        source="profile",
        mean_reason="mean of the profile / what the fleet carries",
        crowded_rps=crowded_rps,
    )
    if peak_rps:
        of_profile = held.busy_hour.rps if held.busy_hour else crowded_rps
        shape = min(held.mean_rps / of_profile, 1.0)
        why = f"the peak x {shape:.2f}, as mean / busiest hour of the profile"
        return dataclasses.replace(
            known, peak_rps=peak_rps, mean_rps=shape * peak_rps, mean_reason=why
        )
    if (busy := held.busy_hour) is None:
        return dataclasses.replace(
            known, peak_reason=f"the profile holds no busy hour (fit its log again): {why}"
        )
    low, high = busy.rps_ci
    if not 0 <= low <= busy.rps <= high < math.inf:
        raise FleetError(DAMAGED)
    length = "hour" if busy.window_s == 3600 else f"{busy.window_s / 60:.3g} minutes"
    why = (
        f"the busiest {length} of the profile, 95 % interval {low:.4g} to {high:.4g}; its mean is "
        f"{held.mean_rps:.3g}"
    )
    return dataclasses.replace(known, peak_rps=busy.rps, peak_rps_ci=busy.rps_ci, peak_reason=why)


def _crowded(held: _Arrivals) -> tuple[float, str]:
    """Return (Poisson arrivals with the P99 of the rate over short windows, why).

    The higher of those of ``PEAK_WINDOWS_S``, and the mean at least.
    """
    seen = {w: p99 for w in PEAK_WINDOWS_S if (p99 := held.p99_rps.get(f"{w}s") or 0.0) > 0}
    seen = seen or {1: held.rps_p99}
    peaks = {w: max(held.mean_rps, poisson_rate_rps(p99, w)) for w, p99 in seen.items()}
    width = max(peaks, key=lambda w: peaks[w])
    why = (
        f"{peaks[width]:.3g} requests/s of Poisson arrivals have such a P99 of the rate over "
        f"windows of {width} s as the profile: {seen[width]:.3g}; its mean is {held.mean_rps:.3g}"
    )
    return peaks[width], why


def poisson_rate_rps(p99_rps: float, window_s: float) -> float:
    """Return the rate of a Poisson process whose P99 of the rate over windows is ``p99_rps``.

    M with P[N <= p99 w; m w] = 0.99.
    """
    from scipy.special import pdtri

    return float(pdtri(round(p99_rps * window_s), 0.99)) / window_s


def choose_safety(traffic: Traffic | None) -> tuple[float, str]:
    """Return (1.2 or 1.5, why): 1.2 where a week of history shows a steady rate."""
    if traffic is None or (traffic.rate_cv is None and traffic.history_s is None):
        return BURSTY, "50 %: no history of the traffic shows stable peaks (--profile)"
    if traffic.rate_cv is None:
        return BURSTY, "50 %: the history is too short to show how much the rate varies"
    varies = (
        f"the rate varies by {100 * traffic.rate_cv:.0f} % (coefficient of variation over windows "
        "of up to a minute)"
    )
    if traffic.rate_cv > STEADY_CV:
        return BURSTY, f"50 %: {varies}, more than {100 * STEADY_CV:.0f} %"
    days = (traffic.history_s or 0.0) / 86_400
    if (traffic.history_s or 0.0) < HISTORY_S:
        return BURSTY, f"50 %: {varies}, but {days:.2g} days of history do not show a week"
    if traffic.long_requests is not None:
        return BURSTY, f"50 %: {traffic.long_requests}"
    return STEADY, f"20 %: {varies}, over {days:.3g} days of history"


def long_requests(lengths: Sequence[tuple[str, float | None, float | None]]) -> str | None:
    """Return which lengths vary much, from (name, P50, P95) of each; None: none does.

    P95 above 4 x P50, which is a coefficient of variation above 1 where lengths are lognormal.
    """
    for name, p50, p95 in lengths:
        if p50 and p95 and p95 > LONG_REQUESTS * p50:
            return f"lengths vary much ({name} tokens: P95 is {p95 / p50:.1f} x P50)"
    return None


@dataclass(frozen=True)
class Carried:
    """Rates that one instance carries at its capacity.

    Tokens are means of a request, ``good_share`` those within the SLOs.
    """

    capacity_rps: float
    capacity_rps_ci: tuple[float | None, float | None]  # an end that is None or 0 is not known
    input_tokens: float | None
    output_tokens: float | None
    good_share: float | None


def carried_by(
    capacity: Capacity,
    stages: Sequence[Stage],
    input_tokens: float | None,
    output_tokens: float | None,
) -> Carried | None:
    """Return what one instance carries, from ``capacity``; None where there is no capacity."""
    rate = capacity.capacity_rps
    if not rate:
        return None
    low, high = capacity.capacity_rps_ci or (None, None)
    return Carried(
        rate,
        (None, rate) if capacity.crossing == "saturated" else (low, high),
        input_tokens,
        output_tokens,
        good_share_at(stages, capacity.c_max_basis, rate),
    )


def fleet_of(
    traffic: Traffic | None,
    carried: Carried | None,
    tensor_parallel: int = 1,
    safety: float | None = None,
    gpu_hour_usd: float | None = None,
) -> Fleet:
    """Return the fleet; ``safety`` None: as the traffic asks for.

    What is not known is None with a reason. The interval runs from the low end of the peak at the
    high end of the capacity to the high end at the low end.
    """
    factor, why = (safety, "as given") if safety is not None else choose_safety(traffic)
    result = with_nulls(
        Fleet,
        peak_rps=traffic and traffic.peak_rps,
        peak_rps_ci=traffic and traffic.peak_rps_ci,
        peak_reason=traffic and traffic.peak_reason,
        safety_factor=factor,
        safety_reason=why,
        tensor_parallel=tensor_parallel,
        gpu_hour_usd=gpu_hour_usd,
    )
    if carried is None:
        return replace(result, reason="no capacity within the SLOs was found")
    try:
        if gpu_hour_usd is not None and carried.output_tokens:
            cost = cost_per_million_output_tokens(
                gpu_hour_usd, tensor_parallel, carried.capacity_rps * carried.output_tokens
            )
            result = replace(result, cost_per_million_output_tokens=cost)
        if traffic is None:
            return replace(result, reason=NO_PEAK)
        peaks = traffic.peak_rps_ci or (traffic.peak_rps, traffic.peak_rps)
        rates = [carried.capacity_rps, *reversed(carried.capacity_rps_ci)]
        fleet, low, high = (
            _sized(peak, rate, factor, tensor_parallel)
            for peak, rate in zip((traffic.peak_rps, *peaks), rates, strict=True)
        )
    except FleetError as error:
        return replace(result, reason=str(error))
    assert fleet is not None
    ends = (low and low.instances, high and high.instances)
    return replace(result, instances_ci=ends, **{name: getattr(fleet, name) for name in SIZED})


def _sized(
    peak_rps: float, capacity_rps: float | None, safety: float, tensor_parallel: int
) -> FleetFigures | None:
    if not (peak_rps and capacity_rps):
        return None
    return fleet_figures(
        FleetInputs(
            peak_rps=peak_rps,
            capacity_rps=capacity_rps,
            safety_factor=safety,
            tensor_parallel=tensor_parallel,
        )
    )


def instances_text(number: int | None, ends: tuple[int | None, int | None] | None) -> str:
    """Return the instances with their range.

    ``10 instances (9 to 15)``, ``at most 10 instances``.
    """
    low, high = ends or (None, None)
    text = f"{number:,} instance{'' if number == 1 else 's'}"
    if low is None or high is None:
        bound, end = ("at most", high) if low is None else ("at least", low)
        if end is None:
            return f"{text} (range unknown)"
        return f"{bound} {text}" if end == number else f"{text} ({bound} {end:,})"
    return (
        f"{text} at either end of the interval" if low == high else f"{text} ({low:,} to {high:,})"
    )
