"""Sessions: duration, goodput, concurrency, and the figures of each turn.

A session belongs to a stage's cohort when its first request was scheduled in the stage's window;
its later turns count whenever they came. It is *failed* when a request of it failed, *cut* when the
run ended before it did.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ampacity.analysis.contract.stage import Stage
from ampacity.analysis.contract.traffic import Concurrent, SessionFit, Sessions, SessionStage, Turns
from ampacity.analysis.metrics.chunks import read_chunks
from ampacity.analysis.metrics.cohort import Cohort
from ampacity.analysis.metrics.lengths import spread
from ampacity.analysis.metrics.observations import Observations
from ampacity.analysis.metrics.percentiles import percentiles
from ampacity.analysis.metrics.requests import (
    Bools,
    Floats,
    Ints,
    Requests,
    e2e_s,
    ttft_s,
)
from ampacity.analysis.slo import Slo
from ampacity.analysis.stage.analyse import RunRecords
from ampacity.analysis.stage.attainment import observe_slos, requests_meeting
from ampacity.analysis.stage.steady import time_average_in_flight
from ampacity.loadgen.rundir.meta import StageMeta

NO_SESSIONS = "the workload has no sessions"
_TURNS = (0, 1, 2, 3, 5, 10, 20, 50, 2**31)  # first turn of each row of per_turn
_NS = 1e-9


@dataclass(frozen=True)
class _Sessions:
    """The requests of one stage's sessions, and which session (0 .. n - 1) each is of."""

    requests: Requests
    of: Ints
    turn: Ints
    ids: list[str]

    def __len__(self) -> int:
        return len(self.ids)

    def first(self, values: Floats) -> Floats:
        """Return the least value of each session."""
        found = np.full(len(self), np.inf)
        np.minimum.at(found, self.of, values)
        return found

    def last(self, values: Floats) -> Floats:
        """Return the greatest known value of each session."""
        found = np.full(len(self), -np.inf)
        np.maximum.at(found, self.of, np.where(np.isnan(values), -np.inf, values))
        return found

    def total(self, values: Floats) -> Floats:
        """Return the sum of each session, unknown values taken as 0."""
        return np.asarray(
            np.bincount(self.of, np.nan_to_num(values), minlength=len(self)), dtype=np.float64
        )

    def any(self, which: Bools) -> Bools:
        """Return whether a session has such a request."""
        return np.bincount(self.of[which], minlength=len(self)) > 0


def summarise_sessions(
    records: RunRecords,
    metas: Sequence[StageMeta],
    stages: Sequence[Stage],
    slos: Sequence[Slo],
) -> Sessions | None:
    """Return the sessions of a run (docs/sessions.md), or None where no request is of one."""
    ids, turns = (records.table[name] for name in ("session_id", "turn"))
    if ids.null_count == len(ids):
        return None
    found = [
        _of_stage(records, sessions, meta, stage, slos)
        for meta, stage in zip(metas, stages, strict=True)
        if (sessions := _read(records.requests, ids, turns, meta.index)) is not None
    ]
    return Sessions(stages=found, fit=_fit(found, stages, slos)) if found else None


def _read(
    requests: Requests, ids: pa.ChunkedArray, turns: pa.ChunkedArray, stage: int
) -> _Sessions | None:
    rows = requests.take((requests.stage == stage) & (requests.attempt == 0))
    ids = ids.take(rows.row)
    named = np.asarray(pc.is_valid(ids).to_numpy(), dtype=np.bool_)
    if not named.any():
        return None
    rows = rows.take(named)
    names, of = np.unique(
        np.asarray(ids.filter(named).to_pylist(), dtype=object), return_inverse=True
    )
    turn = pc.fill_null(turns.take(rows.row), 0).to_numpy()
    return _Sessions(
        rows, of.astype(np.int64), np.asarray(turn, dtype=np.int64), [str(n) for n in names]
    )


def _of_stage(
    records: RunRecords,
    sessions: _Sessions,
    meta: StageMeta,
    stage: Stage,
    slos: Sequence[Slo],
) -> SessionStage:
    r = sessions.requests
    begin_ns, end_ns = sessions.first(r.scheduled_ns), sessions.last(r.ended_ns)
    zero_s = (meta.start_ns - records.origin_ns) * _NS
    window_s = (zero_s + stage.window.start_s, zero_s + stage.window.end_s)
    chosen = (begin_ns * _NS >= window_s[0]) & (begin_ns * _NS < window_s[1])
    noted = meta.sessions  # a killed run did not note which sessions it cut
    cut = sessions.any(r.has_status("unfinished"))
    cut |= np.isin(sessions.ids, (noted.cut if noted else None) or [])
    failed = sessions.any(r.failed) & ~cut
    complete = ~cut & ~failed
    length_s = window_s[1] - window_s[0]
    whole = chosen & complete
    counts = np.bincount(sessions.of, minlength=len(sessions)).astype(np.float64)
    unended = "the run did not come to its end: sessions still going on count as complete"
    session_s, busy_s = (
        percentiles(_observed(values, failed, cut, chosen))
        for values in ((end_ns - begin_ns) * _NS, _busy_s(sessions))
    )
    return SessionStage(
        index=meta.index,
        sessions=int(chosen.sum()),
        complete=int(whole.sum()),
        failed=int((chosen & failed).sum()),
        cut=int((chosen & cut).sum()),
        cut_reason=unended if noted is None else None,
        arrived_per_s=float(chosen.sum() / length_s) if length_s > 0 else None,
        concurrent=_concurrent(begin_ns * _NS, end_ns * _NS, window_s),
        session_s=session_s,
        busy_s=busy_s,
        requests=spread(counts[whole]),
        input_tokens=spread(sessions.total(r.input_tokens)[whole]),
        output_tokens=spread(sessions.total(r.output_tokens)[whole]),
        largest_prompt_tokens=spread(sessions.last(r.input_tokens)[whole]),
        per_turn=_per_turn(sessions, chosen),
        **_goodput(records, sessions, slos, chosen, complete, length_s),
    )


