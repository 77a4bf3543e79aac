"""Knee, capacity, C_max, fleet: hand-made stages with a known answer, and queues with a known capacity."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ampacity.analysis.capacity.fleet import (
    Carried,
    FleetError,
    Traffic,
    cost_per_million_output_tokens,
    fleet_of,
    queue_depth,
    size_fleet,
)
from ampacity.analysis.capacity.goodput_peak import peak_goodput
from ampacity.analysis.capacity.knee import find_knee
from ampacity.analysis.capacity.levels import good_share_at, number_text
from ampacity.analysis.capacity.usable import find_capacity, met_by_all
from ampacity.analysis.slo import parse_slos
from ampacity.analysis.stage.goodput import goodput_rps
from ampacity.experiments.sweep import next_rate
from tests.support.contract import summarise
from tests.support.synthetic import ORIGIN_NS, Stage, make_run, queue_sweep, request

SLOS = parse_slos(["ttft_p99=1s"])


def stage(
    index: int,
    load: float,
    p99: float | None,
    met: bool | None,
    *,
    kind: str = "open",
    stable: bool = True,
    concurrency: float | None = None,
    limited: bool = False,
    achieved: float | None = None,
    p50: float = 0.1,
) -> dict[str, Any]:
    """A stage object with what capacity and knee read."""
    rate = load if achieved is None else achieved
    figures = {"p50": p50, "p95": p99, "p99": p99}
    attained = 1.0 if p99 is not None and p99 <= 1 else 0.9
    return {
        "index": index,
        "kind": kind,
        "offered_rps": load if kind == "open" else None,
        "concurrency_set": int(load) if kind == "closed" else None,
        "requests": 1000,
        "achieved_rps": rate,
        "arrived_rps": load if kind == "open" else rate,
        "carried_rps": rate,
        "ended_early": None,
        "concurrency": load * 2 if concurrency is None else concurrency,
        "client_limited": limited,
        "stable": stable,
        "slo_met": met,
        "slo_met_reason": "inconclusive: ttft_p99=1s: few",
        "ttft_from_schedule_s": figures,
        "e2e_from_schedule_s": figures,
        "slo_verdicts": [
            {
                "slo": "ttft_p99=1s",
                "value_s": p99,
                "attainment": attained,
                "requests_effective": 1000,
            }
        ],
        "window": {"start_s": 0.0, "end_s": 30.0, "warmup_requests": 0},
        "goodput_rps": rate if met else 0.0,
    }


def test_the_highest_load_shown_to_meet_stands_where_the_estimate_is_too_wide() -> None:
    c = find_capacity(
        [stage(0, 4, 0.25, True), stage(1, 16, 4.0, False), stage(2, 2, 0.2, True)], SLOS
    )
    assert (c["crossing"], c["capacity_rps"], c["c_max"], c["binding_slo"]) == (
        "verified",
        4,
        8,
        "ttft_p99=1s",
    )
    assert (c["verified_rps"], c["violated_rps"], c["stage"], c["c_max_ci"]) == (4, 16, 0, [8, 32])
    low, high = c["estimate_rps_ci"]
    assert high - low > 2 * 0.25 * c["estimate_rps"]
    assert 4 < c["estimate_rps"] < 16
    assert c["capacity_rps_ci"] == [min(low, 4), high]
    assert "known to a factor of" in c["reason"]


def test_the_interval_ends_below_a_load_that_was_surely_violated() -> None:
    """Half of 1,000 requests miss a p99 at 8: whatever the stages at 4 and 40 say, the rate is below 8."""
    over = stage(1, 8, 4.0, None)
    over["slo_verdicts"][0]["attainment"] = 0.5
    c = find_capacity([stage(0, 4, 0.25, True), over, stage(2, 40, 4.0, False)], SLOS)
    assert c["capacity_rps_ci"][1] <= 8
    # against a load at which nearly all stages say that it holds no load is known from below
    many = [stage(i, load, 0.25, None) for i, load in enumerate((4, 6, 7, 8.5, 9, 9.5, 10))]
    over = over | {"index": 8, "offered_rps": 5, "slo_met": None}
    c = find_capacity([*many, over, stage(9, 40, 4.0, False)], SLOS)
    assert c["capacity_rps_ci"] is None or c["capacity_rps_ci"][0] == 0.0
    assert c["capacity_rps"] is None


def test_no_load_is_named_where_a_lone_request_misses_as_often_as_is_allowed() -> None:
    """At any load 0.98 % of 20,000 miss a p99; the interval has no lower end, and the reason is said."""
    stages = [
        stage(i, load, 0.9, None) | {"requests": 20_000} for i, load in enumerate((2, 4, 6, 8, 9))
    ]
    for s in stages:
        s["slo_verdicts"][0] |= {"attainment": 1 - 0.0098, "requests_effective": 20_000}
    c = find_capacity([*stages, stage(5, 40, 4.0, False)], SLOS)
    assert c["capacity_rps"] is None
    assert c["capacity_rps_ci"][0] == 0.0
    assert "at low loads requests miss ttft_p99=1s nearly as often as it allows" in c["reason"]


def test_the_slo_that_breaks_first_is_the_binding_one() -> None:
    tpot = parse_slos(["tpot_p95=60ms"])
    stages = []
    for i, (load, p99, share) in enumerate(
        [(4, 0.25, 1.0), (8, 0.5, 1.0), (16, 4.0, 0.96), (32, 8.0, 0.5)]
    ):
        verdict = {
            "slo": "tpot_p95=60ms",
            "value_s": 0.05,
            "attainment": share,
            "requests_effective": 1000,
        }
        made = stage(i, load, p99, p99 < 1)
        stages.append(made | {"slo_verdicts": [*made["slo_verdicts"], verdict]})
    # of the first tokens one in ten is late at 16, ten times what is allowed; of the answers 4 %, less than that
    assert find_capacity(stages, [*SLOS, *tpot])["binding_slo"] == "ttft_p99=1s"


def test_an_in_flight_count_without_a_level_is_no_end_of_an_interval() -> None:
    """The issue's C_max: between a steady stage with 8 in flight and an unstable one with 600 nothing is interpolated."""
    stages = [
        stage(0, 16, 0.25, True, concurrency=8),
        stage(1, 40, 1.1, False, stable=False, achieved=20, concurrency=600)
        | {"carried_rps": 40.0},
    ]
    c = find_capacity(stages, SLOS)
    # no more than 20 were served, with the chance error of 600 answers
    assert (c["crossing"], c["verified_rps"], c["violated_rps"]) == ("pooled", 16, 40)
    assert 15 < c["capacity_rps_ci"][0] < c["capacity_rps"] < 20 < c["capacity_rps_ci"][1] < 23
    assert 8 < c["c_max"] < 12
    bare = [
        s | {"slo_verdicts": [v | {"requests_effective": 0} for v in s["slo_verdicts"]]}
        for s in stages
    ]
    shown = find_capacity(bare, SLOS)
    assert (shown["capacity_rps"], shown["c_max"], shown["c_max_ci"]) == (16, 8, [8, None])


