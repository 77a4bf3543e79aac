"""A run over time: arrivals, requests in flight, first tokens, failures and the server's gauges."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ampacity.analysis.load_names import planned_name
from ampacity.analysis.metrics.requests import Floats, read_requests, ttft_s
from ampacity.analysis.stage.steady import in_flight_at
from ampacity.loadgen.rundir.files import Run
from ampacity.loadgen.rundir.records import FAILED_KINDS, KINDS

STEPS_MAX = 300
POINTS_MAX = 20_000  # first tokens that are drawn: more than a screen has room for
GAUGES = ("running", "waiting", "kv_cache_usage", "preemptions_total")
QUOTA_LEFT = "quota_left"
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Timeline:
    """Series over the run. Times in s after the first stage began; step i begins at i x step_s."""

    step_s: float
    arrivals_rps: list[float]  # requests that were due, one a step
    in_flight: list[float]  # at the middle of each step
    failed_rps: dict[str, list[float]]  # by kind, when they ended
    ttft_s: Points  # (when due, TTFT from schedule): each step's extremes first
    answered: int  # requests with a first token, of which ``ttft_s`` may be a part
    stages: list[tuple[float, str]]  # (start, name)
    server: dict[str, Points]  # by a name of GAUGES: the highest sample of each step; QUOTA_LEFT


def timeline_of(run: Run) -> Timeline | None:
    """Return the series of a run; None where nothing was recorded. Raises RecordsError."""
    stages = [s for s in run.stages if s.start_ns]
    if not run.requests.num_rows or not stages:
        return None
    origin_ns = run.origin_ns
    every = read_requests(run.requests, origin_ns, run.meta)
    first = every.take(every.attempt == 0)
    due_s, ended_s = first.scheduled_ns * 1e-9, first.ended_ns * 1e-9
    over_s = np.where(np.isnan(ended_s), due_s, ended_s)
    end_s = max(float(np.nanmax(np.maximum(due_s, over_s))), 1e-3)
    step_s = _step(end_s)
    edges = np.arange(0.0, end_s + step_s, step_s)

    def per_second(times_s: Floats) -> list[float]:
        return [float(n) / step_s for n in np.histogram(times_s, edges)[0]]

    failed = {
        kind: per_second(over_s[first.status == code])
        for code, kind in enumerate(KINDS)
        if kind in FAILED_KINDS and (first.status == code).any()
    }
    middles = edges[:-1] + step_s / 2
    ttft = ttft_s(first, from_schedule=True)
    known = np.isfinite(ttft) & (ttft > 0)
    return Timeline(
        step_s,
        per_second(due_s),
        in_flight_at(middles, every.started_ns * 1e-9, every.ended_ns * 1e-9).tolist(),
        failed,
        _thinned(due_s[known], ttft[known], step_s),
        int(known.sum()),
        [((s.start_ns - origin_ns) * 1e-9, planned_name(s)) for s in stages],
        _gauges(run.server, origin_ns, step_s) | _quota_left(run.requests, origin_ns, step_s),
    )


def _step(end_s: float) -> float:
    """Return the shortest of 1, 2, 5 times powers of ten of seconds that needs few steps."""
    steps = (float(f"{m}e{k}") for k in range(-4, 9) for m in (1, 2, 5))
    return next(step for step in steps if end_s / step <= STEPS_MAX)


def _thinned(at_s: Floats, ttft: Floats, step_s: float) -> Points:
    """Return at most POINTS_MAX points: the least and the most of each step, then any others.

    The others are in no order, so that a beginning of the list is a fair part of all.
    """
    at_s = at_s.round(3)
    step = (at_s / step_s).astype(np.int64)
    by_height = np.lexsort((ttft, step))
    begins = np.flatnonzero(np.diff(step[by_height], prepend=-1))
    ends = np.append(begins[1:], len(step)) - 1
    extremes = np.unique(by_height[np.concatenate([begins, ends])]) if len(step) else by_height
    rest = np.setdiff1d(np.arange(len(step)), extremes)
    room = max(0, POINTS_MAX - len(extremes))
    rest = np.random.default_rng(0).permutation(rest)[:room]
    chosen = np.concatenate([extremes, rest])
    pairs = zip(at_s[chosen].tolist(), ttft[chosen].tolist(), strict=True)
    return [(at, float(f"{height:.4g}")) for at, height in pairs]


def _gauges(samples: pa.Table | None, origin_ns: int, step_s: float) -> dict[str, Points]:
    if samples is None or not samples.num_rows:
        return {}
    at_s = (samples["at_ns"].to_numpy() - origin_ns) * 1e-9
    found: dict[str, Points] = {}
    for name in GAUGES:
        values: Any = pc.cast(samples[name], pa.float64()).to_numpy()
        held = np.isfinite(values) & (at_s >= 0)
        if held.any():
            found[name] = _highest(at_s[held], values[held], step_s)
    return found


def _quota_left(table: pa.Table, origin_ns: int, step_s: float) -> dict[str, Points]:
    """Return the share that answers state as left of the quota that is used most: each step's least."""

    def column(name: str) -> Floats:
        return np.asarray(table[name].cast(pa.float64()).to_numpy())

    pairs = ((column(f"quota_{of}_left"), column(f"quota_{of}")) for of in ("requests", "tokens"))
    shares = [np.where(limit > 0, left / np.maximum(limit, 1.0), np.nan) for left, limit in pairs]
    share, at_s = np.fmin(*shares), (column("headers_ns") - origin_ns) * 1e-9
    known = np.isfinite(share) & (at_s >= 0)
    least = [(x, -y) for x, y in _highest(at_s[known], -share[known], step_s)]
    return {QUOTA_LEFT: least} if least else {}


def _highest(at_s: Floats, values: Floats, step_s: float) -> Points:
    """Return the highest sample of each step."""
    steps = (at_s / step_s).astype(np.int64)
    order = np.lexsort((values, steps))
    last = order[np.flatnonzero(np.diff(steps[order], append=-1))]
    return list(zip(at_s[last].round(3).tolist(), values[last].tolist(), strict=True))
