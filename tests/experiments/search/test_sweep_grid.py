"""The grid that finds itself: rates are chosen from the judgements of the stages before."""

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from ampacity.analysis.capacity.limit import find_capacity
from ampacity.analysis.capacity.next_load import fewest_requests
from ampacity.analysis.contract.stage import Stage
from ampacity.analysis.slo import parse_slo, parse_slos
from ampacity.cli.measure.sweep import timed_sweep
from ampacity.config import make_settings
from ampacity.durations import duration_text, rounded_up
from ampacity.experiments.stages.rig import Rig
from ampacity.experiments.sweep import STAGES_MAX, begin_rate, next_rate, sweep, too_few
from ampacity.values import ConfigError, parse_duration
from benchmarks.servers import SERVERS
from benchmarks.studies.search_cost import QUEUE, ServerRig, put_at
from tests.support.args import args_of
from tests.support.contract import on_stages
from tests.support.repeats import often

next_rate, find_capacity = on_stages(next_rate), on_stages(find_capacity)


def stage(
    rps: float,
    slo_met: bool | None = True,
    stable: bool = True,
    limited: bool = False,
    slo: bool = True,
) -> dict[str, Any]:
    return {
        "index": 0,
        "kind": "open",
        "offered_rps": rps,
        "slo_met": slo_met if slo else None,
        "stable": stable,
        "client_limited": limited,
        "achieved_rps": rps,
        "slo_verdicts": [{"slo": "ttft_p99=1s", "attainment": 0.5 if slo_met is False else 1.0}]
        if slo
        else [],
        "concurrency": 1.0,
        "requests": 1000,
        "window": {"warmup_requests": 0},
    }


def run_grid(
    capacity_rps: float,
    saturation_rps: float,
    start_rps: float,
    *,
    slo: bool = True,
    undecided_below: float = 0.0,
) -> list[dict[str, Any]]:
    """The whole grid against an ideal endpoint: SLO met below capacity, unstable from saturation
    on."""
    stages: list[dict[str, Any]] = []
    rate: float | None = start_rps
    while rate is not None:
        met: bool | None = rate <= capacity_rps
        if rate < undecided_below:
            met = None
        stages.append(stage(rate, met, rate < saturation_rps, slo=slo))
        rate = next_rate(stages)
        assert len(stages) <= STAGES_MAX
    return stages


@pytest.mark.parametrize(
    ("stages", "rate"),
    [
        ([stage(2)], 4),
        ([stage(2), stage(4)], 8),
        ([stage(2), stage(4, limited=True)], None),  # more load would only measure the client
        # an overloaded stage sends the grid down even where the client was late
        ([stage(80, None, stable=False, limited=True)], 40),
    ],
)
def test_the_next_rate(stages: list[dict[str, Any]], rate: float | None) -> None:
    assert next_rate(stages) == rate


@pytest.mark.parametrize("capacity", [3.0, 7.7, 31.0, 50.0, 100.0, 900.0])
def test_without_an_slo_the_bracket_narrows_to_a_tenth(capacity: float) -> None:
    stages = run_grid(1e9, capacity, start_rps=2.0, slo=False)
    stable = max(s["offered_rps"] for s in stages if s["stable"])
    over = min(s["offered_rps"] for s in stages if not s["stable"])
    assert stable < capacity <= over
    assert over / stable <= 1.101  # three halvings of a doubling: 2^(1/8) = 1.09


def test_goes_past_saturation() -> None:
    stages = run_grid(30.0, 36.0, start_rps=2.0)
    assert any(not s["stable"] for s in stages)


def test_stops_two_stages_after_a_slo_that_saturation_does_not_explain() -> None:
    rates = [s["offered_rps"] for s in run_grid(5.0, 1e9, start_rps=2.0)]
    assert max(rates) == 16  # 8 and 16 broke it; no need to look for saturation


