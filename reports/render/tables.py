"""Tables of the report as plain rows of text, for the terminal and for the page alike.

A null figure is a dash that carries the number of a footnote with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ampacity.analysis.load_names import load_name
from ampacity.analysis.slo import parse_slo, verdict_word
from ampacity.analysis.stage.throughput import steady_state
from ampacity.analysis.verdict import outage_verdict
from ampacity.reports.render.figures import (
    DASH,
    by_load,
    count,
    cut_off,
    exact,
    failures,
    gpu_price,
    interval,
    percentile_text,
    reason_of,
    seconds,
    share,
    significant,
)

METRICS: dict[str, str] = {
    "ttft_from_schedule_s": "TTFT from schedule",
    "ttft_s": "TTFT",
    "first_answer_s": "Time to first answer token",
    "itl_s": "ITL",
    "icl_s": "ICL",
    "tpot_s": "TPOT",
    "e2e_from_schedule_s": "E2E from schedule",
    "e2e_s": "E2E",
}
ABOVE_ACHIEVED = (
    "above the achieved rate: goodput is a share of the requests that were due in the window, which are waited for; "
    "achieved are the answers that ended within it"
)
GAP_METRICS = {"itl_s", "icl_s"}
LENGTH_COLUMNS = ("n", "mean", "p1", "p5", "p10", "p25", "p50", "p75", "p90", "p95", "p99", "max")
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Cell:
    text: str
    note: int | None = None  # number of a footnote
    state: str = ""  # good | bad | unsure, or empty
    heads: bool = (
        False  # a row of its own name: in a terminal it may reach over the blank cells that follow
    )


@dataclass(frozen=True)
class Column:
    head: str
    unit: str = ""
    priority: int = 0  # the terminal drops the highest numbers first
    text: bool = False  # words (aligned left), not figures


@dataclass
class Table:
    """``rows`` hold one cell for each of ``columns``; ``notes`` are footnotes, numbered from 1."""

    title: str
    columns: list[Column]
    rows: list[list[Cell]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def footnote(self, reason: str) -> int:
        """The number of the footnote that says ``reason``; the same reason is written once."""
        if reason not in self.notes:
            self.notes.append(reason)
        return self.notes.index(reason) + 1

    def cell(self, holder: Mapping[str, Any] | None, name: str, text: Callable[[Any], str]) -> Cell:
        """The figure ``name`` of ``holder`` as ``text`` writes it, or a dash with its reason."""
        value = (holder or {}).get(name)
        if value is None:
            return Cell(DASH, self.footnote(reason_of(holder, name)))
        return Cell(text(value))


Shown = tuple[
    Column, Callable[[Table, Row], Cell]
]  # a column, and its cell in a row of the summary


def table_of(title: str, rows: Iterable[Row], shown: Sequence[Shown]) -> Table:
    """A table with one row for each of ``rows``."""
    table = Table(title, [column for column, _ in shown])
    table.rows += [[cell(table, row) for _, cell in shown] for row in rows]
    return table


def figure(
    head: str,
    unit: str,
    name: str,
    text: Callable[[Any], str],
    priority: int = 0,
    reason: str | None = "",
) -> Shown:
    """The column of a figure; ``name`` is its place in the row, as ``ttft_s.p50``.

    ``reason``: why it is null, where the summary does not say; None: a dash without a footnote.
    """
    *path, last = name.split(".")

    def cell(table: Table, row: Row) -> Cell:
        for key in path:
            row = row.get(key) or {}
        if reason is None and row.get(last) is None:
            return Cell(DASH)
        return table.cell(
            {"reason": reason} | dict(row), last, lambda _: percentile_text(row, last, text)
        )

    return Column(head, unit, priority), cell


def words(head: str, text: Callable[[Row], str]) -> Shown:
    return Column(head, text=True), lambda _, row: Cell(text(row))


LOAD = words("load", load_name)


def stages_table(summary: Row) -> Table:
    """One row a stage: load, what came of it, and the verdict."""
    stages = by_load(summary)
    errors = [stage.get("errors") for stage in stages]
    urgent, any_cut = any(map(failures, errors)), any(map(cut_off, errors))
    most = any(stage.get("concurrency_max") is not None for stage in stages)
    judged = bool(summary.get("slos"))
    return table_of(
        "Stages",
        stages,
        [
            LOAD,
            figure("achieved", "req/s", "achieved_rps", significant, 1),
            figure("in flight", "mean", "concurrency", significant, 5),
            *([figure("at most", "in flight", "concurrency_max", count, 8)] if most else []),
            figure("TTFT p50", "schedule", "ttft_from_schedule_s.p50", seconds, 6),
            figure("TTFT p99", "schedule", "ttft_from_schedule_s.p99", seconds),
            figure("ITL p99", "per gap", "itl_s.p99", seconds, 3),
            figure("E2E p99", "schedule", "e2e_from_schedule_s.p99", seconds, 7),
            (Column("goodput", "req/s", 2), _goodput),
            (Column("errors", "requests", 1 if urgent else 4), lambda _, stage: _errors(stage)),
            *(
                [(Column("cut off", "unfinished", 1), lambda _, stage: _cut_off(stage))]
                if any_cut
                else []
            ),
            (Column("steady", "state", text=True, priority=2), _steady),
            (Column("SLO", text=True), lambda table, stage: _slo(table, stage, judged)),
        ],
    )


def _goodput(table: Table, stage: Row) -> Cell:
    """With a note where more is shown than was achieved in the window."""
    cell, achieved = table.cell(stage, "goodput_rps", significant), stage.get("achieved_rps")
    good = stage.get("goodput_rps")
    if not achieved or not good or good <= achieved or cell.text == significant(achieved):
        return cell
    return Cell(cell.text, table.footnote(ABOVE_ACHIEVED))


def _cut_off(stage: Row) -> Cell:
    cut = cut_off(stage.get("errors"))
    return Cell(count(cut), state="unsure" if cut else "")


def _errors(stage: Mapping[str, Any]) -> Cell:
    failed = failures(stage.get("errors"))
    return Cell(
        f"{count(failed)} of {count(stage.get('requests') or 0)}", state="bad" if failed else ""
    )


def _steady(table: Table, stage: Mapping[str, Any]) -> Cell:
    found, why = steady_state(stage)
    state = {"no": "bad", "not shown": "unsure"}.get(found, "")
    return Cell(DASH if found == "unknown" else found, table.footnote(why) if why else None, state)


def _slo(table: Table, stage: Mapping[str, Any], judged: bool) -> Cell:
    if stage.get("client_limited"):
        reason = f"the load generator was the limit: {reason_of(stage, 'client_limited')}"
        return Cell("no finding", table.footnote(reason), "unsure")
    if not judged:
        return Cell(
            DASH, table.footnote(str(stage.get("slo_met_reason") or "no SLO was given (--slo)"))
        )
    if stage.get("outage"):
        state = {True: "good", False: "bad", None: "unsure"}[stage["slo_met"]]
        return Cell(verdict_word(stage["slo_met"]), table.footnote(outage_verdict(stage)), state)
    if stage.get("slo_met") is None:
        together = stage.get("slo_met_by_all")
        if together is None:
            return Cell(verdict_word(None), table.footnote(_inconclusive(stage)), "unsure")
        note = table.footnote(
            f"by all stages together, which put the limit {'above' if together else 'below'} this load; "
            "this stage alone is too short to tell"
        )
        return Cell(verdict_word(together), note, "good" if together else "bad")
    return Cell(verdict_word(stage["slo_met"]), state="good" if stage["slo_met"] else "bad")


def _inconclusive(stage: Row) -> str:
    """Why, in words without the stage's own figures, so that stages share a footnote; the SLO table has the figures."""
    causes: dict[str, list[str]] = {}
    for v in stage.get("slo_verdicts") or []:
        if v.get("verdict") == "inconclusive":
            causes.setdefault(str(v.get("cause") or reason_of(v, "verdict")), []).append(
                str(v.get("slo"))
            )
    found = [f"{', '.join(slos)}: {cause}" for cause, slos in causes.items()]
    return "; ".join(found) or reason_of(stage, "slo_met")


