"""One stage: from its records to the stage object of docs/summary.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from analysis.attainment import judge_slo, observe_slos, requests_meeting
from analysis.cohort import Cohort
from analysis.drift import (
    RATE_BATCHES,
    events_per_batch,
    rate_interval,
    spread_per_batch,
    tail_trend,
    two_modes,
)
from analysis.fluidity import fluidity_of
from analysis.goodput import accepted_goodput, goodput_rps, window_cost_usd
from analysis.littles_law import consistency
from analysis.metrics import (
    Bools,
    Chunks,
    Floats,
    Requests,
    e2e_s,
    read_chunks,
    read_requests,
    ttft_s,
    visible_tokens,
)
from analysis.observations import Observations, quantile_rank
from analysis.percentiles import curve, percentiles
from analysis.slo import Slo
from analysis.steady import (
    Stability,
    Window,
    find_window,
    in_flight_at,
    judge_stability,
    time_average_in_flight,
)

_NS = 1e-9


@dataclass(frozen=True)
class RunRecords:
    """The records of a run, or of some of its stages, as vectors; read once, used for every stage."""

    table: pa.Table
    requests: Requests  # all rows, all attempts
    origin_ns: int


def read_records(table: pa.Table, origin_ns: int) -> RunRecords:
    """Vectors of the records; times count from ``origin_ns``. Raises RecordsError."""
    return RunRecords(table, read_requests(table, origin_ns), origin_ns)


def analyse_stage(
    table: pa.Table | RunRecords, meta: Mapping[str, Any], slos: Sequence[Slo], warmup_requests: int | None = None,
    *, run_complete: bool = True, labels: Mapping[int, bool] | None = None, fleet_inputs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The stage object of docs/summary.md; ``labels``: request_id -> accepted, for its ``accepted`` object.

    ``table`` holds at least the rows of the stage, ``meta`` is the stage's entry in run.json. Where the
    stage ended early, or the run was killed, the window ends with the last thing that happened.
    """
    records = table if isinstance(table, RunRecords) else read_records(table, int(meta.get("start_ns") or 0))
    table, everything, origin_ns = records.table, records.requests, records.origin_ns
    cut_short = bool(meta.get("ended_early")) or not run_complete
    rows = everything.take(everything.stage == meta["index"])
    scheduled = rows.take(rows.attempt == 0)
    missing = max(0, int(meta.get("scheduled_requests") or 0) - len(scheduled))
    start_s, end_s, now_s = _span(meta, rows, origin_ns, cut_short)
    window = find_window(
        start_s, end_s, scheduled.scheduled_ns * _NS, scheduled.ended_ns * _NS,
        ttft_s(scheduled, from_schedule=True), warmup_requests,
    )  # fmt: skip
    cohort, tokens_per_s = _cohort(table, rows, window, missing, now_s)
    stability = _stability(meta, scheduled, start_s, end_s, now_s)
    result = _load(meta, cohort, window, start_s, rows, everything)
    result |= {"output_tokens_per_s": tokens_per_s, "input_tokens_per_s": _input_rate(rows, window)}
    result |= _rate_intervals(rows, window)
    result |= _latencies(cohort)
    result |= {
        "drift": tail_trend(cohort.ttft(from_schedule=True)),
        "modes": two_modes(cohort.e2e(from_schedule=False)),
    }
    result |= {
        "stable": stability.stable,
        "stable_reason": stability.reason,
        "growth_rps": stability.growth_rps,
    }
    result |= _client(meta, cohort)
    observed = observe_slos(cohort, slos)
    result |= _slo_findings(cohort, observed, window, stability, result["client_limited"])
    known = bool(observed) and not any(o.reason for _, o in observed)
    meets = requests_meeting(cohort, observed) if known or not observed else None
    result["classes"] = _classes(cohort, meets if observed else None, window)
    result["fluidity"] = _fluidity(cohort, slos)
    result["accepted"] = accepted_goodput(
        table["request_id"].to_numpy()[cohort.requests.row], meets,
        cohort.requests.output_tokens, labels, window.length_s, window_cost_usd(fleet_inputs or {}, window.length_s),
    )  # fmt: skip
    return result


