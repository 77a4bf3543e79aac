"""Quantiles of a reference, and the test of other runs against them.

``Reference`` is what gate and compare share. ``Tracked`` is one of a baseline file: runs are tested
against a tolerance that the baseline alone determines, the least step of a ladder that a run like
its own passes with probability ``SURE``, separately for candidates that send the same requests and
others. docs/methods/comparison.md.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from ampacity.analysis.change import engine, samples
from ampacity.analysis.metrics.observations import Observations
from ampacity.analysis.metrics.requests import Floats, Ints
from ampacity.analysis.stats.intervals import smallest_n

MOST_TOLERANCE = 0.15
LADDER = (0.03, 0.04, 0.05, 0.06, 0.075, 0.09, 0.1, 0.12, 0.15)
RESOLUTION_S = 1e-4  # what a time of the client is exact to: less is no change of the server
SURE = 0.999  # chance that an equal run passes one metric; the estimated noise is itself uncertain
FOUND = 0.95  # chance that the smallest change is found
SAME, OTHER = "same_schedule", "other_schedule"
Explained = Sequence[Floats | None]


@dataclass(frozen=True)
class Reference:
    """Hold the ``marks`` around quantile ``q`` of the reference and its ``runs`` over them."""

    q: float
    marks: samples.Marks
    runs: list[samples.Blocks]

    def test(
        self, ours: Sequence[samples.Blocks], *, paired: bool, noise: float, slope: float = 1.0
    ) -> engine.Estimate:
        """Test whether more than 1 - q of these samples, counted over moved marks, are above."""
        share = 1 - self.q
        return engine.compare_shares(
            self.runs, ours, share, paired=paired, noise=noise, slope=slope
        )

    def factors(
        self, found: Sequence[Observations], e: engine.Estimate, drawn: float = 0.0
    ) -> list[float | None]:
        """Return by which factor the quantile moved: lower end, best estimate, upper end at 95 %.

        ``drawn``: the share of the samples above the marks that the requests alone explain.
        """
        share = 1 - self.q + drawn
        return [samples.moved_by(found, self.marks, share + x) for x in (e.reach, 0.0, -e.reach)]


@dataclass(frozen=True)
class Tracked(Reference):
    """A quantile that a baseline file holds.

    ``noise``: s.d. from run to run of the share over the marks where a run's speed varies by
    ASSUMED_NOISE at the same queue; queueing multiplies it by ``amplified``. ``tables``: the
    control variate (samples.py). ``tolerance`` for SAME and OTHER; None where an equal run may
    differ by more than MOST_TOLERANCE: then nothing passes, and the metric is only watched.
    """

    noise: float
    amplified: float
    tables: Floats | None
    tolerance: dict[str, float | None]

    @property
    def resolved(self) -> float:
        """Return the least relative change that the client can tell from its own error."""
        return min(RESOLUTION_S / max(self.marks.middle_s, 1e-9), 10.0)

    def expect(self, cells: Sequence[Sequence[Ints]]) -> Explained:
        """Return what the ``cells`` of each run's requests explain; None without a table."""
        return [None if self.tables is None else samples.expected_of(self.tables, c) for c in cells]

    def compare(
        self, found: Sequence[Observations], explained: Explained, tolerance: float, *, paired: bool
    ) -> engine.Estimate:
        """Test whether these runs are worse than the baseline's by more than the tolerance."""
        marks = self.marks.times(1 + tolerance)
        ours = []
        for o, x in zip(found, explained, strict=True):
            if x is None:
                ours.append(samples.blocks_over(o, marks, paired=paired))
            else:
                over = samples.over_each(o, marks)
                ours.append(samples.blocks_beside(o, over, _fitted(o, over, x)))
        slope = engine.speed_noise(found, marks.limits_s) / self.noise if self.noise else 1.0
        noise = self.noise * self.amplified
        return self.test(ours, paired=paired, noise=noise, slope=min(1.0, slope))

    def moved(
        self, found: Sequence[Observations], explained: Explained, e: engine.Estimate
    ) -> list[float | None]:
        """Return the relative change: lower end, best estimate, upper end; None where unknown."""
        pairs = zip(found, explained, strict=True)
        drawn = [0.0 if x is None else float((x * o.sizes).sum() / o.n) for o, x in pairs]
        factors = self.factors(found, e, float(np.mean(drawn)))
        return [None if x is None else x - 1 for x in factors]

    def as_dict(self) -> dict[str, Any]:
        return {
            "value_s": self.marks.middle_s,
            "marks_s": [rounded(x) for x in self.marks.limits_s.tolist()],
            "noise": float(f"{self.noise:.4g}"),
            "amplified": float(f"{self.amplified:.4g}"),
            "tolerance": self.tolerance,
            "runs": [b.as_dict() for b in self.runs],
            "expected": None if self.tables is None else np.round(self.tables, 4).tolist(),
        }

    @classmethod
    def from_dict(cls, q: float, value: Mapping[str, Any]) -> Tracked:
        marks = samples.Marks(np.array(value["marks_s"]), np.zeros(len(value["marks_s"])))
        tables = None if value["expected"] is None else np.array(value["expected"])
        runs = [samples.Blocks.from_dict(b) for b in value["runs"]]
        return cls(q, marks, runs, value["noise"], value["amplified"], tables, value["tolerance"])