def test_no_stage_broke_or_the_lowest_did() -> None:
    c = find_capacity([stage(0, 4, 0.25, True), stage(1, 8, 0.5, True)], SLOS)
    assert (c["crossing"], c["capacity_rps"], c["capacity_rps_ci"]) == ("lower_bound", 8, [8, None])
    late = [stage(0, 4, 2.0, False), stage(1, 8, 5.0, False)]
    late[1]["slo_verdicts"][0]["attainment"] = 0.5
    c = find_capacity(late, SLOS)
    assert (c["crossing"], c["capacity_rps"], c["capacity_rps_ci"]) == ("none", None, [0.0, 4])
    assert c["reason"] == (
        "the lowest load tried, 4 requests/s, is already too high: 4 requests/s were answered there; try 1, 2, 3 requests/s"
    )
    c = find_capacity([stage(0, 4, 0.9, None)], SLOS)
    assert (c["capacity_rps"], c["capacity_rps_ci"]) == (None, None)
    assert c["reason"] == "no stage is decided (ttft_p99=1s: few)"


def test_a_stage_in_which_everything_failed_is_no_finding() -> None:
    """An endpoint that went down at 20/s says nothing of 20/s; requests that ran into their time limit may."""
    met, down = stage(0, 10, 0.25, True), stage(1, 20, None, False, achieved=0)
    refused = down | {"errors": {"http_error": 900, "connect_error": 100, "timeout": 0}}
    c = find_capacity([met, refused], SLOS)
    assert (c["capacity_rps"], c["capacity_rps_ci"], c["crossing"]) == (
        10,
        [10, None],
        "lower_bound",
    )
    alone = find_capacity([refused], SLOS)
    assert (alone["capacity_rps"], alone["capacity_rps_ci"]) == (None, None)
    assert alone["reason"] == "no usable stage: every request failed in all of them"
    for errors in ({"timeout": 1000}, {"http_error": 999}):  # the one of a thousand was answered
        c = find_capacity([met, down | {"errors": errors}], SLOS)
        assert (c["verified_rps"], c["violated_rps"], c["crossing"]) == (10, 20, "pooled")
        assert c["capacity_rps_ci"] == pytest.approx([10, 20])  # nothing was measured between


