"""Pass, regression or inconclusive: a candidate's runs against a baseline and against SLOs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ampacity.analysis.change import engine
from ampacity.analysis.change.comparable import check_distinct, check_same, format_value
from ampacity.analysis.change.judged import CompareError, Judged
from ampacity.analysis.change.results import Check, GateResult
from ampacity.analysis.gate import checks
from ampacity.analysis.gate.baseline import NEAR_SATURATION, near_saturation
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
NOISY = (
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
) -> GateResult:
    """Return the gate's result (docs/ci.md), at look ``look`` of ``looks`` at a growing list.

    Raises CompareError where the candidate is no evidence or another experiment.
    """
    _check_comparable(base, runs)
    alpha = engine.spent_at_looks(engine.ALPHA, looks)[look - 1]
    levels = checks.read_levels(base, runs)
    tested = [t for at in levels for t in checks.changes_of(at, tolerances)]
    found, watched = _at_levels(levels, runs, checks.decide(tested, alpha))
    untracked = {f"{k} at {at.name}": v for at in levels for k, v in at.base["untracked"].items()}
    limits, unjudged = checks.slo_checks(levels, runs[0].summary.slos)
    tolerance = tolerances.get("capacity_rps", checks.CAPACITY_TOLERANCE)
    found += checks.capacity_checks(base, runs[-1], tolerance) + limits
    verdicts = {"regression" if c.verdict == "violated" else c.verdict for c in found}
    verdict = next((v for v in ("regression", "inconclusive") if v in verdicts), "pass")
    paired = all(at.paired for at in levels)
    notes = ([NOISY] if watched else []) + _notes(base, runs, paired)
    return GateResult(
        schema_version=GATE_SCHEMA_VERSION,
        verdict=verdict,
        sentence=_sentence(verdict, found),
        same_schedule=paired,
        family=len(tested),
        alpha=engine.ALPHA,
        look=look,
        looks=looks,
        alpha_of_look=alpha,
        baseline_runs=len(base["runs"]),
        candidate_runs=len(runs),
        notes=notes + ([INTERVALS] if any(c.change_ci for c in found) else []),
        untracked=untracked | watched | unjudged,
        checks=found,
        stage_s={at.name: sum(s.window.end_s for s in at.stages) for at in levels},
    )


def _at_levels(
    levels: Sequence[checks.Level], runs: Sequence[Judged], decided: Sequence[Check]
) -> tuple[list[Check], dict[str, str]]:
    """Return the checks at each level, and why others are only watched."""
    found: list[Check] = []
    watched: dict[str, str] = {}
    for at in levels:
        delays_s = [run.client_delay_s(s) for run, s in zip(runs, at.stages, strict=True)]
        later_s = max(delays_s) - at.base["client_delay_s"]
        found += [check for run in runs for check in checks.sanity(run, at.name)]
        for check in (c for c in decided if c.level == at.name):
            if check.verdict == checks.WATCHED:
                watched[check.title] = checks.why_watched(check)
            else:
                found.append(checks.excuse_client_delay(check, later_s))
    return found, watched


def _check_comparable(base: Mapping[str, Any], runs: Sequence[Judged]) -> None:
    for run in runs:
        check_same(base, run)
        if missing := [name for name in base["levels"] if name not in run.levels()]:
            raise CompareError(
                f"{run.run.path} lacks the load level {missing[0]} of the baseline: "
                "run the same --rates or --concurrency"
            )
    check_distinct(runs)


def cost_of(run: Judged) -> tuple[float, int]:
    """Return the seconds and the tokens of prompts and answers that the run took."""
    stages, r = run.run.stages, run.records.requests
    seconds = sum(((s.drained_ns or s.end_ns) - s.start_ns) * 1e-9 for s in stages)
    prompts = np.where(np.isnan(r.input_tokens), r.input_tokens_planned, r.input_tokens)
    return float(seconds), int(np.nansum(prompts) + np.nansum(r.output_tokens))


def _notes(base: Mapping[str, Any], runs: Sequence[Judged], paired: bool) -> list[str]:
    notes = []
    if len(base["runs"]) == 1:
        assumed = f"{engine.ASSUMED_NOISE:.1%} is assumed. Give several to measure it."
        notes.append(f"One baseline run shows no noise from run to run: {assumed}")
    known = {r.get("run_id") for r in base["runs"]} - {None}
    if again := [str(run.run.path) for run in runs if run.meta.get("run_id") in known]:
        notes.append(f"{', '.join(again)} is itself a run of the baseline: it shows nothing new.")
    if not paired:
        seeds = ", ".join(sorted({format_value(r["seed"]) for r in base["runs"]}))
        notes.append(
            f"Baseline and candidate sent other requests (baseline seed {seeds}): the draw of "
            "lengths and arrivals counts as noise. With the same --seed (1 where none is given) "
            "and --duration, and no stage repeated or cut, smaller changes can be detected."
        )
    if near := near_saturation(base):
        notes.append(f"{', '.join(near)}: {NEAR_SATURATION}.")
    if names := {f.lengths for run in runs for f in run.summary.families}:
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
    if check.kind == "slo":
        return f"{check.title} {verdict_word(check.verdict)}"
    if check.change is None:
        return check.title
    rate = f"{check.candidate:.2%}" if check.name == "error_rate" else checks.signed(check.change)
    return f"{check.title} {rate}"


def twice_as_slow(run: Run) -> Run:
    """Return the same run with every answer taking twice its time, which a gate must fail."""
    table = run.requests.slice()

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
