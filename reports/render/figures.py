"""Numbers as people read them: three significant digits, and a unit."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ampacity.analysis.capacity.levels import usd
from ampacity.analysis.contract.capacity import Goodput, Limit
from ampacity.analysis.contract.figures import Percentiles
from ampacity.analysis.contract.stage import Stage
from ampacity.analysis.contract.summary import Summary
from ampacity.durations import duration_text

Quantile = Literal["p50", "p90", "p95", "p99", "p99_9", "max"]

DASH = "–"
NO_REASON = "this run holds nothing to tell it from"


@dataclass(frozen=True)
class Finding:
    """A key figure; where it is null, ``value`` is a dash and ``note`` the reason."""

    label: str
    value: str
    interval: str | None
    note: str
    state: str = ""  # good | bad | unsure, or empty


def significant(value: float | None, digits: int = 3) -> str:
    """Return ``value`` to ``digits`` significant digits, without an exponent."""
    if value is None:
        return DASH
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits - 1}e}")
    if not math.isfinite(rounded):  # the largest floats become so by rounding
        return str(value)
    magnitude = math.floor(math.log10(abs(rounded)))
    if magnitude >= digits:
        return f"{value:,.0f}"
    return f"{rounded:,.{max(0, digits - 1 - magnitude)}f}"


def exact(value: float | None) -> str:
    """Return a value that was set, not measured: without trailing zeros."""
    if value is None:
        return DASH
    text = significant(value, 4)
    return text.rstrip("0").rstrip(".") if "." in text else text


def seconds(value: float | None) -> str:
    """Return a duration in µs, ms or s."""
    if value is None:
        return DASH
    size = abs(value)
    if size == 0:
        return "0 s"
    if size < 0.9995e-3:
        return f"{significant(value * 1e6)} µs"
    return f"{significant(value * 1e3)} ms" if size < 0.9995 else f"{significant(value)} s"


def at_least(
    value: Any, ends: Sequence[float | None] | None, text: Callable[[Any], str] = seconds
) -> str:
    """Return a figure with ``≥`` where its interval has no upper end, or there is none."""
    return f"≥ {text(value)}" if ends is None or ends[1] is None else text(value)


def length(time_s: float) -> str:
    """Return a length as ``duration_text``, with ``11 min`` for ``11m``."""
    text = duration_text(time_s)
    return f"{text[:-1]} {'min' if text[-1] == 'm' else text[-1]}"


def rate(value: float | None) -> str:
    if value is None:
        return DASH
    return f"{significant(value)} req/s"


def share(value: float | None) -> str:
    """Return a fraction as per cent; only 1 is ``100%``."""
    if value is None:
        return DASH
    per_cent = 100 * value
    if 99.9 <= per_cent < 100:
        return f"{math.floor(per_cent * 1000) / 1000:.3f}%"
    return "100%" if per_cent == 100 else f"{significant(per_cent)}%"


def signed_per_cent(value: float | None) -> str:
    """Return a share in per cent as ``+4.1``, or ``?``."""
    return "?" if value is None else f"{round(100 * value, 1) + 0.0:+.1f}"  # no -0.0


def count(value: float | None) -> str:
    if value is None:
        return DASH
    return f"{value:,.0f}"


def counted(value: float | None, noun: str) -> str:
    """Return ``1 GPU``, ``52 GPUs``."""
    return f"{count(value)} {noun}{'' if value == 1 else 's'}"


def gpu_price(gpus: int, gpu_hour_usd: float) -> str:
    """Return the price behind a cost: ``2 GPUs × $2.50/h``."""
    return f"{counted(gpus, 'GPU')} × {usd(gpu_hour_usd)}/h"


def interval(
    bounds: Sequence[float | None] | None, text: Any = significant, unit: str = ""
) -> str | None:
    """Return ``6.00 to 7.00 req/s``, or None where neither end is known."""
    low, high = bounds or (None, None)
    unit = f" {unit}" if unit else ""
    if low is None:
        return None if high is None else f"up to {text(high)}{unit}"
    if high is None:
        return f"from {text(low)}{unit}, no upper bound"
    return f"{text(low)} to {text(high)}{unit}"


def why_null(held: Percentiles, name: Quantile | Literal["mean"]) -> str:
    """Return why a percentile is null."""
    return getattr(held, f"{name}_reason") or held.reason or NO_REASON


def loads_of(summary: Summary, indices: Sequence[int]) -> str:
    """Return the names of some stages' loads, from the lowest up."""
    names = (stage.name for stage in by_load(summary.stages) if stage.index in indices)
    return ", ".join(dict.fromkeys(names))


