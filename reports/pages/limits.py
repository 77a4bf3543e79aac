"""Show the causes that limit an endpoint, and the limits to set in front of an instance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf

from ampacity.analysis.contract.capacity import Fleet
from ampacity.analysis.contract.limits import Evidence, Limit
from ampacity.analysis.decision.guardrails import Guardrails
from ampacity.analysis.decision.plan import Plan
from ampacity.analysis.limits.table import NO_CAUSES, SYMPTOMS
from ampacity.reports.render.figures import DASH, seconds, share, significant


@dataclass(frozen=True)
class ShownLimit:
    """A limit with the figures that it follows from, the outcome of its test, and its symptoms."""

    limit: Limit
    evidence: str
    tested: str
    symptoms: list[ShownLimit]


def limits_with_figures(limits: Sequence[Limit]) -> list[ShownLimit]:
    """Return each limit that holds; symptoms stand under the first cause in the endpoint."""
    held = [one for one in limits if one.holds]
    shown = [ShownLimit(one, evidence_text(one.evidence), _outcome(one), []) for one in held]
    cause = next((one for one in shown if one.limit.rule not in NO_CAUSES), None)
    if cause is None:
        return shown
    cause.symptoms.extend(one for one in shown if one.limit.rule in SYMPTOMS)
    return [one for one in shown if one not in cause.symptoms]


def _outcome(limit: Limit) -> str:
    word = {False: "Here it falls", True: "Here it stays", None: "Here it falls by less than half"}[
        limit.refuted
    ]
    return f"{word}: {evidence_text(limit.tested)}" if limit.tested else ""


def evidence_text(evidence: Sequence[Evidence]) -> str:
    """Return figures as text: ``at 200 req/s: requests waiting, mean 486; requests running, 64``."""
    stages = {e.stage for e in evidence}
    common = next(iter(stages)) if len(stages) == 1 and len(evidence) > 1 else None
    texts = (
        f"{e.figure}{':' * isinstance(e.value, str)} {_evidence(e)}"
        + (f" at {e.stage}" if e.stage and not common else "")
        for e in evidence
    )
    return (f"at {common}: " if common else "") + "; ".join(texts)


def _evidence(seen: Evidence) -> str:
    value = seen.value
    if isinstance(value, float) and seen.unit:
        return {"share": share, "s": seconds}[seen.unit](value)
    if isinstance(value, float):
        return significant(value) if abs(value) >= 1e-6 else "0"
    return DASH if value is None else str(value)


@dataclass(frozen=True)
class Rail:
    """A limit to set in front of an instance.

    Its name, where to set it, its value with the unit, what happens to what comes beyond it, and why.
    """

    name: str
    place: str
    value: str
    beyond: str
    why: str


def rails_of(rails: Guardrails, fleet: Plan | Fleet | None = None) -> list[Rail]:
    """Return the limits for an instance; where the fleet has too few for the rate, how many."""
    found = []
    if rails.operate_rps is not None:
        takes = ceil(fleet.peak_rps / rails.operate_rps) if fleet and fleet.peak_rps else 0
        more = f"; the peak then takes {takes} instances" if takes > _instances(fleet) else ""
        at = f"at most {significant(rails.operate_rps)} req/s"
        found.append(Rail("rate", "proxy", at, "refused (429)", f"{rails.operate_reason}{more}"))
    if rails.max_input_tokens is not None:
        low, high = rails.max_input_tokens
        why = "2 × P95 of the prompts, in the stage with the most requests"
        why += f" (3 ×: {high:,})" if high > low else ""
        found.append(Rail("prompt", "proxy", f"at most {low:,} tokens", "refused (400)", why))
    full = rails.concurrency_limit
    if full is not None:
        why = "at any moment: C_max, rounded up"
        found.append(
            Rail("requests in flight", "proxy", f"at most {full}", "waits in the queue", why)
        )
    if rails.breaker:
        low, high = rails.breaker
        total = (
            f"; {_ends((full + low, full + high))} requests with those in flight" if full else ""
        )
        why = f"80 to 90 % of the queue, before that is full{total}"
        at = f"opens at {_ends(rails.breaker)} waiting"
        found.append(Rail("circuit breaker", "proxy", at, "refused (503)", why))
    if rails.queue_depth is not None:
        why = f"what leaves in the {seconds(rails.wait_budget_s)} that TTFT may wait"
        at = f"at most {rails.queue_depth} waiting"
        found.append(Rail("queue", "proxy", at, "refused (429)", why))
    if rails.max_input_tokens is not None and rails.max_output_tokens is not None:
        value = f"at most {rails.max_output_tokens:,} tokens"
        why = "P99 of the answers, in the stage with the most requests: one in 100 is cut"
        found.append(Rail("answer", "max_tokens", value, "cut off", why))
    if full is not None:
        value = f"above {rails.scale_in_flight} in flight"
        why = "on average over minutes: C_max ÷ the safety factor"
        found.append(Rail("add an instance", "autoscaler", value, DASH, why))
    if rails.prewarm_s is not None:
        value = f"{significant(rails.prewarm_s)} s ahead"
        found.append(Rail("start an instance", "autoscaler", value, DASH, "--cold-start"))
    return found


def _instances(fleet: Plan | Fleet | None) -> float:
    return (fleet and fleet.instances) or inf


def _ends(ends: tuple[int, int]) -> str:
    low, high = ends
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
