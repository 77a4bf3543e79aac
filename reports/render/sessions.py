"""Sessions and prefix sharing as tables and key figures."""

from ampacity.analysis.contract.stage import Stage
from ampacity.analysis.contract.summary import Summary
from ampacity.analysis.contract.traffic import Sharing, Turns
from ampacity.reports.render.figures import (
    DASH,
    NO_REASON,
    Finding,
    by_load,
    count,
    loads_of,
    seconds,
    share,
    significant,
)
from ampacity.reports.render.table import Rows, Table

NO_ANSWER = "no good answer"


def session_findings(summary: Summary) -> list[Finding]:
    """Return how many sessions fit, and what the prefix cache found, where the run has any."""
    found = []
    if summary.sessions:
        fit = summary.sessions.fit
        if fit.concurrent_sessions is None or fit.stage is None:
            found.append(Finding("Sessions", DASH, None, fit.reason or NO_REASON))
        else:
            note = (
                f"at once, pauses included, at {loads_of(summary, [fit.stage])}; "
                f"{significant(fit.sessions_per_s or 0.0)} began per second"
            )
            found.append(Finding("Sessions", significant(fit.concurrent_sessions), None, note))
    return [*found, *(_cached(summary, row) for row in (summary.sharing or [])[-1:])]


def _cached(summary: Summary, row: Sharing) -> Finding:
    note = (
        f"of the input tokens at {loads_of(summary, [row.stage])}; "
        f"{share(row.planned or 0.0)} by the schedule with an infinite cache"
    )
    if row.realised is None:
        return Finding("Cached", DASH, None, f"{note}; {row.realised_reason or NO_REASON}")
    return Finding("Cached", share(row.realised), None, note)


def session_tables(summary: Summary) -> list[Table]:
    """Return sessions by stage, and the turns of the highest load, where there are sessions."""
    if not summary.sessions:
        return []
    held = {s.index: s for s in summary.sessions.stages}
    stages = [(s, held[s.index]) for s in by_load(summary.stages) if s.index in held]
    rows = Rows("Sessions", stages)
    rows.words("load", lambda row: row[0].name)
    rows.figure("sessions", "", lambda row: row[1].sessions, count)
    rows.figure("complete", "", lambda row: row[1].complete, count)
    rows.figure("failed", "", lambda row: row[1].failed, count)
    rows.figure("cut", "", lambda row: row[1].cut, count)
    rows.figure(
        "at once",
        "mean",
        lambda row: row[1].concurrent.mean,
        significant,
        why=lambda row: row[1].concurrent.reason,
    )
    rows.percentile("time p50", "", lambda row: row[1].session_s, "p50")
    rows.percentile("time p95", "", lambda row: row[1].session_s, "p95")
    rows.percentile("busy p50", "", lambda row: row[1].busy_s, "p50")
    rows.figure(
        "goodput",
        "per s",
        lambda row: row[1].goodput_per_s,
        significant,
        why=lambda row: row[1].goodput_per_s_reason,
    )
    rows.figure("input", "tokens p50", lambda row: row[1].input_tokens.p50, count, why=NO_ANSWER)
    rows.figure("output", "tokens p50", lambda row: row[1].output_tokens.p50, count, why=NO_ANSWER)
    return [rows.done(), *(_turns(s, own.per_turn) for s, own in stages[-1:])]


def _turns(stage: Stage, turns: list[Turns]) -> Table:
    uncounted = "the server does not report cached tokens"
    rows = Rows(f"Turns at {stage.name}", turns)
    rows.words("turns", lambda t: "–".join(map(str, sorted(set(t.turns)))))
    rows.figure("requests", "", lambda t: t.requests, count)
    rows.figure("ok", "", lambda t: t.ok, count)
    rows.figure("input", "tokens p50", lambda t: t.input_tokens.p50, count, why=NO_ANSWER)
    rows.figure("cached", "of input", lambda t: t.cached_share, share, why=uncounted)
    for p, value in (
        ("TTFT p50", lambda t: t.ttft_from_schedule_s.p50),
        ("TTFT p95", lambda t: t.ttft_from_schedule_s.p95),
        ("E2E p50", lambda t: t.e2e_from_schedule_s.p50),
    ):
        rows.figure(p, "schedule", value, seconds, why=NO_ANSWER)
    return rows.done()
