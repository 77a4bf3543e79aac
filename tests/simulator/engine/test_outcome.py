"""A stage in virtual time: every token of every request, in the order asked for."""

import time
from dataclasses import replace

import numpy as np
import pytest

from ampacity.simulator.engine.engine import EngineConfig, Speculation
from ampacity.simulator.models.hardware import PRESETS, linear_config
from benchmarks.servers.truth import Measured, simulate

LINE = linear_config(0.010, 0.001)


def of(stage: Measured, request: int) -> list[float]:
    return stage.token_times_s(request).tolist()


def test_tokens_by_hand() -> None:
    """Steps of 10 + b ms. The one at 0 s: 11, 22 ms; that at 15 ms joins: 33, 44, 55."""
    stage = simulate(LINE, [0.0, 0.015], [5, 5], [2, 3])
    assert of(stage, 0) == pytest.approx([0.011, 0.022])
    assert of(stage, 1) == pytest.approx([0.033, 0.044, 0.055])
    assert stage.arrival_s.tolist() == [0.0, 0.015]
    assert stage.first_token_s == pytest.approx([0.011, 0.033])
    assert stage.finish_s == pytest.approx([0.022, 0.055])
    assert stage.output_tokens.tolist() == [2, 3]


def test_speculative_tokens_come_in_chunks_and_the_seed_decides() -> None:
    config = EngineConfig("s", LINE.step_time, 16, 4096, 8192, speculation=Speculation(3, 0.7))
    rows = ([0.0] * 8, [4] * 8, [60] * 8)
    stage = simulate(replace(config, seed=1), *rows)
    for request in range(8):
        times, tokens = stage.chunks(request)
        assert tokens.sum() == 60
        assert tokens[0] == 1
        assert tokens.max() <= 4
        assert np.all(np.diff(times) > 0)
    again, other = (simulate(replace(config, seed=seed), *rows) for seed in (1, 2))
    assert (
        [of(again, n) for n in range(8)]
        == [of(stage, n) for n in range(8)]
        != [of(other, n) for n in range(8)]
    )


def test_much_faster_than_real_time() -> None:
    """The 70B preset at 50 requests/s, with all token times, runs at 300 times real time."""
    rng = np.random.default_rng(1)
    count = 5000
    arrivals = np.cumsum(rng.exponential(1 / 50, count))
    inputs = np.clip(np.rint(1020 * np.exp(0.6 * rng.standard_normal(count))), 1, 4000)
    outputs = np.clip(np.rint(200 * np.exp(0.6 * rng.standard_normal(count))), 1, 4000)
    spent = []
    for _ in range(3):
        start = time.process_time()
        stage = simulate(PRESETS["llama3-70b-4xh100"], arrivals, inputs, outputs)
        tokens = sum(len(stage.token_times_s(request)) for request in range(count))
        spent.append(time.process_time() - start)
    assert tokens == outputs.sum()
    assert arrivals[-1] / min(spent) > 300