def _busy_s(sessions: _Sessions) -> Floats:
    """Return how long at least one request of each session was in flight: without its pauses."""
    r = sessions.requests
    order = np.lexsort((r.scheduled_ns, sessions.of))
    of, begin, end = sessions.of[order], r.scheduled_ns[order] * _NS, r.ended_ns[order] * _NS
    end = np.where(np.isnan(end), begin, end)
    shift = of * (2.0 * (end.max() - begin.min()) + 1.0)  # sessions one after the other on one axis
    reached = np.maximum.accumulate(end + shift)
    before = np.concatenate([[-np.inf], reached[:-1]])
    new = np.maximum(end + shift - np.maximum(begin + shift, before), 0.0)
    return np.asarray(np.bincount(of, new, minlength=len(sessions)), dtype=np.float64)


def _observed(values: Floats, failed: Bools, cut: Bools, chosen: Bools) -> Observations:
    """Return the times as observations: a failed session is infinite, a cut one censored."""
    finite = ~failed[chosen] & ~cut[chosen]
    return Observations(
        unit="sessions",
        values=values[chosen][finite],
        owner=np.flatnonzero(finite),
        weights=None,
        infinite=failed[chosen].astype(np.float64),
        censored=np.where(cut[chosen], np.maximum(values[chosen], 0.0), np.nan),
    )


def _concurrent(begin_s: Floats, end_s: Floats, window_s: tuple[float, float]) -> Concurrent:
    """Return the mean and maximum of sessions begun and not over, their pauses included."""
    inside = (end_s > window_s[0]) & (begin_s < window_s[1])
    if not inside.any() or window_s[1] <= window_s[0]:
        return Concurrent(mean=None, max=None)
    begin, end = np.maximum(begin_s[inside], window_s[0]), np.minimum(end_s[inside], window_s[1])
    times = np.concatenate([begin, end])
    change = np.concatenate([np.ones(len(begin)), -np.ones(len(end))])
    at_once = np.cumsum(change[np.lexsort((change, times))])
    mean = time_average_in_flight(window_s[0], window_s[1], begin_s, end_s)
    return Concurrent(mean=mean, max=int(at_once.max()))


def _goodput(
    records: RunRecords,
    sessions: _Sessions,
    slos: Sequence[Slo],
    chosen: Bools,
    complete: Bools,
    length_s: float,
) -> dict[str, Any]:
    """Return the complete sessions per second whose every turn met every SLO."""
    if not slos:
        return {"goodput_per_s": None, "attainment": None, "goodput_per_s_reason": "no SLO given"}
    r = sessions.requests
    last_ns = float(np.nanmax(r.ended_ns, initial=0.0))
    cohort = Cohort(r, read_chunks(records.table, r), 0, last_ns, spoilt=records.spoilt)
    observed = observe_slos(cohort, slos)
    unknown = next((o.reason for _, o in observed if o.reason), None)
    if unknown:
        return {"goodput_per_s": None, "attainment": None, "goodput_per_s_reason": unknown}
    # a user who left misses nothing
    misses = ~requests_meeting(cohort, observed) & ~r.left_out
    met = chosen & complete & ~sessions.any(misses)
    n = int(chosen.sum())
    return {
        "goodput_per_s": float(met.sum() / length_s) if length_s > 0 else None,
        "attainment": float(met.sum() / n) if n else None,
    }


def _per_turn(sessions: _Sessions, chosen: Bools) -> list[Turns]:
    """Return the good answers of the cohort's sessions, by their place in the session."""
    r = sessions.requests
    ttft, e2e = ttft_s(r, from_schedule=True), e2e_s(r, from_schedule=True)
    found = []
    for low, high in pairwise(_TURNS):
        here = chosen[sessions.of] & (sessions.turn >= low) & (sessions.turn < high)
        ok = here & r.has_status("ok")
        if not here.any():
            continue
        found.append(
            Turns(
                turns=(low, min(high - 1, int(sessions.turn[here].max()))),
                requests=int(here.sum()),
                ok=int(ok.sum()),
                input_tokens=spread(r.input_tokens[ok]),
                cached_share=r.take(ok).cached_share(),
                ttft_from_schedule_s=spread(ttft[ok]),
                e2e_from_schedule_s=spread(e2e[ok]),
            )
        )
    return found


def _fit(found: Sequence[SessionStage], stages: Sequence[Stage], slos: Sequence[Slo]) -> SessionFit:
    """Return the most concurrent sessions of any stage that met the SLOs."""
    met = {s.index for s in stages if s.slo_met} if slos else set()
    fitting = [s for s in found if s.index in met and s.concurrent.mean is not None]
    best = max(fitting, key=lambda s: s.concurrent.mean or 0.0, default=None)
    if best is None:
        reason = "no stage met the SLOs" if slos else "no SLO given"
        return SessionFit(concurrent_sessions=None, sessions_per_s=None, stage=None, reason=reason)
    return SessionFit(
        concurrent_sessions=best.concurrent.mean,
        sessions_per_s=best.arrived_per_s,
        stage=best.index,
        reason=None,
    )
