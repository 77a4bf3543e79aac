"""Replay recorded sessions: dependencies, pauses, and the prefix of each prompt."""

import itertools
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ampacity.workloads.prompts.prefixes import (
    SharedPrefixes,
    block_sizes,
    prefixes_of_blocks,
    take_lists,
)
from ampacity.workloads.timetable import AFTER_END, AFTER_START, WITH_START
from ampacity.workloads.traces.trace import Trace

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
_LOOK_BACK = 64  # so many earlier requests of a conversation are looked at
_MANY_PIECES = 64  # a prompt of more pieces is not cut within its last ...
# ... tokens, so many or such a share, so that they stay few
_SLACK_TOKENS, _SLACK_SHARE = (128, 0.005)
_OWN, _COMMON = 1 << 62, (1 << 62) - 1  # segments: the text that row k adds is _OWN + k


def roots(trace: Trace) -> Ints:
    """Return int64[n]: the session of each request, helpers counted to their caller's; -1: none."""
    if trace.session is None:
        return np.full(len(trace), -1, dtype=np.int64)
    found = np.arange(int(trace.session.max(initial=-1)) + 2)  # the last one stands for -1
    found[-1] = -1
    for session, caller in _callers(trace).items():
        found[session] = caller
    while (found[found] != found).any():
        found = found[found]
    return np.asarray(found[trace.session], dtype=np.int64)


def _rows(trace: Trace) -> dict[int, list[int]]:
    """Return the requests of each conversation, in the order of their times."""
    rows: dict[int, list[int]] = defaultdict(list)
    for i, session in enumerate([] if trace.session is None else trace.session.tolist()):
        if session >= 0:
            rows[session].append(i)
    return rows


def _callers(trace: Trace) -> dict[int, int]:
    """Return the caller of each helper that starts after it."""
    if trace.parent is None or trace.session is None:
        return {}
    sessions, first = np.unique(trace.session, return_index=True)
    begin = dict(zip(sessions.tolist(), first.tolist(), strict=True))
    found = {session: int(trace.parent[i]) for session, i in begin.items() if session >= 0}
    return {s: c for s, c in found.items() if c >= 0 and c in begin and begin[c] < begin[s]}


@dataclass
class Waits:
    """For each request of a trace: what it waits for, its pause, and what the pause counts from."""

    after: list[list[int]]
    pause_s: Floats
    counts_from: NDArray[np.int8]

    def follow(self, continues: Ints) -> None:
        """Make each request that continues another (-1: none) wait for that one alone."""
        for i in np.flatnonzero(continues >= 0).tolist():
            self.after[i] = [int(continues[i])]
            if self.counts_from[i] == WITH_START:
                self.counts_from[i], self.pause_s[i] = AFTER_END, 0.0


def who_waits(trace: Trace) -> Waits:
    """Infer dependencies from the recorded times.

    A request waits for those of its conversation that had ended when it began and that no other of
    these had waited for: the previous one, or several that ran in parallel. Where all were still
    running, it starts with the first of them. A helper starts after its caller's finished requests;
    the caller waits for a helper that had ended. Without end times, each waits for the previous
    one, and at least the recorded time from start to start.
    """
    n, rows, callers = len(trace), _rows(trace), _callers(trace)
    waits = Waits([[] for _ in range(n)], np.zeros(n), np.zeros(n, dtype=np.int8))
    ends = np.full(n, np.nan) if trace.end_s is None else trace.end_s
    told_s = np.full(n, np.nan) if trace.pause_s is None else trace.pause_s
    for session, mine in rows.items():
        for k, i in enumerate(mine[1:], start=1):
            _wait(trace, waits, ends, mine[max(k - _LOOK_BACK, 0) : k], i, told_s[i])
        if session in callers:
            earlier = [j for j in rows[callers[session]] if j < mine[0]]
            _wait(trace, waits, ends, earlier[-_LOOK_BACK:], mine[0], np.nan)
    for session, caller in callers.items():
        _join(trace, waits, ends, rows[session], rows[caller], told_s)
    return waits


