"""The check: one load, until every SLO is decided or the time is used up."""

from __future__ import annotations

from typing import Any

from ampacity.analysis.change.engine import spent_at
from ampacity.analysis.contract.summary import Summary
from ampacity.analysis.load_names import load_name
from ampacity.analysis.slo import verdict_word
from ampacity.analysis.change.results import Check, GateResult
from ampacity.durations import duration_text
from ampacity.experiments.stages.rig import Rig, Stage, Watch
from ampacity.experiments.sweep import too_few

ALPHA = 0.05  # chance of a false "met", and of a false "violated", over all looks together
LOOKS = (0.02, 0.04, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8)
ALPHAS = spent_at(ALPHA, [*LOOKS, 1.0])


def decided(stage: Stage) -> str | None:
    """Return the verdict of a stage so far; None while it is inconclusive.

    No steady state is no verdict by itself before the stage's end: it may be the start-up.
    """
    verdicts = stage["slo_verdicts"]
    if violated := [v["slo"] for v in verdicts if v["verdict"] == "violated"]:
        return f"violated: {', '.join(violated)}"
    return "met" if verdicts and stage["slo_met"] else None


async def check(rig: Rig) -> None:
    """Run one stage of the settings' ``duration_s`` at most."""
    (rate_rps,) = rig.settings.rates or ()
    if warning := too_few(rig):
        rig.tell(warning)
    length_s = rig.settings.duration_s
    rig.tell(
        f"at most {duration_text(length_s)} (--max-duration), about {rate_rps * length_s:,.0f} "
        "requests; ends as soon as every SLO is decided"
    )
    await rig.open_stage(rate_rps, length_s, Watch(decided, LOOKS, ALPHAS))
