"""The changes against a baseline that a gate tests, and the decision on all of them.

Quantiles of latencies, the error rate, and tokens per second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ampacity.analysis.change.blocks import TRACKED, LevelRecords, blocks_of, from_dict
from ampacity.analysis.change.check import Check, Evidence, signed
from ampacity.analysis.change.comparable import Judged
from ampacity.analysis.change.expected import cells_from_dict, expected_of
from ampacity.analysis.change.regression import (
    ASSUMED_NOISE,
    Estimate,
    compare_rates,
    compare_shares,
    holm,
    times_longer,
)
from ampacity.analysis.change.tracked import (
    DEFAULT_TOLERANCE,
    MOST_TOLERANCE,
    OTHER,
    SAME,
    Explained,
    Tracked,
    tracked_from_dict,
)
from ampacity.analysis.metrics.percentiles import finite

ERROR_TOLERANCE = 0.01  # in points of share
_EDGE_FACTOR = 50.0
SILENT = "watched"  # no verdict of the gate's
SHIFT_SAID = 0.01  # where the tested change differs from that of the figures by more, it is said


def changes_of(
    level: Mapping[str, Any],
    name: str,
    runs: Sequence[Judged],
    records: Sequence[LevelRecords],
    tolerances: Mapping[str, float],
    paired: bool,
) -> list[Check]:
    checks = [
        _quantile_check(level, name, metric, records, tolerances, paired)
        for metric in level["quantiles"]
    ]
    checks.append(
        _error_check(level, name, records, tolerances.get("error_rate", ERROR_TOLERANCE), paired)
    )
    rates = [level, *(run.levels()[name][1] for run in runs)]
    if all(of["output_tokens_per_s"] is not None for of in rates):  # else nobody counted
        tolerance = tolerances.get("output_tokens_per_s", DEFAULT_TOLERANCE)
        checks.append(_rate_check(level, name, runs, records, tolerance, paired))
    return checks


def only_watched(check: Check) -> str:
    """Why a metric that is only watched has no line of its own."""
    if check.change is None:
        return check.reason or "no change can be told"
    more = f"an equal run may differ by more than {check.tolerance:.0%}"
    return f"{signed(check.change)}; at this load and length {more}"


def _quantile_check(
    level: Mapping[str, Any],
    name: str,
    metric: str,
    records: Sequence[LevelRecords],
    tolerances: Mapping[str, float],
    paired: bool,
) -> Check:
    kind, q = TRACKED[metric]
    known = tracked_from_dict(q, level["quantiles"][metric])
    least = known.tolerance[SAME if paired else OTHER]
    watched = metric not in tolerances and (least is None or least > MOST_TOLERANCE)
    tolerance = tolerances.get(metric, MOST_TOLERANCE if watched or least is None else least)
    check = Check(metric, "change", name, baseline=known.value_s, tolerance=tolerance)
    found = [r.metrics[kind] for r in records]
    unknown = next(
        (o.reason or "no request has a value" for o in found if o.reason or not o.n), None
    )
    if unknown:
        check.reason, check.verdict = unknown, SILENT if watched else check.verdict
        return check
    explained = _explained(level, kind, known, records)
    worse = passing = known.compare(found, explained, tolerance, paired=paired)
    if metric not in tolerances:
        worse = known.compare(found, explained, DEFAULT_TOLERANCE, paired=paired)
    check.candidate = finite(float(np.mean([o.quantile_bounds(known.q)[1] for o in found])))
    check.shift, low, high = known.moved(found, explained, worse)
    check.test = Evidence(worse, passing, passing.worse > 0, watched)
    check.change = check.shift
    if check.candidate is not None and check.baseline:
        check.change = (
            check.candidate / check.baseline - 1
        )  # of the figures; the test is on the shift
        low = None if low is None else min(low, check.change)
        high = None if high is None else max(high, check.change)
    check.change_ci = (low, high)
    return check


def _explained(
    level: Mapping[str, Any], kind: str, known: Tracked, records: Sequence[LevelRecords]
) -> Explained:
    """What is known of each request lets expect, beyond 1 - q; None where the baseline has no table."""
    if known.tables is None:
        return [None] * len(records)
    cells = [cells_from_dict(c) for c in level["cells"][kind]]
    return [expected_of(known.tables, [c.of(r) for c in cells]) for r in records]


def _error_check(
    level: Mapping[str, Any],
    name: str,
    records: Sequence[LevelRecords],
    tolerance: float,
    paired: bool,
) -> Check:
    base, ours = [from_dict(b) for b in level["errors"]], [blocks_of(r.failed) for r in records]
    shares = [
        sum(b.over.sum() for b in side) / sum(b.size.sum() for b in side) for side in (base, ours)
    ]
    limit = shares[0] + tolerance
    e = compare_shares(base, ours, limit, paired=paired, noise=0.0)
    floor = (
        limit * (1 - limit) / sum(b.size.sum() for b in ours)
    )  # no failure at all has a variance too
    check = Check(
        "error_rate", "change", name, baseline=shares[0], candidate=shares[1], tolerance=tolerance
    )
    check.change = shares[1] - shares[0]
    df = e.df if e.within > floor else math.inf
    estimate = Estimate(e.worse, max(e.within, floor), e.between, df)
    check.test = Evidence(estimate, estimate)
    return check


def _rate_check(
    level: Mapping[str, Any],
    name: str,
    runs: Sequence[Judged],
    records: Sequence[LevelRecords],
    tolerance: float,
    paired: bool,
) -> Check:
    """The rate is shown as measured.

    What is tested of an open loop is tokens per token planned, so that the draw of the lengths does not count.
    """
    theirs, ours = [from_dict(x) for x in level["rates"]], [r.rates(level["kind"]) for r in records]
    noise = ASSUMED_NOISE if level["kind"] == "closed" else 0.0
    e = compare_rates(theirs, ours, tolerance, paired=paired, noise=noise)
    check = Check("output_tokens_per_s", "change", name, tolerance=tolerance)
    check.baseline = float(level["output_tokens_per_s"])
    check.candidate = float(np.mean([run.levels()[name][1]["output_tokens_per_s"] for run in runs]))
    check.change = check.candidate / check.baseline - 1 if check.baseline else None
    check.shift = math.exp(-(e.worse + math.log1p(tolerance))) - 1
    check.test = Evidence(e, e)
    return check


def decide(checks: list[Check], alpha: float, base: Mapping[str, Any]) -> None:
    """Regression: worse than the tolerance, and by Holm over all checks no chance.

    Pass: shown to be below the tolerance. One that is only watched is SILENT unless it is a regression, or
    would be one if only those were tested: then it is inconclusive.
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
            _say_what_would_decide(check, n, times_longer(e, alpha, alpha / len(known)))
        if (
            check.shift is None
            or check.change is None
            or abs(check.change - check.shift) <= SHIFT_SAID
        ):
            continue
        told = f"at equal load and lengths {signed(check.shift)}, which is what is tested"
        check.reason = f"{told}; {check.reason}" if check.reason else told


def _say_what_would_decide(check: Check, n: int, factor: float | None) -> None:
    """``factor``: how many times the ``n`` requests would decide; None where no length does."""
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


def excuse(checks: Sequence[Check], name: str, later_s: float) -> None:
    """No regression is a TTFT or E2E that is worse by no more than the client itself was later at this load.

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
