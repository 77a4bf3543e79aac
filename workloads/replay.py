"""From a trace to the schedule that plays it: spreading, cutting, thinning, looping, the turns of its sessions.

Each says so in the notes.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.prompts.prefixes import block_size, in_time_order, odd_blocks
from ampacity.workloads.replay_turns import Prompts, earliest_s, prompts_of, roots, who_waits
from ampacity.workloads.schedule import WITH_START, Schedule
from ampacity.workloads.traces.recorded import Recorded
from ampacity.workloads.traces.trace import Trace

_NAMED = 3  # rows that a note names
_ODD_SESSION = 1000  # requests of a session that is doubted where it has most of the file


@dataclass(frozen=True)
class Replay:
    """What of a trace is played, and how; in seconds of the trace itself. Raises WorkloadError."""

    from_s: float = 0.0
    to_s: float | None = None
    # share of the requests (of whole sessions, where there are any) that is played
    keep: float = 1.0
    loops: int = 1
    as_written: bool = False  # a coarse clock's bursts are kept
    time_scale: float = 1.0  # every gap and pause is divided by it
    # pauses within sessions are multiplied by it; None: as time_scale has it
    think_scale: float | None = None
    max_think_s: float = math.inf  # no pause is longer
    # of the ids in hash_ids; None: as the file says, else by the lengths
    block_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, factor in (("time", self.time_scale), ("think", self.think_scale)):
            if factor is not None and not (math.isfinite(factor) and factor > 0):
                raise WorkloadError(f"{name} scale is {factor!r}: give a finite number above 0")
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


@dataclass(frozen=True, eq=False)
class Replayed:
    """A trace, or a schedule from a file, as it is played, and what is to be said of it."""

    schedule: Schedule
    source: str
    notes: tuple[str, ...]
    prompts: str  # what the prompts are and have in common, in words
    recorded: Recorded | None = None  # the messages of requests with an ``entry``
    says_arrivals: bool = True
    counts: dict[str, int] | None = None  # what run.json's ``workload.trace`` says besides


def prepare(trace: Trace, how: Replay, seed: int) -> Trace:
    """The requests of the trace that are to be played, at their times. Raises WorkloadError where none is left."""
    rng = np.random.default_rng([seed, 0x7ACE])
    trace = spread(trace, rng, as_written=how.as_written)
    trace = cut(trace, how.from_s, how.to_s)
    trace = thin(trace, how.keep, rng)
    return loop(trace, how.loops)


def replayed(trace: Trace, how: Replay, seed: int, rate_rps: float | None = None) -> Replayed:
    """The schedule of a trace: its own times, lengths, sessions, messages, and shared beginnings.

    ``rate_rps``: of requests, where the trace does not say when its sessions arrived: they begin at random
    (Poisson) at that rate by their mean number of requests. Raises WorkloadError.
    """
    trace = with_blocks(prepare(trace, how, seed), how.block_tokens)
    root, prompts = roots(trace), prompts_of(trace)
    waits = who_waits(trace)
    if prompts.continues is not None:
        waits.follow(prompts.continues)
    if trace.says_arrivals:
        arrival_s = trace.arrival_s / how.time_scale
    else:
        arrival_s = _begun_at_random(root, rate_rps, np.random.default_rng([seed, 0xBE61]))
    scale = 1 / how.time_scale if how.think_scale is None else how.think_scale
    pause_s = waits.pause_s * scale
    long = (waits.counts_from != WITH_START) & (pause_s > how.max_think_s)
    changes = [*_speed_notes(trace, how, waits.pause_s), *_cut_note(pause_s[long], how.max_think_s)]
    if not trace.says_arrivals and rate_rps is not None:
        what = "requests" if trace.session is None else "sessions"
        changes.append(
            f"{what} begin at random (Poisson), at {rate_rps:g} requests/s: the file has no arrivals"
        )
    waits.pause_s = np.where(long, how.max_think_s, pause_s)
    columns: dict[str, Any] = {
        "scheduled_s": arrival_s,
        "input_tokens": prompts.input_tokens,
        "output_tokens": trace.output_tokens,
    }
    told = {} if trace.entry is None else {"entry": trace.entry}
    if trace.session is not None:
        turn = np.empty(len(trace), dtype=np.int32)
        due_s = earliest_s(arrival_s, waits)
        order = np.lexsort((due_s, root))
        begins = np.flatnonzero(np.diff(root[order], prepend=-2))
        turn[order] = np.arange(len(order)) - np.repeat(begins, np.diff(begins, append=len(order)))
        columns |= {
            "session": root,
            "turn": turn,
            "think_s": waits.pause_s,
            "counts_from": waits.counts_from,
        }
        columns |= {"scheduled_s": due_s, **told}
        anew = (
            prompts.continues
            if prompts.continues is not None
            else np.full(len(trace), -1, dtype=np.int64)
        )
        if prompts.new_tokens is not None:
            columns["new_tokens"] = prompts.new_tokens
        columns = in_time_order(columns, anew, waits.after, prompts.shared)
        if prompts.continues is None:
            del columns["continues"]
    else:
        columns |= told | ({} if prompts.shared is None else {"shared": prompts.shared})
    first = np.array([not after for after in waits.after]) & (root >= 0)
    paused = np.zeros(len(trace), dtype=bool) if trace.pause_s is None else trace.pause_s > 0
    idle = int(np.count_nonzero(first & paused))
    if lone := int(np.count_nonzero(paused & (root < 0))):
        changes.append(
            f"{lone} requests without a session have a pause before them, which is not played"
        )
    name = trace.source.partition(" (")[0]
    notes = [
        *trace.notes,
        *(f"{name}: {text}" for text in (*changes, *_notes(trace, prompts, how, idle))),
    ]
    sessions = {} if trace.session is None else {"sessions": len(np.unique(root[root >= 0]))}
    recorded = 0 if trace.entry is None else int(np.count_nonzero(trace.entry >= 0))
    return Replayed(
        Schedule(first_request_id=0, **columns),
        trace.source,
        tuple(notes),
        _prompts_text(trace, prompts, recorded),
        trace.recorded,
        trace.says_arrivals,
        sessions | {"recorded_prompts": recorded},
    )


def with_blocks(trace: Trace, given: int | None = None) -> Trace:
    """The trace with the size of its blocks, and what is to be said of rows that do not fit it."""
    if trace.blocks is None:
        if given is not None:
            raise WorkloadError(
                f"{trace.source}: --block-size goes with hash_ids, of which the file has none"
            )
        return trace
    start = trace.blocks.start
    size = given or trace.block_tokens or block_size(trace.input_tokens, start)
    if size is None:
        return _noted(
            replace(trace, blocks=None),
            "hash_ids: no size of a block fits most of the rows, so that nothing is shared; give --block-size",
        )
    odd = odd_blocks(trace.input_tokens, start, size)
    trace = replace(trace, block_tokens=size)
    if not len(odd):
        return trace
    assert trace.place is not None
    named = ", ".join(
        f"{trace.place_word} {trace.place[i]} ({start[i + 1] - start[i]} for {trace.input_tokens[i]} tokens)"
        for i in odd[:_NAMED]
    )
    more = f" and {len(odd) - _NAMED} more" if len(odd) > _NAMED else ""
    note = (
        f"hash_ids: {len(odd)} of {len(trace)} rows have a number of ids that does not go with blocks of {size} tokens: "
        f"{named}{more}; ids behind a prompt's end are left out, tokens without an id are its own"
    )
    return _noted(trace, note)


def _begun_at_random(
    root: NDArray[np.int64], rate_rps: float | None, rng: np.random.Generator
) -> NDArray[np.float64]:
    """When each request's session, or lone request, begins: all at 0 without a rate, as a closed loop has it."""
    names = np.where(root >= 0, root, -1 - np.arange(len(root)))
    _, first, unit = np.unique(names, return_index=True, return_inverse=True)
    if rate_rps is None:
        return np.zeros(len(root))
    begins = np.empty(len(first))
    begins[np.argsort(first)] = np.cumsum(
        rng.exponential(len(root) / len(first) / rate_rps, len(first))
    )
    return np.asarray(begins[unit], dtype=np.float64)


