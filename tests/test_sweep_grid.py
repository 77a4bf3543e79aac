"""The grid that finds itself: rates are chosen from the judgements of the stages before."""

from typing import Any

import pytest

from ampacity.experiments.sweep import STAGES_MAX, first_rate, next_rate


def stage(
    rps: float, slo_met: bool | None = True, stable: bool = True, limited: bool = False, slo: bool = True
) -> dict[str, Any]:
    return {
        "offered_rps": rps, "slo_met": slo_met if slo else None, "stable": stable, "client_limited": limited,
        "slo_verdicts": [{"slo": "ttft_p99=1s"}] if slo else [],
    }  # fmt: skip


def run_grid(
    capacity_rps: float,
    saturation_rps: float,
    start_rps: float,
    *,
    slo: bool = True,
    undecided_below: float = 0.0,
) -> list[dict[str, Any]]:
    """The whole grid against an ideal endpoint: SLO met below capacity, unstable from saturation on."""
    stages: list[dict[str, Any]] = []
    rate: float | None = start_rps
    while rate is not None:
        met: bool | None = rate <= capacity_rps
        if rate < undecided_below:
            met = None
        stages.append(stage(rate, met, rate < saturation_rps, slo=slo))
        rate = next_rate(stages)
        assert len(stages) <= STAGES_MAX
    return stages


def test_first_rate_is_low_but_not_empty() -> None:
    assert first_rate(typical_e2e_s=0.1, duration_s=30.0) == 2.5  # busy a quarter of the time
    assert first_rate(typical_e2e_s=60.0, duration_s=30.0) == pytest.approx(20 / 30, rel=1e-2)  # 20 requests


def test_doubles_until_saturated() -> None:
    assert next_rate([stage(2)]) == 4
    assert next_rate([stage(2), stage(4)]) == 8


@pytest.mark.parametrize("capacity", [3.0, 7.7, 31.0, 100.0, 900.0])
def test_bracket_narrows_to_a_tenth(capacity: float) -> None:
    stages = run_grid(capacity, 1.2 * capacity, start_rps=2.0)
    met = max(s["offered_rps"] for s in stages if s["slo_met"] and s["stable"])
    over = min(s["offered_rps"] for s in stages if not (s["slo_met"] and s["stable"]))
    assert met <= capacity < over
    assert over / met <= 1.101  # three halvings of a doubling: 2^(1/8) = 1.09


def test_goes_past_saturation() -> None:
    stages = run_grid(30.0, 36.0, start_rps=2.0)
    assert any(not s["stable"] for s in stages)


def test_stops_two_stages_after_a_slo_that_saturation_does_not_explain() -> None:
    rates = [s["offered_rps"] for s in run_grid(5.0, 1e9, start_rps=2.0)]
    assert max(rates) == 16  # 8 and 16 broke it; no need to look for saturation


def test_goes_down_when_the_start_was_too_high() -> None:
    stages = run_grid(1.0, 1.3, start_rps=20.0)
    met = [s["offered_rps"] for s in stages if s["slo_met"] and s["stable"]]
    assert met
    assert max(met) == pytest.approx(1.0, rel=0.1)


def test_gives_up_going_down_after_six_halvings() -> None:
    rates = [s["offered_rps"] for s in run_grid(0.0, 1e-9, start_rps=20.0)]
    assert min(rates) == pytest.approx(20 / 64, rel=0.02)


def test_without_slo_the_bracket_is_that_of_saturation() -> None:
    stages = run_grid(1e9, 50.0, start_rps=2.0, slo=False)
    stable = max(s["offered_rps"] for s in stages if s["stable"])
    assert 50 / 1.101 <= stable < 50


def test_undecided_stages_do_not_end_the_search() -> None:
    stages = run_grid(100.0, 130.0, start_rps=2.0, undecided_below=20.0)
    assert max(s["offered_rps"] for s in stages if s["slo_met"]) == pytest.approx(100, rel=0.1)


def test_a_limited_client_ends_the_sweep() -> None:
    assert next_rate([stage(2), stage(4, limited=True)]) is None


def test_an_overloaded_stage_sends_the_grid_down_even_where_the_client_was_late() -> None:
    assert next_rate([stage(80, None, stable=False, limited=True)]) == 40
