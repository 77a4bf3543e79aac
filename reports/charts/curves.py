"""Pictures of a summary as Vega-Lite specs: pure functions, which compute nothing that the summary lacks.

Each function returns None where the summary holds nothing to draw: a curve needs two stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ampacity.analysis.load_names import load_name
from ampacity.reports.charts.burst import burst_queue, burst_ttft
from ampacity.reports.charts.distributions import (
    errors_by_stage,
    input_lengths,
    itl_percentiles,
    output_lengths,
    ttft_percentiles,
)
from ampacity.reports.charts.families import curve_charts
from ampacity.reports.charts.marks import (
    CURVE,
    DASHED,
    NARROW,
    WIDE,
    Axis,
    Chart,
    Plot,
    linear_axis,
    log_axis,
    seconds_axis,
    stage_state,
)
from ampacity.reports.charts.outage import outage_chart
from ampacity.reports.render.figures import (
    by_load,
    exact,
    interval,
    least_of,
    offered_at,
    peak_text,
    percentile_text,
    rate,
    reason_of,
    seconds,
    share,
    significant,
)

DRAWN = (("ttft", "ttft_from_schedule_s", "TTFT"), ("e2e", "e2e_from_schedule_s", "E2E"))
TAILS = (0.9, 0.95, 0.99)  # quantiles that a summary holds, as p90, p95, p99


def charts(summary: Mapping[str, Any]) -> list[Chart]:
    """Every chart that the summary supports, in the order of the report."""
    drawn: list[Callable[[Mapping[str, Any]], Chart | None]] = [
        outage_chart,
        burst_ttft,
        burst_queue,
        latency_by_rate,
        latency_by_concurrency,
        achieved_by_offered,
        ttft_percentiles,
        itl_percentiles,
        goodput_by_load,
        errors_by_stage,
        input_lengths,
        output_lengths,
    ]
    return [
        *(chart for draw in drawn if (chart := draw(summary)) is not None),
        *curve_charts(summary),
    ]


def _stages(summary: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Stages with a positive figure ``name`` (a stage without any completion has no place on the axis)."""
    return [s for s in by_load(summary) if (s.get(name) or 0) > 0]


def _points(
    summary: Mapping[str, Any],
    stages: Sequence[Mapping[str, Any]],
    x: str,
    metric: str,
    percentile: str,
    label: str,
) -> list[dict[str, Any]]:
    rows = []
    for stage in stages:
        held = stage.get(metric) or {}
        value = held.get(percentile)
        if value is None or value <= 0:
            continue
        ci = held.get("p99_ci")
        bounds = interval(ci, seconds) if percentile == "p99" else None
        text = f"{load_name(stage)}: {label} {percentile_text(held, percentile, seconds)}" + (
            f" ({bounds})" if bounds else ""
        )
        state = stage_state(stage, summary)
        rows.append({"x": stage[x], "y": value, "text": text, "state": state, "ci": ci})
    return rows


def _tail(summary: Mapping[str, Any], metric: str) -> str:
    """The percentile that is judged: that of the SLO on ``metric`` (the highest of several), p99 without one."""
    quantiles = [
        slo.get("quantile") for slo in summary.get("slos") or [] if slo.get("metric") == metric
    ]
    judged = [q for q in quantiles if q in TAILS]
    return f"p{100 * max(judged):.0f}" if judged else "p99"


