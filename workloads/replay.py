"""What is done to a trace before it is played: spreading, cutting, thinning, looping. Each says so in the notes."""

import math
from dataclasses import dataclass, replace

import numpy as np

from workloads.errors import WorkloadError
from workloads.traces import Trace


@dataclass(frozen=True)
class Replay:
    """What of a trace is played, and how; in seconds of the trace itself. Raises WorkloadError."""

    from_s: float = 0.0
    to_s: float | None = None
    keep: float = 1.0  # share of the requests (of whole sessions, where there are any) that is played
    loops: int = 1
    as_written: bool = False  # a coarse clock's bursts are kept

    def __post_init__(self) -> None:
        if self.from_s < 0 or (self.to_s is not None and self.to_s <= self.from_s):
            raise WorkloadError(
                f"the trace is cut from {self.from_s:g} s to {self.to_s} s: give an end behind the start"
            )
        if not 0 < self.keep <= 1:
            raise WorkloadError(
                f"the share of the trace to keep is {self.keep!r}: give more than 0 and at most 1"
            )
        if self.loops < 1:
            raise WorkloadError(f"the trace is played {self.loops} times: give 1 or more")


def prepare(trace: Trace, how: Replay, seed: int) -> Trace:
    """The trace as it is to be played. Raises WorkloadError where nothing of it is left."""
    if trace.from_session_start:
        raise WorkloadError(
            f"{trace.source}: the times count from the start of each session, so it does not say when requests arrive: "
            "use it with 'ampacity workload fit'"
        )
    if trace.as_schedule and how != Replay():
        raise WorkloadError(
            f"{trace.source}: a schedule is played as it is: drop --trace-from, -to, -keep, -loop, -as-written"
        )
    rng = np.random.default_rng([seed, 0x7ACE])
    trace = spread(trace, rng, as_written=how.as_written)
    trace = cut(trace, how.from_s, how.to_s)
    trace = thin(trace, how.keep, rng)
    return loop(trace, how.loops)


def spread(trace: Trace, rng: np.random.Generator, *, as_written: bool = False) -> Trace:
    """Requests of one tick of a coarse clock, uniformly over the tick (``as_written``: not at all); other traces as they are.

    A tick lasts until the next one, and no longer than one and a half steps of the clock.
    """
    step_s = trace.clock_step_s
    if step_s is None:
        return trace
    note = f"coarse clock: {len(np.unique(trace.arrival_s))} distinct arrival times, {step_s:.3g} s apart, for {len(trace)} requests; they are"
    if as_written:
        return _noted(trace, f"{note} replayed as written, so requests of one time arrive as a burst")
    ticks, of = np.unique(trace.arrival_s, return_inverse=True)
    widths = np.minimum(np.diff(ticks, append=ticks[-1] + step_s), 1.5 * step_s)
    times = trace.arrival_s + rng.random(len(trace)) * widths[of]
    spread_out = trace.take(np.arange(len(trace)), times - times.min())
    return replace(_noted(spread_out, f"{note} spread over the step"), clock_step_s=None)


def cut(trace: Trace, from_s: float, to_s: float | None) -> Trace:
    """Requests of [from_s, to_s), at times from ``from_s`` on. Raises WorkloadError where none is left."""
    if from_s == 0 and to_s is None:
        return trace
    end_s = math.inf if to_s is None else to_s
    (index,) = np.nonzero((trace.arrival_s >= from_s) & (trace.arrival_s < end_s))
    if not len(index):
        raise WorkloadError(
            f"{trace.source}: no request arrives from {from_s:g} s to {end_s:g} s; the trace lasts {trace.arrival_s[-1]:g} s"
        )
    note = f"cut from {from_s:g} s to {trace.arrival_s[-1] if to_s is None else to_s:g} s: {len(index)} of {len(trace)} requests"
    return _noted(trace.take(index, trace.arrival_s[index] - from_s), note)


def thin(trace: Trace, keep: float, rng: np.random.Generator) -> Trace:
    """A random share of the requests, each kept with probability ``keep``; a session is kept or left as a whole."""
    if keep == 1:
        return trace
    kept = rng.random(len(trace)) < keep
    if trace.session is not None:
        whole = rng.random(int(trace.session.max()) + 1) < keep
        kept = np.where(trace.session >= 0, whole[trace.session], kept)
    (index,) = np.nonzero(kept)
    if not len(index):
        raise WorkloadError(f"{trace.source}: no request is left of {len(trace)} with a share of {keep:g}")
    return _noted(trace.take(index), f"thinned to a share of {keep:g}: {len(index)} of {len(trace)} requests")


def loop(trace: Trace, times: int) -> Trace:
    """The trace ``times`` times, one mean gap between two rounds. Sessions of each round are sessions of their own."""
    if times == 1:
        return trace
    n = len(trace)
    period_s = float(trace.arrival_s[-1]) * n / (n - 1) if n > 1 else 1.0
    rounds = np.repeat(np.arange(times), n)
    looped = trace.take(np.tile(np.arange(n), times), np.tile(trace.arrival_s, times) + rounds * period_s)
    if looped.session is not None:  # take() keeps the rounds in order, as no round reaches into the next
        count = int(looped.session.max()) + 1
        looped = replace(looped, session=np.where(looped.session < 0, -1, looped.session + rounds * count))
    return _noted(looped, f"played {times} times, {period_s:.6g} s each")


def _noted(trace: Trace, note: str) -> Trace:
    return replace(trace, notes=(*trace.notes, f"{trace.source.partition(' (')[0]}: {note}"))
