"""The posterior of the limit: what the size of clusters of misses says of the slope."""

import math
from typing import Any

import numpy as np
import pytest

from ampacity.analysis.capacity.posterior import Looks, _clusters
from ampacity.analysis.slo import parse_slos
from tests.analysis.capacity.hand_made import find_capacity, stage

SLO = "ttft_p95=150ms"


def looks(clustering: float) -> Looks:
    """One stage of 1,000 requests at 100 requests/s, one in ten of which misses."""
    one = np.ones(1)
    return Looks(
        x=math.log(100) * one,
        n=1000 * one,
        share=0.1 * one,
        clustering=clustering * one,
        together=one,
        cut=0 * one,
        steady=one,
        per_request=1.0,
    )


@pytest.mark.parametrize(
    ("clustering", "beyond"),
    [
        (1.0, 0.0),
        (30.0, 0.0),  # five times the memory, 3 rho / (1 - rho)^2 = 6 requests at rho = 0.5
        (60.0, math.log(2)),
        (600.0, math.log(20)),
    ],
)
def test_clusters_beyond_five_memories_speak_against_a_slope(
    clustering: float, beyond: float
) -> None:
    r = np.ones((1, 1))  # rho / (1 - rho)
    size, memory, chance = _clusters(looks(clustering), math.log(100), np.ones(1), r)
    assert memory.ravel() == pytest.approx([6.0])
    assert size.ravel() == pytest.approx([max(clustering, 6.0)])
    assert chance.ravel() == pytest.approx([-((beyond / 0.6) ** 2) / 2], abs=1e-12)


def test_one_large_jam_at_the_limit_does_not_make_far_lower_loads_possible() -> None:
    """A real run of the demo, whose capacity is 294. Clusters of some 1,000 requests are those of a
    queue with 3 r (1 + r) = 1,000: r = 18, and the slope of a p95 is 3 r = 54. At 254 the share of
    misses is then e^-7.5 of that at 295, and the lower end lies above.
    """

    def at(
        index: int, load: float, requests: int, share: float, effective: float, **more: Any
    ) -> dict[str, Any]:
        p95 = 0.02 if share > 0.95 else 0.16
        met = True if index == 0 else None
        seen = {"requests": requests, "concurrency": load * 0.22, **more}
        return stage(index, load, p95, met, share=share, effective=effective, slo=SLO, **seen)

    full = {"stable": False, "achieved": 296.0, "achieved_rps_ci": [285.0, 307.0]}
    stages = [
        at(0, 180, 1413, 1.0, 382),
        at(1, 254, 3979, 1.0, 75),
        at(2, 288, 3977, 1.0, 27),
        at(3, 291, 7161, 1 - 1 / 7161, 35),
        at(4, 295, 7053, 1 - 376 / 7053, 7),
        at(5, 360, 2639, 1 - 2510 / 2639, 6, **full),
    ]
    low, high = find_capacity(stages, parse_slos([SLO])).capacity_rps_ci or (0.0, math.inf)
    assert 254 < low < 294 < high < 320
