"""A comparison as tables and charts: for a terminal, as Markdown, as CSV, as one HTML file."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampacity.analysis.change.comparable import by_option, format_value
from ampacity.analysis.change.results import Comparison, Line, QuantileChange, Shift, ShownChange
from ampacity.reports.charts.marks import NARROW, WIDE, Axis, Chart, Plot, linear_axis, seconds_axis
from ampacity.reports.pages.gate import escaped
from ampacity.reports.pages.page import embedded_json, render_page, write_page
from ampacity.reports.render.figures import (
    DASH,
    at_least,
    gpu_price,
    printable,
    signed_per_cent,
    significant,
)
from ampacity.reports.render.tables import Cell, Column, Table

if TYPE_CHECKING:
    from rich.console import Console

COLOURS = ("ttft", "e2e", "good", "bad", "knee", "step4", "planned", "ink")  # of the runs
SHORT = (0.1, 0.5, 0.9, 0.95, 0.99)  # the quantiles that a terminal shows
INFINITE = "∞"
SIDES = ("reference", "other")
BRACKET = (
    "95 % interval from all open stages of the run, without noise from run to run; of a closed "
    "loop, or where there is no estimate, between tested loads, with those of the achieved rates "
    "at its ends; a run wins the line where its whole interval is better than all others by 2 %"
)
METHOD = (
    "A run wins a line where its advantage is at least 2 % (of requests that failed or were cut "
    "off: any) and not chance: 5 % of error over all lines together (Holm). Equal: the whole 95 % "
    "interval lies within 3 %. Open: neither is shown; the run in brackets leads. The quantiles "
    "are a family of their own. Intervals are not widened for the number of tests. A change is "
    "that of the two figures beside it; what is tested, that of the quantile's neighbourhood (p90: "
    "p85 to p95) or of an A/B's pairs with their order taken out, is in the JSON, and the interval "
    "is drawn out to hold both. ≥: the interval of this p99 has no upper end, the run is too short "
    "to show how high it is."
)
RUN_COLUMNS = {
    "path": "run",
    "engine": "engine",
    "model": "model",
    "hardware": "hardware",
    "gpus": "GPUs",
    "gpu_hour_usd": "USD per GPU-hour",
    "best_stage": "best stage",
}
CSV_COLUMNS = (
    "kind name run value change change_low change_high verdict winner reason note bound low high"
)


def tables(
    result: Comparison, *, short: bool = False, fits: Callable[[Table], bool] | None = None
) -> list[Table]:
    """Return runs, their differences, scorecard, noise floor of an A/A, quantiles.

    ``short``: the main quantiles. A table with a column for each run has a line for each run
    instead where it does not pass ``fits``.
    """
    return [*_main_tables(result, fits), *_shifts(result, short)]


def _main_tables(result: Comparison, fits: Callable[[Table], bool] | None = None) -> list[Table]:
    found = [_runs(result)]
    for made in (_differences, _scorecard):
        table = made(result)
        found.append(table if fits is None or fits(table) else made(result, by_run=True))
    found += [_noise_floor(result)] if result.aa else []
    return [t for t in found if t.rows]


def _runs(result: Comparison) -> Table:
    heads = [Column(h, priority=i, text=i < 4) for i, h in enumerate(RUN_COLUMNS.values())]
    table = Table("Runs", [Column(""), Column("failed", "whole run"), *heads])
    for run in result.runs:
        cut = f", {run.unfinished:,} cut off" if run.unfinished else ""
        state = "bad" if run.failed else "unsure" if cut else ""
        failed = Cell(f"{run.failed:,} of {run.requests:,}{cut}", state=state)
        values = {name: getattr(run, name) for name in RUN_COLUMNS} | {"path": run.path[-60:]}
        cells = [Cell(DASH if v is None else format_value(v)) for v in values.values()]
        table.rows.append([Cell(run.name), failed, *cells])
    return table


def _differences(result: Comparison, by_run: bool = False) -> Table:
    names = [r.name for r in result.runs]
    heads = ["setting", "value"] if by_run else ["", *names]
    table = Table("Not the same in these runs", [Column(h, text=True) for h in heads])
    for option, values in by_option(result.differences).items():
        cells = [Cell(value) for value in values]
        if by_run:
            table.rows.append([Cell(option, state="unsure", heads=True), Cell("")])
            table.rows += [[Cell(f"  {n}"), c] for n, c in zip(names, cells, strict=True)]
        else:
            table.rows.append([Cell(option, state="unsure"), *cells])
    return table


def _change(held: QuantileChange | ShownChange | None, unit: str = "%") -> str:
    if held is None or held.change_ci is None:
        return DASH
    low, high = held.change_ci
    ends = f"({signed_per_cent(low)} to {signed_per_cent(high)})"
    if held.change is None:  # from or to infinite
        return DASH if low is high is None else ends
    return f"{signed_per_cent(held.change)} {unit} {ends}"


def _scorecard(result: Comparison, by_run: bool = False) -> Table:
    names = [r.name for r in result.runs]
    if by_run:
        columns = [Column("value", "", 1), Column("its interval", "", 2)]
        columns.append(Column(f"against {names[0]}", "95 % interval"))
    else:
        columns = [Column(n) for n in names]
        columns += [Column(f"{n} against {names[0]}", "95 % interval", 2) for n in names[1:]]
    table = Table("Scorecard", [Column("figure", text=True), *columns, Column("better", text=True)])
    for line in result.scorecard:
        _add_line(table, result, line, by_run)
    return table


def _add_line(table: Table, result: Comparison, line: Line, by_run: bool) -> None:
    names = [r.name for r in result.runs]
    note = line.note if line.best else None
    note = _prices(result, line) if line.question == "cost" else note
    label = Cell(line.label, table.footnote(note) if note else None)
    values = _values(table, line)
    changes = [_change(c, "points" if line.question == "errors" else "%") for c in line.changes]
    blank, against = [Cell("")] * (len(names) - 1), [Cell(c) for c in changes[1:]]
    texts = [c.text for c in values]
    # of figures that read the same none leads
    leads = line.best is not None and texts.count(texts[names.index(line.best)]) == 1
    footnote = table.footnote(line.reason) if line.reason else None
    better = replace(_better(line, leads), note=footnote)
    ends: list[Cell] = []
    if any(end is not None for ends_of in line.brackets or [] for end in ends_of):
        note_of_ends = table.footnote(BRACKET)
        ends = [Cell(_bracket(both)) for both in line.brackets or []]
    if not by_run:
        table.rows.append([label, *values, *against, better])
        if ends:
            table.rows.append([Cell("  its interval", note_of_ends), *ends, *blank, Cell("")])
        return
    head = [replace(label, heads=True), *[Cell("")] * 3]
    if set(texts) == {DASH} and len({c.note for c in values}) == 1:  # no run has a figure
        table.rows.append([*head, replace(better, note=better.note or values[0].note)])
        return
    ends = [replace(end, note=note_of_ends) for end in ends] or [Cell("")] * len(names)
    by_name = zip(names, values, ends, [Cell(""), *against], strict=True)
    table.rows.append([*head, better])
    table.rows += [[Cell(f"  {name}"), *cells, Cell("")] for name, *cells in by_name]


def _values(table: Table, line: Line) -> list[Cell]:
    cells = []
    lows = line.lower_bound or [False] * len(line.values)
    columns = zip(line.values, line.reasons, _bounds(line), lows, strict=True)
    for value, reason, bound, low in columns:
        if value is None:
            text = INFINITE if str(reason).startswith("infinite") else DASH
        else:
            text = f"{value:.2%}" if line.question == "errors" else _number(value)
            text = f"≥ {text}" if low else text
        text = f"{bound} {text}" if bound else text
        cells.append(Cell(text, table.footnote(reason) if reason and not bound else None))
    return cells


def _bounds(line: Line) -> list[str | None]:
    """Return ``at least`` or ``at most`` for each run whose figure is only that."""
    bound = "at most" if line.higher_is_better is False else "at least"
    return [bound if least else None for least in line.at_least or [False] * len(line.values)]


def _bracket(ends: Sequence[float | None]) -> str:
    return " to ".join("?" if x is None else _number(x) for x in ends) if any(ends) else DASH


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else significant(value)


def _prices(result: Comparison, line: Line) -> str:
    """Return what a cost is of, and the prices that it rests on; empty where none is known."""
    known = [
        f"{r.name}: {gpu_price(r.gpus, r.gpu_hour_usd)}"
        for r in result.runs
        if r.gpu_hour_usd is not None
    ]
    return f"of {line.note}, at {'; '.join(known)}" if known else ""


def _better(line: Line, leads: bool) -> Cell:
    if line.winner:
        return Cell(line.winner, state="good")
    if line.verdict == "open":
        return Cell(f"open ({line.best})" if leads else "open", state="unsure")
    return Cell("equal" if line.verdict == "equal" else DASH)


def _noise_floor(result: Comparison) -> Table:
    columns = [Column("metric", text=True), *(Column(_name(q)) for q in SHORT)]
    table = Table("Smallest difference that this rig sees", columns)

    def cell(seen: float | None, reason: str | None = None) -> Cell:
        if seen is None:
            return Cell(DASH, table.footnote(reason or "no interval"))
        return Cell(f"{significant(100 * seen, 2)} %")

    for shift in result.shift:
        shown = {q.q: cell(q.smallest_seen, q.reason) for q in shift.quantiles if q.q in SHORT}
        table.rows.append([Cell(shift.metric.upper()), *shown.values()])
    blank = [Cell("")] * (len(SHORT) - 1)
    seen = [line for line in result.scorecard if line.smallest_seen is not None]
    table.rows += [[Cell(x.label.split(",")[0]), cell(x.smallest_seen), *blank] for x in seen]
    return table


def _shifts(result: Comparison, short: bool) -> list[Table]:
    found: list[Table] = []
    for shift in result.shift if result.level else []:  # without one a note says why
        heads = [Column("quantile"), Column(shift.reference), Column(shift.other)]
        heads += [Column("change", "95 % interval"), Column("", text=True)]
        title = f"{shift.metric.upper()} of {shift.other} against {shift.reference}{_at(result)}"
        table = Table(title, heads)
        for q in shift.quantiles:
            if short and q.q not in SHORT:
                continue
            texts = [*(_figure(q, side) for side in SIDES), _change(q)]
            note = table.footnote(q.reason) if q.reason else None
            cells = [Cell(t, note if t in (INFINITE, DASH) else None) for t in texts]
            state = "unsure" if q.verdict == "open" else ""
            state = ("bad" if q.slower else "good") if q.verdict == "differs" else state
            table.rows.append([Cell(_name(q.q)), *cells, Cell(_verdict(q), state=state)])
        alike = {(q.verdict, q.reason, q.reference_s, q.other_s) for q in shift.quantiles}
        if len(alike) == 1 and shift.quantiles[0].verdict == "unknown":
            table.rows = [[Cell("all"), *table.rows[-1][1:]]]
        found.append(table)
    return found


def _name(q: float) -> str:
    return f"p{100 * q:.0f}"


def _figure(q: QuantileChange, side: str) -> str:
    """Return a quantile of one of the SIDES: ``412 ms``, ``≥ 857 ms``, ∞ or a dash."""
    value = q.reference_s if side == "reference" else q.other_s
    if value is None:
        return INFINITE if side in q.infinite else DASH
    return at_least(value, [None, None if q.at_least[SIDES.index(side)] else value])


def _at(result: Comparison) -> str:
    return f" at {result.level}" if result.level else ""


def _verdict(q: QuantileChange) -> str:
    words = {"differs": "slower" if q.slower else "faster", "unknown": DASH}
    return words.get(q.verdict, q.verdict)


def render_comparison(result: Comparison, console: Console) -> None:
    """Print it; readable without colour."""
    from functools import partial

    from ampacity.reports.pages.terminal import fits, print_table

    plain = partial(console.print, highlight=False, markup=False)
    plain(printable(result.sentence), style="bold")
    for note in result.notes:
        plain(printable(note))
    for table in tables(result, short=True, fits=partial(fits, console)):
        plain(f"\n{printable(table.title)}", style="bold")
        print_table(console, table)
    plain(f"\n{METHOD}", style="dim")


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
        columns = line.values, line.changes, line.reasons, _bounds(line), brackets
        common = {"verdict": line.verdict, "winner": line.winner, "note": line.note}
        for run, value, change, reason, bound, (low, high) in zip(
            result.runs, *columns, strict=True
        ):
            own = {"reason": reason or line.reason, "bound": bound, "low": low, "high": high}
            write(line.question, line.name, run.name, value, change, **common, **own)
    for shift in result.shift:
        for q in shift.quantiles:
            name, common = (
                f"{shift.metric}_{_name(q.q)}_s",
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
    for curve in result.curves:
        for p in ("p50", "p99"):
            rows = series.setdefault((curve.run, p), [])
            for s in curve.stages:
                y = s.ttft_p99_s if p == "p99" else s.ttft_p50_s
                if y:
                    figure = at_least(y, s.ttft_p99_ci if p == "p99" else [0, 0])
                    text = f"{curve.run} at {s.load}: TTFT {p} {figure}"
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
    wide, narrow = plot.spec(WIDE, 380), plot.spec(NARROW, 340)
    return Chart("curves", title, alt, wide, plot.keys, "", narrow)


def _quantiles(metric: str, shifts: Sequence[Shift], result: Comparison) -> Chart | None:
    sides = [(shifts[0].reference, SIDES[0], shifts[0]), *((s.other, SIDES[1], s) for s in shifts)]
    series: dict[str, list[dict[str, Any]]] = {}
    for name, side, s in sides:
        values = [(q, q.reference_s if side == "reference" else q.other_s) for q in s.quantiles]
        series[name] = [
            {"x": q.q, "y": y, "text": f"{name} {_name(q.q)}: {_figure(q, side)}"}
            for q, y in values
            if y
        ]
    heights = [r["y"] for rows in series.values() for r in rows]
    if not heights:
        return None
    plot = Plot(Axis("Quantile", 0.0, 1.0), seconds_axis(metric.upper(), heights))
    for name, rows in series.items():
        plot.curve(rows, _colour(result, name), name, size=30)
    title = f"{metric.upper()}{_at(result)}: quantiles"
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
            text = f"{s.other} {_name(q.q)}: {_change(q)}, {_verdict(q)}"
            points[q.verdict == "differs"].append({"x": x, "y": 100 * change, "text": text})
        plot.bars_between(bars, colour)
        for real, rows in points.items():
            plot.points(rows, colour, filled=real)
        plot.key(f"{s.other} differs", colour, "line-dot")
    plot.key("not shown to differ", "muted", "dash-ring")
    title = f"{metric.upper()}{_at(result)}: change against {reference}"
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
        tables=_main_tables(result),
        shifts=_shifts(result, False),
        metrics=_metrics(result),
        how=METHOD,
        embedded=embedded_json(result.as_dict()),
    )
    write_page(path, page)
