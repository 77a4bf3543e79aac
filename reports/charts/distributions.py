"""Distributions of a summary as charts: latency by percentile, lengths of inputs and outputs, failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ampacity.analysis.load_names import load_name
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

PERCENTILE_TICKS = (1.0, 2.0, 10.0, 100.0, 1000.0)
PERCENTILE_LABEL = (
    "datum.value == 1 ? 'fastest' : datum.value == 2 ? 'p50' : datum.value == 10 ? 'p90' :"
    " datum.value == 100 ? 'p99' : 'p99.9'"
)
LENGTH_PERCENTILES = ("p1", "p5", "p10", "p25", "p50", "p75", "p90", "p95", "p99")


def ttft_percentiles(summary: Mapping[str, Any]) -> Chart | None:
    """Quantile curves of the time to first token, one a stage."""
    title = "Time to first token by percentile, from schedule"
    return _quantile_chart(summary, "ttft_from_schedule_s", "ttft", title, "TTFT")


def itl_percentiles(summary: Mapping[str, Any]) -> Chart | None:
    """Quantile curves of the inter-token latency, one a stage."""
    return _quantile_chart(
        summary, "itl_s", "itl", "Inter-token latency by percentile, over gaps", "ITL"
    )


def _curve_of(stage: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Points (x = 1/(1−q), y) of a quantile curve; infinite ones (null) and q = 1 are left out."""
    held = (stage.get("curves") or {}).get(name) or {}
    pairs = zip(held.get("q") or [], held.get("value") or [], strict=False)
    return [{"x": 1 / (1 - q), "y": v} for q, v in pairs if q < 0.9995 and v is not None and v > 0]


def chosen(stages: Sequence[Any], most: int = len(STEPS)) -> list[Any]:
    """At most ``most`` of the stages, evenly spaced, the first and the last among them."""
    if len(stages) <= most:
        return list(stages)
    return [stages[round(i * (len(stages) - 1) / (most - 1))] for i in range(most)]


def _quantile_chart(
    summary: Mapping[str, Any], name: str, metric: str, title: str, short: str
) -> Chart | None:
    with_curve = [(s, curve) for s in by_load(summary) if (curve := _curve_of(s, name))]
    drawn = chosen(with_curve)
    if not drawn:
        return None
    limits = [
        s for s in summary.get("slos") or [] if s.get("metric") == metric and s.get("limit_s")
    ]
    heights = [p["y"] for _, curve in drawn for p in curve] + [s["limit_s"] for s in limits]
    right = max(p["x"] for _, curve in drawn for p in curve)
    x = Axis("Percentile", 1.0, max(right * 1.1, 120.0), True, PERCENTILE_LABEL, PERCENTILE_TICKS)
    plot = Plot(x, seconds_axis(f"{short} (logarithmic)", heights))
    for slo in limits:
        plot.slo(slo, "ink")
        plot.points(_target(slo, plot), "ink", "diamond", filled=False)
    for place, (stage, curve) in enumerate(drawn):
        colour = STEPS[round(place * (len(STEPS) - 1) / max(1, len(drawn) - 1))]
        growing = stage.get("stable") is False
        plot.line(curve, colour, [5, 3] if growing else None, 1.9)
        plot.key(
            load_name(stage) + (", no steady state" if growing else ""),
            colour,
            "dash" if growing else "line",
        )
    caption = "The axis widens the slow tail: p90, p99 and p99.9 lie equally far apart."
    if len(drawn) < len(with_curve):
        caption += f" {len(drawn)} of {len(with_curve)} stages are drawn."
    alt = f"{title}, {len(drawn)} stages, latency on a logarithmic axis."
    return Chart(f"{metric}-percentiles", title, alt, plot.spec(NARROW, 290), plot.keys, caption)


def _target(slo: Mapping[str, Any], plot: Plot) -> list[dict[str, Any]]:
    """The point that a curve must pass below: the SLO's own percentile at its limit."""
    quantile = slo.get("quantile")
    if quantile is None or not quantile < 1 or 1 / (1 - quantile) > plot.x.high:
        return []
    text = f"SLO {slo['text']}: at most {seconds(slo['limit_s'])} at p{exact(100 * quantile)}"
    return [{"x": 1 / (1 - quantile), "y": slo["limit_s"], "text": text}]


def input_lengths(summary: Mapping[str, Any]) -> Chart | None:
    """Input tokens: planned against what the server counted."""
    return _length_chart(summary, "input_tokens", "sent", "Input lengths", "counted by the server")


def output_lengths(summary: Mapping[str, Any]) -> Chart | None:
    """Output tokens: planned against received."""
    return _length_chart(summary, "output_tokens", "received", "Output lengths", "received")


def _length_chart(
    summary: Mapping[str, Any], group: str, side: str, what: str, realised: str
) -> Chart | None:
    held = ((summary.get("workload") or {}).get("realised") or {}).get(group) or {}
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


def errors_by_stage(summary: Mapping[str, Any]) -> Chart | None:
    """Requests of each stage that did not end well, stacked by cause; None where all did."""
    stages = by_load(summary)
    causes = list(dict.fromkeys(c for s in stages for c, n in (s.get("errors") or {}).items() if n))
    if not causes:
        return None
    labels = [load_name(stage) for stage in stages]
    rows = [
        row
        for stage, label in zip(stages, labels, strict=True)
        for row in _error_bars(stage, label, causes)
    ]
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
    totals = {cause: sum((s.get("errors") or {}).get(cause, 0) for s in stages) for cause in causes}
    judged = count(sum(s.get("requests") or 0 for s in stages))
    failed, others = failures(totals), ended_otherwise(totals)
    title = "; ".join([f"{count(failed)} of {judged} requests in the windows failed", *others])
    if not failed:
        title = f"No request in the windows failed; of {judged}, {' and '.join(others)}"
    spec = with_look(bars, {"errors": rows})
    keys = [Key(NO_FAILURES.get(cause, cause), _error_colour(cause), "band") for cause in causes]
    return Chart("errors", title, f"{title}, by stage and cause: {', '.join(causes)}.", spec, keys)


def _error_colour(cause: str) -> str:
    return cause if cause in COLOURS else "other_error"


def _error_bars(
    stage: Mapping[str, Any], label: str, causes: Sequence[str]
) -> list[dict[str, Any]]:
    rows, start = [], 0
    for cause in causes:
        n = (stage.get("errors") or {}).get(cause, 0)
        text = f"{label}: {NO_FAILURES.get(cause, cause)} {count(n)} of {count(stage.get('requests') or 0)} requests"
        if n:
            colour = light(_error_colour(cause))
            rows.append(
                {"stage": label, "x": start, "x2": start + n, "colour": colour, "text": text}
            )
        start += n
    return rows
