"""What everyone knows about inference engines, shown by the simulated one."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import brentq

from ampacity.simulator.engine.deployment import Deployment
from ampacity.simulator.engine.engine import EngineConfig, Request, Speculation
from ampacity.simulator.models.hardware import PRESETS, linear_config
from benchmarks.servers.truth import Measured, simulate, true_capacity
from tests.support.simulator.engine_runs import prefix_hashes, simulate_closed

BIG = PRESETS["llama3-70b-4xh100"]
SMALL = PRESETS["llama3-8b-h100"]


def gap_quantile(outcome: Measured, quantile: float) -> float:
    lengths, counts = outcome.gaps_s()
    order = np.argsort(lengths)
    cumulated = np.cumsum(counts[order])
    return float(lengths[order][np.searchsorted(cumulated, quantile * cumulated[-1])])


def test_chunked_prefill_lowers_itl_p99_and_raises_the_long_ttft() -> None:
    """Short chats and few prompts of 7,000 tokens: chunks of 512 against whole prompts."""
    rng = np.random.default_rng(1)
    arrivals = np.cumsum(rng.exponential(1 / 6, 1200))
    long = np.arange(1200) % 12 == 11
    inputs, outputs = np.where(long, 7000, 200), np.where(long, 50, 150)
    p99, ttft = [], []
    for budget in (512, 8192):
        outcome = simulate(replace(BIG, max_num_batched_tokens=budget), arrivals, inputs, outputs)
        p99.append(gap_quantile(outcome, 0.99))
        ttft.append(float(np.median(outcome.ttft_s[long])))
    assert p99[0] < p99[1] / 4
    assert ttft[0] > 1.05 * ttft[1]


def test_prefix_hits_lower_ttft_in_proportion() -> None:
    """Prompts of 6,400 tokens, one at a time: TTFT less a step is proportional to tokens computed.

    This is exact without the attention's square (flops_per_pair 0)."""
    step = replace(SMALL.step_time, flops_per_pair=0.0)
    config = replace(SMALL, step_time=step, prefix_caching=True)
    for share in (0.25, 0.5, 0.75):
        tokens = int(6400 * share)
        requests = [
            Request(6400, 1, block_hashes=prefix_hashes("system", tokens)) for _ in range(10)
        ]
        outcome = simulate(config, np.arange(10.0), requests)
        assert outcome.cached_tokens.tolist() == [0] + [tokens] * 9
        ttft = outcome.ttft_s - step.overhead_s
        assert ttft[1:] == pytest.approx(np.full(9, (1 - share) * ttft[0]), rel=0.02)


