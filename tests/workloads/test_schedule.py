"""The seeded plan of a stage."""

from dataclasses import replace

import numpy as np
import pytest

from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.lengths.parse import Fixed, LogNormal
from ampacity.workloads.profile import Workload, load_workload
from ampacity.workloads.prompts.prefixes import Pool, Prefixes
from ampacity.workloads.replay import replayed
from ampacity.workloads.schedule import Schedule, closed_schedule, endless_schedule, open_schedule
from ampacity.workloads.trace_cuts import Replay
from ampacity.workloads.traces.trace import Trace

CHAT = load_workload("chat")


def columns(schedule: Schedule) -> list[list[float]]:
    return [
        schedule.scheduled_s.tolist(),
        schedule.input_tokens.tolist(),
        schedule.output_tokens.tolist(),
    ]


def chat_stage(
    seed: int = 1, stage: int = 0, rate_rps: float = 5, duration_s: float = 60
) -> Schedule:
    return open_schedule(CHAT, rate_rps=rate_rps, duration_s=duration_s, seed=seed, stage=stage)


def test_same_seed_and_stage_give_the_same_schedule() -> None:
    assert columns(chat_stage()) == columns(chat_stage())
    for other in (chat_stage(seed=2), chat_stage(stage=1)):
        assert not set(other.scheduled_s.tolist()) & set(chat_stage().scheduled_s.tolist())
        n = min(len(other), len(chat_stage()))
        assert np.mean(other.input_tokens[:n] == chat_stage().input_tokens[:n]) < 0.1


def test_lengths_of_the_kth_request_do_not_depend_on_rate_or_duration() -> None:
    slow, fast = chat_stage(), chat_stage(rate_rps=40, duration_s=30)
    assert len(fast) > len(slow)
    assert columns(fast)[1][: len(slow)] == columns(slow)[1]
    assert columns(fast)[2][: len(slow)] == columns(slow)[2]


def test_the_streams_are_apart() -> None:
    other_input = replace(CHAT, input_tokens=Fixed(9))
    changed = open_schedule(other_input, rate_rps=5, duration_s=60, seed=1, stage=0)
    assert columns(changed)[::2] == columns(chat_stage())[::2]
    constant = open_schedule(
        replace(CHAT, arrivals="constant"), rate_rps=5, duration_s=60, seed=1, stage=0
    )
    assert len(constant) == 300
    n = min(len(constant), len(chat_stage()))
    assert columns(constant)[1][:n] == columns(chat_stage())[1][:n]


def test_input_and_output_are_drawn_independently() -> None:
    same = Workload("w", LogNormal(100, 400), LogNormal(100, 400))
    plan = closed_schedule(same, requests=20_000, seed=3, stage=0)
    ranks = [np.argsort(np.argsort(column)) for column in (plan.input_tokens, plan.output_tokens)]
    assert abs(np.corrcoef(*ranks)[0, 1]) < 4.5 / np.sqrt(20_000)


def test_open_schedule_has_the_asked_rate() -> None:
    plan = chat_stage(rate_rps=100, duration_s=400)
    assert len(plan) == pytest.approx(40_000, abs=900)  # 4.5 standard deviations of Poisson(40,000)
    assert plan.scheduled_s.max() < 400


def test_closed_schedule_leaves_the_times_to_the_driver() -> None:
    plan = closed_schedule(CHAT, requests=50, seed=1, stage=0, first_request_id=7)
    assert len(plan) == 50
    assert plan.first_request_id == 7
    assert not plan.scheduled_s.any()
    assert columns(plan)[1] == columns(chat_stage())[1][:50]  # the same lengths as in an open loop
    assert len(closed_schedule(CHAT, requests=0, seed=1, stage=0)) == 0


def test_trace_schedule_plays_faster_with_a_larger_scale() -> None:
    trace = Trace(
        np.array([0.0, 0.003, 6.0]), np.array([10, 20, 30]), np.array([1, 2, 3]), "t", clock="s"
    )
    assert columns(replayed(trace, Replay(), 1).schedule) == [
        [0.0, 0.003, 6.0],
        [10, 20, 30],
        [1, 2, 3],
    ]
    expected = pytest.approx([0, 0.0015, 3.0], rel=1e-15)
    assert replayed(trace, Replay(time_scale=2), 1).schedule.scheduled_s == expected
    for factor in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(WorkloadError, match="time scale"):
            Replay(time_scale=factor)