def _speed_notes(trace: Trace, how: Replay, pause_s: NDArray[np.float64]) -> Iterator[str]:
    """What is played faster or slower than it was recorded, and by how much; ``pause_s`` float64[n] as recorded."""
    span_s = float(trace.arrival_s[-1])
    if how.time_scale != 1:
        alone = how.think_scale is not None or trace.session is None
        what = "arrivals" if alone else "arrivals, and pauses within sessions,"
        lasts = (
            f": arrivals over {span_s:.6g} s come within {span_s / how.time_scale:.6g} s"
            if span_s
            else ""
        )
        yield f"{what} are played {how.time_scale:g} times as fast as recorded (--time-scale){lasts}"
    if how.think_scale not in (None, 1.0):
        total_s = float(pause_s.sum())
        yield (
            f"{np.count_nonzero(pause_s)} pauses within sessions are {how.think_scale:g} times as long as recorded "
            f"(--think-scale): {total_s * how.think_scale:.6g} s in all, not {total_s:.6g} s"
        )
    if how.block_tokens is not None:
        yield f"hash_ids: blocks of {how.block_tokens} tokens are taken (--block-size)"


def _cut_note(pause_s: NDArray[np.float64], max_s: float) -> Iterator[str]:
    """Of pauses longer than ``max_s``."""
    if len(pause_s):
        yield (
            f"{len(pause_s)} pauses within sessions are cut to {max_s:g} s (--max-think): the longest was "
            f"{pause_s.max():.6g} s, all of them are {float((pause_s - max_s).sum()):.6g} s shorter"
        )


