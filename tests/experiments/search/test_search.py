"""The search: its decisions on hand-made stages, its estimate on a queue with a known capacity, its
stages ended early.
"""

import asyncio
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ampacity.analysis.capacity.levels import level_of, open_levels
from ampacity.analysis.capacity.limit import find_capacity
from ampacity.analysis.capacity.next_load import (
    Finished,
    Goal,
    Step,
    cut_short,
    is_decided,
    next_step,
    so_far,
)
from ampacity.analysis.capacity.pooled import Estimate, _binding, estimate
from ampacity.analysis.capacity.posterior import Posterior
from ampacity.analysis.capacity.search import shortfall
from ampacity.analysis.contract.capacity import Search as SearchFound
from ampacity.analysis.slo import Slo, parse_slos
from ampacity.loadgen.drive.stage import StageRunner
from ampacity.loadgen.net.http import Client
from ampacity.loadgen.plan import StagePlan
from ampacity.loadgen.send.endpoint import parse_endpoint
from tests.support.contract import on_stages, struct_of
from tests.support.servers.fault_server import FaultServer
from tests.support.stage_driving import plain, schedule_at

level_of, open_levels, find_capacity, cut_short, is_decided, next_step, so_far = (
    on_stages(f)
    for f in (level_of, open_levels, find_capacity, cut_short, is_decided, next_step, so_far)
)

SLOS = parse_slos(["ttft_p95=1s"])
GOAL = Goal(tuple(SLOS), 0.05, 1.0)


def stage(
    load: float,
    attainment: float,
    *,
    n: int = 4000,
    effective: int = 800,
    stable: bool = True,
    limited: bool = False,
    met: bool | None = None,
    index: int = 0,
    concurrency: float | None = None,
) -> dict[str, Any]:
    return {
        "index": index,
        "kind": "open",
        "offered_rps": load,
        "requests": n,
        "client_limited": limited,
        "ended_early": None,
        "stable": stable,
        "stable_reason": None if stable else "it kept growing",
        "slo_met": met if stable else False,
        "slo_met_reason": None,
        "concurrency": 2 * load if concurrency is None else concurrency,
        "achieved_rps": load,
        "arrived_rps": load,
        "carried_rps": load,
        "window": {"warmup_requests": 0, "end_s": n / load},
        "slo_verdicts": [
            {
                "slo": "ttft_p95=1s",
                "value_s": 1.0,
                "attainment": attainment,
                "requests_effective": effective,
            }
        ],
    }


def true_share(load: float, x_star: float = 10.0, slope: float = 20.0) -> float:
    """Within the limit when the log-odds of a miss rise by ``slope`` per ln(load) and 95 % hold at
    ``x_star``."""
    return 1 / (1 + math.exp(math.log(0.05 / 0.95) + slope * math.log(load / x_star)))


def next_stage(stages: list[dict[str, Any]], goal: Goal) -> Step:
    found = next_step(stages, goal)
    assert isinstance(found, Step)
    return found


def end_of(stages: list[dict[str, Any]], goal: Goal) -> Finished:
    found = next_step(stages, goal)
    assert isinstance(found, Finished)
    return found


def estimated(stages: list[dict[str, Any]], slos: list[Slo] = SLOS) -> Estimate:
    found = estimate(open_levels(stages), slos)
    assert found is not None
    return found


def test_it_doubles_until_something_breaks_and_halves_until_something_holds() -> None:
    first = next_stage([], GOAL)
    assert (first.load_rps, first.requests) == (1.0, 60)  # three misses allowed at p95
    up = next_stage([stage(1, 1.0), stage(2, 0.99)], GOAL)
    assert up.load_rps == 4.0
    down = next_stage([stage(1, 0.5)], GOAL)
    assert down.load_rps == 0.5
    assert down.why == "1 requests/s seem too many"  # not decided
    broken = next_stage([stage(1, 0.5, met=False)], GOAL)
    assert broken.why == "1 requests/s are too many"
    lowest = [stage(2.0**-k, 0.1) for k in range(9)]
    assert isinstance(next_step(lowest, GOAL), Finished)


def test_one_late_request_of_few_does_not_end_the_search() -> None:
    again = next_stage([stage(8.2, 1.0, n=27, limited=True)], GOAL)
    assert (again.load_rps, again.requests) == (8.2, 600)
    end = end_of([stage(8.2, 1.0, n=27, limited=True), stage(8.2, 1.0, n=600, limited=True)], GOAL)
    assert end.why == "the client could not keep up with 8.2 requests/s"


