"""Token deadlines: is every token there when a reader who began on time reaches it?

The first token is due ``first_s`` after the schedule, every further one ``each_s`` later, so that
time gained early may be spent later (a buffer), which no percentile of gaps shows.
"""

import numpy as np

from ampacity.analysis.metrics.chunks import Chunks
from ampacity.analysis.metrics.requests import Floats, Requests


def token_times_s(requests: Requests, chunks: Chunks) -> tuple[Floats, Floats]:
    """Return (s after the schedule, tokens of the request before it) of every chunk."""
    delay_s = (requests.started_ns - requests.scheduled_ns) * 1e-9
    tokens = np.ones(len(chunks.at_us)) if chunks.tokens is None else chunks.tokens.astype(float)
    before = np.cumsum(tokens) - tokens
    has = chunks.count > 0
    base = np.zeros(len(requests))
    base[has] = before[chunks.starts[:-1][has]]
    at_s = np.repeat(delay_s, chunks.count) + chunks.at_us * 1e-6
    return at_s, before - np.repeat(base, chunks.count)


def needed_pace_s(requests: Requests, chunks: Chunks, first_s: float) -> Floats:
    """Return the least ``each_s`` per token that every token of a request keeps, shape (n,), s.

    max over tokens i >= 1 of (arrival_i - first_s) / i; infinite where the first token itself was
    late, 0 where all came within first_s, NaN without a chunk. A chunk is due with its first token.
    """
    found = np.empty(len(requests))
    for where, part in chunks.parts():
        found[where] = _needed_pace_s(requests.take(where), part, first_s)
    return found


def _needed_pace_s(requests: Requests, chunks: Chunks, first_s: float) -> Floats:
    at_s, index = token_times_s(requests, chunks)
    late = at_s - first_s
    with np.errstate(divide="ignore", invalid="ignore"):
        pace = np.where(index > 0, np.maximum(late, 0.0) / index, np.where(late > 0, np.inf, 0.0))
    result, has = np.full(len(requests), np.nan), chunks.count > 0
    if has.any():
        result[has] = np.maximum.reduceat(pace, chunks.starts[:-1][has])
    return result


def fluidity_of(requests: Requests, chunks: Chunks, first_s: float, each_s: float) -> Floats:
    """Return the share of token deadlines kept, 1 - missed/total, of requests with chunks, (n,).

    Etalon (Metron), arXiv 2407.07000. A token in time adds what it was early to the slack of the
    next; a late one misses floor((gap - slack - deadline) / each_s) + 1 deadlines and starts anew.
    Of a chunk only the first token can be late.
    """
    found = np.empty(len(requests))
    for where, part in chunks.parts():
        found[where] = _fluidity_of(requests.take(where), part, first_s, each_s)
    return found


def _fluidity_of(requests: Requests, chunks: Chunks, first_s: float, each_s: float) -> Floats:
    at_s, index = token_times_s(requests, chunks)
    n, count = len(requests), chunks.count
    slack, missed, total = np.zeros(n), np.zeros(n), np.zeros(n)
    order = np.argsort(-count, kind="stable")  # the longest first, so that a step is a slice
    starts, alive = chunks.starts[:-1][order], n
    beside = None if chunks.tokens is None else np.maximum(chunks.tokens - 1, 0)
    descending = count[order]
    for i in range(int(count.max(initial=0))):
        while alive and descending[alive - 1] <= i:
            alive -= 1
        here = starts[:alive] + i
        gap = at_s[here] if i == 0 else at_s[here] - at_s[here - 1]
        due = np.full(alive, first_s) if i == 0 else each_s * (index[here] - index[here - 1])
        _step(gap, due, each_s, slack[:alive], missed[:alive], total[:alive])
        if beside is not None:
            total[:alive] += beside[here]
    result = np.empty(n)
    result[order] = 1 - missed / np.maximum(total, 1)
    return result


def _step(
    gap: Floats, due: Floats, each_s: float, slack: Floats, missed: Floats, total: Floats
) -> None:
    """Advance many requests by one token; the last three arrays change in place."""
    over = gap - due - slack
    late = over > 1e-12
    misses = np.where(late, np.floor(np.maximum(over, 0.0) / each_s + 1e-9) + 1, 0.0)
    total += np.where(late, misses, 1.0)
    missed += misses
    slack[:] = np.where(late, 0.0, slack + due - gap)
