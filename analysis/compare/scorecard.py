"""The scorecard of two or more runs: what each delivers and costs, which differences are real."""

import math
from collections.abc import Callable, Mapping
from itertools import product

from msgspec import structs

from ampacity.analysis.capacity.fleet import AT_FULL_LOAD, AT_USABLE, cost_per_million_output_tokens
from ampacity.analysis.capacity.fleet_figures import FleetInputs, fleet_figures
from ampacity.analysis.change import engine
from ampacity.analysis.change.comparable import differences, other_work
from ampacity.analysis.change.judged import CompareError, level_name
from ampacity.analysis.change.results import (
    Comparison,
    Curve,
    CurveStage,
    Line,
    QuantileChange,
    RunSummary,
    Shift,
    ShownChange,
)
from ampacity.analysis.change.samples import METRICS
from ampacity.analysis.compare.figures import (
    BURST,
    C_MAX,
    CAPACITY,
    CAPACITY_PER_GPU,
    FIGURES,
    NO_PRICE,
    USD_PER_TOKENS,
    Figure,
    Runs,
)
from ampacity.analysis.compare.findings import findings, is_aa, pairs_planned
from ampacity.analysis.compare.pairs import RATES, ComparedRun, Pairing, pairings
from ampacity.analysis.compare.shift import NOTHING_COUNTS, QUANTILES, quantile_result
from ampacity.analysis.contract.part import Interval
from ampacity.analysis.next_run import ab_command
from ampacity.loadgen.rundir.records import FAILED_KINDS

COMPARE_SCHEMA_VERSION = 1
MORE_IN_FLIGHT = "no winner: more in flight at the limit is neither better nor worse"
FIXED_LOAD = (
    "no winner: a run's figures at a load that it carried are those of that load, not what it can "
    "carry; find the capacity of each first (--slo and --rates up to a load that breaks it, or "
    "ampacity search); of tokens/s a load without a steady state, offline the --concurrency above "
    "which tokens/s do not grow"
)
SLOWER_MEDIAN = (
    "no winner: a slower median lowers it as well; where the tail differs stands with the quantiles"
)
BETWEEN = (
    "no winner: what the others carry is only known to lie in an interval, which is too wide for "
    "this line: closer --rates, or ampacity search"
)
Pairings = Mapping[tuple[int, int], Pairing]
Changes = Mapping[tuple[int, int], engine.Change | str]


def compare(runs: Runs) -> Comparison:
    """Compare runs (docs/compare.md). Raises CompareError unless they are two or more."""
    if len(runs) < 2:
        raise CompareError("give two run directories or more")
    if len({r.judged.run.path.resolve() for r in runs}) < len(runs):
        raise CompareError(
            "a run is given twice: compare different runs "
            "(or one endpoint with itself: ampacity ab --aa)"
        )
    made = pairings(runs)
    first, shift, lines = made[0, 1], _shift(runs, made), _scorecard(runs, made)
    level = level_name(first.stages[0][0]) if first.stages else None
    compared, sentence, notes = findings(runs, first, lines, shift, level)
    unlike = differences([r.judged for r in runs])
    if other := other_work(unlike, [r.name for r in runs]):
        sentence = f"Not comparable: {other}."
        lines = [structs.replace(x, winner=None, verdict="unknown", reason=other) for x in lines]
    against = [pair for j in range(1, len(runs)) for pair in made[0, j].pairs]
    return Comparison(
        schema_version=COMPARE_SCHEMA_VERSION,
        sentence=sentence,
        notes=notes,
        assumed_run_noise=None if first.rounds else engine.ASSUMED_NOISE,
        compared=compared,
        other_work=other or None,
        aa=is_aa(first),
        level=level,
        interleaved_pairs=len(first.pairs) if first.rounds else None,
        interleaved_pairs_planned=pairs_planned(runs[0]) if first.rounds else None,
        same_schedule=bool(against) and all(pair.same_schedule for pair in against),
        slos=[s.text for s in runs[0].summary.slos],
        runs=[_summary(r) for r in runs],
        differences=unlike,
        scorecard=lines,
        shift=shift,
        curves=[Curve(r.name, _curve(r)) for r in runs],
        next_command=_next_command(runs, first),
    )


