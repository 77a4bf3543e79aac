"""The stages of a run from low to high load, as the rules of diagnosis look at them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from ampacity.analysis.contract.limits import Evidence
from ampacity.analysis.contract.stage import Server, Stage
from ampacity.analysis.contract.summary import SloLimit, Summary

LOW_LOAD_IN_FLIGHT = 4.0  # a load at which requests hardly meet each other
SATURATED = 0.9  # achieved / offered below this: the throughput is at its limit


class CannotTell(Exception):
    """A rule lacks a figure; the message names it."""


@dataclass(frozen=True)
class Found:
    """A rule's figure against its threshold, with what it read."""

    strength: float
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True)
class Rule:
    """One row of the table; ``check`` returns None where the rule does not hold."""

    name: str
    title: str
    check: Callable[[Curve], Found | None]
    lever: str
    refuted_by: str


class Curve:
    """The stages of a run from low to high load, as the rules look at them."""

    def __init__(self, summary: Summary) -> None:
        self.summary = summary
        self.kept_up = [s for s in summary.stages if not s.client_limited]
        self._slo = {slo.text: slo for slo in summary.slos}

    @cached_property
    def stages(self) -> list[Stage]:
        """Return the stages with open arrivals. Raises CannotTell where there is none."""
        if self.summary.burst:
            raise CannotTell("a burst is no steady load")
        found = [s for s in self.kept_up if s.kind == "open" and s.offered_rps and s.ok]
        if not found:
            raise CannotTell("the run has no answered stage with open arrivals (--rates)")
        return sorted(found, key=lambda s: s.offered_rps or 0.0)

    @property
    def low(self) -> Stage:
        """Return the lowest load."""
        return self.stages[0]

    @property
    def idle(self) -> bool:
        """Return whether requests hardly meet each other at the lowest load."""
        return (self.low.concurrency or 0.0) <= LOW_LOAD_IN_FLIGHT and self.low.stable is not False

    @cached_property
    def broken(self) -> Stage | None:
        """Return the lowest load that violates an SLO."""
        return next((s for s in self.stages if self.violated(s)), None)

    @property
    def saturated(self) -> Stage | None:
        """Return the highest load, where it is beyond the throughput of the endpoint."""
        top = self.stages[-1]
        if not top.achieved_rps or not top.offered_rps or top.stable is not False:
            return None
        return top if top.achieved_rps < SATURATED * top.offered_rps else None

    @property
    def limited(self) -> Stage | None:
        """Return the load at which the endpoint showed a limit of any kind."""
        return self.broken or self.saturated

    def violated(self, stage: Stage) -> list[SloLimit]:
        """Return the SLOs that a stage violates."""
        return [self._slo[v.slo] for v in stage.slo_verdicts if v.verdict == "violated"]

    def prefill_busy(self, stage: Stage) -> float:
        """Return the share of its time that one engine computes prompts at a load.

        Rate x what a prompt adds to a step, which is the mean TTFT of the idle endpoint less a step
        (utilisation law: Denning and Buzen 1978).
        """
        if not self.idle:
            raise CannotTell(
                "no stage at low load (in flight at most 4) shows the time of a prompt"
            )
        alone_s = self.low.ttft_s.mean if self.low.ttft_s.mean is not None else self.low.ttft_s.p50
        rate = stage.achieved_rps
        if alone_s is None or rate is None:
            raise CannotTell("TTFT at low load is not known")
        return rate * max(alone_s - (self.low.itl_s.p50 or 0.0), 0.0)

    def with_server(self) -> list[tuple[Stage, Server]]:
        """Return the stages during which the server reported its metrics. Raises CannotTell."""
        found = [(s, s.server) for s in self.kept_up if s.server is not None]
        if not found:
            raise CannotTell("the server's own metrics were not read (/metrics)")
        return found
