"""From a capacity to instances and cost: worked values."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from ampacity.analysis.capacity.fleet import (
    Carried,
    Traffic,
    choose_safety,
    fleet_of,
    instances_text,
    long_requests,
    traffic_of_profile,
)
from ampacity.analysis.capacity.fleet_figures import FleetError
from ampacity.analysis.decision.plan import Terms, plan_fleet
from ampacity.analysis.summary import summarise as full_summary
from ampacity.config import make_settings
from ampacity.loadgen.rundir.files import Run
from ampacity.workloads.fit.traffic import fit_arrivals
from tests.support.contract import summarise
from tests.support.synthetic import Stage, make_run, request

WEEK_S = 7 * 86_400.0


def carried(usable: float = 10.0, low: float | None = 9.0, high: float | None = 12.0) -> Carried:
    return Carried(usable, (low, high), input_tokens=1000.0, output_tokens=200.0, good_share=0.99)


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def plan(ampacity: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> Command:
    """Run ``ampacity plan``: its exit status, stdout and stderr."""
    full = ("--summary", "full")
    return lambda *words: (int(ampacity("plan", *words, *full) or 0), *capsys.readouterr())


def ten_per_second(path: Path, **facts: Any) -> Run:
    """A run whose one stage carries 10 requests/s, the least that an instance does."""
    stage = Stage([request(i, i * 0.1) for i in range(1200)], 120.0, offered_rps=10.0)
    return make_run(path, [stage], ["ttft_p99=1s"], warmup_requests=0, **facts)


def test_the_interval_is_carried_through_to_instances() -> None:
    plan = fleet_of(Traffic(120.0), carried(), tensor_parallel=4, safety=1.2)
    # 120/10 = 12, x 1.2 = 14.4 -> 15; at 9/s: 14 x 1.2 = 16.8 -> 17; at 12/s: 10 x 1.2 = 12
    assert (plan.instances_before_safety, plan.instances, plan.gpus) == (12, 15, 60)
    assert plan.instances_ci == (12, 17)
    assert plan.one_replica_down == 15
    assert fleet_of(Traffic(120.0), carried(high=None), safety=1.2).instances_ci == (None, 17)
    assert fleet_of(Traffic(20.0), carried(), safety=1.0).one_replica_down == 3
    # both intervals: 96/12 = 8 x 1.2 = 9.6 -> 10; 150/9 -> 17 x 1.2 = 20.4 -> 21
    both = fleet_of(Traffic(120.0, peak_rps_ci=(96.0, 150.0)), carried(), safety=1.2)
    assert both.instances_ci == (10, 21)


@pytest.mark.parametrize(
    ("ends", "text"),
    [
        ([9, 15], "10 instances (9 to 15)"),
        ([10, 10], "10 instances at either end of the interval"),
        ([None, 10], "at most 10 instances"),
        ([None, 12], "10 instances (at most 12)"),
        ([10, None], "at least 10 instances"),
        ([9, None], "10 instances (at least 9)"),
        ([None, None], "10 instances (range unknown)"),
    ],
)
def test_a_fleet_is_said_with_its_range(ends: list[int | None], text: str) -> None:
    assert instances_text(10, ends) == text


@pytest.mark.parametrize(
    ("cv", "history_s", "factor", "why"),
    [
        (
            0.1,
            2 * WEEK_S,
            1.2,
            "20 %: the rate varies by 10 % (coefficient of variation over windows of up to a "
            "minute), over 14 days of history",
        ),
        (0.6, 2 * WEEK_S, 1.5, "60 %"),
        (0.1, 3 * 3600.0, 1.5, "do not show a week"),
        (None, 3 * 3600.0, 1.5, "too short to show"),
        (None, None, 1.5, "no history of the traffic shows stable peaks"),
    ],
)
def test_safety_follows_variance_and_history(
    cv: float | None, history_s: float | None, factor: float, why: str
) -> None:
    found = choose_safety(Traffic(120.0, 100.0, rate_cv=cv, history_s=history_s))
    assert found[0] == factor
    assert why in found[1]
    assert choose_safety(None)[0] == 1.5
    assert fleet_of(Traffic(120.0), carried(), safety=1.37).safety_factor == 1.37


def test_lengths_that_vary_much_need_more_in_reserve() -> None:
    """A coefficient of variation of 1 is P95 = 3.9 x P50 where lengths are lognormal."""
    assert long_requests([("input", 100.0, 400.0), ("output", None, None)]) is None
    varied = long_requests([("input", 100.0, 120.0), ("output", 100.0, 520.0)])
    assert varied == "lengths vary much (output tokens: P95 is 5.2 x P50)"
    stable = Traffic(120.0, 100.0, rate_cv=0.1, history_s=2 * WEEK_S)
    assert choose_safety(stable)[0] == 1.2
    assert choose_safety(replace(stable, long_requests=varied)) == (1.5, f"50 %: {varied}")


def test_a_profile_gives_peak_mean_and_variance() -> None:
    held = {
        "mean_rps": 4.0,
        "rps_p99": 11.0,
        "span_s": WEEK_S,
        "dispersion": {"1s": 2.0, "60s": 9.6},
    }
    traffic = traffic_of_profile({"measured": {"arrivals": held}})
    # 11 is the P99 of Poisson(m), 2 m = 10.856: the 1 % point of chi-squared(24)
    assert traffic.peak_rps == pytest.approx(10.856 / 2, abs=1e-3)
    assert (traffic.mean_rps, traffic.history_s) == (4.0, WEEK_S)
    # variance of the counts 9.6 x 240, of which 240 are chance, over 240^2
    assert traffic.rate_cv == pytest.approx(math.sqrt(8.6 / 240))
    given = traffic_of_profile({"measured": {"arrivals": held}}, 20.0)
    assert given.peak_rps == 20.0
    # the shape of the profile: 4 / 5.428 of its peak on average
    assert given.mean_rps == pytest.approx(20 * 4 / 5.428, rel=1e-3)
    for bad in (
        {},
        {"measured": {}},
        {"measured": {"arrivals": {"mean_rps": 0, "rps_p99": 1}}},
        [],
        None,
    ):
        with pytest.raises(FleetError, match="no measured arrivals"):
            traffic_of_profile(bad)


def test_chance_is_not_counted_twice() -> None:
    # P99 of a second of Poisson(1.46) is 5, which an instance that carries a mean of 1.94 contains
    held: dict[str, Any] = {
        "mean_rps": 1.46,
        "rps_p99": 5.0,
        "span_s": WEEK_S,
        "dispersion": {"60s": 1.0},
    }
    traffic = traffic_of_profile({"measured": {"arrivals": held}})
    # chi-squared with 12 degrees of freedom, 1 % point
    assert traffic.peak_rps == pytest.approx(3.571 / 2, abs=1e-3)
    assert traffic.rate_cv == 0.0
    assert fleet_of(traffic, carried(1.94)).instances == 2  # 1 x 1.2
    held |= {"p99_rps": {"1s": 9.0, "10s": 3.4, "60s": 1.9}}  # 34 in 10 s: 70 degrees of freedom
    bursty = traffic_of_profile({"measured": {"arrivals": held}})
    assert bursty.peak_rps == pytest.approx(45.442 / 20, abs=1e-4)
    assert "windows of 10 s as the profile: 3.4; its mean is 1.46" in bursty.peak_reason


@pytest.mark.parametrize("seed", range(3))
def test_a_fitted_poisson_log_needs_no_fleet_for_its_chance(seed: int) -> None:
    rng = np.random.default_rng(seed)
    fitted = fit_arrivals(np.sort(rng.uniform(0, 7200, 10_512)))  # 1.46 requests/s for two hours
    traffic = traffic_of_profile({"measured": {"requests": 10_512, "arrivals": fitted}})
    assert 1.455 < traffic.peak_rps < 1.94
    slow = np.repeat([1.0, 3.0], 3600)  # an hour at 1/s, an hour at 3/s: P99 of the rate is 3
    seconds = np.repeat(np.arange(7200), rng.poisson(slow))
    fitted = fit_arrivals(np.sort(seconds + rng.random(len(seconds))))
    expected = pytest.approx(3, abs=0.2)
    assert traffic_of_profile({"measured": {"arrivals": fitted}}).peak_rps == expected


def test_a_profile_of_three_requests_is_refused() -> None:
    held = {"mean_rps": 4.0, "rps_p99": 11.0, "span_s": 0.5}
    with pytest.raises(FleetError, match="rests on 3 requests"):
        traffic_of_profile({"measured": {"requests": 3, "arrivals": held}})


def test_a_closed_loop_is_no_plan_without_a_warning(tmp_path: Path, plan: Command) -> None:
    # 10 users wait 0.5 s and think 0.5 s: 10/s, 5 in flight; 40 get the same 10/s, wait 3.5 s
    stages = []
    for number, (users, takes_s) in enumerate([(10, 0.5), (40, 3.5)]):
        records = [
            request(1000 * number + i, 200 * number + i * 0.1, stage=number, ttft_s=takes_s)
            for i in range(1000)
        ]
        stages.append(Stage(records, 100.0, 200.0 * number, concurrency=users))
    run = make_run(
        tmp_path / "run", stages, ["ttft_p90=1s"], warmup_requests=0, locked={"think_s": 0.5}
    )
    summary = summarise(run)
    capacity = summary["capacity"]
    assert (capacity["c_max"], capacity["users"], capacity["crossing"]) == (
        pytest.approx(5, rel=0.01),
        10,
        "saturated",
    )
    assert summary["littles_law"]["gap"] is None
    assert "the closed loop is saturated" in summary["littles_law"]["reason"]
    assert summary["verdict"].startswith("One instance carries at most 9.9")
    assert "C_max 4.99 in flight (10 users); users wait for the server" in summary["verdict"]
    _, out, _ = plan(tmp_path / "run", "--peak-rps", 35)
    assert out.startswith("at least 6 instances")  # 4 x 1.5
    assert "between" not in out
    assert "Warning: The capacity was found with a closed loop" in out
    unpaused = summarise(make_run(tmp_path / "same", stages, ["ttft_p90=1s"], warmup_requests=0))
    # users without a pause that are not in flight: what was measured counts
    assert (unpaused["capacity"]["c_max"], unpaused["capacity"]["users"]) == (
        pytest.approx(5, rel=0.01),
        10,
    )


def test_plan_reads_a_run_and_a_profile(tmp_path: Path, plan: Command) -> None:
    ten_per_second(tmp_path / "run")
    profile = tmp_path / "traffic.yaml"
    profile.write_text(
        "measured: {arrivals: {mean_rps: 20, rps_p99: 39, span_s: 1000000, dispersion: {60s: 1.0}}}"
    )
    by_profile = (tmp_path / "run", "--profile", profile)
    status, out, _ = plan(*by_profile, "--gpu-hour", 2, "--json")
    found: dict[str, Any] = json.loads(out)
    assert (status, found["instances_before_safety"], found["instances"]) == (0, 3, 4)
    assert found["peak_rps"] == pytest.approx(53.540 / 2, abs=1e-3)
    assert found["utilisation"] == pytest.approx(20 / 40, rel=0.01)
    # one token a request in the synthetic run, and 100 of input
    for side, tokens in (("output", 1), ("input", 100)):
        cost = found[f"fleet_cost_per_million_{side}_tokens"]
        assert cost == pytest.approx(8 / (20 * 3600 * tokens) * 1e6, rel=0.01)
    assert np.isfinite(found["fleet_cost_per_thousand_good_requests"])
    _, out, _ = plan(*by_profile, "--gpu-hour", 0.002)  # a thousandth of $8 / (20 x 3.6)
    assert re.search(r"\$0\.000111 for 1,000 good requests \(within the SLOs\)\n", out)
    assert "pooled" not in out
    assert "20 %: the rate varies by" in out


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "give the load of the fleet: --peak-rps R"),
        (["--peak-rps", "10", "--mean-rps", "11"], "--mean-rps 11: give a number above 0"),
        (["--peak-rps", "10", "--mean-rps", "1e-300"], "--mean-rps 1e-300: give a number above 0"),
        (["--peak-rps", "10", "--utilisation", "1e-300"], "--utilisation 1e-300: give a share"),
        # what is wrong is the flag, not the run
        (["--peak-rps", "1e-300"], "--peak-rps 1e-300: give a number from 1e-12 to 1e+12\n"),
        (["--peak-rps", "1e300"], "--peak-rps 1e+300: give a number from 1e-12 to 1e+12\n"),
        (
            ["--peak-rps", "10", "--safety", "1e300"],
            "--safety 1e+300: give a number from 1e-12 to 1e+12\n",
        ),
        (
            ["--peak-rps", "10", "--gpu-hour", "1e300"],
            "--gpu-hour 1e+300: give a number from 1e-12 to 1e+12\n",
        ),
    ],
)
def test_a_plan_of_nonsense_is_refused_in_one_line(
    arguments: list[str], error: str, tmp_path: Path, plan: Command
) -> None:
    ten_per_second(tmp_path / "run")
    status, _, err = plan(tmp_path / "run", *arguments)
    assert (status, err.count("\n")) == (2, 1)
    assert err.startswith(f"ampacity: {error}")


def test_at_the_capacity_as_many_requests_are_good_as_its_slos_demand(tmp_path: Path) -> None:
    """Interpolated over a cliff it would be half; ttft_p99 is met at the capacity: 99 % at least."""
    summary = full_summary(ten_per_second(tmp_path / "run"))
    (stage,) = summary.stages
    cliff = structs.replace(summary, stages=[structs.replace(stage, slo_attainment=0.5)])
    found = plan_fleet("run", cliff, Traffic(20.0), Terms(gpu_hour_usd=1.0, safety=1.0))
    good, any_ = (
        getattr(found, f"fleet_cost_per_thousand_{what}") for what in ("good_requests", "requests")
    )
    assert good == pytest.approx(any_ / 0.99)


def test_a_burst_names_no_capacity_to_plan_with(tmp_path: Path, plan: Command) -> None:
    lengths = {"base_s": 60.0, "burst_s": 20.0, "recovery_s": 40.0}
    ten_per_second(tmp_path / "run", burst={"base_rps": 10.0, "factor": 1.0, **lengths})
    status, _, err = plan(tmp_path / "run", "--peak-rps", 10)
    assert status == 2
    assert "a burst is no steady load, so it names no capacity" in err


def test_tokens_are_a_mean_over_all_answers_not_of_the_stage_at_the_limit(tmp_path: Path) -> None:
    # 10/s met with 1 token an answer; a short stage at 12/s of 4; one limited by the client of 50
    def stage(number: int, n: int, rps: float, tokens: int, start_s: float, **how: Any) -> Stage:
        rows = [
            request(
                2000 * number + i, start_s + i / rps, stage=number, gaps_s=[0.001] * (tokens - 1)
            )
            for i in range(n)
        ]
        return Stage(rows, n / rps, start_s, **how)

    stages = [
        stage(0, 1200, 10.0, 1, 0.0),
        stage(1, 300, 12.0, 4, 200.0),
        stage(2, 100, 20.0, 50, 400.0, client_limited=True),
    ]
    inputs = {"peak_rps": 100, "tensor_parallel": 2, "safety_factor": 1.2, "gpu_hour_usd": 3.0}
    summary = summarise(
        make_run(tmp_path / "run", stages, ["ttft_p99=1s"], warmup_requests=0, fleet_inputs=inputs)
    )
    fleet = summary["fleet"]
    assert (summary["capacity"]["capacity_rps"], summary["capacity"]["stage"]) == (
        pytest.approx(12),
        1,
    )
    assert (fleet["input_tokens_mean"], fleet["output_tokens_mean"]) == (
        100,
        pytest.approx((1200 + 4 * 300) / 1500),
    )
    # 2 GPUs x $3 = $6 an hour for 12/s x 1.6 tokens x 3600 s
    assert fleet["cost_per_million_output_tokens"] == pytest.approx(6 / (12 * 1.6 * 3600) * 1e6)


@pytest.mark.parametrize(
    ("facts", "gpus"),
    [
        ({}, 1),
        ({"locked": {"hardware": "4xH100"}}, 4),
        ({"locked": {"hardware": "8x7B", "tensor_parallel": "2"}}, 2),
        ({"locked": {"hardware": "4xH100"}, "fleet_inputs": {"tensor_parallel": 2}}, 2),
        ({"predicted": True, "endpoint": {"model": "llama3-70b@4xa100-80"}}, 4),
        ({"predicted": True, "endpoint": {"model": "llama3-8b-a100-80"}}, 1),
    ],
)
def test_a_plan_for_other_instances_than_the_one_measured_warns(
    facts: dict[str, Any], gpus: int, tmp_path: Path, plan: Command
) -> None:
    ten_per_second(tmp_path / "run", **facts)
    for tp, warned in ((None, False), (gpus, False), (gpus + 3, True)):
        given = [] if tp is None else ["--tp", tp]
        found = json.loads(plan(tmp_path / "run", "--peak-rps", 25, "--json", *given)[1])
        assert (found["gpu_hour_usd"], found["cost_per_hour"]) == (None, None)
        assert (found["instances"], found["gpus"]) == (5, 5 * (tp or gpus))  # ceil(3 x 1.5)
        assert ("other_instance" in [w["code"] for w in found["warnings"]]) == warned


def test_the_gpus_of_an_instance_are_those_that_were_locked() -> None:
    settings = {"url": "http://127.0.0.1:1/v1", "lock": ["hardware=4xH100"]}
    assert make_settings(settings).tp == 4
    assert make_settings(settings | {"tp": 2}).tp == 2
    assert make_settings(settings | {"lock": ["hardware=simulated L4"]}).tp == 1


def test_a_plan_shows_the_price_that_its_costs_rest_on(tmp_path: Path, plan: Command) -> None:
    ten_per_second(tmp_path / "run")
    # ceil(ceil(25 / 10) x 1.5) = 5 instances of 2 GPUs
    _, out, _ = plan(tmp_path / "run", "--peak-rps", 25, "--tp", 2, "--gpu-hour", 2.5)
    assert "  10 GPUs × $2.50/h (stated: --gpu-hour) = $25.00 an hour" in out


def test_a_plan_takes_what_the_run_was_given_unless_another_is(
    tmp_path: Path, plan: Command
) -> None:
    inputs = {"peak_rps": 95.0, "tensor_parallel": 2, "safety_factor": 1.5, "gpu_hour_usd": 3.0}
    summary = summarise(ten_per_second(tmp_path / "run", fleet_inputs=inputs))
    _, told, _ = plan(tmp_path / "run")
    # no stage broke: 10/s is the least that one carries, ceil(95 / 10) x 1.5 = 15 the most
    # 30 GPUs x $3 x 8,760 hours
    assert told.startswith(
        "at most 15 instances, 30 GPUs for 95 requests/s; at most $788,400 a year\n"
    )
    assert "  peak 95 requests/s (stated: as given at the run)\n" in told
    assert "  safety 1.5 (stated: as given at the run)\n" in told
    assert "30 GPUs × $3.00/h (stated: as given at the run) = $90.00 an hour" in told
    assert summary["verdict"].endswith(
        "; 95 req/s need at most 15 instances, 30 GPUs, with a safety factor of 1.5."
    )
    found = json.loads(plan(tmp_path / "run", "--json")[1])
    expected = {*("peak", "safety", "GPU-hour")}
    assert {i["name"] for i in found["inputs"] if i["source"] == "as given at the run"} == expected
    same = summary["fleet"]
    assert {k: found[k] for k in found.keys() & same.keys()} == {
        k: same[k] for k in found.keys() & same.keys()
    }
    others = ("--peak-rps", 20, "--safety", 1, "--gpu-hour", 2)
    _, other, _ = plan(tmp_path / "run", *others)
    assert other.startswith("at most 2 instances, 4 GPUs for 20 requests/s; ")
    assert "4 GPUs × $2.00/h (stated: --gpu-hour) = $8.00 an hour" in other
    assert "as given at the run" not in other


def test_arrivals_that_crowd_within_a_minute_are_a_warning(tmp_path: Path, plan: Command) -> None:
    ten_per_second(tmp_path / "run")
    profile = tmp_path / "traffic.yaml"
    # 3.4/s over 10 s: 2.27/s of Poisson arrivals, see above
    profile.write_text(
        "measured: {arrivals: {mean_rps: 1.46, rps_p99: 9, p99_rps: {10s: 3.4}, "
        "busy_hour: {rps: 1.9, rps_ci: [1.7, 2.1], window_s: 3600}}}"
    )
    found = json.loads(plan(tmp_path / "run", "--profile", profile, "--json")[1])
    assert (found["peak_rps"], found["peak_rps_ci"]) == (1.9, [1.7, 2.1])
    (crowded,) = [w["text"] for w in found["warnings"] if w["code"] == "crowded"]
    assert "as Poisson arrivals of 2.27 requests/s do, more than the busiest hour's 1.9" in crowded
