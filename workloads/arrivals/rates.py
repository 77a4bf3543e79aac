"""Rate curves of arrivals within a stage: ramps, steps, days, bursts, on and off.

A curve maps operational time, in which the rate is 1, to stage time: t = L^-1(s), where L(t) is the
integral of the relative rate (time-rescaling; Cinlar 1975). A stage's mean rate is exact:
L(duration) = duration; for the random on-off curve it holds on average.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ampacity.workloads.errors import WorkloadError

Floats = NDArray[np.float64]
Rescaling = tuple[float, Callable[[Floats], Floats]]
"""The operational time that a stage lasts, and the stage times of operational times."""

CHANGES_MAX = 10_000_000
MEASURED_DAY = (
    *(0.74, 0.82, 0.80, 0.73, 0.71, 0.72, 0.81, 0.81, 0.94, 1.14, 1.19, 1.13),
    *(0.71, 0.96, 1.31, 1.21, 1.25, 1.27, 1.06, 1.21, 1.14, 0.90, 1.16, 1.31),
)
"""Hourly rates of ServeGen's m-large, first day, relative to its mean (Alibaba, Apache-2.0)."""


@dataclass(frozen=True)
class Ramp:
    """Linear change of the relative rate from ``start`` to ``end``."""

    start: float
    end: float

    def rescaling(self, duration_s: float, rng: np.random.Generator) -> Rescaling:
        """Solve a t + (b - a) t^2 / 2T = s, with a and b scaled to mean 1."""
        mean = (self.start + self.end) / 2
        a, slope = self.start / mean, (self.end - self.start) / mean / duration_s
        return (
            duration_s,
            lambda s: 2 * s / np.maximum(a + np.sqrt(np.maximum(a * a + 2 * slope * s, 0)), 1e-300),
        )


@dataclass(frozen=True)
class Steps:
    """Relative rate ``rates[i]`` for the relative length ``lengths[i]`` of the stage."""

    rates: tuple[float, ...]
    lengths: tuple[float, ...]
    notes: tuple[str, ...] = ()  # of the file that they are from

    def rescaling(self, duration_s: float, rng: np.random.Generator) -> Rescaling:
        lengths = np.asarray(self.lengths) * (duration_s / math.fsum(self.lengths))
        return _piecewise(lengths, np.asarray(self.rates), duration_s)


@dataclass(frozen=True)
class Bursts:
    """``factor`` times the rate for ``length_s``, at ``at_s`` and then every ``every_s``."""

    factor: float
    length_s: float
    at_s: float | None = None  # None: in the middle of the stage, or of the first period
    every_s: float | None = None

    def rescaling(self, duration_s: float, rng: np.random.Generator) -> Rescaling:
        period = self.every_s or duration_s
        _check_changes(duration_s / period)
        first = max((period - self.length_s) / 2, 0.0) if self.at_s is None else self.at_s
        if first >= duration_s or (first == 0 and self.length_s >= duration_s):
            raise WorkloadError(
                f"burst: {self.length_s:g} s from {first:g} s on leave no change of rate "
                f"in a stage of {duration_s:g} s: lengthen it"
            )
        starts = first + period * np.arange(max(math.ceil((duration_s - first) / period), 0))
        edges = np.minimum(np.stack([starts, starts + self.length_s], axis=1).ravel(), duration_s)
        edges = np.concatenate([[0.0], edges, [duration_s]])
        lengths = np.diff(edges)
        rates = np.where(np.arange(len(lengths)) % 2, self.factor, 1.0)
        return _piecewise(lengths, rates, duration_s)


@dataclass(frozen=True)
class Switching:
    """Markov-modulated rate: ``rates[i]`` for an exponential time of mean ``stay_s[i]``.

    States follow each other in a ring, from the stationary distribution; rates are scaled to a
    long-run mean of 1. Two states are the classical MMPP(2), with one of rate 0 an on-off process.
    """

    rates: tuple[float, ...]
    stay_s: tuple[float, ...]

    def rescaling(self, duration_s: float, rng: np.random.Generator) -> Rescaling:
        stay = np.asarray(self.stay_s)
        _check_changes(duration_s / float(stay.mean()))
        mean = float(np.dot(self.rates, stay) / stay.sum())
        at = int(
            min(
                np.searchsorted(np.cumsum(stay), rng.random() * stay.sum(), side="right"),
                len(stay) - 1,
            )
        )
        block = math.ceil(duration_s / stay.mean() * 1.2) + 50
        lengths = np.empty(0)
        while lengths.sum() < duration_s:
            order = (at + len(lengths) + np.arange(block)) % len(stay)
            lengths = np.concatenate([lengths, rng.standard_exponential(block) * stay[order]])
        rates = np.asarray(self.rates)[(at + np.arange(len(lengths))) % len(stay)] / mean
        ends = np.cumsum(lengths)
        last = int(np.searchsorted(ends, duration_s))
        lengths = np.append(lengths[:last], duration_s - (ends[last - 1] if last else 0.0))
        return _piecewise(lengths, rates[: last + 1], None)


Curve = Ramp | Steps | Bursts | Switching


def _check_changes(count: float) -> None:
    if count > CHANGES_MAX:
        raise WorkloadError(
            f"the rate of the arrivals changes more than {CHANGES_MAX} times in a stage: "
            "lengthen it"
        )


def _piecewise(lengths_s: Floats, rates: Floats, total: float | None) -> Rescaling:
    """Return steps of ``rates``, scaled to the operational time ``total`` (None: unscaled)."""
    ends = np.concatenate([[0.0], np.cumsum(lengths_s)])
    integral = np.concatenate([[0.0], np.cumsum(lengths_s * rates)])
    if total is not None and integral[-1] == 0:
        raise WorkloadError(
            "the rate of the arrivals is 0 all through the stage: give them time to come"
        )
    integral *= 1.0 if total is None else total / integral[-1]
    return float(integral[-1]), lambda s: np.asarray(np.interp(s, integral, ends), dtype=np.float64)
