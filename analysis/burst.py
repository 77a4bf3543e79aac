"""What a burst did: per phase, how high TTFT and the queue rose, and when both were back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from scipy.special import stdtrit

from analysis.attainment import observe_slos, requests_meeting
from analysis.burst_advice import breaker, find_harm, headroom
from analysis.cohort import Cohort
from analysis.intervals import smallest_n
from analysis.metrics import Bools, Floats, Ints, read_chunks, ttft_s
from analysis.observations import Observations
from analysis.slo import Slo
from analysis.stages import RunRecords
from analysis.steady import time_average_in_flight

SETTLE_SHARE = 0.2  # of the base phase: an endpoint that starts idle fills up first
REQUESTS_PER_BIN = 10.0
BINS_MIN = 12  # in the base phase, to know how wide its band is
BASE_BINS_MIN = 5
BAND_MARGIN = 1.1  # over the base's mean: what differs by less is back, however little the base varies
RUN = 3  # neighbouring bins within the band: fewer may be a lull in a queue
FALSE_ALARM = 0.05  # chance that base load alone is above the band anywhere after the burst
PARTS = 8  # of the time in which the backlog falls: how much its fall varies
SERVED_ALL = 0.95  # of the burst's rate: what is served as fast as it comes is delayed, and no queue
UNSEEN = "what is known of the run ends before the burst does"
_NS = 1e-9


def summarise_burst(
    plan: Mapping[str, Any], meta: Mapping[str, Any], records: RunRecords, slos: Sequence[Slo], server: pa.Table | None
) -> dict[str, Any]:  # fmt: skip
    """The ``burst`` object of docs/summary.md from run.json's ``burst`` and its one stage. Times in s after its start."""
    rows = records.requests.take((records.requests.stage == meta["index"]) & (records.requests.attempt == 0))
    start_ns = float(meta["start_ns"] - records.origin_ns)
    last_ns = float(np.nanmax(np.concatenate([rows.ended_ns, [start_ns]])))
    at, last_s = (rows.scheduled_ns - start_ns) * _NS, (last_ns - start_ns) * _NS
    planned_s = float(plan["base_s"] + plan["burst_s"] + plan["recovery_s"])
    end_s = _known_until_s(planned_s, meta, at, records.table["request_id"].to_numpy()[rows.row], last_s)
    rows, at = rows.take(at <= end_s), at[at <= end_s]
    cohort = Cohort(rows, read_chunks(records.table, rows), 0, last_ns)
    observed = observe_slos(cohort, slos)
    known = bool(slos) and not any(o.reason and not o.n for _, o in observed)
    met = requests_meeting(cohort, observed) if known else None
    ttft = ttft_s(rows, from_schedule=True)
    ttft = np.where(rows.failed | rows.has_status("unfinished") & np.isnan(ttft), np.inf, ttft)
    finish = np.where(np.isnan(rows.ended_ns), max(end_s, last_s), (rows.ended_ns - start_ns) * _NS)
    left = np.where(rows.has_status("unfinished"), np.inf, finish)
    answered = np.where(np.isnan(rows.first_token_ns), left, (rows.first_token_ns - start_ns) * _NS)
    times = [0.0, float(plan["base_s"]), float(plan["base_s"] + plan["burst_s"]), end_s]
    phases = [
        _phase(name, min(a, end_s), min(b, end_s), cohort, at, met, finish)
        for name, (a, b) in zip(("base", "burst", "recovery"), pairwise(times), strict=True)
    ]
    edges = _edges(times, float(plan["base_rps"]))
    series: dict[str, Floats | None] = {
        "ttft_s": _by_bin(edges, at, ttft, np.median),
        "in_flight": np.array([time_average_in_flight(a, b, at, finish) for a, b in pairwise(edges)]),
        "server_queue": _gauges(edges, server, meta),
    }
    bands = {name: _band(edges, values, times, counts=name != "ttft_s") for name, values in series.items()}
    result: dict[str, Any] = {
        **{k: plan.get(k) for k in ("base_rps", "factor", "shape")}, "phases": phases, "resolution_s": float(edges[1] - edges[0]),
        "band": {name: band for name, band in bands.items() if band is not None},
        "known_until_s": end_s if end_s < planned_s else None,
    }  # fmt: skip
    back_s: dict[str, float] = {}
    for name, values in series.items():
        found = _recovery(edges, values, bands[name], times[2])
        result |= {f"{name}_{key}": value for key, value in found.items()}
        back_s[name] = math.inf if found["recovery_s"] is None else times[2] + found["recovery_s"]
    result |= _peaks(at, ttft, finish, times[1], back_s["ttft_s"], back_s["in_flight"])
    after, base = at >= times[1], cohort.part(at < times[1])
    result["slo_misses"] = None if met is None else phases[1]["slo_misses"] + phases[2]["slo_misses"]
    of_base = 1 - phases[0]["slo_attainment"] if phases[0]["slo_attainment"] is not None else 0.0
    result["slo_misses_of_base"] = of_base * int(np.count_nonzero(after & ~rows.has_status("cancelled")))
    result["lost"] = int(np.count_nonzero(after & rows.failed))
    result["unfinished"] = int(np.count_nonzero(after & rows.has_status("unfinished")))
    over_s = max((back_s[n] for n in ("ttft_s", "in_flight") if n in result["band"]), default=math.inf)
    result["harm"] = {
        "base": find_harm(base, cohort.part(at < 0), slos),
        "burst": find_harm(cohort.part(after & (at < times[2])), base, slos),
        "after": find_harm(cohort.part(at >= over_s), base, slos),
    }
    result["backlog"] = _backlog(
        times, at, answered, finish, rows.has_status("ok"), phases, float(plan["base_rps"])
    )
    over = over_s < math.inf and not result["harm"]["after"]
    result["headroom"] = headroom(plan, slos, phases, result["backlog"], result["harm"], over=over)
    result["breaker"] = breaker(slos, phases, result["backlog"], result["harm"]["burst"])
    offered_rps = np.histogram(at, edges)[0] / np.diff(edges)
    result["series"] = {"start_s": edges[:-1], "end_s": edges[1:], **series, "offered_rps": offered_rps}
    result["series"] = {name: values for name, values in result["series"].items() if values is not None}
    return result


