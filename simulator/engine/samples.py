"""The engines' own state once a second of virtual time, as a scrape of their /metrics shows it."""

from collections.abc import Sequence
from typing import NamedTuple

from ampacity.simulator.engine.engine import Engine

EVERY_S = 1.0


class Sample(NamedTuple):
    """State of all engines together at a time; counters grow through the run."""

    at_s: float
    running: int
    waiting: int
    kv_usage: float
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    drafted: int
    accepted: int


class Sampler:
    """Samples engines at whole seconds. What a step that is under way changes is seen at its end."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.samples: list[Sample] = []
        self.due_s = 0.0
        self._engines = engines

    def step_ended(self, start_s: float, end_s: float, *, idle_before: bool) -> None:
        """Take the samples due by the end of a step; before its start the engines may be idle."""
        idle = self._state(idle=True)
        while idle_before and self.due_s < start_s:
            self._take(idle)
        busy = self._state(idle=False)
        while self.due_s <= end_s:
            self._take(busy)

    def _take(self, state: Sample) -> None:
        self.samples.append(state._replace(at_s=self.due_s))
        self.due_s += EVERY_S

    def _state(self, *, idle: bool) -> Sample:
        engines = self._engines
        return Sample(
            0.0,
            0 if idle else sum(engine.running for engine in engines),
            0 if idle else sum(engine.waiting for engine in engines),
            max(engine.kv_usage for engine in engines),
            sum(engine.preemptions for engine in engines),
            sum(engine.prefix_queries for engine in engines),
            sum(engine.prefix_hits for engine in engines),
            sum(engine.batch.drafted for engine in engines),
            sum(engine.batch.accepted for engine in engines),
        )
