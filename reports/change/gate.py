"""Results of gate and check: on a terminal, as Markdown, JUnit XML, annotations of a CI."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from xml.etree import ElementTree

from ampacity.analysis.change.results import Check, GateResult
from ampacity.analysis.gate.gate import INTERVALS, NOISY
from ampacity.analysis.slo import SHARES
from ampacity.reports.render.figures import signed_per_cent
from ampacity.reports.render.table import Cell, Column, Rows, Table
from ampacity.reports.render.terminal import Entry, Screen

_WIDTH = 41
NAMED = 3  # figures that are not judged, which a line names; of more it counts the rest
_GOOD = ("pass", "met")
_SIGNS = {"pass": "✅", "met": "✅", "regression": "❌", "violated": "❌", "inconclusive": "❔"}
_MARKS = {"pass": "✓", "met": "✓", "regression": "✗", "violated": "✗", "inconclusive": "?"}
_STATES = {
    "pass": "good",
    "met": "good",
    "regression": "bad",
    "violated": "bad",
    "inconclusive": "unsure",
    "cannot_compare": "bad",
    "not_checked": "bad",
}
_ORDER = ("regression", "violated", "inconclusive", "pass", "met")
_COUNTED = {
    "regression": "worse than allowed",
    "violated": "SLOs violated",
    "inconclusive": "inconclusive",
    "pass": "passed",
}
HEADS = ("change", "tested, 95 %", "allowed")
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # in XML 1.0


def figure(check: Check, value: float | None) -> str:
    """Return ``412 ms``, ``3.2 %``, ``80.1`` in four digits, from which the change follows."""
    if value is None:
        return "–"
    if check.name.partition("=")[0].rpartition(":")[2] in (*SHARES, "errors"):
        return f"{value:.2%}"
    if check.name in ("output_tokens_per_s", "capacity_rps"):
        return f"{value:.4g}"
    return f"{value:.4g} s" if value >= 1 else f"{value * 1e3:.4g} ms"


def change(check: Check) -> str:
    """Return ``+4.1 % (1.0 to 7.3)``."""
    if check.change is None:
        return "–"
    points = " points" if check.name == "error_rate" else " %"
    text = f"{signed_per_cent(check.change)}{points}"
    if check.change_ci:
        low, high = (signed_per_cent(x) for x in check.change_ci)
        text += f" ({low} to {high})"
    return text


def _change(check: Check) -> str:
    """Return ``+4.1 %`` or ``+0.3 pp``, without an interval."""
    return change(check).partition(" (")[0].replace("points", "pp")


def chart(result: GateResult) -> list[str]:
    """Return a line per latency: change and 95 % interval around 0, the tolerance marked ``!``.

    What is beyond three times the largest change or the least tolerance is cut off, so that the
    changes stay legible.
    """
    rows = [
        (c.title, c.change, c.change_ci, c.tolerance)
        for c in result.checks
        if c.change_ci and c.change is not None and c.tolerance is not None
    ]
    if not rows:
        return []
    ends = [abs(x) for _, _, ci, tolerance in rows for x in (*ci, tolerance) if x is not None]
    near = 3 * max(*(abs(change) for _, change, _, _ in rows), min(row[3] for row in rows))
    reach = min(max(*ends, 0.05), max(near, 0.05), 1.0)
    width = max(len(title) for title, *_ in rows)

    def column(value: float | None) -> int:
        share = 1.0 if value is None else max(-1.0, min(1.0, value / reach))
        return round((_WIDTH - 1) * (share + 1) / 2)

    lines = []
    for title, change, (low_end, high_end), tolerance in rows:
        row = [" "] * _WIDTH
        low, high = column(-1.0 if low_end is None else low_end), column(high_end)
        row[low : high + 1] = "-" * (high - low + 1)
        row[column(0.0)], row[column(tolerance)] = "|", "!" if tolerance <= reach else ">"
        row[column(change)] = "o"
        lines.append(f"{title:<{width}} {''.join(row)} {signed_per_cent(change):>6} %")
    axis = (
        f"{-reach * 100:.0f} %".ljust(_WIDTH // 2)
        + "0".ljust(_WIDTH - _WIDTH // 2 - 6)
        + f"{reach * 100:+.0f} %".rjust(6)
    )
    return [*lines, f"{'':<{width}} {axis}   o change, - 95 % interval, ! tolerance, > further out"]


def _cells(check: Check) -> tuple[str, ...]:
    """Return a check as cells of a table: name, both figures, change, tolerance."""
    before, now = figure(check, check.baseline), figure(check, check.candidate)
    return check.title, before, now, _change(check), _tested(check), _tolerance(check) or "–"


def _measured(check: Check) -> tuple[str, str]:
    return check.title, figure(check, check.candidate)


_TABLES: dict[str, tuple[Sequence[str], Callable[[Check], tuple[str, ...]]]] = {
    "gate": (("check", "baseline", "candidate", *HEADS), _cells),
    "check": (("check", "measured"), _measured),
}


def _word(check: Check) -> str:
    failed = check.verdict in ("regression", "violated")
    return check.verdict.upper() if failed else check.verdict


def _tolerance(check: Check) -> str:
    return "" if check.tolerance is None else f"{check.tolerance * 100:.3g} %"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines in which the cells of a column begin at the same place."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def check_screen(result: GateResult, next_command: str | None, path: object) -> Screen:
    """Return the screen of a check: its verdict, and one row for each limit."""
    verdict, _, named = result.sentence.partition(": ")
    answers = [Entry("VERDICT", verdict.lower(), named, _STATES[result.verdict])]
    rows = Rows("", sorted(result.checks, key=lambda c: _ORDER.index(c.verdict)))
    _add_mark(rows)
    rows.words("check", lambda c: c.title)
    rows.column(Column("measured"), lambda _, c: Cell(figure(c, c.candidate)))
    rows.column(Column("", text=True, cut=True), lambda _, c: Cell(c.reason or ""))
    notes = [*result.untracked.values(), *result.notes]
    return Screen(answers, rows.done(), notes=notes, next_command=next_command, path=path)


def _add_mark(rows: Rows[Check]) -> None:
    def mark(_: Table, check: Check) -> Cell:
        return Cell(_MARKS[check.verdict], state=_STATES[check.verdict])

    rows.column(Column("", text=True), mark)


def lines(result: GateResult) -> list[str]:
    """Return every check, the changes drawn, and the reasons, as lines."""
    found = [result.sentence, ""]
    rows: list[tuple[str, ...]] = [("", "baseline", "candidate", *HEADS, "")]
    rows += [(*_cells(c), _word(c)) for c in result.checks]
    found += [*aligned(rows), "", *chart(result), ""]
    found += [f"{c.title}: {c.reason}" for c in result.checks if c.reason]
    found += [f"{name} is not tracked: {reason}" for name, reason in result.untracked.items()]
    return found + list(result.notes)


def gate_screen(result: GateResult, next_command: str | None) -> Screen:
    """Return the screen: the verdict, the worst checks first, and why."""
    word, _, named = result.sentence.rstrip(".").partition(": ")
    state = _STATES[result.verdict]
    worst = sorted(result.checks, key=lambda c: (_ORDER.index(c.verdict), _excess(c)))
    answers = [Entry("VERDICT", word.lower(), named, state)]
    if result.checks and result.verdict == "regression":
        counts = Counter(c.verdict for c in result.checks)
        known = (f"{counts[v]} {w}" for v, w in _COUNTED.items() if counts[v])
        answers.append(Entry("CHECKS", ", ".join(known)))
    why = [c for c in worst if c.verdict != "pass"]
    answers += [Entry("WHY", f"{c.title}: {sentence(c)}") for c in why[:1]]
    known_otherwise = sorted((c for c in worst if c.tested is not None), key=_as_it_looks)
    texts = [f"{c.title} {signed_per_cent(c.tested)} %" for c in known_otherwise]
    if texts:
        more = f" and {len(texts) - 2} more" if len(texts) > 2 else ""
        tested = f"at equal load {', '.join(texts[:2])}{more}"
        answers.append(Entry("TESTED", tested, "not the change of the two figures"))
    rows = Rows("", worst)
    _add_mark(rows)
    rows.words("check", lambda c: c.title)
    rows.column(Column("baseline", "", 2), lambda _, c: Cell(figure(c, c.baseline)))
    rows.column(Column("candidate", "", 1), lambda _, c: Cell(figure(c, c.candidate)))
    rows.column(Column(HEADS[0]), lambda _, c: Cell(_change(c)))
    rows.column(Column(HEADS[1]), lambda _, c: Cell(_tested(c)))
    rows.column(Column(HEADS[2]), lambda _, c: Cell(_tolerance(c) or "–"))
    rows.column(Column("verdict", "", 4, text=True), lambda _, c: Cell(c.verdict))
    # those about further samples, which are appended, first
    notes = [note for note in reversed(result.notes) if note not in (INTERVALS, NOISY)]
    if result.untracked:
        named = ", ".join(list(result.untracked)[:NAMED])
        more = f" and {len(result.untracked) - NAMED} more" * (len(result.untracked) > NAMED)
        notes.append(f"Not judged, too noisy or too few: {named}{more} (--summary full says why).")
    return Screen(answers, rows.done(), notes=notes, next_command=next_command)


def _tested(check: Check) -> str:
    """Return ``+6.1 to +14.9 %``, the interval of the test."""
    if not check.change_ci:
        return "–"
    low, high = (signed_per_cent(x) for x in check.change_ci)
    return f"{low} to {high} %"


def _as_it_looks(check: Check) -> bool:
    """Return whether the verdict is the one that the two figures suggest."""
    beyond = (check.change or 0.0) > (check.tolerance or 0.0)
    return beyond == (check.verdict == "regression")


def _excess(check: Check) -> float:
    """Return by how much a change stays below what is allowed, as a multiple of that."""
    return -(check.change or 0.0) / (check.tolerance or 1.0)


def workflow_commands(result: GateResult) -> list[str]:
    """Return GitHub's workflow commands: an error per regression, a warning if inconclusive."""
    found = []
    for c in result.checks:
        if c.verdict in _GOOD:
            continue
        level = "warning" if c.verdict == "inconclusive" else "error"
        text = f"{c.title} {_word(c)}: {sentence(c)}"
        found.append(f"::{level} title=ampacity {result.command}::{_escaped(text)}")
    if not result.checks:
        found.append(f"::error title=ampacity {result.command}::{_escaped(result.sentence)}")
    return found