def _notes(trace: Trace, prompts: Prompts, how: Replay, idle: int) -> list[str]:
    found = []
    bare = np.zeros(0, dtype=np.int64) if trace.entry is None else np.flatnonzero(trace.entry < 0)
    if len(bare):
        behind = "; the turns behind them go on without them" if prompts.left_aside else ""
        found.append(
            f"{len(bare)} of {len(trace)} requests have no text of a prompt, where others have one ({_named(trace, bare)}): "
            f"made-up text of their length is sent{behind}"
        )
    if trace.session is not None and trace.end_s is None and trace.pause_s is None and trace.clock:
        found.append(
            "sessions: the file does not say when answers ended: a turn comes as long after the start of the turn before "
            "as recorded, and no earlier than its answer"
        )
    if trace.session is None and (how.think_scale is not None or how.max_think_s < math.inf):
        found.append(
            "the file has no sessions: --max-think and --think-scale have nothing to act on"
        )
    largest = (
        0
        if trace.session is None
        else int(np.bincount(np.maximum(trace.session, 0), trace.session >= 0).max())
    )
    if largest > max(_ODD_SESSION, len(trace) / 2):
        found.append(
            f"one session has {largest} of {len(trace)} requests, which are played one after the other: if its id is none, "
            "name the column that holds sessions (--column session=NAME)"
        )
    if idle:
        found.append(
            f"{idle} sessions have a pause before their first request, which is not played"
        )
    if prompts.begun_anew:
        found.append(
            f"{prompts.begun_anew} later turns are shorter than every turn before them: they begin anew, and share nothing"
        )
    return found


def _named(trace: Trace, index: NDArray[np.int64]) -> str:
    """Where the first of these requests stand in the file."""
    assert trace.place is not None
    places = list(dict.fromkeys(trace.place[index].tolist()))
    more = f" and {len(places) - _NAMED} more" if len(places) > _NAMED else ""
    return f"{trace.place_word} {', '.join(map(str, places[:_NAMED]))}{more}"


