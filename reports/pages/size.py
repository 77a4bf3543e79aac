"""A decision in thirteen steps: as text for a terminal, and as one HTML page."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Sequence
from typing import Any, Protocol

from ampacity.analysis.contract.summary import Summary
from ampacity.analysis.decision.curve import Limit
from ampacity.analysis.decision.disaggregation import Condition
from ampacity.analysis.decision.guardrails import Guardrails
from ampacity.analysis.decision.inputs import Input
from ampacity.analysis.decision.known import Fleet
from ampacity.analysis.decision.money import FleetCost
from ampacity.analysis.decision.steps import Step
from ampacity.reports.pages.page import render_page
from ampacity.reports.render.figures import DASH, interval, significant

SHOWN_LIMITS = 3
NAME_WIDTH = 28  # of a run's path in the matrix: its end


class Decided(Protocol):
    """A decision as the page shows it (ampacity.experiments.decide)."""

    @property
    def name(self) -> str: ...
    @property
    def summary(self) -> Summary: ...
    @property
    def steps(self) -> list[Step]: ...
    @property
    def limits(self) -> list[Limit]: ...
    @property
    def rails(self) -> Guardrails: ...
    @property
    def cost(self) -> FleetCost | None: ...
    @property
    def fleet(self) -> Fleet | None: ...
    @property
    def hardware(self) -> str: ...
    @property
    def disaggregation(self) -> list[Condition]: ...


def size_text(decisions: Sequence[Decided], note: str | None = None) -> str:
    """Return the decisions for a terminal: ranked first where there are several."""
    lines: list[str] = []
    if len(decisions) > 1:
        lines += [*_matrix(decisions), *([note] if note else []), ""]
    for one in decisions:
        predicted = ": predicted, nothing was measured" if one.summary.predicted else ""
        lines += [f"{one.name}{predicted}", *_steps(one), *_limits(one), *_rails(one.rails), ""]
    width = min(max(shutil.get_terminal_size((80, 24)).columns, 60), 120)
    return "\n".join(piece for line in lines for piece in _wrapped(line, width)).rstrip()


def _wrapped(line: str, width: int) -> list[str]:
    """Return a line as lines of a width; what follows is indented as its text is."""
    found = re.match(r"[ \d]\d .{16}|\s*(try: )?", line)
    indent = " " * (len(found[0]) if found else 0)
    if line.lstrip().startswith("→"):  # a command is pasted: it stays whole
        return [line]
    return textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False) or [""]


def size_page(decisions: Sequence[Decided], note: str | None = None) -> str:
    """Return the decisions as one HTML page that needs no network."""
    return render_page(
        "size.html.j2",
        [],
        title="ampacity size",
        decisions=[_shown(one) for one in decisions],
        matrix=_rows(decisions) if len(decisions) > 1 else [],
        notes=[_told_apart(decisions), *([note] if note else [])] if len(decisions) > 1 else [],
    )


def _shown(one: Decided) -> dict[str, Any]:
    """Return a decision as the template shows it: all figures are text."""
    return {
        "name": one.name,
        "hardware": one.hardware,
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
        "rails": [line.strip() for line in _rails(one.rails)[1:]],
        "conditions": [
            (c.name, {True: "yes", False: "no", None: "unknown"}[c.holds], c.evidence)
            for c in one.disaggregation
        ],
    }


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


def _steps(one: Decided) -> list[str]:
    lines = []
    for number, step in enumerate(one.steps, 1):
        head = f"{number:2} {step.title:15} "
        lines.append(head + (step.decision or f"not known: {step.gap}"))
        gap = step.gap if step.decision else None
        if step.command:
            lines.append(f"{'':19}→ {step.command}" + (f"  # {gap}" if gap else ""))
        elif gap:
            lines.append(f"{'':19}{gap}")
    return lines


def _limits(one: Decided) -> list[str]:
    holds = [limit for limit in one.limits if limit.holds]
    lines = ["What limits it" + (": nothing that this run shows" if not holds else "")]
    for limit in holds[:SHOWN_LIMITS]:
        lines += [f"  {limit.title} ({_figures(limit)})", f"    try: {limit.lever}"]
    more = len(holds) - SHOWN_LIMITS
    lines += [f"  {more} more in --html"] if more > 0 else []
    return [*lines, f"  {one.hardware}"]


def _rails(rails: Guardrails) -> list[str]:
    lines = ["Guardrails of an instance"]
    if rails.operate_rps is not None:
        lines.append(f"  run at {significant(rails.operate_rps)} req/s: {rails.operate_reason}")
    if rails.at_knee:
        lines.append(f"  {rails.at_knee}")
    if rails.queue_depth is not None and rails.breaker is not None:
        lines.append(
            f"  queue {rails.queue_depth} deep at most, breaker opens at {rails.breaker[0]} to "
            f"{rails.breaker[1]}"
        )
    if rails.max_input_tokens is not None:
        low, high = rails.max_input_tokens
        most = rails.max_output_tokens
        output = "" if most is None else f", max output {most:,}"
        lines.append(f"  max input {low:,} to {high:,} tokens{output}")
    if rails.concurrency_limit is not None:
        lines.append(
            f"  {rails.concurrency_limit} in flight at most; add an instance above "
            f"{rails.scale_in_flight} in flight"
        )
    return [*lines, *(f"  {name}: {why}" for name, why in rails.missing.items())]


def _rows(decisions: Sequence[Decided]) -> list[list[str]]:
    """Return the rows of the matrix, cheapest request first; those without a cost by GPUs."""
    ranked = sorted(decisions, key=_rank)
    rows = []
    for one in ranked:
        capacity = one.summary.capacity
        ends = interval(capacity.capacity_rps_ci) or DASH
        rows.append(
            [
                one.name[-NAME_WIDTH:],
                DASH if capacity.capacity_rps is None else significant(capacity.capacity_rps),
                ends,
                DASH if one.fleet is None else str(one.fleet.gpus),
                DASH if one.cost is None else significant(1e3 * one.cost.usd_per_request),
            ]
        )
    return rows


def _rank(one: Decided) -> tuple[float, float]:
    cost = float("inf") if one.cost is None else one.cost.usd_per_request
    return cost, float("inf") if one.fleet is None else one.fleet.gpus


def _told_apart(decisions: Sequence[Decided]) -> str:
    """Return whether the first two differ by more than their intervals."""
    first, second = sorted(decisions, key=_rank)[:2]
    ends = [one.summary.capacity.capacity_rps_ci or (None, None) for one in (first, second)]
    costs = [_cost_range(one, *e) for one, e in zip((first, second), ends, strict=True)]
    if None in costs or costs[0] is None or costs[1] is None:
        return "not ranked by cost: a price, a peak or an interval is missing"
    if costs[0][1] < costs[1][0]:
        return f"{first.name} is cheaper per request than {second.name}: the intervals do not meet"
    return f"{first.name} and {second.name} are not to be told apart: their intervals meet"


def _cost_range(one: Decided, low: float | None, high: float | None) -> tuple[float, float] | None:
    """Return the cost per request at the ends of the capacity's interval."""
    rate = one.summary.capacity.capacity_rps
    if one.cost is None or not low or not high or not rate:
        return None
    return one.cost.usd_per_request * rate / high, one.cost.usd_per_request * rate / low


def _matrix(decisions: Sequence[Decided]) -> list[str]:
    heads = ["candidate", "req/s", "95 % interval", "GPUs", "USD/1,000"]
    rows = [heads, *_rows(decisions)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    return [*lines, _told_apart(decisions)]
