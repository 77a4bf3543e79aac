"""The tables of a comparison, and the texts of its figures."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from ampacity.analysis.change.comparable import by_option, format_value
from ampacity.analysis.change.results import Comparison, Line, QuantileChange, Shift, ShownChange
from ampacity.reports.render.figures import DASH, at_least, gpu_price, signed_per_cent, significant
from ampacity.reports.render.table import Cell, Column, Table

SHORT = (0.1, 0.5, 0.9, 0.95, 0.99)  # the quantiles that a terminal shows
TAIL, TAILS = 0.99, ("ttft", "itl", "e2e")  # the quantile of a screen, and of which metrics
INFINITE = "∞"
BRACKET = (
    "95 % interval of all open stages, without noise from run to run; of a closed loop, or without "
    "an estimate, between tested loads; a run wins the line where its whole interval is 2 % better"
)
RUN_COLUMNS = ("path", "engine", "model", "hardware", "gpus", "gpu_hour_usd", "best_stage")
RUN_HEADS = ("run", "engine", "model", "hardware", "GPUs", "USD per GPU-hour", "best stage")


def tables(
    result: Comparison, *, short: bool = False, fits: Callable[[Table], bool] | None = None
) -> list[Table]:
    """Return runs, their differences, scorecard, noise floor of an A/A, quantiles.

    ``short``: the main quantiles. A table with a column for each run has a line for each run
    instead where it does not pass ``fits``.
    """
    return [*main_tables(result, fits), *shift_tables(result, short)]


def main_tables(result: Comparison, fits: Callable[[Table], bool] | None = None) -> list[Table]:
    found = [_runs(result)]
    for made in (_differences, _scorecard):
        table = made(result)
        found.append(table if fits is None or fits(table) else made(result, by_run=True))
    found += [_noise_floor(result)] if result.aa else []
    return [t for t in found if t.rows]


def _runs(result: Comparison) -> Table:
    heads = [Column(h, priority=i, text=i < 4) for i, h in enumerate(RUN_HEADS)]
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


def change_text(held: QuantileChange | ShownChange | None, unit: str = "%") -> str:
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
    changes = [change_text(c, "points" if line.question == "errors" else "%") for c in line.changes]
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
    columns = zip(line.values, line.reasons, bounds(line), lows, strict=True)
    for value, reason, bound, low in columns:
        if value is None:
            text = INFINITE if str(reason).startswith("infinite") else DASH
        else:
            text = f"{value:.2%}" if line.question == "errors" else _number(value)
            text = f"≥ {text}" if low else text
        text = f"{bound} {text}" if bound else text
        cells.append(Cell(text, table.footnote(reason) if reason and not bound else None))
    return cells


def bounds(line: Line) -> list[str | None]:
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
    if line.verdict == "inconclusive":
        return Cell(f"inconclusive ({line.best})" if leads else "inconclusive", state="unsure")
    return Cell("equal" if line.verdict == "equal" else DASH)


def _noise_floor(result: Comparison) -> Table:
    columns = [Column("metric", text=True), *(Column(quantile_name(q)) for q in SHORT)]
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


def shift_tables(result: Comparison, short: bool) -> list[Table]:
    found: list[Table] = []
    for shift in result.shift if result.level else []:  # without one a note says why
        heads = [Column("quantile"), Column(shift.reference), Column(shift.other)]
        heads += [Column("change", "95 % interval"), Column("", text=True)]
        title = (
            f"{shift.metric.upper()} of {shift.other} against {shift.reference}{at_level(result)}"
        )
        table = Table(title, heads)
        for q in shift.quantiles:
            if short and q.q not in SHORT:
                continue
            texts = [*(figure_text(q, side) for side in (0, 1)), change_text(q)]
            note = table.footnote(q.reason) if q.reason else None
            cells = [Cell(t, note if t in (INFINITE, DASH) else None) for t in texts]
            state = "unsure" if q.verdict == "inconclusive" else ""
            state = ("bad" if q.slower else "good") if q.verdict == "differs" else state
            table.rows.append(
                [Cell(quantile_name(q.q)), *cells, Cell(verdict_text(q), state=state)]
            )
        alike = {(q.verdict, q.reason, q.reference_s, q.other_s) for q in shift.quantiles}
        if len(alike) == 1 and shift.quantiles[0].verdict == "unknown":
            table.rows = [[Cell("all"), *table.rows[-1][1:]]]
        found.append(table)
    return found


def quantile_name(q: float) -> str:
    return f"p{100 * q:.0f}"


def figure_text(q: QuantileChange, side: int) -> str:
    """Return a quantile of one side: ``412 ms``, ``≥ 857 ms``, ∞ or a dash."""
    value = (q.reference_s, q.other_s)[side]
    if value is None:
        return INFINITE if ("reference", "other")[side] in q.infinite else DASH
    return at_least(value, [None, None if q.at_least[side] else value])


def at_level(result: Comparison) -> str:
    return f" at {result.level}" if result.level else ""


def verdict_text(q: QuantileChange) -> str:
    words = {"differs": "slower" if q.slower else "faster", "unknown": DASH}
    return words.get(q.verdict, q.verdict)


def _claimed(shift: Shift) -> list[QuantileChange]:
    """Return the p99, and the highest quantile that is faster or slower: what is claimed of it.

    Where no p99 is known, the highest of the main quantiles that is.
    """
    highest = {q.slower: q for q in shift.changed}
    known = [q for q in shift.quantiles if {figure_text(q, 0), figure_text(q, 1)} != {DASH}]
    tail = [q for q in known if q.q in SHORT and q.q <= TAIL and shift.metric in TAILS][-1:]
    return tail + [q for q in highest.values() if q not in tail]


def winners_table(result: Comparison) -> Table:
    """Return the figures that some run has: the winner first, and what a run wins on top."""
    names, two = [r.name for r in result.runs], len(result.runs) == 2
    heads = [Column("winner", text=True), Column("figure", text=True), *map(Column, names)]
    heads += [Column("change"), Column("95 % interval", "", 3)] if two else []
    table, per_gpu = Table("", heads), any(r.gpus > 1 for r in result.runs)

    def add(won: Cell, label: str, values: Sequence[Cell], change: str) -> None:
        figure, _, ends = change.partition(" (")
        changes = [Cell(figure), Cell(ends.rstrip(")") or DASH)] if two else []
        table.rows.append([won, Cell(label), *values, *changes])

    for shift in result.shift if two and result.level else []:
        for q in _claimed(shift):
            winner = names[0] if q.slower else names[1]
            # none wins whose tail has become infinite
            against = any(x.slower != q.slower for x in shift.quantiles if len(x.infinite) == 1)
            state = "" if against else "good"
            won = Cell(*((winner, None, state) if q.verdict == "differs" else ("inconclusive",)))
            won = Cell(DASH) if result.other_work else won
            sides = [Cell(figure_text(q, side)) for side in (0, 1)]
            add(won, f"{shift.metric.upper()} {quantile_name(q.q)}", sides, change_text(q))
    for line in result.scorecard:
        if any(v is not None for v in line.values) and (per_gpu or "per GPU" not in line.label):
            won = replace(_better(line, False), note=None)
            unit = "points" if line.question == "errors" else "%"
            add(
                won,
                line.label.partition(", ")[0],
                _values(table, line),
                change_text(line.changes[1], unit),
            )
    table.rows.sort(key=lambda row: (row[0].state != "good", row[0].text == DASH))
    if two and all(row[-2].text == DASH for row in table.rows):
        table.columns, table.rows = table.columns[:-2], [row[:-2] for row in table.rows]
    return table
