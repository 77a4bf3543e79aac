"""Print progress to stderr: a live panel on a terminal, else plain lines.

A thread paints, so that a terminal that was stopped (Ctrl-S) stops no request.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any, Self

from rich.console import Console

from ampacity.analysis.contract.figures import Percentiles
from ampacity.analysis.contract.stage import Stage
from ampacity.analysis.load_names import load_name
from ampacity.analysis.slo import verdict_word
from ampacity.live_panel import LivePanel, Outlook, lines_of
from ampacity.loadgen.generator import Generator
from ampacity.loadgen.plan import StagePlan
from ampacity.loadgen.probe.diagnosis_rules import duration_text as seconds
from ampacity.loadgen.send.protocols import printable
from ampacity.reports.render import plain as plain  # registers "in_ascii"
from ampacity.reports.render.figures import (
    counted,
    ended_otherwise,
    failures,
    percentile_text,
    undecided,
)
from ampacity.settings import Settings

PAINT_EVERY_S = 0.5
PLAIN_EVERY_S = 1.0
PLAIN_LINES = 1000  # of a run, about
AT_WORK_EVERY_S = 10.0
CLOSE_S = 1.0  # to wait for a terminal that was stopped
SWITCH_S = 0.0005  # the painter gives way to the load within this time


class Progress:
    """Prints to stderr, or to ``console``; never to stdout. ``with`` starts the painter."""

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self.quiet = quiet
        self._moves = self._console.is_terminal and not self._console.is_dumb_terminal
        self._notes: SimpleQueue[str | None] = SimpleQueue()  # None: the last one
        self._painter: threading.Thread | None = None
        self._panel: LivePanel | None = None
        self._painted: list[str] = []  # lines of the panel that are on the terminal
        self._outlook = Outlook()

    def __enter__(self) -> Self:
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        self._painter = threading.Thread(target=self._paint, daemon=True)
        self._painter.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._notes.put(None)
        if self._painter:
            self._painter.join(CLOSE_S)
        self._painter = None
        sys.setswitchinterval(self._switch_s)

    def note(self, text: str) -> None:
        """Print a line."""
        if self.quiet:
            return
        line = printable(text, 1000)
        if self._painter:
            self._notes.put(line)
        else:
            self._write(f"{line}\n")

    def ask(self, question: str) -> bool:
        """Ask on the terminal; return whether the answer is yes."""
        self._write(f"{question} [y/N] ")
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    def expect(self, outlook: Outlook) -> None:
        """Set how many stages the run has, and how long it takes."""
        self._outlook = outlook

    def repeated(self) -> None:
        """Expect one stage more."""
        if self._outlook.stages:
            self._outlook = replace(self._outlook, stages=self._outlook.stages + 1)

    @contextlib.contextmanager
    def stage(
        self,
        generator: Generator,
        plan: StagePlan,
        settings: Settings,
        burst: dict[str, Any] | None = None,
    ) -> Iterator[None]:
        """Show the stage that ``generator`` is about to run; ``burst``: its lengths in run.json."""
        self._panel = LivePanel(
            generator, plan, settings.slos, self._outlook, burst, settings.max_cost
        )
        try:
            yield
        finally:
            self._panel = None

    @contextlib.contextmanager
    def at_work(self, what: str) -> Iterator[None]:
        """Print a line every AT_WORK_EVERY_S while the block computes without yielding."""
        began_s, over = time.monotonic(), threading.Event()

        def say() -> None:
            while not over.wait(AT_WORK_EVERY_S):
                self.note(f"{what}: at work for {time.monotonic() - began_s:.0f} s")

        threading.Thread(target=say, daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def judged(self, stage: Stage, *, burst: bool = False) -> None:
        """Print a line about a finished stage."""
        line = stage_line(stage, burst=burst)
        self.note(f"{self._outlook.arm}: {line}" if self._outlook.arm else line)

    def _paint(self) -> None:
        """Print notes and the stage until there is a None."""
        last_s, going = 0.0, True
        while going:
            plain_s = max(PLAIN_EVERY_S, (self._outlook.length_s or 0.0) / PLAIN_LINES)
            every_s = PAINT_EVERY_S if self._moves else plain_s
            notes = self._next_notes(max(last_s + every_s - time.monotonic(), 0.0))
            going = None not in notes
            text = "".join(f"{note}\n" for note in notes if note is not None)
            due = time.monotonic() - last_s >= every_s
            if due:
                last_s = time.monotonic()
            panel = self._panel if going and not self.quiet else None
            if self._moves:
                self._write(self._erased() + text + self._painted_again(panel))
            else:
                line = panel.line() if panel and due else None
                self._write(text + (f"{line}\n" if line else ""))

    def _next_notes(self, wait_s: float) -> list[str | None]:
        """Return the notes of the next ``wait_s``, earlier if there is one."""
        with contextlib.suppress(Empty):
            found = [self._notes.get(timeout=wait_s)]
            while True:
                try:
                    found.append(self._notes.get_nowait())
                except Empty:
                    return found
        return []

    def _erased(self) -> str:
        """Return what erases the panel; a narrower terminal has wrapped its lines since."""
        width = max(self._console.width, 1)
        rows = sum(-(-max(len(line), 1) // width) for line in self._painted)
        return "\r\x1b[2K" + "\x1b[1A\x1b[2K" * rows if rows else ""

    def _painted_again(self, panel: LivePanel | None) -> str:
        styled, self._painted = lines_of(panel, self._console) if panel else ("", [])
        return styled

    def _write(self, text: str) -> None:
        """Write to the descriptor: the stream's lock would outlive a thread that is held up."""
        file = self._console.file
        with contextlib.suppress(OSError, ValueError):  # a closed stderr must not end the run
            if not text:
                return
            try:
                descriptor = file.fileno()
            except OSError:  # a stream in memory
                file.write(text)
                return
            data = memoryview(text.encode(self._console.encoding, "in_ascii"))
            while data:
                data = data[os.write(descriptor, data) :]


def stage_line(stage: Stage, *, burst: bool = False) -> str:
    """Return the outcome of a stage in one line; a ``burst`` is judged by its phases, not here."""
    ttft = stage.ttft_from_schedule_s
    curve = f", all at {stage.lengths} lengths" if stage.lengths else ""
    verdict = f"SLO {verdict_word(stage.slo_met)}" if stage.slo_verdicts else "no SLO"
    if stage.slo_verdicts and stage.slo_met is None:
        verdict += f" ({_why(stage)})"
    if burst:
        verdict = ""
    parts = [
        f"stage {stage.index}{curve}: {load_name(stage.offered_rps, stage.concurrency_set)}",
        f"{stage.requests} requests",
        f"TTFT p50 {seconds(ttft.p50)} p99 {_p99(ttft)}",
        f"ITL p99 {_p99(stage.itl_s)}",
        counted(failures(stage.errors), "error"),
        *ended_otherwise(stage.errors),
        "unstable" if stage.stable is False else "",
        "CLIENT LIMITED, no finding" if stage.client_limited else verdict,
    ]
    return ", ".join(part for part in parts if part)


def _p99(held: Percentiles) -> str:
    return percentile_text(held.p99, held.p99_ci, seconds)


def _why(stage: Stage) -> str:
    """Return why the stage's SLO is inconclusive, in a few words."""
    cause = next((str(v.cause) for v in stage.slo_verdicts if v.verdict == "inconclusive"), "")
    return undecided(cause)
