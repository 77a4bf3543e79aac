"""How often is L against lambda W called inconsistent: in steady stages, closed loops, and where
something drifts?

python -m benchmarks.studies.littles_law [--runs 600] [--seed 100000]
"""

from collections.abc import Callable

import numpy as np

from ampacity.analysis.metrics.requests import Floats
from ampacity.analysis.stage.littles_law import consistency
from ampacity.analysis.stage.steady import find_window, time_average_in_flight
from benchmarks.options import parser
from benchmarks.servers import SERVERS

NAMES = ("mm1", "mg1", "mm8", "batch")


def is_off(begin: Floats, ttft: Floats, end: Floats, length_s: float) -> bool:
    """Return whether the stage [0, length_s) is called inconsistent."""
    window = find_window(0.0, length_s, begin, end, ttft, None)
    level = time_average_in_flight(window.start_s, window.end_s, begin, end)
    return consistency(window.start_s, window.end_s, level, begin, end).ok is False


def open_stage(
    name: str,
    load: float,
    n: int,
    rng: np.random.Generator,
    late: Callable[..., Floats] | None = None,
) -> bool:
    """Judge a stage of about n requests; ``late`` gives what is added to their ends."""
    server = SERVERS[name]()
    begin, ttft, e2e = server.run(load * server.most_rps, n, rng)
    length_s = n / (load * server.most_rps)
    due = begin < length_s
    begin, ttft, e2e = begin[due], ttft[due], e2e[due]
    added = late(begin, e2e, length_s, rng) if late else 0.0
    return is_off(begin, ttft, begin + e2e + added, length_s)


def closed_stage(users: int, n: int, fixed: bool, rng: np.random.Generator) -> bool:
    """Judge users who ask again at once, with answers of 1 s, fixed or exponential."""
    each = n // users
    takes = np.ones((users, each)) if fixed else rng.exponential(1.0, (users, each))
    end = np.cumsum(takes, axis=1)
    begin, length_s = end - takes, float(end[:, -1].min()) * rng.uniform(0.8, 1.0)
    kept = begin.ravel() < length_s
    order = np.argsort(begin.ravel()[kept], kind="stable")
    begin_s, end_s = begin.ravel()[kept][order], end.ravel()[kept][order]
    return is_off(begin_s, end_s - begin_s, end_s, length_s)


WRONG_TIMES: dict[str, Callable[..., Floats]] = {
    "ends ever later, by 5 % of the time since the start": lambda b, e, t, rng: 0.05 * b,
    "ends of the second half late by ten answers": lambda b, e, t, rng: 10 * e.mean() * (b > t / 2),
    "a random half of the ends late by three answers": lambda b, e, t, rng: (
        3 * e.mean() * (rng.random(len(b)) < 0.5)
    ),
}


def main() -> None:
    given = parser(__doc__, runs=600, seed=100_000)
    args = given.parse_args()

    def share(one: Callable[[np.random.Generator], bool]) -> str:
        return (
            f"{np.mean([one(np.random.default_rng([args.seed, k])) for k in range(args.runs)]):.1%}"
        )

    for name in NAMES:
        for load in (0.3, 0.6, 0.9, 1.2):
            off = [
                share(lambda rng, at=load, n=n, of=name: open_stage(of, at, n, rng))
                for n in (300, 1000, 3000, 20_000)
            ]
            print(f"{name} at {load}, 300/1,000/3,000/20,000 requests: {' '.join(off)}", flush=True)
    for fixed in (True, False):
        off = [share(lambda rng, c=c, f=fixed: closed_stage(c, 3000, f, rng)) for c in (8, 64, 256)]
        print(
            f"closed, 8/64/256 users, {'equal' if fixed else 'exponential'} answers: "
            f"{' '.join(off)}",
            flush=True,
        )
    for what, late in WRONG_TIMES.items():
        off = [
            share(lambda rng, of=name, f=late: open_stage(of, 0.6, 3000, rng, f)) for name in NAMES
        ]
        print(f"{what}, {'/'.join(NAMES)} at 0.6, 3,000 requests: {' '.join(off)}", flush=True)


if __name__ == "__main__":
    main()
