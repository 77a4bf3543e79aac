"""How often does the stated region of a knee hold the load at which p99 truly parts from p50?

    python -m benchmarks.studies.knee_hits [--sweeps 600] [--servers mm1,mg1,mm8,batch] [--longer 8]

Sweeps of 6 to 10 even loads from 0.1-0.3 to 0.95-1.1 of saturation, stages of 30 to 60 s, then
three stages at 1.1 to 1.6, with which the knee is found again. The truth is the lowest load at
which p99/p50 (p95/p50, where the sweep goes by p95) of TTFT of a long run exceeds twice that at
0.1; of M/M/1, M/G/1 and M/M/8 it never does.
"""

from functools import cache

import numpy as np

from ampacity.analysis.capacity.knee import DIVERGENCE_FACTOR, find_knee
from ampacity.analysis.contract.stage import Stage
from ampacity.analysis.stage.analyse import analyse_stage, read_records
from ampacity.loadgen.rundir.meta import read_stage
from benchmarks.options import parser
from benchmarks.servers import ORIGIN_NS, SERVERS, stage_of, table_of, truth_at

LOADS = np.arange(0.5, 0.99, 0.02)


@cache
def true_knee(name: str, tail: float) -> tuple[float, float] | None:
    """Return (requests in flight, requests/s) where the ratio parts; None: nowhere."""
    low, at = _ratio(name, 0.1, tail), 0.0
    for load in LOADS.round(3).tolist():
        ratio = _ratio(name, load, tail)
        if ratio > DIVERGENCE_FACTOR * low:
            share = np.log(DIVERGENCE_FACTOR * low / at) / np.log(ratio / at)
            a, b = (truth_at(name, v, 400_000, 1) for v in (round(load - 0.02, 3), load))
            return a.in_flight + share * (b.in_flight - a.in_flight), a.rate_rps + share * (
                b.rate_rps - a.rate_rps
            )
        at = ratio
    return None


def _ratio(name: str, load: float, tail: float) -> float:
    truth = truth_at(name, load, 400_000, 1)
    return truth.quantile_s(tail) / truth.quantile_s(0.5)


def sweep(
    name: str, rng: np.random.Generator, longer: float = 1.0
) -> tuple[list[Stage], list[Stage]]:
    """Return stages up to saturation, and three beyond it, each ``longer`` times as long."""
    server, n = SERVERS[name](), int(rng.integers(6, 11))
    within = np.linspace(rng.uniform(0.1, 0.3), rng.uniform(0.95, 1.1), n)
    loads = [*within, *np.sort(rng.uniform(1.1, 1.6, 3))]
    duration_s = longer * rng.uniform(30, 60)
    table, metas = table_of(
        [stage_of(server, load * server.most_rps, duration_s, rng) for load in loads]
    )
    records = read_records(table, ORIGIN_NS)
    stages = [analyse_stage(records, read_stage(meta), []) for meta in metas]
    return stages[:n], stages[n:]


def judge(name: str, sweeps: int, seed: int, longer: float = 1.0) -> dict[str, float]:
    """Count sweeps, and return the median width of their regions (upper over lower end)."""
    found = dict.fromkeys(("named", "wrong_in_flight", "wrong_rps", "moved", "named_by_more"), 0)
    widths = []
    for k in range(sweeps):
        stages, beyond = sweep(name, np.random.default_rng([seed, k]), longer)
        knee, more = find_knee(stages), find_knee(stages + beyond)
        found["moved"] += knee.region is not None and knee.region != more.region
        found["named_by_more"] += knee.region is None and more.region is not None
        if more.region is None:
            continue
        found["named"] += 1
        definition = more.methods["p99_p50_divergence"].definition or ""
        truth = true_knee(name, 0.99 if definition.startswith("p99") else 0.95)
        for i, (what, of) in enumerate(
            (("wrong_in_flight", "region"), ("wrong_rps", "region_rps"))
        ):
            low, high = getattr(more, of)
            found[what] += truth is None or not low <= truth[i] <= high
        widths.append(
            [getattr(more, of)[1] / getattr(more, of)[0] for of in ("region", "region_rps")]
        )
    width = np.median(widths, axis=0) if widths else (np.nan, np.nan)
    return found | {"width_in_flight": float(width[0]), "width_rps": float(width[1])}


def main() -> None:
    given = parser(__doc__, sweeps=600, seed=100_000, servers="mm1,mg1,mm8,batch")
    given.add_argument("--longer", type=float, default=1.0, help="times, of every stage")
    args = given.parse_args()
    for name in args.servers.split(","):
        found = judge(name, args.sweeps, args.seed, args.longer)
        print(
            f"{name}, {args.sweeps} sweeps:",
            ", ".join(f"{k} {v:.3g}" for k, v in found.items()),
            flush=True,
        )


if __name__ == "__main__":
    main()
