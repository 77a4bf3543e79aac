"""Is the busy hour's rate that a profile gives the true one? Days whose rate is known, one log of a
day or a week each.

    python -m benchmarks.workloads.busy_hour --runs 600

``sine``: the rate swings by 90 % around its mean, once a day; ``step`` and ``hour``: it stands at
the peak for four hours, or for one. All have a peak of 1.9 times the mean. ``week``: seven days of
the sine, the last two at 60 % of it; ``flat``: it does not vary. Arrivals are Poisson, ``bursts``
(at once, five on average, geometric) or ``sessions`` (of five turns on average, geometric, an
exponential minute from turn to turn): the index of dispersion of both is 9. The truth is the
largest mean of the rate of requests over an hour. ``largest`` is the bias of what stands to reason:
the busiest of all windows of an hour.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ampacity.workloads.fit.busy_hour import CELLS, busy_rate
from benchmarks.options import parser

Floats = npt.NDArray[np.float64]
CELL_S = 60.0
DAY = 1440  # minutes
SWING, PEAK = 0.9, 1.9  # of the mean
SIZE = 5.0  # requests of a burst or of a session, on average
BETWEEN_S = 60.0  # from turn to turn, on average


def sine(minute: Floats) -> Floats:
    return 1 + SWING * np.sin(2 * np.pi * (minute / DAY + 0.12))


def step(minute: Floats, hours: int = 4) -> Floats:
    at, low = minute % DAY, (24 - hours * PEAK) / (24 - hours)
    return np.where((at >= 558) & (at < 558 + 60 * hours), PEAK, low)


def hour(minute: Floats) -> Floats:
    return step(minute, 1)


def flat(minute: Floats) -> Floats:
    return np.ones_like(minute)


def week(minute: Floats) -> Floats:
    return sine(minute) * np.where(minute // DAY % 7 >= 5, 0.6, 1.0)


MEANS = (0.65, 10.0, 100.0)
SHAPES: dict[str, tuple[Callable[[Floats], Floats], int, tuple[float, ...]]] = {
    "sine": (sine, 1, MEANS),
    "step": (step, 1, MEANS),
    "week": (week, 7, MEANS),
    "hour": (hour, 1, MEANS[:1]),
    "flat": (flat, 1, MEANS[:1]),
}


def minutes(kind: str, rate_rps: Floats, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Return requests in each minute, with the mean rate ``rate_rps``."""
    if kind == "poisson":
        return rng.poisson(rate_rps * CELL_S)
    begun = rng.poisson(rate_rps * CELL_S / SIZE)
    if kind == "bursts":
        return begun + np.where(begun > 0, rng.negative_binomial(np.maximum(begun, 1), 1 / SIZE), 0)
    start_s = (np.repeat(np.arange(len(begun)), begun) + rng.random(begun.sum())) * CELL_S
    found = np.zeros(len(begun), dtype=np.int64)
    while len(start_s):  # turn after turn of those that go on
        found += np.bincount((start_s / CELL_S).astype(np.int64), minlength=len(begun))
        start_s = start_s[rng.random(len(start_s)) < 1 - 1 / SIZE]
        start_s += rng.exponential(BETWEEN_S, len(start_s))
        start_s = start_s[start_s < len(begun) * CELL_S]
    return found


def of_requests(kind: str, rate: Floats, step_s: float) -> Floats:
    """Return the rate of requests if sessions begin at ``rate``, in steps."""
    if kind != "sessions":
        return rate
    kept = np.exp(-step_s / (SIZE * BETWEEN_S))
    later, found = rate[-1], np.empty_like(rate)
    for _ in range(2):  # the first round settles what came before the log
        for i, now in enumerate(rate.tolist()):
            later = kept * later + (1 - kept) * now
            found[i] = now / SIZE + (1 - 1 / SIZE) * later
    return found


def windows(per_minute: Floats) -> Floats:
    return np.convolve(per_minute, np.ones(CELLS), "valid") / CELLS


def main() -> None:
    made = parser(__doc__, runs=600, seed=100_000)
    given = made.parse_args()
    print("shape  arrivals  mean/s   peak/s   bias    s.d.   interval  covers   largest")
    for shape, (law, days, means) in SHAPES.items():
        per_minute = law(np.arange(days * DAY) + 0.5)
        for mean in means:
            for kind in ("poisson", "bursts", "sessions"):
                if kind == "sessions" and mean * days > 10:
                    continue  # minutes of time for what 10/s says already
                truth = mean * windows(of_requests(kind, per_minute, CELL_S)).max()
                rows = []
                for seed in range(given.seed, given.seed + given.runs):
                    rng = np.random.default_rng(seed)
                    counts = minutes(kind, mean * per_minute, rng)
                    rps, (low, high) = busy_rate(counts, CELL_S)
                    rows.append(
                        (
                            rps,
                            low <= truth <= high,
                            (high - low) / 2,
                            windows(counts).max() / CELL_S,
                        )
                    )
                rps, held, half, largest = np.array(rows).T
                print(
                    f"{shape:5}  {kind:8} {mean:6g}  {truth:7.4g}  "
                    f"{100 * (rps.mean() / truth - 1):+5.1f} % "
                    f"{100 * rps.std() / truth:5.1f} %   ± {100 * half.mean() / truth:4.1f} %  "
                    f"{100 * held.mean():5.1f} %  {100 * (largest.mean() / truth - 1):+5.1f} %",
                    flush=True,
                )


if __name__ == "__main__":
    main()
