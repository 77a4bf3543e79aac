"""The highest goodput of a run, from all of its stages together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ampacity.analysis.capacity.pooled import peak_goodput_rps
from ampacity.analysis.slo import Slo
from ampacity.analysis.stage.throughput import NO_FIGURE, is_figure


def peak_goodput(stages: Sequence[dict[str, Any]], slos: Sequence[Slo]) -> dict[str, Any]:
    """Return the ``goodput`` object.

    The maximum of load x share that meets every SLO, from all open stages together. Where they
    allow no such estimate, the best of the stages whose rates are figures, without an interval: the
    best of several is the one that chance favours.
    """
    result: dict[str, Any] = {
        "peak_rps": None,
        "peak_rps_ci": None,
        "at_offered_rps": None,
        "basis": None,
        "reason": None,
    }
    judged = [s for s in stages if s["goodput_rps"] is not None]
    usable = [s for s in judged if is_figure(s)]
    if not usable:
        reasons = (s["goodput_rps_reason"] for s in stages if s.get("goodput_rps_reason"))
        return result | {"reason": NO_FIGURE if judged else next(reasons, "no stage was measured")}
    if found := peak_goodput_rps(stages, slos):
        peak, ci, load = found
        return result | {
            "peak_rps": peak,
            "peak_rps_ci": list(ci),
            "at_offered_rps": load,
            "basis": "pooled",
        }
    best = max(usable, key=lambda s: s["goodput_rps"])
    return result | {
        "peak_rps": best["goodput_rps"],
        "at_offered_rps": best["offered_rps"],
        "basis": "stage",
    }
