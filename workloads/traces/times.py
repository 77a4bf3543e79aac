"""What the times of a log give away: rows far from all others, a unit that is most likely another, a length beyond reason."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.traces.fields import Columns

Floats = NDArray[np.float64]
OUT_OF_PROPORTION = 100.0  # times the next largest gap, from which on a gap is none of the traffic
_LEAST_GAP_S = 60.0  # a pause that is shorter belongs to the traffic
_FEW = 20  # gaps at most that are called out of proportion: more are a pattern
_STRAY_SHARE = 0.01  # of the rows: fewer than these, behind such a gap, are strays
_DAY_S = 86_400.0
LONGEST_REPLAY_S = _DAY_S  # that is played without being asked for by name
_SLOW_RPS, _FAST_RPS = 0.02, 1000.0  # beyond these a unit that nobody named is doubted
_LEAST_ROWS = 10
_SINCE_1970_NS = 10**17  # from 1973 on: numbers that large tell their unit


@dataclass(frozen=True, eq=False)
class LargeGaps:
    """Gaps out of all proportion: their lengths in s, and which of the sorted requests are ``strays`` (bool[n])."""

    gaps_s: Floats
    strays: NDArray[np.bool_]
    next_s: float  # the largest of the other gaps


def large_gaps(arrival_s: Floats) -> LargeGaps | None:
    """The gaps of sorted times that are ``OUT_OF_PROPORTION`` times as long as any other, a minute or more; else None.

    They part the log; parts with at most a hundredth of the requests (or with one) are strays, the largest part never is.
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
    """The time that a log covers: sorted ``arrival_s`` from 0 without ``strays`` requests and without ``breaks_s``."""

    arrival_s: Floats
    strays: int = 0
    breaks_s: tuple[float, ...] = ()

    def note(self, requests: int) -> Iterator[str]:
        """What is left out of rates and gaps, in one line."""
        found = []
        if self.strays:
            found.append(
                f"{self.strays} of {requests} requests, which stand apart from all others in time"
            )
        if self.breaks_s:
            lengths = ", ".join(map(length_text, self.breaks_s[:5]))
            found.append(f"{len(self.breaks_s)} breaks of more than a day in the log ({lengths})")
        if found:
            yield f"rates and gaps are without {' and '.join(found)}; the lengths are those of all {requests}"


def recorded(arrival_s: Floats) -> Recorded:
    """What is left of sorted times without strays and without breaks: large gaps of more than a day.

    Of a log of a day or more whole days are taken out, so that the hours of its days stay.
    """
    found = large_gaps(arrival_s)
    if found is None:
        return Recorded(arrival_s)
    kept = arrival_s[~found.strays]
    kept = kept - kept[0]
    gaps = np.diff(kept)
    broken = (gaps >= found.gaps_s[-1]) & (gaps > _DAY_S)
    rest_s = float(gaps[~broken].sum())
    out = np.where(
        broken, np.floor(gaps / _DAY_S) * _DAY_S if rest_s >= _DAY_S else gaps - found.next_s, 0.0
    )
    times = np.concatenate([[0.0], np.cumsum(gaps - out)])
    return Recorded(times, int(found.strays.sum()), tuple(gaps[broken].tolist()))


def time_notes(
    name: str, arrival_ns: NDArray[np.int64], columns: Columns, clock: str
) -> Iterator[str]:
    """What is odd about the times (int64[n], as they are written by ``clock``) of the file ``name``, one line each."""
    times_s = np.sort(arrival_ns - arrival_ns.min()) / 1e9
    yield from _gap_note(name, times_s)
    unit = {"a number of seconds": "s", "a number of milliseconds": "ms"}.get(clock)
    if unit and not columns.unit_told and int(arrival_ns.max()) < _SINCE_1970_NS:
        yield from _unit_note(name, columns["time"], times_s, unit)


def _gap_note(name: str, arrival_s: Floats) -> Iterator[str]:
    """One line where sorted times have gaps out of all proportion."""
    found = large_gaps(arrival_s)
    if found is None:
        return
    several = len(found.gaps_s)
    what = "a gap of" if several == 1 else f"{several} gaps, the longest of"
    said = f"{name}: {what} {length_text(found.gaps_s[0])}; the next longest is {length_text(found.next_s)}"
    strays = int(found.strays.sum())
    if strays:
        said += f"; {strays} of {len(arrival_s)} rows stand apart behind or before it: remove them if their times are wrong"
    yield said


def _unit_note(name: str, column: str, arrival_s: Floats, unit: str) -> Iterator[str]:
    """One line where sorted times, read in ``unit``, make an implausible rate."""
    core = recorded(arrival_s).arrival_s
    if len(core) < _LEAST_ROWS or core[-1] <= 0:
        return
    rps = (len(core) - 1) / float(core[-1])
    other = {"s": "ms", "ms": "s"}.get(unit)
    if other is None or not (rps < _SLOW_RPS if unit == "s" else rps > _FAST_RPS):
        return
    words = {"s": "seconds", "ms": "milliseconds"}
    yield (
        f"{name}: column {column} is read as {words[unit]}, which makes {rps:.3g} requests/s over {length_text(core[-1])}: "
        f"if it holds {words[other]}, give --time-unit {other}"
    )


def check_replay_length(
    source: str, lasts_s: float, end_s: float, chosen: bool, longest_pause_s: float = 0.0
) -> None:
    """Raise WorkloadError where a replay would last ``lasts_s``, more than a day, unless its end is ``chosen``.

    ``end_s``: the last arrival in the trace's own time, which --trace-to counts in; ``longest_pause_s`` of its
    sessions.
    """
    if lasts_s <= LONGEST_REPLAY_S or chosen:
        return
    if longest_pause_s > _LEAST_GAP_S:
        raise WorkloadError(
            f"{source}: the replay would last {lasts_s:,.0f} s ({length_text(lasts_s)}), with pauses of up to "
            f"{length_text(longest_pause_s)} within sessions: cut them (--max-think 60s), scale them (--think-scale 0.1), "
            "or play the trace faster (--time-scale 100)"
        )
    hours = int(end_s // 3600) + 1
    meant = f"; if it is meant, give --trace-to {hours}h" if hours <= 720 else ""
    raise WorkloadError(
        f"{source}: the replay would last {lasts_s:,.0f} s ({length_text(lasts_s)}): cut it (--trace-from, --trace-to), play it "
        f"faster (--time-scale 100), or name the unit of its times (--time-unit){meant}"
    )


def length_text(seconds: float) -> str:
    """A length in the largest unit of which there are two: ``54 years``, ``20 days``, ``3.2 h``, ``45 s``."""
    for unit, in_s in (
        ("years", 365.25 * 86_400),
        ("days", 86_400.0),
        ("h", 3600.0),
        ("min", 60.0),
    ):
        if seconds >= 2 * in_s:
            return f"{seconds / in_s:.3g} {unit}"
    return f"{seconds:.3g} s"
