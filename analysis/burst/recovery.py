"""What a burst did: per phase, how high TTFT and the queue rose, and when it was got over."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from scipy.special import stdtr, stdtrit

from ampacity.analysis.burst.advice import breaker, find_harm, headroom
from ampacity.analysis.metrics.cohort import Cohort
from ampacity.analysis.metrics.observations import Observations
from ampacity.analysis.metrics.requests import Bools, Floats, Ints, read_chunks, ttft_s
from ampacity.analysis.slo import ERROR_RATE, Slo
from ampacity.analysis.stage.analyse import RunRecords
from ampacity.analysis.stage.attainment import observe_slos, requests_meeting
from ampacity.analysis.stage.steady import time_average_in_flight
from ampacity.analysis.stats.intervals import smallest_n

SETTLE_SHARE = 0.2  # of the base phase: an endpoint that starts idle fills up first
REQUESTS_PER_BIN = 10.0
BINS_MIN = 12  # in the base phase, however few its requests
BASE_REQUESTS_MIN = 30  # of the settled base phase, to know what to come back to
BASE_ANSWERS_MIN = (
    10.0  # mean answers that the settled base phase lasts: a shorter one still fills up
)
BASE_ERROR_MAX = 0.45  # half of the 95 % interval of the base's mean in flight, over the mean
BELOW = 1.0  # of the base's standard deviations, by which the count must come below its mean
BASE_SHARE_MAX = 0.6  # of what is served: above that the base load has long queues of its own
SINCE_REQUESTS_MIN = 20  # due after the backlog, to know what TTFT has become
SLOWER = 1.1  # a request is slow where its TTFT is above this times the base's median
SLOWER_P = 0.01  # one-sided, of the test that as many are slow as in the base
SAME = 1e-6  # counts of requests that are nearer are one
PARTS = 8  # of a time, to know how much what happens in it varies
SERVED_ALL = (
    0.95  # of the burst's rate: what is served as fast as it comes is delayed, and no queue
)
UNSEEN = "what is known of the run ends before the burst does"
_NS = 1e-9


def summarise_burst(
    plan: Mapping[str, Any],
    meta: Mapping[str, Any],
    records: RunRecords,
    slos: Sequence[Slo],
    server: pa.Table | None,
) -> dict[str, Any]:
    """The ``burst`` object of docs/summary.md from run.json's ``burst`` and its one stage. Times in s after its start."""
    rows = records.requests.take(
        (records.requests.stage == meta["index"]) & (records.requests.attempt == 0)
    )
    start_ns = float(meta["start_ns"] - records.origin_ns)
    last_ns = float(np.nanmax(np.concatenate([rows.ended_ns, [start_ns]])))
    at, last_s = (rows.scheduled_ns - start_ns) * _NS, (last_ns - start_ns) * _NS
    planned_s = round(float(plan["base_s"] + plan["burst_s"] + plan["recovery_s"]), 9)
    ids = records.table["request_id"].to_numpy()[rows.row]
    end_s = max(0.0, _known_until_s(planned_s, meta, at, ids, last_s))
    rows, at = rows.take(at <= end_s), at[at <= end_s]
    cohort = Cohort(rows, read_chunks(records.table, rows), 0, last_ns, spoilt=records.spoilt)
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
        "in_flight": np.array(
            [time_average_in_flight(a, b, at, finish) for a, b in pairwise(edges)]
        ),
        "server_queue": _gauges(edges, server, meta),
    }
    result: dict[str, Any] = {
        **{k: plan.get(k) for k in ("base_rps", "factor", "shape")},
        "phases": phases,
        "resolution_s": float(edges[1] - edges[0]),
        "known_until_s": end_s if end_s < planned_s else None,
    }
    result["backlog"] = _backlog(
        times, at, answered, finish, rows.has_status("ok"), phases, float(plan["base_rps"])
    )
    result |= _recovery(times, at, answered, finish, ttft, result["backlog"], phases)
    known_s = result["recovery_s"]
    over_s = math.inf if known_s is None else times[2] + known_s
    result |= _peaks(at, ttft, finish, times[1], over_s)
    after, base = at >= times[1], cohort.part(at < times[1])
    result["slo_misses"] = (
        None if met is None else phases[1]["slo_misses"] + phases[2]["slo_misses"]
    )
    of_base = 1 - phases[0]["slo_attainment"] if phases[0]["slo_attainment"] is not None else 0.0
    result["slo_misses_of_base"] = of_base * int(np.count_nonzero(after & ~rows.left_out))
    result["lost"] = int(np.count_nonzero(after & rows.failed))
    result["unfinished"] = int(np.count_nonzero(after & rows.has_status("unfinished")))
    # as long as the burst, or half of the base: a long recovery phase must not dilute an outage
    soon = (at >= over_s) & (at < over_s + max(times[2] - times[1], times[1] / 2))
    result["harm"] = {
        "base": find_harm(base, cohort.part(at < 0), slos),
        "burst": find_harm(cohort.part(after & (at < times[2])), base, slos),
        "after": find_harm(cohort.part(soon), base, slos)
        or find_harm(cohort.part(at >= over_s), base, slos),
    }
    result["max_recovery"] = judge_recovery(plan.get("max_recovery_s"), result)
    over = over_s < math.inf and not result["harm"]["after"]
    result["headroom"] = headroom(plan, slos, phases, result["backlog"], result["harm"], over=over)
    result["breaker"] = breaker(slos, phases, result["backlog"], result["harm"]["burst"])
    offered_rps = np.histogram(at, edges)[0] / np.diff(edges)
    result["series"] = {
        "start_s": edges[:-1],
        "end_s": edges[1:],
        **series,
        "offered_rps": offered_rps,
    }
    result["series"] = {
        name: values for name, values in result["series"].items() if values is not None
    }
    return result


