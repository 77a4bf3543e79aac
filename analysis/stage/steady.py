"""Choose the part of a stage that counts; judge if the stage has a steady state at all.

Everything here is in seconds after some common zero, per stage, in scheduled order.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ampacity.analysis.metrics.requests import Bools, Floats

MIN_REQUESTS_FOR_MSER = 50
_BATCH = 5
_SAME = 1e-6  # a series that varies by less, in relation to its size, is constant
_UNSETTLED_GAIN = 0.6
GROWTH_Z = 2.5  # arrivals minus completions, in standard deviations of a Poisson difference
WEAK_GROWTH_Z = 1.75  # enough where end-to-end times rise by CLEAR_RISE and few requests arrived
FEW_ARRIVALS = 150
CLEAR_RISE = 1.5
STARTUP_REQUEST_TIMES = 3.0  # an idle endpoint fills within a few times as long as a request takes
FIRST_REQUESTS = 20  # whose times say how long that is
APPROACH_PARTS = 5
LATENCY_RISE = 1.2  # end-to-end times must have risen by this factor as well
LATENCY_RISE_SHORT = 2.0  # the same, where the stage is short against its requests
FEW_COMPLETIONS = 50  # below so many in half of a short stage their rate is not known
RISING_PAIRS = 0.75  # of an early and a later request the later one must take longer so often


@dataclass(frozen=True)
class Window:
    """The part of a stage that counts: requests scheduled in [start_s, end_s)."""

    start_s: float
    end_s: float
    warmup_requests: int
    method: str  # mser5 | fixed | none
    reason: str | None
    settled: bool
    # of the start-up that the data showed; none of a ramp, nor of a warm-up that was asked for
    cut_s: float = 0.0

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s

    def holds(self, at_s: Floats) -> Bools:
        """Return which times lie in the window."""
        return np.asarray((at_s >= self.start_s) & (at_s < self.end_s), dtype=np.bool_)


@dataclass(frozen=True)
class Stability:
    """``stable`` is None where the stage is too short to tell; growth in requests per second."""

    stable: bool | None
    reason: str | None
    growth_rps: float | None = None


def mser5(series: Floats) -> tuple[int, bool]:
    """Return (observations to cut at the start, whether the series settled) (White 1997, MSER-5).

    d* minimises sum_{j>d} (z_j - mean)^2 / (m-d)^2 over the means z_j of batches of five, 0 <= d <=
    m/2; 5 d* are cut. A minimum at m/2 that is well below the value at 0 (a linear trend halves it)
    means that the series had not settled.
    """
    m = len(series) // _BATCH
    if m < 4:
        return 0, True
    z = series[: m * _BATCH].reshape(m, _BATCH).mean(axis=1)
    if float(np.ptp(z)) <= _SAME * max(1.0, float(np.abs(z).max())):
        return 0, True
    z = z - z.mean()
    left = np.arange(m, 0, -1.0)  # batches kept after cutting d = 0, 1, ...
    sums, squares = np.cumsum(z[::-1])[::-1], np.cumsum(z[::-1] ** 2)[::-1]
    statistic = np.maximum(squares - sums**2 / left, 0.0) / left**2
    half = m // 2
    best = int(np.argmin(statistic[: half + 1]))
    if best < half:
        return best * _BATCH, True
    if statistic[half] < _UNSETTLED_GAIN * statistic[0]:
        return half * _BATCH, False
    return int(np.argmin(statistic[: half // 2 + 1])) * _BATCH, True  # chance put the minimum there


def in_flight_at(times_s: Floats, begin_s: Floats, end_s: Floats) -> Floats:
    """Return requests in [begin, end) at each time.

    NaN in begin means never, in end means still.
    """
    begun = ~np.isnan(begin_s)
    ends = np.sort(np.where(np.isnan(end_s[begun]), np.inf, end_s[begun]))
    begins = np.sort(begin_s[begun])
    return (
        np.searchsorted(begins, times_s, side="right")
        - np.searchsorted(ends, times_s, side="right")
    ).astype(np.float64)


def time_average_in_flight(
    start_s: float, end_s: float, begin_s: Floats, finish_s: Floats
) -> float:
    """Return the time average over [start, end] of the number of requests in [begin, finish]."""
    begin, finish = np.clip(begin_s, start_s, end_s), np.clip(finish_s, start_s, end_s)
    overlap = finish - begin
    return float(np.nansum(overlap)) / (end_s - start_s) if end_s > start_s else 0.0


def find_window(
    start_s: float,
    end_s: float,
    scheduled_s: Floats,
    ended_s: Floats,
    ttft_s: Floats,
    warmup_requests: int | None,
    ramp_s: float = 0.0,
) -> Window:
    """Cut the warm-up of a stage [start, end).

    Its ramp, then the first ``warmup_requests``, or what the data say. Turns of sessions that are
    due after its end are no part of it. From the data: the later of MSER-5 on the in-flight count
    that each request finds and MSER-5 on log TTFT from schedule. MSER-5 cuts whatever differs from
    the rest, a jam as well, so a cut must be a start-up: at most ``STARTUP_REQUEST_TIMES`` request
    times long, or a monotone approach to the level of the rest. Whoever judges an SLO does so with
    and without the cut.
    """
    ramped = int(np.searchsorted(scheduled_s, start_s + ramp_s)) if ramp_s > 0 else 0
    due = int(np.searchsorted(scheduled_s, end_s))
    rest_s = scheduled_s[ramped:due]
    settled = True
    if warmup_requests is None and len(rest_s) >= MIN_REQUESTS_FOR_MSER:
        method, reason = "mser5", None
        in_flight = in_flight_at(rest_s, scheduled_s, ended_s)
        bound = _startup_requests(rest_s, ended_s[ramped:due])
        cut, settled = _start_up(in_flight, ttft_s[ramped:due], bound)
        if not settled:
            reason = "never settled: the in-flight count or TTFT was still changing half-way"
    else:
        cut, method, reason = _asked(len(rest_s), warmup_requests)
    begin_s = float(rest_s[cut]) if cut else start_s + ramp_s
    cut_s = begin_s - start_s - ramp_s if method == "mser5" else 0.0
    return Window(min(begin_s, end_s), end_s, ramped + cut, method, reason, settled, cut_s)


def _startup_requests(scheduled_s: Floats, ended_s: Floats) -> int:
    """Return how many requests fall due while an idle endpoint fills.

    In ``STARTUP_REQUEST_TIMES`` of its first requests' times.
    """
    lasted_s = (ended_s - scheduled_s)[:FIRST_REQUESTS]
    if not np.isfinite(lasted_s).any():
        return 0
    filled_s = scheduled_s[0] + STARTUP_REQUEST_TIMES * float(np.nanmedian(lasted_s))
    return int(np.searchsorted(scheduled_s, filled_s))


def _start_up(in_flight: Floats, ttft_s: Floats, bound: int) -> tuple[int, bool]:
    """Return how many requests at the start are a start-up, at most half of them, and whether the
    series settled.
    """
    valued = np.flatnonzero(np.nan_to_num(ttft_s, posinf=0.0) > 0)
    cut, all_settled = 0, True
    for which, series in ((np.arange(len(in_flight)), in_flight), (valued, np.log(ttft_s[valued]))):
        found, settled = mser5(series)
        all_settled &= settled
        if not found:
            continue
        at = int(which[min(found, len(which) - 1)])
        start_up = settled and _approaches(series, found)
        cut = max(cut, at if start_up else min(at, bound))
    return min(cut, len(in_flight) // 2), all_settled


def _approaches(series: Floats, cut: int) -> bool:
    """Return whether the first ``cut`` values approach the level of the rest from one side, without
    turning back.

    The cut and the rest are taken in parts of a fifth of the cut. The first parts must lie beyond
    all parts of the rest, on one side and ever nearer; those after them within the rest's range.
    """
    size = cut // APPROACH_PARTS
    if size < _BATCH or len(series) - cut < 2 * size:
        return False
    parts = series[: size * APPROACH_PARTS].reshape(APPROACH_PARTS, size).mean(axis=1)
    rest = series[cut : cut + (len(series) - cut) // size * size].reshape(-1, size).mean(axis=1)
    if parts[0] < rest.min():
        parts, rest = -parts, -rest
    beyond = parts > rest.max()
    n = int(np.argmin(beyond)) if not beyond.all() else APPROACH_PARTS
    within = not beyond[n:].any() and bool(np.all(parts[n:] >= rest.min()))
    return n > 0 and within and bool(np.all(np.diff(parts[:n]) < 0))


def _asked(n: int, warmup_requests: int | None) -> tuple[int, str, str | None]:
    """Return (requests to cut, method, reason) where the warm-up is not found from the data."""
    if warmup_requests is None:
        return (
            0,
            "none",
            f"{n} requests are too few to find a warm-up (needs {MIN_REQUESTS_FOR_MSER})",
        )
    cut = min(warmup_requests, n // 2)
    short = f"only {cut} of the asked {warmup_requests} requests cut: the stage has {n}"
    return cut, "fixed", short if cut < warmup_requests else None


def judge_stability(
    start_s: float, end_s: float, scheduled_s: Floats, ended_s: Floats, e2e_s: Floats
) -> Stability:
    """Judge whether the number of requests in an open stage [start, end) keeps growing.

    A stage that starts empty fills for about one request's length; growth counts from when nine of
    ten of its first requests have ended, half-way at the latest. Unstable: from there on arrivals
    exceed completions by ``GROWTH_Z`` sqrt(arrivals + completions) (less where few arrive and end-
    to-end times rise clearly), the in-flight count rises by regression, and end-to-end times
    (censored ones at their age) have risen: in a stage hardly longer than its requests twofold, or
    in the order of arrival while completions stand still. ``e2e_s`` is from schedule, NaN or inf
    for failed requests.
    """
    n = len(scheduled_s)
    if n < 20 or end_s <= start_s:
        return Stability(None, f"{n} requests are too few to tell (needs 20)")
    valued = np.isfinite(e2e_s)
    first = e2e_s[valued][: max(5, n // 10)]
    fills_s = np.quantile(first, (0.5, 0.9)) if len(first) else np.zeros(2)
    half_filled, filled = (start_s + fills_s).tolist()
    short = filled > (start_s + end_s) / 2
    begin = min(filled, (start_s + end_s) / 2)
    arrivals = int(np.count_nonzero((scheduled_s >= begin) & (scheduled_s < end_s)))
    completions = int(np.count_nonzero((ended_s >= begin) & (ended_s < end_s)))
    growth = arrivals - completions
    growth_rps = growth / (end_s - begin)
    z = growth / np.sqrt(max(arrivals + completions, 1))
    needed = WEAK_GROWTH_Z if arrivals < FEW_ARRIVALS else GROWTH_Z
    if z < needed or _slope_z(begin, end_s, scheduled_s, ended_s) < 2:
        return Stability(True, None, growth_rps)
    rise = _latency_rise(scheduled_s, ended_s, e2e_s, valued, begin)
    if (z < GROWTH_Z and rise < CLEAR_RISE) or (not short and rise < LATENCY_RISE):
        return Stability(True, None, growth_rps)
    still = _stands_still(min(half_filled, begin), end_s, scheduled_s, ended_s)
    if (
        short
        and rise < LATENCY_RISE_SHORT
        and not (still and _rises(e2e_s[valued], ended_s[valued]))
    ):
        return Stability(
            None,
            f"requests lasted about {filled - start_s:.3g} s, too long for a stage of "
            f"{end_s - start_s:.3g} s: filling up and overload look the same",
            growth_rps,
        )
    reason = (
        f"the queue kept growing by {growth_rps:.3g} requests/s: {arrivals} arrived and "
        f"{completions} ended in the last {end_s - begin:.3g} s"
    )
    return Stability(False, reason, growth_rps)


def _stands_still(begin_s: float, end_s: float, scheduled_s: Floats, ended_s: Floats) -> bool:
    """Return whether completions are too slow to reach the arrivals.

    Not even within as long again as half of the span, if they go on as from the first half to the
    second, two standard errors on top. Where a server fills up they rise.
    """
    middle = (begin_s + end_s) / 2
    first = int(np.count_nonzero((ended_s >= begin_s) & (ended_s < middle)))
    second = int(np.count_nonzero((ended_s >= middle) & (ended_s < end_s)))
    lacking = int(np.count_nonzero((scheduled_s >= middle) & (scheduled_s < end_s))) - second
    return (
        first >= FEW_COMPLETIONS and second - first + 2 * float(np.sqrt(first + second)) < lacking
    )


def _rises(e2e_s: Floats, ended_s: Floats) -> bool:
    """Return whether E2E times rise in the order of arrival (Gehan 1965), censored at age."""
    early, late = np.split(np.arange(len(e2e_s)), [max(10, len(e2e_s) // 5)])
    up, down = (
        (
            len(these)
            - np.searchsorted(
                np.sort(e2e_s[these]), e2e_s[than][~np.isnan(ended_s[than])], side="right"
            )
        ).sum()
        for these, than in ((late, early), (early, late))
    )
    return bool(up > RISING_PAIRS * (up + down))


def _slope_z(begin_s: float, end_s: float, scheduled_s: Floats, ended_s: Floats) -> float:
    """Return the slope of the in-flight count over ten spans of time, in standard errors."""
    edges = np.linspace(begin_s, end_s, 11)
    centres = (edges[1:] + edges[:-1]) / 2
    level = np.array(
        [
            time_average_in_flight(a, b, scheduled_s, np.where(np.isnan(ended_s), np.inf, ended_s))
            for a, b in pairwise(edges)
        ]
    )
    x = centres - centres.mean()
    slope = float(x @ level / (x @ x))
    residuals = level - level.mean() - slope * x
    error = float(np.sqrt(residuals @ residuals / (len(x) - 2) / (x @ x)))
    return slope / error if error > 0 else float(np.inf if slope > 0 else 0.0)


def _latency_rise(
    scheduled_s: Floats, ended_s: Floats, e2e_s: Floats, valued: Bools, begin_s: float
) -> float:
    """Return the median end-to-end time of the last third of the span over that of the stage's
    first requests.

    Where the stage was cut off (Ctrl-C) the last requests have hardly any age, and say nothing, nor
    do the quick ones among their neighbours: counted are those that were due long enough ago to
    show a rise.
    """
    values, due, n = e2e_s[valued], scheduled_s[valued], int(np.count_nonzero(valued))
    if n < 20:
        return float("inf")  # hardly anything ended: the growth speaks for itself
    low = float(np.median(values[: max(10, n // 5)]))
    open_ = np.isnan(ended_s[valued])
    now_s = float((due + values)[open_].max()) if open_.any() else float("inf")
    old = due <= now_s - CLEAR_RISE * low
    values = values[old]
    if len(values) < 10 or low <= 0:
        return float("inf") if low <= 0 else 1.0
    late = values[-max(5, int(np.count_nonzero(due[old] >= begin_s)) // 3) :]
    return float(np.median(late)) / low