def percentile_table(summary: Mapping[str, Any], metric: str) -> Table:
    """Every percentile of one metric of METRICS, one row a stage."""
    what = "gaps" if metric in GAP_METRICS else "requests"
    absent = "not in this summary"
    return table_of(
        METRICS[metric],
        by_load(summary),
        [
            LOAD,
            *(
                figure(p, "", f"{metric}.{p}", seconds, reason=absent)
                for p in ("p50", "p90", "p95", "p99")
            ),
            (
                Column("p99 interval"),
                lambda table, stage: _interval_cell(table, stage.get(metric) or {"reason": absent}),
            ),
            figure("mean", "", f"{metric}.mean", seconds, reason=absent),
            *(
                (
                    Column(name, what),
                    lambda _, stage, name=name: Cell(
                        count((stage.get(metric) or {}).get(name) or 0)
                    ),
                )
                for name in ("n", "infinite")
            ),
        ],
    )


def _interval_cell(table: Table, held: Mapping[str, Any]) -> Cell:
    """The interval of p99; a footnote says why it, or an end of it, is not known."""
    ends = held.get("p99_ci")
    bounds = interval(ends, seconds)
    if bounds is None:
        reason = held.get("p99_ci_reason") or reason_of(held, "p99")
        return Cell(DASH, table.footnote(str(reason)))
    reason = held.get("p99_ci_reason") if None in (ends or []) else None
    return Cell(bounds, table.footnote(str(reason)) if reason else None)


