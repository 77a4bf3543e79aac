"""Mixtures of length distributions, and distributions censored at bounds."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ampacity.workloads.lengths import distributions


@dataclass(frozen=True)
class Mixture(distributions.Lengths):
    """A mixture of ``parts`` with the relative ``weights``."""

    kind = "mixture"
    parts: tuple[distributions.Lengths, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        distributions.check_weights(self.weights, len(self.parts))

    @cached_property
    def _shares(self) -> distributions.Floats:
        shares: distributions.Floats = np.divide(
            self.weights, np.sum(self.weights), dtype=np.float64
        )
        return shares

    def sample(self, rng: np.random.Generator, n: int) -> NDArray[np.int64]:
        """Return int64[n]; one uniform number selects the part and the level within it."""
        edges = np.concatenate([[0.0], np.cumsum(self._shares)])
        u = rng.random(n)
        part = np.minimum(np.searchsorted(edges[1:], u, side="right"), len(self.parts) - 1)
        tokens = np.empty(n, dtype=np.float64)
        for i, lengths in enumerate(self.parts):
            mine = part == i
            tokens[mine] = lengths.at(np.clip((u[mine] - edges[i]) / self._shares[i], 0, 1))
        return distributions.whole_tokens(tokens)

    @cached_property
    def _table(self) -> tuple[distributions.Floats, distributions.Floats]:
        """Return (levels, tokens): the parts' quantiles in 8,000 cells each, merged."""
        from scipy.special import ndtr

        edges = ndtr(np.linspace(-8.2, 8.2, 8001))
        middles, widths = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
        tokens = np.concatenate([lengths.at(middles) for lengths in self.parts])
        order = np.argsort(tokens, kind="stable")
        weight = np.concatenate([share * widths for share in self._shares])[order]
        ends = np.concatenate([lengths.at(np.array([0.0, 1.0])) for lengths in self.parts])
        return (
            np.concatenate([[0.0], np.minimum(np.cumsum(weight) - weight / 2, 1 - 2**-53), [1.0]]),
            np.concatenate([[ends.min()], tokens[order], [ends.max()]]),
        )

    def _quantiles(self, u: distributions.Floats) -> distributions.Floats:
        return np.interp(u, *self._table)

    def mean(self) -> float:
        return float(sum(w * p.mean() for w, p in zip(self._shares, self.parts, strict=True)))

    def describe(self) -> dict[str, Any]:
        parts = [
            {"weight": w, **p.describe()} for w, p in zip(self.weights, self.parts, strict=True)
        ]
        return super().describe() | {"parts": parts}

    def _text(self) -> str:
        shown = (f"{w:.3g} of {p._text()}" for w, p in zip(self._shares, self.parts, strict=True))
        return f"mixture of {len(self.parts)}: " + "; ".join(shown)


@dataclass(frozen=True)
class Clipped(distributions.Lengths):
    """``lengths`` censored at ``minimum`` and ``maximum``: values outside become the bound."""

    kind = "clipped"
    lengths: distributions.Lengths
    minimum: int = 1
    maximum: int | None = None

    def __post_init__(self) -> None:
        distributions.check_bounds(self.minimum, self.maximum)

    @property
    def _bounds(self) -> tuple[int, int]:
        return self.minimum, distributions.MAX_TOKENS if self.maximum is None else self.maximum

    def _quantiles(self, u: distributions.Floats) -> distributions.Floats:
        return np.clip(self.lengths.at(u), *self._bounds)

    def sample(self, rng: np.random.Generator, n: int) -> NDArray[np.int64]:
        return np.clip(self.lengths.sample(rng, n), *self._bounds)

    def quantile(self, q: float) -> float:
        low, high = self._bounds
        return min(max(self.lengths.quantile(q), float(low)), float(high))

    def describe(self) -> dict[str, Any]:
        """Return the description of the lengths, the bounds, and the share cut by ``maximum``."""
        bounds = {"minimum": self.minimum, "maximum": self.maximum, "truncated_share": self._cut}
        return self.lengths.describe() | super().describe() | bounds | {"kind": self.lengths.kind}

    @cached_property
    def _cut(self) -> float:
        return 0.0 if self.maximum is None else self.lengths.share_above(self.maximum)

    def _text(self) -> str:
        text = self.lengths._text() + (f", at least {self.minimum}" if self.minimum > 1 else "")
        if self.maximum is None:
            return text
        cut = f" ({self._cut:.1%} are cut to it)" if self._cut >= 0.0005 else ""
        return f"{text}, at most {self.maximum}{cut}"
