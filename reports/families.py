"""Several curves of one run in a picture and a table: one for each class, or for each length combination."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reports.figures import count, exact, interval, load_of, seconds, significant
from reports.marks import (
    DASHED,
    NARROW,
    WIDE,
    Chart,
    Key,
    Plot,
    linear_axis,
    log_axis,
    seconds_axis,
    stage_state,
    state_keys,
    state_points,
)
from reports.palette import CURVES
from reports.tables import Cell, Column, Table, stages_table

WORDS = {"ttft": "TTFT", "first_answer": "first answer", "e2e": "E2E", "itl": "ITL", "icl": "ICL", "tpot": "TPOT"}  # fmt: skip


@dataclass(frozen=True)
class _Curve:
    """``judged``: (a stage, what it says of this curve); ``capacity``: up to which load the SLOs hold."""

    label: str
    judged: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]
    capacity: Mapping[str, Any]
    slo: Mapping[str, Any] | None  # whose percentile is drawn


def latency_by_class(summary: Mapping[str, Any]) -> Chart | None:
    """Each class's latency against the load of all classes, with its own limit."""
    classes = summary.get("classes") or []
    stages = summary.get("stages") or []
    curves = []
    for kind in classes:
        judged = [(s, s["classes"][kind["name"]]) for s in stages if kind["name"] in (s.get("classes") or {})]
        own = sorted(kind["slos"], key=lambda text: not text.startswith(f"{kind['name']}:"))
        curves.append(_Curve(kind["name"], judged, kind, _drawn_slo(summary, kind, own)))
    curves.sort(key=lambda curve: -sum(figures["requests"] for _, figures in curve.judged))
    broken = [k for k in classes if k["usable_rps"] is not None and k["crossing"] != "lower_bound"]
    first = min(broken, key=lambda kind: kind["usable_rps"], default=None)
    title = f"Class {first['name']} is the first to break its SLOs" if first else "Latency by class"
    return _chart("classes", title, curves)


def latency_by_lengths(summary: Mapping[str, Any]) -> Chart | None:
    """The workload's own curve and those with every request at one quantile of its lengths."""
    families = summary.get("families") or []
    if not families:
        return None
    slo = _drawn_slo(summary, summary["capacity"], [str(s["text"]) for s in summary.get("slos") or []])
    curves = [
        _Curve(_family_name(f), [(s, s) for s in f["stages"]], f["capacity"], slo)
        for f in [summary, *families]
    ]
    return _chart("lengths", "Latency by length of the requests", curves)


def _family_name(family: Mapping[str, Any]) -> str:
    return f"all at {family['lengths']} lengths" if "lengths" in family else "the workload's own lengths"


def _drawn_slo(
    summary: Mapping[str, Any], capacity: Mapping[str, Any], texts: Sequence[str]
) -> Mapping[str, Any] | None:
    """The SLO that binds, else the first of ``texts`` that is a time."""
    timed = {str(slo["text"]): slo for slo in summary.get("slos") or [] if slo.get("metric") in WORDS}
    return next((timed[t] for t in (capacity.get("binding_slo"), *texts) if t in timed), None)


def _points(curve: _Curve, x: str) -> tuple[str, list[dict[str, Any]]]:
    """(what is drawn, its points): the SLO's percentile where two stages have it, else TTFT p99, else TTFT p50."""
    found: list[tuple[str, list[dict[str, Any]]]] = []
    for what, value_of in _drawable(curve.slo):
        rows = [
            {"x": stage[x], "y": value, "state": stage_state(stage), "text": f"{curve.label} at {load_of(stage)}: {what} {seconds(value)}"}
            for stage, figures in curve.judged
            if stage.get(x) and (value := value_of(figures))
        ]  # fmt: skip
        found.append((what, sorted(rows, key=lambda row: row["x"])))
    return next((f for f in found if len(f[1]) > 1), found[-1])


def _drawable(slo: Mapping[str, Any] | None) -> list[tuple[str, Any]]:
    def ttft(p: str) -> Any:
        return lambda figures: (figures.get("ttft_from_schedule_s") or {}).get(p)

    always = [("TTFT p99", ttft("p99")), ("TTFT p50", ttft("p50"))]
    if slo is None:
        return always

    def of_slo(figures: Mapping[str, Any]) -> Any:
        verdicts = figures.get("slo_verdicts") or []
        return next((v["value_s"] for v in verdicts if v["slo"] == slo["text"]), None)

    return [(f"{WORDS[slo['metric']]} p{exact(100 * slo['quantile'])}", of_slo), *always]


