"""Tiers, pools and guardrails: worked values."""

from __future__ import annotations

import pytest

from ampacity.analysis.capacity.fleet import queue_depth
from ampacity.analysis.decision.guardrails import breaker_of
from ampacity.analysis.decision.model import DecisionError
from ampacity.analysis.decision.tiers import Tier, size_pools, size_tiers, slow_replica_share

SMALL, LARGE = Tier("small", 0.8, 30, 1, 2.0), Tier("large", 0.2, 12, 4, 3.0)


def test_a_fleet_of_one_tier() -> None:
    """120 / 12 = 10 instances, x 1.3 = 13, of 4 GPUs: 52."""
    (fleet,) = size_tiers([Tier("only", 1, 12, 4)], 120, 1.3)
    assert (fleet.instances_before_safety, fleet.instances, fleet.gpus) == (10, 13, 52)
    assert fleet.usd_per_hour is None


def test_routing_gives_each_tier_its_share_of_the_peak() -> None:
    """96/s on 30: 4 -> 5 of one GPU at $2; 24/s on 12: 2 -> 3 (2.4) of 4 GPUs at $3."""
    small, large = size_tiers([SMALL, LARGE], 120, 1.2)
    assert (small.peak_rps, small.instances, small.usd_per_hour) == (96, 5, 10)
    assert (large.peak_rps, large.instances, large.usd_per_hour) == (24, 3, 36)


def test_a_cascade_sends_all_of_the_peak_to_the_first_tier() -> None:
    """120/s on 30: 4 -> 5; 24/s on 12 as above."""
    small, large = size_tiers([SMALL, LARGE], 120, 1.2, cascade=True)
    assert (small.peak_rps, small.instances_before_safety, small.instances) == (120, 4, 5)
    assert large.peak_rps == 24


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        pytest.param([], "no tier", id="none"),
        pytest.param([SMALL], "sum to 0.8, not to 1", id="sum"),
        pytest.param([Tier("t", 1.5, 1, 1)], "share 1.5 is not within 0 and 1", id="share"),
        pytest.param([Tier("t", 1.0, 0, 1)], "its run shows no capacity", id="capacity"),
    ],
)
def test_tiers_that_cannot_be_sized(tiers: list[Tier], message: str) -> None:
    with pytest.raises(DecisionError, match=message):
        size_tiers(tiers, 120, 1.2)


def test_one_slow_replica_of_eight() -> None:
    assert slow_replica_share(8) == 0.125


def test_pools_of_a_disaggregated_fleet() -> None:
    """120/s: 120 / 40 = 3 -> 4 (3.6) for prompts, 120 / 15 = 8 -> 10 (9.6) for decoding: 2 to 5."""
    pools = size_pools(120, 40, 15, 1.2)
    assert (pools.prefill, pools.decode, pools.ratio) == (4, 10, 0.4)
    with pytest.raises(DecisionError, match="above zero"):
        size_pools(120, 0, 15, 1.2)


def test_queue_and_breaker() -> None:
    """2 s x 50/s = 100; a breaker at 80 to 90."""
    assert queue_depth(50, 2) == 100
    assert breaker_of(100) == (80, 90)
