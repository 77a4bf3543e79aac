"""One stage: from its records to the stage object of docs/summary.md."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from ampacity.analysis.contract import stage as contract
from ampacity.analysis.contract.part import plain
from ampacity.analysis.diagnosed import spoilt_by
from ampacity.analysis.metrics.chunks import Chunks, read_chunks
from ampacity.analysis.metrics.cohort import Cohort
from ampacity.analysis.metrics.observations import quantile_rank
from ampacity.analysis.metrics.percentiles import WITH_INTERVAL, curve, percentiles
from ampacity.analysis.metrics.requests import Bools, Floats, Requests, e2e_s, read_requests, ttft_s
from ampacity.analysis.slo import Slo
from ampacity.analysis.stage import outage
from ampacity.analysis.stage.client import Moved, what_moved, without_client
from ampacity.analysis.stage.drift import tail_trend, two_modes
from ampacity.analysis.stage.goodput import accepted_goodput, window_cost_usd
from ampacity.analysis.stage.littles_law import consistency
from ampacity.analysis.stage.steady import (
    Stability,
    Window,
    find_window,
    in_flight_at,
    judge_stability,
    time_average_in_flight,
)
from ampacity.analysis.stage.throughput import input_rate, output_rates, span_s, tokens_per_batch
from ampacity.analysis.stage.verdicts import Judge, Judged
from ampacity.analysis.stats.intervals import memory_of
from ampacity.loadgen.rundir.lateness import FROM_SCHEDULE, lateness_limit_s, left_late
from ampacity.loadgen.rundir.meta import ClientAudit, StageMeta

_NS = 1e-9


@dataclass(frozen=True)
class RunRecords:
    """The records of a run, or of some of its stages, as vectors; read once for every stage."""

    table: pa.Table
    requests: Requests  # all rows, all attempts
    origin_ns: int
    spoilt: Mapping[str, str] = field(default_factory=dict)  # by the endpoint's diagnosis
    before: pa.Table | None = None  # requests of other windows of a soak: only counted in flight

    def in_flight(self) -> tuple[Floats, Floats]:
        """Return when each request began and ended, in s; NaN where that is not known."""
        begin, finish = self.requests.started_ns, self.requests.ended_ns
        if self.before is not None:
            columns = (self.before[name].to_numpy() for name in ("started_ns", "ended_ns"))
            began, ended = (np.asarray(of, dtype=np.float64) - self.origin_ns for of in columns)
            begin, finish = np.concatenate([begin, began]), np.concatenate([finish, ended])
        return begin * _NS, finish * _NS


def read_records(
    table: pa.Table,
    origin_ns: int,
    meta: Mapping[str, Any] | None = None,
    before: pa.Table | None = None,
) -> RunRecords:
    """Return vectors of the records; times count from ``origin_ns``.

    ``meta`` is run.json, ``before`` as ``Run`` has it. Raises RecordsError.
    """
    requests = read_requests(table, origin_ns, meta)
    return RunRecords(table, requests, origin_ns, spoilt_by(meta or {}), before)


@dataclass(frozen=True)
class StageRecords:
    """Records of a run by which a stage is judged. Times in seconds after the run's zero."""

    rows: Requests  # of the stage, all attempts
    scheduled: Requests  # its first attempts
    window: Window
    cohort: Cohort
    whole: Cohort | None  # with the start-up that was cut, where the data showed one
    tokens: Floats  # output tokens per batch of the window
    stability: Stability
    before: Stability  # that up to the first outage
    start_s: float
    outages: list[outage.Outage]  # over ``scheduled``

    def in_cohort(self, which: Bools) -> Bools:
        """Return a mask over ``scheduled`` as one over the requests of the cohort."""
        return np.isin(self.cohort.requests.row, self.scheduled.row[which])

    @property
    def hit_by_outages(self) -> Bools | None:
        """Return which requests of the cohort an outage hit; None without one."""
        if not self.outages:
            return None
        return self.in_cohort(np.any([o.hit for o in self.outages], axis=0))


