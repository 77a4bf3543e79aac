"""Several curves of one run, in a chart and a table: one for each class, or for each length combination."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ampacity.analysis.load_names import load_name
from ampacity.reports.charts.marks import (
    NARROW,
    WIDE,
    Chart,
    Plot,
    linear_axis,
    log_axis,
    seconds_axis,
    stage_state,
)
from ampacity.reports.charts.palette import CURVES
from ampacity.reports.render.figures import (
    DASH,
    by_load,
    count,
    exact,
    interval,
    seconds,
    significant,
)
from ampacity.reports.render.tables import Cell, Column, Table

Figures = Mapping[str, Any]
WORDS = {
    "ttft": "TTFT",
    "first_answer": "first answer",
    "e2e": "E2E",
    "itl": "ITL",
    "icl": "ICL",
    "tpot": "TPOT",
}


@dataclass(frozen=True)
class Curve:
    """``judged``: (a stage, what it says of this curve); ``capacity``: up to which load its SLOs hold."""

    label: str
    about: str
    judged: Sequence[tuple[Figures, Figures]]
    capacity: Figures
    binding: str | None  # text of the SLO whose percentile is drawn, if two stages have it


def class_curves(summary: Figures) -> list[Curve]:
    """One for each class of a workload that has several."""
    stages = by_load(summary)
    return [
        Curve(
            k["name"],
            ", ".join(k["slos"]),
            [(s, f) for s in stages if (f := (s.get("classes") or {}).get(k["name"]))],
            k,
            k["binding_slo"],
        )
        for k in summary.get("classes") or []
    ]


def length_curves(summary: Figures) -> list[Curve]:
    """The workload's own, and one for each further length combination that was swept; empty where there is none."""
    found, workload = [], summary.get("workload") or {}
    own = {
        side: (workload.get(side) or {}).get("p50") for side in ("input_tokens", "output_tokens")
    }
    for f in [{**summary, **own}, *summary["families"]] if summary.get("families") else []:
        label = f"all at {f['lengths']} lengths" if "lengths" in f else "the workload's own lengths"
        about = f"{'' if 'lengths' in f else 'p50 '}{_in_and_out(f)}"
        if "lengths" in f and f["classes"]:
            label = f"each class at its {f['lengths']} lengths"
            about = "; ".join(f"{name} {_in_and_out(k)}" for name, k in f["classes"].items())
        binding = summary["capacity"]["binding_slo"]  # the same for all of them
        found.append(Curve(label, about, [(s, s) for s in by_load(f)], f["capacity"], binding))
    return found


def _in_and_out(f: Figures) -> str:
    tokens = [
        DASH if f[side] is None else count(f[side]) for side in ("input_tokens", "output_tokens")
    ]
    return f"{tokens[0]} in, {tokens[1]} out"


def curve_charts(summary: Figures) -> list[Chart]:
    """Latency against load: of the classes, and of the length combinations."""
    classes, lengths = class_curves(summary), length_curves(summary)
    found = [
        _chart("lengths", "Latency by length of the requests", lengths, summary),
        _chart("classes", "Latency by class", classes, summary),
    ]
    return [chart for chart in found if chart is not None]


