"""Pass, regression or inconclusive: a candidate's runs against a baseline and against SLOs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ampacity.analysis.change.baseline import (
    NEAR_SATURATION,
    client_delay_s,
    near_saturation,
    read_level,
    schedule_of,
)
from ampacity.analysis.change.changes import SILENT, changes_of, decide, excuse, only_watched
from ampacity.analysis.change.check import Check, signed
from ampacity.analysis.change.comparable import (
    CompareError,
    Judged,
    check_distinct,
    check_realised,
    check_same,
    identity,
    realised,
    said,
)
from ampacity.analysis.change.limits import USABLE_TOLERANCE, sanity, slos, usable
from ampacity.analysis.change.regression import ALPHA, ASSUMED_NOISE, spent_at_looks
from ampacity.analysis.slo import verdict_word
from ampacity.analysis.warnings import of_endpoint

GATE_SCHEMA_VERSION = 1
INTERVALS = (
    "Each interval is that of the test, at equal load and lengths, drawn out to the change of the two figures: ampacity compare, "
    "which gives the interval of those figures, shows another one."
)


def judge_gate(
    base: Mapping[str, Any],
    runs: Sequence[Judged],
    tolerances: Mapping[str, float],
    *,
    look: int = 1,
    looks: int = 1,
) -> dict[str, Any]:
    """The gate's answer as one dict (docs/ci.md).

    It is look number ``look`` of at most ``looks`` at a growing list of runs.
    Raises CompareError where the candidate is no evidence or another experiment.
    """
    for run in runs:
        check_same(base["identity"], identity(run), str(run.run.path))
        missing = [name for name in base["levels"] if name not in run.levels()]
        if missing:
            raise CompareError(
                f"{run.run.path} lacks the load level {missing[0]} of the baseline: "
                "run the same --rates or --concurrency"
            )
        if any(s["ok"] for s in run.summary["stages"]):
            check_realised(base["realised"], realised(run), str(run.run.path))
    check_distinct(runs)
    alpha = spent_at_looks(ALPHA, looks)[look - 1]
    checks: list[Check] = []
    paired: dict[str, bool] = {}
    for name, level in base["levels"].items():
        checks += [c for run in runs for c in sanity(run, name)]
        records = [read_level(run, name, level["skipped"]) for run in runs]
        n, theirs = min(r.n for r in records), min(level["requests"])
        if n < theirs / 2:
            raise CompareError(
                f"{runs[0].run.path}: {name} has {n} requests, the baseline {theirs}: too few to compare"
            )
        sent = {schedule_of(run, name, r) for run, r in zip(runs, records, strict=True)}
        paired[name] = None not in sent and len(sent | set(level["schedules"])) == 1
        checks += changes_of(level, name, runs, records, tolerances, paired[name])
    tested = [c for c in checks if c.kind == "change"]
    decide(tested, alpha, base)
    untracked = {
        f"{metric} at {name}": why
        for name, level in base["levels"].items()
        for metric, why in level["untracked"].items()
    }
    silent = [c for c in checks if c.verdict == SILENT]
    untracked |= {f"{c.name} at {c.level}": only_watched(c) for c in silent}
    checks = [c for c in checks if c not in silent]
    for name, level in base["levels"].items():
        excuse(
            checks, name, max(client_delay_s(run, name) for run in runs) - level["client_delay_s"]
        )
    checks += usable(base, runs[-1], tolerances.get("capacity_rps", USABLE_TOLERANCE))
    limits, unjudged = slos(base, runs)
    checks, untracked = checks + limits, untracked | unjudged
    verdicts = {c.verdict for c in checks}
    failed = verdicts & {"regression", "violated"}
    verdict = "regression" if failed else "inconclusive" if "inconclusive" in verdicts else "pass"
    return {
        "schema_version": GATE_SCHEMA_VERSION,
        "verdict": verdict,
        "sentence": _sentence(verdict, checks),
        "same_schedule": all(paired.values()),
        "family": len(tested),
        "alpha": ALPHA,
        "look": look,
        "looks": looks,
        "alpha_of_look": alpha,
        "baseline_runs": len(base["runs"]),
        "candidate_runs": len(runs),
        "notes": _notes(base, runs, all(paired.values()), watched=bool(silent))
        + ([INTERVALS] if any(c.change_ci for c in checks) else []),
        "untracked": untracked,
        "checks": [c.as_dict() for c in checks],
    }


def cost_of(run: Judged) -> tuple[float, int]:
    """(seconds, tokens of prompts and answers) that the run took."""
    stages, r = run.run.meta["stages"], run.records.requests
    seconds = sum(((s.get("drained_ns") or s["end_ns"]) - s["start_ns"]) * 1e-9 for s in stages)
    asked = np.where(np.isnan(r.input_tokens), r.input_tokens_planned, r.input_tokens)
    return float(seconds), int(np.nansum(asked) + np.nansum(r.output_tokens))


def _notes(
    base: Mapping[str, Any], runs: Sequence[Judged], paired: bool, *, watched: bool
) -> list[str]:
    notes = []
    if watched:
        notes.append(
            "What could be noise is not called a regression. To tell less: a longer --duration in the "
            "baseline as well, more baseline runs, a lower load, ampacity ab, or a limit of your own "
            "(--tolerance METRIC=10%)."
        )
    if len(base["runs"]) == 1:
        notes.append(
            f"One baseline run shows no noise from run to run: {ASSUMED_NOISE:.1%} is assumed. "
            "Give several to measure it."
        )
    known = {r.get("run_id") for r in base["runs"]} - {None}
    if again := [str(run.run.path) for run in runs if run.run.meta.get("run_id") in known]:
        notes.append(f"{', '.join(again)} is itself a run of the baseline: it shows nothing new.")
    if not paired:
        seeds = ", ".join(sorted({said(r["seed"]) for r in base["runs"]}))
        notes.append(
            f"Baseline and candidate sent other requests (baseline seed {seeds}): the draw of lengths "
            "and arrivals counts as noise. With the same --seed (1 where none is given) and --duration, "
            "and no stage repeated or cut, smaller changes can be told."
        )
    if near := near_saturation(base):
        notes.append(f"{', '.join(near)}: {NEAR_SATURATION}.")
    families = [f for run in runs for f in run.summary.get("families") or []]
    if families:
        names = ", ".join(sorted({f["lengths"] for f in families}))
        notes.append(
            f"Not judged: the curves of other lengths ({names}). Gate them by runs of their own."
        )
    return notes + list(dict.fromkeys(text for run in runs for text in of_endpoint(run.summary)))


def _sentence(verdict: str, checks: Sequence[Check]) -> str:
    named = [c for c in checks if c.verdict in ("regression", "violated")]
    if not named and verdict != "pass":
        named = [c for c in checks if c.verdict == "inconclusive"]
    if not named:
        return f"Pass: none of {len(checks)} checks is worse than its tolerance."
    more = f" and {len(named) - 4} more" if len(named) > 4 else ""
    listed = ", ".join(_short(c) for c in named[:4]) + more
    if verdict == "regression":
        return f"Regression: {listed}."
    needed = [c.more_requests for c in named if c.more_requests]
    if not needed:
        return f"Inconclusive: {listed}."
    some = ""
    if len(needed) < len(named):
        some = f" {len(needed)} of these {len(named)}; what else is needed stands with each"
    more = f"About {max(needed)} more requests, in the baseline as well, would decide"
    return f"Inconclusive: {listed}. {more}{some}."


def _short(check: Check) -> str:
    at = f" at {check.level}" if check.level else ""
    if check.kind == "slo":
        return f"{check.name}{at} {verdict_word(check.verdict)}"
    if check.name == "error_rate" and check.change is not None:
        return f"error_rate{at} {check.candidate:.2%}"
    return f"{check.name}{at}" + (f" {signed(check.change)}" if check.change is not None else "")