def stage_records(
    records: RunRecords,
    meta: StageMeta,
    warmup_requests: int | None = None,
    *,
    run_complete: bool = True,
) -> StageRecords:
    """Return the window of a stage, the requests in it, and whether it has a steady state.

    The arguments are those of ``analyse_stage``.
    """
    everything = records.requests
    cut_short = bool(meta.ended_early) or not (run_complete or meta.drained_ns)
    rows = everything.take(everything.stage == meta.index)
    scheduled = rows.take(rows.attempt == 0)
    missing = max(0, (meta.scheduled_requests or 0) - len(scheduled))
    start_s, end_s, now_s = _span(meta, rows, records.origin_ns, cut_short)
    chunks = read_chunks(records.table, rows)
    outages = outage.find_outages(scheduled, chunks.take(rows.attempt == 0), now_s)
    if outages and warmup_requests is None:
        warmup_requests = 0  # an outage is no start-up
    window = find_window(
        start_s,
        end_s,
        scheduled.scheduled_ns * _NS,
        scheduled.ended_ns * _NS,
        ttft_s(scheduled, from_schedule=True),
        warmup_requests,
        meta.ramp_s or 0.0,
    )
    is_open = meta.kind == "open"
    of_stage: dict[str, Any] = {"missing": missing, "now_ns": now_s / _NS, "spoilt": records.spoilt}
    cohort = _cohort(rows, chunks, window, is_open, **of_stage)
    whole = None
    if window.cut_s:
        uncut = replace(window, start_s=window.start_s - window.cut_s)
        whole = _cohort(rows, chunks, uncut, is_open, **of_stage)
        whole = replace(whole, memory=cohort.memory)
    tokens = tokens_per_batch(rows, chunks, window)
    stability = before = _stability(meta, scheduled, start_s, end_s, now_s)
    if outages:  # in which every queue grows
        before = _stability(meta, scheduled, start_s, outages[0].start_s, now_s)
    return StageRecords(
        rows, scheduled, window, cohort, whole, tokens, stability, before, start_s, outages
    )


def analyse_stage(
    table: pa.Table | RunRecords,
    meta: StageMeta,
    slos: Sequence[Slo],
    warmup_requests: int | None = None,
    *,
    run_complete: bool = True,
    labels: Mapping[int, bool] | None = None,
    fleet_inputs: Mapping[str, Any] | None = None,
) -> contract.Stage:
    """Return a stage, with every field that a lone stage can have; the rest is for the summary.

    ``table`` holds at least the rows of the stage, ``meta`` is the stage's entry in run.json. Where
    the stage ended early, or the run was killed before its end, the window ends with the last thing that
    happened.
    ``labels``: request_id -> accepted, for ``accepted``.
    """
    records = table if isinstance(table, RunRecords) else read_records(table, meta.start_ns)
    found = stage_records(records, meta, warmup_requests, run_complete=run_complete)
    cohort, window, rows = found.cohort, found.window, found.rows
    rates = output_rates(rows, found.tokens, window, found.start_s, meta.kind == "closed")
    result = _load(meta, cohort, window, found.start_s, rows, records.in_flight()) | asdict(rates)
    result |= _latencies(cohort) | _over_time(cohort, found.stability)
    result |= _client(meta, found.scheduled, slos)
    result["input_tokens_per_s"] = input_rate(rows, window)
    other = without_client(cohort, meta.audit, records.origin_ns)
    if other is not None:
        _leave_out_moved(result, what_moved(cohort, other, slos))
    worth_s = span_s(
        result["kind"], window, result["requests"], result["ok"], result["offered_rps"], rates
    )
    judge = Judge(slos, found.stability, result["client_limited"], worth_s, meta.alpha)
    judged = Judged(cohort, found.whole, found.hit_by_outages)
    verdicts, meets = judge.stage_findings(judged)
    if verdicts["goodput_rps"] and not result["achieved_rps"]:
        why = "no answer ended within the stage, which is too short for a rate"
        verdicts |= {"goodput_rps": None, "goodput_rps_reason": why}
    accepted = accepted_goodput(
        None if labels is None else _labels_of(records, cohort, labels),
        meets,
        cohort.requests.output_tokens,
        worth_s,
        window_cost_usd(fleet_inputs or {}, worth_s),
    )
    result |= verdicts | {"accepted": accepted, "outage": _outage(found, judge)}
    result |= {"name": "", "users_pause": False, "slo_met_by_all": None, "server": None}
    return msgspec.convert(plain(result), contract.Stage)


