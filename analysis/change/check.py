"""One line of a gate's answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ampacity.analysis.change.regression import Estimate


@dataclass(frozen=True)
class Evidence:
    """What the decision on a change rests on.

    ``worse``: the change beyond 3 %; ``passing``: beyond the tolerance (one and the same where it is given).
    ``beyond``: the estimate itself is worse than the tolerance. ``watched``: no tolerance can be held,
    so nothing passes.
    """

    worse: Estimate
    passing: Estimate
    beyond: bool = True
    watched: bool = False


@dataclass
class Check:
    """One line of the verdict.

    ``change`` is relative (error_rate: in points), > 0 where the figure is higher.
    """

    name: str
    kind: str  # change | slo | sanity
    level: str | None
    verdict: str = "inconclusive"  # pass | regression | broken | inconclusive
    baseline: float | None = None
    candidate: float | None = None
    change: float | None = None
    change_ci: tuple[float | None, float | None] | None = None
    shift: float | None = None  # what the test says: by how much the quantile's neighbourhood moved
    tolerance: float | None = None
    p_regression: float | None = None
    p_equivalence: float | None = None
    more_requests: int | None = None
    reason: str | None = None
    test: Evidence | None = field(default=None, repr=False)

    def as_dict(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k != "test"}


def signed(share: float) -> str:
    return f"{round(share, 3) + 0.0:+.1%}"  # no -0.0
