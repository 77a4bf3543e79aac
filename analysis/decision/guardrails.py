"""Choose the operating point of an instance, and the limits to set in front of it."""

from __future__ import annotations

import math

from ampacity.analysis.capacity.fleet import queue_depth
from ampacity.analysis.capacity.knee import knee_region
from ampacity.analysis.contract.figures import Spread
from ampacity.analysis.contract.part import Part
from ampacity.analysis.contract.summary import Summary

BREAKER = (0.8, 0.9)  # a breaker opens at this share of the queue's depth
ROUGH = 2.0  # high over low end of C_max: beyond it, a limit may refuse what the instance can carry
INPUT_FACTORS = (2, 3)  # a request longer than this times P95 is an accident, not traffic


class Guardrails(Part, frozen=True, kw_only=True):
    """Limits for one instance. What the run does not show is None, with its reason in ``missing``.

    They act in this order: requests in flight, the queue that waits for a place among them, the
    breaker where that queue is nearly full.

    ``operate_rps``: the rate to run at; ``wait_budget_s``: what a first token may wait in a queue;
    ``concurrency_limit``: the mean in flight at the capacity (C_max), rounded up: what comes beyond
    it would wait in the engine, and that wait belongs to the queue's budget. ``scale_in_flight``:
    the mean per instance at which to add one.
    """

    operate_rps: float | None
    operate_reason: str
    at_knee: str | None
    wait_budget_s: float | None
    queue_depth: int | None
    breaker: tuple[int, int] | None
    max_input_tokens: tuple[int, int] | None
    max_output_tokens: int | None
    concurrency_limit: int | None
    scale_in_flight: int | None
    prewarm_s: float | None
    missing: dict[str, str]


def operating_rate(summary: Summary, crowding: float = 1.0) -> tuple[float | None, str]:
    """Return (the rate to run an instance at, why).

    The lowest of the low end of the capacity's interval and the low end of the knee region, over
    ``crowding`` where the run had Poisson arrivals and the traffic crowds more within a minute.
    """
    capacity = summary.capacity
    if capacity.capacity_rps is None:
        return None, capacity.reason or "no capacity within the SLOs was found"
    low = (capacity.capacity_rps_ci or (None, None))[0]
    bound = capacity.crossing == "lower_bound" or not low
    choices = {
        "the low end of the capacity's interval": None if bound else low,
        "the highest load that met every SLO": capacity.verified_rps if bound else None,
        "the low end of the knee region": (summary.knee.region_rps or (None, None))[0],
    }
    known = {why: rate for why, rate in choices.items() if rate}
    if not known:
        return capacity.capacity_rps, "the capacity: its interval has no low end"
    why = min(known, key=lambda name: known[name])
    if crowding > 1 and str(summary.workload.get("arrivals")).startswith("poisson"):
        return known[why] / crowding, f"{why}, over {crowding:.3g} for bursts within a minute"
    return known[why], why


def guardrails(
    summary: Summary,
    wait_budget_s: float | None = None,
    cold_start_s: float | None = None,
    safety: float = 1.2,
    max_tokens: int | None = None,
    crowding: float = 1.0,
) -> Guardrails:
    """Return the limits for one instance; ``wait_budget_s`` None: what the TTFT limit leaves.

    ``max_tokens``: of the model's context, which prompt and answer share. ``crowding``: Poisson
    arrivals that fill a minute as the traffic does, over its peak.
    """
    rate, why = operating_rate(summary, crowding)
    missing: dict[str, str] = {}
    budget = _wait_budget_s(summary) if wait_budget_s is None else wait_budget_s
    if budget is None:
        missing["queue_depth"] = "no SLO on TTFT: give --wait-budget"
    depth = queue_depth(rate, budget) if rate and budget else None
    if budget is not None and rate and not depth:
        missing["queue_depth"] = (
            f"none at {rate:.3g} req/s, the wait budget of {1000 * budget:.3g} ms is too short: "
            "give --wait-budget"
        )
    c_max, unknown = _c_max(summary)
    if unknown:  # a queue is of those that find no place in flight
        missing["concurrency_limit"] = unknown
        missing.setdefault("queue_depth", "it takes a limit of the requests in flight")
    depth = depth if depth and c_max is not None else None
    inputs, outputs = _lengths(summary)
    if inputs is None:
        missing["max_input_tokens"] = "the run counted no input tokens"
    if cold_start_s is None:
        missing["prewarm_s"] = "no cold start was measured: give --cold-start"
    return Guardrails(
        operate_rps=rate,
        operate_reason=why,
        at_knee=knee_region(summary),
        wait_budget_s=budget,
        queue_depth=depth,
        breaker=None if depth is None else breaker_of(depth),
        max_input_tokens=None if inputs is None else _longest(inputs, outputs, max_tokens),
        max_output_tokens=None if outputs is None or outputs.p99 is None else int(outputs.p99),
        concurrency_limit=None if c_max is None else math.ceil(c_max),
        scale_in_flight=None if c_max is None else max(math.floor(c_max / safety), 1),
        prewarm_s=cold_start_s,
        missing=missing,
    )


def _c_max(summary: Summary) -> tuple[float | None, str | None]:
    """Return (C_max, None), or None and why it is no limit: nothing is refused by a rough figure."""
    capacity = summary.capacity
    if capacity.c_max is None:
        return None, "no C_max was found"
    low, high = capacity.c_max_ci or (None, None)
    if low and high is None:
        return None, "C_max is a lower bound: no load violated an SLO"
    if low and high and high > ROUGH * low:
        return (
            None,
            f"C_max is known too roughly ({low:.3g} to {high:.3g}): longer stages tell more",
        )
    return capacity.c_max, None


def breaker_of(depth: int) -> tuple[int, int] | None:
    """Return the queue lengths between which a circuit breaker should open; None: too short."""
    low, high = (math.floor(share * depth + 1e-9) for share in BREAKER)
    return (low, high) if low else None


def _wait_budget_s(summary: Summary) -> float | None:
    """Return the TTFT limit less the median TTFT at the lowest load."""
    limits = [slo.limit_s for slo in summary.slos if slo.metric == "ttft" and slo.limit_s]
    alone = [s.ttft_s.p50 for s in summary.stages if s.ttft_s.p50 is not None]
    if not limits or not alone:
        return None
    return max(min(limits) - min(alone), 0.0)


def _lengths(summary: Summary) -> tuple[Spread | None, Spread | None]:
    """Return the input and output lengths of the stage with the most requests, all classes."""
    stages = [t.classes for t in summary.traffic if t.classes]
    if not stages:
        return None, None
    classes = max(stages, key=lambda held: sum(c.requests for c in held))
    longest_in = max(classes, key=lambda c: c.input_tokens.p95 or 0.0).input_tokens
    longest_out = max(classes, key=lambda c: c.output_tokens.p99 or 0.0).output_tokens
    return (longest_in if longest_in.p95 else None, longest_out)


def _longest(inputs: Spread, outputs: Spread | None, max_tokens: int | None) -> tuple[int, int]:
    """Return 2 and 3 times the P95 of the inputs, as far as the context has room for them."""
    answer = outputs.p99 if outputs is not None and outputs.p99 else 0.0
    room = math.inf if max_tokens is None else max(max_tokens - answer, 1.0)
    low, high = (math.ceil(min(f * (inputs.p95 or 0.0), room)) for f in INPUT_FACTORS)
    return low, high
