"""Distributions as charts: latency by percentile, token lengths, failures."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from ampacity.analysis.contract.stage import Stage
from ampacity.analysis.contract.summary import SloLimit, Summary
from ampacity.reports.charts.marks import (
    NARROW,
    TOOLTIP,
    Axis,
    Chart,
    Key,
    Plot,
    log_axis,
    seconds_axis,
    with_look,
)
from ampacity.reports.charts.palette import COLOURS, STEPS, light
from ampacity.reports.render.figures import (
    NO_FAILURES,
    by_load,
    count,
    ended_otherwise,
    exact,
    failures,
    seconds,
)

T = TypeVar("T")
PERCENTILE_TICKS = (1.0, 2.0, 10.0, 100.0, 1000.0)
PERCENTILE_LABEL = (
    "datum.value == 1 ? 'fastest' : datum.value == 2 ? 'p50' : datum.value == 10 ? 'p90' :"
    " datum.value == 100 ? 'p99' : 'p99.9'"
)
LENGTH_PERCENTILES = ("p1", "p5", "p10", "p25", "p50", "p75", "p90", "p95", "p99")


def ttft_percentiles(summary: Summary) -> Chart | None:
    """Draw the quantile curves of the time to first token, one a stage."""
    title = "Time to first token by percentile, from schedule"
    return _quantile_chart(summary, "ttft_from_schedule_s", "ttft", title, "TTFT")


def itl_percentiles(summary: Summary) -> Chart | None:
    """Draw the quantile curves of the inter-token latency, one a stage."""
    title = "Inter-token latency by percentile, over gaps"
    return _quantile_chart(summary, "itl_s", "itl", title, "ITL")


def _curve_of(stage: Stage, name: str) -> list[dict[str, Any]]:
    """Return points (x = 1/(1−q), y); infinite values (null) and q = 1 are left out."""
    if (held := stage.curves.get(name)) is None:
        return []
    pairs = zip(held.q, held.value, strict=False)
    return [{"x": 1 / (1 - q), "y": v} for q, v in pairs if q < 0.9995 and v is not None and v > 0]


def chosen(stages: Sequence[T], most: int = len(STEPS)) -> list[T]:
    """Return at most ``most`` stages, evenly spaced, with the first and the last."""
    if len(stages) <= most:
        return list(stages)
    return [stages[round(i * (len(stages) - 1) / (most - 1))] for i in range(most)]


def _quantile_chart(
    summary: Summary, name: str, metric: str, title: str, short: str
) -> Chart | None:
    with_curve = [(s, curve) for s in by_load(summary.stages) if (curve := _curve_of(s, name))]
    drawn = chosen(with_curve)
    if not drawn:
        return None
    limits = [slo for slo in summary.slos if slo.metric == metric and slo.limit_s]
    heights = [p["y"] for _, curve in drawn for p in curve]
    heights += [slo.limit_s for slo in limits]
    right = max(p["x"] for _, curve in drawn for p in curve)
    x = Axis("Percentile", 1.0, max(right * 1.1, 120.0), True, PERCENTILE_LABEL, PERCENTILE_TICKS)
    plot = Plot(x, seconds_axis(f"{short} (logarithmic)", heights))
    for slo in limits:
        plot.slo(slo, "ink")
        plot.points(_target(slo, plot), "ink", "diamond", filled=False)
    for place, (stage, curve) in enumerate(drawn):
        colour = STEPS[round(place * (len(STEPS) - 1) / max(1, len(drawn) - 1))]
        growing = stage.stable is False
        plot.line(curve, colour, [5, 3] if growing else None, 1.9)
        label = f"{stage.name}, no steady state" if growing else stage.name
        plot.key(label, colour, "dash" if growing else "line")
    caption = "The axis widens the slow tail: p90, p99 and p99.9 lie equally far apart."
    if len(drawn) < len(with_curve):
        caption += f" {len(drawn)} of {len(with_curve)} stages are drawn."
    alt = f"{title}, {len(drawn)} stages, latency on a logarithmic axis."
    return Chart(f"{metric}-percentiles", title, alt, plot.spec(NARROW, 290), plot.keys, caption)


def _target(slo: SloLimit, plot: Plot) -> list[dict[str, Any]]:
    """Return the point below which a curve must pass: the SLO's percentile at its limit."""
    quantile = slo.quantile
    if quantile is None or not quantile < 1 or 1 / (1 - quantile) > plot.x.high:
        return []
    text = f"SLO {slo.text}: at most {seconds(slo.limit_s)} at p{exact(100 * quantile)}"
    return [{"x": 1 / (1 - quantile), "y": slo.limit_s, "text": text}]


def input_lengths(summary: Summary) -> Chart | None:
    """Draw input tokens: planned, and as the server counted them."""
    return _length_chart(summary, "input_tokens", "sent", "Input lengths", "counted by the server")


