"""``ampacity plan``: the instances and GPUs that a peak load needs, from a measured run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ampacity.cli import options as o
from ampacity.cli.output import print_json

if TYPE_CHECKING:
    from ampacity.analysis.contract.summary import Summary

MeanRps = Annotated[
    float | None,
    typer.Option(metavar="R", help="Mean load in requests/s, for utilisation and cost per token."),
]
Profile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Profile from 'ampacity workload fit': busiest hour, mean and variance of the "
        "traffic.",
    ),
]
Safety = Annotated[
    float | None,
    typer.Option(
        metavar="F",
        help="Safety factor on the number of instances.",
        show_default="that of the run, else 1.2, or 1.5 for bursty traffic",
    ),
]


@o.shares(("peak_rps", "tp", "gpu_hour"))
def plan(
    raw: dict[str, Any],
    run: o.RunDir,
    mean_rps: MeanRps = None,
    profile: Profile = None,
    safety: Safety = None,
    json: o.Json = False,
) -> None:
    """Size a fleet for a peak load, from the measured capacity of one instance.

    ampacity plan runs/search --peak-rps 120 --gpu-hour 2.50

    ampacity plan runs/search --profile traffic.yaml
    """
    from ampacity.analysis.capacity.fleet import FleetError, carried_by, fleet_of, use_of_fleet
    from ampacity.analysis.contract.summary import to_json
    from ampacity.analysis.summary import summarise
    from ampacity.experiments.sizing import FLAGS, gpus_measured, options_of_run, traffic_of
    from ampacity.loadgen.rundir.files import load_run
    from ampacity.settings import fleet_inputs, read_settings

    loaded = load_run(run)
    measured = gpus_measured(loaded.meta)
    given = raw if safety is None else {**raw, "safety": safety}
    defaults = options_of_run(loaded.meta, profile)
    inputs = fleet_inputs(read_settings({**defaults, "tp": measured, **given}))
    traffic = traffic_of(inputs["peak_rps"], mean_rps, profile)
    summary = summarise(loaded)
    capacity, stages = to_json(summary.capacity), [to_json(s) for s in summary.stages]
    carried = carried_by(capacity, stages, to_json(summary.fleet))
    if carried is None:
        raise FleetError(f"{run}: no fleet can be sized from this run: {capacity['reason']}")
    sizing = (inputs["tensor_parallel"], inputs["safety_factor"], inputs["gpu_hour_usd"])
    fleet = fleet_of(traffic, carried, *sizing)
    if fleet["instances"] is None:
        raise FleetError(fleet["reason"])
    fleet |= use_of_fleet(fleet, traffic, carried)
    fleet |= {name: capacity[name] for name in ("capacity_rps", "capacity_rps_ci")}
    fleet["from_run"] = sorted(
        name for name, flag in FLAGS.items() if flag in defaults.keys() - given.keys()
    )
    fleet["warnings"] = [*map(to_json, summary.warnings), *_own_warnings(fleet, traffic, measured)]
    if json:
        print_json(fleet)
        return
    for line in [*_lines(fleet, summary), *(f"Warning: {w['text']}" for w in fleet["warnings"])]:
        typer.echo(line)


def _own_warnings(fleet: Mapping[str, Any], traffic: Any, measured: int) -> list[dict[str, str]]:
    found = {}
    if fleet["tensor_parallel"] != measured:
        found["other_instance"] = (
            f"The run measured an instance of {measured} GPU{'s' if measured > 1 else ''} "
            f"(--tp, --lock hardware=); the plan takes its rate for one of "
            f"{fleet['tensor_parallel']}, "
            "which carries another. Measure such an instance, or drop --tp."
        )
    if traffic.peak_rps_ci and traffic.crowded_rps > traffic.peak_rps_ci[1]:
        found["crowded"] = (
            "Arrivals are burstier than Poisson: within a minute they crowd as Poisson arrivals of "
            f"{traffic.crowded_rps:.3g} requests/s do, more than the busiest hour's "
            f"{traffic.peak_rps:.3g}. Measure the capacity with them (--workload with this "
            f"profile, "
            "or --trace)."
        )
    return [{"code": code, "text": text} for code, text in found.items()]


def _lines(fleet: dict[str, Any], summary: Summary) -> list[str]:
    """Return the plan in words, with the arithmetic."""
    from ampacity.analysis.capacity.fleet import instances_text
    from ampacity.reports.pages.findings import usable_rate
    from ampacity.reports.render.figures import counted, gpu_price, significant

    usable = usable_rate(summary)
    between = f" ({usable.interval})" if usable.interval else ""
    before, down = fleet["instances_before_safety"], fleet["one_replica_down"]
    fleet_peak = f"{fleet['peak_rps']:.4g} requests/s"
    carries = "is predicted to carry" if summary.predicted else "carries"
    lines = [
        f"{instances_text(fleet)}, {counted(fleet['gpus'], 'GPU')} for {fleet_peak}",
        f"  one instance {carries} {usable.value}{between}; {usable.note}",
        f"  peak {fleet_peak}: {_from_run(fleet, 'peak_rps') or fleet['peak_reason']}",
        f"  instances that carry the peak: {before}, × {fleet['safety_factor']:g} safety = "
        f"{fleet['instances']}; GPUs: × {fleet['tensor_parallel']} = {fleet['gpus']}",
        f"  safety {_from_run(fleet, 'safety_factor') or fleet['safety_reason']}",
        f"  of these {_spare(fleet['instances'], before)}; to carry the peak while one is down, "
        f"have {counted(down, 'instance')} ({counted(fleet['one_replica_down_gpus'], 'GPU')}): "
        f"{_spare(down, before)}",
        f"  {fleet['gpu_hours_per_day']} GPU-hours a day, utilisation "
        f"{100 * fleet['utilisation']:.0f} % at {fleet['utilisation_at']}",
    ]
    if fleet["cost_per_hour"] is not None:
        given = f" ({price})" if (price := _from_run(fleet, "gpu_hour_usd")) else ""
        lines.append(
            f"  {gpu_price(fleet['gpus'], fleet['gpu_hour_usd'])}{given} = "
            f"${fleet['cost_per_hour']:,.2f} an hour; each line below allocates the full cost of "
            "the fleet at that utilisation, so they do not add up:"
        )
        names = {
            "fleet_cost_per_million_output_tokens": "a million output tokens",
            "fleet_cost_per_million_input_tokens": "a million input tokens",
            "fleet_cost_per_million_tokens": "a million tokens of both",
            "fleet_cost_per_thousand_good_requests": "1,000 good requests",
        }
        lines += [
            f"    ${significant(fleet[key])} for {what}"
            for key, what in names.items()
            if fleet[key] is not None
        ]
    return lines


def _spare(instances: int, before: int) -> str:
    """Return for example ``13 serve the peak, 2 are spare``."""
    spare = instances - before
    serve = "serves" if before == 1 else "serve"
    return f"{before} {serve} the peak, {spare or 'none'} {'are' if spare > 1 else 'is'} spare"


def _from_run(fleet: Mapping[str, Any], name: str) -> str:
    return "as given at the run" if name in fleet["from_run"] else ""