@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_round_robin_lowers_the_hit_rate_towards_one_nth(replicas: int) -> None:
    """Large cache: sticky finds all earlier turns, round robin those of the same replica."""
    turns, sessions, grown = 12, 60, 160
    names = [[(s, n) for n in range(turns * grown // 16)] for s in range(sessions)]

    def hit_rate(routing: str) -> float:
        rng = np.random.default_rng(2)
        rows = [(t, s) for t in range(turns) for s in rng.permutation(sessions).tolist()]
        requests = [Request((t + 1) * grown, 8, session=s, block_hashes=names[s]) for t, s in rows]
        deployment = Deployment(replace(SMALL, prefix_caching=True), replicas, routing)
        outcome = simulate(deployment, 0.02 * np.arange(len(rows)), requests)
        # New tokens of a turn can never be cached: hits as a share of what the turns before had
        return float(outcome.cached_tokens.sum() / sum(t * grown for t, _ in rows))

    sticky, spread = hit_rate("session-sticky"), hit_rate("round-robin")
    assert sticky > 0.98
    # turn t finds turn t - k, t - k + 1 parts, if that was the last one on this replica:
    # probability (1/N) (1 - 1/N)^(k - 1)
    miss = 1 - 1 / replicas
    found = sum(
        (t - k + 1) * miss ** (k - 1) / replicas for t in range(1, turns) for k in range(1, t + 1)
    )
    assert spread == pytest.approx(found / sum(range(1, turns)), abs=0.04)


def unique_prefix_rate(replicas: int, routing: str) -> float:
    """Each prefix is used N times: with round robin once by each replica."""
    config = replace(SMALL, prefix_caching=True)
    prefixes, uses = 40, replicas
    requests = [
        Request(1616, 4, block_hashes=prefix_hashes(p, 1600))
        for p in range(prefixes)
        for _ in range(uses)
    ]
    arrivals = 0.1 * np.arange(len(requests))
    outcome = simulate(Deployment(config, replicas, routing), arrivals, requests)
    return float((outcome.cached_tokens > 0).mean())


@pytest.mark.parametrize("replicas", [2, 4])
def test_a_prefix_must_be_computed_once_on_every_replica(replicas: int) -> None:
    assert unique_prefix_rate(replicas, "prefix-hash") == pytest.approx(1 - 1 / replicas)
    assert unique_prefix_rate(replicas, "round-robin") == 0.0


def throughput(config: EngineConfig, clients: int) -> float:
    """Output tokens per second of a closed loop."""
    requests = [Request(128, 100) for _ in range(max(40, 4 * clients))]
    outcome = simulate_closed(config, clients, requests)
    return float(outcome.output_tokens.sum() / outcome.finish_s.max())


def test_speculation_helps_at_low_and_not_at_high_concurrency() -> None:
    """4 drafts, acceptance 0.7: 2.77 tokens a step. A single request stays memory-bound.

    512 requests compute 5 tokens each: 2 x 8.03e9 x 2560 over 495 TFLOP/s, 83 ms against 17 ms."""
    plain = replace(SMALL, max_num_seqs=512)
    speculative = replace(plain, speculation=Speculation(4, 0.7))
    gain = {n: throughput(speculative, n) / throughput(plain, n) for n in (1, 16, 128, 512)}
    assert gain[1] == pytest.approx((1 - 0.7**5) / (1 - 0.7), rel=0.05)
    assert gain[1] > gain[128] > gain[512]
    assert gain[512] < 0.9


def capacity_rps(lengths: str) -> float:
    """The 70B preset; prompts of mean 1,000: uniform, or log-normal (sigma 1.5) up to 8,000."""

    def requests(
        rate: float, seed: int
    ) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
        rng = np.random.default_rng(seed)
        arrivals = np.cumsum(rng.exponential(1.0, 2000)) / rate
        if lengths == "uniform":
            inputs = rng.integers(1, 2000, 2000)
        else:
            raw = np.exp(1.5 * rng.standard_normal(2000))
            scale = brentq(lambda c: np.minimum(raw * c, 8000).mean() - 1000, 1, 8000)
            inputs = np.maximum(1, np.rint(np.minimum(raw * scale, 8000))).astype(int)
        return arrivals, inputs, np.full(2000, 20)

    found = true_capacity(BIG, requests, [("ttft", 0.95, 1.0)], replications=2, tolerance=0.02)
    return found.capacity_rps


def test_heavy_tails_move_the_knee_left() -> None:
    """Equal means saturate alike, but waiting grows with E[S^2]: the SLO is violated earlier."""
    assert capacity_rps("heavy") < 0.8 * capacity_rps("uniform")


def static_gain(spread: float) -> float:
    """Return continuous / static throughput at saturation; outputs uniform on 60 (1 ± spread)."""
    rng = np.random.default_rng(5)
    outputs = np.rint(60 * (1 + spread * rng.uniform(-1, 1, 640))).astype(int)
    base = linear_config(0.010, 0.001, max_num_seqs=16)
    spans = [
        simulate(
            replace(base, static_batching=static), np.zeros(640), np.ones(640), outputs
        ).finish_s.max()
        for static in (True, False)
    ]
    return float(spans[0] / spans[1])


def test_continuous_beats_static_batching_the_more_lengths_vary() -> None:
    """A static batch takes its longest of 16 uniform outputs: mean 60 (1 + spread 15/17) steps."""
    gains = [static_gain(spread) for spread in (0.0, 0.5, 0.95)]
    assert gains[0] == pytest.approx(1.0)
    assert gains[1] == pytest.approx(1 + 0.5 * 15 / 17, rel=0.05)
    assert gains[2] == pytest.approx(1 + 0.95 * 15 / 17, rel=0.05)


def test_prefix_hits_raise_capacity() -> None:
    """8B, prompts of 4,000 tokens of which 3,600 are one of 10 prefixes, answers of 4.

    A prompt's operations: 4,000 x 16.06 G + 8.0 M pairs x 0.52 M = 68.4 T; with hits
    400 x 16.06 G + 1.52 M pairs x 0.52 M = 7.2 T. So saturation is at 9.5 times the rate, and the
    gain under a TTFT limit is larger."""

    def requests(rate: float, seed: int) -> tuple[NDArray[np.float64], list[Request]]:
        rng = np.random.default_rng(seed)
        arrivals = np.cumsum(rng.exponential(1.0, 400)) / rate
        names = [prefix_hashes(p, 3600) for p in range(10)]
        return arrivals, [Request(4000, 4, block_hashes=names[p]) for p in rng.integers(0, 10, 400)]

    slos = [("ttft", 0.95, 0.5)]
    found = [
        true_capacity(
            replace(SMALL, prefix_caching=on), requests, slos, replications=2, tolerance=0.05
        )
        for on in (False, True)
    ]
    assert found[1].saturation_rps / found[0].saturation_rps == pytest.approx(9.5, rel=0.05)
    assert found[1].capacity_rps / found[0].capacity_rps > 9.5
