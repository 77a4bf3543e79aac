"""The study of start skew, against what theory says of its arrivals."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.studies.start_skew import Plan, dealt, dispersions, of_constant

PLAN = Plan(workers=200, rate=1000, duration=11, runs=20)  # a worker's own gap is 0.2 s


def test_requests_go_to_the_workers_in_turn() -> None:
    assert dealt(np.arange(5.0), np.array([0.0, 0.5])).tolist() == [0, 1.5, 2, 3.5, 4]


@pytest.mark.parametrize("skew_s", [0.01, 0.1])
def test_a_constant_schedule_has_the_dispersion_of_its_skew(skew_s: float) -> None:
    windows_s = (0.02, 0.05, 0.1)
    plan = replace(PLAN, duration=1.2, runs=500)  # of each the one period that repeats
    found = dispersions("constant", "dealt", skew_s, plan, windows_s)
    assert found == pytest.approx([of_constant(w, skew_s) for w in windows_s], abs=0.05)


@pytest.mark.parametrize("how", ["dealt", "own"])
def test_a_poisson_process_stays_one(how: str) -> None:
    found = dispersions("poisson", how, 0.1, PLAN, (0.01, 0.1))
    assert found == pytest.approx([1.0, 1.0], abs=0.08)


def test_workers_with_schedules_of_their_own_lose_the_bursts() -> None:
    """What a switching rate adds to 1 goes with the rate, and each of 200 has a 200th of it."""
    process, windows_s = "mmpp:rates=1/8,stay=1s/100ms", (0.1, 0.5)
    whole, apart = (dispersions(process, how, 0.0, PLAN, windows_s) for how in ("dealt", "own"))
    assert min(whole) > 20
    assert apart == pytest.approx([1 + (x - 1) / 200 for x in whole], rel=0.25)
