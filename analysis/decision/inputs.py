"""The inputs of a decision: each with its value and where it comes from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from ampacity.analysis.contract.part import Part

Basis = Literal["measured", "predicted", "stated", "assumed"]
WIDE = 0.3  # of a figure: an interval wider than this leaves a fleet open


def is_wide(value: float, ends: Sequence[float | None] | None) -> bool:
    """Return whether an interval is too wide to size by; one without an end is."""
    low, high = ends or (None, None)
    return low is None or high is None or high - low > WIDE * value


class Input(Part, frozen=True, kw_only=True):
    """A number that an answer rests on; ``value`` None: not known."""

    name: str
    value: float | None
    unit: str = ""
    basis: Basis
    source: str


class Range(msgspec.Struct, frozen=True):
    """A figure with the ends of its 95 % interval; an end that is None is not known."""

    value: float
    low: float | None = None
    high: float | None = None

    def through(self, rising: Callable[[float], float]) -> Range:
        """Return what a rising function makes of the figure and of its ends."""
        low, high = (None if end is None else rising(end) for end in (self.low, self.high))
        return Range(rising(self.value), low, high)

    def times(self, factor: float) -> Range:
        """Return the figure and its ends, each times a positive factor."""
        return self.through(lambda value: value * factor)