def test_a_result_is_never_above_what_was_offered() -> None:
    # by chance more arrived than offered: 41.5 for 40, and 145 for 143 in the stage that broke
    met, broken = stage(0, 40, 0.25, True, achieved=41.5), stage(1, 143, 4.0, False, achieved=138)
    broken |= {"arrived_rps": 145.0, "carried_rps": 145.0}
    alone = find_capacity([met], SLOS)
    assert (alone["capacity_rps"], alone["capacity_rps_ci"]) == (40, [40, None])
    c = find_capacity([met, broken], SLOS)
    assert (c["verified_rps"], c["violated_rps"]) == (40, 143)
    failing = stage(0, 40, 0.25, True) | {"carried_rps": 38.0}  # two of forty failed
    assert find_capacity([failing], SLOS)["capacity_rps"] == 38
    # as many more arrived as failed: 44 for 40, of which 38.5 were answered, seven of eight
    crowded = stage(0, 40, 0.25, True) | {"arrived_rps": 44.0, "carried_rps": 38.5}
    assert find_capacity([crowded], SLOS)["capacity_rps"] == 35


def test_a_level_that_was_kept_is_the_rate_that_was_asked_for() -> None:
    # 1000 Poisson arrivals have a standard deviation of 31.6: 4.75 for 5 is 1.66 of them, 4.3 is 5.1 (a trace, sessions)
    drawn = stage(0, 5, 0.25, True) | {"arrived_rps": 4.75, "carried_rps": 4.75}
    found = find_capacity([drawn], SLOS)
    assert (found["capacity_rps"], found["capacity_rps_ci"]) == (5.0, [5.0, None])
    assert size_fleet(10, found["capacity_rps"], 1.0).instances == 2
    assert find_capacity([drawn | {"carried_rps": 4.56}], SLOS)["capacity_rps"] == pytest.approx(
        4.8
    )  # 4 % failed
    fewer = drawn | {"arrived_rps": 4.3, "carried_rps": 4.3}
    assert find_capacity([fewer], SLOS)["capacity_rps"] == 4.3


def test_figures_lie_in_their_intervals_whatever_the_stages() -> None:
    rng, seen = np.random.default_rng(0), 0
    for k in range(600):
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
        found = find_capacity(stages, SLOS)
        for name in ("capacity_rps", "c_max"):
            if found[name] is not None:
                low, high = found[f"{name}_ci"]
                assert low <= found[name] <= (math.inf if high is None else high)
                seen += 1
    assert seen > 600


