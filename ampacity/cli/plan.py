"""``ampacity plan``: from a measured run to a number of instances and GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ampacity.cli import options as o
from ampacity.cli.output import print_json


@o.shares(("peak_rps", "tp", "gpu_hour"))
def plan(
    raw: dict[str, Any],
    run: Annotated[Path, typer.Argument(help="Run directory of a search or a sweep.", show_default=False)],
    mean_rps: Annotated[float | None, typer.Option(metavar="R", help="Mean load, for the utilisation and what a token really costs.")] = None,
    profile: Annotated[Path | None, typer.Option(metavar="FILE", help="Profile of 'ampacity workload fit': peak, mean and variance of the traffic.")] = None,
    safety: Annotated[float | None, typer.Option(metavar="F", help="Safety factor. Default: 1.2 or 1.5, as the traffic's variance asks for.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:  # fmt: skip
    """Size a fleet for a peak load from what one instance carried.

    ampacity plan runs/search --profile traffic.yaml --gpu-hour 2.50
    """
    from dataclasses import replace

    from ampacity.config import fleet_inputs
    from ampacity.values import ConfigError
    from analysis.fleet import FleetError, plan_fleet
    from analysis.summary import summarise
    from loadgen.rundir import load_run

    peak_rps = raw.get("peak_rps")
    if peak_rps is None and profile is None:
        raise ConfigError(
            "say what the fleet has to carry: --peak-rps R, or --profile FILE of 'ampacity workload fit'"
        )
    traffic = _traffic(peak_rps, mean_rps, profile)
    loaded = load_run(run)
    measured = _gpus_measured(loaded.meta)
    price = (loaded.meta.get("fleet_inputs") or {}).get("gpu_hour_usd")  # holds where no other is given
    known = {} if price is None else {"gpu_hour": price}
    inputs = fleet_inputs({"safety": safety or 1.2, "tp": measured, **known, **raw})
    summary = summarise(replace(loaded, meta={**loaded.meta, "fleet_inputs": inputs}))
    carried = _carried(summary)
    if carried is None:
        raise FleetError(f"{run}: no fleet can be sized from this run: {summary['capacity']['reason']}")
    fleet = plan_fleet(traffic, carried, inputs["tensor_parallel"], safety, inputs["gpu_hour_usd"])
    fleet["warnings"] = list(summary["warnings"])
    if fleet["tensor_parallel"] != measured:
        text = (
            f"By what the run says (--tp, --lock hardware=) an instance of {measured} GPU{'s' if measured > 1 else ''} was measured; the plan "
            f"takes its rate for one of {fleet['tensor_parallel']}, which carries another. Measure such an instance, or drop --tp."
        )
        fleet["warnings"].append({"code": "other_instance", "text": text})
    if json:
        print_json(fleet)
        return
    for line in [*_lines(fleet, summary["capacity"]), *(f"Warning: {w['text']}" for w in fleet["warnings"])]:
        typer.echo(line)


def _gpus_measured(meta: Mapping[str, Any]) -> int:
    """GPUs of the instance that was measured: by --tp of the run, what was locked, or the preset of a prediction."""
    from ampacity.config import SAYS_GPUS, gpus_named

    given = int((meta.get("fleet_inputs") or {}).get("tensor_parallel") or 1)
    texts = [(meta.get("locked") or {}).get(name) for name in SAYS_GPUS]
    texts += [(meta.get("endpoint") or {}).get("model")] if meta.get("predicted") else []
    return given if given > 1 else gpus_named(*texts) or 1


def _traffic(peak_rps: float | None, mean_rps: float | None, profile: Path | None) -> Any:
    from dataclasses import replace

    from ampacity.values import ConfigError
    from analysis.fleet import FleetError, Traffic, traffic_of_profile
    from workloads.profile import read_yaml

    if profile is None:
        assert peak_rps is not None
        traffic = Traffic(peak_rps)
    else:
        try:
            traffic = traffic_of_profile(read_yaml(profile), peak_rps)
        except FleetError as error:
            raise ConfigError(f"--profile {profile}: {error}") from error
    if mean_rps is None:
        return traffic
    if not 0 < mean_rps <= traffic.peak_rps:
        raise ConfigError(
            f"--mean-rps {mean_rps:g}: give a number above 0 and at most the peak of {traffic.peak_rps:g}"
        )
    return replace(traffic, mean_rps=mean_rps)


def _carried(summary: Mapping[str, Any]) -> Any:
    """What one instance carries at its usable rate; None where there is no such rate."""
    from analysis.capacity import good_share_at
    from analysis.fleet import Carried

    capacity = summary["capacity"]
    if not capacity["usable_rps"]:
        return None
    tokens = {name: summary["fleet"][f"{name}_mean"] for name in ("input_tokens", "output_tokens")}
    low, high = capacity["usable_rps_ci"] or (None, None)
    low = None if capacity["crossing"] == "saturated" else low
    return Carried(
        capacity["usable_rps"],
        (low, high),
        **tokens,
        good_share=good_share_at(summary["stages"], capacity["c_max_basis"], capacity["usable_rps"]),
    )


def _lines(fleet: dict[str, Any], capacity: Mapping[str, Any]) -> list[str]:
    """The plan in words, with the arithmetic shown."""
    from reports.figures import gpu_price, significant
    from reports.findings import CROSSING

    low, high = fleet["usable_rps_ci"]
    between = f" (between {low:.3g} and {'?' if high is None else format(high, '.3g')})" if low else ""
    at_least, most_rate = ("at least ", "at most ") if capacity["crossing"] == "saturated" else ("", "")
    in_loop = ", in a closed loop" if capacity["c_max_basis"] == "closed" else ""
    fewest, most = fleet["instances_ci"]
    lines = [
        f"{at_least}{fleet['instances']} instances, {fleet['gpus']} GPUs for {fleet['peak_rps']:.4g} requests/s",
        f"  one instance carries {most_rate}{capacity['usable_rps']:.3g} requests/s{between}, {CROSSING[capacity['crossing']]}{in_loop}",
        *([f"  peak: {fleet['peak_reason']}"] if fleet["traffic"] == "profile" else []),
        f"  instances that carry the peak: {fleet['instances_before_safety']}, × {fleet['safety_factor']:g} safety = {fleet['instances']}"
        f"; GPUs: × {fleet['tensor_parallel']} = {fleet['gpus']}",
        f"  safety {fleet['safety_reason']}",
        f"  with one replica down: {fleet['one_replica_down']} instances, {fleet['one_replica_down_gpus']} GPUs",
    ]
    if most is not None and (fewest, most) != (fleet["instances"], fleet["instances"]):
        lines.append(
            f"  over the interval of the usable rate: {'?' if fewest is None else fewest} to {most} instances"
        )
    lines.append(
        f"  {fleet['gpu_hours_per_day']} GPU-hours a day, utilisation {100 * fleet['utilisation']:.0f} % at {fleet['utilisation_at']}"
    )
    if fleet["cost_per_hour"] is not None:
        lines.append(
            f"  {gpu_price(fleet['gpus'], fleet['gpu_hour_usd'])} = ${fleet['cost_per_hour']:,.2f} an hour; of the whole fleet at that utilisation, each of these bears all of it:"
        )
        names = {
            "cost_per_million_output_tokens": "a million output tokens", "cost_per_million_input_tokens": "a million input tokens",
            "cost_per_million_tokens": "a million tokens of both", "cost_per_thousand_good_requests": "1,000 good requests",
        }  # fmt: skip
        lines += [
            f"    ${significant(fleet[key])} for {what}"
            for key, what in names.items()
            if fleet[key] is not None
        ]
    return lines
