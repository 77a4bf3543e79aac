"""A decision in thirteen steps: as text for a terminal, and as one HTML page."""

import re
from collections.abc import Sequence
from typing import Any

from ampacity.analysis.decision.candidates import Candidate, Decision
from ampacity.analysis.decision.guardrails import Guardrails
from ampacity.analysis.decision.inputs import Input
from ampacity.analysis.decision.plan import Plan
from ampacity.analysis.decision.roofline import Use
from ampacity.reports.pages.limits import limits_with_figures, rails_of
from ampacity.reports.pages.page import render_page
from ampacity.reports.pages.plan import (
    columns,
    headline,
    hosted_lines,
    pools_text,
    rate_text,
    sensitivity_rows,
    table_of,
    wrapped,
)
from ampacity.reports.render.figures import DASH, seconds, significant
from ampacity.reports.render.terminal import Entry, Screen

SHOWN_LIMITS, SHOWN_INPUTS = 2, 3  # in a terminal: the rest is in the page
OWN_COMMAND = r"^ampacity size .* (?=--\S+ \S+$)"  # which a step adds an option to
NAME_WIDTH = 20  # of a run's path in the matrix: its end


def size_screen(decision: Decision, page: object = None) -> Screen:
    """Return the screen of a decision: the best candidate's answer, the matrix of several."""
    best, plan = decision.candidates[0], decision.candidates[0].plan
    fleet = headline(plan) if plan else f"no fleet: {best.plan_missing}"
    head, _, year = fleet.partition("; ") if plan else (fleet, "", "")
    cost = next((step.decision for step in best.steps if step.title == "TCO"), None) or ""
    held = [shown.limit for shown in limits_with_figures(best.limits)]
    others = f"+ {len(held) - 1} more with --summary full" if len(held) > 1 else ""
    gaps = {step.gap: [s.title for s in best.steps if s.gap == step.gap] for step in best.steps}
    several = len(decision.candidates) > 1
    rails = [f"{rail.name} {rail.value}" for rail in rails_of(best.guardrails, plan)]
    entries = [
        Entry("FLEET", head, best.run if several else "", "good" if plan else "unsure"),
        Entry("COST", year, cost.partition("; ")[2]),
        _capacity(best),
        *(Entry("CAUSE", f"{limit.title}. To try: {limit.lever}", others) for limit in held[:1]),
        Entry("HARDWARE", best.hardware_text),
        Entry("SET", "; ".join(rails)),
        *(Entry("OPEN", ", ".join(steps), gap) for gap, steps in gaps.items() if gap),
        Entry("PREDICTED", "nothing was measured" if best.predicted else "", state="unsure"),
        Entry("ALL", "the thirteen steps", "--summary full; with their sources: --html FILE"),
    ]
    matrix = [row[:-1] for row in _matrix(decision.candidates)]  # 80 columns hold no more
    left_out = [f"Left out: {one.run}: {one.reason}" for one in decision.left_out]
    return Screen(
        [entry for entry in entries if entry.text],
        table_of(matrix) if several else None,
        notes=[
            *filter(None, [best.guardrails.at_knee]),
            *decision.apart,
            *decision.notes,
            *left_out,
        ],
        next_command=next((s.command for s in best.steps if s.title == "Benchmark"), None),
        path=page,
    )


def _capacity(one: Candidate) -> Entry:
    if one.capacity_rps is None:
        return Entry("CAPACITY", "not known", one.capacity_reason or "no capacity was found")
    rate = rate_text(one.capacity_rps, one.capacity_rps_ci, one.verified_rps)
    return Entry("CAPACITY", rate.rstrip(","), f"an instance, at {', '.join(one.slos)}")


