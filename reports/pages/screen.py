"""The final screen of a run: the answer first, in 80 x 24."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ampacity.analysis.capacity.fleet import AT_FULL_LOAD, instances_text
from ampacity.analysis.capacity.levels import usd
from ampacity.analysis.contract.stage import SloVerdict, Stage
from ampacity.analysis.contract.summary import SloLimit, Summary, to_json
from ampacity.analysis.next_run import deciding_s
from ampacity.analysis.slo import ERROR_RATE, GOODPUT, METRICS, SHARES, slo_from_dict
from ampacity.analysis.stage.throughput import steady_state
from ampacity.analysis.stage_warnings import client_relief
from ampacity.analysis.verdict import led
from ampacity.reports.pages.burst_screen import burst_answers, burst_drawn, burst_table
from ampacity.reports.pages.soak import soak_answers, soak_table
from ampacity.reports.render import figures
from ampacity.reports.render.bracket import bracket
from ampacity.reports.render.table import Cell, Column, Rows, Table
from ampacity.reports.render.tables import slo_value
from ampacity.reports.render.terminal import Entry, Screen, show

if TYPE_CHECKING:
    from rich.console import Console

JUDGED = 6  # SLOs that have a column
STEADY = {
    "yes": ("✓ steady", None, "good"),
    "not shown": ("? no level found", None, "unsure"),
    "no": ("✗ queue grew", None, "bad"),
    "unknown": ("? too short to tell", None, "unsure"),
}
NAMED = 2  # SLOs that a line names; of more it counts the rest
NOTES: dict[str, str | None] = {
    "partial": "",  # an answer of its own
    "no_requests": "No request was recorded.",
    "client_limited": "",  # its remedy: _notes
    "outage": "The endpoint was down or silent for a while.",
    "errors": "",  # counted on every screen
    "too_long": "Some requests exceeded the model's context: use shorter lengths or --fit-context.",
    "unstable_lowest": "Even the lowest load was too high: start lower.",
    "resumed": None,  # its own text is short, as that of others
    "events": None,
    "never_settled": "Some stages never settled: use a longer --duration.",
    "resent": "Idle connections broke, and requests were sent again.",
    "unsolicited": "Answers came that no request had asked for: some may be those of others.",
    "drift": "Latency drifted during a stage: use a longer --duration.",
    "two_modes": "Latency switched between two levels: look for other work on the server.",
    "too_few_requests": "",  # the table's last column
    "too_short": "Stages are too short to show a steady state: use a longer --duration.",
    "non_monotone": "An SLO was violated below a load that met it: repeat with longer stages.",
    "beyond_context": "Part of the workload did not fit the model's context and was cut.",
    "inputs_off": None,
    "lengths_off": None,
    "cut_short": "Some answers may have been cut short by something on the way.",
    "unseen": "Some answers hold no visible token: plan longer ones, or switch reasoning off.",
    "endings": "Some answers ended for a reason of their own, as a content filter.",
    "impossible_counts": None,
    "foreign_load": None,
    "strangers": "Other models, or a cache, gave some of the answers.",
    "not_streamed": "The endpoint does not stream token by token: TTFT and ITL mean little.",
    "diagnosis": "The endpoint streams oddly: see ampacity doctor.",
    "speculation": "Several tokens come at once (speculative decoding): ITL is per chunk.",
    "tokens_per_chunk": "A chunk holds several tokens: ITL is per chunk.",
    "cached": "The prefix cache answered part of the prompts although each is unique.",
    "littles_law": "In some stages the requests in flight kept moving one way, as near saturation.",
    "class_below": "One class violates its SLO at a lower load than all together.",
    "lengths_out_of_order": "Longer requests seem to be carried at a higher rate: repeat, longer.",
    "knee_region": "Just above the capacity latency rises steeply: keep a margin.",
    "closed_loop": "Found with a closed loop: open arrivals violate the SLO at a lower rate.",
    "users_missing": "Some of the closed loop's users never started.",
}
"""A short note for the codes of warnings; empty: the screen shows it elsewhere."""


def render_screen(summary: Summary, console: Console, path: object = None) -> None:
    """Print the screen of a run; it fits 80 x 24. ``path``: of the report."""
    burst, soak = summary.burst, summary.soak
    stages = [] if burst or soak else figures.by_load(summary.stages)
    table = burst_table(burst) if burst else judged_table(summary, stages)
    table = soak_table(soak) if soak else table
    drawn = burst_drawn(burst, console) if burst else []
    if summary.search:
        drawn = bracket(summary, console.width)
    answer = burst_answers if burst else soak_answers if soak else _answers
    answers = answer(summary)
    answers += _conditions(summary)
    screen = Screen(
        answers,
        table,
        near=None if soak else _near(summary, stages),
        drawn=drawn,
        notes=_notes(summary),
        next_command=summary.next_command,
        path=path,
    )
    show(screen, console)


def _conditions(summary: Summary) -> list[Entry]:
    """Return what must be known before any figure is read."""
    found = []
    if summary.partial:
        found.append(Entry("PARTIAL", summary.partial, state="unsure"))
    if summary.spent_usd is not None:
        wrong = any(w.code == "impossible_counts" for w in summary.warnings)
        at_least = "; at least, chunks and planned prompts where the count is wrong" * wrong
        found.append(Entry("SPENT", f"${summary.spent_usd:.4g}", f"at the prices given{at_least}"))
    if summary.simulated:
        text = "results: they describe no real engine or GPU"
        found.append(Entry("SIMULATED", text, "", "unsure"))
    if summary.predicted:
        found.append(
            Entry("PREDICTED", "by a simulated engine: nothing was measured", "", "unsure")
        )
    return found


def _counts(summary: Summary) -> list[str]:
    """Return how many requests failed or were cut off, where any were."""
    failed = figures.failures(summary.errors)
    parts = (
        [f"{figures.count(failed)} failed ({figures.failures_by_cause(summary)})"] if failed else []
    )
    parts += figures.ended_otherwise(summary.errors)
    parts += [f"{figures.count(summary.retries)} sent again"] if summary.retries else []
    return [f"{figures.count(summary.requests)} requests: {'; '.join(parts)}."] if parts else []


def _notes(summary: Summary) -> list[str]:
    """Return the counts, what helps a client that was the limit, and the other warnings."""
    client = []
    if any(w.code == "client_limited" for w in summary.warnings):
        held = [s for s in summary.stages if s.index not in summary.audit.repeated_stages]
        late = [s for s in held if s.client_limited or s.client_limited_metrics]
        client = [client_relief(summary.audit, late)]
    notes = ((NOTES.get(w.code), w.text) for w in summary.warnings)
    short = (text if note is None else note and note + _windows(text) for note, text in notes)
    if any(stage.outage for stage in summary.stages):  # which comes first
        return [*_counts(summary), *filter(None, short), *client]
    return [*_counts(summary), *client, *filter(None, short)]


def _windows(text: str) -> str:
    """Return in how many windows of a soak a warning holds, as its text says at its end."""
    return " " + text[text.rindex("(In ") :] if text.endswith(" windows.)") else ""


def _near(summary: Summary, stages: Sequence[Stage]) -> int:
    """Return the row of the stage that is nearest to the capacity."""
    held = summary.capacity
    rps = held.estimate_rps or held.capacity_rps or summary.goodput.at_offered_rps
    if rps is None:
        return len(stages) - 1
    loads = [s.offered_rps or s.achieved_rps or 0.0 for s in stages]
    return min(range(len(loads)), key=lambda i: abs(loads[i] - rps), default=0)


def _answers(summary: Summary) -> list[Entry]:
    """Return capacity, C_max, limit and fleet."""
    held, fleet = summary.capacity, summary.fleet
    if held.capacity_rps is None or not summary.slos:
        text = summary.verdict.partition(" This is likely")[0].removeprefix(led(summary))
        return [Entry("CAPACITY", "not known", text, "bad" if summary.slos else "unsure")]
    found = [_capacity(summary)]
    if held.c_max is not None:
        ends = _ends(held.c_max_ci, "pooled" in held.crossing)
        least = "at least " if held.crossing == "lower_bound" else ""
        found.append(Entry("C_MAX", f"{least}{figures.significant(held.c_max)} in flight", ends))
    found.append(_limit(summary))
    causes = [f"{c.title}. To try: {c.lever}" for c in summary.limits if c.holds]
    found += [Entry("CAUSE", cause) for cause in causes[:1]]
    if summary.families:
        curves = (f"{f.lengths} {figures.rate(f.capacity.capacity_rps)}" for f in summary.families)
        found.append(Entry("LENGTHS", ", ".join(curves)))
    if fleet.instances is not None:
        cost = fleet.cost_per_million_output_tokens
        sized = instances_text(fleet.instances, fleet.instances_ci)
        before, safety = fleet.instances_before_safety, figures.exact(fleet.safety_factor)
        asides = [f"{sized}: {before:,} for the peak, safety {safety}"]
        asides += [f"{usd(cost)} per million output tokens {AT_FULL_LOAD}"] if cost else []
        text = f"{figures.counted(fleet.gpus, 'GPU')} for {figures.count(fleet.peak_rps)} req/s"
        found.append(Entry("FLEET", text, ", ".join(asides)))
    return found


def _capacity(summary: Summary) -> Entry:
    held = summary.capacity
    value, ends = (
        figures.rate(held.capacity_rps),
        _ends(held.capacity_rps_ci, held.crossing == "pooled"),
    )
    if held.crossing in ("lower_bound", "saturated"):
        why = "the closed loop saturates there"
        least = {
            "lower_bound": ("at least", "no stage violated an SLO"),
            "saturated": ("at most", why),
        }
        word, aside = least[held.crossing]
        return Entry("CAPACITY", f"{word} {value}", aside, "good")
    if summary.predicted:
        return Entry("CAPACITY", f"{value} predicted", ends, "good")
    if held.crossing == "verified" and held.verified_rps and held.estimate_rps:
        ends = _ends(held.estimate_rps_ci, True)
        estimate = f"estimate {figures.significant(held.estimate_rps)}, {ends}"
        return Entry("CAPACITY", f"{figures.rate(held.verified_rps)} verified", estimate, "good")
    if held.crossing == "pooled":
        shown = held.verified_rps
        known = (
            f"verified to {figures.significant(shown)} by a single stage"
            if shown
            else "from all stages together"
        )
        state = "good" if shown else "unsure"
        return Entry("CAPACITY", f"{value} estimated", f"{ends}, {known}", state)
    word = "verified" if held.crossing in ("verified", "measured") else "interpolated"
    return Entry("CAPACITY", f"{value} {word}", ends, "good")


def _ends(interval: Sequence[float | None] | None, pooled: bool) -> str:
    """Return ``95 % 84.9–143``."""
    low, high = interval or (None, None)
    if low is None or high is None or low == high:
        return ""
    return (
        f"{'95 % ' if pooled else 'between '}{figures.significant(low)}–{figures.significant(high)}"
    )


def _limit(summary: Summary) -> Entry:
    """Return the SLO that limits, and up to which load the others held."""
    held, slos = summary.capacity, [slo_from_dict(to_json(s)) for s in summary.slos]
    texts = {slo.text: slo.bound_text for slo in slos}
    binding = [texts[t] for t in (held.binding_slo, *held.binding_or) if t in texts]
    asides = []
    counted = [s for s in figures.by_load(summary.stages) if not s.client_limited]
    for slo in [s for s in slos if texts[s.text] not in binding]:
        verdicts = [(s.name, v) for s in counted for v in s.slo_verdicts if v.slo == slo.text]
        at = [name for name, v in verdicts if v.verdict == "violated"]
        over = [name for name, v in verdicts if (v.value_s or 0.0) > slo.limit_s]
        found = f"violated at {at[0]}" if at else f"in doubt at {over[0]}" if over else ""
        asides.append(f"{texts[slo.text]} {found or 'never violated'}")
    if not binding:
        return Entry("LIMIT", "none reached", _some(asides))
    others = f"breaks first; {_some(asides)}" if asides else ""
    return Entry("LIMIT", _some(binding, " or "), others)


def _some(texts: Sequence[str], joined: str = ", ") -> str:
    more = [f"{len(texts) - NAMED} more"] if len(texts) > NAMED else []
    return joined.join([*texts[:NAMED], *more])


def judged_table(summary: Summary, stages: Sequence[Stage]) -> Table | None:
    """Return one row a stage: its load, what the SLOs judge, and the verdict in words."""
    if not stages:
        return None
    kinds = {s.kind for s in stages}
    rows = Rows("", stages)
    head = {"open": "req/s", "closed": "users"}[stages[0].kind] if len(kinds) == 1 else "load"
    rows.column(Column(head), lambda _, s: Cell(s.name.removesuffix(f" {head}")))
    if not summary.slos:
        rows.percentile("TTFT p50", "", lambda s: s.ttft_from_schedule_s, "p50")
        rows.percentile("TTFT p95", "", lambda s: s.ttft_from_schedule_s, "p95", 2)
        rows.percentile("ITL p99", "", lambda s: s.itl_s, "p99", 3)
    for i, slo in enumerate(_judged(summary)):
        rows.column(Column(slo.head, "", 2 + i if i else 0), slo.cell)
    rows.figure("in flight", "", lambda s: s.concurrency, figures.significant, 6, "")
    rows.figure("goodput", "", lambda s: s.goodput_rps, figures.significant, 5, "")
    if summary.slos:
        rows.column(Column("missed", "", 8), lambda _, s: Cell(_missed(s)))
        if all(slo.text.partition("=")[0] != "ttft_p50" for slo in summary.slos):
            rows.percentile("TTFT p50", "", lambda s: s.ttft_from_schedule_s, "p50", 9)
    if any(s.server and s.server.waiting is not None for s in stages):
        rows.figure("waiting", "", _waiting, figures.significant, 10, "")
    if any(figures.failures(s.errors) for s in stages):
        rows.figure("failed", "", lambda s: figures.failures(s.errors), figures.count, 1)
    if any(s.accepted.requests is not None for s in stages):
        rows.figure("accepted/s", "", lambda s: s.accepted.rps, figures.significant, 2, "")
    rows.figure("tokens/s", "", lambda s: s.output_tokens_per_s, figures.significant, 7, "")
    last = Column("SLO" if summary.slos else "state", "", text=True)
    rows.column(last, lambda _, s: _words(summary, s))
    return rows.done()


def _missed(stage: Stage) -> str:
    """Return the share of the requests that missed an SLO; at most, where the run cut some off."""
    if stage.slo_attainment is None:
        return figures.DASH
    at_most = figures.cut_off(stage.errors) > 0 and stage.slo_met is not False
    return "≤ " * at_most + figures.share(1.0 - stage.slo_attainment)


def _waiting(stage: Stage) -> float | None:
    """Return the mean number of requests that waited at the server."""
    return stage.server.waiting if stage.server else None


class _Judged:
    """The column of an SLO's percentile."""

    def __init__(self, slo: SloLimit) -> None:
        named = slo_from_dict(to_json(slo))
        known = METRICS.get(slo.metric)
        metric = "errors" if slo.metric == ERROR_RATE else known.label if known else slo.metric
        percentile = "" if slo.metric in SHARES else f" {named.percentile}"
        class_ = f"{slo.class_}: " if slo.class_ else ""
        self.head, self._text = f"{class_}{metric}{percentile}", slo.text
        self._limit, self._is_goodput = named.limit_for_people, slo.metric == GOODPUT
        latency = METRICS.get(slo.metric) if not slo.class_ else None
        self._field, self._percentile = latency and latency.stage_field, named.percentile

    def cell(self, table: Table, stage: Stage) -> Cell:
        verdict = next((v for v in stage.slo_verdicts if v.slo == self._text), None)
        if verdict is None:
            return Cell(figures.DASH)
        if verdict.value_s is not None:
            return slo_value(table, verdict)
        if self._is_goodput and verdict.attainment is not None:
            return Cell(figures.share(verdict.attainment))
        if verdict.value is not None:
            return Cell(figures.share(verdict.value))
        if known := self._known(stage):
            return Cell(known)
        return Cell(f"> {self._limit}" if verdict.verdict == "violated" else figures.DASH)

    def _known(self, stage: Stage) -> str | None:
        """Return the bounds of a percentile whose value is not known."""
        held = getattr(stage, self._field) if self._field else None
        low, high = getattr(held, f"{self._percentile}_bounds", None) or (None, None)
        if low is None:
            return None
        return f"≥ {figures.seconds(low)}" if high is None else f"≤ {figures.seconds(high)}"


