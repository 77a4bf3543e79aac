"""A burst: its key figures, its phases as a table, and TTFT and queue over time."""

from collections.abc import Sequence
from typing import Any

from ampacity.analysis.contract.burst import Breaker, Burst
from ampacity.analysis.contract.summary import Summary
from ampacity.reports.charts import marks
from ampacity.reports.render.figures import (
    DASH,
    NO_REASON,
    Finding,
    count,
    failures,
    rate,
    seconds,
    share,
    significant,
)
from ampacity.reports.render.table import Rows, Table

GAPS = "; gaps: half not answered, or none due"
UNANSWERED = (
    "requests that got no answer reach into it, or there were too few: a median needs 5, p95 59"
)


def burst_findings(burst: Burst) -> list[Finding]:
    return [
        _peak(burst),
        _recovery(burst),
        _backlog(burst),
        _harm(burst),
        _headroom(burst),
        _breaker(burst.breaker),
    ]


def _peak(burst: Burst) -> Finding:
    if burst.peak_ttft_s is None:
        return Finding("Peak TTFT", DASH, None, "nothing was answered from the burst on")
    note = (
        f"from the time it was due, {significant(burst.peak_ttft_at_s)} s after the start, of an "
        f"answered request; {count(burst.peak_in_flight)} requests in flight at most"
    )
    if burst.later_ttft_s is not None:
        note += (
            f"; after the recovery, {seconds(burst.later_ttft_s)} of one due "
            f"{significant(burst.later_ttft_at_s)} s after the start"
        )
    return Finding("Peak TTFT", seconds(burst.peak_ttft_s), None, note)


def _recovery(burst: Burst) -> Finding:
    """Return when the burst was over, and the verdict on its limit."""
    (low_s, _), back_s, limit = burst.recovery_ci_s, burst.recovery_s, burst.max_recovery
    if back_s is None:
        value, note = f"> {significant(low_s)} s" if low_s else DASH, str(burst.recovery_reason)
    else:
        value = f"{significant(back_s)} s"
        note = "requests waiting, requests in flight and TTFT are back at the base load's level"
        if low_s is not None and low_s < back_s:
            note += f"; not before {significant(low_s)} s, when in flight came close to that level"
    state = "bad" if back_s is None else ""
    if limit:
        note = f"limit {significant(limit.limit_s)} s: {limit.verdict}; {note}"
        state = {"met": "good", "violated": "bad"}.get(limit.verdict, "")
    return Finding("Recovered after", value, None, note, state)


def _backlog(burst: Burst) -> Finding:
    backlog, base = burst.backlog, burst.backlog.base_waiting or 0.0
    if backlog.piled_up is not None:
        value = f"{count(backlog.piled_up)} in flight"
        return Finding("Backlog", value, None, str(backlog.reason), "bad")
    if backlog.served_rps is None:
        value = "none" if backlog.drained else DASH
        return Finding("Backlog", value, None, str(backlog.reason))
    known = backlog.base_waiting is not None
    note = "waited for a first token when the burst ended"
    note += f", {significant(base, 2)} at the base load; " if known else "; "
    if backlog.drained:
        note += (
            f"{'back at that' if known else 'none did'} {significant(backlog.drained_s)} s later, "
            f"{significant(backlog.fall_rps)} fewer each second"
        )
    else:
        note += _not_drained(burst, base)
    note += f"; {rate(backlog.served_rps)} were served meanwhile"
    if backlog.unanswered:
        note += f", and {count(backlog.unanswered)} requests ended unanswered"
    value = f"{count((backlog.at_end_of_burst or 0.0) + base)} requests"
    return Finding("Backlog", value, None, note, "" if backlog.drained else "bad")


def _not_drained(burst: Burst, base: float) -> str:
    backlog, after = burst.backlog, burst.phases[2]
    still = (
        f"{significant(after.end_s - after.start_s)} s later "
        f"{count((backlog.at_end or 0.0) + base)} still did; "
    )
    if backlog.drains is None:
        return still + "whether it drains, a longer --recovery-duration would show"
    if not backlog.drains:
        return still + "at the base load it does not drain"
    low, high = backlog.further_s_ci or (None, None)
    end = f"to {significant(high)} s" if high else "s and up, no upper bound"
    return still + (
        f"at the base load {significant(backlog.further_s)} s more are needed "
        f"(95 % interval {significant(low)} {end})"
    )


def _harm(burst: Burst) -> Finding:
    missed = burst.slo_misses
    value = "no SLO was given, or none that this stream tells"
    if missed is not None:
        value = f"{count(missed)} violated an SLO"
    note = "of those due from the burst on"
    if burst.unfinished:
        were = "was" if burst.unfinished == 1 else "were"
        note += f"; {count(burst.unfinished)} {were} cut off unfinished"
    if of_base := _of_base(burst):
        note += f"; not counted: of the base {of_base}"
    state = "bad" if burst.lost or burst.unfinished or missed else "good"
    return Finding("Requests harmed", f"{value}, {count(burst.lost)} lost", None, note, state)


def _of_base(burst: Burst) -> str:
    """Return how many of the base were harmed, and of the rest would have been at that share."""
    base, share = burst.phases[0], burst.slo_misses_of_base
    harmed = []
    if base.slo_misses:
        would = f" (at that share {significant(share)} would here)" if share >= 0.5 else ""
        harmed.append(f"{count(base.slo_misses)} violated an SLO{would}")
    if failed := failures(base.errors):
        harmed.append(f"{count(failed)} failed")
    return " and ".join(harmed)


