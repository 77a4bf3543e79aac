"""The stages of a run from low to high load, as the rules of diagnosis look at them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from ampacity.analysis.contract.limits import Evidence
from ampacity.analysis.contract.stage import Server, Stage
from ampacity.analysis.contract.summary import SloLimit, Summary
from ampacity.loadgen.rundir.records import FAILED_KINDS

NEARLY_IDLE = 4.0  # a load at which requests hardly meet each other
SEEN_BY_SERVER = 0.8  # of the requests in flight: below it some engines are not among its metrics
BEYOND = 1.25  # a load this far above the capacity shows another state than the one at its limit
ABOUT_HALF = 0.6
SATURATED = 0.9  # achieved / offered below this: the throughput is at its limit


class CannotTell(Exception):
    """A rule lacks a figure; the message names it."""


@dataclass(frozen=True)
class Found:
    """A rule's figure against its threshold, with what it read."""

    strength: float
    evidence: tuple[Evidence, ...]
    title: str | None = None  # None: the rule's
    tested: tuple[Evidence, ...] = ()  # what the run itself shows of the rule's refutation


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
        return (self.low.concurrency or 0.0) <= NEARLY_IDLE and self.low.stable is not False

    @cached_property
    def broken(self) -> Stage | None:
        """Return the load that shows by what the SLOs break.

        The lowest that violates one. Where that is far above the capacity: a load between them whose
        latency is over a limit, though too few requests decide it.
        """
        found = next((s for s in self.stages if self.violated(s)), None)
        if found is None or not self.beyond(found):
            return found
        capacity = self.summary.capacity.capacity_rps or 0.0
        near = self.stages[: self.stages.index(found)]
        return next(
            (s for s in near if (s.offered_rps or 0.0) > capacity and self.exceeded(s)), found
        )

    @property
    def saturated(self) -> Stage | None:
        """Return the highest load, where it is beyond the throughput of the endpoint."""
        top = self.stages[-1]
        if not top.achieved_rps or not top.offered_rps or top.stable is not False:
            return None
        return top if top.achieved_rps < SATURATED * top.offered_rps else None

    def halved(
        self, stage: Stage, figure: str, of: Callable[[Stage], float | None], unit: str
    ) -> tuple[Evidence, ...]:
        """Return a figure at the highest load of about half of a stage's, at the stage, and by how
        much the rate is lower.
        """
        rate = stage.offered_rps or 0.0
        loads = [(s.offered_rps or 0.0, s) for s in self.kept_up if s.ok]
        half = [(x, s) for x, s in loads if 0 < x <= ABOUT_HALF * rate]
        if not half:
            return ()
        lower, at = max(half, key=lambda one: one[0])
        pair = (Evidence(figure=figure, value=of(s), stage=s.name, unit=unit) for s in (at, stage))
        less = Evidence(figure="a rate lower by", value=1 - lower / rate, stage=None, unit="share")
        return (*pair, less)

    @property
    def limited(self) -> Stage | None:
        """Return the load at which the endpoint showed a limit of any kind."""
        return self.broken or self.saturated

    def violated(self, stage: Stage) -> list[SloLimit]:
        """Return the SLOs that the latencies of a stage violate: its failures alone do not.

        Time-outs are latencies.
        """
        return self._by_latency(
            stage, {v.slo for v in stage.slo_verdicts if v.verdict == "violated"}
        )

    def exceeded(self, stage: Stage) -> list[SloLimit]:
        """Return the SLOs that a stage violates; where none is decided, those over their limit."""
        over = {
            v.slo
            for v in stage.slo_verdicts
            if v.value_s is not None and v.value_s > (self._slo[v.slo].limit_s or math.inf)
        }
        return self.violated(stage) or self._by_latency(stage, over)

    def _by_latency(self, stage: Stage, texts: set[str]) -> list[SloLimit]:
        failed = sum(n for kind, n in stage.errors.items() if kind in FAILED_KINDS - {"timeout"})
        found = [slo for text, slo in self._slo.items() if text in texts]
        return [s for s in found if s.quantile and failed < (1 - s.quantile) * stage.requests]

    def beyond(self, stage: Stage) -> tuple[Evidence, ...]:
        """Return, as evidence, how far a load is above the capacity, where it is not near it."""
        capacity, offered = self.summary.capacity, stage.offered_rps or 0.0
        highest = (capacity.capacity_rps_ci or (None, None))[1] or capacity.capacity_rps
        if not highest or offered < BEYOND * highest:
            return ()
        what = "offered load / highest capacity possible: no load nearer to it shows the limit"
        return (Evidence(figure=what, value=offered / highest, stage=stage.name, unit=""),)

    def engines(self, stage: Stage) -> float:
        """Return how many engines serve. Raises CannotTell."""
        server, law = stage.server, stage.littles_law.server
        if server is None or not server.engines:
            raise CannotTell("how many engines share the load: their /metrics were not read")
        if law is not None and law.ratio is not None and law.ratio < SEEN_BY_SERVER:
            raise CannotTell("how many engines share the load: /metrics holds a part of it")
        return server.engines

    def prefill_busy(self, stage: Stage, least: float) -> float:
        """Return the share of its time that an engine computes prompts at a load.

        Rate x what a prompt adds to a step, which is the mean TTFT of the idle endpoint less a step
        (utilisation law: Denning and Buzen 1978), over the number of engines. Where one engine
        would be busy for less than ``least`` their number is not needed: the share is at most that.
        """
        if not self.idle:
            raise CannotTell(
                "no stage of a nearly idle endpoint (in flight at most 4) shows the time of a prompt"
            )
        alone_s = self.low.ttft_s.mean if self.low.ttft_s.mean is not None else self.low.ttft_s.p50
        rate = stage.achieved_rps
        if alone_s is None or rate is None:
            raise CannotTell("TTFT of the nearly idle endpoint is not known")
        busy = rate * max(alone_s - (self.low.itl_s.p50 or 0.0), 0.0)
        return busy if busy < least else busy / self.engines(stage)

    def with_server(self) -> list[tuple[Stage, Server]]:
        """Return the stages during which the server reported its metrics. Raises CannotTell."""
        found = [(s, s.server) for s in self.kept_up if s.server is not None]
        if not found:
            raise CannotTell("the server's own metrics were not read (/metrics)")
        return found
