"""Tables of the report as plain rows of text, for the terminal and for the page alike.

A null figure is a dash that carries the number of a footnote with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reports.figures import (
    DASH,
    by_load,
    count,
    cut_off,
    exact,
    failures,
    interval,
    load_of,
    reason_of,
    seconds,
    share,
    significant,
)

METRICS: dict[str, str] = {
    "ttft_from_schedule_s": "TTFT from schedule",
    "ttft_s": "TTFT",
    "first_answer_s": "Time to first answer token",
    "itl_s": "ITL",
    "icl_s": "ICL",
    "tpot_s": "TPOT",
    "e2e_from_schedule_s": "E2E from schedule",
    "e2e_s": "E2E",
}
GAP_METRICS = {"itl_s", "icl_s"}
LENGTH_COLUMNS = ("n", "mean", "p1", "p5", "p10", "p25", "p50", "p75", "p90", "p95", "p99", "max")


@dataclass(frozen=True)
class Cell:
    text: str
    note: int | None = None  # number of a footnote
    state: str = ""  # good | bad | unsure, or empty


@dataclass(frozen=True)
class Column:
    head: str
    unit: str = ""
    priority: int = 0  # the terminal drops the highest numbers first
    text: bool = False  # words (aligned left), not figures


@dataclass
class Table:
    """``rows`` hold one cell for each of ``columns``; ``notes`` are footnotes, numbered from 1."""

    title: str
    columns: list[Column]
    rows: list[list[Cell]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def footnote(self, reason: str) -> int:
        """The number of the footnote that says ``reason``; the same reason is written once."""
        if reason not in self.notes:
            self.notes.append(reason)
        return self.notes.index(reason) + 1

    def cell(self, holder: Mapping[str, Any] | None, name: str, text: Callable[[Any], str]) -> Cell:
        """The figure ``name`` of ``holder`` as ``text`` writes it, or a dash with its reason."""
        value = (holder or {}).get(name)
        if value is None:
            return Cell(DASH, self.footnote(reason_of(holder, name)))
        return Cell(text(value))


def stages_table(summary: Mapping[str, Any]) -> Table:
    """One row a stage: load, what came of it, and the verdict."""
    errors = [stage.get("errors") for stage in by_load(summary)]
    cuts = [cut_off(e) for e in errors]
    urgent = any(failures(e) for e in errors)
    most = any(stage.get("concurrency_max") is not None for stage in by_load(summary))
    table = Table(
        "Stages",
        [
            Column("load", text=True),
            Column("achieved", "req/s", 1),
            Column("in flight", "mean", 5),
            *([Column("at most", "in flight", 8)] if most else []),
            Column("TTFT p50", "schedule", 6),
            Column("TTFT p99", "schedule", 0),
            Column("ITL p99", "per gap", 3),
            Column("E2E p99", "schedule", 7),
            Column("goodput", "req/s", 2),
            Column("errors", "requests", 1 if urgent else 4),
            *([Column("cut off", "unfinished", 1)] if any(cuts) else []),
            Column("stable", text=True, priority=2),
            Column("SLO", text=True),
        ],
    )
    for stage, cut in zip(by_load(summary), cuts, strict=True):
        table.rows.append(
            [
                Cell(load_of(stage)),
                table.cell(stage, "achieved_rps", significant),
                table.cell(stage, "concurrency", significant),
                *([table.cell(stage, "concurrency_max", count)] if most else []),
                table.cell(stage.get("ttft_from_schedule_s"), "p50", seconds),
                table.cell(stage.get("ttft_from_schedule_s"), "p99", seconds),
                table.cell(stage.get("itl_s"), "p99", seconds),
                table.cell(stage.get("e2e_from_schedule_s"), "p99", seconds),
                table.cell(stage, "goodput_rps", significant),
                _errors(stage),
                *([Cell(count(cut), state="unsure" if cut else "")] if any(cuts) else []),
                _stable(table, stage),
                _slo(table, stage, bool(summary.get("slos"))),
            ]
        )
    return table


def _errors(stage: Mapping[str, Any]) -> Cell:
    failed = failures(stage.get("errors"))
    return Cell(f"{count(failed)} of {count(stage.get('requests') or 0)}", state="bad" if failed else "")


def _stable(table: Table, stage: Mapping[str, Any]) -> Cell:
    stable = stage.get("stable")
    if stable is None:
        return Cell(DASH, table.footnote(reason_of(stage, "stable")))
    if stable:
        return Cell("yes")
    reason = stage.get("stable_reason")
    return Cell("no", table.footnote(str(reason)) if reason else None, "bad")


def _slo(table: Table, stage: Mapping[str, Any], judged: bool) -> Cell:
    if stage.get("client_limited"):
        reason = f"the load generator was the limit: {reason_of(stage, 'client_limited')}"
        return Cell("no finding", table.footnote(reason), "unsure")
    if not judged:
        return Cell(DASH, table.footnote(str(stage.get("slo_met_reason") or "no SLO was given (--slo)")))
    if stage.get("slo_met") is None:
        return Cell("undecided", state="unsure")
    return Cell("met", state="good") if stage["slo_met"] else Cell("broken", state="bad")


def percentile_table(summary: Mapping[str, Any], metric: str) -> Table:
    """Every percentile of one metric of METRICS, one row a stage."""
    what = "gaps" if metric in GAP_METRICS else "requests"
    heads = [Column("load", text=True), *(Column(p) for p in ("p50", "p90", "p95", "p99"))]
    heads += [Column("p99 interval"), Column("mean"), Column("n", what), Column("infinite", what)]
    table = Table(METRICS[metric], heads)
    for stage in by_load(summary):
        held = stage.get(metric) or {"reason": "not in this summary"}
        row = [Cell(load_of(stage)), *(table.cell(held, p, seconds) for p in ("p50", "p90", "p95", "p99"))]
        row.append(_interval_cell(table, held))
        row.append(table.cell(held, "mean", seconds))
        row += [Cell(count(held.get("n") or 0)), Cell(count(held.get("infinite") or 0))]
        table.rows.append(row)
    return table


def _interval_cell(table: Table, held: Mapping[str, Any]) -> Cell:
    """The interval of p99; a footnote says why it, or an end of it, is not known."""
    ends = held.get("p99_ci")
    bounds = interval(ends, seconds)
    if bounds is None:
        reason = held.get("p99_ci_reason") or reason_of(held, "p99")
        return Cell(DASH, table.footnote(str(reason)))
    reason = held.get("p99_ci_reason") if None in (ends or []) else None
    return Cell(bounds, table.footnote(str(reason)) if reason else None)


def slo_table(summary: Mapping[str, Any]) -> Table:
    """One row for each stage and SLO."""
    heads = [Column("load", text=True), Column("SLO", text=True), Column("verdict", text=True)]
    heads += [Column("value"), Column("attainment", "of requests"), Column("effective", "requests")]
    table = Table("SLO verdicts", [*heads, Column("to decide", "more requests")])
    for stage in by_load(summary):
        for verdict in stage.get("slo_verdicts") or []:
            said = str(verdict.get("verdict"))
            reason = verdict.get("reason")
            state = {"met": "good", "broken": "bad"}.get(said, "unsure")
            more = verdict.get("more_requests")
            table.rows.append(
                [
                    Cell(load_of(stage)),
                    Cell(str(verdict.get("slo"))),
                    Cell(said, table.footnote(str(reason)) if reason else None, state),
                    table.cell(verdict, "value_s", seconds),
                    table.cell(verdict, "attainment", share),
                    table.cell(verdict, "requests_effective", count),
                    Cell("" if more is None else count(more)),
                ]
            )
    return table


def server_table(summary: Mapping[str, Any]) -> Table | None:
    """What the server's own metrics say, one row a stage; None where no stage has any."""
    figures: dict[str, tuple[Column, Callable[[Any], str]]] = {
        "running": (Column("running", "mean"), significant),
        "waiting": (Column("waiting", "mean"), significant),
        "kv_cache_usage_max": (Column("KV cache", "most"), share),
        "preemptions": (Column("preemptions"), count),
        "prefix_hit_rate": (Column("prefix hits", "of tokens"), share),
        "spec_acceptance_rate": (Column("drafts accepted", "of tokens"), share),
        "gpu_utilization": (Column("GPU", "mean"), share),
        "gpu_memory_used_bytes": (Column("GPU memory", "GiB, all"), lambda b: significant(b / 2**30)),
    }
    stages = [(s, s["server"]) for s in by_load(summary) if s.get("server")]
    known = [name for name in figures if any(held.get(name) is not None for _, held in stages)]
    if not known:
        return None
    table = Table("The server's own metrics", [Column("load", text=True), *(figures[n][0] for n in known)])
    for stage, held in stages:
        cells = [table.cell({"reason": "not on its page"} | held, n, figures[n][1]) for n in known]
        table.rows.append([Cell(load_of(stage)), *cells])
    return table