def _labels_of(
    records: RunRecords, cohort: Cohort, labels: Mapping[int, bool]
) -> list[bool | None]:
    ids = records.table["request_id"].to_numpy()[cohort.requests.row]
    return [labels.get(number) for number in ids.tolist()]


def _leave_out_moved(result: dict[str, Any], moved: Moved) -> None:
    """Remove from a stage the figures that the client's own lateness may have moved."""
    for name, why in moved.figures.items():
        for percentile, reason in why.items():
            changed: dict[str, Any] = {percentile: None, f"{percentile}_reason": reason}
            if percentile in WITH_INTERVAL:
                changed |= {f"{percentile}_ci": None, f"{percentile}_ci_reason": reason}
            result[name] = msgspec.structs.replace(result[name], **changed)
    result["client_limited_metrics"] = moved.metrics
    if moved.limited and not result["client_limited"]:
        result |= {"client_limited": True, "client_limited_reason": "; ".join(moved.limited)}


def _outage(found: StageRecords, judge: Judge) -> contract.Outage | None:
    """Return when the endpoint of a stage was down, and the verdicts on the other requests."""
    cohort, outages = found.cohort, found.outages
    if not outages:
        return None
    touched = found.in_cohort(np.any([o.touched for o in outages], axis=0))
    outside = cohort.part(~touched)
    if outside.memory is not None and outside.in_flight is not None and len(outside.requests):
        # the queue's own, not the outage's
        outside = replace(outside, memory=memory_of(outside.in_flight))
    periods = outage.periods_after(found.start_s, outages, found.scheduled)
    requests = len(found.scheduled) + cohort.missing
    return contract.Outage(
        text=outage.outage_text(periods, requests),
        requests=requests,
        failed=sum(p.failed for p in periods),
        periods=periods,
        outside=replace(judge, stability=found.before).outside(outside),
        series=outage.outage_series(found.scheduled, found.start_s),
    )


def _span(
    meta: StageMeta, rows: Requests, origin_ns: int, cut_short: bool
) -> tuple[float, float, float]:
    """Return the scheduled start and end of a stage, and its last known event, in seconds."""
    known = np.concatenate([rows.ended_ns, rows.last_token_ns, rows.dispatched_ns])
    known = known[~np.isnan(known)]
    scheduled = rows.scheduled_ns[~np.isnan(rows.scheduled_ns)]
    start = float(meta.start_ns - origin_ns)
    last = float(known.max()) if len(known) else start
    end = float(scheduled.max()) + 1 if len(scheduled) else start
    if meta.end_ns:
        end = float(meta.end_ns - origin_ns)
    if cut_short:
        end = min(end, last)
    now = max(last, float(meta.drained_ns - origin_ns)) if meta.drained_ns else last
    return start * _NS, max(start, end) * _NS, max(now, start) * _NS


def _cohort(
    rows: Requests, chunks: Chunks, window: Window, is_open: bool, **of_stage: Any
) -> Cohort:
    """Return the requests of the window."""
    s = rows.scheduled_ns * _NS
    which = (rows.attempt == 0) & (s >= window.start_s) & (s < window.end_s)
    requests = rows.take(which)
    in_flight = in_flight_at(requests.scheduled_ns, rows.scheduled_ns, rows.ended_ns)
    memory = memory_of(in_flight) if is_open and len(requests) else None
    rate_rps = len(requests) / window.length_s if window.length_s > 0 else 0.0
    return Cohort(
        requests,
        chunks.take(which),
        in_flight=in_flight,
        memory=memory,
        rate_rps=rate_rps,
        **of_stage,
    )


def _stability(
    meta: StageMeta, scheduled: Requests, start_s: float, end_s: float, now_s: float
) -> Stability:
    if meta.kind == "closed":
        return Stability(True, None)
    e2e = e2e_s(scheduled, from_schedule=True)
    unfinished = scheduled.has_status("unfinished")
    ended = np.where(np.isnan(scheduled.ended_ns), now_s / _NS, scheduled.ended_ns)
    age = np.maximum((ended - scheduled.scheduled_ns) * _NS, 0.0)
    e2e = np.where(unfinished, age, np.where(scheduled.has_status("ok"), e2e, np.nan))
    still = np.where(unfinished, np.nan, scheduled.ended_ns * _NS)
    due = scheduled.scheduled_ns * _NS < end_s
    return judge_stability(start_s, end_s, scheduled.scheduled_ns[due] * _NS, still[due], e2e[due])