def _chart(name: str, title: str, curves: Sequence[_Curve]) -> Chart | None:
    shown = curves[: len(CURVES)]
    stages = [stage for curve in shown for stage, _ in curve.judged]
    is_open = any(stage.get("kind") == "open" for stage in stages)
    x, figure, unit = (
        ("offered_rps", "usable_rps", "req/s") if is_open else ("concurrency_set", "c_max", "in flight")
    )
    drawn = [(curve, *_points(curve, x)) for curve in shown]
    rows = [row for *_, points in drawn for row in points]
    if len(drawn) < 2 or len({row["x"] for row in rows}) < 2:
        return None
    limits = [curve.slo["limit_s"] for curve in shown if curve.slo]
    slos = {str(curve.slo["text"]) for curve in shown if curve.slo}
    one = len(slos) == 1 and len(limits) == len(shown)  # an SLO for all
    loads = [row["x"] for row in rows]
    axis = linear_axis("Offered rate (requests/s)", loads) if is_open else log_axis("Set concurrency", loads)
    plot, keys = Plot(axis, seconds_axis("Latency", [*(row["y"] for row in rows), *limits])), []
    if one:
        plot.y_rule(limits[0], "muted", f"SLO {min(slos)}")
        keys.append(Key(f"SLO {min(slos)}", "muted", "dots"))
    for colour, (curve, what, points) in zip(CURVES, drawn, strict=False):
        median, label = what.endswith("p50"), f"{curve.label}: {what}"
        if curve.slo and not one:
            plot.y_rule(curve.slo["limit_s"], colour, f"SLO {curve.slo['text']}")
            label += f", SLO {curve.slo['text']}"
        if curve.capacity.get(figure) is not None:
            least = "at least " if curve.capacity["crossing"] == "lower_bound" else ""
            kept = f"kept up to {least}{significant(curve.capacity[figure])} {unit}"
            plot.x_rule(curve.capacity[figure], colour, f"{curve.label}: SLOs {kept}")
            label += f", SLOs {kept}"
        plot.line(points, colour, DASHED if median else None)
        state_points(plot, points, colour)
        keys.append(Key(label, colour, "dash-ring" if median else "line-dot"))
    said = ["Dotted: the limit. Upright: the highest load at which the SLOs are kept."] if limits else []
    if len(curves) > len(shown):
        said.append(f"{len(curves) - len(shown)} more are in the table only.")
    alt = f"{title}, {len(drawn)} curves: {'; '.join(key.label for key in keys)}."
    caption, keys = " ".join(said), [*keys, *state_keys(stages)]
    return Chart(name, title, alt, plot.spec(WIDE, 340), keys, caption, plot.spec(NARROW, 340))


def classes_table(summary: Mapping[str, Any]) -> Table | None:
    """For each class the load of all classes up to which it keeps its SLOs; None where there are not several."""
    heads = [
        Column("class", text=True),
        Column("keeps its SLOs up to", "req/s of all"),
        Column("interval", "req/s", 2),
    ]
    heads += [Column("C_max", "in flight", 1), Column("bound by", text=True), Column("its SLOs", text=True, priority=3)]  # fmt: skip
    table = Table("Classes", heads)
    for kind in summary.get("classes") or []:
        cells = _capacity_cells(table, kind)
        bound = table.cell(kind, "binding_slo", str)
        table.rows.append(
            [Cell(str(kind["name"])), *cells[:3], bound, Cell(", ".join(kind["slos"]) or "none")]
        )
    return table if table.rows else None


def lengths_families_table(summary: Mapping[str, Any]) -> Table | None:
    """The workload's own curve beside those at other lengths; None where there are no others."""
    families = summary.get("families") or []
    heads = [Column("every request", text=True), Column("input", "tokens"), Column("output", "tokens")]
    heads += [Column("usable rate", "req/s"), Column("interval", "req/s", 1), Column("C_max", "in flight"), Column("interval", "in flight", 2)]  # fmt: skip
    table = Table("Lengths", [*heads, Column("knee", "req/s", 3)])
    workload = summary.get("workload") or {}
    own = {
        f"{side}_tokens": (workload.get(f"{side}_tokens") or {}).get("p50") for side in ("input", "output")
    }
    for family in [{**summary, **own}, *families] if families else []:
        tokens = [table.cell(family, f"{side}_tokens", count) for side in ("input", "output")]
        if "lengths" not in family:
            tokens = [Cell(f"p50 {cell.text}", cell.note) for cell in tokens]
        knee = family.get("knee") or {}
        row = [Cell(_family_name(family)), *tokens, *_capacity_cells(table, family["capacity"])]
        region = interval(knee.get("region_rps"))
        table.rows.append([*row, Cell(region) if region else table.cell(knee, "rps", significant)])
    return table if table.rows else None


def _capacity_cells(table: Table, capacity: Mapping[str, Any]) -> list[Cell]:
    """Usable rate and its interval, C_max and its interval."""
    least = "≥ " if capacity.get("crossing") == "lower_bound" else ""
    cells = []
    for figure in ("usable_rps", "c_max"):
        cells.append(table.cell(capacity, figure, lambda value: least + significant(value)))
        bounds = interval(capacity.get(f"{figure}_ci"))
        cells.append(Cell(bounds) if bounds else table.cell(capacity, f"{figure}_ci", str))
    return cells


def family_stages(summary: Mapping[str, Any]) -> list[Table]:
    """The table of stages of each other length combination."""
    found = []
    for family in summary.get("families") or []:
        table = stages_table({**summary, "stages": family["stages"]})
        table.title = f"Stages with {_family_name(family)}"
        found.append(table)
    return found
