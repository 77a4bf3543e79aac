"""Print progress to stderr: a live line on a terminal, else plain lines."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

from ampacity.analysis.load_names import load_name
from ampacity.analysis.metrics.observations import quantile_rank
from ampacity.analysis.slo import verdict_word
from ampacity.analysis.stats.intervals import smallest_n
from ampacity.loadgen.generator import Generator
from ampacity.loadgen.plan import LIVE_TTFTS, Live, StagePlan
from ampacity.loadgen.probe.diagnosis import duration_text as seconds
from ampacity.loadgen.send.protocols import printable
from ampacity.reports.render.figures import counted, failures, percentile_text

PAINT_EVERY_S = 0.5
PLAIN_EVERY_S = 10.0  # also the time over which the rates of the live line are taken
UNDECIDED = {
    "too few": "too few requests",
    "too short": "too short",
    "so near": "near its limit",
    "the share": "on the edge",
    "were cut off": "cut off in flight",
}
"""Short words for a verdict's ``cause``, by a text that it contains."""


class Progress:
    """Prints to stderr, or to ``console``; never to stdout."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)

    def note(self, text: str) -> None:
        """Print a line."""
        with contextlib.suppress(OSError):  # a closed stderr must not end the run
            self._console.print(Text(printable(text, 1000)), soft_wrap=True)

    @contextlib.contextmanager
    def stage(self, generator: Generator, plan: StagePlan) -> Iterator[None]:
        """Show the stage that ``generator`` is about to run; a line costs the loop about 50 µs."""
        painter = asyncio.create_task(self._paint(generator, plan))
        try:
            yield
        finally:
            painter.cancel()
            self._overwrite("")

    @contextlib.contextmanager
    def at_work(self, what: str) -> Iterator[None]:
        """Print a line every PLAIN_EVERY_S while the block computes without yielding to a loop."""
        began_s, over = time.monotonic(), threading.Event()

        def say() -> None:
            while not over.wait(PLAIN_EVERY_S):
                self.note(f"{what}: at work for {time.monotonic() - began_s:.0f} s")

        threading.Thread(target=say, daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def judged(self, stage: dict[str, Any], *, burst: bool = False) -> None:
        """Print a line about a finished stage."""
        self.note(stage_line(stage, burst=burst))

    async def _paint(self, generator: Generator, plan: StagePlan) -> None:
        terminal = self._console.is_terminal
        every_s = PAINT_EVERY_S if terminal else PLAIN_EVERY_S
        seen = deque([(0.0, 0, 0)], round(PLAIN_EVERY_S / every_s))
        while True:
            await asyncio.sleep(every_s)
            if generator.live.stage != plan.index or not generator.live.began_s:
                continue
            live = generator.live
            now = time.monotonic() - live.began_s, live.released, live.ended
            line = live_line(live, now, seen[0])
            seen.append(now)
            if terminal:
                self._overwrite(line[: self._console.width - 1])
            else:
                self.note(line)

    def _overwrite(self, line: str) -> None:
        if self._console.is_terminal:
            with contextlib.suppress(OSError):
                self._console.file.write(f"\r\x1b[2K{line}")
                self._console.file.flush()


def live_line(live: Live, now: tuple[float, int, int], before: tuple[float, int, int]) -> str:
    """Return the live line. ``now``, ``before``: s since the start, requests sent, ended."""
    span_s = max(now[0] - before[0], 1e-9)
    sent, done = ((b - a) / span_s for a, b in zip(before[1:], now[1:], strict=True))
    if live.kind == "open":
        level = f"{load_name({'offered_rps': live.level})} on average"
    else:
        level = f"{load_name({'concurrency': live.level})}, closed loop"
    left_s = max(live.duration_s - now[0], 0.0)
    ttft, n = sorted(live.ttft_s[-LIVE_TTFTS:]), len(live.ttft_s[-LIVE_TTFTS:])
    p50, p99 = (
        seconds(ttft[quantile_rank(q, n) - 1] if n >= smallest_n(q) else None) for q in (0.5, 0.99)
    )
    left = f"{left_s:.0f} s left" if left_s else "draining"
    return (
        f"stage {live.stage}: {level}, {sent:.1f} sent/s, {done:.1f} done/s, "
        f"{live.in_flight} in flight, TTFT p50 {p50} p99 {p99}, "
        f"{counted(live.failed, 'error')}, {left}"
    )


def stage_line(stage: dict[str, Any], *, burst: bool = False) -> str:
    """Return the outcome of a stage in one line; a ``burst`` is judged by its phases, not here."""
    ttft = stage["ttft_from_schedule_s"]
    curve = f", all at {stage['lengths']} lengths" if stage["lengths"] else ""
    verdict = f"SLO {verdict_word(stage['slo_met'])}" if stage["slo_verdicts"] else "no SLO"
    if stage["slo_verdicts"] and stage["slo_met"] is None:
        verdict += f" ({_why(stage)})"
    if burst:
        verdict = ""
    parts = [
        f"stage {stage['index']}{curve}: {load_name(stage)}",
        f"{stage['requests']} requests",
        f"TTFT p50 {seconds(ttft.get('p50'))} p99 {_p99(ttft)}",
        f"ITL p99 {_p99(stage['itl_s'])}",
        counted(failures(stage["errors"]), "error"),
        "unstable" if stage["stable"] is False else "",
        "CLIENT LIMITED, no finding" if stage["client_limited"] else verdict,
    ]
    return ", ".join(part for part in parts if part)


def _p99(held: dict[str, Any]) -> str:
    return percentile_text(held.get("p99"), held.get("p99_ci"), seconds)


def _why(stage: dict[str, Any]) -> str:
    """Return why the stage's SLO is inconclusive, in a few words."""
    cause = next(
        (str(v["cause"]) for v in stage["slo_verdicts"] if v["verdict"] == "inconclusive"), ""
    )
    return next((words for part, words in UNDECIDED.items() if part in cause), "no value")
