"""The soak of summary.json: the verdict over all windows, and what changed over the hours."""

from __future__ import annotations

from typing import Literal

from ampacity.analysis.contract.part import Part
from ampacity.analysis.contract.stage import SloVerdict, Verdict


class SoakChange(Part, frozen=True, kw_only=True):
    """One figure over the windows: ``before`` and ``after`` the change, or both ends of a drift.

    Without a change ``before`` is the median over all windows.
    """

    name: str
    unit: Literal["s", "share", "req/s", "tokens/s", "bytes", "requests"]
    verdict: Literal["no change", "step", "drift", "inconclusive"]
    before: float | None
    after: float | None = None
    since_s: float | None = None
    window: int | None = None
    p: float | None = None
    reason: str | None = None


class Soak(Part, frozen=True, kw_only=True):
    """``duration_s`` is what was played of ``planned_s``; ``series`` has a value for each window."""

    rate_rps: float
    window_s: float
    planned_s: float
    duration_s: float
    windows: int
    verdict: Verdict
    reason: str | None = None
    slo_verdicts: list[SloVerdict]
    client_limited_windows: list[int]
    changes: list[SoakChange]
    begin_s: list[float]
    series: dict[str, list[float | None]]
