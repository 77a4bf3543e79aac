"""A comparison (ampacity.analysis.change.scorecard) as tables and charts: for a terminal, as Markdown, as CSV, as one HTML file."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampacity.analysis.change.comparable import in_words, said
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
from ampacity.reports.render.table import Cell, Column, Table

if TYPE_CHECKING:
    from rich.console import Console

COLOURS = (
    "ttft",
    "e2e",
    "good",
    "bad",
    "knee",
    "step4",
    "planned",
    "ink",
)  # of the runs, in their order
SHORT = (0.1, 0.5, 0.9, 0.95, 0.99)  # what a terminal shows of the shift function
INFINITE = "∞"
SIDES = ("reference", "other")
BRACKET = "95 % interval from all open stages of the run, without noise from run to run; of a closed loop, or where there is no estimate, between tested loads, with those of the achieved rates at its ends; a run wins the line where its whole interval is better than all others by 2 %"
HOW = (
    "A run wins a line where its advantage is at least 2 % (of requests that failed or were cut off: any) and not chance: 5 % of error over all lines together (Holm). "
    "Equal: the whole 95 % interval lies within 3 %. Open: neither is shown; the run in brackets leads. "
    "The quantiles are a family of their own. Intervals are not widened for the number of tests. "
    "A change is that of the two figures beside it; what is tested, that of the quantile's neighbourhood (p90: p85 to p95) or of an A/B's "
    "pairs with their order taken out, is in the JSON, and the interval is drawn out to hold both. "
    "≥: the interval of this p99 has no upper end, the run is too short to show how high it is."
)


def tables(
    result: Mapping[str, Any], *, short: bool = False, fits: Callable[[Table], bool] | None = None
) -> list[Table]:
    """Runs, what differs between them, scorecard, noise floor of an A/A, quantiles (``short``: the main ones).

    What has a column for each run has a line for each run instead where it does not pass ``fits``.
    """
    found = [_runs(result)]
    for made in (_differences, _scorecard):
        table = made(result)
        found.append(table if fits is None or fits(table) else made(result, by_run=True))
    found += [_noise_floor(result)] if result["aa"] else []
    return [t for t in [*found, *_shifts(result, short)] if t.rows]


def _runs(result: Mapping[str, Any]) -> Table:
    shown = {
        "path": "run",
        "engine": "engine",
        "model": "model",
        "hardware": "hardware",
        "gpus": "GPUs",
        "gpu_hour_usd": "USD per GPU-hour",
        "best_stage": "best stage",
    }
    heads = [Column(head, priority=i, text=i < 4) for i, head in enumerate(shown.values())]
    table = Table("Runs", [Column(""), Column("failed", "whole run"), *heads])
    for run in result["runs"]:
        cut = f", {run['unfinished']:,} cut off" if run["unfinished"] else ""
        failed = Cell(
            f"{run['failed']:,} of {run['requests']:,}{cut}",
            state="bad" if run["failed"] else "unsure" if cut else "",
        )
        run = {**run, "path": run["path"][-60:]}
        table.rows.append(
            [
                Cell(run["name"]),
                failed,
                *(Cell(DASH if run[n] is None else said(run[n])) for n in shown),
            ]
        )
    return table


def _differences(result: Mapping[str, Any], by_run: bool = False) -> Table:
    names = [r["name"] for r in result["runs"]]
    columns = [
        Column("setting" if by_run else "", text=True),
        *(Column(n, text=True) for n in (["value"] if by_run else names)),
    ]
    table = Table("Not the same in these runs", columns)
    for option, values in in_words(result["differences"]).items():
        if by_run:
            table.rows.append([Cell(option, state="unsure", heads=True), Cell("")])
            table.rows += [
                [Cell(f"  {n}"), Cell(value)] for n, value in zip(names, values, strict=True)
            ]
            continue
        table.rows.append([Cell(option, state="unsure"), *(Cell(value) for value in values)])
    return table


def _change(held: Mapping[str, Any] | None, unit: str = "%") -> str:
    if held is None or held["change_ci"] is None:
        return DASH
    low, high = held["change_ci"]
    if held["change"] is None:  # from or to infinite
        return (
            DASH if low is high is None else f"({signed_per_cent(low)} to {signed_per_cent(high)})"
        )
    return f"{signed_per_cent(held['change'])} {unit} ({signed_per_cent(low)} to {signed_per_cent(high)})"


def _scorecard(result: Mapping[str, Any], by_run: bool = False) -> Table:
    names = [r["name"] for r in result["runs"]]
    if by_run:
        columns = [
            Column("value", "", 1),
            Column("its interval", "", 2),
            Column(f"against {names[0]}", "95 % interval"),
        ]
    else:
        columns = [
            *(Column(n) for n in names),
            *(Column(f"{n} against {names[0]}", "95 % interval", 2) for n in names[1:]),
        ]
    table = Table("Scorecard", [Column("figure", text=True), *columns, Column("better", text=True)])
    for row in result["scorecard"]:
        note = (
            _prices(result, row)
            if row["question"] == "cost"
            else row["note"]
            if row["best"]
            else None
        )
        label = Cell(row["label"], table.footnote(note) if note else None)
        errors = row["question"] == "errors"
        values: list[Cell] = []
        lows = row.get("lower_bound") or [False] * len(names)
        for value, reason, bound, low in zip(
            row["values"], row["reasons"], _bounds(row), lows, strict=True
        ):
            endless = INFINITE if str(reason).startswith("infinite") else DASH
            figure = endless if value is None else f"{value:.2%}" if errors else _number(value)
            figure = f"≥ {figure}" if value is not None and low else figure
            text = f"{bound} {figure}" if bound else figure
            values.append(Cell(text, table.footnote(reason) if reason and not bound else None))
        changes = [Cell("")]  # of the first run, against which the others stand
        changes += [Cell(_change(held, "points" if errors else "%")) for held in row["changes"][1:]]
        leads = (
            row["best"]
            and [c.text for c in values].count(values[names.index(row["best"])].text) == 1
        )  # not where both read the same
        better = replace(
            _better(row, leads), note=table.footnote(row["reason"]) if row["reason"] else None
        )
        ends: list[Cell] = []
        if any(end is not None for ends_of in row["brackets"] or [] for end in ends_of):
            ends = [
                Cell(
                    " to ".join("?" if end is None else _number(end) for end in both)
                    if any(both)
                    else DASH
                )
                for both in row["brackets"]
            ]
            bracket = table.footnote(BRACKET)
        if by_run:
            table.rows += _lines_of_runs(
                names, label, values, [replace(end, note=bracket) for end in ends], changes, better
            )
            continue
        table.rows.append([label, *values, *changes[1:], better])
        if ends:
            table.rows.append(
                [Cell("  its interval", bracket), *ends, *[Cell("")] * (len(names) - 1), Cell("")]
            )
    return table


def _lines_of_runs(
    names: Sequence[str],
    label: Cell,
    values: Sequence[Cell],
    ends: Sequence[Cell],
    changes: Sequence[Cell],
    better: Cell,
) -> list[list[Cell]]:
    """A figure's name and which run is better, and below it a line for each run; one line where no run has a figure."""
    head = [replace(label, heads=True), *[Cell("")] * 3]
    if {c.text for c in values} == {DASH} and len({c.note for c in values}) == 1:
        return [[*head, replace(better, note=better.note or values[0].note)]]
    lines = zip(names, values, ends or [Cell("")] * len(names), changes, strict=True)
    return [[*head, better], *([Cell(f"  {name}"), *cells, Cell("")] for name, *cells in lines)]


