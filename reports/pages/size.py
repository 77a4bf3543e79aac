"""A decision in thirteen steps: as text for a terminal, and as one HTML page."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Sequence
from typing import Any

from ampacity.analysis.contract.limits import Limit
from ampacity.analysis.decision.candidates import Candidate, Decision
from ampacity.analysis.decision.guardrails import Guardrails
from ampacity.analysis.decision.inputs import Input
from ampacity.analysis.decision.plan import Plan
from ampacity.reports.pages.page import render_page
from ampacity.reports.pages.plan import columns, headline, hosted_lines, sensitivity_rows
from ampacity.reports.render.figures import DASH, interval, significant

SHOWN_LIMITS, SHOWN_INPUTS = 2, 3  # in a terminal: the rest is in the page
OWN_COMMAND = r"^ampacity size .* (?=--\S+ \S+$)"  # which a step adds an option to
NAME_WIDTH = 24  # of a run's path in the matrix: its end


def size_text(decision: Decision) -> str:
    """Return a decision for a terminal: the answer, then the steps of the best candidate."""
    best, *others = decision.candidates
    lines = []
    if others:
        lines += [*columns(_matrix(decision.candidates)), *decision.apart, *decision.notes]
    lines += [f"left out: {one.run}: {one.reason}" for one in decision.left_out]
    for one in others:
        lines += ["", *_answer(one)]
    lines += ["", *_answer(best), "", *_steps(best), *_plan(best.plan), _rails_line(best)]
    if others:
        lines.append("All steps of every candidate: --html FILE or --json")
    width = min(max(shutil.get_terminal_size((80, 24)).columns, 60), 120)
    return "\n".join(piece for line in lines for piece in _wrapped(line, width)).strip()


def _wrapped(line: str, width: int) -> list[str]:
    """Return a line as lines of a width; what follows is indented as its text is."""
    found = re.match(r"[ \d]\d [A-Z].{15}|\s*", line)
    if len(line) <= width or line.lstrip().startswith("→"):  # a command is pasted: it stays whole
        return [line]
    indent = " " * (len(found[0]) if found else 0)
    return textwrap.wrap(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


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
        "answer": _answer(one)[1:],
        "steps": [
            {
                "title": step.title,
                "decision": step.decision,
                "gap": step.gap,
                "command": step.command,
                "known": [_input(known) for known in step.known if known.value is not None],
            }
            for step in one.steps
        ],
        "sensitivity": sensitivity_rows(plan.sensitivity) if plan else [],
        "hosted": [line.strip() for h in plan.hosted for line in hosted_lines(h, plan)]
        if plan
        else [],
        "limits": [
            {
                "title": limit.title,
                "figures": _figures(limit),
                "lever": limit.lever,
                "refuted_by": limit.refuted_by,
            }
            for limit in one.limits
            if limit.holds
        ],
        "untold": [limit for limit in one.limits if limit.holds is None],
        "rails": _rails(one.guardrails),
        "conditions": [
            (c.name, {True: "yes", False: "no", None: "unknown"}[c.holds], c.evidence)
            for c in one.disaggregation
        ],
        "warnings": [warned.text for warned in plan.warnings] if plan else [],
    }


def _answer(one: Candidate) -> list[str]:
    """Return instances, GPUs, cost and what limits, in this order."""
    lines = [f"{one.run}: predicted, nothing was measured" if one.predicted else one.run]
    lines.append(headline(one.plan) if one.plan else f"no fleet: {one.plan_missing}")
    slos = ", ".join(one.slos) or "no SLO"
    if one.capacity_rps is None:
        lines.append(f"one instance: {one.capacity_reason or 'no capacity was found'}")
    else:
        ends = interval(one.capacity_rps_ci)
        carries = "is predicted to carry" if one.predicted else "carries"
        lines.append(
            f"one instance {carries} {significant(one.capacity_rps)} req/s"
            f"{f' ({ends})' if ends else ''} at {slos}"
        )
    holds = [limit.title for limit in one.limits if limit.holds]
    shown, more = holds[:SHOWN_LIMITS], len(holds) - SHOWN_LIMITS
    further = [f"{more} more in --html"] if more > 0 else []
    lines.append("limit: " + ("; ".join([*shown, *further]) or "none that this run shows"))
    lines.append(one.hardware_text)
    return [*lines, *([one.guardrails.at_knee] if one.guardrails.at_knee else [])]


def _input(known: Input) -> str:
    unit = f" {known.unit}" if known.unit else ""
    value = known.value or 0.0
    text = f"{value:,.0f}" if value == int(value) else significant(value)
    return f"{known.name} {text}{unit} ({known.basis}: {known.source})"


def _figures(limit: Limit) -> str:
    return ", ".join(
        f"{e.figure} {_value(e.value)}" + (f" at {e.stage}" if e.stage else "")
        for e in limit.evidence
    )


def _value(value: float | str | None) -> str:
    if isinstance(value, float):
        return significant(value) if abs(value) >= 1e-6 else "0"
    return DASH if value is None else str(value)


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
    return f"Guardrails of an instance: {'; '.join(_rails(one.guardrails))}"


def _rails(rails: Guardrails) -> list[str]:
    """Return the limits for an instance, one each."""
    found = []
    if rails.operate_rps is not None:
        found.append(f"run at {significant(rails.operate_rps)} req/s ({rails.operate_reason})")
    if rails.queue_depth is not None and rails.breaker is not None:
        low, high = rails.breaker
        found.append(f"queue {rails.queue_depth} deep at most, breaker at {low} to {high}")
    if rails.max_input_tokens is not None:
        low, high = rails.max_input_tokens
        most = rails.max_output_tokens
        output = "" if most is None else f", output {most:,}"
        found.append(f"max input {low:,} to {high:,} tokens{output}")
    if rails.concurrency_limit is not None:
        found.append(
            f"{rails.concurrency_limit} in flight at most, add an instance above "
            f"{rails.scale_in_flight}"
        )
    if rails.prewarm_s is not None:
        found.append(f"start an instance {significant(rails.prewarm_s)} s ahead")
    return [*found, *(f"{name}: {why}" for name, why in rails.missing.items())]


def _matrix(candidates: Sequence[Candidate]) -> list[list[str]]:
    """Return the rows of the matrix with their heads, each figure with its interval."""
    rows = [["candidate", "req/s", "GPUs", "USD a year", "USD/1,000"]]
    for one in candidates:
        plan, rate = one.plan, DASH
        if one.capacity_rps is not None:
            rate = _with(significant(one.capacity_rps), interval(one.capacity_rps_ci))
        gpus = year = each = DASH
        if plan is not None:
            low, high = plan.instances_ci
            tp = plan.tensor_parallel
            ends = low and high and low != high and f"{low * tp} to {high * tp}"
            gpus = _with(str(plan.gpus), ends or None)
            if plan.cost_per_year is not None:
                year = f"{plan.cost_per_year:,.0f}"
            each = significant(plan.fleet_cost_per_thousand_requests)
        rows.append([one.run[-NAME_WIDTH:], rate, gpus, year, each])
    return rows


def _with(text: str, ends: str | None) -> str:
    return f"{text} ({ends})" if ends else text
