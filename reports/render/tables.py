"""The tables of a summary's stages and lengths."""

from collections.abc import Callable
from operator import itemgetter
from typing import Any

from ampacity.analysis.contract.figures import Percentiles
from ampacity.analysis.contract.stage import Server, SloVerdict, Stage
from ampacity.analysis.contract.summary import Imported, Summary
from ampacity.analysis.slo import METRICS as SLO_METRICS
from ampacity.analysis.slo import parse_slo, verdict_word
from ampacity.analysis.stage.throughput import steady_state
from ampacity.analysis.verdict import outage_verdict
from ampacity.reports.render.figures import (
    DASH,
    NO_REASON,
    Quantile,
    by_load,
    count,
    cut_off,
    failures,
    gpu_price,
    interval,
    percentile_text,
    queue_grew,
    seconds,
    share,
    significant,
    why_null,
)
from ampacity.reports.render.table import Cell, Column, Rows, Table

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
QUANTILES: tuple[tuple[Quantile, float], ...] = (
    ("p50", 0.5),
    ("p90", 0.9),
    ("p95", 0.95),
    ("p99", 0.99),
)
ABOVE_ACHIEVED = (
    "above the achieved rate: goodput is a share of the requests that were due in the window, "
    "which are waited for; achieved are the answers that ended within it"
)
LENGTH_COLUMNS = ("n", "mean", "p1", "p5", "p10", "p25", "p50", "p75", "p90", "p95", "p99", "max")


def rows_of_stages(title: str, stages: list[Stage]) -> Rows[Stage]:
    """Return the rows of a table with one row a stage, which begins with its load."""
    rows = Rows(title, stages)
    rows.words("load", lambda stage: stage.name)
    return rows


def stages_table(summary: Summary) -> Table:
    """Return one row a stage: load, latencies and rates, verdict."""
    stages = by_load(summary.stages)
    urgent = any(failures(s.errors) for s in stages)
    rows = rows_of_stages("Stages", stages)
    if any(_by_chance(s) for s in stages):
        rows.figure("arrived", "req/s", lambda s: s.arrived_rps, significant, 1)
    rows.figure("achieved", "req/s", lambda s: s.achieved_rps, significant, 1)
    rows.figure("in flight", "mean", lambda s: s.concurrency, significant, 5)
    rows.figure("at most", "in flight", lambda s: s.concurrency_max, count, 8)
    rows.percentile("TTFT p50", "schedule", lambda s: s.ttft_from_schedule_s, "p50", 6)
    rows.percentile("TTFT p99", "schedule", lambda s: s.ttft_from_schedule_s, "p99")
    rows.percentile("ITL p99", "per gap", lambda s: s.itl_s, "p99", 3)
    rows.percentile("E2E p99", "schedule", lambda s: s.e2e_from_schedule_s, "p99", 7)
    rows.column(Column("goodput", "req/s", 2), _goodput)
    rows.column(Column("errors", "requests", 1 if urgent else 4), lambda _, s: _errors(s))
    if any(cut_off(s.errors) for s in stages):
        rows.column(Column("cut off", "unfinished", 1), lambda _, s: _cut_off(s))
    rows.column(Column("steady", "state", text=True, priority=2), _steady)
    judged = bool(summary.slos)
    rows.column(Column("SLO", text=True), lambda table, s: _slo(table, s, judged))
    return rows.done()


def _by_chance(stage: Stage) -> bool:
    """Return whether another rate arrived than the one that names the stage, as both are shown."""
    offered = stage.offered_rps
    return bool(offered) and significant(stage.arrived_rps) != significant(offered)


def _goodput(table: Table, stage: Stage) -> Cell:
    """Add a note where more is shown than was achieved in the window."""
    good, achieved = stage.goodput_rps, stage.achieved_rps
    cell = table.cell(good, significant, stage.goodput_rps_reason or NO_REASON)
    if not achieved or not good or good <= achieved or cell.text == significant(achieved):
        return cell
    return Cell(cell.text, table.footnote(ABOVE_ACHIEVED))


def _cut_off(stage: Stage) -> Cell:
    cut = cut_off(stage.errors)
    return Cell(count(cut), state="unsure" if cut else "")


def _errors(stage: Stage) -> Cell:
    failed = failures(stage.errors)
    return Cell(f"{count(failed)} of {count(stage.requests)}", state="bad" if failed else "")


def _steady(table: Table, stage: Stage) -> Cell:
    found, why = steady_state(stage)
    state = {"no": "bad", "not shown": "unsure"}.get(found, "")
    return Cell(DASH if found == "unknown" else found, table.footnote(why) if why else None, state)


def _slo(table: Table, stage: Stage, judged: bool) -> Cell:
    if stage.client_limited:
        reason = f"the load generator was the limit: {stage.client_limited_reason or NO_REASON}"
        return Cell("no finding", table.footnote(reason), "unsure")
    if not judged:
        return Cell(DASH, table.footnote(stage.slo_met_reason or "no SLO was given (--slo)"))
    met, note, state = stage.slo_met, None, {True: "good", False: "bad", None: "unsure"}
    if stage.outage:
        note = outage_verdict(stage)
    elif met is None:
        met = stage.slo_met_by_all
        side = "above" if met else "below"
        note = (
            f"all stages together put the limit {side} this load; this stage alone is too short to "
            "decide"
        )
        note = _inconclusive(stage) if met is None else note
    word = "queue grew" if queue_grew(stage) else verdict_word(met)
    return Cell(word, table.footnote(note) if note else None, state[met])


