"""The parts of charts: axes and layers (lines, points, bands, rules).

Charts carry no legend and no title of their own: the page sets both as text, which wraps and is
legible in every theme. Every figure a mark shows is in its tooltip.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ampacity.analysis.contract.stage import Stage
from ampacity.analysis.contract.summary import SloLimit, Summary
from ampacity.analysis.stage.throughput import REQUESTS_MIN, steady_state
from ampacity.reports.charts.palette import light

FONT = "Helvetica Neue, Helvetica, Arial, Liberation Sans, sans-serif"
WIDE, NARROW = 980, 380  # pixels of the plot itself
SECONDS_LABEL = (
    "datum.value < 1e-3 ? format(datum.value * 1e6, '.3~r') + ' µs' : datum.value < 1 ?"
    " format(datum.value * 1e3, '.3~r') + ' ms' : format(datum.value, ',.3~r') + ' s'"
)
DASHED, DOTTED = [5, 4], [2, 2]
ZOOM = {
    "name": "zoom",
    "select": {"type": "interval", "zoom": "wheel![event.ctrlKey]"},  # a bare wheel scrolls
    "bind": "scales",
}
SHAPES = {
    "steady": "circle",
    "growing": "diamond",
    "unsettled": "triangle-down",
    "client": "cross",
    "short": "square",
}
STATES = {
    "growing": "no steady state: requests in flight keep growing",
    "unsettled": "no steady state shown",
    "client": "limited by the load generator: no finding",
    "short": "no steady state, or too short to show one: no part of the curve",
}
CURVE = ("steady", "growing", "unsettled")
FILLS = 10  # times as many requests must have ended as were in flight


@dataclass(frozen=True)
class Key:
    """An entry of a chart's legend. ``shape``: see the macro ``swatch`` of the page."""

    label: str
    colour: str
    shape: str
    switch: str = ""  # the chart's parameter that shows it


@dataclass(frozen=True)
class Chart:
    """A Vega-Lite ``spec`` with its words: ``title``, and ``alt`` for screen readers."""

    name: str
    title: str
    alt: str
    spec: dict[str, Any]
    keys: list[Key] = field(default_factory=list)
    caption: str = ""

    @property
    def off(self) -> list[str]:
        """Return the switches that are off at first."""
        return [p["name"] for p in self.spec.get("params", ()) if p["value"] is False]


@dataclass(frozen=True)
class Axis:
    """One axis; ``log`` needs a positive ``low``; ``labels`` is a Vega expression."""

    title: str
    low: float
    high: float
    log: bool = False
    labels: str | None = None
    ticks: Sequence[float] | None = None

    def at(self, share: float) -> float:
        """Return the value at a share of the axis' length."""
        if self.log:
            return float(self.low * (self.high / self.low) ** share)
        return self.low + share * (self.high - self.low)


def log_ticks(low: float, high: float, most: int = 10) -> list[float]:
    """Return 1, 2, 5 times powers of ten in [low, high]; the powers alone above ``most``."""
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    for steps in ((1, 2, 5), (1,)):
        ticks = [
            float(f"{m}e{k}") for k in decades for m in steps if low <= float(f"{m}e{k}") <= high
        ]
        if len(ticks) <= most:
            break
    return ticks


def log_axis(title: str, values: Sequence[float], labels: str | None = None) -> Axis:
    """Return a logarithmic axis with some room around the positive ``values``."""
    positive = [v for v in values if v > 0] or [1.0]
    low, high = min(positive) / 1.25, max(positive) * 1.25
    if high / low < 4:
        low, high = low / 1.5, high * 1.5
    return Axis(title, low, high, True, labels, log_ticks(low, high))


def linear_axis(title: str, values: Sequence[float]) -> Axis:
    """Return a linear axis from 0 to a little above the largest of ``values``."""
    return Axis(title, 0.0, 1.06 * (max(values, default=0.0) or 1.0))


def seconds_axis(title: str, values: Sequence[float]) -> Axis:
    return log_axis(title, values, SECONDS_LABEL)


def _mark(kind: str, colour: str, **look: Any) -> dict[str, Any]:
    return {"type": kind, "color": light(colour), **look}


def _channel(name: str, axis: Axis) -> dict[str, Any]:
    kind, ends = "log" if axis.log else "linear", [axis.low, axis.high]
    scale = {"type": kind, "domain": ends, "nice": False}
    scale |= {} if axis.log else {"zero": False}
    labels = {"labelExpr": axis.labels} if axis.labels else {"format": ",~r"}
    ticks = {"tickCount": 7} if axis.ticks is None else {"values": list(axis.ticks)}
    return {
        "field": name,
        "type": "quantitative",
        "title": axis.title,
        "scale": scale,
        "axis": labels | ticks,
    }


