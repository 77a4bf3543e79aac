"""What is known of a request beside the engine's speed, and how much of a latency it lets expect.

Two runs differ by the draw of lengths and arrivals, and by how full the server was. A control variate takes that
out (Lavenberg and Welch 1981): the share of samples over a threshold is tabled by cells of a known quantity, and what
a run's own requests let expect by the table is subtracted from what the run shows. The table is the baseline's alone.

- TTFT, by the requests in flight at its arrival and, in open loops, by the wait that one queue, first come, first served,
  would give the prompts (Lindley 1952); where the schedule depends on the server, that wait may be the change looked for.
- TPOT and ITL, by the mean number of requests in flight between a request's first and last token.
- E2E, by the planned output tokens.

In an open loop a slower engine is fuller as well; at equal occupancy its own speed is left. An engine that is as fast at
every occupancy is never fuller, so nothing is hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ampacity.analysis.metrics.requests import Floats, Ints, Requests
from ampacity.analysis.stage.steady import in_flight_at

CELLS = 20
_ROUNDS = 10  # of backfitting
_DIGITS = 6  # after the point: what is equal but for the last bit is in one cell
_CANDIDATES = np.geomspace(1e-6, 1e-2, 41)  # s per input token: a million to a hundred tokens/s
QUEUE, AT_ARRIVAL, IN_FLIGHT, OUTPUT_TOKENS = "queue", "at_arrival", "in_flight", "output_tokens"


class Known(Protocol):
    """A load level, as far as it is known beside its latencies."""

    @property
    def planned(self) -> Requests: ...

    @property
    def in_flight(self) -> Floats: ...

    @property
    def at_arrival(self) -> Floats: ...


@dataclass(frozen=True)
class Cells:
    """Requests by a quantity: ``edges`` between the CELLS cells, shape (CELLS - 1,). Of QUEUE: s of prefill per token."""

    by: str
    edges: Floats
    s_per_token: float | None = None

    def of(self, level: Known) -> Ints:
        """The cell of each request, 0 to CELLS - 1, shape (n,)."""
        return np.digitize(_quantity(self.by, level, self.s_per_token), self.edges)

    def as_dict(self) -> dict[str, Any]:
        return {"by": self.by, "edges": self.edges.tolist(), "s_per_token": self.s_per_token}


def cells_from_dict(value: Mapping[str, Any]) -> Cells:
    return Cells(value["by"], np.array(value["edges"], dtype=np.float64), value["s_per_token"])


def make_cells(by: str, levels: Sequence[Known], s_per_token: float | None = None) -> Cells:
    """With as many requests of these levels in each cell, as far as equal values allow."""
    values = np.concatenate([_quantity(by, level, s_per_token) for level in levels])
    return Cells(by, np.quantile(values, np.arange(1, CELLS) / CELLS).round(_DIGITS), s_per_token)


def _quantity(by: str, level: Known, s_per_token: float | None) -> Floats:
    if by == QUEUE and s_per_token is not None:
        return queue_time_s(level.planned, s_per_token).round(_DIGITS)
    if by == IN_FLIGHT:
        return level.in_flight.round(_DIGITS)
    if by == AT_ARRIVAL:
        return level.at_arrival
    return np.nan_to_num(level.planned.output_tokens_planned)


def queue_time_s(requests: Requests, s_per_token: float) -> Floats:
    """Wait and service of each request in scheduled order (Lindley 1952), shape (n,)."""
    due = (requests.scheduled_ns - requests.scheduled_ns[0]) * 1e-9
    service = s_per_token * np.nan_to_num(requests.input_tokens_planned)
    done = np.cumsum(service)
    before = done - service
    return np.asarray(done + np.maximum.accumulate(due - before) - due, dtype=np.float64)


def fit_queue(requests: Sequence[Requests], ttft_s: Sequence[Floats]) -> float:
    """The s per input token whose queue's times are most nearly in the order of the measured ones.

    One entry per run; NaN where a TTFT is not known.
    """
    known = [~np.isnan(t) for t in ttft_s]

    def correlation(s_per_token: float) -> float:
        found = [
            _rank_correlation(queue_time_s(r, s_per_token)[k], t[k])
            for r, t, k in zip(requests, ttft_s, known, strict=True)
        ]
        return float(np.mean(found))

    return float(max(_CANDIDATES, key=correlation))


def mean_in_flight(requests: Requests, stage: Requests, now_ns: float) -> Floats:
    """Time average of the requests of ``stage`` in flight from the first to the last token of each of ``requests``.

    At its schedule where a request has no token, at the first token where it has one. ``now_ns``: the end of what is
    not over. Shape (n,).
    """
    ended = np.where(np.isnan(stage.ended_ns), now_ns, stage.ended_ns)
    times = np.concatenate([stage.scheduled_ns, ended])
    order = np.argsort(times, kind="stable")
    times = times[order]
    count = np.cumsum(np.where(order < len(stage), 1.0, -1.0))
    integral = np.concatenate([[0.0], np.cumsum(count[:-1] * np.diff(times))])
    begin = np.where(
        np.isnan(requests.first_token_ns), requests.scheduled_ns, requests.first_token_ns
    )
    end = np.where(requests.last_token_ns > begin, requests.last_token_ns, begin)
    over = np.interp(end, times, integral) - np.interp(begin, times, integral)
    at_once = in_flight_at(begin, stage.scheduled_ns, ended)
    return np.where(end > begin, over / np.maximum(end - begin, 1.0), at_once)


def tables_of(cells: Sequence[Ints], over: Floats, sizes: Floats, share: float) -> Floats:
    """Share of the samples over the threshold in each cell, less ``share``, shape (len(cells), CELLS).

    ``over`` of ``sizes`` samples of each request. Of several quantities the tables add up, each fitted to what the
    others leave (backfitting). 0 where no sample is.
    """
    tables = np.zeros((len(cells), CELLS))
    counts = [np.bincount(c, sizes, CELLS) for c in cells]
    for _ in range(_ROUNDS if len(cells) > 1 else 1):
        for j, where in enumerate(cells):
            tables[j] = 0.0
            rest = over - sizes * (share + expected_of(tables, cells))
            tables[j] = np.bincount(where, rest, CELLS) / np.maximum(counts[j], 1.0)
    return tables


def expected_of(tables: Floats, cells: Sequence[Ints]) -> Floats:
    """What the tables let expect of each request, beyond the share of all, shape (n,)."""
    return np.asarray(sum(table[where] for table, where in zip(tables, cells, strict=True)))


def _rank_correlation(a: Floats, b: Floats) -> float:
    ranks = np.stack([np.argsort(np.argsort(x, kind="stable")) for x in (a, b)])
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1]) if len(a) > 1 else 0.0
