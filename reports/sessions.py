"""Sessions and prefix sharing as tables and key figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reports.figures import (
    DASH,
    Finding,
    by_load,
    count,
    load_of,
    loads_of,
    reason_of,
    seconds,
    share,
    significant,
)
from reports.tables import Cell, Column, Table


def session_findings(summary: Mapping[str, Any]) -> list[Finding]:
    """How many sessions fit, and what the prefix cache found; empty where neither was part of the workload."""
    found = []
    if sessions := summary.get("sessions"):
        fit = sessions.get("fit") or {}
        if fit.get("concurrent_sessions") is None:
            found.append(Finding("Sessions", DASH, None, reason_of(fit, "concurrent_sessions")))
        else:
            note = f"at once, pauses included, at {loads_of(summary, [fit['stage']])}; {significant(fit['sessions_per_s'])} began per second"
            found.append(Finding("Sessions", significant(fit["concurrent_sessions"]), None, note))
    for row in (summary.get("sharing") or [])[-1:]:
        value = share(row["realised"]) if row.get("realised") is not None else DASH
        note = f"of the input tokens at {loads_of(summary, [row['stage']])}; {share(row['planned'])} by the schedule with an infinite cache"
        if row.get("realised") is None:
            note += f"; {reason_of(row, 'realised')}"
        found.append(Finding("Cached", value, None, note))
    return found


def session_tables(summary: Mapping[str, Any]) -> list[Table]:
    """Sessions by stage, and the turns of the highest load; empty where there are none."""
    sessions = summary.get("sessions")
    if not sessions:
        return []
    held = {s["index"]: s for s in sessions["stages"]}
    stages = [(stage, held[stage["index"]]) for stage in by_load(summary) if stage["index"] in held]
    table = Table(
        "Sessions",
        [
            Column("load", text=True), Column("sessions"), Column("complete"), Column("failed"), Column("cut"),
            Column("at once", "mean"), Column("time p50"), Column("time p95"), Column("busy p50"), Column("goodput", "per s"),
            Column("input", "tokens p50"), Column("output", "tokens p50"),
        ],
    )  # fmt: skip
    for stage, own in stages:
        table.rows.append([
            Cell(load_of(stage)), *(Cell(count(own[name])) for name in ("sessions", "complete", "failed", "cut")),
            table.cell(own["concurrent"], "mean", significant), table.cell(own["session_s"], "p50", seconds),
            table.cell(own["session_s"], "p95", seconds), table.cell(own["busy_s"], "p50", seconds),
            table.cell(own, "goodput_per_s", significant), _median(table, own["input_tokens"], count),
            _median(table, own["output_tokens"], count),
        ])  # fmt: skip
    return [table, *(_turns(stage, own) for stage, own in stages[-1:])]


def _turns(stage: Mapping[str, Any], own: Mapping[str, Any]) -> Table:
    table = Table(
        f"Turns at {load_of(stage)}",
        [
            Column("turns", text=True), Column("requests"), Column("ok"), Column("input", "tokens p50"), Column("cached", "of input"),
            Column("TTFT p50", "schedule"), Column("TTFT p95", "schedule"), Column("E2E p50", "schedule"),
        ],
    )  # fmt: skip
    for turn in own["per_turn"]:
        low, high = turn["turns"]
        ttft, e2e = turn["ttft_from_schedule_s"], turn["e2e_from_schedule_s"]
        table.rows.append([
            Cell(str(low) if low == high else f"{low}–{high}"), Cell(count(turn["requests"])), Cell(count(turn["ok"])),
            _median(table, turn["input_tokens"], count),
            table.cell({"reason": "the server does not report cached tokens"} | turn, "cached_share", share),
            _median(table, ttft, seconds), _median(table, ttft, seconds, "p95"), _median(table, e2e, seconds),
        ])  # fmt: skip
    return table


def _median(table: Table, spread: Mapping[str, Any], text: Any, name: str = "p50") -> Cell:
    return table.cell({"reason": "no good answer"} | dict(spread), name, text)
