"""Tell in words what requests meet at the loads around the capacity."""

import math

from ampacity.analysis.contract.stage import Stage
from ampacity.analysis.contract.summary import Summary
from ampacity.analysis.slo import GAP_METRICS
from ampacity.reports.render import tables
from ampacity.reports.render.figures import by_load, rate, seconds, share

OF_REQUESTS = ("ttft_from_schedule_s", "itl_s", "e2e_from_schedule_s")


def around_limit(summary: Summary) -> list[str]:
    """Return what happens at the highest load met, below the capacity, at it and above it.

    Loads at which the load generator was the limit are left out, and those above where the capacity
    is not known.
    """
    held, lines = summary.capacity, []
    stages = [s for s in by_load(summary.stages) if s.client_limited is not True]
    limit = held.capacity_rps or 0.0
    below = [s for s in stages if (s.offered_rps or math.inf) <= limit]
    below = below or [s for s in stages if s.index == held.stage]
    met = [s for s in below if s.slo_met or s.slo_met_by_all]
    if met:
        lines.append(
            f"At {met[-1].name}, {_highest(summary, met[-1])}: {_latencies(summary, met[-1])}."
        )
    if below and below[-1:] != met[-1:]:
        open_ = "the highest load below the capacity; its verdict is inconclusive"
        lines.append(f"At {below[-1].name}, {open_}: {_latencies(summary, below[-1])}.")
    known = limit and held.crossing != "lower_bound"
    above = [s for s in stages if known and limit < (s.offered_rps or 0.0)]
    beyond = [_missed(stage) for stage in above if stage.slo_attainment is not None]
    lines += _at_capacity(summary)
    where = f"Above the {'estimate' if held.crossing == 'pooled' else 'capacity'}"
    return [*lines, *([f"{where}: {'; '.join(beyond)}."] if beyond else [])]


def _at_capacity(summary: Summary) -> list[str]:
    """Return the share of the requests that the SLO allows to miss, which miss at the capacity."""
    held = summary.capacity
    slo = next((s for s in summary.slos if s.text == held.binding_slo), None)
    if held.crossing != "pooled" or not slo or not slo.limit_s or slo.metric in GAP_METRICS:
        return []
    missed, limit = share(1 - (slo.quantile or 0.0)), seconds(slo.limit_s)
    return [
        f"At the capacity, {rate(held.capacity_rps)}, by the estimate {missed} of the requests take "
        f"longer than {limit}, as {slo.text} allows."
    ]


def _highest(summary: Summary, stage: Stage) -> str:
    text = f"the highest load that met the SLO{'s' * (len(summary.slos) > 1)}"
    return text + " (by all stages together)" * (stage.slo_met is None)


def _latencies(summary: Summary, stage: Stage) -> str:
    """Return p50, p95 and p99 of TTFT, ITL and E2E."""
    parts = []
    for metric in OF_REQUESTS:
        found = tables.percentile_table(summary, metric)
        row = next(row for row in found.rows if row[0].text == stage.name)
        p50, _, p95, p99 = (cell.text for cell in row[1:5])
        parts.append(f"{found.title.split()[0]} p50 {p50}, p95 {p95}, p99 {p99}")
    return "; ".join(parts)


def _missed(stage: Stage) -> str:
    """Return the share of the requests that missed an SLO, and what most of them waited."""
    missed = 1.0 - (stage.slo_attainment or 0.0)
    words = "no request met" if missed == 1 else f"{share(missed)} of the requests missed"
    text = f"at {stage.name} {words} the SLO"
    if stage.ttft_from_schedule_s.p50 is not None:
        text += f", TTFT p50 {seconds(stage.ttft_from_schedule_s.p50)}"
    return text + ", and the queue grew to the end" * (stage.stable is False)
