"""How often does ``ampacity compare`` name a winner between two equal runs, and find one that is
some per cent slower?

    .venv/bin/python -m benchmarks.studies.compare_rates --servers mm1,mg1,mm8,batch --runs 600
    .venv/bin/python -m benchmarks.studies.compare_rates --servers batch --loads 0.6 --slower 0.1

Servers of benchmarks.servers, in virtual time. Every run is slower or faster as a whole by --noise
(s.d.) and has 3 % of noise of its own in each request's time. ``same``: both runs sent the same
requests at the same times; ``other``: nothing but the workload is the same. A sweep has three
loads, the last of which violates the SLO.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ampacity.analysis.change.judged import prepare
from ampacity.analysis.change.results import Comparison
from ampacity.analysis.compare.pairs import ComparedRun
from ampacity.analysis.compare.scorecard import compare
from ampacity.analysis.slo import Slo, parse_slo
from benchmarks.options import parser
from benchmarks.servers import SERVERS, Sent, Server, run_of, truth_at

JITTER = 0.03
SWEEP = (0.75, 1.0, 1.25)  # of the load


def sent(server: Server, rate_rps: float, requests: int, seed: int, own: int, speed: float) -> Sent:
    """One stage. ``seed`` draws arrivals and work; times are ``speed`` times as long, with noise
    drawn from ``own``.

    A server that takes ``speed`` times as long for all is the same one in a time that runs slower.
    """
    rng = np.random.default_rng([seed, 1])
    duration_s = requests / rate_rps
    arrival = np.sort(rng.uniform(0, duration_s, requests))
    ttft, e2e = server.serve(arrival / speed, np.random.default_rng([seed, 2]))
    jitter = np.exp(np.random.default_rng([own, 3]).normal(0, JITTER, (2, requests)))
    first = ttft * speed * jitter[0]
    return Sent(rate_rps, duration_s, arrival, first, first + (e2e - ttft) * speed * jitter[1])


def arm(name: str, stages: Sequence[Sent], slos: Sequence[Slo], seed: int) -> ComparedRun:
    """A run with lengths drawn by its seed, which say nothing of the server's work."""
    run = run_of(stages, slos, seed=seed, run_id=name)
    n = run.requests.num_rows
    lengths = pa.array(
        np.clip(np.random.default_rng([seed, 4]).lognormal(np.log(100), 0.6, n), 5, 2000).astype(
            int
        )
    )
    table = run.requests
    for column in ("output_tokens", "output_tokens_planned"):
        at = table.schema.get_field_index(column)
        table = table.set_column(
            at, table.schema.field(at), lengths.cast(table.schema.field(at).type)
        )
    return ComparedRun(
        name, prepare(replace(run, path=Path(name), requests=table), limited_too=True), 1, 2.0
    )


def pair(
    server: Server,
    slos: Sequence[Slo],
    rates: Sequence[float],
    seed: int,
    options: Any,
    other: bool,
) -> Comparison:
    """The comparison of two runs; B is slower by --slower."""
    arms = []
    for k, name in enumerate("AB"):
        drawn, own = seed + other * k * 10**6, 2 * seed + k
        noise = np.random.default_rng([own, 5]).normal(0, options.noise)
        speed = float(np.exp(noise)) * (1 + k * options.slower)
        stages = [
            sent(server, r, options.requests, drawn + 10**7 * i, own + 10**7 * i, speed)
            for i, r in enumerate(rates)
        ]
        arms.append(arm(name, stages, slos, drawn))
    return compare(arms)


def kept_below(name: str, load: float) -> Slo:
    """Return a TTFT SLO that is met up to about this load."""
    return parse_slo(
        f"ttft_p95={1e3 * truth_at(name, load, requests=50_000, parts=1).quantile_s(0.95):.4f}ms"
    )


def differing(result: Comparison) -> set[str]:
    """What the comparison says differs: each line with a winner, each latency."""
    lines = {r.name for r in result.scorecard if r.winner}
    moved = {s.metric for s in result.shift for q in s.quantiles if q.verdict == "differs"}
    slower = {
        "slower" for s in result.shift for q in s.quantiles if q.verdict == "differs" and q.slower
    }
    return (
        lines
        | moved
        | slower
        | ({"ANY line"} if lines else set())
        | ({"ANY latency"} if moved else set())
    )


def main() -> None:
    given = parser(
        __doc__, servers="mm1,mg1,mm8,batch,preset", kinds="single,sweep", first_seed=100_000
    )
    given.add_argument("--loads", default="0.4,0.6,0.85", help="of saturation")
    given.add_argument("--runs", type=int, default=100, help="comparisons per cell")
    given.add_argument("--requests", type=int, default=2000, help="in each stage")
    given.add_argument("--noise", type=float, default=0.005, help="of a run's speed")
    given.add_argument(
        "--slower", type=float, default=0.0, help="B's times are longer by this share"
    )
    options = given.parse_args()
    for name in options.servers.split(","):
        server = SERVERS[name]()
        for load in map(float, options.loads.split(",")):
            rate = load * server.most_rps
            for kind in options.kinds.split(","):
                # a sweep violates its SLO above the load; a single stage keeps an easy one
                slos = [parse_slo("ttft_p90=60s")] if kind == "single" else [kept_below(name, load)]
                rates = [rate] if kind == "single" else [x * rate for x in SWEEP if x * load < 0.98]
                for other in (False, True):
                    found: Counter[str] = Counter()
                    for k in range(options.runs):
                        found.update(
                            differing(
                                pair(server, slos, rates, options.first_seed + k, options, other)
                            )
                        )
                    print(
                        json.dumps(
                            {
                                "server": name,
                                "load": load,
                                "kind": kind,
                                "schedule": "other" if other else "same",
                                "runs": options.runs,
                                **dict(sorted(found.items())),
                            }
                        ),
                        flush=True,
                    )


if __name__ == "__main__":
    main()
