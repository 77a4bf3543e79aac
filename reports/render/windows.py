"""The table of the stages' windows, and when they began."""

from collections.abc import Callable, Mapping
from typing import Any

from ampacity.analysis.contract.stage import Stage
from ampacity.analysis.contract.summary import Summary
from ampacity.reports.render.figures import NO_REASON, by_load, count, seconds, share, significant
from ampacity.reports.render.table import Cell, Column, Table
from ampacity.reports.render.tables import rows_of_stages


def windows_table(summary: Summary, meta: Mapping[str, Any]) -> Table:
    """Return the window of each stage, Little's Law in it, and the load generator's lateness."""
    rows = rows_of_stages("Windows and load generator", by_load(summary.stages))
    starts_s = began_s(meta)
    rows.column(Column("window", "s of the run"), lambda _, s: span(s, starts_s.get(s.index, 0.0)))
    rows.figure("warm-up", "requests", lambda s: s.window.warmup_requests, count)
    rows.column(Column("method", text=True), _method)

    def why(stage: Stage) -> str | None:
        return stage.littles_law.reason

    rows.figure("L", "", lambda s: s.littles_law.l, significant, why=why)
    rows.figure("λW", "", lambda s: s.littles_law.lambda_w, significant, why=why)
    rows.column(Column("L ÷ λW"), _consistency)
    rows.figure("slip p50", "whole stage", lambda s: s.slip_s.p50, seconds)
    rows.figure("slip p99", "whole stage", lambda s: s.slip_s.p99, seconds)
    for head, name, text in (
        ("slip max", "slip_max_s", seconds),
        ("loop lag p99", "loop_lag_p99_s", seconds),
        ("CPU", "cpu_fraction", share),
    ):
        value = _of_audit(meta, name)
        rows.figure(head, "whole stage", value, text, why="run.json does not hold it")
    rows.figure(
        "output",
        "tokens/s",
        lambda s: s.output_tokens_per_s,
        significant,
        why=lambda s: s.output_tokens_per_s_reason,
    )
    rows.figure("input", "tokens/s", lambda s: s.input_tokens_per_s, significant)
    return rows.done()


def _of_audit(meta: Mapping[str, Any], name: str) -> Callable[[Stage], Any]:
    audits = {s.get("index"): s.get("audit") or {} for s in meta.get("stages") or []}
    return lambda stage: audits.get(stage.index, {}).get(name)


def began_s(meta: Mapping[str, Any]) -> dict[int, float]:
    """Return when each stage began, in s since the first: the time axis of the timeline."""
    starts = {s.get("index"): s.get("start_ns") for s in meta.get("stages") or []}
    known = {index: ns for index, ns in starts.items() if isinstance(ns, int)}
    first = min(known.values(), default=0)
    return {index: (ns - first) * 1e-9 for index, ns in known.items() if isinstance(index, int)}


def span(stage: Stage, began_s: float) -> Cell:
    ends = (began_s + stage.window.start_s, began_s + stage.window.end_s)
    return Cell(" to ".join(f"{end_s:.1f}" for end_s in ends))


def _method(table: Table, stage: Stage) -> Cell:
    reason = stage.window.reason
    return Cell(stage.window.method, table.footnote(reason) if reason else None)


def _consistency(table: Table, stage: Stage) -> Cell:
    law = stage.littles_law
    cell = table.cell(law.consistency, significant, law.reason or NO_REASON)
    if law.ok is not False or law.consistency is None:
        return cell
    within = f"outside its tolerance of {share(law.tolerance or 0.0)}"
    return Cell(cell.text, table.footnote(within), "bad")
