"""Percentiles, curves and spreads: the figures of a sample."""

from __future__ import annotations

import msgspec

from ampacity.analysis.contract.part import Interval, Part


class Percentiles(Part, frozen=True, kw_only=True):
    """Percentiles of a metric; a null one has its reason, or the bounds that are known."""

    n: int
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    p99_ci: Interval | None
    p99_9: float | None = msgspec.field(name="p99.9", default=None)
    p99_9_ci: Interval | None = msgspec.field(name="p99.9_ci", default=None)
    min: float | None = None
    max: float | None = None
    mean: float | None
    infinite: int
    censored: int = 0
    p50_reason: str | None = None
    p90_reason: str | None = None
    p95_reason: str | None = None
    p99_reason: str | None = None
    p99_9_reason: str | None = msgspec.field(name="p99.9_reason", default=None)
    min_reason: str | None = None
    max_reason: str | None = None
    p50_bounds: Interval | None = None
    p90_bounds: Interval | None = None
    p95_bounds: Interval | None = None
    p99_bounds: Interval | None = None
    p99_9_bounds: Interval | None = msgspec.field(name="p99.9_bounds", default=None)
    min_bounds: Interval | None = None
    max_bounds: Interval | None = None
    p99_ci_reason: str | None = None
    p99_9_ci_reason: str | None = msgspec.field(name="p99.9_ci_reason", default=None)
    mean_reason: str | None = None
    assumption: str | None = None
    reason: str | None = None


class Curve(Part, frozen=True, kw_only=True):
    q: list[float]
    value: list[float | None]


class Spread(Part, frozen=True, kw_only=True):
    """Plain figures of a sample, without intervals."""

    n: int
    mean: float | None
    p50: float | None
    p95: float | None
    p99: float | None
    max: float | None
