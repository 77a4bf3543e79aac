"""An outage: when the endpoint was down, as a figure and as answers over time."""

from itertools import pairwise

from ampacity.analysis.contract.stage import Outage, Stage
from ampacity.analysis.contract.summary import Summary
from ampacity.reports.charts.marks import NARROW, Chart, Plot, linear_axis
from ampacity.reports.render.figures import Finding, count, seconds


def outage_findings(summary: Summary) -> list[Finding]:
    """Return a finding for each stage with an outage."""
    found = []
    for stage, outage in _outages(summary):
        lasted = [
            f"all from {seconds(p.start_s)} on" if p.end_s is None else seconds(p.end_s - p.start_s)
            for p in outage.periods
        ]
        waited = any(p.waited for p in outage.periods)
        words = " or ".join(["failed"] * (outage.failed > 0) + ["waited"] * waited)
        hit = f"{count(_hit(outage))} of {count(outage.requests)} requests {words}"
        value = f"{' and '.join(lasted)}, {hit}"
        note = f"at {stage.name} the endpoint was {outage.text}; times after the start of the stage"
        found.append(Finding("Outage", value, None, note, "bad"))
    return found


def _hit(outage: Outage) -> int:
    """Return how many requests failed or waited."""
    return sum(p.failed + p.waited for p in outage.periods)


def _outages(summary: Summary) -> list[tuple[Stage, Outage]]:
    return [(s, s.outage) for s in summary.stages if s.outage and not s.client_limited]


def outage_chart(summary: Summary) -> Chart | None:
    """Draw answers and failures per second of the stage that has most requests in an outage."""
    if not (outages := _outages(summary)):
        return None
    stage, outage = max(outages, key=lambda found: _hit(found[1]))
    series = outage.series
    ends = [0.0, *series.end_s]
    plot = Plot(
        linear_axis("Seconds after the start", ends),
        linear_axis("Requests/s that ended", [*series.answered_rps, *series.failed_rps]),
    )
    for period in outage.periods:
        plot.x_band([period.start_s, period.end_s], "bad", "silent" if period.waited else "down")
    plot.key("outage", "bad", "band")
    for rates, colour, text in (
        (series.answered_rps, "ttft", "answered"),
        (series.failed_rps, "bad", "failed"),
    ):
        middles = ((a + b) / 2 for a, b in pairwise(ends))
        plot.line([{"x": x, "y": y} for x, y in zip(middles, rates, strict=False)], colour)
        plot.key(text, colour, "line")
    title = f"The endpoint was {outage.text}"
    alt = f"Answers and failures per second over the stage at {stage.name}. {title}."
    return Chart("outage", title, alt, plot.spec(NARROW, 290), plot.keys)
