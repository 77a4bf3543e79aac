"""Facts that the steps of a decision read, and what the hardware allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ampacity.analysis.contract.summary import Summary
from ampacity.analysis.decision.guardrails import Guardrails
from ampacity.analysis.decision.inputs import Range
from ampacity.analysis.decision.memory import (
    NO_ADAPTERS,
    Adapters,
    Fit,
    does_it_fit,
    memory_needed,
    valid_degrees,
)
from ampacity.analysis.decision.model import DecisionError
from ampacity.analysis.decision.plan import Plan
from ampacity.analysis.decision.roofline import Instance, Point, Use, lever, use_of


@dataclass(frozen=True)
class Known:
    """All that the steps read: a run's summary, and what is stated beside it.

    ``run``: the run directory, for the commands. ``lengths``: input tokens by quantile. Everything
    that is None is not known, and the step that needs it names the option.
    """

    summary: Summary
    run: str
    lengths: Mapping[str, float]
    output_tokens: float | None
    rails: Guardrails
    instance: Instance | None = None
    instance_missing: str = ""
    plan: Plan | None = None
    plan_missing: str = ""
    gpu_hour_usd: float | None = None
    profile: str | None = None
    planned_sharing: float | None = None
    run_gpus: int = 1  # of the instance that was measured
    draft_tokens: int | None = None
    adapters: Adapters = NO_ADAPTERS
    command: str = ""  # that of this decision, which further options are added to


@dataclass(frozen=True)
class Physics:
    """Does it fit and how far is it from the hardware; ``missing`` says what is not known.

    ``curve``: the use of the hardware by achieved requests/s, of every stage that shows it.
    """

    fit: Fit | None = None
    use: Use | None = None
    missing: str = ""
    curve: tuple[tuple[float, Use], ...] = ()


def measured_points(
    summary: Summary, input_tokens: float, output_tokens: float
) -> list[tuple[float, Point]]:
    """Return achieved requests/s and operating point of each open stage that answers."""
    found = []
    for stage in (s for s in summary.stages if s.kind == "open" and s.output_tokens_per_s):
        tpot_s = stage.tpot_s.mean if stage.tpot_s.mean is not None else stage.tpot_s.p50
        if tpot_s:
            low, high = stage.output_tokens_per_s_ci or (None, None)
            rate = Range(stage.output_tokens_per_s or 0.0, low, high)
            lengths = input_tokens, output_tokens
            point = Point(rate, tpot_s, *lengths, stage.input_tokens_per_s)
            found.append((stage.achieved_rps or 0.0, point))
    return sorted(found, key=lambda at: at[0])


def physics_of(known: Known, points: Sequence[tuple[float, Point]]) -> Physics:
    """Return the memory floor and the use of the hardware, as far as the inputs allow.

    The operating point is the measured stage nearest to the capacity.
    """
    instance = known.instance
    if instance is None:
        return Physics(missing=known.instance_missing)
    if instance.gpus not in valid_degrees(instance.shape.heads):
        raise DecisionError(
            f"--tp {instance.gpus} does not divide the {instance.shape.heads} attention heads of "
            f"{instance.shape.name}: valid are {_few(valid_degrees(instance.shape.heads))}"
        )
    capacity = known.summary.capacity
    rate = capacity.verified_rps or capacity.capacity_rps or 0.0
    point = min(points, key=lambda at: abs(at[0] - rate))[1] if points else None
    in_flight = capacity.c_max or 1.0
    tokens = known.lengths.get("p95", point.context if point else 0.0) + (
        known.output_tokens or 0.0
    )
    needed = memory_needed(
        instance.shape,
        in_flight,
        tokens,
        weights=instance.weights,
        kv=instance.kv,
        adapters=known.adapters,
    )
    lengths = {n: v + (known.output_tokens or 0.0) for n, v in known.lengths.items()}
    fit = does_it_fit(
        instance.shape, needed, instance.hardware, lengths, kv=instance.kv, gpus=instance.gpus
    )
    if point is None:
        return Physics(fit, None, "no stage shows a time per output token")
    try:
        curve = tuple((rps, use_of(instance, at)) for rps, at in points)
        return Physics(fit, use_of(instance, point), curve=curve)
    except DecisionError as error:
        return Physics(fit, None, str(error))


def hardware_words(physics: Physics) -> str:
    """Return how far the measured point is from the hardware, or why that is not known."""
    return lever(physics.use) if physics.use else physics.missing


def _few(degrees: Sequence[int]) -> str:
    return ", ".join(str(degree) for degree in degrees[:6]) + (", ..." if len(degrees) > 6 else "")