def _next_command(runs: Runs, first: Pairing) -> str | None:
    """Return the A/B of two servers, which takes the noise from run to run out."""
    if len(runs) != 2 or not first.stages:
        return None
    return ab_command([run.meta for run in runs], first.stages[0][0])


def _summary(run: ComparedRun) -> RunSummary:
    errors, endpoint = run.summary.errors, run.meta.get("endpoint") or {}
    return RunSummary(
        name=run.name,
        path=str(run.judged.run.path),
        model=endpoint.get("model"),
        url=endpoint.get("url"),
        gpus=run.gpus,
        gpu_hour_usd=run.gpu_hour_usd,
        failed=sum(errors.get(k, 0) for k in FAILED_KINDS),
        unfinished=errors["unfinished"],
        best_stage=level_name(run.best) if run.best else None,
        predicted=run.summary.predicted,
        client_limited_stages=run.limited,
        other_lengths=[f.lengths for f in run.summary.families],
        **run.judged.origin(),
        **run.judged.realised(),
    )


def _curve(run: ComparedRun) -> list[CurveStage]:
    found = []
    for s in run.stages:
        ttft, rate = s.ttft_from_schedule_s, s.achieved_rps
        tail = ttft.p99, ttft.p99_ci
        found.append(CurveStage(level_name(s), rate, s.stable, ttft.p50, *tail))
    return sorted(found, key=lambda s: s.achieved_rps)


def _shift(runs: Runs, made: Pairings) -> list[Shift]:
    """Compare every run with the first, by metric and quantile.

    5 % false findings over all of them together (Holm).
    """
    keys = product(range(1, len(runs)), METRICS, QUANTILES)
    cells = {(j, m, q): made[0, j].quantile(m, q) for j, m, q in keys}
    tested = {k: c.change.p for k, c in cells.items() if not isinstance(c.change, str)}
    real = dict(zip(tested, engine.holm(list(tested.values()), engine.ALPHA), strict=True))
    found: dict[tuple[int, str], list[QuantileChange]] = {}
    for (j, m, q), cell in cells.items():
        result = quantile_result(q, cell, real.get((j, m, q), False), len(tested))
        found.setdefault((j, m), []).append(result)
    return [Shift(m, runs[0].name, runs[j].name, results) for (j, m), results in found.items()]


def _scorecard(runs: Runs, made: Pairings) -> list[Line]:
    rounds = made[0, 1].rounds
    failed, *figures = _tested_lines(runs, made)
    by_capacity = [] if rounds else _capacity_lines(runs)
    costs = {x.name: x for x in by_capacity if x.question == "cost" and None not in x.values}
    lines = [failed, *(x for x in by_capacity if x.question != "cost")]
    lines += [costs.get(x.name, x) for x in figures]
    bursts = [r.summary.burst for r in runs if r.summary.burst]
    if len(bursts) == len(runs):
        values = [str(b.recovery_reason) if b.recovery_s is None else b.recovery_s for b in bursts]
        lines.append(BURST.line(runs, values, note="one burst each: no interval"))
    return lines


def _tested_lines(runs: Runs, made: Pairings) -> list[Line]:
    """Return the lines with a test: the best wins where it differs from every other.

    5 % false winners over all lines together (Holm).
    """
    tests, lines = {}, {}
    one_load = made[0, 1].rounds or len({r.best and level_name(r.best) for r in runs}) == 1
    for f in FIGURES:
        lines[f], against = _untested(f, runs, made, one_load)
        if lines[f].verdict == "inconclusive":
            tests[f] = against
    real = iter(engine.holm([c.p for against in tests.values() for c in against], engine.ALPHA))
    for f, against in tests.items():
        verdicts = {c.verdict(next(real)) for c in against}
        verdict = verdicts.pop() if len(verdicts) == 1 else "inconclusive"
        seen = [c.smallest_seen(len(tests) * len(against)) for c in against]
        lines[f] = structs.replace(
            lines[f],
            verdict=verdict,
            winner=lines[f].best if verdict == "differs" else None,
            smallest_seen=None if None in seen else max(x for x in seen if x is not None),
        )
    return list(lines.values())


