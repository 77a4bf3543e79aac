"""Tiers, pools and guardrails: worked values, and ``plan --tier``."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ampacity.analysis.capacity.fleet import Traffic, queue_depth
from ampacity.analysis.decision.guardrails import breaker_of
from ampacity.analysis.decision.model import DecisionError
from ampacity.analysis.decision.tiers import Mode, TierPlan, slow_replica_share, tier_traffic
from tests.support.synthetic import Stage, make_run, request


@pytest.mark.parametrize(
    ("shares", "mode", "peaks"),
    [
        ((1.0,), "routing", (120,)),
        ((0.8, 0.2), "routing", (96, 24)),
        ((0.8, 0.2), "cascade", (120, 24)),
        ((0.5, 0.3, 0.2), "cascade", (120, 60, 24)),  # what is passed on passes the next tier
        ((1.0, 1.0), "pools", (120, 120)),
    ],
)
def test_what_each_tier_carries(
    shares: Sequence[float], mode: Mode, peaks: Sequence[float]
) -> None:
    traffic = tier_traffic(Traffic(120, 60, peak_rps_ci=(100, 140)), shares, mode)
    assert [one.peak_rps for one in traffic] == pytest.approx(peaks)
    assert [one.mean_rps for one in traffic] == pytest.approx([peak / 2 for peak in peaks])
    assert traffic[-1].peak_rps_ci == pytest.approx((100 / 120 * peaks[-1], 140 / 120 * peaks[-1]))


@pytest.mark.parametrize(
    ("shares", "mode", "message"),
    [
        ((0.8,), "routing", "sum to 0.8, not to 1"),
        ((0.8, 0.3), "cascade", "sum to 1.1, not to 1"),
        ((0.5, 0.5), "pools", "each share is 1 with --mode pools"),
    ],
)
def test_shares_that_do_not_fit(shares: Sequence[float], mode: Mode, message: str) -> None:
    with pytest.raises(DecisionError, match=message):
        tier_traffic(Traffic(120), shares, mode)


def test_one_slow_replica_of_eight() -> None:
    assert slow_replica_share(8) == 0.125


def test_queue_and_breaker() -> None:
    """2 s x 50/s = 100; a breaker at 80 to 90. Of one request 80 % are none."""
    assert queue_depth(50, 2) == 100
    assert [breaker_of(depth) for depth in (100, 2, 1)] == [(80, 90), (1, 1), None]


def run_at(path: Path, rate_rps: float, **facts: Any) -> Path:
    """A run whose one stage carries ``rate_rps``, the least that an instance does."""
    n = int(120 * rate_rps)
    stage = Stage([request(i, i / rate_rps) for i in range(n)], 120.0, offered_rps=rate_rps)
    make_run(path, [stage], ["ttft_p99=1s"], warmup_requests=0, **facts)
    return path


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def plan(
    tmp_path: Path, ampacity: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> Command:
    """Run ``ampacity plan`` on runs of 12/s (small), 10/s (large) and a virtual one."""
    run_at(tmp_path / "small", 12.0)
    run_at(tmp_path / "large", 10.0)
    run_at(tmp_path / "virtual", 10.0, predicted=True)

    def call(*arguments: object) -> tuple[int, str, str]:
        words = [str(a).replace("RUNS", str(tmp_path)) for a in arguments]
        return (int(ampacity("plan", *words, "--summary", "full") or 0), *capsys.readouterr())

    return call


TWO = ("--tier", "small=RUNS/small,80%,l4,1", "--tier", "large=RUNS/large,0.2,4xH100,3")


def test_routing_gives_each_tier_its_share(plan: Command) -> None:
    """96/s on 12: 8 x 1.2 = 10 of one GPU at $1; 24/s on 10: 3 x 1.2 = 4 of 4 GPUs at $3.

    $10 + $48 an hour for 120/s all day: 1,000 x 58 / 432,000 of a dollar."""
    status, out, _ = plan(*TWO, "--peak-rps", 120, "--safety", 1.2, "--json")
    found = json.loads(out)
    small, large = (tier["plan"] for tier in found["tiers"])
    assert (status, small["peak_rps"], small["instances"], small["gpus"]) == (0, 96, 10, 10)
    assert (large["peak_rps"], large["instances"], large["gpus"]) == (24, 4, 16)
    assert msgspec.convert(found, TierPlan).tiers[1].gpu == "4xH100"
    assert (found["instances"], found["gpus"], found["cost_per_hour"]) == (14, 26, 58)
    assert found["cost_per_year"] == 58 * 8760
    assert found["cost_per_thousand_requests"] == pytest.approx(1000 * 58 / 432_000)
    # 4 of 14 instances get 28.6 % behind a round robin
    (warned,) = found["warnings"]
    assert warned["code"] == "mixed_tiers"
    assert "send 28.6 % of the requests to large (its share is 20 %)" in warned["text"]


def test_a_cascade_sends_all_of_the_peak_to_the_first_tier(plan: Command) -> None:
    """120/s on 12: 10 x 1.2 = 12; 24/s on 10 as above. $12 + $48 for the 120/s that ask."""
    given = (*TWO, "--peak-rps", 120, "--safety", 1.2, "--mode", "cascade")
    found = json.loads(plan(*given, "--json")[1])
    assert [tier["plan"]["instances"] for tier in found["tiers"]] == [12, 4]
    assert found["cost_per_thousand_requests"] == pytest.approx(1000 * 60 / 432_000)
    assert found["warnings"] == []
    out = plan(*given)[1]
    assert out.startswith(
        "at most 16 instances, 28 GPUs for 120 requests/s (cascade); at most $525,600 a year, "
    )


def test_one_plan_names_the_load_of_its_costs_and_its_spare_instances_once(plan: Command) -> None:
    """110/s on 12: 10 instances, 1.2 times that 12: 110/s are 76 % of 144; $1 an instance."""
    out = " ".join(
        plan("RUNS/small", "--peak-rps", 110, "--safety", 1.2, "--gpu-hour", 1)[1].split()
    )
    assert "5 ways to express the same cost at 76 % mean load: $30.30 for a million output" in out
    assert out.count("spare") == 1
    assert "2 of 12 are spare: the peak is carried while one is down" in out
    assert "if this were 20 % lower / higher instances" in out
    none = " ".join(plan("RUNS/small", "--peak-rps", 110, "--safety", 1)[1].split())
    assert "none is spare: to carry the peak while one is down, have 11 instances (11 GPUs)" in none


def test_pools_of_a_disaggregated_fleet(plan: Command) -> None:
    """120/s: 10 x 1.3 = 13 for prompts, 12 x 1.3 = 16 (15.6) for decoding."""
    pools = [text.replace("80%", "1").replace("0.2", "1") for text in TWO]
    _, out, _ = plan(*pools, "--peak-rps", 120, "--safety", 1.3, "--mode", "pools")
    assert "  P:D ratio 13:16 = 0.812\n" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*TWO[:2], "--peak-rps", 9), "the shares of the tiers sum to 0.8, not to 1"),
        (("--tier", "v=RUNS/virtual,1,l4,1", "--peak-rps", 9), "predicted: a tier needs a measur"),
        (("--tier", "n=RUNS/small,170%,l4,1", "--peak-rps", 9), "share 1.7 is not above 0"),
        (("--tier", "n=RUNS/none,1,l4,1", "--peak-rps", 9), "none is no run directory"),
        (("--tier", "n=RUNS/small,1,l4", "--peak-rps", 9), "write NAME=RUN,SHARE,GPU,PRICE"),
        (("--tier", "n=RUNS/small,2,l4,1", "--peak-rps", 9), "share 2 is not above 0 and at most"),
        (("--tier", "n=RUNS/small,1,l4,nan", "--peak-rps", 9), "--tier n: price nan: give a num"),
        ((*TWO, *TWO, "--peak-rps", 9), "--tier small: the name stands twice"),
        (TWO, "give the load of the fleet"),
        ((*TWO, "--peak-rps", 9, "--mode", "random"), "--mode random: none of routing, cascade"),
        ((*TWO, "--peak-rps", 9, "--gpu-hour", 2), "--gpu-hour is part of --tier"),
        (("RUNS/small", *TWO), "give a run directory, or a --tier"),
        ((), "give a run directory, or a --tier"),
        (("RUNS/small", "--peak-rps", 9, "--mode", "cascade"), "--mode is about tiers"),
        (("RUNS/small", "--peak-rps", 9, "--accepted", 1.5), "--accepted 1.5: give a share"),
        (
            ("RUNS/small", "--peak-rps", 9, "--utilisation", 0.4, "--mean-rps", 3),
            "--mean-rps and --utilisation exclude each other",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(
    arguments: Sequence[object], message: str, plan: Command
) -> None:
    status, _, err = plan(*arguments)
    assert (status, err.count("\n")) == (2, 1)
    assert message in err
