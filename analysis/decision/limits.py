"""Find what limits an endpoint, and what to change first: a closed table of rules over a run's summary.

Each rule reads figures of the summary and answers yes, no, or "cannot tell, because X was not
measured". Several may hold: causes come before symptoms, and what shows at a lower load before what
shows at a higher one, as it ends the range in which the SLOs hold.
"""

from __future__ import annotations

from ampacity.analysis.contract.summary import Summary
from ampacity.analysis.decision.curve import CannotTell, Curve, Limit, Rule
from ampacity.analysis.decision.limit_rules import RULES

SYMPTOMS = {"queueing", "plateau"}  # of any engine near or beyond its throughput


def find_limits(summary: Summary) -> list[Limit]:
    """Return the answer of every rule: those that hold first, causes before symptoms."""
    curve = Curve(summary)
    found = [_answer(rule, curve) for rule in RULES]
    order = {True: 0, None: 1, False: 2}
    load = {stage.name: number for number, stage in enumerate(curve.stages)}

    def rank(limit: Limit) -> tuple[int, bool, int, float]:
        stages = [load[e.stage] for e in limit.evidence if e.stage in load]
        symptom = limit.rule in SYMPTOMS
        return order[limit.holds], symptom, min(stages, default=0), -limit.strength

    return sorted(found, key=rank)


def _answer(rule: Rule, curve: Curve) -> Limit:
    found, reason = None, None
    try:
        found = rule.check(curve)
    except CannotTell as missing:
        reason = f"cannot tell: {missing}"
    return Limit(
        rule=rule.name,
        holds=None if reason else found is not None,
        title=rule.title,
        lever=rule.lever,
        refuted_by=rule.refuted_by,
        evidence=found.evidence if found else (),
        strength=found.strength if found else 0.0,
        reason=reason,
    )
