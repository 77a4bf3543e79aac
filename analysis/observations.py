"""Samples of one metric over a cohort, with what the status table says of failed and unfinished requests.

Failed requests are infinitely slow; unfinished ones are censored: slower than the age at which they were
cut off; cancelled ones are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from analysis.gaps import GapSeries
from analysis.intervals import LONG_ENOUGH, LOOKS_OVER_QUANTILE, effective_size, order_statistic_ranks
from analysis.metrics import Floats

_MIN_EXCEEDANCES = 20.0  # fewer say nothing about how they cluster
_TAILS = (0.2, 0.5, 1.0, 3.0, 10.0, 20.0)  # levels at which clustering is looked at, in shares 1 - q
_BULK = 0.2


@dataclass(frozen=True)
class Observations:
    """Samples in scheduled order. ``owner`` is the request (0 .. n_owners-1) of each finite value."""

    unit: str  # "requests", "sessions" or "gaps"
    values: Floats  # seconds, finite
    owner: npt.NDArray[np.integer[Any]]
    weights: Floats | None  # samples per value; None: one each
    infinite: Floats  # shape (n_owners,): infinitely slow samples of each request
    censored: Floats  # shape (n_owners,): slower than this, NaN where not censored
    reason: str | None = None  # why the metric is not known at all
    assumption: str | None = None
    looks: float = float("inf")  # independent looks at the load that the samples had (intervals.py)

    @property
    def n_owners(self) -> int:
        return len(self.infinite)

    @cached_property
    def sizes(self) -> Floats:
        """Samples of each request, shape (n_owners,)."""
        return np.asarray(self._finite_sizes() + self.infinite + ~np.isnan(self.censored), dtype=np.float64)

    @cached_property
    def n(self) -> int:
        """Samples in all, infinite and censored ones included."""
        return round(float(self.sizes.sum()))

    @cached_property
    def n_infinite(self) -> int:
        return round(float(self.infinite.sum()))

    @cached_property
    def n_censored(self) -> int:
        return int(np.count_nonzero(~np.isnan(self.censored)))

    def misses(self, limit_s: float) -> Floats:
        """Samples above the limit per request; a censored one counts when its age is past it."""
        return np.asarray(self.misses_each(np.array([limit_s]))[0])

    def misses_each(self, limits_s: Floats) -> Floats:
        """``misses`` for each of k limits, shape (k, n_owners)."""
        with np.errstate(invalid="ignore"):
            endless = self.infinite + (self.censored > limits_s[:, None])
        return np.asarray(self._over(limits_s) + endless, dtype=np.float64)

    def _over(self, limits_s: Floats) -> Floats:
        """Finite samples above each limit, shape (k, n_owners)."""
        found = np.zeros((len(limits_s), self.n_owners))
        for row, limit_s in enumerate(limits_s):
            over = self.values > limit_s
            weights = None if self.weights is None else self.weights[over]
            found[row] = np.bincount(self.owner[over], weights=weights, minlength=self.n_owners)
        return found

    def _finite_sizes(self) -> Floats:
        """Finite samples of each request, shape (n_owners,)."""
        found = np.bincount(self.owner, weights=self.weights, minlength=self.n_owners)
        return np.asarray(found, dtype=np.float64)

    def undecided(self, limit_s: float) -> int:
        """Censored samples whose age is not past the limit: they may or may not be misses."""
        with np.errstate(invalid="ignore"):
            return int(np.count_nonzero(self.censored <= limit_s))

    def shares_over(self, limits_s: Floats) -> Floats:
        """Share of all samples above each of k limits, shape (k,): ``misses_each`` without regard to whose they are."""
        values, cumulative = self._sorted
        at_most = np.searchsorted(values, limits_s, side="right")
        if cumulative is not None:
            at_most = np.concatenate([[0.0], cumulative])[at_most]
        ages = self.censored[~np.isnan(self.censored)]
        return np.asarray(1 - (at_most + (ages[:, None] <= limits_s).sum(axis=0)) / self.n, dtype=np.float64)

    def effective_size(self, limit_s: float) -> float:
        """n_eff for the share above ``limit_s``.

        Where fewer than twenty samples are on one side of the limit, their clustering cannot be seen; then
        it is taken at the nearest level that has twenty.
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

    def tail_size(self, quantile: float) -> tuple[float, float]:
        """(n_eff for statements about a quantile, how many times as long the run must be to know its upper end).

        The least n_eff over levels around it, from rarer ones, whose slow samples cluster most, to commoner ones,
        where there are more of them to see it by. It should last ``LONG_ENOUGH`` correlation times of the slowest
        fifth, and have ``LOOKS_OVER_QUANTILE``/(1 - q) independent looks at the load: long enough at 1 and below.
        """
        key = 1 - quantile
        if key not in self._tails:
            shares = {min(max(k * key, _MIN_EXCEEDANCES / max(self.n, 1)), 0.5) for k in _TAILS} | {_BULK}
            sizes = self._sizes_at(sorted(shares))
            bulk = self.n / max(sizes[_BULK], 1e-9) if np.isfinite(sizes[_BULK]) else 1.0
            unit = self.n / max(self.n_owners, 1)  # the gaps of a request are alike, however long the run is
            lengths = max(LONG_ENOUGH * (bulk - unit) / self.n, LOOKS_OVER_QUANTILE / key / self.looks)
            least = min(sizes.values())
            least = least if np.isfinite(least) else float(np.count_nonzero(self.sizes))
            self._tails[key] = least, lengths
        return self._tails[key]

    @cached_property
    def _tails(self) -> dict[float, tuple[float, float]]:
        return {}

    def _sizes_at(self, shares: list[float]) -> dict[float, float]:
        """n_eff at the level that each share of the samples exceeds; inf where ties leave too few above it."""
        levels = [self.rank_bounds(max(1, round(self.n * (1 - share))))[0] for share in shares]
        found = {}
        for share, misses in zip(shares, self.misses_each(np.array(levels)), strict=True):
            few = float(misses.sum()) < min(_MIN_EXCEEDANCES, 0.5 * share * self.n)
            found[share] = float("inf") if few else effective_size(misses, self.sizes)
        return found

    @cached_property
    def _sorted(self) -> tuple[Floats, Floats | None]:
        if self.weights is None:
            return np.sort(self.values), None
        order = np.argsort(self.values, kind="stable")
        return self.values[order], np.cumsum(self.weights[order])

    @cached_property
    def _merged(self) -> tuple[Floats, Floats | None]:
        """Sorted values with each censored sample at its age, and the cumulative weights."""
        values, cumulative = self._sorted
        if not self.n_censored:
            return values, cumulative
        ages = self.censored[~np.isnan(self.censored)]
        weights = np.ones(len(values)) if cumulative is None else np.diff(cumulative, prepend=0.0)
        merged = np.concatenate([values, ages])
        order = np.argsort(merged, kind="stable")
        return merged[order], np.cumsum(np.concatenate([weights, np.ones(len(ages))])[order])

    def rank_bounds(self, rank: int) -> tuple[float, float]:
        """Least and greatest possible value of the sample of 1-based ``rank``; equal without censoring."""
        return _at_rank(*self._merged, rank), _at_rank(*self._sorted, rank)

    def quantile_bounds(self, quantile: float) -> tuple[float, float]:
        """The smallest x with F(x) >= quantile, so that it is within a limit when that share is."""
        return self.rank_bounds(quantile_rank(quantile, self.n))

    def confidence_interval(self, quantile: float) -> tuple[float, float]:
        """95 % order-statistic interval for clustered samples; NaN where an end is unknown."""
        n_effective, lengths = self.tail_size(quantile)
        low, high = order_statistic_ranks(self.n, quantile, n_effective=n_effective)
        return (
            self.rank_bounds(low)[0] if low else float("nan"),
            self.rank_bounds(high)[1] if high and lengths <= 1 else float("nan"),
        )

    def mean(self) -> float:
        """Mean of the finite values, NaN where there is none."""
        return float(np.average(self.values, weights=self.weights)) if len(self.values) else float("nan")


