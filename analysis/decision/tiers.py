"""Fleets of more than one kind of instance: tiers of models, and prefill apart from decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar

from ampacity.analysis.capacity.fleet import Traffic
from ampacity.analysis.capacity.fleet_figures import HOURS_PER_YEAR
from ampacity.analysis.contract.part import Interval, Part
from ampacity.analysis.contract.summary import Warned
from ampacity.analysis.decision.model import DecisionError
from ampacity.analysis.decision.plan import Plan

Mode = Literal["routing", "cascade", "pools"]
N = TypeVar("N", int, float)


class Tier(Part, frozen=True, kw_only=True):
    """One kind of instance: ``share`` of the requests, as stated; its own run, GPU and price."""

    name: str
    share: float
    gpu: str
    plan: Plan


class TierPlan(Part, frozen=True, kw_only=True):
    """Tiers for one peak.

    ``routing``: each request goes to one tier. ``cascade``: to the first, and what is not answered
    there on to the next. ``pools``: every request goes to every tier (prefill, then decoding).
    An interval is the sum of those of the tiers.
    ``ratio``: instances of the first pool / those of the second.
    """

    mode: Mode
    peak_rps: float
    tiers: list[Tier]
    instances: int
    instances_ci: tuple[int | None, int | None]
    gpus: int
    cost_per_hour: float | None
    cost_per_year: float | None
    cost_per_year_ci: Interval | None
    cost_per_thousand_requests: float | None
    ratio: float | None
    warnings: list[Warned]


def tier_traffic(traffic: Traffic, shares: Sequence[float], mode: Mode) -> list[Traffic]:
    """Return what each tier has to carry. Raises DecisionError where shares do not sum to 1.

    In a cascade a tier carries its own share and all that it passes on.
    """
    if mode == "pools":
        if any(share != 1 for share in shares):
            raise DecisionError(
                "every request passes every pool: each share is 1 with --mode pools"
            )
        return [traffic for _ in shares]
    if abs(sum(shares) - 1) > 1e-6:
        raise DecisionError(f"the shares of the tiers sum to {sum(shares):.4g}, not to 1")
    if mode == "cascade":
        shares = [sum(shares[number:]) for number in range(len(shares))]
    return [traffic.share(min(share, 1.0)) for share in shares]


def plan_tiers(mode: Mode, traffic: Traffic, tiers: list[Tier]) -> TierPlan:
    """Return the whole of the tiers; a request costs what the fleet costs over the mean load."""
    hours = [tier.plan.cost_per_hour for tier in tiers]
    hourly = None if None in hours else sum(hour or 0.0 for hour in hours)
    first, *others = (tier.plan for tier in tiers)
    # a cascade's and a pool's first tier sees every request
    load = first.load_rps + (sum(p.load_rps for p in others) if mode == "routing" else 0.0)
    pooled = mode == "pools" and len(tiers) == 2
    return TierPlan(
        mode=mode,
        peak_rps=traffic.peak_rps,
        tiers=tiers,
        instances=sum(tier.plan.instances for tier in tiers),
        instances_ci=_summed([tier.plan.instances_ci for tier in tiers]),
        gpus=sum(tier.plan.gpus for tier in tiers),
        cost_per_hour=hourly,
        cost_per_year=None if hourly is None else HOURS_PER_YEAR * hourly,
        cost_per_year_ci=None
        if hourly is None
        else _summed([tier.plan.cost_per_year_ci or (None, None) for tier in tiers]),
        cost_per_thousand_requests=None if hourly is None else 1000 * hourly / (3600 * load),
        ratio=tiers[0].plan.instances / tiers[1].plan.instances if pooled else None,
        warnings=[_mixed(traffic.peak_rps, tiers)] if mode == "routing" and others else [],
    )


def _summed(intervals: Sequence[tuple[N | None, N | None]]) -> tuple[N | None, N | None]:
    """Return the sum of intervals; an end that one of them lacks is None."""
    lows, highs = ([x for x in side if x is not None] for side in zip(*intervals, strict=True))
    n = len(intervals)
    return sum(lows) if len(lows) == n else None, sum(highs) if len(highs) == n else None


def _mixed(peak_rps: float, tiers: Sequence[Tier]) -> Warned:
    """Return what a round robin over all instances would do to the slowest tier."""
    slow = min(tiers, key=lambda tier: tier.plan.capacity_rps)
    total = sum(tier.plan.instances for tier in tiers)
    share = slow_replica_share(total, slow.plan.instances)
    text = (
        f"A round robin over all {total} instances would send {100 * share:.3g} % of the requests "
        f"to {slow.name} (its share is {100 * slow.share:.3g} %): {peak_rps / total:.3g} req/s an "
        f"instance at the peak, where one carries {slow.plan.capacity_rps:.3g}. Route by tier."
    )
    return Warned(code="mixed_tiers", text=text)


def slow_replica_share(replicas: int, slow: int = 1) -> float:
    """Return the share of the traffic that slow replicas get behind a round robin."""
    return slow / replicas
