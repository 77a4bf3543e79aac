"""Which process does 'ampacity workload fit' find in a log, of which the process is known?

    python -m benchmarks.workloads.arrival_fits --runs 600

Each run draws a log of the size given, fits it, and counts the kind of process that is chosen by
held-out likelihood, and how far the fitted process's index of dispersion over ten seconds (of a
long draw) is from the true one.
"""

from collections import Counter

import numpy as np

from ampacity.workloads.arrivals.processes import arrival_times
from ampacity.workloads.fit.process import choose_process
from ampacity.workloads.fit.profile import FEWEST
from ampacity.workloads.fit.traffic import count_windows
from benchmarks.options import parser

RATE_RPS = 2.0
WINDOWS_S = (1, 10, 60)
LAWS = (
    "poisson",
    "gamma:cv=1.5",
    "gamma:cv=3",
    "weibull:cv=3",
    "onoff:on=10s,off=50s",
    "onoff:on=60s,off=240s",
    "mmpp:rates=1/8,stay=60s/5s",
    "mmpp:rates=1/2,stay=60s/60s",
    "diurnal",
)


def log_of(law: str, requests: int, rng: np.random.Generator) -> np.ndarray:
    """Return sorted times from 0, at least 100; three days of ``diurnal``."""
    if law == "diurnal":
        days = [
            arrival_times(law, requests / 3 / 86_400, 86_400, rng) + day * 86_400
            for day in range(3)
        ]
        times = np.concatenate(days)
    else:
        times = arrival_times(law, RATE_RPS, requests / RATE_RPS, rng)
        while len(times) < FEWEST:  # off all the time: no log
            times = arrival_times(law, RATE_RPS, requests / RATE_RPS, rng)
    return times - times[0]


def dispersion(times: np.ndarray) -> list[float]:
    return [w.dispersion() for width in WINDOWS_S if (w := count_windows(times, width)).total >= 5]


def main() -> None:
    given = parser(__doc__, runs=600, requests=2000, seed=100_000)
    given.add_argument(
        "--laws", default=",".join(map(str, range(len(LAWS)))), help="numbers of the laws"
    )
    args = given.parse_args()
    print(
        "law | kinds chosen | dispersion over 10 s, fitted / true, p10 p50 p90 | same of "
        "independent gaps"
    )
    for law in (LAWS[int(k)] for k in args.laws.split(",")):
        kinds: Counter[str] = Counter()
        ratio: list[float] = []
        plain: list[float] = []
        rng = np.random.default_rng(1)
        true = (
            None
            if law == "diurnal"
            else count_windows(arrival_times(law, RATE_RPS, 100_000, rng), 10).dispersion()
        )
        for run in range(args.runs):
            rng = np.random.default_rng([args.seed, run])
            times = log_of(law, args.requests, rng)
            found = choose_process(times, dispersion(times), rng)
            kinds[found[0].text.partition(":")[0]] += 1
            if true is not None and run < 100:
                gaps = next(
                    p.text
                    for p in found
                    if p.text.partition(":")[0] in ("poisson", "gamma", "constant")
                )
                for text, held in ((found[0].text, ratio), (gaps, plain)):
                    held.append(
                        count_windows(arrival_times(text, RATE_RPS, 50_000, rng), 10).dispersion()
                        / true
                    )
        shown = ", ".join(f"{kind} {count / args.runs:.1%}" for kind, count in kinds.most_common())
        spread = [
            " ".join(f"{q:.2f}" for q in np.quantile(h, [0.1, 0.5, 0.9])) if h else "-"
            for h in (ratio, plain)
        ]
        print(f"{law} | {shown} | {spread[0]} | {spread[1]}", flush=True)


if __name__ == "__main__":
    main()
