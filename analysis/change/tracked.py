"""A quantile of a latency that a gate tracks: what the baseline knows of it, and the test of a candidate against it.

The tolerance is fixed by the baseline alone: the least step of a ladder that a run like the baseline's passes with
``SURE``, in a sequence of its own for candidates that send the same requests and for others. docs/methods.md,
"Comparing two runs".
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import numpy as np

from ampacity.analysis.change.blocks import (
    BLOCKS,
    Blocks,
    Marks,
    as_dict,
    blocks_beside,
    blocks_over,
    from_dict,
    in_blocks,
    moved_by,
    over_each,
)
from ampacity.analysis.change.regression import (
    ALPHA,
    ASSUMED_NOISE,
    Estimate,
    compare_shares,
    student_quantile,
)
from ampacity.analysis.metrics.observations import Observations
from ampacity.analysis.metrics.requests import Floats

DEFAULT_TOLERANCE = 0.03
MOST_TOLERANCE = 0.15
LADDER = (0.03, 0.04, 0.05, 0.06, 0.075, 0.09, 0.1, 0.12, 0.15)
SURE = 0.999  # chance that an equal run passes one metric; what one run tells of its noise is itself uncertain
FOUND = 0.95  # chance that the smallest change is found
SAME, OTHER = "same_schedule", "other_schedule"
Explained = Sequence[Floats | None]


@dataclass(frozen=True)
class Tracked:
    """``marks`` around the baseline's quantile ``q``; the blocks of its ``runs`` over them.

    ``noise``: s.d. from run to run of the share over the marks, if a run's speed varies by ASSUMED_NOISE with the same
    queue; the queue makes it ``amplified`` times as much. ``tables``: see analysis/change/expected.py.
    ``tolerance`` for each of SAME and OTHER; None: an equal run may differ by more than MOST_TOLERANCE. Nothing passes
    then, and the metric is only watched for changes beyond that.
    """

    q: float
    marks: Marks
    noise: float
    amplified: float
    runs: list[Blocks]
    tables: Floats | None
    tolerance: dict[str, float | None]

    @cached_property
    def value_s(self) -> float:
        return float(np.median(self.marks.limits_s))

    def compare(
        self, found: Sequence[Observations], explained: Explained, tolerance: float, *, paired: bool
    ) -> Estimate:
        """Are the candidate's runs worse than the baseline's by more than the tolerance?"""
        ours, slope = self._beyond(found, explained, tolerance, paired=paired)
        return self._estimate(ours, slope, paired=paired)

    def _beyond(
        self, found: Sequence[Observations], explained: Explained, tolerance: float, *, paired: bool
    ) -> tuple[list[Blocks], float]:
        """(blocks over the marks moved by the tolerance, how much noise moves them, as ``noise_slope``)."""
        marks = self.marks.times(1 + tolerance)
        ours = []
        for o, x in zip(found, explained, strict=True):
            if x is None:
                ours.append(blocks_over(o, marks, paired=paired))
            else:
                over = over_each(o, marks)
                ours.append(blocks_beside(o, over, _fitted(o, over, x)))
        return ours, noise_slope(found, marks.limits_s, self.noise)

    def _estimate(self, ours: Sequence[Blocks], slope: float, *, paired: bool) -> Estimate:
        noise = self.noise * self.amplified
        return compare_shares(self.runs, ours, 1 - self.q, paired=paired, noise=noise, slope=slope)

    def moved(
        self, found: Sequence[Observations], explained: Explained, e: Estimate
    ) -> tuple[float | None, float | None, float | None]:
        """Relative change of the candidate's runs: (best figure, lower, upper end at 95 %); None where unknown."""
        reach = student_quantile(0.975, e.df) * e.se
        drawn = float(np.mean([_drawn(o, x) for o, x in zip(found, explained, strict=True)]))
        factors = [
            moved_by(found, self.marks, 1 - self.q + drawn - x) for x in (0.0, -reach, reach)
        ]
        middle, low, high = (None if x is None else x - 1 for x in factors)
        return middle, low, high

    def like_own(
        self, found: Sequence[Observations], explained: Explained, tolerance: float
    ) -> dict[str, Estimate]:
        """What ``compare`` would give for runs like the baseline's own, which these are, with noise of their own."""
        ours, slope = self._beyond(found, explained, tolerance, paired=False)
        other, same = (self._estimate(ours, slope, paired=paired) for paired in (False, True))
        within = min(other.within, 2 * same.within)  # a candidate is not the same run again
        if self.q < 0.5:  # without a queue it is not the schedule that says which requests are slow
            within = other.within
        return {OTHER: other, SAME: Estimate(other.worse, within, same.between, same.df)}

    def as_dict(self) -> dict[str, Any]:
        return {
            "value_s": self.value_s,
            "marks_s": [rounded(x) for x in self.marks.limits_s.tolist()],
            "noise": float(f"{self.noise:.4g}"),
            "amplified": float(f"{self.amplified:.4g}"),
            "tolerance": self.tolerance,
            "runs": [as_dict(b) for b in self.runs],
            "expected": None if self.tables is None else np.round(self.tables, 4).tolist(),
        }


def tracked_from_dict(q: float, value: Mapping[str, Any]) -> Tracked:
    marks = Marks(np.array(value["marks_s"]), np.zeros(len(value["marks_s"])))
    tables = None if value["expected"] is None else np.array(value["expected"])
    runs = [from_dict(b) for b in value["runs"]]
    return Tracked(q, marks, value["noise"], value["amplified"], runs, tables, value["tolerance"])


