"""Service level objectives as people write them: ``ttft_p99=2s``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

METRICS: tuple[str, ...] = ("ttft", "itl", "icl", "tpot", "e2e", "first_answer")
GAP_METRICS: frozenset[str] = frozenset({"itl", "icl"})
"""Metrics whose percentile is over gaps; the others have one value per request."""

_UNITS_S = {
    "us": Decimal("1e-6"),
    "µs": Decimal("1e-6"),
    "ms": Decimal("1e-3"),
    "s": Decimal(1),
    "m": Decimal(60),
}
_EXAMPLE = "for example ttft_p99=2s or itl_p99=50ms"
_NUMBER = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([^\d\s.]*)")


class SloError(ValueError):
    """A text that is no SLO; the message is one line and says what is allowed."""


@dataclass(frozen=True)
class Slo:
    """At least a share ``quantile`` of the samples of ``metric`` is within ``limit_s`` seconds."""

    metric: str
    quantile: float
    limit_s: float

    @property
    def percentile(self) -> str:
        """``p99`` or ``p99.9``."""
        return f"p{(Decimal(repr(self.quantile)) * 100).normalize():f}"

    @property
    def name(self) -> str:
        """``ttft_p99``."""
        return f"{self.metric}_{self.percentile}"

    @property
    def text(self) -> str:
        """The canonical form, which ``parse_slo`` reads back: ``ttft_p99=2s``."""
        return f"{self.name}={duration_text(self.limit_s)}"

    def as_dict(self) -> dict[str, Any]:
        """The entry of ``slos`` in run.json and summary.json."""
        return {"metric": self.metric, "quantile": self.quantile, "limit_s": self.limit_s, "text": self.text}


def duration_text(seconds: float) -> str:
    """``2s``, ``50ms``, ``300us``: the largest unit in which the number is at least 1."""
    value = Decimal(repr(float(seconds)))
    for unit in ("s", "ms", "us"):
        if value >= _UNITS_S[unit] or unit == "us":
            return f"{(value / _UNITS_S[unit]).normalize():f}{unit}"
    raise AssertionError("unreachable")


def parse_duration(text: str, what: str = "a duration") -> float:
    """Seconds of ``500ms``, ``2s``, ``1.5m``, ``300us``. Raises SloError; a bare number is refused."""
    match = _NUMBER.fullmatch(text.strip())
    if not match:
        raise SloError(
            f"{what}: {text!r} is no duration: write a number and a unit (us, ms, s, m), {_EXAMPLE}"
        )
    number, unit = match.groups()
    if not unit:
        raise SloError(f"{what}: {text!r} has no unit: write {number}s or {number}ms ({_EXAMPLE})")
    if unit not in _UNITS_S:
        raise SloError(f"{what}: unknown unit {unit!r} in {text!r}: allowed are us, ms, s, m, {_EXAMPLE}")
    seconds = float(Decimal(number) * _UNITS_S[unit])
    if seconds <= 0:
        raise SloError(f"{what}: {text!r} is not above zero: a limit must be positive, {_EXAMPLE}")
    return seconds


def parse_slo(text: str) -> Slo:
    """Read ``metric_pQQ=limit``. Raises SloError with one line that says what is allowed."""
    name, equals, limit = text.strip().partition("=")
    if not equals:
        raise SloError(f"SLO {text!r} has no '=': write metric_pQQ=limit, {_EXAMPLE}")
    metric, underscore, percentile = name.strip().rpartition("_p")
    if not underscore:
        bare = name.strip()
        hint = f"write {bare}_p99={limit.strip()}" if bare in METRICS else f"metrics are {', '.join(METRICS)}"
        raise SloError(f"SLO {text!r} names no percentile: {hint}, {_EXAMPLE}")
    if metric not in METRICS:
        raise SloError(
            f"SLO {text!r}: unknown metric {metric!r}: allowed are {', '.join(METRICS)}, {_EXAMPLE}"
        )
    if not re.fullmatch(r"\d{2}(\.\d{1,3})?", percentile) or not 50 <= Decimal(percentile) <= Decimal("99.9"):
        raise SloError(f"SLO {text!r}: percentile p{percentile} is not between p50 and p99.9, {_EXAMPLE}")
    return Slo(metric, float(Decimal(percentile) / 100), parse_duration(limit, f"SLO {text!r}"))


def parse_slos(texts: Iterable[str]) -> list[Slo]:
    """Read several SLOs; the same one twice counts once, two limits for one percentile are refused."""
    slos: dict[str, Slo] = {}
    for slo in map(parse_slo, texts):
        known = slos.setdefault(slo.name, slo)
        if known.limit_s != slo.limit_s:
            raise SloError(
                f"SLO {slo.name} is given as {duration_text(known.limit_s)} and as {duration_text(slo.limit_s)}: keep one"
            )
    return list(slos.values())


def slo_from_dict(value: Mapping[str, Any]) -> Slo:
    """Read an entry of run.json's ``slos``. Raises SloError."""
    try:
        slo = Slo(str(value["metric"]), float(value["quantile"]), float(value["limit_s"]))
    except (KeyError, TypeError, ValueError) as error:
        raise SloError(f"run.json: slos holds {value!r}, which needs metric, quantile and limit_s") from error
    if slo.metric not in METRICS or not 0.5 <= slo.quantile <= 0.999 or not 0 < slo.limit_s < float("inf"):
        raise SloError(f"run.json: slos holds {value!r}, whose metric, quantile or limit_s is out of range")
    return slo