def _known_until_s(planned_s: float, meta: Mapping[str, Any], at: Floats, ids: Ints, last_s: float) -> float:
    """When what is known ends: the plan's end, or when the run was stopped.

    Of a killed run just after the last request before which none lacks its record: they are numbered as they are due.
    """
    if meta.get("drained_ns"):
        stopped_s = (meta["end_ns"] - meta["start_ns"]) * _NS
        return min(planned_s, stopped_s, last_s) if meta.get("ended_early") else planned_s
    gaps = np.flatnonzero(np.diff(ids) != 1)
    last = at[gaps[0] if len(gaps) else -1] if len(at) else 0.0
    return min(planned_s, float(last) + _NS)


def _phase(
    name: str, start_s: float, end_s: float, cohort: Cohort, at: Floats, met: Bools | None, finish: Floats
) -> dict[str, Any]:  # fmt: skip
    inside = (at >= start_s) & (at < end_s)
    part = cohort.part(inside)
    rows, length = part.requests, end_s - start_s or math.inf  # a phase that never came: rate 0
    held = None if met is None else met[inside & ~cohort.requests.has_status("cancelled")]
    errors = rows.status_counts()
    ok = errors.pop("ok")
    done = (finish >= start_s) & (finish < end_s) & cohort.requests.has_status("ok")
    return {
        "name": name, "start_s": start_s, "end_s": end_s, "requests": len(rows), "ok": ok,
        "errors": {status: n for status, n in errors.items() if n},
        "offered_rps": len(rows) / length, "achieved_rps": int(np.count_nonzero(done)) / length,
        "concurrency": time_average_in_flight(start_s, end_s, at, finish),
        "ttft_s": _quantiles(part.ttft(from_schedule=True)), "e2e_s": _quantiles(part.e2e(from_schedule=True)),
        "slo_misses": None if held is None else int(np.count_nonzero(~held)),
        "slo_attainment": None if held is None or not len(held) else float(np.mean(held)),
    }  # fmt: skip


