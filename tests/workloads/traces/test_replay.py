"""What is done to a trace before it is played."""

import numpy as np
import pytest

from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.trace_cuts import Replay, cut, loop, prepare, spread, thin
from ampacity.workloads.traces.trace import Blocks, Trace


def trace(times: list[float], **more: object) -> Trace:
    n = len(times)
    held = {"clock": "a number of seconds", **more}
    return Trace(
        np.array(times, dtype=float),
        np.arange(1, n + 1),
        np.full(n, 7),
        "t.csv (generic format)",
        **held,
    )


def test_spreading_fills_the_step_evenly_and_keeps_the_requests() -> None:
    """Mooncake's clock: ticks of 3 s with about ten requests each; spread, the gaps of a Poisson
    process."""
    rng = np.random.default_rng(1)
    per_tick = rng.poisson(10, 1000)
    times = np.repeat(np.arange(1000) * 3.0, per_tick)
    coarse = trace(times.tolist(), clock_step_s=3.0)
    played = spread(coarse, np.random.default_rng(2))
    assert len(played) == len(coarse)
    assert sorted(played.input_tokens) == sorted(coarse.input_tokens)
    assert (np.diff(played.arrival_s) >= 0).all()
    order = np.argsort(played.input_tokens)  # input_tokens number the requests
    late = played.arrival_s[order] - times
    late -= late.min()
    assert late.max() <= 3.0
    # Kolmogorov-Smirnov against the uniform on one step: 1.63/sqrt(n) is the 1 % limit
    u = np.sort(late / 3.0)
    assert np.abs(u - np.arange(1, len(u) + 1) / len(u)).max() < 1.63 / np.sqrt(len(u)) + 1e-3
    gaps = np.diff(played.arrival_s)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.05)
    assert "spread over the step" in played.notes[-1]


def test_a_tick_is_no_longer_than_one_and_a_half_steps() -> None:
    sparse = trace([0.0] * 5 + [100.0] * 5, clock_step_s=1.0)
    played = spread(sparse, np.random.default_rng(1))
    order = np.argsort(played.input_tokens)
    assert (played.arrival_s[order][:5] < 1.5).all()
    assert (played.arrival_s[order][5:] > 98).all()


def test_a_fine_clock_is_left_alone() -> None:
    fine = trace([0.0, 0.4, 0.4, 2.0])
    assert prepare(fine, Replay(), 1) is fine


def test_cutting_takes_from_and_leaves_to() -> None:
    played = cut(trace([0.0, 1.0, 2.0, 3.0]), 1.0, 3.0)
    assert played.arrival_s.tolist() == [0.0, 1.0]
    assert played.input_tokens.tolist() == [2, 3]
    assert played.notes == ("t.csv: cut from 1 s to 3 s: 2 of 4 requests",)
    with pytest.raises(WorkloadError, match="no request arrives from 5 s"):
        cut(trace([0.0, 1.0]), 5.0, None)


@pytest.mark.parametrize(
    ("from_s", "to_s", "said"),
    [
        (12.0, None, "; 2 sessions begin with a later turn, whose history is new"),
        (0.0, 12.0, "; 2 sessions end before their last turn"),
        (12.0, 18.0, "; 1 sessions begin with a later turn, whose history is new"),
        (0.0, 30.0, ""),
    ],
)
def test_sessions_that_are_cut_are_counted(from_s: float, to_s: float | None, said: str) -> None:
    """Session 0 at 0, 10 and 20 s, session 1 at 5 and 15 s, and a request alone at 25 s."""
    held = trace([0, 5, 10, 15, 20, 25], session=np.array([0, 1, 0, 1, 0, -1]))
    assert cut(held, from_s, to_s).notes[-1].partition(" requests")[2] == said


def test_thinning_keeps_a_share_and_sessions_as_a_whole() -> None:
    n = 10_000
    played = thin(trace(np.arange(n, dtype=float).tolist()), 0.3, np.random.default_rng(1))
    # four standard deviations
    assert len(played) == pytest.approx(0.3 * n, abs=4 * np.sqrt(n * 0.3 * 0.7))
    session = np.repeat(np.arange(1000), 10)
    played = thin(
        trace(np.arange(n, dtype=float).tolist(), session=session), 0.3, np.random.default_rng(1)
    )
    assert played.session is not None
    assert set(np.unique(played.session, return_counts=True)[1]) == {10}


def test_looping_repeats_the_trace_one_mean_gap_apart() -> None:
    played = loop(trace([0.0, 1.0, 4.0], session=np.array([0, 0, 1])), 2)
    assert played.arrival_s.tolist() == [0.0, 1.0, 4.0, 6.0, 7.0, 10.0]  # the mean gap is 2 s
    assert played.input_tokens.tolist() == [1, 2, 3, 1, 2, 3]
    assert played.session.tolist() == [0, 0, 1, 2, 2, 3]


def test_each_round_of_a_loop_has_blocks_of_its_own() -> None:
    """Two prompts share their first block, and so do those two of the next round."""
    blocks = Blocks(np.array([5, -1, 5, 2**40]), np.array([0, 2, 4]))
    played = loop(trace([0.0, 1.0], blocks=blocks), 3)
    ids = played.blocks.ids.tolist()
    assert played.blocks.start.tolist() == [0, 2, 4, 6, 8, 10, 12]
    assert [ids[i] == ids[i + 2] for i in (0, 4, 8)] == [True] * 3
    assert len(set(ids)) == 9  # three in each round


def test_blocks_go_along() -> None:
    blocks = Blocks(np.array([5, 6, 7, 8, 9, 10]), np.array([0, 2, 3, 6]))
    played = cut(trace([0.0, 1.0, 2.0], blocks=blocks), 1.0, None)
    assert played.blocks.ids.tolist() == [7, 8, 9, 10]
    assert played.blocks.start.tolist() == [0, 1, 4]


def test_what_cannot_be_played_is_refused() -> None:
    with pytest.raises(WorkloadError, match="does not say when its sessions arrived"):
        prepare(trace([0.0, 0.0], from_session_start=True), Replay(from_s=1.0), 1)
    with pytest.raises(WorkloadError, match="end behind the start"):
        Replay(from_s=5, to_s=5)
    with pytest.raises(WorkloadError, match="at most 1"):
        Replay(keep=1.5)


def test_the_same_seed_plays_the_same() -> None:
    coarse = trace([0.0] * 10 + [3.0] * 10, clock_step_s=3.0)
    a, b, c = (prepare(coarse, Replay(keep=0.5), seed) for seed in (1, 1, 2))
    assert a.arrival_s.tolist() == b.arrival_s.tolist()
    assert a.arrival_s.tolist() != c.arrival_s.tolist()
