"""Gather what is known of a run, a model, a GPU and a price, and walk the thirteen steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ampacity.analysis.capacity.fleet import (
    carried_by,
    choose_safety,
    fleet_of,
)
from ampacity.analysis.contract.summary import Summary
from ampacity.analysis.decision.curve import Limit
from ampacity.analysis.decision.disaggregation import Condition, readiness
from ampacity.analysis.decision.guardrails import Guardrails, guardrails, input_quantiles
from ampacity.analysis.decision.inputs import Range
from ampacity.analysis.decision.known import (
    Fleet,
    Known,
    Physics,
    hardware_words,
    operating_point,
    physics_of,
)
from ampacity.analysis.decision.limits import find_limits
from ampacity.analysis.decision.model import DecisionError, ModelShape
from ampacity.analysis.decision.money import FleetCost, Prices
from ampacity.analysis.decision.roofline import Instance, tp_crossover
from ampacity.analysis.decision.steps import Step, cost_of, thirteen_steps
from ampacity.analysis.summary import summarise
from ampacity.experiments.sizing import gpus_measured, options_of_run, traffic_of
from ampacity.loadgen.rundir.files import load_run
from ampacity.settings import fleet_inputs, read_settings
from ampacity.simulator.models.catalog import HARDWARE
from ampacity.values import ConfigError


@dataclass(frozen=True)
class Stated:
    """Facts that are stated beside the runs; ``raw``: the fleet's options as they were given."""

    raw: Mapping[str, Any]
    gpu: str | None = None
    shape: ModelShape | None = None
    weights: str | None = None  # None: as the checkpoint's config.json says, else fp16
    kv: str = "fp16"
    profile: Path | None = None
    prices: Mapping[str, Prices] = field(default_factory=dict)
    wait_budget_s: float | None = None
    cold_start_s: float | None = None
    link_bits_s: float | None = None
    command: str = ""


@dataclass(frozen=True)
class Decision:
    """The answer for one run."""

    run: Path
    summary: Summary
    steps: list[Step]
    limits: list[Limit]
    rails: Guardrails
    physics: Physics
    cost: FleetCost | None
    fleet: Fleet | None
    gpus: int
    model: str | None
    disaggregation: list[Condition]

    @property
    def name(self) -> str:
        return str(self.run)

    @property
    def hardware(self) -> str:
        """Return how far the run is from its hardware, in words."""
        return hardware_words(self.physics)

    def plain(self) -> dict[str, Any]:
        """Return the decision as JSON-able values."""
        cost = self.cost and {
            "usd_per_hour": self.cost.usd_per_hour,
            "usd_per_year": self.cost.usd_per_year,
            "usd_per_request": self.cost.usd_per_request,
            "usd_per_million_output_tokens": self.cost.usd_per_million_output,
        }
        held = {
            "run": str(self.run),
            "capacity_rps": self.summary.capacity.capacity_rps,
            "capacity_rps_ci": self.summary.capacity.capacity_rps_ci,
            "steps": self.steps,
            "limits": self.limits,
            "guardrails": self.rails,
            "memory": self.physics.fit,
            "hardware": self.physics.use,
            "fleet": self.fleet,
            "cost": cost,
            "disaggregation": self.disaggregation,
        }
        plain: dict[str, Any] = msgspec.to_builtins(held)
        return plain


