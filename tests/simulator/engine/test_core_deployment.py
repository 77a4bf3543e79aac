"""Replicas behind a router, and prefill apart from decoding."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from ampacity.simulator import SimulatorError
from ampacity.simulator.engine.deployment import Deployment, Run, Transfer
from ampacity.simulator.engine.engine import EngineConfig, Request, Speculation
from ampacity.simulator.engine.outcome import outcome_of
from ampacity.simulator.engine.steptime import Roofline
from ampacity.simulator.models.hardware import PRESETS, linear_config
from benchmarks.servers.truth import simulate, true_capacity
from tests.support.simulator.engine_runs import prefix_hashes, simulate_closed

LINE = linear_config(0.010, 0.001)


def places(deployment: Deployment, requests: list[Request], arrivals: list[float]) -> list[int]:
    run = Run(deployment)
    for request, at_s in zip(requests, arrivals, strict=True):
        run.arrive(request, at_s)
    run.advance()
    return [request.place for request in requests]


def test_round_robin_and_least_request() -> None:
    # the first request takes 100 steps, the others end before the next one arrives
    requests = [Request(1, 200), *(Request(1, 2) for _ in range(5))]
    arrivals = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
    assert places(Deployment(LINE, 2), requests, arrivals) == [0, 1, 0, 1, 0, 1]
    requests = [Request(1, 200), *(Request(1, 2) for _ in range(5))]
    assert places(Deployment(LINE, 2, "least-request"), requests, arrivals) == [0, 1, 1, 1, 1, 1]


def test_sticky_routings_keep_to_a_replica_and_spread() -> None:
    requests = [
        Request(8, 1, session=n % 40, block_hashes=prefix_hashes(n % 40, 64)) for n in range(400)
    ]
    for routing in ("session-sticky", "prefix-hash"):
        found = places(Deployment(LINE, 4, routing), requests, [0.1 * n for n in range(400)])
        homes = {n % 40: place for n, place in enumerate(found)}
        assert all(homes[n % 40] == place for n, place in enumerate(found))
        assert set(Counter(homes.values())) == {0, 1, 2, 3}
        requests = [Request(8, 1, session=r.session, block_hashes=r.block_hashes) for r in requests]


def test_one_replica_is_the_plain_engine() -> None:
    rng = np.random.default_rng(4)
    arrivals = np.cumsum(rng.exponential(0.05, 300))
    inputs, outputs = rng.integers(1, 4000, 300), rng.integers(1, 400, 300)
    alone = simulate(PRESETS["llama3-8b-l4"], arrivals, inputs, outputs)
    run = Run(Deployment(PRESETS["llama3-8b-l4"]))
    requests = [
        Request(int(prompt), int(output)) for prompt, output in zip(inputs, outputs, strict=True)
    ]
    for request, at_s in zip(requests, arrivals, strict=True):
        run.arrive(request, float(at_s))
    run.advance()
    routed = outcome_of(run, requests)
    assert alone.explicit  # some were preempted
    for request in range(300):
        assert np.array_equal(alone.token_times_s(request), routed.token_times_s(request))


def test_replicas_share_the_load_exactly() -> None:
    """Round robin over two: each replica sees every other request, alone."""
    rng = np.random.default_rng(4)
    arrivals = np.cumsum(rng.exponential(0.05, 200))
    inputs, outputs = np.ones(200), rng.integers(1, 40, 200)
    both = simulate(Deployment(LINE, 2), arrivals, inputs, outputs)
    for half in (0, 1):
        alone = simulate(LINE, arrivals[half::2], inputs[half::2], outputs[half::2])
        assert np.array_equal(both.finish_s[half::2], alone.finish_s)
        for number in range(100):
            assert np.array_equal(
                both.token_times_s(2 * number + half), alone.token_times_s(number)
            )
    lengths, counts = both.gaps_s()
    apart = [
        np.repeat(*simulate(LINE, arrivals[h::2], inputs[h::2], outputs[h::2]).gaps_s())
        for h in (0, 1)
    ]
    assert np.sort(np.repeat(lengths, counts)) == pytest.approx(np.sort(np.concatenate(apart)))


def test_disaggregation_by_hand() -> None:
    """Prefill 1 ms a token, 5 ms a step; a transfer of 4 kB over 1 MB/s plus 2 ms takes 6 ms."""
    prefill = EngineConfig("p", Roofline(0.0, 0.0, 1.0, 0.0, 1e3, 1e3))
    decode = EngineConfig("d", Roofline(5.0, 0.0, 1.0, 0.0, 1e3, 1e3))
    pair = Deployment(decode, prefill=prefill, transfer=Transfer(1e3, 1e6, 0.002))
    outcome = simulate(pair, [0.0, 1.0], [4, 6], [3, 1])
    # First token at 4 ms from the prefill engine; over at 10 ms; then 15 and 20 ms
    assert outcome.token_times_s(0) == pytest.approx([0.004, 0.015, 0.020])
    assert outcome.token_times_s(1) == pytest.approx([1.006])
    assert outcome.ttft_s == pytest.approx([0.004, 0.006])
    assert outcome.finish_s == pytest.approx([0.020, 1.006])


def test_disaggregation_keeps_prompts_out_of_the_gaps() -> None:
    """Long prompts, no chunking: the worst gap is a prefill, but not with prefill elsewhere."""
    rng = np.random.default_rng(6)
    arrivals = np.cumsum(rng.exponential(0.5, 200))
    inputs, outputs = np.full(200, 6000), np.full(200, 100)
    config = PRESETS["llama3-70b-4xh100"]
    transfer = Transfer(320 * 1024, 50e9, 0.001)
    together = simulate(Deployment(config, 2), arrivals, inputs, outputs)
    apart = simulate(
        Deployment(config, prefill=config, transfer=transfer), arrivals, inputs, outputs
    )
    worst = [float(outcome.gaps_s()[0].max()) for outcome in (together, apart)]
    # 6,000 tokens x 141.2 GFLOP over 4 x 0.5 x 989 TFLOP/s take 0.43 s
    assert worst[0] > 0.43
    # The transfer of 6,000 x 320 KiB takes 40 ms
    assert worst[1] < 0.1


def test_everyone_gets_its_tokens_in_every_deployment() -> None:
    rng = np.random.default_rng(8)
    base = PRESETS["llama3-8b-l4"]
    arrivals = np.cumsum(rng.exponential(0.03, 300))
    inputs, outputs = rng.integers(1, 3000, 300), rng.integers(1, 300, 300)
    for deployment in (
        Deployment(base, 3, "least-request"),
        Deployment(base, 2, prefill=base, prefill_replicas=2, transfer=Transfer(131072, 1e9)),
    ):
        outcome = simulate(deployment, arrivals, inputs, outputs)
        for request, tokens in enumerate(outputs):
            times = outcome.token_times_s(request)
            assert len(times) == tokens
            assert times[0] == outcome.first_token_s[request]
            assert times[-1] == pytest.approx(outcome.finish_s[request])
            assert np.all(np.diff(times) >= 0)


@pytest.mark.parametrize("clients", [1, 3])
def test_closed_loop(clients: int) -> None:
    """X = C / (m (alpha + beta C) + Z), with think time Z while the clients stay in step."""
    outcome = simulate_closed(LINE, clients, [Request(1, 10) for _ in range(30)], think_s=0.5)
    response = 10 * (0.010 + 0.001 * clients)
    assert outcome.e2e_s == pytest.approx(np.full(30, response))
    rounds = 30 // clients
    assert outcome.finish_s.max() == pytest.approx(rounds * response + (rounds - 1) * 0.5)


def test_capacity_of_two_replicas_is_about_twice_that_of_one() -> None:
    """Least-request over two M/D/1-like servers is better than two apart, and never worse."""

    def requests(rate: float, seed: int):
        rng = np.random.default_rng(seed)
        return np.cumsum(rng.exponential(1.0, 1500)) / rate, np.ones(1500), np.ones(1500)

    one = linear_config(0.1, 0.0, max_num_seqs=1)
    slos = [("ttft", 0.9, 0.55)]
    single = true_capacity(one, requests, slos, replications=2, tolerance=0.02)
    double = true_capacity(
        Deployment(one, 2, "least-request"), requests, slos, replications=2, tolerance=0.02
    )
    assert double.saturation_rps == pytest.approx(20.0, rel=0.01)
    assert 2 * single.capacity_rps < double.capacity_rps < 20.0


@pytest.mark.parametrize(
    "options",
    [{"replicas": 0}, {"routing": "random"}, {"prefill": LINE}, {"transfer": Transfer(1.0, 1.0)}],
)
def test_bad_deployments(options: dict[str, object]) -> None:
    with pytest.raises(SimulatorError):
        Deployment(LINE, **options)


def test_speculation_behind_a_router() -> None:
    config = replace(LINE, speculation=Speculation(2, 0.7), max_num_batched_tokens=1 << 30)
    requests = [Request(1, 50) for _ in range(20)]
    outcome = simulate(Deployment(config, 2), np.zeros(20), requests)
    assert all(len(outcome.token_times_s(n)) == 50 for n in range(20))