def sentence(check: Check) -> str:
    """Return what happened, in one line."""
    parts, before, now = [], figure(check, check.baseline), figure(check, check.candidate)
    if check.change is not None:
        parts.append(f"{before} → {now}, {change(check)}")
    if check.tolerance is not None:
        parts.append(f"tolerance {_tolerance(check)}")
    if check.reason:
        parts.append(check.reason)
    if not parts and check.candidate is not None:
        parts.append(now)
    return "; ".join(parts) or "no figure"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def gate_markdown(result: GateResult) -> str:
    """Return the verdict, a table, the changes drawn as text, and the reasons."""
    sign = _SIGNS.get(result.verdict, "❌")
    found = [f"## {sign} ampacity {result.command}", "", escaped(result.sentence), ""]
    if result.checks:
        head, cells_of = _TABLES[result.command]
        found += [f"| {' | '.join(head)} | verdict |", "|---" * (len(head) + 1) + "|"]
    for c in result.checks:
        cells = *cells_of(c), f"{_SIGNS[c.verdict]} {c.verdict}"
        found.append(f"| {' | '.join(map(escaped, cells))} |")
    if drawn := chart(result):
        found += ["", "```text", *drawn, "```"]
    reasons = [
        f"{c.title}: {c.reason}"
        for c in result.checks
        if c.reason and (c.verdict not in _GOOD or not _as_it_looks(c))
    ]
    reasons += [f"Not tracked: {name}, {reason}" for name, reason in result.untracked.items()]
    notes = [f"- {escaped(text)}" for text in [*reasons, *result.notes]]
    return "\n".join([*found, *([""] if notes else []), *notes]) + "\n"