def track(
    found: Sequence[Observations],
    q: float,
    cells: Sequence[Sequence[Ints]],
    measured: Sequence[bool] | None,
    tests: int,
) -> dict[str, Any] | str:
    """Return the entry of one quantile for a baseline file, or why it is not tracked.

    ``cells``: of each run's requests. ``measured``: which of them depend on the run and not on its
    plan; None in a closed loop.
    """
    few, needed = min(o.n_owners for o in found), max(smallest_n(q), smallest_n(1 - q))
    if few < needed:
        return f"needs {needed} requests, has {few}"
    marks = samples.pooled_marks(found, q)
    if isinstance(marks, str):
        return marks
    tables, explained, runs = _control(found, q, marks, cells)
    noise = engine.speed_noise(found, marks.limits_s, 1 - q)
    amplified = 1.0
    if measured is not None:  # what the plan alone explains is amplified by a slower run as well
        kept = None if tables is None else tables * np.array(measured)[:, None]
        alone = explained if kept is None else [samples.expected_of(kept, c) for c in cells]
        amplified = amplified_by_load(found, marks, alone, noise)
    known = Tracked(q, marks, runs, noise, amplified, tables, {})
    own = OwnRuns(known, found, explained)
    tolerances = own.tolerances()
    return replace(known, tolerance=tolerances).as_dict() | {"finds": own.finds(tolerances, tests)}


def _control(
    found: Sequence[Observations], q: float, marks: samples.Marks, cells: Sequence[Sequence[Ints]]
) -> tuple[Floats | None, Explained, list[samples.Blocks]]:
    """Fit the control variate: its tables, what they explain, and the blocks without that."""
    if not cells[0]:
        return None, [None] * len(found), [samples.blocks_over(o, marks) for o in found]
    over = [samples.over_each(o, marks) for o in found]
    of_all = [np.concatenate(c) for c in zip(*cells, strict=True)]
    sizes = np.concatenate([o.sizes for o in found])
    tables = samples.tables_of(of_all, np.concatenate(over), sizes, 1 - q)
    explained = [samples.expected_of(tables, c) for c in cells]
    runs = [samples.blocks_beside(o, x, e) for o, x, e in zip(found, over, explained, strict=True)]
    return tables, explained, runs


