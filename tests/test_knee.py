"""Knees with a known place: laws of throughput, the asymptotic bounds, and the region that the methods agree on."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from analysis.knee import _region, find_knee, kneedle
from analysis.scalability import Usl, corner_of_bounds, fit_usl

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.knee_hits import LEVELS, closed_network, hits, stages_of


def test_usl_of_the_published_example() -> None:
    law = Usl(1.0, 0.03, 0.0005)
    assert law.peak == pytest.approx(44.05, abs=0.01)
    assert float(law.at(np.array(law.peak))) == pytest.approx(13.60, abs=0.01)


def test_usl_is_found_again_without_and_with_noise() -> None:
    law = Usl(2.0, 0.03, 0.0005)
    again = fit_usl(LEVELS, law.at(LEVELS))
    assert again is not None
    assert (again.gamma, again.alpha, again.beta) == pytest.approx((2.0, 0.03, 0.0005), rel=1e-6)
    rng = np.random.default_rng(4)
    fits = [fit_usl(LEVELS, law.at(LEVELS) * np.exp(0.01 * rng.standard_normal(10))) for _ in range(200)]
    peaks = [fit.peak for fit in fits if fit]
    assert len(peaks) == 200
    assert np.median(peaks) == pytest.approx(44.05, rel=0.03)


def test_usl_without_coherency_is_amdahl_and_a_line_has_no_corner() -> None:
    amdahl = fit_usl(LEVELS, Usl(2.0, 0.1, 0.0).at(LEVELS))
    assert amdahl is not None
    assert amdahl.corner(48.0) == pytest.approx(48 / 5.7, rel=1e-3)  # 48 / (1 + 0.1 x 47)
    line = fit_usl(LEVELS, 3 * LEVELS)
    assert line is not None
    assert line.corner(48.0) == pytest.approx(48.0, rel=1e-3)


def test_bounds_meet_at_demand_over_the_bottleneck() -> None:
    # bottleneck 0.1 s, 0.9 s elsewhere without queueing: N* = 1.0 / 0.1 = 10
    x = np.array([1, 2, 3, 5, 10, 20, 40, 80.0])
    y = np.minimum(10.0, x / 1.0)
    assert corner_of_bounds(x, y, saturated=False) == pytest.approx(10.0)
    assert corner_of_bounds(x[:4], y[:4], saturated=False) is None  # still growing


def test_kneedle_depends_on_the_range_and_says_so() -> None:
    # M/M/1 response time against load: the knee is where the curve was cut off
    for top, knee_at in ((0.95, 0.80), (0.99, 0.90)):
        rho = np.linspace(0, top, 400)
        response = 1 / (1 - rho)
        flipped = kneedle(
            1 - rho[::-1] / top, response.max() - response[::-1]
        )  # convex increasing, turned round
        assert flipped is not None
        assert float(rho[::-1][flipped.index]) == pytest.approx(knee_at, abs=0.05)
    stages = stages_of(LEVELS, np.array([closed_network(int(n), (0.1,), 0.9) for n in LEVELS]), 10**6)
    assert "swept from concurrency 1 to 48" in find_knee(stages)["methods"]["kneedle"]["definition"]


def test_the_knee_of_noisy_curves_is_in_its_region() -> None:
    """Closed networks with one bottleneck: the corner is N* = (D + Z) / D_max (100 curves: benchmarks/README.md)."""
    named, inside, width = hits(24, requests=1000, stations=1, seed=7)
    assert named >= 22
    assert inside >= 0.9 * named
    assert width < 4


def test_methods_that_disagree_are_named() -> None:
    y = np.array([closed_network(int(n), (0.1,), 0.9) for n in LEVELS])
    stages = stages_of(LEVELS, y, 10**6)
    for stage in stages:  # the tail runs away far earlier than throughput bends
        late = {"p50": 0.1, "p95": 0.2, "p99": 0.2 if stage["concurrency"] < 2.5 else 9.0}
        stage |= {"ttft_from_schedule_s": late, "e2e_from_schedule_s": late}
    knee = find_knee(stages)
    assert "p99_p50_divergence" in knee["disagreement"]
    assert knee["region"][0] > 4  # three of four agree: the region is theirs


def test_the_figure_lies_in_its_region_whatever_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweeps that are coarse, fall past their peak, or end without a steady state: both axes, of the whole and of each method."""
    monkeypatch.setattr("analysis.knee.RESAMPLES", 4)
    rng = np.random.default_rng(3)
    seen = 0
    for k in range(60):
        levels = LEVELS if k % 2 else np.array([1, 3, 6, 10, 20, 60, 200, 600.0])
        demand_s = 1 / rng.uniform(2, 20)
        y = np.array([closed_network(int(n), (demand_s,), 1 - demand_s) for n in levels])
        y *= np.where(levels > 15, rng.uniform(0.6, 1.0), 1.0)
        stages = stages_of(levels, y, 300, rng)
        for stage in stages[len(stages) - k % 3 :]:
            stage["stable"] = False
        knee = find_knee(stages)
        found = [(knee, "region"), *((method, "range") for method in knee["methods"].values())]
        for figures, ends in found:
            for name, (low, high) in (("concurrency", figures[ends] or (0, 0)), ("rps", figures[f"{ends}_rps"] or (0, 0))):  # fmt: skip
                assert figures[name] is None or low <= figures[name] <= high
                seen += figures[name] is not None
    assert seen > 300


def test_the_figure_and_a_region_by_hand() -> None:
    """Four methods, one of whose ranges ends where nothing has a level: medians of figures and of ends (on a log scale)."""
    x, y = np.array([1, 10, 30, 60, 1000.0]), np.array([1, 8, 12, 9, 7.0])
    methods = [{"concurrency": at, "range": [low, high]} for at, low, high in ((20, 16, 32), (25, 20, 40), (500, 50, 1000), (400, 40, 800))]  # fmt: skip
    found = _region(methods, x, y)
    assert found["concurrency"] == pytest.approx(
        100
    )  # sqrt(25 x 400); the geometric mean of all four is as well
    assert found["region"] == pytest.approx([28.28, 178.9], abs=0.05)  # sqrt(20 x 40), sqrt(40 x 800)
    assert found["rps"] == pytest.approx(9 - 2 * 40 / 940)
    assert found["region_rps"] == pytest.approx(
        [9 - 2 * 118.885 / 940, 12.0], abs=1e-3
    )  # the peak at 30 lies between
    methods[2:] = [{"concurrency": 5000, "range": [15, 9000]}]
    found = _region(methods, x, y)  # the mean of the figures, 136, lies outside
    assert found["concurrency"] == pytest.approx(25)
    assert found["region"] == pytest.approx([16, 40])
