"""What a burst did: per phase, how high TTFT and the queue rose, and when both were back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from scipy.special import stdtrit

from analysis.attainment import observe_slos, requests_meeting
from analysis.cohort import Cohort
from analysis.fleet import queue_depth
from analysis.metrics import Bools, Floats, e2e_s, read_chunks, ttft_s
from analysis.observations import quantile_rank
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
_NS = 1e-9
NAMES = ("base", "burst", "recovery")


def summarise_burst(
    plan: Mapping[str, Any], meta: Mapping[str, Any], records: RunRecords, slos: Sequence[Slo], server: pa.Table | None
) -> dict[str, Any]:  # fmt: skip
    """The ``burst`` object of docs/summary.md from run.json's ``burst`` and its one stage. Times in s after its start."""
    rows = records.requests.take((records.requests.stage == meta["index"]) & (records.requests.attempt == 0))
    start_ns = float(meta["start_ns"] - records.origin_ns)
    at = (rows.scheduled_ns - start_ns) * _NS
    last_ns = float(np.nanmax(np.concatenate([rows.ended_ns, [start_ns]])))
    end_s = float(plan["base_s"] + plan["burst_s"] + plan["recovery_s"])
    until_s = max(end_s, (last_ns - start_ns) * _NS)
    cohort = Cohort(rows, read_chunks(records.table, rows), 0, last_ns)
    met = requests_meeting(cohort, observe_slos(cohort, slos)) if slos else None
    ttft = np.where(rows.failed, np.inf, ttft_s(rows, from_schedule=True))
    begin, finish = at, np.where(np.isnan(rows.ended_ns), until_s, (rows.ended_ns - start_ns) * _NS)
    answered = np.where(np.isnan(rows.first_token_ns), finish, (rows.first_token_ns - start_ns) * _NS)
    cut_ns = meta["end_ns"] - meta["start_ns"] if meta.get("ended_early") else last_ns - start_ns
    if meta.get("ended_early") or not meta.get("drained_ns"):  # stopped, or killed
        end_s = min(end_s, cut_ns * _NS)
    times = [0.0, float(plan["base_s"]), float(plan["base_s"] + plan["burst_s"]), end_s]
    phases = [
        _phase(name, min(a, end_s), min(b, end_s), cohort, at, ttft, met, begin, finish)
        for name, (a, b) in zip(NAMES, pairwise(times), strict=True)
    ]
    edges = _edges(times, float(plan["base_rps"]))
    in_flight = np.array([time_average_in_flight(a, b, begin, finish) for a, b in pairwise(edges)])
    series: dict[str, Floats | None] = {
        "ttft_s": _medians(
            edges, at, np.where(np.isnan(ttft) & rows.has_status("unfinished"), finish - at, ttft)
        ),
        "in_flight": in_flight,
        "server_queue": _gauges(edges, server, meta),
    }
    bands = {name: _band(edges, values, times, counts=name != "ttft_s") for name, values in series.items()}
    result: dict[str, Any] = {
        **{k: plan.get(k) for k in ("base_rps", "factor", "shape")}, "phases": phases, "resolution_s": float(edges[1] - edges[0]),
        "band": {name: band for name, band in bands.items() if band is not None},
    }  # fmt: skip
    for name, values in series.items():
        found = _recovery(edges, values, bands[name], times[2])
        result |= {f"{name}_{key}": value for key, value in found.items()}
    back_s = [
        times[2] + (math.inf if (s := result[f"{n}_recovery_s"]) is None else s)
        for n in ("ttft_s", "in_flight")
    ]
    result |= _peaks(at, ttft, begin, finish, times[1], *back_s)
    after = at >= times[1]
    result["slo_misses"] = None if met is None else int(np.count_nonzero(after & ~met))
    of_base = float(phases[0]["slo_misses"] or 0) / max(1, int(phases[0]["requests"]))
    result["slo_misses_of_base"] = of_base * int(np.count_nonzero(after))
    result["lost"] = int(np.count_nonzero(after & rows.failed))
    result["unfinished"] = int(np.count_nonzero(after & rows.has_status("unfinished")))
    result["backlog"] = _backlog(times, at, answered, finish, rows.has_status("ok"), phases)
    result["backlog"]["drained"] = None if bands["in_flight"] is None else math.isfinite(back_s[1])
    result["headroom"] = _headroom(plan, slos, phases, result["backlog"])
    result["breaker"] = _breaker(slos, phases, result["backlog"])
    result["series"] = {
        "start_s": edges[:-1],
        "end_s": edges[1:],
        **{k: v for k, v in series.items() if v is not None},
    }
    result["series"]["offered_rps"] = np.histogram(at, edges)[0] / np.diff(edges)
    return result


