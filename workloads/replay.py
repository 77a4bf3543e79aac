"""Turn a trace into the schedule that replays it; every change is noted."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ampacity.workloads.replay_turns import Prompts, Waits, earliest_s, prompts_of, roots, who_waits
from ampacity.workloads.timetable import WITH_START, Floats, Ints, Schedule
from ampacity.workloads.trace_cuts import MAX_NAMED, Replay, prepare, with_blocks
from ampacity.workloads.traces.recorded import Recorded
from ampacity.workloads.traces.trace import Trace

_ODD_SESSION = 1000  # a session with more requests, and most of the file, is doubted


@dataclass(frozen=True, eq=False)
class Replayed:
    """The schedule of a trace or of a schedule file, with notes on it."""

    schedule: Schedule
    source: str
    notes: tuple[str, ...]
    prompts: str  # in words: what the prompts are and what they share
    recorded: Recorded | None = None  # the messages of requests with an ``entry``
    says_arrivals: bool = True
    counts: dict[str, int] | None = None  # further entries of run.json's ``workload.trace``


def replayed(trace: Trace, how: Replay, seed: int, rate_rps: float | None = None) -> Replayed:
    """Return the schedule of a trace: its times, lengths, sessions, messages and shared prefixes.

    ``rate_rps``: requests/s for a trace without arrivals, whose sessions begin at random (Poisson)
    at that rate divided by their mean number of requests. Raises WorkloadError.
    """
    trace = with_blocks(prepare(trace, how, seed), how.block_tokens)
    root, prompts, waits = roots(trace), prompts_of(trace), who_waits(trace)
    if prompts.continues is not None:
        waits.follow(prompts.continues)
    if trace.says_arrivals:
        arrival_s = trace.arrival_s / how.time_scale
    else:
        arrival_s = _begun_at_random(root, rate_rps, np.random.default_rng([seed, 0xBE61]))
    changes = [*_speed_notes(trace, how, waits.pause_s), *_scale_pauses(waits, how)]
    if not trace.says_arrivals and rate_rps is not None:
        what = "requests" if trace.session is None else "sessions"
        changes.append(
            f"{what} begin at random (Poisson), at {rate_rps:g} requests/s: "
            "the file has no arrivals"
        )
    schedule = _scheduled(trace, arrival_s, root, waits, prompts)
    is_first = np.array([not after for after in waits.after]) & (root >= 0)
    paused = np.zeros(len(trace), dtype=bool) if trace.pause_s is None else trace.pause_s > 0
    if lone := int(np.count_nonzero(paused & (root < 0))):
        changes.append(
            f"{lone} requests without a session have a pause before them, which is not played"
        )
    name = trace.source.partition(" (")[0]
    texts = [*changes, *_notes(trace, prompts, how, int(np.count_nonzero(is_first & paused)))]
    counts = {} if trace.session is None else {"sessions": len(np.unique(root[root >= 0]))}
    recorded = 0 if trace.entry is None else int(np.count_nonzero(trace.entry >= 0))
    return Replayed(
        schedule,
        trace.source,
        (*trace.notes, *(f"{name}: {text}" for text in texts)),
        _prompts_text(trace, prompts, recorded),
        trace.recorded,
        trace.says_arrivals,
        counts | {"recorded_prompts": recorded},
    )


def _scheduled(
    trace: Trace, arrival_s: Floats, root: Ints, waits: Waits, prompts: Prompts
) -> Schedule:
    outputs, shared = trace.output_tokens, prompts.shared
    found = Schedule(arrival_s, prompts.input_tokens, outputs, entry=trace.entry, shared=shared)
    if trace.session is None:
        return found
    turn = np.empty(len(trace), dtype=np.int32)
    due_s = earliest_s(arrival_s, waits)
    order = np.lexsort((due_s, root))
    begins = np.flatnonzero(np.diff(root[order], prepend=-2))
    turn[order] = np.arange(len(order)) - np.repeat(begins, np.diff(begins, append=len(order)))
    found = replace(
        found,
        scheduled_s=due_s,
        session=root,
        turn=turn,
        think_s=waits.pause_s,
        counts_from=waits.counts_from,
        continues=prompts.continues,
        new_tokens=prompts.new_tokens,
    )
    return found.in_time_order(waits.after)


def _begun_at_random(root: Ints, rate_rps: float | None, rng: np.random.Generator) -> Floats:
    """Return when each request's session, or lone request, begins; without a rate all at 0."""
    names = np.where(root >= 0, root, -1 - np.arange(len(root)))
    _, first, unit = np.unique(names, return_index=True, return_inverse=True)
    if rate_rps is None:
        return np.zeros(len(root))
    begins = np.empty(len(first))
    gaps = rng.exponential(len(root) / len(first) / rate_rps, len(first))
    begins[np.argsort(first)] = np.cumsum(gaps)
    return np.asarray(begins[unit], dtype=np.float64)


