"""The SLO verdicts of one stage: verdicts, goodput, the classes of its workload, fluidity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec.structs import replace

from ampacity.analysis.contract.stage import Fluidity, OutsideOutage, SloVerdict, StageClass
from ampacity.analysis.metrics.cohort import Cohort
from ampacity.analysis.metrics.fluidity import fluidity_of
from ampacity.analysis.metrics.percentiles import percentiles
from ampacity.analysis.metrics.requests import Bools
from ampacity.analysis.slo import Slo
from ampacity.analysis.stage.attainment import judge_slo, observe_slos, requests_meeting
from ampacity.analysis.stage.goodput import goodput_rps
from ampacity.analysis.stage.steady import Stability
from ampacity.analysis.stats.intervals import CONFIDENCE

# times the chance of a false "violated": of a stage with its start-up, whose quick answers dilute
# the misses of the rest
DILUTED = 2.0


@dataclass(frozen=True)
class Judged:
    """Requests of a stage to be judged.

    ``whole`` also holds the start-up that was cut, where the data showed one; a verdict must hold
    with it, too. ``down``, shape (n,): which requests failed or waited in an outage.
    """

    cohort: Cohort
    whole: Cohort | None = None
    down: Bools | None = None

    def of_class(self, name: str) -> Judged:
        down = None if self.down is None else self.down[self.cohort.in_class(name)]
        whole = self.whole and self.whole.of_class(name)
        return Judged(self.cohort.of_class(name), whole, down)


@dataclass(frozen=True)
class Judge:
    """The SLOs of a stage and what voids their verdicts.

    ``span_s``: seconds of the stage's load that its cohort is worth
    (``ampacity.analysis.stage.throughput.span_s``). ``alpha``: of a check, the chance of a false
    "met" and that of a false "violated" over all SLOs; None: 5 % for each verdict.
    """

    slos: Sequence[Slo]
    stability: Stability
    client_limited: bool
    span_s: float = 0.0
    alpha: float | None = None

    def stage_findings(self, judged: Judged) -> tuple[dict[str, Any], Bools | None]:
        """Return the SLO fields of a stage, and which requests meet all SLOs, (n,) or None."""
        cohort = judged.cohort
        observed = observe_slos(cohort, self.slos)
        unknown = next((o.reason for _, o in observed if o.reason), None)
        meets = None if unknown else requests_meeting(cohort, observed)
        good = meets if observed else None
        return {
            **self._goodput(cohort, good),
            "goodput_rps_reason": unknown if observed else "no SLO given",
            **self._verdicts(judged, self.slos),
            "classes": self._classes(judged, good),
            "fluidity": _fluidity(cohort, self.slos),
        }, meets

    def outside(self, cohort: Cohort) -> OutsideOutage:
        """Return the SLO verdicts on the requests that no outage touched."""
        return OutsideOutage(
            requests=len(cohort.requests),
            ok=int(np.count_nonzero(cohort.requests.has_status("ok"))),
            **self._verdicts(Judged(cohort), self.slos),
        )

    def _classes(self, judged: Judged, good: Bools | None) -> dict[str, StageClass]:
        """Return each class of a workload that has several.

        It is judged by the SLOs of all requests and by its own.
        """
        names = sorted(set(judged.cohort.requests.class_))
        found: dict[str, StageClass] = {}
        for name in names if len(names) > 1 else ():
            part = judged.of_class(name)
            cohort, counts = part.cohort, part.cohort.requests.status_counts()
            found[name] = StageClass(
                requests=len(cohort.requests),
                ok=counts.pop("ok"),
                errors=counts,
                **self._goodput(
                    cohort, None if good is None else good[judged.cohort.in_class(name)]
                ),
                **self._verdicts(part, slos_of(name, self.slos)),
                ttft_from_schedule_s=percentiles(cohort.ttft(from_schedule=True)),
                tpot_s=percentiles(cohort.tpot),
                icl_s=percentiles(cohort.icl),
                e2e_from_schedule_s=percentiles(cohort.e2e(from_schedule=True)),
            )
        return found

    def _goodput(self, cohort: Cohort, good: Bools | None) -> dict[str, Any]:
        left_out = int(np.count_nonzero(cohort.requests.left_out))
        judged = len(cohort.requests) - left_out + cohort.missing
        met = None if good is None else int(np.count_nonzero(good))
        return {
            "goodput_rps": None if met is None else goodput_rps(met, self.span_s),
            "slo_attainment": met / judged if met is not None and judged else None,
        }

    def _verdicts(self, judged: Judged, slos: Sequence[Slo]) -> dict[str, Any]:
        """Return ``slo_met``, ``slo_met_reason`` and ``slo_verdicts`` of some requests."""
        chances = 1 - CONFIDENCE, 1 - CONFIDENCE
        if self.alpha is not None:  # all must be met; one that is violated is enough (Bonferroni)
            chances = self.alpha / max(len(self.slos), 1), self.alpha
        verdicts = judge_requests(judged, slos, *chances)
        met, reason = self.overall(verdicts)
        return {"slo_met": met, "slo_met_reason": reason, "slo_verdicts": verdicts}

    def overall(self, verdicts: Sequence[SloVerdict]) -> tuple[bool | None, str | None]:
        """Return whether all SLOs are met, and why not or why that is not known."""
        if not verdicts:
            return None, "no SLO given"
        if self.client_limited:
            return None, "the client could not keep up: nothing of this stage is a finding"
        if self.stability.stable is False:
            return False, f"unstable: {self.stability.reason}"
        if violated := [v.slo for v in verdicts if v.verdict == "violated"]:
            return False, f"violated: {', '.join(violated)}"
        for v in verdicts:
            if v.verdict == "inconclusive":
                return None, f"inconclusive: {v.slo}: {v.reason}"
        return True, None


def judge_requests(
    judged: Judged,
    slos: Sequence[Slo],
    chance_violated: float = 1 - CONFIDENCE,
    chance_met: float = 1 - CONFIDENCE,
) -> list[SloVerdict]:
    """Return the entries of ``slo_verdicts``, with these chances of a false one.

    Violated where an outage made more requests miss than the SLO allows: one event, whose size is
    no matter of chance. Inconclusive where the start-up that was cut makes the difference: with it
    a violation may be less sure (``DILUTED``), not unsure.
    """
    cohort, whole, down = judged.cohort, judged.whole, judged.down
    verdicts = []
    for slo, o in observe_slos(cohort, slos):
        verdict = judge_slo(o, slo, chance_violated, chance_met)
        if down is not None and o.n:
            of_class = down[cohort.in_class(slo.class_)]
            lost = float(o.misses(slo.limit_s)[: len(of_class)][of_class].sum())
            if lost > (1 - slo.quantile) * o.n:
                reason = f"{lost:.0f} of {o.n} {o.unit} missed it because of an outage"
                verdict = _overruled(verdict, "violated", reason)
        verdicts.append(verdict)
    if whole is None:
        return verdicts
    cut = len(whole.requests) - len(cohort.requests)
    for i, (slo, o) in enumerate(observe_slos(whole, slos)):
        was = verdicts[i].verdict
        if was not in (
            "inconclusive",
            judge_slo(o, slo, DILUTED * chance_violated, chance_met).verdict,
        ):
            cause = f"the first {cut} requests, taken for a start-up, make the difference"
            reason = (
                f"{was} without the first {cut} requests, a start-up, and not with them: --warmup "
                f"{cut} leaves them out"
            )
            verdicts[i] = _overruled(verdicts[i], "inconclusive", reason, cause)
    return verdicts


def _overruled(verdict: SloVerdict, word: str, reason: str, cause: str | None = None) -> SloVerdict:
    return replace(verdict, verdict=word, reason=reason, cause=cause, more_requests=None)


def slos_of(name: str, slos: Sequence[Slo]) -> list[Slo]:
    """Return the SLOs that the requests of a class have to meet."""
    return [slo for slo in slos if slo.class_ in (None, name)]


def _fluidity(cohort: Cohort, slos: Sequence[Slo]) -> Fluidity:
    """Return the fluidity indices for the deadlines of the first fluidity SLO."""
    slo = next((s for s in slos if s.metric == "fluidity"), None)
    if slo is not None and slo.first_s is not None:
        part = cohort.of_class(slo.class_)
        part = part.part(part.requests.has_status("ok") & (part.chunks.count > 0))
        if len(part.requests):
            index = fluidity_of(part.requests, part.chunks, slo.first_s, slo.limit_s)
            smooth = float(np.mean(index >= 0.9))
            return Fluidity(slo=slo.text, mean_index=float(index.mean()), share_smooth=smooth)
    return Fluidity(slo=None, mean_index=None, share_smooth=None)
