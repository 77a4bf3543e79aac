"""Numbers as people read them: three significant digits, a unit, and a dash with a reason for null."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ampacity.analysis.load_names import load_name

DASH = "–"
NO_REASON = "this run holds nothing to tell it from"


@dataclass(frozen=True)
class Finding:
    """One key figure. ``value`` is a dash where the figure is null; ``note`` then holds the reason."""

    label: str
    value: str
    interval: str | None
    note: str
    state: str = ""  # good | bad | unsure, or empty


def significant(value: float, digits: int = 3) -> str:
    """``value`` to ``digits`` significant digits without an exponent; whole parts are kept whole."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits - 1}e}")
    if not math.isfinite(rounded):  # the largest floats become so by rounding
        return str(value)
    magnitude = math.floor(math.log10(abs(rounded)))
    if magnitude >= digits:
        return f"{value:,.0f}"
    return f"{rounded:,.{max(0, digits - 1 - magnitude)}f}"


def exact(value: float) -> str:
    """A value that was set, not measured: no trailing zeros (4.0 is '4', 2.5 is '2.5')."""
    text = significant(value, 4)
    return text.rstrip("0").rstrip(".") if "." in text else text


def seconds(value: float) -> str:
    """A duration with the unit that suits it: µs, ms or s."""
    size = abs(value)
    if size == 0:
        return "0 s"
    if size < 0.9995e-3:
        return f"{significant(value * 1e6)} µs"
    return f"{significant(value * 1e3)} ms" if size < 0.9995 else f"{significant(value)} s"


def at_least(
    value: float, ends: Sequence[float | None] | None, text: Callable[[float], str] = seconds
) -> str:
    """A figure with its unit, ``≥ 857 ms`` where its interval ``ends`` has no upper end (p99 with its ``p99_ci``).

    Such a run has not seen its worst: the figure that it shows is only a lower bound of the true one.
    """
    open_above = ends is None or ends[1] is None
    return f"≥ {text(value)}" if open_above else text(value)


def rate(value: float) -> str:
    return f"{significant(value)} req/s"


def share(value: float) -> str:
    """A fraction as per cent; what is not 100 % is never rounded up to it."""
    per_cent = 100 * value
    if 99.9 <= per_cent < 100:
        return f"{math.floor(per_cent * 1000) / 1000:.3f}%"
    return "100%" if per_cent == 100 else f"{significant(per_cent)}%"


def signed_per_cent(value: float | None) -> str:
    """A share as ``+4.1``, in per cent; ``?`` where there is none."""
    return "?" if value is None else f"{round(100 * value, 1) + 0.0:+.1f}"  # no -0.0


def count(value: float) -> str:
    return f"{value:,.0f}"


def counted(value: float, noun: str) -> str:
    """'1 GPU', '52 GPUs'."""
    return f"{count(value)} {noun}{'' if value == 1 else 's'}"


def gpu_price(gpus: int, gpu_hour_usd: float) -> str:
    """What a cost rests on: '2 GPUs × $2.5/h'."""
    return f"{counted(gpus, 'GPU')} × ${exact(gpu_hour_usd)}/h"


def interval(
    bounds: Sequence[float | None] | None, text: Any = significant, unit: str = ""
) -> str | None:
    """'6.00 to 7.00 req/s'; a side that is not known is said so; None where there is no interval."""
    if bounds is None or len(bounds) != 2:
        return None
    low, high = bounds
    unit = f" {unit}" if unit else ""
    if low is None and high is None:
        return None
    if low is None:
        return f"up to {text(high)}{unit}"
    return (
        f"from {text(low)}{unit}, no upper bound"
        if high is None
        else f"{text(low)} to {text(high)}{unit}"
    )


def reason_of(holder: Mapping[str, Any] | None, name: str) -> str:
    """Why the figure ``name`` of ``holder`` is null: ``<name>_reason``, else the holder's ``reason``."""
    held = holder or {}
    return str(held.get(f"{name}_reason") or held.get("reason") or NO_REASON)


def loads_of(summary: Mapping[str, Any], indices: Sequence[int]) -> str:
    """The loads of some stages, as the tables name them, from the lowest up."""
    return ", ".join(
        dict.fromkeys(load_name(s) for s in by_load(summary) if s.get("index") in indices)
    )


def printable(text: str) -> str:
    """``text`` without control characters, which could drive a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


NO_FAILURES = {
    "unfinished": "cut off unfinished",
    "cancelled": "cancelled by the workload",
    "too_long": "longer than the model's context",
}
"""Statuses that say nothing against the server: who ended these requests, in words."""


def failures(errors: Mapping[str, int] | None) -> int:
    """Requests that failed; what was cut off, cancelled or made too long from this side did not."""
    return sum(n for status, n in (errors or {}).items() if status not in NO_FAILURES)


def cut_off(errors: Mapping[str, int] | None) -> int:
    """Requests that were given up unfinished, at the drain limit or at the end of the run."""
    return (errors or {}).get("unfinished", 0)


def ended_otherwise(errors: Mapping[str, int] | None) -> list[str]:
    """'12 cut off unfinished', for each status that is no failure and was seen."""
    return [
        f"{count(n)} {words}"
        for status, words in NO_FAILURES.items()
        if (n := (errors or {}).get(status))
    ]


def by_load(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The stages from the lowest load to the highest; equal loads in the order in which they ran."""
    return sorted(
        summary.get("stages") or [],
        key=lambda s: (
            str(s.get("kind")),
            s.get("offered_rps") or s.get("concurrency_set") or 0,
            s.get("index") or 0,
        ),
    )


def percentile_text(held: Mapping[str, Any], name: str, text: Callable[[Any], str]) -> str:
    """The figure ``name`` as ``text`` writes it, with ``≥`` where its interval (``<name>_ci``) has no upper end."""
    interval = held.get(f"{name}_ci")
    return at_least(held[name], interval, text) if interval else text(held.get(name))


BOUNDS = {"lower_bound": "at least ", "saturated": "at most ", "pooled": "an estimated "}


def least_of(capacity: Mapping[str, Any]) -> str:
    """What stands before a load at which the SLOs hold: ``at least ``, ``an estimated `` or nothing."""
    crossing = str(capacity.get("crossing"))
    return "" if crossing == "saturated" else BOUNDS.get(crossing, "")


def offered_at(goodput: Mapping[str, Any]) -> str:
    """Where the goodput peaks: a load that was set, or an estimate of one."""
    at: float = goodput["at_offered_rps"]
    return significant(at) if goodput.get("basis") == "pooled" else exact(at)


def peak_text(goodput: Mapping[str, Any], unit: str = "req/s") -> str:
    """The goodput peak, called an estimate where it is no stage's own."""
    least = BOUNDS.get(str(goodput.get("basis")), "")
    return f"{least}{significant(goodput['peak_rps'])} {unit}"
