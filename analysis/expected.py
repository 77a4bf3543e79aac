"""What the schedule alone lets expect of TTFT: the wait in one queue, first come, first served, for the prefill before it.

Two runs that sent other requests differ by the draw of lengths and arrivals, and that is most of what the median
TTFT of a run of heavy-tailed lengths differs by from another. A control variate takes it out: the share of requests over a
threshold is tabled by the time that a queue of ``s_per_token`` per planned input token would have taken, and what a
run's own times let expect is subtracted from what it shows. Fitted to the baseline alone; where the table explains
nothing it takes nothing away. Only for schedules that do not depend on the server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.metrics import Floats, Requests

CELLS = 20
_CANDIDATES = np.geomspace(1e-6, 1e-2, 41)  # s per input token: a million to a hundred tokens/s


@dataclass(frozen=True)
class Queue:
    """Seconds of prefill per input token, and the edges in s between the cells of the table, shape (CELLS - 1,)."""

    s_per_token: float
    edges_s: Floats

    def cells(self, requests: Requests) -> Any:
        """The cell of each request, 0 to CELLS - 1, shape (n,)."""
        return np.digitize(queue_time_s(requests, self.s_per_token), self.edges_s)

    def as_dict(self) -> dict[str, Any]:
        return {"s_per_token": float(f"{self.s_per_token:.6g}"), "edges_s": [float(f"{x:.6g}") for x in self.edges_s]}  # fmt: skip


def queue_from_dict(value: Mapping[str, Any] | None) -> Queue | None:
    return value and Queue(float(value["s_per_token"]), np.array(value["edges_s"], dtype=np.float64))  # type: ignore[return-value]


def queue_time_s(requests: Requests, s_per_token: float) -> Floats:
    """Wait and service of each request in scheduled order (Lindley 1952), shape (n,)."""
    due = (requests.scheduled_ns - requests.scheduled_ns[0]) * 1e-9
    service = s_per_token * np.nan_to_num(requests.input_tokens_planned)
    done = np.cumsum(service)
    before = done - service
    return np.asarray(done + np.maximum.accumulate(due - before) - due, dtype=np.float64)


def fit_queue(requests: Sequence[Requests], ttft_s: Sequence[Floats]) -> Queue:
    """The queue whose times are most nearly in the order of the measured ones (NaN: not known); one entry per run."""
    known = [~np.isnan(t) for t in ttft_s]

    def correlation(s_per_token: float) -> float:
        found = [
            _rank_correlation(queue_time_s(r, s_per_token)[k], t[k])
            for r, t, k in zip(requests, ttft_s, known, strict=True)
        ]
        return float(np.mean(found))

    best = float(max(_CANDIDATES, key=correlation))
    times = np.concatenate([queue_time_s(r, best) for r in requests])
    return Queue(best, np.quantile(times, np.arange(1, CELLS) / CELLS))


def table_of(cells: Sequence[Any], over: Sequence[Floats], share: float) -> Floats:
    """Share over the threshold in each cell, less the share over all, shape (CELLS,); 0 where no request is."""
    where, values = np.concatenate(cells), np.concatenate(over)
    sums, sizes = (np.bincount(where, w, CELLS) for w in (values, None))
    return np.where(sizes > 0, sums / np.maximum(sizes, 1) - share, 0.0)


def _rank_correlation(a: Floats, b: Floats) -> float:
    ranks = np.stack([np.argsort(np.argsort(x, kind="stable")) for x in (a, b)])
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1]) if len(a) > 1 else 0.0