def _bounds(row: Mapping[str, Any]) -> list[str | None]:
    """Of each run ``at least`` or ``at most`` where its figure is only that."""
    bound = "at most" if row["higher_is_better"] is False else "at least"
    return [
        bound if least else None for least in row.get("at_least") or [False] * len(row["values"])
    ]


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else significant(value)


def _prices(result: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """What a cost is of, and the prices that it rests on; empty where none is known."""
    known = [
        f"{r['name']}: {gpu_price(r['gpus'], r['gpu_hour_usd'])}"
        for r in result["runs"]
        if r["gpu_hour_usd"] is not None
    ]
    return f"of {row['note']}, at {'; '.join(known)}" if known else ""


def _better(row: Mapping[str, Any], leads: bool) -> Cell:
    if row["winner"]:
        return Cell(row["winner"], state="good")
    if row["verdict"] == "open":
        return Cell(f"open ({row['best']})" if leads else "open", state="unsure")
    return Cell("equal" if row["verdict"] == "equal" else DASH)


def _noise_floor(result: Mapping[str, Any]) -> Table:
    table = Table(
        "Smallest difference that this rig sees",
        [Column("metric", text=True), *(Column(f"p{100 * q:.0f}") for q in SHORT)],
    )
    for shift in result["shift"]:
        by_q = {q["q"]: q for q in shift["quantiles"]}
        cells = [
            Cell(DASH, table.footnote(by_q[q]["reason"] or "no interval"))
            if by_q[q]["smallest_seen"] is None
            else Cell(f"{significant(100 * by_q[q]['smallest_seen'], 2)} %")
            for q in SHORT
        ]
        table.rows.append([Cell(shift["metric"].upper()), *cells])
    blank = [Cell("")] * (len(SHORT) - 1)
    table.rows += [
        [
            Cell(r["label"].split(",")[0]),
            Cell(f"{significant(100 * r['smallest_seen'], 2)} %"),
            *blank,
        ]
        for r in result["scorecard"]
        if r["smallest_seen"] is not None
    ]
    return table


def _shifts(result: Mapping[str, Any], short: bool) -> list[Table]:
    found: list[Table] = []
    for shift in result["shift"] if result["level"] else []:  # without one a note says why
        a, b = shift["reference"], shift["other"]
        table = Table(
            f"{shift['metric'].upper()} of {b} against {a}{_at(result)}",
            [
                Column("quantile"),
                Column(a),
                Column(b),
                Column("change", "95 % interval"),
                Column("", text=True),
            ],
        )
        for q in shift["quantiles"]:
            if short and q["q"] not in SHORT:
                continue
            name = f"p{100 * q['q']:.0f}"
            state = {"differs": "bad" if q["slower"] else "good", "open": "unsure"}.get(
                q["verdict"], ""
            )
            texts = [_figure(q, side) for side in SIDES] + [_change(q)]
            note = table.footnote(q["reason"]) if q["reason"] else None
            cells = [Cell(t, note if t in (INFINITE, DASH) else None) for t in texts]
            table.rows.append([Cell(name), *cells, Cell(_word(q), state=state)])
        told = {(q["reason"], q["reference_s"], q["other_s"]) for q in shift["quantiles"]}
        if len(told) == 1 and all(
            q["verdict"] == "unknown" for q in shift["quantiles"]
        ):  # one line says it
            table.rows = [[Cell("all"), *table.rows[-1][1:]]]
        found.append(table)
    return found


def _figure(q: Mapping[str, Any], side: str) -> str:
    """A quantile of one of the SIDES: ``412 ms``, ``≥ 857 ms``, ∞ or a dash."""
    value = q[f"{side}_s"]
    if value is None:
        return INFINITE if side in q["infinite"] else DASH
    return at_least(value, [None, None if q["at_least"][SIDES.index(side)] else value])


def _at(result: Mapping[str, Any]) -> str:
    return f" at {result['level']}" if result["level"] else ""


def _word(q: Mapping[str, Any]) -> str:
    words = {"differs": "slower" if q["slower"] else "faster", "unknown": DASH}
    return words.get(q["verdict"], str(q["verdict"]))


def render_comparison(result: Mapping[str, Any], console: Console) -> None:
    """Print it; readable without colour."""
    from functools import partial

    from ampacity.reports.pages.terminal import fits, print_table

    console.print(printable(result["sentence"]), style="bold", highlight=False, markup=False)
    for note in result["notes"]:
        console.print(printable(note), highlight=False, markup=False)
    for table in tables(result, short=True, fits=partial(fits, console)):
        console.print(f"\n{printable(table.title)}", style="bold", highlight=False, markup=False)
        print_table(console, table)
    console.print(f"\n{HOW}", style="dim", highlight=False)


def comparison_markdown(result: Mapping[str, Any]) -> str:
    """The same tables as Markdown."""
    parts = [f"## {escaped(result['sentence'])}", *map(escaped, result["notes"])]
    for table in tables(result, short=True):
        heads = [f"{c.head} ({c.unit})" if c.unit else c.head for c in table.columns]
        lines = [heads, ["---" if c.text else "---:" for c in table.columns]]
        lines += [[c.text + (f" [{c.note}]" if c.note else "") for c in row] for row in table.rows]
        parts += [
            f"### {escaped(table.title)}",
            "\n".join(
                f"| {' | '.join(x if i == 1 else escaped(x) for x in line)} |"
                for i, line in enumerate(lines)
            ),
        ]
        parts += [f"\\[{i}\\] {escaped(note)}" for i, note in enumerate(table.notes, 1)]
    return "\n\n".join([*parts, HOW]) + "\n"


def comparison_csv(result: Mapping[str, Any]) -> str:
    """One line per figure and run, and per quantile and run; changes are against the first run, ``low`` and ``high`` are the bracket."""
    out = io.StringIO()
    write = csv.writer(out, lineterminator="\n").writerow
    write(
        [
            "kind",
            "name",
            "run",
            "value",
            "change",
            "change_low",
            "change_high",
            "verdict",
            "winner",
            "reason",
            "note",
            "bound",
            "low",
            "high",
        ]
    )
    for run, name in product(result["runs"], ("gpus", "gpu_hour_usd")):
        write(["run", name, run["name"], run[name], *[None] * 10])
    for row in result["scorecard"]:
        columns = (
            row["values"],
            row["changes"],
            row["reasons"],
            _bounds(row),
            row["brackets"] or [[None, None]] * len(result["runs"]),
        )
        for run, value, change, reason, bound, ends in zip(result["runs"], *columns, strict=True):
            change = change or {"change": None, "change_ci": [None, None]}
            write(
                [
                    row["question"],
                    row["name"],
                    run["name"],
                    value,
                    change["change"],
                    *change["change_ci"],
                    row["verdict"],
                    row["winner"],
                    reason or row["reason"],
                    row["note"],
                    bound,
                    *ends,
                ]
            )
    for shift in result["shift"]:
        for q in shift["quantiles"]:
            name = f"{shift['metric']}_p{100 * q['q']:.0f}_s"
            write(
                [
                    "quantile",
                    name,
                    shift["reference"],
                    q["reference_s"],
                    None,
                    None,
                    None,
                    q["verdict"],
                    None,
                    q["reason"],
                    *[None] * 4,
                ]
            )
            write(
                [
                    "quantile",
                    name,
                    shift["other"],
                    q["other_s"],
                    q["change"],
                    *(q["change_ci"] or [None, None]),
                    q["verdict"],
                    None,
                    q["reason"],
                    *[None] * 4,
                ]
            )
    return out.getvalue()


def charts(result: Mapping[str, Any]) -> list[Chart]:
    """The latency-throughput curves overlaid, and for each metric its quantiles and the shift function."""
    found = [_curves(result)]
    for metric in dict.fromkeys(s["metric"] for s in result["shift"]):
        shifts = [s for s in result["shift"] if s["metric"] == metric]
        found += [_quantiles(metric, shifts, result), _shift_chart(metric, shifts, result)]
    return [chart for chart in found if chart]


def _colour(result: Mapping[str, Any], name: str) -> str:
    return COLOURS[[r["name"] for r in result["runs"]].index(name) % len(COLOURS)]


def _curves(result: Mapping[str, Any]) -> Chart | None:
    series = [
        (
            c["run"],
            p,
            [
                {
                    "x": s["achieved_rps"],
                    "y": s[f"ttft_{p}_s"],
                    "text": f"{c['run']} at {s['load']}: TTFT {p} {at_least(s[f'ttft_{p}_s'], s['ttft_p99_ci'] if p == 'p99' else [0, 0])}",
                }
                for s in c["stages"]
                if s[f"ttft_{p}_s"]
            ],
        )
        for c in result["curves"]
        for p in ("p50", "p99")
    ]
    points = [row for *_, rows in series for row in rows]
    if result["interleaved_pairs"] or all(len(rows) < 2 for *_, rows in series):
        return None
    plot = Plot(
        linear_axis("Achieved rate (requests/s)", [r["x"] for r in points]),
        seconds_axis("TTFT from schedule", [r["y"] for r in points]),
    )
    for name, p, rows in series:
        if rows:
            plot.curve(rows, _colour(result, name), f"{name} {p}", dashed=p == "p50")
    alt = f"TTFT against the achieved rate of {len(result['runs'])} runs, on a logarithmic axis."
    return Chart(
        "curves",
        "TTFT against the achieved rate",
        alt,
        plot.spec(WIDE, 380),
        plot.keys,
        "",
        plot.spec(NARROW, 340),
    )


def _known(shift: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [q for q in shift["quantiles"] if q["change"] is not None]


def _quantiles(
    metric: str, shifts: Sequence[Mapping[str, Any]], result: Mapping[str, Any]
) -> Chart | None:
    sides = [
        (shifts[0]["reference"], SIDES[0], shifts[0]),
        *((s["other"], SIDES[1], s) for s in shifts),
    ]
    series = {
        name: [
            {
                "x": q["q"],
                "y": q[f"{side}_s"],
                "text": f"{name} p{100 * q['q']:.0f}: {_figure(q, side)}",
            }
            for q in s["quantiles"]
            if q[f"{side}_s"]
        ]
        for name, side, s in sides
    }
    heights = [r["y"] for rows in series.values() for r in rows]
    if not heights:
        return None
    plot = Plot(Axis("Quantile", 0.0, 1.0), seconds_axis(metric.upper(), heights))
    for name, rows in series.items():
        plot.curve(rows, _colour(result, name), name, size=30)
    title = f"{metric.upper()}{_at(result)}: quantiles"
    return Chart(
        f"{metric}-quantiles",
        title,
        f"{title} of {', '.join(series)}.",
        plot.spec(NARROW, 260),
        plot.keys,
    )


def _shift_chart(
    metric: str, shifts: Sequence[Mapping[str, Any]], result: Mapping[str, Any]
) -> Chart | None:
    changes = [100 * q["change"] for s in shifts for q in _known(s)]
    if not changes:
        return None
    ends = [100 * x for s in shifts for q in _known(s) for x in q["change_ci"] if x is not None]
    reach = 3 * max(
        *map(abs, changes), 3.0
    )  # an interval may be cut off, so that the changes stay legible
    bottom, top = max(min(*ends, *changes, -1.0), -reach), min(max(*ends, *changes, 1.0), reach)
    air, reference = 0.06 * (top - bottom), shifts[0]["reference"]
    y = Axis(f"Change against {reference} (%)", bottom - air, top + air)
    plot = Plot(Axis("Quantile", 0.0, 1.0), y)
    plot.line([{"x": 0, "y": 0}, {"x": 1, "y": 0}], "axis", None, 1)
    for k, s in enumerate(shifts):
        colour, aside = _colour(result, s["other"]), 0.01 * (k - (len(shifts) - 1) / 2)
        bars: list[dict[str, Any]] = []
        points: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for q in _known(s):
            x, (low, high) = q["q"] + aside, q["change_ci"]
            bars.append(
                {
                    "x": x,
                    "y": y.low if low is None else 100 * low,
                    "y2": y.high if high is None else 100 * high,
                }
            )
            text = f"{s['other']} p{100 * q['q']:.0f}: {_change(q)}, {_word(q)}"
            points[q["verdict"] == "differs"].append({"x": x, "y": 100 * q["change"], "text": text})
        plot.bars_between(bars, colour)
        for real, rows in points.items():
            plot.points(rows, colour, filled=real)
        plot.key(f"{s['other']} differs", colour, "line-dot")
    plot.key("not shown to differ", "muted", "dash-ring")
    title = f"{metric.upper()}{_at(result)}: change against {reference}"
    return Chart(
        f"{metric}-shift",
        title,
        f"{title}, by quantile, with 95 % intervals.",
        plot.spec(NARROW, 260),
        plot.keys,
    )


def write_comparison_page(path: Path, result: Mapping[str, Any]) -> None:
    """One HTML file that needs no network; whole or not at all. Raises OSError."""
    main = tables({**result, "shift": []})
    page = render_page(
        "compare.html.j2",
        charts(result),
        title="Comparison – ampacity",
        sentence=result["sentence"],
        notes=result["notes"],
        predicted=any(r["predicted"] for r in result["runs"]),
        runs=result["runs"],
        slos=", ".join(result["slos"]) or "none",
        tables=main,
        shifts=_shifts(result, False),
        metrics=list(dict.fromkeys(s["metric"] for s in result["shift"])),
        how=HOW,
        embedded=embedded_json(result),
    )
    write_page(path, page)
