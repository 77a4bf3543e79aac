"""The ``burst`` object of summary.json: each phase, the queue, the recovery, what to do."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from ampacity.analysis.burst.advice import breaker, find_harm, headroom
from ampacity.analysis.burst.backlog import find_backlog
from ampacity.analysis.burst.recovery import find_recovery, judge_recovery
from ampacity.analysis.burst.timeline import Phases, Timeline
from ampacity.analysis.contract.burst import Burst, BurstSeries, HarmByPhase, Phase, PhaseLatency
from ampacity.analysis.metrics.chunks import read_chunks
from ampacity.analysis.metrics.cohort import Cohort
from ampacity.analysis.metrics.lengths import LENGTHS_OFF_SHARE, deviations
from ampacity.analysis.metrics.observations import Observations
from ampacity.analysis.metrics.requests import Bools, Floats, Ints, ttft_s
from ampacity.analysis.slo import Slo
from ampacity.analysis.stage.analyse import RunRecords
from ampacity.analysis.stage.attainment import observe_slos, requests_meeting
from ampacity.analysis.stage.steady import time_average_in_flight
from ampacity.analysis.stats.intervals import smallest_n
from ampacity.loadgen.rundir.meta import StageMeta

REQUESTS_PER_BIN = 10.0
BINS_MIN = 12  # in the base phase, however few its requests
_NS = 1e-9


def summarise_burst(
    plan: Mapping[str, Any],
    meta: StageMeta,
    records: RunRecords,
    slos: Sequence[Slo],
    server: pa.Table | None,
) -> Burst:
    """Return the ``burst`` object from run.json's ``burst`` and its one stage.

    Times in s after the start of the stage.
    """
    cohort, t = _read(plan, meta, records)
    met = _meeting(cohort, slos)
    phases = _phases(t, cohort, met)
    base_rps = float(plan["base_rps"])
    edges = _edges(t, base_rps)
    backlog = find_backlog(t, phases, base_rps)
    recovery, other = find_recovery(t, backlog, phases), _other_work(t, cohort)
    if other:
        recovery = replace(recovery, recovery_s=None, ci_s=(None, None), reason=other)
    over_s = math.inf if recovery.recovery_s is None else t.over_s + recovery.recovery_s
    harm = _harm(t, cohort, slos, over_s)
    over = over_s < math.inf and not harm.after
    return Burst(
        base_rps=plan["base_rps"],
        factor=plan.get("factor"),
        shape=plan.get("shape"),
        resolution_s=float(edges[1] - edges[0]),
        phases=phases,
        base_level=recovery.base_level,
        recovery_s=recovery.recovery_s,
        recovery_ci_s=recovery.ci_s,
        recovery_reason=recovery.reason,
        base_too_short=recovery.base_too_short,
        max_recovery=judge_recovery(
            plan.get("max_recovery_s"), recovery.ci_s, recovery.reason, harm.after
        ),
        known_until_s=t.end_s if t.end_s < _planned_s(plan) else None,
        harm=harm,
        backlog=backlog,
        headroom=headroom(
            slos,
            phases,
            backlog,
            harm,
            over=over,
            base_too_short=recovery.base_too_short,
            other=other,
        ),
        breaker=breaker(slos, phases, backlog, harm.burst),
        series=_series(t, edges, server, meta),
        **_peaks(t, over_s),
        **_losses(t, cohort, met, phases),
    )


def _planned_s(plan: Mapping[str, Any]) -> float:
    return round(float(plan["base_s"] + plan["burst_s"] + plan["recovery_s"]), 9)


def _read(plan: Mapping[str, Any], meta: StageMeta, records: RunRecords) -> tuple[Cohort, Timeline]:
    """Return the first attempts of the stage up to the end of what is known."""
    rows = records.requests.take(
        (records.requests.stage == meta.index) & (records.requests.attempt == 0)
    )
    start_ns = float(meta.start_ns - records.origin_ns)
    last_ns = float(np.nanmax(np.concatenate([rows.ended_ns, [start_ns]])))
    at, last_s = (rows.scheduled_ns - start_ns) * _NS, (last_ns - start_ns) * _NS
    ids = records.table["request_id"].to_numpy()[rows.row]
    end_s = max(0.0, _known_until_s(_planned_s(plan), meta, at, ids, last_s))
    rows, at = rows.take(at <= end_s), at[at <= end_s]
    cohort = Cohort(rows, read_chunks(records.table, rows), 0, last_ns, spoilt=records.spoilt)
    unfinished, ttft = rows.has_status("unfinished"), ttft_s(rows, from_schedule=True)
    ttft = np.where(rows.failed | unfinished & np.isnan(ttft), np.inf, ttft)
    finish = np.where(np.isnan(rows.ended_ns), max(end_s, last_s), (rows.ended_ns - start_ns) * _NS)
    left = np.where(unfinished, np.inf, finish)
    answered = np.where(np.isnan(rows.first_token_ns), left, (rows.first_token_ns - start_ns) * _NS)
    burst_s, over_s = float(plan["base_s"]), float(plan["base_s"] + plan["burst_s"])
    ok = rows.has_status("ok")
    return cohort, Timeline(burst_s, over_s, end_s, at, ttft, answered, finish, ok)


def _meeting(cohort: Cohort, slos: Sequence[Slo]) -> Bools | None:
    """Return which requests meet every SLO; None without SLOs, or where one is not known."""
    observed = observe_slos(cohort, slos)
    if not slos or any(o.reason and not o.n for _, o in observed):
        return None
    return requests_meeting(cohort, observed)


def _other_work(t: Timeline, cohort: Cohort) -> str | None:
    """Return why the burst was other work: its answers miss their plan as the base's do not."""
    spans = (t.at < t.burst_s, (t.at >= t.burst_s) & (t.at < t.over_s))
    base, burst = (deviations(cohort.part(span).requests)[1].mean for span in spans)
    if base is None or burst is None or abs(burst - base) <= LENGTHS_OFF_SHARE:
        return None
    return (
        f"answers to the burst had {1 + burst:.0%} of the planned tokens, those to the base "
        f"{1 + base:.0%}: it was not the work that was planned"
    )


