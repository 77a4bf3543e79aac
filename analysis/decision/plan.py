"""From the capacity of an instance, its traffic and prices to a plan, each input with its basis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from msgspec import structs

from ampacity.analysis.capacity.fleet import Traffic, carried_by, fleet_of, long_requests
from ampacity.analysis.capacity.fleet_figures import (
    FleetError,
    FleetFigures,
    FleetInputs,
    fleet_figures,
)
from ampacity.analysis.contract.part import Interval
from ampacity.analysis.contract.summary import Summary, Warned
from ampacity.analysis.decision.disaggregation import Pools, pools_of
from ampacity.analysis.decision.inputs import Basis, Input
from ampacity.analysis.decision.money import Hosted, Moved, Prices, against_hosted, sensitivities

PER_REQUEST = ("ttft", "tpot", "e2e")  # a request has one of each
NO_FLEET = "no fleet can be sized from this run"
OF_RUN = "as given at the run"
OF_FLEET = [
    *("safety_factor", "safety_reason", "peak_rps", "peak_rps_ci", "peak_reason"),
    *("instances_ci", "tensor_parallel", "gpu_hour_usd", "cost_per_million_output_tokens"),
]


class Plan(FleetFigures, frozen=True, kw_only=True):
    """A fleet of instances like the one of a run, for a peak load.

    ``instances_ci`` and ``cost_per_year_ci`` follow from the intervals of the peak and of the
    capacity. ``crowding``: Poisson arrivals that fill a minute as the traffic does, over the
    peak. ``hosted`` is empty without a price file or counted tokens. ``pools``: prefill apart from
    decoding.
    """

    run: str
    predicted: bool
    slos: list[str]
    capacity_rps: float
    capacity_rps_ci: Interval | None
    verified_rps: float | None
    peak_rps: float
    peak_rps_ci: Interval | None
    peak_reason: str
    crowding: float
    safety_factor: float
    safety_reason: str
    tensor_parallel: int
    gpu_hour_usd: float | None
    mean_rps: float | None
    utilisation_at: str
    instances_ci: tuple[int | None, int | None]
    cost_per_year_ci: Interval | None
    cost_per_million_output_tokens: float | None
    inputs: list[Input]
    sensitivity: list[Moved]
    hosted: list[Hosted]
    pools: Pools | None
    pools_reason: str | None
    warnings: list[Warned]


@dataclass(frozen=True)
class Terms:
    """Facts that are stated for a fleet beside its traffic; None: not stated.

    ``of_run``: the inputs that the run was given, by their name in the plan. ``measured_gpus``: of
    the instance that was measured.
    """

    tensor_parallel: int = 1
    safety: float | None = None
    gpu_hour_usd: float | None = None
    utilisation: float | None = None
    accepted: float | None = None
    prices: Mapping[str, Prices] = field(default_factory=dict)
    of_run: frozenset[str] = frozenset()
    measured_gpus: int = 1


def plan_fleet(run: str, summary: Summary, traffic: Traffic | None, terms: Terms) -> Plan:
    """Return the plan for one run. Raises FleetError where a fleet cannot be sized."""
    tokens = summary.fleet.input_tokens_mean, summary.fleet.output_tokens_mean
    carried = carried_by(summary.capacity, summary.stages, *tokens)
    if carried is None:
        raise FleetError(f"{NO_FLEET}: {summary.capacity.reason}")
    if traffic is not None:
        traffic = replace(traffic, long_requests=long_requests(_lengths(summary)))
    gpus, price = terms.tensor_parallel, terms.gpu_hour_usd
    sized = fleet_of(traffic, carried, gpus, terms.safety, price)
    if traffic is None or sized.instances is None:
        raise FleetError(sized.reason)
    given = FleetInputs(
        peak_rps=traffic.peak_rps,
        capacity_rps=carried.capacity_rps,
        safety_factor=sized.safety_factor,
        tensor_parallel=gpus,
        gpu_hour_usd=price,
        utilisation=terms.utilisation,
        mean_rps=traffic.mean_rps,
        input_tokens=carried.input_tokens,
        cached_tokens=cached_tokens(summary),
        output_tokens=carried.output_tokens,
        good_share=_good_share(carried.good_share, summary),
        accepted=terms.accepted,
    )
    figures = fleet_figures(given)
    pools, why = pools_of(summary, traffic.peak_rps, given.safety_factor)
    held = {name: getattr(sized, name) for name in OF_FLEET} | structs.asdict(figures)
    return Plan(
        run=run,
        predicted=summary.predicted,
        slos=[slo.text for slo in summary.slos],
        capacity_rps=carried.capacity_rps,
        capacity_rps_ci=summary.capacity.capacity_rps_ci,
        verified_rps=summary.capacity.verified_rps,
        mean_rps=traffic.mean_rps,
        crowding=max((traffic.crowded_rps or 0.0) / traffic.peak_rps, 1.0),
        utilisation_at=_load(given, traffic, terms)[1],
        cost_per_year_ci=_yearly(figures, sized.instances_ci),
        inputs=_inputs(given, figures.utilisation, summary, traffic, terms, sized.safety_reason),
        sensitivity=sensitivities(given),
        pools=pools,
        pools_reason=why,
        hosted=against_hosted(given, figures, terms.prices),
        warnings=[*summary.warnings, *_warnings(given, traffic, terms, engines_seen(summary))],
        **held,
    )


def _yearly(
    fleet: FleetFigures, instances: tuple[int | None, int | None] | None
) -> tuple[float | None, float | None] | None:
    """Return the cost of a year at the ends of the instances; None without a price."""
    if fleet.cost_per_year is None or instances is None:
        return None
    each = fleet.cost_per_year / fleet.instances
    low, high = (end and end * each for end in instances)
    return low, high


def engines_seen(summary: Summary) -> int:
    """Return how many engines the endpoint's /metrics showed; 1 where it showed none."""
    return int(max((s.server.engines or 1 for s in summary.stages if s.server), default=1))


