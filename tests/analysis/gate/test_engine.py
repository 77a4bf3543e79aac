"""The tests that a gate rests on, by hand and by simulation."""

from dataclasses import replace

import numpy as np
import pytest
from hdrh.histogram import HdrHistogram

from ampacity.analysis.change import engine
from ampacity.analysis.change.samples import Blocks
from ampacity.analysis.metrics.hdr import encode_seconds


def test_holm_rejects_step_by_step() -> None:
    """Of four at 5 %: 0.01 ≤ 0.05/4, 0.016 ≤ 0.05/3, 0.03 > 0.05/2 stops, though 0.04 ≤ 0.05."""
    assert engine.holm([0.04, 0.01, 0.03, 0.016], 0.05) == [False, True, False, True]


def test_holm_holds_the_family_wise_error_of_correlated_tests() -> None:
    from scipy.special import ndtr

    rng = np.random.default_rng(7)
    z = 0.7 * rng.standard_normal((4000, 1)) + np.sqrt(1 - 0.49) * rng.standard_normal((4000, 14))
    false = np.mean([any(engine.holm(p.tolist(), 0.05)) for p in 1 - ndtr(z)])
    assert 0.005 < false < 0.06


def test_share_test_is_exact_under_no_change() -> None:
    """Independent samples, 10 % over in both: p-values are uniform; the 5 % test errs in about 5 %
    of cases."""
    rng = np.random.default_rng(3)
    size = np.full(20, 100.0)

    def draw() -> Blocks:
        return Blocks(rng.binomial(100, 0.1, 20).astype(float), size, 2000.0)

    p = []
    for _ in range(1500):
        base, candidate = draw(), draw()
        p.append(
            engine.compare_shares(
                [base], [candidate], base.share, paired=False, noise=0.0
            ).p_regression
        )
    assert 0.025 < np.mean(np.array(p) < 0.05) < 0.06
    assert 0.4 < np.mean(p) < 0.6


def test_pairing_takes_away_what_the_blocks_have_in_common() -> None:
    """Blocks differ by ±10 in both runs alike; only the shift of 1 in 100 is left, without
    variance."""
    over = np.array([10.0, 30.0] * 10)
    size = np.full(20, 100.0)
    e = engine.compare_shares(
        [Blocks(over, size, 2000)], [Blocks(over + 1, size, 2000)], 0.2, paired=True, noise=0.0
    )
    assert e.worse == pytest.approx(0.01)
    assert e.within == pytest.approx(0.0, abs=1e-18)
    apart = engine.compare_shares(
        [Blocks(over, size, 2000)], [Blocks(over + 1, size, 2000)], 0.2, paired=False, noise=0.0
    )
    # per side var((10, 30) x 10, ddof 1)/100²/20 = 2000/19/10⁴/20
    assert apart.within == pytest.approx(2 * 2000 / 19 / 1e4 / 20, rel=1e-6)


def test_noise_between_runs_is_moderated() -> None:
    """var(1, 2, 3) = 1, less 0.25 inside a run, with two degrees of freedom, beside 0.5² with four:
    (4 x 0.25 + 2 x 0.75)/6."""
    variance, df = engine.between_runs(np.array([1.0, 2.0, 3.0]), 0.25, 0.5)
    assert variance == pytest.approx(2.5 / 6)
    assert df == 6
    assert engine.between_runs(np.array([1.0]), 0.25, 0.5) == (0.25, float("inf"))


def test_further_requests_are_those_that_decide() -> None:
    """At t = 0.82 standard errors; z(0.95) = 1.645 needs (1.645/0.8225)² = 4 times the length."""
    e = engine.Estimate(-0.8224, 1.0, 0.0, float("inf"))
    assert engine.times_longer(e, 0.05, 0.01) == pytest.approx(4.0, rel=1e-3)
    # noise between runs: no length helps
    assert engine.times_longer(replace(e, between=1.0), 0.05, 0.01) is None


def test_histogram_equals_that_of_another_implementation_of_the_format() -> None:
    """Theirs has 1, 5 (301 times), 1000, 2047, 2048, 2049, 5·10⁶ and 4·10⁹ µs."""
    theirs = "HISTFAAAADJ4nJNpmSzMwMAgwgABzFCaEUT8BwL7D1ABJtZbLIf5mVYLMLG0bmZkuj2LkQkAHEgLuA=="
    values = np.array([1, 5, 1000, 2047, 2048, 2049, 5_000_000, 4_000_000_000]) * 1e-6
    ours = encode_seconds(values, np.array([1.0, 301, 1, 1, 1, 1, 1, 1]))
    assert ours.startswith("HISTF")
    ours_read, theirs_read = (HdrHistogram.decode(text) for text in (ours, theirs))
    assert ours_read.equals(theirs_read)
    assert ours_read.get_total_count() == 308