def _span(
    meta: Mapping[str, Any], rows: Requests, origin_ns: int, cut_short: bool
) -> tuple[float, float, float]:  # fmt: skip
    """Scheduled start and end of the stage, and the time of the last thing that we know of, in seconds."""
    known = np.concatenate([rows.ended_ns, rows.last_token_ns, rows.dispatched_ns])
    known = known[~np.isnan(known)]
    scheduled = rows.scheduled_ns[~np.isnan(rows.scheduled_ns)]
    start_ns, end_ns, drained_ns = (meta.get(k) for k in ("start_ns", "end_ns", "drained_ns"))
    start = (
        float(start_ns - origin_ns) if start_ns is not None else (scheduled.min() if len(scheduled) else 0.0)
    )
    last = float(known.max()) if len(known) else start
    end = float(end_ns - origin_ns) if end_ns else (scheduled.max() + 1 if len(scheduled) else start)
    if cut_short:
        end = min(end, last)
    now = max(last, float(drained_ns - origin_ns)) if drained_ns else last
    return start * _NS, max(start, end) * _NS, max(now, start) * _NS


def _cohort(
    table: pa.Table, rows: Requests, window: Window, missing: int, now_s: float
) -> tuple[Cohort, float]:  # fmt: skip
    """The cohort of the window, and output tokens per second by the time at which they came."""
    chunks = read_chunks(table, rows)
    rate = _output_rate(rows, chunks, window)
    s = rows.scheduled_ns * _NS
    which = np.flatnonzero((rows.attempt == 0) & (s >= window.start_s) & (s < window.end_s))
    requests = rows if len(which) == len(rows) else rows.take(which)
    if len(which) and len(which) == which[-1] - which[0] + 1:
        low, high = int(which[0]), int(which[-1]) + 1
        chunks = chunks.between(low, high)
    elif len(which) < len(rows):
        chunks = read_chunks(table, requests)
    in_flight = in_flight_at(requests.scheduled_ns, rows.scheduled_ns, rows.ended_ns)
    return Cohort(requests, chunks, missing, now_s / _NS, in_flight), rate


def _output_rate(rows: Requests, chunks: Chunks, window: Window) -> float:
    """Output tokens per second of the window; chunks of unknown size share the request's tokens evenly."""
    if window.length_s <= 0:
        return 0.0
    held, count = chunks.tokens_in(), chunks.count
    sent = np.where(np.isnan(rows.output_tokens), count, visible_tokens(rows))
    mean_chunk = np.divide(sent, count, out=np.zeros(len(rows)), where=count > 0)
    held = np.where(chunks.known, held, mean_chunk * count)
    silent = (count == 0) & rows.has_status("ok")
    held = np.where(silent, np.nan_to_num(rows.output_tokens), held)
    last_ns = np.where(silent, rows.ended_ns, rows.started_ns + chunks.last_us() * 1e3)
    begin_ns = np.where(silent, last_ns, rows.started_ns)
    whole = (begin_ns * _NS >= window.start_s) & (last_ns * _NS < window.end_s)
    crossing = (count > 0) & ~whole & (last_ns * _NS >= window.start_s) & (begin_ns * _NS < window.end_s)
    total = float(held[whole].sum())
    if crossing.any():
        at = np.repeat(crossing, count)
        owner = np.repeat(np.flatnonzero(crossing), count[crossing])
        at_s = (rows.started_ns[owner] + chunks.at_us[at] * 1e3) * _NS
        each = np.where(chunks.known, 1.0 if chunks.tokens is None else np.nan, mean_chunk)[owner]
        if chunks.tokens is not None:
            each = np.where(np.isnan(each), chunks.tokens[at], each)
        total += float(each[(at_s >= window.start_s) & (at_s < window.end_s)].sum())
    return total / window.length_s


def _input_rate(rows: Requests, window: Window) -> float:
    """Input tokens whose prefill ended (first token) in the window, per second."""
    if window.length_s <= 0:
        return 0.0
    done = np.where(np.isnan(rows.first_token_ns) & rows.has_status("ok"), rows.ended_ns, rows.first_token_ns)
    tokens = np.where(np.isnan(rows.input_tokens), rows.input_tokens_planned, rows.input_tokens)
    return float(np.nansum(tokens[_inside(done, window)]) / window.length_s)