def _losses(t: Timeline, cohort: Cohort, met: Bools | None, phases: Phases) -> dict[str, Any]:
    """Return the requests due from the burst on that missed an SLO, failed, or were cut off."""
    rows, after, base_share = cohort.requests, t.at >= t.burst_s, phases[0].slo_attainment
    miss_share = 0.0 if base_share is None else 1 - base_share
    missed = None if met is None else sum(phase.slo_misses or 0 for phase in phases[1:])
    return {
        "slo_misses": missed,
        "slo_misses_of_base": miss_share * int(np.count_nonzero(after & ~rows.left_out)),
        "lost": int(np.count_nonzero(after & rows.failed)),
        "unfinished": int(np.count_nonzero(after & rows.has_status("unfinished"))),
    }


def _harm(t: Timeline, cohort: Cohort, slos: Sequence[Slo], over_s: float) -> HarmByPhase:
    """Return the harm done in the base phase, in the burst, and after the recovery."""
    base = cohort.part(t.at < t.burst_s)
    # as long as the burst, or half of the base: a long recovery phase must not dilute an outage
    soon = (t.at >= over_s) & (t.at < over_s + max(t.over_s - t.burst_s, t.burst_s / 2))
    return HarmByPhase(
        base=find_harm(base, cohort.part(t.at < 0), slos),
        burst=find_harm(cohort.part((t.at >= t.burst_s) & (t.at < t.over_s)), base, slos),
        after=find_harm(cohort.part(soon), base, slos)
        or find_harm(cohort.part(t.at >= over_s), base, slos),
    )


def _series(t: Timeline, edges: Floats, server: pa.Table | None, meta: StageMeta) -> BurstSeries:
    """Return the curves over time, one value per bin."""
    in_flight = [time_average_in_flight(a, b, t.at, t.finish) for a, b in pairwise(edges)]
    queue = _gauges(edges, server, meta)
    return BurstSeries(
        start_s=edges[:-1].tolist(),
        end_s=edges[1:].tolist(),
        ttft_s=_finite(_by_bin(edges, t.at, t.ttft, np.median)),
        in_flight=_finite(in_flight),
        server_queue=None if queue is None else _finite(queue),
        offered_rps=_finite(np.histogram(t.at, edges)[0] / np.diff(edges)),
    )


def _finite(values: Floats | list[float]) -> list[float | None]:
    return [float(value) if math.isfinite(value) else None for value in values]


def _known_until_s(
    planned_s: float, meta: StageMeta, at: Floats, ids: Ints, last_s: float
) -> float:
    """Return when the records end: at the plan's end, or when the run was stopped.

    To the millisecond. Of a killed run just after the last request before which none lacks its
    record: they are numbered as they are due.
    """
    if meta.drained_ns:
        stopped_s = (meta.end_ns - meta.start_ns) * _NS
        stopped_s = round(min(stopped_s, last_s), 3)
        return min(planned_s, stopped_s) if meta.ended_early else planned_s
    gaps = np.flatnonzero(np.diff(ids) != 1)
    last_s = float(at[gaps[0] if len(gaps) else -1]) if len(at) else 0.0
    return min(planned_s, (math.floor(1e3 * last_s) + 1) / 1e3)


def _phases(t: Timeline, cohort: Cohort, met: Bools | None) -> Phases:
    cuts = [min(cut_s, t.end_s) for cut_s in (0.0, t.burst_s, t.over_s, t.end_s)]
    spans = zip(("base", "burst", "recovery"), pairwise(cuts), strict=True)
    return [_phase(name, start_s, end_s, t, cohort, met) for name, (start_s, end_s) in spans]


