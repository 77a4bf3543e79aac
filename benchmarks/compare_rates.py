"""How often does ``ampacity compare`` find a difference between two equal runs, and one of some per cent? In virtual time.

    .venv/bin/python -m benchmarks.compare_rates --pairs 100 --rate 3.16

Runs are those of benchmarks.gate_rates: steps with noise, seeds of their own; --slower 1.05 makes B's steps 5 % longer.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter

from analysis.arms import Arm
from analysis.compare import compare
from benchmarks.gate_rates import simulate


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--rate", type=float, default=3.16, help="requests/s")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--jitter", type=float, default=0.03)
    parser.add_argument("--run-noise", type=float, default=0.005, help="of a run's speed, as compare assumes")
    parser.add_argument("--change", type=float, default=0.0, help="B's steps are longer by this share")
    parser.add_argument("--first-seed", type=int, default=1)
    options = parser.parse_args()
    options.preset, options.workload = "llama3-8b-a100", "chat"
    for schedule in ("same", "other"):
        found: Counter[str] = Counter()
        for pair in range(options.pairs):
            seed = options.first_seed + pair
            a = simulate(options, seed, 1000 * seed)
            b = simulate(options, seed if schedule == "same" else seed + 10**6, 1000 * seed + 1, "steps")
            result = compare([Arm("A", a), Arm("B", b)])
            differs = {
                s["metric"] for s in result["shift"] for q in s["quantiles"] if q["verdict"] == "differs"
            }
            found.update([*differs, *(["any quantile"] if differs else [])])
            found.update(["any line"] if any(r["winner"] for r in result["scorecard"]) else [])
        print(json.dumps({"schedule": schedule, "pairs": options.pairs, "rate": options.rate, "change": options.change, **found}), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
