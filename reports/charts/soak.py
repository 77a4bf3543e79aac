"""TTFT over the windows of a soak."""

from typing import Any

from ampacity.analysis.contract.summary import Summary
from ampacity.analysis.soak.sentence import change_text, changes, clock
from ampacity.reports.charts.marks import WIDE, Chart, Plot, linear_axis, seconds_axis
from ampacity.reports.render.figures import seconds

DRAWN = {"TTFT p50": "itl", "TTFT p95": "e2e", "TTFT p99": "ttft"}  # figure -> colour

HOURS_S = 2 * 3600  # from this length on the axis is in hours


def soak_chart(summary: Summary) -> Chart | None:
    """Draw three percentiles of TTFT, and the changes of any figure; None below two windows."""
    if (soak := summary.soak) is None or soak.windows < 2:
        return None
    unit, unit_s = ("Hours", 3600) if soak.duration_s > HOURS_S else ("Minutes", 60)
    rows: dict[str, list[dict[str, Any]]] = {
        name: [
            {"x": at_s / unit_s, "y": y, "text": f"{name} {seconds(y)} from {clock(at_s)} on"}
            for at_s, y in zip(soak.begin_s, soak.series.get(name, ()), strict=False)
            if y
        ]
        for name in DRAWN
    }
    x = linear_axis(f"{unit} after the start", [soak.duration_s / unit_s])
    plot = Plot(x, seconds_axis("TTFT from schedule", [r["y"] for of in rows.values() for r in of]))
    for name, colour in DRAWN.items():
        plot.curve(rows[name], colour, name)
    for slo in (s for s in summary.slos if s.metric == "ttft" and s.limit_s is not None):
        plot.slo(slo, "bad")
    for change in changes(soak):
        if change.verdict == "step" and change.since_s is not None:
            plot.x_rule(change.since_s / unit_s, "muted", f"{change.name} {change_text(change)}")
    title = "TTFT over the windows"
    return Chart("soak", title, f"{title} of the soak.", plot.spec(WIDE, 290), plot.keys)
