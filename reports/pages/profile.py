"""A workload's profile, in a terminal and as one HTML file.

``view`` is what ``ampacity.workloads.fit.view.view`` returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampacity.reports.charts.marks import NARROW, Axis, Chart, Plot, log_axis
from ampacity.reports.pages.page import render_page, write_page
from ampacity.reports.render.figures import count, interval, rate, seconds, share, significant
from ampacity.reports.render.plain import printable
from ampacity.reports.render.traffic import side_title, workload_facts

if TYPE_CHECKING:
    from rich.console import Console

_BAR = 40  # characters of the longest bar
_HEIGHTS = " ▁▂▃▄▅▆▇█"
_LONGEST = 60  # characters of an arrival process: a curve may have hundreds of rates
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_SHOWN = ("p1", "p10", "p50", "p90", "p99")


def render_profile(view: Mapping[str, Any], console: Console) -> None:
    """Print the profile, 80 columns wide, readable without colour."""
    from rich.text import Text

    def line(text: str, style: str = "") -> None:
        console.print(Text(printable(text), style=style), soft_wrap=True)

    line(": ".join(part for part in (view["name"], view["source"]) if part), "bold")
    for side, held in view["sides"].items():
        line("")
        line(f"{side_title(view['described'], side)}: {_quantile_text(held)}", "bold")
        for text in _bars(held["bins"]):
            line(text)
    line("")
    width = max(len(label) for label, _ in facts(view))
    for label, text in facts(view):
        line(f"{label:<{width}}  {text}")


def write_profile_page(path: Path, view: Mapping[str, Any]) -> None:
    """Write the profile as one HTML file without scripts; whole or not at all. Raises OSError."""
    page = render_page(
        "profile.html.j2",
        [_chart(view, side) for side in view["sides"]],
        title=f"{view['name']} – ampacity",
        headline=f"Workload {view['name']}",
        source=view["source"],
        predicted=False,
        known=facts(view),
    )
    write_page(path, page)


def facts(view: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (label, text) of everything that is known beside the pictures."""
    return list(_facts(view, view["measured"]))


