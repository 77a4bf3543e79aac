"""Worked cases of what users misread: coordinated omission, users, lengths of stages."""

import json
from pathlib import Path

import numpy as np
import pytest

from ampacity.analysis.contract.summary import read_summary
from ampacity.analysis.decision.guardrails import guardrails
from ampacity.analysis.load_names import load_name
from ampacity.analysis.metrics.observations import Observations
from ampacity.analysis.metrics.percentiles import groups, percentiles
from ampacity.analysis.stats.intervals import memory_of
from ampacity.reports.pages.limits import rails_of
from tests.support import sample_summary
from tests.support.args import Command
from tests.support.contract import summarise
from tests.support.synthetic import Stage, cohort, make_run, request


def test_coordinated_omission_of_a_stall_of_100_seconds() -> None:
    """Tene's example: 100 requests/s of 1 ms for 100 s, nothing for 100 s, then the backlog."""
    quick = [request(i, 0.01 * i, ttft_s=0.001) for i in range(10_000)]
    # due 100.00 to 199.99 s, answered when the stall ends: latencies of 100, 99.99 ... 0.01 s
    late = [
        request(10_000 + i, 100 + 0.01 * i, ttft_s=0.001, start_delay_s=100 - 0.01 * i - 0.001)
        for i in range(10_000)
    ]
    c = cohort(*quick, *late)
    from_schedule, from_send = (percentiles(c.ttft(from_schedule=which)) for which in (True, False))
    assert from_schedule.mean == pytest.approx(25.003, abs=1e-3)
    assert [from_schedule.p50, from_schedule.p99] == pytest.approx([0.001, 98.0], abs=0.0101)
    assert c.ttft(from_schedule=True).quantile_bounds(0.75)[0] == pytest.approx(50.0, abs=0.0101)
    assert from_send.p99 == pytest.approx(0.001)  # what a closed loop would have told


def test_fault_72_users_who_think_are_not_requests_in_flight(tmp_path: Path) -> None:
    """1,000 users who think 0.75 s between answers of 0.25 s: 250 in flight, not 1,000."""
    records, number = [], 0
    for turn in range(8):
        for user in range(1000):
            records.append(
                request(
                    number,
                    turn + user / 1000,
                    ttft_s=0.125,
                    gaps_s=[0.125],
                    session_id=f"0-{user}",
                    turn=turn,
                )
            )
            number += 1
    stage = Stage(records, 8.0, concurrency=1000, extra={"sessions": {"begun": 1000, "cut": []}})
    found = summarise(make_run(tmp_path / "run", [stage], ["e2e_p90=1s"], warmup_requests=1000))
    (figures,), (sessions,) = found["stages"], found["sessions"]["stages"]
    assert figures["concurrency"] == pytest.approx(250, rel=0.01)
    assert figures["concurrency_max"] == pytest.approx(250, abs=1)
    assert sessions["concurrent"]["max"] == 1000
    # and "in flight" is a column of its own
    assert load_name(figures["offered_rps"], figures["concurrency_set"]) == "1,000 users"


def test_fault_32_each_stage_of_a_sweep_has_its_own_length(
    tmp_path: Path, command: Command
) -> None:
    run = tmp_path / "run"
    command(
        "predict --preset linear:0.01,0.0001,max_num_seqs=64 --input-tokens 10 --output-tokens 20 "
        "--concurrency 1,64 --duration 30s --warmup 0 --out",
        run,
    )
    one, many = json.loads((run / "summary.json").read_text())["stages"]
    assert [one["concurrency_set"], many["concurrency_set"]] == [1, 64]
    for stage in (one, many):
        assert stage["window"]["end_s"] == pytest.approx(30, rel=0.02)
    # C users of a step of 10 + 0.1 C ms and 20 tokens: C/(0.2 + 0.002 C) requests/s
    assert one["requests"] == pytest.approx(30 / 0.202, rel=0.02)
    assert many["requests"] == pytest.approx(30 * 64 / 0.328, rel=0.02)