def _interval_bars(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The p99 intervals; where an end is not known, the bar stops at the p99 itself."""
    bars = []
    for row in rows:
        low, high = row["ci"] or (None, None)
        if low is not None or high is not None:
            ends = {"y": row["y"] if low is None else low, "y2": row["y"] if high is None else high}
            bars.append({"x": row["x"], **ends})
    return bars


def _beyond(stages: Sequence[Mapping[str, Any]], x: str, tail: str) -> list[dict[str, Any]]:
    """Stages whose TTFT ``tail`` is infinite because of failed requests."""
    rows = []
    for stage in stages:
        held = stage.get("ttft_from_schedule_s") or {}
        reason = str(held.get(f"{tail}_reason") or "")
        if held.get(tail) is None and reason.startswith("infinite"):
            rows.append({"x": stage[x], "text": f"{load_name(stage)}: TTFT {tail} {reason}"})
    return rows


def _left_out(summary: Mapping[str, Any]) -> str:
    """The stages that lack a percentile which the latency charts draw, and why."""
    missing: dict[str, dict[str, str]] = {}  # percentile -> load -> reason
    for metric, name, label in DRAWN:
        for p in ("p50", _tail(summary, metric)):
            for stage in by_load(summary):
                held = stage.get(name) or {}
                if held.get(p) is None:
                    missing.setdefault(f"{label} {p}", {})[load_name(stage)] = reason_of(held, p)
    parts = []
    for what, reasons in missing.items():
        why = (
            next(iter(reasons.values()))
            if len(set(reasons.values())) == 1
            else "reasons in the tables"
        )
        parts.append(f"{what} at {', '.join(reasons)} ({why})")
    return f"Not drawn: {'; '.join(parts)}." if parts else ""


def _latency_plot(
    summary: Mapping[str, Any], stages: Sequence[Mapping[str, Any]], x: str, axis: Axis
) -> Plot | None:
    """Latency percentiles over ``x`` with the SLO limits; None below two stages with one."""
    series = [
        (f"{label} {p}", metric, p, _points(summary, stages, x, name, p, f"{label} {p}"))
        for metric, name, label in DRAWN
        for p in ("p50", _tail(summary, metric))
    ]
    limits = [
        s
        for s in summary.get("slos") or []
        if s.get("metric") in ("ttft", "e2e") and s.get("limit_s")
    ]
    heights = [row["y"] for *_, rows in series for row in rows] + [slo["limit_s"] for slo in limits]
    heights += [b for *_, p, rows in series if p == "p99" for r in rows for b in r["ci"] or [] if b]
    if len({row["x"] for *_, rows in series for row in rows}) < 2:
        return None
    plot = Plot(axis, seconds_axis("Latency from schedule", heights))
    for slo in limits:
        plot.slo(slo, slo["metric"])
    for label, colour, p, rows in series:
        if rows:
            plot.curve(
                rows,
                colour,
                label,
                p == "p50",
                intervals=_interval_bars(rows) if p == "p99" else (),
            )
    top = plot.y.high * (plot.y.low / plot.y.high) ** 0.025
    beyond = [{**row, "y": top} for row in _beyond(stages, x, _tail(summary, "ttft"))]
    plot.points(beyond, "bad", "triangle-up")
    plot.state_keys(stages, summary)
    if beyond:
        plot.key(f"TTFT {_tail(summary, 'ttft')} infinite: failed requests", "bad", "triangle")
    return plot


def _mark_capacity(
    plot: Plot,
    knee: Sequence[float] | None,
    value: float | None,
    bounds: Any,
    what: str,
    unit: str,
) -> None:
    """The knee region and the capacity with its interval, as bands over x, and their legend."""
    if interval(knee):
        text = f"knee region {interval(knee, unit=unit)}"
        plot.x_strip(knee, "knee", text)
        plot.key(text, "knee", "strip")
    if value is not None:
        text = f"{what} {significant(value)} {unit}"
        if interval(bounds) and bounds[0] != bounds[1]:
            text += f" ({interval(bounds)})"
            plot.x_band(bounds, "usable", text)
        plot.x_rule(value, "usable", text)
        plot.key(text, "usable", "rule-band")


def _capacity_title(summary: Mapping[str, Any], figure: str, otherwise: str) -> str:
    capacity = summary.get("capacity") or {}
    if capacity.get(figure) is None:
        return otherwise
    least = least_of(capacity)
    what = "requests/s" if figure == "capacity_rps" else "requests in flight"
    who = "The SLOs hold" if len(summary.get("slos") or []) > 1 else "The SLO holds"
    return f"{who} up to {least}{significant(capacity[figure])} {what}"


SHORT_OF = 1.03  # offered over achieved: less is the draw of the arrivals


def latency_by_rate(summary: Mapping[str, Any]) -> Chart | None:
    """The latency-throughput curve, with the knee region and the capacity."""
    stages = _stages(summary, "achieved_rps")
    capacity, knee = summary.get("capacity") or {}, summary.get("knee") or {}
    bounds = [b for b in capacity.get("capacity_rps_ci") or [] if b]
    rates = [s["achieved_rps"] for s in stages] + bounds
    plot = _latency_plot(
        summary, stages, "achieved_rps", linear_axis("Achieved rate (requests/s)", rates)
    )
    if plot is None:
        return None
    usable = capacity.get("capacity_rps")
    _mark_capacity(
        plot, knee.get("region_rps"), usable, capacity.get("capacity_rps_ci"), "capacity", "req/s"
    )
    title = _capacity_title(summary, "capacity_rps", "Latency against the achieved rate")
    alt = (
        f"Latency-throughput curve of {len(stages)} stages, latency on a logarithmic axis. {title}. "
        + _ends(summary, stages)
    )
    said = []
    if any(_has_interval(summary, s) for s in stages):
        said.append("Bars on p99 are its interval; a bar to one side only has no known other end.")
    if any(stage_state(s, summary) == "growing" for s in stages):
        said.append("Past saturation the curve turns upwards: latency grows, the rate does not.")
    if usable and any((s.get("offered_rps") or 0.0) > SHORT_OF * s["achieved_rps"] for s in stages):
        said.append(
            "The capacity is a rate offered; a stage that achieves less stands left of what it was offered."
        )
    caption = " ".join([*said, _left_out(summary)]).strip()
    return Chart(
        "latency-rate", title, alt, plot.spec(WIDE, 380), plot.keys, caption, plot.spec(NARROW, 340)
    )


def _has_interval(summary: Mapping[str, Any], stage: Mapping[str, Any]) -> bool:
    return any(
        (stage.get(name) or {}).get("p99_ci")
        for metric, name, _ in DRAWN
        if _tail(summary, metric) == "p99"
    )


def _ends(summary: Mapping[str, Any], stages: Sequence[Mapping[str, Any]]) -> str:
    """First and last stage in words, for those who do not see the picture."""
    said = []
    tail = _tail(summary, "ttft")
    drawn = [s for s in stages if stage_state(s, summary) in CURVE] or stages
    for stage in (drawn[0], drawn[-1]):
        held = stage.get("ttft_from_schedule_s") or {}
        low, high = (
            percentile_text(held, p, seconds) if held.get(p) is not None else "unknown"
            for p in ("p50", tail)
        )
        said.append(f"At {load_name(stage)}, TTFT p50 {low} and {tail} {high}.")
    return " ".join(dict.fromkeys(said))


def latency_by_concurrency(summary: Mapping[str, Any]) -> Chart | None:
    """Latency against the mean number of requests in flight, with C_max."""
    stages = _stages(summary, "concurrency")
    capacity, knee = summary.get("capacity") or {}, summary.get("knee") or {}
    levels = [s["concurrency"] for s in stages]
    if not levels:
        return None
    c_max, bounds = capacity.get("c_max"), capacity.get("c_max_ci")
    axis = log_axis(
        "Requests in flight (mean)", levels + [b for b in [c_max, *(bounds or [])] if b]
    )
    plot = _latency_plot(summary, stages, "concurrency", axis)
    if plot is None:
        return None
    _mark_capacity(plot, knee.get("region"), c_max, bounds, "C_max", "in flight")
    title = _capacity_title(summary, "c_max", "Latency against requests in flight")
    alt = f"Latency against requests in flight, both axes logarithmic. {title}. {_ends(summary, stages)}"
    return Chart(
        "latency-concurrency", title, alt, plot.spec(NARROW, 290), plot.keys, _left_out(summary)
    )


def achieved_by_offered(summary: Mapping[str, Any]) -> Chart | None:
    """Achieved against offered rate of the open stages, with the diagonal."""
    stages = [s for s in _stages(summary, "offered_rps") if s.get("achieved_rps") is not None]
    if len(stages) < 2:
        return None
    top = [s["offered_rps"] for s in stages]
    plot = Plot(
        linear_axis("Offered rate (requests/s)", top),
        linear_axis("Achieved rate (requests/s)", top),
    )
    _diagonal(plot, "achieved = offered")
    rows = [
        {
            "x": s["offered_rps"],
            "y": s["achieved_rps"],
            "state": stage_state(s, summary),
            "text": f"{load_name(s)} offered: {rate(s['achieved_rps'])} achieved",
        }
        for s in stages
    ]
    plot.curve(rows, "ttft", "achieved rate")
    plot.state_keys(stages, summary)
    title = _follows(stages, [s for s in stages if stage_state(s, summary) in CURVE])
    alt = f"Achieved against offered rate of {len(stages)} stages. {title}."
    return Chart("achieved", title, alt, plot.spec(NARROW, 290), plot.keys)


def _follows(stages: Sequence[Mapping[str, Any]], drawn: Sequence[Mapping[str, Any]]) -> str:
    growing = [s["offered_rps"] for s in drawn if s.get("stable") is False]
    kept = [
        s["offered_rps"]
        for s in drawn
        if s.get("stable") and s["achieved_rps"] >= 0.9 * s["offered_rps"]
    ]
    if kept and not growing and len(kept) == len(drawn):
        all_of_them = len(drawn) == len(stages)
        return f"The achieved rate follows every rate offered{'' if all_of_them else f' up to {exact(max(kept))} requests/s'}"
    if growing and kept and max(kept) < min(growing):
        return (
            f"Keeps up with {exact(max(kept))} requests/s offered, not with {exact(min(growing))}"
        )
    return "Achieved against offered rate"


def _diagonal(plot: Plot, label: str) -> None:
    end = min(plot.x.high, plot.y.high)
    plot.line([{"x": 0, "y": 0}, {"x": end, "y": end}], "planned", DASHED, 1.5)
    plot.key(label, "planned", "dash")


def goodput_by_load(summary: Mapping[str, Any]) -> Chart | None:
    """Goodput against the offered rate (or the set concurrency), with the diagonal of an ideal server."""
    known = [s for s in by_load(summary) if s.get("goodput_rps") is not None]
    if summary.get("burst"):  # two loads of one burst: no curve
        return None
    is_open = all(s.get("offered_rps") is not None for s in known)
    x = "offered_rps" if is_open else "concurrency_set"
    stages = [s for s in known if s.get(x) is not None]
    if len(stages) < 2:
        return None
    peak = summary.get("goodput") or {}
    estimate = _peak_rows(peak) if is_open else []
    loads = [*(s[x] for s in stages), *(row["x"] for row in estimate)]
    goods = [*(s["goodput_rps"] for s in stages), *(row["y2"] for row in estimate)]
    if is_open:
        plot = Plot(
            linear_axis("Offered rate (requests/s)", loads),
            linear_axis("Goodput (requests/s)", [*loads, *goods]),
        )
        _diagonal(plot, "goodput = offered")
    else:
        plot = Plot(
            log_axis("Set concurrency (requests)", loads),
            linear_axis("Goodput (requests/s)", goods),
        )
    rows = [
        {
            "x": s[x],
            "y": s["goodput_rps"],
            "state": stage_state(s, summary),
            "text": _goodput_text(s),
        }
        for s in stages
    ]
    title = "Goodput by load"
    if peak.get("peak_rps"):
        at = f", at {offered_at(peak)} offered" if peak.get("at_offered_rps") is not None else ""
        title = f"Goodput peaks at {peak_text(peak, 'requests/s')}{at}"
    elif peak.get("peak_rps") == 0:
        title = "No request met every SLO"
    plot.curve(rows, "good", "goodput: requests that met every SLO")
    caption = ""
    if estimate:
        plot.bars_between([{**row, "y": row["y1"]} for row in estimate], "usable")
        plot.points(estimate, "usable", "diamond", filled=False, size=80)
        plot.key(str(estimate[0]["text"]), "usable", "diamond-ring")
        caption = "The peak is an estimate from all open stages together, so that it may lie off the points that were measured: a stage that saw no jam lies above it."
    plot.state_keys(stages, summary)
    alt = f"{title}. {len(stages)} stages."
    return Chart("goodput", title, alt, plot.spec(NARROW, 290), plot.keys, caption)


def _peak_rows(peak: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The estimated peak with its 95 % interval from ``y1`` to ``y2``; nothing of one that is a stage's own."""
    if peak.get("basis") != "pooled":
        return []
    low, high = peak["peak_rps_ci"]
    text = f"estimated peak {rate(peak['peak_rps'])} (95 % interval {interval([low, high])})"
    return [
        {"x": peak["at_offered_rps"], "y": peak["peak_rps"], "y1": low, "y2": high, "text": text}
    ]


def _goodput_text(stage: Mapping[str, Any]) -> str:
    attained = stage.get("slo_attainment")
    part = f", {share(attained)} of requests" if attained is not None else ""
    return f"{load_name(stage)}: goodput {rate(stage['goodput_rps'])}{part}"
