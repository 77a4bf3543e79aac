"""Several curves of one run, in a chart and a table: of classes, or of length combinations."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ampacity.analysis.contract.capacity import Family, FamilyTokens, Limit
from ampacity.analysis.contract.stage import Stage, StageClass
from ampacity.analysis.contract.summary import SloLimit, Summary
from ampacity.analysis.slo import METRICS
from ampacity.reports.charts import marks
from ampacity.reports.charts.palette import CURVES
from ampacity.reports.render.figures import (
    DASH,
    NO_REASON,
    by_load,
    count,
    exact,
    interval,
    seconds,
    significant,
)
from ampacity.reports.render.table import Cell, Column, Rows, Table


@dataclass(frozen=True)
class Curve:
    """``judged``: stages, and the figures of this curve in each."""

    label: str
    about: str
    judged: Sequence[tuple[Stage, Stage | StageClass]]
    capacity: Limit  # up to which load its SLOs hold
    binding: str | None  # text of the SLO whose percentile is drawn, if two stages have it


def class_curves(summary: Summary) -> list[Curve]:
    """Return a curve for each class of a workload that has several."""
    stages = by_load(summary.stages)
    return [
        Curve(
            k.name,
            ", ".join(k.slos),
            [(s, s.classes[k.name]) for s in stages if k.name in s.classes],
            k,
            k.binding_slo,
        )
        for k in summary.classes
    ]


def length_curves(summary: Summary) -> list[Curve]:
    """Return the workload's own curve and those of further length combinations, if any."""
    if not summary.families:
        return []
    own, held = (
        (summary.workload.get(side) or {}).get("p50") for side in ("input_tokens", "output_tokens")
    )
    about = f"p50 {_in_and_out(FamilyTokens(input_tokens=own, output_tokens=held))}"
    binding = summary.capacity.binding_slo  # the same for all of them
    stages = [(s, s) for s in by_load(summary.stages)]
    found = [Curve("the workload's own lengths", about, stages, summary.capacity, binding)]
    for f in summary.families:
        label, about = f"all at {f.lengths} lengths", _in_and_out(f)
        if f.classes:
            label = f"each class at its {f.lengths} lengths"
            about = "; ".join(f"{name} {_in_and_out(k)}" for name, k in f.classes.items())
        stages = [(s, s) for s in by_load(f.stages)]
        found.append(Curve(label, about, stages, f.capacity, binding))
    return found


def _in_and_out(f: Family | FamilyTokens) -> str:
    return f"{count(f.input_tokens)} in, {count(f.output_tokens)} out"


def curve_charts(summary: Summary) -> list[marks.Chart]:
    """Draw latency against load: of the classes, and of the length combinations."""
    classes, lengths = class_curves(summary), length_curves(summary)
    found = [
        _chart("lengths", "Latency by length of the requests", lengths, summary),
        _chart("classes", "Latency by class", classes, summary),
    ]
    return [chart for chart in found if chart is not None]


def _chart(name: str, title: str, curves: Sequence[Curve], summary: Summary) -> marks.Chart | None:
    stages = [stage for curve in curves for stage, _ in curve.judged]
    is_open = any(stage.kind == "open" for stage in stages)
    drawn = [(curve, *_points(curve, is_open, summary)) for curve in curves[: len(CURVES)]]
    rows = [row for *_, points in drawn for row in points]
    loads = [row["x"] for row in rows]
    if len(curves) < 2 or len(set(loads)) < 2:
        return None
    limits = [slo.limit_s for _, slo, _ in drawn if slo and slo.limit_s]
    axis = marks.log_axis("Set concurrency", loads)
    if is_open:
        axis = marks.linear_axis("Offered rate (requests/s)", loads)
    plot = marks.Plot(axis, marks.seconds_axis("Latency", [*(row["y"] for row in rows), *limits]))
    for colour, (curve, slo, points) in zip(CURVES, drawn, strict=False):
        _draw(plot, colour, curve, slo, points, is_open)
    caption = "Dotted: the limit of an SLO. Upright: the highest load at which the SLOs are kept."
    if len(curves) > len(drawn):
        caption += f" {len(curves) - len(drawn)} more are in the table only."
    alt = f"{title}: {'; '.join(key.label for key in plot.keys)}."
    plot.state_keys(stages, summary)
    return marks.Chart(name, title, alt, plot.spec(marks.WIDE, 340), plot.keys, caption)