def test_what_a_queue_remembers_bounds_what_a_run_has_seen() -> None:
    """A count in flight that changes every 200 requests has a memory of 200 requests."""
    rng = np.random.default_rng(13)
    memory = memory_of(np.repeat(rng.exponential(100, 4000), 200))
    assert memory == pytest.approx(200, rel=0.1)
    assert memory_of(rng.poisson(100.0, 20_000).astype(float)) == pytest.approx(1.0, abs=0.1)

    def upper_end(n: int, memory: float | None) -> float:
        values = rng.exponential(size=n)  # the latencies themselves show nothing of it
        o = Observations(
            "requests", values, np.arange(n), None, np.zeros(n), np.full(n, np.nan), memory=memory
        )
        return o.confidence_interval(0.99)[1]

    assert np.isfinite(upper_end(5_000, None))
    assert np.isnan(upper_end(5_000, memory))  # 50 slow ones to expect, in clusters of 600
    assert np.isfinite(upper_end(100_000, memory))


def test_groups_that_no_stage_sees_whole_have_no_size() -> None:
    n = 248
    o = Observations("requests", np.ones(n), np.arange(n), None, np.zeros(n), np.full(n, np.nan))
    assert groups(o, 60.4) == "slow requests come in groups of about 60"
    assert groups(o, 3535.0) == "slow requests come in groups longer than the stage"


@pytest.mark.parametrize(
    ("wait_s", "queue", "total"), [(1.9, 10, "43 to 44"), (10, 54, "78 to 83")]
)
def test_limits_stand_in_the_order_in_which_they_act(wait_s: float, queue: int, total: str) -> None:
    """C_max 34.2 at 5.4 req/s: 35 in flight; 10 more may wait in 1.9 s, 54 in 10 s. Waiting in the
    engine as well would spend that time twice.
    """
    rails = guardrails(read_summary(sample_summary.open_sweep()), wait_budget_s=wait_s)
    shown = {rail.name: rail for rail in rails_of(rails)}
    order = ["requests in flight", "circuit breaker", "queue", "add an instance"]
    assert [name for name in shown if name in order] == order
    values = [shown[name].value for name in ("requests in flight", "queue")]
    assert values == ["at most 35", f"at most {queue} waiting"]
    assert (
        shown["circuit breaker"].why
        == f"80 to 90 % of the queue, before that is full; {total} requests with those in flight"
    )


@pytest.mark.parametrize(
    ("instances", "more"), [(23, ""), (22, "; the peak then takes 23 instances")]
)
def test_a_rate_that_needs_more_instances_than_the_fleet_has_says_so(
    instances: int, more: str
) -> None:
    """120/s at 5.4/s each: 22.2, so 23."""
    given = sample_summary.open_sweep()
    given["fleet"] |= {"instances": instances}
    summary = read_summary(given)
    rate, *_ = rails_of(guardrails(summary), summary.fleet)
    assert (rate.name, rate.why) == ("rate", f"the low end of the knee region{more}")


@pytest.mark.parametrize(
    ("c_max_ci", "why"),
    [
        ([24.0, None], "C_max is a lower bound: no load violated an SLO"),
        ([24.0, 48.1], "C_max is known too roughly (24 to 48.1): longer stages tell more"),
        ([24.0, 48.0], None),
        (None, None),
    ],
)
def test_a_rough_c_max_limits_nothing(c_max_ci: list[float | None] | None, why: str | None) -> None:
    """Such a limit would refuse what the instance carries; nor is there a queue before it."""
    given = sample_summary.open_sweep()
    given["capacity"] |= {"c_max_ci": c_max_ci}
    rails = guardrails(read_summary(given))
    assert rails.missing.get("concurrency_limit") == why
    known = (rails.concurrency_limit, rails.queue_depth, rails.breaker, rails.scale_in_flight)
    assert known == ((None, None, None, None) if why else (35, 10, (8, 9), 28))
