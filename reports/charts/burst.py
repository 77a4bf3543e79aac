"""A burst for people: its key figures, its phases as a table, and TTFT and queue over time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ampacity.reports.charts.marks import NARROW, Axis, Chart, Plot, linear_axis, seconds_axis
from ampacity.reports.render.figures import (
    DASH,
    Finding,
    count,
    failures,
    rate,
    reason_of,
    seconds,
    share,
    significant,
)
from ampacity.reports.render.tables import Table, figure, table_of, words

UNANSWERED = (
    "requests that got no answer reach into it, or there were too few: a median needs 5, p95 59"
)


def burst_findings(burst: Mapping[str, Any]) -> list[Finding]:
    """The key figures, in the order in which they are asked for."""
    return [
        _peak(burst),
        _recovery(burst),
        _backlog(burst),
        _harm(burst),
        _headroom(burst),
        _breaker(burst["breaker"]),
    ]


def _peak(burst: Mapping[str, Any]) -> Finding:
    note = f"{count(burst['peak_in_flight'])} requests in flight at most"
    if burst["peak_ttft_s"] is None:
        return Finding("Peak TTFT", DASH, None, "nothing was answered from the burst on")
    at = f"from the time it was due, {significant(burst['peak_ttft_at_s'])} s after the start, of an answered request; {note}"
    if burst["later_ttft_s"] is not None:
        at += (
            f"; after it was got over, {seconds(burst['later_ttft_s'])} of one due {significant(burst['later_ttft_at_s'])} s "
            "after the start"
        )
    return Finding("Peak TTFT", seconds(burst["peak_ttft_s"]), None, at)


def _recovery(burst: Mapping[str, Any]) -> Finding:
    """When the burst was got over: the one figure that backlog, requests in flight and TTFT agree on; and the limit's verdict."""
    (low_s, _), limit = burst["recovery_ci_s"], burst["max_recovery"]
    if burst["recovery_s"] is None:
        shown, note = f"> {significant(low_s)} s" if low_s else DASH, burst["recovery_reason"]
    else:
        shown = f"{significant(burst['recovery_s'])} s"
        note = "no more wait or are in flight than at the base load, and TTFT is what it was there"
        if low_s < burst["recovery_s"]:
            note += f"; more than chance puts there are in flight until {significant(low_s)} s"
    tone = "bad" if burst["recovery_s"] is None else ""
    if limit:
        said = f"limit {significant(limit['limit_s'])} s: {limit['verdict']}"
        note = f"{said}; {note}"
        tone = {"met": "good", "violated": "bad"}.get(limit["verdict"], "")
    return Finding("Recovered after", shown, None, note, tone)


def _backlog(burst: Mapping[str, Any]) -> Finding:
    backlog, (_, _, after) = burst["backlog"], burst["phases"]
    if backlog["served_rps"] is None:
        return Finding(
            "Backlog", "none" if backlog["drained"] else DASH, None, str(backlog["reason"])
        )
    base, known = backlog["base_waiting"] or 0.0, backlog["base_waiting"] is not None
    said = f"waited for a first token when the burst ended{f', {significant(base, 2)} at the base load' if known else ''}; "
    if backlog["drained"]:
        said += f"{'back at that' if known else 'none did'} {significant(backlog['drained_s'])} s later, {significant(backlog['fall_rps'])} fewer each second"
    else:
        said += f"{significant(after['end_s'] - after['start_s'])} s later {count(backlog['at_end'] + base)} still did; "
        if backlog["drains"]:
            low, high = backlog["further_s_ci"]
            span = f"{significant(low)} " + (
                f"to {significant(high)} s" if high else "s and up, no upper bound"
            )
            said += f"at the base load {significant(backlog['further_s'])} s more are needed (95 % interval {span})"
        else:
            unknown = "whether it drains, a longer --recovery-duration would show"
            said += unknown if backlog["drains"] is None else "at the base load it does not drain"
    said += f"; {rate(backlog['served_rps'])} were served meanwhile"
    if backlog["unanswered"]:
        said += f", and {count(backlog['unanswered'])} requests ended unanswered"
    value = f"{count(backlog['at_end_of_burst'] + base)} requests"
    return Finding("Backlog", value, None, said, "" if backlog["drained"] else "bad")


def _harm(burst: Mapping[str, Any]) -> Finding:
    missed = burst["slo_misses"]
    value = (
        "no SLO was given, or none that this stream tells"
        if missed is None
        else f"{count(missed)} violated an SLO"
    )
    note, of_base = "of those due from the burst on", burst["slo_misses_of_base"]
    if burst["unfinished"]:
        note += f"; {count(burst['unfinished'])} {'was' if burst['unfinished'] == 1 else 'were'} cut off unfinished"
    if of_base >= 0.5:
        note += f"; at the base load's share {significant(of_base)} would break one"
    tone = "bad" if burst["lost"] or burst["unfinished"] or missed else "good"
    return Finding("Requests harmed", f"{value}, {count(burst['lost'])} lost", None, note, tone)


