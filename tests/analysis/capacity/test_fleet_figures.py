"""The arithmetic of fleets and costs: worked values, by hand."""

import math
from typing import Any

import pytest
from msgspec import structs

from ampacity.analysis.capacity.fleet_figures import (
    FleetError,
    FleetInputs,
    crossover_utilisation,
    fleet_figures,
)
from tests.analysis.capacity.hand_made import FLEET

GIVEN = structs.replace(FLEET, cached_tokens=500, good_share=0.96, accepted=0.9)


@pytest.mark.parametrize(
    ("peak", "usable", "tp", "safety", "before", "instances", "gpus"),
    [
        (120, 12, 4, 1.3, 10, 13, 52),
        (120, 12, 4, 1.25, 10, 13, 52),  # never 50 GPUs
        (101, 12, 1, 1.3, 9, 12, 12),
        (10, 1, 1, 1.1, 10, 11, 11),  # 10 x 1.1 is 11.000000000000002 in floats
        (3, 0.1, 1, 1.2, 30, 36, 36),  # 3 / 0.1 is 30, 30 x 1.2 is 36
        (5, 12, 8, 1.0, 1, 1, 8),
    ],
)
def test_instances_by_hand(
    peak: float, usable: float, tp: int, safety: float, before: int, instances: int, gpus: int
) -> None:
    fleet = fleet_figures(
        FleetInputs(peak_rps=peak, capacity_rps=usable, safety_factor=safety, tensor_parallel=tp)
    )
    assert (fleet.instances_before_safety, fleet.instances, fleet.gpus) == (before, instances, gpus)
    assert fleet.one_replica_down == max(instances, before + 1)
    assert fleet.utilisation == pytest.approx(peak / (instances * usable))  # the peak all day
    assert fleet.cost_per_year is fleet.fleet_cost_per_million_tokens is None


def test_costs_by_hand() -> None:
    """52 GPUs at $2: $104 an hour for 0.4 x 156 x 3,600 = 224,640 requests."""
    fleet = fleet_figures(GIVEN)
    assert (fleet.gpus, fleet.carried_rps, fleet.load_rps) == (52, 156, pytest.approx(62.4))
    assert (fleet.cost_per_hour, fleet.cost_per_year) == (104, 911_040)
    each = 104 / 224_640
    assert fleet.fleet_cost_per_thousand_requests == pytest.approx(1000 * each)
    assert fleet.fleet_cost_per_thousand_good_requests == pytest.approx(1000 * each / 0.96)
    assert fleet.fleet_cost_per_thousand_accepted_results == pytest.approx(1000 * each / 0.9)
    assert fleet.fleet_cost_per_million_input_tokens == pytest.approx(1000 * each)
    assert fleet.fleet_cost_per_million_cached_tokens == pytest.approx(2000 * each)
    assert fleet.fleet_cost_per_million_output_tokens == pytest.approx(4000 * each)
    assert fleet.fleet_cost_per_million_tokens == pytest.approx(800 * each)
    mean = fleet_figures(structs.replace(GIVEN, utilisation=None, mean_rps=62.4))
    assert mean.utilisation == pytest.approx(0.4)
    assert mean.fleet_cost_per_thousand_requests == pytest.approx(1000 * each)


@pytest.mark.parametrize(("utilisation", "divided_by"), [(0.8, 2.0), (0.7, 1.75)])
def test_cost_falls_with_utilisation(utilisation: float, divided_by: float) -> None:
    costs = [
        fleet_figures(structs.replace(GIVEN, utilisation=u)).fleet_cost_per_million_output_tokens
        for u in (0.4, utilisation)
    ]
    assert costs[1] == pytest.approx(costs[0] / divided_by)


def test_crossover_with_a_hosted_api() -> None:
    """Hosted at $0.001 a request: a full fleet serves 561,600 an hour, $561.60 against $104."""
    assert crossover_utilisation(fleet_figures(GIVEN), 0.001) == pytest.approx(104 / 561.6)
    at_crossover = fleet_figures(structs.replace(GIVEN, utilisation=104 / 561.6))
    assert at_crossover.fleet_cost_per_thousand_requests == pytest.approx(1.0)
    assert crossover_utilisation(fleet_figures(GIVEN), 0.0) is None  # for free
    unpriced = fleet_figures(structs.replace(GIVEN, gpu_hour_usd=None))
    assert crossover_utilisation(unpriced, 0.001) is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"peak_rps": 0.0}, "--peak-rps is 0.0"),
        ({"peak_rps": math.nan}, "--peak-rps is nan"),
        ({"capacity_rps": 0.0}, "the capacity is 0.0"),
        ({"safety_factor": 0.9}, "--safety is 0.9: it must be 1 or more"),
        ({"tensor_parallel": 0}, "--tp is 0"),
        ({"mean_rps": -1.0}, "--mean-rps is -1.0"),
        ({"utilisation": 1.01}, "--utilisation is 1.01: it must be above 0 and at most 1"),
        ({"accepted": 0.0}, "--accepted is 0"),
    ],
)
def test_nonsense_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(FleetError, match=message):
        fleet_figures(structs.replace(GIVEN, **wrong))
