"""The live line on stderr while a stage goes on; plain lines where stderr is no terminal."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

from loadgen.generator import Generator
from loadgen.plan import LIVE_TTFTS, Live, StagePlan
from loadgen.protocols import printable
from reports.figures import failures

PAINT_EVERY_S = 0.5
PLAIN_EVERY_S = 10.0


class Progress:
    """Prints to stderr only, where it is given no other ``console``; never touches stdout."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)

    def note(self, text: str) -> None:
        """One line that stays."""
        with contextlib.suppress(OSError):  # nobody reads any more: that is no reason to lose a run
            self._console.print(Text(printable(text, 1000)), soft_wrap=True)

    @contextlib.contextmanager
    def stage(self, generator: Generator, plan: StagePlan) -> Iterator[None]:
        """Show the stage that ``generator`` is about to run. A painted line costs the event loop some 50 µs."""
        painter = asyncio.create_task(self._paint(generator, plan))
        try:
            yield
        finally:
            painter.cancel()
            self._overwrite("")

    @contextlib.contextmanager
    def at_work(self, what: str) -> Iterator[None]:
        """A line every PLAIN_EVERY_S while the block computes, without a loop that could say so."""
        began_s, over = time.monotonic(), threading.Event()

        def say() -> None:
            while not over.wait(PLAIN_EVERY_S):
                self.note(f"{what}: at work for {time.monotonic() - began_s:.0f} s")

        threading.Thread(target=say, daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def judged(self, stage: dict[str, Any]) -> None:
        """One line for a finished stage."""
        self.note(stage_line(stage))

    async def _paint(self, generator: Generator, plan: StagePlan) -> None:
        terminal = self._console.is_terminal
        while True:
            await asyncio.sleep(PAINT_EVERY_S if terminal else PLAIN_EVERY_S)
            if generator.live.stage != plan.index or not generator.live.began_s:
                continue
            line = live_line(generator.live)
            if terminal:
                self._overwrite(line[: self._console.width - 1])
            else:
                self.note(line)

    def _overwrite(self, line: str) -> None:
        if self._console.is_terminal:
            with contextlib.suppress(OSError):
                self._console.file.write(f"\r\x1b[2K{line}")
                self._console.file.flush()


def live_line(live: Live) -> str:
    """What is going on, in one line."""
    elapsed_s = time.monotonic() - live.began_s
    is_open = live.kind == "open"
    level = f"{live.level:.4g} req/s offered on average" if is_open else f"{live.level:g} users, closed loop"
    left_s = max(live.duration_s - elapsed_s, 0.0)
    recent = sorted(live.ttft_s[-LIVE_TTFTS:])
    ttft = "TTFT -"
    if recent:
        p50, p99 = recent[len(recent) // 2], recent[min(int(len(recent) * 0.99), len(recent) - 1)]
        ttft = f"TTFT p50 {seconds(p50)} p99 {seconds(p99)}"
    left = f"{left_s:.0f} s left" if left_s else "draining"
    achieved = live.ended / max(elapsed_s, 1e-9)
    return f"stage {live.stage}: {level}, {achieved:.1f} done/s, {live.in_flight} in flight, {ttft}, {live.failed} errors, {left}"


def stage_line(stage: dict[str, Any]) -> str:
    """The outcome of one stage, in one line."""
    is_open, ttft = stage["kind"] == "open", stage["ttft_from_schedule_s"]
    level = f"{stage['offered_rps']:.3g} req/s" if is_open else f"concurrency {stage['concurrency_set']}"
    curve = f", all at {stage['lengths']} lengths" if stage["lengths"] else ""
    verdict = {True: "SLO met", False: "SLO broken", None: "SLO undecided"}[stage["slo_met"]]
    parts = [
        f"stage {stage['index']}{curve}: {level}",
        f"{stage['requests']} requests",
        f"TTFT p50 {seconds(ttft.get('p50'))} p99 {seconds(ttft.get('p99'))}",
        f"ITL p99 {seconds(stage['itl_s'].get('p99'))}",
        f"{failures(stage['errors'])} errors",
        "unstable" if stage["stable"] is False else "",
        "CLIENT LIMITED" if stage["client_limited"] else "",
        verdict if stage["slo_verdicts"] else "no SLO",
    ]
    return ", ".join(part for part in parts if part)


def seconds(value: float | None) -> str:
    """A duration for people: ms below 1 s."""
    if value is None:
        return "-"
    return f"{value * 1e3:.3g} ms" if value < 0.9995 else f"{value:.3g} s"