def _rate_intervals(rows: Requests, window: Window) -> dict[str, Any]:
    """95 % intervals by batch means; a request's tokens are taken to come evenly from its first to its last."""
    start_s, end_s = window.start_s, window.end_s
    ended = rows.ended_ns[rows.has_status("ok")] * _NS
    first, last = rows.first_token_ns * _NS, rows.last_token_ns * _NS
    tokens = spread_per_batch(rows.output_tokens, first, last, start_s, end_s)
    batch_s = window.length_s / RATE_BATCHES
    return {
        "achieved_rps_ci": rate_interval(events_per_batch(ended, start_s, end_s), batch_s) if batch_s > 0 else None,
        "output_tokens_per_s_ci": rate_interval(tokens, batch_s),
    }  # fmt: skip


def _classes(cohort: Cohort, meets: Bools | None, window: Window) -> dict[str, dict[str, Any]]:
    """Figures of each class of a workload that has several; ``meets``: every SLO of all and of the class, (n,)."""
    names = sorted(set(cohort.requests.class_))
    found: dict[str, dict[str, Any]] = {}
    if len(names) < 2:
        return found
    for name in names:
        part, inside = cohort.of_class(name), cohort.in_class(name)
        judged = int(np.count_nonzero(inside)) - int(np.count_nonzero(part.requests.has_status("cancelled")))
        met = None if meets is None else int(np.count_nonzero(meets & inside))
        counts = part.requests.status_counts()
        found[name] = {
            "requests": len(part.requests), "ok": counts.pop("ok"), "errors": counts,
            "goodput_rps": None if met is None else goodput_rps(met, window.length_s),
            "slo_attainment": met / judged if met is not None and judged else None,
            "ttft_from_schedule_s": percentiles(part.ttft(from_schedule=True)), "tpot_s": percentiles(part.tpot),
            "icl_s": percentiles(part.icl), "e2e_from_schedule_s": percentiles(part.e2e(from_schedule=True)),
        }  # fmt: skip
    return found


def _fluidity(cohort: Cohort, slos: Sequence[Slo]) -> dict[str, Any]:
    """Fluidity indices for the deadlines of the first fluidity SLO."""
    slo = next((s for s in slos if s.metric == "fluidity"), None)
    part = cohort.of_class(slo.class_) if slo else cohort
    ok = part.requests.has_status("ok") & (part.chunks.count > 0)
    if slo is None or slo.first_s is None or not ok.any():
        return {"slo": None, "mean_index": None, "share_at_least_0.9": None}
    index = fluidity_of(part.requests.take(ok), part.chunks.take(ok), slo.first_s, slo.limit_s)
    return {
        "slo": slo.text, "mean_index": float(index.mean()), "share_at_least_0.9": float(np.mean(index >= 0.9)),
    }  # fmt: skip


def _inside(at_ns: Floats, window: Window) -> Any:
    return (at_ns * _NS >= window.start_s) & (at_ns * _NS < window.end_s)


def _stability(
    meta: Mapping[str, Any], scheduled: Requests, start_s: float, end_s: float, now_s: float
) -> Stability:
    if meta["kind"] == "closed":
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
    meta: Mapping[str, Any],
    cohort: Cohort,
    window: Window,
    start_s: float,
    rows: Requests,
    everything: Requests,
) -> dict[str, Any]:
    counts = cohort.requests.status_counts()
    ok = counts.pop("ok")
    counts["unfinished"] += cohort.missing
    requests, length = len(cohort.requests) + cohort.missing, window.length_s
    completed = int(np.count_nonzero(rows.has_status("ok") & _inside(rows.ended_ns, window)))
    begin, finish = everything.started_ns * _NS, everything.ended_ns * _NS
    finish = np.where(np.isnan(finish), cohort.now_ns * _NS, finish)
    concurrency = time_average_in_flight(window.start_s, window.end_s, begin, finish)
    within = begin[(begin >= window.start_s) & (begin < window.end_s)]
    is_open = meta["kind"] == "open"
    offered = meta.get("offered_rps") if is_open else None
    if is_open and offered is None:  # a trace: what it asked for on average
        n = int(meta.get("scheduled_requests") or 0) or len(rows)
        offered = n / (window.end_s - start_s) if window.end_s > start_s else None
    return {
        "index": meta["index"], "kind": meta["kind"], "offered_rps": offered,
        "concurrency_set": meta.get("concurrency"),
        "achieved_rps": completed / length if length > 0 else 0.0,
        "arrived_rps": requests / length if length > 0 else 0.0,
        "carried_rps": ok / length if length > 0 else 0.0,
        "window": {
            "start_s": window.start_s - start_s, "end_s": window.end_s - start_s,
            "warmup_requests": window.warmup_requests, "method": window.method, "settled": window.settled,
            "reason": window.reason,
        },
        "requests": requests, "ok": ok, "errors": counts, "missing": cohort.missing,
        "concurrency": concurrency,
        "concurrency_max": int(in_flight_at(within, begin, finish).max(initial=0.0)),
        "littles_law": consistency(window.start_s, window.end_s, concurrency, begin, finish),
        "ended_early": meta.get("ended_early"),
    }  # fmt: skip


