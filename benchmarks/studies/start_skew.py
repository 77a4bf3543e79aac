"""What does the skew of the workers' starts do to the arrivals that an endpoint sees?

    python -m benchmarks.studies.start_skew [--workers 1000] [--rate 5000] [--runs 20]

Virtual time. Each worker starts late by its own skew, uniform on [0, s]. ``dealt``: one schedule,
whose requests go to the workers in turn, as ampacity does. ``own``: each worker draws a schedule of
its own at its share of the rate. Prints the index of dispersion of counts (variance over mean; 1
for Poisson) by length of window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from ampacity.analysis.metrics.requests import Floats
from ampacity.workloads.arrivals.processes import arrival_times
from benchmarks.options import parser

PROCESSES = ("poisson", "constant", "gamma:cv=3", "mmpp:rates=1/8,stay=10s/1s")
SKEWS_S = (0.0, 0.001, 0.01, 0.1, 1.0)
WINDOWS_S = (0.001, 0.01, 0.1, 1.0, 10.0)


def dealt(due_s: Floats, skew_s: Floats) -> Floats:
    """Return the arrivals of one schedule that goes to the workers in turn, in no order."""
    return due_s + np.resize(skew_s, len(due_s))


def own(
    process: str, rate_rps: float, duration_s: float, skew_s: Floats, rng: np.random.Generator
) -> Floats:
    """Return the arrivals of workers that each draw a schedule of their own, in no order."""
    share_rps = rate_rps / len(skew_s)
    return np.concatenate(
        [
            late_s + arrival_times(process, share_rps, duration_s, rng, one_of_many=True)
            for late_s in skew_s
        ]
    )


def counted(at_s: Floats, window_s: float, begin_s: float, end_s: float) -> npt.NDArray[np.int64]:
    """Return the arrivals in each window of [begin, end)."""
    windows = int((end_s - begin_s) / window_s + 1e-9)
    which = np.floor((at_s - begin_s) / window_s).astype(np.int64)
    return np.bincount(which[(which >= 0) & (which < windows)], minlength=windows)


def of_constant(window_s: float, skew_s: float) -> float:
    """Return the dispersion of a dense constant schedule of which each request has its own skew.

    A request due x before a window's end falls in it with a probability p that rises from 0 to 1
    over ``skew_s``; the variance is the sum of p (1 - p). For windows and skews that are shorter
    than a worker's own gap."""
    if skew_s <= window_s:
        return skew_s / (3 * window_s)
    return 1 - window_s / skew_s + window_s**2 / (3 * skew_s**2)


def dispersions(
    process: str, how: str, skew_s: float, plan: Plan, windows_s: Sequence[float] = WINDOWS_S
) -> list[float]:
    """Return the index of dispersion at each length of window, over all runs together.

    The first second is left out: not all workers have started."""
    counts: list[list[npt.NDArray[np.int64]]] = [[] for _ in windows_s]
    for seed in range(plan.runs):
        rng = np.random.default_rng([plan.seed, seed])
        skews_s = rng.uniform(0.0, skew_s, plan.workers)
        if how == "dealt":
            at_s = dealt(arrival_times(process, plan.rate, plan.duration, rng), skews_s)
        else:
            at_s = own(process, plan.rate, plan.duration, skews_s, rng)
        for found, window_s in zip(counts, windows_s, strict=True):
            found.append(counted(at_s, window_s, 1.0, plan.duration))
    return [float(np.var(all_) / np.mean(all_)) for all_ in map(np.concatenate, counts)]


@dataclass(frozen=True)
class Plan:
    """Workers, their rate together, the length and number of runs, and the first seed."""

    workers: int = 1000
    rate: float = 5000.0
    duration: float = 61.0
    runs: int = 20
    seed: int = 100000


def main() -> None:
    given = parser(__doc__)
    for field in fields(Plan):
        given.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    plan = Plan(**vars(given.parse_args()))
    windows = " | ".join(f"{1e3 * w:g} ms" if w < 1 else f"{w:g} s" for w in WINDOWS_S)
    print(f"| arrivals | schedule | skew up to | {windows} |")
    print("|---" * (3 + len(WINDOWS_S)) + "|")
    for process in PROCESSES:
        for how in ("dealt", "own"):
            for skew_s in SKEWS_S:
                cells = " | ".join(f"{x:.2f}" for x in dispersions(process, how, skew_s, plan))
                print(f"| `{process}` | {how} | {1e3 * skew_s:g} ms | {cells} |", flush=True)


if __name__ == "__main__":
    main()