def test_a_stage_that_ended_early_is_no_evidence_unless_it_is_alone() -> None:
    cut = stage(1, 40, 0.3, True, achieved=61.5) | {"ended_early": "the budget", "requests": 12}
    c = find_capacity([stage(0, 20, 0.25, True), cut], SLOS)
    assert (c["capacity_rps"], c["capacity_rps_ci"], c["stage"]) == (20, [20, None], 0)
    broken = cut | {"slo_met": False}
    assert find_capacity([stage(0, 20, 0.25, True), broken], SLOS)["crossing"] == "lower_bound"
    assert find_capacity([cut | {"index": 0}], SLOS)["capacity_rps"] == 40
    two = find_capacity([cut, cut | {"index": 0, "offered_rps": 20}], SLOS)
    assert "ended early" in two["reason"]


def test_the_lowest_load_was_too_high_in_a_closed_loop_and_where_nothing_was_answered() -> None:
    c = find_capacity([stage(0, 8, 2.0, False, kind="closed", achieved=3.456)], SLOS)
    assert c["reason"] == (
        "the lowest load tried, 8 in flight, is already too high: 3.46 requests/s were answered there; "
        "try 2, 4 in flight"
    )
    served = find_capacity([stage(0, 40, None, False, achieved=10)], SLOS)["reason"]
    assert served.endswith("10 requests/s were answered there; try 2.5, 5, 7.5 requests/s")
    nothing = find_capacity([stage(0, 40, None, False, achieved=0)], SLOS)["reason"]
    assert nothing.endswith(
        "0 requests/s were answered there; try 2.5, 5, 7.5 requests/s"
    )  # quarters of a quarter


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


def test_a_client_limited_stage_is_no_finding() -> None:
    stages = [stage(0, 4, 0.25, True), stage(1, 8, 9.0, False, limited=True)]
    assert find_capacity(stages, SLOS)["crossing"] == "lower_bound"
    assert find_capacity([stage(0, 8, 9.0, None, limited=True)], SLOS)["reason"].startswith(
        "no usable stage"
    )


def test_non_monotone_verdicts_are_taken_conservatively() -> None:
    stages = [
        stage(0, 4, 0.25, True),
        stage(1, 8, 2.0, False),
        stage(2, 12, 0.8, True),
        stage(3, 16, 4.0, False),
    ]
    c = find_capacity(stages, SLOS)
    assert c["non_monotone"] is True
    assert (c["verified_rps"], c["violated_rps"]) == (4, 8)
    assert (
        c["capacity_rps_ci"][0] <= 4 < 12 < c["capacity_rps_ci"][1]
    )  # wide enough for either to be right


def test_a_limit_below_the_median_at_no_load_is_met_by_no_rate() -> None:
    slos = parse_slos(["ttft_p99=60ms"])

    def at(index: int, load: float, p50: float, kind: str = "open") -> dict[str, Any]:
        made = stage(index, load, 0.3, False, p50=p50, kind=kind)
        verdict = {
            "slo": "ttft_p99=60ms",
            "value_s": 0.3,
            "attainment": 0.0,
            "requests_effective": 1,
        }
        return made | {"slo_verdicts": [verdict], "classes": {}}

    flat = [at(0, 0.2, 0.24), at(1, 0.1, 0.227)]  # 0.214 s at no load
    assert find_capacity(flat, slos)["reason"].startswith(
        "no load can meet ttft_p99=60ms: the median is 0.227 s at a load of 0.1 and 0.24 s at 0.2"
    )
    assert next_rate(flat) is None
    falling = [at(0, 0.2, 0.18), at(1, 0.1, 0.11)]  # 0.04 s at no load
    assert "is already too high" in find_capacity(falling, slos)["reason"]
    assert next_rate(falling) == 0.05
    assert (
        "no load can meet"
        in find_capacity([at(i, n, 0.2, "closed") for i, n in enumerate((1, 2))], slos)["reason"]
    )
    overloaded = [s | {"stable": False} for s in flat]
    assert "no load can meet" not in find_capacity(overloaded, slos)["reason"]


