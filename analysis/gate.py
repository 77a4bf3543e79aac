"""Pass, regression or inconclusive: a candidate's runs against a baseline, and against absolute SLOs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from analysis.baseline import (
    NEAR_SATURATION,
    client_delay_s,
    near_saturation,
    read_level,
    schedule_of,
)
from analysis.blocks import QUANTILES, LevelRecords, blocks_of, from_dict
from analysis.caveats import ERROR_SHARE
from analysis.comparable import (
    CompareError,
    Judged,
    check_distinct,
    check_realised,
    check_same,
    identity,
    realised,
    said,
)
from analysis.expected import cells_from_dict, expected_of
from analysis.percentiles import finite
from analysis.regression import (
    ALPHA,
    ASSUMED_NOISE,
    Estimate,
    compare_rates,
    compare_shares,
    holm,
    spent_at_looks,
    times_longer,
)
from analysis.slo import Slo, parse_slos
from analysis.tracked import (
    DEFAULT_TOLERANCE,
    MOST_TOLERANCE,
    OTHER,
    SAME,
    WATCHED,
    Explained,
    Tracked,
    tracked_from_dict,
)

GATE_SCHEMA_VERSION = 1
ERROR_TOLERANCE = 0.01  # in points of share
USABLE_TOLERANCE = 0.1
_EDGE_FACTOR = 50.0
SHIFT_SAID = 0.01  # so much may the tested change differ from that of the two figures without a word


@dataclass
class Check:
    """One line of the verdict. ``change`` is relative (error_rate: in points), > 0 where the figure is higher."""

    name: str
    kind: str  # change | slo | sanity
    level: str | None
    verdict: str = "inconclusive"  # pass | regression | broken | inconclusive
    baseline: float | None = None
    candidate: float | None = None
    change: float | None = None
    change_ci: tuple[float | None, float | None] | None = None
    shift: float | None = None  # what the test says: by how much the quantile's neighbourhood moved
    tolerance: float | None = None
    p_regression: float | None = None
    p_equivalence: float | None = None
    more_requests: int | None = None
    reason: str | None = None
    estimate: Estimate | None = field(default=None, repr=False)
    watched: bool = False

    def as_dict(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in ("estimate", "watched")}


def judge_gate(
    base: Mapping[str, Any],
    runs: Sequence[Judged],
    tolerances: Mapping[str, float],
    *,
    look: int = 1,
    looks: int = 1,
) -> dict[str, Any]:
    """The gate's answer as one dict (docs/ci.md): look number ``look`` of at most ``looks`` at a growing list of runs.

    Raises CompareError where the candidate is no evidence or another experiment.
    """
    for run in runs:
        check_same(base["identity"], identity(run), str(run.run.path))
        missing = [name for name in base["levels"] if name not in run.levels()]
        if missing:
            raise CompareError(f"{run.run.path} lacks the load level {missing[0]} of the baseline: run the same --rates or --concurrency")  # fmt: skip
        if any(s["ok"] for s in run.summary["stages"]):
            check_realised(base["realised"], realised(run), str(run.run.path))
    check_distinct(runs)
    alpha = spent_at_looks(ALPHA, looks)[look - 1]
    checks: list[Check] = []
    paired: dict[str, bool] = {}
    for name, level in base["levels"].items():
        sanity = [c for run in runs for c in _sanity(run, name)]
        checks += sanity
        records = [read_level(run, name, level["skipped"]) for run in runs]
        if min(r.n for r in records) < min(level["requests"]) / 2:
            raise CompareError(f"{runs[0].run.path}: {name} has {min(r.n for r in records)} requests, the baseline {min(level['requests'])}: too few to compare")  # fmt: skip
        sent = {schedule_of(run, name, r) for run, r in zip(runs, records, strict=True)}
        paired[name] = None not in sent and len(sent | set(level["schedules"])) == 1
        checks += _changes(level, name, runs, records, tolerances, paired[name])
    _decide([c for c in checks if c.kind == "change"], alpha, base)
    untracked = {f"{metric} at {n}": why for n, lv in base["levels"].items() for metric, why in lv["untracked"].items()}  # fmt: skip
    silent = [c for c in checks if c.watched and c.verdict != "regression"]
    untracked |= {f"{c.name} at {c.level}": _only_watched(c) for c in silent}
    checks = [c for c in checks if c not in silent]
    for name, level in base["levels"].items():
        _excuse(checks, name, max(client_delay_s(run, name) for run in runs) - level["client_delay_s"])
    checks += _usable(base, runs[-1], tolerances.get("usable_rps", USABLE_TOLERANCE))
    slos, unjudged = _slos(base, runs)
    checks, untracked = checks + slos, untracked | unjudged
    verdicts = {c.verdict for c in checks}
    failed = verdicts & {"regression", "broken"}
    verdict = "regression" if failed else "inconclusive" if "inconclusive" in verdicts else "pass"
    return {
        "schema_version": GATE_SCHEMA_VERSION, "verdict": verdict, "sentence": _sentence(verdict, checks),
        "same_schedule": all(paired.values()), "family": sum(c.kind == "change" for c in checks), "alpha": ALPHA,
        "look": look, "looks": looks, "alpha_of_look": alpha,
        "baseline_runs": len(base["runs"]), "candidate_runs": len(runs), "notes": _notes(base, runs, all(paired.values())),
        "untracked": untracked,
        "checks": [c.as_dict() for c in checks],
    }  # fmt: skip


def cost_of(run: Judged) -> tuple[float, int]:
    """(seconds, tokens of prompts and answers) that the run took."""
    stages, r = run.run.meta["stages"], run.records.requests
    seconds = sum(((s.get("drained_ns") or s["end_ns"]) - s["start_ns"]) * 1e-9 for s in stages)
    asked = np.where(np.isnan(r.input_tokens), r.input_tokens_planned, r.input_tokens)
    return float(seconds), int(np.nansum(asked) + np.nansum(r.output_tokens))


def _only_watched(check: Check) -> str:
    if check.change is None:
        return check.reason or "no change can be told"
    return (
        f"{_signed(check.change)}; less than {check.tolerance:+.0%} could be noise at this load and length, so only more is "
        f"called a regression: use a longer --duration in the baseline as well, a lower load, ampacity ab, or set a limit "
        f"(--tolerance {check.name}=10%)"
    )


def _sanity(run: Judged, name: str) -> list[Check]:
    """What no comparison of latencies can make good: a load that the candidate does not carry, and errors."""
    stage = run.levels()[name][1]
    failures = read_level(run, name, 0).failed  # those of the warm-up too
    failed, share = int(failures.sum()), float(failures.mean()) if len(failures) else 1.0
    checks = []
    if stage["stable"] is False:
        checks.append(Check("stability", "sanity", name, "regression", reason=f"no steady state at this load any more: {stage['stable_reason']}"))  # fmt: skip
    if share > ERROR_SHARE:
        checks.append(Check("errors", "sanity", name, "inconclusive", candidate=share, reason=f"{failed} of {len(failures)} requests failed or were cut off unfinished: with more than {ERROR_SHARE:.0%} nothing passes"))  # fmt: skip
    return checks


def _changes(
    level: Mapping[str, Any],
    name: str,
    runs: Sequence[Judged],
    records: Sequence[LevelRecords],
    tolerances: Mapping[str, float],
    paired: bool,
) -> list[Check]:
    checks = [
        _quantile_check(level, name, metric, records, tolerances, paired) for metric in level["quantiles"]
    ]
    return [
        *checks,
        _error_check(level, name, records, tolerances.get("error_rate", ERROR_TOLERANCE), paired),
        _rate_check(
            level, name, runs, records, tolerances.get("output_tokens_per_s", DEFAULT_TOLERANCE), paired
        ),
    ]


def _quantile_check(
    level: Mapping[str, Any],
    name: str,
    metric: str,
    records: Sequence[LevelRecords],
    tolerances: Mapping[str, float],
    paired: bool,
) -> Check:
    kind, percentile = metric.split("_")
    known = tracked_from_dict(QUANTILES[percentile], level["quantiles"][metric])
    least = known.tolerance[SAME if paired else OTHER]
    tolerance = tolerances.get(metric, WATCHED[-1] if least is None else least)
    watched = metric not in tolerances and tolerance > MOST_TOLERANCE
    check = Check(metric, "change", name, baseline=known.value_s, tolerance=tolerance, watched=watched)
    found = [r.metrics[kind] for r in records]
    unknown = next((o.reason or "no request has a value" for o in found if o.reason or not o.n), None)
    if unknown:
        check.reason = unknown
        return check
    explained = _explained(level, kind, known, records)
    check.estimate = known.compare(found, explained, tolerance, paired=paired)
    check.candidate = finite(float(np.mean([o.quantile_bounds(known.q)[1] for o in found])))
    check.shift, low, high = known.moved(found, explained, check.estimate)
    check.change = check.shift
    if check.candidate is not None and check.baseline:
        check.change = (
            check.candidate / check.baseline - 1
        )  # of the figures beside it; the test is on the shift
        low, high = (
            None if low is None else min(low, check.change),
            None if high is None else max(high, check.change),
        )
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
    level: Mapping[str, Any], name: str, records: Sequence[LevelRecords], tolerance: float, paired: bool
) -> Check:
    base, ours = [from_dict(b) for b in level["errors"]], [blocks_of(r.failed) for r in records]
    shares = [sum(b.over.sum() for b in side) / sum(b.size.sum() for b in side) for side in (base, ours)]
    limit = shares[0] + tolerance
    e = compare_shares(base, ours, limit, paired=paired, noise=0.0)
    floor = limit * (1 - limit) / sum(b.size.sum() for b in ours)  # no failure at all has a variance too
    check = Check("error_rate", "change", name, baseline=shares[0], candidate=shares[1], change=shares[1] - shares[0], tolerance=tolerance)  # fmt: skip
    check.estimate = Estimate(
        e.worse, max(e.within, floor), e.between, e.df if e.within > floor else math.inf
    )
    return check


def _rate_check(
    level: Mapping[str, Any],
    name: str,
    runs: Sequence[Judged],
    records: Sequence[LevelRecords],
    tolerance: float,
    paired: bool,
) -> Check:
    """The rate is shown as measured. Open loop: what is tested is tokens per token planned, as the draw of the lengths does not count."""
    theirs, ours = [from_dict(x) for x in level["rates"]], [r.rates(level["kind"]) for r in records]
    noise = ASSUMED_NOISE if level["kind"] == "closed" else 0.0
    e = compare_rates(theirs, ours, tolerance, paired=paired, noise=noise)
    check = Check("output_tokens_per_s", "change", name, baseline=float(level["output_tokens_per_s"]), tolerance=tolerance)  # fmt: skip
    check.candidate = float(np.mean([run.levels()[name][1]["output_tokens_per_s"] for run in runs]))
    check.change = check.candidate / check.baseline - 1 if check.baseline else None
    check.shift = math.exp(-(e.worse + math.log1p(tolerance))) - 1
    check.estimate = e
    return check


def _decide(checks: list[Check], alpha: float, base: Mapping[str, Any]) -> None:
    """Regression by Holm over all checks; pass where the change is shown to be below the tolerance."""
    known = [c for c in checks if c.estimate is not None]
    estimates = [c.estimate for c in known if c.estimate is not None]
    worse = holm([e.p_regression for e in estimates], alpha)
    for check, e, rejected in zip(known, estimates, worse, strict=True):
        check.p_regression, check.p_equivalence = e.p_regression, e.p_equivalence
        check.verdict = "regression" if rejected else "pass" if e.p_equivalence <= alpha else "inconclusive"
        if check.verdict == "inconclusive":
            n = min(base["levels"][check.level]["requests"])
            factor = times_longer(e, alpha, alpha / len(known))
            if factor is None:
                check.reason = (
                    "the noise from run to run decides, not the length: give the baseline more runs"
                )
            elif factor > _EDGE_FACTOR:
                check.reason = "the change is on the edge of the tolerance: no length is likely to decide"
            else:
                check.more_requests = max(1, math.ceil(n * (factor - 1)))
                check.reason = f"needs about {check.more_requests} more requests at {check.level}, in the baseline as well"
        if (
            check.shift is not None
            and check.change is not None
            and abs(check.change - check.shift) > SHIFT_SAID
        ):
            said = f"at equal load and lengths {_signed(check.shift)}, which is what is tested"
            check.reason = f"{said}; {check.reason}" if check.reason else said


def _excuse(checks: Sequence[Check], name: str, later_s: float) -> None:
    """A TTFT or E2E that is worse by no more than the candidate's own client was later than the baseline's is no regression."""
    for check in checks:
        if (check.level, check.verdict, check.kind) != (name, "regression", "change") or check.shift is None:
            continue
        if check.name.startswith(("ttft_", "e2e_")) and check.shift * float(check.baseline or 0.0) <= later_s:
            check.verdict = "inconclusive"
            check.reason = f"the client itself was {1e3 * later_s:.3g} ms later at p99 than in the baseline, which is as much as this change: run it on a quieter machine"  # fmt: skip


def _usable(base: Mapping[str, Any], run: Judged, tolerance: float) -> list[Check]:
    """Brackets of tested loads: worse where they do not overlap, no worse where the lower ends agree."""
    ours, theirs = run.summary["capacity"], base["usable_rps"]
    if not theirs:
        return []
    check = Check("usable_rps", "capacity", None, baseline=theirs["value"], candidate=ours["usable_rps"], tolerance=tolerance)  # fmt: skip
    bracket, least = ours["usable_rps_ci"], theirs["bracket"][0] * (1 - tolerance)
    if ours["usable_rps"]:
        check.change = ours["usable_rps"] / theirs["value"] - 1
    if not bracket:
        check.reason = ours["reason"]
    elif bracket[0] is not None and bracket[0] >= least:
        check.verdict = "pass"
    elif bracket[1] is not None and bracket[1] <= least:
        check.verdict = "regression"
    else:
        check.reason = "the tested loads lie too far apart to tell: use closer --rates or a longer --duration"
    return [check]


def _slos(base: Mapping[str, Any], runs: Sequence[Judged]) -> tuple[list[Check], dict[str, str]]:
    """(absolute limits, why some are not judged at a load). Any run may break one, any may meet it.

    In a sweep only at loads at which the baseline kept them; at the lowest where it kept one nowhere.
    """
    checks, untracked, levels = [], {}, base["levels"]
    lowest = min(levels, key=lambda name: levels[name]["offered_rps"] or levels[name]["concurrency"] or 0.0)
    for slo in runs[0].summary["slos"]:
        metric = slo["text"].partition("=")[0]
        known = {name: level.get("slos", {}).get(metric, level["quantiles"].get(metric, {}).get("value_s")) for name, level in levels.items()}  # fmt: skip
        kept = [name for name, s in known.items() if s is not None and s <= slo["limit_s"]] or [lowest]
        unknown = f"the baseline does not hold {metric}: make it from runs with --slo {slo['text']}"
        for name, known_s in known.items():
            if name not in kept:
                untracked[f"{slo['text']} at {name}"] = unknown if known_s is None else f"not judged at this load, the baseline did not keep it there ({known_s:.3g} s)"  # fmt: skip
                continue
            found = [v for run in runs for v in run.levels()[name][1]["slo_verdicts"] if v["slo"] == slo["text"]]  # fmt: skip
            v = next((v for word in ("broken", "met") for v in found if v["verdict"] == word), found[-1])
            verdict = {"met": "pass", "broken": "broken"}.get(v["verdict"], "inconclusive")
            reason = v["reason"] or (unknown if known_s is None else None)
            checks.append(Check(slo["text"], "slo", name, verdict, baseline=known_s, candidate=v["value_s"], more_requests=v["more_requests"], reason=reason))  # fmt: skip
    return checks, untracked


def _notes(base: Mapping[str, Any], runs: Sequence[Judged], paired: bool) -> list[str]:
    notes = []
    if len(base["runs"]) == 1:
        notes.append(f"One baseline run shows no noise from run to run: {ASSUMED_NOISE:.1%} is assumed. Give several to measure it.")  # fmt: skip
    if not paired:
        seeds = sorted({said(r["seed"]) for r in base["runs"]})
        notes.append(f"Baseline and candidate sent other requests (baseline seed {', '.join(seeds)}): the draw of lengths and arrivals counts as noise. With the same --seed (1 where none is given) and --duration, and no stage repeated or cut, smaller changes can be told.")  # fmt: skip
    if near := near_saturation(base):
        notes.append(f"{', '.join(near)}: {NEAR_SATURATION}.")
    if left_out := sorted({f["lengths"] for run in runs for f in run.summary.get("families") or []}):
        notes.append(f"Not judged: the curves of other lengths ({', '.join(left_out)}). Gate them by runs of their own.")  # fmt: skip
    return notes


def _sentence(verdict: str, checks: Sequence[Check]) -> str:
    named = [c for c in checks if c.verdict in ("regression", "broken")]
    if not named and verdict != "pass":
        named = [c for c in checks if c.verdict == "inconclusive"]
    if not named:
        return f"Pass: none of {len(checks)} checks is worse than its tolerance."
    more = f" and {len(named) - 4} more" if len(named) > 4 else ""
    listed = ", ".join(_short(c) for c in named[:4]) + more
    if verdict == "regression":
        return f"Regression: {listed}."
    needed = [c.more_requests for c in named if c.more_requests]
    some = "" if len(needed) == len(named) else f" {len(needed)} of these {len(named)}; what else is needed stands with each"  # fmt: skip
    return f"Inconclusive: {listed}." + (f" About {max(needed)} more requests, in the baseline as well, would decide{some}." if needed else "")  # fmt: skip


def _signed(share: float) -> str:
    return f"{round(share, 3) + 0.0:+.1%}"  # no -0.0


def _short(check: Check) -> str:
    at = f" at {check.level}" if check.level else ""
    if check.kind == "slo":
        return f"{check.name}{at} {'broken' if check.verdict == 'broken' else 'undecided'}"
    if check.name == "error_rate" and check.change is not None:
        return f"error_rate{at} {check.candidate:.2%}"
    return f"{check.name}{at}" + (f" {_signed(check.change)}" if check.change is not None else "")


def slos_of(base: Mapping[str, Any], given: Sequence[str]) -> list[Slo]:
    """The baseline's SLOs and those given; a limit that is given wins. Raises SloError."""
    wanted = {slo.name: slo for slo in parse_slos(base["slos"])}
    return list((wanted | {slo.name: slo for slo in parse_slos(given)}).values())
