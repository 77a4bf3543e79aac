"""Fleets of more than one kind of instance: tiers of models, and prefill apart from decoding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ampacity.analysis.decision.model import DecisionError


@dataclass(frozen=True)
class Tier:
    """One kind of instance: what it carries within the SLO and costs; ``share`` of the requests."""

    name: str
    share: float
    capacity_rps: float
    gpus: int
    gpu_hour_usd: float | None = None


@dataclass(frozen=True)
class TierFleet:
    """The instances of one tier at the peak."""

    tier: Tier
    peak_rps: float
    instances_before_safety: int
    instances: int

    @property
    def gpus(self) -> int:
        return self.instances * self.tier.gpus

    @property
    def usd_per_hour(self) -> float | None:
        return None if self.tier.gpu_hour_usd is None else self.gpus * self.tier.gpu_hour_usd


def size_tiers(
    tiers: Sequence[Tier], peak_rps: float, safety: float, *, cascade: bool = False
) -> list[TierFleet]:
    """Return the fleet of each tier.

    Routing: each tier carries its share of the peak. ``cascade``: every request goes to the first
    tier, and the shares of the others are those that are escalated to them. Raises DecisionError
    where shares of a routed fleet do not sum to 1.
    """
    if not tiers:
        raise DecisionError("no tier was given (--tier NAME=RUN,SHARE,GPU,PRICE)")
    for tier in tiers:
        if not 0 < tier.share <= 1:
            raise DecisionError(f"tier {tier.name}: share {tier.share:g} is not within 0 and 1")
        if not tier.capacity_rps > 0:
            raise DecisionError(f"tier {tier.name}: its run shows no capacity within the SLOs")
    total = sum(tier.share for tier in tiers)
    if not cascade and abs(total - 1) > 1e-6:
        raise DecisionError(f"the shares of the tiers sum to {total:.4g}, not to 1")
    found = []
    for number, tier in enumerate(tiers):
        peak = peak_rps * (1.0 if cascade and number == 0 else tier.share)
        before = math.ceil(peak / tier.capacity_rps - 1e-9)
        found.append(TierFleet(tier, peak, before, math.ceil(before * safety - 1e-9)))
    return found


def slow_replica_share(replicas: int, slow: int = 1) -> float:
    """Return the share of the traffic that slow replicas get behind a round robin."""
    return slow / replicas


@dataclass(frozen=True)
class Pools:
    """Instances that compute prompts and instances that decode."""

    prefill: int
    decode: int

    @property
    def ratio(self) -> float:
        return self.prefill / self.decode


def size_pools(peak_rps: float, prefill_rps: float, decode_rps: float, safety: float) -> Pools:
    """Return the pools for a peak, from the rate that one instance of each phase carries."""
    if min(prefill_rps, decode_rps) <= 0:
        raise DecisionError("the rates of prefill and decoding must be above zero")
    pools = (
        math.ceil(math.ceil(peak_rps / rate - 1e-9) * safety - 1e-9)
        for rate in (prefill_rps, decode_rps)
    )
    return Pools(*pools)