def _facts(view: Mapping[str, Any], measured: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "Arrivals", _shortened(str(view["described"]["arrivals"]))
    yield from workload_facts(view["described"])
    yield from _measured_arrivals(measured.get("arrivals") or {})
    for side, held in view["sides"].items():
        known = measured.get(f"{side}_tokens") or {}
        spikes = known.get("spikes", held["spikes"])
        if spikes:
            text = ", ".join(f"{count(s['tokens'])} ({share(s['share'])})" for s in spikes[:6])
            yield f"Spikes, {side}", text
        if known.get("families"):
            yield f"Families, {side}", _families(known)
    if "correlation" in measured:
        yield (
            "Correlation",
            f"{measured['correlation']:+.3f} (rank correlation of input and output)",
        )
    clients = measured.get("clients")
    if clients:
        top = ", ".join(f"top {n} send {share(s)}" for n, s in clients["share_of_top"].items())
        most = f"{count(clients['clients_for_90_percent'])} make 90 %"
        yield "Clients", f"{count(clients['clients'])}; {top}; {most}"
    sharing = measured.get("sharing") or {}
    if "cached_share_infinite" in sharing:
        cache = f"an infinite cache of {sharing['block_tokens']}-token blocks"
        yield (
            "Shared prefixes",
            f"{share(sharing['cached_share_infinite'])} of prompt tokens, in {cache}",
        )
    if "cached_share_reported" in sharing:
        yield "Cached, reported", f"{share(sharing['cached_share_reported'])} of prompt tokens"
    sessions = measured.get("sessions")
    if sessions:
        turns = sessions["turns"]
        spread = f"turns p50 {turns['p50']:g}, p90 {turns['p90']:g}, mean {turns['mean']:g}"
        yield "Sessions", f"{count(sessions['sessions'])}; {spread}"
        if gap := sessions.get("gap_s"):
            text = f"p50 {seconds(gap['p50'])}, p90 {seconds(gap['p90'])}, from start to start"
            yield "Between turns", text
        if "turn_to_turn_share" in sessions:
            kept = share(sessions["turn_to_turn_share"])
            yield "From turn to turn", f"{kept} of the blocks are those of the turn before"
    for note in [*([view["note"]] if view["note"] else []), *(measured.get("notes") or [])]:
        yield "Note", str(note)


def _measured_arrivals(held: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if not held:
        return
    peaks = ", ".join(
        f"{width} {significant(value)}×" for width, value in held.get("peak_to_mean", {}).items()
    )
    peaks = f"; peak to mean by window: {peaks}" if peaks else ""  # none in a short log
    mean = f"mean {significant(held['mean_rps'])} req/s over {seconds(held['span_s'])}"
    yield "Rate", f"{mean}{peaks}"
    if "rps_p99" in held:
        text = f"P95 {held['rps_p95']:g} req/s, P99 {held['rps_p99']:g} req/s"
        yield "Per second", f"{text}, most {held['rps_max']:g}"
    if busy := held.get("busy_hour"):
        length = "hour" if busy["window_s"] == 3600 else seconds(busy["window_s"])
        bounds = interval(busy["rps_ci"], unit="req/s")
        text = f"{rate(busy['rps'])} (95 % interval {bounds}): what 'ampacity plan' sizes for"
        yield f"Busiest {length}", text
    yield "Gaps", f"CV {significant(held['gap_cv'])} (Poisson: 1)"
    if held.get("dispersion"):
        by_window = ", ".join(
            f"{width} {significant(value)}" for width, value in held["dispersion"].items()
        )
        yield "Index of dispersion", f"{by_window} (Poisson: 1)"
    time = held.get("over_time") or {}
    if drawn := time.get("fitted_dispersion"):
        by_window = ", ".join(f"{width} {significant(value)}" for width, value in drawn.items())
        yield "… as fitted", f"{by_window}, of one draw"
    if processes := held.get("processes"):
        shown = (f"{_shortened(p['process'])} {p['held_out_nats']:+.3g}" for p in processes)
        yield (
            "Processes",
            f"{', '.join(shown)} nats a request, held out, against Poisson; the first is taken",
        )
    if time:
        most = max([*time["rps"], *(time.get("fitted_rps") or [])])
        text = f"up to {significant(most)} req/s in {seconds(time['window_s'])}"
        yield "Rate over time", f"{_sparkline(time['rps'], most)} {text}"
        if time.get("fitted_rps"):
            yield "… as fitted", f"{_sparkline(time['fitted_rps'], most)} one draw"


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _sparkline(values: list[float], most: float) -> str:
    """Return a character for each value, from nothing to ``most``."""
    return "".join(
        _HEIGHTS[-(-round(value / most * 800) // 100)] if most else " " for value in values
    )


def _families(known: Mapping[str, Any]) -> str:
    said = ", ".join(
        f"{f['family']} KS {f['ks']:.3f} (p99 ×{f['p99_ratio']:.2f})" for f in known["families"]
    )
    best = known.get("best_family")
    verdict = f"{best} fits" if best else "none fits, the quantile table is kept"
    return f"{verdict} (5 % limit {known['ks_limit']:.4f}): {said}"


def _quantile_text(held: Mapping[str, Any]) -> str:
    return f"mean {held['mean']:.0f}, " + ", ".join(
        f"{name} {count(held['quantiles'][name])}" for name in _SHOWN
    )


def _bars(bins: list[Mapping[str, float]]) -> Iterator[str]:
    most = max(b["share"] for b in bins)
    for b in bins:
        eighths = round(b["share"] / most * _BAR * 8)
        bar = "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
        bounds = (
            count(b["low"]) if b["high"] <= b["low"] else f"{count(b['low'])}–{count(b['high'])}"
        )
        yield f"{bounds:>17} {bar} {share(b['share'])}" if b["share"] else f"{bounds:>17}"


def _chart(view: Mapping[str, Any], side: str) -> Chart:
    """Draw the share of requests up to a length; quantiles are points, spikes are lines."""
    held = view["sides"][side]
    colour = "ttft" if side == "input" else "e2e"
    rows = [{"x": tokens, "y": percent} for percent, tokens in enumerate(held["curve"])]
    points = [
        {"x": value, "y": float(name[1:]), "text": f"{name}: {count(value)} tokens"}
        for name, value in held["quantiles"].items()
    ]
    y = Axis("Requests up to this length, %", 0.0, 100.0)
    plot = Plot(log_axis("Tokens (logarithmic)", [row["x"] for row in rows + points]), y)
    for spike in held["spikes"][:4]:
        plot.x_rule(
            spike["tokens"], "grid", f"{share(spike['share'])} have {count(spike['tokens'])} tokens"
        )
    plot.line(rows, colour)
    plot.points(points, colour)
    title = side_title(view["described"], side)
    alt = f"{title}, cumulative share of requests on a logarithmic axis: {_quantile_text(held)}."
    return Chart(side, title, alt, plot.spec(NARROW, 260), caption=_quantile_text(held))