def size_text(decision: Decision, page: object = None) -> str:
    """Return a decision in full: the answer, then the steps of the best candidate."""
    best, *others = decision.candidates
    lines = []
    if others:
        rows = [row[:-1] for row in _matrix(decision.candidates)]  # 80 columns hold no more
        lines += [*columns(rows), *decision.apart, *decision.notes]
    lines += [f"left out: {one.run}: {one.reason}" for one in decision.left_out]
    lines += ["", *_answer(best)]
    for one in others:
        lines += ["", *_answer(one)]
    lines += [
        "",
        *([f"Steps of {best.run}:"] if others else []),
        *_steps(best),
        *_plan(best.plan),
        _rails_line(best),
    ]
    holds = [condition.holds for condition in best.disaggregation]
    pools = best.plan.pools if best.plan else None
    ratio = f"; P:D {pools.prefill_instances}:{pools.decode_instances}" if pools else ""
    lines.append(
        f"Prefill apart from decoding: {holds.count(True)} of {len(holds)} conditions hold, "
        f"{holds.count(None)} unknown{ratio} (--html)"
    )
    if others:
        lines.append("All steps of every candidate: --html FILE or --json")
    lines += [f"report: {page}"] if page else []
    return wrapped("\n".join(lines).strip())


def size_page(decision: Decision) -> str:
    """Return a decision as one HTML page that needs no network."""
    several = len(decision.candidates) > 1
    return render_page(
        "size.html.j2",
        [],
        title="ampacity size",
        candidates=[_shown(one) for one in decision.candidates],
        matrix=_matrix(decision.candidates) if several else [],
        notes=[
            *decision.apart,
            *decision.notes,
            *(f"Left out: {one.run}: {one.reason}" for one in decision.left_out),
        ],
    )


def _shown(one: Candidate) -> dict[str, Any]:
    """Return a candidate as the template shows it: all figures are text."""
    plan = one.plan
    return {
        "name": one.run,
        "answer": _answer(one, len(one.limits))[1:],
        "steps": [
            (step, [_input(known) for known in step.known if known.value is not None])
            for step in one.steps
        ],
        "curve": _curve(one),
        "use": _use(one.hardware) if one.hardware else "",
        "sensitivity": sensitivity_rows(plan.sensitivity) if plan else [],
        "hosted": [line.strip() for h in plan.hosted for line in hosted_lines(h, plan)]
        if plan
        else [],
        "limits": limits_with_figures(one.limits),
        "untold": [limit for limit in one.limits if limit.holds is None],
        "rails": _rails(one.guardrails, one.plan),
        "pools": pools_text(plan) if plan else None,
        "conditions": [
            (c.name, {True: "yes", False: "no", None: "unknown"}[c.holds], c.evidence)
            for c in one.disaggregation
        ],
        "warnings": [warned.text for warned in plan.warnings] if plan else [],
    }


def _curve(one: Candidate) -> list[list[str]]:
    """Return the use of the hardware along the measured curve, heads first."""
    rows = [["req/s", "bandwidth used", "compute used"]]
    for at in one.hardware_curve:
        mfu = "–" if at.mfu is None else f"{at.mfu.value:.1%}"
        rows.append([significant(at.rps), f"{at.mbu.value:.1%}", mfu])
    return rows if one.hardware_curve else []


def _use(use: Use) -> str:
    """Return what the measured point delivers per unit of hardware, and its floors."""
    return (
        f"{use.tokens_per_s_per_gpu.value:,.0f} output tokens/s per GPU, "
        f"{significant(use.tokens_per_gpu_hour.value / 1e6)} million per GPU-hour, "
        f"{significant(use.tokens_per_s_per_gb.value)} tokens/s per GB; no step can be shorter than "
        f"{seconds(use.decode_floor_s)}, no prompt of this length than "
        f"{seconds(use.prefill_floor_s)}."
    )


