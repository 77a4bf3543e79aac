"""Samples of one metric over a cohort, by the statuses of its requests.

Failed requests are infinitely slow; unfinished ones are censored: slower than the age at which they
were cut off; cancelled ones are left out.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ampacity.analysis.metrics.gaps import GapSeries
from ampacity.analysis.metrics.requests import Floats
from ampacity.analysis.stats.intervals import (
    CONFIDENCE,
    MEMORIES,
    MEMORY_ERROR,
    effective_size,
    few_by_chance,
    many_by_chance,
    short_by_chance,
)

_MIN_EXCEEDANCES = 20.0  # fewer say nothing about how they cluster
_NEAR = (0.2, 0.5, 1.0, 3.0)  # levels at which clustering is looked at, in shares 1 - q
_COMMON = (10.0, 20.0)  # commoner levels, for samples of which no queue is known
_RANKS_MAX = 256
FAR = 4.0  # a limit so many times the slowest sample leaves room for the queue to have shown itself
TURNS = 30.0  # a stage must be so many times as long as its requests to have shown its queue


@dataclass(frozen=True)
class Queue:
    """The requests in flight that each request found, and the requests that arrive per second."""

    in_flight: Floats
    rate_rps: float


@dataclass(frozen=True)
class Observations:
    """Samples in scheduled order; ``owner`` is the request (0 .. n_owners-1) of each value."""

    unit: str  # "requests", "sessions" or "gaps"
    values: Floats  # seconds, finite
    owner: npt.NDArray[np.integer[Any]]
    weights: Floats | None  # samples per value; None: one each
    infinite: Floats  # shape (n_owners,): infinitely slow samples of each request
    censored: Floats  # shape (n_owners,): slower than this, NaN where not censored
    reason: str | None = None  # why the metric is not known at all
    assumption: str | None = None
    # samples over which the queue that they waited in stays alike, of waits of an open stage
    memory: float | None = None
    queue: Queue | None = None  # that the first token waits in, of TTFT of an open stage

    @property
    def n_owners(self) -> int:
        return len(self.infinite)

    @cached_property
    def sizes(self) -> Floats:
        """Return samples of each request, shape (n_owners,)."""
        return np.asarray(
            self._finite_sizes() + self.infinite + ~np.isnan(self.censored), dtype=np.float64
        )

    @cached_property
    def n(self) -> int:
        """Return samples in all, infinite and censored ones included."""
        return round(float(self.sizes.sum()))

    @cached_property
    def n_infinite(self) -> int:
        return round(float(self.infinite.sum()))

    @cached_property
    def n_censored(self) -> int:
        return len(self._ages)

    @cached_property
    def _ages(self) -> Floats:
        """Return the ages of the censored samples, shape (n_censored,)."""
        return self.censored[~np.isnan(self.censored)]

    def misses(self, limit_s: float) -> Floats:
        """Return samples above the limit per request; a censored one counts once its age is."""
        return np.asarray(self.misses_each(np.array([limit_s]))[0])

    def misses_each(self, limits_s: Floats) -> Floats:
        """Return ``misses`` for each of k limits, shape (k, n_owners)."""
        endless = self.infinite
        if self.n_censored:
            with np.errstate(invalid="ignore"):
                endless = endless + (self.censored > limits_s[:, None])
        return np.asarray(self._over(limits_s) + endless, dtype=np.float64)

    def _over(self, limits_s: Floats) -> Floats:
        """Return the finite samples above each limit, shape (k, n_owners)."""
        found = np.zeros((len(limits_s), self.n_owners))
        for row, limit_s in enumerate(limits_s):
            over = self.values > limit_s
            weights = None if self.weights is None else self.weights[over]
            found[row] = np.bincount(self.owner[over], weights=weights, minlength=self.n_owners)
        return found

    def _finite_sizes(self) -> Floats:
        """Return the finite samples of each request, shape (n_owners,)."""
        found = np.bincount(self.owner, weights=self.weights, minlength=self.n_owners)
        return np.asarray(found, dtype=np.float64)

    def inconclusive(self, limit_s: float) -> int:
        """Return the censored samples that may still be misses: their age is not past the limit."""
        with np.errstate(invalid="ignore"):
            return int(np.count_nonzero(self.censored <= limit_s))

    def shares_over(self, limits_s: Floats) -> Floats:
        """Return the share of all samples above each of k limits, shape (k,)."""
        at_most = self._at_most(limits_s)
        if self.n_censored:
            at_most = at_most + (self._ages[:, None] <= limits_s).sum(axis=0)
        return np.asarray(1 - at_most / self.n, dtype=np.float64)

    def effective_size(self, limit_s: float) -> float:
        """Return n_eff for the share above ``limit_s``.

        Where fewer than twenty samples are on one side of the limit, their clustering cannot be
        seen; then it is taken at the nearest level that has twenty.
        """
        floor = max(_MIN_EXCEEDANCES, 0.01 * self.n) if self.unit == "gaps" else _MIN_EXCEEDANCES
        misses = self.misses(limit_s)
        over = float(misses.sum())
        wanted = min(max(over, floor), self.n - floor)
        if wanted != over and 0 < wanted < self.n:
            level = self.rank_bounds(round(self.n - wanted))[0]
            if np.isfinite(level):
                misses = self.misses(level)
        return effective_size(misses, self.sizes)

    def clustering(self, quantile: float) -> tuple[float, float]:
        """Return (tau seen, widest tau): samples around a quantile per independent sample.

        The largest over levels from rarer ones, whose slow samples cluster most, to commoner ones,
        where there are more to see it by. ``widest`` looks at the commonest, too; so does ``seen``
        where no queue says how rare ones cluster.
        """
        if quantile not in self._clusterings:
            least = _MIN_EXCEEDANCES / max(self.n, 1)
            near, common = (
                sorted({min(max(k * (1 - quantile), least), 0.5) for k in of})
                for of in (_NEAR, _COMMON)
            )
            everybody = self.n / max(float(np.count_nonzero(self.sizes)), 1.0)
            sizes = self._sizes_at(near + common)
            taus = [self.n / max(size, 1e-9) for size in sizes]
            seen = max((tau for tau in taus[: len(near)] if tau > 0), default=everybody)
            widest = max((tau for tau in taus if tau > 0), default=everybody)
            self._clusterings[quantile] = (
                max(1.0, seen if self.memory else widest),
                max(1.0, widest),
            )
        return self._clusterings[quantile]

    @cached_property
    def _clusterings(self) -> dict[float, tuple[float, float]]:
        return {}

    def _sizes_at(self, shares: list[float]) -> list[float]:
        """Return n_eff at the level that each share exceeds; inf if ties leave too few above."""
        levels = [self.rank_bounds(max(1, round(self.n * (1 - share))))[0] for share in shares]
        found = []
        for share, misses in zip(shares, self.misses_each(np.array(levels)), strict=True):
            few = float(misses.sum()) < min(_MIN_EXCEEDANCES, 0.5 * share * self.n)
            found.append(float("inf") if few else effective_size(misses, self.sizes))
        return found

    @property
    def likely_cluster(self) -> float:
        """Return the likely samples in a cluster, by the queue; 1 without a known queue.

        The memory is taken some standard errors larger than it was seen: a stage without its share
        of jams shows too small a one.
        """
        if self.memory is None:
            return 1.0
        memory = max(self.memory, 1.0)
        error = MEMORY_ERROR * math.sqrt(memory / self.n)
        return 1 + MEMORIES * (1 + error) * (memory - 1)

    def below_by_chance(self, quantile: float, levels_s: Floats) -> Floats:
        """Return P[so few samples over each of k levels | the quantile is there], shape (k,).

        Censored ones count as over.
        """
        within = self._at_most(levels_s)
        tau, _ = self.clustering(quantile)
        return few_by_chance(self.n - within, self.n, 1 - quantile, tau, self.likely_cluster)

    def far_by_chance(self, quantile: float, limit_s: float) -> float:
        """Return P[queue so short | the quantile is at the limit]; 1 unless that is FAR off.

        Also 1 in a stage of fewer than ``TURNS`` request times, which are n / mean in flight.

        While a request waits longer than the limit, those that arrive meanwhile wait behind it: at
        its end the queue is longer than any seen by the arrivals of limit - slowest sample. Samples
        that miss for another reason are as clustered as those of ``clustering``.
        """
        slowest_s = float(self.values.max(initial=0.0))
        endless = self.n_infinite + self.n_censored
        if self.queue is None or self.memory is None or endless or limit_s < FAR * slowest_s:
            return 1.0
        found, p = self.queue.in_flight, 1 - quantile
        if len(found) < TURNS * found.mean():
            return 1.0  # 300 requests of a batch at 0.87 of saturation said "met" in 8 % without it
        longest = float(found.max()) + self.queue.rate_rps * (limit_s - slowest_s)
        alone = few_by_chance(0.0, self.n, p, self.clustering(quantile)[0], 1.0)
        return max(float(alone), short_by_chance(found, longest, p, self.memory))

    @cached_property
    def _sorted(self) -> tuple[Floats, Floats | None]:
        if self.weights is None:
            return np.sort(self.values), None
        order = np.argsort(self.values, kind="stable")
        return self.values[order], np.cumsum(self.weights[order])

    def _at_most(self, limits_s: Floats) -> Floats:
        """Return the finite samples up to each of k limits, shape (k,)."""
        values, cumulative = self._sorted
        places = np.searchsorted(values, limits_s, side="right")
        if cumulative is None or not len(cumulative):
            return places.astype(np.float64)
        return np.where(places > 0, cumulative[places - 1], 0.0)

    @cached_property
    def _merged(self) -> tuple[Floats, Floats | None]:
        """Return the sorted values, censored ones at their age, and the cumulative weights."""
        values, cumulative = self._sorted
        if not self.n_censored:
            return values, cumulative
        ages = self._ages
        weights = np.ones(len(values)) if cumulative is None else np.diff(cumulative, prepend=0.0)
        merged = np.concatenate([values, ages])
        order = np.argsort(merged, kind="stable")
        return merged[order], np.cumsum(np.concatenate([weights, np.ones(len(ages))])[order])

    def rank_bounds(self, rank: int) -> tuple[float, float]:
        """Return the bounds of the sample of 1-based ``rank``, equal without censoring."""
        return _at_rank(*self._merged, rank), _at_rank(*self._sorted, rank)

    def quantile_bounds(self, quantile: float) -> tuple[float, float]:
        """Return the bounds of the smallest x with F(x) >= quantile.

        It is within a limit when that share of the samples is.
        """
        return self.rank_bounds(quantile_rank(quantile, self.n))

    def confidence_interval(self, quantile: float) -> tuple[float, float]:
        """Return the 95 % interval of a quantile for clustered samples, by tests at 2.5 % an end.

        NaN where an end is unknown. The upper end is the lowest level that would be shown to be
        within an SLO on this quantile, the lower end the highest that would be shown to break one.
        """
        alpha, p, (seen, widest) = (1 - CONFIDENCE) / 2, 1 - quantile, self.clustering(quantile)
        most = self.n - quantile_rank(quantile, self.n)  # samples over the quantile itself
        over = np.unique(np.linspace(0, most, min(most + 1, _RANKS_MAX)).astype(np.int64))[::-1]
        few = np.flatnonzero(few_by_chance(over, self.n, p, seen, self.likely_cluster) <= alpha)
        over_low = np.unique(np.geomspace(most + 1, self.n, _RANKS_MAX).astype(np.int64))
        many = np.flatnonzero(many_by_chance(over_low, self.n, p, widest) <= alpha)
        high = self.rank_bounds(self.n - int(over[few[0]]))[1] if len(few) else float("nan")
        low = (
            self.rank_bounds(self.n + 1 - int(over_low[many[0]]))[0] if len(many) else float("nan")
        )
        return low, high

    def mean(self) -> float:
        """Return the mean of the finite values, NaN where there is none."""
        return (
            float(np.average(self.values, weights=self.weights))
            if len(self.values)
            else float("nan")
        )


@dataclass(frozen=True)
class GapObservations(Observations):
    """Observations of gaps: ``values`` are the distinct ones, ``weights`` how often each occurs.

    ``owner`` is empty: figures per request are computed from ``series``, which holds the first of
    the n_owners.
    """

    series: GapSeries | None = None

    def _over(self, limits_s: Floats) -> Floats:
        return self._padded(self.series.over(limits_s)) if self.series else super()._over(limits_s)

    def _finite_sizes(self) -> Floats:
        return self._padded(self.series.sizes()) if self.series else super()._finite_sizes()

    def _padded(self, found: Floats) -> Floats:
        """Pad with zeros for the requests whose records were lost."""
        lost = self.n_owners - found.shape[-1]
        if not lost:
            return found
        return np.concatenate([found, np.zeros((*found.shape[:-1], lost))], axis=-1)


def quantile_rank(quantile: float, n: int) -> int:
    """Return 1-based rank of the quantile: the smallest k with k/n >= quantile."""
    return max(1, int(np.ceil(quantile * n - 1e-9)))


def _at_rank(values: Floats, cumulative: Floats | None, rank: int) -> float:
    index = rank - 1 if cumulative is None else int(np.searchsorted(cumulative, rank - 0.5))
    return float(values[index]) if 0 <= index < len(values) else float("inf")
