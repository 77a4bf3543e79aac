"""The samples of one load level: counted in blocks over a threshold, and predicted per request.

Blocks keep how the samples of a run depend on each other and, where two runs sent the same
schedule, which blocks hold the same requests. A quantile is represented by its neighbourhood: the
share over it is the mean over MARKS thresholds at ranks around q, so that a sample that moves a
little counts a little. A threshold that many samples equal is split so that the share is exact.

Two runs also differ by the draw of lengths and arrivals and by how full the server was. A control
variate removes that (Lavenberg and Welch 1981): the share of samples over a threshold is tabled by
cells of a known quantity, and the expectation from a run's own requests is subtracted from what the
run shows. The table comes from the baseline alone.

- TTFT: by the requests in flight at arrival and, in open loops, by the time in a single FIFO queue
  of the prompts (Lindley 1952).
- TPOT and ITL: by the mean number of requests in flight between first and last token.
- E2E: by the planned output tokens.

An engine that is slower is fuller as well; at equal occupancy its own speed is left.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ampacity.analysis.metrics.chunks import read_chunks
from ampacity.analysis.metrics.cohort import Cohort
from ampacity.analysis.metrics.observations import Observations, quantile_rank
from ampacity.analysis.metrics.requests import Floats, Ints, Requests
from ampacity.analysis.stage.analyse import RunRecords
from ampacity.analysis.stage.steady import in_flight_at
from ampacity.analysis.stats.intervals import effective_size

BLOCKS = 20
MARKS = 9
CELLS = 20
# Of ranks on each side at the median, half of 1 - q in the tails; at most up to the finite samples
NEIGHBOURHOOD = 0.1
METRICS = ("ttft", "itl", "tpot", "e2e")
# The metric and quantile of each name that a gate tracks. TTFT p10 hardly ever includes queueing:
# the length of a queue is mostly chance, the engine's own time is not.
TRACKED = {"ttft_p10": ("ttft", 0.1)} | {
    f"{metric}_{name}": (metric, q)
    for metric in METRICS
    for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
}
QUEUE, AT_ARRIVAL, IN_FLIGHT, OUTPUT_TOKENS = "queue", "at_arrival", "in_flight", "output_tokens"
TOGETHER = "0: tokens that came together reach into it"
_STEPS = 65  # of a search that evaluates all steps of a round at once
_ROUNDS = 10  # of backfitting
_DIGITS = 6  # decimals: values that are equal but for the last bit share a cell
_CANDIDATES = np.geomspace(1e-6, 1e-2, 41)  # s per input token: a million to a hundred tokens/s


@dataclass(frozen=True)
class Blocks:
    """Hold ``over`` of ``size`` samples per block, each of shape (BLOCKS,).

    ``effective`` is the number of independent samples they are worth; inf where an expectation per
    request was subtracted, and the scatter between blocks gives the uncertainty of the rest.
    """

    over: Floats
    size: Floats
    effective: float

    @property
    def share(self) -> float:
        return float(self.over.sum() / self.size.sum())

    def as_dict(self) -> dict[str, Any]:
        return {
            "over": [round(x, 3) for x in self.over.tolist()],
            "size": [round(x, 3) for x in self.size.tolist()],
            "effective": round(self.effective, 1) if math.isfinite(self.effective) else None,
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Blocks:
        over, size = (np.array(value[k], dtype=np.float64) for k in ("over", "size"))
        return cls(over, size, math.inf if value["effective"] is None else value["effective"])


@dataclass(frozen=True)
class Marks:
    """Hold the thresholds of a quantile in s, shape (k,).

    ``splits``: the share of the samples equal to each threshold that counts as above it.
    """

    limits_s: Floats
    splits: Floats

    @property
    def middle_s(self) -> float:
        return float(np.median(self.limits_s))

    def times(self, factor: float) -> Marks:
        """Return the thresholds moved by a factor; only the reference's own samples are split."""
        return Marks(self.limits_s * factor, np.zeros(len(self.limits_s)))