def _answer(one: Candidate, most: int = SHOWN_LIMITS) -> list[str]:
    """Return instances, GPUs, cost and at most so many limits, in this order."""
    lines = [f"{one.run}: predicted, nothing was measured" if one.predicted else one.run]
    lines.append(headline(one.plan) if one.plan else f"no fleet: {one.plan_missing}")
    slos = ", ".join(one.slos) or "no SLO"
    if one.capacity_rps is None and one.capacity_reason != one.plan_missing:
        lines.append(f"one instance: {one.capacity_reason or 'no capacity was found'}")
    elif one.capacity_rps is not None:
        carries = "is predicted to carry" if one.predicted else "carries"
        rate = rate_text(one.capacity_rps, one.capacity_rps_ci, one.verified_rps)
        lines.append(f"one instance {carries} {rate} at {slos}")
    holds = [shown.limit.title for shown in limits_with_figures(one.limits)]
    shown, more = holds[:most], len(holds) - most
    further = [f"{more} more in --html"] if more > 0 else []
    lines.append("limit: " + ("; ".join([*shown, *further]) or "none that this run shows"))
    lines.append(one.hardware_text)
    return [*lines, *([one.guardrails.at_knee] if one.guardrails.at_knee else [])]


def _input(known: Input) -> str:
    unit = f" {known.unit}" if known.unit else ""
    value = known.value or 0.0
    text = f"{value:,.0f}" if value == int(value) else significant(value)
    return f"{known.name} {text}{unit} ({known.basis}: {known.source})"


def _steps(one: Candidate) -> list[str]:
    lines = []
    for number, step in enumerate(one.steps, 1):
        head = f"{number:2} {step.title:15} "
        lines.append(head + (step.decision or f"not known: {step.gap}"))
        if step.command:
            lines.append(f"   → {re.sub(OWN_COMMAND, 'add ', step.command)}")
        elif step.gap and step.decision:
            lines.append(f"{'':19}{step.gap}")
    return lines


def _plan(plan: Plan | None) -> list[str]:
    if plan is None:
        return []
    codes = ", ".join(dict.fromkeys(warned.code for warned in plan.warnings))
    lines = columns(sensitivity_rows(plan.sensitivity[:SHOWN_INPUTS]))
    return [*lines, *([f"Warnings (ampacity plan {plan.run}): {codes}"] if codes else [])]


def _rails_line(one: Candidate) -> str:
    first, *others = _rails(one.guardrails, one.plan)
    short = (text.partition(" (")[0].replace("at most", "≤") for text in others)
    return f"Guardrails of an instance: {'; '.join([first, *short])}"


def _rails(rails: Guardrails, plan: Plan | None = None) -> list[str]:
    """Return the limits for an instance, one each, and what is missing for others."""
    words = {name: name.removesuffix("_s").replace("_", " ") for name in rails.missing}
    unknown = (f"{words[name]}: {why}" for name, why in rails.missing.items())
    known = (f"{rail.name} {rail.value} ({rail.why})" for rail in rails_of(rails, plan))
    return [*known, *unknown]


def _matrix(candidates: Sequence[Candidate]) -> list[list[str]]:
    """Return the rows of the matrix with their heads, each figure with its interval."""
    rows = [["candidate", "req/s", "GPUs", "USD a year", "USD/1,000"]]
    for one in candidates:
        plan, rate = one.plan, DASH
        if one.capacity_rps is not None:
            rate = rate_text(one.capacity_rps, one.capacity_rps_ci, unit="")
        gpus = year = each = DASH
        if plan is not None:
            low, high = plan.instances_ci
            tp = plan.tensor_parallel
            ends = low and high and low != high and f"{low * tp} to {high * tp}"
            gpus = _with(str(plan.gpus), ends or None)
            if plan.cost_per_year is not None:
                lower, upper = plan.cost_per_year_ci or (None, None)
                known = lower and upper and lower != upper
                year = _with(
                    _k(plan.cost_per_year),
                    f"{_k(lower or 0.0)} to {_k(upper or 0.0)}" if known else None,
                )
            each = significant(plan.fleet_cost_per_thousand_requests)
        rows.append([one.run[-NAME_WIDTH:], rate, gpus, year, each])
    return rows


def _k(usd: float) -> str:
    """Return dollars as 263k or 1.23M."""
    return f"{usd / 1e6:,.2f}M" if usd >= 1e6 else f"{usd / 1000:,.0f}k"


def _with(text: str, ends: str | None) -> str:
    return f"{text} ({ends})" if ends else text
