"""Find when the endpoint has recovered: no queue, and TTFT is that of the base load."""

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.special import stdtr, stdtrit

from ampacity.analysis.burst import timeline
from ampacity.analysis.contract.burst import Backlog, BaseLevel, Harm, MaxRecovery
from ampacity.analysis.contract.part import Interval
from ampacity.analysis.contract.stage import Verdict
from ampacity.analysis.metrics.requests import Bools, Floats
from ampacity.analysis.slo import ERROR_RATE
from ampacity.analysis.stage.steady import time_average_in_flight

BASE_REQUESTS_MIN = 30  # of the settled base phase, to know what to come back to
BASE_ANSWERS_MIN = 10.0  # mean answer times that the settled base phase must last
BASE_ERROR_MAX = 0.45  # half of the 95 % interval of the base's mean in flight, over the mean
BELOW = 1.0  # of the base's standard deviations, by which the count must come below its mean
BASE_SHARE_MAX = 0.6  # of what is served: above that the base load has long queues of its own
SINCE_REQUESTS_MIN = 20  # due after the backlog, to know what TTFT has become
SLOWER = 1.1  # a request is slow where its TTFT is above this times the base's median
SLOWER_P = 0.01  # one-sided, of the test that as many are slow as in the base


@dataclass(frozen=True)
class Level:
    """The number of requests in a state over a time span."""

    mean: float  # time average
    half: float  # half of its 95 % interval
    spread: float  # standard deviation over time


@dataclass(frozen=True)
class _Base:
    """The settled part of the base phase, which the recovery is compared with."""

    length_s: float
    requests: int
    waiting: Level  # for a first token
    in_flight: Level
    mean_in_flight: float
    ttft: Floats

    @property
    def median_s(self) -> float | None:
        """Return the median TTFT; None where too few requests, or infinite."""
        if len(self.ttft) < SINCE_REQUESTS_MIN:
            return None
        median = float(np.median(self.ttft))
        return median if math.isfinite(median) else None

    def too_short(self) -> str | None:
        """Return why the phase does not show what to come back to."""
        answers = self.requests / self.mean_in_flight  # its length in mean answer times (Little)
        error = self.in_flight.half / self.mean_in_flight
        if answers < BASE_ANSWERS_MIN:
            why = f"it lasts {answers:.3g} mean answer times, {BASE_ANSWERS_MIN:g} are needed"
        elif error > BASE_ERROR_MAX:
            why = (
                f"its mean of {self.mean_in_flight:.3g} in flight is known to ± {100 * error:.3g} "
                f"% only, ± {100 * BASE_ERROR_MAX:.3g} % is needed"
            )
        else:
            return None
        return (
            f"the base phase is too short to know what to come back to: {why}; raise "
            "--base-duration"
        )


@dataclass(frozen=True)
class Recovery:
    """Seconds from the end of the burst until its excess is gone, or why they are not known."""

    base_level: BaseLevel
    recovery_s: float | None
    ci_s: Interval
    reason: str | None
    base_too_short: bool = False


