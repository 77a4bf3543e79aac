"""A comparison: in a terminal, as Markdown, as CSV, as one HTML file with charts."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampacity.analysis.change.results import Comparison, Shift
from ampacity.reports.change.compare_tables import (
    at_level,
    bounds,
    change_text,
    figure_text,
    main_tables,
    quantile_name,
    shift_tables,
    tables,
    verdict_text,
    winners_table,
)
from ampacity.reports.change.gate import escaped
from ampacity.reports.charts.marks import NARROW, WIDE, Axis, Chart, Plot, linear_axis, seconds_axis
from ampacity.reports.pages.page import embedded_json, render_page, write_page
from ampacity.reports.render.figures import at_least
from ampacity.reports.render.terminal import Entry, Screen

if TYPE_CHECKING:
    from rich.console import Console

RUNS = 6  # that a screen names
COLOURS = ("ttft", "e2e", "good", "bad", "knee", "step4", "planned", "ink")  # of the runs
METHOD = (
    "A run wins a line where it is at least 2 % better (of requests that failed or were cut off: "
    "at all) and significantly so: 5 % of error over all lines (Holm), and over all quantiles. "
    "Equal: the whole 95 % interval lies within 3 %. Open: neither; the run in brackets leads. "
    "Each interval holds the change of the two figures and the change that is tested, which is in "
    "the JSON (docs/compare.md). ≥: the interval of this p99 has no upper end."
)
CSV_COLUMNS = (
    "kind name run value change change_low change_high verdict winner reason note bound low high"
)


def render_comparison(result: Comparison, console: Console) -> None:
    """Print every table of it; readable without colour."""
    from functools import partial

    from ampacity.reports.render.terminal import fits, print_table, say

    say(console, result.sentence, "bold")
    for note in result.notes:
        say(console, note)
    for table in tables(result, short=True, fits=partial(fits, console)):
        say(console, f"\n{table.title}", "bold")
        print_table(console, table)
    say(console, f"\n{METHOD}", "dim")


def comparison_screen(result: Comparison) -> Screen:
    """Return the screen: who wins what, the winner's column first."""
    table = winners_table(result)
    won = [row[0].text for row in table.rows if row[0].state == "good"]
    winners = dict.fromkeys(won)
    if result.other_work:
        answer = Entry("RESULT", f"NOT COMPARABLE: {result.other_work}", state="unsure")
    elif winners:
        text = next(iter(winners)) if len(winners) == 1 else f"mixed: {' and '.join(winners)}"
        answer = Entry("WINNER", text, result.sentence, "good")
    elif result.compared:
        text = re.sub(
            r"^No difference (.*?) is shown", r"no significant difference \1", result.sentence
        )
        text = re.sub("^No latency", "not known: no latency", text)
        answer = Entry("WINNER", text.rstrip("."), state="unsure")
    else:
        answer = Entry("WINNER", "none", result.sentence, "unsure")
    runs = []
    for run in result.runs[:RUNS]:
        facts = [run.engine, run.hardware, f"{run.failed:,} of {run.requests:,} failed"]
        runs.append(Entry(run.name, run.path[-60:], ", ".join(filter(None, facts))))
    notes = [*_without_winner(result), *result.notes]
    return Screen([answer, *runs], table, notes=notes, next_command=result.next_command)


def _without_winner(result: Comparison) -> list[str]:
    """Return why a line whose figures differ has no winner, once for each reason."""
    lines: dict[str, list[str]] = {}
    for line in result.scorecard:
        differs = any(change and change.change for change in line.changes)
        known = (None, result.other_work)  # which heads the screen
        if line.verdict == "unknown" and line.reason not in known and differs:
            lines.setdefault(line.reason or "", []).append(line.label.partition(", ")[0])
    return [f"{', '.join(labels)}: {reason}" for reason, labels in lines.items()]