def lengths_table(summary: Mapping[str, Any]) -> Table:
    """Planned and realised token counts: one row a side."""
    table = Table("Lengths in tokens", [Column("", text=True), *(Column(name) for name in LENGTH_COLUMNS)])
    for label, held in length_sides(summary):
        cells = [table.cell(held, name, _tokens) for name in LENGTH_COLUMNS]
        table.rows.append([Cell(label), *cells])
    return table


def _tokens(value: float) -> str:
    return count(value) if float(value).is_integer() else significant(value, 4)


def length_sides(summary: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The four LENGTHS of a summary with their names, those that are there."""
    realised = (summary.get("workload") or {}).get("realised") or {}
    sides = [
        ("input, planned", "input_tokens", "planned"),
        ("input, counted by the server", "input_tokens", "sent"),
        ("output, planned", "output_tokens", "planned"),
        ("output, received", "output_tokens", "received"),
    ]
    found = [(label, (realised.get(group) or {}).get(side)) for label, group, side in sides]
    return [(label, held) for label, held in found if held]


def windows_table(summary: Mapping[str, Any], meta: Mapping[str, Any]) -> Table:
    """What part of each stage counts, Little's Law in it, and how well the load generator kept up."""
    heads = [Column("load", text=True), Column("window", "from start"), Column("warm-up", "requests")]
    heads += [Column("method", text=True), Column("L"), Column("λW"), Column("L ÷ λW")]
    heads += [
        Column("slip p50"),
        Column("slip p99"),
        Column("slip max"),
        Column("loop lag p99"),
        Column("CPU"),
    ]
    table = Table(
        "Windows and load generator", [*heads, Column("output", "tokens/s"), Column("input", "tokens/s")]
    )
    audits = {s.get("index"): s.get("audit") or {} for s in meta.get("stages") or []}
    for stage in by_load(summary):
        window, law = stage.get("window") or {}, stage.get("littles_law") or {}
        audit = {"reason": "run.json does not hold it", **audits.get(stage.get("index"), {})}
        table.rows.append(
            [
                Cell(load_of(stage)),
                _span(table, window),
                table.cell(window, "warmup_requests", count),
                _method(table, window),
                table.cell(law, "l", significant),
                table.cell(law, "lambda_w", significant),
                _consistency(table, law),
                table.cell(stage.get("slip_s"), "p50", seconds),
                table.cell(stage.get("slip_s"), "p99", seconds),
                table.cell(audit, "slip_max_s", seconds),
                table.cell(audit, "loop_lag_p99_s", seconds),
                table.cell(audit, "cpu_fraction", share),
                table.cell(stage, "output_tokens_per_s", significant),
                table.cell(stage, "input_tokens_per_s", significant),
            ]
        )
    return table


def _span(table: Table, window: Mapping[str, Any]) -> Cell:
    start, end = window.get("start_s"), window.get("end_s")
    if start is None or end is None:
        return Cell(DASH, table.footnote(reason_of(window, "start_s")))
    return Cell(f"{exact(start)} to {exact(end)} s")


def _method(table: Table, window: Mapping[str, Any]) -> Cell:
    reason = window.get("reason")
    return Cell(str(window.get("method") or DASH), table.footnote(str(reason)) if reason else None)


def _consistency(table: Table, law: Mapping[str, Any]) -> Cell:
    cell = table.cell(law, "consistency", significant)
    if law.get("ok") is not False or law.get("consistency") is None:
        return cell
    tolerance = law.get("tolerance")
    within = f"outside its tolerance of {share(tolerance)}" if tolerance is not None else "out of tolerance"
    return Cell(cell.text, table.footnote(within), "bad")


def all_percentiles(summary: Mapping[str, Any]) -> list[Table]:
    """The percentile table of every metric that any stage of the summary holds."""
    stages: Sequence[Mapping[str, Any]] = by_load(summary)
    return [percentile_table(summary, m) for m in METRICS if any(stage.get(m) for stage in stages)]


def imported_tables(imported: Mapping[str, Any] | None) -> list[Table]:
    """How the tool that measured an imported run defines things, and what its files do not hold."""
    if not imported:
        return []
    tool = str(imported.get("tool"))
    differs = Table(
        f"Where {tool} differs",
        [Column("figure", text=True), Column(tool, text=True), Column("ampacity", text=True)],
        [
            [Cell(str(d.get(k))) for k in ("what", "theirs", "ours")]
            for d in imported.get("definitions") or []
        ],
    )
    missing = Table(
        "Not in its files",
        [Column("column", text=True), Column("why it is null, or how it was made", text=True)],
        [[Cell(str(name)), Cell(str(why))] for name, why in (imported.get("missing") or {}).items()],
    )
    return [differs, missing]