def test_capped_ends_where_the_budget_ends() -> None:
    plan = Schedule(np.array([0.0, 1.0, 2.0]), np.array([100, 200, 300]), np.array([10, 20, 30]), 5)
    assert plan.planned_tokens() == 660
    assert plan.capped() == (plan, None)
    assert plan.capped(3, 660) == (plan, None)

    cut, reason = plan.capped(max_tokens=330)  # 110, 330, 660: two fit exactly
    assert columns(cut) == [[0.0, 1.0], [100, 200], [10, 20]]
    assert cut.first_request_id == 5
    assert reason == "the limit of 330 planned tokens leaves 2 of 3 requests (330 tokens)"
    assert len(plan.capped(max_tokens=329)[0]) == 1
    assert len(plan.capped(max_tokens=109)[0]) == 0

    cut, reason = plan.capped(max_requests=1, max_tokens=330)
    assert len(cut) == 1
    assert reason == "the limit of 1 requests leaves 1 of 3 requests (110 tokens)"
    with pytest.raises(WorkloadError, match="max_tokens is -1"):
        plan.capped(max_tokens=-1)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(WorkloadError, match="seed -1"):
        chat_stage(seed=-1)
    with pytest.raises(WorkloadError, match="requests is -1"):
        closed_schedule(CHAT, requests=-1, seed=0, stage=0)
    with pytest.raises(WorkloadError, match="differ in length"):
        Schedule(np.zeros(2), np.ones(1, dtype=np.int64), np.ones(2, dtype=np.int64), 0)
    with pytest.raises(WorkloadError, match="finite"):
        Schedule(np.array([np.nan]), np.ones(1, dtype=np.int64), np.ones(1, dtype=np.int64), 0)


def test_the_schedule_of_a_pinned_seed_stays_as_it_is() -> None:
    """A schedule made today must be made by the next version too: drawn here by numpy alone."""
    plan = closed_schedule(
        Workload("w", LogNormal(100, 400), Fixed(5)), requests=3, seed=42, stage=2
    )
    z = np.random.Generator(
        np.random.PCG64(np.random.SeedSequence(42, spawn_key=(2, 1)))
    ).standard_normal(3)
    assert plan.input_tokens.tolist() == [round(100 * 4 ** (x / 2.3263478740408408)) for x in z]


@pytest.mark.parametrize("prefixes", [None, Prefixes((Pool("system", Fixed(64), 8),))])
def test_an_endless_load_is_the_same_however_it_is_cut(prefixes: Prefixes | None) -> None:
    """At 100 req/s a block lasts 50 s; the parts begin at block ends, within blocks and beyond."""
    workload = replace(CHAT, prefixes=prefixes)
    how = {"rate_rps": 100.0, "seed": 3}
    whole = endless_schedule(workload, begin_s=0.0, end_s=170.0, **how)
    parts, ids = [], 0
    for begin_s, end_s in ((0.0, 50.0), (50.0, 61.0), (61.0, 170.0)):
        part = endless_schedule(workload, begin_s=begin_s, end_s=end_s, first_request_id=ids, **how)
        assert part.scheduled_s.min() >= 0
        assert part.scheduled_s.max() < end_s - begin_s
        for i in range(0, len(part), 500):
            assert part.request_id(i) == ids + i
            if part.shared and whole.shared:
                assert part.shared.of(i) == whole.shared.of(ids + i)
        parts.append(replace(part, scheduled_s=part.scheduled_s + begin_s))
        ids += len(part)
    assert ids == len(whole) == pytest.approx(17_000, rel=0.05)
    assert np.concatenate([p.scheduled_s for p in parts]) == pytest.approx(whole.scheduled_s)
    for name in ("input_tokens", "output_tokens"):
        joined = np.concatenate([getattr(p, name) for p in parts])
        assert (joined == getattr(whole, name)).all()
    assert len(set(whole.input_tokens[:4000] - whole.input_tokens[5000:9000])) > 1000  # no repeat


def test_an_endless_load_of_conversations_is_refused() -> None:
    with pytest.raises(WorkloadError, match="conversations cannot be cut"):
        endless_schedule(load_workload("agentic"), rate_rps=1.0, begin_s=0, end_s=1, seed=0)
