"""From a usable rate to instances and cost: worked values."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import Stage, make_run, request

from ampacity.cli import main
from analysis.fleet import Carried, FleetError, Traffic, choose_safety, plan_fleet, traffic_of_profile

WEEK_S = 7 * 86_400.0


def carried(usable: float = 10.0, low: float | None = 9.0, high: float | None = 12.0) -> Carried:
    return Carried(usable, (low, high), input_tokens=1000.0, output_tokens=200.0, good_share=0.99)


def test_the_interval_is_carried_through_to_instances() -> None:
    plan = plan_fleet(Traffic(120.0), carried(), tensor_parallel=4, safety=1.2)
    # 120/10 = 12, x 1.2 = 14.4 -> 15; at 9/s: 14 x 1.2 = 16.8 -> 17; at 12/s: 10 x 1.2 = 12
    assert (plan["instances_before_safety"], plan["instances"], plan["gpus"]) == (12, 15, 60)
    assert plan["instances_ci"] == [12, 17]
    assert (plan["one_replica_down"], plan["one_replica_down_gpus"]) == (15, 60)
    assert plan["gpu_hours_per_day"] == 24 * 60
    assert plan_fleet(Traffic(120.0), carried(high=None), safety=1.2)["instances_ci"] == [None, 17]
    assert plan_fleet(Traffic(20.0), carried(), safety=1.0)["one_replica_down"] == 3


def test_half_the_utilisation_is_twice_the_cost_of_a_token() -> None:
    # five instances at 10/s carry 50/s: 20/s is 40 %, 40/s is 80 %
    at = {
        mean: plan_fleet(Traffic(50.0, mean_rps=mean), carried(), 2, safety=1.0, gpu_hour_usd=3.0)
        for mean in (20.0, 40.0)
    }
    assert [at[m]["utilisation"] for m in (20.0, 40.0)] == pytest.approx([0.4, 0.8])
    for name in (
        "cost_per_million_output_tokens",
        "cost_per_million_input_tokens",
        "cost_per_million_tokens",
        "cost_per_good_request",
    ):
        assert at[20.0][name] == pytest.approx(2 * at[40.0][name])
    # 10 GPUs x $3 = $30 an hour; 40/s x 200 tokens x 3600 s = 28.8 million output tokens
    assert at[40.0]["cost_per_million_output_tokens"] == pytest.approx(30 / 28.8)
    assert at[40.0]["cost_per_million_input_tokens"] == pytest.approx(30 / 144)
    assert at[40.0]["cost_per_million_tokens"] == pytest.approx(30 / 172.8)
    assert at[40.0]["cost_per_good_request"] == pytest.approx(30 / (40 * 3600 * 0.99))


def test_safety_follows_variance_and_history_and_says_why() -> None:
    steady = Traffic(120.0, 100.0, rate_cv=0.1, history_s=2 * WEEK_S)
    assert choose_safety(steady) == (
        1.2,
        "20 %: the rate varies by 10 % (coefficient of variation over windows of up to a minute), over 14 days of history",
    )
    factor, why = choose_safety(Traffic(120.0, 100.0, rate_cv=0.6, history_s=2 * WEEK_S))
    assert factor == 1.5
    assert "60 %" in why
    factor, why = choose_safety(Traffic(120.0, 100.0, rate_cv=0.1, history_s=3 * 3600.0))
    assert factor == 1.5
    assert "do not show a week" in why
    factor, why = choose_safety(Traffic(120.0))
    assert factor == 1.2
    assert "nothing is known" in why
    assert plan_fleet(Traffic(120.0), carried(), safety=1.37)["safety_factor"] == 1.37


def test_a_profile_gives_peak_mean_and_variance() -> None:
    held = {"mean_rps": 4.0, "rps_p99": 11.0, "span_s": WEEK_S, "dispersion": {"1s": 2.0, "60s": 9.6}}
    traffic = traffic_of_profile({"measured": {"arrivals": held}})
    assert (traffic.peak_rps, traffic.mean_rps, traffic.history_s) == (11.0, 4.0, WEEK_S)
    # variance of the counts 9.6 x 240, over 240^2: 0.04
    assert traffic.rate_cv == pytest.approx(math.sqrt(0.04))
    assert traffic_of_profile({"measured": {"arrivals": held}}, 20.0).peak_rps == 20.0
    for bad in ({}, {"measured": {}}, {"measured": {"arrivals": {"mean_rps": 0, "rps_p99": 1}}}, [], None):
        with pytest.raises(FleetError, match="no measured arrivals"):
            traffic_of_profile(bad)  # type: ignore[arg-type]


def test_plan_reads_a_run_and_a_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = Stage([request(i, i * 0.1) for i in range(1200)], 120.0, offered_rps=10.0)
    make_run(tmp_path / "run", [stage], ["ttft_p99=1s"], warmup_requests=0)
    profile = tmp_path / "traffic.yaml"
    profile.write_text(
        "measured: {arrivals: {mean_rps: 20, rps_p99: 41, span_s: 1000000, dispersion: {60s: 1.0}}}\n",
        encoding="utf-8",
    )

    def plan(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["ampacity", "plan", str(tmp_path / "run"), *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0)

    assert plan("--profile", str(profile), "--gpu-hour", "2", "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (found["peak_rps"], found["instances_before_safety"], found["instances"]) == (41.0, 5, 6)
    assert found["utilisation"] == pytest.approx(20 / 60, rel=0.01)
    # one token a request in the synthetic run, and 100 of input
    assert found["cost_per_million_output_tokens"] == pytest.approx(12 / (20 * 3600) * 1e6, rel=0.01)
    assert found["cost_per_million_input_tokens"] == pytest.approx(12 / (20 * 3600 * 100) * 1e6, rel=0.01)
    assert plan("--profile", str(profile)) == 0
    assert "20 %: the rate varies by" in capsys.readouterr().out
    assert plan() == 2
    assert "--peak-rps" in capsys.readouterr().err
    assert plan("--peak-rps", "10", "--mean-rps", "11") == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert np.isfinite(found["cost_per_good_request"])