def _known_until_s(
    planned_s: float, meta: Mapping[str, Any], at: Floats, ids: Ints, last_s: float
) -> float:
    """When what is known ends: the plan's end, or when the run was stopped.

    To the millisecond. Of a killed run just after the last request before which none lacks its record: they are numbered as they are due.
    """
    if meta.get("drained_ns"):
        stopped_s = (meta["end_ns"] - meta["start_ns"]) * _NS
        return (
            min(planned_s, round(min(stopped_s, last_s), 3))
            if meta.get("ended_early")
            else planned_s
        )
    gaps = np.flatnonzero(np.diff(ids) != 1)
    last_s = float(at[gaps[0] if len(gaps) else -1]) if len(at) else 0.0
    return min(planned_s, (math.floor(1e3 * last_s) + 1) / 1e3)


def _phase(
    name: str,
    start_s: float,
    end_s: float,
    cohort: Cohort,
    at: Floats,
    met: Bools | None,
    finish: Floats,
) -> dict[str, Any]:
    inside = (at >= start_s) & (at < end_s)
    part = cohort.part(inside)
    rows, length = part.requests, end_s - start_s or math.inf  # a phase that never came: rate 0
    held = None if met is None else met[inside & ~cohort.requests.left_out]
    errors = rows.status_counts()
    ok = errors.pop("ok")
    done = (finish >= start_s) & (finish < end_s) & cohort.requests.has_status("ok")
    return {
        "name": name,
        "start_s": start_s,
        "end_s": end_s,
        "requests": len(rows),
        "ok": ok,
        "errors": {status: n for status, n in errors.items() if n},
        "offered_rps": len(rows) / length,
        "achieved_rps": int(np.count_nonzero(done)) / length,
        "concurrency": time_average_in_flight(start_s, end_s, at, finish),
        "ttft_s": _quantiles(part.ttft(from_schedule=True)),
        "e2e_s": _quantiles(part.e2e(from_schedule=True)),
        "slo_misses": None if held is None else int(np.count_nonzero(~held)),
        "slo_attainment": None if held is None or not len(held) else float(np.mean(held)),
    }


