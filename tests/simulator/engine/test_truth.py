"""Capacity in virtual time against crossings that are known in closed form."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import brentq

from ampacity.simulator import SimulatorError
from ampacity.simulator.engine.engine import EngineConfig
from ampacity.simulator.models.hardware import PRESETS, linear_config
from benchmarks.servers.truth import Slo, shares_within, simulate, true_capacity

Arrays = tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]


def poisson(count: int, prompt: int, output: int):
    def requests(rate: float, seed: int) -> Arrays:
        rng = np.random.default_rng(seed)
        arrivals = np.cumsum(rng.exponential(1.0, count)) / rate
        return arrivals, np.full(count, prompt), np.full(count, output)

    return requests


def m_d_1_waits_at_most(t: float, rate: float, service: float) -> float:
    """P[W <= t] = (1 - rho) sum_{k <= t/D} x^k / k! e^-x, x = lambda (k D - t): Erlang 1909."""
    terms = [
        (rate * (k * service - t)) ** k / math.factorial(k) * math.exp(-rate * (k * service - t))
        for k in range(int(t // service) + 1)
    ]
    return (1 - rate * service) * sum(terms)


def test_m_d_1_crossing() -> None:
    """One slot, one token of 0.1 s: the rate at which 90 % wait <= 0.45 s, and Little's L."""
    service, wait = 0.1, 0.45
    rate = brentq(lambda r: m_d_1_waits_at_most(wait, r, service) - 0.9, 1.0, 9.9)
    mean_in_flight = rate * (service + rate * service**2 / (2 * (1 - rate * service)))
    config = linear_config(service, 0.0, max_num_seqs=1)
    found = true_capacity(
        config, poisson(4_000, 1, 1), [("ttft", 0.9, wait + service)], replications=4
    )
    assert found.capacity_rps == pytest.approx(rate, abs=4 * found.usable_rps_se + 0.005 * rate)
    assert found.usable_rps_se < 0.03 * rate
    expected = pytest.approx(mean_in_flight, abs=4 * found.c_max_se + 0.02 * mean_in_flight)
    assert found.c_max == expected
    assert found.saturation_rps == pytest.approx(10.0)
    assert found.binding == ("ttft", 0.9, wait + service)


def test_an_slo_that_never_breaks_leaves_the_saturation_rate() -> None:
    config = linear_config(0.1, 0.0, max_num_seqs=1)
    found = true_capacity(config, poisson(500, 1, 1), [("ttft", 0.5, 1e6)], replications=2)
    assert (found.capacity_rps, found.binding) == (pytest.approx(10.0), None)


def test_an_slo_below_the_floor_is_never_met() -> None:
    config = linear_config(0.1, 0.0, max_num_seqs=1)
    found = true_capacity(
        config, poisson(500, 1, 2), [("ttft", 0.5, 1.0), ("itl", 0.5, 0.09)], replications=2
    )
    assert (found.capacity_rps, found.c_max) == (0.0, 0.0)
    assert found.binding == ("itl", 0.5, 0.09)


@pytest.mark.parametrize("slo", [("speed", 0.9, 1.0), ("ttft", 1.0, 1.0), ("ttft", 0.9, 0.0)])
def test_bad_slos(slo: Slo) -> None:
    with pytest.raises(SimulatorError, match="needs"):
        true_capacity(linear_config(0.1, 0.0), poisson(10, 1, 1), [slo])


def test_outcome_of_two_requests_by_hand() -> None:
    """Steps of 10 + b ms. Tokens of request 0: 11, 22 ms; 1 arrives in step 2: 33, 44 ms."""
    config = linear_config(0.010, 0.001)
    outcome = simulate(config, [0.0, 0.015], [5, 5], [2, 2])
    assert outcome.step_end_s == pytest.approx([0.011, 0.022, 0.033, 0.044])
    assert outcome.ttft_s == pytest.approx([0.011, 0.018])
    assert outcome.e2e_s == pytest.approx([0.022, 0.029])
    assert outcome.tpot_s == pytest.approx([0.011, 0.011])
    # In flight: 22 ms and 29 ms of 44 ms
    assert outcome.concurrency(0.0, 0.044) == pytest.approx(51 / 44)
    assert outcome.concurrency(0.015, 0.022) == pytest.approx(2.0)
    everyone = np.ones(2, dtype=bool)
    slos: list[Slo] = [
        ("ttft", 0.5, 0.012),
        ("e2e", 0.5, 0.03),
        ("tpot", 0.5, 0.01),
        ("itl", 0.5, 0.0111),
    ]
    assert shares_within(outcome, slos, everyone) == [0.5, 1.0, 0.0, 1.0]


def test_a_request_of_one_token_has_no_gaps() -> None:
    outcome = simulate(linear_config(0.01, 0.0), [0.0], [1], [1])
    assert math.isnan(outcome.tpot_s[0])
    assert outcome.gaps_s()[1].sum() == 0


def test_preempted_requests_keep_their_long_gap() -> None:
    base = linear_config(0.01, 0.0)
    config = EngineConfig("tight", base.step_time, 4, 1000, 64, 16, 4)
    outcome = simulate(config, [0.0, 0.0], [4, 4], [44, 44])
    assert list(outcome.explicit) == [1]  # preempted
    # the second waits until the first has all its 44 tokens: from step 28 to that after the 44th
    assert np.diff(outcome.token_times_s(1)).max() == pytest.approx((44 - 28) * 0.01)
    gaps, counts = outcome.gaps_s()
    assert counts.sum() == 2 * 43
    assert gaps.max() == pytest.approx(0.16)


@pytest.mark.parametrize(
    ("arrivals", "inputs", "outputs"),
    [([], [], []), ([1.0, 0.5], [1, 1], [1, 1]), ([0.0], [1, 1], [1]), ([0.0], [1], [0])],
)
def test_bad_requests(arrivals: list[float], inputs: list[int], outputs: list[int]) -> None:
    with pytest.raises(SimulatorError):
        simulate(linear_config(0.1, 0.0), arrivals, inputs, outputs)


def chat_short(count: int):
    """Log-normal lengths: input p50 128, p99 512, output p50 32, p99 128 (z of p99: 2.326)."""

    def draw(rng: np.random.Generator, median: float) -> NDArray[np.int64]:
        return np.maximum(
            1, np.rint(median * np.exp(math.log(4) / 2.3263 * rng.standard_normal(count)))
        ).astype(int)

    def requests(rate: float, seed: int) -> Arrays:
        rng = np.random.default_rng(seed)
        return np.cumsum(rng.exponential(1.0, count)) / rate, draw(rng, 128), draw(rng, 32)

    return requests


def test_demo_saturates_where_it_is_meant_to() -> None:
    """Between 120 and 200 requests/s, steps of 8 ms or more, TTFT of some tens of ms well below."""
    requests = chat_short(4000)
    found = true_capacity(
        PRESETS["demo"], requests, [("ttft", 0.99, 0.5)], replications=2, tolerance=0.02
    )
    assert 120 < found.capacity_rps <= found.saturation_rps < 200
    below = simulate(PRESETS["demo"], *requests(60.0, 1))
    assert np.diff(below.step_end_s).min() > 0.008
    assert 0.01 < np.quantile(below.ttft_s, 0.5) < np.quantile(below.ttft_s, 0.99) < 0.06
