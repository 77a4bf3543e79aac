"""Tokens and requests per second of a window, with intervals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ampacity.analysis.contract.stage import Stage
from ampacity.analysis.metrics import requests
from ampacity.analysis.metrics.chunks import Chunks
from ampacity.analysis.stage.drift import RATE_BATCHES, events_per_batch, rate_interval
from ampacity.analysis.stage.outage import DOWN
from ampacity.analysis.stage.steady import Window

REQUESTS_MIN = 100
UNCOUNTED_MAX = 0.01  # of the answers, whose tokens nobody counted
FIRST_ANSWERS = 5  # whose mean time is how long an idle endpoint takes to answer
# of a number of arrivals: nearer to what was offered, it is the draw of the schedule
CHANCE_SD = 3.0
NO_FIGURE = (
    f"no rate is known: that takes a stage with a steady state, {REQUESTS_MIN} requests and a client "
    "that kept up"
)
TOO_SHORT = "the stage was shorter than an answer: no token came before its end"
_NS = 1e-9
_DOWN = DOWN - {"timeout"}


def is_figure(stage: Stage) -> bool:
    """Return whether a stage's rates stand for the server at that load.

    It has a steady state and REQUESTS_MIN requests in its window, and the client kept up. The
    highest rate of shorter stages, as those by which a search brackets the limit, is that of the
    luckiest draw.
    """
    return bool(stage.stable and stage.requests >= REQUESTS_MIN and not stage.client_limited)


def steady_state(stage: Stage) -> tuple[str, str | None]:
    """Return (yes | no | not shown | unknown, why not) for a stage's steady state.

    No: its queue grew to the end. Not shown: it grew no further than chance allows in a queue, yet
    its start-up had no end, or the number in flight kept moving one way. Unknown: too short to tell.
    """
    if stage.stable is None:
        return "unknown", str(stage.stable_reason)
    if not stage.stable:
        return "no", str(stage.stable_reason)
    window, law = stage.window, stage.littles_law
    if window.settled is False:
        return "not shown", str(window.reason)
    if (law.ok is False or _filled(stage)) and is_figure(stage):
        return (
            "not shown",
            f"the number in flight kept moving one way (L ÷ λW = {law.consistency:.2f})",
        )
    return "yes", None


def _filled(stage: Stage) -> bool:
    """Return whether more requests stayed than chance leaves where none waits for another.

    Of two numbers in flight, both Poisson, the difference has the variance 2 L.
    """
    gained = (stage.growth_rps or 0.0) * (stage.window.end_s - stage.window.start_s)
    return bool(stage.kind == "open" and gained > CHANCE_SD * (2 * stage.concurrency) ** 0.5)


def all_failed(stage: Stage) -> bool:
    """Return whether every request failed other than by its time limit.

    Such an endpoint is down or refuses, which a lower load does not change.
    """
    return 0 < stage.requests <= sum(stage.errors.get(status, 0) for status in _DOWN)


def span_s(
    kind: str, window: Window, n: int, ok: int, offered_rps: float | None, rates: OutputRates
) -> float:
    """Return how many seconds of load the ``n`` requests due in the window stand for.

    At least the window's own length. Open loop: longer where by chance more requests arrived than
    the rate offers in it (within CHANCE_SD; more than that is a rate that changes by design).
    Closed loop: longer where more requests began in the window than ended, as at a common start:
    then the time in which the loop answers that many.
    """
    length_s, rate = window.length_s, rates.achieved_rps
    if kind == "closed":
        return max(length_s, ok / rate) if rate else length_s
    offered = n if offered_rps is None else offered_rps * length_s
    by_chance = offered and 0 < n - offered <= CHANCE_SD * n**0.5
    return float(length_s * n / offered) if by_chance else length_s


def tokens_per_batch(rows: requests.Requests, chunks: Chunks, window: Window) -> requests.Floats:
    """Return output tokens that came in each of ``RATE_BATCHES`` equal spans.

    Chunks of unknown size share the request's tokens evenly.
    """
    found, batch_s = np.zeros(RATE_BATCHES), window.length_s / RATE_BATCHES
    if batch_s <= 0:
        return found
    held, count = chunks.tokens_in(), chunks.count
    sent = np.where(np.isnan(rows.output_tokens), count, requests.visible_tokens(rows))
    mean_chunk = np.divide(sent, count, out=np.zeros(len(rows)), where=count > 0)
    held = np.where(chunks.known, held, mean_chunk * count)
    silent = (count == 0) & rows.has_status("ok")
    held = np.where(silent, np.nan_to_num(rows.output_tokens), held)
    last_ns = np.where(silent, rows.ended_ns, rows.started_ns + chunks.last_us() * 1e3)

    def batch_of(at_ns: requests.Floats) -> requests.Floats:
        return np.asarray(np.floor((at_ns * _NS - window.start_s) / batch_s))

    def add(batch: requests.Floats, tokens: requests.Floats) -> None:
        inside = (batch >= 0) & (batch < RATE_BATCHES)
        found[:] += np.bincount(batch[inside].astype(np.int64), tokens[inside], RATE_BATCHES)

    first, last = batch_of(np.where(silent, rows.ended_ns, rows.started_ns)), batch_of(last_ns)
    add(first[first == last], held[first == last])
    crossing = (count > 0) & (first != last) & (last >= 0) & (first < RATE_BATCHES)
    owners = np.flatnonzero(crossing)
    for where, part in chunks.take(crossing).parts():
        owner = owners[where][part.owner]
        tokens = 1.0 if part.tokens is None else part.tokens
        each = np.where(chunks.known[owner], tokens, mean_chunk[owner])
        add(batch_of(rows.started_ns[owner] + part.at_us * 1e3), each)
    return found


def input_rate(rows: requests.Requests, window: Window) -> float:
    """Return input tokens whose prefill ended (first token) in the window, per second."""
    if window.length_s <= 0:
        return 0.0
    done = np.where(
        np.isnan(rows.first_token_ns) & rows.has_status("ok"), rows.ended_ns, rows.first_token_ns
    )
    tokens = np.where(np.isnan(rows.input_tokens), rows.input_tokens_planned, rows.input_tokens)
    return float(np.nansum(tokens[window.holds(done * _NS)]) / window.length_s)


@dataclass(frozen=True)
class OutputRates:
    """Answers/s and output tokens/s of a window, with 95 % intervals by batch means."""

    achieved_rps: float
    achieved_rps_ci: list[float] | None
    output_tokens_per_s: float | None
    output_tokens_per_s_ci: list[float] | None
    output_tokens_per_s_reason: str | None = None


def output_rates(
    rows: requests.Requests, tokens: requests.Floats, window: Window, start_s: float, closed: bool
) -> OutputRates:
    """Return the rates of a stage that began at ``start_s``; ``tokens``: of tokens_per_batch."""
    answers, each_s = _answers_per_batch(rows, window, start_s, closed)
    rate, rate_ci = (
        float(answers.mean()) / each_s if each_s > 0 else 0.0,
        rate_interval(answers, each_s),
    )
    if requests.uncounted_share(rows) > UNCOUNTED_MAX:
        return OutputRates(rate, rate_ci, None, None, requests.UNCOUNTED)
    if not tokens.any() and np.nansum(rows.output_tokens[rows.has_status("ok")]) > 0:
        return OutputRates(rate, rate_ci, None, None, TOO_SHORT)
    tokens_per_s = float(tokens.sum()) / window.length_s if window.length_s > 0 else 0.0
    tokens_ci = rate_interval(tokens, window.length_s / RATE_BATCHES)
    return OutputRates(rate, rate_ci, tokens_per_s, tokens_ci)


def _answers_per_batch(
    rows: requests.Requests, window: Window, start_s: float, closed: bool
) -> tuple[requests.Floats, float]:
    """Return (answers in each of some equal spans of the window, the length of a span in s).

    Open: by the time at which they ended, from when the first requests have been answered in the
    mean (half of the window at the latest): before that a server fills, and no answer can have
    ended. Closed: users wait for their answers, so each request counts with the share of its time
    that lies in a span, whether or not it ends there (renewal-reward); a span is two answers long
    at least, or its neighbours would share them.
    """
    ok = rows.has_status("ok") & np.isfinite(rows.started_ns) & np.isfinite(rows.ended_ns)
    begin_s, end_s = (x[ok] * _NS for x in (rows.started_ns, rows.ended_ns))
    took_s = np.maximum(end_s - begin_s, _NS)
    if closed:
        mean_s = took_s.mean() if len(took_s) else np.inf
        spans = int(np.clip(window.length_s / (2 * mean_s), 1, RATE_BATCHES))
        edges_s = np.linspace(window.start_s, window.end_s, spans + 1)
        done = [float(np.clip((edge - begin_s) / took_s, 0.0, 1.0).sum()) for edge in edges_s]
        return np.diff(done), window.length_s / spans
    first_s = took_s[: max(FIRST_ANSWERS, len(took_s) // 10)]
    filled_s = start_s + (float(first_s.mean()) if len(first_s) else 0.0)
    from_s = min(max(window.start_s, filled_s), (window.start_s + window.end_s) / 2)
    if window.end_s <= from_s:
        return np.zeros(RATE_BATCHES), 0.0
    return events_per_batch(end_s, from_s, window.end_s), (window.end_s - from_s) / RATE_BATCHES
