"""A soak on the screen and in the report: its verdict, and what changed over the hours."""

from ampacity.analysis.contract.soak import Soak, SoakChange
from ampacity.analysis.contract.summary import Summary
from ampacity.analysis.soak.sentence import change_text, changes, of_server, size_text
from ampacity.durations import duration_text
from ampacity.reports.render.figures import DASH, Finding, count, rate
from ampacity.reports.render.table import Cell, Column, Rows, Table
from ampacity.reports.render.terminal import Entry

STATES = {"met": "good", "violated": "bad", "inconclusive": "unsure"}
FIRST = ("TTFT p99", "ITL p99", "E2E p99", "answered", "KV cache used, most", "client memory")
NOT_SERVER = "nothing of the server"
_LAST = len(FIRST)


def soak_answers(summary: Summary) -> list[Entry]:
    """Return verdict, changes and load of a soak, for a screen."""
    assert summary.soak is not None
    soak = summary.soak
    reasons = "; ".join(f"{v.slo}: {v.reason}" for v in soak.slo_verdicts)
    verdict = (soak.verdict, STATES[soak.verdict]) if summary.slos else ("no SLO given", "unsure")
    length = f"{duration_text(round(soak.duration_s, 1))} at {rate(soak.rate_rps)}"
    rests = sum(
        abs(at_s / soak.window_s - round(at_s / soak.window_s)) > 1e-6 for at_s in soak.begin_s
    )
    up_to, cut = ("up to ", f" ({rests} cut in two)") if rests else ("", "")
    windows = f"{soak.windows} windows of {up_to}{duration_text(soak.window_s)}{cut}"
    return [
        Entry("VERDICT", verdict[0], soak.reason or reasons, verdict[1]),
        _changed(soak),
        Entry("SOAK", length, f"{count(summary.requests)} requests, {windows}"),
    ]


def soak_findings(summary: Summary) -> list[Finding]:
    """Return the same for the report."""
    return [
        Finding(e.label.capitalize(), e.text, None, e.aside, e.state) for e in soak_answers(summary)
    ]


def _changed(soak: Soak) -> Entry:
    found, judged = changes(soak), _judged(soak)
    if found:
        first = f"{found[0].name} {change_text(found[0])}"
        many = f"{len(found)} of {len(judged)} figures"
        return Entry("CHANGED", many if of_server(found) else NOT_SERVER, first, "unsure")
    if judged:
        return Entry("CHANGED", "nothing", f"none of {len(judged)} figures", "good")
    why = _why_not_known(soak) or soak.reason or "nothing was measured"
    return Entry("CHANGED", "not known", why, "unsure")


def _judged(soak: Soak) -> list[SoakChange]:
    return [c for c in soak.changes if c.verdict != "inconclusive"]


def _why_not_known(soak: Soak) -> str | None:
    """Return why of no figure it is known whether it changed."""
    return None if _judged(soak) else next((c.reason for c in soak.changes if c.reason), None)


def soak_table(soak: Soak) -> Table:
    """Return a row for each figure, those that changed first."""

    def rank(change: SoakChange) -> tuple[bool, int]:
        return change.after is None, FIRST.index(change.name) if change.name in FIRST else _LAST

    rows = Rows("What changed over the windows", sorted(soak.changes, key=rank))
    rows.words("figure", lambda c: c.name)
    why_not_known = _why_not_known(soak)

    def level(_: Table, change: SoakChange) -> Cell:
        return Cell(DASH if change.before is None else size_text(change.before, change.unit))

    rows.column(Column("level"), level)

    def word(_: Table, change: SoakChange) -> Cell:
        state = {"no change": "good", "inconclusive": "unsure"}.get(change.verdict, "bad")
        told = change.verdict == "inconclusive" and change.reason == why_not_known
        return Cell("inconclusive" if told else change_text(change), state=state)

    rows.column(Column("change", text=True, cut=True), word)
    return rows.done()
