"""Parametric length distributions, each given by its quantile function."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from ampacity.workloads.errors import WorkloadError, number_between

MAX_TOKENS = 2**31 - 1
"""Longest length that a record can hold; every distribution is censored there."""

_NORMAL = NormalDist()  # scipy.special would cost a tenth of a second at every start
Z_99 = _NORMAL.inv_cdf(0.99)  # 2.3263...
Floats = NDArray[np.float64]


def _z(u: Floats) -> Floats:
    from scipy.special import ndtri

    return np.asarray(ndtri(u), dtype=np.float64)


class Lengths(ABC):
    """Base of all distributions: subclasses define ``_quantiles`` and ``_text``."""

    kind: ClassVar[str]

    @abstractmethod
    def _quantiles(self, u: Floats) -> Floats:
        """Return tokens at the levels ``u``, neither clipped nor rounded."""

    @abstractmethod
    def _text(self) -> str:
        """Return the distribution in words."""

    def at(self, u: Floats) -> Floats:
        """Return tokens at the levels ``u`` in [0, 1], before rounding."""
        return np.clip(self._quantiles(u), 1, MAX_TOKENS)

    def sample(self, rng: np.random.Generator, n: int) -> NDArray[np.int64]:
        """Return int64[n], rounded to whole tokens; the first k do not depend on n."""
        return whole_tokens(self.at(rng.random(n)))

    def quantile(self, q: float) -> float:
        """Return tokens at level q in [0, 1], before rounding."""
        check_level(q)
        return float(self.at(np.array([q], dtype=np.float64))[0])

    def mean(self) -> float:
        """Return the mean in tokens: the integral of q(Phi(z)) phi(z) dz, by the trapezoid rule."""
        from scipy.special import ndtr

        z = np.linspace(-8.2, 8.2, 20_001)
        weight = np.exp(-(z**2) / 2)
        return float(np.sum(self.at(ndtr(z)) * weight) / np.sum(weight))

    def share_above(self, tokens: float) -> float:
        """Return P(length > tokens), by bisection of the quantile function."""
        low, high = 0.0, 1.0
        for _ in range(54):
            middle = (low + high) / 2
            low, high = (middle, high) if self.quantile(middle) <= tokens else (low, middle)
        return 1 - high

    def describe(self) -> dict[str, Any]:
        """Return a JSON-able description, as ``workload.input_tokens`` in run.json."""
        figures = {"p50": self.quantile(0.5), "p99": self.quantile(0.99), "mean": self.mean()}
        return {"kind": self.kind, **figures, "text": self._text()}


@dataclass(frozen=True)
class Fixed(Lengths):
    """A constant length."""

    kind = "fixed"
    tokens: int

    def __post_init__(self) -> None:
        check_whole("tokens", self.tokens)

    def _quantiles(self, u: Floats) -> Floats:
        return np.full(u.shape, self.tokens, dtype=np.float64)

    def sample(self, rng: np.random.Generator, n: int) -> NDArray[np.int64]:
        """Return int64[n]; draws nothing from ``rng``."""
        return np.full(n, self.tokens, dtype=np.int64)

    def mean(self) -> float:
        return float(self.tokens)

    def _text(self) -> str:
        return f"fixed at {self.tokens}"


@dataclass(frozen=True)
class LogNormal(Lengths):
    """Log-normal with median ``p50`` and 99th percentile ``p99``, in tokens.

    mu = ln p50, sigma = ln(p99/p50) / z_0.99.
    """

    kind = "lognormal"
    p50: float
    p99: float

    def __post_init__(self) -> None:
        for name, value in (("p50", self.p50), ("p99", self.p99)):
            check_positive(name, value)
        if self.p99 < self.p50:
            raise WorkloadError(f"p99 ({self.p99:g}) is below p50 ({self.p50:g}): give p99 >= p50")

    @classmethod
    def from_mean(cls, mean: float, cv: float) -> Self:
        """Convert mean and CV: sigma^2 = ln(1 + cv^2), p50 = mean / sqrt(1 + cv^2)."""
        check_positive("mean", mean)
        check_positive("cv", cv, "above 0")
        p50, sigma = mean / math.sqrt(1 + cv**2), math.sqrt(math.log1p(cv**2))
        return cls(p50, p50 * math.exp(sigma * Z_99))

    def _quantiles(self, u: Floats) -> Floats:
        return self.p50 * (self.p99 / self.p50) ** (_z(u) / Z_99)

    def sample(self, rng: np.random.Generator, n: int) -> NDArray[np.int64]:
        tokens = self.p50 * (self.p99 / self.p50) ** (rng.standard_normal(n) / Z_99)
        return whole_tokens(np.clip(tokens, 1, MAX_TOKENS))

    def quantile(self, q: float) -> float:
        """Return exp(mu + sigma z_q) = p50 (p99/p50)^(z_q/z_0.99) tokens, before rounding."""
        check_level(q)
        z = _NORMAL.inv_cdf(q) if 0 < q < 1 else math.copysign(math.inf, q - 0.5)
        return float(min(max(self.p50 * (self.p99 / self.p50) ** (z / Z_99), 1), MAX_TOKENS))

    def mean(self) -> float:
        """Return the mean censored to [1, b]: F(1) + b (1 - F(b)) + partial expectation."""
        sigma, mu = math.log(self.p99 / self.p50) / Z_99, math.log(self.p50)
        if sigma == 0:
            return self.quantile(0.5)
        z_low, z_high = -mu / sigma, (math.log(MAX_TOKENS) - mu) / sigma
        inside = _NORMAL.cdf(z_high - sigma) - _NORMAL.cdf(z_low - sigma)
        inner = math.exp(mu + sigma**2 / 2) * inside if inside > 0 else 0.0
        return float(_NORMAL.cdf(z_low) + MAX_TOKENS * _NORMAL.cdf(-z_high) + inner)

    def _text(self) -> str:
        return f"log-normal, p50 {self.p50:.10g}, p99 {self.p99:.10g}"


@dataclass(frozen=True)
class Uniform(Lengths):
    """Uniform over the whole numbers from ``minimum`` to ``maximum``."""

    kind = "uniform"
    minimum: int
    maximum: int

    def __post_init__(self) -> None:
        check_bounds(self.minimum, self.maximum)

    def _quantiles(self, u: Floats) -> Floats:
        return np.clip(
            self.minimum - 0.5 + u * (self.maximum - self.minimum + 1), self.minimum, self.maximum
        )

    def mean(self) -> float:
        return (self.minimum + self.maximum) / 2

    def _text(self) -> str:
        return f"uniform from {self.minimum} to {self.maximum}"


@dataclass(frozen=True)
class Normal(Lengths):
    """Normal with ``center`` and ``std`` in tokens, truncated at 1 (smaller draws are repeated).

    Quantile at u: center + std Phi^-1(Phi(a) + u (1 - Phi(a))), a = (1 - center) / std.
    """

    kind = "normal"
    center: float
    std: float

    def __post_init__(self) -> None:
        check_positive("mean", self.center)
        check_positive("std", self.std)

    @property
    def _below(self) -> tuple[float, float]:
        a = (1 - self.center) / self.std
        return a, _NORMAL.cdf(a)

    def _quantiles(self, u: Floats) -> Floats:
        below = self._below[1]
        return self.center + self.std * _z(below + u * (1 - below))

    def mean(self) -> float:
        """Return the truncated mean: center + std phi(a) / (1 - Phi(a))."""
        a, below = self._below
        return min(self.center + self.std * _NORMAL.pdf(a) / (1 - below), float(MAX_TOKENS))

    def _text(self) -> str:
        cut = self._below[1]
        note = f" ({cut:.1%} would lie below and are drawn again)" if cut >= 0.0005 else ""
        return f"normal, mean {self.center:.10g}, std {self.std:.10g}, truncated at 1{note}"


@dataclass(frozen=True)
class Gamma(Lengths):
    """Gamma with mean ``average`` in tokens and coefficient of variation ``cv``: shape 1/cv^2."""

    kind = "gamma"
    average: float
    cv: float

    def __post_init__(self) -> None:
        check_positive("mean", self.average)
        number_between(self.cv, "cv", 0.001, 100)

    def _quantiles(self, u: Floats) -> Floats:
        from scipy.special import gammaincinv

        return np.asarray(gammaincinv(self.cv**-2, u), dtype=np.float64) * self.average * self.cv**2

    def sample(self, rng: np.random.Generator, n: int) -> NDArray[np.int64]:
        """Return int64[n] as the base does, ten times as fast as by quantiles."""
        tokens = rng.standard_gamma(self.cv**-2, n) * (self.average * self.cv**2)
        return whole_tokens(np.clip(tokens, 1, MAX_TOKENS))

    def _text(self) -> str:
        return f"gamma, mean {self.average:.10g}, CV {self.cv:.10g}"


@dataclass(frozen=True)
class Pareto(Lengths):
    """Pareto from ``start`` tokens on: P[X > x] = (start / x)^alpha; the long tail of a mixture."""

    kind = "pareto"
    start: float
    alpha: float

    def __post_init__(self) -> None:
        if not 1 <= self.start <= MAX_TOKENS:
            raise WorkloadError(
                f"start is {self.start!r}: give a number of tokens from 1 to {MAX_TOKENS}"
            )
        number_between(self.alpha, "alpha", 0.05, 100)

    def _quantiles(self, u: Floats) -> Floats:
        with np.errstate(divide="ignore", over="ignore"):  # an endless tail is censored by ``at``
            return self.start * (1 - u) ** (-1 / self.alpha)

    def mean(self) -> float:
        """Return the mean, censored at b: start (1 + (1 - (start/b)^(alpha - 1)) / (alpha - 1))."""
        if self.alpha == 1:
            return self.start * (1 + math.log(MAX_TOKENS / self.start))
        rest = -math.expm1((self.alpha - 1) * math.log(self.start / MAX_TOKENS)) / (self.alpha - 1)
        return self.start * (1 + rest)

    def _text(self) -> str:
        return f"Pareto from {self.start:.10g}, alpha {self.alpha:.10g}"


def whole_tokens(tokens: Floats) -> NDArray[np.int64]:
    return np.rint(tokens).astype(np.int64)


def check_positive(name: str, value: float, bounds: str = "") -> None:
    """Raise WorkloadError unless 0 < ``value`` <= MAX_TOKENS."""
    if not 0 < value <= MAX_TOKENS:
        wanted = bounds or f"of tokens above 0 and up to {MAX_TOKENS}"
        raise WorkloadError(f"{name} is {value!r}: give a number {wanted}")


def check_weights(weights: tuple[float, ...], n: int) -> None:
    """Raise WorkloadError unless there are n weights above 0."""
    if not weights or len(weights) != n:
        raise WorkloadError("give at least one part, each with its weight")
    for weight in weights:
        if not 1e-12 <= weight <= 1e12:
            raise WorkloadError(f"weight {weight!r}: give a number above 0")


def check_bounds(minimum: int, maximum: int | None) -> None:
    """Raise WorkloadError unless both are lengths and in order."""
    check_whole("minimum", minimum)
    if maximum is not None:
        check_whole("maximum", maximum)
        if maximum < minimum:
            raise WorkloadError(
                f"maximum ({maximum}) is below minimum ({minimum}): give max >= min"
            )


def check_whole(name: str, value: int) -> None:
    """Raise WorkloadError unless ``value`` is a length."""
    if not 1 <= value <= MAX_TOKENS:
        raise WorkloadError(
            f"{name} is {value!r}: give a whole number of tokens from 1 to {MAX_TOKENS}"
        )


def check_level(q: float) -> None:
    """Raise WorkloadError unless q is a quantile level."""
    if not 0 <= q <= 1:
        raise WorkloadError(f"quantile level {q!r} is outside 0 to 1: write p99 as 0.99")