NO_FAILURES = {
    "unfinished": "cut off unfinished",
    "cancelled": "cancelled by the workload",
    "too_long": "longer than the model's context",
}
"""Statuses that are not the server's fault, in words."""


def failures(errors: Mapping[str, int]) -> int:
    """Return the requests that failed; those that this side ended did not."""
    return sum(n for status, n in errors.items() if status not in NO_FAILURES)


def cut_off(errors: Mapping[str, int]) -> int:
    """Return the requests that were in flight at the drain limit or at the end of the run."""
    return errors.get("unfinished", 0)


def ended_otherwise(errors: Mapping[str, int]) -> list[str]:
    """Return ``12 cut off unfinished``, for each status that is no failure and occurred."""
    counts = ((errors.get(status), words) for status, words in NO_FAILURES.items())
    return [f"{count(n)} {words}" for n, words in counts if n]


def failures_by_cause(summary: Summary) -> str:
    """Return ``rate_limited 27 (HTTP 429: quota), reset 3``, the most frequent first."""
    causes = ((n, name) for name, n in summary.errors.items() if n and name not in NO_FAILURES)
    examples = {name: f" ({text})" for name, text in summary.error_examples.items()}
    return ", ".join(
        f"{name} {count(n)}{examples.get(name, '')}" for n, name in sorted(causes, reverse=True)
    )


def queue_grew(stage: Stage) -> bool:
    """Return whether each value is within its limit, and only the growing queue violates."""
    within = all(v.verdict != "violated" for v in stage.slo_verdicts)
    return stage.slo_met is False and stage.stable is False and within


def by_load(stages: Sequence[Stage]) -> list[Stage]:
    """Return the stages from the lowest load up; equal loads in the order in which they ran."""
    return sorted(stages, key=lambda s: (s.kind, s.offered_rps or s.concurrency_set or 0, s.index))


def percentile_text(
    value: Any, ends: Sequence[float | None] | None, text: Callable[[Any], str] = seconds
) -> str:
    """Return a figure with ``≥`` where its interval has no upper end."""
    return at_least(value, ends, text) if ends else text(value)


def quantile_text(held: Percentiles, name: Quantile) -> str:
    """Return a percentile of a latency; it is not null."""
    return percentile_text(getattr(held, name), held.p99_ci if name == "p99" else None, seconds)


BOUNDS = {"lower_bound": "at least ", "saturated": "at most ", "pooled": "an estimated "}


def least_of(capacity: Limit) -> str:
    """Return what precedes the load: ``at least ``, ``an estimated `` or nothing."""
    return "" if capacity.crossing == "saturated" else BOUNDS.get(capacity.crossing, "")


def most_answered(summary: Summary) -> str:
    """Return ``, at most 138 answered``, where the capacity's interval ends above any rate seen."""
    high = (summary.capacity.capacity_rps_ci or (None, None))[1]
    most = max((s.achieved_rps for s in summary.stages), default=0.0)
    unseen = summary.capacity.crossing == "pooled" and high and high > most
    return f", at most {significant(most)} answered" if unseen else ""


def peak_basis(summary: Summary) -> str:
    """Return what an estimated goodput peak rests on, and why a stage may lie above it."""
    peak = summary.goodput.peak_rps or 0.0
    above = any((s.goodput_rps or 0.0) > peak for s in summary.stages)
    text = "an estimate of its own, from all open-loop stages together"
    return text + "; a stage lies above it by chance" * above


def offered_at(goodput: Goodput) -> str | None:
    """Return the load of the goodput peak: one that was set, or an estimate of one."""
    if goodput.at_offered_rps is None:
        return None
    return (significant if goodput.basis == "pooled" else exact)(goodput.at_offered_rps)


def peak_text(goodput: Goodput, unit: str = "req/s") -> str:
    """Return the goodput peak, called an estimate where it is no stage's own."""
    least = BOUNDS.get(str(goodput.basis), "")
    return f"{least}{significant(goodput.peak_rps or 0)} {unit}"


UNDECIDED = {
    "too few": "too few requests",
    "needs": "too few requests",
    "too short": "too short",
    "so near": "near its limit",
    "the share": "on the edge",
    "were cut off": "cut off in flight",
    "start-up": "slow start-up (--warmup)",
}
"""Short words for a verdict's ``cause``, by a text that it contains."""


def undecided(cause: str) -> str:
    """Return the short words for the cause of an inconclusive verdict."""
    return next((words for part, words in UNDECIDED.items() if part in cause), "no value")
