"""The engine as queues with closed forms (Kleinrock; Harchol-Balter 2013); see docs/simulator.md.

Each figure, the mean of replications, must be within four standard errors of the formula
plus the wait of an arrival for the end of the current step.
"""

import heapq
import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import brentq

from ampacity.simulator.engine.engine import EngineConfig
from ampacity.simulator.models.hardware import linear_config
from benchmarks.servers.truth import Measured, saturation_rps, simulate
from tests.simulator.engine.test_truth import m_d_1_waits_at_most

Lengths = Callable[[np.random.Generator, int], NDArray[np.int64]]


def fixed(tokens: int) -> Lengths:
    return lambda rng, n: np.full(n, tokens)


def geometric(mean: float) -> Lengths:
    return lambda rng, n: rng.geometric(1 / mean, n)


def replicate(
    config: EngineConfig,
    rate: float,
    lengths: Lengths,
    value: Callable[[Measured], NDArray[np.float64]],
    requests: int,
    replications: int = 4,
) -> tuple[float, float]:
    """Mean of `value` over the requests after a warm-up of 20 %, and its standard error."""
    means = []
    for seed in range(replications):
        rng = np.random.default_rng([11, seed])
        arrivals = np.cumsum(rng.exponential(1 / rate, requests))
        outcome = simulate(config, arrivals, np.ones(requests), lengths(rng, requests))
        means.append(value(outcome)[requests // 5 :].mean())
    return float(np.mean(means)), float(np.std(means, ddof=1) / math.sqrt(replications))


def waiting_s(step_s: float) -> Callable[[Measured], NDArray[np.float64]]:
    """Time in the queue: the first token comes one step after admission."""
    return lambda outcome: outcome.ttft_s - step_s


def e2e_s(outcome: Measured) -> NDArray[np.float64]:
    return outcome.e2e_s


def assert_near(
    found: tuple[float, float], formula: float, extra: float = 0.0, noise: float = 0.1
) -> None:
    mean, error = found
    assert error < noise * formula, "too noisy to say anything"
    assert abs(mean - formula) <= 4 * error + extra, (
        f"{mean:.4f} +- {error:.4f} against {formula:.4f}"
    )


def test_m_g_1_pollaczek_khinchine() -> None:
    """One slot, geometric lengths: W = lambda E[S^2] / (2 (1 - rho)), exactly."""
    mean, step = 5.0, 0.02
    p = 1 / mean
    second_moment = step**2 * (2 - p) / p**2
    config = linear_config(step, 0.0, max_num_seqs=1)
    found = replicate(config, 7.0, geometric(mean), waiting_s(step), 6_000)
    assert_near(found, 7.0 * second_moment / (2 * 0.3))


@pytest.mark.parametrize(
    ("servers", "load", "requests", "step_s", "formulas"),
    [
        # mean, p95, p99 of the wait, mu = 1: C/(c mu - lambda), ln(C/(1 - q))/(c mu - lambda)
        (1, 0.7, 1_000, 0.04, (2.3333, 8.797, 14.162)),
        (4, 0.8, 1_500, 0.04, (0.74554, 3.099, 5.110)),
        (8, 0.8, 3_000, 0.04, (0.28603, 1.384, 2.390)),
        (32, 0.9, 6_000, 0.02, (0.14319, 0.692, 1.195)),
    ],
)
def test_m_m_c(
    servers: int, load: float, requests: int, step_s: float, formulas: tuple[float, float, float]
) -> None:
    """Slots of constant speed; geometric lengths of many steps instead of exponential ones.

    An arrival at a busy engine waits half a step more; tolerance: a quarter of a step, and 2 % for
    the smaller second moment. Control variate: the same draws in a queue without steps, in runs
    sixteen times as long."""
    assert erlang_wait(servers, load) == pytest.approx(formulas, rel=1e-3)
    config = linear_config(step_s, 0.0, max_num_seqs=servers)
    late_s = step_s / 2 if servers > 1 else 0.0  # one slot is free at a step's end or idle
    found = []
    for seed in range(4):
        rng = np.random.default_rng([13, seed])
        arrivals = np.cumsum(rng.exponential(1 / (servers * load), 16 * requests))
        lengths = rng.geometric(step_s, 16 * requests)
        outcome = simulate(config, arrivals[:requests], np.ones(requests), lengths[:requests])
        exact = multi_server_waits(servers, arrivals, lengths * step_s)
        engine_, same, long = (
            np.array([waits.mean(), *np.quantile(waits, [0.95, 0.99])])
            for waits in (
                (outcome.ttft_s - step_s)[requests // 5 :],
                exact[requests // 5 : requests],
                exact[requests // 5 :],
            )
        )
        assert abs(engine_[0] - late_s - same[0]) < step_s / 4
        found.append(engine_ - same + long)
    for mean, error, formula in zip(
        np.mean(found, 0), np.std(found, 0, ddof=1) / 2, formulas, strict=True
    ):
        extra = 0.02 * formula + step_s / 4
        assert_near((float(mean - late_s), float(error)), formula, extra, noise=0.15)


def multi_server_waits(
    servers: int, arrivals: NDArray[np.float64], service_s: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return waits, first come first served, each to the first free server (Kiefer, Wolfowitz)."""
    free = [0.0] * servers
    waits = np.empty(len(arrivals))
    for number, (arrival, service) in enumerate(
        zip(arrivals.tolist(), service_s.tolist(), strict=True)
    ):
        start = max(arrival, free[0])
        waits[number] = start - arrival
        heapq.heapreplace(free, start + service)
    return waits


def erlang_wait(servers: int, load: float) -> tuple[float, float, float]:
    """(mean, p95, p99) of the M/M/c wait for mu = 1 (Erlang C)."""
    offered, blocked = servers * load, 1.0
    for k in range(1, servers + 1):
        blocked = offered * blocked / (k + offered * blocked)
    waits = blocked / (1 - load * (1 - blocked))
    rate = servers - offered
    return waits / rate, math.log(waits / 0.05) / rate, math.log(waits / 0.01) / rate


def test_m_d_1_quantiles() -> None:
    """P[W <= t] = (1 - rho) sum_{k <= t/D} x^k / k! e^-x, x = lambda (k D - t): Erlang 1909."""
    service, rate = 0.1, 7.0
    config = linear_config(service, 0.0, max_num_seqs=1)
    waits = []
    for seed in range(4):
        rng = np.random.default_rng([17, seed])
        outcome = simulate(
            config, np.cumsum(rng.exponential(1 / rate, 8000)), np.ones(8000), np.ones(8000)
        )
        waits.append((outcome.ttft_s - service)[1600:])
    for quantile in (0.95, 0.99):
        formula = brentq(lambda t, q=quantile: m_d_1_waits_at_most(t, rate, service) - q, 0.01, 3.0)
        found = [np.quantile(each, quantile) for each in waits]
        assert_near((float(np.mean(found)), float(np.std(found, ddof=1) / 2)), formula)


@pytest.mark.parametrize("lengths", [fixed(50), geometric(50)], ids=["fixed", "geometric"])
def test_m_g_1_processor_sharing_is_insensitive(lengths: Lengths) -> None:
    """Step time beta * b without a limit on b: E[T] = E[S] / (1 - rho), for any distribution.

    A step is b beta long: an arrival waits E[b^2] beta / (2 E[b]) for its end, 4.5 beta at rho 0.8.
    """
    config = linear_config(0.0, 0.002, max_num_seqs=10_000)
    assert_near(replicate(config, 8.0, lengths, e2e_s, 3_000), 0.1 / 0.2, extra=0.009)


def birth_death(
    rate: float, alpha: float, beta: float, slots: int, tokens: float
) -> tuple[float, float]:
    """(E[T], TPOT) in s of the batching server: deaths k / ((alpha + beta k) m), k = min(n, B)."""
    weight, weights = 1.0, [1.0]
    for n in range(1, 4000):
        k = min(n, slots)
        weight *= rate * (alpha + beta * k) * tokens / k
        weights.append(weight)
    probabilities = np.array(weights) / sum(weights)
    n = np.arange(len(weights))
    response = float((n * probabilities).sum() / rate)
    return response, float((np.minimum(n, slots) * probabilities).sum() / (rate * tokens))


@pytest.mark.parametrize(
    ("load", "response_s", "tpot_s"),
    [
        (0.3, 1.3491, 0.013491),
        (0.5, 1.5891, 0.015887),
        (0.7, 1.9508, 0.019236),
        (0.8, 2.2750, 0.021320),
    ],
)
def test_batching_server_response_and_tpot(load: float, response_s: float, tpot_s: float) -> None:
    """alpha 10 ms, beta 1 ms, B 16, m 100, geometric: within 2 %, with half a step of waiting."""
    rate = load * 16 / (100 * (0.010 + 0.001 * 16))
    formula = birth_death(rate, 0.010, 0.001, 16, 100)
    assert formula == pytest.approx((response_s, tpot_s), rel=2e-4)
    config = linear_config(0.010, 0.001, max_num_seqs=16)
    found = replicate(config, rate, geometric(100), e2e_s, 1_500)
    assert_near(found, response_s, extra=0.02 * response_s)
    # Time in service over tokens: the ratio of means is the mean over tokens.
    in_service = replicate(
        config,
        rate,
        fixed(100),
        lambda o: (o.finish_s - o.first_token_s) / (o.output_tokens - 1),
        500,
    )
    assert_near(in_service, tpot_s, extra=0.02 * tpot_s)


@pytest.mark.parametrize(("prefill_s", "rps"), [(0.0, 6.1538), (0.05, 4.7059), (0.1, 3.8095)])
def test_batching_server_saturation(prefill_s: float, rps: float) -> None:
    """1 / (p + m (alpha / B + beta))."""
    assert 1 / (prefill_s + 100 * (0.010 / 16 + 0.001)) == pytest.approx(rps, abs=5e-5)
    config = linear_config(0.010, 0.001, prefill_s, max_num_seqs=16)

    def requests(
        rate: float, seed: int
    ) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
        return np.arange(1600) / rate, np.ones(1600, dtype=np.int64), np.full(1600, 100)

    assert saturation_rps(config, requests) == pytest.approx(rps, rel=1e-4)
