"""What a burst did: per phase, how high TTFT and the queue rose, and when both were back for good."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

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
BAND_MARGIN = 1.1
RUN = 3  # neighbouring bins above the band: fewer are what the base itself shows now and then
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
    times = [0.0, float(plan["base_s"]), float(plan["base_s"] + plan["burst_s"]), end_s]
    cut_s = min(end_s, (meta["end_ns"] - meta["start_ns"]) * _NS) if meta.get("ended_early") else end_s
    phases = [
        _phase(name, min(a, cut_s), min(b, cut_s), cohort, at, ttft, met, begin, finish)
        for name, (a, b) in zip(NAMES, pairwise(times), strict=True)
    ]
    edges = _edges(times, float(plan["base_rps"]))
    in_flight = np.array([time_average_in_flight(a, b, begin, finish) for a, b in pairwise(edges)])
    series: dict[str, Floats | None] = {
        "ttft_s": _medians(edges, at, ttft),
        "in_flight": in_flight,
        "server_queue": _gauges(edges, server, meta),
    }
    bands = {name: _band(edges, values, times[1], counts=name != "ttft_s") for name, values in series.items()}
    result: dict[str, Any] = {
        **{k: plan.get(k) for k in ("base_rps", "factor", "shape")}, "phases": phases, "resolution_s": float(edges[1] - edges[0]),
        "band": {name: band for name, band in bands.items() if band is not None},
        **_peaks(at, ttft, begin, finish, times[1]),
    }  # fmt: skip
    for name, values in series.items():
        result[f"{name}_recovery_s"], result[f"{name}_recovery_reason"] = _recovery(
            edges, values, bands[name], times[1], times[2]
        )
    after = at >= times[1]
    result["slo_misses"] = None if met is None else int(np.count_nonzero(after & ~met))
    result["lost"] = int(np.count_nonzero(after & rows.failed))
    result["unfinished"] = int(np.count_nonzero(after & rows.has_status("unfinished")))
    result["backlog"] = _backlog(
        times, edges, in_flight, bands["in_flight"], finish, rows.has_status("ok"), phases
    )
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
    """Median of each bin and its neighbours; empty bins say nothing."""
    padded = np.concatenate([values[:1], values, values[-1:]])
    three = np.sort(np.stack([padded[:-2], padded[1:-1], padded[2:]]), axis=0)  # NaN last
    known = np.count_nonzero(~np.isnan(three), axis=0)
    return np.where(known == 0, np.nan, three[np.maximum(known - 1, 0) // 2, np.arange(len(values))])


def _band(edges: Floats, values: Floats | None, base_end_s: float, *, counts: bool) -> float | None:
    """Upper end of what the base phase shows once it has settled: its highest smoothed bin, and a tenth.

    Of ``counts`` at least mean + 2 sqrt(mean): a short base shows less than chance alone may bring later.
    """
    if values is None:
        return None
    base = (edges[:-1] >= SETTLE_SHARE * base_end_s) & (edges[1:] <= base_end_s + 1e-9)
    held = _smooth(values)[base]
    held = held[np.isfinite(held)]
    if not len(held):
        return None
    chance = float(held.mean() + 2 * math.sqrt(held.mean())) if counts else 0.0
    return max(BAND_MARGIN * float(held.max()), chance)


def _recovery(
    edges: Floats, values: Floats | None, band: float | None, burst_s: float, over_s: float
) -> tuple[float | None, str | None]:
    """Seconds from the end of the burst until the series is within the band for good, and why not.

    For good: never again ``RUN`` neighbouring bins above it. 0 where it is back before the burst ends.
    """
    if values is None:
        return None, "the server shows no gauges of its queue"
    if band is None:
        return None, "the base phase has no value to come back to"
    smooth, last = _smooth(values), None
    above = (smooth > band) & (edges[:-1] >= burst_s - 1e-9)
    for i in range(len(above) - RUN + 1):
        if above[i : i + RUN].all():
            last = i + RUN - 1
    if last is None:
        return 0.0, None
    if last >= len(above) - 1:
        return None, f"still above the base band of {band:.3g} when the run ended"
    return max(0.0, float(edges[last + 1]) - over_s), None


def _peaks(at: Floats, ttft: Floats, begin: Floats, finish: Floats, burst_s: float) -> dict[str, Any]:
    """The slowest first token of what was answered, and the most requests in flight, from the burst on."""
    known = np.flatnonzero(np.isfinite(ttft) & (at >= burst_s))
    slowest = int(known[np.argmax(ttft[known])]) if len(known) else None
    moments = np.concatenate([begin, finish])
    order = np.argsort(moments, kind="stable")
    level = np.cumsum(np.concatenate([np.ones(len(begin)), -np.ones(len(finish))])[order])
    level = np.where(moments[order] >= burst_s, level, 0)
    return {
        "peak_ttft_s": None if slowest is None else float(ttft[slowest]),
        "peak_ttft_at_s": None if slowest is None else float(at[slowest]),
        "peak_in_flight": int(level.max()) if len(level) else 0,
        "peak_in_flight_at_s": float(moments[order][int(level.argmax())]) if len(level) else None,
    }


def _backlog(
    times: list[float], edges: Floats, in_flight: Floats, band: float | None, finish: Floats, ok: Bools, phases: list[dict[str, Any]]
) -> dict[str, Any]:  # fmt: skip
    """What had piled up when the burst ended, at which rate it was served, and whether it went away."""
    _, burst_s, over_s, _ = times
    base = phases[0]["concurrency"]
    at_end = float(in_flight[max(int(np.searchsorted(edges, over_s - 1e-9)) - 1, 0)])
    result: dict[str, Any] = {
        "at_end_of_burst": max(0.0, at_end - base), "base_in_flight": base, "served_rps": None,
        "expected_drain_s": None,
        "drained": None, "reason": None,
    }  # fmt: skip
    if band is None:
        return result | {"reason": "the base phase is too short to know its requests in flight"}
    result["drained"] = _recovery(edges, in_flight, band, burst_s, over_s)[0] is not None
    unqueued = phases[1]["offered_rps"] * (phases[0]["e2e_s"]["p50"] or 0.0)  # Little: at the base's pace
    if at_end <= max(band, unqueued + 3 * math.sqrt(unqueued)):
        return result | {"reason": "nothing piled up: the burst was carried"}
    middle = (burst_s + over_s) / 2  # by then the answers come at the rate at which they are served
    later = np.flatnonzero((edges[1:] > over_s) & (in_flight <= band))
    until = float(edges[later[0]]) if len(later) else float(edges[-1])
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
    served = backlog["served_rps"]
    if served is None:
        return {"needed_rps": needed, "factor": None, "enough": True if backlog["drained"] else None,
                "reason": backlog["reason"]}  # fmt: skip
    text = f"with a wait of {wait_s:.3g} s allowed by {slo.text}" if slo and wait_s else "without any wait"
    return {"needed_rps": needed, "factor": needed / served, "enough": bool(served >= needed), "reason": text}


def _breaker(slos: Sequence[Slo], phases: list[dict[str, Any]], backlog: dict[str, Any]) -> dict[str, Any]:
    """Queue depth = acceptable wait x the rate that moves it; a breaker opens at 80 to 90 % of it."""
    wait_s, slo = _wait_limit_s(slos, phases)
    rate = min(backlog["served_rps"] or math.inf, phases[1]["offered_rps"])
    result: dict[str, Any] = {
        "acceptable_wait_s": wait_s,
        "rate_rps": rate,
        "max_depth": None,
        "open_at": None,
        "reason": None,
    }
    if not wait_s or not rate:
        why = (
            "the SLO leaves no time to wait"
            if slo
            else "no SLO says how long a request may wait: give --slo ttft_p99=2s"
        )
        return result | {"reason": why}
    depth = queue_depth(rate, wait_s)
    return result | {"max_depth": depth.max_depth, "open_at": [depth.breaker_low, depth.breaker_high]}