def find_recovery(t: timeline.Timeline, backlog: Backlog, phases: timeline.Phases) -> Recovery:
    """Return when the burst is over.

    It is over when no more requests wait for a first token, and no more are in flight, than the
    lower end of the 95 % interval of the settled base's time average (Student's t over ``PARTS``
    parts) or one standard deviation below it, and TTFT of those due from then on is the base's.
    From such a moment on the endpoint is in a state that the base load alone has as well. The
    interval begins where fewer are in flight than the base has but for chance (upper end +
    2 sqrt(mean)).
    """
    base_due = (t.at >= t.settled_s) & (t.at < t.burst_s)
    n = int(np.count_nonzero(base_due))
    mean = time_average_in_flight(t.settled_s, t.burst_s, t.at, t.finish)
    if n < BASE_REQUESTS_MIN or not mean:
        reason = (
            f"the settled base phase has {n} requests: {BASE_REQUESTS_MIN} are needed to know what "
            "to come back to"
        )
        return Recovery(BaseLevel(), None, (None, None), reason, base_too_short=True)
    waiting, in_flight = (
        _level(t.settled_s, t.burst_s, t.at, left) for left in (t.answered, t.finish)
    )
    ttft = t.ttft[base_due & ~np.isnan(t.ttft)]
    base = _Base(t.burst_s - t.settled_s, n, waiting, in_flight, mean, ttft)
    level = BaseLevel(waiting=waiting.mean, in_flight=mean, ttft_s=base.median_s)
    if t.end_s <= t.over_s:
        return Recovery(level, None, (None, None), timeline.UNSEEN)
    if short := base.too_short():
        return Recovery(level, None, (None, None), short, base_too_short=True)
    upper = mean + in_flight.half + 2 * math.sqrt(mean)
    earliest_s = timeline.fallen_s(t.at, t.finish, upper, t.over_s, t.end_s)
    low_s = timeline.elapsed_s(t.over_s, t.end_s) if earliest_s is None else earliest_s
    if too_high := _base_load_too_high(t, backlog, phases):
        return Recovery(level, None, (low_s, None), too_high)
    back_s, why = _emptied_s(t, base)
    if back_s is None or (why := _slower_since(t, base, back_s)):
        return Recovery(level, None, (low_s, None), why)
    return Recovery(level, back_s, (min(back_s, low_s), back_s), None)


def _base_load_too_high(
    t: timeline.Timeline, backlog: Backlog, phases: timeline.Phases
) -> str | None:
    """Return why the base load's own queues hide that of the burst."""
    base_rps, most_rps = phases[0].offered_rps or 0.0, backlog.served_rps or phases[1].achieved_rps
    if not most_rps:
        return "nothing of the burst was answered: what is served is not known"
    chance = 1 + 2 / math.sqrt(max(1.0, most_rps * (t.over_s - t.burst_s)))
    if (carried_rps := phases[0].achieved_rps or 0.0) > most_rps * chance:
        return (
            f"{carried_rps:.3g} req/s were answered in the base, and {most_rps:.3g} from the burst "
            "on: the endpoint broke down, which is no queue"
        )
    if base_rps <= BASE_SHARE_MAX * most_rps * chance:
        return None
    served = "is served" if backlog.served_rps else "was seen to be served"
    return (
        f"the base load is {base_rps / most_rps:.0%} of the {most_rps:.3g} req/s that {served}: "
        f"above {BASE_SHARE_MAX:.0%} it has queues of its own, and when the burst's is gone cannot "
        "be told"
    )


def _emptied_s(t: timeline.Timeline, base: _Base) -> tuple[float | None, str | None]:
    """Return the s until as few requests wait and are in flight as in the base, or why not."""
    later_s = timeline.elapsed_s(t.over_s, t.end_s) / 2
    leaving = (t.answered, t.finish)
    later = [_level((t.over_s + t.end_s) / 2, t.end_s, t.at, left) for left in leaving]
    levels = _with_later([base.waiting, base.in_flight], later, base.length_s, later_s)
    aims = [max(0.0, level.mean - max(level.half, BELOW * level.spread)) for level in levels]
    found = [
        timeline.fallen_s(t.at, left, aim, t.over_s, t.end_s)
        for left, aim in zip(leaving, aims, strict=True)
    ]
    names = ("waiting for a first token", "in flight")
    for name, at_s, aim, level in zip(names, found, aims, levels, strict=True):
        if at_s is None:
            return None, (
                f"{math.floor(aim)} or fewer {name} (the base's mean of {level.mean:.3g} less what "
                "it varies by) were not seen before the load ended; raise --recovery-duration"
            )
    return max(s for s in found if s is not None), None


def _slower_since(t: timeline.Timeline, base: _Base, back_s: float) -> str | None:
    """Return why TTFT of the requests due after the backlog is not the base's."""
    if base.median_s is None:
        return None
    since = t.ttft[(t.at >= t.over_s + back_s) & ~np.isnan(t.ttft)]
    if len(since) < SINCE_REQUESTS_MIN:
        return (
            f"only {len(since)} requests were due after the backlog was gone: raise "
            "--recovery-duration"
        )
    limit_s = SLOWER * base.median_s
    p = slower_p(base.ttft > limit_s, since > limit_s)
    if p >= SLOWER_P:
        return None
    return (
        f"the backlog is gone {back_s:.3g} s after the burst, but TTFT of those due since is above "
        f"the base's: {np.mean(since > limit_s):.0%} against {np.mean(base.ttft > limit_s):.0%} "
        f"take more than {limit_s:.3g} s (p = {p:.1g})"
    )