def _untested(
    f: Figure, runs: Runs, made: Pairings, one_load: bool
) -> tuple[Line, list[engine.Change]]:
    """Return a line and the changes from or to its best; it is inconclusive where these are tested."""
    rounds = made[0, 1].rounds
    sides = [(made[0, max(i, 1)], min(i, 1)) for i in range(len(runs))]
    values = [f.value(r, p.value(f.basis, side)) for r, (p, side) in zip(runs, sides, strict=True)]
    at = "the load where latencies are compared"
    if f.basis in RATES:
        at = "the load of the A/B" if rounds else "its best stage"
    note = f"one instance at {at}" if f.question == "cost" else None
    lower_bound = [p.at_least(f.basis, side) for p, side in sides]
    line = f.line(runs, values, note=note, lower_bound=lower_bound)
    if f.higher is None:
        return structs.replace(line, reason=SLOWER_MEDIAN), []
    known = [v for v in line.values if v is not None]
    if len(known) < len(runs):
        return line, []
    changes = {pair: f.change(pairing) for pair, pairing in made.items()}
    best = line.values.index((max if f.higher else min)(known))
    against = [change for pair, change in changes.items() if best in pair]
    reason = next((c for c in against if isinstance(c, str)), None)
    same_price = f.question != "cost" and len({f.factor(r) for r in runs}) == 1
    if not reason and not (same_price and (one_load or f.basis not in RATES)):
        # else load, price or number of GPUs win
        reason = _may_carry_more(f, runs, best, changes, one_load)
    shown = [None, *(_shown(changes[0, j]) for j in range(1, len(runs)))]
    line = structs.replace(line, changes=shown, reason=reason)
    if reason:
        line = structs.replace(line, verdict="unknown", best=None)
    return line, [c for c in against if isinstance(c, engine.Change)]


def _may_carry_more(
    f: Figure, runs: Runs, best: int, changes: Changes, one_load: bool
) -> str | None:
    """Return why the best is no winner: another may carry so much more than at its best stage.

    More of the best's own only helps it. None where it may win.
    """
    for i, run in enumerate(runs):
        times = 1.0 if i == best and f.basis in RATES else run.missing(f.basis, one_load)
        change = changes.get((min(i, best), max(i, best)))
        ends = change.ci if isinstance(change, engine.Change) else ()
        near = min((0.0 if end is None else abs(math.log1p(end)) for end in ends), default=0.0)
        if times > 1 and near < math.log(times):
            return FIXED_LOAD if math.isinf(times) else BETWEEN
    return None


def _shown(change: engine.Change | str) -> ShownChange | None:
    if isinstance(change, str):
        return None
    return ShownChange(change.change, change.ci, change.tested, change.p)


