"""The run over time: panels under one time axis, of which the first chooses the span of the rest.

A page with scripts draws it live: dragging over the first panel, or the sliders, set ``from_s`` and
``to_s``. ``BESIDE`` is the room beside a panel that its axis and the margins take, in pixels.
"""

from collections.abc import Sequence
from typing import Any

from ampacity.analysis.contract.summary import SloLimit, Summary
from ampacity.analysis.timeline import QUOTA_LEFT, Timeline
from ampacity.reports.charts.distributions import error_colour
from ampacity.reports.charts.marks import WIDE, Chart, Key, log_ticks, seconds_axis, with_look
from ampacity.reports.charts.palette import light
from ampacity.reports.render.figures import count, seconds, significant

BESIDE = 82
LETTER = 5.5  # pixels of a letter of a label
Rows = list[dict[str, Any]]
SHOWN = {"domainMin": {"expr": "from_s"}, "domainMax": {"expr": "to_s"}, "nice": False}


def timeline_chart(timeline: Timeline, summary: Summary) -> Chart:
    """Draw arrivals, requests in flight, TTFT, failures and the server's gauges over the run."""
    end_s = round(timeline.step_s * len(timeline.arrivals_rps), 6)
    data = _data(timeline)
    panels = [_overview(end_s), _in_flight(timeline), _scatter(timeline, summary.slos)]
    panels += [_failures(timeline)] if timeline.failed_rps else []
    shares = (("KV cache", "kv_cache_usage", "knee"), ("Quota left", QUOTA_LEFT, "bad"))
    panels += [_share(*share) for share in shares if share[1] in timeline.server]
    panels += [_preemptions()] if data["preemptions_total"] else []
    for layer in (of for of in panels[-1]["layer"] if "x" in of["encoding"]):
        layer["encoding"]["x"]["axis"] = {"format": "~r", "title": "Seconds after the start"}
    span = {"input": "range", "min": 0, "max": end_s, "step": timeline.step_s}
    spec = {
        "params": [
            {"name": "from_s", "value": 0, "bind": {**span, "name": "from, s "}},
            {"name": "to_s", "value": end_s, "bind": {**span, "name": "to, s "}},
        ],
        "vconcat": panels,
        "spacing": 30,
        "bounds": "flush",
        "usermeta": {"beside": BESIDE},
    }
    spec = with_look(spec, data)
    requests = sum(round(rps * timeline.step_s) for rps in timeline.arrivals_rps)
    title = f"{seconds(end_s)}, pauses included: {count(requests)} requests over time"
    alt = f"{title}, in {len(panels)} panels: {', '.join(p['name'].lower() for p in panels)}."
    return Chart("timeline", title, alt, spec, _keys(timeline, summary), _caption(timeline))


def _caption(timeline: Timeline) -> str:
    drawn, answered = len(timeline.ttft_s), timeline.answered
    text = f"One step is {seconds(timeline.step_s)}."
    if drawn < answered:
        text += (
            f" {count(drawn)} of {count(answered)} first tokens are drawn: the fastest and the "
            "slowest of each step, and a random part of the others."
        )
    return text + " Drag over the first panel, or move the sliders, to look at a part of the run."


def _keys(timeline: Timeline, summary: Summary) -> list[Key]:
    keys = [Key("arrivals", "ttft", "band"), Key("a stage begins", "axis", "dots")]
    keys += [Key("in flight, by the client", "e2e", "line")]
    for name, label, colour, shape in GAUGE_LINES:
        keys += [Key(label, colour, shape)] if name in timeline.server else []
    keys += [Key(f"SLO {slo.text}", "bad", "dots") for slo in _limits(summary.slos)]
    return keys + [Key(status, error_colour(status), "band") for status in timeline.failed_rps]


GAUGE_LINES = (
    ("running", "running, by the server", "planned", "dash"),
    ("waiting", "waiting, by the server", "itl", "line"),
)


def _limits(slos: Sequence[SloLimit]) -> list[SloLimit]:
    return [slo for slo in slos if slo.metric == "ttft" and slo.limit_s]


def _data(timeline: Timeline) -> dict[str, Rows]:
    step_s = timeline.step_s

    def rows(values: Sequence[float]) -> Rows:
        return [{"x": round(i * step_s, 4), "y": significantly(v)} for i, v in enumerate(values)]

    grown = timeline.server.get("preemptions_total", [])
    base = grown[0][1] if grown else 0.0
    gauges = {
        name: [{"x": x, "y": y} for x, y in timeline.server.get(name, [])]
        for name in ("running", "waiting", "kv_cache_usage", QUOTA_LEFT)
    }
    moved = [{"x": x, "y": y - base} for x, y in grown]
    return gauges | {
        "arrivals": rows(timeline.arrivals_rps),
        "in_flight": [{**row, "x": row["x"] + step_s / 2} for row in rows(timeline.in_flight)],
        "ttft": [{"x": x, "y": y} for x, y in timeline.ttft_s],
        "failed": [
            {"x": i * step_s, "x2": (i + 1) * step_s, "y": rps, "kind": kind}
            | {"colour": light(error_colour(kind)), "text": f"{kind}: {significant(rps)} a second"}
            for kind, values in timeline.failed_rps.items()
            for i, rps in enumerate(values)
            if rps
        ],
        "preemptions_total": moved if moved and moved[-1]["y"] else [],
        "stages": _stages(timeline),
    }


