"""Known factors found again in the simulator's own noisy latencies."""

import math
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from ampacity.simulator import SimulatorError
from ampacity.simulator.engine.engine import EngineConfig, Request
from ampacity.simulator.engine.steptime import Roofline
from ampacity.simulator.models.calibrate import Level, calibrate, expected_latencies_s
from ampacity.simulator.models.hardware import PRESETS
from benchmarks.servers.truth import Measured, simulate
from tests.support.simulator.engine_runs import simulate_closed

BASE = PRESETS["llama3-8b-h100"]
assert isinstance(BASE.step_time, Roofline)
NOMINAL: Roofline = BASE.step_time
TRUE = replace(NOMINAL, bandwidth_bytes_s=2.1e12, compute_flops=360e12, overhead_s=3.1e-3)
ENGINE: EngineConfig = replace(BASE, step_time=TRUE)


def measured(stage: Measured) -> tuple[float, float, float]:
    """Mean requests in flight, mean ITL and mean TTFT in the middle of a stage."""
    n = len(stage.arrival_s)
    inside = slice(n // 4, n - n // 10)
    start, end = np.sort(stage.arrival_s)[[n // 4, n - n // 10]]
    gaps = [np.diff(stage.token_times_s(r)) for r in range(*inside.indices(n))]
    ttft = stage.ttft_s[inside]
    return stage.concurrency(start, end), float(np.concatenate(gaps).mean()), float(ttft.mean())


def levels(closed: bool, noise: float) -> NDArray[np.float64]:
    """Columns concurrency, ITL, TTFT, prompt, answer; lengths varied by a half."""
    rng = np.random.default_rng(7)
    rows = []
    for prompt, loads in (
        (256, (1, 2, 4, 8, 16, 32, 64) if closed else (1, 3, 6, 12, 18, 24)),
        (5000, (1, 2, 4, 8, 12, 16, 20) if closed else (0.2, 0.5, 0.8, 1.1, 1.4)),
    ):
        for load in loads:
            count = 60 + 6 * int(load) if closed else 500
            inputs = rng.integers(prompt // 2, prompt * 3 // 2, count)
            outputs = rng.integers(60, 180, count)
            if closed:
                requests = [
                    Request(i, o) for i, o in zip(inputs.tolist(), outputs.tolist(), strict=True)
                ]
                stage = simulate_closed(ENGINE, int(load), requests)
            else:
                arrivals = np.cumsum(rng.exponential(1 / load, count))
                stage = simulate(ENGINE, arrivals, inputs, outputs)
            concurrency, itl, ttft = measured(stage)
            concurrency = float(load) if closed else concurrency
            wobble = rng.normal(1, noise, 2)
            rows.append(
                (concurrency, itl * wobble[0], ttft * wobble[1], inputs.mean(), outputs.mean())
            )
    return np.array(rows).T


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "open"])
def test_known_factors_are_found_again(closed: bool) -> None:
    """Fitted figures within 10 %, and within what the fit says of its own error."""
    found = calibrate(NOMINAL, *levels(closed, 0.01), closed_loop=closed)
    for name in ("bandwidth_bytes_s", "compute_flops", "overhead_s"):
        truth, fitted = getattr(TRUE, name), getattr(found.step_time, name)
        assert fitted == pytest.approx(truth, rel=0.10 if name != "overhead_s" else 0.25), name
        assert abs(math.log(fitted / truth)) < 4 * found.relative_error[name] + 0.05
    assert found.r2_itl > 0.97
    assert found.r2_ttft > 0.97
    assert found.unknown == []


def test_a_wrong_nominal_does_not_matter() -> None:
    data = levels(True, 0.0)
    near = calibrate(NOMINAL, *data, closed_loop=True)
    far = calibrate(
        replace(NOMINAL, bandwidth_bytes_s=8e12, compute_flops=50e12), *data, closed_loop=True
    )
    expected = pytest.approx(near.step_time.bandwidth_bytes_s, rel=0.02)
    assert far.step_time.bandwidth_bytes_s == expected
    assert far.step_time.compute_flops == pytest.approx(near.step_time.compute_flops, rel=0.02)


def test_what_the_data_do_not_show_is_called_unknown() -> None:
    """One request at a time, prompts of one token: compute and bandwidth stay unknown."""
    one = np.ones(4)
    itl = 0.010 * np.array([1.0, 1.01, 0.99, 1.0])
    found = calibrate(NOMINAL, one, itl, np.full(4, np.nan), one, 100 * one, closed_loop=True)
    assert "compute_flops" in found.unknown
    assert found.relative_error["compute_flops"] == math.inf
    # What can be known is known: the step's length
    fitted, _ = expected_latencies_s(found.step_time, Level(1, 1, 100, 0.0), 8192)
    assert fitted == pytest.approx(0.010, rel=0.005)


def test_latencies_of_one_request_alone() -> None:
    """ITL is a decode step, TTFT the prompt's step, and with a small budget its chunks'."""
    # 10 ms of weights, 2 ms a token
    step = Roofline(1e3, 0.0, 2.0, 0.0, 1e5, 1e3, overhead_s=0.001)
    itl, ttft = expected_latencies_s(step, Level(1, 50, 100, 0.0), 8192)
    assert (itl, ttft) == (pytest.approx(0.011), pytest.approx(0.101))
    # Chunks of 20, 20 and 10 tokens: 41, 41 and 21 ms
    assert expected_latencies_s(step, Level(1, 50, 100, 0.0), 20)[1] == pytest.approx(0.103)
    # Half of the step under way besides: prompts' steps (1 of 100) are met more often, E[s^2]/E[s]
    mean, square = (99 * 0.011 + 0.101) / 100, (99 * 0.011**2 + 0.101**2) / 100
    expected = pytest.approx(0.101 + 0.5 * square / mean)
    assert expected_latencies_s(step, Level(1, 50, 100, 0.5), 8192)[1] == expected


def test_latencies_of_two_requests() -> None:
    """Each is in its prompt's step once in 2: both decode with 1/4, one with 1/2, none with 1/4."""
    step = Roofline(0.0, 0.0, 1.0, 0.0, 1.0, 1e3)  # 1 ms a token
    itl, ttft = expected_latencies_s(step, Level(2, 9, 2, 0.0), 8192)
    # Gaps: 2 of 2 ms with weight 1/4, 1 of 10 ms with 1/2
    assert itl == pytest.approx((0.25 * 2 * 0.002 + 0.5 * 0.010) / (0.25 * 2 + 0.5))
    # The own prompt with the other's decoding or its prompt: 10 or 18 ms
    assert ttft == pytest.approx(0.014)


@pytest.mark.parametrize(
    ("itl", "words"),
    [
        ([0.01, 0.01], "same length"),
        ([0.01, math.nan, math.nan], "at least three"),
        ([0.0, 1.0, 1.0], "> 0"),
    ],
)
def test_data_that_cannot_be_used(itl: list[float], words: str) -> None:
    three = np.ones(3)
    with pytest.raises(SimulatorError, match=words):
        calibrate(NOMINAL, three, itl, np.full(3, np.nan), three, three, closed_loop=True)
