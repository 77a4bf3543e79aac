"""Servers with a known law, in virtual time, and their steady state; only "preset" is our
simulator.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from ampacity.analysis.slo import Slo, parse_slo

Floats = npt.NDArray[np.float64]
Times = tuple[Floats, Floats, Floats]
TRUTH_REQUESTS = 1_000_000
TRUTH_PARTS = 4
TRUTH_SKIPPED = 50_000


@dataclass(frozen=True)
class Server:
    """A server that is idle before the first request and saturates at ``most_rps``.

    ``serve(arrivals, rng)`` returns the (TTFT, E2E) of requests, in s."""

    name: str
    most_rps: float
    serve: Callable[[Floats, np.random.Generator], tuple[Floats, Floats]]

    def run(self, rate_rps: float, n: int, rng: np.random.Generator) -> Times:
        """Return (arrivals, TTFT, E2E) of n Poisson requests, in s."""
        arrival = np.cumsum(rng.exponential(1 / rate_rps, n))
        return (arrival, *self.serve(arrival, rng))


def one_server(
    name: str, draw: Callable[[int, np.random.Generator], Floats], mean_s: float, decode_s: float
) -> Server:
    """Return M/G/1, first come first served: TTFT is queue and service; E2E adds ``decode_s``."""

    def serve(arrival: Floats, rng: np.random.Generator) -> tuple[Floats, Floats]:
        done = np.cumsum(draw(len(arrival), rng))
        before = np.concatenate([[0.0], done[:-1]])
        ttft = done + np.maximum.accumulate(arrival - before) - arrival  # Lindley 1952
        return ttft, ttft + decode_s

    return Server(name, 1 / mean_s, serve)


def many_servers(name: str, servers: int, mean_s: float, decode_s: float) -> Server:
    """Return M/M/c: TTFT is the time in the queue and in service."""

    def serve(arrival: Floats, rng: np.random.Generator) -> tuple[Floats, Floats]:
        free = [0.0] * servers
        ttft = []
        for at, takes in zip(
            arrival.tolist(), rng.exponential(mean_s, len(arrival)).tolist(), strict=True
        ):
            end = max(at, free[0]) + takes
            heapq.heapreplace(free, end)
            ttft.append(end - at)
        found = np.array(ttft)
        return found, found + decode_s

    return Server(name, servers / mean_s, serve)


def batch_server(name: str, slots: int, heavy: bool) -> Server:
    """Return a batching server: with b requests in a batch, a step of 10 + b ms gives each a token.

    Answers have 100 tokens on average, exponential or (heavy) log-normal with sigma 1. A prefill of
    50 ms, sigma 0.3, is added to every TTFT without delaying others. Saturates at
    1/(m (alpha/B + beta))."""
    step_s = [0.010 + 0.001 * b for b in range(slots + 1)]

    def serve(arrival: Floats, rng: np.random.Generator) -> tuple[Floats, Floats]:
        n = len(arrival)
        tokens = rng.lognormal(np.log(100) - 0.5, 1.0, n) if heavy else rng.exponential(100, n)
        start, end = _decode(arrival, tokens, slots, step_s)
        ttft = start - arrival + step_s[1] + 0.05 * rng.lognormal(0, 0.3, n)
        return ttft, np.maximum(end - arrival, ttft)

    return Server(name, 1 / (100 * (0.010 / slots + 0.001)), serve)


def _decode(
    arrival: Floats, tokens: Floats, slots: int, step_s: list[float]
) -> tuple[Floats, Floats]:
    """Return start and end of each request; running ones are kept by the step at which they end."""
    need = tokens.tolist()
    start, end = [0.0] * len(need), [0.0] * len(need)
    running: list[tuple[float, int]] = []
    now = steps = 0.0
    waiting, busy = 0, 0  # the first that has not begun
    for i, at in enumerate([*arrival.tolist(), np.inf]):
        while busy:
            due = now + (running[0][0] - steps) * step_s[busy]
            if due > at:
                break
            steps, done = running[0]
            now = end[done] = due
            if waiting < i:
                start[waiting] = now
                heapq.heapreplace(running, (steps + need[waiting], waiting))
                waiting += 1
            else:
                heapq.heappop(running)
                busy -= 1
        if at == np.inf:
            break
        if busy:
            steps += (at - now) / step_s[busy]
        now = at
        if busy < slots:
            busy += 1
            heapq.heappush(running, (steps + need[i], i))
            start[i], waiting = at, i + 1
    return np.array(start), np.array(end)


def preset_server() -> Server:
    """Return the simulator's Llama 3 8B on an A100; p50 of 512 prompt and 128 answer tokens."""
    from ampacity.simulator.engine.outcome import simulate
    from ampacity.simulator.models.hardware import find_config
    from benchmarks.servers.truth import saturation_rps

    config = find_config("llama3-8b-a100")

    def lengths(
        n: int, rng: np.random.Generator
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        inputs, outputs = rng.lognormal(np.log(512), 0.6, n), rng.lognormal(np.log(128), 0.6, n)
        return np.clip(inputs, 1, 4000).astype(np.int64), np.clip(outputs, 1, 2000).astype(np.int64)

    def serve(arrival: Floats, rng: np.random.Generator) -> tuple[Floats, Floats]:
        out = simulate(config, arrival, *lengths(len(arrival), rng))
        return out.ttft_s, out.e2e_s

    def make(
        rate_rps: float, seed: int
    ) -> tuple[Floats, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        rng = np.random.default_rng(seed)
        return np.cumsum(rng.exponential(1 / rate_rps, 8000)), *lengths(8000, rng)

    return Server("preset", saturation_rps(config, make), serve)


SERVERS: dict[str, Callable[[], Server]] = {
    "mm1": lambda: one_server("mm1", lambda n, rng: rng.exponential(0.1, n), 0.1, 0.5),
    "mg1": lambda: one_server(
        "mg1", lambda n, rng: rng.lognormal(np.log(0.1) - 0.5, 1.0, n), 0.1, 0.5
    ),
    "mm8": lambda: many_servers("mm8", 8, 0.5, 0.5),
    "batch": lambda: batch_server("batch", 16, heavy=False),
    "heavy": lambda: batch_server("heavy", 32, heavy=True),
    "preset": preset_server,
}


@dataclass(frozen=True)
class Truth:
    """A server's steady state at one load."""

    rate_rps: float
    in_flight: float
    ttft_s: Floats  # sorted sample

    def quantile_s(self, q: float) -> float:
        return float(np.quantile(self.ttft_s, q))

    def missed(self, limit_s: float) -> float:
        """Return the share of requests whose TTFT is above the limit."""
        return 1 - float(np.searchsorted(self.ttft_s, limit_s, side="right")) / len(self.ttft_s)


@cache
def truth_at(
    name: str, load: float, requests: int = TRUTH_REQUESTS, parts: int = TRUTH_PARTS
) -> Truth:
    """Return the steady state at ``load`` times saturation, from ``parts`` runs of ``requests``."""
    server = SERVERS[name]()
    rate = load * server.most_rps
    runs = [
        server.run(
            rate, requests + TRUTH_SKIPPED, np.random.default_rng([98, part, round(load * 1e6)])
        )
        for part in range(parts)
    ]
    ttft = np.sort(np.concatenate([ttft[TRUTH_SKIPPED:] for _, ttft, _ in runs]))
    return Truth(
        rate, rate * float(np.mean([e2e[TRUTH_SKIPPED:].mean() for *_, e2e in runs])), ttft
    )


def limit_at(name: str, load: float, quantile: float) -> Slo:
    """Return the TTFT SLO that is just met at ``load`` times saturation."""
    limit_s = truth_at(name, load).quantile_s(quantile)
    return parse_slo(f"ttft_p{100 * quantile:g}={1e3 * limit_s:.4f}ms")
