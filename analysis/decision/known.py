"""Facts that the steps of a decision read, and what the hardware allows."""

import math
from collections.abc import Sequence
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
from ampacity.analysis.decision.plan import Plan, engines_seen
from ampacity.analysis.decision.roofline import Instance, Point, Use, lever, use_of


@dataclass(frozen=True)
class Known:
    """All that the steps read: a run's summary, and what is stated beside it.

    ``run``: the run directory, for the commands. Everything that is None is not known, and the step
    that needs it names the option.
    """

    summary: Summary
    run: str
    rails: Guardrails
    instance: Instance | None = None
    plan: Plan | None = None
    plan_missing: str = ""
    gpu_hour_usd: float | None = None
    profile: str | None = None
    planned_sharing: float | None = None
    run_gpus: int = 1  # of the instance that was measured
    draft_tokens: int | None = None
    command: str = ""  # that of this decision, which further options are added to


@dataclass(frozen=True)
class Physics:
    """Does it fit and how far is it from the hardware; ``missing`` says what is not known.

    ``curve``: the use of the hardware by achieved requests/s, of every stage that shows it.
    """

    fit: Fit | None = None
    at_rps: float | None = None
    use: Use | None = None
    missing: str = ""
    curve: tuple[tuple[float, Use], ...] = ()


def measured_points(summary: Summary) -> list[tuple[float, Point]]:
    """Return achieved requests/s and operating point of each open stage that answers."""
    lengths = summary.fleet.input_tokens_mean, summary.fleet.output_tokens_mean
    if lengths[0] is None or lengths[1] is None:
        return []
    found = []
    for stage in (s for s in summary.stages if s.kind == "open" and s.output_tokens_per_s):
        tpot_s = stage.tpot_s.mean if stage.tpot_s.mean is not None else stage.tpot_s.p50
        if tpot_s:
            low, high = stage.output_tokens_per_s_ci or (None, None)
            rate = Range(stage.output_tokens_per_s or 0.0, low, high)
            point = Point(rate, tpot_s, lengths[0], lengths[1], stage.input_tokens_per_s)
            found.append((stage.achieved_rps or 0.0, point))
    return sorted(found, key=lambda at: at[0])


def sequence_lengths(summary: Summary) -> dict[str, float]:
    """Return the tokens of a whole sequence, input and output, by quantile; empty: not counted."""
    held = summary.workload["realised"]["sequence_tokens"]
    return {name: held[name] for name in ("p50", "p95", "p99") if held[name]}


def in_flight_p95(mean: float) -> float:
    """Return the P95 of requests in flight, which vary as a Poisson number does (assumed)."""
    return mean + 1.645 * math.sqrt(mean)


def physics_of(
    summary: Summary, instance: Instance | None, missing: str, adapters: Adapters = NO_ADAPTERS
) -> Physics:
    """Return the memory floor and the use of the hardware, as far as the inputs allow.

    The operating point is the measured stage nearest to the capacity. ``missing``: why there is no
    instance. Raises DecisionError.
    """
    if instance is None:
        return Physics(missing=missing)
    if (engines := engines_seen(summary)) > 1:
        why = f"{engines:.0f} engines share the load: memory and roofline are those of one engine"
        return Physics(missing=f"{why}, so measure one alone")
    shape, capacity = instance.shape, summary.capacity
    if instance.gpus not in valid_degrees(shape.heads):
        raise DecisionError(
            f"--tp {instance.gpus} does not divide the {shape.heads} attention heads of "
            f"{shape.name}: valid are {_few(valid_degrees(shape.heads))}"
        )
    lengths = sequence_lengths(summary)
    needed = memory_needed(
        shape,
        in_flight_p95(capacity.c_max or 1.0),
        lengths.get("p95", 0.0),
        weights=instance.weights,
        kv=instance.kv,
        adapters=adapters,
    )
    fit = does_it_fit(shape, needed, instance.hardware, lengths, kv=instance.kv, gpus=instance.gpus)
    points = measured_points(summary)
    if not points:
        return Physics(fit, missing="no stage shows a time per output token")
    rate = capacity.verified_rps or capacity.capacity_rps or 0.0
    at_rps, point = min(points, key=lambda at: abs(at[0] - rate))
    try:
        curve = tuple((rps, use_of(instance, at)) for rps, at in points)
        return Physics(fit, at_rps, use_of(instance, point), curve=curve)
    except DecisionError as error:
        return Physics(fit, missing=str(error))


def hardware_words(physics: Physics) -> str:
    """Return how far the measured point is from the hardware, or why that is not known."""
    use = physics.use
    if use is None:
        return physics.missing
    compute = "" if use.mfu is None else f" ({100 * use.mfu.value:.0f} % of the compute bound)"
    return f"at {physics.at_rps:.3g} req/s {lever(use)}{compute}"


def _few(degrees: Sequence[int]) -> str:
    return ", ".join(str(degree) for degree in degrees[:6]) + (", ..." if len(degrees) > 6 else "")