def test_an_slo_that_no_stage_measures_ends_the_search_and_names_no_capacity() -> None:
    slos = tuple(parse_slos(["ttft_p95=1s", "itl_p95=50ms"]))
    blank = json.loads("""{"slo": "itl_p95=50ms", "value_s": null, "attainment": null,
        "requests_effective": 0, "reason": "chunks hold several tokens"}""")
    short, met, broken = (
        s | {"slo_verdicts": [*s["slo_verdicts"], blank]}
        for s in (stage(4, 1.0, n=59), stage(4, 1.0, n=60), stage(16, 0.5))
    )
    assert isinstance(next_step([short], Goal(slos)), Step)  # too few requests to know
    for stages in ([met], [met, broken]):
        end = end_of(stages, Goal(slos))
        assert end.why.endswith("all SLOs are met (itl_p95=50ms: chunks hold several tokens)")
        assert not end.reached
        assert estimate(open_levels(stages), slos) is None


def test_between_both_it_goes_where_the_limit_is_and_asks_for_what_the_interval_lacks() -> None:
    stages = [stage(4, true_share(4)), stage(8, true_share(8)), stage(16, true_share(16))]
    step = next_stage(stages, GOAL)
    assert 8 < step.load_rps < 14
    for load in (9.6, 10.2, 9.9, 10.4, 10.0):
        stages.append(stage(load, true_share(load), n=40_000, effective=20_000))
    done = end_of(stages, GOAL)
    assert done.reached
    found = estimated(stages)
    assert found.capacity_rps == pytest.approx(10.0, rel=0.01)
    assert found.capacity_rps_ci[0] < 10 < found.capacity_rps_ci[1]
    assert found.c_max == pytest.approx(20.0, rel=0.02)  # two in flight for each request/s
    tenth = [
        s | {"requests": 400, "slo_verdicts": [s["slo_verdicts"][0] | {"requests_effective": 40}]}
        for s in stages
    ]
    few = estimated(tenth)
    assert few.relative_error > 2 * found.relative_error


def test_short_stages_on_both_sides_have_the_next_one_between_them() -> None:
    short = [
        stage(4, 1.0, n=60, effective=20),
        stage(8, 1.0, n=60, effective=20),
        stage(16, 0.2, n=60, effective=5),
    ]
    step = next_stage(short, GOAL)
    assert 8 < step.load_rps < 16
    # the load arrives for 1 s (the limit) and spends 2 s in flight: an overload as large as what is
    # not known
    # yet of the limit, three times over
    found = estimated(short)
    assert step.requests >= 3 * 3 * step.load_rps / min(found.relative_error, 1)


def test_the_slope_is_found_and_says_how_far_from_the_limit_the_next_load_is() -> None:
    stages = [
        stage(x, true_share(x), n=20_000, effective=10_000) for x in (5, 9.5, 9.8, 10.2, 10.4, 16)
    ]
    stages[3]["requests"] = 21_000  # so that the side below has seen less
    found = estimated(stages)
    # of ln p, which the law's log-odds near 0.05 to 0.5 rise faster than
    assert found.slope == pytest.approx(16.0, rel=0.2)
    step = next_stage(stages, Goal(tuple(SLOS), 0.0001, 1.0))
    assert step.load_rps == pytest.approx(found.capacity_rps * (1 - 0.7 / found.slope), rel=1e-3)


def test_one_estimate_of_two_slos_is_that_of_the_tighter() -> None:
    slos = parse_slos(["ttft_p95=1s", "e2e_p95=5s"])
    stages = []
    for load in (4, 8, 9, 10, 11, 16):
        both = stage(load, true_share(load, 12.0), n=40_000, effective=20_000)
        other = {
            "slo": "e2e_p95=5s",
            "value_s": 1.0,
            "attainment": true_share(load, 9.0),
            "requests_effective": 20_000,
        }
        both["slo_verdicts"].append(other)
        stages.append(both)
    found = estimated(stages, slos)
    assert found.capacity_rps == pytest.approx(9.0, rel=0.02)
    assert [slo.text for slo in found.binding] == ["e2e_p95=5s"]


def uniform(low: float, high: float) -> Posterior:
    return Posterior(np.linspace(low, high, 101), np.linspace(0, 1, 101))