def test_goes_down_from_what_was_served_of_a_start_that_was_far_too_high() -> None:
    """10,000/s were offered and ten served: half of that is next, and six halvings are left."""
    far = stage(10_000.0, False, stable=False) | {"achieved_rps": 10.0}
    assert next_rate([far]) == 5.0
    assert next_rate([far, stage(5.0, False)]) == 2.5
    assert next_rate([far, stage(10 / 64, False)]) is None


def test_goes_down_when_the_start_was_too_high_by_six_halvings_at_most() -> None:
    stages = run_grid(1.0, 1.3, start_rps=20.0)
    assert 0 < max(s["offered_rps"] for s in stages if s["slo_met"] and s["stable"]) <= 1.0
    rates = [s["offered_rps"] for s in run_grid(0.0, 1e-9, start_rps=20.0)]
    assert min(rates) == pytest.approx(20 / 64, rel=0.02)


def test_undecided_stages_do_not_end_the_search() -> None:
    stages = run_grid(100.0, 130.0, start_rps=2.0, undecided_below=20.0)
    assert 50 <= max(s["offered_rps"] for s in stages if s["slo_met"]) <= 100


def told_of(typical_e2e_s: float = 2.0, **raw: Any) -> str | None:
    """What a sweep with these settings says before its first stage."""
    settings = make_settings({"url": "http://127.0.0.1:9/v1", **raw})
    rig = SimpleNamespace(
        settings=settings, typical_e2e_s=typical_e2e_s, stage_s=lambda _: settings.duration_s
    )
    return too_few(rig)


def test_rates_whose_stages_cannot_meet_a_percentile_are_named_beforehand_with_what_would_do() -> (
    None
):
    """p99 takes 299 requests (0.99^299 < 0.05): 30 s have them from 9.967 req/s on; 1.2 * 299 s are
    6 minutes."""
    told = told_of(slo=["ttft_p99=2s", "e2e_p95=9s"], rates=[1, 2, 20])
    assert told == (
        "stages are too short for ttft_p99=2s: it takes 299 requests at least to be "
        "met, and they have about 30 at 1 req/s, 60 at 2 req/s; that takes --duration 6m from 1 "
        "req/s on"
    )
    assert told_of(slo=["ttft_p99=2s"], rates=[1, 2, 20], duration="6m") is None
    assert told_of(slo=["ttft_p99=2s"], rates=[10]) is None
    assert told_of(slo=["ttft_p99=2s"], rates="20,1", duration="30s,5m") is None
    assert told_of(rates=[1]) is None
    assert told_of(slo=["itl_p99=50ms"], rates=[1]) is None  # hundreds of gaps a request


def begins_at(typical_e2e_s: float, stage_s: float | None = None, **raw: Any) -> float:
    settings = make_settings({"url": "http://127.0.0.1:9/v1", "workload": "chat-short", **raw})
    rig = SimpleNamespace(
        settings=settings,
        typical_e2e_s=typical_e2e_s,
        stage_s=lambda _: stage_s or settings.duration_s,
    )
    return begin_rate(rig, fewest_requests(settings.slos, {})[0])


def test_a_grid_begins_at_a_load_that_is_surely_low() -> None:
    """Where a stage has twice the 59 requests that p95 takes, 118 in 15 s or 7.87 req/s, if that is
    at most half a request in flight (one thread is busy half of the time); never below a quarter.
    """
    p95: dict[str, Any] = {"slo": ["ttft_p95=500ms"], "duration": "15s"}
    assert begins_at(0.05, **p95) == 7.87
    assert begins_at(0.2, **p95) == 2.5
    assert begins_at(2.0, **p95) == 0.25
    assert begins_at(0.02, **p95) == 12.5  # a quarter in flight
    assert begins_at(0.2, duration="15s") == 1.33  # 20 requests, where no percentile asks for more
    assert begins_at(60.0) == pytest.approx(0.5 / 60, rel=1e-2)
    assert begins_at(0.2, **p95, stage_s=90.0) == 1.31  # virtual time has 118 requests there


