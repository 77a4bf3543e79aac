"""Advice on a burst: the harm done, the headroom that would have carried it, a circuit breaker."""

import math
from collections.abc import Sequence

from msgspec.structs import replace

from ampacity.analysis.burst.timeline import Phases
from ampacity.analysis.capacity.fleet import queue_depth
from ampacity.analysis.contract.burst import Backlog, Breaker, Harm, HarmByPhase, Headroom, Phase
from ampacity.analysis.contract.part import with_nulls
from ampacity.analysis.metrics.cohort import Cohort
from ampacity.analysis.slo import ERROR_RATE, WAITS, Slo, parse_slo
from ampacity.analysis.stage.attainment import observe_slos

FAILURES = parse_slo("error_rate=1%")  # a relevant share, where no SLO names one


def find_harm(part: Cohort, base: Cohort, slos: Sequence[Slo]) -> Harm | None:
    """Return the first SLO missed more often than it allows, the base's share and chance explain.

    Chance: three standard deviations, sqrt(expected (1 + n / n of the base)). Without an SLO on
    failures they are held to 1 %.
    """
    judged = sorted(slos, key=lambda slo: slo.metric != ERROR_RATE)
    if not judged or judged[0].metric != ERROR_RATE:
        judged.insert(0, FAILURES)
    pairs = zip(observe_slos(part, judged), observe_slos(base, judged), strict=True)
    for (slo, o), (_, of_base) in pairs:
        misses, share = float(o.misses(slo.limit_s).sum()), 1 - slo.quantile
        if of_base.n:
            share = max(share, float(of_base.misses(slo.limit_s).sum()) / of_base.n)
        expected = share * o.n
        spread = math.sqrt(max(1.0, expected) * (1 + o.n / of_base.n if of_base.n else 1.0))
        if misses > expected + 3 * spread:
            what = "failed" if slo.metric == ERROR_RATE else f"missed {slo.text}"
            return Harm(slo=slo.text, reason=f"{misses:.0f} of {o.n} {o.unit} {what}")
    return None


def _wait_limit_s(slos: Sequence[Slo], base: Phase) -> tuple[float | None, Slo | None]:
    """Return how long a request may wait: the tightest limit, less what the base takes."""
    limits = [slo for slo in slos if slo.metric in WAITS]
    found = [
        (max(0.0, slo.limit_s - median_s), slo)
        for slo in limits
        if (median_s := (base.e2e_s if slo.metric == "e2e" else base.ttft_s).p50) is not None
    ]
    return min(found, key=lambda f: f[0], default=(None, limits[0] if limits else None))


def headroom(
    slos: Sequence[Slo],
    phases: Phases,
    backlog: Backlog,
    harm: HarmByPhase,
    *,
    over: bool,
    base_too_short: bool = False,
    other: str | None = None,
) -> Headroom:
    """Return the rate that would have kept the burst's last request within its limit.

    Never enough where the burst was harmed, not known where it was not seen to be ``over``, the
    base is harmed itself or ``base_too_short``, or where the burst was ``other`` work than the base.
    """
    base, burst, after = phases
    offered, served = burst.offered_rps or 0.0, backlog.served_rps
    wait_s, slo = _wait_limit_s(slos, base)
    length_s = burst.end_s - burst.start_s
    if after.end_s <= burst.end_s:
        return with_nulls(Headroom, reason=backlog.reason)
    needed = None if slo and wait_s is None else offered * length_s / (length_s + (wait_s or 0.0))
    result = with_nulls(Headroom, needed_rps=needed)
    if served is not None and needed is not None and served < needed:
        text = (
            f"with a {wait_s:.3g} s wait allowed by {slo.text}"
            if slo and wait_s
            else "without any wait"
        )
        return replace(
            result, factor=needed / served if served else None, enough=False, reason=text
        )
    if harm.burst:
        return replace(result, enough=False, reason=f"in the burst {harm.burst.reason}")
    if harm.base:
        return replace(result, reason=f"the base load alone is too much: {harm.base.reason}")
    if other:
        return replace(result, reason=other)
    if not burst.ok:
        return replace(result, reason="the burst was not answered at all")
    if base_too_short:
        return replace(result, reason="the base phase is too short to know when the burst is over")
    if not over:
        return replace(result, reason="the burst was not seen to end")
    reason = backlog.reason or "the queue stayed within the limits"
    return replace(result, enough=True, reason=reason)


def breaker(slos: Sequence[Slo], phases: Phases, backlog: Backlog, harm: Harm | None) -> Breaker:
    """Return the queue depth, acceptable wait x rate, at which a circuit breaker opens.

    The rate is that of the answers: while there was a queue, or in the burst where a relevant share
    of it failed.
    """
    burst = phases[1]
    wait_s, slo = _wait_limit_s(slos, phases[0])
    rate = backlog.served_rps
    if rate is None and harm and ERROR_RATE in harm.slo and burst.ok:
        rate = burst.achieved_rps
    result = with_nulls(Breaker, acceptable_wait_s=wait_s, rate_rps=rate)
    if wait_s and rate:
        depth = queue_depth(rate, wait_s)
        return replace(result, max_depth=depth, open_at=(depth * 8 // 10, depth * 9 // 10))
    if slo is None:
        why = "no SLO says how long a request may wait: give --slo ttft_p99=2s"
    elif wait_s is None:
        why = (
            "too few requests were answered in the base phase to know how long one may wait "
            f"within {slo.text}"
        )
    elif not wait_s:
        why = (
            f"{slo.text} leaves no time to wait: at the base load half of the requests take as "
            "long as it allows"
        )
    elif backlog.piled_up is not None:
        why = (
            "requests pile up in flight, not in a queue: limit those in flight, to the C_max that "
            "a sweep finds"
        )
    elif not burst.ok:
        why = "nothing of the burst was answered: the server's rate is not known"
    else:
        why = (
            f"{backlog.reason}: the server's rate is only known to be at least "
            f"{burst.achieved_rps:.3g} req/s"
        )
        carried = backlog.at_end_of_burst is not None and not harm
        why += "; raise --factor" if carried else ""
    return replace(result, reason=why)
