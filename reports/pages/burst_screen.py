"""The screen of a burst: recovery, peak and harm, and TTFT and load over its phases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ampacity.analysis.contract.burst import Burst
from ampacity.analysis.contract.summary import Summary
from ampacity.reports.charts.burst import burst_findings, phases_table
from ampacity.reports.render.figures import DASH, Finding, count, exact, rate, seconds, significant
from ampacity.reports.render.table import Table
from ampacity.reports.render.terminal import LABEL, Entry, spark

if TYPE_CHECKING:
    from rich.console import Console

WIDEST = 60


def burst_answers(summary: Summary) -> list[Entry]:
    """Return when the burst was over, how high TTFT rose, who was harmed, and the headroom."""
    assert summary.burst is not None
    burst, base = summary.burst, summary.burst.base_level
    held = burst.headroom
    needed = f"{rate(held.needed_rps)} would have carried the burst"
    level = f" (base median {seconds(base.ttft_s)})" if base.ttft_s else ""
    in_flight = f"{count(burst.peak_in_flight)} in flight at once"
    if burst.backlog.piled_up is not None:
        high = burst.phases[1]
        in_flight += f" ({rate(high.achieved_rps)} answered of {significant(high.offered_rps)})"
    peak, harmed, headroom = [
        f for f in burst_findings(burst) if f.label.split()[0] in ("Peak", "Requests", "Headroom")
    ]
    made = [_recovered(burst), peak, harmed, headroom]
    asides = {
        "RECOVERED": "",
        "PEAK TTFT": f"of the burst or before recovery{level}; {in_flight}",
        "HARMED": harmed.note,
        "HEADROOM": needed if held.factor else str(held.reason),
    }
    return [
        Entry(label, f.value, f.note if label == "RECOVERED" else aside, f.state)
        for (label, aside), f in zip(asides.items(), made, strict=True)
    ]


def _recovered(burst: Burst) -> Finding:
    """Return when the burst was over, and whether that is within its limit."""
    found = next(f for f in burst_findings(burst) if f.label == "Recovered after")
    limit, notes = burst.max_recovery, []
    if limit:
        notes.append(f"limit {significant(limit.limit_s)} s: {limit.verdict}")
    if burst.recovery_s is None:
        notes.append(str(burst.recovery_reason))
        return Finding("", found.value, None, "; ".join(notes), found.state)
    return Finding(
        "", f"{found.value} after the burst", None, "; ".join(notes), found.state or "good"
    )


def burst_table(burst: Burst) -> Table:
    """Return the phases, without what is zero in all of them."""
    table = phases_table(burst)
    blank = [
        i
        for i, column in enumerate(table.columns)
        if column.head == "errors" and all(row[i].text == "0" for row in table.rows)
    ]
    keep = [i for i in range(len(table.columns)) if i not in blank]
    columns = [table.columns[i] for i in keep]
    return Table("", columns, [[row[i] for i in keep] for row in table.rows])


def burst_drawn(burst: Burst, console: Console) -> list[Entry]:
    """Return TTFT and in-flight as sparklines over the phases, which a third line names."""
    width = min(console.width - LABEL - 30, WIDEST)
    series, end_s = burst.series, max(burst.series.end_s, default=0.0)
    if not end_s or len(series.end_s) < 2:
        return []
    drawn = []
    for label, values, text, of_bins in (
        ("TTFT p50", series.ttft_s, seconds, ""),
        ("IN FLIGHT", series.in_flight, significant, "bin means "),
    ):
        known = [v for v in values if v is not None]
        between = f"{of_bins}{text(min(known))} to {text(max(known))}" if known else DASH
        drawn.append(Entry(label, spark(values, width), between))
    phases = _phases(burst, end_s, min(width, len(series.end_s)))
    return [*drawn, Entry("", phases, f"bins of {exact(burst.resolution_s)} s")]


def _phases(burst: Burst, end_s: float, width: int) -> str:
    """Return the names of the phases where they begin on the sparklines."""
    line = [" "] * (width + 20)
    for phase in burst.phases:
        at, text = round(width * phase.start_s / end_s), f"│{phase.name}"
        line[at : at + len(text)] = text
    return "".join(line).rstrip()
