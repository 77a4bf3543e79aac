"""The client's own lateness in the times of a stage, and which figures it may have moved.

The event loop notes when it was held up (``audit.stalls`` of run.json). Chunks that came meanwhile
were read at the end of the stall: with kernel timestamps, tokens of one stream that waited together
have the time of the last; without them each has the time of its read. Requests may also leave late.
Each figure is computed a second time with all of that as early, and as evenly, as it may have been.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ampacity.analysis.metrics.chunks import Chunks
from ampacity.analysis.metrics.cohort import Cohort
from ampacity.analysis.metrics.observations import Observations
from ampacity.analysis.metrics.percentiles import LEVELS, Figure, figure
from ampacity.analysis.metrics.requests import Floats, Requests
from ampacity.analysis.slo import EXTREMES, Slo
from ampacity.analysis.stage.attainment import judge_slo, observe_slos
from ampacity.analysis.stats.intervals import smallest_n
from ampacity.durations import exact_text
from ampacity.loadgen.rundir.meta import ClientAudit

BEAT_NS = 20e6  # the loop looks at its clock so often: it may have been held up since it last did
READING_NS = 5e6  # what waited is read within so long after that
LATE_NS = 2e6  # a request that leaves later than this after its time is late
SHARE_MIN = 1e-3  # of the requests or chunks: fewer move no p99
MOVED, MOVED_S = 0.1, 0.002  # a figure has moved: by this share of it, and by so many seconds
OF_LIMIT = 0.02  # of an SLO's limit
DECISIVE = ("p50", "p90", "p95", "p99")  # that make a stage no finding where they moved
GAPS = ("itl_s", "icl_s")
_APART_NS = 1e15  # between the clocks of two workers, so that all are searched at once


def without_client(cohort: Cohort, audit: ClientAudit | None, origin_ns: int) -> Cohort | None:
    """Return the cohort without the client's own lateness; None where that is negligible.

    ``audit.stalls``: (worker, when the loop should have looked at its clock, when it did),
    monotonic ns.
    """
    requests, chunks, n = cohort.requests, cohort.chunks, len(cohort.requests)
    late = requests.dispatched_ns - requests.scheduled_ns > LATE_NS
    if np.count_nonzero(late) > SHARE_MIN * n:
        requests = requests.changed(
            scheduled_ns=np.where(late, requests.dispatched_ns, requests.scheduled_ns)
        )
    if audit is not None and audit.stalls:
        by_kernel = bool(audit.dated_by_kernel)
        early = _without_stalls(requests, chunks, audit.stalls, by_kernel, origin_ns)
        first_ns, moved = np.zeros(n), 0
        for where, part in early.parts():
            was_us, has = chunks.between(where.start, where.stop).at_us, part.count > 0
            starts = part.starts[:-1][has]
            first_ns[where][has] = 1e3 * (was_us[starts] - part.at_us[starts].astype(np.float64))
            moved += int(np.count_nonzero(part.at_us != was_us))
        if np.count_nonzero(first_ns) > SHARE_MIN * n:
            of_first = requests.first_answer_ns == requests.first_token_ns
            requests = requests.changed(
                first_token_ns=requests.first_token_ns - first_ns,
                first_answer_ns=requests.first_answer_ns - np.where(of_first, first_ns, 0.0),
            )
        if moved > SHARE_MIN * chunks.count.sum():
            chunks = early
    if requests is cohort.requests and chunks is cohort.chunks:
        return None
    return replace(cohort, requests=requests, chunks=chunks)


def _without_stalls(
    requests: Requests, chunks: Chunks, stalls: Any, by_kernel: bool, origin_ns: int
) -> Chunks:
    """Return the chunks without the stalls of the client's event loop."""
    held = np.asarray(stalls, dtype=np.float64)
    held[:, 1:] += held[:, :1] * _APART_NS - origin_ns
    held = held[np.argsort(held[:, 1])]
    began_ns = requests.started_ns + requests.worker * _APART_NS

    def read(low: int, high: int) -> Any:
        part, began = chunks.between(low, high), began_ns[low:high]
        return _earlier_us(part, began, held[:, 1], held[:, 2], by_kernel=by_kernel), part.tokens

    return replace(chunks, read=read)