@dataclass(frozen=True)
class GapObservations(Observations):
    """Observations whose ``values`` are the distinct gaps and ``weights`` how many have each, all ``n_owners`` taken together.

    ``owner`` is empty: what is asked per request is worked out from ``series``, of the first of the n_owners.
    """

    series: GapSeries | None = None

    def _over(self, limits_s: Floats) -> Floats:
        return self._padded(self.series.over(limits_s)) if self.series else super()._over(limits_s)

    def _finite_sizes(self) -> Floats:
        return self._padded(self.series.sizes()) if self.series else super()._finite_sizes()

    def _padded(self, found: Floats) -> Floats:
        """With zeros for the requests whose records were lost."""
        lost = self.n_owners - found.shape[-1]
        if not lost:
            return found
        return np.concatenate([found, np.zeros((*found.shape[:-1], lost))], axis=-1)


def quantile_rank(quantile: float, n: int) -> int:
    """1-based rank of the quantile: the smallest k with k/n >= quantile."""
    return max(1, int(np.ceil(quantile * n - 1e-9)))


def _at_rank(values: Floats, cumulative: Floats | None, rank: int) -> float:
    index = rank - 1 if cumulative is None else int(np.searchsorted(cumulative, rank - 0.5))
    return float(values[index]) if 0 <= index < len(values) else float("inf")
