"""Detect odd times in a log: outliers, breaks, implausible units, overlong replays."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.traces import values
from ampacity.workloads.traces.columns import Columns

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
OUT_OF_PROPORTION = 100.0  # a gap this many times the next largest is no part of the traffic
_LEAST_GAP_S = 60.0  # a shorter pause is part of the traffic
_FEW = 20  # maximum number of such gaps: more are a pattern
_STRAY_SHARE = 0.01  # a part with at most this share of the rows is stray
_DAY_S = 86_400.0
LONGEST_REPLAY_S = _DAY_S  # longer replays must be asked for
_SLOW_RPS, _FAST_RPS = 0.02, 1000.0  # rates beyond these raise doubts about a default unit
_LEAST_ROWS = 10
_APART_S, _APART_SHARE = 0.05, 0.1  # two clocks of one program differ by less
_SHORT_S = 0.1  # milliseconds whose longest pause is shorter raise doubts
_SINCE_1970_NS = 10**17  # numbers this large (from 1973 on) imply their unit


@dataclass(frozen=True, eq=False)
class LargeGaps:
    """Disproportionate gaps in s; ``strays`` bool[n]: sorted requests apart from the rest."""

    gaps_s: Floats
    strays: NDArray[np.bool_]
    next_s: float  # the largest of the other gaps


def large_gaps(arrival_s: Floats) -> LargeGaps | None:
    """Return the gaps of sorted times that are ``OUT_OF_PROPORTION`` times any other, and >= 1 min.

    They split the log into parts. Parts with at most 1 % of the requests (or one request) are
    strays; the largest part never is. None where there are no such gaps.
    """
    gaps = np.diff(arrival_s)
    if len(gaps) < 2:
        return None
    order = np.argsort(-gaps, kind="stable")
    top = gaps[order[: _FEW + 1]]
    following = np.maximum(top[1:], 1e-6)
    breaks = np.flatnonzero((top[:-1] > OUT_OF_PROPORTION * following) & (top[:-1] > _LEAST_GAP_S))
    if not len(breaks):
        return None
    several = int(breaks[-1]) + 1
    parts = np.split(np.arange(len(arrival_s)), np.sort(order[:several]) + 1)
    most = max(len(part) for part in parts)
    limit = min(max(1, int(_STRAY_SHARE * len(arrival_s))), most - 1)
    strays = np.zeros(len(arrival_s), dtype=np.bool_)
    for part in parts:
        strays[part] = len(part) <= limit
    return LargeGaps(top[:several], strays, float(top[several]))


@dataclass(frozen=True, eq=False)
class Recorded:
    """Sorted ``arrival_s`` from 0 without ``strays`` requests and without ``breaks_s``."""

    arrival_s: Floats
    strays: int = 0
    breaks_s: tuple[float, ...] = ()

    def note(self, requests: int) -> Iterator[str]:
        """Yield one line on what rates and gaps leave out, if anything."""
        found = []
        if self.strays:
            found.append(
                f"{self.strays} of {requests} requests, which stand apart from all others in time"
            )
        if self.breaks_s:
            lengths = ", ".join(map(length_text, self.breaks_s[:5]))
            found.append(f"{len(self.breaks_s)} breaks of more than a day in the log ({lengths})")
        if found:
            yield (
                f"rates and gaps are without {' and '.join(found)}; "
                f"the lengths are those of all {requests}"
            )


def recorded(arrival_s: Floats) -> Recorded:
    """Return sorted times without strays and without breaks (large gaps of more than a day).

    From a log of a day or more whole days are removed, so that hours of the day are kept.
    """
    found = large_gaps(arrival_s)
    if found is None:
        return Recorded(arrival_s)
    kept = arrival_s[~found.strays]
    kept = kept - kept[0]
    gaps = np.diff(kept)
    is_break = (gaps >= found.gaps_s[-1]) & (gaps > _DAY_S)
    rest_s = float(gaps[~is_break].sum())
    removed = np.floor(gaps / _DAY_S) * _DAY_S if rest_s >= _DAY_S else gaps - found.next_s
    times = np.concatenate([[0.0], np.cumsum(gaps - np.where(is_break, removed, 0.0))])
    return Recorded(times, int(found.strays.sum()), tuple(gaps[is_break].tolist()))


def time_notes(
    name: str, arrival_ns: NDArray[np.int64], columns: Columns, clock: str
) -> Iterator[str]:
    """Yield one line for each oddity of the times int64[n], which are in the notation ``clock``."""
    times_s = np.sort(arrival_ns - arrival_ns.min()) / 1e9
    yield from _gap_note(name, times_s)
    is_small = float(np.quantile(arrival_ns, 0.1)) < _SINCE_1970_NS
    if clock in (values.SECONDS, values.MILLISECONDS) and is_small and not columns.unit_is_explicit:
        yield from _unit_note(name, columns["time"], times_s, is_seconds=clock == values.SECONDS)


def _gap_note(name: str, arrival_s: Floats) -> Iterator[str]:
    found = large_gaps(arrival_s)
    if found is None:
        return
    several = len(found.gaps_s)
    what = "a gap of" if several == 1 else f"{several} gaps, the longest of"
    text = (
        f"{name}: {what} {length_text(found.gaps_s[0])}; "
        f"the next longest is {length_text(found.next_s)}"
    )
    strays = int(found.strays.sum())
    if strays:
        text += (
            f"; {strays} of {len(arrival_s)} rows stand apart behind or before it: "
            "remove them if their times are wrong"
        )
    yield text


def _unit_note(name: str, column: str, arrival_s: Floats, is_seconds: bool) -> Iterator[str]:
    """Yield a line where the unit gives an implausible rate."""
    core = recorded(arrival_s).arrival_s
    if len(core) < _LEAST_ROWS or core[-1] <= 0:
        return
    rps = (len(core) - 1) / float(core[-1])
    if rps > _FAST_RPS and is_seconds:
        remedy = "minutes, hours or days, write them in seconds"
    elif rps < _SLOW_RPS if is_seconds else rps > _FAST_RPS:
        finer = (u for u in ("ms", "us") if rps * 10 ** (9 - values.UNITS[u]) >= _SLOW_RPS / 10)
        meant = next(finer, "ns") if is_seconds else "s"
        remedy = f"{values.UNIT_WORDS[meant]}, give --time-unit {meant}"
    else:
        return
    yield (
        f"{name}: column {column} is read as {values.UNIT_WORDS['s' if is_seconds else 'ms']}, "
        f"which makes {rps:.3g} requests/s over {length_text(core[-1])}: if it holds {remedy}"
    )


def span_notes(
    name: str, columns: Columns, session: Ints, resolution_s: float, held: Mapping[str, Ints]
) -> Iterator[str]:
    """Yield one line for each column of durations that is doubtful: its unit, or by the times.

    ``held``: arrival_ns, end_ns, took_ns and pause_ns of each request, int64[n] with UNKNOWN.
    """
    order = np.lexsort((held["arrival_ns"], session))
    order = order[session[order] >= 0]
    turns = np.flatnonzero(np.diff(session[order]) == 0)
    before, later = order[turns], order[turns + 1]
    gap_ns = held["arrival_ns"][later] - held["arrival_ns"][before]
    took_ns = np.where(held["end_ns"] == values.UNKNOWN, 0, held["end_ns"] - held["arrival_ns"])
    for role, spans_ns, odd in (
        ("duration", held["took_ns"][before], "answers end after the next turn has begun"),
        ("pause", held["pause_ns"][later], "pauses are longer than the time between two turns"),
    ):
        column = columns.name(role).strip()
        unit, named = values.span_unit(column)
        beyond, longest_s = int((spans_ns > gap_ns).sum()), spans_ns.max(initial=0) / 1e9
        in_s = unit == "s" and beyond > 0.5 * len(turns)
        in_ms = unit == "ms" and longest_s > 0
        if not column or named or not (in_s or in_ms):
            continue
        other = "ms" if in_s else "s"
        doubt = f": if it holds {values.UNIT_WORDS[other]}, rename it {column}_{other}"
        why = f", by which {beyond} of {len(turns)} {odd}" if in_s else ""
        yield (
            f"{name}: column {column} is read as {values.UNIT_WORDS[unit]}{why}"
            f"{doubt if in_s or longest_s < _SHORT_S else ''}"
        )
    far, apart_s = _apart(took_ns, held["took_ns"], resolution_s)
    if far.any():
        yield (
            f"{name}: columns {columns['end'].strip()} and {columns['duration'].strip()} are up to "
            f"{length_text(apart_s[far].max())} apart in {far.sum()} rows: the first is taken"
        )
    by_times_ns, told_ns = np.maximum(gap_ns - took_ns[before], 0), held["pause_ns"][later]
    far, _ = _apart(by_times_ns, told_ns, resolution_s)
    if far.any():
        sums = (length_text(float(each[far].sum()) / 1e9) for each in (told_ns, by_times_ns))
        since = "answers" if (took_ns[before][far] > 0).all() else "starts"
        yield (
            f"{name}: column {columns['pause'].strip()} is not what {columns.name('time').strip()} "
            f"says in {far.sum()} later turns: the pauses are played ({next(sums)} in all), not the "
            f"times ({next(sums)} in all behind the {since} of the turns before)"
        )


def _apart(by_times_ns: Ints, told_ns: Ints, resolution_s: float) -> tuple[Bools, Floats]:
    """Return (whether the times and a column of lengths contradict each other, by how many s)."""
    known = told_ns != values.UNKNOWN
    longer_s = np.where(known, np.maximum(by_times_ns, told_ns), 0) / 1e9
    apart_s = np.where(known, np.abs(by_times_ns - told_ns), 0) / 1e9
    return apart_s > resolution_s + _APART_S + _APART_SHARE * longer_s, apart_s


def check_replay_length(
    source: str, lasts_s: float, end_s: float, chosen: bool, longest_pause_s: float = 0.0
) -> None:
    """Raise WorkloadError for a replay of more than a day, unless its end is ``chosen``.

    ``end_s``: last arrival in the trace's own time, as for --trace-to; ``longest_pause_s``: within
    its sessions.
    """
    if lasts_s <= LONGEST_REPLAY_S or chosen:
        return
    start = f"{source}: the replay would last {lasts_s:,.0f} s ({length_text(lasts_s)})"
    if longest_pause_s > _LEAST_GAP_S:
        raise WorkloadError(
            f"{start}, with pauses of up to {length_text(longest_pause_s)} within sessions: "
            "cut them (--max-think 60s), scale them (--think-scale 0.1), "
            "or play the trace faster (--time-scale 100)"
        )
    hours = int(end_s // 3600) + 1
    meant = f"; if it is meant, give --trace-to {hours}h" if hours <= 720 else ""
    raise WorkloadError(
        f"{start}: cut it (--trace-from, --trace-to), play it faster (--time-scale 100), "
        f"or name the unit of its times (--time-unit){meant}"
    )


def length_text(seconds: float) -> str:
    """Return a duration in the largest unit with at least two: ``20 days``, ``3.2 h``, ``45 s``."""
    units = (("years", 365.25 * _DAY_S), ("days", _DAY_S), ("h", 3600.0), ("min", 60.0))
    for unit, in_s in units:
        if seconds >= 2 * in_s:
            return f"{seconds / in_s:.3g} {unit}"
    return f"{seconds:.3g} s"