def slo_table(summary: Mapping[str, Any]) -> Table:
    """One row for each stage and SLO."""
    rows = [
        {"stage": s, **verdict} for s in by_load(summary) for verdict in s.get("slo_verdicts") or []
    ]
    return table_of(
        "SLO verdicts",
        rows,
        [
            words("load", lambda row: load_name(row["stage"])),
            words("SLO", lambda row: str(row.get("slo"))),
            (Column("verdict", text=True), _verdict),
            (Column("value"), _slo_value),
            figure("attainment", "of requests", "attainment", share),
            figure("effective", "requests", "requests_effective", count),
            (
                Column("to decide", "more requests"),
                lambda _, row: Cell(_more(row.get("more_requests"))),
            ),
        ],
    )


def _slo_value(table: Table, row: Row) -> Cell:
    """The percentile that was judged; of a p99 its interval is that of the stage, or of the class in it."""
    slo = parse_slo(str(row["slo"]))
    stage = row["stage"]
    of = stage if slo.class_ is None else (stage.get("classes") or {}).get(slo.class_) or {}
    held = of.get(f"{slo.metric}_from_schedule_s") or of.get(f"{slo.metric}_s") or {}
    bounds = held.get("p99_ci") if slo.quantile == 0.99 else None
    return table.cell(
        row, "value_s", lambda _: percentile_text({**row, "value_s_ci": bounds}, "value_s", seconds)
    )


def _verdict(table: Table, row: Row) -> Cell:
    said, reason = verdict_word(row.get("verdict")), row.get("reason")
    state = {"met": "good", "violated": "bad"}.get(said, "unsure")
    return Cell(said, table.footnote(str(reason)) if reason else None, state)


def _more(requests: float | None) -> str:
    return "" if requests is None else count(requests)


def server_table(summary: Mapping[str, Any]) -> Table | None:
    """What the server's own metrics say, one row a stage; None where no stage has any."""
    stages = [stage for stage in by_load(summary) if stage.get("server")]
    known = [
        figure(head, unit, f"server.{name}", text, reason="not on its page")
        for head, unit, name, text in (
            ("running", "mean", "running", significant),
            ("waiting", "mean", "waiting", significant),
            ("KV cache", "most", "kv_cache_usage_max", share),
            ("preemptions", "", "preemptions", count),
            ("prefix hits", "of tokens", "prefix_hit_rate", share),
            ("drafts accepted", "of tokens", "spec_acceptance_rate", share),
            ("GPU", "mean", "gpu_utilization", share),
            ("GPU memory", "GiB, all", "gpu_memory_used_bytes", lambda b: significant(b / 2**30)),
        )
        if any(stage["server"].get(name) is not None for stage in stages)
    ]
    return table_of("The server's own metrics", stages, [LOAD, *known]) if known else None


def lengths_table(summary: Mapping[str, Any]) -> Table:
    """Planned and realised token counts: one row a side."""
    realised = (summary.get("workload") or {}).get("realised") or {}
    rows = [
        {"side": label, **held}
        for label, group, side in (
            ("input, planned", "input_tokens", "planned"),
            ("input, counted by the server", "input_tokens", "sent"),
            ("output, planned", "output_tokens", "planned"),
            ("output, received", "output_tokens", "received"),
        )
        if (held := (realised.get(group) or {}).get(side))
    ]
    figures = [figure(name, "", name, _tokens) for name in LENGTH_COLUMNS]
    return table_of("Lengths in tokens", rows, [words("", lambda row: str(row["side"])), *figures])


def _tokens(value: float) -> str:
    return count(value) if float(value).is_integer() else significant(value, 4)