def decide(path: Path, stated: Stated) -> Decision:
    """Return the decision for one run directory. Raises DecisionError, ConfigError, RunDirError."""
    run = load_run(path)
    if not run.meta.get("stages"):
        raise DecisionError(f"{path}: the run has no stage: nothing was measured")
    summary = summarise(run)
    measured_gpus = gpus_measured(run.meta)
    given = {**options_of_run(run.meta, stated.profile), "tp": measured_gpus, **stated.raw}
    inputs = fleet_inputs(read_settings(given))
    instance, lacks = _instance(stated, inputs["tensor_parallel"])
    fleet, no_fleet = _fleet(summary, inputs, stated)
    limits = find_limits(summary)
    rails = guardrails(
        summary,
        stated.wait_budget_s,
        stated.cold_start_s,
        inputs["safety_factor"] or 1.2,
        stated.shape.max_tokens if stated.shape else None,
    )
    known = Known(
        summary,
        str(path),
        input_quantiles(summary),
        summary.fleet.output_tokens_mean,
        limits,
        rails,
        instance,
        lacks,
        fleet,
        no_fleet,
        inputs["gpu_hour_usd"],
        None,
        stated.prices,
        str(stated.profile) if stated.profile else None,
        next((s.planned for s in summary.sharing or () if s.planned is not None), None),
        measured_gpus,
        stated.command,
    )
    tokens = summary.fleet.input_tokens_mean, summary.fleet.output_tokens_mean
    point = None if None in tokens else operating_point(summary, tokens[0] or 0, tokens[1] or 0)
    physics = physics_of(known, point)
    return Decision(
        path,
        summary,
        thirteen_steps(known, physics),
        limits,
        rails,
        physics,
        cost_of(known),
        fleet,
        inputs["tensor_parallel"],
        (run.meta.get("endpoint") or {}).get("model"),
        readiness(
            summary, limits, stated.shape, stated.link_bits_s, fleet.instances if fleet else None
        ),
    )


def crossover(decisions: Sequence[Decision]) -> str | None:
    """Return where requests/s per GPU fall with the TP degree, of runs of one model; else None."""
    if len({one.model for one in decisions}) != 1:
        return None
    rates = {}
    for one in decisions:
        capacity = one.summary.capacity
        if capacity.capacity_rps is not None:
            low, high = capacity.capacity_rps_ci or (None, None)
            rates[one.gpus] = Range(capacity.capacity_rps, low, high)
    found = tp_crossover(rates)
    if found is None:
        return None
    sure = "" if found.certain else ", though the intervals meet"
    return (
        f"TP {found.higher} carries {found.higher_rps_per_gpu.value:.3g} req/s per GPU, "
        f"TP {found.lower} {found.lower_rps_per_gpu.value:.3g}{sure}: past its crossover, more "
        "instances serve more than a higher degree"
    )


def _instance(stated: Stated, gpus: int) -> tuple[Instance | None, str]:
    """Return (the model on its GPUs, what is missing for it)."""
    if stated.gpu is not None and stated.gpu.lower() not in HARDWARE:
        raise ConfigError(f"--gpu {stated.gpu}: none of {', '.join(HARDWARE)}")
    if stated.shape is None:
        return None, "the model is not known: give --model-config (or --params, --layers, ...)"
    if stated.gpu is None:
        return None, "the GPU is not known: give --gpu"
    card = HARDWARE[stated.gpu.lower()]
    weights = stated.weights or stated.shape.weights or "fp16"
    return Instance(stated.shape, card, gpus, weights, stated.kv), ""


def _fleet(summary: Summary, inputs: Mapping[str, Any], stated: Stated) -> tuple[Fleet | None, str]:
    """Return (the fleet for the peak, why there is none)."""
    traffic = None
    if stated.profile is not None or inputs["peak_rps"] is not None:
        traffic = traffic_of(inputs["peak_rps"], None, stated.profile)
    plain = msgspec.to_builtins(summary)
    carried = carried_by(plain["capacity"], plain["stages"], plain["fleet"])
    sized = fleet_of(traffic, carried, inputs["tensor_parallel"], inputs["safety_factor"])
    if sized["instances"] is None:
        return None, sized["reason"]
    low, high = sized["instances_ci"]
    why = sized["safety_reason"] or choose_safety(traffic)[1]
    peak, number, gpus = sized["peak_rps"], sized["instances"], sized["gpus"]
    before, safety = sized["instances_before_safety"], sized["safety_factor"]
    return Fleet(peak, before, number, (low, high), gpus, safety, why), ""