def _scale_pauses(waits: Waits, how: Replay) -> Iterator[str]:
    """Scale the pauses and cut them to ``max_think_s``; yield a note if any was cut."""
    pause_s = waits.pause_s * (1 / how.time_scale if how.think_scale is None else how.think_scale)
    is_long = (waits.counts_from != WITH_START) & (pause_s > how.max_think_s)
    waits.pause_s = np.where(is_long, how.max_think_s, pause_s)
    cut = pause_s[is_long]
    if len(cut):
        yield (
            f"{len(cut)} pauses within sessions are cut to {how.max_think_s:g} s (--max-think): "
            f"the longest was {cut.max():.6g} s, "
            f"all of them are {float((cut - how.max_think_s).sum()):.6g} s shorter"
        )


def _speed_notes(trace: Trace, how: Replay, pause_s: Floats) -> Iterator[str]:
    """Yield what is faster or slower than recorded; ``pause_s`` float64[n] as recorded."""
    span_s = float(trace.arrival_s[-1])
    if how.time_scale != 1:
        alone = how.think_scale is not None or trace.session is None
        what = "arrivals" if alone else "arrivals, and pauses within sessions,"
        scaled_s = span_s / how.time_scale
        lasts = f": arrivals over {span_s:.6g} s come within {scaled_s:.6g} s" if span_s else ""
        yield (
            f"{what} are played {how.time_scale:g} times as fast as recorded (--time-scale){lasts}"
        )
    if how.think_scale not in (None, 1.0) and trace.session is not None:
        total_s = float(pause_s.sum())
        yield (
            f"{np.count_nonzero(pause_s)} pauses within sessions are {how.think_scale:g} times "
            f"as long as recorded (--think-scale): {total_s * how.think_scale:.6g} s in all, "
            f"not {total_s:.6g} s"
        )
    if how.block_tokens is not None:
        yield f"hash_ids: blocks of {how.block_tokens} tokens are taken (--block-size)"


def _notes(trace: Trace, prompts: Prompts, how: Replay, idle: int) -> Iterator[str]:
    bare = np.zeros(0, dtype=np.int64) if trace.entry is None else np.flatnonzero(trace.entry < 0)
    if len(bare):
        behind = "; the turns behind them go on without them" if prompts.left_aside else ""
        yield (
            f"{len(bare)} of {len(trace)} requests have no text of a prompt, where others have one "
            f"({_named(trace, bare)}): made-up text of their length is sent{behind}"
        )
    given = [
        name
        for name, there in (
            ("recorded messages", trace.entry is not None),
            ("hash_ids", trace.blocks is not None),
            ("counts of blocks shared with the turn before", trace.shared_blocks is not None),
            ("counts of cached tokens", trace.cached_tokens is not None),
        )
        if there
    ]
    if len(given) > 1:
        yield (
            f"what prompts share is that of their {given[0]}; {' and '.join(given[1:])} are used "
            "only where a prompt has none"
        )
    has_ends = trace.end_s is not None or trace.pause_s is not None
    if trace.session is not None and not has_ends and trace.clock:
        yield (
            "sessions: the file does not say when answers ended: a turn comes as long after the "
            "start of the turn before as recorded, and no earlier than its answer"
        )
    if trace.session is None and (how.think_scale is not None or how.max_think_s < math.inf):
        yield "the file has no sessions: --max-think and --think-scale have nothing to act on"
    if trace.session is not None:
        sizes = np.bincount(np.maximum(trace.session, 0), trace.session >= 0)
        if (largest := int(sizes.max())) > max(_ODD_SESSION, len(trace) / 2):
            yield (
                f"one session has {largest} of {len(trace)} requests, which are played one after "
                "the other: if its id is none, name the column that holds sessions "
                "(--column session=NAME)"
            )
    if idle:
        yield f"{idle} sessions have a pause before their first request, which is not played"
    if prompts.apart:
        yield (
            f"{prompts.apart} later turns have messages that do not begin with those of the turn "
            "before: they are sent as recorded"
        )
    if prompts.too_short:
        yield (
            f"{prompts.too_short} later turns are too short to hold the turn before and its answer: "
            "that they begin with an earlier prompt all the same is an assumption, and so is what a "
            "prefix cache finds of it"
        )
    if prompts.begun_anew:
        yield (
            f"{prompts.begun_anew} later turns are shorter than every turn before them: "
            "they begin anew, and share nothing"
        )


def _named(trace: Trace, index: Ints) -> str:
    """Return where the first of these requests are in the file."""
    assert trace.place is not None
    places = list(dict.fromkeys(trace.place[index].tolist()))
    more = f" and {len(places) - MAX_NAMED} more" if len(places) > MAX_NAMED else ""
    return f"{trace.place_word} {', '.join(map(str, places[:MAX_NAMED]))}{more}"


def _prompts_text(trace: Trace, prompts: Prompts, recorded: int) -> str:
    """Return run.json's ``workload.prompts``: recorded or generated, and what is shared."""
    generated = len(trace) - recorded
    parts = [f"messages as recorded ({recorded} of {len(trace)} requests)"] if recorded else []
    if prompts.continues is not None:
        parts.append("histories with the answers of this run")
    if generated and trace.blocks is not None:
        parts.append("made-up text with shared blocks as in the trace")
    elif generated and trace.session is not None:
        parts.append("made-up text of the recorded lengths, each turn behind the one before")
    elif generated and prompts.shared is not None and not recorded:
        parts.append("made-up text that shares as many tokens as were cached")
    elif generated:
        parts.append("made-up text of the recorded lengths" if parts else "unique")
    return "; ".join(parts)