_TEXT = {"field": "text", "type": "nominal"}
TOOLTIP = {"description": _TEXT, "tooltip": _TEXT}  # of a static picture, and of a live one
TO_X2, TO_Y2 = {"x2": {"field": "x2"}}, {"y2": {"field": "y2"}}


class Plot:
    """Layers over one pair of axes: bands at the back, the rest in the order of the calls."""

    def __init__(self, x: Axis, y: Axis) -> None:
        self.x, self.y = x, y
        self._layers: list[dict[str, Any]] = []
        self._bands: list[dict[str, Any]] = []  # drawn below everything else
        self._datasets: dict[str, list[dict[str, Any]]] = {}
        self._params: list[dict[str, Any]] = []
        self.keys: list[Key] = []  # of the legend

    def switch(self, name: str, label: str, on: bool) -> None:
        """Add a box to tick, which shows the curves with this ``switch``."""
        bind = {"input": "checkbox", "name": label}
        self._params.append({"name": name, "value": on, "bind": bind})

    def key(self, label: str, colour: str, shape: str) -> None:
        self.keys.append(Key(label, colour, shape))

    def curve(
        self,
        rows: list[dict[str, Any]],
        colour: str,
        label: str,
        dashed: bool = False,
        size: int = 52,
        intervals: Sequence[dict[str, Any]] = (),
        dotted: bool = False,
        width: float = 2,
        switch: str = "",
    ) -> None:
        """Draw ``rows`` (x, y, text, state) as a line with symbols; dashed: hollow ones."""
        first = len(self._layers)
        self.line(rows, colour, DASHED if dashed else DOTTED if dotted else None, width)
        self.bars_between(list(intervals), colour)
        for state, shape in SHAPES.items():
            chosen = [r for r in rows if r.get("state", "steady") == state]
            self.points(chosen, colour, shape, not dashed and state != "short", size)
        shape = "dash-ring" if dashed else "dots-dot" if dotted else "line-dot"
        self.keys.append(Key(label, colour, shape, switch))
        for layer in self._layers[first:] if switch else ():
            layer["transform"] = [{"filter": switch}]

    def state_keys(self, stages: Sequence[Stage], summary: Summary) -> None:
        """Add the legend of the symbols that are not of a steady stage."""
        seen = {stage_state(stage, summary) for stage in stages}
        self.keys += [
            Key(text, "muted", SHAPES[state]) for state, text in STATES.items() if state in seen
        ]

    def _layer(
        self, rows: list[dict[str, Any]], mark: dict[str, Any], **channels: Any
    ) -> dict[str, Any]:
        name = f"layer{len(self._datasets)}"
        self._datasets[name] = rows
        encoding = {"x": _channel("x", self.x), "y": _channel("y", self.y), **channels}
        return {"data": {"name": name}, "mark": mark, "encoding": encoding}

    def line(
        self,
        rows: list[dict[str, Any]],
        colour: str,
        dash: list[int] | None = None,
        width: float = 2,
    ) -> None:
        """Draw a line through ``rows`` in their order, without stages that measure nothing."""
        rows = [r for r in rows if r.get("state", "steady") in CURVE]
        if len(rows) < 2:
            return
        rows = [{"x": r["x"], "y": r["y"], "order": i} for i, r in enumerate(rows)]
        mark = _mark("line", colour, strokeWidth=width, strokeJoin="round", clip=True, aria=False)
        mark |= {"strokeDash": dash} if dash else {}
        order = {"field": "order", "type": "quantitative"}
        self._layers.append(self._layer(rows, mark, order=order))

    def points(
        self,
        rows: list[dict[str, Any]],
        colour: str,
        shape: str = "circle",
        filled: bool = True,
        size: int = 52,
    ) -> None:
        """Draw a symbol at each of ``rows`` (x, y, text); ``text`` is its tooltip."""
        look = {"shape": shape, "filled": filled, "size": size}
        if rows:
            mark = _mark("point", colour, **look, strokeWidth=1.8)
            self._layers.append(self._layer(rows, mark, **TOOLTIP))

    def bars_between(self, rows: list[dict[str, Any]], colour: str) -> None:
        """Draw vertical intervals: ``rows`` hold x, y and y2."""
        mark = _mark("rule", colour, strokeWidth=1.4, opacity=0.75, clip=True, aria=False)
        if rows:
            self._layers.append(self._layer(rows, mark, **TO_Y2))

    def x_band(self, bounds: Sequence[float | None] | None, colour: str, text: str) -> None:
        """Draw a vertical band; an open side reaches to the edge of the plot."""
        self._rectangle(bounds, self.y.high, colour, 0.17, text)

    def x_strip(self, bounds: Sequence[float | None] | None, colour: str, text: str) -> None:
        """Draw a strip along the lower edge, which a band over the same range does not hide."""
        self._rectangle(bounds, self.y.at(0.03), colour, 1.0, text)

    def _rectangle(
        self,
        bounds: Sequence[float | None] | None,
        top: float,
        colour: str,
        opacity: float,
        text: str,
    ) -> None:
        if not bounds or len(bounds) != 2 or (bounds[0] is None and bounds[1] is None):
            return
        low = self.x.low if bounds[0] is None else max(bounds[0], self.x.low)
        high = self.x.high if bounds[1] is None else min(bounds[1], self.x.high)
        rows = [{"x": low, "x2": high, "y": self.y.low, "y2": top, "text": text}]
        mark = _mark("rect", colour, opacity=opacity)
        self._bands.append(self._layer(rows, mark, **TO_X2, **TO_Y2, **TOOLTIP))

    def x_rule(self, value: float | None, colour: str, text: str) -> None:
        """Draw a vertical line through the whole plot."""
        if value is None or not self.x.low <= value <= self.x.high:
            return
        rows = [{"x": value, "y": self.y.low, "y2": self.y.high, "text": text}]
        mark = _mark("rule", colour, strokeWidth=2)
        self._layers.append(self._layer(rows, mark, **TO_Y2, **TOOLTIP))

    def slo(self, slo: SloLimit, colour: str) -> None:
        """Draw the limit of an SLO, with its key."""
        self.y_rule(slo.limit_s or 0.0, colour, f"SLO {slo.text}")
        self.key(f"SLO {slo.text}", colour, "dots")

    def y_rule(self, value: float, colour: str, text: str) -> None:
        """Draw a horizontal dashed line through the whole plot: a limit."""
        if not self.y.low <= value <= self.y.high:
            return
        rows = [{"x": self.x.low, "x2": self.x.high, "y": value, "text": text}]
        mark = _mark("rule", colour, strokeWidth=1.8, strokeDash=[2, 3])
        self._layers.append(self._layer(rows, mark, **TO_X2, **TOOLTIP))

    def spec(self, width: int, height: int, zoom: bool = False) -> dict[str, Any]:
        """Return the Vega-Lite spec of all layers; ``zoom``: by dragging and Ctrl + wheel."""
        layers = self._bands + self._layers or [self._layer([], {"type": "point"})]
        if zoom:
            layers[-1] = layers[-1] | {"params": [ZOOM]}
            for layer in layers:
                layer["mark"]["clip"] = True
        chart = {"layer": layers, "width": width, "height": height, "params": self._params}
        return with_look(chart, self._datasets)