def _inconclusive(stage: Stage) -> str:
    """Return why, without the stage's own figures, so that stages share a footnote."""
    causes: dict[str, list[str]] = {}
    for v in stage.slo_verdicts:
        if v.verdict == "inconclusive":
            causes.setdefault(v.cause or v.reason or NO_REASON, []).append(v.slo)
    found = [f"{', '.join(slos)}: {cause}" for cause, slos in causes.items()]
    return "; ".join(found) or stage.slo_met_reason or NO_REASON


def percentile_table(summary: Summary, metric: str) -> Table:
    """Return every percentile of one metric of METRICS, one row a stage."""

    def of(stage: Stage) -> Percentiles:
        held: Percentiles = getattr(stage, metric)
        return held

    what = "gaps" if metric in ("itl_s", "icl_s") else "requests"
    rows = rows_of_stages(METRICS[metric], by_load(summary.stages))
    judged = {
        slo.quantile: slo.text
        for slo in summary.slos
        if slo.metric in SLO_METRICS
        and SLO_METRICS[slo.metric].stage_field == metric
        and not slo.class_
    }
    for name, quantile in QUANTILES:
        if quantile in judged and quantile != 0.99:
            rows.column(Column(name), _as_judged(judged[quantile], of, name))
        else:
            rows.percentile(name, "", of, name)
    rows.column(Column("p99 interval"), lambda table, s: _interval_cell(table, of(s)))
    rows.figure("mean", "", lambda s: of(s).mean, seconds, why=lambda s: why_null(of(s), "mean"))
    rows.figure("n", what, lambda s: of(s).n, count)
    rows.figure("failed", f"{what}, infinitely slow", lambda s: of(s).infinite, count)
    return rows.done()


def _as_judged(
    slo: str, of: Callable[[Stage], Percentiles], name: Quantile
) -> Callable[[Table, Stage], Cell]:
    """Return the cell of a percentile that an SLO judges: with the open end of its interval."""

    def cell(table: Table, stage: Stage) -> Cell:
        verdict = next((v for v in stage.slo_verdicts if v.slo == slo), None)
        if verdict is not None and verdict.value_s is not None:
            return slo_value(table, verdict)
        value = getattr(of(stage), name)
        return table.cell(value, seconds, why_null(of(stage), name))

    return cell


def _interval_cell(table: Table, held: Percentiles) -> Cell:
    """Return the interval of p99; a footnote says why it, or an end of it, is not known."""
    bounds, reason = interval(held.p99_ci, seconds), held.p99_ci_reason
    if bounds is None:
        return Cell(DASH, table.footnote(reason or why_null(held, "p99")))
    open_end = reason if None in (held.p99_ci or ()) else None
    return Cell(bounds, table.footnote(open_end) if open_end else None)


def slo_table(summary: Summary) -> Table:
    """Return one row for each stage and SLO."""
    found = [(s, v) for s in by_load(summary.stages) for v in s.slo_verdicts]
    rows = Rows("SLO verdicts", found)
    rows.words("load", lambda row: row[0].name)
    rows.words("SLO", lambda row: row[1].slo)
    rows.column(Column("verdict", text=True), lambda table, row: _verdict(table, row[1]))
    rows.column(Column("value"), lambda table, row: slo_value(table, row[1]))

    def why(row: tuple[Stage, SloVerdict]) -> str | None:
        return row[1].reason

    rows.figure("attainment", "of requests", lambda row: row[1].attainment, share, why=why)
    rows.figure("effective", "requests", lambda row: row[1].requests_effective, count, why=why)
    rows.column(
        Column("to decide", "more requests"),
        lambda _, row: Cell("" if (more := row[1].more_requests) is None else count(more)),
    )
    return rows.done()


def slo_value(table: Table, verdict: SloVerdict) -> Cell:
    """Return the percentile that was judged; ``≥`` where its interval has no upper end.

    ``≈`` where that would read as violated, which is not shown: the value is above the limit.
    """
    why = verdict.value_s_reason or verdict.reason or NO_REASON
    ends = verdict.value_s_ci

    def text(value_s: float) -> str:
        open_above = ends is not None and ends[1] is None
        if (
            open_above
            and verdict.verdict == "inconclusive"
            and value_s > parse_slo(verdict.slo).limit_s
        ):
            return f"≈ {seconds(value_s)}"
        return percentile_text(value_s, ends, seconds)

    return table.cell(verdict.value_s, text, why)


def _verdict(table: Table, verdict: SloVerdict) -> Cell:
    word, reason = verdict_word(verdict.verdict), verdict.reason
    state = {"met": "good", "violated": "bad"}.get(word, "unsure")
    return Cell(word, table.footnote(reason) if reason else None, state)


