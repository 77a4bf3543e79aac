"""How many tokens a request has: fixed, log-normal, or empirical."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from workloads.errors import WorkloadError

MAX_TOKENS = 2**31 - 1
"""Longest length that a record can hold; every distribution is censored there."""

_NORMAL = NormalDist()  # scipy.special would cost a tenth of a second at every start
Z_99 = _NORMAL.inv_cdf(0.99)  # 2.3263...


def _z(q: float) -> float:
    return _NORMAL.inv_cdf(q) if 0 < q < 1 else math.copysign(math.inf, q - 0.5)


@dataclass(frozen=True)
class Fixed:
    """Every request has ``tokens`` tokens."""

    tokens: int

    def __post_init__(self) -> None:
        _check_whole("tokens", self.tokens)

    def sample(self, rng: np.random.Generator, n: int) -> NDArray[np.int64]:
        """int64[n], all the same; draws nothing from ``rng``."""
        return np.full(n, self.tokens, dtype=np.int64)

    def quantile(self, q: float) -> float:
        """Tokens at level q in [0, 1]."""
        _check_level(q)
        return float(self.tokens)

    def mean(self) -> float:
        """Mean in tokens."""
        return float(self.tokens)

    def describe(self) -> dict[str, Any]:
        """JSON-able description, as ``workload.input_tokens`` in run.json."""
        return _description(self, "fixed", f"fixed at {self.tokens}")


@dataclass(frozen=True)
class LogNormal:
    """Log-normal lengths with median ``p50`` and 99th percentile ``p99``, in tokens.

    Censored at ``minimum`` and ``maximum``: what falls outside becomes the bound itself, so a bound
    carries the probability that lies beyond it. mu = ln p50, sigma = ln(p99/p50) / z_0.99.
    """

    p50: float
    p99: float
    minimum: int = 1
    maximum: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("p50", self.p50), ("p99", self.p99)):
            if not (_is_number(value) and 0 < value <= MAX_TOKENS):
                raise WorkloadError(
                    f"{name} is {value!r}: give a number of tokens above 0 and up to {MAX_TOKENS}"
                )
        if self.p99 < self.p50:
            raise WorkloadError(f"p99 ({self.p99:g}) is below p50 ({self.p50:g}): give p99 >= p50")
        _check_whole("minimum", self.minimum)
        if self.maximum is not None:
            _check_whole("maximum", self.maximum)
            if self.maximum < self.minimum:
                raise WorkloadError(
                    f"maximum ({self.maximum}) is below minimum ({self.minimum}): give max >= min"
                )

    @property
    def sigma(self) -> float:
        """Standard deviation of ln(tokens), before censoring."""
        return math.log(self.p99 / self.p50) / Z_99

    @property
    def _bounds(self) -> tuple[int, int]:
        return self.minimum, MAX_TOKENS if self.maximum is None else self.maximum

    def sample(self, rng: np.random.Generator, n: int) -> NDArray[np.int64]:
        """int64[n], rounded to whole tokens; the first k do not depend on n."""
        tokens = self.p50 * (self.p99 / self.p50) ** (rng.standard_normal(n) / Z_99)
        return np.clip(np.rint(tokens), *self._bounds).astype(np.int64)

    def quantile(self, q: float) -> float:
        """Tokens at level q in [0, 1], before rounding: exp(mu + sigma z_q) = p50 (p99/p50)^(z_q/z_0.99), censored."""
        _check_level(q)
        low, high = self._bounds
        tokens = self.p50 * (self.p99 / self.p50) ** (_z(q) / Z_99)
        return float(min(max(tokens, low), high))

    def mean(self) -> float:
        """Mean in tokens, of the censored distribution: a F(a) + b (1 - F(b)) + partial expectation on (a, b)."""
        low, high = self._bounds
        sigma, mu = self.sigma, math.log(self.p50)
        if sigma == 0:
            return self.quantile(0.5)
        z_low, z_high = (math.log(low) - mu) / sigma, (math.log(high) - mu) / sigma
        inside = _NORMAL.cdf(z_high - sigma) - _NORMAL.cdf(z_low - sigma)
        inner = math.exp(mu + sigma**2 / 2) * inside if inside > 0 else 0.0
        return float(low * _NORMAL.cdf(z_low) + high * _NORMAL.cdf(-z_high) + inner)

    def describe(self) -> dict[str, Any]:
        """JSON-able description, as ``workload.input_tokens`` in run.json."""
        text = f"log-normal, p50 {self.p50:.10g}, p99 {self.p99:.10g}"
        if self.minimum > 1:
            text += f", at least {self.minimum}"
        if self.maximum is not None:
            text += f", at most {self.maximum}"
        return _description(self, "lognormal", text, minimum=self.minimum, maximum=self.maximum)


@dataclass(frozen=True)
class Empirical:
    """Lengths by a table of quantiles: tokens ``tokens[i]`` at level ``levels[i]``, linear in between.

    ``levels`` rise from 0 to 1, ``tokens`` never fall. Make one with ``from_samples`` or ``from_quantiles``.
    """

    levels: tuple[float, ...]
    tokens: tuple[float, ...]
    basis: str = "quantile table"

    def __post_init__(self) -> None:
        if len(self.levels) != len(self.tokens) or len(self.levels) < 2:
            raise WorkloadError("a quantile table needs at least the levels 0 and 1, each with its tokens")
        for value in self.tokens:
            if not (_is_number(value) and 1 <= value <= MAX_TOKENS):
                raise WorkloadError(f"{value!r} is no length: give tokens from 1 to {MAX_TOKENS}")
        if not all(_is_number(level) and 0 <= level <= 1 for level in self.levels):
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
    def from_samples(cls, samples: Iterable[float]) -> Empirical:
        """From observed lengths in tokens, in any order (one or more)."""
        values = tuple(samples)
        if not values:
            raise WorkloadError("an empirical distribution needs at least one length")
        if not all(_is_number(v) for v in values):
            raise WorkloadError("an empirical distribution takes numbers of tokens only")
        ordered = sorted(float(v) for v in values)
        if len(ordered) == 1:
            ordered *= 2
        levels = tuple(i / (len(ordered) - 1) for i in range(len(ordered)))
        return cls(levels, tuple(ordered), f"{len(values)} samples")

    @classmethod
    def from_quantiles(cls, table: Mapping[float, float]) -> Empirical:
        """From {level: tokens}, in any order; the levels 0 and 1 must be there."""
        if not all(_is_number(level) for level in table):
            raise WorkloadError("the levels of a quantile table are numbers from 0 to 1")
        pairs = sorted(table.items(), key=lambda pair: pair[0])
        return cls(tuple(float(q) for q, _ in pairs), tuple(tokens for _, tokens in pairs))

    @cached_property
    def _table(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return np.asarray(self.levels, dtype=np.float64), np.asarray(self.tokens, dtype=np.float64)

    def sample(self, rng: np.random.Generator, n: int) -> NDArray[np.int64]:
        """int64[n] by inverse CDF, rounded to whole tokens; the first k do not depend on n."""
        return np.rint(np.interp(rng.random(n), *self._table)).astype(np.int64)

    def quantile(self, q: float) -> float:
        """Tokens at level q in [0, 1], interpolated and before rounding."""
        _check_level(q)
        return float(np.interp(q, *self._table))

    def mean(self) -> float:
        """Mean in tokens: the integral of the interpolated quantile function."""
        levels, tokens = self._table
        return float(np.sum(np.diff(levels) * (tokens[1:] + tokens[:-1]) / 2))

    def describe(self) -> dict[str, Any]:
        """JSON-able description, as ``workload.input_tokens`` in run.json."""
        text = f"empirical ({self.basis}), p50 {self.quantile(0.5):.6g}, p99 {self.quantile(0.99):.6g}"
        return _description(self, "empirical", text, minimum=self.tokens[0], maximum=self.tokens[-1])


Lengths: TypeAlias = Fixed | LogNormal | Empirical


def _description(lengths: Lengths, kind: str, text: str, **more: Any) -> dict[str, Any]:
    figures = {"p50": lengths.quantile(0.5), "p99": lengths.quantile(0.99), "mean": lengths.mean()}
    return {"kind": kind, **figures, "text": text, **more}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def _check_whole(name: str, value: object) -> None:
    if not (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_TOKENS):
        raise WorkloadError(f"{name} is {value!r}: give a whole number of tokens from 1 to {MAX_TOKENS}")


def _check_level(q: float) -> None:
    if not 0 <= q <= 1:
        raise WorkloadError(f"quantile level {q!r} is outside 0 to 1: write p99 as 0.99")


FORMS = "512, lognormal:p50=1020,p99=4142[,min=1][,max=8192], or in a file {lognormal: ...}, {quantiles: ...}, {empirical: [...]}"  # fmt: skip
_SHORT = {"min": "minimum", "max": "maximum"}


def parse_lengths(spec: object, where: str) -> Lengths:
    """A length distribution from a flag (``512``, ``"lognormal:p50=200,p99=800,max=4096"``) or a YAML value.

    YAML forms: ``512``, ``{fixed: 512}``, ``{lognormal: {p50: 200, p99: 800, max: 4096}}``,
    ``{empirical: [12, 80, ...]}``, ``{quantiles: {0: 1, 0.5: 100, 1: 4000}}``.
    Raises WorkloadError with one line that begins with ``where``.
    """
    try:
        if isinstance(spec, Mapping):
            return _from_mapping(spec)
        if isinstance(spec, str) and ":" in spec:
            kind, _, rest = spec.partition(":")
            return _from_mapping({kind.strip().lower(): rest})
        return Fixed(_whole("tokens", spec))
    except WorkloadError as error:
        raise WorkloadError(f"{where}: {error}") from None


def _from_mapping(spec: Mapping[Any, Any]) -> Lengths:
    if len(spec) != 1:
        raise WorkloadError(f"{dict(spec)!r:.80} is no length distribution: write {FORMS}")
    ((kind, value),) = spec.items()
    if kind == "fixed":
        return Fixed(_whole("tokens", value))
    if kind == "lognormal":
        return _lognormal(_pairs(value) if isinstance(value, str) else value)
    if kind == "empirical" and isinstance(value, list | tuple):
        return Empirical.from_samples(_number("empirical", item) for item in value)
    if kind == "quantiles" and isinstance(value, Mapping):
        return Empirical.from_quantiles({_number("level", q): _number("tokens", n) for q, n in value.items()})
    raise WorkloadError(f"{kind}: {value!r:.60} is no length distribution: write {FORMS}")


def _lognormal(values: object) -> LogNormal:
    if not isinstance(values, Mapping):
        raise WorkloadError(
            f"lognormal: {values!r:.60} is no list of parameters: write lognormal:p50=1020,p99=4142"
        )
    given = {_SHORT.get(name, name): value for name, value in values.items()}
    unknown = [name for name in given if name not in ("p50", "p99", "minimum", "maximum")]
    if unknown:
        raise WorkloadError(f"lognormal has no parameter {unknown[0]!r}: it takes p50, p99, min and max")
    for name in ("p50", "p99"):
        if name not in given:
            raise WorkloadError(f"lognormal lacks {name}: write lognormal:p50=1020,p99=4142")
    maximum = given.get("maximum")
    return LogNormal(
        p50=_number("p50", given["p50"]),
        p99=_number("p99", given["p99"]),
        minimum=_whole("minimum", given.get("minimum", 1)),
        maximum=None if maximum is None else _whole("maximum", maximum),
    )


def _pairs(text: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for part in text.split(","):
        name, sign, value = part.partition("=")
        if not sign:
            raise WorkloadError(f"{part.strip()!r} is no name=value: write lognormal:p50=1020,p99=4142")
        if name.strip() in pairs:
            raise WorkloadError(f"{name.strip()} is given twice: keep one")
        pairs[name.strip()] = value.strip()
    return pairs


def _number(name: str, value: object) -> float:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise WorkloadError(f"{name} is {value!r:.60}: give a number") from None
    if not _is_number(value):
        raise WorkloadError(f"{name} is {value!r:.60}: give a number")
    return value  # type: ignore[return-value]  # _is_number has looked


def _whole(name: str, value: object) -> int:
    if not isinstance(value, int | float | str) or isinstance(value, bool):
        raise WorkloadError(f"{name} is {value!r:.60}: write {FORMS}")
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise WorkloadError(f"{name} is {value!r:.60}: write {FORMS}") from None
    if not math.isfinite(number) or number != int(number):
        raise WorkloadError(f"{name} is {value!r:.60}: give a whole number of tokens")
    return int(number)