@pytest.mark.parametrize(
    ("low", "named"),
    [
        (0.5, ["ttft_p95=1s", "e2e_p95=5s"]),
        (0.6, ["ttft_p95=1s"]),
    ],  # the second is the lower one with 0.5²/2 and 0.4²/2
)
def test_every_slo_that_may_be_the_first_to_break_is_named(low: float, named: list[str]) -> None:
    ttft, e2e = parse_slos(["ttft_p95=1s", "e2e_p95=5s"])
    found = {e2e: uniform(low, low + 1), ttft: uniform(0, 1)}
    assert [slo.text for slo in _binding([], found)] == named
    over = {"slo": "e2e_p95=5s", "value_s": 5.1, "attainment": 0.94, "requests_effective": 800}
    seen = [stage(10, 0.96), stage(11, 0.96), stage(12, 0.9)]
    seen[1]["slo_verdicts"].append(over)  # at 11/s it is over, ttft only at 12/s
    assert _binding(open_levels(seen), found)[0].text == (named[-1])
    seen[1]["requests"] = 50  # which shows nothing
    assert _binding(open_levels(seen), found)[0].text == "ttft_p95=1s"


def test_the_stage_of_a_search_is_the_nearest_that_measures_something() -> None:
    stages = [
        stage(x, true_share(x), n=n, index=i)
        for i, (x, n) in enumerate([(4, 300), (9.5, 4000), (10.1, 30), (16, 300)])
    ]
    found = find_capacity(stages, SLOS)
    # the limit is at 10, where only 30 requests were sent
    assert (found.crossing, found.stage) == ("pooled", 1)
    few = [{**s, "requests": 30} for s in stages]
    assert find_capacity(few, SLOS).stage is None


def test_an_answer_that_does_not_fall_with_the_load_is_run_again_and_then_refused() -> None:
    stages = [stage(8, 0.80, met=False), stage(10, 0.99, met=True), stage(20, 0.2, met=False)]
    again = next_stage(stages, GOAL)
    assert again.load_rps == 8
    assert "once more" in again.why
    stages.append(stage(8, 0.82, met=False))
    higher = next_stage(stages, GOAL)
    assert higher.load_rps == 10
    stages.append(stage(10, 0.985, met=True))
    refused = end_of(stages, GOAL)
    assert "twice each" in refused.why
    numbered = [s | {"index": i} for i, s in enumerate(stages)]
    found = find_capacity(numbered, SLOS)
    assert found.non_monotone is True
    assert found.crossing != "pooled"
    # where the second look agrees with the rest, it was chance
    assert isinstance(next_step([*stages[:3], stage(8, 0.99, met=True)], GOAL), Step)


def test_a_lucky_short_stage_names_no_capacity_where_every_load_misses_the_same() -> None:
    """A fifth of the requests misses at 1, 2 and 8/s: odds of 1/4 at no load too, and 1/19 are
    allowed. 20 at 4/s had luck."""
    same = [stage(load, 0.8, met=False, index=i) for i, load in enumerate((1, 2, 8))]
    lucky = stage(4, 1.0, n=20, effective=20, index=3)
    end = end_of([*same, lucky], GOAL)
    assert end.why.startswith(
        "no load can meet ttft_p95=1s: 20 % of the requests miss it at a load of 1 and 20 % at 8"
    )
    found = find_capacity([*same, lucky], SLOS)
    assert (found.capacity_rps, found.reason) == (None, end.why)
    assert found.non_monotone is False  # no load is shown to hold
    rising = [stage(x, true_share(x), n=2000, effective=700) for x in (3, 8.5, 9.6, 10.3, 12, 24)]
    assert isinstance(next_step(rising, GOAL), Step)


def test_a_client_that_cannot_keep_up_ends_it() -> None:
    ended = end_of([stage(1, 1.0), stage(2, 1.0, limited=True)], GOAL)
    assert "could not keep up" in ended.why


def test_three_stages_in_a_row_of_a_client_that_was_held_up_end_it() -> None:
    """Their queues grew, so that the endpoint may have been the limit: two are tried again."""
    known = [stage(4, 1.0), stage(8, 0.9)]
    late = [stage(6, 0.5, limited=True, stable=False) for _ in range(3)]
    assert isinstance(next_step([*known, *late[1:]], GOAL), Step)
    assert isinstance(next_step([*late, *known], GOAL), Step)
    ended = end_of([*known, *late], GOAL)
    assert ended.why == (
        "the client could not keep up in 3 stages in a row, the last at 6 requests/s"
    )


def test_a_stage_on_its_way_is_ended_when_it_is_clear() -> None:
    known = [stage(4, 1.0), stage(8, 0.99)]
    assert "clearly broken" in str(is_decided([], stage(16, 0.5, n=200, effective=50), GOAL))
    assert "no steady state" in str(is_decided(known, stage(16, 0.9, stable=False), GOAL))
    # nothing was measured between 8 and 16, so the limit may be anywhere between
    assert "clearly broken" in str(is_decided(known, stage(16, 0.5, n=200, effective=50), GOAL))
    assert is_decided([], stage(16, 0.93, n=200, effective=50), GOAL) is None
    sure = [stage(x, true_share(x), n=40_000, effective=20_000) for x in (4, 9.6, 10.2, 20)]
    assert "elsewhere" in str(
        is_decided(sure, stage(14, true_share(14)), GOAL)
    ) or "known to" in str(is_decided(sure, stage(14, true_share(14)), GOAL))
    assert is_decided([], stage(4, 1.0) | {"slo_verdicts": []}, GOAL) is None


