"""A gate's result as one HTML file: its screen's parts, and each change against what is allowed."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ampacity.analysis.change.results import Check, GateResult
from ampacity.reports.change.gate import change, gate_screen
from ampacity.reports.charts.marks import WIDE, Axis, Chart, Plot
from ampacity.reports.pages.page import embedded_json, render_page, write_page
from ampacity.reports.render.table import Table

METRICS = ("ttft", "e2e", "itl", "tpot")  # each has a colour of its name
APART = 0.012  # of the axis, between the metrics of a quantile
LATENCY = re.compile(r"(\w+)_p(\d+)")


def write_gate_page(path: Path, result: GateResult, next_command: str | None) -> None:
    """Write one HTML file that needs no network; whole or not at all. Raises OSError."""
    screen = gate_screen(result, next_command)
    facts = [
        (a.label.capitalize(), ", ".join(filter(None, (a.text, a.aside))))
        for a in screen.answers[1:]  # the first is the sentence
    ]
    page = render_page(
        "gate.html.j2",
        charts(result),
        title="Gate – ampacity",
        sentence=result.sentence,
        facts=facts,
        table=screen.table and _without_marks(screen.table).last_second(),
        notes=result.notes,
        untracked=list(result.untracked.items()),
        command=screen.next_command,
        predicted=False,
        embedded=embedded_json(result.as_dict()),
    )
    write_page(path, page)


def _without_marks(table: Table) -> Table:
    """Return the screen's table without its first column, whose colour the verdict takes."""
    rows = [[*row[1:-1], replace(row[-1], state=row[0].state)] for row in table.rows]
    return Table("", table.columns[1:], rows)


def charts(result: GateResult) -> list[Chart]:
    """Return a chart for each load level: the changes of its latencies, by quantile."""
    levels = dict.fromkeys(c.level for c in result.checks)
    drawn = (
        _level_chart(i, level, [c for c in result.checks if c.level == level])
        for i, level in enumerate(levels)
    )
    return [chart for chart in drawn if chart]


def _level_chart(number: int, level: str | None, checks: Sequence[Check]) -> Chart | None:
    known = [(m, c) for c in checks if (m := LATENCY.fullmatch(c.name)) and c.change is not None]
    if not known:
        return None
    changes = [100 * (c.change or 0.0) for _, c in known]
    allowed = [100 * (c.tolerance or 0.0) for _, c in known]
    ends = [100 * end for _, c in known for end in c.change_ci or () if end is not None]
    reach = 3 * max(*map(abs, changes), *allowed, 1.0)  # intervals are cut there: changes show
    low, high = max(min(*ends, *changes, -1.0), -reach), min(max(*ends, *changes, *allowed), reach)
    air = 0.06 * (high - low)
    plot = Plot(Axis("Quantile", 0.0, 1.02), Axis("Change (%)", low - air, high + air))
    plot.line([{"x": 0, "y": 0}, {"x": 1, "y": 0}], "axis", None, 1)
    for k, metric in enumerate(METRICS):
        rows = [(int(m[2]) / 100 + APART * (k - 1.5), c) for m, c in known if m[1] == metric]
        if rows:
            _draw(plot, metric, rows)
    plot.key("allowed", "muted", "triangle-down")
    title = f"Changes of latency at {level}" if level else "Changes of latency"
    alt = f"{title}, by quantile, with 95 % intervals and the change that is allowed."
    return Chart(f"level-{number}", title, alt, plot.spec(WIDE, 260), plot.keys)


def _draw(plot: Plot, metric: str, rows: Sequence[tuple[float, Check]]) -> None:
    """Draw the changes of a metric: intervals, points (hollow: passed), what is allowed."""
    bars: list[dict[str, Any]] = []
    for x, c in rows:
        bottom, top = c.change_ci or (None, None)
        ends = (
            plot.y.low if bottom is None else 100 * bottom,
            plot.y.high if top is None else 100 * top,
        )
        bars += [{"x": x, "y": ends[0], "y2": ends[1]}] if c.change_ci else []
        text = f"{c.title}: {change(c)}, {c.verdict}"
        plot.points(
            [{"x": x, "y": 100 * (c.change or 0.0), "text": text}],
            metric,
            filled=c.verdict != "pass",
        )
        if c.tolerance is not None:
            text = f"{c.title}: allowed {100 * c.tolerance:.3g} %"
            plot.points(
                [{"x": x, "y": 100 * c.tolerance, "text": text}], metric, "triangle-down", False
            )
    plot.bars_between(bars, metric)
    plot.key(metric.upper(), metric, "line-dot")
