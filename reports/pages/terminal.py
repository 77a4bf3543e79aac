"""Every finding of a run on a terminal: verdict, tables, key figures, warnings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ampacity.analysis.contract.summary import Summary
from ampacity.reports.charts.burst import phases_table
from ampacity.reports.charts.families import curve_tables
from ampacity.reports.pages.findings import error_bound, findings
from ampacity.reports.pages.soak import soak_table
from ampacity.reports.render import figures
from ampacity.reports.render.sessions import session_findings
from ampacity.reports.render.tables import accepted_table, stages_table
from ampacity.reports.render.terminal import print_entry, print_table, say

if TYPE_CHECKING:
    from rich.console import Console

AT_LEAST = "≥ is a lower bound: what was seen, in a stage too short to know how high it may be."


def render_table(summary: Summary, console: Console, path: object = None) -> None:
    """Print every table, finding and warning of ``summary``, as wide as the console is."""
    say(console, summary.verdict or "no verdict", "bold")
    if summary.partial:
        say(console, f"Partial: {summary.partial}", "yellow")
    if summary.predicted:
        text = "Predicted: every figure comes from a simulation, none was measured."
        say(console, text, "yellow")
    table = phases_table(summary.burst) if summary.burst else stages_table(summary)
    if summary.soak:
        console.print()
        print_table(console, soak_table(summary.soak))
    if table.rows:
        console.print()
        print_table(console, table)
        if any("≥" in cell.text for row in table.rows for cell in row):
            say(console, AT_LEAST, "dim")
        if bound := error_bound(summary):
            say(console, bound, "dim")
    for further in (*curve_tables(summary), accepted_table(summary)):
        if further:
            console.print()
            print_table(console, further)
    console.print()
    for finding in [*findings(summary), *session_findings(summary)]:
        value = f"{finding.value} ({finding.interval})" if finding.interval else finding.value
        print_entry(console, finding.label, value, finding.note, finding.state)
    errors, failed = summary.errors, figures.failures(summary.errors)
    text = f"{figures.count(failed)} of {figures.count(summary.requests)} requests of the whole run"
    text = "; ".join([text, *figures.ended_otherwise(errors)])
    state = "bad" if failed else "unsure" if figures.cut_off(errors) else ""
    print_entry(console, "Errors", text, figures.failures_by_cause(summary), state)
    for warning in summary.warnings:
        console.print()
        say(console, f"Warning [{warning.code}] {warning.text}", "yellow")
    if path:
        say(console, f"report: {path}")
