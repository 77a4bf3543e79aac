"""Gather what is known of runs, a model, a GPU and prices, and walk the thirteen steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

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
from ampacity.analysis.decision.guardrails import guardrails, input_quantiles
from ampacity.analysis.decision.inputs import Range
from ampacity.analysis.decision.known import Known, hardware_words, measured_points, physics_of
from ampacity.analysis.decision.memory import NO_ADAPTERS, Adapters
from ampacity.analysis.decision.model import ModelShape
from ampacity.analysis.decision.plan import Plan
from ampacity.analysis.decision.roofline import Instance, tp_crossover
from ampacity.analysis.decision.steps import thirteen_steps
from ampacity.analysis.slo import slo_from_dict
from ampacity.experiments.sizing import Sizing, fleet_terms, gpus_measured, plan_run, read_judged
from ampacity.loadgen.rundir.files import Run
from ampacity.simulator.models.catalog import HARDWARE
from ampacity.values import ConfigError


@dataclass(frozen=True)
class Stated:
    """Facts that are stated beside the runs; ``sizing``: for their fleets."""

    sizing: Sizing
    gpu: str | None = None
    shape: ModelShape | None = None
    weights: str | None = None  # None: as the checkpoint's config.json says, else fp16
    kv: str = "fp16"
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
    rails = guardrails(
        summary,
        stated.wait_budget_s,
        stated.cold_start_s,
        plan.safety_factor if plan else choose_safety(None)[0],
        stated.shape.max_tokens if stated.shape else None,
    )
    instance, lacks = _instance(stated, terms["tensor_parallel"])
    sharing = [s.planned for s in summary.sharing or () if s.planned is not None]
    known = Known(
        summary=summary,
        run=str(path),
        lengths=input_quantiles(summary),
        output_tokens=summary.fleet.output_tokens_mean,
        rails=rails,
        instance=instance,
        instance_missing=lacks,
        plan=plan,
        plan_missing=no_plan,
        gpu_hour_usd=terms["gpu_hour_usd"],
        profile=str(stated.sizing.profile) if stated.sizing.profile else None,
        planned_sharing=sharing[0] if sharing else None,
        run_gpus=gpus_measured(run.meta),
        draft_tokens=stated.draft_tokens,
        adapters=stated.adapters,
        command=stated.command,
    )
    return _candidate(known, run, stated)


def _candidate(known: Known, run: Run, stated: Stated) -> Candidate:
    """Return the answer from all that is known."""
    summary, plan = known.summary, known.plan
    tokens = summary.fleet.input_tokens_mean, summary.fleet.output_tokens_mean
    points = [] if None in tokens else measured_points(summary, tokens[0] or 0, tokens[1] or 0)
    physics = physics_of(known, points)
    return Candidate(
        run=known.run,
        predicted=summary.predicted,
        slos=[slo.text for slo in summary.slos],
        capacity_rps=summary.capacity.capacity_rps,
        capacity_rps_ci=summary.capacity.capacity_rps_ci,
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
            stated.shape,
            stated.link_bits_s,
            plan.instances if plan else None,
            stated.kv,
        ),
    )


def _plan(path: Path, run: Run, summary: Summary, sizing: Sizing) -> tuple[Plan | None, str]:
    """Return (the fleet for the peak, why there is none)."""
    if sizing.profile is None and fleet_terms(run, sizing)["peak_rps"] is None:
        return None, NO_PEAK
    try:
        return plan_run(path, run, summary, sizing), ""
    except FleetError as error:
        return None, str(error)


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


def _instance(stated: Stated, gpus: int) -> tuple[Instance | None, str]:
    """Return (the model on its GPUs, what is missing for it)."""
    if stated.gpu is not None and stated.gpu.lower() not in HARDWARE:
        raise ConfigError(f"--gpu {stated.gpu}: none of {', '.join(HARDWARE)}")
    if stated.shape is None:
        return None, "no model is given (--model-config)"
    if stated.gpu is None:
        return None, "no GPU is given (--gpu)"
    card = HARDWARE[stated.gpu.lower()]
    weights = stated.weights or stated.shape.weights or "fp16"
    return Instance(stated.shape, card, gpus, weights, stated.kv), ""
