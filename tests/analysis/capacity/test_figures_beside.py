"""Figures beside a capacity: money, numbers in words, the best goodput, the good share."""

from typing import Any

import numpy as np
import pytest

from ampacity.analysis.capacity.fleet import (
    Carried,
    Traffic,
    cost_per_million_output_tokens,
    fleet_of,
)
from ampacity.analysis.capacity.goodput_peak import peak_goodput
from ampacity.analysis.capacity.levels import (
    good_share_at,
    number_text,
    rounded_down,
    usd,
)
from ampacity.analysis.capacity.pooled import _two_parts
from ampacity.analysis.stage.goodput import goodput_rps
from tests.analysis.capacity.hand_made import LIMITED, SLOS, stage
from tests.support.contract import on_stages

peak_goodput, good_share_at = on_stages(peak_goodput), on_stages(good_share_at)


@pytest.mark.parametrize(
    ("low", "printed"),
    [(124.715, 124), (6, 6), (0.8189, 0.818), (1239, 1230), (99.99, 99.9), (100, 100), (0, 0)],
)
def test_the_low_end_of_an_interval_is_not_printed_above_itself(low: float, printed: float) -> None:
    """1,000 requests/s need 9 instances of 124.7, not the 8 of a printed 125."""
    assert rounded_down(low) == printed


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0.0412, 2, "0.041"),
        (14.2, 2, "14"),
        (9.97, 2, "10"),
        (129.6, 3, "130"),
        (6.0, 3, "6"),
        (0.00001, 3, "0.00001"),
        (43210, 3, "43200"),
        (0, 3, "0"),
    ],
)
def test_numbers_in_words(value: float, digits: int, text: str) -> None:
    assert number_text(value, digits) == text


def test_cost_of_tokens() -> None:
    # 4 GPUs at $2.50 an hour give 10,000 tokens/s: 36 M tokens for $10
    assert cost_per_million_output_tokens(2.5, 4, 10_000) == pytest.approx(10 / 36)
    carried = Carried(12.0, (11.0, 13.0), None, 10_000 / 12, None)
    fleet = fleet_of(None, carried, 4, gpu_hour_usd=2.5)
    assert fleet.cost_per_million_output_tokens == pytest.approx(10 / 36)
    assert "no peak rate" in str(fleet.reason)
    assert fleet_of(Traffic(120.0), carried, safety=0.5).instances is None


def test_goodput_of_thirty_good_requests_a_minute() -> None:
    assert goodput_rps(30, 60.0) == 0.5


SHORT = stage(1, 9, 0.2, True, requests=99)
UNSTABLE = stage(2, 10, 0.2, True, stable=False)


@pytest.mark.parametrize(
    ("stages", "peak_rps"),
    [
        ([stage(0, 4, 0.2, True), stage(1, 8, 0.5, True), LIMITED | {"goodput_rps": 50}], 8),
        ([stage(0, 8, 0.2, True), SHORT, UNSTABLE], 8),
        ([stage(0, 8, 0.2, True), SHORT | {"requests": 100}], 9),
        ([SHORT, UNSTABLE], None),
    ],
)
def test_the_best_goodput_is_that_of_a_stage_whose_rates_are_figures(
    stages: list[dict[str, Any]], peak_rps: float | None
) -> None:
    peak = peak_goodput(stages, SLOS)
    assert (peak.peak_rps, peak.at_offered_rps) == (peak_rps, peak_rps)
    assert (peak.reason is None) or "100 requests" in peak.reason


def test_the_good_share_is_that_at_the_capacity() -> None:
    """0.871 at 0.433/s, 0.658 at 0.864/s, 0.5 at 1.22/s; a stage of 30 requests says nothing."""
    rows = [(0.433, 400, 0.871), (0.864, 400, 0.658), (1.22, 400, 0.5), (0.93, 30, 0.1)]
    stages = [
        stage(i, rate, 0.1, True, requests=n, slo_attainment=share)
        for i, (rate, n, share) in enumerate(rows)
    ]
    between = 0.658 - 0.158 * (0.931 - 0.864) / (1.22 - 0.864)
    assert good_share_at(stages, "open", 0.931) == pytest.approx(between)
    assert good_share_at(stages, "open", 0.2) == 0.871
    assert good_share_at(stages, "closed", 0.931) is None


def test_two_parts_are_those_of_nnls() -> None:
    from scipy.optimize import nnls

    rng = np.random.default_rng(1)
    for n in rng.integers(2, 9, 50):
        of = np.abs(rng.normal(size=(n, 2)))
        seen = of @ rng.normal(size=2) + 0.1 * rng.normal(size=n)
        np.testing.assert_allclose(_two_parts(of, seen), nnls(of, seen)[0], atol=1e-9)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (262_800.4, "$262,800"),
        (99.999, "$100"),
        (12.0126, "$12.01"),
        (2.5, "$2.50"),
        (0.3314, "$0.331"),
        (0.00044, "$0.00044"),
        (0, "$0"),
    ],
)
def test_dollars_read_the_same_in_plan_report_and_size(value: float, text: str) -> None:
    assert usd(value) == text
