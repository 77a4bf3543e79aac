"""Fit a profile to a trace: a workload file without prompts or names, with the measurements."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from ampacity.workloads.arrivals.processes import arrival_times, parse_arrivals
from ampacity.workloads.arrivals.rates import Switching
from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.fit import traffic
from ampacity.workloads.fit.lengths import fit_lengths, quantile_table, rounded
from ampacity.workloads.fit.process import DAY_S, Process, choose_process, gaps_text
from ampacity.workloads.fit.sessions import context_limit, joint_sessions, shrunk_note
from ampacity.workloads.lengths.parse import fit_copula, parse_lengths, spearman
from ampacity.workloads.trace_cuts import spread, with_blocks
from ampacity.workloads.traces.times import recorded
from ampacity.workloads.traces.trace import Trace

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
OVER_TIME = 48  # windows that a log's rate is shown by
_DRAWN_MAX = 3_000_000  # requests of a draw that is shown beside the log
_SLOW_S = 60.0  # a cycle of states that a usual stage is too short for
FEWEST = 100  # requests; fewer show neither a process of arrivals nor a correlation
_SESSION_TURNS = 1.5  # mean turns, and ...
# ... share of the requests in sessions, from which on the profile is one of sessions
_SESSION_SHARE = 0.9


def fit(trace: Trace, name: str, *, seed: int = 1) -> dict[str, Any]:
    """Return the profile of a trace as a workload file; measurements are under ``measured``.

    Lengths are quantile tables that keep spikes; arrivals are those of a trace with its coarse
    clock spread. Raises WorkloadError for too few requests.
    """
    n = len(trace)
    if n < 2:
        raise WorkloadError(f"{trace.source}: {n} request is too few for a profile: give 2 or more")
    trace = with_blocks(trace)
    few = n < FEWEST
    timed = bool(trace.clock) and not trace.from_session_start and not few
    spread_out = spread(trace, np.random.default_rng(seed))
    covered = recorded(spread_out.arrival_s)
    clock, arrivals, clock_notes = "poisson", None, list[str]()
    if timed:
        clock, arrivals, clock_notes = fit_clock(covered.arrival_s, seed)
    notes = [*(spread_out.notes if timed else trace.notes)]
    if timed:
        notes += [*covered.note(n), *clock_notes]
    if few:
        notes.append(
            f"{n} requests are too few to fit: arrivals are taken for Poisson, no rate, peak or "
            f"correlation is given ({FEWEST} would do); the lengths are those {n}"
        )
    client = spread_out.client
    measured: dict[str, Any] = {
        "requests": n,
        "clock": trace.clock or None,
        "clock_step_s": trace.clock_step_s,
        "input_tokens": _side(trace.input_tokens),
        "output_tokens": _side(trace.output_tokens),
        "correlation": None if few else round(spearman(trace.input_tokens, trace.output_tokens), 4),
        "arrivals": arrivals,
        "clients": client
        if client is None
        else traffic.fit_clients(client, spread_out.arrival_s if timed else None),
        "sharing": traffic.fit_sharing(trace),
        "sessions": traffic.fit_sessions(trace),
        "notes": notes,
    }
    profile: dict[str, Any] = {
        "name": name,
        "source": f"fitted to {trace.source}, {n} requests",
        "arrivals": clock,
    }
    profile |= _lengths_workload(trace, measured, timed=timed, seed=seed)
    kept = {key: value for key, value in measured.items() if value not in (None, [])}
    return profile | {"measured": kept}


def _lengths_workload(
    trace: Trace, measured: dict[str, Any], *, timed: bool, seed: int
) -> dict[str, Any]:
    """Return the keys of a workload of sessions or of lone requests; may add to the notes."""
    sessions = measured["sessions"]
    if (
        sessions
        and sessions["turns"]["mean"] >= _SESSION_TURNS
        and sessions["requests_in_sessions"] >= _SESSION_SHARE
    ):
        profile = _session_workload(trace, timed, seed)
        measured["notes"] += shrunk_note(trace, profile["sessions"].get("limit_tokens"))
        return profile
    profile = {side: _table(getattr(trace, side)) for side in ("input_tokens", "output_tokens")}
    if abs(measured["correlation"] or 0.0) >= 0.01:
        profile["correlation"] = _within_reach(measured["correlation"], profile)
    sharing = measured["sharing"] or {}
    share = sharing.get("cached_share_infinite") or sharing.get("cached_share_reported")
    if share:
        profile["prefixes"] = {"cached_share": round(share, 4), "pool": 8, "zipf": 1.0}
    return profile


def _within_reach(rho: float, profile: dict[str, Any]) -> float:
    """Return the correlation the tables can reach; of a few rows the measured one may be 1."""
    sides = [parse_lengths(profile[side], side) for side in ("input_tokens", "output_tokens")]
    wanted = min(max(rho, -0.999), 0.999)
    while abs(wanted) >= 0.01:
        try:
            fit_copula(sides[0], sides[1], wanted)
            return round(wanted, 4)
        except WorkloadError:
            wanted *= 0.95
    return 0.0


def fit_clock(arrival_s: Floats, seed: int) -> tuple[str, dict[str, Any] | None, list[str]]:
    """Return (arrivals of the profile, their measurements, notes) of sorted times from 0.

    Beside the log's own figures are those of one draw of the chosen process.
    """
    arrivals = traffic.fit_arrivals(arrival_s)
    if arrivals is None:
        return "poisson", None, []
    rng = np.random.default_rng([seed, 0xC10C])
    processes = choose_process(arrival_s, [*arrivals["dispersion"].values()], rng)
    best, gaps = processes[0], gaps_text(arrivals["gap_cv"])
    arrivals["processes"] = [{"process": p.text, "held_out_nats": p.nats} for p in processes]
    span_s = float(arrival_s[-1])
    rps = np.histogram(arrival_s, np.linspace(0, span_s, OVER_TIME + 1))[0] / (span_s / OVER_TIME)
    arrivals["over_time"] = over_time(rps, span_s, best.text, rng)
    second = processes[1].nats if len(processes) > 1 else 0.0
    plain = next((p.nats for p in processes if p.text == gaps), second)
    notes = [] if best.text == gaps else [*_process_notes(best, gaps, best.nats - plain)]
    return best.text, arrivals, notes


def _process_notes(best: Process, gaps: str, gain: float) -> Iterator[str]:
    kind = best.text.partition(":")[0]
    yield (
        f"arrivals: {kind} describes parts of the log that it was not fitted to better than "
        f"{gaps} does, by {gain:.3g} nats a request"
    )
    slow = _cycle_s(best.text)
    if kind == "diurnal":
        yield (
            "the rate changes over the day, and the curve is laid over a stage of any length "
            "(24h: as recorded): sweep and search look for one steady rate, "
            f"give them --arrivals {gaps}"
        )
    elif slow > _SLOW_S:
        yield (
            f"the rate changes every {slow / 2:.3g} s on average: a stage should last several "
            f"times {slow:.3g} s, or take --arrivals {gaps}"
        )


def _cycle_s(text: str) -> float:
    """Return the mean duration of a full cycle of a switching process; 0 for others."""
    curve = parse_arrivals(text).curve
    return sum(curve.stay_s) if isinstance(curve, Switching) else 0.0


def over_time(
    rps: Floats, span_s: float, text: str, rng: np.random.Generator | None = None
) -> dict[str, Any]:
    """Return the log's rates (float[n]) by ``OVER_TIME`` windows, and those of a draw."""
    windows = min(OVER_TIME, len(rps))
    parts = np.array_split(rps, windows)
    found: dict[str, Any] = {
        "window_s": rounded(span_s / windows),
        "rps": [rounded(part.mean()) for part in parts],
        "fitted_rps": None,
    }
    mean = float(rps.mean())
    if mean * span_s <= _DRAWN_MAX:
        rng = np.random.default_rng(1) if rng is None else rng
        drawn = _drawn(text, mean, span_s, rng)
        edges = np.concatenate([[0], np.cumsum([len(part) for part in parts])]) * (
            span_s / len(rps)
        )
        found["fitted_rps"] = [
            rounded(rate) for rate in np.histogram(drawn, edges)[0] / np.diff(edges)
        ]
        found["fitted_dispersion"] = (
            (traffic.fit_arrivals(drawn) or {}).get("dispersion") if len(drawn) else None
        )
    return found


