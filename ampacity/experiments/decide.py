"""Gather what is known of runs, a model, a GPU and prices, and walk the thirteen steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ampacity.analysis.capacity.fleet import NO_PEAK, choose_safety
from ampacity.analysis.capacity.fleet_figures import FleetError
from ampacity.analysis.contract.summary import Summary
from ampacity.analysis.decision.candidates import (
    Candidate,
    Decision,
    LeftOut,
    UseAt,
    rank,
    told_apart,
)
from ampacity.analysis.decision.disaggregation import readiness
from ampacity.analysis.decision.guardrails import guardrails
from ampacity.analysis.decision.inputs import Range
from ampacity.analysis.decision.known import Known, Physics, hardware_words, physics_of
from ampacity.analysis.decision.memory import NO_ADAPTERS, Adapters
from ampacity.analysis.decision.model import DecisionError, ModelShape, catalogued
from ampacity.analysis.decision.plan import NO_FLEET, Plan
from ampacity.analysis.decision.roofline import Instance, tp_crossover
from ampacity.analysis.decision.steps import thirteen_steps
from ampacity.analysis.slo import slo_from_dict
from ampacity.experiments.sizing import Sizing, fleet_terms, gpus_measured, plan_run, read_judged
from ampacity.loadgen.rundir.files import Run
from ampacity.simulator.models.catalog import HARDWARE
from ampacity.simulator.models.hardware import devices, made_of


@dataclass(frozen=True)
class Engine:
    """A stated model, its GPUs and precisions; None: as in the run, else fp16."""

    gpu: str | None = None
    shape: ModelShape | None = None
    weights: str | None = None
    kv: str | None = None


@dataclass(frozen=True)
class Stated:
    """Facts that are stated beside the runs; ``sizing``: for their fleets."""

    sizing: Sizing
    engine: Engine = Engine()
    wait_budget_s: float | None = None
    cold_start_s: float | None = None
    link_bits_s: float | None = None
    draft_tokens: int | None = None
    adapters: Adapters = NO_ADAPTERS
    command: str = ""


def decide(paths: Sequence[Path], stated: Stated) -> Decision:
    """Return the decision for one or more run directories, ranked at one SLO and one peak.

    Of several, one that cannot be used is left out with its reason; all are judged at the SLOs and
    the peak of the first where none are stated. Raises ValueError where none is left.
    """
    found: list[Candidate] = []
    errors: list[tuple[Path, ValueError]] = []
    sizing, notes = stated.sizing, []
    for path in paths:
        try:
            run, summary = read_judged(path, sizing.slos)
            if len(paths) > 1 and not found:
                sizing, note = _common(path, run, sizing)
                notes = [note]
            found.append(_decide(path, run, summary, replace(stated, sizing=sizing)))
        except ValueError as error:
            errors.append((path, error))
    if not found:
        raise errors[0][1]
    ranked = rank(found)
    return Decision(
        candidates=ranked,
        apart=told_apart(ranked),
        notes=[*notes, *_crossover(found)],
        left_out=[LeftOut(run=str(path), reason=str(error)) for path, error in errors],
    )


def _common(path: Path, run: Run, sizing: Sizing) -> tuple[Sizing, str]:
    """Return (what holds for all candidates, in words): what is not stated is that of one run."""
    slos = sizing.slos or [slo_from_dict(slo) for slo in run.meta.get("slos") or []]
    peak = fleet_terms(run, sizing)["peak_rps"]
    raw = sizing.raw if peak is None else {**sizing.raw, "peak_rps": peak}
    given = "as stated" if sizing.slos else f"that of {path}"
    at = " and ".join(slo.text for slo in slos) or "no SLO"
    return replace(sizing, slos=slos, raw=raw), f"All are judged at {at}, {given}."


def _decide(path: Path, run: Run, summary: Summary, stated: Stated) -> Candidate:
    """Return the answer for one run. Raises DecisionError, ConfigError."""
    terms = fleet_terms(run, stated.sizing)
    plan, no_plan = _plan(path, run, summary, stated.sizing)
    instance, lacks = find_instance(run.meta, stated.engine, terms["tensor_parallel"])
    rails = guardrails(
        summary,
        stated.wait_budget_s,
        stated.cold_start_s,
        plan.safety_factor if plan else choose_safety(None)[0],
        instance.shape.max_tokens if instance else None,
        plan.crowding if plan else 1.0,
    )
    sharing = [s.planned for s in summary.sharing or () if s.planned is not None]
    known = Known(
        summary=summary,
        run=str(path),
        rails=rails,
        instance=instance,
        plan=plan,
        plan_missing=no_plan,
        gpu_hour_usd=terms["gpu_hour_usd"],
        profile=str(stated.sizing.profile) if stated.sizing.profile else None,
        planned_sharing=sharing[0] if sharing else None,
        run_gpus=gpus_measured(run.meta),
        draft_tokens=stated.draft_tokens,
        command=stated.command,
    )
    return _candidate(known, physics_of(summary, instance, lacks, stated.adapters), run, stated)


def _candidate(known: Known, physics: Physics, run: Run, stated: Stated) -> Candidate:
    """Return the answer from all that is known."""
    summary, plan = known.summary, known.plan
    return Candidate(
        run=known.run,
        predicted=summary.predicted,
        slos=[slo.text for slo in summary.slos],
        capacity_rps=summary.capacity.capacity_rps,
        capacity_rps_ci=summary.capacity.capacity_rps_ci,
        verified_rps=summary.capacity.verified_rps,
        capacity_reason=summary.capacity.reason,
        gpus=fleet_terms(run, stated.sizing)["tensor_parallel"],
        model=(run.meta.get("endpoint") or {}).get("model"),
        plan=plan,
        plan_missing=known.plan_missing or None,
        steps=thirteen_steps(known, physics),
        limits=summary.limits,
        guardrails=known.rails,
        memory=physics.fit,
        hardware=physics.use,
        hardware_text=hardware_words(physics),
        hardware_curve=[UseAt(rps=rps, mbu=use.mbu, mfu=use.mfu) for rps, use in physics.curve],
        disaggregation=readiness(
            summary,
            summary.limits,
            known.instance,
            stated.link_bits_s,
            plan.instances if plan else None,
        ),
    )


def _plan(path: Path, run: Run, summary: Summary, sizing: Sizing) -> tuple[Plan | None, str]:
    """Return (the fleet for the peak, why there is none)."""
    if sizing.profile is None and fleet_terms(run, sizing)["peak_rps"] is None:
        return None, NO_PEAK
    try:
        return plan_run(path, run, summary, sizing), ""
    except FleetError as error:
        return None, str(error).removeprefix(f"{NO_FLEET}: ")


def _crossover(candidates: Sequence[Candidate]) -> list[str]:
    """Return where requests/s per GPU fall with the TP degree, of runs of one model."""
    if len({one.model for one in candidates}) != 1:
        return []
    rates = {}
    for one in candidates:
        if one.capacity_rps is not None:
            low, high = one.capacity_rps_ci or (None, None)
            rates[one.gpus] = Range(one.capacity_rps, low, high)
    found = tp_crossover(rates)
    if found is None:
        return []
    sure = "" if found.certain else ", though the intervals meet"
    return [
        f"TP {found.higher} carries {found.higher_rps_per_gpu.value:.3g} req/s per GPU, "
        f"TP {found.lower} {found.lower_rps_per_gpu.value:.3g}{sure}: past its crossover, more "
        "instances serve more than a higher degree"
    ]


def find_instance(
    meta: Mapping[str, Any], engine: Engine, gpus: int
) -> tuple[Instance | None, str]:
    """Return (the model on its GPUs, what is missing for it).

    What is not stated is that of the run: what a prediction simulated, the GPU of --lock hardware=.
    """
    name = (meta.get("endpoint") or {}).get("model") if meta.get("predicted") else None
    model, card, settings = made_of(str(name)) or (None, None, {})
    locked = str((meta.get("locked") or {}).get("hardware") or "").lower()
    card = HARDWARE.get(engine.gpu or devices(locked)[1], card)
    shape = engine.shape or (catalogued(model) if model else None)
    if shape is None:
        return None, "no model is given (--model-config)"
    if card is None:
        return None, "no GPU is given (--gpu)"
    weights = engine.weights or shape.weights or settings.get("weights", "fp16")
    return Instance(shape, card, gpus, weights, engine.kv or settings.get("kv", "fp16")), ""


def hardware_text(run: Run, summary: Summary, engine: Engine) -> str | None:
    """Return how far a run is from its hardware, or why that is not known.

    None where model or GPU are not known.
    """
    instance, _ = find_instance(run.meta, engine, gpus_measured(run.meta))
    if instance is None:
        return None
    try:
        return hardware_words(physics_of(summary, instance, ""))
    except DecisionError as error:  # of a run's own --tp: the report is written all the same
        return str(error)
