"""Tell in words what requests meet at the loads around the capacity."""

import math

from ampacity.analysis.contract.stage import Stage
from ampacity.analysis.contract.summary import Summary
from ampacity.reports.render import tables
from ampacity.reports.render.figures import by_load, seconds, share

OF_REQUESTS = ("ttft_from_schedule_s", "itl_s", "e2e_from_schedule_s")


def around_limit(summary: Summary) -> list[str]:
    """Return a line for the highest load met, one for the highest below the capacity, and each above.

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
        lines.append(f"At {met[-1].name}, {_highest(summary)}: {_latencies(summary, met[-1])}.")
    if below and below[-1:] != met[-1:]:
        open_ = "the highest load below the capacity; whether it meets the SLO is open"
        lines.append(f"At {below[-1].name}, {open_}: {_latencies(summary, below[-1])}.")
    known = limit and held.crossing != "lower_bound"
    above = [s for s in stages if known and limit < (s.offered_rps or 0.0)]
    beyond = [_missed(stage) for stage in above if stage.slo_attainment is not None]
    return [*lines, *([f"Above the capacity: {'; '.join(beyond)}."] if beyond else [])]


def _highest(summary: Summary) -> str:
    return f"the highest load that met the SLO{'s' * (len(summary.slos) > 1)}"


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
