"""When requests are due: arrival processes of an open loop."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from workloads.errors import WorkloadError

ARRIVALS: tuple[str, ...] = ("poisson", "constant")

MAX_PLANNED_REQUESTS = 50_000_000
"""A stage of more requests is refused before it eats the memory."""


def arrival_times(
    kind: str, rate_rps: float, duration_s: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Offsets in seconds, float64, sorted, in [0, duration_s), at ``rate_rps`` requests/s on average.

    ``poisson``: exponential gaps, the first one before the first request; the number of requests is
    random (its mean is rate x duration). ``constant``: k / rate for k = 0, 1, ... One random state gives the
    same pattern at every rate, stretched. Raises WorkloadError.
    """
    check_arrivals(kind)
    for name, value, unit in (("rate", rate_rps, "requests/s"), ("duration", duration_s, "seconds")):
        if not (math.isfinite(value) and value > 0):
            raise WorkloadError(f"{name} is {value!r} {unit}: give a finite number above 0")
    expected = rate_rps * duration_s
    if expected > MAX_PLANNED_REQUESTS:
        raise WorkloadError(
            f"{rate_rps:g} requests/s for {duration_s:g} s is more than {MAX_PLANNED_REQUESTS} requests: lower one"
        )
    if kind == "constant":
        times = np.arange(math.ceil(expected) + 1, dtype=np.float64) / rate_rps
        return times[times < duration_s]
    return _poisson_times(rate_rps, duration_s, rng)


def _poisson_times(rate_rps: float, duration_s: float, rng: np.random.Generator) -> NDArray[np.float64]:
    expected = rate_rps * duration_s
    block = math.ceil(expected + 6 * math.sqrt(expected)) + 16  # one block is enough but once in 10^9
    gaps = rng.standard_exponential(block)
    while (times := np.cumsum(gaps) / rate_rps)[-1] < duration_s:
        gaps = np.concatenate([gaps, rng.standard_exponential(block)])
    return times[: np.searchsorted(times, duration_s, side="left")]


def check_arrivals(kind: str) -> None:
    """Raise WorkloadError unless ``kind`` is one of ``ARRIVALS``."""
    if kind not in ARRIVALS:
        raise WorkloadError(f"arrivals {kind!r} are not known: use {' or '.join(ARRIVALS)}")
