"""The busiest hour of a log: logs whose rate is known, and days by the study of
benchmarks/workloads/busy_hour.py.
"""

from pathlib import Path

import numpy as np
import pytest
import yaml

from ampacity.analysis.capacity.fleet import traffic_of_profile
from ampacity.analysis.capacity.fleet_figures import FleetError
from ampacity.reports.pages.profile import facts
from ampacity.workloads.fit.busy_hour import CELLS, busy_hour, busy_rate
from ampacity.workloads.fit.traffic import fit_arrivals
from benchmarks.workloads.busy_hour import CELL_S, DAY, minutes, of_requests, sine, step, windows


def test_without_chance_the_busy_hour_is_exact() -> None:
    # one request a second, two in the hour from 5:00 to 6:00 of ten hours
    times = np.concatenate([np.arange(36_000.0), np.arange(18_000.5, 21_600.5)])
    found = busy_hour(np.sort(times))
    assert (found["rps"], found["window_s"]) == (pytest.approx(2, rel=0.01), 3600)


def test_a_short_log_has_the_windows_that_it_can() -> None:
    assert busy_hour(np.arange(0.0, 239.0)) is None
    found = busy_hour(np.arange(0.0, 3601.0))
    # a quarter of an hour's log
    assert (found["rps"], found["window_s"]) == (pytest.approx(1), 900)


@pytest.mark.parametrize("law", [sine, step])
@pytest.mark.parametrize("kind", ["poisson", "sessions"])
def test_a_day_at_0_65_a_second_is_sized_by_its_peak(law: object, kind: str) -> None:
    per_minute = law(np.arange(DAY) + 0.5)
    truth = 0.65 * windows(of_requests(kind, per_minute, CELL_S)).max()  # 1.23
    held, rates, largest = [], [], []
    for seed in range(60):
        counts = minutes(kind, 0.65 * per_minute, np.random.default_rng(seed))
        rps, (low, high) = busy_rate(counts, CELL_S)
        rates.append(rps)
        held.append(low <= truth <= high)
        largest.append(windows(counts).max() / CELL_S)
    assert np.mean(rates) == pytest.approx(truth, rel=0.03)
    assert np.mean(held) >= 0.85  # of 60; the study has 600
    assert np.mean(largest) > 1.01 * truth  # what it corrects


def test_a_profile_carries_the_busy_hour_and_its_interval_to_the_plan(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    per_minute = step(np.arange(DAY) + 0.5)
    counts = rng.poisson(0.65 * per_minute * CELL_S)
    times = np.sort((np.repeat(np.arange(DAY), counts) + rng.random(counts.sum())) * CELL_S)
    arrivals = fit_arrivals(times - times[0])
    path = tmp_path / "profile.yaml"
    path.write_text(yaml.safe_dump({"measured": {"requests": len(times), "arrivals": arrivals}}))
    traffic = traffic_of_profile(yaml.safe_load(path.read_text()))
    assert traffic.peak_rps == arrivals["busy_hour"]["rps"] == pytest.approx(1.235, rel=0.06)
    assert traffic.peak_rps_ci is not None
    low, high = traffic.peak_rps_ci
    assert low < 1.235 < high
    assert traffic.peak_reason.startswith(
        f"the busiest hour of the profile, 95 % interval {low:.4g} to {high:.4g}"
    )
    shown = dict(
        facts(
            {
                "described": {"arrivals": "poisson"},
                "measured": {"arrivals": arrivals},
                "sides": {},
                "note": "",
            }
        )
    )
    assert shown["Busiest hour"] == (
        f"{traffic.peak_rps:.2f} req/s (95 % interval {low:.2f} to {high:.2f} req/s): what "
        "'ampacity plan' sizes for"
    )
    del arrivals["busy_hour"]  # a profile of before
    old = traffic_of_profile({"measured": {"arrivals": arrivals}})
    assert old.peak_reason.startswith("the profile holds no busy hour (fit its log again): ")
    assert old.peak_rps_ci is None
    for bad in (
        {"rps": -1, "rps_ci": [0, 1], "window_s": 3600},
        {"rps": 2, "rps_ci": [0, 1], "window_s": 3600},
    ):
        with pytest.raises(FleetError, match="busy_hour is not as"):
            traffic_of_profile({"measured": {"arrivals": arrivals | {"busy_hour": bad}}})


def test_the_cells_of_the_study_are_those_of_an_hour() -> None:
    assert CELLS * CELL_S == 3600
