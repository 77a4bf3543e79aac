"""A load level of a run in consecutive blocks: how many samples of each are over a threshold.

Blocks keep what a single percentile forgets: how the samples of a run depend on each other, and, where two
runs sent the same schedule, which blocks hold the same requests. A quantile stands for its neighbourhood: the
share over it is the mean over MARKS thresholds at ranks around q, so that a sample that moves a little counts a
little. A threshold that many samples equal (a step time of the engine) is split so that the share is exact.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ampacity.analysis.change.expected import mean_in_flight
from ampacity.analysis.metrics.cohort import Cohort
from ampacity.analysis.metrics.observations import Observations, quantile_rank
from ampacity.analysis.metrics.requests import Floats, Ints, Requests, read_chunks
from ampacity.analysis.stage.analyse import RunRecords
from ampacity.analysis.stage.steady import in_flight_at
from ampacity.analysis.stats.intervals import effective_size

BLOCKS = 20
MARKS = 9
NEIGHBOURHOOD = 0.1  # of ranks on each side at the median, half of 1 - q in the tails; no farther than finite samples reach
_STEPS = 65  # of a search in which each round looks at all at once
METRICS = ("ttft", "itl", "tpot", "e2e")
TRACKED = {"ttft_p10": ("ttft", 0.1)} | {
    f"{metric}_{name}": (metric, q)
    for metric in METRICS
    for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
}
"""What a gate tracks: the metric and the quantile of each name.

TTFT p10 waits for nearly nobody: the length of a queue is mostly chance, the engine's own time is not.
"""


@dataclass(frozen=True)
class Blocks:
    """``over`` of ``size`` samples per block, each of shape (BLOCKS,); ``effective``: how many independent ones they are worth.

    Where what is known of the requests was taken out (analysis/change/expected.py), ``effective`` is inf: the scatter from block to
    block says how sure the rest is.
    """

    over: Floats
    size: Floats
    effective: float

    @property
    def share(self) -> float:
        return float(self.over.sum() / self.size.sum())


@dataclass(frozen=True)
class Marks:
    """The thresholds of a quantile in s, and the share of the samples equal to each that counts as above; shape (k,)."""

    limits_s: Floats
    splits: Floats

    def times(self, factor: float) -> Marks:
        """The same thresholds moved by a factor; nothing but the reference's own samples is split."""
        return Marks(self.limits_s * factor, np.zeros(len(self.limits_s)))


@dataclass(frozen=True)
class LevelRecords:
    """The requests of one load level from ordinal ``skipped`` on, in scheduled order."""

    cohort: Cohort
    schedule: str  # digest of the planned lengths, warm-up included
    stage: Requests  # all requests of the stage, further attempts included

    @property
    def planned(self) -> Requests:
        return self.cohort.requests

    @cached_property
    def in_flight(self) -> Floats:
        """Mean number of requests in flight between the first and the last token of each, shape (n,)."""
        return mean_in_flight(self.planned, self.stage, self.cohort.now_ns)

    @cached_property
    def at_arrival(self) -> Floats:
        """Requests in flight when each was due, shape (n,)."""
        return in_flight_at(self.planned.scheduled_ns, self.stage.scheduled_ns, self.stage.ended_ns)

    @cached_property
    def metrics(self) -> dict[str, Observations]:
        """TTFT and E2E from the schedule, so that a wait before the first byte counts."""
        c = self.cohort
        return {
            "ttft": c.ttft(from_schedule=True),
            "itl": c.itl,
            "tpot": c.tpot,
            "e2e": c.e2e(from_schedule=True),
        }

    @cached_property
    def failed(self) -> Floats:
        """1 for each request that failed or was cut off."""
        r = self.cohort.requests
        return np.asarray(r.failed | r.has_status("unfinished"), dtype=np.float64)

    @property
    def n(self) -> int:
        return len(self.cohort.requests)

    def rates(self, kind: str) -> Blocks:
        """Output tokens received in each block, per planned token (open loop) or per second (closed).

        A closed loop has blocks of equal time, from the first to the last start; the tokens of an answer are spread over
        its life, so that users who move in step are no gusts.
        """
        r = self.cohort.requests
        tokens = np.nan_to_num(
            np.where(r.has_status("ok"), r.output_tokens, self.cohort.chunks.tokens_in())
        )
        if kind == "open":
            planned = in_blocks(np.nan_to_num(r.output_tokens_planned))
            return Blocks(in_blocks(tokens), np.maximum(planned, 1.0), math.inf)
        edges = np.linspace(r.scheduled_ns[0], r.scheduled_ns[-1], BLOCKS + 1)
        begun, life = r.scheduled_ns, np.maximum(np.nan_to_num(r.ended_ns - r.scheduled_ns), 1.0)
        arrived = [float(tokens @ np.clip((edge - begun) / life, 0.0, 1.0)) for edge in edges]
        return Blocks(np.diff(arrived), np.maximum(np.diff(edges) * 1e-9, 1e-9), math.inf)


def level_records(records: RunRecords, index: int, skipped: int, now_ns: float) -> LevelRecords:
    """Stage ``index`` of a run without its first ``skipped`` requests; ``now_ns`` after the origin, for ages."""
    stage = records.requests.take(records.requests.stage == index)
    rows = stage.take(stage.attempt == 0)
    requests = rows.take(np.arange(len(rows)) >= skipped)
    cohort = Cohort(
        requests, read_chunks(records.table, requests), 0, now_ns, spoilt=records.spoilt
    )
    return LevelRecords(cohort, _digest(rows), stage)