def test_is_over_goes_by_the_share_and_the_steady_state() -> None:
    assert not level_of(stage(4, 0.95)).is_over
    assert level_of(stage(4, 0.949)).is_over
    assert level_of(stage(4, 1.0, stable=False)).is_over
    filling = stage(4, 1.0, n=45, stable=False)
    # 45 requests, 12 of which are there at a time: it may only be filling up
    assert not level_of(filling).is_over
    step = next_stage([filling], GOAL)
    assert step.why == "the SLO seems to hold, while the stage fills up, at 4 requests/s"
    filling["slo_verdicts"][0]["slo"] = "itl_p95=1s"
    assert level_of(filling).is_over  # a growing queue never shows in the gaps


def test_clustered_misses_are_charged_even_where_a_stage_saw_none() -> None:
    """A short stage without a miss beside one whose misses came in clusters says little."""
    clustered = stage(10.0, 0.95, n=4000, effective=40)  # clusters of 100
    lucky = stage(10.2, 1.0, n=400, effective=400)
    base = [stage(5, 1.0), stage(20, 0.2), clustered]
    alone, both = estimated(base), estimated([*base, lucky])
    # as 400 independent requests it would have moved it far more
    assert both.capacity_rps / alone.capacity_rps < 1.04


async def _finished_early(url: str) -> tuple[dict[str, Any], list[Any]]:
    endpoint = parse_endpoint(url)
    client = Client(endpoint, endpoint.addresses(), endpoint.ssl_context())
    records: list[Any] = []
    runner = StageRunner([client], plain(endpoint), records.append)
    times = np.arange(0, 30, 0.05)
    plan = StagePlan(
        0, "open", schedule_at(times.tolist()), duration_s=30.0, offered_rps=20.0, drain_s=10.0
    )

    def soon(start_ns: int) -> None:
        asyncio.get_running_loop().call_later(0.6, runner.finish_stage, "it has told enough")

    first = await runner.run(plan, soon)
    second = await runner.run(
        StagePlan(
            1,
            "open",
            schedule_at([0.0, 0.05], first_request_id=first.ids_used),
            duration_s=0.1,
            offered_rps=20.0,
        )
    )
    await client.close()
    return first.meta | {"second": second.meta}, records


def test_a_stage_that_has_told_enough_is_drained_and_the_next_one_runs() -> None:
    with FaultServer() as server:
        meta, records = asyncio.run(_finished_early(server.url))
    assert meta["decided_early"] == "it has told enough"
    assert meta["ended_early"] is None
    sent = meta["scheduled_requests"]
    assert 2 <= sent < 300
    assert (meta["end_ns"] - meta["start_ns"]) / 1e9 < 20
    assert [r.status for r in records] == ["ok"] * (sent + 2)
    assert meta["second"]["decided_early"] is None


def predicted(ampacity: Callable[..., object], run: Path, *more: str) -> dict[str, Any]:
    """The summary of a search on the simulated batching server: 16 slots, steps of 10 + b ms."""
    server = ("--preset", "linear:0.01,0.001,max_num_seqs=16", "--input-tokens", 10)
    answers = ("--output-tokens", "gamma:mean=5,cv=1", "--slo", "ttft_p90=100ms", "--search")
    assert ampacity("predict", *server, *answers, *more, "--out", run) == 0
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return summary


def test_a_search_in_virtual_time_finds_the_capacity_of_the_batching_server(
    tmp_path: Path, ampacity: Callable[..., object]
) -> None:
    """The engine's own bookkeeping (benchmarks.servers.truth) in 4 x 40,000 requests: p90 of
    TTFT within 100 ms breaks at 103.7 ± 0.7 requests/s; it saturates near 123."""
    found = predicted(ampacity, tmp_path / "run", "--precision", "25%")
    capacity, search = found["capacity"], found["search"]
    assert capacity["crossing"] == "pooled"
    low, high = capacity["capacity_rps_ci"]
    assert low < 103.7 < high
    assert capacity["capacity_rps"] == pytest.approx(103.7, rel=0.25)
    assert search["reached"] is True
    assert (high - low) / 2 / capacity["capacity_rps"] <= 0.25
    assert search["requests"] == found["requests"]
    assert [step["stage"] for step in search["path"]] == [s["index"] for s in found["stages"]]
    assert search["path"][-1]["capacity_rps"] == pytest.approx(capacity["capacity_rps"])
    assert "95 % interval" in found["verdict"]
    assert "precision" not in found["verdict"]  # it was reached