def _wait(
    trace: Trace, waits: Waits, ends: Floats, before: list[int], i: int, told_s: float
) -> None:
    """Set what request ``i`` waits for among ``before``; ``told_s``: its recorded pause, or NaN."""
    start, last = trace.arrival_s, before[-1]
    slack_s = trace.resolution_s
    if not np.isnan(told_s):
        waits.after[i], waits.pause_s[i] = [last], told_s
    elif np.isnan(ends[last]):
        # what began in the same moment and cannot hold the other's answer ran beside it
        beside = (
            start[i] == start[last]
            and trace.input_tokens[i] < trace.input_tokens[last] + trace.output_tokens[last]
        )
        if not beside:
            waits.after[i], waits.pause_s[i] = [last], start[i] - start[last]
            waits.counts_from[i] = AFTER_START
        elif waits.after[last]:
            waits.after[i], waits.pause_s[i] = list(waits.after[last]), waits.pause_s[last]
            waits.counts_from[i] = waits.counts_from[last]
        else:
            waits.after[i], waits.counts_from[i] = [last], WITH_START
    elif finished := [j for j in before if ends[j] <= start[i] + slack_s]:
        since_s = start[finished[-1]] + slack_s
        waits.after[i] = [j for j in finished if j == finished[-1] or ends[j] > since_s]
        waits.pause_s[i] = max(0.0, start[i] - ends[waits.after[i]].max())
    else:
        waits.after[i], waits.counts_from[i] = [before[0]], WITH_START
        waits.pause_s[i] = start[i] - start[before[0]]


def _join(
    trace: Trace, waits: Waits, ends: Floats, helper: list[int], caller: list[int], told_s: Floats
) -> None:
    """Make the caller's first request after a helper's end wait for it too."""
    last = helper[-1]
    for before, i in itertools.pairwise(caller):
        began, ended = trace.arrival_s[i], ends[last]
        if helper[0] < i and last < i and ended <= began + trace.resolution_s:
            if waits.counts_from[i] == AFTER_END and trace.arrival_s[before] <= ended:
                waits.after[i] = sorted({*waits.after[i], last})
                if np.isnan(told_s[i]) or ended > ends[before]:
                    waits.pause_s[i] = max(0.0, began - np.nanmax(ends[waits.after[i]]))
            return


def earliest_s(arrival_s: Floats, waits: Waits) -> Floats:
    """Return when each request would be due if every answer took no time."""
    due, pause = arrival_s.tolist(), waits.pause_s.tolist()
    for i, after in enumerate(waits.after):
        if after:
            due[i] = max(due[k] for k in after) + pause[i]
    return np.asarray(due, dtype=np.float64)


@dataclass
class Prompts:
    """The shared prefixes and continuations of a trace's prompts."""

    shared: SharedPrefixes | None
    input_tokens: Ints
    # conversations that the recorded texts go on with, each behind the answer to the last
    continues: Ints | None
    new_tokens: Ints | None
    too_short: int = 0  # turns that share with those before, and cannot hold all of the last
    begun_anew: int = 0  # turns of which nothing says what they share with those before
    apart: int = 0  # turns whose recorded messages are not those of the turn before and more
    left_aside: int = 0  # turns without a text, in conversations that texts go on with


def prompts_of(trace: Trace) -> Prompts:
    """Return what each prompt shares with others.

    By its recorded messages, else by its blocks, else with the longest earlier prompt of its
    conversation that is no longer than it.
    """
    found = _told_on(trace)
    blocks = _blocks_of(trace)
    need = _own_chains(trace, blocks)
    if trace.entry is not None and trace.recorded is not None:
        by_messages = trace.recorded.shared(trace.entry, found.input_tokens)
        blocks = by_messages if blocks is None else _first_of(by_messages, blocks, trace.entry >= 0)
        need &= trace.entry < 0
    if not need.any():
        found.shared = blocks
        return found
    chains = [[] if blocks is None else blocks.of(i) for i in range(len(trace))]
    size, far = _counted_block(trace), dict[int, int]()
    inputs, cached = trace.input_tokens, trace.cached_tokens
    made_up = np.ones(len(trace), dtype=bool) if trace.entry is None else trace.entry < 0
    alone = need if trace.session is None else need & (trace.session < 0)
    for session in [*_rows(trace).values(), *([i] for i in np.flatnonzero(alone).tolist())]:
        mine = [i for i in session if made_up[i]]  # no made-up text begins with a recorded one
        for k, i in enumerate(mine):
            if need[i]:
                begins_anew = _chain(trace, chains, mine[max(k - _LOOK_BACK, 0) : k], i, size, far)
                found.begun_anew += begins_anew
                if k and not (begins_anew or size) and (cached is None or cached[i] < 0):
                    whole = inputs[mine[k - 1]] + trace.output_tokens[mine[k - 1]]
                    found.too_short += bool(inputs[i] < whole)
    start = np.concatenate([[0], np.cumsum([len(chain) for chain in chains])]).astype(np.int64)
    flat = np.array([pair for chain in chains for pair in chain], dtype=np.int64).reshape(-1, 2)
    found.shared = SharedPrefixes(start, flat[:, 0], flat[:, 1])
    return found