@pytest.mark.parametrize("kind", ["open", "closed"])
@pytest.mark.parametrize(
    ("shares", "n", "hopeless"),
    [
        ((0.06, 0.06), 1200, True),  # odds of 0.064 at no load, sd 0.017; 0.0101 are allowed
        ((0.06, 0.06), 100, False),  # sd 0.06: it may yet be the load
        (
            (0.2, 0.6),
            1200,
            False,
        ),  # refused beyond 8/s: odds 0.25 and 1.5, on a line that is below 0 at no load
        ((0.005, 0.06), 1200, False),
    ],
)
def test_misses_that_do_not_fall_with_the_load_are_not_blamed_on_it(
    kind: str, shares: tuple[float, float], n: int, hopeless: bool
) -> None:
    def at(index: int, load: float, missed: float) -> dict[str, Any]:
        made = stage(index, load, 0.3, False, p50=0.1, kind=kind)
        held = {
            "slo": "ttft_p99=1s",
            "value_s": None,
            "attainment": 1 - missed,
            "requests_effective": n,
        }
        return made | {
            "slo_verdicts": [held],
            "classes": {},
            "requests": 1200,
            "concurrency": 2.0,
            "window": {"start_s": 0.0, "end_s": 60.0, "warmup_requests": 0},
        }

    stages = [at(0, 10, shares[0]), at(1, 20, shares[1])]
    reason = find_capacity(stages, parse_slos(["ttft_p99=1s"]))["reason"] or ""
    said = "no load can meet ttft_p99=1s: 6 % of the requests miss it at a load of 10 and 6 % at 20, so it is not the load"
    assert reason.startswith(said) == hopeless, reason


def test_c_max_of_users_who_pause_is_what_was_in_flight() -> None:
    stages = [
        stage(i, users, p99, p99 <= 1, kind="closed", achieved=rate, concurrency=flying)
        | {"users_pause": True}
        for i, (users, p99, rate, flying) in enumerate(
            [(16, 0.2, 12.5, 3.9), (32, 0.6, 22.2, 9.8), (48, 1.4, 22.3, 25.8)]
        )
    ]
    c = find_capacity(stages, SLOS)
    assert (c["c_max"], c["c_max_ci"], c["users"]) == (9.8, [9.8, 25.8], 32)
    assert (c["capacity_rps"], c["crossing"]) == (22.2, "saturated")  # 22.3 is within 1 %


def test_closed_loop_c_max_is_the_highest_set_concurrency_that_met() -> None:
    stages = [
        stage(i, load, p99, p99 <= 1, kind="closed", achieved=rate)
        for i, (load, p99, rate) in enumerate(
            [(1, 0.2, 4.0), (2, 0.3, 7.0), (4, 0.6, 11.0), (8, 1.4, 13.0)]
        )
    ]
    c = find_capacity(stages, SLOS)
    assert (c["c_max"], c["c_max_basis"], c["c_max_ci"]) == (4, "closed", [4, 8])
    assert (c["capacity_rps"], c["capacity_rps_ci"], c["crossing"]) == (
        11.0,
        [11.0, 13.0],
        "measured",
    )


@pytest.mark.parametrize("seed", range(5))
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
    # M/M/1 holds rho/(1-rho) = 7.7 requests there; each also spends 40 ms on its further four tokens
    assert capacity["c_max_ci"][0] <= 7.7 + truth * 0.04 <= capacity["c_max_ci"][1]
    assert [s["stable"] for s in summary["stages"][-2:]] == [False, False]
    assert all(s["stable"] for s in summary["stages"][:4])
    # the sojourn time of M/M/1 is exponential at any load, so p99/p50 never parts; the bounds meet at 45 ms x 200/s = 9
    assert summary["knee"]["region"] is None
    assert summary["knee"]["methods"]["bounds"]["concurrency"] == pytest.approx(9, rel=0.25)


