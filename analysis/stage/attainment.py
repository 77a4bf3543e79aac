"""Judge which requests, and which stage, meet the SLOs."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ampacity.analysis.contract.stage import SloVerdict, Verdict
from ampacity.analysis.metrics.cohort import Cohort, observations_for_slo
from ampacity.analysis.metrics.observations import Observations
from ampacity.analysis.metrics.percentiles import NO_VALUE, between_bounds, finite, groups
from ampacity.analysis.metrics.requests import Bools, unseen
from ampacity.analysis.slo import (
    ERROR_RATE,
    EXTREMES,
    FIRST_TOKEN,
    GAP_METRICS,
    GOODPUT,
    SHARES,
    Slo,
)
from ampacity.analysis.stats.intervals import (
    CONFIDENCE,
    deciding_factor,
    many_by_chance,
    smallest_n,
)

EDGE_FACTOR = 20.0
"""More times the requests that it has, and than its percentile needs: on the edge, not too short."""


def judge_slo(
    o: Observations,
    slo: Slo,
    chance_violated: float = 1 - CONFIDENCE,
    chance_met: float = 1 - CONFIDENCE,
) -> SloVerdict:
    """Return an entry of ``slo_verdicts``: is a share ``slo.quantile`` within the limit?

    ``chance_violated``, ``chance_met``: of a false "violated" and a false "met".
    ``requests_effective`` is the effective sample size (of gaps, for ITL and ICL).
    """
    if not o.n:
        reason = o.reason or NO_VALUE
        return SloVerdict(
            slo=slo.text,
            verdict="inconclusive",
            value_s=None,
            attainment=None,
            requests_effective=0,
            more_requests=None,
            reason=reason,
            cause=reason,
        )
    if slo.quantile in EXTREMES:
        return _judge_extreme(o, slo)
    misses, unfinished = float(o.misses(slo.limit_s).sum()), o.inconclusive(slo.limit_s)
    tau, widest = o.clustering(slo.quantile)
    few = min(
        float(o.below_by_chance(slo.quantile, np.array([slo.limit_s]))[0]),
        o.far_by_chance(slo.quantile, slo.limit_s),
    )
    many = float(many_by_chance(misses, o.n, 1 - slo.quantile, widest))
    low, high = o.quantile_bounds(slo.quantile)
    is_rate = slo.metric in SHARES
    verdict: Verdict = "violated" if many <= chance_violated else "inconclusive"
    verdict = "met" if few <= chance_met else verdict
    why: dict[str, Any] = dict.fromkeys(("more_requests", "reason", "cause"))
    if verdict == "inconclusive":
        why |= _why_inconclusive(o, slo, misses, unfinished, (chance_met, chance_violated))
    elif is_rate:
        what = "failed" if slo.metric == ERROR_RATE else "missed an SLO or failed"
        why["reason"] = f"{misses:.0f} of {o.n} requests {what}"
    elif math.isinf(low) and slo.metric == "fluidity":
        why["reason"] = f"the first token of {misses:.0f} of {o.n} requests was late or missing"
    elif math.isinf(low):
        why["reason"] = f"infinite: {o.n_infinite} of {o.n} {o.unit} failed"
    value_s, ends = finite(low) if low == high and not is_rate else None, None
    if value_s is not None:
        below, above = o.confidence_interval(slo.quantile)
        ends = finite(below), finite(above)
    return SloVerdict(
        slo=slo.text,
        verdict=verdict,
        value_s=value_s,
        value_s_ci=ends,
        value_s_reason=between_bounds(o, low, high) if low < high and not is_rate else None,
        attainment=1 - (misses + unfinished) / o.n,
        undecided=unfinished / o.n,
        requests_effective=math.floor(o.n / tau),
        **why,
    )


def _judge_extreme(o: Observations, slo: Slo) -> SloVerdict:
    """Return the verdict on the smallest or largest sample: a fact of the run, no inference.

    Met, it names what share of further samples may be slower: 1 - 0.05^(1/n) of independent ones.
    """
    low, high = o.quantile_bounds(slo.quantile)
    met = high <= slo.limit_s
    open_ = not met and low <= slo.limit_s
    misses, unfinished = float(o.misses(slo.limit_s).sum()), o.inconclusive(slo.limit_s)
    reason = f"{misses:.0f} of {o.n} {o.unit} over the limit"
    if open_:
        reason += f"; {unfinished} were cut off, or gave no token, before the limit"
    elif met and slo.quantile:
        beyond = 1 - (1 - CONFIDENCE) ** (1 / o.n)
        reason = f"of these {o.n} {o.unit}; up to {beyond:.2g} of all may be slower"
    return SloVerdict(
        slo=slo.text,
        verdict="met" if met else "inconclusive" if open_ else "violated",
        value_s=finite(low) if low == high else None,
        value_s_reason=between_bounds(o, low, high) if low < high else None,
        attainment=1 - (misses + unfinished) / o.n,
        undecided=unfinished / o.n,
        requests_effective=o.n,
        more_requests=None,
        reason=reason,
        cause="the cut-off ones decide it" if open_ else None,
    )


def _why_inconclusive(
    o: Observations, slo: Slo, misses: float, unfinished: int, chances: tuple[float, float]
) -> dict[str, Any]:
    """Return ``reason``, ``cause`` and ``more_requests`` of an inconclusive verdict.

    ``chances``: of a false "met" and a false "violated".
    """
    over = misses / o.n  # a longer stage cuts off a smaller share
    few, (tau, widest) = over < 1 - slo.quantile, o.clustering(slo.quantile)
    size = max(tau, o.likely_cluster) if few else widest
    n_effective, needed = o.n / size, smallest_n(slo.quantile, confidence=1 - chances[0])
    reason = f"{misses:.0f} of {o.n} {o.unit} over the limit"
    if size >= 2:
        reason += f"; {groups(o, size)}"
    cause = f"so near its limit that more {o.unit} are needed"
    if n_effective < needed:
        cause = f"{slo.percentile} needs {needed} {o.unit}"
        if o.n >= needed:
            cause += f", correlated ones count as {n_effective:.0f}"
        reason += f" ({cause})" if size < 2 else f", so {o.n:,} {o.unit} are too few"
        if size >= 2:
            cause = f"slow {o.unit} come in groups, so these are too few"
    elif unfinished:
        cause = f"{o.unit} were cut off that may have met its limit or not"
    if unfinished:
        were = "was" if unfinished == 1 else "were"
        reason += f"; {unfinished} {were} cut off, or gave no token, before the limit"
    seen, chance = (tau, chances[0]) if few else (widest, chances[1])
    factor = deciding_factor(over, o.n, 1 - slo.quantile, seen, o.likely_cluster, chance)
    more = None
    if factor is None and unfinished:
        reason += ": how they would have ended decides it"
    elif factor is None or (
        factor > EDGE_FACTOR and factor * n_effective > EDGE_FACTOR * smallest_n(slo.quantile)
    ):
        cause = "the share of misses is on the edge of the SLO: no length is likely to decide"
        reason += f"; {cause}"
    else:
        more = max(1, math.ceil(o.n_owners * (factor - 1)))
    return {"reason": reason, "cause": cause, "more_requests": more}


def requests_meeting(cohort: Cohort, observed: Sequence[tuple[Slo, Observations]]) -> Bools:
    """Return which requests of the cohort meet every SLO of their class, shape (n,).

    Failed and unfinished ones miss. A request meets ``itl_p99=50ms`` when the p99 of its own gaps
    does. A metric that a good answer does not have (a single token) cannot be missed by it, nor
    one that this server's stream does not show. Of an answer of several tokens of which none was
    seen nobody knows when the first came: it does not meet a limit on that.
    """
    r = cohort.requests
    meets = r.has_status("ok")
    for slo, o in observed:
        if o.reason and not o.n:  # it is known of no request
            continue
        which = np.flatnonzero(cohort.in_class(slo.class_))
        misses = o.misses(slo.limit_s)[: len(which)]
        if slo.metric in FIRST_TOKEN:
            meets[which] &= ~unseen(r)[which]
        if slo.metric in GAP_METRICS:
            sizes = o.sizes[: len(which)]
            least = np.minimum(sizes, 1)  # within the limit, where there are any
            allowed = sizes - np.maximum(np.ceil(slo.quantile * sizes - 1e-9), least)
            meets[which] &= misses <= allowed
        else:
            meets[which] &= misses == 0
    return meets


def observe_slos(cohort: Cohort, slos: Sequence[Slo]) -> list[tuple[Slo, Observations]]:
    """Return the observations that each SLO is judged by; goodput by all the others together."""
    cache: dict[tuple[Any, ...], Observations] = {}
    for slo in slos:
        key = slo.metric, slo.class_, slo.first_s
        if key not in cache and slo.metric != GOODPUT:
            cache[key] = observations_for_slo(cohort, slo)
    known = {s: cache[s.metric, s.class_, s.first_s] for s in slos if s.metric != GOODPUT}
    found = []
    for slo in slos:
        if slo.metric == GOODPUT:
            meets = requests_meeting(cohort, list(known.items()))
            part = cohort.of_class(slo.class_)
            found.append((slo, part.meeting(meets[cohort.in_class(slo.class_)])))
        else:
            found.append((slo, known[slo]))
    return found
