"""From a trace or a log to a profile: a workload file without prompts or names, with what was measured beside it."""

from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from workloads.errors import WorkloadError
from workloads.fit_lengths import fit_lengths, quantile_table
from workloads.fit_traffic import fit_arrivals, fit_clients, fit_sessions, fit_sharing, turns_of
from workloads.lengths import fit_copula, parse_lengths, spearman
from workloads.replay import spread, with_blocks
from workloads.trace_times import recorded
from workloads.traces import Trace

_POISSON_CV = (0.85, 1.2)  # gaps of a log that are called Poisson
_CONSTANT_CV = 0.02
FEWEST = 100  # requests; fewer show neither a process of arrivals nor a correlation
_SESSION_TURNS = 1.5  # mean turns, and ...
_SESSION_SHARE = 0.9  # ... share of the requests in sessions, from which on the profile is one of sessions


def fit(trace: Trace, name: str, *, seed: int = 1) -> dict[str, Any]:
    """The profile of a trace, in the form of a workload file; what was measured stands under ``measured``.

    Lengths are quantile tables with the spikes kept, whichever family fits; arrivals are those of a trace with
    its coarse clock spread. Raises WorkloadError where there are too few requests.
    """
    n = len(trace)
    if n < 2:
        raise WorkloadError(f"{trace.source}: {n} request is too few for a profile: give 2 or more")
    trace = with_blocks(trace)
    few = n < FEWEST
    timed = bool(trace.clock) and not trace.from_session_start and not few
    spread_out = spread(trace, np.random.default_rng(seed))
    covered = recorded(spread_out.arrival_s)
    arrivals = fit_arrivals(covered.arrival_s) if timed else None
    sessions = fit_sessions(trace)
    measured: dict[str, Any] = {
        "requests": n,
        "clock": trace.clock or None,
        "clock_step_s": trace.clock_step_s,
        "input_tokens": _side(trace.input_tokens),
        "output_tokens": _side(trace.output_tokens),
        "correlation": None if few else round(spearman(trace.input_tokens, trace.output_tokens), 4),
        "arrivals": arrivals,
        "clients": None
        if trace.client is None
        else fit_clients(spread_out.client, spread_out.arrival_s if timed else None),  # type: ignore[arg-type]
        "sharing": fit_sharing(trace),
        "sessions": sessions,
        "notes": list(spread_out.notes if timed else trace.notes),
    }
    if timed:
        measured["notes"] += covered.note(n)
    if few:
        measured["notes"].append(
            f"{n} requests are too few to fit: arrivals are taken for Poisson, no rate, peak or correlation is given ({FEWEST} would do); the lengths are those {n}"
        )
    profile: dict[str, Any] = {
        "name": name,
        "source": f"fitted to {trace.source}, {n} requests",
        "arrivals": arrivals_text(arrivals["gap_cv"]) if arrivals else "poisson",
    }
    if (
        sessions
        and sessions["turns"]["mean"] >= _SESSION_TURNS
        and sessions["requests_in_sessions"] >= _SESSION_SHARE
    ):
        profile |= _session_workload(trace, timed)
    else:
        profile |= {"input_tokens": _table(trace.input_tokens), "output_tokens": _table(trace.output_tokens)}
        if abs(measured["correlation"] or 0.0) >= 0.01:
            profile["correlation"] = _within_reach(measured["correlation"], profile)
        share = (measured["sharing"] or {}).get("cached_share_infinite")
        if share:
            profile["prefixes"] = {"cached_share": round(share, 4), "pool": 8, "zipf": 1.0}
    return profile | {"measured": {key: value for key, value in measured.items() if value not in (None, [])}}


def _within_reach(rho: float, profile: dict[str, Any]) -> float:
    """The rank correlation that the tables can be drawn with; of a few rows it may be as strong as 1."""
    sides = [parse_lengths(profile[side], side) for side in ("input_tokens", "output_tokens")]
    wanted = min(max(rho, -0.999), 0.999)
    while abs(wanted) >= 0.01:
        try:
            fit_copula(sides[0], sides[1], wanted)
            return round(wanted, 4)
        except WorkloadError:
            wanted *= 0.95
    return 0.0


def arrivals_text(gap_cv: float) -> str:
    """The arrival process with gaps of this coefficient of variation, as a workload file writes it."""
    low, high = _POISSON_CV
    if gap_cv < _CONSTANT_CV:
        return "constant"
    return "poisson" if low <= gap_cv <= high else f"gamma:cv={min(gap_cv, 100):.3g}"


def write_profile(path: Path, profile: dict[str, Any]) -> None:
    """Write a profile as YAML. Raises WorkloadError."""
    text = yaml.safe_dump(profile, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)
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


def _session_workload(trace: Trace, timed: bool) -> dict[str, Any]:
    """The keys of a workload of sessions, arrivals being those of sessions; a pause is from one turn's start to the next, so it holds the answer too."""
    order, turns, first, later = turns_of(trace)
    inputs, outputs = trace.input_tokens[order], trace.output_tokens[order]
    said = inputs[later] - inputs[later - 1] - outputs[later - 1]
    gaps_ms = np.rint(np.diff(trace.arrival_s[order])[later - 1] * 1e3).astype(np.int64)
    begun = np.sort(trace.arrival_s[order][first])
    arrivals = fit_arrivals(recorded(begun - begun[0]).arrival_s) if timed else None
    sessions = {"turns": _table(turns)}
    if len(later):
        sessions |= {"user_tokens": _table(said), "think_ms": _table(gaps_ms)}
    return {
        "arrivals": arrivals_text(arrivals["gap_cv"]) if arrivals else "poisson",
        "input_tokens": _table(inputs[first]), "output_tokens": _table(outputs), "sessions": sessions,
    }  # fmt: skip
