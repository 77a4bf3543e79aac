"""An outage for people: when the endpoint was down, as a figure and as a chart of what was answered over time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ampacity.analysis.load_names import load_name
from ampacity.reports.charts.marks import NARROW, Chart, Plot, linear_axis
from ampacity.reports.render.figures import Finding, count, seconds


def outage_findings(summary: Mapping[str, Any]) -> list[Finding]:
    """One for each stage in which the endpoint was down."""
    found = []
    for stage in _stages(summary):
        outage = stage["outage"]
        lasted = [
            seconds(p["end_s"] - p["start_s"])
            if p["end_s"] is not None
            else f"all from {seconds(p['start_s'])} on"
            for p in outage["periods"]
        ]
        value = f"{' and '.join(lasted)}, {count(outage['failed'])} of {count(outage['requests'])} requests failed"
        note = f"at {load_name(stage)} the endpoint was {outage['text']}; times after the start of the stage"
        found.append(Finding("Outage", value, None, note, "bad"))
    return found


def _stages(summary: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [
        s for s in summary.get("stages") or [] if s.get("outage") and not s.get("client_limited")
    ]


def outage_chart(summary: Mapping[str, Any]) -> Chart | None:
    """Answers and failures per second over the stage that lost most requests to an outage; None without one."""
    stage = max(_stages(summary), key=lambda s: s["outage"]["failed"], default=None)
    if stage is None:
        return None
    outage = stage["outage"]
    ends = [0.0, *outage["series"]["end_s"]]
    rows = {
        name: [
            {"x": (a + b) / 2, "y": y}
            for a, b, y in zip(ends, ends[1:], outage["series"][name], strict=False)
        ]
        for name in ("answered_rps", "failed_rps")
    }
    heights = [row["y"] for of in rows.values() for row in of]
    plot = Plot(
        linear_axis("Seconds after the start", ends), linear_axis("Requests/s that ended", heights)
    )
    for period in outage["periods"]:
        plot.x_band([period["start_s"], period["end_s"]], "bad", "down")
    plot.key("down", "bad", "band")
    for name, colour, text in (
        ("answered_rps", "ttft", "answered"),
        ("failed_rps", "bad", "failed"),
    ):
        plot.line(rows[name], colour)
        plot.key(text, colour, "line")
    title = f"The endpoint was {outage['text']}"
    alt = f"Answers and failures per second over the stage at {load_name(stage)}. {title}."
    return Chart("outage", title, alt, plot.spec(NARROW, 290), plot.keys)