def _headroom(burst: Burst) -> Finding:
    held = burst.headroom
    if held.factor is None:
        text = {True: "enough", False: "not enough", None: DASH}[held.enough]
        note, state = str(held.reason), "bad" if held.enough is False else ""
        if held.enough is False and burst.backlog.served_rps is None:
            note += "; by how much is not known: no queue showed what the server can do"
        return Finding("Headroom", text, None, note, state)
    value = f"{significant(held.factor)} times what was served"
    note = f"{rate(held.needed_rps)} would have carried the burst {held.reason}"
    return Finding("Headroom needed", value, None, note, "bad")


def _breaker(breaker: Breaker) -> Finding:
    if breaker.open_at is None:
        return Finding("Circuit breaker", DASH, None, breaker.reason or NO_REASON)
    low, high = breaker.open_at
    note = (
        f"at 80 to 90 % of the {breaker.max_depth} requests that may wait at most, "
        f"{rate(breaker.rate_rps)} x {significant(breaker.acceptable_wait_s)} s of acceptable wait"
    )
    value = f"opens at {low} to {high} waiting" if low < high else f"opens at {high} waiting"
    if not high:
        value = "opens as soon as a request waits"
    return Finding("Circuit breaker", value, None, note)


def phases_table(burst: Burst) -> Table:
    """Return one row for each phase, by the time at which its requests were due."""
    rows = Rows("Phases of the burst", burst.phases)
    rows.words("phase", lambda p: f"{p.name}, {significant(p.start_s)} to {significant(p.end_s)} s")
    rows.figure("offered", "req/s", lambda p: p.offered_rps, significant)
    rows.figure("answered", "req/s", lambda p: p.achieved_rps, significant)
    rows.figure("in flight", "mean", lambda p: p.concurrency, significant, priority=2)
    rows.figure("TTFT p50", "schedule", lambda p: p.ttft_s.p50, seconds, why=UNANSWERED)
    rows.figure("TTFT p95", "schedule", lambda p: p.ttft_s.p95, seconds, why=UNANSWERED)
    rows.figure("TTFT max", "schedule", lambda p: p.ttft_s.max, seconds, why=UNANSWERED)
    rows.figure("requests", "", lambda p: p.requests, count, priority=1)
    rows.figure("errors", "", lambda p: failures(p.errors), count)
    rows.figure("SLO met", "share", lambda p: p.slo_attainment, share, why="")
    return rows.done()


def burst_ttft(summary: Summary) -> marks.Chart | None:
    """Draw the median TTFT over time."""
    if (burst := summary.burst) is None:
        return None
    rows = _rows(burst, burst.series.ttft_s)
    limits = [s for s in summary.slos if s.metric == "ttft" and s.limit_s is not None]
    heights = [*(r["y"] for r in rows), *(s.limit_s for s in limits if s.limit_s)]
    plot = _over_time(
        burst, rows, burst.base_level.ttft_s, marks.seconds_axis("TTFT from schedule", heights)
    )
    if plot is None:
        return None
    plot.line(rows, "ttft")
    gaps = "" if len(rows) == len(burst.series.ttft_s) else GAPS
    plot.key(f"median TTFT{gaps}", "ttft", "line")
    for slo in limits:
        plot.slo(slo, "bad")
    title = _title(burst, "TTFT")
    return marks.Chart(
        "burst-ttft",
        title,
        f"Median TTFT over time. {title}.",
        plot.spec(marks.NARROW, 290),
        plot.keys,
    )


def burst_queue(summary: Summary) -> marks.Chart | None:
    """Draw the requests in flight over time, as the client and as the server count them."""
    if (burst := summary.burst) is None:
        return None
    rows = _rows(burst, burst.series.in_flight)
    server = _rows(burst, burst.series.server_queue or [])
    y = marks.linear_axis("Requests in flight", [r["y"] for r in rows + server])
    plot = _over_time(burst, rows, burst.base_level.in_flight, y)
    if plot is None:
        return None
    plot.line(rows, "e2e")
    plot.key("requests in flight", "e2e", "line")
    if server:
        plot.line(server, "planned", marks.DASHED)
        plot.key("running and waiting, by the server's count", "planned", "dash")
    title = _title(burst, "The count in flight")
    alt = f"Requests in flight over time. {title}."
    return marks.Chart("burst-queue", title, alt, plot.spec(marks.NARROW, 290), plot.keys)


def _rows(burst: Burst, values: Sequence[float | None]) -> list[dict[str, Any]]:
    spans = zip(burst.series.start_s, burst.series.end_s, values, strict=False)
    return [{"x": (a + b) / 2, "y": y} for a, b, y in spans if y is not None]


def _over_time(
    burst: Burst, rows: Sequence[dict[str, Any]], base: float | None, y: marks.Axis
) -> marks.Plot | None:
    """Return a plot with the burst as a band, the base load's level, and the end of the recovery.

    None where ``rows`` make no curve.
    """
    if len(rows) < 2:
        return None
    plot = marks.Plot(marks.linear_axis("Seconds after the start", [burst.series.end_s[-1]]), y)
    phase = burst.phases[1]
    plot.x_band([phase.start_s, phase.end_s], "usable", "burst")
    plot.key("burst", "usable", "band")
    if base is not None:
        plot.y_rule(base, "muted", "the base load's level")
        plot.key("at the base load", "muted", "dots")
    if burst.recovery_s:
        plot.x_rule(phase.end_s + burst.recovery_s, "good", "recovered")
        plot.key("recovered", "good", "line")
    return plot


def _title(burst: Burst, what: str) -> str:
    if burst.recovery_s is None:
        return f"{what}: when the endpoint recovered is not known"
    if burst.recovery_s == 0:
        return f"{what} was at the base load's level when the burst ended"
    back_s = significant(burst.recovery_s)
    return f"{what} was back at the base load's level {back_s} s after the burst"