def _blocks_of(trace: Trace) -> SharedPrefixes | None:
    size = trace.block_tokens  # see trace_cuts.with_blocks
    if trace.blocks is None or size is None:
        return None
    return prefixes_of_blocks(trace.blocks.ids, trace.blocks.start, trace.input_tokens, size)


def _own_chains(trace: Trace, blocks: SharedPrefixes | None) -> NDArray[np.bool_]:
    """Return which requests without blocks are turns of sessions, or have cached tokens."""
    need = np.zeros(len(trace), dtype=bool)
    if trace.session is not None:
        size = np.bincount(np.maximum(trace.session, 0), trace.session >= 0)[trace.session]
        need |= (trace.session >= 0) & (size > 1)
    if trace.cached_tokens is not None:
        need |= trace.cached_tokens > 0
    return need if blocks is None else need & (np.diff(blocks.start) == 0)


def _first_of(a: SharedPrefixes, b: SharedPrefixes, of_a: NDArray[np.bool_]) -> SharedPrefixes:
    """Return the prompts of ``a`` where ``of_a``, else of ``b``."""
    n = len(of_a)
    start = np.concatenate([a.start, a.start[-1] + b.start[1:]])
    items, new_start = take_lists(start, np.where(of_a, np.arange(n), np.arange(n) + n))
    return SharedPrefixes(
        new_start,
        np.concatenate([a.ids, b.ids])[items],
        np.concatenate([a.tokens, b.tokens])[items],
    )


def _counted_block(trace: Trace) -> int:
    """Return the block size where the file only counts blocks shared with the previous turn."""
    if trace.shared_blocks is None:
        return 0
    counts = np.concatenate([[0], np.cumsum(np.maximum(trace.shared_blocks[:, 1], 0))])
    return next(iter(block_sizes(trace.input_tokens, counts)), 0)


def _chain(
    trace: Trace,
    chains: list[list[tuple[int, int]]],
    before: list[int],
    i: int,
    size: int,
    far: dict[int, int],
) -> bool:
    """Set the prefix of a turn's prompt; return whether it restarts, for want of a shorter one.

    ``far``: how much of each segment's text is in use. The first to continue it extends it, others
    get a segment of their own behind what they share.
    """
    inputs, length = trace.input_tokens, int(trace.input_tokens[i])
    cached = -1 if trace.cached_tokens is None else int(trace.cached_tokens[i])
    model, common = -1, length if cached < 0 else min(cached, length)
    if size and trace.shared_blocks is not None and before:
        model, common = before[-1], min(int(trace.shared_blocks[i, 0]) * size, length)
    else:
        fitting = [j for j in before if inputs[j] <= length] if cached < 0 else before
        model = max(fitting, key=lambda j: (int(inputs[j]), j), default=-1)
    of_model = (
        chains[model] if model >= 0 else [(_COMMON, common)] if cached > 0 and not before else []
    )
    slack = max(_SLACK_TOKENS, int(_SLACK_SHARE * length))
    if len(of_model) > _MANY_PIECES and int(inputs[model]) - common < slack:
        common = length
    chain: list[tuple[int, int]] = []
    left = common
    for piece, tokens in of_model:
        if left > 0:
            chain.append((piece, min(tokens, left)))
            left -= tokens
    rest = length - sum(tokens for _, tokens in chain)
    if rest and chain and chain[-1][0] >= _OWN and far.get(chain[-1][0]) == chain[-1][1]:
        chain[-1] = chain[-1][0], chain[-1][1] + rest
    elif rest:
        chain.append((_OWN + i, rest))
    far[chain[-1][0]] = max(far.get(chain[-1][0], 0), chain[-1][1])
    chains[i] = chain
    return bool(before) and model < 0


def _told_on(trace: Trace) -> Prompts:
    """Find conversations whose file has only the text each turn adds: they continue real answers.

    A turn without a text is separate: the next one continues the text before it.
    """
    inputs = trace.input_tokens.copy()
    found = Prompts(None, inputs, None, None)
    entry, recorded = trace.entry, trace.recorded
    if entry is None or recorded is None:
        return found
    continues, new = np.full(len(trace), -1, dtype=np.int64), inputs.copy()
    for session in _rows(trace).values():
        mine = [i for i in session if entry[i] >= 0]
        told = all(recorded.is_text[entry[i]] for i in mine)
        pairs = list(itertools.pairwise(mine))
        apart = sum(not recorded.begins_with(int(entry[i]), int(entry[k])) for k, i in pairs)
        if not told:
            found.apart += apart
        elif apart:
            found.left_aside += len(session) - len(mine)
            for k, i in pairs:
                continues[i] = k
                inputs[i] = inputs[k] + trace.output_tokens[k] + new[i]
    if (continues >= 0).any():
        found.continues, found.new_tokens = continues, new
    return found