def _chart(name: str, title: str, curves: Sequence[Curve], summary: Figures) -> Chart | None:
    stages = [stage for curve in curves for stage, _ in curve.judged]
    is_open = any(stage.get("kind") == "open" for stage in stages)
    x, figure, unit = (
        ("offered_rps", "capacity_rps", "req/s")
        if is_open
        else ("concurrency_set", "users", "users")
    )
    drawn = [(curve, *_points(curve, x, summary)) for curve in curves[: len(CURVES)]]
    rows = [row for *_, points in drawn for row in points]
    loads, limits = [row["x"] for row in rows], [slo["limit_s"] for _, slo, _ in drawn if slo]
    if len(curves) < 2 or len(set(loads)) < 2:
        return None
    axis = (
        linear_axis("Offered rate (requests/s)", loads)
        if is_open
        else log_axis("Set concurrency", loads)
    )
    plot = Plot(axis, seconds_axis("Latency", [*(row["y"] for row in rows), *limits]))
    for colour, (curve, slo, points) in zip(CURVES, drawn, strict=False):
        label, kept = f"{curve.label}: {_name(slo)}", curve.capacity.get(figure)
        if slo:
            plot.y_rule(slo["limit_s"], colour, f"SLO {slo['text']}")
        if kept is not None:
            least = "at least " if curve.capacity["crossing"] == "lower_bound" else ""
            between = interval(curve.capacity.get("capacity_rps_ci")) if is_open else None
            label += f", SLOs kept up to {least}{significant(kept)} {unit}{f' ({between})' if between else ''}"
            plot.x_rule(kept, colour, label)
        plot.curve(points, colour, label)
    caption = "Dotted: the limit of an SLO. Upright: the highest load at which the SLOs are kept."
    if len(curves) > len(drawn):
        caption += f" {len(curves) - len(drawn)} more are in the table only."
    alt = f"{title}: {'; '.join(key.label for key in plot.keys)}."
    plot.state_keys(stages, summary)
    return Chart(name, title, alt, plot.spec(WIDE, 340), plot.keys, caption, plot.spec(NARROW, 340))


def _name(slo: Figures | None) -> str:
    return (
        f"{WORDS[slo['metric']]} p{exact(100 * slo['quantile'])} (SLO {slo['text']})"
        if slo
        else "TTFT p50"
    )


def _points(curve: Curve, x: str, summary: Figures) -> tuple[Figures | None, list[dict[str, Any]]]:
    """(an SLO, its percentile in each stage): of the one that binds, else of the first that two stages have; else TTFT p50."""
    timed = [slo for slo in summary.get("slos") or [] if slo.get("metric") in WORDS]
    timed.sort(key=lambda slo: (slo["text"] != curve.binding, slo.get("class") is None))
    rows: list[dict[str, Any]] = []
    for slo in [*timed, None]:
        rows = []
        for stage, figures in curve.judged:
            value = figures["ttft_from_schedule_s"].get("p50")
            if slo:
                value = next(
                    (
                        v["value_s"]
                        for v in figures.get("slo_verdicts") or []
                        if v["slo"] == slo["text"]
                    ),
                    None,
                )
            if value and stage.get(x):
                text = f"{curve.label} at {load_name(stage)}: {_name(slo)}: {seconds(value)}"
                rows.append(
                    {"x": stage[x], "y": value, "text": text, "state": stage_state(stage, summary)}
                )
        if len(rows) > 1:
            break
    return slo, rows


def curve_tables(summary: Figures) -> list[Table]:
    """Up to which load the SLOs of each class, and at each length combination, are kept."""
    found = []
    for title, curves in (("Lengths", length_curves(summary)), ("Classes", class_curves(summary))):
        table = Table(
            title,
            [
                Column("curve", text=True),
                Column("requests" if title == "Lengths" else "its SLOs", text=True, priority=4),
            ],
        )
        table.columns += [
            Column("SLOs kept", "up to req/s"),
            Column("interval", "req/s", 1),
            Column("C_max", "in flight"),
            Column("bound by", text=True, priority=2),
        ]
        for curve in curves:
            crossing = curve.capacity["crossing"]
            least = "≥ " if crossing == "lower_bound" else ""
            most = "≤ " if crossing == "saturated" else least
            usable = table.cell(curve.capacity, "capacity_rps", _signed(most))
            c_max = table.cell(curve.capacity, "c_max", _signed(least))
            bounds = (
                None if crossing == "saturated" else interval(curve.capacity.get("capacity_rps_ci"))
            )
            bound = table.cell(curve.capacity, "binding_slo", str)
            table.rows.append(
                [
                    Cell(curve.label),
                    Cell(curve.about or "none"),
                    usable,
                    Cell(bounds or DASH),
                    c_max,
                    bound,
                ]
            )
        found += [table] if table.rows else []
    return found


def _signed(sign: str) -> Callable[[Any], str]:
    return lambda value: sign + significant(value)
