"""The stage that is going on: as a panel of a terminal, and as a line."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

from ampacity.analysis.load_names import load_name
from ampacity.analysis.metrics.observations import quantile_rank
from ampacity.analysis.slo import Slo
from ampacity.analysis.stats.intervals import smallest_n
from ampacity.loadgen.generator import Generator
from ampacity.loadgen.plan import LIVE_BOUNDS_S, LIVE_TIMES, Ints, Live, LiveTimes, StagePlan
from ampacity.loadgen.probe.diagnosis_rules import duration_text as seconds
from ampacity.loadgen.rundir.records import FAILED_KINDS
from ampacity.reports.render.figures import counted
from ampacity.reports.render.terminal import spark, text_of

if TYPE_CHECKING:
    from rich.console import Console

RATE_OVER_S = 10.0  # the time over which rates are taken
JUDGED = 2  # SLOs with a row
HISTORY = 120  # points of a sparkline
WIDTH = 59  # a terminal that is made narrower, down to 60, wraps no line of it
LOWEST = 14  # rows of a terminal that has room for the panel


@dataclass(frozen=True)
class Outlook:
    """The expected course of the whole run. None: not known."""

    stages: int | None = None
    length_s: float | None = None
    about: bool = False  # the number of stages is what is usual
    began_s: float = field(default_factory=time.monotonic)
    part: str = "stage"  # what a stage is called
    arm: str = ""  # of an A/B: which is under load
    before: int = 0  # stages of its other arm that have run


class LivePanel:
    """Reads the counters of a stage each time it is asked; it changes nothing of the load."""

    def __init__(
        self,
        generator: Generator,
        plan: StagePlan,
        slos: Sequence[Slo],
        outlook: Outlook,
        burst: dict[str, Any] | None = None,
        max_cost: float | None = None,
    ) -> None:
        self._of_limit = "" if max_cost is None else f" of ${max_cost:g}"
        self._generator, self._plan, self._outlook, self._burst = generator, plan, outlook, burst
        judged = [s for s in slos if s.metric in LIVE_TIMES and s.class_ is None]
        self._slos = sorted(judged, key=lambda s: s.metric != "ttft")[:JUDGED]
        self._seen: deque[tuple[float, int, int]] = deque([(0.0, 0, 0)])  # s, sent, ended
        self._in_flight: deque[float] = deque(maxlen=HISTORY)
        self._medians_s: dict[str, deque[float | None]] = {}  # by metric, of what came since a look
        self._before = LiveTimes().fine

    def _look(self) -> tuple[Live, tuple[float, int, int], tuple[float, int, int]] | None:
        """Return (counters, now, some seconds ago), or None before the stage has begun."""
        live = self._generator.live
        if live.stage != self._plan.index or not live.began_s or live.began_s > time.monotonic():
            return None
        done = live.ended - live.kinds["unfinished"]  # which were given up
        now = time.monotonic() - live.began_s, live.released, done
        self._seen.append(now)
        while len(self._seen) > 2 and self._seen[1][0] < now[0] - RATE_OVER_S:
            self._seen.popleft()
        return live, now, self._seen[0]

    def line(self) -> str | None:
        """Return the stage in one line, or None before it has begun."""
        seen = self._look()
        if seen is None:
            return None
        text = live_line(*seen, phase=self._phase(seen[1][0]), outlook=self._outlook)
        return ", ".join([text, *self._spent(seen[0])])

    def _spent(self, live: Live) -> list[str]:
        spent_usd = live.spent_usd
        return [] if spent_usd is None else [f"${spent_usd:.3g}{self._of_limit} spent"]

    def _phase(self, elapsed_s: float) -> str | None:
        """Return the phase of a burst."""
        if not self._burst:
            return None
        burst_s = self._burst["base_s"], self._burst["base_s"] + self._burst["burst_s"]
        return ("base", "burst", "recovery")[sum(elapsed_s >= at for at in burst_s)]

    def rows(self, width: int) -> tuple[str, list[list[tuple[str, str]]]] | None:
        """Return the title, and rows of (text, style)."""
        if (seen := self._look()) is None:
            return None
        live, now, before = seen
        self._in_flight.append(float(live.in_flight))
        sent, done = _rates(now, before)
        bars = max(width - 34, 8)
        return self._title(live, now[0]), [
            [(f"{self._outlook.part:<10}", "dim"), *_bar(now[0], live.duration_s, bars - 4, live)],
            [("run       ", "dim"), *self._of_run(now[0], live, bars - 4)],
            *self._judged(live, bars),
            [
                ("in flight ", "dim"),
                (f"{live.in_flight:>9,}", "bold"),
                (" " * 11, ""),
                (spark(list(self._in_flight), bars), "cyan"),
            ],
            [("requests  ", "dim"), (f"{sent:.1f} sent/s, {done:.1f} done/s", "")],
            [("errors    ", "dim"), (_errors(live), "bold red" if live.failed else "")],
            *([("spend     ", "dim"), (text, "bold")] for text in self._spent(live)),
        ]

    def _judged(self, live: Live, bars: int) -> list[list[tuple[str, str]]]:
        """Return a row for each of some SLOs: its percentile so far against its limit."""
        times = live.times or LiveTimes()
        fine, rows, slos = times.fine.copy(), [], self._slos or (None,)
        for slo in slos:
            metric, quantile = (slo.metric, slo.quantile) if slo else ("ttft", 0.95)
            value, row = percentile(live, metric, quantile), LIVE_TIMES.index(metric)
            new = _at_rank(times, fine[row] - self._before[row], 0.5)
            history = self._medians_s.setdefault(metric, deque(maxlen=HISTORY))
            history.append(new if new != inf else None)
            style = "bold"
            if slo:
                style = "bold red" if (value or 0.0) > slo.limit_s else "bold green"
            name = f"{metric.upper()} {slo.percentile if slo else 'p95'}"
            limit = f" of {seconds(slo.limit_s)}" if slo else ""
            figures = [(f"{name:<10}", "dim"), (f"{_shown(value):>9}", style), (f"{limit:<11}", "")]
            rows.append([*figures, (spark(list(history), bars), "cyan")])
        self._before = fine
        return rows

    def _title(self, live: Live, elapsed_s: float) -> str:
        parts = [_number(live, self._outlook), self._phase(elapsed_s) or _level(live)]
        return " · ".join(parts)

    def _of_run(self, elapsed_s: float, live: Live, bars: int) -> list[tuple[str, str]]:
        """Return the bar of the whole run, or how long it has lasted."""
        stages, length_s = self._outlook.stages, self._outlook.length_s
        passed_s = time.monotonic() - self._outlook.began_s
        if length_s is None and stages is not None:
            left = max(stages - live.stage - 1 - self._outlook.before, 0) * live.duration_s
            length_s = passed_s + left + max(live.duration_s - elapsed_s, 0.0)
        if length_s is None:
            return [(f"{_clock(passed_s)} so far", "")]
        return _bar(passed_s, length_s, bars, about="about ")


def _number(live: Live, outlook: Outlook | None) -> str:
    """Return which stage it is: ``stage 3 (4 of ~9)``, ``B stage 1 (3 of 8)``."""
    outlook = outlook or Outlook()
    number = live.stage + 1 + outlook.before
    name = " ".join(filter(None, (outlook.arm, outlook.part, str(live.stage))))
    if not outlook.stages:
        return name
    return f"{name} ({number} of {'~' if outlook.about else ''}{max(outlook.stages, number)})"


def _shown(value_s: float | None) -> str:
    """Return a percentile in two digits, as exact as it is."""
    if value_s == inf:
        return f"> {LIVE_BOUNDS_S[-1]:.0f} s"
    return seconds(None if value_s is None else float(f"{value_s:.2g}"))


def _level(live: Live) -> str:
    if live.kind == "open":
        return load_name(live.level)
    return load_name(None, live.level)


def _errors(live: Live) -> str:
    """Return ``timeout 2, reset 1``."""
    kinds = (f"{k} {n:,}" for k, n in live.kinds.most_common() if k in FAILED_KINDS)
    return ", ".join(kinds) or "none"


def _rates(now: tuple[float, int, int], before: tuple[float, int, int]) -> list[float]:
    """Return (sent, ended) per second between two looks."""
    span_s = max(now[0] - before[0], 1e-9)
    return [(b - a) / span_s for a, b in zip(before[1:], now[1:], strict=True)]


def _bar(
    done_s: float, of_s: float, width: int, live: Live | None = None, about: str = ""
) -> list[tuple[str, str]]:
    share = min(done_s / max(of_s, 1e-9), 1.0)
    full = round(share * width)
    left = f"{about}{_clock(of_s - done_s)} left"
    if done_s >= of_s:
        left = f"waiting for {live.in_flight:,}" if live else "about done"
    return [("━" * full, "cyan"), ("─" * (width - full), "dim"), (f" {share:4.0%}  {left}", "")]


def _clock(length_s: float) -> str:
    minutes, rest = divmod(round(max(length_s, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def percentile(live: Live, metric: str, q: float) -> float | None:
    """Return a percentile of the stage so far in s, to 2 %; None where the times are too few.

    Infinite where failed requests reach into it.
    """
    if live.times is None:
        return None
    counts = live.times.fine[LIVE_TIMES.index(metric)]
    return _at_rank(live.times, counts, q) if counts.sum() >= smallest_n(q) else None


def _at_rank(times: LiveTimes, counts: Ints, q: float) -> float | None:
    """Return the value of a quantile of these counts; None where they are 0."""
    upto = np.cumsum(counts)
    if not upto[-1]:
        return None
    return times.bucket_s(int(np.searchsorted(upto, quantile_rank(q, int(upto[-1])))))


def lines_of(panel: LivePanel, console: Console) -> tuple[str, list[str]]:
    """Return the panel as text with escape sequences, and its lines without."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    width = min(console.width - 1, WIDTH)
    if console.height < LOWEST:
        short = (panel.line() or "")[:width]
        return (f"{short}\n", [short]) if short else ("", [])
    if (seen := panel.rows(width)) is None:
        return "", []
    title, rows = seen
    lines = [Text.assemble(*(text_of(console, *piece) for piece in row)) for row in rows]
    for line in lines:
        line.truncate(width - 4)
    body = Panel(
        Group(*lines), title=text_of(console, title, "bold"), title_align="left", width=width
    )
    with console.capture() as captured:
        console.print(body)
    styled = captured.get()
    return styled, [" " * width] * styled.count("\n")


def live_line(
    live: Live,
    now: tuple[float, int, int],
    before: tuple[float, int, int],
    phase: str | None = None,
    outlook: Outlook | None = None,
) -> str:
    """Return the live line. ``now``, ``before``: s since the start, requests sent, ended."""
    sent, done = _rates(now, before)
    level = f"{_level(live)}{' planned' if live.kind == 'open' else ', closed loop'}"
    left_s = max(live.duration_s - now[0], 0.0)
    p50, p99 = (_shown(percentile(live, "ttft", q)) for q in (0.5, 0.99))
    left = f"{left_s:.0f} s left" if left_s else "waiting for answers"
    return (
        f"{_number(live, outlook)}: {f'{phase}, ' if phase else ''}{level}, {sent:.1f} sent/s, "
        f"{done:.1f} done/s, {live.in_flight} in flight, TTFT p50 {p50} p99 {p99}, "
        f"{counted(live.failed, 'error')}, {left}"
    )
