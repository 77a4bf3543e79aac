"""The series of a report's timeline, and the capacity at other limits of the SLO."""

from dataclasses import replace

import numpy as np
import pytest

from ampacity.analysis import timeline
from ampacity.analysis.other_limits import capacity_at_limits
from ampacity.analysis.slo import parse_slo
from ampacity.analysis.summary import summarise
from ampacity.loadgen.rundir.files import Run
from tests.support.synthetic import make_run, queue_sweep

SLOS = ["ttft_p95=200ms", "itl_p99=100ms"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    stages = queue_sweep(np.random.default_rng(3), [10, 25, 35, 45, 60], 40.0, service_rps=50.0)
    return make_run(tmp_path_factory.mktemp("sweep") / "run", stages, SLOS)


def test_the_series_count_what_the_records_hold(run: Run) -> None:
    found = timeline.timeline_of(run)
    table = run.requests.to_pandas()
    origin_ns = min(s["start_ns"] for s in run.meta["stages"])
    due_s = (table["scheduled_ns"] - origin_ns) * 1e-9
    step_s = found.step_s
    assert len(found.arrivals_rps) <= timeline.STEPS_MAX
    assert sum(found.arrivals_rps) * step_s == pytest.approx(len(table))
    tenth = ((due_s >= 10 * step_s) & (due_s < 11 * step_s)).sum()
    assert found.arrivals_rps[10] * step_s == pytest.approx(tenth)
    at_ns = origin_ns + 10.5 * step_s * 1e9
    present = (table["started_ns"] <= at_ns) & (table["ended_ns"] > at_ns)
    assert found.in_flight[10] == present.sum()
    ttft = (table["first_token_ns"] - table["scheduled_ns"]) * 1e-9
    assert max(height for _, height in found.ttft_s) == pytest.approx(ttft.max(), rel=1e-3)
    assert found.answered == len(found.ttft_s) == ttft.notna().sum()
    assert [name for _, name in found.stages][:2] == ["10 req/s", "25 req/s"]


def test_thinning_keeps_the_extremes_of_every_step(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = timeline.timeline_of(run)
    monkeypatch.setattr(timeline, "POINTS_MAX", 1_000)
    few = timeline.timeline_of(run)
    assert len(few.ttft_s) == 1_000 < whole.answered == few.answered
    assert set(few.ttft_s) <= set(whole.ttft_s)

    def extremes(points: timeline.Points) -> dict[int, tuple[float, float]]:
        found: dict[int, list[float]] = {}
        for at_s, height in points:
            found.setdefault(int(at_s / whole.step_s), []).append(height)
        return {step: (min(of), max(of)) for step, of in found.items()}

    assert extremes(few.ttft_s) == extremes(whole.ttft_s)


def test_each_limit_has_the_capacity_of_a_run_with_that_slo(run: Run) -> None:
    summary = summarise(run)
    limits = capacity_at_limits(run, summary)
    assert [at.slo for at in limits if at.given] == [summary.capacity.binding_slo] == SLOS[:1]
    assert [at.slo for at in limits][::4] == ["ttft_p95=60ms", "ttft_p95=200ms", "ttft_p95=1.6s"]
    for at in limits[::2]:
        slos = [parse_slo(text).as_dict() for text in (at.slo, SLOS[1])]
        there = summarise(replace(run, meta={**run.meta, "slos": slos})).capacity
        assert (at.capacity_rps, at.capacity_rps_ci, at.crossing, at.reason) == (
            there.capacity_rps,
            there.capacity_rps_ci,
            there.crossing,
            there.reason,
        )
    assert len({at.capacity_rps for at in limits}) > 4


def test_without_an_slo_there_are_no_limits(run: Run) -> None:
    bare = replace(run, meta={**run.meta, "slos": []})
    assert capacity_at_limits(bare, summarise(bare)) == []
