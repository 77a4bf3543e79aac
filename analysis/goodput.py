"""Goodput: requests per second that met every SLO; failed requests are in the denominator of attainment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def goodput_rps(met: int, window_s: float) -> float:
    """Requests of the cohort that met every SLO, per second of the window in which they were scheduled."""
    return met / window_s if window_s > 0 else 0.0


def peak_goodput(stages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The ``goodput`` object: the best stage that was not limited by the client."""
    usable = [s for s in stages if not s["client_limited"] and s["goodput_rps"] is not None]
    if not usable:
        return {
            "peak_rps": None,
            "at_offered_rps": None,
            "reason": "no SLO given, or none that could be judged",
        }
    best = max(usable, key=lambda s: s["goodput_rps"])
    return {"peak_rps": best["goodput_rps"], "at_offered_rps": best["offered_rps"], "reason": None}
