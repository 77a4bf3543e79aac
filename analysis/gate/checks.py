"""The checks of a gate: changes against the baseline, absolute limits, capacity, and evidence.

The changes are those of latency quantiles, of the error rate and of tokens per second.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from msgspec import structs

from ampacity.analysis.change import engine, samples
from ampacity.analysis.change.judged import CompareError, Judged
from ampacity.analysis.change.quantiles import MOST_TOLERANCE, OTHER, SAME, Tracked
from ampacity.analysis.change.results import Check
from ampacity.analysis.contract.stage import Stage
from ampacity.analysis.contract.summary import SloLimit
from ampacity.analysis.metrics.percentiles import finite
from ampacity.analysis.slo import Slo, parse_slos
from ampacity.analysis.warnings import ERROR_SHARE

NAMES = (*samples.TRACKED, "error_rate", "output_tokens_per_s", "capacity_rps")
ERROR_TOLERANCE = 0.01  # in points of share
CAPACITY_TOLERANCE = 0.1
WATCHED = "watched"  # not a verdict of the gate
_EDGE_FACTOR = 50.0


@dataclass(frozen=True)
class CheckedChange:
    """A check of a change, and what its verdict is based on; no estimates: it is not known.

    ``worse``: the change beyond the default tolerance; ``passing``: beyond the check's own (the
    same where it was given). ``watched``: the baseline is too noisy for any tolerance, so nothing
    passes. ``n``: requests of the shortest baseline run.
    """

    check: Check
    n: int
    worse: engine.Estimate | None = None
    passing: engine.Estimate | None = None
    watched: bool = False


@dataclass(frozen=True)
class Level:
    """A load level of the candidate's ``runs`` and the ``base`` level of the baseline file.

    ``paired``: all runs, the baseline's included, sent the same schedule.
    """

    name: str
    base: Mapping[str, Any]
    runs: Sequence[Judged]
    stages: Sequence[Stage]
    records: Sequence[samples.LevelRecords]
    paired: bool

    def checked(self, name: str, tolerance: float, **figures: Any) -> CheckedChange:
        check = Check(name, "change", self.name, tolerance=tolerance, **figures)
        return CheckedChange(check, min(self.base["requests"]))


def read_levels(base: Mapping[str, Any], runs: Sequence[Judged]) -> list[Level]:
    """Return each level of the baseline. Raises CompareError where the candidate is too short."""
    found = []
    for name, level in base["levels"].items():
        stages = [run.levels()[name] for run in runs]
        records = [run.read(s, level["skipped"]) for run, s in zip(runs, stages, strict=True)]
        n, theirs = min(r.n for r in records), min(level["requests"])
        if n < theirs / 2:
            raise CompareError(
                f"{runs[0].run.path}: {name} has {n} requests, the baseline {theirs}: "
                "too few to compare"
            )
        sent = {run.schedule(s, r) for run, s, r in zip(runs, stages, records, strict=True)}
        paired = None not in sent and len(sent | set(level["schedules"])) == 1
        found.append(Level(name, level, runs, stages, records, paired))
    return found


def parse_tolerances(texts: Sequence[str]) -> dict[str, float]:
    """Parse ``ttft_p99=10%`` to {"ttft_p99": 0.1}; ``ttft`` and ``p99`` match several names.

    Raises CompareError.
    """
    found: dict[str, float] = {}
    for text in texts:
        match = re.fullmatch(r"\s*([\w.]+)\s*=\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*", text)
        given = match[1] if match else ""
        names = [n for n in NAMES if n == given or (n in samples.TRACKED and given in n.split("_"))]
        if not match or not names:
            raise CompareError(
                f"--tolerance {text}: write METRIC=N%, as ttft_p99=10%, "
                f"with one of {', '.join(NAMES)}"
            )
        if not 0 < float(match[2]) <= 1000:
            raise CompareError(f"--tolerance {text}: give more than 0 % and at most 1000 %")
        found |= dict.fromkeys(names, float(match[2]) / 100)
    return found


def changes_of(at: Level, tolerances: Mapping[str, float]) -> list[CheckedChange]:
    found = [_quantile_change(at, metric, tolerances) for metric in at.base["quantiles"]]
    found.append(_error_change(at, tolerances.get("error_rate", ERROR_TOLERANCE)))
    rates = [at.base["output_tokens_per_s"], *(s.output_tokens_per_s for s in at.stages)]
    if None not in rates:  # else there is no token count
        tolerance = tolerances.get("output_tokens_per_s", engine.DEFAULT_TOLERANCE)
        found.append(_rate_change(at, tolerance, float(rates[0]), float(np.mean(rates[1:]))))
    return found


def _quantile_change(at: Level, metric: str, tolerances: Mapping[str, float]) -> CheckedChange:
    kind, q = samples.TRACKED[metric]
    known = Tracked.from_dict(q, at.base["quantiles"][metric])
    least = known.tolerance[SAME if at.paired else OTHER]
    watched = metric not in tolerances and (least is None or least > MOST_TOLERANCE)
    default = max(MOST_TOLERANCE, known.resolved) if watched or least is None else least
    tolerance = tolerances.get(metric, default)
    found, before = [r.metrics[kind] for r in at.records], known.marks.middle_s
    if unknown := samples.no_values(found):
        verdict = WATCHED if watched else "inconclusive"
        return at.checked(metric, tolerance, baseline=before, reason=unknown, verdict=verdict)
    cells = [samples.Cells.from_dict(c) for c in at.base["cells"].get(kind, [])]
    explained = known.expect([[c.of(r) for c in cells] for r in at.records])
    worse = passing = known.compare(found, explained, tolerance, paired=at.paired)
    if metric not in tolerances:
        worse = known.compare(found, explained, engine.DEFAULT_TOLERANCE, paired=at.paired)
    low, shift, high = known.moved(found, explained, worse)
    now = finite(float(np.mean([o.quantile_bounds(q)[1] for o in found])))
    figures = {"baseline": before, "candidate": now, "shift": shift}
    change, ci = shift, (low, high)
    if now is not None and before:  # the change of the figures; the shift is tested
        change = now / before - 1
        ci = engine.widened(ci, change)
    tested = at.checked(metric, tolerance, change=change, change_ci=ci, **figures)
    return replace(tested, worse=worse, passing=passing, watched=watched)


def _error_change(at: Level, tolerance: float) -> CheckedChange:
    base = [samples.Blocks.from_dict(b) for b in at.base["errors"]]
    ours = [samples.blocks_of(r.failed) for r in at.records]
    before, now = (
        sum(b.over.sum() for b in side) / sum(b.size.sum() for b in side) for side in (base, ours)
    )
    limit = before + tolerance
    e = engine.compare_shares(base, ours, limit, paired=at.paired, noise=0.0)
    # A share of no failures has a variance as well
    floor = limit * (1 - limit) / sum(b.size.sum() for b in ours)
    if e.within <= floor:
        e = replace(e, within=floor, df=math.inf)
    figures = {"baseline": float(before), "candidate": float(now), "change": float(now - before)}
    return replace(at.checked("error_rate", tolerance, **figures), worse=e, passing=e)


def _rate_change(at: Level, tolerance: float, before: float, now: float) -> CheckedChange:
    """Show the rate as measured; in an open loop test tokens per planned token.

    So the draw of the lengths does not count.
    """
    kind = at.base["kind"]
    theirs = [samples.Blocks.from_dict(x) for x in at.base["rates"]]
    ours = [r.rates(kind) for r in at.records]
    noise = engine.ASSUMED_NOISE if kind == "closed" else 0.0
    e = engine.compare_rates(theirs, ours, tolerance, paired=at.paired, noise=noise)
    figures = {"baseline": before, "candidate": now}
    figures["shift"] = math.exp(-(e.worse + math.log1p(tolerance))) - 1
    change = now / before - 1 if before else None
    tested = at.checked("output_tokens_per_s", tolerance, change=change, **figures)
    return replace(tested, worse=e, passing=e)


def decide(found: Sequence[CheckedChange], alpha: float) -> list[Check]:
    """Return the checks with the verdict of each tested change.

    Regression: worse than the tolerance, and significant by Holm over all checks. Pass: shown to be
    below the tolerance. A watched check is WATCHED unless it is a regression; it is inconclusive
    where it would be one if only the watched were tested.
    """
    known = [(t, t.worse, t.passing) for t in found if t.worse and t.passing]
    watched = sum(t.watched for t, *_ in known)
    rejected = iter(engine.holm([worse.p_regression for _, worse, _ in known], alpha))
    checks = []
    for t in found:
        check = t.check
        if t.worse and t.passing:
            verdict, beyond = "inconclusive", t.passing.worse > 0
            tests = {"p_regression": t.worse.p_regression, "p_equivalence": t.passing.p_equivalence}
            if next(rejected) and beyond:
                verdict = "regression"
            elif t.watched:
                may_be = beyond and t.worse.p_regression <= alpha / watched
                verdict = "inconclusive" if may_be else WATCHED
            elif t.passing.p_equivalence <= alpha:
                verdict = "pass"
            check = structs.replace(check, verdict=verdict, **tests)
            if verdict == "inconclusive":
                e = t.worse if beyond else t.passing
                check = _with_missing(check, t.n, engine.times_longer(e, alpha, alpha / len(known)))
        if check.tested is not None:
            reason = f"at equal load and lengths {signed(check.tested)}, which is what is tested"
            reason = f"{reason}; {check.reason}" if check.reason else reason
            check = structs.replace(check, reason=reason)
        checks.append(check)
    return checks


def _with_missing(check: Check, n: int, factor: float | None) -> Check:
    """Return the check with what would decide it: ``factor`` times ``n`` requests; None: none."""
    if factor is None:
        reason = "the noise from run to run decides, not the length: more runs of baseline and candidate tell"
    elif factor > _EDGE_FACTOR:
        reason = "the change is on the edge of the tolerance: no length is likely to decide"
    else:
        more = max(1, math.ceil(n * (factor - 1)))
        reason = f"needs about {more} more requests at {check.level}, in the baseline as well"
        return structs.replace(check, more_requests=more, reason=reason)
    return structs.replace(check, reason=reason)


def why_watched(check: Check) -> str:
    """Return why a watched metric has no line of its own."""
    if check.change is None:
        return check.reason or "no change can be determined"
    more = f"an equal run may differ by more than {check.tolerance:.0%}"
    return f"{signed(check.change)}; at this load and length {more}"


def excuse_client_delay(check: Check, later_s: float) -> Check:
    """Return a regression of TTFT or E2E as inconclusive if the client's own delay explains it.

    ``later_s``: how much later the candidate's client was at p99 than the baseline's.
    """
    if check.verdict != "regression" or not check.name.startswith(("ttft_", "e2e_")):
        return check
    if check.shift is None or check.shift * float(check.baseline or 0.0) > later_s:
        return check
    reason = (
        f"the client itself was {1e3 * later_s:.3g} ms later at p99 than in the baseline, "
        "which is as much as this change: run it on a quieter machine"
    )
    return structs.replace(check, verdict="inconclusive", reason=reason)


def sanity(run: Judged, name: str) -> list[Check]:
    """Return checks that no latency outweighs: a lost steady state, and errors."""
    stage = run.levels()[name]
    failures = run.read(stage).failed  # those of the warm-up too
    failed, share = int(failures.sum()), float(failures.mean()) if len(failures) else 1.0
    checks = []
    if stage.stable is False:
        reason = f"no steady state at this load any more: {stage.stable_reason}"
        checks.append(Check("stability", "sanity", name, "regression", reason=reason))
    if share > ERROR_SHARE:
        reason = (
            f"{failed} of {len(failures)} requests failed or were in flight at cutoff: "
            f"with more than {ERROR_SHARE:.0%} nothing passes"
        )
        checks.append(Check("errors", "sanity", name, candidate=share, reason=reason))
    return checks


def capacity_checks(base: Mapping[str, Any], run: Judged, tolerance: float) -> list[Check]:
    """Compare brackets of tested loads.

    Worse where they do not overlap, no worse where the lower ends agree.
    """
    ours, theirs = run.summary.capacity, base["capacity_rps"]
    if not theirs:
        return []
    rate, (low, high) = ours.capacity_rps, ours.capacity_rps_ci or (None, None)
    least, verdict, reason = theirs["bracket"][0] * (1 - tolerance), "inconclusive", None
    if low is not None and low >= least:
        verdict = "pass"
    elif high is not None and high <= least:
        verdict = "regression"
    elif ours.capacity_rps_ci:
        reason = (
            "the tested loads lie too far apart to decide: "
            "use closer --rates or a longer --duration"
        )
    else:
        reason = ours.reason
    figures = {"baseline": theirs["value"], "candidate": rate, "tolerance": tolerance}
    figures["change"] = rate / theirs["value"] - 1 if rate else None
    return [Check("capacity_rps", "capacity", None, verdict, reason=reason, **figures)]


def slo_checks(
    levels: Sequence[Level], slos: Sequence[SloLimit]
) -> tuple[list[Check], dict[str, str]]:
    """Return absolute limits, and why some are not judged at a load.

    In a sweep an SLO is judged at the loads at which the baseline met it; at the lowest where it
    met it nowhere.
    """
    checks: list[Check] = []
    untracked: dict[str, str] = {}
    lowest = min(levels, key=lambda at: at.base["offered_rps"] or at.base["concurrency"] or 0.0)
    for slo in slos:
        text, metric = slo.text, slo.text.partition("=")[0]
        known = {at.name: _baseline_s(at.base, metric) for at in levels}
        met = [name for name, s in known.items() if s is not None and s <= (slo.limit_s or 0.0)]
        unknown = f"the baseline does not hold {metric}: make it from runs with --slo {text}"
        for at in levels:
            known_s = known[at.name]
            if at.name in (met or [lowest.name]):
                checks.append(_slo_check(text, at, known_s, unknown))
            elif known_s is None:
                untracked[f"{text} at {at.name}"] = unknown
            else:
                why = f"the baseline did not meet it there ({known_s:.3g} s)"
                untracked[f"{text} at {at.name}"] = f"not judged at this load, {why}"
    return checks, untracked


def _baseline_s(level: Mapping[str, Any], metric: str) -> float | None:
    tracked = level["quantiles"].get(metric, {}).get("value_s")
    found: float | None = level.get("slos", {}).get(metric, tracked)
    return found


def _slo_check(slo: str, at: Level, known_s: float | None, unknown: str) -> Check:
    """Return one limit at one load; one run that violates it is enough, and one that meets it."""
    found = [v for stage in at.stages for v in stage.slo_verdicts if v.slo == slo]
    v = next((v for word in ("violated", "met") for v in found if v.verdict == word), found[-1])
    verdict = {"met": "pass", "violated": "violated"}.get(v.verdict, "inconclusive")
    reason, more = v.reason or (unknown if known_s is None else None), v.more_requests
    return Check(
        slo, "slo", at.name, verdict, known_s, v.value_s, more_requests=more, reason=reason
    )


def slos_of(base: Mapping[str, Any], given: Sequence[str]) -> list[Slo]:
    """Return the baseline's SLOs and the given ones, which replace those. Raises SloError."""
    wanted = {slo.name: slo for slo in parse_slos(base["slos"])}
    return list((wanted | {slo.name: slo for slo in parse_slos(given)}).values())


def signed(share: float) -> str:
    return f"{round(share, 3) + 0.0:+.1%}"  # no -0.0
