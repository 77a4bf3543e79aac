"""Capacity and C_max: hand-made stages with a known answer, queues with a known capacity."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from ampacity.analysis.capacity.levels import open_levels
from ampacity.analysis.capacity.limit import met_by_all
from ampacity.analysis.capacity.posterior import saturation_of
from ampacity.analysis.contract.capacity import Capacity
from ampacity.analysis.contract.stage import Stage as StageFigures
from ampacity.analysis.slo import parse_slos
from ampacity.experiments.sweep import next_rate
from tests.analysis.capacity.hand_made import (
    LIMITED,
    SLOS,
    capacity_of,
    find_capacity,
    stage,
    verdict,
)
from tests.support.contract import on_stages, struct_of, summarise
from tests.support.repeats import often
from tests.support.synthetic import ORIGIN_NS, Stage, make_run, queue_sweep, request

met_by_all, next_rate = on_stages(met_by_all), on_stages(next_rate)

MET = stage(0, 10, 0.25, True)
DOWN = stage(1, 20, None, False, achieved=0)
REFUSED = DOWN | {"errors": {"http_error": 900, "connect_error": 100, "timeout": 0}}
CUT = stage(1, 40, 0.3, True, achieved=61.5, ended_early="the budget", requests=12)
# 1000 Poisson arrivals have a standard deviation of 31.6: 4.75 for 5 is 1.66 of them, 4.3 is 5.1
DRAWN = stage(0, 5, 0.25, True, arrived_rps=4.75, carried_rps=4.75)


@pytest.mark.parametrize(
    ("stages", "capacity", "ci"),
    [
        ([stage(0, 4, 0.25, True), stage(1, 8, 0.5, True)], 8, (8, None)),
        # of no finding: everything failed, ended early, the client was the limit
        ([MET, REFUSED], 10, (10, None)),
        ([MET, CUT], 10, (10, None)),
        ([MET, CUT | {"slo_met": False}], 10, (10, None)),
        ([CUT], 40, (40, None)),  # alone it counts
        ([MET, LIMITED], 10, (10, None)),
        # by chance more arrived than offered: never above what was offered
        ([stage(0, 40, 0.25, True, achieved=41.5)], 40, (40, None)),
        ([stage(0, 40, 0.25, True, carried_rps=38.0)], 38, (38, None)),  # two of forty failed
        # as many more arrived as failed: 44 for 40, of which 38.5 were answered, seven of eight
        ([stage(0, 40, 0.25, True, arrived_rps=44.0, carried_rps=38.5)], 35, (35, None)),
        ([DRAWN], 5.0, (5.0, None)),
        ([DRAWN | {"carried_rps": 4.56}], pytest.approx(4.8), None),  # 4 % failed
        ([DRAWN | {"arrived_rps": 4.3, "carried_rps": 4.3}], 4.3, (4.3, None)),
    ],
)
def test_the_highest_load_that_met_is_a_lower_bound(
    stages: list[dict[str, Any]], capacity: float, ci: tuple[float, float | None] | None
) -> None:
    c = capacity_of(*stages)
    assert (c.crossing, c.capacity_rps) == ("lower_bound", capacity)
    assert ci is None or c.capacity_rps_ci == ci


@pytest.mark.parametrize(
    ("stages", "ci", "reason"),
    [
        (
            [stage(0, 4, 2.0, False), stage(1, 8, 5.0, False, share=0.5)],
            (0.0, 4),
            "the lowest load tried, 4 requests/s, is already too high: 4 requests/s were answered "
            "there; try 1, 2, 3 requests/s",
        ),
        ([stage(0, 4, 0.9, None)], None, "no stage is decided (ttft_p99=1s: few)"),
        ([REFUSED], None, "no usable stage: every request failed in all of them"),
        (
            [CUT, CUT | {"offered_rps": 20}],
            None,
            "no usable stage: those that the client kept up with ended early",
        ),
        ([LIMITED], None, "no usable stage: the client was the limit in all of them"),
        (
            [stage(0, 8, 2.0, False, kind="closed", achieved=3.456)],
            (0.0, 3.456),
            "the lowest load tried, 8 in flight, is already too high: 3.46 requests/s were "
            "answered there; try 2, 4 in flight",
        ),
        (
            [stage(0, 40, None, False, achieved=10)],
            (0.0, 40),
            "the lowest load tried, 40 requests/s, is already too high: 10 requests/s were "
            "answered there; try 2.5, 5, 7.5 requests/s",
        ),
        (  # quarters of a quarter
            [stage(0, 40, None, False, achieved=0)],
            (0.0, 40),
            "the lowest load tried, 40 requests/s, is already too high: 0 requests/s were "
            "answered there; try 2.5, 5, 7.5 requests/s",
        ),
    ],
)
def test_stages_that_name_no_capacity_have_a_reason(
    stages: list[dict[str, Any]], ci: tuple[float, float] | None, reason: str
) -> None:
    c = capacity_of(*stages)
    assert (c.crossing, c.capacity_rps, c.capacity_rps_ci) == ("none", None, ci)
    assert c.reason == reason


def test_the_highest_load_that_met_is_given_where_the_estimate_is_too_wide() -> None:
    c = capacity_of(stage(0, 4, 0.25, True), stage(1, 16, 4.0, False), stage(2, 2, 0.2, True))
    assert (c.crossing, c.capacity_rps, c.c_max, c.binding_slo) == ("verified", 4, 8, "ttft_p99=1s")
    assert (c.verified_rps, c.violated_rps, c.stage, c.c_max_ci) == (4, 16, 0, (8, 32))
    low, high = c.estimate_rps_ci or (None, None)
    assert high - low > 2 * 0.25 * c.estimate_rps
    assert 4 < c.estimate_rps < 16
    assert c.capacity_rps_ci == (min(low, 4), high)
    assert "known to a factor of" in str(c.reason)


def test_the_interval_ends_below_a_load_that_was_surely_violated() -> None:
    """Half of 1,000 requests miss a p99 at 8: whatever 4 and 40 show, the rate is below 8."""
    over = stage(8, 8, 4.0, None, share=0.5)
    c = capacity_of(stage(0, 4, 0.25, True), over, stage(9, 40, 4.0, False))
    assert c.capacity_rps_ci[1] <= 8
    # against a load at which nearly all stages say that it holds no load is known from below
    many = [stage(i, load, 0.25, None) for i, load in enumerate((4, 6, 7, 8.5, 9, 9.5, 10))]
    c = capacity_of(*many, over | {"offered_rps": 5}, stage(9, 40, 4.0, False))
    assert c.capacity_rps_ci is None or c.capacity_rps_ci[0] == 0.0
    assert c.capacity_rps is None


def test_no_load_is_named_where_a_lone_request_misses_as_often_as_is_allowed() -> None:
    """At any load 0.98 % of 20,000 miss a p99: no lower end, with the reason."""
    many = {"share": 1 - 0.0098, "effective": 20_000, "requests": 20_000}
    stages = [stage(i, load, 0.9, None, **many) for i, load in enumerate((2, 4, 6, 8, 9))]
    c = capacity_of(*stages, stage(5, 40, 4.0, False))
    assert c.capacity_rps is None
    assert c.capacity_rps_ci[0] == 0.0
    assert "at the lowest loads requests miss ttft_p99=1s nearly as often as it allows" in str(
        c.reason
    )


def test_the_slo_that_breaks_first_is_the_binding_one() -> None:
    """One first token in ten is late at 16, ten times what is allowed; of the answers 4 %, less."""
    stages = []
    for i, (load, p99, share) in enumerate(
        [(4, 0.25, 1.0), (8, 0.5, 1.0), (16, 4.0, 0.96), (32, 8.0, 0.5)]
    ):
        made = stage(i, load, p99, p99 < 1)
        made["slo_verdicts"].append(verdict("tpot_p95=60ms", 0.05, share))
        stages.append(made)
    found = find_capacity(stages, [*SLOS, *parse_slos(["tpot_p95=60ms"])])
    assert found.binding_slo == "ttft_p99=1s"


def test_an_in_flight_count_without_a_level_is_no_end_of_an_interval() -> None:
    """Between a steady stage with 8 in flight and an unstable one with 600 nothing is interpolated:
    no more than 20 were served, with the chance error of 600 answers."""
    jammed = {"stable": False, "achieved": 20, "concurrency": 600, "carried_rps": 40.0}

    def both(effective: float) -> Capacity:
        return capacity_of(
            stage(0, 16, 0.25, True, concurrency=8, effective=effective),
            stage(1, 40, 1.1, False, effective=effective, **jammed),
        )

    c = both(1000)
    assert (c.crossing, c.verified_rps, c.violated_rps) == ("pooled", 16, 40)
    (low, high), rate = c.capacity_rps_ci or (None, None), c.capacity_rps
    assert 15 < low < rate < 20 < high < 23
    assert 8 < c.c_max < 12
    shown = both(0)
    assert (shown.capacity_rps, shown.c_max, shown.c_max_ci) == (16, 8, (8, None))


def overloaded(index: int, up: float, **changes: Any) -> dict[str, Any]:
    """A stage at 200/s of which 100/s were answered in 30 s, at most ``up`` more."""
    jammed = {
        "stable": False,
        "concurrency": 1000,
        "achieved": 100,
        "achieved_rps_ci": [100 - up, 100 + up],
    }
    return stage(index, 200, 9.0, False, share=0.0, **jammed | changes)


@pytest.mark.parametrize(
    ("ups", "idle_s", "most"),
    [
        ([1], 2.0, 101.325),  # 1 % are 1.96 standard deviations: e^(0.01 * 2.58 / 1.96)
        ([1.2, 1.6], 2.0, 101.325),  # a mean of two: half of the root of 1.2^2 + 1.6^2
        ([1], 3.1, math.inf),  # a tenth of the stage is what a lone request takes: it may fill up
    ],
)
def test_the_interval_ends_at_what_overloaded_stages_answered(
    ups: list[float], idle_s: float, most: float
) -> None:
    full = [overloaded(2 + i, up) for i, up in enumerate(ups)]
    few = {"share": 1.0, "effective": 25, "concurrency": 95 * idle_s}
    given = [stage(0, 80, 0.25, True, **few), stage(1, 95, 0.25, None, **few), *full]
    stages = [struct_of(StageFigures, one) for one in given]
    found = saturation_of(open_levels(stages))
    assert (math.exp(found.x), math.exp(found.most)) == pytest.approx((100, most), rel=1e-4)
    low, high = find_capacity(stages, SLOS).capacity_rps_ci or (None, None)
    assert low is not None
    assert high <= most * (1 + 1e-4)
    without = [structs.replace(s, achieved_rps_ci=None) for s in stages]
    free = find_capacity(without, SLOS).capacity_rps_ci
    assert free[0] == low
    assert high < free[1] or most == math.inf


def test_an_endpoint_that_answers_some_is_evidence() -> None:
    """Requests that ran into their time limit say something of 20/s, as does the one answered."""
    for errors in ({"timeout": 1000}, {"http_error": 999}):
        c = capacity_of(MET, DOWN | {"errors": errors})
        assert (c.verified_rps, c.violated_rps, c.crossing) == (10, 20, "pooled")
        assert c.capacity_rps_ci == pytest.approx((10, 20))  # nothing was measured between


def test_more_arrivals_than_offered_are_no_higher_violation() -> None:
    violated = stage(1, 143, 4.0, False, achieved=138, arrived_rps=145.0, carried_rps=145.0)
    c = capacity_of(stage(0, 40, 0.25, True, achieved=41.5), violated)
    assert (c.verified_rps, c.violated_rps) == (40, 143)


def test_figures_lie_in_their_intervals_whatever_the_stages() -> None:
    rng, seen, number = np.random.default_rng(0), 0, often(100, 600)
    for k in range(number):
        loads = np.sort(rng.uniform(1, 100, rng.integers(2, 7)))
        stages = []
        for i, (load, p99) in enumerate(
            zip(loads.tolist(), np.exp(rng.normal(np.log(0.3 + loads / 60), 0.5)), strict=True)
        ):
            met, stable = (
                True if p99 < 0.8 else None if p99 < 1.2 else False,
                rng.random() > 0.1 * i,
            )
            concurrency, achieved = (
                load * np.exp(rng.normal(0, 0.4)),
                load * min(1, np.exp(rng.normal(0, 0.05))),
            )
            stages.append(
                stage(
                    i,
                    load,
                    float(p99),
                    met if stable else False,
                    kind="open" if k % 3 else "closed",
                    stable=stable,
                    concurrency=concurrency,
                    achieved=achieved,
                )
            )
        found = capacity_of(*stages)
        for name in ("capacity_rps", "c_max"):
            if (value := getattr(found, name)) is not None:
                low, high = getattr(found, f"{name}_ci")
                assert low <= value <= (math.inf if high is None else high)
                seen += 1
    assert seen > number


def test_non_monotone_verdicts_are_taken_conservatively() -> None:
    rows = [(4, 0.25), (8, 2.0), (12, 0.8), (16, 4.0)]
    c = capacity_of(*(stage(i, load, p99, p99 < 1) for i, (load, p99) in enumerate(rows)))
    assert c.non_monotone is True
    assert (c.verified_rps, c.violated_rps) == (4, 8)
    low, high = c.capacity_rps_ci or (None, None)
    assert low <= 4 < 12 < high  # wide enough for either to be right


@pytest.mark.parametrize(
    ("kind", "rows", "hopeless", "next_rps"),
    [
        ("open", [(0.2, 0.24), (0.1, 0.227)], True, None),  # 0.214 s at no load
        ("open", [(0.2, 0.18), (0.1, 0.11)], False, 0.05),  # 0.04 s at no load
        ("closed", [(1, 0.2), (2, 0.2)], True, None),
        ("overloaded", [(0.2, 0.24), (0.1, 0.227)], False, None),
    ],
)
def test_a_limit_below_the_median_at_no_load_is_met_by_no_rate(
    kind: str, rows: list[tuple[float, float]], hopeless: bool, next_rps: float | None
) -> None:
    how: dict[str, Any] = {"share": 0.0, "effective": 1, "slo": "ttft_p99=60ms"}
    how |= {"stable": False} if kind == "overloaded" else {"kind": kind}
    stages = [stage(i, load, 0.3, False, p50=p50, **how) for i, (load, p50) in enumerate(rows)]
    reason = str(find_capacity(stages, parse_slos(["ttft_p99=60ms"])).reason)
    low, high = sorted(rows)
    text = (
        f"no load can meet ttft_p99=60ms: the median is {low[1]} s at a load of {low[0]} and "
        f"{high[1]} s at {high[0]}"
    )
    assert reason.startswith(text) is hopeless
    assert hopeless or "is already too high" in reason
    if kind == "open":
        assert next_rate(stages) == next_rps


@pytest.mark.parametrize("kind", ["open", "closed"])
@pytest.mark.parametrize(
    ("shares", "n", "hopeless"),
    [
        ((0.06, 0.06), 1200, True),  # odds of 0.064 at no load, sd 0.017; 0.0101 are allowed
        ((0.06, 0.06), 100, False),  # sd 0.06: it may yet be the load
        # refused beyond 8/s: odds 0.25 and 1.5, on a line that is below 0 at no load
        ((0.2, 0.6), 1200, False),
        ((0.005, 0.06), 1200, False),
    ],
)
def test_misses_that_do_not_fall_with_the_load_are_not_blamed_on_it(
    kind: str, shares: tuple[float, float], n: int, hopeless: bool
) -> None:
    how: dict[str, Any] = {"kind": kind, "effective": n, "requests": 1200, "concurrency": 2.0}
    how |= {"window": {"start_s": 0.0, "end_s": 60.0, "warmup_requests": 0}}
    rows = enumerate(zip((10, 20), shares, strict=True))
    reason = capacity_of(
        *(stage(i, load, 0.3, False, share=1 - missed, **how) for i, (load, missed) in rows)
    ).reason
    text = (
        "no load can meet ttft_p99=1s: 6 % of the requests miss it at a load of 10 and 6 % at 20, "
        "so it is not the load"
    )
    assert str(reason).startswith(text) == hopeless, reason


def closed_loop(rows: list[tuple[float, float, float]], **more: Any) -> Capacity:
    return capacity_of(
        *(
            stage(i, users, p99, p99 <= 1, kind="closed", achieved=rate, **more)
            for i, (users, p99, rate) in enumerate(rows)
        )
    )


def test_c_max_of_users_who_pause_is_what_was_in_flight() -> None:
    in_flight = {16: 3.9, 32: 9.8, 48: 25.8}
    rows = [(16, 0.2, 12.5), (32, 0.6, 22.2), (48, 1.4, 22.3)]
    stages = [
        stage(i, users, p99, p99 <= 1, kind="closed", achieved=rate, users_pause=True)
        | {"concurrency": in_flight[users]}
        for i, (users, p99, rate) in enumerate(rows)
    ]
    c = capacity_of(*stages)
    assert (c.c_max, c.c_max_ci, c.users) == (9.8, (9.8, 25.8), 32)
    assert (c.capacity_rps, c.crossing) == (22.2, "saturated")  # 22.3 is within 1 %


def test_closed_loop_c_max_is_the_highest_set_concurrency_that_met() -> None:
    c = closed_loop([(1, 0.2, 4.0), (2, 0.3, 7.0), (4, 0.6, 11.0), (8, 1.4, 13.0)])
    assert (c.c_max, c.c_max_basis, c.c_max_ci) == (4, "closed", (4, 8))
    assert (c.capacity_rps, c.capacity_rps_ci, c.crossing) == (11.0, (11.0, 13.0), "measured")


@pytest.mark.parametrize("seed", range(often(2, 5)))
def test_capacity_of_a_queue_is_inside_the_interval(tmp_path: Path, seed: int) -> None:
    # M/M/1 with mu = 200/s: p99 of the sojourn time is 200 ms at 200 - ln(100)/0.2 = 177/s
    truth = 200 - math.log(100) / 0.2
    rng = np.random.default_rng(seed)
    stages = queue_sweep(rng, [25, 50, 100, 150, 170, 220, 300], 20.0, service_rps=200)
    summary = summarise(make_run(tmp_path / "run", stages, ["ttft_p99=200ms"]))
    capacity = summary["capacity"]
    low, high = capacity["capacity_rps_ci"]
    assert low <= truth <= high
    assert capacity["capacity_rps"] == pytest.approx(truth, rel=0.15)
    # M/M/1 holds rho/(1-rho) = 7.7 requests there; each spends 40 ms on its further four tokens
    assert capacity["c_max_ci"][0] <= 7.7 + truth * 0.04 <= capacity["c_max_ci"][1]
    assert [s["stable"] for s in summary["stages"][-2:]] == [False, False]
    assert all(s["stable"] for s in summary["stages"][:4])
    # exponential at any load, so p99/p50 never diverges; the bounds meet at 45 ms x 200/s = 9
    assert summary["knee"]["region"] is None
    assert summary["knee"]["methods"]["bounds"]["concurrency"] == pytest.approx(9, rel=0.25)


@pytest.mark.parametrize(
    ("load", "changes", "crossing", "met"),
    [
        (20.0, {}, "pooled", True),
        (50.0, {}, "pooled", None),
        (80.0, {}, "pooled", False),
        (20.0, {"kind": "closed"}, "pooled", None),
        (20.0, {"client_limited": True}, "pooled", None),
        (20.0, {}, "lower_bound", None),
        (50.0, {"slo_met": True}, "pooled", True),  # what a stage shows by itself counts
    ],
)
def test_an_inconclusive_stage_is_judged_by_all_stages_together(
    load: float, changes: dict[str, Any], crossing: Any, met: bool | None
) -> None:
    """The capacity is between 40 and 60/s by all stages."""
    known = structs.replace(capacity_of(MET), crossing=crossing, capacity_rps_ci=(40.0, 60.0))
    assert met_by_all(stage(0, load, 0.9, None) | changes, known) is met


def test_a_miss_in_a_short_low_stage_is_no_limit(tmp_path: Path) -> None:
    """One of 60 requests at 1/s fails, none at 10, 20 and 40/s: at least 40/s are carried, and no
    estimate lies above."""

    def stage(rate: float, n: int, bad: int | None, start_s: float, first: int) -> Stage:
        records = [
            request(
                first + k,
                start_s + k / rate,
                **({"ttft_s": None, "status": "timeout"} if k == bad else {}),
            )
            for k in range(n)
        ]
        return Stage(records, n / rate, start_s=start_s, offered_rps=rate)

    stages = [
        stage(1, 60, 7, 0, 0),
        stage(10, 900, None, 200, 1000),
        stage(20, 1800, None, 400, 3000),
        stage(40, 3600, None, 600, 6000),
    ]
    found = summarise(make_run(tmp_path / "run", stages, ["ttft_p99=200ms"]))["capacity"]
    assert (found["crossing"], found["verified_rps"]) == (
        "lower_bound",
        pytest.approx(40, rel=0.01),
    )


def test_loads_that_contradict_each_other_name_no_capacity(tmp_path: Path) -> None:
    """Every request at 10 and 40/s waits 1 s, at 20, 60 and 80/s none does: no figure, and the
    warning."""
    stages = queue_sweep(np.random.default_rng(1), (10, 20, 40, 60, 80, 110), 60, service_rps=100)
    for i in (0, 2):
        stages[i].records = [
            request(r.request_id, (r.scheduled_ns - ORIGIN_NS) / 1e9, ttft_s=1.0)
            for r in stages[i].records
        ]
    found = summarise(make_run(tmp_path / "run", stages, ["ttft_p99=200ms"]))
    assert (found["capacity"]["crossing"] == "pooled", found["capacity"]["non_monotone"]) == (
        False,
        True,
    )
    assert "non_monotone" in {w["code"] for w in found["warnings"]}