def _load(
    meta: StageMeta,
    cohort: Cohort,
    window: Window,
    start_s: float,
    rows: Requests,
    in_flight: tuple[Floats, Floats],
) -> dict[str, Any]:
    counts = cohort.requests.status_counts()
    ok = counts.pop("ok")
    counts["unfinished"] += cohort.missing
    requests, length = len(cohort.requests) + cohort.missing, window.length_s
    begin, finish = in_flight
    finish = np.where(np.isnan(finish), cohort.now_ns * _NS, finish)
    concurrency = time_average_in_flight(window.start_s, window.end_s, begin, finish)
    within = begin[(begin >= window.start_s) & (begin < window.end_s)]
    there = (begin < window.end_s) & (finish >= window.start_s)
    is_open = meta.kind == "open"
    offered = meta.offered_rps if is_open else None
    if is_open and offered is None:  # a trace: what it asked for on average
        n = meta.scheduled_requests or len(rows)
        offered = n / (window.end_s - start_s) if window.end_s > start_s else None
    return {
        "index": meta.index,
        "kind": meta.kind,
        "lengths": meta.lengths,
        "offered_rps": offered,
        "concurrency_set": meta.concurrency,
        "arrived_rps": requests / length if length > 0 else 0.0,
        "carried_rps": ok / length if length > 0 else 0.0,
        "window": contract.Window(
            start_s=window.start_s - start_s,
            end_s=window.end_s - start_s,
            warmup_requests=window.warmup_requests,
            method=window.method,
            settled=window.settled,
            reason=window.reason,
        ),
        "requests": requests,
        "ok": ok,
        "errors": counts,
        "missing": cohort.missing,
        "concurrency": concurrency,
        "concurrency_se": cohort.in_flight_se,
        "concurrency_max": int(in_flight_at(within, begin[there], finish[there]).max(initial=0.0)),
        "littles_law": consistency(window.start_s, window.end_s, concurrency, begin, finish),
        "ended_early": meta.ended_early,
    }


def _latencies(cohort: Cohort) -> dict[str, Any]:
    found = cohort.observed
    charted = ("ttft_s", "ttft_from_schedule_s", "itl_s", "icl_s", "tpot_s", "e2e_s")
    curves = {name: curve(found[name]) for name in charted}
    return {name: percentiles(o) for name, o in found.items()} | {"curves": curves}


def _over_time(cohort: Cohort, stability: Stability) -> dict[str, Any]:
    return {
        "drift": tail_trend(cohort.ttft(from_schedule=True)),
        "modes": two_modes(cohort.e2e(from_schedule=False)),
        "stable": stability.stable,
        "stable_reason": stability.reason,
        "growth_rps": stability.growth_rps,
    }


def _client(meta: StageMeta, scheduled: Requests, slos: Sequence[Slo]) -> dict[str, Any]:
    """Return how well the client kept up over the whole stage, warm-up included.

    By its own audit, or from the records of a stage that has none: it was killed before.
    """
    audit = meta.audit or ClientAudit()
    slip = np.sort((scheduled.dispatched_ns - scheduled.scheduled_ns) * _NS)
    slip = slip[~np.isnan(slip)]
    p50, p99 = audit.slip_p50_s, audit.slip_p99_s
    if (p50 is None or p99 is None) and len(slip):
        p50, p99 = (float(slip[quantile_rank(q, len(slip)) - 1]) for q in (0.5, 0.99))
    reason = audit.client_limited_reason
    if meta.audit is None:
        most_s = lateness_limit_s(slo.limit_s for slo in slos if slo.metric in FROM_SCHEDULE)
        late = left_late(p99, most_s)
        reason = late and f"{late}; by its records, as it has no account of its own"
    return {
        "slip_s": contract.Slip(p50=p50, p99=p99),
        "resent": audit.resent or 0,
        "unsolicited": audit.unsolicited or 0,
        "client_limited": reason is not None or bool(audit.client_limited),
        "client_limited_reason": reason,
        "client_limited_metrics": {},
        "busiest": audit.busiest or [],
    }