def _drawn(text: str, rate_rps: float, span_s: float, rng: np.random.Generator) -> Floats:
    """Return sorted times of a draw as long as the log; a daily curve repeats each day."""
    if not text.startswith("diurnal"):
        return arrival_times(text, rate_rps, span_s, rng)
    days = [
        arrival_times(text, rate_rps, DAY_S, rng) + day * DAY_S
        for day in range(math.ceil(span_s / DAY_S))
    ]
    times = np.concatenate(days)
    return times[times < span_s]


def write_profile(path: Path, profile: dict[str, Any]) -> None:
    """Write a profile as YAML. Raises WorkloadError."""
    text = yaml.safe_dump(
        profile, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True
    )
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise WorkloadError(f"{path} cannot be written: {error.strerror or error}") from None


def _side(tokens: NDArray[np.int64]) -> dict[str, Any]:
    values, counts = np.unique(tokens, return_counts=True)
    return fit_lengths(values.astype(float), counts.astype(float), len(tokens))


def _table(tokens: NDArray[np.int64]) -> dict[str, Any]:
    values, counts = np.unique(np.maximum(tokens, 1), return_counts=True)
    return {"quantiles": quantile_table(values.astype(float), counts.astype(float))}


def _session_workload(trace: Trace, timed: bool, seed: int) -> dict[str, Any]:
    """Return the keys of a workload of sessions, whose arrivals are those of sessions.

    A pause is from one turn's start to the next, so it includes the answer.
    """
    order, turns, first, later = traffic.turns_of(trace)
    inputs, outputs = trace.input_tokens[order], trace.output_tokens[order]
    said = inputs[later] - inputs[later - 1] - outputs[later - 1]
    gaps_ms = np.rint(np.diff(trace.arrival_s[order])[later - 1] * 1e3).astype(np.int64)
    begun = np.sort(trace.arrival_s[order][first])
    clock = fit_clock(recorded(begun - begun[0]).arrival_s, seed)[0] if timed else "poisson"
    sessions: dict[str, Any] = {"turns": _table(turns)}
    if len(later):
        limit = context_limit(inputs, outputs, later)
        joint = joint_sessions(inputs, outputs, turns, first, matched=limit is None)
        sessions |= {"user_tokens": _table(said), "think_ms": _table(gaps_ms), "joint": joint}
        if limit is not None:
            sessions |= {"limit_tokens": limit[0], "summary_tokens": _table(limit[1])}
    return {
        "arrivals": clock,
        "input_tokens": _table(inputs[first]),
        "output_tokens": _table(outputs),
        "sessions": sessions,
    }