def test_the_knee_is_a_region_and_the_bounds_stand_beside_it() -> None:
    rows = [(1, 1, 0.2), (2, 2, 0.2), (4, 4, 0.21), (8, 7, 0.22), (16, 8, 1.0), (32, 8.2, 3.0)]
    stages = [
        stage(i, rps, p99, True, concurrency=concurrency, achieved=rps)
        for i, (concurrency, rps, p99) in enumerate(rows)
    ]
    knee = find_knee(stages)
    divergence = knee["methods"]["p99_p50_divergence"]
    # p99/p50 goes from 2.2 to 10, through 2 x 2; without an interval one more load may be quiet by chance
    assert divergence["range"] == knee["region"] == [4, 16]
    assert knee["region_rps"] == [4, 8]
    assert knee["concurrency"] == pytest.approx(8 * 2 ** (math.log(4 / 2.2) / math.log(10 / 2.2)))
    assert knee["methods"]["bounds"]["concurrency"] == pytest.approx(
        23.2 / 3
    )  # 1 s x (7 + 8 + 8.2) / 3


def test_knee_needs_four_stages() -> None:
    knee = find_knee([stage(i, i + 1, 0.2, True) for i in range(3)])
    assert (knee["concurrency"], knee["reason"]) == (None, "needs 4 usable stages, has 3")
    limited = [stage(i, i + 1, 0.2, True, limited=True) for i in range(8)]
    assert find_knee(limited)["concurrency"] is None


def test_no_knee_where_nothing_parts() -> None:
    """All requests take ever longer, p50 as p99: no tail parts; nor does throughput bend."""
    stages = [stage(i, 2.0**i, 0.2 * 2**i, True, p50=0.1 * 2**i) for i in range(6)]
    knee = find_knee(stages)
    assert (knee["concurrency"], knee["region"], knee["rps"]) == (None, None, None)
    assert "never clearly reached" in knee["reason"]
    assert "still growing" in knee["methods"]["bounds"]["reason"]


@pytest.mark.parametrize(
    ("peak", "usable", "tp", "safety", "before", "instances", "gpus"),
    [
        (120, 12, 4, 1.3, 10, 13, 52),
        (120, 12, 4, 1.25, 10, 13, 52),  # never 50 GPUs
        (101, 12, 1, 1.3, 9, 12, 12),
        (10, 1, 1, 1.1, 10, 11, 11),  # 10 x 1.1 is 11.000000000000002 in floats
        (3, 0.1, 1, 1.2, 30, 36, 36),  # 3 / 0.1 is 30, 30 x 1.2 is 36
        (5, 12, 8, 1.0, 1, 1, 8),
    ],
)
def test_fleet_worked_values(
    peak: float, usable: float, tp: int, safety: float, before: int, instances: int, gpus: int
) -> None:
    fleet = size_fleet(peak, usable, safety, tp)
    assert (fleet.instances_before_safety, fleet.instances, fleet.gpus) == (before, instances, gpus)
    assert fleet.one_replica_down == max(instances, before + 1)


def test_fleet_refuses_nonsense() -> None:
    for inputs in (
        (0, 12, 1.2, 1),
        (120, 0, 1.2, 1),
        (120, 12, 0.9, 1),
        (120, 12, 1.2, 0),
        (math.nan, 1, 1.2, 1),
    ):
        with pytest.raises(FleetError):
            size_fleet(*inputs)  # type: ignore[arg-type]