def with_look(chart: dict[str, Any], datasets: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return ``chart`` as a spec with its data and the report's fonts and lines."""
    axis = {
        "labelFont": FONT,
        "titleFont": FONT,
        "labelFontSize": 12,
        "titleFontSize": 12.5,
        "labelColor": light("muted"),
        "titleColor": light("ink"),
        "titleFontWeight": "normal",
        "titlePadding": 10,
        "labelPadding": 5,
        "gridColor": light("grid"),
        "domainColor": light("axis"),
        "tickColor": light("axis"),
        "tickSize": 4,
        "labelOverlap": "greedy",
        "labelSeparation": 8,
        "labelFlush": False,
    }
    config = {
        "background": "transparent",
        "view": {"stroke": None},
        "axis": axis,
        "padding": 4,
        "font": FONT,
    }
    return {**chart, "datasets": datasets, "config": config}


def stage_state(stage: Stage, summary: Summary) -> str:
    """Return a name of SHAPES.

    A search brackets with stages that tell a side of the limit and no figure: too few requests, or
    hardly more than were in flight, which hides what the rate is.
    """
    few = False
    if stage.client_limited:
        return "client"
    if summary.search:
        window_s = stage.window.end_s - stage.window.start_s
        ended = (stage.achieved_rps or 0.0) * window_s
        few = stage.requests < REQUESTS_MIN or ended < FILLS * (stage.concurrency or 0.0)
    if few or stage.stable is None or stage.ended_early:
        return "short"
    steady, _ = steady_state(stage)
    return {"no": "growing", "not shown": "unsettled"}.get(steady, "steady")