@dataclass(frozen=True)
class LevelRecords:
    """The requests of one load level from ordinal ``skipped`` on, in scheduled order."""

    cohort: Cohort
    schedule: str  # digest of the planned lengths, warm-up included
    stage: Requests  # all requests of the stage, retries included

    @property
    def planned(self) -> Requests:
        return self.cohort.requests

    @property
    def n(self) -> int:
        return len(self.cohort.requests)

    @cached_property
    def in_flight(self) -> Floats:
        """Mean requests in flight between first and last token of each request, shape (n,)."""
        return mean_in_flight(self.planned, self.stage, self.cohort.now_ns)

    @cached_property
    def at_arrival(self) -> Floats:
        """Requests in flight when each was due, shape (n,)."""
        return in_flight_at(self.planned.scheduled_ns, self.stage.scheduled_ns, self.stage.ended_ns)

    @cached_property
    def metrics(self) -> dict[str, Observations]:
        """TTFT and E2E from the schedule, so that queueing before the first byte counts."""
        c = self.cohort
        found = c.ttft(from_schedule=True), c.itl, c.tpot, c.e2e(from_schedule=True)
        return dict(zip(METRICS, found, strict=True))

    @cached_property
    def failed(self) -> Floats:
        """1 for each request that failed or was in flight at the cutoff, shape (n,)."""
        r = self.planned
        return np.asarray(r.failed | r.has_status("unfinished"), dtype=np.float64)

    def rates(self, kind: str) -> Blocks:
        """Return output tokens per block, by planned token (open loop) or by second (closed).

        A closed loop has blocks of equal time, from the first to the last start; the tokens of an
        answer are spread over its duration, so that users in step do not look like bursts.
        """
        r, received = self.planned, self.cohort.chunks.tokens_in()
        tokens = np.nan_to_num(np.where(r.has_status("ok"), r.output_tokens, received))
        if kind == "open":
            planned = in_blocks(np.nan_to_num(r.output_tokens_planned))
            return Blocks(in_blocks(tokens), np.maximum(planned, 1.0), math.inf)
        edges = np.linspace(r.scheduled_ns[0], r.scheduled_ns[-1], BLOCKS + 1)
        start, life = r.scheduled_ns, np.maximum(np.nan_to_num(r.ended_ns - r.scheduled_ns), 1.0)
        arrived = [float(tokens @ np.clip((edge - start) / life, 0.0, 1.0)) for edge in edges]
        return Blocks(np.diff(arrived), np.maximum(np.diff(edges) * 1e-9, 1e-9), math.inf)


def level_records(records: RunRecords, index: int, skipped: int, now_ns: float) -> LevelRecords:
    """Return stage ``index`` without its first ``skipped`` requests; ``now_ns`` after the origin.

    ``now_ns`` gives the age of requests that have no end.
    """
    stage = records.requests.take(records.requests.stage == index)
    rows = stage.take(stage.attempt == 0)
    requests = rows.take(np.arange(len(rows)) >= skipped)
    chunks = read_chunks(records.table, requests)
    cohort = Cohort(requests, chunks, 0, now_ns, spoilt=records.spoilt)
    lengths = np.stack([rows.input_tokens_planned, rows.output_tokens_planned])
    digest = hashlib.sha256(np.nan_to_num(lengths).astype("<i8").tobytes()).hexdigest()
    return LevelRecords(cohort, digest[:16], stage)


def in_blocks(values: Floats) -> Floats:
    """Return sums over BLOCKS consecutive parts of nearly equal length; at least BLOCKS values."""
    edges = np.arange(BLOCKS, dtype=np.int64) * len(values) // BLOCKS
    return np.asarray(np.add.reduceat(values, edges), dtype=np.float64)


def over_each(o: Observations, marks: Marks) -> Floats:
    """Return the samples of each request above the marks, averaged over them, shape (n_owners,)."""
    found = o.misses_each(marks.limits_s).mean(axis=0)
    split = marks.splits > 0
    if split.any():
        limits = marks.limits_s[split]
        ties = o.misses_each(np.nextafter(limits, 0.0)) - o.misses_each(limits)
        found = found + marks.splits[split] @ ties / len(marks.splits)
    return np.asarray(found, dtype=np.float64)


def blocks_over(o: Observations, marks: Marks, *, paired: bool = False) -> Blocks:
    """Return the samples above the marks."""
    # Paired runs do not need the effective size, which takes most of the time
    effective = 0.0 if paired else o.effective_size(marks.middle_s)
    return Blocks(in_blocks(over_each(o, marks)), in_blocks(o.sizes), effective)


def blocks_beside(o: Observations, over: Floats, explained: Floats) -> Blocks:
    """Return ``over_each`` less ``explained`` (a share of each request's samples; (n_owners,))."""
    return Blocks(in_blocks(over - explained * o.sizes), in_blocks(o.sizes), math.inf)


def blocks_of(events: Floats) -> Blocks:
    """Return the requests with an event, as a failure."""
    ones = np.ones(len(events))
    return Blocks(in_blocks(events), in_blocks(ones), effective_size(events, ones))


def pooled(runs: Sequence[Observations]) -> tuple[Floats, Floats]:
    """Return the values of all runs and their weights."""
    weights = [np.ones(len(o.values)) if o.weights is None else o.weights for o in runs]
    return np.concatenate([o.values for o in runs]), np.concatenate(weights)


def no_values(runs: Sequence[Observations]) -> str | None:
    """Return why one of the runs has no sample at all; None where each has."""
    return next((o.reason or "no request has a value" for o in runs if not o.n or o.reason), None)


def endless(runs: Sequence[Observations]) -> str:
    """Return why a quantile is infinite (failures) or unknown (requests cut off)."""
    failed, cut_off = any(o.n_infinite for o in runs), any(o.n_censored for o in runs)
    parts = ["failed"] * failed + ["were in flight at cutoff"] * cut_off
    infinite = "infinite" if failed else "infinite or unknown"
    return f"{infinite}: requests that {' or '.join(parts)} reach into it"