def _quantiles(o: Observations) -> dict[str, Any]:
    """p50, p95 and the largest, each null where failed or unfinished requests reach into it, or a stage's had too few requests.

    No interval: no steady state.
    """
    levels = {
        name: q
        for name, q in (("p50", 0.5), ("p95", 0.95), ("max", 1.0))
        if q == 1 or o.n >= smallest_n(q)
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
    waiting = (
        server["waiting"].fill_null(0.0).to_numpy() if "waiting" in server.column_names else 0.0
    )
    level = server["running"].to_numpy(zero_copy_only=False) + waiting
    at = (server["at_ns"].to_numpy() - int(meta["start_ns"])) * _NS
    return None if np.isnan(level).all() else _by_bin(edges, at, level, np.mean)


def _recovery(
    times: list[float],
    at: Floats,
    answered: Floats,
    finish: Floats,
    ttft: Floats,
    backlog: Mapping[str, Any],
    phases: list[dict[str, Any]],
) -> dict[str, Any]:
    """Seconds from the end of the burst until its excess is gone, and why that is not known.

    Over: no more requests wait for a first token, and no more are in flight, than the lower end of the 95 % interval
    of the settled base's time average (Student's t over ``PARTS`` parts) or one standard deviation below it, and TTFT of those due from then on is what
    the base showed. From such a moment on the endpoint is in a state that the base load alone has as well.
    ``recovery_ci_s`` begins where fewer are in flight than the base has but for chance (upper end + 2 sqrt(mean)).
    """
    _, burst_s, over_s, end_s = times
    settled_s = SETTLE_SHARE * burst_s
    base = (at >= settled_s) & (at < burst_s)
    n, in_flight = (
        int(np.count_nonzero(base)),
        time_average_in_flight(settled_s, burst_s, at, finish),
    )
    result: dict[str, Any] = {"base_level": {}, "recovery_s": None, "recovery_ci_s": [None, None]}
    length_s = burst_s - settled_s
    if n < BASE_REQUESTS_MIN or not in_flight:
        return result | {
            "recovery_reason": f"the settled base phase has {n} requests: {BASE_REQUESTS_MIN} are needed to know what to come back to"
        }
    answer_s = in_flight * length_s / n  # Little
    levels = [_level(settled_s, burst_s, at, left) for left in (answered, finish)]
    result["base_level"] = {"waiting": levels[0][0], "in_flight": in_flight}
    known_ttft = ttft[base & ~np.isnan(ttft)]
    if len(known_ttft) >= SINCE_REQUESTS_MIN and np.isfinite(
        middle := float(np.median(known_ttft))
    ):
        result["base_level"]["ttft_s"] = middle
    if end_s <= over_s:
        return result | {"recovery_reason": UNSEEN}
    if length_s < BASE_ANSWERS_MIN * answer_s or levels[1][1] > BASE_ERROR_MAX * in_flight:
        return result | {
            "recovery_reason": f"the base phase is too short to know what to come back to: {in_flight:.3g} in flight, "
            f"give or take {levels[1][1]:.3g}, in {length_s / answer_s:.3g} times an answer; raise --base-duration"
        }
    seen_s = _apart_s(over_s, end_s)
    upper = in_flight + levels[1][1] + 2 * math.sqrt(in_flight)
    earliest_s = _fallen_s(at, finish, upper, over_s, end_s)
    result["recovery_ci_s"] = [seen_s if earliest_s is None else earliest_s, None]
    most_rps = backlog["served_rps"] or phases[1]["achieved_rps"]
    chance = 1 + 2 / math.sqrt(max(1.0, most_rps * (over_s - burst_s)))
    if not most_rps:
        return result | {
            "recovery_reason": "nothing of the burst was answered: what is served is not known"
        }
    if phases[0]["offered_rps"] > BASE_SHARE_MAX * most_rps * chance:
        served = "is served" if backlog["served_rps"] else "was seen to be served"
        return result | {
            "recovery_reason": f"the base load is {phases[0]['offered_rps'] / most_rps:.0%} of the {most_rps:.3g} req/s that "
            f"{served}: above {BASE_SHARE_MAX:.0%} it has queues of its own, and when the burst's is gone cannot be told"
        }
    levels = _with_later(
        levels,
        [_level((over_s + end_s) / 2, end_s, at, left) for left in (answered, finish)],
        length_s,
        seen_s / 2,
    )
    aims = [max(0.0, mean - max(half, BELOW * spread)) for mean, half, spread in levels]
    found = [
        _fallen_s(at, left, aim, over_s, end_s)
        for left, aim in zip((answered, finish), aims, strict=True)
    ]
    fallen = [f for f in found if f is not None]
    if len(fallen) < len(found):
        what = "waiting for a first token" if found[0] is None else "in flight"
        aim, mean = (aims[0], levels[0][0]) if found[0] is None else (aims[1], levels[1][0])
        return result | {
            "recovery_reason": f"{math.floor(aim)} or fewer {what} (the base's mean of {mean:.3g} less what it varies by) were not "
            "seen before the load ended; raise --recovery-duration"
        }
    back_s = max(fallen)
    since = ttft[(at >= over_s + back_s) & ~np.isnan(ttft)]
    if "ttft_s" in result["base_level"]:
        if len(since) < SINCE_REQUESTS_MIN:
            return result | {
                "recovery_reason": f"only {len(since)} requests were due after the backlog was gone: raise --recovery-duration"
            }
        limit_s = SLOWER * result["base_level"]["ttft_s"]
        if (p := _slower_p(known_ttft > limit_s, since > limit_s)) < SLOWER_P:
            return result | {
                "recovery_reason": f"the backlog is gone {back_s:.3g} s after the burst, but TTFT of those due since is above the base's: "
                f"{np.mean(since > limit_s):.0%} against {np.mean(known_ttft > limit_s):.0%} take more than {limit_s:.3g} s (p = {p:.1g})"
            }
    low_s = min(back_s, result["recovery_ci_s"][0])
    return result | {
        "recovery_s": back_s,
        "recovery_ci_s": [low_s, back_s],
        "recovery_reason": None,
    }


def _level(start_s: float, end_s: float, at: Floats, left: Floats) -> tuple[float, float, float]:
    """Of the requests that have not left: time average, half of its 95 % interval from ``PARTS`` parts, standard deviation."""
    cuts = np.linspace(start_s, end_s, PARTS + 1)
    parts = np.array([time_average_in_flight(a, b, at, left) for a, b in pairwise(cuts)])
    half = float(stdtrit(PARTS - 1, 0.975) * parts.std(ddof=1) / math.sqrt(PARTS))
    moments = np.sort(np.concatenate([[start_s, end_s], at, left]))
    moments = moments[(moments >= start_s) & (moments <= end_s)]
    waiting, lasts_s = _waiting(at, np.sort(left), moments[:-1]), np.diff(moments)
    mean = float(parts.mean())
    spread = math.sqrt(float(np.average((waiting - mean) ** 2, weights=lasts_s)))
    return mean, half, spread


Level = tuple[float, float, float]  # see _level


def _with_later(
    base: list[Level], later: list[Level], base_s: float, later_s: float
) -> list[Level]:
    """The base's levels, known better by the second half of the recovery, unless more are in flight there than chance explains.

    The same load came in both; means by the lengths, their errors and variances likewise.
    """
    if later[1][0] > base[1][0] + math.hypot(base[1][1], later[1][1]):
        return base
    share = base_s / (base_s + later_s)
    pooled = []
    for (mean, half, spread), (mean_later, half_later, spread_later) in zip(
        base, later, strict=True
    ):
        both = share * mean + (1 - share) * mean_later
        apart = share * (1 - share) * (mean - mean_later) ** 2
        spread = math.sqrt(share * spread**2 + (1 - share) * spread_later**2 + apart)
        half = math.hypot(share * half, (1 - share) * half_later)
        pooled.append((both, half, spread))
    return pooled


def _apart_s(from_s: float, to_s: float) -> float:
    """To the millisecond: what is less is the clock's own."""
    return round(to_s - from_s, 3) + 0.0


def _fallen_s(at: Floats, left: Floats, level: float, over_s: float, end_s: float) -> float | None:
    """Seconds from the end of the burst until no more than ``level`` have not left; None: not while there was load."""
    left = np.sort(left)
    moments = np.concatenate([[over_s], left[(left > over_s) & (left <= end_s)]])
    down = moments[_waiting(at, left, moments) <= level + SAME]
    return _apart_s(over_s, float(down[0])) if len(down) else None


def _slower_p(base: Bools, since: Bools) -> float:
    """p of "as many are slow as in the base", one-sided: Welch's t over ``PARTS`` consecutive parts of each.

    Neighbouring requests are alike, so parts are compared; they vary at least as independent requests do.
    """
    share = np.mean(np.concatenate([base, since]))
    variance = 0.0
    for slow in (base, since):
        parts = np.array([part.mean() for part in np.array_split(slow, PARTS)])
        variance += max(float(parts.var(ddof=1)) / PARTS, float(share * (1 - share)) / len(slow))
    gap = float(since.mean() - base.mean())
    return (
        1.0
        if gap <= 0
        else float(stdtr(2 * PARTS - 2, -gap / math.sqrt(variance)) if variance else 0.0)
    )


def judge_recovery(limit_s: float | None, burst: Mapping[str, Any]) -> dict[str, Any] | None:
    """Whether the burst was got over within ``limit_s``: met, violated or inconclusive, with the reason; None without a limit."""
    if limit_s is None:
        return None
    low_s, high_s = burst["recovery_ci_s"]
    harmed = (burst.get("harm") or {}).get("after")
    if harmed and (
        low_s is None or low_s <= limit_s
    ):  # an endpoint that fails later on is not got over it
        failed = harmed["slo"].startswith(ERROR_RATE)
        verdict = "violated" if failed else "inconclusive"
        reason = f"of those due later {harmed['reason']}"
    elif high_s is not None and high_s <= limit_s:
        verdict, reason = "met", f"got over {high_s:.3g} s after the burst"
    elif low_s is not None and low_s > limit_s:
        verdict, reason = "violated", f"not got over for {low_s:.3g} s after the burst at least"
    elif high_s is not None:
        verdict, reason = "inconclusive", f"got over {low_s:.3g} to {high_s:.3g} s after the burst"
    else:
        verdict, reason = "inconclusive", burst["recovery_reason"]
    return {"limit_s": limit_s, "verdict": verdict, "reason": reason}


def _peaks(
    at: Floats, ttft: Floats, finish: Floats, burst_s: float, back_s: float
) -> dict[str, Any]:
    """The slowest first token of what was answered, and the most requests in flight, from the burst until it is got over.

    ``later_ttft_s``: a slower one that was due after that, which is not the burst's doing.
    """

    def slowest(which: Bools) -> int | None:
        known = np.flatnonzero(np.isfinite(ttft) & which)
        return int(known[np.argmax(ttft[known])]) if len(known) else None

    peak, later = slowest((at >= burst_s) & (at < back_s)), slowest(at >= back_s)
    if later is not None and peak is not None and ttft[later] <= ttft[peak]:
        later = None
    moments = np.concatenate([at, finish])
    order = np.argsort(moments, kind="stable")
    level = np.cumsum(np.repeat([1.0, -1.0], len(at))[order])
    level = np.where((moments[order] >= burst_s) & (moments[order] < back_s), level, 0)
    return {
        "peak_ttft_s": None if peak is None else float(ttft[peak]),
        "peak_ttft_at_s": None if peak is None else float(at[peak]),
        "later_ttft_s": None if later is None else float(ttft[later]),
        "later_ttft_at_s": None if later is None else float(at[later]),
        "peak_in_flight": int(level.max()) if len(level) else 0,
        "peak_in_flight_at_s": float(moments[order][int(level.argmax())]) if len(level) else None,
    }


def _backlog(
    times: list[float],
    at: Floats,
    answered: Floats,
    finish: Floats,
    ok: Bools,
    phases: list[dict[str, Any]],
    base_rps: float,
) -> dict[str, Any]:
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
        "at_end_of_burst": max(0.0, float(waiting[-1]) - base),
        "base_waiting": base or None,
        "served_rps": None,
        "drained": None,
        "reason": None,
        **dict.fromkeys(
            ("unanswered", "drained_s", "at_end", "fall_rps", "drains", "further_s", "further_s_ci")
        ),
    }
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
        return result | {
            "reason": "requests waited, but were served as fast as they came: a delay, no queue"
        }
    lasted_s, rest = (
        _apart_s(over_s, until),
        max(0.0, float(_waiting(at, left, np.array([until]))[0]) - base),
    )
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
    return {
        "drains": True,
        "further_s": further_s,
        "further_s_ci": [rest / (rate + half), latest_s],
    }
