"""Is a burst said to be over when it is? Bursts on servers with a known law, each with its exact
truth by coupling.

    .venv/bin/python -m benchmarks.studies.burst_recovery --runs 600 --seed 100000

Each run is played twice with the same base arrivals and service times, with the burst's extra
arrivals and without. The true recovery time is counted from the end of the burst to the last moment
at which, of the run with the burst, more are in flight by over one standard deviation of the run
without, or a request is due whose TTFT is above its own TTFT without the burst by over one standard
deviation of that: from then on the burst is less than what the base load does by itself. Early: an
answer before that by more than a bin of the report; late: after 1.5 x that + 3 bins. ``surely``:
the lower end of the interval lies after the truth by more than a bin, which would make a gate say
"violated" wrongly. ``half`` and ``twice``: what a gate says whose limit is half of, or twice and 3
bins more than, the truth.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ampacity.analysis.burst.recovery import judge_recovery
from ampacity.analysis.burst.summarise import summarise_burst
from ampacity.analysis.contract.burst import Burst
from ampacity.analysis.slo import parse_slo
from ampacity.analysis.stage.analyse import read_records
from ampacity.experiments.burst import BurstPlan
from ampacity.loadgen.rundir.meta import read_stage
from benchmarks.options import parser
from benchmarks.servers import ORIGIN_NS, SERVERS, Floats, Sent, table_of

NAMES = ("mm1", "mg1", "mm8", "batch")
FACTORS = {0.3: 4.0, 0.4: 3.5, 0.5: 3.0, 0.6: 2.5, 0.7: 2.0, 0.8: 2.0}
BURST_S = 20.0
BASES_S = (5.0, 15.0, 30.0, 60.0, 120.0)


class Kept:
    """Draws for all requests, of which those in ``mask`` are given: the same service times with and
    without the burst."""

    def __init__(self, seed: list[int], mask: npt.NDArray[np.bool_]) -> None:
        self._rng, self._mask = np.random.default_rng(seed), mask

    def exponential(self, mean: float, _: int) -> Floats:
        return self._rng.exponential(mean, len(self._mask))[self._mask]

    def lognormal(self, mean: float, sigma: float, _: int) -> Floats:
        return self._rng.lognormal(mean, sigma, len(self._mask))[self._mask]


@dataclass(frozen=True)
class Case:
    """``base`` as a share of the server's capacity, and the burst over the base; lengths in s."""

    name: str
    base: float
    factor: float
    base_s: float = 60.0
    recovery_s: float = 0.0  # 0: at least 60 s, and three times what the fluid model needs

    @property
    def plan(self) -> BurstPlan:
        drain_s = max(0.0, self.base * self.factor - 1) * BURST_S / (1 - self.base)
        recovery_s = self.recovery_s or max(60.0, 3 * drain_s)
        rate_rps = self.base * SERVERS[self.name]().most_rps
        return BurstPlan(rate_rps, self.factor, self.base_s, BURST_S, recovery_s)


@dataclass(frozen=True)
class Played:
    """One run, with the burst's extra requests and without: arrivals, TTFT and E2E in s."""

    at: Floats
    ttft: Floats
    e2e: Floats
    extra: npt.NDArray[np.bool_]
    ttft_without: Floats
    e2e_without: Floats


def play(case: Case, seed: int, more_s: float = 0.0) -> Played:
    """``more_s``: how long the base load goes on after what the run sees."""
    plan, server = case.plan, SERVERS[case.name]()
    rng, end_s = np.random.default_rng([seed, 1]), plan.duration_s + more_s
    base = rng.uniform(0, end_s, rng.poisson(plan.base_rps * end_s))
    more = rng.poisson((plan.factor - 1) * plan.base_rps * plan.burst_s)
    at = np.concatenate([base, plan.base_s + plan.burst_s * rng.uniform(size=more)])
    order = np.argsort(at)
    at, extra = at[order], order >= len(base)
    with_it = server.serve(at, Kept([seed, 2], np.ones(len(at), bool)))  # type: ignore[arg-type]
    without = server.serve(at[~extra], Kept([seed, 2], ~extra))  # type: ignore[arg-type]
    return Played(at, *with_it, extra, *without)


def true_recovery_s(case: Case, run: Played) -> float:
    """See the module; the coupling is exact, since the server is a function of arrivals and service
    times."""
    over_s = case.plan.base_s + case.plan.burst_s
    begun = run.at[~run.extra]
    left, left_without = np.sort(run.at + run.e2e), np.sort(begun + run.e2e_without)
    moments = np.sort(np.concatenate([[over_s], left, left_without, run.at]))
    moments = moments[moments <= case.plan.duration_s]

    def level(at: Floats, gone: Floats) -> Floats:
        return np.searchsorted(at, moments, "right") - np.searchsorted(gone, moments, "right") + 0.0

    without = level(begun, left_without)
    weights = np.diff(moments, append=moments[-1])
    spread = float(np.sqrt(np.cov(without, aweights=weights)))
    high = moments[(level(run.at, left) - without > max(1.0, spread)) & (moments >= over_s)]
    slow = run.ttft[~run.extra] - run.ttft_without > run.ttft_without.std()
    late = begun[slow & (begun >= over_s)]
    return max(float(high.max(initial=over_s)), float(late.max(initial=over_s))) - over_s


