"""The checks of a gate: changes against the baseline, absolute limits, capacity, and evidence.

Tested changes are those of latency quantiles, of the error rate and of tokens per second.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ampacity.analysis.change.baseline import read_level, schedule_of
from ampacity.analysis.change.change import (
    ASSUMED_NOISE,
    DEFAULT_TOLERANCE,
    Estimate,
    compare_rates,
    compare_shares,
    holm,
    times_longer,
    widened,
)
from ampacity.analysis.change.comparable import CompareError, Judged
from ampacity.analysis.change.quantiles import MOST_TOLERANCE, OTHER, SAME, Tracked
from ampacity.analysis.change.samples import (
    TRACKED,
    Blocks,
    Cells,
    LevelRecords,
    blocks_of,
    no_values,
)
from ampacity.analysis.metrics.percentiles import finite
from ampacity.analysis.slo import Slo, parse_slos
from ampacity.analysis.warnings import ERROR_SHARE

NAMES = (*TRACKED, "error_rate", "output_tokens_per_s", "capacity_rps")
ERROR_TOLERANCE = 0.01  # in points of share
CAPACITY_TOLERANCE = 0.1
SILENT = "watched"  # not a verdict of the gate
_EDGE_FACTOR = 50.0
_SHIFT_SHOWN = 0.01  # a larger difference between tested change and that of the figures is reported


@dataclass(frozen=True)
class Evidence:
    """What the decision on a change is based on.

    ``worse``: the change beyond the default tolerance; ``passing``: beyond the check's own (the
    same where it was given). ``beyond``: the estimate itself is worse than the tolerance.
    ``watched``: the baseline is too noisy for any tolerance, so nothing passes.
    """

    worse: Estimate
    passing: Estimate
    beyond: bool = True
    watched: bool = False


@dataclass
class Check:
    """One line of a gate's answer.

    ``change`` is relative (error_rate: in points), > 0 where the figure is higher. ``shift`` is
    what the test is about: by how much the neighbourhood of the quantile moved.
    """

    name: str
    kind: str  # change | slo | sanity | capacity
    level: str | None
    verdict: str = "inconclusive"  # pass | regression | violated | inconclusive
    baseline: float | None = None
    candidate: float | None = None
    change: float | None = None
    change_ci: tuple[float | None, float | None] | None = None
    shift: float | None = None
    tolerance: float | None = None
    p_regression: float | None = None
    p_equivalence: float | None = None
    more_requests: int | None = None
    reason: str | None = None
    test: Evidence | None = field(default=None, repr=False)

    def as_dict(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k != "test"}


@dataclass(frozen=True)
class Level:
    """A load level of the candidate's ``runs`` and the ``base`` level of the baseline file.

    ``paired``: all runs, the baseline's included, sent the same schedule.
    """

    name: str
    base: Mapping[str, Any]
    runs: Sequence[Judged]
    records: Sequence[LevelRecords]
    paired: bool

    def change(self, name: str, tolerance: float, **figures: Any) -> Check:
        return Check(name, "change", self.name, tolerance=tolerance, **figures)


def read_levels(base: Mapping[str, Any], runs: Sequence[Judged]) -> list[Level]:
    """Return each level of the baseline. Raises CompareError where the candidate is too short."""
    found = []
    for name, level in base["levels"].items():
        records = [read_level(run, name, level["skipped"]) for run in runs]
        n, theirs = min(r.n for r in records), min(level["requests"])
        if n < theirs / 2:
            raise CompareError(
                f"{runs[0].run.path}: {name} has {n} requests, the baseline {theirs}: "
                "too few to compare"
            )
        sent = {schedule_of(run, name, r) for run, r in zip(runs, records, strict=True)}
        paired = None not in sent and len(sent | set(level["schedules"])) == 1
        found.append(Level(name, level, runs, records, paired))
    return found


def parse_tolerances(texts: Sequence[str]) -> dict[str, float]:
    """Parse ``ttft_p99=10%`` to {"ttft_p99": 0.1}; ``ttft`` and ``p99`` match several names.

    Raises CompareError.
    """
    found: dict[str, float] = {}
    for text in texts:
        match = re.fullmatch(r"\s*([\w.]+)\s*=\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*", text)
        given = match[1] if match else ""
        names = [n for n in NAMES if n == given or (n in TRACKED and given in n.split("_"))]
        if not match or not names:
            raise CompareError(
                f"--tolerance {text}: write METRIC=N%, as ttft_p99=10%, "
                f"with one of {', '.join(NAMES)}"
            )
        if not 0 < float(match[2]) <= 1000:
            raise CompareError(f"--tolerance {text}: give more than 0 % and at most 1000 %")
        found |= dict.fromkeys(names, float(match[2]) / 100)
    return found


def changes_of(at: Level, tolerances: Mapping[str, float]) -> list[Check]:
    checks = [_quantile_check(at, metric, tolerances) for metric in at.base["quantiles"]]
    checks.append(_error_check(at, tolerances.get("error_rate", ERROR_TOLERANCE)))
    rates = [at.base, *(run.levels()[at.name][1] for run in at.runs)]
    if all(of["output_tokens_per_s"] is not None for of in rates):  # else there is no token count
        tolerance = tolerances.get("output_tokens_per_s", DEFAULT_TOLERANCE)
        checks.append(_rate_check(at, tolerance))
    return checks


def _quantile_check(at: Level, metric: str, tolerances: Mapping[str, float]) -> Check:
    kind, q = TRACKED[metric]
    known = Tracked.from_dict(q, at.base["quantiles"][metric])
    least = known.tolerance[SAME if at.paired else OTHER]
    watched = metric not in tolerances and (least is None or least > MOST_TOLERANCE)
    tolerance = tolerances.get(metric, MOST_TOLERANCE if watched or least is None else least)
    check = at.change(metric, tolerance, baseline=known.marks.middle_s)
    found = [r.metrics[kind] for r in at.records]
    if unknown := no_values(found):
        check.reason, check.verdict = unknown, SILENT if watched else check.verdict
        return check
    cells = [Cells.from_dict(c) for c in at.base["cells"].get(kind, [])]
    explained = known.expect([[c.of(r) for c in cells] for r in at.records])
    worse = passing = known.compare(found, explained, tolerance, paired=at.paired)
    if metric not in tolerances:
        worse = known.compare(found, explained, DEFAULT_TOLERANCE, paired=at.paired)
    check.candidate = finite(float(np.mean([o.quantile_bounds(q)[1] for o in found])))
    low, check.shift, high = known.moved(found, explained, worse)
    check.test = Evidence(worse, passing, passing.worse > 0, watched)
    check.change, check.change_ci = check.shift, (low, high)
    if check.candidate is not None and check.baseline:
        check.change = check.candidate / check.baseline - 1  # of the figures; the shift is tested
        check.change_ci = widened(check.change_ci, check.change)
    return check


def _error_check(at: Level, tolerance: float) -> Check:
    base = [Blocks.from_dict(b) for b in at.base["errors"]]
    ours = [blocks_of(r.failed) for r in at.records]
    before, now = (
        sum(b.over.sum() for b in side) / sum(b.size.sum() for b in side) for side in (base, ours)
    )
    limit = before + tolerance
    e = compare_shares(base, ours, limit, paired=at.paired, noise=0.0)
    # A share of no failures has a variance as well
    floor = limit * (1 - limit) / sum(b.size.sum() for b in ours)
    df = e.df if e.within > floor else math.inf
    estimate = Estimate(e.worse, max(e.within, floor), e.between, df)
    check = at.change("error_rate", tolerance, baseline=before, candidate=now, change=now - before)
    check.test = Evidence(estimate, estimate)
    return check


def _rate_check(at: Level, tolerance: float) -> Check:
    """Show the rate as measured; in an open loop test tokens per planned token.

    So the draw of the lengths does not count.
    """
    kind = at.base["kind"]
    theirs, ours = (
        [Blocks.from_dict(x) for x in at.base["rates"]],
        [r.rates(kind) for r in at.records],
    )
    noise = ASSUMED_NOISE if kind == "closed" else 0.0
    e = compare_rates(theirs, ours, tolerance, paired=at.paired, noise=noise)
    check = at.change("output_tokens_per_s", tolerance)
    check.baseline = float(at.base["output_tokens_per_s"])
    rates = [run.levels()[at.name][1]["output_tokens_per_s"] for run in at.runs]
    check.candidate = float(np.mean(rates))
    check.change = check.candidate / check.baseline - 1 if check.baseline else None
    check.shift = math.exp(-(e.worse + math.log1p(tolerance))) - 1
    check.test = Evidence(e, e)
    return check


def decide(checks: list[Check], alpha: float, base: Mapping[str, Any]) -> None:
    """Set the verdict of each tested change.

    Regression: worse than the tolerance, and significant by Holm over all checks. Pass: shown to be
    below the tolerance. A watched check is SILENT unless it is a regression; it is inconclusive
    where it would be one if only the watched were tested.
    """
    known = [(c, c.test) for c in checks if c.test is not None]
    watched = sum(t.watched for _, t in known)
    worse = holm([t.worse.p_regression for _, t in known], alpha)
    for (check, t), rejected in zip(known, worse, strict=True):
        check.p_regression, check.p_equivalence = t.worse.p_regression, t.passing.p_equivalence
        if rejected and t.beyond:
            check.verdict = "regression"
        elif t.watched:
            may_be = t.beyond and check.p_regression <= alpha / watched
            check.verdict = "inconclusive" if may_be else SILENT
        elif check.p_equivalence <= alpha:
            check.verdict = "pass"
        if check.verdict == "inconclusive":
            n = min(base["levels"][check.level]["requests"])
            e = t.worse if t.beyond else t.passing
            _set_what_would_decide(check, n, times_longer(e, alpha, alpha / len(known)))
        shift, change = check.shift, check.change
        if shift is not None and change is not None and abs(change - shift) > _SHIFT_SHOWN:
            tested = f"at equal load and lengths {signed(shift)}, which is what is tested"
            check.reason = f"{tested}; {check.reason}" if check.reason else tested


def _set_what_would_decide(check: Check, n: int, factor: float | None) -> None:
    """``factor``: by how many times ``n`` requests would decide; None where no length does."""
    if factor is None:
        check.reason = (
            "the noise from run to run decides, not the length: give the baseline more runs"
        )
    elif factor > _EDGE_FACTOR:
        check.reason = "the change is on the edge of the tolerance: no length is likely to decide"
    else:
        check.more_requests = max(1, math.ceil(n * (factor - 1)))
        more = f"needs about {check.more_requests} more requests at {check.level}"
        check.reason = f"{more}, in the baseline as well"


def only_watched(check: Check) -> str:
    """Return why a watched metric has no line of its own."""
    if check.change is None:
        return check.reason or "no change can be determined"
    more = f"an equal run may differ by more than {check.tolerance:.0%}"
    return f"{signed(check.change)}; at this load and length {more}"


def excuse_client_delay(checks: Sequence[Check], name: str, later_s: float) -> None:
    """Make regressions of TTFT and E2E inconclusive where the client's own delay explains them.

    ``later_s``: how much later the candidate's client was at p99 than the baseline's.
    """
    for check in checks:
        if (check.level, check.verdict, check.kind) != (name, "regression", "change"):
            continue
        if check.shift is None or not check.name.startswith(("ttft_", "e2e_")):
            continue
        if check.shift * float(check.baseline or 0.0) <= later_s:
            check.verdict = "inconclusive"
            check.reason = (
                f"the client itself was {1e3 * later_s:.3g} ms later at p99 than in the baseline, "
                "which is as much as this change: run it on a quieter machine"
            )


def sanity(run: Judged, name: str) -> list[Check]:
    """Return checks that no latency outweighs: a lost steady state, and errors."""
    stage = run.levels()[name][1]
    failures = read_level(run, name, 0).failed  # those of the warm-up too
    failed, share = int(failures.sum()), float(failures.mean()) if len(failures) else 1.0
    checks = []
    if stage["stable"] is False:
        reason = f"no steady state at this load any more: {stage['stable_reason']}"
        checks.append(Check("stability", "sanity", name, "regression", reason=reason))
    if share > ERROR_SHARE:
        reason = (
            f"{failed} of {len(failures)} requests failed or were in flight at cutoff: "
            f"with more than {ERROR_SHARE:.0%} nothing passes"
        )
        errors = Check("errors", "sanity", name, "inconclusive", candidate=share, reason=reason)
        checks.append(errors)
    return checks


def capacity_checks(base: Mapping[str, Any], run: Judged, tolerance: float) -> list[Check]:
    """Compare brackets of tested loads.

    Worse where they do not overlap, no worse where the lower ends agree.
    """
    ours, theirs = run.summary["capacity"], base["capacity_rps"]
    if not theirs:
        return []
    rate, bracket = ours["capacity_rps"], ours["capacity_rps_ci"]
    least = theirs["bracket"][0] * (1 - tolerance)
    check = Check("capacity_rps", "capacity", None, baseline=theirs["value"], candidate=rate)
    check.tolerance = tolerance
    if rate:
        check.change = rate / theirs["value"] - 1
    if not bracket:
        check.reason = ours["reason"]
    elif bracket[0] is not None and bracket[0] >= least:
        check.verdict = "pass"
    elif bracket[1] is not None and bracket[1] <= least:
        check.verdict = "regression"
    else:
        check.reason = (
            "the tested loads lie too far apart to decide: "
            "use closer --rates or a longer --duration"
        )
    return [check]


def slo_checks(
    base: Mapping[str, Any], runs: Sequence[Judged]
) -> tuple[list[Check], dict[str, str]]:
    """Return absolute limits, and why some are not judged at a load.

    One run that violates it is enough, and one that meets it. In a sweep an SLO is judged at the
    loads at which the baseline met it; at the lowest where it met it nowhere.
    """
    checks: list[Check] = []
    untracked: dict[str, str] = {}
    levels = base["levels"]
    lowest = min(
        levels, key=lambda name: levels[name]["offered_rps"] or levels[name]["concurrency"] or 0.0
    )
    for slo in runs[0].summary["slos"]:
        text, metric = slo["text"], slo["text"].partition("=")[0]
        known = {name: _baseline_s(level, metric) for name, level in levels.items()}
        met = [name for name, s in known.items() if s is not None and s <= slo["limit_s"]]
        unknown = f"the baseline does not hold {metric}: make it from runs with --slo {text}"
        for name, known_s in known.items():
            if name in (met or [lowest]):
                checks.append(_slo_check(text, name, runs, known_s, unknown))
            elif known_s is None:
                untracked[f"{text} at {name}"] = unknown
            else:
                untracked[f"{text} at {name}"] = (
                    f"not judged at this load, the baseline did not meet it there ({known_s:.3g} s)"
                )
    return checks, untracked


def _baseline_s(level: Mapping[str, Any], metric: str) -> float | None:
    tracked = level["quantiles"].get(metric, {}).get("value_s")
    found: float | None = level.get("slos", {}).get(metric, tracked)
    return found


def _slo_check(
    slo: str, name: str, runs: Sequence[Judged], known_s: float | None, unknown: str
) -> Check:
    found = [v for run in runs for v in run.levels()[name][1]["slo_verdicts"] if v["slo"] == slo]
    v = next((v for word in ("violated", "met") for v in found if v["verdict"] == word), found[-1])
    verdict = {"met": "pass", "violated": "violated"}.get(v["verdict"], "inconclusive")
    check = Check(slo, "slo", name, verdict, known_s, v["value_s"])
    check.more_requests = v["more_requests"]
    check.reason = v["reason"] or (unknown if known_s is None else None)
    return check


def slos_of(base: Mapping[str, Any], given: Sequence[str]) -> list[Slo]:
    """Return the baseline's SLOs and the given ones, which replace those. Raises SloError."""
    wanted = {slo.name: slo for slo in parse_slos(base["slos"])}
    return list((wanted | {slo.name: slo for slo in parse_slos(given)}).values())


def signed(share: float) -> str:
    return f"{round(share, 3) + 0.0:+.1%}"  # no -0.0