def _stages(timeline: Timeline) -> Rows:
    """Return where each stage begins, with its load as a label where there is room for it."""
    per_s = (WIDE - BESIDE) / (timeline.step_s * len(timeline.arrivals_rps))
    rows, free_s = [], 0.0
    for x, name in timeline.stages:
        fits = x >= free_s
        free_s = x + LETTER * (len(name) + 1) / per_s if fits else free_s
        rows.append({"x": x, "text": name, "label": name if fits else ""})
    return rows


def significantly(value: float) -> float:
    return float(f"{value:.4g}")


def _panel(
    title: str, height: int, layers: list[dict[str, Any]], x_scale: Any = SHOWN, **y: Any
) -> dict[str, Any]:
    labels = {"labels": x_scale is not SHOWN, "format": "~r"}
    axis = {"titleX": -60, "titlePadding": 0, "tickCount": 4, "format": "~s", **y.pop("axis", {})}
    x = {"field": "x", "type": "quantitative", "title": None, "axis": labels, "scale": x_scale}
    y = {"field": "y", "type": "quantitative", "title": title, "axis": axis, **y}
    layers = [*layers, _layer("stages", "rule", "axis", _STAGE, strokeDash=[2, 3])]
    for layer in layers:  # not inherited: a layer's datum does not replace an inherited field
        own = {"x": {**x}, "y": y, **layer["encoding"]}
        layer["encoding"] = {channel: of for channel, of in own.items() if of}
    return {"name": title, "width": WIDE - BESIDE, "height": height, "layer": layers}


_STAGE = {"y": None, "tooltip": {"field": "text", "type": "nominal"}}
_ONCE: dict[str, Any] = {"values": [{}]}  # one mark, without a row of its own


def _layer(
    data: str | dict[str, Any],
    kind: str,
    colour: str,
    encoding: dict[str, Any] | None = None,
    **look: Any,
) -> dict[str, Any]:
    mark = {"type": kind, "color": light(colour), "clip": True, "aria": False, **look}
    held = {"name": data} if isinstance(data, str) else data
    return {"data": held, "mark": mark, "encoding": encoding or {}}


def _overview(end_s: float) -> dict[str, Any]:
    brush: dict[str, Any] = {"name": "brush", "select": {"type": "interval", "encodings": ["x"]}}
    brush["select"]["mark"] = {"fillOpacity": 0, "strokeOpacity": 0}
    bars = _layer("arrivals", "area", "ttft", interpolate="step-after", opacity=0.75)
    chosen = _layer(_ONCE, "rect", "usable", {"x2": {"field": "x2"}, "y": None})
    chosen["mark"]["opacity"] = {"expr": f"to_s - from_s < {end_s} ? 0.25 : 0"}
    ends = (("from_s", "x"), ("to_s", "x2"))
    chosen["transform"] = [{"calculate": expression, "as": name} for expression, name in ends]
    named = {"text": {"field": "label", "type": "nominal"}, "y": {"value": -4}}
    labels = _layer("stages", "text", "muted", named, align="left", baseline="bottom", fontSize=10)
    labels["mark"] |= {"clip": False, "dx": -1}
    layers = [chosen, bars | {"params": [brush]}, labels]
    return _panel("Arrivals/s", 70, layers, {"domain": [0, end_s], "nice": False})


def _in_flight(timeline: Timeline) -> dict[str, Any]:
    lines = [_layer("in_flight", "line", "e2e", strokeWidth=1.5)]
    for name, _, colour, shape in GAUGE_LINES:
        if name in timeline.server:
            dash = [5, 4] if shape == "dash" else []
            lines.append(_layer(name, "line", colour, strokeWidth=1.3, strokeDash=dash))
    return _panel("Requests", 100, lines)


def _scatter(timeline: Timeline, slos: Sequence[SloLimit]) -> dict[str, Any]:
    hover = [
        {"field": "y", "type": "quantitative", "format": ".3~s", "title": "TTFT, s"},
        {"field": "x", "type": "quantitative", "format": ".2f", "title": "due at, s"},
    ]
    look = {"size": 9, "filled": True, "opacity": 0.45}
    limits = [
        _layer(
            _ONCE,
            "rule",
            "bad",
            {"x": None, "y": {"datum": slo.limit_s}},
            strokeDash=[2, 3],
            strokeWidth=1.8,
        )
        for slo in _limits(slos)
    ]
    layers = [_layer("ttft", "point", "ttft", {"tooltip": hover}, **look), *limits]
    heights = [height for _, height in timeline.ttft_s]
    y = seconds_axis("TTFT", [*heights, *(slo.limit_s or 0.0 for slo in _limits(slos))])
    scale = {"type": "log", "domain": [y.low, y.high], "nice": False}
    axis = {"labelExpr": y.labels, "values": log_ticks(y.low, y.high, 6)}
    return _panel("TTFT", 170, layers, scale=scale, axis=axis)


def _failures(timeline: Timeline) -> dict[str, Any]:
    colour = {"field": "colour", "type": "nominal", "scale": None, "legend": None}
    tooltip = {"field": "text", "type": "nominal"}
    encoding = {"color": colour, "x2": {"field": "x2"}, "tooltip": tooltip}
    return _panel("Failures/s", 70, [_layer("failed", "bar", "bad", encoding)], stack="zero")


def _share(title: str, name: str, colour: str) -> dict[str, Any]:
    scale = {"domain": [0, 1]}
    line = _layer(name, "line", colour, strokeWidth=1.5)
    return _panel(title, 60, [line], scale=scale, axis={"format": ".0%", "tickCount": 2})


def _preemptions() -> dict[str, Any]:
    return _panel("Preemptions", 60, [_layer("preemptions_total", "line", "bad", strokeWidth=1.5)])
