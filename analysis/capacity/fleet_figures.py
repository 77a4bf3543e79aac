"""Instances, GPUs and cost of a fleet from plain numbers: the one place of this arithmetic.

The report's sliders compute the same in JavaScript, so all inputs and results are numbers or null.
Only two lines round (``math.ceil``), both up and exactly: a float counts as the decimal number that
its shortest text shows. In JavaScript: ``String(x)`` as a fraction of two ``BigInt``.
"""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

from ampacity.analysis.contract.part import Part

HOURS_PER_YEAR = 8760


class FleetError(ValueError):
    """Inputs from which no fleet can be computed; the message is one line."""


class FleetInputs(Part, frozen=True, kw_only=True):
    """Inputs of a fleet; null: not known, and what needs it is null too.

    ``utilisation``: mean load / what the fleet carries; null: ``mean_rps`` is the mean load, and
    where that is null too, the peak. Tokens are means of a request, ``cached_tokens`` are part of
    the input. ``good_share``: requests within the SLOs, ``accepted``: results that are of use.
    """

    peak_rps: float
    capacity_rps: float
    safety_factor: float = 1.2
    tensor_parallel: int = 1
    gpu_hour_usd: float | None = None
    utilisation: float | None = None
    mean_rps: float | None = None
    input_tokens: float | None = None
    cached_tokens: float | None = None
    output_tokens: float | None = None
    good_share: float | None = None
    accepted: float | None = None


class FleetFigures(Part, frozen=True, kw_only=True):
    """A fleet of whole instances, paid for whether it is used or not.

    ``carried_rps``: requests/s within the SLOs of all its instances; ``load_rps``: mean load. Each
    ``fleet_cost_…`` is the whole cost of the fleet over what it serves: they do not add up.
    """

    instances_before_safety: int
    instances: int
    gpus: int
    one_replica_down: int
    one_replica_down_gpus: int
    gpu_hours_per_day: float
    carried_rps: float
    load_rps: float
    utilisation: float
    cost_per_hour: float | None
    cost_per_year: float | None
    fleet_cost_per_million_input_tokens: float | None
    fleet_cost_per_million_cached_tokens: float | None
    fleet_cost_per_million_output_tokens: float | None
    fleet_cost_per_million_tokens: float | None
    fleet_cost_per_thousand_requests: float | None
    fleet_cost_per_thousand_good_requests: float | None
    fleet_cost_per_thousand_accepted_results: float | None

    @property
    def at_mean_load(self) -> str:
        """Return the load that each ``fleet_cost_…`` is for: ``at 64 % mean load``."""
        return f"at {100 * self.utilisation:.0f} % mean load"


def exact(value: float) -> Fraction:
    """Return the number as written: 1.1 is 11/10, so that 10 instances x 1.1 is 11 and not 12."""
    return Fraction(Decimal(repr(value)))


def fleet_figures(given: FleetInputs) -> FleetFigures:
    """Return the fleet for a peak, and what it costs.

    instances = ceil(ceil(peak / capacity) x safety); to carry the peak while one instance is down:
    max(instances, ceil(peak / capacity) + 1). Cost of a unit = cost of an hour / (3,600 x mean load
    x units of a request). Raises FleetError where an input is not positive or safety is below 1.
    """
    _check(given)
    before = math.ceil(exact(given.peak_rps) / exact(given.capacity_rps))
    instances = math.ceil(before * exact(given.safety_factor))
    down, gpus = max(instances, before + 1), instances * given.tensor_parallel
    carried = instances * given.capacity_rps
    if given.utilisation is not None:
        load = given.utilisation * carried
    else:
        load = given.peak_rps if given.mean_rps is None else given.mean_rps
    hourly = None if given.gpu_hour_usd is None else gpus * given.gpu_hour_usd
    tokens_in, tokens_out = given.input_tokens, given.output_tokens
    both = None if tokens_in is None or tokens_out is None else tokens_in + tokens_out

    def cost(of: float | None, number: float) -> float | None:
        """Return the cost of ``number`` units, of which a request has ``of``."""
        return None if hourly is None or not of else hourly / (3600 * load * of) * number

    return FleetFigures(
        instances_before_safety=before,
        instances=instances,
        gpus=gpus,
        one_replica_down=down,
        one_replica_down_gpus=down * given.tensor_parallel,
        gpu_hours_per_day=24 * gpus,
        carried_rps=carried,
        load_rps=load,
        utilisation=load / carried,
        cost_per_hour=hourly,
        cost_per_year=None if hourly is None else HOURS_PER_YEAR * hourly,
        fleet_cost_per_million_input_tokens=cost(tokens_in, 1e6),
        fleet_cost_per_million_cached_tokens=cost(given.cached_tokens, 1e6),
        fleet_cost_per_million_output_tokens=cost(tokens_out, 1e6),
        fleet_cost_per_million_tokens=cost(both, 1e6),
        fleet_cost_per_thousand_requests=cost(1.0, 1e3),
        fleet_cost_per_thousand_good_requests=cost(given.good_share, 1e3),
        fleet_cost_per_thousand_accepted_results=cost(given.accepted, 1e3),
    )


def _check(given: FleetInputs) -> None:
    above_zero = {
        "--peak-rps": given.peak_rps,
        "the capacity": given.capacity_rps,
        "--tp": given.tensor_parallel,
        "--mean-rps": 1.0 if given.mean_rps is None else given.mean_rps,
    }
    for name, value in above_zero.items():
        if not (math.isfinite(value) and value > 0):
            raise FleetError(f"{name} is {value}: it must be above zero")
    safety = given.safety_factor
    if not (math.isfinite(safety) and safety >= 1):
        raise FleetError(f"--safety is {safety}: it must be 1 or more (1.2 adds 20 %)")
    for name, share in {"--utilisation": given.utilisation, "--accepted": given.accepted}.items():
        if share is not None and not 0 < share <= 1:
            raise FleetError(f"{name} is {share:g}: it must be above 0 and at most 1")


def crossover_utilisation(fleet: FleetFigures, hosted_usd_per_request: float) -> float | None:
    """Return the utilisation from which a fleet is cheaper than a hosted API.

    Cost of an hour / (3,600 x what the fleet carries x hosted price of a request). Above 1: the
    hosted API is cheaper at any load that the fleet carries. None: no price, or hosted for free.
    """
    if fleet.cost_per_hour is None or not hosted_usd_per_request:
        return None
    return fleet.cost_per_hour / (3600 * fleet.carried_rps * hosted_usd_per_request)
