"""Parse length distributions from flags or files, and draw correlated input and output lengths."""

import math
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ampacity.workloads.errors import WorkloadError, did_you_mean
from ampacity.workloads.lengths.distributions import (
    MAX_TOKENS,
    Fixed,
    Gamma,
    Lengths,
    LogNormal,
    Normal,
    Pareto,
    Uniform,
    whole_tokens,
)
from ampacity.workloads.lengths.empirical import Empirical, Points
from ampacity.workloads.lengths.mixtures import Clipped, Mixture

__all__ = [
    "MAX_TOKENS",
    "Clipped",
    "Empirical",
    "Fixed",
    "Gamma",
    "Lengths",
    "LogNormal",
    "Mixture",
    "Normal",
    "Pareto",
    "Points",
    "Uniform",
    "draw_pairs",
    "parse_lengths",
]

FORMS = (
    "512, lognormal:p50=1020,p99=4142, gamma:mean=300,cv=2, 0.7*lognormal:... + 0.3*512, "
    "or in a file {quantiles: {0: 1, 0.5: 100, 1: 4000}}"
)
# By kind: its parameters, what it is made with, and how it is written.
_FAMILIES: dict[str, tuple[tuple[str, str], Callable[[Any, Any], Lengths], str]] = {
    "lognormal": (("p50", "p99"), LogNormal, "lognormal:p50=1020,p99=4142"),
    "normal": (("mean", "std"), Normal, "normal:mean=500,std=100"),
    "gamma": (("mean", "cv"), Gamma, "gamma:mean=300,cv=2"),
    "pareto": (("start", "alpha"), Pareto, "pareto:start=4000,alpha=1.5"),
    "uniform": (("min", "max"), Uniform, "uniform:min=100,max=200"),
}
_KINDS = (*_FAMILIES, "fixed", "points", "quantiles", "empirical", "mixture")
_LONG = {"minimum": "min", "maximum": "max"}
_SUM = re.compile(r"\s*\+\s*(?=[\d.]+\s*\*)")  # between the parts of a mixture; 1e+3 holds a + too
_PART = re.compile(r"([\d.]+)\s*\*\s*(.+)", re.DOTALL)


def parse_lengths(spec: object, where: str, unit: str = " of tokens") -> Lengths:
    """Parse a length distribution from a flag or a YAML value.

    Flags: ``512``, ``"lognormal:p50=200,p99=800,max=4096"``, or the mixture
    ``"0.7*lognormal:p50=200,p99=800 + 0.3*181"``. YAML also: ``{lognormal: {p50: 200, p99: 800}}``,
    ``{empirical: [12, 80, ...]}``, ``{quantiles: {0: 1, 0.5: 100, 1: 4000}}``, ``{points: {181:
    0.3, 4096: 0.7}}`` and ``{mixture: [{weight: 0.7, lognormal: {...}}, {weight: 0.3, fixed:
    181}]}``, each optionally with ``min`` and ``max``. ``unit``: what is counted, for messages.
    Raises WorkloadError with one line that begins with ``where``.
    """
    try:
        return _parse(spec)
    except WorkloadError as error:
        text = str(error)
        if unit != " of tokens":
            text = text.removeprefix("tokens is ").replace(" of tokens", unit)
        raise WorkloadError(f"{where}: {text}") from None
    except RecursionError:
        raise WorkloadError(f"{where}: this is nested too deep") from None


def _parse(spec: object) -> Lengths:
    if isinstance(spec, Mapping):
        return _from_mapping(spec)
    if isinstance(spec, str) and "*" in spec:
        parts = [_PART.fullmatch(part.strip()) for part in _SUM.split(spec)]
        if not all(parts):
            raise WorkloadError(
                f"{spec!r:.80} is no mixture: write 0.7*lognormal:p50=200,p99=800 + 0.3*512"
            )
        return Mixture(
            tuple(_parse(part[2]) for part in parts if part),
            tuple(number("weight", part[1]) for part in parts if part),
        )
    if isinstance(spec, str) and ":" in spec:
        kind, _, rest = spec.partition(":")
        return _of_kind(kind.strip().lower(), rest)
    return Fixed(whole("tokens", spec))