def _digest(rows: Requests) -> str:
    planned = np.nan_to_num(
        np.stack([rows.input_tokens_planned, rows.output_tokens_planned])
    ).astype("<i8")
    return hashlib.sha256(planned.tobytes()).hexdigest()[:16]


def _edges(n: int) -> Ints:
    return np.arange(BLOCKS, dtype=np.int64) * n // BLOCKS


def in_blocks(values: Floats) -> Floats:
    """Sums of a series over BLOCKS consecutive parts of nearly equal length; the series is at least as long."""
    return np.asarray(np.add.reduceat(values, _edges(len(values))), dtype=np.float64)


def over_each(o: Observations, marks: Marks) -> Floats:
    """Samples above the marks of each request, in the mean over the marks, shape (n_owners,)."""
    found = o.misses_each(marks.limits_s).mean(axis=0)
    split = marks.splits > 0
    if split.any():
        limits = marks.limits_s[split]
        ties = o.misses_each(np.nextafter(limits, 0.0)) - o.misses_each(limits)
        found = found + marks.splits[split] @ ties / len(marks.splits)
    return np.asarray(found, dtype=np.float64)


def blocks_over(o: Observations, marks: Marks, *, paired: bool = False) -> Blocks:
    """Samples above the marks."""
    # runs that are compared block by block have no use for the effective size, which costs most of the time
    effective = 0.0 if paired else o.effective_size(float(np.median(marks.limits_s)))
    return Blocks(in_blocks(over_each(o, marks)), in_blocks(o.sizes), effective)


def blocks_beside(o: Observations, over: Floats, explained: Floats) -> Blocks:
    """``over_each`` less ``explained``, what is known of each request lets expect, as a share of its samples; both (n_owners,)."""
    return Blocks(in_blocks(over - explained * o.sizes), in_blocks(o.sizes), math.inf)


def blocks_of(events: Floats) -> Blocks:
    """Requests with an event, as a failure."""
    ones = np.ones(len(events))
    return Blocks(in_blocks(events), in_blocks(ones), effective_size(events, ones))


def endless(runs: Sequence[Observations]) -> str:
    """Why a quantile of these is infinite: only what failed is; how long what was cut off would have taken is not known."""
    failed, cut_off = any(o.n_infinite for o in runs), any(o.n_censored for o in runs)
    which = [
        word for word, there in (("failed", failed), ("were cut off unfinished", cut_off)) if there
    ]
    return f"infinite{'' if failed else ' or unknown'}: requests that {' or '.join(which)} reach into it"


def pooled_marks(runs: Sequence[Observations], quantile: float) -> Marks | str:
    """Around the quantile of all runs together; the share above them is 1 - q exactly. A reason where one is 0 or infinite."""
    values = np.concatenate([o.values for o in runs])
    weights = np.concatenate(
        [np.ones(len(o.values)) if o.weights is None else o.weights for o in runs]
    )
    order = np.argsort(values)
    values, cumulative = values[order], np.cumsum(weights[order])
    n = sum(o.n for o in runs)
    finite = cumulative[-1] / n if len(values) else 0.0
    reach = max(0.0, min(NEIGHBOURHOOD, quantile / 2, (1 - quantile) / 2, finite - quantile))
    ranks = quantile + reach * np.linspace(-1, 1, MARKS)
    at = np.searchsorted(cumulative, [quantile_rank(float(r), n) - 0.5 for r in ranks])
    if at[-1] >= len(values):
        return endless(runs)
    limits = values[at]
    if limits[0] <= 0:
        return "0: tokens that came together reach into it"
    over, from_there = (
        sum(o.shares_over(x) * o.n for o in runs) for x in (limits, np.nextafter(limits, 0.0))
    )
    return Marks(limits, ((1 - ranks) * n - over) / (from_there - over))


def moved_by(runs: Sequence[Observations], marks: Marks, share: float) -> float | None:
    """The least factor by which the marks must move to have no more than ``share`` of the runs' samples above them.

    0 below a thousandth; None beyond a thousand.
    """

    def above(log_factors: Floats) -> Floats:
        limits = marks.limits_s * np.exp(log_factors)[:, None]
        shares = [o.shares_over(limits.ravel()).reshape(limits.shape).mean(axis=1) for o in runs]
        return np.asarray(np.mean(shares, axis=0), dtype=np.float64)

    share += 1e-12  # a sum of shares is not exact
    ends = np.log([0.001, 1000.0])
    at_ends = above(ends)
    if at_ends[1] > share:
        return None
    if at_ends[0] <= share:
        return 0.0
    while ends[1] - ends[0] > 1e-13:
        steps = np.linspace(ends[0], ends[1], _STEPS)
        first = int(np.argmax(above(steps) <= share))
        ends = steps[first - 1 : first + 1]
    return float(np.exp(ends.mean()))


def as_dict(blocks: Blocks) -> dict[str, Any]:
    """For a file."""
    return {
        "over": [round(x, 3) for x in blocks.over.tolist()],
        "size": [round(x, 3) for x in blocks.size.tolist()],
        "effective": round(blocks.effective, 1) if math.isfinite(blocks.effective) else None,
    }


def from_dict(value: Mapping[str, Any]) -> Blocks:
    over, size = (np.array(value[k], dtype=np.float64) for k in ("over", "size"))
    return Blocks(over, size, math.inf if value["effective"] is None else value["effective"])
