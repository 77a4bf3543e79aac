"""Empirical length distributions: quantile tables and point masses."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np

from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.lengths import distributions


@dataclass(frozen=True)
class Empirical(distributions.Lengths):
    """A quantile table: ``tokens[i]`` at level ``levels[i]``, linear in between.

    ``levels`` rise from 0 to 1, ``tokens`` never fall.
    """

    kind = "empirical"
    levels: tuple[float, ...]
    tokens: tuple[float, ...]
    basis: str = "quantile table"

    def __post_init__(self) -> None:
        if len(self.levels) != len(self.tokens) or len(self.levels) < 2:
            raise WorkloadError(
                "a quantile table needs at least the levels 0 and 1, each with its tokens"
            )
        for value in self.tokens:
            if not 1 <= value <= distributions.MAX_TOKENS:
                raise WorkloadError(
                    f"{value!r} is no length: give tokens from 1 to {distributions.MAX_TOKENS}"
                )
        if not all(0 <= level <= 1 for level in self.levels):
            raise WorkloadError("a quantile level is outside 0 to 1: write p99 as 0.99")
        if self.levels[0] != 0 or self.levels[-1] != 1:
            raise WorkloadError(
                "a quantile table must begin at level 0 (the minimum) and end at 1 (the maximum)"
            )
        if any(a >= b for a, b in zip(self.levels, self.levels[1:], strict=False)):
            raise WorkloadError("the levels of a quantile table must rise, each written once")
        if any(a > b for a, b in zip(self.tokens, self.tokens[1:], strict=False)):
            raise WorkloadError(
                "the tokens of a quantile table fall from one level to the next: check the order"
            )

    @classmethod
    def from_samples(cls, samples: Iterable[float]) -> Self:
        """Return the distribution of observed lengths in tokens, in any order (one or more)."""
        ordered = sorted(float(v) for v in samples)
        if not ordered:
            raise WorkloadError("an empirical distribution needs at least one length")
        basis = f"{len(ordered)} samples"
        if len(ordered) == 1:
            ordered *= 2
        levels = tuple(i / (len(ordered) - 1) for i in range(len(ordered)))
        return cls(levels, tuple(ordered), basis)

    @classmethod
    def from_quantiles(cls, table: Mapping[float, float]) -> Self:
        """Return the distribution by {level: tokens}; the levels 0 and 1 are required."""
        return cls(
            tuple(sorted(float(level) for level in table)), tuple(table[q] for q in sorted(table))
        )

    @cached_property
    def _table(self) -> tuple[distributions.Floats, distributions.Floats]:
        return np.asarray(self.levels, dtype=np.float64), np.asarray(self.tokens, dtype=np.float64)

    def _quantiles(self, u: distributions.Floats) -> distributions.Floats:
        return np.asarray(np.interp(u, *self._table), dtype=np.float64)

    def mean(self) -> float:
        """Return the integral of the interpolated quantile function."""
        levels, tokens = self._table
        return float(np.sum(np.diff(levels) * (tokens[1:] + tokens[:-1]) / 2))

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"minimum": self.tokens[0], "maximum": self.tokens[-1]}

    def _text(self) -> str:
        return (
            f"empirical ({self.basis}), p50 {self.quantile(0.5):.6g}, p99 {self.quantile(0.99):.6g}"
        )


@dataclass(frozen=True)
class Points(distributions.Lengths):
    """Point masses: ``tokens[i]`` (rising) with the relative weight ``weights[i]``."""

    kind = "points"
    tokens: tuple[int, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        for value in self.tokens:
            distributions.check_whole("tokens", value)
        if list(self.tokens) != sorted(set(self.tokens)):
            raise WorkloadError("the lengths of point masses must rise, each written once")
        distributions.check_weights(self.weights, len(self.tokens))

    def _quantiles(self, u: distributions.Floats) -> distributions.Floats:
        edges = np.cumsum(self.weights)
        index = np.searchsorted(edges, u * edges[-1], side="left")
        masses: distributions.Floats = np.asarray(self.tokens, dtype=np.float64).take(
            np.minimum(index, len(edges) - 1)
        )
        return masses

    def mean(self) -> float:
        return float(np.average(self.tokens, weights=self.weights))

    def _text(self) -> str:
        shown = ", ".join(map(str, self.tokens[:6]))
        return f"point masses at {shown}{', …' if len(self.tokens) > 6 else ''}"