def _quantiles(o: Observations) -> dict[str, Any]:
    """p50, p95 and the largest, each null where failed or unfinished requests reach into it, or a stage's had too few requests.

    No interval: no steady state.
    """
    levels = {
        name: q for name, q in (("p50", 0.5), ("p95", 0.95), ("max", 1.0)) if q == 1 or o.n >= smallest_n(q)
    }
    bounds = {name: o.quantile_bounds(q) for name, q in levels.items()}
    known = {k: low if low == high < math.inf else None for k, (low, high) in bounds.items()}
    return {"n": o.n, "p50": None, "p95": None} | known


def _edges(times: list[float], base_rps: float) -> Floats:
    """Bins of one width, which ends the base phase with a bin: ten requests of the base, if it is long enough.

    They end with the load: once nothing more is sent, an empty queue says nothing.
    """
    width = min(max(REQUESTS_PER_BIN / base_rps, 0.25), times[1] / BINS_MIN)
    width = times[1] / math.ceil(times[1] / width)
    return np.arange(max(1, int((times[3] + 1e-9) / width)) + 1, dtype=np.float64) * width


def _by_bin(edges: Floats, at: Floats, values: Floats, of: Callable[[Floats], Any]) -> Floats:
    """Median or mean of each bin, NaN where it is empty."""
    at, values = at[~np.isnan(values)], values[~np.isnan(values)]
    cuts = np.searchsorted(at, edges)
    return np.array([float(of(values[a:b])) if b > a else np.nan for a, b in pairwise(cuts)])


def _gauges(edges: Floats, server: pa.Table | None, meta: Mapping[str, Any]) -> Floats | None:
    """Mean of running + waiting, as the server says, in each bin; None without such samples."""
    if server is None or "running" not in server.column_names:
        return None
    waiting = server["waiting"].fill_null(0.0).to_numpy() if "waiting" in server.column_names else 0.0
    level = server["running"].to_numpy(zero_copy_only=False) + waiting
    at = (server["at_ns"].to_numpy() - int(meta["start_ns"])) * _NS
    return None if np.isnan(level).all() else _by_bin(edges, at, level, np.mean)


