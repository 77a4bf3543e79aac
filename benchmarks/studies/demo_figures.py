"""Are the three lines of `ampacity demo` true? Its sweep in virtual time, over seeds, against long
runs.

    python -m benchmarks.studies.demo_figures --runs 30 --first-seed 100000 [--duration 8s]

The truth is the capacity of the demo's engine and SLOs and the mean in flight at it, by bisection
over runs of 200,000 requests (``benchmarks.servers.truth``). A line misses where its
interval does not hold the truth: capacity, C_max, and the fleet for 1,000 requests/s.
"""

import asyncio
import math
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ampacity.analysis.contract.summary import to_json
from ampacity.analysis.slo import parse_slos
from ampacity.analysis.summary import summarise
from ampacity.cli.measure.demo import (
    DURATION,
    MAX_DURATION_S,
    PRESET,
    SLOS,
    START_RPS,
    WORKLOAD,
)
from ampacity.config import make_settings
from ampacity.experiments.sweep import sweep
from ampacity.experiments.virtual import player
from ampacity.experiments.virtual import predict as virtual
from ampacity.loadgen.rundir.files import load_run
from ampacity.progress import Progress
from ampacity.simulator.models.hardware import find_deployment
from ampacity.workloads.schedule import open_schedule
from benchmarks.options import parser
from benchmarks.servers.truth import true_capacity

PEAK_RPS, SAFETY = 1000, 1.5
TRUTH_REQUESTS, TRUTH_RUNS = 200_000, 4
WAITS_S = 13.0  # for answers after the stages, which count in real time only


def settings_of(seed: int, duration: str, out: Path | None = None) -> Any:
    raw = {
        "url": "http://x.invalid/v1",
        "workload": WORKLOAD,
        "duration": duration,
        "slo": SLOS,
        "seed": seed,
    }
    return make_settings(raw | {"peak_rps": PEAK_RPS} | ({"out": str(out)} if out else {}))


def truth() -> tuple[float, float]:
    """Return (capacity in requests/s, mean in flight at it)."""
    settings = settings_of(1, DURATION)

    def make(rate_rps: float, seed: int) -> Any:
        made = open_schedule(
            settings.workload,
            rate_rps=rate_rps,
            duration_s=TRUTH_REQUESTS / rate_rps,
            seed=seed + 10_000,
            stage=0,
        )
        return made.scheduled_s, made.input_tokens, made.output_tokens

    slos = [(slo.metric, slo.quantile, slo.limit_s) for slo in parse_slos(SLOS)]
    found = true_capacity(
        find_deployment(PRESET), make, slos, replications=TRUTH_RUNS, warmup_share=0.05
    )
    print(
        f"truth: {found.capacity_rps:.4g} ± {found.usable_rps_se:.2g} req/s, C_max "
        f"{found.c_max:.4g} ± {found.c_max_se:.2g}"
    )
    return found.capacity_rps, found.c_max


def one_demo(seed: int, duration: str) -> dict[str, Any]:
    """Return the summary of a demo with the demo's own stage lengths."""
    player.REQUESTS_MIN = 1
    with tempfile.TemporaryDirectory() as folder:
        settings = settings_of(seed, duration, Path(folder) / "run")
        drive = partial(sweep, start_rps=START_RPS, max_duration_s=MAX_DURATION_S - WAITS_S)
        progress = Progress(quiet=True)
        path = asyncio.run(
            virtual.predict(settings, find_deployment(PRESET), [], progress, drive, "demo")
        )
        found = to_json(summarise(load_run(path)))
    return found


def main() -> None:
    given = parser(__doc__, runs=30, first_seed=100_000)
    given.add_argument("--duration", default=DURATION)
    args = given.parse_args()
    rate, in_flight = truth()
    instances = math.ceil(math.ceil(PEAK_RPS / rate) * SAFETY)
    rows, missed = [], {"capacity": 0, "C_max": 0, "fleet": 0}
    for seed in range(args.first_seed, args.first_seed + args.runs):
        found = one_demo(seed, args.duration)
        capacity, fleet = found["capacity"], found["fleet"]

        def holds(ends: list[float | None] | None, true: float) -> bool:
            return bool(ends) and (ends[0] or 0) <= true <= (
                math.inf if ends[1] is None else ends[1]
            )

        for name, ends, true in (
            ("capacity", capacity["capacity_rps_ci"], rate),
            ("C_max", capacity["c_max_ci"], in_flight),
            ("fleet", fleet["instances_ci"], instances),
        ):
            missed[name] += not holds(ends, true)
        low, high = capacity["capacity_rps_ci"] or (math.nan, math.nan)
        load_s = sum(s["window"]["end_s"] for s in found["stages"])
        rows.append(
            [
                capacity["capacity_rps"] or math.nan,
                (high or math.nan) - low,
                capacity["c_max"] or math.nan,
                load_s,
            ]
        )
        print(f"{seed}: {found['verdict']}", flush=True)
    usable, width, c_max, load_s = np.array(rows).T
    print(
        f"{args.runs} demos: capacity median {np.nanmedian(usable):.4g} "
        f"({np.isnan(usable).sum()} without one), half width median "
        f"{np.nanmedian(width / usable) / 2:.1%}, C_max median {np.nanmedian(c_max):.3g}; "
        f"seconds of load {np.median(load_s):.0f} "
        f"(most {load_s.max():.0f}); missed the truth: {missed}"
    )


if __name__ == "__main__":
    main()
