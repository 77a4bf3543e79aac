"""The answer of ``size``: candidates with their thirteen steps, ranked where there are several."""

from __future__ import annotations

from collections.abc import Sequence

from ampacity.analysis.contract.limits import Limit
from ampacity.analysis.contract.part import Interval, Part
from ampacity.analysis.decision.disaggregation import Condition
from ampacity.analysis.decision.guardrails import Guardrails
from ampacity.analysis.decision.inputs import Range
from ampacity.analysis.decision.memory import Fit
from ampacity.analysis.decision.plan import Plan
from ampacity.analysis.decision.roofline import Use
from ampacity.analysis.decision.steps import Step


class UseAt(Part, frozen=True, kw_only=True):
    """The use of memory bandwidth and compute at one stage, as shares of the hardware's peak."""

    rps: float
    mbu: Range
    mfu: Range | None


class Candidate(Part, frozen=True, kw_only=True):
    """The answer for one run. ``plan`` null: no fleet, ``plan_missing`` says why.

    ``hardware_text``: how far the measured point is from its hardware, or why that is not known.
    """

    run: str
    predicted: bool
    slos: list[str]
    capacity_rps: float | None
    capacity_rps_ci: Interval | None
    verified_rps: float | None
    capacity_reason: str | None
    gpus: int
    model: str | None
    plan: Plan | None
    plan_missing: str | None
    steps: list[Step]
    limits: tuple[Limit, ...]
    guardrails: Guardrails
    memory: Fit | None
    hardware: Use | None
    hardware_text: str
    hardware_curve: list[UseAt]
    disaggregation: list[Condition]


class LeftOut(Part, frozen=True, kw_only=True):
    run: str
    reason: str


class Decision(Part, frozen=True, kw_only=True):
    """All candidates, the best first, at one SLO and one peak.

    ``apart``: one sentence for each after the first, whether the two can be told apart.
    """

    candidates: list[Candidate]
    apart: list[str]
    notes: list[str]
    left_out: list[LeftOut]


def rank(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the cheapest fleet first; without prices the smallest, then the highest capacity."""
    return sorted(candidates, key=lambda one: (_figure(one)[0], -(one.capacity_rps or 0.0)))


def told_apart(ranked: Sequence[Candidate]) -> list[str]:
    """Return for each candidate after the first whether it differs by more than its interval."""
    best, *others = ranked
    return [_against(best, other) for other in others]


def _against(best: Candidate, other: Candidate) -> str:
    (_, ends, what), (_, of_other, other_what) = _figure(best), _figure(other)
    names = f"{best.run} and {other.run}"
    if None in (*ends, *of_other) or what != other_what:
        return f"{names} cannot be compared: a capacity, a peak, a price or an interval is missing"
    if (ends[1] or 0.0) < (of_other[0] or 0.0):
        return f"{best.run} {what} {other.run}: the intervals do not meet"
    return f"{names} are not to be told apart: their intervals meet"


def _figure(one: Candidate) -> tuple[float, Interval, str]:
    """Return (what candidates are ranked by, its interval, how the lower one is called)."""
    plan = one.plan
    if plan is None:
        return float("inf"), (None, None), "needs less than"
    if plan.cost_per_year is not None:
        return plan.cost_per_year, plan.cost_per_year_ci or (None, None), "is cheaper than"
    low, high = plan.instances_ci
    gpus = plan.tensor_parallel
    return plan.gpus, (low and low * gpus, high and high * gpus), "needs fewer GPUs than"