def _smooth(values: Floats) -> Floats:
    """Median of each bin and its neighbours, the lower of two; empty bins say nothing."""
    padded = np.concatenate([[np.nan], values, [np.nan]])
    three = np.sort(np.stack([padded[:-2], padded[1:-1], padded[2:]]), axis=0)  # NaN last
    known = np.count_nonzero(~np.isnan(three), axis=0)
    return np.where(known == 0, np.nan, three[np.maximum(known - 1, 0) // 2, np.arange(len(values))])


def _band(edges: Floats, values: Floats | None, times: list[float], *, counts: bool) -> float | None:
    """Upper prediction bound for the highest of the m bins after the burst, from the n bins of the settled base phase.

    Mean + t(n - 1, 1 - FALSE_ALARM / m) s sqrt(1 + 1/n): of logarithms, but of ``counts`` themselves, which vary
    at least as Poisson's do (s >= sqrt(mean)): neighbouring bins of a short base share requests and look alike.
    """
    if values is None:
        return None
    held = values[(edges[:-1] >= SETTLE_SHARE * times[1]) & (edges[1:] <= times[1] + 1e-9)]
    held = held[np.isfinite(held)]
    if len(held) < BASE_BINS_MIN or (counts and not held.any()):
        return None
    level = held if counts else np.log(np.maximum(held, _NS))
    mean, spread = float(level.mean()), float(level.std(ddof=1))
    tested = max(1, int(np.count_nonzero(edges[:-1] >= times[2] - 1e-9)))
    t = float(stdtrit(len(held) - 1, 1 - FALSE_ALARM / tested)) * math.sqrt(1 + 1 / len(held))
    if counts:
        return max(BAND_MARGIN * mean, mean + t * max(spread, math.sqrt(mean)))
    return math.exp(mean + max(math.log(BAND_MARGIN), t * spread))


def _recovery(edges: Floats, values: Floats | None, band: float | None, over_s: float) -> dict[str, Any]:
    """Seconds from the end of the burst until the smoothed series is back in the band for ``RUN`` bins, and why not.

    0 where it is in the band when the burst ends. What is above it later is no part of that: seconds in all.
    """
    none: dict[str, Any] = {"recovery_s": None, "above_again_s": None}
    if values is None:
        return none | {"recovery_reason": "the server shows no gauges of its queue"}
    if band is None:
        return none | {
            "recovery_reason": "the base phase is too short, or holds too few requests, to know what to come back to"
        }
    if edges[-1] < over_s:
        return none | {"recovery_reason": UNSEEN}
    level = _smooth(values)
    for i in range(int(np.searchsorted(edges, over_s + 1e-9)) - 1, len(level) - RUN + 1):
        if (level[i : i + RUN] <= band).all():  # an empty bin says nothing
            again_s = float(np.diff(edges)[i:][level[i:] > band].sum())
            back_s = max(0.0, float(edges[i]) - over_s)
            return {"recovery_s": back_s, "recovery_reason": None, "above_again_s": again_s}
    still = "still above" if level[-1] > band else f"not seen for {RUN * float(edges[1]):.3g} s on end at"
    return none | {"recovery_reason": f"{still} the base load's level when the load ended"}


def _peaks(
    at: Floats, ttft: Floats, finish: Floats, burst_s: float, ttft_back_s: float, in_flight_back_s: float
) -> dict[str, Any]:  # fmt: skip
    """The slowest first token of what was answered, and the most requests in flight, from the burst until each is back.

    ``later_ttft_s``: a slower one that was due after that, which is not the burst's doing.
    """

    def slowest(which: Bools) -> int | None:
        known = np.flatnonzero(np.isfinite(ttft) & which)
        return int(known[np.argmax(ttft[known])]) if len(known) else None

    peak, later = slowest((at >= burst_s) & (at < ttft_back_s)), slowest(at >= ttft_back_s)
    if later is not None and peak is not None and ttft[later] <= ttft[peak]:
        later = None
    moments = np.concatenate([at, finish])
    order = np.argsort(moments, kind="stable")
    level = np.cumsum(np.repeat([1.0, -1.0], len(at))[order])
    level = np.where((moments[order] >= burst_s) & (moments[order] < in_flight_back_s), level, 0)
    return {
        "peak_ttft_s": None if peak is None else float(ttft[peak]),
        "peak_ttft_at_s": None if peak is None else float(at[peak]),
        "later_ttft_s": None if later is None else float(ttft[later]),
        "later_ttft_at_s": None if later is None else float(at[later]),
        "peak_in_flight": int(level.max()) if len(level) else 0,
        "peak_in_flight_at_s": float(moments[order][int(level.argmax())]) if len(level) else None,
    }


def _backlog(
    times: list[float], at: Floats, answered: Floats, finish: Floats, ok: Bools, phases: list[dict[str, Any]],
    base_rps: float,
) -> dict[str, Any]:  # fmt: skip
    """The queue when the burst ended, requests without a first token yet, how it fell, and the rate at which it was served.

    A queue is more than the burst's rate explains at the base's wait (Little: rate x wait) all through the second half
    of the burst, and beyond chance at its end. Without one the server was not full: what it can serve is not known.
    It has drained once no more wait than in the base's mean.
    """
    _, burst_s, over_s, end_s = times
    middle, left = (burst_s + over_s) / 2, np.sort(answered)
    waiting = _waiting(at, left, np.linspace(middle, over_s, 21))
    base = time_average_in_flight(SETTLE_SHARE * burst_s, burst_s, at, answered)
    result: dict[str, Any] = {
        "at_end_of_burst": max(0.0, float(waiting[-1]) - base), "base_waiting": base or None, "served_rps": None, "drained": None,
        "reason": None, **dict.fromkeys(("unanswered", "drained_s", "at_end", "fall_rps", "drains", "further_s", "further_s_ci")),
    }  # fmt: skip
    if end_s <= over_s:
        return result | {"at_end_of_burst": None, "reason": UNSEEN}
    leaves = left[(left > over_s) & (left < end_s)]
    emptied = leaves[_waiting(at, left, leaves) <= base]
    result["drained"] = bool(waiting[-1] <= base or len(emptied))
    explained = base * max(1.0, phases[1]["offered_rps"] / (phases[0]["offered_rps"] or math.inf))
    if waiting[-1] <= explained + 3 * math.sqrt(max(1.0, explained)) or waiting.min() <= explained:
        return result | {"reason": "no queue lasted through the second half of the burst"}
    until = float(emptied[0]) if len(emptied) else end_s  # while there is a queue
    ended = (finish >= middle) & (finish < until)
    served = int(np.count_nonzero(ended & ok)) / (until - middle)
    if served >= SERVED_ALL * phases[1]["offered_rps"]:
        return result | {"reason": "requests waited, but were served as fast as they came: a delay, no queue"}
    lasted_s, rest = until - over_s, max(0.0, float(_waiting(at, left, np.array([until]))[0]) - base)
    fall_rps = (result["at_end_of_burst"] - rest) / lasted_s
    unanswered = int(np.count_nonzero(ended & ~ok))
    result |= {"served_rps": served, "unanswered": unanswered, "at_end": rest, "fall_rps": fall_rps}
    if len(emptied):
        return result | {"drained_s": lasted_s}
    parts = np.linspace(over_s, until, PARTS + 1)
    level = _waiting(at, left, parts)
    top = int(level.argmax())  # a server that was stuck for a while: what it did since counts
    top = top if top <= PARTS // 2 else 0
    leave = np.histogram(left, parts[top:])[0] / (parts[1] - over_s)
    return result | _further(leave, phases[2], base_rps, rest, fell=bool(level[-1] < level[top]))


def _waiting(at: Floats, left: Floats, moments: Floats) -> Ints:
    return np.searchsorted(at, moments, "right") - np.searchsorted(left, moments, "right")


def _further(
    leave: Floats, after: Mapping[str, Any], base_rps: float, rest: float, *, fell: bool
) -> dict[str, Any]:
    """Whether a backlog drains at the base load, and when, from the rates at which it was left in the last parts of
    ``PARTS`` of the recovery, and whether it fell in them.

    Fluid: rest / (leave - base). 95 %: Student's t over the parts, and chance in what is yet to come and to leave
    (Poisson arrivals), as rates over that time. The base is as planned, or what came where chance does not explain the
    difference. ``drains`` is null where chance decides, or what was seen says the contrary.
    """
    length_s, n = after["end_s"] - after["start_s"], len(leave)
    if abs(after["requests"] - base_rps * length_s) > 3 * math.sqrt(base_rps * length_s):
        base_rps = after["offered_rps"]
    rate, variance = float(leave.mean()) - base_rps, float(leave.var(ddof=1))
    half = float(stdtrit(n - 1, 0.975)) * math.sqrt(variance / n)
    if rate <= half or not fell:
        return {"drains": False if rate <= -half and not fell else None}
    further_s = rest / rate
    half = math.hypot(half, 1.96 * math.sqrt((base_rps + variance * length_s / PARTS) / further_s))
    latest_s = rest / (rate - half) if rate > half else None
    return {"drains": True, "further_s": further_s, "further_s_ci": [rest / (rate + half), latest_s]}