def _headroom(burst: Mapping[str, Any]) -> Finding:
    held = burst["headroom"]
    if held["factor"] is None:
        text = {True: "enough", False: "not enough", None: DASH}[held["enough"]]
        return Finding(
            "Headroom", text, None, str(held["reason"]), "bad" if held["enough"] is False else ""
        )
    value = f"{significant(held['factor'])} times what was served"
    note = f"{rate(held['needed_rps'])} would have carried the burst {held['reason']}"
    return Finding("Headroom needed", value, None, note, "bad")


def _breaker(breaker: Mapping[str, Any]) -> Finding:
    if breaker["open_at"] is None:
        return Finding("Circuit breaker", DASH, None, reason_of(breaker, "open_at"))
    low, high = breaker["open_at"]
    note = (
        f"at 80 to 90 % of the {breaker['max_depth']} requests that may wait at most, {rate(breaker['rate_rps'])} x "
        f"{significant(breaker['acceptable_wait_s'])} s of acceptable wait"
    )
    at = f"opens at {low} to {high} waiting" if low < high else f"opens at {high} waiting"
    return Finding(
        "Circuit breaker", at if high else "opens as soon as a request waits", None, note
    )


def phases_table(burst: Mapping[str, Any]) -> Table:
    """One row for each phase, by the time at which its requests were due."""
    return table_of(
        "Phases of the burst",
        burst["phases"],
        [
            words(
                "phase",
                lambda p: (
                    f"{p['name']}, {significant(p['start_s'])} to {significant(p['end_s'])} s"
                ),
            ),
            figure("offered", "req/s", "offered_rps", significant),
            figure("answered", "req/s", "achieved_rps", significant),
            figure("in flight", "mean", "concurrency", significant, priority=2),
            *(
                figure(f"TTFT {q}", "schedule", f"ttft_s.{q}", seconds, reason=UNANSWERED)
                for q in ("p50", "p95", "max")
            ),
            figure("requests", "", "requests", count, priority=1),
            figure("errors", "", "errors", lambda errors: count(failures(errors))),
            figure("SLO met", "share", "slo_attainment", share, reason=None),
        ],
    )


def burst_ttft(summary: Mapping[str, Any]) -> Chart | None:
    """Median TTFT over time."""
    burst = summary.get("burst") or {}
    limits = [s for s in summary.get("slos") or [] if s["metric"] == "ttft"]
    heights = [r["y"] for r in _rows(burst, "ttft_s")] + [s["limit_s"] for s in limits]
    plot = _over_time(burst, "ttft_s", seconds_axis("TTFT from schedule", heights))
    if plot is None:
        return None
    rows = _rows(burst, "ttft_s")
    plot.line(rows, "ttft")
    none = (
        ""
        if len(rows) == len(burst["series"]["ttft_s"])
        else "; gaps: half not answered, or none due"
    )
    plot.key(f"median TTFT{none}", "ttft", "line")
    for slo in limits:
        plot.slo(slo, "bad")
    title = _title(burst, "TTFT")
    return Chart(
        "burst-ttft", title, f"Median TTFT over time. {title}.", plot.spec(NARROW, 290), plot.keys
    )


def burst_queue(summary: Mapping[str, Any]) -> Chart | None:
    """Requests in flight over time, as this end and as the server counts them."""
    burst = summary.get("burst") or {}
    rows, server = _rows(burst, "in_flight"), _rows(burst, "server_queue")
    y = linear_axis("Requests in flight", [r["y"] for r in rows + server])
    plot = _over_time(burst, "in_flight", y)
    if plot is None:
        return None
    plot.line(rows, "e2e")
    plot.key("requests in flight", "e2e", "line")
    if server:
        plot.line(server, "planned", [5, 4])
        plot.key("running and waiting, by the server's count", "planned", "dash")
    title = _title(burst, "The count in flight")
    alt = f"Requests in flight over time. {title}."
    return Chart("burst-queue", title, alt, plot.spec(NARROW, 290), plot.keys)


def _rows(burst: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    series = burst.get("series") or {"start_s": [], "end_s": []}
    middles = [(a + b) / 2 for a, b in zip(series["start_s"], series["end_s"], strict=True)]
    return [
        {"x": x, "y": y}
        for x, y in zip(middles, series.get(name) or [], strict=False)
        if y is not None
    ]


def _over_time(burst: Mapping[str, Any], name: str, y: Axis) -> Plot | None:
    """The burst as a band over time, the upper end of the base load's level, and when it was got over; None without a curve."""
    if len(_rows(burst, name)) < 2:
        return None
    plot = Plot(linear_axis("Seconds after the start", [burst["series"]["end_s"][-1]]), y)
    phase = burst["phases"][1]
    plot.x_band([phase["start_s"], phase["end_s"]], "usable", "burst")
    plot.key("burst", "usable", "band")
    if burst["base_level"].get(name) is not None:
        plot.y_rule(burst["base_level"][name], "muted", "the base load's level")
        plot.key("at the base load", "muted", "dots")
    if burst["recovery_s"]:
        plot.x_rule(phase["end_s"] + burst["recovery_s"], "good", "got over")
        plot.key("got over", "good", "line")
    return plot


def _title(burst: Mapping[str, Any], what: str) -> str:
    if burst["recovery_s"] is None:
        return f"{what}: when the burst was got over is not known"
    if burst["recovery_s"] == 0:
        return f"{what} was at the base load's level when the burst ended"
    return f"{what} was back at the base load's level {significant(burst['recovery_s'])} s after the burst"