def _phase(
    name: str, start_s: float, end_s: float, cohort: Cohort, at: Floats, ttft: Floats, met: Bools | None,
    begin: Floats, finish: Floats,
) -> dict[str, Any]:  # fmt: skip
    inside = (at >= start_s) & (at < end_s)
    rows, length = (
        cohort.requests.take(inside),
        end_s - start_s or math.inf,
    )  # a phase that never came: rate 0
    errors = rows.status_counts()
    ok = errors.pop("ok")
    done = (finish >= start_s) & (finish < end_s) & cohort.requests.has_status("ok")
    return {
        "name": name, "start_s": start_s, "end_s": end_s, "requests": len(rows), "ok": ok,
        "errors": {status: n for status, n in errors.items() if n},
        "offered_rps": len(rows) / length, "achieved_rps": int(np.count_nonzero(done)) / length,
        "concurrency": time_average_in_flight(start_s, end_s, begin, finish),
        "ttft_s": _quantiles(ttft[inside]), "e2e_s": _quantiles(np.where(rows.failed, np.inf, e2e_s(rows, from_schedule=True))),
        "slo_misses": None if met is None else int(np.count_nonzero(~met[inside])),
        "slo_attainment": None if met is None or not len(rows) else float(np.mean(met[inside])),
    }  # fmt: skip


def _quantiles(values: Floats) -> dict[str, Any]:
    """p50, p95 and the largest, each null where failures reach into it; no interval: a phase has no steady state."""
    values = np.sort(values[~np.isnan(values)])
    n = len(values)
    at = {"p50": 0.5, "p95": 0.95, "max": 1.0}
    found = {name: float(values[quantile_rank(q, n) - 1]) if n else None for name, q in at.items()}
    return {name: v if v is not None and math.isfinite(v) else None for name, v in found.items()} | {"n": n}


def _edges(times: list[float], base_rps: float) -> Floats:
    """Bins of one width, which ends the base phase with a bin: ten requests of the base, if it is long enough.

    They end with the load: once nothing more is sent, an empty queue says nothing.
    """
    width = min(max(REQUESTS_PER_BIN / base_rps, 0.25), times[1] / BINS_MIN)
    width = times[1] / math.ceil(times[1] / width)
    return np.arange(int((times[3] + 1e-9) / width) + 1, dtype=np.float64) * width


def _medians(edges: Floats, at: Floats, values: Floats) -> Floats:
    """Median of each bin, NaN where it is empty."""
    known = ~np.isnan(values)
    at, values = at[known], values[known]
    cuts = np.searchsorted(at, edges)
    return np.array([np.median(values[a:b]) if b > a else np.nan for a, b in pairwise(cuts)])


def _gauges(edges: Floats, server: pa.Table | None, meta: Mapping[str, Any]) -> Floats | None:
    """Mean of running + waiting, as the server says, in each bin; None without such samples."""
    if server is None or "running" not in server.column_names:
        return None
    waiting = server["waiting"].fill_null(0.0).to_numpy() if "waiting" in server.column_names else 0.0
    level = server["running"].to_numpy(zero_copy_only=False) + waiting
    at = (server["at_ns"].to_numpy() - int(meta["start_ns"])) * _NS
    level, at = level[~np.isnan(level)], at[~np.isnan(level)]
    if not len(at):
        return None
    cuts = np.searchsorted(at, edges)
    return np.array([float(level[a:b].mean()) if b > a else np.nan for a, b in pairwise(cuts)])


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
    if len(held) < BASE_BINS_MIN:
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
    if values is None or band is None:
        lacking = "the base phase is too short to know what to come back to"
        reason = "the server shows no gauges of its queue" if values is None else lacking
        return {"recovery_s": None, "recovery_reason": reason, "above_again_s": None}
    above = _smooth(values) > band
    if edges[-1] < over_s:
        return {
            "recovery_s": None,
            "recovery_reason": "the run ended before the burst did",
            "above_again_s": None,
        }
    for i in range(int(np.searchsorted(edges, over_s + 1e-9)) - 1, len(above)):
        if not above[i : i + RUN].any():
            again_s = float(np.diff(edges)[i:][above[i:]].sum())
            back_s = max(0.0, float(edges[i]) - over_s)
            return {"recovery_s": back_s, "recovery_reason": None, "above_again_s": again_s}
    reason = f"still above the base band of {band:.3g} when the run ended"
    return {"recovery_s": None, "recovery_reason": reason, "above_again_s": None}