def comparison_markdown(result: Comparison) -> str:
    """Return the same tables as Markdown."""
    parts = [f"## {escaped(result.sentence)}", *map(escaped, result.notes)]
    for table in tables(result, short=True):
        heads = [escaped(f"{c.head} ({c.unit})" if c.unit else c.head) for c in table.columns]
        lines = [heads, ["---" if c.text else "---:" for c in table.columns]]
        for row in table.rows:
            lines.append([escaped(c.text + (f" [{c.note}]" if c.note else "")) for c in row])
        rows = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        parts += [f"### {escaped(table.title)}", rows]
        parts += [f"\\[{i}\\] {escaped(note)}" for i, note in enumerate(table.notes, 1)]
    return "\n\n".join([*parts, METHOD]) + "\n"


def comparison_csv(result: Comparison) -> str:
    """Return one line per figure and run, and per quantile and run.

    Changes are against the first run, ``low`` and ``high`` are the bracket.
    """
    out = io.StringIO()
    writer = csv.DictWriter(out, CSV_COLUMNS.split(), lineterminator="\n")
    writer.writeheader()

    def write(kind: str, name: str, run: str, value: Any, change: Any = None, **more: Any) -> None:
        if change is not None:
            low, high = change.change_ci or (None, None)
            more |= {"change": change.change, "change_low": low, "change_high": high}
        writer.writerow({"kind": kind, "name": name, "run": run, "value": value} | more)

    for run in result.runs:
        for name in ("gpus", "gpu_hour_usd"):
            write("run", name, run.name, getattr(run, name))
    for line in result.scorecard:
        brackets = line.brackets or [(None, None)] * len(result.runs)
        columns = line.values, line.changes, line.reasons, bounds(line), brackets
        common = {"verdict": line.verdict, "winner": line.winner, "note": line.note}
        for run, value, change, reason, bound, (low, high) in zip(
            result.runs, *columns, strict=True
        ):
            own = {"reason": reason or line.reason, "bound": bound, "low": low, "high": high}
            write(line.question, line.name, run.name, value, change, **common, **own)
    for shift in result.shift:
        for q in shift.quantiles:
            name, common = (
                f"{shift.metric}_{quantile_name(q.q)}_s",
                {"verdict": q.verdict, "reason": q.reason},
            )
            write("quantile", name, shift.reference, q.reference_s, **common)
            write("quantile", name, shift.other, q.other_s, q, **common)
    return out.getvalue()


def charts(result: Comparison) -> list[Chart]:
    """Return the latency-throughput curves overlaid, and each metric's quantiles and shifts."""
    found = [_curves(result)]
    for metric in _metrics(result):
        shifts = [s for s in result.shift if s.metric == metric]
        found += [_quantiles(metric, shifts, result), _shift_chart(metric, shifts, result)]
    return [chart for chart in found if chart]


def _metrics(result: Comparison) -> list[str]:
    return list(dict.fromkeys(s.metric for s in result.shift))


def _colour(result: Comparison, name: str) -> str:
    return COLOURS[[r.name for r in result.runs].index(name) % len(COLOURS)]


def _curves(result: Comparison) -> Chart | None:
    series: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for curve, p in product(result.curves, ("p50", "p99")):
        rows = series.setdefault((curve.run, p), [])
        for s in curve.stages:
            y, ci = (s.ttft_p99_s, s.ttft_p99_ci) if p == "p99" else (s.ttft_p50_s, (0, 0))
            if y:
                text = f"{curve.run} at {s.load}: TTFT {p} {at_least(y, ci)}"
                rows.append({"x": s.achieved_rps, "y": y, "text": text})
    points = [row for rows in series.values() for row in rows]
    if result.interleaved_pairs or all(len(rows) < 2 for rows in series.values()):
        return None
    x = linear_axis("Achieved rate (requests/s)", [r["x"] for r in points])
    plot = Plot(x, seconds_axis("TTFT from schedule", [r["y"] for r in points]))
    for (name, p), rows in series.items():
        if rows:
            plot.curve(rows, _colour(result, name), f"{name} {p}", dashed=p == "p50")
    title = "TTFT against the achieved rate"
    alt = f"{title} of {len(result.runs)} runs, on a logarithmic axis."
    return Chart("curves", title, alt, plot.spec(WIDE, 380), plot.keys)