def _from_mapping(spec: Mapping[Any, Any]) -> Lengths:
    given = {_LONG.get(name, name): value for name, value in spec.items()}
    bounds = {name: given.pop(name) for name in ("min", "max") if name in given}
    if len(given) != 1:
        raise WorkloadError(f"{dict(spec)!r:.80} is no length distribution: write {FORMS}")
    ((kind, value),) = given.items()
    return _bounded(_of_kind(kind, value), bounds)


def _of_kind(kind: object, value: object) -> Lengths:
    if kind == "fixed":
        return Fixed(whole("tokens", value))
    if isinstance(kind, str) and kind in _FAMILIES:
        return _parametric(kind, value)
    if kind == "empirical" and isinstance(value, list | tuple):
        return Empirical.from_samples(number("empirical", item) for item in value)
    if kind == "quantiles" and isinstance(value, Mapping):
        return Empirical.from_quantiles(
            {number("level", q): number("tokens", n) for q, n in value.items()}
        )
    if kind == "points":
        table = pairs(value, "points:181=0.3,4096=0.7") if isinstance(value, str) else value
        if isinstance(table, Mapping):
            weights = {whole("tokens", n): number("weight", w) for n, w in table.items()}
            return Points(tuple(sorted(weights)), tuple(weights[n] for n in sorted(weights)))
    if kind == "mixture" and isinstance(value, list | tuple):
        return _mixture(value)
    hint = "" if kind in _KINDS else did_you_mean(kind, _KINDS)
    raise WorkloadError(f"{kind}: {value!r:.60} is no length distribution{hint}: write {FORMS}")


def _parametric(kind: str, values: object) -> Lengths:
    wanted, make, example = _FAMILIES[kind]
    if isinstance(values, str):
        values = pairs(values, example)
    if not isinstance(values, Mapping):
        raise WorkloadError(f"{kind}: {values!r:.60} is no list of parameters: write {example}")
    given = {_LONG.get(name, name): value for name, value in values.items()}
    if kind == "lognormal" and "p50" not in given and ("mean" in given or "cv" in given):
        wanted, make = ("mean", "cv"), LogNormal.from_mean
    bounded = () if kind == "uniform" else ("min", "max")
    bounds = {name: given.pop(name) for name in bounded if name in given}
    for name in given:
        if name not in wanted:
            also = "" if kind == "uniform" else ", and min and max"
            hint = did_you_mean(name, wanted)
            raise WorkloadError(
                f"{kind} has no parameter {name!r}{hint}: it takes {' and '.join(wanted)}{also}"
            )
    for name in wanted:
        if name not in given:
            raise WorkloadError(f"{kind} lacks {name}: write {example}")
    read = whole if kind == "uniform" else number
    return _bounded(make(*(read(name, given[name]) for name in wanted)), bounds)


def _mixture(items: list[Any] | tuple[Any, ...]) -> Mixture:
    parts, weights = [], []
    for item in items:
        if not isinstance(item, Mapping) or "weight" not in item:
            raise WorkloadError(
                f"mixture: {item!r:.60} has no weight: write {{weight: 0.3, fixed: 512}}"
            )
        weights.append(number("weight", item["weight"]))
        parts.append(
            _from_mapping({name: value for name, value in item.items() if name != "weight"})
        )
    return Mixture(tuple(parts), tuple(weights))


def _bounded(lengths: Lengths, bounds: Mapping[str, object]) -> Lengths:
    if not bounds:
        return lengths
    minimum = whole("minimum", bounds.get("min", 1))
    maximum = None if bounds.get("max") is None else whole("maximum", bounds["max"])
    return Clipped(lengths, minimum, maximum)