def output_lengths(summary: Summary) -> Chart | None:
    """Draw output tokens: planned and received."""
    return _length_chart(summary, "output_tokens", "received", "Output lengths", "received")


def _length_chart(
    summary: Summary, group: str, side: str, what: str, realised: str
) -> Chart | None:
    held = (summary.workload.get("realised") or {}).get(group) or {}
    sides = [
        ("planned", held.get("planned") or {}, "planned"),
        (realised, held.get(side) or {}, "ttft"),
    ]
    rows = {label: _length_rows(lengths, label) for label, lengths, _ in sides}
    tokens = [row["x"] for found in rows.values() for row in found]
    if not tokens:
        return None
    names = [
        name
        for name in LENGTH_PERCENTILES
        if any(r["name"] == name for f in rows.values() for r in f)
    ]
    labels = (
        " : ".join(f"datum.value == {i} ? '{n}'" for i, n in enumerate(LENGTH_PERCENTILES))
        + " : ''"
    )
    y = Axis(
        "Percentile of requests",
        -0.4,
        len(LENGTH_PERCENTILES) - 0.6,
        False,
        labels,
        range(len(LENGTH_PERCENTILES)),
    )
    plot = Plot(log_axis(f"{what.split()[0]} tokens (logarithmic)", tokens), y)
    for label, lengths, colour in sides:
        if rows[label]:
            planned = label == "planned"
            n = f", {count(lengths['n'])} requests" if lengths.get("n") else ""
            plot.curve(rows[label], colour, label + n, planned, 110 if planned else 52)
    title = (
        f"{what}: planned and {realised}" if rows[realised] else f"{what}: planned, none {realised}"
    )
    medians = [
        f"{label} p50 {count(lengths['p50'])}"
        for label, lengths, _ in sides
        if lengths.get("p50") is not None
    ]
    alt = f"{title}, {len(names)} percentiles of tokens a request: {', '.join(medians)}."
    return Chart(group.replace("_", "-"), title, alt, plot.spec(NARROW, 260), plot.keys)


def _length_rows(lengths: Mapping[str, Any], label: str) -> list[dict[str, Any]]:
    return [
        {
            "x": lengths[name],
            "y": i,
            "name": name,
            "text": f"{label}: {name} {count(lengths[name])} tokens",
        }
        for i, name in enumerate(LENGTH_PERCENTILES)
        if lengths.get(name)
    ]


def errors_by_stage(summary: Summary) -> Chart | None:
    """Draw the requests of each stage that did not end well, by cause; None where all did."""
    stages = by_load(summary.stages)
    totals: Counter[str] = Counter()
    for stage in stages:
        totals.update({cause: n for cause, n in stage.errors.items() if n})
    if not totals:
        return None
    causes = list(totals)
    labels = [stage.name for stage in stages]
    rows = [row for stage in stages for row in _error_bars(stage, causes)]
    counts = {"tickMinStep": 1, "format": ",d", "tickCount": 6}
    encoding = {
        "x": {"field": "x", "type": "quantitative", "title": "Requests", "axis": counts},
        "x2": {"field": "x2"},
        "y": {"field": "stage", "type": "nominal", "title": None, "scale": {"domain": labels}},
        "color": {"field": "colour", "type": "nominal", "scale": None, "legend": None},
        **TOOLTIP,
    }
    bars = {
        "data": {"name": "errors"},
        "mark": {"type": "bar", "height": {"band": 0.66}},
        "encoding": encoding,
        "width": NARROW - 20,
        "height": max(60, 30 * len(labels)),
    }
    judged = count(sum(s.requests for s in stages))
    failed = f"{count(failures(totals)) if failures(totals) else 'none'} failed"
    ends = "; ".join([*ended_otherwise(totals), failed])
    title = f"Of {judged} requests in the windows {ends}"
    spec = with_look(bars, {"errors": rows})
    keys = [Key(NO_FAILURES.get(cause, cause), error_colour(cause), "band") for cause in causes]
    return Chart("errors", title, f"{title}, by stage and cause: {', '.join(causes)}.", spec, keys)


def error_colour(cause: str) -> str:
    return cause if cause in COLOURS else "other_error"


def _error_bars(stage: Stage, causes: Sequence[str]) -> list[dict[str, Any]]:
    rows, start = [], 0
    for cause in causes:
        if n := stage.errors.get(cause, 0):
            what = f"{NO_FAILURES.get(cause, cause)} {count(n)} of {count(stage.requests)} requests"
            ends = {"stage": stage.name, "x": start, "x2": start + n}
            colour = light(error_colour(cause))
            rows.append({**ends, "colour": colour, "text": f"{stage.name}: {what}"})
            start += n
    return rows
