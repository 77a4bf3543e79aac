"""A load level of a run in consecutive blocks: how many samples of each are over a threshold.

Blocks keep what a single percentile forgets: how the samples of a run depend on each other, and, where two
runs sent the same schedule, which blocks hold the same requests. A threshold that many samples equal (a step
time of the engine) is split so that the share over it is exactly 1 - q.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from analysis.cohort import Cohort
from analysis.intervals import effective_size
from analysis.metrics import Requests, read_chunks
from analysis.observations import Observations, quantile_rank
from analysis.stages import RunRecords

Floats = npt.NDArray[np.float64]

BLOCKS = 20
METRICS = ("ttft", "itl", "tpot", "e2e")
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True)
class Blocks:
    """``over`` of ``size`` samples per block, each of shape (BLOCKS,); ``effective``: how many independent ones they are worth."""

    over: Floats
    size: Floats
    effective: float

    @property
    def share(self) -> float:
        return float(self.over.sum() / self.size.sum())


@dataclass(frozen=True)
class LevelRecords:
    """The requests of one load level from ordinal ``skipped`` on, in scheduled order."""

    cohort: Cohort
    schedule: str  # digest of the planned lengths, warm-up included

    @cached_property
    def metrics(self) -> dict[str, Observations]:
        """TTFT and E2E from the schedule, so that a wait before the first byte counts."""
        c = self.cohort
        return {"ttft": c.ttft(from_schedule=True), "itl": c.itl, "tpot": c.tpot, "e2e": c.e2e(from_schedule=True)}  # fmt: skip

    @cached_property
    def failed(self) -> Floats:
        """1 for each request that failed or was cut off."""
        r = self.cohort.requests
        return np.asarray(r.failed | r.has_status("unfinished"), dtype=np.float64)

    @property
    def n(self) -> int:
        return len(self.cohort.requests)

    def rates(self, kind: str) -> Floats:
        """Output tokens received per block: per planned token (open loop) or per second of the block (closed)."""
        r = self.cohort.requests
        tokens = in_blocks(
            np.nan_to_num(np.where(r.has_status("ok"), r.output_tokens, self.cohort.chunks.tokens_in()))
        )
        if kind == "open":
            return tokens / np.maximum(in_blocks(np.nan_to_num(r.output_tokens_planned)), 1.0)
        starts = r.scheduled_ns[_edges(self.n)]
        return tokens[:-1] / np.maximum(np.diff(starts) * 1e-9, 1e-9)


def level_records(records: RunRecords, index: int, skipped: int, now_ns: float) -> LevelRecords:
    """Stage ``index`` of a run without its first ``skipped`` requests; ``now_ns`` after the origin, for ages."""
    rows = records.requests.take((records.requests.stage == index) & (records.requests.attempt == 0))
    requests = rows.take(np.arange(len(rows)) >= skipped)
    cohort = Cohort(requests, read_chunks(records.table, requests), 0, now_ns)
    return LevelRecords(cohort, _digest(rows))


def _digest(rows: Requests) -> str:
    planned = np.nan_to_num(np.stack([rows.input_tokens_planned, rows.output_tokens_planned])).astype("<i8")
    return hashlib.sha256(planned.tobytes()).hexdigest()[:16]


def _edges(n: int) -> npt.NDArray[np.int64]:
    return np.arange(BLOCKS, dtype=np.int64) * n // BLOCKS


def in_blocks(values: Floats) -> Floats:
    """Sums of a series over BLOCKS consecutive parts of nearly equal length; the series is at least as long."""
    return np.asarray(np.add.reduceat(values, _edges(len(values))), dtype=np.float64)


def blocks_over(o: Observations, limit_s: float, split: float = 0.0, *, paired: bool = False) -> Blocks:
    """Samples above ``limit_s``, and the share ``split`` of those that equal it."""
    misses = o.misses(limit_s)
    if split:
        misses = misses + split * (o.misses(np.nextafter(limit_s, 0.0)) - misses)
    # runs that are compared block by block have no use for the effective size, which costs most of the time
    return Blocks(in_blocks(misses), in_blocks(o.sizes), 0.0 if paired else o.effective_size(limit_s))


def blocks_of(events: Floats) -> Blocks:
    """Requests with an event, as a failure."""
    ones = np.ones(len(events))
    return Blocks(in_blocks(events), in_blocks(ones), effective_size(events, ones))


def pooled_quantile(runs: Sequence[Observations], quantile: float) -> tuple[float, float]:
    """(value in s, split): the quantile of all runs together, and the share of its ties that makes 1 - q exact."""
    values = np.concatenate([o.values for o in runs])
    weights = np.concatenate([np.ones(len(o.values)) if o.weights is None else o.weights for o in runs])
    order = np.argsort(values)
    cumulative = np.cumsum(weights[order])
    n = sum(o.n for o in runs)
    at = int(np.searchsorted(cumulative, quantile_rank(quantile, n) - 0.5))
    if at >= len(values):
        return float("inf"), 0.0
    value = float(values[order[at]])
    over = sum(float(o.misses(value).sum()) for o in runs)
    ties = sum(float(o.misses(np.nextafter(value, 0.0)).sum()) for o in runs) - over
    return value, ((1 - quantile) * n - over) / ties


def as_dict(blocks: Blocks) -> dict[str, Any]:
    """For a file."""
    return {
        "over": [round(x, 3) for x in blocks.over.tolist()],
        "size": [int(x) for x in blocks.size.tolist()],
        "effective": round(blocks.effective, 1),
    }


def from_dict(value: Mapping[str, Any]) -> Blocks:
    return Blocks(np.array(value["over"], dtype=np.float64), np.array(value["size"], dtype=np.float64), float(value["effective"]))  # fmt: skip
