"""Tokens and requests per second of a window, with intervals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from analysis.drift import RATE_BATCHES, events_per_batch, rate_interval, spread_per_batch
from analysis.metrics import Chunks, Requests, visible_tokens
from analysis.steady import Window

REQUESTS_MIN = 100
CHANCE_SD = 3.0  # of a number of arrivals: nearer to what was offered, it is the draw of the schedule
NO_FIGURE = f"no stage has a steady state and {REQUESTS_MIN} requests with a client that kept up: its rates are no figures"
_NS = 1e-9


def is_figure(stage: Mapping[str, Any]) -> bool:
    """Whether a stage's rates stand for the server at that load, so that the best of them may be named.

    It has a steady state and REQUESTS_MIN requests in its window, and the client kept up. The highest rate of shorter
    stages, as those by which a search brackets the limit, is that of the luckiest draw.
    """
    return bool(stage["stable"] and stage["requests"] >= REQUESTS_MIN and not stage["client_limited"])


def span_s(stage: Mapping[str, Any], window: Window) -> float:
    """Seconds of the stage's load that the requests due in its window are worth; the window's own at least.

    Open: more than that where more arrived by chance than are offered in it (CHANCE_SD; beyond it is a rate that moves
    by design). Closed: users who begin together, and answers that come after the window's end, make more
    requests begin than end, so that the answers are worth the time in which the loop gives as many.
    """
    length_s, n = window.length_s, stage["requests"]
    if stage["kind"] == "closed":
        return max(length_s, stage["ok"] / stage["achieved_rps"]) if stage["achieved_rps"] else length_s
    offered = n if stage["offered_rps"] is None else stage["offered_rps"] * length_s
    return float(length_s * n / offered) if 0 < n - offered <= CHANCE_SD * n**0.5 and offered else length_s


def output_rate(rows: Requests, chunks: Chunks, window: Window) -> float:
    """Output tokens per second of the window; chunks of unknown size share the request's tokens evenly."""
    if window.length_s <= 0:
        return 0.0
    held, count = chunks.tokens_in(), chunks.count
    sent = np.where(np.isnan(rows.output_tokens), count, visible_tokens(rows))
    mean_chunk = np.divide(sent, count, out=np.zeros(len(rows)), where=count > 0)
    held = np.where(chunks.known, held, mean_chunk * count)
    silent = (count == 0) & rows.has_status("ok")
    held = np.where(silent, np.nan_to_num(rows.output_tokens), held)
    last_ns = np.where(silent, rows.ended_ns, rows.started_ns + chunks.last_us() * 1e3)
    begin_ns = np.where(silent, last_ns, rows.started_ns)
    whole = (begin_ns * _NS >= window.start_s) & (last_ns * _NS < window.end_s)
    crossing = (count > 0) & ~whole & (last_ns * _NS >= window.start_s) & (begin_ns * _NS < window.end_s)
    total = float(held[whole].sum())
    if crossing.any():
        at = np.repeat(crossing, count)
        owner = np.repeat(np.flatnonzero(crossing), count[crossing])
        at_s = (rows.started_ns[owner] + chunks.at_us[at] * 1e3) * _NS
        each = np.where(chunks.known, 1.0 if chunks.tokens is None else np.nan, mean_chunk)[owner]
        if chunks.tokens is not None:
            each = np.where(np.isnan(each), chunks.tokens[at], each)
        total += float(each[(at_s >= window.start_s) & (at_s < window.end_s)].sum())
    return total / window.length_s


def input_rate(rows: Requests, window: Window) -> float:
    """Input tokens whose prefill ended (first token) in the window, per second."""
    if window.length_s <= 0:
        return 0.0
    done = np.where(np.isnan(rows.first_token_ns) & rows.has_status("ok"), rows.ended_ns, rows.first_token_ns)
    tokens = np.where(np.isnan(rows.input_tokens), rows.input_tokens_planned, rows.input_tokens)
    return float(np.nansum(tokens[window.holds(done * _NS)]) / window.length_s)


def rate_intervals(rows: Requests, window: Window) -> dict[str, Any]:
    """95 % intervals by batch means; a request's tokens are taken to come evenly from its first to its last."""
    start_s, end_s = window.start_s, window.end_s
    ended = rows.ended_ns[rows.has_status("ok")] * _NS
    first, last = rows.first_token_ns * _NS, rows.last_token_ns * _NS
    tokens = spread_per_batch(rows.output_tokens, first, last, start_s, end_s)
    batch_s = window.length_s / RATE_BATCHES
    return {
        "achieved_rps_ci": rate_interval(events_per_batch(ended, start_s, end_s), batch_s) if batch_s > 0 else None,
        "output_tokens_per_s_ci": rate_interval(tokens, batch_s),
    }  # fmt: skip