def judged(case: Case, run: Played) -> Burst:
    """The ``burst`` object of what the run sees."""
    plan = case.plan
    seen = run.at < plan.duration_s
    sent = Sent(
        plan.mean_rps,
        plan.duration_s,
        run.at[seen],
        run.ttft[seen],
        np.maximum(run.e2e, run.ttft)[seen],
    )
    table, metas = table_of([sent])
    return summarise_burst(
        vars(plan),
        read_stage(metas[0]),
        read_records(table, ORIGIN_NS),
        [parse_slo("ttft_p95=2s")],
        None,
    )


def row(case: Case, runs: int, seed: int) -> str:
    """Return rates over all runs, answered or not."""
    count: Counter[str] = Counter()
    truths, ratios, why = [], [], Counter[str]()
    for number in range(seed, seed + runs):
        run = play(case, number)
        found, true_s = judged(case, run), true_recovery_s(case, run)
        said_s, (low_s, _), bin_s = (found.recovery_s, found.recovery_ci_s, found.resolution_s)
        truths.append(true_s)
        drained_s = found.backlog.drained_s
        if said_s is not None:
            count["answer"] += 1
            ratios.append(said_s - true_s)
            count["early"] += said_s < true_s - bin_s
            count["late"] += said_s > 1.5 * true_s + 3 * bin_s
            count["undrained"] += drained_s is not None and said_s < drained_s - 1e-6
        else:
            why[" ".join(found.recovery_reason.split()[:4])] += 1
        count["surely"] += low_s is not None and low_s > true_s + bin_s
        for name, limit_s, right in (
            ("half", true_s / 2, "violated"),
            ("twice", 2 * true_s + 3 * bin_s, "met"),
        ):
            ends, after = found.recovery_ci_s, found.harm.after
            gate = judge_recovery(limit_s, ends, found.recovery_reason, after)
            count[name] += gate is not None and gate.verdict == right
    rates = "  ".join(
        f"{n} {count[n] / runs:6.1%}"
        for n in ("answer", "early", "late", "undrained", "surely", "half", "twice")
    )
    error = "{:.1f} to {:.1f}".format(*np.quantile(ratios, [0.05, 0.95])) if ratios else ""
    return (
        f"{case.name:6}{case.base:.1f} x {case.factor:.1f} base {case.base_s:3.0f} s  "
        f"true {np.median(truths):5.1f} s  {rates}  said - true {error} s {dict(why)}"
    )


def rest(case: Case, runs: int, seed: int) -> str:
    """Return whether the end of a backlog that outlasts the recovery is reported correctly."""
    told, early, late = Counter[Any](), 0, 0
    for number in range(seed, seed + runs):
        run = play(case, number, 1000.0)
        backlog, end_s = judged(case, run).backlog, case.plan.duration_s
        told["drained" if backlog.drained else backlog.drains] += 1
        if backlog.drains:
            left = np.sort(run.at + run.ttft)
            after = left[left > end_s]
            waiting = np.searchsorted(run.at, after, "right") - np.searchsorted(
                left, after, "right"
            )
            gone = after[waiting <= backlog.base_waiting]
            gone_s = float(gone[0]) - end_s if len(gone) else np.inf
            low, high = backlog.further_s_ci
            early, late = early + (gone_s < low), late + (high is not None and gone_s > high)
    return (
        f"{case.name:6}{case.base:.1f} x {case.factor:.1f} seen {case.recovery_s:.0f} s: "
        f"{dict(told)}  gone before the interval {early}, after it {late}"
    )


def main() -> None:
    given = parser(__doc__, runs=600)
    given.add_argument("--seed", type=int, default=100_000, help="the first")
    given.add_argument("--servers", default=",".join(NAMES))
    options = given.parse_args()
    for name in options.servers.split(","):
        cases = [Case(name, base, factor) for base, factor in FACTORS.items()]
        cases += [Case(name, 0.5, 3.0, base_s) for base_s in BASES_S if base_s != 60.0]
        for case in cases:
            print(row(case, options.runs, options.seed), flush=True)
        for case in (Case(name, 0.6, 4.0, recovery_s=30.0), Case(name, 0.8, 3.0, recovery_s=60.0)):
            print(rest(case, options.runs, options.seed), flush=True)


if __name__ == "__main__":
    main()