def _judged(summary: Summary) -> list[_Judged]:
    """Return the columns of the judged percentiles, the binding one first."""
    binding = summary.capacity.binding_slo
    ranked = sorted(summary.slos, key=lambda s: s.text != binding)
    return [_Judged(slo) for slo in ranked[:JUDGED]]


def _words(summary: Summary, stage: Stage) -> Cell:
    """Return a mark and the verdict in words."""
    if stage.client_limited:
        return Cell("– this machine was the limit", state="unsure")
    if not summary.slos:
        return Cell(*STEADY[steady_state(stage)[0]])
    if stage.slo_met:
        return Cell("✓ met", state="good")
    violated = [v.slo.partition("=")[0] for v in stage.slo_verdicts if v.verdict == "violated"]
    if figures.queue_grew(stage):
        return Cell("✗ queue grew", state="bad")
    if stage.slo_met is False:
        return Cell(f"✗ {_some(violated) or 'violated'}", state="bad")
    if stage.slo_met_by_all is not None:
        word, state = ("✓ met", "good") if stage.slo_met_by_all else ("✗ violated", "bad")
        return Cell(f"{word} (all stages together)", state=state)
    open_ = [v for v in stage.slo_verdicts if v.verdict == "inconclusive"]
    return Cell(f"? inconclusive: {_undecided(open_, stage)}", state="unsure")


def _undecided(verdicts: Sequence[SloVerdict], stage: Stage) -> str:
    """Return what an inconclusive stage lacks, in a few words."""
    if more := max((v.more_requests or 0 for v in verdicts), default=0):
        length_s = deciding_s(stage, more)
        if length_s is None or length_s <= stage.window.end_s:  # a budget cut its requests
            return f"{figures.count(more)} more requests"
        return f"run {figures.length(length_s)}"
    cause = next((v.cause for v in verdicts if v.cause), stage.slo_met_reason or "")
    return figures.undecided(cause)
