"""Rates over the load as Vega-Lite specs: what was achieved, and what was good."""

from collections.abc import Callable, Sequence
from typing import Any

from ampacity.analysis.contract.capacity import Goodput
from ampacity.analysis.contract.stage import Stage
from ampacity.analysis.contract.summary import Summary
from ampacity.analysis.stage.throughput import steady_state
from ampacity.reports.charts import marks
from ampacity.reports.render.figures import (
    by_load,
    exact,
    interval,
    offered_at,
    peak_basis,
    peak_text,
    rate,
    share,
)

Point = dict[str, Any]
Load = Callable[[Stage], float | None]


def with_load(summary: Summary, load: Load) -> list[tuple[float, Stage]]:
    """Return the stages that have a place on an axis of a positive load, with that load."""
    return [(x, s) for s in by_load(summary.stages) if (x := load(s) or 0.0) > 0]


def achieved_by_offered(summary: Summary) -> marks.Chart | None:
    """Draw the achieved against the offered rate of the open stages, with the diagonal."""
    placed = [
        (x, s.achieved_rps, s)
        for x, s in with_load(summary, lambda s: s.offered_rps)
        if s.achieved_rps is not None
    ]
    if len(placed) < 2:
        return None
    top = [x for x, *_ in placed]
    plot = marks.Plot(
        marks.linear_axis("Offered rate (requests/s)", top),
        marks.linear_axis("Achieved rate (requests/s)", top),
    )
    _diagonal(plot, "achieved = offered")
    rows = [
        {
            "x": x,
            "y": y,
            "state": marks.stage_state(s, summary),
            "text": f"{s.name} offered: {rate(y)} achieved",
        }
        for x, y, s in placed
    ]
    plot.curve(rows, "ttft", "achieved rate")
    stages = [s for *_, s in placed]
    plot.state_keys(stages, summary)
    title = _follows(stages, [s for s in stages if marks.stage_state(s, summary) in marks.CURVE])
    alt = f"Achieved against offered rate of {len(stages)} stages. {title}."
    return marks.Chart("achieved", title, alt, plot.spec(marks.NARROW, 290), plot.keys)


def _follows(stages: Sequence[Stage], drawn: Sequence[Stage]) -> str:
    loads = [(steady_state(s)[0], s.offered_rps or 0.0, s.achieved_rps or 0.0) for s in drawn]
    growing = {offered: state for state, offered, _ in loads if state in ("no", "not shown")}
    kept = [x for state, x, achieved in loads if state == "yes" and achieved >= 0.9 * x]
    if kept and not growing and len(kept) == len(drawn):
        up_to = "" if len(drawn) == len(stages) else f" up to {exact(max(kept))} requests/s"
        return f"The achieved rate follows every rate offered{up_to}"
    if growing and kept and max(kept) < min(growing):
        word = "not" if growing[min(growing)] == "no" else "not surely"
        return f"Keeps up with {exact(max(kept))} requests/s offered, {word} with {exact(min(growing))}"
    return "Achieved against offered rate"


def _diagonal(plot: marks.Plot, label: str) -> None:
    end = min(plot.x.high, plot.y.high)
    plot.line([{"x": 0, "y": 0}, {"x": end, "y": end}], "planned", marks.DASHED, 1.5)
    plot.key(label, "planned", "dash")


def goodput_by_load(summary: Summary) -> marks.Chart | None:
    """Draw goodput against the offered rate, or the set concurrency."""
    known = [s for s in by_load(summary.stages) if s.goodput_rps is not None]
    is_open = all(s.offered_rps is not None for s in known)
    loads = ((s.offered_rps if is_open else s.concurrency_set, s) for s in known)
    placed = [(x, s) for x, s in loads if x is not None]
    if len(placed) < 2 or summary.burst:  # two loads of one burst are no curve
        return None
    estimate = _peak_rows(summary.goodput) if is_open else []
    xs = [*(x for x, _ in placed), *(row["x"] for row in estimate)]
    ys = [*(s.goodput_rps or 0.0 for _, s in placed), *(row["y2"] for row in estimate)]
    if is_open:
        x_axis = marks.linear_axis("Offered rate (requests/s)", xs)
        plot = marks.Plot(x_axis, marks.linear_axis("Goodput (requests/s)", [*xs, *ys]))
        _diagonal(plot, "goodput = offered")
    else:
        x_axis = marks.log_axis("Set concurrency (requests)", xs)
        plot = marks.Plot(x_axis, marks.linear_axis("Goodput (requests/s)", ys))
    rows = [
        {
            "x": x,
            "y": s.goodput_rps,
            "state": marks.stage_state(s, summary),
            "text": _goodput_text(s),
        }
        for x, s in placed
    ]
    plot.curve(rows, "good", "goodput: requests that met every SLO")
    caption = ""
    if estimate:
        plot.bars_between([{**row, "y": row["y1"]} for row in estimate], "usable")
        plot.points(estimate, "usable", "diamond", filled=False, size=80)
        plot.key(str(estimate[0]["text"]), "usable", "diamond-ring")
        caption = f"The peak is {peak_basis(summary)}."
    plot.state_keys([s for _, s in placed], summary)
    title = _goodput_title(summary.goodput)
    alt = f"{title}. {len(placed)} stages."
    return marks.Chart("goodput", title, alt, plot.spec(marks.NARROW, 290), plot.keys, caption)


def _goodput_title(peak: Goodput) -> str:
    if not peak.peak_rps:
        return "Goodput by load" if peak.peak_rps is None else "No request met every SLO"
    at = f", at {offered} offered" if (offered := offered_at(peak)) else ""
    return f"Goodput peaks at {peak_text(peak, 'requests/s')}{at}"


def _peak_rows(peak: Goodput) -> list[Point]:
    """Return the estimated peak with its 95 % interval; nothing of one that is a stage's own."""
    if peak.basis != "pooled" or peak.peak_rps_ci is None:
        return []
    low, high = peak.peak_rps_ci
    text = f"estimated peak {rate(peak.peak_rps)} (95 % interval {interval([low, high])})"
    return [{"x": peak.at_offered_rps, "y": peak.peak_rps, "y1": low, "y2": high, "text": text}]


def _goodput_text(stage: Stage) -> str:
    attained = stage.slo_attainment
    part = "" if attained is None else f", {share(attained)} of requests"
    return f"{stage.name}: goodput {rate(stage.goodput_rps)}{part}"
