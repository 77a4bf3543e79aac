"""Do the 95 % intervals of a p99 hold, and are the verdicts right? Seeded runs in virtual time against the truth.

    python -m benchmarks.coverage [--server batch|heavy|preset] [--runs 125] [--requests 20000]

The truth is that of a run fifty times as long and more. Nothing is written to disk: times go straight into
``analysis``, warm-up cut included. Figures: docs/methods.md.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from analysis.attainment import judge_slo
from analysis.intervals import independent_looks
from analysis.observations import Observations
from analysis.slo import Slo
from analysis.steady import find_window, in_flight_at, judge_stability

Floats = npt.NDArray[np.float64]

QUANTILE = 0.99
LOADS = (0.5, 0.7, 0.85, 0.95)
VERDICT_LOADS = (0.8, 0.9, 0.97, 1.03, 1.15)
WARMUP_REQUESTS = 1000  # that the study adds before the requests that it counts
TRUE_REQUESTS = 1_000_000


@dataclass(frozen=True)
class Server:
    """``run(rate, n, rng)`` gives (arrivals, TTFT, time in system) of n requests in s; saturated at ``most_rps``."""

    name: str
    most_rps: float
    run: Callable[[float, int, np.random.Generator], tuple[Floats, Floats, Floats]]


def batch_server(name: str, slots: int, heavy: bool) -> Server:
    """b requests decode together, one step takes 10 + b ms and gives each a token; the others wait in turn.

    Answers have 100 tokens in the mean, exponential or (heavy) log-normal with sigma 1. A prefill of 50 ms,
    sigma 0.3, is added to every TTFT and stops nobody. Saturates at 1/(m (alpha/B + beta)).
    """
    step_s = [0.010 + 0.001 * b for b in range(slots + 1)]

    def run(rate_rps: float, n: int, rng: np.random.Generator) -> tuple[Floats, Floats, Floats]:
        arrival = np.cumsum(rng.exponential(1 / rate_rps, n))
        tokens = rng.lognormal(np.log(100) - 0.5, 1.0, n) if heavy else rng.exponential(100, n)
        start, end = _serve(arrival, tokens, slots, step_s)
        ttft = start - arrival + step_s[1] + 0.05 * rng.lognormal(0, 0.3, n)
        return arrival, ttft, end - arrival

    return Server(name, 1 / (100 * (0.010 / slots + 0.001)), run)


def _serve(arrival: Floats, tokens: Floats, slots: int, step_s: list[float]) -> tuple[Floats, Floats]:
    """Start and end of each request; in flight they are known by the count of steps at which they end."""
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
    """Llama 3 8B on an A100 as the simulator has it, prompts of 512 tokens and answers of 128 in the median."""
    from simulator.hardware import find_config
    from simulator.truth import saturation_rps, simulate

    config = find_config("llama3-8b-a100")

    def lengths(n: int, rng: np.random.Generator) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        inputs, outputs = rng.lognormal(np.log(512), 0.6, n), rng.lognormal(np.log(128), 0.6, n)
        return np.clip(inputs, 1, 4000).astype(np.int64), np.clip(outputs, 1, 2000).astype(np.int64)

    def run(rate_rps: float, n: int, rng: np.random.Generator) -> tuple[Floats, Floats, Floats]:
        out = simulate(config, np.cumsum(rng.exponential(1 / rate_rps, n)), *lengths(n, rng))
        return out.arrival_s, out.ttft_s, out.e2e_s

    def make(rate_rps: float, seed: int) -> tuple[Floats, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        rng = np.random.default_rng(seed)
        return np.cumsum(rng.exponential(1 / rate_rps, 8000)), *lengths(8000, rng)

    return Server("preset", saturation_rps(config, make), run)


SERVERS: dict[str, Callable[[], Server]] = {
    "batch": lambda: batch_server("batch", 16, heavy=False),
    "heavy": lambda: batch_server("heavy", 32, heavy=True),
    "preset": preset_server,
}


def measure(server: Server, load: float, n: int, seed: int) -> tuple[Observations, bool | None]:
    """TTFT of one run as the tool would see it, its warm-up cut, and whether the stage is found stable."""
    rate = load * server.most_rps
    arrival, ttft, e2e = server.run(
        rate, n + WARMUP_REQUESTS, np.random.default_rng([seed, round(load * 1e6), n])
    )
    end_s = float(arrival[-1])
    window = find_window(0.0, end_s, arrival, arrival + e2e, ttft, None)
    stable = judge_stability(0.0, end_s, arrival, arrival + e2e, e2e).stable
    kept = np.flatnonzero(arrival >= window.start_s)[-n:]
    found = in_flight_at(arrival[kept], arrival, arrival + e2e)
    return observations(ttft[kept], independent_looks(found)), stable


def observations(values: Floats, looks: float = float("inf")) -> Observations:
    """One sample per request, none failed."""
    n = len(values)
    return Observations("requests", values, np.arange(n), None, np.zeros(n), np.full(n, np.nan), looks=looks)


def truth(server: Server, load: float, requests: int = TRUE_REQUESTS, parts: int = 4) -> float:
    """p99 of TTFT in the steady state, s, over ``parts`` runs of ``requests`` each."""
    found = []
    for part in range(parts):
        rng = np.random.default_rng([99, part, round(load * 1e6)])
        skipped = min(50_000, requests // 5)
        found.append(server.run(load * server.most_rps, requests + skipped, rng)[1][skipped:])
    return float(np.quantile(np.concatenate(found), QUANTILE))


@dataclass(frozen=True)
class Coverage:
    """Of the runs at one load: shares, and widths as upper end over lower end."""

    load: float
    truth_s: float
    covered: float  # of the intervals that were given
    refused: float
    width: float
    oracle_width: float  # of exp(+-1.96 sd) where the sd of ln p99 over runs is known

    @property
    def right(self) -> float:
        """Share of runs whose interval holds the truth or that said 'too short'."""
        return self.refused + self.covered * (1 - self.refused)


def cover(server: Server, load: float, n: int, runs: int, true_s: float, seed: int = 1) -> Coverage:
    """How often the 95 % interval of p99 TTFT contains the truth."""
    measured = [measure(server, load, n, seed * 10_000 + r)[0] for r in range(runs)]
    ends = np.array([o.confidence_interval(QUANTILE) for o in measured])
    given = ~np.isnan(ends).any(axis=1)
    inside = (ends[:, 0] <= true_s) & (true_s <= ends[:, 1])
    estimates = np.log([o.quantile_bounds(QUANTILE)[0] for o in measured])
    any_given = bool(given.any())
    return Coverage(
        load=load,
        truth_s=true_s,
        covered=float(inside[given].mean()) if any_given else float("nan"),
        refused=float(1 - given.mean()),
        width=float(np.median(ends[given, 1] / ends[given, 0])) if any_given else float("nan"),
        oracle_width=float(np.exp(2 * 1.96 * estimates.std())),
    )


def verdicts(
    server: Server, load: float, limit_s: float, n: int, runs: int, seed: int = 2
) -> dict[str, float]:
    """Shares of met, broken and undecided at a load; a stage without a steady state is broken."""
    counts = dict.fromkeys(("met", "broken", "undecided"), 0)
    for run in range(runs):
        o, stable = measure(server, load, n, seed * 10_000 + run)
        verdict = judge_slo(o, Slo("ttft", QUANTILE, limit_s))["verdict"]
        counts["broken" if stable is False else verdict] += 1
    return {name: count / runs for name, count in counts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", choices=SERVERS, default="batch")
    parser.add_argument("--runs", type=int, default=125, help="at each load")
    parser.add_argument("--requests", type=int, default=20_000, help="of a run")
    parser.add_argument(
        "--capacity", type=float, default=0.8, help="share of saturation at which the SLO's limit is put"
    )
    args = parser.parse_args()  # fmt: skip
    server = SERVERS[args.server]()
    size = TRUE_REQUESTS if args.server != "preset" else 500_000
    known = cache(lambda load: truth(server, load, size))
    print(
        f"{server.name}: saturated at {server.most_rps:.4g} requests/s; {args.runs} runs of {args.requests}"
    )
    print("load   truth s  right  covered  refused  width  oracle")
    for load in LOADS:
        c = cover(server, load, args.requests, args.runs, known(load))
        print(f"{load:4.2f} {c.truth_s:9.4g}  {c.right:5.3f}  {c.covered:7.3f}  {c.refused:7.3f}  {c.width:5.2f}  {c.oracle_width:5.2f}",
              flush=True)  # fmt: skip
    limit_s = known(args.capacity)
    print(f"SLO ttft_p99 = {limit_s:.4g} s: capacity at {args.capacity:.2f} of saturation")
    for share in VERDICT_LOADS:
        found = verdicts(server, share * args.capacity, limit_s, args.requests, args.runs)
        print(f"{share:4.2f} of capacity: " + ", ".join(f"{k} {v:.3f}" for k, v in found.items()), flush=True)


if __name__ == "__main__":
    main()