def _latencies(cohort: Cohort) -> dict[str, Any]:
    found: dict[str, Observations] = {
        "ttft_s": cohort.ttft(from_schedule=False),
        "ttft_from_schedule_s": cohort.ttft(from_schedule=True),
        "first_answer_s": cohort.first_answer(from_schedule=False),
        "itl_s": cohort.itl,
        "icl_s": cohort.icl,
        "tpot_s": cohort.tpot,
        "e2e_s": cohort.e2e(from_schedule=False),
        "e2e_from_schedule_s": cohort.e2e(from_schedule=True),
    }
    result: dict[str, Any] = {name: percentiles(o) for name, o in found.items()}
    pictured = ("ttft_s", "ttft_from_schedule_s", "itl_s", "icl_s", "tpot_s", "e2e_s")
    result["curves"] = {name: curve(found[name]) for name in pictured}
    return result


def _client(meta: Mapping[str, Any], cohort: Cohort) -> dict[str, Any]:
    audit = meta.get("audit") or {}
    slip = np.sort((cohort.requests.dispatched_ns - cohort.requests.scheduled_ns) * _NS)
    slip = slip[~np.isnan(slip)]
    return {
        "slip_s": {
            "p50": float(slip[quantile_rank(0.5, len(slip)) - 1]) if len(slip) else audit.get("slip_p50_s"),
            "p99": float(slip[quantile_rank(0.99, len(slip)) - 1]) if len(slip) else audit.get("slip_p99_s"),
        },
        "client_limited": bool(audit.get("client_limited", False)),
        "client_limited_reason": audit.get("client_limited_reason"),
    }  # fmt: skip


def _slo_findings(
    cohort: Cohort, observed: Sequence[tuple[Slo, Observations]], window: Window, stability: Stability, client_limited: bool
) -> dict[str, Any]:  # fmt: skip
    result: dict[str, Any] = {
        "goodput_rps": None, "slo_attainment": None, "slo_met": None, "slo_met_reason": None, "slo_verdicts": [],
    }  # fmt: skip
    if not observed:
        return result | {"slo_met_reason": "no SLO given", "goodput_rps_reason": "no SLO given"}
    verdicts = [judge_slo(o, slo) for slo, o in observed]
    result["slo_verdicts"] = verdicts
    result["slo_met"], result["slo_met_reason"] = _overall(verdicts, stability, client_limited)
    unknown = next((o.reason for _, o in observed if o.reason), None)
    if unknown:
        return result | {"goodput_rps_reason": unknown}
    met = int(np.count_nonzero(requests_meeting(cohort, observed)))
    judged = (
        len(cohort.requests) + cohort.missing - int(np.count_nonzero(cohort.requests.has_status("cancelled")))
    )
    result["goodput_rps"] = goodput_rps(met, window.length_s)
    result["slo_attainment"] = met / judged if judged else None
    return result


def _overall(
    verdicts: list[dict[str, Any]], stability: Stability, client_limited: bool
) -> tuple[bool | None, str | None]:
    if client_limited:
        return None, "the client could not keep up: nothing of this stage is a finding"
    if stability.stable is False:
        return False, f"unstable: {stability.reason}"
    broken = [v["slo"] for v in verdicts if v["verdict"] == "broken"]
    if broken:
        return False, f"broken: {', '.join(broken)}"
    undecided = [v for v in verdicts if v["verdict"] == "undecided"]
    if undecided:
        return None, f"undecided: {undecided[0]['slo']}: {undecided[0]['reason']}"
    return True, None
