"""The capacity at other limits of an SLO: what a laxer or stricter one would allow."""

from collections.abc import Sequence
from dataclasses import replace

from msgspec import structs

from ampacity.analysis.capacity.families import split_lengths
from ampacity.analysis.capacity.limit import find_capacity
from ampacity.analysis.contract.capacity import Capacity, Crossing
from ampacity.analysis.contract.part import Interval, Part
from ampacity.analysis.contract.stage import SloVerdict, Stage
from ampacity.analysis.contract.summary import Summary
from ampacity.analysis.slo import ERROR_RATE, Slo, slo_from_dict
from ampacity.analysis.stage.analyse import RunRecords, stage_records
from ampacity.analysis.stage.steady import Stability
from ampacity.analysis.stage.verdicts import Judge, Judged, judge_requests
from ampacity.analysis.summary import read_stages, warmup_of
from ampacity.loadgen.rundir.files import Run
from ampacity.loadgen.rundir.meta import StageMeta

TIMES = (0.3, 0.4, 0.6, 0.8, 1.0, 1.5, 2.0, 4.0, 8.0)  # of the limit


class AtLimit(Part, frozen=True, kw_only=True):
    """The capacity with an SLO in the place of the one that binds; null: none was found."""

    slo: str
    given: bool  # the run's own
    capacity_rps: float | None
    capacity_rps_ci: Interval | None
    crossing: Crossing
    reason: str | None


def at_limit(slo: str, capacity: Capacity, given: bool = True) -> AtLimit:
    """Return a capacity as the one at the limit of ``slo``."""
    return AtLimit(
        slo=slo,
        given=given,
        capacity_rps=capacity.capacity_rps,
        capacity_rps_ci=capacity.capacity_rps_ci,
        crossing=capacity.crossing,
        reason=capacity.reason,
    )


def capacity_at_limits(run: Run, summary: Summary) -> list[AtLimit]:
    """Return the capacity of a run for other limits of an SLO, strictest first.

    Of the SLO that binds, else of the first. Equal to what ``summarise`` finds with that SLO. Empty
    without an SLO that has a limit, and where more than verdicts would change: a stage with an
    outage, or one whose client was late by an SLO's measure.
    """
    slos = [slo_from_dict(slo) for slo in run.meta.get("slos") or []]
    limited = [s for s in slos if s.metric not in ("fluidity", ERROR_RATE)]
    limited.sort(key=lambda slo: slo.text != summary.capacity.binding_slo)
    own = limited[0] if limited else None
    moved = any(s.outage or s.client_limited_metrics for s in summary.stages)
    if own is None or summary.burst or moved:
        return []
    run, _ = split_lengths(run)
    metas, records = read_stages(run)
    tried = [
        own if times == 1 else replace(own, limit_s=float(f"{own.limit_s * times:.2g}"))
        for times in TIMES
    ]
    found = [_judge(records, m, run, tried) for m in metas]  # one stage after the other in memory
    capacities = []
    for i, slo in enumerate(tried):
        instead = [slo if s == own else s for s in slos]
        stages = [
            _with_verdict(stage, stability, instead, judged[i])
            for stage, (stability, judged) in zip(summary.stages, found, strict=True)
        ]
        capacities.append(at_limit(slo.text, find_capacity(stages, instead), slo == own))
    return capacities


def _judge(
    records: RunRecords, meta: StageMeta, run: Run, slos: Sequence[Slo]
) -> tuple[Stability, list[SloVerdict]]:
    """Return whether a stage has a steady state, and its verdict on each of ``slos``."""
    found = stage_records(records, meta, warmup_of(run.meta), run_complete=run.complete)
    judged = Judged(found.cohort, found.whole, found.hit_by_outages)
    return found.stability, judge_requests(judged, slos)


def _with_verdict(
    stage: Stage, stability: Stability, slos: Sequence[Slo], verdict: SloVerdict
) -> Stage:
    """Return a stage with the verdicts on ``slos``, of which ``verdict`` is new."""
    known = {v.slo: v for v in (*stage.slo_verdicts, verdict)}
    verdicts = [known[slo.text] for slo in slos]
    met, reason = Judge(slos, stability, bool(stage.client_limited)).overall(verdicts)
    return structs.replace(stage, slo_verdicts=verdicts, slo_met=met, slo_met_reason=reason)