def test_a_search_that_was_cut_short_says_so_in_its_verdict(
    tmp_path: Path, ampacity: Callable[..., object]
) -> None:
    run = tmp_path / "run"
    found = predicted(ampacity, run, "--precision", "2%", "--max-requests", "700")
    assert found["search"]["reached"] is False
    assert "--max-requests 700 is used up" in found["search"]["reason"]
    assert found["verdict"].endswith(
        "The precision asked for, 2 %, was not reached; it is too early to say how many requests "
        "it takes."
    )
    assert found["search"]["more_requests"] is None
    assert "was not reached; it is too early" in (run / "report.html").read_text()


def test_what_is_lacking_is_said_with_its_reason() -> None:
    lacking = json.loads("""{"reached": false, "precision": 0.05,
        "reason": "60 stages are enough", "more_requests": 12345, "requests": 20000}""")
    assert shortfall(struct_of(SearchFound, lacking), "One instance carries 9.8.") == (
        "The precision asked for, 5 %, was not reached: 60 stages are enough; about 32,000 "
        "requests in all would reach it."
    )
    slow = lacking | {
        "reason": "the client could not keep up with 80 requests/s",
        "more_requests": None,
    }
    assert shortfall(struct_of(SearchFound, slow), "No finding.") == (
        "The precision asked for, 5 %, was not reached: the client could not keep up with 80 "
        "requests/s."
    )
    assert shortfall(struct_of(SearchFound, lacking | {"reached": True}), "") is None


def test_what_a_search_takes_is_said_once_the_interval_is_twice_the_precision() -> None:
    """At 1.5 times the precision 1.5² times the requests near the limit are needed; at 2.5 times it
    is too early to say, and where fewer are near than three quarters of what it takes in the mean.
    """
    stages = [
        stage(x, true_share(x), n=n, effective=n // 5)
        for x, n in ((5, 300), (9, 4000), (10.5, 6000), (20, 300))
    ]
    found = estimated(stages)
    wide = Goal(tuple(SLOS), found.relative_error / 1.5)
    end = cut_short(stages, wide, "no time left")
    assert end.why == "no time left"
    # six misses for each 1/precision^2, three quarters of eight, of the allowed 5 %
    least = 6 / 0.05 / wide.precision**2 - 10_000
    assert end.more_requests == pytest.approx(max(1.25 * 10_000, least), abs=2)
    precision = found.relative_error / 2.5
    early = cut_short(stages, Goal(tuple(SLOS), precision), "no time left")
    assert early.more_requests is None
    asked = {"reached": False, "precision": 0.01, "reason": early.why, "more_requests": None}
    assert shortfall(struct_of(SearchFound, asked), "") == (
        "The precision asked for, 1 %, was not reached: no time left; it is too early to say how "
        "many requests it takes."
    )
    assert "requests in all" not in str(so_far(stages, Goal(tuple(SLOS), precision)))
    known = str(so_far(stages, Goal(tuple(SLOS), found.relative_error / 1.5)))
    sent = 10_600 + end.more_requests
    assert f"; about {float(f'{sent:.2g}'):,.0f} requests in all to" in known


def test_a_short_stage_taken_for_unstable_does_not_hold_the_search_below_it() -> None:
    """The engine's fault: 45 requests at 6/s that only filled up. Later the law of ``true_share``
    is seen around 10."""
    filling = stage(6, 1.0, n=45, effective=7, stable=False)
    seen = [stage(x, true_share(x), n=2000, effective=700) for x in (3, 8.5, 9.6, 10.3, 12, 24)]
    assert not level_of(filling).is_over
    found, without = estimated([filling, *seen]), estimated(seen)
    assert found.capacity_rps_ci[0] < 10 < found.capacity_rps_ci[1]
    assert found.capacity_rps == pytest.approx(without.capacity_rps, rel=0.02)


def test_no_slope_explains_away_a_long_stage_without_a_miss() -> None:
    """Loads at which 20,000 requests never missed lie below the limit, however steep it is and
    wherever the others are."""
    stages = [stage(5, 1.0, n=20_000, effective=5_000), stage(20, 0.3, n=60, effective=5)]
    found = estimated(stages)
    assert found.capacity_rps_ci[0] > 4.9
    assert found.capacity_rps_ci[1] > 15  # the short stage far above says little