def _earlier_us(
    chunks: Chunks, began_ns: Floats, due_ns: Floats, looked_ns: Floats, *, by_kernel: bool
) -> npt.NDArray[np.uint32]:
    """Return ``chunks.at_us`` with late chunks spread evenly after the chunk before them.

    None moves to before the stall. With kernel timestamps only chunks are in doubt that share
    theirs with a later one of their stream, whose own is right; without them all that were read in
    or just after a stall, but the last of each stream.
    """
    if not len(chunks.at_us):
        return chunks.at_us
    has, owner = chunks.count > 0, chunks.owner
    first, last = np.zeros((2, len(owner)), dtype=np.bool_)
    first[chunks.starts[:-1][has]], last[chunks.starts[1:][has] - 1] = True, True
    at = began_ns[owner] + chunks.at_us * 1e3
    k = np.minimum(np.searchsorted(looked_ns + READING_NS, at), len(due_ns) - 1)
    since = due_ns[k] - (BEAT_NS if by_kernel else 0.0)
    late = (since <= at) & (at <= looked_ns[k] + READING_NS)
    if by_kernel:
        late[:-1] &= (chunks.at_us[1:] == chunks.at_us[:-1]) & ~last[:-1]
        late[-1] = False
    if not late.any():
        return chunks.at_us
    earliest = np.minimum(np.maximum(since, began_ns[owner]), at)
    known = np.flatnonzero(~late | first | last)
    spread = np.interp(np.arange(len(at)), known, np.where(late & first, earliest, at)[known])
    new = np.where(late, np.clip(spread, earliest, at), at)
    return np.rint((new - began_ns[owner]) / 1e3).astype(np.uint32)


@dataclass(frozen=True)
class Moved:
    """Figures that the client's lateness may have moved."""

    metrics: dict[str, str]  # metric -> how its figures or verdict may be due to the client
    # name of percentiles in a stage -> percentile -> between what it lies
    figures: dict[str, dict[str, str]]
    limited: list[str]  # reasons of ``metrics`` by which the stage is no finding


def what_moved(cohort: Cohort, other: Cohort, slos: Sequence[Slo]) -> Moved:
    """Return the differences between ``cohort`` and ``other`` (from ``without_client``).

    The stage is no finding where a verdict differs or a figure moved by ``OF_LIMIT`` of an SLO on
    it; without an SLO where any figure did.
    """
    metrics: dict[str, str] = {}
    figures: dict[str, dict[str, str]] = {}
    limited: dict[str, str] = {}
    limits_s: dict[str, float] = {}
    for slo in slos:
        limits_s[slo.metric] = min(slo.limit_s, limits_s.get(slo.metric, slo.limit_s))
    for name, o in cohort.observed.items():
        if name in GAPS and other.chunks is cohort.chunks:
            continue
        metric = name.removesuffix("_s").removesuffix("_from_schedule")
        limit_s = limits_s.get(metric, math.inf if slos else 0.0)
        for level, quantile in LEVELS.items():
            ends = moved_between(o, other.observed[name], quantile)
            if ends is None:
                continue
            low, value = ends
            between = _between(ends)
            figures.setdefault(name, {})[level] = _late(ends)
            if level not in DECISIVE:
                continue
            metrics[metric] = (
                f"{level} of {metric} lies between {between}, by what the client itself may have "
                "added"
            )
            if abs(low - value) > OF_LIMIT * limit_s:
                limited[metric] = metrics[metric]
    pairs = zip(observe_slos(cohort, slos), observe_slos(other, slos), strict=True)
    for (slo, o), (_, new) in pairs:
        verdict, without = judge_slo(o, slo).verdict, judge_slo(new, slo).verdict
        # lateness can only have made it look worse
        if verdict != without and (without == "met" or verdict == "violated"):
            why = f"what the client itself may have added decides {slo.text}"
            limited[slo.metric] = metrics.setdefault(slo.metric, why)
    return Moved(metrics, figures, list(limited.values()))


def figure_without_client(o: Observations, new: Observations | None, quantile: float) -> Figure:
    """Return a percentile, null where the client's lateness may have moved it.

    ``new``: the same metric of the cohort of ``without_client``.
    """
    found = figure(o, quantile)
    ends = None if new is None else moved_between(o, new, quantile)
    if ends is None:
        return found
    return replace(found, value=None, reason=_late(ends), ci=None, ci_reason=_late(ends))


def moved_between(
    o: Observations, new: Observations, quantile: float
) -> tuple[float, float] | None:
    """Return (a percentile, its value in ``new``) where it moved, else None."""
    if quantile in EXTREMES or o.n < smallest_n(quantile):
        return None
    (low, high), (value, _) = o.quantile_bounds(quantile), new.quantile_bounds(quantile)
    if low == high and np.isfinite(low) and abs(low - value) > max(MOVED * low, MOVED_S):
        return low, value
    return None


def _between(ends: tuple[float, float]) -> str:
    return " and ".join(exact_text(float(f"{x:.3g}")) for x in sorted(ends))


def _late(ends: tuple[float, float]) -> str:
    return f"between {_between(ends)}: the client was late"
