"""Do the 95 % intervals of a p99 hold, and are the verdicts right? Seeded runs in virtual time
against the truth.

    python -m benchmarks.studies.coverage [--server batch|heavy|preset] [--runs 125]

The truth is that of a run fifty times as long and more. Nothing is written to disk: times go
straight into ``analysis``, warm-up cut included. Figures: docs/methods.md.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from ampacity.analysis.metrics.observations import Observations
from ampacity.analysis.slo import Slo
from ampacity.analysis.stage.analyse import read_records, stage_records
from ampacity.analysis.stage.attainment import judge_slo
from ampacity.loadgen.rundir.meta import read_stage
from benchmarks.options import parser
from benchmarks.servers import ORIGIN_NS, SERVERS, Server, stage_of, table_of

Floats = npt.NDArray[np.float64]

QUANTILE = 0.99
LOADS = (0.5, 0.7, 0.85, 0.95)
VERDICT_LOADS = (0.8, 0.9, 0.97, 1.03, 1.15)
TRUE_REQUESTS = 1_000_000


def measure(server: Server, load: float, n: int, seed: int) -> tuple[Observations, bool | None]:
    """Measure TTFT in a stage of about n requests; return it and whether the stage is stable."""
    rate = load * server.most_rps
    sent = stage_of(server, rate, n / rate, np.random.default_rng([seed, round(load * 1e6), n]))
    table, metas = table_of([sent])
    found = stage_records(read_records(table, ORIGIN_NS), read_stage(metas[0]))
    return found.cohort.ttft(from_schedule=True), found.stability.stable


def observations(values: Floats) -> Observations:
    """Return one sample per request, none failed."""
    n = len(values)
    return Observations("requests", values, np.arange(n), None, np.zeros(n), np.full(n, np.nan))


def truth(server: Server, load: float, requests: int = TRUE_REQUESTS, parts: int = 4) -> float:
    """Return p99 of TTFT in the steady state, s, over ``parts`` runs of ``requests`` each."""
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
        """Return the share of runs whose interval holds the truth or is too short to be given."""
        return self.refused + (self.covered * (1 - self.refused) if self.refused < 1 else 0.0)


def cover(server: Server, load: float, n: int, runs: int, true_s: float, seed: int = 1) -> Coverage:
    """Return how often the 95 % interval of p99 TTFT contains the truth."""
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
    """Return shares of the verdicts at a load; an unstable stage counts as violated."""
    counts = dict.fromkeys(("met", "violated", "inconclusive"), 0)
    for run in range(runs):
        o, stable = measure(server, load, n, seed * 10_000 + run)
        verdict = judge_slo(o, Slo("ttft", QUANTILE, limit_s)).verdict
        counts["violated" if stable is False else verdict] += 1
    return {name: count / runs for name, count in counts.items()}


def main() -> None:
    given = parser(__doc__)
    given.add_argument("--server", choices=SERVERS, default="batch")
    given.add_argument("--runs", type=int, default=125, help="at each load")
    given.add_argument("--requests", type=int, default=20_000, help="of a run")
    given.add_argument(
        "--capacity",
        type=float,
        default=0.8,
        help="share of saturation at which the SLO's limit is put",
    )
    args = given.parse_args()
    server = SERVERS[args.server]()
    size = TRUE_REQUESTS if args.server != "preset" else 500_000
    known = cache(lambda load: truth(server, load, size))
    print(
        f"{server.name}: saturated at {server.most_rps:.4g} requests/s; {args.runs} runs of "
        f"{args.requests}"
    )
    print("load   truth s  right  covered  refused  width  oracle")
    for load in LOADS:
        c = cover(server, load, args.requests, args.runs, known(load))
        print(
            f"{load:4.2f} {c.truth_s:9.4g}  {c.right:5.3f}  {c.covered:7.3f}  {c.refused:7.3f} "
            f" {c.width:5.2f}  {c.oracle_width:5.2f}",
            flush=True,
        )
    limit_s = known(args.capacity)
    print(f"SLO ttft_p99 = {limit_s:.4g} s: capacity at {args.capacity:.2f} of saturation")
    for share in VERDICT_LOADS:
        found = verdicts(server, share * args.capacity, limit_s, args.requests, args.runs)
        print(
            f"{share:4.2f} of capacity: " + ", ".join(f"{k} {v:.3f}" for k, v in found.items()),
            flush=True,
        )


if __name__ == "__main__":
    main()