def pooled_marks(runs: Sequence[Observations], quantile: float) -> Marks | str:
    """Return marks around the quantile of all runs; exactly 1 - q of the samples are above them.

    Returns the reason where one of the marks is 0 or infinite.
    """
    values, weights = pooled(runs)
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
        return TOGETHER
    over, from_there = (
        sum(o.shares_over(x) * o.n for o in runs) for x in (limits, np.nextafter(limits, 0.0))
    )
    return Marks(limits, ((1 - ranks) * n - over) / (from_there - over))


def moved_by(runs: Sequence[Observations], marks: Marks, share: float) -> float | None:
    """Return the least factor on the marks that leaves at most ``share`` of the samples above them.

    0 below a thousandth; None beyond a thousand, or where any factor does (a share of 1).
    """
    if share >= 1:
        return None

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


@dataclass(frozen=True)
class Cells:
    """Requests by a quantity: ``edges`` between the CELLS cells, shape (CELLS - 1,).

    ``s_per_token``: seconds of prefill per token, of QUEUE only.
    """

    by: str
    edges: Floats
    s_per_token: float | None = None

    def of(self, level: LevelRecords) -> Ints:
        """Return the cell of each request, 0 to CELLS - 1, shape (n,)."""
        return np.digitize(_quantity(self.by, level, self.s_per_token), self.edges)

    def as_dict(self) -> dict[str, Any]:
        return {"by": self.by, "edges": self.edges.tolist(), "s_per_token": self.s_per_token}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Cells:
        return cls(value["by"], np.array(value["edges"], dtype=np.float64), value["s_per_token"])


def make_cells(by: str, levels: Sequence[LevelRecords], s_per_token: float | None = None) -> Cells:
    """Return cells that hold equally many requests of these levels, as far as ties allow."""
    values = np.concatenate([_quantity(by, level, s_per_token) for level in levels])
    return Cells(by, np.quantile(values, np.arange(1, CELLS) / CELLS).round(_DIGITS), s_per_token)


def _quantity(by: str, level: LevelRecords, s_per_token: float | None) -> Floats:
    if by == QUEUE and s_per_token is not None:
        return queue_time_s(level.planned, s_per_token).round(_DIGITS)
    if by == IN_FLIGHT:
        return level.in_flight.round(_DIGITS)
    if by == AT_ARRIVAL:
        return level.at_arrival
    return np.nan_to_num(level.planned.output_tokens_planned)


def queue_time_s(requests: Requests, s_per_token: float) -> Floats:
    """Return wait and service of each request in a FIFO queue (Lindley 1952), shape (n,)."""
    due = (requests.scheduled_ns - requests.scheduled_ns[0]) * 1e-9
    service = s_per_token * np.nan_to_num(requests.input_tokens_planned)
    done = np.cumsum(service)
    before = done - service
    return np.asarray(done + np.maximum.accumulate(due - before) - due, dtype=np.float64)


def fit_queue(requests: Sequence[Requests], ttft_s: Sequence[Floats]) -> float:
    """Return the s per input token whose queue times rank-correlate best with the measured TTFTs.

    One entry per run; NaN where a TTFT is not known.
    """

    def correlation(s_per_token: float) -> float:
        found = []
        for r, t in zip(requests, ttft_s, strict=True):
            pair, known = (queue_time_s(r, s_per_token), t), ~np.isnan(t)
            ranks = [np.argsort(np.argsort(x[known], kind="stable")) for x in pair]
            found.append(np.corrcoef(ranks[0], ranks[1])[0, 1] if known.sum() > 1 else 0.0)
        return float(np.mean(found))

    return float(max(_CANDIDATES, key=correlation))


def mean_in_flight(requests: Requests, stage: Requests, now_ns: float) -> Floats:
    """Return the time average in flight from first to last token of each request, shape (n,).

    Taken at the schedule where a request has no token, at its token where it has one. ``now_ns`` is
    the end of requests of ``stage`` that have none.
    """
    ended = np.where(np.isnan(stage.ended_ns), now_ns, stage.ended_ns)
    times = np.concatenate([stage.scheduled_ns, ended])
    order = np.argsort(times, kind="stable")
    times = times[order]
    count = np.cumsum(np.where(order < len(stage), 1.0, -1.0))
    integral = np.concatenate([[0.0], np.cumsum(count[:-1] * np.diff(times))])
    first = requests.first_token_ns
    begin = np.where(np.isnan(first), requests.scheduled_ns, first)
    end = np.where(requests.last_token_ns > begin, requests.last_token_ns, begin)
    over = np.interp(end, times, integral) - np.interp(begin, times, integral)
    at_once = in_flight_at(begin, stage.scheduled_ns, ended)
    return np.where(end > begin, over / np.maximum(end - begin, 1.0), at_once)


def tables_of(cells: Sequence[Ints], over: Floats, sizes: Floats, share: float) -> Floats:
    """Return the share over the threshold in each cell, less ``share``, shape (len(cells), CELLS).

    ``over`` of ``sizes`` samples of each request. Tables of several quantities add up: each is
    fitted to what the others leave (backfitting). 0 in a cell without samples.
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
    """Return what the tables predict for each request, beyond the share of all, shape (n,)."""
    return np.asarray(sum(table[where] for table, where in zip(tables, cells, strict=True)))