class OwnRuns:
    """Predict from the baseline's own runs how further equal runs would be judged."""

    def __init__(self, known: Tracked, found: Sequence[Observations], explained: Explained) -> None:
        self._known, self._found, self._explained = known, found, explained
        self._at = cache(self._like_own)

    def _like_own(self, tolerance: float) -> dict[str, engine.Estimate]:
        """Return ``Tracked.compare`` for new runs like the baseline's own."""
        other, same = (
            self._known.compare(self._found, self._explained, tolerance, paired=paired)
            for paired in (False, True)
        )
        within = min(other.within, 2 * same.within)  # a candidate is not the same run again
        if self._known.q < 0.5:  # without a queue the schedule does not determine the slow requests
            within = other.within
        return {OTHER: other, SAME: replace(same, worse=other.worse, within=within)}

    def _se(self, kind: str, tolerance: float) -> float:
        """Standard error beyond the tolerance; few samples there underestimate their scatter."""
        return max(self._at(tolerance)[kind].se, self._at(0.0)[kind].se)

    def _passes(self, kind: str, tolerance: float) -> bool:
        e = self._at(tolerance)[kind]
        sure = sum(engine.student_quantile(p, e.df) for p in (1 - engine.ALPHA, SURE))
        return e.worse + sure * self._se(kind, tolerance) <= 0

    def tolerances(self) -> dict[str, float | None]:
        """Return the least tolerance of each kind at which a run like these passes with SURE.

        It is RESOLUTION_S at least, and beyond MOST_TOLERANCE only for that reason.
        """
        found: dict[str, float | None] = {}
        resolved = self._known.resolved
        for kind in (SAME, OTHER):
            step = bisect_left(LADDER, True, key=partial(self._passes, kind))
            noise = LADDER[step] if step < len(LADDER) else None
            found[kind] = resolved if resolved > MOST_TOLERANCE else noise and max(noise, resolved)
        return found

    def finds(
        self, tolerances: Mapping[str, float | None], tests: int
    ) -> dict[str, dict[str, float | None]]:
        """Return the least change of each kind called a regression with FOUND, by Holm at worst.

        ``tests``: the number of tests together. It is found beyond the tolerance, and significant
        beyond the least one. ``now``, and approximately with four times the length (``longer``) and
        three times the baseline runs (``more_runs``).
        """
        result = {}
        n, power = len(self._known.runs), engine.student_quantile(FOUND, math.inf)
        for kind, allowed in tolerances.items():
            tolerance = allowed or MOST_TOLERANCE
            e, se = self._at(tolerance)[kind], self._se(kind, tolerance)
            sure = engine.student_quantile(1 - engine.ALPHA / tests, e.df) + power
            significant = self._moved(engine.DEFAULT_TOLERANCE, sure * se)
            beyond = self._moved(tolerance, power * se)
            now = None if significant is None or beyond is None else max(significant, beyond)
            longer = more = now
            if now is not None and e.se:
                longer = now * math.sqrt((e.within / 4 + e.between) / (e.within + e.between))
                more = now * math.sqrt((1 / (3 * n) + 1) / (1 / n + 1))
            result[kind] = {"now": now, "longer": longer, "more_runs": more}
        return result

    def _moved(self, limit: float, reach: float) -> float | None:
        """Return the change that leaves ``reach`` more than allowed beyond ``limit``."""
        q = self._known.q
        if reach >= q:
            return None
        factor = samples.moved_by(self._found, self._known.marks, 1 - q + reach)
        return (1 + limit) / factor - 1 if factor else None


def amplified_by_load(
    found: Sequence[Observations], marks: samples.Marks, explained: Explained, noise: float
) -> float:
    """Return the factor by which the load of an open loop multiplies ``noise``.

    A run that is slower by a share has that much more load on a slower clock. The load of blocks of
    n Poisson requests varies by 1/sqrt(n); the variation of their shares over the marks beyond
    chance results from it.
    """
    beyond = []
    for o, x in zip(found, explained, strict=True):
        rest = samples.over_each(o, marks) - (0.0 if x is None else x * o.sizes)
        rest = (rest - rest.sum() / o.n * o.sizes) / o.sizes.mean()
        beyond.append(
            float(samples.in_blocks(rest).var(ddof=1)) * samples.BLOCKS / o.n_owners
            - float(rest.var())
        )
    by_load = math.sqrt(max(0.0, float(np.mean(beyond))))
    return 1.0 + engine.ASSUMED_NOISE * by_load / noise if noise else 1.0


def _fitted(o: Observations, over: Floats, explained: Floats) -> Floats:
    """Return ``explained`` times the coefficient, 0 to 1, that best fits ``over``.

    For a run that is worse by exactly the tolerance the baseline's table holds as it is (1). Of an
    equal run fewer samples are above the marks, and the table explains less of them.
    """
    over, expected = (x - x.sum() / o.n * o.sizes for x in (over, explained * o.sizes))
    most = float(expected @ expected)
    return explained * (min(max(float(over @ expected) / most, 0.0), 1.0) if most else 0.0)


def rounded(value: float) -> float:
    return float(f"{value:.6g}")