def test_cost_of_tokens() -> None:
    # 4 GPUs at $2.50 an hour give 10,000 tokens/s: 36 M tokens for $10
    assert cost_per_million_output_tokens(2.5, 4, 10_000) == pytest.approx(10 / 36)
    carried = Carried(12.0, (11.0, 13.0), None, 10_000 / 12, None)
    fleet = fleet_of(None, carried, 4, gpu_hour_usd=2.5)
    assert fleet["cost_per_million_output_tokens"] == pytest.approx(10 / 36)
    assert "no peak rate" in fleet["reason"]
    assert fleet_of(Traffic(120.0), carried, safety=0.5)["instances"] is None


def test_queue_depth_of_a_two_second_budget() -> None:
    assert queue_depth(50, 2) == 100


def test_goodput_of_thirty_good_requests_a_minute() -> None:
    assert goodput_rps(30, 60.0) == 0.5
    assert goodput_rps(30, 60.0) * 60 == 30
    stages = [stage(0, 4, 0.2, True), stage(1, 8, 0.5, True), stage(2, 50, 0.5, True, limited=True)]
    peak = peak_goodput(stages, SLOS)
    assert (peak["peak_rps"], peak["at_offered_rps"]) == (8, 8)


def test_the_best_goodput_is_not_that_of_a_short_or_an_unstable_stage() -> None:
    long = stage(0, 8, 0.2, True)
    short, unstable = (
        stage(1, 9, 0.2, True) | {"requests": 99},
        stage(2, 10, 0.2, True, stable=False),
    )
    assert peak_goodput([long, short, unstable], SLOS)["peak_rps"] == 8
    assert peak_goodput([short | {"requests": 100}, long], SLOS)["peak_rps"] == 9
    none = peak_goodput([short, unstable], SLOS)
    assert none["peak_rps"] is None
    assert "100 requests" in none["reason"]


def test_the_good_share_is_that_at_the_usable_rate() -> None:
    """0.871 at 0.433/s, 0.658 at 0.864/s, 0.5 at 1.22/s; a stage of 30 requests says nothing."""
    stages = [
        {
            "kind": "open",
            "offered_rps": rate,
            "arrived_rps": rate,
            "carried_rps": rate,
            "client_limited": False,
            "requests": n,
            "slo_attainment": share,
        }
        for rate, n, share in (
            (0.433, 400, 0.871),
            (0.864, 400, 0.658),
            (1.22, 400, 0.5),
            (0.93, 30, 0.1),
        )
    ]
    assert good_share_at(stages, "open", 0.931) == pytest.approx(
        0.658 - 0.158 * (0.931 - 0.864) / (1.22 - 0.864)
    )
    assert good_share_at(stages, "open", 0.2) == 0.871
    assert good_share_at(stages, "closed", 0.931) is None


def test_a_short_stage_is_judged_by_all_stages_together_where_they_tell() -> None:
    """The capacity is between 40 and 60/s by all stages: 20/s is met, 80/s violated, 50/s is what nobody knows."""
    capacity = {"crossing": "pooled", "capacity_rps_ci": [40.0, 60.0]}

    def judged(load: float, capacity: dict[str, Any] = capacity, **changes: Any) -> bool | None:
        stage = {
            "kind": "open",
            "offered_rps": load,
            "requests": 100,
            "client_limited": False,
            "slo_met": None,
        } | changes
        return met_by_all(stage, capacity)

    assert [judged(load) for load in (20.0, 50.0, 80.0)] == [True, None, False]
    assert judged(20.0, kind="closed") is None
    assert judged(20.0, client_limited=True) is None
    assert judged(20.0, capacity | {"crossing": "lower_bound"}) is None
    assert judged(50.0, slo_met=True) is True  # what a stage shows by itself stands


def test_a_miss_in_a_short_low_stage_is_no_limit(tmp_path: Path) -> None:
    """One of 60 requests at 1/s fails, none at 10, 20 and 40/s: at least 40/s are carried, and no estimate lies above."""

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
    """Every request at 10 and 40/s waits 1 s, at 20, 60 and 80/s none does: no figure, and the warning."""
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