def _draw(
    plot: marks.Plot,
    colour: str,
    curve: Curve,
    slo: SloLimit | None,
    points: list[dict[str, Any]],
    is_open: bool,
) -> None:
    label, held = f"{curve.label}: {_name(slo)}", curve.capacity
    kept, unit = (held.capacity_rps, "req/s") if is_open else (held.users, "users")
    if slo:
        plot.y_rule(slo.limit_s or 0.0, colour, f"SLO {slo.text}")
    if kept is not None:
        least = "at least " if held.crossing == "lower_bound" else ""
        bounds = interval(held.capacity_rps_ci) if is_open else None
        between = f" ({bounds})" if bounds else ""
        label += f", SLOs kept up to {least}{significant(kept)} {unit}{between}"
        plot.x_rule(kept, colour, label)
    plot.curve(points, colour, label)


def _name(slo: SloLimit | None) -> str:
    if slo is None:
        return "TTFT p50"
    return f"{METRICS[slo.metric].label} p{exact(100 * (slo.quantile or 0.0))} (SLO {slo.text})"


def _points(
    curve: Curve, is_open: bool, summary: Summary
) -> tuple[SloLimit | None, list[dict[str, Any]]]:
    """Return an SLO and its percentile in each stage.

    The SLO that binds, else the first that two stages have; else None and TTFT p50.
    """
    timed = [
        slo for slo in summary.slos if slo.metric in METRICS and METRICS[slo.metric].stage_field
    ]
    timed.sort(key=lambda slo: (slo.text != curve.binding, slo.class_ is None))
    rows: list[dict[str, Any]] = []
    for slo in [*timed, None]:
        rows = []
        for stage, figures in curve.judged:
            x = stage.offered_rps if is_open else stage.concurrency_set
            value = figures.ttft_from_schedule_s.p50
            if slo:
                values = (v.value_s for v in figures.slo_verdicts if v.slo == slo.text)
                value = next(values, None)
            if value and x:
                text = f"{curve.label} at {stage.name}: {_name(slo)}: {seconds(value)}"
                rows.append(
                    {"x": x, "y": value, "text": text, "state": marks.stage_state(stage, summary)}
                )
        if len(rows) > 1:
            break
    return slo, rows


def curve_tables(summary: Summary) -> list[Table]:
    """Return up to which load the SLOs of each class, and of each length combination, are met."""
    found = [("Lengths", length_curves(summary)), ("Classes", class_curves(summary))]
    return [_table(title, curves) for title, curves in found if curves]


def _table(title: str, curves: Sequence[Curve]) -> Table:
    rows = Rows(title, curves)
    rows.words("curve", lambda c: c.label)
    about = Column("requests" if title == "Lengths" else "its SLOs", text=True, priority=4)
    rows.column(about, lambda _, c: Cell(c.about or "none"))
    rows.column(
        Column("SLOs kept", "up to req/s"),
        lambda table, c: _limit(table, c, c.capacity.capacity_rps, "≤ "),
    )
    rows.column(Column("interval", "req/s", 1), lambda _, c: _interval(c.capacity))
    rows.column(
        Column("C_max", "in flight"), lambda table, c: _limit(table, c, c.capacity.c_max, "")
    )
    rows.column(
        Column("bound by", text=True, priority=2),
        lambda table, c: table.cell(
            c.capacity.binding_text or None, str, c.capacity.reason or NO_REASON
        ),
    )
    return rows.done()


def _limit(table: Table, curve: Curve, value: float | None, saturated: str) -> Cell:
    """Return a highest load, marked where it is a bound."""
    sign = {"lower_bound": "≥ ", "saturated": saturated}.get(curve.capacity.crossing, "")
    return table.cell(value, lambda v: sign + significant(v), curve.capacity.reason or NO_REASON)


def _interval(capacity: Limit) -> Cell:
    bounds = None if capacity.crossing == "saturated" else interval(capacity.capacity_rps_ci)
    return Cell(bounds or DASH)