def _phase(
    name: str, start_s: float, end_s: float, t: Timeline, cohort: Cohort, met: Bools | None
) -> Phase:
    inside = (t.at >= start_s) & (t.at < end_s)
    part = cohort.part(inside)
    rows, length = part.requests, end_s - start_s or math.inf  # a phase that never came: rate 0
    held = None if met is None else met[inside & ~cohort.requests.left_out]
    errors = rows.status_counts()
    ok = errors.pop("ok")
    done = (t.finish >= start_s) & (t.finish < end_s) & t.ok
    return Phase(
        name=name,
        start_s=start_s,
        end_s=end_s,
        requests=len(rows),
        ok=ok,
        errors={status: n for status, n in errors.items() if n},
        offered_rps=len(rows) / length,
        achieved_rps=int(np.count_nonzero(done)) / length,
        concurrency=time_average_in_flight(start_s, end_s, t.at, t.finish),
        ttft_s=_quantiles(part.ttft(from_schedule=True)),
        e2e_s=_quantiles(part.e2e(from_schedule=True)),
        slo_misses=None if held is None else int(np.count_nonzero(~held)),
        slo_attainment=None if held is None or not len(held) else float(np.mean(held)),
    )


def _quantiles(o: Observations) -> PhaseLatency:
    """Return p50, p95 and the maximum, null where failed or unfinished requests reach into them.

    No interval: no steady state.
    """

    def known(q: float) -> float | None:
        if q < 1 and o.n < smallest_n(q):
            return None
        low, high = o.quantile_bounds(q)
        return low if low == high < math.inf else None

    return PhaseLatency(n=o.n, p50=known(0.5), p95=known(0.95), max=known(1.0))


def _edges(t: Timeline, base_rps: float) -> Floats:
    """Return the edges of equal bins of about ten base requests, aligned to the base phase.

    They end with the load: once nothing more is sent, an empty queue says nothing.
    """
    width = min(max(REQUESTS_PER_BIN / base_rps, 0.25), t.burst_s / BINS_MIN)
    width = t.burst_s / math.ceil(t.burst_s / width)
    return np.arange(max(1, int((t.end_s + 1e-9) / width)) + 1, dtype=np.float64) * width


def _by_bin(edges: Floats, at: Floats, values: Floats, of: Callable[[Floats], Any]) -> Floats:
    """Return the median or mean of each bin, NaN where it is empty."""
    at, values = at[~np.isnan(values)], values[~np.isnan(values)]
    cuts = np.searchsorted(at, edges)
    return np.array([float(of(values[a:b])) if b > a else np.nan for a, b in pairwise(cuts)])


def _gauges(edges: Floats, server: pa.Table | None, meta: StageMeta) -> Floats | None:
    """Return the mean of running + waiting, as the server says, in each bin.

    None without such samples.
    """
    if server is None or "running" not in server.column_names:
        return None
    level = server["running"].to_numpy(zero_copy_only=False)
    if "waiting" in server.column_names:
        level = level + server["waiting"].fill_null(0.0).to_numpy()
    at = (server["at_ns"].to_numpy() - meta.start_ns) * _NS
    return None if np.isnan(level).all() else _by_bin(edges, at, level, np.mean)


def _peaks(t: Timeline, back_s: float) -> dict[str, Any]:
    """Return the slowest first token and the most requests in flight until the recovery.

    ``later_ttft_s``: a slower one that was due after that, which is not the burst's doing.
    """

    def slowest(which: Bools) -> int | None:
        known = np.flatnonzero(np.isfinite(t.ttft) & which)
        return int(known[np.argmax(t.ttft[known])]) if len(known) else None

    peak, later = slowest((t.at >= t.burst_s) & (t.at < back_s)), slowest(t.at >= back_s)
    if later is not None and peak is not None and t.ttft[later] <= t.ttft[peak]:
        later = None
    moments = np.concatenate([t.at, t.finish])
    order = np.argsort(moments, kind="stable")
    moments = moments[order]
    level = np.cumsum(np.repeat([1.0, -1.0], len(t.at))[order])
    level = np.where((moments >= t.burst_s) & (moments < back_s), level, 0)
    top = int(level.argmax()) if len(level) else None
    return {
        "peak_ttft_s": None if peak is None else float(t.ttft[peak]),
        "peak_ttft_at_s": None if peak is None else float(t.at[peak]),
        "later_ttft_s": None if later is None else float(t.ttft[later]),
        "later_ttft_at_s": None if later is None else float(t.at[later]),
        "peak_in_flight": 0 if top is None else int(level[top]),
        "peak_in_flight_at_s": None if top is None else float(moments[top]),
    }
