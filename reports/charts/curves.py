"""A summary as Vega-Lite specs; nothing is computed that the summary lacks.

Each function returns None where there is nothing to draw: a curve needs two stages.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from ampacity.analysis.contract.figures import Percentiles
from ampacity.analysis.contract.part import Interval
from ampacity.analysis.contract.stage import Stage
from ampacity.analysis.contract.summary import Summary
from ampacity.analysis.slo import METRICS
from ampacity.reports.charts import marks
from ampacity.reports.charts.burst import burst_queue, burst_ttft
from ampacity.reports.charts.distributions import (
    errors_by_stage,
    input_lengths,
    itl_percentiles,
    output_lengths,
    ttft_percentiles,
)
from ampacity.reports.charts.families import curve_charts
from ampacity.reports.charts.outage import outage_chart
from ampacity.reports.charts.rates import achieved_by_offered, goodput_by_load, with_load
from ampacity.reports.charts.soak import soak_chart
from ampacity.reports.render import figures

Point = dict[str, Any]
DRAWN, IF_JUDGED = ("ttft", "e2e"), ("itl", "icl", "tpot")
SWITCHED: tuple[figures.Quantile, ...] = (
    "p50",
    "p95",
    "p99",
)  # and others where an SLO judges them
TAILS: dict[float | None, figures.Quantile] = {
    0.5: "p50",
    0.9: "p90",
    0.95: "p95",
    0.99: "p99",
    0.999: "p99_9",
    1.0: "max",
}


def charts(summary: Summary) -> list[marks.Chart]:
    """Return every chart that the summary supports, in the order of the report."""
    drawn: list[Callable[[Summary], marks.Chart | None]] = [
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
    if summary.soak:  # its windows have one load, which is no curve
        drawn = [outage_chart, soak_chart, errors_by_stage, input_lengths, output_lengths]
    found = (draw(summary) for draw in drawn)
    return [*(chart for chart in found if chart is not None), *curve_charts(summary)]


def _points(
    summary: Summary,
    placed: Sequence[tuple[float, Stage]],
    of: Callable[[Stage], Percentiles],
    name: figures.Quantile,
    label: str,
) -> list[Point]:
    rows = []
    for x, stage in placed:
        held = of(stage)
        value: float | None = getattr(held, name)
        if not value or value < 0:
            continue
        text = f"{stage.name}: {label} {figures.quantile_text(held, name)}"
        ci = getattr(held, f"{name}_ci", None)
        if bounds := figures.interval(ci, figures.seconds):
            text += f" ({bounds})"
        rows.append({"x": x, "y": value, "text": text, "state": marks.stage_state(stage, summary)})
        rows[-1]["ci"] = ci
    return rows


def _tail(summary: Summary, metric: str) -> figures.Quantile:
    """Return the percentile that is judged: the highest of the SLOs on ``metric``, else p99."""
    judged = [slo.quantile for slo in summary.slos if slo.metric == metric]
    return TAILS[max((q for q in judged if q in TAILS and q is not None), default=0.99)]


def _interval_bars(rows: Sequence[Point]) -> list[Point]:
    """Return the intervals; where an end is not known, the bar stops at the figure itself."""
    bars = []
    for row in rows:
        low, high = row["ci"] or (None, None)
        if low is not None or high is not None:
            ends = {"y": row["y"] if low is None else low, "y2": row["y"] if high is None else high}
            bars.append({"x": row["x"], **ends})
    return bars


def _infinite(placed: Sequence[tuple[float, Stage]], tail: figures.Quantile) -> list[Point]:
    """Return the stages whose TTFT ``tail`` is infinite because of failed requests."""
    rows = []
    for x, stage in placed:
        held = stage.ttft_from_schedule_s
        reason = getattr(held, f"{tail}_reason") or ""
        if getattr(held, tail) is None and reason.startswith("infinite"):
            rows.append({"x": x, "text": f"{stage.name}: TTFT {percentile(tail)} {reason}"})
    return rows


def _left_out(summary: Summary) -> str:
    """Return the stages that lack a percentile that is judged, and why."""
    missing: dict[str, dict[str, str]] = {}  # percentile -> load -> reason
    judged = {slo.metric for slo in summary.slos} or {"ttft", "e2e"}
    for metric, label, of in _metrics(summary):
        p = _tail(summary, metric)
        for stage in figures.by_load(summary.stages) if metric in judged else ():
            if getattr(of(stage), p) is None:
                missing.setdefault(f"{label} {percentile(p)}", {})[stage.name] = figures.why_null(
                    of(stage), p
                )
    parts = []
    for what, reasons in missing.items():
        different = set(reasons.values())
        why = different.pop() if len(different) == 1 else "reasons in the tables"
        parts.append(f"{what} at {', '.join(reasons)} ({why})")
    return f"Not drawn: {'; '.join(parts)}." if parts else ""


def percentile(name: figures.Quantile) -> str:
    """Return the name that people read: ``p99.9``."""
    return name.replace("_", ".")


def _metrics(summary: Summary) -> list[tuple[str, str, Callable[[Stage], Percentiles]]]:
    """Return the metrics that the latency charts draw: TTFT, E2E and those that an SLO judges."""
    judged = {slo.metric for slo in summary.slos}
    names = [*DRAWN, *(name for name in IF_JUDGED if name in judged)]
    return [(name, METRICS[name].label, _percentiles(name)) for name in names]


def _percentiles(metric: str) -> Callable[[Stage], Percentiles]:
    return attrgetter(METRICS[metric].stage_field or "")


def _latency_plot(
    summary: Summary, placed: Sequence[tuple[float, Stage]], axis: marks.Axis
) -> marks.Plot | None:
    """Return latency percentiles over load with the SLO limits; None below two stages with one.

    Each percentile has a switch: p50 and those that are judged are on.
    """
    judged = {
        (slo.metric, _tail(summary, slo.metric))
        for slo in summary.slos
        if slo.limit_s and slo.quantile in TAILS
    }
    shown = {p for _, p in judged} or {"p99"}
    switched = [p for p in TAILS.values() if p in (*SWITCHED, *shown)]
    series = [
        (metric, p, f"{name} {percentile(p)}", rows)
        for metric, name, of in _metrics(summary)
        for p in switched
        if (rows := _points(summary, placed, of, p, f"{name} {percentile(p)}"))
    ]
    drawn = {metric for metric, *_ in series}
    limits = [slo for slo in summary.slos if slo.metric in drawn and slo.limit_s]
    heights = [row["y"] for *_, rows in series for row in rows]
    heights += [slo.limit_s for slo in limits if slo.limit_s]
    heights += [b for *_, rows in series for r in rows for b in r["ci"] or [] if b]
    if len({row["x"] for *_, rows in series for row in rows}) < 2:
        return None
    plot = marks.Plot(axis, marks.seconds_axis("Latency from schedule", heights))
    for p in switched:
        plot.switch(f"show_{p}", percentile(p), p == "p50" or p in shown)
    for slo in limits:
        plot.slo(slo, slo.metric)
    for metric, p, label, rows in series:
        plot.curve(
            rows,
            metric,
            label + (" (judged)" if (metric, p) in judged else ""),
            dashed=p == "p50",
            dotted=p == "p99" and (metric, p) not in judged,
            intervals=_interval_bars(rows),
            width=3.5 if (metric, p) in judged else 1.3,
            switch=f"show_{p}",
        )
    tail = _tail(summary, "ttft")
    top = plot.y.high * (plot.y.low / plot.y.high) ** 0.025
    infinite = [{**row, "y": top} for row in _infinite(placed, tail)]
    plot.points(infinite, "bad", "triangle-up")
    plot.state_keys([stage for _, stage in placed], summary)
    if infinite:
        plot.key(f"TTFT {percentile(tail)} infinite: failed requests", "bad", "triangle")
    return plot


def _mark_capacity(
    plot: marks.Plot,
    knee: Interval | None,
    value: float | None,
    bounds: Interval | None,
    what: str,
    unit: str,
    seen: str = "",
) -> None:
    """Draw the knee region and the capacity with its interval, and add their legend."""
    if figures.interval(knee):
        text = f"knee region {figures.interval(knee, unit=unit)}"
        plot.x_strip(knee, "knee", text)
        plot.key(text, "knee", "strip")
    if value is not None:
        text = f"{what} {figures.significant(value)} {unit}"
        if bounds and figures.interval(bounds) and bounds[0] != bounds[1]:
            text += f" ({figures.interval(bounds)}{seen})"
            plot.x_band(bounds, "usable", text)
        plot.x_rule(value, "usable", text)
        plot.key(text, "usable", "rule-band")


def _capacity_title(summary: Summary, value: float | None, unit: str, otherwise: str) -> str:
    if value is None:
        return otherwise
    who = "The SLOs hold" if len(summary.slos) > 1 else "The SLO holds"
    return f"{who} up to {figures.least_of(summary.capacity)}{figures.significant(value)} {unit}"


def latency_by_rate(summary: Summary) -> marks.Chart | None:
    """Draw latency over the rate, with the knee region and the capacity.

    The rate is the one offered, as the capacity is; of a closed loop the one achieved.
    """
    placed = with_load(summary, lambda s: s.offered_rps or s.achieved_rps)
    capacity, open_ = summary.capacity, any(stage.offered_rps for _, stage in placed)
    rates = [x for x, _ in placed] + [b for b in capacity.capacity_rps_ci or () if b]
    kind = "offered" if open_ else "achieved"
    axis = marks.linear_axis(f"{kind.capitalize()} rate (requests/s)", rates)
    plot = _latency_plot(summary, placed, axis)
    if plot is None:
        return None
    usable, bounds = capacity.capacity_rps, capacity.capacity_rps_ci
    seen = figures.most_answered(summary)
    _mark_capacity(plot, summary.knee.region_rps, usable, bounds, "capacity", "req/s", seen)
    title = _capacity_title(summary, usable, "requests/s", f"Latency against the {kind} rate")
    alt = (
        f"Latency-throughput curve of {len(placed)} stages, latency on a logarithmic axis. "
        f"{title}. {_ends(summary, placed)}"
    )
    notes = []
    if any(of(stage).p99_ci for _, stage in placed for of in map(_percentiles, DRAWN)):
        notes.append("Bars: 95 % interval; a bar to one side only has no known other end.")
    if capacity.crossing == "pooled":
        notes.append("By chance a stage may lie above one at a higher load.")
    if open_ and any(not stage.offered_rps for _, stage in placed):
        notes.append("Closed loops stand at the rate that they achieved.")
    notes.append("Drag to move, Ctrl + wheel (or pinch) to zoom, double click to reset.")
    caption = " ".join([*notes, _left_out(summary)]).strip()
    return marks.Chart(
        "latency-rate", title, alt, plot.spec(marks.WIDE, 380, zoom=True), plot.keys, caption
    )


def _ends(summary: Summary, placed: Sequence[tuple[float, Stage]]) -> str:
    """Return the first and the last stage in words, for those who do not see the picture."""
    tail = _tail(summary, "ttft")
    stages = [stage for _, stage in placed]
    drawn = [s for s in stages if marks.stage_state(s, summary) in marks.CURVE] or stages
    sentences = []
    for stage in (drawn[0], drawn[-1]):
        held = stage.ttft_from_schedule_s
        quantiles: tuple[figures.Quantile, ...] = ("p50", tail)
        low, high = (
            "unknown" if getattr(held, p) is None else figures.quantile_text(held, p)
            for p in quantiles
        )
        sentences.append(f"At {stage.name}, TTFT p50 {low} and {percentile(tail)} {high}.")
    return " ".join(dict.fromkeys(sentences))


def latency_by_concurrency(summary: Summary) -> marks.Chart | None:
    """Draw latency against the mean number of requests in flight, with C_max."""
    placed, capacity = with_load(summary, lambda s: s.concurrency), summary.capacity
    if not placed:
        return None
    c_max, bounds = capacity.c_max, capacity.c_max_ci
    levels = [x for x, _ in placed] + [b for b in (c_max, *(bounds or ())) if b]
    plot = _latency_plot(summary, placed, marks.log_axis("Requests in flight (mean)", levels))
    if plot is None:
        return None
    _mark_capacity(plot, summary.knee.region, c_max, bounds, "C_max", "in flight")
    what = "Latency against requests in flight"
    title = _capacity_title(summary, c_max, "requests in flight", what)
    alt = f"{what}, both axes logarithmic. {title}. {_ends(summary, placed)}"
    return marks.Chart("latency-concurrency", title, alt, plot.spec(marks.NARROW, 290), plot.keys)