SERVER: tuple[tuple[str, str, Callable[[Server], float | None], Callable[[float], str]], ...] = (
    ("running", "mean", lambda s: s.running, significant),
    ("waiting", "mean", lambda s: s.waiting, significant),
    ("KV cache", "most", lambda s: s.kv_cache_usage_max, share),
    ("preemptions", "", lambda s: s.preemptions, count),
    ("prefix hits", "of tokens", lambda s: s.prefix_hit_rate, share),
    ("cached", "tokens", lambda s: s.cached_tokens, count),
    ("KV blocks", "live, s", lambda s: s.kv_block_lifetime_s, significant),
    ("drafts accepted", "of tokens", lambda s: s.spec_acceptance_rate, share),
    ("adapters", "most", lambda s: s.adapter_slots_used_max, count),
    ("adapter slots", "", lambda s: s.adapter_slots, count),
    ("GPU", "mean", lambda s: s.gpu_utilization, share),
    ("tensor cores", "active", lambda s: s.tensor_active, share),
    ("memory", "active", lambda s: s.memory_active, share),
    ("GPU memory", "GiB, all", lambda s: s.gpu_memory_used_bytes, lambda b: significant(b / 2**30)),
)


def server_table(summary: Summary) -> Table | None:
    """Return the server's own metrics, one row a stage; None where no stage has any."""
    servers = [(s.name, s.server) for s in by_load(summary.stages) if s.server]
    rows = Rows("The server's own metrics", servers)
    rows.words("load", lambda row: row[0])
    for head, unit, value, text in SERVER:
        if any(value(server) is not None for _, server in servers):
            _add_server_column(rows, head, unit, value, text)
    return rows.done() if len(rows.table.columns) > 1 else None


def _add_server_column(
    rows: Rows[tuple[str, Server]],
    head: str,
    unit: str,
    value: Callable[[Server], float | None],
    text: Callable[[float], str],
) -> None:
    rows.figure(head, unit, lambda row: value(row[1]), text, why="not on its page")


def lengths_table(summary: Summary) -> Table:
    """Return planned and realised token counts: one row a side."""
    realised = summary.workload.get("realised") or {}
    sides = [
        {"side": label, **held}
        for label, group, side in (
            ("input, planned", "input_tokens", "planned"),
            ("input, counted by the server", "input_tokens", "sent"),
            ("output, planned", "output_tokens", "planned"),
            ("output, received", "output_tokens", "received"),
        )
        if (held := (realised.get(group) or {}).get(side))
    ]
    rows: Rows[dict[str, Any]] = Rows("Lengths in tokens", sides)
    rows.words("", itemgetter("side"))
    for name in LENGTH_COLUMNS:
        rows.figure(name, "", itemgetter(name), _tokens, why=lambda row: row.get("reason"))
    return rows.done()


def _tokens(value: float) -> str:
    return count(value) if float(value).is_integer() else significant(value, 4)


def accepted_table(summary: Summary) -> Table | None:
    """Return the goodput of accepted answers, one row a stage; None where none was judged."""
    stages = [s for s in by_load(summary.stages) if s.accepted.requests is not None]
    usd = summary.fleet.gpu_hour_usd
    price = f" at that load, {gpu_price(summary.fleet.tensor_parallel, usd)}" if usd else ""
    free = "no price is known (--gpu-hour), or nothing was accepted"

    def why(stage: Stage) -> str | None:
        return stage.accepted.reason

    rows = rows_of_stages("Accepted answers", stages)
    rows.figure("accepted", "inside SLOs", lambda s: s.accepted.requests, count)
    rows.figure("of requests", "", lambda s: s.accepted.share, share, why=why)
    rows.figure("goodput", "accepted/s", lambda s: s.accepted.rps, significant, why=why)
    rows.figure("output", "tokens/s", lambda s: s.accepted.output_tokens_per_s, significant, 2, why)
    rows.column(
        Column("unlabelled", "not accepted", 1),
        lambda _, s: Cell(count(n := s.accepted.unlabelled or 0), state="unsure" if n else ""),
    )
    rows.figure(
        "a result",
        f"USD{price}",
        lambda s: s.accepted.cost_per_result_usd,
        significant,
        1,
        lambda s: s.accepted.reason or free,
    )
    return rows.done() if stages else None


def all_percentiles(summary: Summary) -> list[Table]:
    """Return the percentile table of every metric."""
    return [percentile_table(summary, m) for m in METRICS if summary.stages]


def imported_tables(imported: Imported | None) -> list[Table]:
    """Return how the tool of an imported run defines things, and what its files do not hold."""
    if imported is None:
        return []
    differs = Rows(f"Where {imported.tool} differs", imported.definitions)
    differs.words("figure", lambda d: d.what)
    differs.words(imported.tool, lambda d: d.theirs)
    differs.words("ampacity", lambda d: str(d.ours))
    missing = Rows("Not in its files", imported.missing.items())
    missing.words("column", lambda row: row[0])
    missing.words("why it is null, or how it was made", lambda row: row[1])
    return [differs.done(), missing.done()]
