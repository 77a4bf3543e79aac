"""Pass, regression or inconclusive: a candidate's runs against a baseline and against SLOs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ampacity.analysis.change.baseline import NEAR_SATURATION, client_delay_s, near_saturation
from ampacity.analysis.change.change import ALPHA, ASSUMED_NOISE, spent_at_looks
from ampacity.analysis.change.checks import (
    CAPACITY_TOLERANCE,
    SILENT,
    Check,
    capacity_checks,
    changes_of,
    decide,
    excuse_client_delay,
    only_watched,
    read_levels,
    sanity,
    signed,
    slo_checks,
)
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
from ampacity.analysis.slo import verdict_word
from ampacity.analysis.warnings import of_endpoint
from ampacity.loadgen.rundir.files import Run
from ampacity.loadgen.rundir.records import CHUNK_AT_MAX_US

GATE_SCHEMA_VERSION = 1
INTERVALS = (
    "Each interval is that of the test, at equal load and lengths, extended to include the change "
    "of the two figures: ampacity compare, which gives the interval of those figures, shows "
    "another one."
)
WATCHED = (
    "What could be noise is not called a regression. To detect smaller changes: a longer "
    "--duration in the baseline as well, more baseline runs, a lower load, ampacity ab, or a limit "
    "of your own (--tolerance METRIC=10%)."
)


def judge_gate(
    base: Mapping[str, Any],
    runs: Sequence[Judged],
    tolerances: Mapping[str, float],
    *,
    look: int = 1,
    looks: int = 1,
) -> dict[str, Any]:
    """Return the gate's answer (docs/ci.md), at look ``look`` of ``looks`` at a growing list.

    Raises CompareError where the candidate is no evidence or another experiment.
    """
    _check_comparable(base, runs)
    alpha = spent_at_looks(ALPHA, looks)[look - 1]
    levels = read_levels(base, runs)
    checks: list[Check] = []
    for at in levels:
        checks += [c for run in runs for c in sanity(run, at.name)] + changes_of(at, tolerances)
    tested = [c for c in checks if c.kind == "change"]
    decide(tested, alpha, base)
    silent = [c for c in checks if c.verdict == SILENT]
    checks = [c for c in checks if c not in silent]
    untracked = {
        f"{metric} at {at.name}": why
        for at in levels
        for metric, why in at.base["untracked"].items()
    }
    untracked |= {f"{c.name} at {c.level}": only_watched(c) for c in silent}
    for at in levels:
        late_s = max(client_delay_s(run, at.name) for run in runs)
        excuse_client_delay(checks, at.name, late_s - at.base["client_delay_s"])
    tolerance = tolerances.get("capacity_rps", CAPACITY_TOLERANCE)
    limits, unjudged = slo_checks(base, runs)
    checks += capacity_checks(base, runs[-1], tolerance) + limits
    verdicts = {c.verdict for c in checks}
    failed = verdicts & {"regression", "violated"}
    verdict = "regression" if failed else "inconclusive" if "inconclusive" in verdicts else "pass"
    paired = all(at.paired for at in levels)
    notes = _notes(base, runs, paired, watched=bool(silent))
    return {
        "schema_version": GATE_SCHEMA_VERSION,
        "verdict": verdict,
        "sentence": _sentence(verdict, checks),
        "same_schedule": paired,
        "family": len(tested),
        "alpha": ALPHA,
        "look": look,
        "looks": looks,
        "alpha_of_look": alpha,
        "baseline_runs": len(base["runs"]),
        "candidate_runs": len(runs),
        "notes": notes + ([INTERVALS] if any(c.change_ci for c in checks) else []),
        "untracked": untracked | unjudged,
        "checks": [c.as_dict() for c in checks],
    }


def _check_comparable(base: Mapping[str, Any], runs: Sequence[Judged]) -> None:
    for run in runs:
        path = str(run.run.path)
        check_same(base["identity"], identity(run), path)
        missing = [name for name in base["levels"] if name not in run.levels()]
        if missing:
            raise CompareError(
                f"{path} lacks the load level {missing[0]} of the baseline: "
                "run the same --rates or --concurrency"
            )
        if any(s["ok"] for s in run.summary["stages"]):
            check_realised(base["realised"], realised(run), path)
    check_distinct(runs)


def cost_of(run: Judged) -> tuple[float, int]:
    """Return the seconds and the tokens of prompts and answers that the run took."""
    stages, r = run.run.meta["stages"], run.records.requests
    seconds = sum(((s.get("drained_ns") or s["end_ns"]) - s["start_ns"]) * 1e-9 for s in stages)
    prompts = np.where(np.isnan(r.input_tokens), r.input_tokens_planned, r.input_tokens)
    return float(seconds), int(np.nansum(prompts) + np.nansum(r.output_tokens))


def _notes(
    base: Mapping[str, Any], runs: Sequence[Judged], paired: bool, *, watched: bool
) -> list[str]:
    notes = [WATCHED] if watched else []
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
            f"Baseline and candidate sent other requests (baseline seed {seeds}): the draw of "
            "lengths and arrivals counts as noise. With the same --seed (1 where none is given) "
            "and --duration, and no stage repeated or cut, smaller changes can be detected."
        )
    if near := near_saturation(base):
        notes.append(f"{', '.join(near)}: {NEAR_SATURATION}.")
    if names := {f["lengths"] for run in runs for f in run.summary.get("families") or []}:
        notes.append(
            f"Not judged: the curves of other lengths ({', '.join(sorted(names))}). "
            "Gate them by runs of their own."
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
        some = f" {len(needed)} of these {len(named)}; each of the others gives its own reason"
    more = f"About {max(needed)} more requests, in the baseline as well, would decide"
    return f"Inconclusive: {listed}. {more}{some}."


def _short(check: Check) -> str:
    at = f" at {check.level}" if check.level else ""
    if check.kind == "slo":
        return f"{check.name}{at} {verdict_word(check.verdict)}"
    if check.name == "error_rate" and check.change is not None:
        return f"error_rate{at} {check.candidate:.2%}"
    return f"{check.name}{at}" + (f" {signed(check.change)}" if check.change is not None else "")


def twice_as_slow(run: Run) -> Run:
    """Return the same run with every answer taking twice its time, which a gate must fail."""
    table = run.requests

    def with_column(name: str, values: Any) -> pa.Table:
        return table.set_column(table.column_names.index(name), table.schema.field(name), values)

    for event in ("headers", "first_event", "first_token", "first_answer", "last_token", "ended"):
        at = table[f"{event}_ns"]
        table = with_column(f"{event}_ns", pc.add(at, pc.subtract(at, table["started_ns"])))
    chunks = table["chunk_at_us"].combine_chunks()
    doubled = np.minimum(chunks.values.to_numpy().astype(np.uint64) * 2, CHUNK_AT_MAX_US)
    lists = pa.ListArray.from_arrays(chunks.offsets, pa.array(doubled.astype(np.uint32)))
    table = with_column("chunk_at_us", lists)
    ends = pc.max(table["ended_ns"]).as_py() or 0
    stages = [{**s, "drained_ns": max(s.get("drained_ns") or 0, ends)} for s in run.meta["stages"]]
    return replace(run, requests=table, meta={**run.meta, "stages": stages})