def pairs(text: str, example: str) -> dict[str, str]:
    """Parse ``a=1,b=2`` into {"a": "1", "b": "2"}. Raises WorkloadError with the ``example``."""
    found: dict[str, str] = {}
    for part in text.split(","):
        name, sign, value = part.partition("=")
        if not sign:
            raise WorkloadError(f"{part.strip()!r} is no name=value: write {example}")
        if name.strip() in found:
            raise WorkloadError(f"{name.strip()} is given twice: keep one")
        found[name.strip()] = value.strip()
    return found


def number(name: str, value: object) -> float:
    """Parse a finite number, given as a number or as text. Raises WorkloadError."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise WorkloadError(f"{name} is {value!r:.60}: give a number") from None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < math.inf:
        raise WorkloadError(f"{name} is {value!r:.60}: give a number")
    return value


def whole(name: str, value: object) -> int:
    """Parse a whole number of tokens, given as a number or as text. Raises WorkloadError."""
    if not isinstance(value, int | float | str) or isinstance(value, bool):
        raise WorkloadError(f"{name} is {value!r:.60}: write {FORMS}")
    try:
        found = float(value)
    except (ValueError, OverflowError):
        raise WorkloadError(f"{name} is {value!r:.60}: write {FORMS}") from None
    if not math.isfinite(found) or found != int(found):
        raise WorkloadError(f"{name} is {value!r:.60}: give a whole number of tokens")
    return int(found)


def draw_pairs(
    inputs: Lengths,
    outputs: Lengths,
    copula: float,
    rng: tuple[np.random.Generator, np.random.Generator],
    n: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw (input, output) tokens, int64[n] each, tied by a Gaussian ``copula`` (0: independent).

    Each side has a random stream of its own; the first k do not depend on n.
    """
    if copula == 0:
        return inputs.sample(rng[0], n), outputs.sample(rng[1], n)
    from scipy.special import ndtr

    z = rng[0].standard_normal(n)
    other = copula * z + math.sqrt(1 - copula**2) * rng[1].standard_normal(n)
    return whole_tokens(inputs.at(ndtr(z))), whole_tokens(outputs.at(ndtr(other)))


@lru_cache(maxsize=64)
def fit_copula(inputs: Lengths, outputs: Lengths, rho: float) -> float:
    """Return the copula parameter for the rank correlation ``rho`` (Spearman's); 0 for 0.

    Without ties it is 2 sin(pi rho / 6); ties need more, so it is found by bisection on 20,000
    fixed draws. Raises WorkloadError where the lengths have too many ties for it.
    """
    if not -1 < rho < 1:
        raise WorkloadError(f"correlation is {rho:g}: give a rank correlation above -1 and below 1")
    if rho == 0:
        return 0.0
    sign, low, high = math.copysign(1, rho), 0.0, 0.999_999
    if abs(_realised(inputs, outputs, sign * high)) < abs(rho) - 0.02:
        raise WorkloadError(
            f"correlation {rho:g} is out of reach: "
            "too many requests share one input or output length"
        )
    for _ in range(14):
        middle = (low + high) / 2
        low, high = (
            (middle, high)
            if abs(_realised(inputs, outputs, sign * middle)) < abs(rho)
            else (low, middle)
        )
    return sign * (low + high) / 2


def _realised(inputs: Lengths, outputs: Lengths, copula: float) -> float:
    rng = np.random.default_rng(0), np.random.default_rng(1)
    return spearman(*draw_pairs(inputs, outputs, copula, rng, 20_000))


def spearman(a: NDArray[np.int64], b: NDArray[np.int64]) -> float:
    """Return the rank correlation with mid-ranks for ties; 0 where one side is constant."""
    ranks = []
    for side in (a, b):
        _, inverse, counts = np.unique(side, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - (counts - 1) / 2)[inverse])
    return (
        float(np.corrcoef(ranks[0], ranks[1])[0, 1]) if ranks[0].std() and ranks[1].std() else 0.0
    )