def accepted_table(summary: Mapping[str, Any]) -> Table | None:
    """Goodput per accepted result, one row a stage; None where no checker judged the answers."""
    stages = [s for s in by_load(summary) if (s.get("accepted") or {}).get("requests") is not None]
    free = "no price is known (--gpu-hour), or nothing was accepted"
    fleet = summary.get("fleet") or {}
    usd = fleet.get("gpu_hour_usd")
    table = table_of(
        "Accepted answers",
        stages,
        [
            LOAD,
            figure("accepted", "inside SLOs", "accepted.requests", count),
            figure("of requests", "", "accepted.share", share),
            figure("goodput", "accepted/s", "accepted.rps", significant),
            figure("output", "tokens/s", "accepted.output_tokens_per_s", significant, 2),
            (
                Column("unlabelled", "not accepted", 1),
                lambda _, stage: _unlabelled(stage["accepted"]["unlabelled"]),
            ),
            figure(
                "a result",
                f"USD at that load, {gpu_price(fleet['tensor_parallel'], usd)}" if usd else "USD",
                "accepted.cost_per_result_usd",
                significant,
                1,
                free,
            ),
        ],
    )
    return table if stages else None


def _unlabelled(requests: int) -> Cell:
    return Cell(count(requests), state="unsure" if requests else "")


def windows_table(summary: Mapping[str, Any], meta: Mapping[str, Any]) -> Table:
    """What part of each stage counts, Little's Law in it, and how well the load generator kept up."""
    audits = {s.get("index"): s.get("audit") or {} for s in meta.get("stages") or []}
    stages = [{**stage, "audit": audits.get(stage.get("index"), {})} for stage in by_load(summary)]
    untold = "run.json does not hold it"
    return table_of(
        "Windows and load generator",
        stages,
        [
            LOAD,
            (Column("window", "from start"), lambda _, stage: _span(stage["window"])),
            figure("warm-up", "requests", "window.warmup_requests", count),
            (
                Column("method", text=True),
                lambda table, stage: _method(table, stage.get("window") or {}),
            ),
            figure("L", "", "littles_law.l", significant),
            figure("λW", "", "littles_law.lambda_w", significant),
            (
                Column("L ÷ λW"),
                lambda table, stage: _consistency(table, stage.get("littles_law") or {}),
            ),
            figure("slip p50", "whole stage", "slip_s.p50", seconds),
            figure("slip p99", "whole stage", "slip_s.p99", seconds),
            figure("slip max", "whole stage", "audit.slip_max_s", seconds, reason=untold),
            figure("loop lag p99", "whole stage", "audit.loop_lag_p99_s", seconds, reason=untold),
            figure("CPU", "whole stage", "audit.cpu_fraction", share, reason=untold),
            figure("output", "tokens/s", "output_tokens_per_s", significant),
            figure("input", "tokens/s", "input_tokens_per_s", significant),
        ],
    )


def _span(window: Row) -> Cell:
    return Cell(f"{exact(window['start_s'])} to {exact(window['end_s'])} s")


def _method(table: Table, window: Mapping[str, Any]) -> Cell:
    reason = window.get("reason")
    return Cell(str(window.get("method") or DASH), table.footnote(str(reason)) if reason else None)


def _consistency(table: Table, law: Mapping[str, Any]) -> Cell:
    cell = table.cell(law, "consistency", significant)
    if law.get("ok") is not False or law.get("consistency") is None:
        return cell
    within = f"outside its tolerance of {share(law['tolerance'])}"
    return Cell(cell.text, table.footnote(within), "bad")


def all_percentiles(summary: Mapping[str, Any]) -> list[Table]:
    """The percentile table of every metric that any stage of the summary holds."""
    return [
        percentile_table(summary, m) for m in METRICS if any(s.get(m) for s in by_load(summary))
    ]


def imported_tables(imported: Mapping[str, Any] | None) -> list[Table]:
    """How the tool that measured an imported run defines things, and what its files do not hold."""
    if not imported:
        return []
    tool = str(imported.get("tool"))
    differs = Table(
        f"Where {tool} differs",
        [Column("figure", text=True), Column(tool, text=True), Column("ampacity", text=True)],
        [
            [Cell(str(d.get(k))) for k in ("what", "theirs", "ours")]
            for d in imported.get("definitions") or []
        ],
    )
    missing = Table(
        "Not in its files",
        [Column("column", text=True), Column("why it is null, or how it was made", text=True)],
        [
            [Cell(str(name)), Cell(str(why))]
            for name, why in (imported.get("missing") or {}).items()
        ],
    )
    return [differs, missing]
