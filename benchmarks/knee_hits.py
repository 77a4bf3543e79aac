"""How often does the stated region of a knee hold the known knee? Noisy curves of closed networks.

    python -m benchmarks.knee_hits [--curves 100]

The throughput of C users in a closed network of queues is exact by mean value analysis; its knee is where the
asymptotic bounds meet, N* = (D + Z)/D_max (Lazowska et al. 1984). Each stage has the noise of its requests.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import numpy as np

from analysis.knee import find_knee

LEVELS = np.array([1, 2, 4, 6, 8, 12, 16, 24, 32, 48.0])


def closed_network(users: int, demands_s: tuple[float, ...], delay_s: float) -> float:
    """Exact throughput of a closed network of queues and a delay by mean value analysis (Reiser and Lavenberg 1980)."""
    queue = np.zeros(len(demands_s))
    rate = 0.0
    for n in range(1, users + 1):
        stay = np.array(demands_s) * (1 + queue)
        rate = n / (delay_s + stay.sum())
        queue = rate * stay
    return rate


def stages_of(x: Any, y: Any, requests: int, rng: np.random.Generator | None = None) -> list[dict[str, Any]]:
    """Stages with the noise of counts in throughput and three times that in concurrency; TTFT rises past the corner."""
    corner = float(np.max(y)) * float(x[0] / y[0])
    found = []
    for i, (n, rate) in enumerate(zip(x.tolist(), y.tolist(), strict=True)):
        noise = (rng.standard_normal(3) if rng else np.zeros(3)) / math.sqrt(requests)
        ratio = 2.0 * (1 + (n / corner) ** 3) * math.exp(5 * noise[2])
        figures = {"p50": 0.1, "p95": 0.1 * ratio, "p99": 0.1 * ratio, "p99_ci": [0.08 * ratio, 0.12 * ratio]}
        found.append({
            "index": i, "kind": "closed", "client_limited": False, "requests": requests, "stable": True, "slo_met": True,
            "concurrency": n * math.exp(3 * noise[0]), "achieved_rps": rate * math.exp(noise[1]),
            "ttft_from_schedule_s": figures, "e2e_from_schedule_s": figures,
        })  # fmt: skip
    return found


def hits(curves: int, requests: int, stations: int, seed: int) -> tuple[int, int, float]:
    """(curves with a region, regions that hold the knee, median upper over lower end)."""
    rng = np.random.default_rng([seed, requests, stations])
    inside, widths = 0, []
    for _ in range(curves):
        corner = rng.uniform(5, 20)
        largest = 1.0 / corner  # of a demand and delay of 1 s in all
        others = tuple(largest * rng.uniform(0.1, 0.6, stations - 1))
        y = np.array([closed_network(int(n), (largest, *others), 1 - largest - sum(others)) for n in LEVELS])
        region = find_knee(stages_of(LEVELS, y, requests, rng))["region"]
        if region is not None:
            inside += region[0] <= corner <= region[1]
            widths.append(region[1] / region[0])
    return len(widths), inside, float(np.median(widths))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--curves", type=int, default=100)
    args = parser.parse_args()
    for stations in (1, 3):
        for requests in (300, 1000, 10_000):
            named, inside, width = hits(args.curves, requests, stations, 1)
            print(f"{stations} stations, {requests} requests a stage: {named} of {args.curves} with a region, {inside} hold the knee, width {width:.2f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
