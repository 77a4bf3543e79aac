"""A search drawn on a line: the loads that were tried, and the interval that they leave."""

import math
from collections.abc import Sequence

from ampacity.analysis.contract.summary import Summary
from ampacity.reports.render.figures import significant
from ampacity.reports.render.terminal import LABEL, Entry

MARKS = {None: "?", True: "✓", False: "✗"}
SPAN = 2.0  # the line reaches from the capacity divided by this to as many times the capacity
WIDEST = 100


def bracket(summary: Summary, width: int) -> list[Entry]:
    """Return a line of rates on a log scale: each stage's verdict, interval and estimate."""
    held = summary.capacity
    tried = [
        (s.offered_rps, s.slo_met if s.slo_met is not None else s.slo_met_by_all)
        for s in summary.stages
        if s.offered_rps
    ]
    if len({rps for rps, _ in tried}) < 2:
        return []
    low, high = held.estimate_rps_ci or (None, None)
    middle = held.estimate_rps or held.capacity_rps or tried[-1][0]
    near = [(r, met) for r, met in tried if middle / SPAN <= r <= middle * SPAN]
    ends = [r for r, _ in near] + [x for x in (low, middle, high) if x]
    first, last = math.log(min(ends)), math.log(max(ends))
    columns = max(min(width, WIDEST) - LABEL, 20)

    def at(rps: float) -> int:
        return round((columns - 1) * (math.log(rps) - first) / max(last - first, 1e-9))

    line = ["─"] * columns
    if low and high:
        line[at(low) : at(high) + 1] = "═" * (at(high) - at(low) + 1)
    for rps, met in sorted(near, key=lambda one: one[1] is not None):  # verdicts over "?"
        line[at(rps)] = MARKS[met]
    if held.estimate_rps:
        line[at(held.estimate_rps)] = "◆"
    named = [x for x in (middle, math.exp(first), math.exp(last), low, high) if x]
    words = "✓ met  ✗ violated  ? inconclusive  ═ 95 %  ◆ estimate, req/s"
    return [
        Entry("BRACKET", "".join(line)),
        Entry("", _numbers(named, [at(x) for x in named], columns)),
        Entry("", "", words),
    ]


def _numbers(values: Sequence[float], columns: Sequence[int], width: int) -> str:
    """Return the numbers under their columns; the first ones first, none over another."""
    line = [" "] * width
    for value, column in zip(values, columns, strict=True):
        text = significant(value)
        begin = min(max(column - len(text) // 2, 0), width - len(text))
        if not "".join(line[max(begin - 1, 0) : begin + len(text) + 1]).strip():
            line[begin : begin + len(text)] = text
    return "".join(line).rstrip()
