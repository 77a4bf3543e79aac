"""What to do about a burst: was it harmed, how much more would have carried it, when should a
circuit breaker open?
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ampacity.analysis.capacity.fleet import queue_depth
from ampacity.analysis.capacity.levels import WAITS
from ampacity.analysis.metrics.cohort import Cohort
from ampacity.analysis.slo import ERROR_RATE, Slo, parse_slo
from ampacity.analysis.stage.attainment import observe_slos

FAILURES = parse_slo("error_rate=1%")  # what is a relevant share, where no SLO says so


def find_harm(part: Cohort, base: Cohort, slos: Sequence[Slo]) -> dict[str, Any] | None:
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
            return {"slo": slo.text, "reason": f"{misses:.0f} of {o.n} {o.unit} {what}"}
    return None


def _wait_limit_s(
    slos: Sequence[Slo], phases: list[dict[str, Any]]
) -> tuple[float | None, Slo | None]:
    """Return how long a request may wait: the tightest limit, less what the base takes."""
    limits = [slo for slo in slos if slo.metric in WAITS]
    found = [
        (max(0.0, slo.limit_s - held), slo)
        for slo in limits
        if (held := phases[0]["e2e_s" if slo.metric == "e2e" else "ttft_s"]["p50"]) is not None
    ]
    return min(found, key=lambda f: f[0], default=(None, limits[0] if limits else None))


def headroom(
    plan: Mapping[str, Any],
    slos: Sequence[Slo],
    phases: list[dict[str, Any]],
    backlog: dict[str, Any],
    harm: dict[str, Any],
    *,
    over: bool,
) -> dict[str, Any]:
    """Return the rate that would have kept the burst's last request within its limit.

    Never enough where the burst was harmed, not known where it was not seen to be ``over`` or the
    base is harmed itself.
    """
    burst, length = phases[1]["offered_rps"], float(plan["burst_s"])
    wait_s, slo = _wait_limit_s(slos, phases)
    needed = None if slo and wait_s is None else burst * length / (length + (wait_s or 0.0))
    served = backlog["served_rps"]
    result: dict[str, Any] = {"needed_rps": needed, "factor": None, "enough": None}
    if phases[2]["end_s"] <= phases[1]["start_s"] + length:
        return result | {"needed_rps": None, "reason": backlog["reason"]}
    if served is not None and needed is not None and served < needed:
        text = (
            f"with a {wait_s:.3g} s wait allowed by {slo.text}"
            if slo and wait_s
            else "without any wait"
        )
        return result | {
            "factor": needed / served if served else None,
            "enough": False,
            "reason": text,
        }
    if harm["burst"]:
        return result | {"enough": False, "reason": f"in the burst {harm['burst']['reason']}"}
    if harm["base"]:
        return result | {"reason": f"the base load alone is too much: {harm['base']['reason']}"}
    if not over or not phases[1]["ok"]:
        why = "was not seen to be got over" if phases[1]["ok"] else "was not answered at all"
        return result | {"reason": f"the burst {why}"}
    return result | {
        "enough": True,
        "reason": backlog["reason"] or "the queue stayed within the limits",
    }


def breaker(
    slos: Sequence[Slo],
    phases: list[dict[str, Any]],
    backlog: dict[str, Any],
    harm: dict[str, Any] | None,
) -> dict[str, Any]:
    """Return the queue depth, acceptable wait x rate, at which a circuit breaker opens.

    The rate is that of the answers: while there was a queue, or in the burst where a relevant share
    of it failed.
    """
    wait_s, slo = _wait_limit_s(slos, phases)
    rate, least = backlog["served_rps"], phases[1]["achieved_rps"]
    if rate is None and harm and ERROR_RATE in harm["slo"] and phases[1]["ok"]:
        rate = least
    result = {
        "acceptable_wait_s": wait_s,
        "rate_rps": rate,
        "max_depth": None,
        "open_at": None,
        "reason": None,
    }
    if wait_s and rate:
        depth = queue_depth(rate, wait_s)
        return result | {"max_depth": depth, "open_at": [depth * 8 // 10, depth * 9 // 10]}
    why = "no SLO says how long a request may wait: give --slo ttft_p99=2s"
    if slo and wait_s is None:
        why = (
            "too few requests were answered in the base phase to know how long one may wait "
            f"within {slo.text}"
        )
    elif slo and not wait_s:
        why = (
            f"{slo.text} leaves no time to wait: at the base load half of the requests take as "
            "long as it allows"
        )
    elif wait_s:
        why = (
            f"{backlog['reason']}: the server's rate is only known to be at least {least:.3g} req/s"
        )
        why += "; raise --factor" if backlog["at_end_of_burst"] is not None else ""
        why = (
            why
            if phases[1]["ok"]
            else "nothing of the burst was answered: the server's rate is not known"
        )
    return result | {"reason": why}