def test_a_sweep_that_finds_its_rates_does_not_ask_a_stage_to_decide_alone() -> None:
    """All stages together decide there; those at the lowest loads need not."""
    assert told_of(slo=["ttft_p99=2s"]) is None


def test_users_send_as_often_as_an_idle_endpoint_answers() -> None:
    """Five users with 2 s of waiting and 1 s of thinking: 5/3 req/s, so 50 requests, and 3.6
    minutes for 1.2 * 299."""
    told = told_of(slo=["ttft_p99=2s"], concurrency=[5, 50], think_time="1s")
    assert told is not None
    assert "about 50 at 5 users; that takes --duration 4m from 5 users on" in told


def test_a_class_has_its_share_of_the_requests() -> None:
    slos = parse_slos(["a:ttft_p95=1s", "b:ttft_p95=1s", "itl_p99.9=1s"])
    assert fewest_requests(slos, {"a": 0.9, "b": 0.1}) == (590, "b:ttft_p95=1s")  # 59 for p95
    assert fewest_requests(slos[2:], {}) == (0, "")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "1s"),
        (89.5, "90s"),
        (91.0, "2m"),
        (359.0, "6m"),
        (5400.0, "90m"),
        (5401.0, "1.6h"),
        (14_500 * 60.0, "10.1d"),
    ],
)
def test_what_is_recommended_is_rounded_up(seconds: float, text: str) -> None:
    assert duration_text(rounded_up(seconds)) == text
    assert parse_duration(text, "--duration") >= seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (110.0, "110s"),
        (120.0, "2m"),
        (0.25, "250ms"),
        (61.5, "61.5s"),
        (3661.0, "3661s"),
        (7200.0, "2h"),
        (129_600.0, "36h"),
    ],
)
def test_a_duration_that_was_given_is_written_exactly(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
    assert parse_duration(text, "--duration") == seconds


def test_a_sweep_gives_what_is_left_to_loads_near_the_limit() -> None:
    """M/M/1 with 10 requests/s, p95 of the sojourn time put at 0.85 of that: 8.5 requests/s, C_max
    8.5/1.5 + 8.5/2.

    Of four or eight intervals that hold the truth in 95 % one may miss it."""
    slo, (truth, in_flight) = put_at(QUEUE, 0.85, 0.95)
    held, n = np.zeros(2), often(4, 8)
    for seed in range(n):
        rig = ServerRig(QUEUE, slo, seed, 60.0)
        asyncio.run(sweep(rig))
        near = sum(abs(math.log(s.offered_rps / truth)) < 0.4 for s in rig.stages)
        assert near >= 2
        found = find_capacity(rig.stages, [slo])
        assert found.crossing == "pooled"
        held += [
            low < true < high
            for (low, high), true in ((found.capacity_rps_ci, truth), (found.c_max_ci, in_flight))
        ]
    assert (held >= n - 1).all()


def swept(max_duration_s: float, server: str = "mm1", **how: Any) -> ServerRig:
    slo, _ = (
        put_at(QUEUE, 0.7, 0.95)
        if server == "mm1"
        else put_at(SERVERS[server](), 0.7, 0.95, 20_000)
    )
    rig = ServerRig(SERVERS[server](), slo, 3, max_duration_s / 20)
    asyncio.run(sweep(rig, max_duration_s=max_duration_s, **how))
    return rig


@pytest.mark.parametrize(
    ("server", "most_rps", "times"), [("mm1", 10.0, 3), ("batch", 6.154, 3), ("mm1", 10.0, 20)]
)
def test_a_sweep_that_begins_too_high_goes_down_and_ends_with_an_answer(
    server: str, most_rps: float, times: int
) -> None:
    """Issue 18 D: the first stage is offered three times what the server can do, or 20 times."""
    rig = swept(600.0, server, start_rps=times * most_rps)
    assert rig.stages[0].stable is False
    # half of what was answered, not of what was offered
    assert rig.stages[1].offered_rps <= most_rps
    low, high = find_capacity(rig.stages, rig.settings.slos).capacity_rps_ci
    assert low < 0.7 * most_rps < high
    assert sum(s.window.end_s for s in rig.stages) <= 600.001
    assert "next_command" not in rig.noted


def test_a_sweep_ends_where_the_client_is_held_up_again_and_again() -> None:
    """From the third stage on, all are the client's: three of them are run, no more."""

    class Late(ServerRig):
        async def open_stage(self, *given: Any) -> Stage | None:
            judged = await super().open_stage(*given)
            if judged and len(self.stages) > 2:
                self.stages[-1] = structs.replace(judged, client_limited=True, stable=False)
            return judged

    slo, _ = put_at(QUEUE, 0.7, 0.95)
    rig = Late(QUEUE, slo, 3, 30.0)
    asyncio.run(sweep(rig, start_rps=6.0, max_duration_s=600.0))
    assert [s.client_limited for s in rig.stages] == [False, False, True, True, True]
    assert any("could not keep up in 3 stages in a row" in text for text in rig.told)


def test_a_sweep_without_an_answer_ends_with_the_command_that_gets_one() -> None:
    """In 40 s of ten requests/s nothing is known; the command it names knows it, and has no command
    any more."""
    rig = swept(40.0)
    assert find_capacity(rig.stages, rig.settings.slos).capacity_rps is None
    command = rig.noted["next_command"]
    assert command in rig.told[-1]
    rig = swept(parse_duration(command.rpartition(" ")[2], "--max-duration"))
    assert "next_command" not in rig.noted
    low, high = find_capacity(rig.stages, rig.settings.slos).capacity_rps_ci
    assert low < 7.0 < high


def test_a_limit_that_an_idle_server_misses_ends_the_sweep_at_once() -> None:
    """An answer takes 100 ms, the limit is 1 ms: no load meets it, and no longer sweep helps."""
    rig = ServerRig(QUEUE, parse_slo("ttft_p95=1ms"), 3, 30.0)
    asyncio.run(sweep(rig, max_duration_s=600.0))
    assert len(rig.stages) == 2
    assert "next_command" not in rig.noted
    found = find_capacity(rig.stages, rig.settings.slos)
    assert (found.reason or "").startswith("no load can meet ttft_p95=1ms: the median is 0.")


def test_a_limit_that_only_saturation_breaks_has_an_interval() -> None:
    """Ten requests/s, a limit of 100 s: the capacity is where the queue begins to grow."""
    rig = ServerRig(QUEUE, parse_slo("ttft_p95=100s"), 3, 30.0)
    asyncio.run(sweep(rig, max_duration_s=600.0))
    low, high = find_capacity(rig.stages, rig.settings.slos).capacity_rps_ci
    assert low < 10.0 < high


def test_the_command_is_the_run_s_own_with_another_time() -> None:
    words = args_of("ampacity sweep U --max-duration 40s --slo ttft_p95=1s")
    book: Any = SimpleNamespace(_writer=SimpleNamespace(meta={"command_line": words}))
    said = Rig.again(book, "--max-duration", "2m")
    assert said == "ampacity sweep U --slo ttft_p95=1s --max-duration 2m"


@pytest.mark.parametrize(
    ("raw", "limit_s", "stage_s"),
    [
        ({}, 600.0, "30s"),
        ({"lengths": "p50"}, 1200.0, "30s"),
        ({"duration": "1m"}, None, "1m"),
        ({"rates": "5"}, None, None),
    ],
)
def test_a_sweep_lasts_ten_minutes_where_nothing_says_how_long(
    raw: dict[str, Any], limit_s: float | None, stage_s: str | None
) -> None:
    settings, drive = timed_sweep(raw)
    assert getattr(drive, "keywords", {}).get("max_duration_s") == limit_s
    assert settings.get("duration") == stage_s
    assert timed_sweep({"duration": "1m"}, "1h")[1].keywords == {"max_duration_s": 3600.0}
    with pytest.raises(ConfigError, match="drop --rates"):
        timed_sweep({"rates": "5"}, "1h")