class Own:
    """What the baseline's own runs say of runs like them, before any candidate is seen."""

    def __init__(self, known: Tracked, found: Sequence[Observations], explained: Explained) -> None:
        self._known, self._found = known, found
        self._at = cache(lambda tolerance: known.like_own(found, explained, tolerance))

    def _se(self, kind: str, tolerance: float) -> float:
        """Of a share beyond the tolerance; few samples there feign that they scatter little."""
        return max(self._at(tolerance)[kind].se, self._at(0.0)[kind].se)

    def _passes(self, kind: str, tolerance: float) -> bool:
        e = self._at(tolerance)[kind]
        sure = student_quantile(1 - ALPHA, e.df) + student_quantile(SURE, e.df)
        return e.worse + sure * self._se(kind, tolerance) <= 0

    def tolerances(self) -> dict[str, float | None]:
        """The least tolerance of each kind at which a run like these passes with SURE."""
        steps = {
            kind: bisect_left(LADDER, True, key=partial(self._passes, kind))
            for kind in (SAME, OTHER)
        }
        return {kind: LADDER[step] if step < len(LADDER) else None for kind, step in steps.items()}

    def finds(
        self, tolerances: Mapping[str, float | None], tests: int
    ) -> dict[str, dict[str, float | None]]:
        """For each kind the least change that is called a regression with FOUND, by Holm among ``tests`` at worst.

        It is found beyond the tolerance, and surely beyond the least one. ``now``, and about what it would be with four
        times the length (``longer``) and with three times the baseline runs (``more_runs``).
        """
        result = {}
        n, power = len(self._known.runs), student_quantile(FOUND, math.inf)
        for kind, allowed in tolerances.items():
            tolerance = allowed or MOST_TOLERANCE
            e, se = self._at(tolerance)[kind], self._se(kind, tolerance)
            sure = student_quantile(1 - ALPHA / tests, e.df) + power
            surely = self._moved(DEFAULT_TOLERANCE, sure * se)
            beyond = self._moved(tolerance, power * se)
            now = None if surely is None or beyond is None else max(surely, beyond)
            longer = more = now
            if now is not None and e.se:
                longer = now * math.sqrt((e.within / 4 + e.between) / (e.within + e.between))
                more = now * math.sqrt((1 / (3 * n) + 1) / (1 / n + 1))
            result[kind] = {"now": now, "longer": longer, "more_runs": more}
        return result

    def _moved(self, limit: float, reach: float) -> float | None:
        """The change at which the share beyond ``limit`` is ``reach`` more than allowed; a change makes it as large as at 0."""
        q = self._known.q
        factor = moved_by(self._found, self._known.marks, 1 - q + reach) if reach < q else None
        return (1 + limit) / factor - 1 if factor else None


def assumed_noise(
    found: Sequence[Observations], limits_s: Any, share: float | None = None
) -> float:
    """How far the share over these limits (``share``, where it is known better) moves when a run is slower by ASSUMED_NOISE.

    By the secant over the default tolerance: a plateau has no other slope.
    """

    def above(limits: Any) -> float:
        return sum(float(o.shares_over(limits).mean()) * o.n for o in found) / sum(
            o.n for o in found
        )

    here = above(limits_s) if share is None else share
    return (
        max(0.0, here - above(limits_s * (1 + DEFAULT_TOLERANCE)))
        * ASSUMED_NOISE
        / DEFAULT_TOLERANCE
    )


def noise_slope(found: Sequence[Observations], limits_s: Any, noise: float) -> float:
    """How much less the share over ``limits_s`` moves by the noise of a run's speed than the baseline's over its quantile."""
    return min(1.0, assumed_noise(found, limits_s) / noise) if noise else 1.0


def amplified_by_load(
    found: Sequence[Observations], marks: Marks, explained: Explained, noise: float
) -> float:
    """By which factor the load of an open loop makes more of ``noise``.

    A run that is slower by a share is one with as much more load on a slower clock. Blocks of n Poisson requests
    differ in load by 1/sqrt(n), relatively; what their shares over the marks differ by beyond chance comes from it.
    """
    beyond = []
    for o, x in zip(found, explained, strict=True):
        rest = over_each(o, marks) - (0.0 if x is None else x * o.sizes)
        rest = (rest - rest.sum() / o.n * o.sizes) / o.sizes.mean()
        beyond.append(float(in_blocks(rest).var(ddof=1)) * BLOCKS / o.n_owners - float(rest.var()))
    by_load = math.sqrt(max(0.0, float(np.mean(beyond))))
    return 1.0 + ASSUMED_NOISE * by_load / noise if noise else 1.0


def _fitted(o: Observations, over: Floats, explained: Floats) -> Floats:
    """``explained`` by the coefficient, 0 to 1, that fits these samples, ``over`` of each request, best.

    Where a run is worse by just the tolerance the baseline's table holds as it is, and the coefficient is 1; of an equal run
    fewer samples are over, and the table explains less of them.
    """
    over, expected = (x - x.sum() / o.n * o.sizes for x in (over, explained * o.sizes))
    most = float(expected @ expected)
    return explained * (min(max(float(over @ expected) / most, 0.0), 1.0) if most else 0.0)


def _drawn(o: Observations, explained: Floats | None) -> float:
    """What is known of the requests lets expect in all, as a share of the samples."""
    return 0.0 if explained is None else float((explained * o.sizes).sum() / o.n)


def rounded(value: float) -> float:
    return float(f"{value:.6g}")
