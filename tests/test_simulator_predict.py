"""A stage in virtual time: every token of every request, in the order asked for."""

import time

import numpy as np
import pytest

from simulator import SimulatorError
from simulator.deployment import Deployment
from simulator.engine import EngineConfig, Speculation
from simulator.hardware import PRESETS, linear_config
from simulator.outcome import Outcome
from simulator.predict import Traits, run_closed_stage, run_stage

LINE = linear_config(0.010, 0.001)


def of(stage: Outcome, request: int) -> list[float]:
    return stage.token_times_s(request).tolist()


def test_tokens_by_hand() -> None:
    """Steps of 10 + b ms; given out of order. The one at 0 s: 11, 22 ms; that at 15 ms joins: 33, 44, 55."""
    stage = run_stage(LINE, [0.015, 0.0], [5, 5], [3, 2])
    assert of(stage, 0) == pytest.approx([0.033, 0.044, 0.055])
    assert of(stage, 1) == pytest.approx([0.011, 0.022])
    assert stage.arrival_s.tolist() == [0.015, 0.0]
    assert stage.first_token_s == pytest.approx([0.033, 0.011])
    assert stage.finish_s == pytest.approx([0.055, 0.022])
    assert stage.output_tokens.tolist() == [3, 2]


def test_order_of_the_schedule_does_not_matter() -> None:
    rng = np.random.default_rng(3)
    scheduled = rng.uniform(0, 20, 400)
    inputs, outputs = rng.integers(1, 3000, 400), rng.integers(1, 200, 400)
    config = PRESETS["llama3-8b-l4"]
    stage = run_stage(config, scheduled, inputs, outputs)
    order = np.argsort(scheduled)
    ordered = run_stage(config, scheduled[order], inputs[order], outputs[order])
    assert stage.preemptions == ordered.preemptions > 0
    for place, request in enumerate(order.tolist()):
        assert of(stage, request) == of(ordered, place)


def test_speculative_tokens_come_in_chunks_and_the_seed_decides() -> None:
    config = EngineConfig("s", LINE.step_time, 16, 4096, 8192, speculation=Speculation(3, 0.7))
    rows = ([0.0] * 8, [4] * 8, [60] * 8)
    stage = run_stage(config, *rows, seed=1)
    for request in range(8):
        times, tokens = stage.chunks(request)
        assert tokens.sum() == 60
        assert tokens[0] == 1
        assert tokens.max() <= 4
        assert np.all(np.diff(times) > 0)
    again, other = (run_stage(config, *rows, seed=seed) for seed in (1, 2))
    assert (
        [of(again, n) for n in range(8)]
        == [of(stage, n) for n in range(8)]
        != [of(other, n) for n in range(8)]
    )


def test_prefixes_and_sessions_are_found_again() -> None:
    """Prefix of 64 tokens of two groups; then turns of a session whose prompts hold what was said before."""
    config = EngineConfig("c", LINE.step_time, 16, 4096, 8192, kv_blocks=1024, prefix_caching=True)
    traits = Traits(prefixes=["a", "b", "a", "b"], prefix_tokens=[64] * 4)
    stage = run_stage(config, [0.0, 1.0, 2.0, 3.0], [100] * 4, [10] * 4, traits=traits)
    assert stage.cached_tokens.tolist() == [0, 0, 64, 64]
    sessions = Traits(sessions=["x", "y", "x", "x"])
    stage = run_stage(config, [0.0, 1.0, 2.0, 3.0], [100, 100, 150, 100], [28] * 4, traits=sessions)
    # Turn 2 finds 127 of the first's 128 tokens: 7 blocks; a prompt of 100 finds 96 of its own
    assert stage.cached_tokens.tolist() == [0, 0, 112, 96]


def test_closed_stage_keeps_its_concurrency() -> None:
    stage = run_closed_stage(LINE, 4, [1] * 40, [10] * 40)
    assert stage.finish_s - stage.arrival_s == pytest.approx(np.full(40, 10 * 0.014))
    assert stage.finish_s.max() == pytest.approx(10 * 10 * 0.014)


def test_replicas_are_run_too() -> None:
    traits = Traits(sessions=list(range(40)), deadlines_s=[1.0] * 40, adapters=[None] * 40)
    stage = run_stage(Deployment(LINE, 4, "least-request"), np.zeros(40), [1] * 40, [10] * 40, traits=traits)
    # Ten on each: steps of 20 ms
    assert stage.finish_s == pytest.approx(np.full(40, 0.2))


@pytest.mark.parametrize(
    ("rows", "traits"),
    [
        (([0.0], [1, 1], [1, 1]), None),
        (([0.0, 0.0], [1, 1], [1]), None),
        (([0.0], [1], [1]), Traits(sessions=[1, 2])),
        (([], [], []), None),
        (([0.0], [9000], [1]), None),
    ],
)
def test_rows_that_do_not_fit(rows: tuple[list[float], list[int], list[int]], traits: Traits | None) -> None:
    with pytest.raises(SimulatorError):
        run_stage(PRESETS["demo"], *rows, traits=traits)


def test_much_faster_than_real_time() -> None:
    """The 70B preset at 50 requests/s, with every token's time: 300 times real time is asked for."""
    rng = np.random.default_rng(1)
    count = 5000
    arrivals = np.cumsum(rng.exponential(1 / 50, count))
    inputs = np.clip(np.rint(1020 * np.exp(0.6 * rng.standard_normal(count))), 1, 4000)
    outputs = np.clip(np.rint(200 * np.exp(0.6 * rng.standard_normal(count))), 1, 4000)
    spent = []
    for _ in range(3):
        start = time.process_time()
        stage = run_stage(PRESETS["llama3-70b-4xh100"], arrivals, inputs, outputs)
        tokens = sum(len(stage.token_times_s(request)) for request in range(count))
        spent.append(time.process_time() - start)
    assert tokens == outputs.sum()
    assert arrivals[-1] / min(spent) > 300
