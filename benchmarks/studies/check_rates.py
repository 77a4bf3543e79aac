"""How often is ``ampacity check`` wrong over all its looks together, and how much does it save?

    python -m benchmarks.studies.check_rates [--server mm1] [--quantile 0.95] [--runs 400]

Servers and limits as in ``verdict_rates``. A check of 1,000 to 20,000 requests at most looks at
what was due before the oldest request in flight, as the live one does. Printed are, by the true
share of misses over what the SLO allows, the verdicts in % and the mean share of the requests that
was sent.
"""

from dataclasses import replace

import numpy as np

from ampacity.analysis.contract.stage import Stage
from ampacity.analysis.slo import Slo, verdict_word
from ampacity.analysis.stage.analyse import analyse_stage
from ampacity.experiments.check import ALPHAS, LOOKS, decided
from ampacity.loadgen.rundir.meta import read_stage
from benchmarks.options import parser
from benchmarks.servers import SERVERS, Sent, limit_at, stage_of, table_of
from benchmarks.studies.verdict_rates import LIMITS, load_with

REQUESTS = (1000, 5000, 20_000)
SHARES = (0.1, 0.5, 1.0, 2.0)


def checked(name: str, load: float, slo: Slo, requests: int, seed: int) -> tuple[str, float]:
    """Return the verdict of a check, and the share of its longest time that it took."""
    server = SERVERS[name]()
    rate = load * server.most_rps
    rng = np.random.default_rng([seed, requests, round(1e4 * load)])
    sent = stage_of(server, rate, requests / rate, rng)
    for look, alpha in zip(LOOKS, ALPHAS, strict=False):
        if decided(_judged(_known(sent, look * sent.duration_s), slo, alpha)):
            seen = _cut(sent, look * sent.duration_s)  # these are drained
            return verdict_word(_judged(seen, slo, None).slo_met), look
    return verdict_word(_judged(sent, slo, ALPHAS[-1]).slo_met), 1.0


def _known(sent: Sent, now_s: float) -> Sent:
    """Return what was due before the oldest request that is in flight."""
    flying = (sent.arrival_s < now_s) & (sent.arrival_s + sent.e2e_s > now_s)
    return _cut(sent, float(sent.arrival_s[flying].min(initial=now_s)))


def _cut(sent: Sent, end_s: float) -> Sent:
    which = sent.arrival_s < end_s
    arrival, ttft, e2e = (v[which] for v in (sent.arrival_s, sent.ttft_s, sent.e2e_s))
    return replace(sent, duration_s=end_s, arrival_s=arrival, ttft_s=ttft, e2e_s=e2e)


def _judged(sent: Sent, slo: Slo, alpha: float | None) -> Stage:
    table, (meta, *_) = table_of([sent])
    return analyse_stage(table, read_stage({**meta, "alpha": alpha}), [slo])


def main() -> None:
    given = parser(__doc__, runs=400)
    given.add_argument("--server", action="append", choices=list(SERVERS))
    given.add_argument("--quantile", type=float, action="append")
    given.add_argument("--limit", type=float, action="append", help="share of saturation")
    given.add_argument("--requests", type=int, action="append")
    given.add_argument("--share", type=float, action="append", help="of the misses allowed")
    args = given.parse_args()
    print("server q limit requests | share of allowed misses: met / violated, % (sent, %)")
    for name in args.server or ("mm1", "mg1", "mm8", "batch"):
        for quantile in args.quantile or (0.95, 0.99):
            for limit_load in args.limit or LIMITS:
                slo = limit_at(name, limit_load, quantile)
                for requests in args.requests or REQUESTS:
                    row = []
                    for times in args.share or SHARES:
                        load = load_with(name, limit_load, quantile, times)
                        if load is None:
                            continue
                        found = [
                            checked(name, load, slo, requests, 200_000 + seed)
                            for seed in range(args.runs)
                        ]
                        words = [word for word, _ in found]
                        met, violated = (
                            100 * words.count(w) / len(words) for w in ("met", "violated")
                        )
                        used = 100 * float(np.mean([share for _, share in found]))
                        row.append(f"{times:g}: {met:.1f} / {violated:.1f} ({used:.0f})")
                    print(
                        f"{name:6} {quantile} {limit_load} {requests:6} | {'   '.join(row)}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