def _prompts_text(trace: Trace, prompts: Prompts, recorded: int) -> str:
    """run.json's ``workload.prompts``: recorded or made up, and what is shared."""
    made = len(trace) - recorded
    parts = [f"messages as recorded ({recorded} of {len(trace)} requests)"] if recorded else []
    if prompts.continues is not None:
        parts.append("histories with the answers of this run")
    if made and trace.blocks is not None:
        parts.append("made-up text with shared blocks as in the trace")
    elif made and trace.session is not None:
        parts.append("made-up text of the recorded lengths, each turn behind the one before")
    elif made:
        parts.append("made-up text of the recorded lengths" if parts else "unique")
    return "; ".join(parts)


def spread(trace: Trace, rng: np.random.Generator, *, as_written: bool = False) -> Trace:
    """Requests of one tick of a coarse clock, uniformly over the tick (``as_written``: not at all); other traces as they are.

    A tick lasts until the next one, and no longer than one and a half steps of the clock.
    """
    step_s = trace.clock_step_s
    if step_s is None:
        return trace
    note = f"coarse clock: {len(np.unique(trace.arrival_s))} distinct arrival times, {step_s:.3g} s apart, for {len(trace)} requests; they are"
    if as_written:
        return _noted(
            trace, f"{note} replayed as written, so requests of one time arrive as a burst"
        )
    ticks, of = np.unique(trace.arrival_s, return_inverse=True)
    widths = np.minimum(np.diff(ticks, append=ticks[-1] + step_s), 1.5 * step_s)
    root, share = roots(trace), rng.random(len(trace))
    _, first = np.unique(root, return_index=True)
    moved = root >= 0  # a session is moved as a whole: its turns keep their order and their gaps
    share[moved] = share[first[np.searchsorted(root[first], root[moved])]]
    width = widths[of]
    width[moved] = width[first[np.searchsorted(root[first], root[moved])]]
    times = trace.arrival_s + share * width
    spread_out = trace.take(np.arange(len(trace)), times - times.min())
    return replace(_noted(spread_out, f"{note} spread over the step"), clock_step_s=None)


def cut(trace: Trace, from_s: float, to_s: float | None) -> Trace:
    """Requests of [from_s, to_s), at times from ``from_s`` on. Raises WorkloadError where none is left."""
    if from_s == 0 and to_s is None:
        return trace
    if not trace.says_arrivals:
        raise WorkloadError(
            f"{trace.source}: the file does not say when its sessions arrived: drop --trace-from and --trace-to (--trace-keep thins it)"
        )
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
    """The trace ``times`` times, one mean gap between two rounds. Sessions of each round are sessions of their own."""
    if times == 1:
        return trace
    n = len(trace)
    period_s = float(trace.arrival_s[-1]) * n / (n - 1) if n > 1 else 1.0
    if not trace.says_arrivals:
        period_s = 0.0
    rounds = np.repeat(np.arange(times), n)
    arrival_s = np.tile(trace.arrival_s, times) + rounds * period_s
    looped = trace.take(np.tile(np.arange(n), times), arrival_s)
    if looped.session is not None:
        count = int(looped.session.max()) + 1
        which = rounds[np.argsort(arrival_s, kind="stable")]
        numbers: dict[str, Any] = {
            name: np.where(column < 0, -1, column + which * count)
            for name in ("session", "parent")
            if (column := getattr(looped, name)) is not None
        }
        looped = replace(looped, **numbers)
    each = f", {period_s:.6g} s each" if trace.says_arrivals else ""
    return _noted(looped, f"played {times} times{each}")


def _noted(trace: Trace, note: str) -> Trace:
    return replace(trace, notes=(*trace.notes, f"{trace.source.partition(' (')[0]}: {note}"))
