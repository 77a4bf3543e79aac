"""Tell what happened in a run, in the order of time."""

from collections.abc import Mapping
from typing import Any

from ampacity.analysis.contract.stage import Stage
from ampacity.analysis.contract.summary import Summary
from ampacity.analysis.stage.throughput import steady_state
from ampacity.reports.render.figures import count, cut_off, failures, significant
from ampacity.reports.render.table import Cell, Column, Table
from ampacity.reports.render.tables import rows_of_stages
from ampacity.reports.render.windows import began_s, span


def events_table(summary: Summary, meta: Mapping[str, Any]) -> Table:
    """Return one row a stage, as they followed each other: when, its load, what happened."""
    rows = rows_of_stages("In the order of time", sorted(summary.stages, key=lambda s: s.index))
    starts_s = began_s(meta)
    rows.column(
        Column("judged from", "s of the run"), lambda _, s: span(s, starts_s.get(s.index, 0.0))
    )
    rows.column(
        Column("what happened", text=True),
        lambda _, s: Cell("; ".join(_events(s)), state="bad" if _troubled(s) else ""),
    )
    return rows.done()


def _troubled(stage: Stage) -> bool:
    return stage.stable is False or stage.outage is not None or failures(stage.errors) > 0


def _events(stage: Stage) -> list[str]:
    most = count(stage.concurrency_max)
    level = f"{significant(stage.concurrency)} in flight on average, {most} at most"
    steady = {
        "yes": level,
        "not shown": f"{level}: they found no level",
        "no": f"requests in flight kept growing, to {most}",
        "unknown": f"{significant(stage.concurrency)} in flight on average, too short to see a trend",
    }
    found = [stage.outage.text] if stage.outage else []
    found.append(steady[steady_state(stage)[0]])
    if stage.server and (waiting := stage.server.waiting) and waiting >= 1:
        found.append(f"{significant(waiting)} waiting at the server on average")
    if failed := failures(stage.errors):
        found.append(f"{count(failed)} failed")
    if cut := cut_off(stage.errors):
        found.append(f"{count(cut)} not answered when the stage had ended, cut off")
    if stage.client_limited:
        found.append("the load generator was the limit")
    if stage.ended_early:
        found.append(f"ended early: {stage.ended_early}")
    return found
