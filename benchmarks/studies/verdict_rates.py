"""How often is a stage's SLO verdict wrong, and how often is there one? Servers with a known law,
in virtual time.

    python -m benchmarks.studies.verdict_rates [--server mm1] [--quantile 0.95] [--runs 600]

The limit is put where a server just keeps it at a share of saturation (``LIMITS``). Stages of 300
to 20,000 requests, each on an idle server, at loads at which the true share of misses is 0.1, 0.5,
1, 1.4 (p95) or 1.6 (p99) and 2 times what the SLO allows. Beside the product's verdicts stands what
an oracle could do: the rule "met where at most c miss" with the c that is wrong in 5 % of the runs
at the limit, which nobody who measures once can know.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from ampacity.analysis.slo import Slo
from ampacity.analysis.stage.analyse import read_records, stage_records
from ampacity.analysis.stage.verdicts import Judge
from ampacity.analysis.stage.verdicts import Judged as Requests
from ampacity.loadgen.rundir.meta import read_stage
from benchmarks.options import parser
from benchmarks.servers import ORIGIN_NS, SERVERS, limit_at, stage_of, table_of, truth_at

LIMITS = (0.5, 0.7, 0.85)
REQUESTS = (300, 700, 3000, 20_000)
FINE = 0.002  # of saturation: how exactly a load is looked for


def shares(quantile: float) -> tuple[float, ...]:
    """Return the shares of misses that are tried, over what the SLO allows."""
    return (0.1, 0.5, 1.0, 1.4 if quantile < 0.97 else 1.6, 2.0)


@cache
def load_with(name: str, limit_load: float, quantile: float, times: float) -> float | None:
    """Return the load with ``times`` the misses that the SLO allows; None: there is none."""
    slo = limit_at(name, limit_load, quantile)
    low, high = (0.05, limit_load) if times < 1 else (limit_load, 0.99)
    if times == 1:
        return limit_load

    def missed(load: float) -> float:
        return truth_at(name, round(load, 4), 400_000, 2).missed(slo.limit_s)

    if missed(low) > times * (1 - quantile):
        return None
    while high - low > FINE:
        middle = (low + high) / 2
        low, high = (low, middle) if missed(middle) > times * (1 - quantile) else (middle, high)
    return low


@dataclass(frozen=True)
class Judged:
    verdict: str
    misses: int


def judge(name: str, load: float, slo: Slo, requests: int, seed: int) -> Judged:
    """Judge a stage as the product does; an unstable one violates."""
    server = SERVERS[name]()
    rate = load * server.most_rps
    sent = stage_of(
        server, rate, requests / rate, np.random.default_rng([seed, requests, round(1e4 * load)])
    )
    table, metas = table_of([sent])
    found = stage_records(read_records(table, ORIGIN_NS), read_stage(metas[0]))
    result, _ = Judge([slo], found.stability, False, 1.0).stage_findings(
        Requests(found.cohort, found.whole)
    )
    verdict = {True: "met", False: "violated", None: "inconclusive"}[result["slo_met"]]
    return Judged(verdict, int(np.count_nonzero(sent.ttft_s > slo.limit_s)))


def main() -> None:
    given = parser(__doc__, runs=600, first_seed=100_000)
    given.add_argument("--server", action="append", choices=list(SERVERS))
    given.add_argument("--quantile", type=float, action="append")
    given.add_argument("--limit", type=float, action="append", help="share of saturation")
    given.add_argument("--requests", type=int, action="append")
    given.add_argument(
        "--share", type=float, action="append", help="of misses, over what is allowed"
    )
    args = given.parse_args()
    print("server q limit requests | share of allowed misses: met / violated, %")
    for name in args.server or ("mm1", "mg1", "mm8", "batch"):
        for quantile in args.quantile or (0.95, 0.99):
            for limit_load in args.limit or LIMITS:
                slo = limit_at(name, limit_load, quantile)
                for requests in args.requests or REQUESTS:
                    row, at = [], {}
                    for times in args.share or shares(quantile):
                        load = load_with(name, limit_load, quantile, times)
                        if load is None:
                            row.append(f"{times:g}: none")
                            continue
                        seeds = range(args.first_seed, args.first_seed + args.runs)
                        at[times] = [judge(name, load, slo, requests, seed) for seed in seeds]
                        said = [j.verdict for j in at[times]]
                        met, violated = (
                            100 * said.count(word) / len(said) for word in ("met", "violated")
                        )
                        row.append(f"{times:g}: {met:.1f} / {violated:.1f}")
                    if 1.0 in at:
                        few = sorted(j.misses for j in at[1.0])[int(0.05 * args.runs)] - 1
                        for times in (0.5, shares(quantile)[3]):
                            if times in at:
                                met = 100 * np.mean([j.misses <= few for j in at[times]])
                                row.append(f"oracle at {times:g}: {met:.1f}")
                    print(
                        f"{name:6} {quantile} {limit_load} {requests:6} | " + "   ".join(row),
                        flush=True,
                    )


if __name__ == "__main__":
    main()