def escaped(text: str) -> str:
    """Return the text so that it cannot end a table cell, open a tag or start a link."""
    for sign in "\\|<[`*":
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())


def junit_xml(result: GateResult) -> str:
    """Return JUnit XML: failures are regressions, errors inconclusive, skipped is not judged.

    A case takes the time of its load; several cases of one load share it, so the suite's time is
    not their sum.
    """
    suite = ElementTree.Element("testsuite", name=f"ampacity {result.command}")
    counts = {"failure": 0, "error": 0, "skipped": 0}
    total_s = sum(result.stage_s.values())

    def case(name: str, level: str | None, tag: str | None, kind: str, message: str) -> None:
        names = {
            "classname": _clean(f"{result.command}.{level or 'run'}"),
            "name": _clean(name),
            "time": f"{result.stage_s.get(level or '', total_s):.3f}",
        }
        element = ElementTree.SubElement(suite, "testcase", names)
        message, attributes = _clean(message), {}
        if tag:
            counts[tag] += 1
            attributes = {"message": message} | ({} if tag == "skipped" else {"type": kind})
        ElementTree.SubElement(element, tag or "system-out", attributes).text = message

    for c in result.checks:
        tag = {"pass": None, "met": None, "inconclusive": "error"}.get(c.verdict, "failure")
        case(c.name, c.level, tag, c.verdict, sentence(c))
    for name, reason in result.untracked.items():
        metric, _, level = name.partition(" at ")
        case(metric, level, "skipped", "untracked", reason)
    if not result.checks:
        case("comparable", None, "error", result.verdict, result.sentence)
    failures, errors, skipped = map(str, counts.values())
    totals = {"tests": str(len(suite)), "failures": failures, "errors": errors}
    totals |= {"skipped": skipped, "time": f"{total_s:.3f}"}
    suite.attrib.update(totals)
    root = ElementTree.Element("testsuites", {"name": "ampacity", **totals})
    root.append(suite)
    ElementTree.indent(root)
    text = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


def _clean(text: str) -> str:
    return _FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text)
