"""What the SLOs say of one stage: verdicts, goodput, the classes of its workload, fluidity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ampacity.analysis.metrics.cohort import Cohort
from ampacity.analysis.metrics.fluidity import fluidity_of
from ampacity.analysis.metrics.percentiles import percentiles
from ampacity.analysis.metrics.requests import Bools
from ampacity.analysis.slo import Slo
from ampacity.analysis.stage.attainment import judge_slo, observe_slos, requests_meeting
from ampacity.analysis.stage.goodput import goodput_rps
from ampacity.analysis.stage.steady import Stability

# chance of a false "violated" by a stage with its start-up, whose quick answers dilute the misses
# of the rest
DILUTED = 0.1


def slo_findings(
    cohort: Cohort,
    whole: Cohort | None,
    slos: Sequence[Slo],
    span_s: float,
    stability: Stability,
    client_limited: bool,
    down: Bools | None = None,
) -> tuple[dict[str, Any], Bools | None]:
    """Return the SLO part of a stage object, and which requests meet all SLOs, (n,) or None.

    ``whole``: with the start-up that was cut, where one was found in the data; a verdict must hold
    with it, too. ``span_s``: seconds of the stage's load that the cohort is worth
    (``ampacity.analysis.stage.throughput.span_s``). ``down``, shape (n,): which of its requests
    failed in an outage.
    """
    observed = observe_slos(cohort, slos)
    verdicts = _verdicts(cohort, whole, slos, down)
    unknown = (
        next((o.reason for _, o in observed if o.reason), None) if observed else "no SLO given"
    )
    meets = requests_meeting(cohort, observed) if not (observed and unknown) else None
    good = meets if observed else None
    met, reason = _overall(verdicts, stability, client_limited)
    result = {
        **_goodput(cohort, good, span_s),
        "slo_met": met,
        "slo_met_reason": reason,
        "slo_verdicts": verdicts,
        "classes": _classes(cohort, whole, slos, good, span_s, stability, client_limited, down),
        "fluidity": _fluidity(cohort, slos),
    }
    return result | ({"goodput_rps_reason": unknown} if unknown else {}), meets


def outside_findings(
    cohort: Cohort, slos: Sequence[Slo], stability: Stability, client_limited: bool
) -> dict[str, Any]:
    """Return the SLO verdicts on the requests that no outage touched."""
    verdicts = _verdicts(cohort, None, slos, None)
    met, reason = _overall(verdicts, stability, client_limited)
    ok = int(np.count_nonzero(cohort.requests.has_status("ok")))
    return {
        "requests": len(cohort.requests),
        "ok": ok,
        "slo_met": met,
        "slo_met_reason": reason,
        "slo_verdicts": verdicts,
    }


def _verdicts(
    cohort: Cohort, whole: Cohort | None, slos: Sequence[Slo], down: Bools | None
) -> list[dict[str, Any]]:
    """Return the entries of ``slo_verdicts``.

    Violated where those that failed in an outage are more than the SLO allows: one event, whose
    size is no matter of chance. Inconclusive where the start-up that was cut makes the difference:
    with it a violation may be less sure (``DILUTED``), not unsure.
    """
    observed = observe_slos(cohort, slos)
    verdicts = [judge_slo(o, slo) for slo, o in observed]
    for verdict, (slo, o) in zip(verdicts, observed, strict=True):
        if down is None or not o.n:
            continue
        of_class = down[cohort.in_class(slo.class_)]
        lost = float(o.misses(slo.limit_s)[: len(of_class)][of_class].sum())
        if lost > (1 - slo.quantile) * o.n:
            reason = f"{lost:.0f} of {o.n} {o.unit} were lost while the endpoint was down"
            verdict |= {
                "verdict": "violated",
                "reason": reason,
                "cause": None,
                "more_requests": None,
            }
    if whole is None:
        return verdicts
    cut = len(whole.requests) - len(cohort.requests)
    for verdict, (slo, o) in zip(verdicts, observe_slos(whole, slos), strict=True):
        other = judge_slo(o, slo, DILUTED)["verdict"]
        if verdict["verdict"] != "inconclusive" and other != verdict["verdict"]:
            was = "met" if verdict["verdict"] == "met" else "violated"
            cause = f"the first {cut} requests, taken for a start-up, make the difference"
            reason = (
                f"{was} without the first {cut} requests, a start-up, and not with them: --warmup "
                f"{cut} leaves them out"
            )
            verdict |= {
                "verdict": "inconclusive",
                "reason": reason,
                "cause": cause,
                "more_requests": None,
            }
    return verdicts


def without_rate(found: Mapping[str, Any], achieved_rps: float) -> dict[str, Any]:
    """Return the nulls that replace a goodput beside an achieved rate of 0."""
    if achieved_rps or not found["goodput_rps"]:
        return {}
    return {
        "goodput_rps": None,
        "goodput_rps_reason": "no answer ended within the stage, which is too short for a rate",
    }


def _goodput(cohort: Cohort, good: Bools | None, span_s: float) -> dict[str, float | None]:
    judged = len(cohort.requests) - int(np.count_nonzero(cohort.requests.left_out))
    judged += cohort.missing
    met = None if good is None else int(np.count_nonzero(good))
    return {
        "goodput_rps": None if met is None else goodput_rps(met, span_s),
        "slo_attainment": met / judged if met is not None and judged else None,
    }


def _classes(
    cohort: Cohort,
    whole: Cohort | None,
    slos: Sequence[Slo],
    good: Bools | None,
    span_s: float,
    stability: Stability,
    client_limited: bool,
    down: Bools | None,
) -> dict[str, dict[str, Any]]:
    """Return the figures of each class of a workload that has several."""
    names = sorted(set(cohort.requests.class_))
    found: dict[str, dict[str, Any]] = {}
    for name in names if len(names) > 1 else ():
        part = cohort.of_class(name)
        counts = part.requests.status_counts()
        lost = None if down is None else down[cohort.in_class(name)]
        verdicts = _verdicts(part, whole and whole.of_class(name), slos_of(name, slos), lost)
        met, reason = _overall(verdicts, stability, client_limited)
        found[name] = {
            "requests": len(part.requests),
            "ok": counts.pop("ok"),
            "errors": counts,
            **_goodput(part, None if good is None else good[cohort.in_class(name)], span_s),
            "slo_met": met,
            "slo_met_reason": reason,
            "slo_verdicts": verdicts,
            "ttft_from_schedule_s": percentiles(part.ttft(from_schedule=True)),
            "tpot_s": percentiles(part.tpot),
            "icl_s": percentiles(part.icl),
            "e2e_from_schedule_s": percentiles(part.e2e(from_schedule=True)),
        }
    return found


def slos_of(name: str, slos: Sequence[Slo]) -> list[Slo]:
    """Return the SLOs that the requests of a class have to meet."""
    return [slo for slo in slos if slo.class_ in (None, name)]


def _fluidity(cohort: Cohort, slos: Sequence[Slo]) -> dict[str, Any]:
    """Return the fluidity indices for the deadlines of the first fluidity SLO."""
    none = {"slo": None, "mean_index": None, "share_at_least_0.9": None}
    slo = next((s for s in slos if s.metric == "fluidity"), None)
    if slo is None or slo.first_s is None:
        return none
    part = cohort.of_class(slo.class_)
    part = part.part(part.requests.has_status("ok") & (part.chunks.count > 0))
    if not len(part.requests):
        return none
    index = fluidity_of(part.requests, part.chunks, slo.first_s, slo.limit_s)
    return {
        "slo": slo.text,
        "mean_index": float(index.mean()),
        "share_at_least_0.9": float(np.mean(index >= 0.9)),
    }


def _overall(
    verdicts: list[dict[str, Any]], stability: Stability, client_limited: bool
) -> tuple[bool | None, str | None]:
    if not verdicts:
        return None, "no SLO given"
    if client_limited:
        return None, "the client could not keep up: nothing of this stage is a finding"
    if stability.stable is False:
        return False, f"unstable: {stability.reason}"
    broken = [v["slo"] for v in verdicts if v["verdict"] == "violated"]
    if broken:
        return False, f"broken: {', '.join(broken)}"
    inconclusive = [v for v in verdicts if v["verdict"] == "inconclusive"]
    if inconclusive:
        return None, f"inconclusive: {inconclusive[0]['slo']}: {inconclusive[0]['reason']}"
    return True, None
