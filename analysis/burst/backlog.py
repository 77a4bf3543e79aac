"""The queue that a burst left: its size, the rate at which it was served, when it drains."""

import math

import numpy as np
from msgspec.structs import replace
from scipy.special import stdtrit

from ampacity.analysis.burst.timeline import PARTS, UNSEEN, Phases, Timeline, elapsed_s, waiting_at
from ampacity.analysis.contract.burst import Backlog, Phase
from ampacity.analysis.contract.part import with_nulls
from ampacity.analysis.metrics.requests import Floats
from ampacity.analysis.stage.steady import time_average_in_flight

SERVED_ALL = 0.95  # of the burst's rate: served this fast, requests are delayed, not queued


def find_backlog(t: Timeline, phases: Phases, base_rps: float) -> Backlog:
    """Return the requests without a first token, and how fast they were served.

    A queue is more than the burst's rate explains at the base's wait (Little: rate x wait) all
    through the second half of the burst, and beyond chance at its end. Without one the server was
    not full, and its rate is not known. It has drained once no more wait than in the base's mean.
    ``piled_up``: the most in flight, where an engine begins more answers than it ends.
    """
    middle_s, left = (t.burst_s + t.over_s) / 2, np.sort(t.answered)
    waiting = waiting_at(t.at, left, np.linspace(middle_s, t.over_s, 21))
    base = time_average_in_flight(t.settled_s, t.burst_s, t.at, t.answered)
    result = with_nulls(Backlog, base_waiting=base or None)
    if t.end_s <= t.over_s:
        return replace(result, reason=UNSEEN)
    leaves = left[(left > t.over_s) & (left < t.end_s)]
    emptied = leaves[waiting_at(t.at, left, leaves) <= base]
    queue = max(0.0, float(waiting[-1]) - base)
    drained = bool(waiting[-1] <= base or len(emptied))
    result = replace(result, at_end_of_burst=queue, drained=drained)
    burst_rps = phases[1].offered_rps or 0.0
    explained = base * max(1.0, burst_rps / (phases[0].offered_rps or math.inf))
    if waiting[-1] <= explained + 3 * math.sqrt(max(1.0, explained)) or waiting.min() <= explained:
        return _piled_up(t, phases, result)
    until_s = float(emptied[0]) if len(emptied) else t.end_s  # while there is a queue
    ended = (t.finish >= middle_s) & (t.finish < until_s)
    served_rps = int(np.count_nonzero(ended & t.ok)) / (until_s - middle_s)
    if served_rps >= SERVED_ALL * burst_rps:
        why = "requests waited, but were served as fast as they came: a delay, no queue"
        return replace(result, reason=why)
    lasted_s = elapsed_s(t.over_s, until_s)
    rest = max(0.0, float(waiting_at(t.at, left, np.array([until_s]))[0]) - base)
    result = replace(
        result,
        served_rps=served_rps,
        unanswered=int(np.count_nonzero(ended & ~t.ok)),
        at_end=rest,
        fall_rps=(queue - rest) / lasted_s,
    )
    if len(emptied):
        return replace(result, drained_s=lasted_s)
    return _outlook(t, left, phases[2], base_rps, result)


def _piled_up(t: Timeline, phases: Phases, result: Backlog) -> Backlog:
    """Return whether requests pile up in flight although none waits for a first token.

    Fewer are answered than come, and more are in flight than the burst's rate explains at the
    base's answer times (Little), beyond chance, and still more at its end than at its middle.
    """
    result = replace(result, reason="no queue lasted through the second half of the burst")
    burst_rps, answered_rps = phases[1].offered_rps or 0.0, phases[1].achieved_rps or 0.0
    base = time_average_in_flight(t.settled_s, t.burst_s, t.at, t.finish)
    explained = base * max(1.0, burst_rps / (phases[0].offered_rps or math.inf))
    due = t.at[(t.at >= t.burst_s) & (t.at < t.over_s)]
    moments = np.concatenate([[(t.burst_s + t.over_s) / 2], due, [t.over_s]])
    middle, *levels, end = waiting_at(t.at, np.sort(t.finish), moments).tolist()
    excess = end > max(explained + 3 * math.sqrt(max(1.0, explained)), middle)
    if not base or not excess or answered_rps >= SERVED_ALL * burst_rps:
        return result
    most = max(levels)
    why = (
        f"requests pile up in flight: {most} at most, {answered_rps:.3g}/s answered of "
        f"{burst_rps:.3g} offered"
    )
    return replace(result, piled_up=most, reason=why)


def _outlook(t: Timeline, left: Floats, after: Phase, base_rps: float, result: Backlog) -> Backlog:
    """Return ``result`` with whether a queue that is still there at the end would drain."""
    parts = np.linspace(t.over_s, t.end_s, PARTS + 1)
    level = waiting_at(t.at, left, parts)
    top = int(level.argmax())  # after a stall only the time since counts
    top = top if top <= PARTS // 2 else 0
    leave_rps = np.histogram(left, parts[top:])[0] / (parts[1] - t.over_s)
    return further(result, leave_rps, after, base_rps, fell=bool(level[-1] < level[top]))


def further(
    result: Backlog, leave: Floats, after: Phase, base_rps: float, *, fell: bool
) -> Backlog:
    """Return ``result`` with whether and when what waits at the end drains at the base load.

    ``leave``: requests/s that left the queue in the last parts of the recovery; ``fell``: whether
    the queue fell in them. Fluid: ``at_end`` / (leave - base). 95 %: Student's t over the parts, and
    chance in what is yet to come and to leave (Poisson). The base is as planned, or what came where
    chance does not explain the difference. ``drains`` is null where chance decides, or what was
    seen contradicts it.
    """
    length_s, n = after.end_s - after.start_s, len(leave)
    if abs(after.requests - base_rps * length_s) > 3 * math.sqrt(base_rps * length_s):
        base_rps = after.offered_rps or 0.0
    rate, variance = float(leave.mean()) - base_rps, float(leave.var(ddof=1))
    half = float(stdtrit(n - 1, 0.975)) * math.sqrt(variance / n)
    if rate <= half or not fell:
        return replace(result, drains=False if rate <= -half and not fell else None)
    rest = result.at_end or 0.0
    further_s = rest / rate
    half = math.hypot(half, 1.96 * math.sqrt((base_rps + variance * length_s / PARTS) / further_s))
    latest_s = rest / (rate - half) if rate > half else None
    ci = rest / (rate + half), latest_s
    return replace(result, drains=True, further_s=further_s, further_s_ci=ci)