def _peaks(
    at: Floats, ttft: Floats, begin: Floats, finish: Floats, burst_s: float, ttft_back_s: float, in_flight_back_s: float
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
    moments = np.concatenate([begin, finish])
    order = np.argsort(moments, kind="stable")
    level = np.cumsum(np.concatenate([np.ones(len(begin)), -np.ones(len(finish))])[order])
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
    times: list[float], at: Floats, answered: Floats, finish: Floats, ok: Bools, phases: list[dict[str, Any]]
) -> dict[str, Any]:
    """The queue when the burst ended, requests without a first token yet, and the rate at which it was served.

    A queue is more than the burst's rate explains at the base's wait (Little: rate x wait) all through the second half
    of the burst, and beyond chance at its end. Without one the server was not full: what it can serve is not known.
    """
    _, burst_s, over_s, end_s = times
    middle = (burst_s + over_s) / 2
    moments = np.linspace(middle, over_s, 21)
    waiting = np.searchsorted(at, moments) - np.searchsorted(np.sort(answered), moments)
    base = time_average_in_flight(SETTLE_SHARE * burst_s, burst_s, at, answered)
    result: dict[str, Any] = {
        "at_end_of_burst": max(0.0, float(waiting[-1]) - base), "base_waiting": base, "served_rps": None,
        "expected_drain_s": None, "reason": None,
    }  # fmt: skip
    if end_s <= over_s:
        return result | {"reason": "the run ended before the burst did"}
    explained = base * max(1.0, phases[1]["offered_rps"] / (phases[0]["offered_rps"] or math.inf))
    if waiting[-1] <= explained + 3 * math.sqrt(max(1.0, explained)) or waiting.min() <= explained:
        return result | {"reason": "no queue lasted through the second half of the burst"}
    queued = answered[(at < over_s) & (answered > over_s)]
    until = min(end_s, float(np.quantile(queued, 0.9)))  # while there is a queue
    served = int(np.count_nonzero(ok & (finish >= middle) & (finish < until))) / (until - middle)
    base_rps = phases[2]["offered_rps"] or phases[0]["offered_rps"]
    result["served_rps"] = served
    if served > base_rps:
        result["expected_drain_s"] = result["at_end_of_burst"] / (served - base_rps)
    else:
        result["reason"] = f"{served:.3g} requests/s were served, {base_rps:.3g} came: it cannot drain"
    return result


def _wait_limit_s(slos: Sequence[Slo], phases: list[dict[str, Any]]) -> tuple[float | None, Slo | None]:
    """How long a request may wait: the tightest limit on its beginning or whole, less what the base takes."""
    best: tuple[float | None, Slo | None] = (None, None)
    for slo in slos:
        held = phases[0]["e2e_s" if slo.metric == "e2e" else "ttft_s"]["p50"]
        if slo.metric in ("ttft", "first_answer", "e2e") and held is not None:
            room_s = max(0.0, slo.limit_s - held)
            if best[0] is None or room_s < best[0]:
                best = (room_s, slo)
    return best


def _headroom(
    plan: Mapping[str, Any], slos: Sequence[Slo], phases: list[dict[str, Any]], backlog: dict[str, Any]
) -> dict[str, Any]:
    """The rate that would have kept the burst's last request within its limit (fluid: (burst - rate) T = wait rate)."""
    burst, length = phases[1]["offered_rps"], float(plan["burst_s"])
    wait_s, slo = _wait_limit_s(slos, phases)
    needed = burst * length / (length + (wait_s or 0.0))
    served, harmed = backlog["served_rps"], phases[1]["slo_misses"] or sum(phases[1]["errors"].values())
    if served is None:
        but = f", but {harmed} of its requests broke an SLO or failed" if harmed else ""
        return {"needed_rps": needed, "factor": None, "enough": None if harmed else True,
                "reason": backlog["reason"] + but}  # fmt: skip
    text = f"with a wait of {wait_s:.3g} s allowed by {slo.text}" if slo and wait_s else "without any wait"
    return {"needed_rps": needed, "factor": needed / served, "enough": bool(served >= needed), "reason": text}


def _breaker(slos: Sequence[Slo], phases: list[dict[str, Any]], backlog: dict[str, Any]) -> dict[str, Any]:
    """Queue depth = acceptable wait x the rate that moves it; a breaker opens at 80 to 90 % of it."""
    wait_s, slo = _wait_limit_s(slos, phases)
    rate = backlog["served_rps"]
    result: dict[str, Any] = {"acceptable_wait_s": wait_s, "rate_rps": rate}
    result |= {"max_depth": None, "open_at": None, "reason": None}
    if not wait_s:
        why = (
            "the SLO leaves no time to wait"
            if slo
            else "no SLO says how long a request may wait: give --slo ttft_p99=2s"
        )
        return result | {"reason": why}
    if not rate:
        least = phases[1]["achieved_rps"]
        return result | {
            "reason": f"no lasting queue: the server's rate is only known to be at least {least:.3g} req/s; raise --factor"
        }
    depth = queue_depth(rate, wait_s)
    return result | {"max_depth": depth.max_depth, "open_at": [depth.breaker_low, depth.breaker_high]}