def _quantiles(metric: str, shifts: Sequence[Shift], result: Comparison) -> Chart | None:
    sides = [(shifts[0].reference, 0, shifts[0]), *((s.other, 1, s) for s in shifts)]
    series: dict[str, list[dict[str, Any]]] = {name: [] for name, *_ in sides}
    for name, side, shift in sides:
        for q in shift.quantiles:
            if y := (q.reference_s, q.other_s)[side]:
                text = f"{name} {quantile_name(q.q)}: {figure_text(q, side)}"
                series[name].append({"x": q.q, "y": y, "text": text})
    heights = [r["y"] for rows in series.values() for r in rows]
    if not heights:
        return None
    plot = Plot(Axis("Quantile", 0.0, 1.0), seconds_axis(metric.upper(), heights))
    for name, rows in series.items():
        plot.curve(rows, _colour(result, name), name, size=30)
    title = f"{metric.upper()}{at_level(result)}: quantiles"
    alt = f"{title} of {', '.join(series)}."
    return Chart(f"{metric}-quantiles", title, alt, plot.spec(NARROW, 260), plot.keys)


def _shift_chart(metric: str, shifts: Sequence[Shift], result: Comparison) -> Chart | None:
    known = [
        (k, q, q.change, q.change_ci)
        for k, s in enumerate(shifts)
        for q in s.quantiles
        if q.change is not None and q.change_ci is not None
    ]
    if not known:
        return None
    changes = [100 * change for _, _, change, _ in known]
    ends = [100 * x for *_, ci in known for x in ci if x is not None]
    reach = 3 * max(*map(abs, changes), 3.0)  # intervals are cut there: changes stay legible
    bottom, top = max(min(*ends, *changes, -1.0), -reach), min(max(*ends, *changes, 1.0), reach)
    air, reference = 0.06 * (top - bottom), shifts[0].reference
    y = Axis(f"Change against {reference} (%)", bottom - air, top + air)
    plot = Plot(Axis("Quantile", 0.0, 1.0), y)
    plot.line([{"x": 0, "y": 0}, {"x": 1, "y": 0}], "axis", None, 1)
    for k, s in enumerate(shifts):
        colour, aside = _colour(result, s.other), 0.01 * (k - (len(shifts) - 1) / 2)
        bars: list[dict[str, Any]] = []
        points: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for _, q, change, (low, high) in (row for row in known if row[0] == k):
            x, bottom_end = q.q + aside, y.low if low is None else 100 * low
            bars.append({"x": x, "y": bottom_end, "y2": y.high if high is None else 100 * high})
            text = f"{s.other} {quantile_name(q.q)}: {change_text(q)}, {verdict_text(q)}"
            points[q.verdict == "differs"].append({"x": x, "y": 100 * change, "text": text})
        plot.bars_between(bars, colour)
        for real, rows in points.items():
            plot.points(rows, colour, filled=real)
        plot.key(f"{s.other} differs", colour, "line-dot")
    plot.key("not shown to differ", "muted", "dash-ring")
    title = f"{metric.upper()}{at_level(result)}: change against {reference}"
    alt = f"{title}, by quantile, with 95 % intervals."
    return Chart(f"{metric}-shift", title, alt, plot.spec(NARROW, 260), plot.keys)


def write_comparison_page(path: Path, result: Comparison) -> None:
    """Write one HTML file that needs no network; whole or not at all. Raises OSError."""
    page = render_page(
        "compare.html.j2",
        charts(result),
        title="Comparison – ampacity",
        sentence=result.sentence,
        notes=result.notes,
        predicted=any(r.predicted for r in result.runs),
        runs=result.runs,
        slos=", ".join(result.slos) or "none",
        tables=[t.last_second() if t.title == "Scorecard" else t for t in main_tables(result)],
        shifts=shift_tables(result, False),
        metrics=_metrics(result),
        how=METHOD,
        embedded=embedded_json(result.as_dict()),
    )
    write_page(path, page)
