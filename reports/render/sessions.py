"""Sessions and prefix sharing as tables and key figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ampacity.analysis.load_names import load_name
from ampacity.reports.render.figures import (
    DASH,
    Finding,
    by_load,
    count,
    loads_of,
    reason_of,
    seconds,
    share,
    significant,
)
from ampacity.reports.render.tables import LOAD, Table, figure, table_of, words

NO_ANSWER = "no good answer"


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
    stages = [
        stage | {"own": held[stage["index"]]}
        for stage in by_load(summary)
        if stage["index"] in held
    ]
    table = table_of(
        "Sessions",
        stages,
        [
            LOAD,
            *(
                figure(name, "", f"own.{name}", count)
                for name in ("sessions", "complete", "failed", "cut")
            ),
            figure("at once", "mean", "own.concurrent.mean", significant),
            figure("time p50", "", "own.session_s.p50", seconds),
            figure("time p95", "", "own.session_s.p95", seconds),
            figure("busy p50", "", "own.busy_s.p50", seconds),
            figure("goodput", "per s", "own.goodput_per_s", significant),
            figure("input", "tokens p50", "own.input_tokens.p50", count, reason=NO_ANSWER),
            figure("output", "tokens p50", "own.output_tokens.p50", count, reason=NO_ANSWER),
        ],
    )
    return [table, *map(_turns, stages[-1:])]


def _turns(stage: Mapping[str, Any]) -> Table:
    return table_of(
        f"Turns at {load_name(stage)}",
        stage["own"]["per_turn"],
        [
            words("turns", lambda turn: "–".join(map(str, sorted(set(turn["turns"]))))),
            figure("requests", "", "requests", count),
            figure("ok", "", "ok", count),
            figure("input", "tokens p50", "input_tokens.p50", count, reason=NO_ANSWER),
            figure(
                "cached",
                "of input",
                "cached_share",
                share,
                reason="the server does not report cached tokens",
            ),
            figure("TTFT p50", "schedule", "ttft_from_schedule_s.p50", seconds, reason=NO_ANSWER),
            figure("TTFT p95", "schedule", "ttft_from_schedule_s.p95", seconds, reason=NO_ANSWER),
            figure("E2E p50", "schedule", "e2e_from_schedule_s.p50", seconds, reason=NO_ANSWER),
        ],
    )