def _capacity_lines(runs: Runs) -> list[Line]:
    """Return the figures that follow from the capacity; they need no load that all runs have.

    They have a bracket of tested loads and no test: one wins whose whole bracket is better than all
    others by ``LEAST``.
    """
    capacities = [r.summary.capacity for r in runs]
    (peak, safety), *unlike = {
        (r.summary.fleet.peak_rps, r.summary.fleet.safety_factor) for r in runs
    }
    name, label = USD_PER_TOKENS
    at_capacity = Figure("cost", name, f"{label} {AT_FULL_LOAD}", False)
    cost = _by_capacity(at_capacity, runs, _usd_per_million)
    # longer answers are not the engine's: it must be cheaper by the request too
    by_request = Figure("cost", "", "", False)
    cheaper = _by_capacity(by_request, runs, lambda run, x: (run.usd_per_s or 0.0) / x)
    if cost.winner not in (None, cheaper.winner):
        cost = structs.replace(cost, winner=None, verdict="inconclusive")
    lines = [
        _by_capacity(CAPACITY, runs, lambda run, x: x),
        _by_capacity(CAPACITY_PER_GPU, runs, lambda run, x: x / run.gpus),
        cost,
    ]
    if peak and not unlike:
        gpus = Figure("capacity", "gpus_for_peak", f"GPUs for {peak:g} req/s × {safety:g}", False)

        def size(run: ComparedRun, rate_rps: float) -> float:
            of_run = FleetInputs(
                peak_rps=peak, capacity_rps=rate_rps, safety_factor=safety, tensor_parallel=run.gpus
            )
            return fleet_figures(of_run).gpus

        lines.append(_by_capacity(gpus, runs, size))
    c_max = [c.c_max or str(c.reason or "none was found") for c in capacities]
    brackets = [tuple(c.c_max_ci or (None, None)) for c in capacities]
    lines.append(C_MAX.line(runs, c_max, brackets=brackets, reason=MORE_IN_FLIGHT))
    least = [c.crossing == "lower_bound" for c in capacities]
    return [structs.replace(line, at_least=least) for line in lines]


def _usd_per_million(run: ComparedRun, rate_rps: float) -> float | str:
    tokens, price = run.summary.fleet.output_tokens_mean, run.gpu_hour_usd
    if price is None or not tokens:
        return NO_PRICE if price is None else NOTHING_COUNTS
    return cost_per_million_output_tokens(price, run.gpus, rate_rps * tokens)


def capacity_bracket(run: ComparedRun) -> Interval:
    """Return that of its capacity, req/s.

    The ends of a closed loop are achieved rates: each with the 95 % interval of its stage's.
    """
    capacity = run.summary.capacity
    low, high = capacity.capacity_rps_ci or (None, None)
    if capacity.c_max_basis == "closed":
        stages: dict[float | None, Interval]
        stages = {s.achieved_rps: s.achieved_rps_ci or (0.0, None) for s in run.of_kind("closed")}
        low, high = stages.get(low, (low, low))[0], stages.get(high, (high, high))[1]
    return low, high


def _by_capacity(
    f: Figure, runs: Runs, figure: Callable[[ComparedRun, float], float | str]
) -> Line:
    """Return the line of a figure of the capacity; it ascends with it where ``f.higher``."""

    def bound(run: ComparedRun, rate: float | None) -> float | None:
        found = figure(run, rate) if rate or (rate == 0 and f.higher) else None
        return None if isinstance(found, str) else found

    capacities = [r.summary.capacity for r in runs]
    values = [
        figure(r, c.capacity_rps) if c.capacity_rps else str(c.reason or "none was found")
        for r, c in zip(runs, capacities, strict=True)
    ]
    ends = [[bound(r, rate) for rate in capacity_bracket(r)] for r in runs]  # the worst first
    brackets = [tuple(e if f.higher else e[::-1]) for e in ends]
    note = AT_USABLE if f.question == "cost" else None
    line = f.line(runs, values, brackets=brackets, note=note)
    if any(c.crossing == "lower_bound" for c in capacities):
        line = structs.replace(line, best=None)  # nobody knows which one's is better
    sign = 1 if f.higher else -1
    better = (1 + engine.LEAST) ** sign
    for i, (worst, _) in enumerate(ends):
        others = [best for k, (_, best) in enumerate(ends) if k != i]
        if worst is None or None in others or line.values[i] is None:
            continue
        if all(sign * (worst - x * better) > 0 for x in others if x is not None):
            name = runs[i].name
            line = structs.replace(line, winner=name, best=name, verdict="differs")
    return line