def cached_tokens(summary: Summary) -> float | None:
    """Return the input tokens of a mean request that a cache held; None: the server does not say."""
    classes = [kind for stage in summary.traffic for kind in stage.classes]
    known = [k for k in classes if k.cached_share is not None and k.input_tokens.mean]
    requests = sum(k.ok for k in known)
    cached = sum(k.ok * (k.cached_share or 0) * (k.input_tokens.mean or 0) for k in known)
    return cached / requests if requests else None


def _good_share(interpolated: float | None, summary: Summary) -> float | None:
    """Return the share of good requests at the capacity: at least what its SLOs demand.

    There each SLO on pQ of a request's latency is met, so at most the sum of (1 - Q) miss one.
    """
    if interpolated is None or not all(
        s.metric in PER_REQUEST and s.quantile for s in summary.slos
    ):
        return interpolated
    return max(interpolated, 1 - sum(1 - (slo.quantile or 1.0) for slo in summary.slos))


def _lengths(summary: Summary) -> list[tuple[str, float | None, float | None]]:
    """Return (name, P50, P95) of the lengths of every class in the stage with most requests."""
    stages = [stage.classes for stage in summary.traffic if stage.classes]
    classes = max(stages, key=lambda held: sum(k.requests for k in held), default=[])
    named = [(k.name, k.input_tokens, k.output_tokens) for k in classes]
    several = len(named) > 1
    return [
        (f"{name} {side}" if several else side, of.p50, of.p95)
        for name, tokens_in, tokens_out in named
        for side, of in (("input", tokens_in), ("output", tokens_out))
    ]


def _load(given: FleetInputs, traffic: Traffic, terms: Terms) -> tuple[Basis, str]:
    """Return (basis, source) of the mean load."""
    if terms.utilisation is not None:
        return "stated", "--utilisation"
    if given.mean_rps is None:
        return "assumed", "the peak all day, as no mean load is known"
    if traffic.mean_reason is None:
        return "stated", "--mean-rps / what the fleet carries"
    return "measured", traffic.mean_reason


def _inputs(
    given: FleetInputs,
    utilisation: float,
    summary: Summary,
    traffic: Traffic,
    terms: Terms,
    safety_reason: str,
) -> list[Input]:
    """Return every input of a plan with its basis and source; those that are not known left out."""
    of_run: Basis = "predicted" if summary.predicted else "measured"
    stated = dict.fromkeys(terms.of_run, OF_RUN)
    peak: Basis = "measured" if traffic.peak_rps_ci else "stated"
    safety: Basis = "assumed" if terms.safety is None else "stated"
    load, why = _load(given, traffic, terms)
    same = terms.tensor_parallel == terms.measured_gpus
    rows: list[tuple[str, float | None, str, Basis, str]] = [
        ("capacity", given.capacity_rps, "req/s", of_run, "the run"),
        ("peak", given.peak_rps, "req/s", peak, stated.get("peak_rps", traffic.peak_reason)),
        ("safety", given.safety_factor, "", safety, stated.get("safety_factor", safety_reason)),
        ("GPUs of an instance", terms.tensor_parallel, "", "stated", "the run" if same else "--tp"),
        ("GPU-hour", given.gpu_hour_usd, "USD", "stated", stated.get("gpu_hour_usd", "--gpu-hour")),
        ("utilisation", utilisation, "", load, why),
        ("input", given.input_tokens, "tokens", of_run, "the run"),
        ("cached", given.cached_tokens, "tokens", of_run, "the run"),
        ("output", given.output_tokens, "tokens", of_run, "the run"),
        ("good requests", given.good_share, "", of_run, "the run"),
        ("accepted results", given.accepted, "", "stated", "--accepted"),
    ]
    return [
        Input(name=name, value=value, unit=unit, basis=basis, source=source)
        for name, value, unit, basis, source in rows
        if value is not None
    ]


def _warnings(given: FleetInputs, traffic: Traffic, terms: Terms, engines: int) -> list[Warned]:
    found = []
    if engines > terms.tensor_parallel:
        text = (
            f"The endpoint's /metrics show {engines} engines, the plan counts "
            f"{terms.tensor_parallel} GPU for all of them: state their GPUs with --tp."
        )
        found.append(Warned(code="several_engines", text=text))
    if terms.prices and None in (given.input_tokens, given.output_tokens):
        text = "The run counted no tokens: hosted prices cannot be compared (--prices)."
        found.append(Warned(code="no_tokens", text=text))
    if terms.tensor_parallel != terms.measured_gpus:
        plural = "s" if terms.measured_gpus > 1 else ""
        text = (
            f"The run measured an instance of {terms.measured_gpus} GPU{plural} (--tp, --lock "
            f"hardware=); the plan takes its rate for one of {terms.tensor_parallel}, which "
            "carries another. Measure such an instance, or drop --tp."
        )
        found.append(Warned(code="other_instance", text=text))
    crowded = traffic.crowded_rps or 0.0
    if traffic.peak_rps_ci and crowded > traffic.peak_rps_ci[1]:
        text = (
            "Arrivals are burstier than Poisson: within a minute they crowd as Poisson arrivals of "
            f"{crowded:.3g} requests/s do, more than the busiest hour's {traffic.peak_rps:.3g}. "
            "Measure the capacity with them (--workload with this profile, or --trace)."
        )
        found.append(Warned(code="crowded", text=text))
    return found
