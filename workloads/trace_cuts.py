"""Choose which part of a trace is replayed: spread a coarse clock, cut, thin, loop."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.prompts.prefixes import block_sizes, odd_blocks
from ampacity.workloads.replay_turns import roots
from ampacity.workloads.traces.trace import Trace

MAX_NAMED = 3  # rows that a note names


@dataclass(frozen=True)
class Replay:
    """Options of a replay; times in seconds of the trace itself. Raises WorkloadError."""

    from_s: float = 0.0
    to_s: float | None = None
    keep: float = 1.0  # share of the requests, or of whole sessions, that is kept
    loops: int = 1
    as_written: bool = False  # keep the bursts of a coarse clock
    time_scale: float = 1.0  # every gap and pause is divided by it
    think_scale: float | None = None  # factor for pauses in sessions; None: as time_scale
    max_think_s: float = math.inf  # longest pause
    block_tokens: int | None = None  # of ids in hash_ids; None: from the file, else by lengths

    def __post_init__(self) -> None:
        for name, factor in (("time", self.time_scale), ("think", self.think_scale)):
            if factor is not None and not (math.isfinite(factor) and factor > 0):
                raise WorkloadError(f"{name} scale is {factor!r}: give a finite number above 0")
        if self.from_s < 0 or (self.to_s is not None and self.to_s <= self.from_s):
            raise WorkloadError(
                f"the trace is cut from {self.from_s:g} s to {self.to_s} s: "
                "give an end behind the start"
            )
        if not 0 < self.keep <= 1:
            raise WorkloadError(
                f"the share of the trace to keep is {self.keep!r}: give more than 0 and at most 1"
            )
        if self.loops < 1:
            raise WorkloadError(f"the trace is played {self.loops} times: give 1 or more")


def prepare(trace: Trace, how: Replay, seed: int) -> Trace:
    """Return the requests of the trace to replay. Raises WorkloadError where none is left."""
    rng = np.random.default_rng([seed, 0x7ACE])
    trace = spread(trace, rng, as_written=how.as_written)
    trace = cut(trace, how.from_s, how.to_s)
    trace = thin(trace, how.keep, rng)
    return loop(trace, how.loops)


def with_blocks(trace: Trace, given: int | None = None) -> Trace:
    """Return the trace with its block size, and a note on rows that do not fit it."""
    if trace.blocks is None:
        if given is not None:
            raise WorkloadError(
                f"{trace.source}: --block-size goes with hash_ids, of which the file has none"
            )
        return trace
    start = trace.blocks.start
    known = given or trace.block_tokens
    sizes = [known] if known else block_sizes(trace.input_tokens, start)
    if not sizes:
        return _noted(
            replace(trace, blocks=None),
            "hash_ids: no size of a block fits most of the rows, so that nothing is shared; "
            "give --block-size",
        )
    size = sizes[0]
    if len(sizes) > 1 and sum(size & (size - 1) == 0 for size in sizes) != 1:
        trace = _noted(
            trace,
            f"hash_ids: blocks of {sizes[0]} tokens are taken, though sizes from {min(sizes)} to "
            f"{max(sizes)} fit as many rows: if you know the size, give --block-size",
        )
    odd = odd_blocks(trace.input_tokens, start, size)
    trace = replace(trace, block_tokens=size)
    if not len(odd):
        return trace
    assert trace.place is not None
    odd = odd[np.argsort(trace.place[odd])]
    named = ", ".join(
        f"{trace.place_word} {trace.place[i]} "
        f"({start[i + 1] - start[i]} for {trace.input_tokens[i]} tokens)"
        for i in odd[:MAX_NAMED]
    )
    more = f" and {len(odd) - MAX_NAMED} more" if len(odd) > MAX_NAMED else ""
    note = (
        f"hash_ids: {len(odd)} of {len(trace)} rows have a number of ids that does not go with "
        f"blocks of {size} tokens: {named}{more}; ids behind a prompt's end are left out, "
        "tokens without an id are its own"
    )
    return _noted(trace, note)


def spread(trace: Trace, rng: np.random.Generator, *, as_written: bool = False) -> Trace:
    """Spread the requests of each tick of a coarse clock uniformly (``as_written``: not at all).

    A tick lasts until the next one, but at most one and a half steps of the clock.
    """
    step_s = trace.clock_step_s
    if step_s is None:
        return trace
    ticks, of = np.unique(trace.arrival_s, return_inverse=True)
    note = (
        f"coarse clock: {len(ticks)} distinct arrival times, {step_s:.3g} s apart, "
        f"for {len(trace)} requests; they are"
    )
    if as_written:
        return _noted(
            trace, f"{note} replayed as written, so requests of one time arrive as a burst"
        )
    widths = np.minimum(np.diff(ticks, append=ticks[-1] + step_s), 1.5 * step_s)
    root, share = roots(trace), rng.random(len(trace))
    _, first = np.unique(root, return_index=True)
    moved = root >= 0  # a session moves as a whole: its turns keep their order and gaps
    share[moved] = share[first[np.searchsorted(root[first], root[moved])]]
    width = widths[of]
    width[moved] = width[first[np.searchsorted(root[first], root[moved])]]
    times = trace.arrival_s + share * width
    spread_out = trace.take(np.arange(len(trace)), times - times.min())
    return replace(_noted(spread_out, f"{note} spread over the step"), clock_step_s=None)


def cut(trace: Trace, from_s: float, to_s: float | None) -> Trace:
    """Return the requests of [from_s, to_s), from time 0. Raises WorkloadError where none is."""
    if from_s == 0 and to_s is None:
        return trace
    if not trace.says_arrivals:
        raise WorkloadError(
            f"{trace.source}: the file does not say when its sessions arrived: "
            "drop --trace-from and --trace-to (--trace-keep thins it)"
        )
    last_s, end_s = trace.arrival_s[-1], math.inf if to_s is None else to_s
    (index,) = np.nonzero((trace.arrival_s >= from_s) & (trace.arrival_s < end_s))
    if not len(index):
        raise WorkloadError(
            f"{trace.source}: no request arrives from {from_s:g} s to {end_s:g} s; "
            f"the trace lasts {last_s:g} s"
        )
    note = (
        f"cut from {from_s:g} s to {last_s if to_s is None else to_s:g} s: "
        f"{len(index)} of {len(trace)} requests{_cut_sessions(trace, from_s, end_s)}"
    )
    return _noted(trace.take(index, trace.arrival_s[index] - from_s), note)


def _cut_sessions(trace: Trace, from_s: float, end_s: float) -> str:
    """Return how many sessions a cut begins or ends within, in words."""
    if trace.session is None:
        return ""
    member = trace.session >= 0
    session, at = trace.session[member], trace.arrival_s[member]
    before, behind = (np.unique(session[part]) for part in (at < from_s, at >= end_s))
    inside = np.unique(session[(at >= from_s) & (at < end_s)])
    counts = (np.isin(inside, before).sum(), np.isin(inside, behind).sum())
    words = ("begin with a later turn, whose history is new", "end before their last turn")
    return "".join(f"; {n} sessions {what}" for n, what in zip(counts, words, strict=True) if n)


def thin(trace: Trace, keep: float, rng: np.random.Generator) -> Trace:
    """Keep each request, or each whole session, with probability ``keep``."""
    if keep == 1:
        return trace
    kept = rng.random(len(trace)) < keep
    if trace.session is not None:
        root = roots(trace)
        whole = rng.random(int(trace.session.max()) + 1) < keep
        kept = np.where(root >= 0, whole[root], kept)
    (index,) = np.nonzero(kept)
    if not len(index):
        raise WorkloadError(
            f"{trace.source}: no request is left of {len(trace)} with a share of {keep:g}"
        )
    return _noted(
        trace.take(index), f"thinned to a share of {keep:g}: {len(index)} of {len(trace)} requests"
    )


def loop(trace: Trace, times: int) -> Trace:
    """Repeat the trace, one mean gap apart; each round has its own sessions and blocks."""
    if times == 1:
        return trace
    n = len(trace)
    period_s = float(trace.arrival_s[-1]) * n / (n - 1) if n > 1 else 1.0
    if not trace.says_arrivals:
        period_s = 0.0
    rounds = np.repeat(np.arange(times), n)
    arrival_s = np.tile(trace.arrival_s, times) + rounds * period_s
    looped = trace.take(np.tile(np.arange(n), times), arrival_s)
    which = rounds[np.argsort(arrival_s, kind="stable")]
    if looped.blocks is not None:
        ids, number = np.unique(looped.blocks.ids, return_inverse=True)
        of_round = np.repeat(which, np.diff(looped.blocks.start))
        blocks = replace(looped.blocks, ids=number + of_round * len(ids))
        looped = replace(looped, blocks=blocks)
    if looped.session is not None:
        count = int(looped.session.max()) + 1
        numbers: dict[str, Any] = {
            name: np.where(column < 0, -1, column + which * count)
            for name in ("session", "parent")
            if (column := getattr(looped, name)) is not None
        }
        looped = replace(looped, **numbers)
    each = f", {period_s:.6g} s each" if trace.says_arrivals else ""
    again = 0 if trace.entry is None else int(np.count_nonzero(trace.entry >= 0))
    cached = f"; from the second on a prefix cache holds the {again} recorded prompts"
    return _noted(looped, f"played {times} times{each}{cached if again else ''}")


def _noted(trace: Trace, note: str) -> Trace:
    return replace(trace, notes=(*trace.notes, f"{trace.source.partition(' (')[0]}: {note}"))