def _level(start_s: float, end_s: float, at: Floats, left: Floats) -> Level:
    """Return the level of the requests that have come and not left in [start, end]."""
    cuts = np.linspace(start_s, end_s, timeline.PARTS + 1)
    parts = np.array([time_average_in_flight(a, b, at, left) for a, b in pairwise(cuts)])
    half = float(stdtrit(timeline.PARTS - 1, 0.975) * parts.std(ddof=1) / math.sqrt(timeline.PARTS))
    moments = np.sort(np.concatenate([[start_s, end_s], at, left]))
    moments = moments[(moments >= start_s) & (moments <= end_s)]
    waiting, lasts_s = timeline.waiting_at(at, np.sort(left), moments[:-1]), np.diff(moments)
    mean = float(parts.mean())
    return Level(mean, half, math.sqrt(float(np.average((waiting - mean) ** 2, weights=lasts_s))))


def _with_later(
    base: list[Level], later: list[Level], base_s: float, later_s: float
) -> list[Level]:
    """Pool the base's levels with those of the second half of the recovery, the same load.

    Not where more are in flight there than chance explains. Means are weighted by the lengths,
    their errors and variances likewise.
    """
    if later[1].mean > base[1].mean + math.hypot(base[1].half, later[1].half):
        return base
    share = base_s / (base_s + later_s)
    pooled = []
    for a, b in zip(base, later, strict=True):
        apart = share * (1 - share) * (a.mean - b.mean) ** 2
        spread = math.sqrt(share * a.spread**2 + (1 - share) * b.spread**2 + apart)
        half = math.hypot(share * a.half, (1 - share) * b.half)
        pooled.append(Level(share * a.mean + (1 - share) * b.mean, half, spread))
    return pooled


def slower_p(base: Bools, since: Bools) -> float:
    """Return the one-sided p of "as many are slow as in the base" (Welch's t over ``PARTS`` parts).

    Neighbouring requests are alike, so parts are compared; they vary at least as independent
    requests do.
    """
    share = np.mean(np.concatenate([base, since]))
    variance = 0.0
    for slow in (base, since):
        parts = np.array([part.mean() for part in np.array_split(slow, timeline.PARTS)])
        variance += max(
            float(parts.var(ddof=1)) / timeline.PARTS, float(share * (1 - share)) / len(slow)
        )
    gap = float(since.mean() - base.mean())
    if gap <= 0:
        return 1.0
    return float(stdtr(2 * timeline.PARTS - 2, -gap / math.sqrt(variance))) if variance else 0.0


def judge_recovery(
    limit_s: float | None, ci_s: Interval | None, reason: str | None, after: Harm | None = None
) -> MaxRecovery | None:
    """Judge the interval of a recovery against ``limit_s``: met, violated or inconclusive.

    None without a limit. ``after``: the harm after it, since an endpoint that fails later on has
    not recovered; ``reason``: why the recovery is not known.
    """
    if limit_s is None:
        return None
    low_s, high_s = ci_s or (None, None)
    verdict: Verdict = "inconclusive"
    why = reason
    if after and (low_s is None or low_s <= limit_s):
        verdict = "violated" if after.slo.startswith(ERROR_RATE) else "inconclusive"
        why = f"of those due later {after.reason}"
    elif high_s is not None and high_s <= limit_s:
        verdict, why = "met", f"recovered within {high_s:.3g} s after the burst"
    elif low_s is not None and low_s > limit_s:
        verdict, why = "violated", f"not recovered for at least {low_s:.3g} s after the burst"
    elif high_s is not None:
        why = f"recovered {low_s:.3g} to {high_s:.3g} s after the burst"
    return MaxRecovery(limit_s=limit_s, verdict=verdict, reason=why)
