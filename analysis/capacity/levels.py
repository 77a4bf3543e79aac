"""The stages of a run as levels of load, each with its verdicts. Rates in requests/s."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

import numpy as np

from ampacity.analysis.contract.stage import Loop, Stage
from ampacity.analysis.load_names import load_name
from ampacity.analysis.slo import GAP_METRICS, WAITS, Slo, parse_slo
from ampacity.analysis.stage.throughput import CHANCE_SD, REQUESTS_MIN, all_failed, is_figure
from ampacity.analysis.stats.intervals import prob_at_least
from ampacity.loadgen.rundir.records import FAILED_KINDS

OVERLOADED = 1.05  # offered over answered rate above which an unstable stage shows the capacity
FILLING = 0.1  # a stage that is blind to overloads this large may only be filling up
QUOTA_SHARE = 0.01  # of the requests refused with 429 or 529: a quota is met ...
QUOTA_STOPS = 0.05  # ... and at higher loads more of them would be
SURE = 0.005  # chance that a stage which surely violates an SLO just meets it


@dataclass(frozen=True)
class Verdict:
    """The verdict of a stage on one SLO."""

    text: str  # of the SLO
    slo: Slo
    value_s: float | None
    attainment: float | None  # share of the samples within the limit
    effective: float  # independent samples
    reason: str | None = None

    @property
    def is_known(self) -> bool:
        return self.attainment is not None and self.effective >= 1

    @property
    def is_over(self) -> bool:
        return self.attainment is not None and self.attainment < self.slo.quantile

    @property
    def missed(self) -> float:
        """Return the share of the samples beyond the limit; 0 where it is not known."""
        return 0.0 if self.attainment is None else 1 - self.attainment

    def clearly_violated(self, chance: float) -> bool:
        """Return whether an SLO just met would be missed so often with at most ``chance``."""
        n, allowed = self.effective, 1 - self.slo.quantile
        return self.is_known and prob_at_least(self.missed * n, n, allowed) <= chance


@dataclass(frozen=True)
class Level:
    """One stage, its load, and what it shows."""

    index: int  # of the stage
    is_open: bool
    load: float  # offered rate, or users of a closed loop
    requests: int
    warmup: int  # requests before them that were cut
    achieved_rps: float  # completions per second in the window
    concurrency: float  # mean requests in flight
    concurrency_se: float  # its standard error
    stable: bool | None
    met: bool | None
    verdicts: tuple[Verdict, ...]
    attainment: float | None  # share of the requests that met every SLO
    client_limited: bool
    figures: Stage

    @property
    def x(self) -> float:
        return math.log(self.load)

    @property
    def rate(self) -> float:
        return stage_rate(self.figures)

    @property
    def highest_rate(self) -> float:
        """Return the rate where this level bounds the capacity from above."""
        return self.load if self.is_open else self.rate

    @property
    def in_flight(self) -> float:
        """Return the concurrency that was set, or, open or where users pause, the mean."""
        paused = self.is_open or self.figures.users_pause
        return self.concurrency if paused else self.load

    @property
    def window_s(self) -> float:
        return float(self.figures.window.end_s - self.figures.window.start_s)

    @property
    def is_figure(self) -> bool:
        return is_figure(self.figures)

    @property
    def overloaded(self) -> bool:
        """Return whether more was offered than the server can do: what it answers is its most."""
        return self.stable is False and self.load > OVERLOADED * self.achieved_rps > 0

    @property
    def is_over(self) -> bool:
        """Return whether this level looks to be above the limit.

        A share within the limit below its SLO, or no steady state. A stage that is short against
        what is in it fills up, which looks like an overload: there only misses count.
        """
        grows = self.stable is False and all(self.blind(v.slo) <= FILLING for v in self.verdicts)
        return grows or any(v.is_over for v in self.verdicts)

    def verdict(self, slo: Slo) -> Verdict | None:
        text = slo.text
        return next((v for v in self.verdicts if v.text == text), None)

    def samples(self, slo: Slo) -> int:
        gaps = slo.metric in GAP_METRICS
        return int(getattr(self.figures, f"{slo.metric}_s").n if gaps else self.requests)

    def median_s(self, slo: Slo) -> float:
        """Return the median of an SLO's metric, incl. queueing if there is such a figure, or 0."""
        of = self.figures if slo.class_ is None else self.figures.classes.get(slo.class_)
        names = (f"{slo.metric}_from_schedule_s", f"{slo.metric}_s")
        held = next((getattr(of, name) for name in names if hasattr(of, name)), None)
        return held.p50 or 0.0 if held else 0.0

    def together(self, slo: Slo) -> float:
        """Return requests that share one fate: in flight, or arriving within the limit."""
        return self.concurrency + (slo.limit_s if slo.metric in WAITS else 0.0) * self.load

    def blind(self, slo: Slo) -> float:
        """Return the overload, as a share of the load, that a stage is too short to show.

        0 where the SLO limits no wait: no overload ever shows in it, only in the steady state.
        """
        if slo.metric not in WAITS:
            return 0.0
        return self.together(slo) / max(self.requests + self.warmup, 1)


def refused_share(stage: Stage) -> float:
    """Return the share of a stage's requests that were refused for their rate (429, 529)."""
    return stage.errors.get("rate_limited", 0) / max(stage.requests, 1)


def met_quota(stage: Stage) -> str | None:
    """Return the share of requests that a stage's quota refuses, in words; None: (almost) none."""
    share, load = refused_share(stage), load_name(stage.offered_rps, stage.concurrency_set)
    told = f"{share:.0%} of the requests at {load} are refused with 429: a quota, not the hardware"
    return told if share >= QUOTA_STOPS else None


def no_higher(stages: Sequence[Stage]) -> str | None:
    """Return why a load above the last stage's would show nothing more; None: it would."""
    if not stages:
        return None
    last = stages[-1]
    failed = sum(n for kind, n in last.errors.items() if kind in FAILED_KINDS)
    most = f"most of the requests at {load_name(last.offered_rps, last.concurrency_set)} failed"
    return met_quota(last) or (most if 2 * failed > last.requests else None)


def level_of(stage: Stage) -> Level:
    """Return a stage object as a level."""
    return Level(
        index=stage.index,
        is_open=stage.kind == "open",
        load=_load(stage),
        requests=stage.requests,
        warmup=stage.window.warmup_requests,
        achieved_rps=stage.achieved_rps,
        concurrency=stage.concurrency,
        concurrency_se=stage.concurrency_se or 0.0,
        stable=stage.stable,
        met=stage.slo_met,
        verdicts=tuple(
            Verdict(
                v.slo,
                parse_slo(v.slo),
                v.value_s,
                v.attainment,
                float(v.requests_effective or 0.0),
                v.reason,
            )
            for v in stage.slo_verdicts
        ),
        attainment=stage.slo_attainment,
        client_limited=bool(stage.client_limited),
        figures=stage,
    )


def _load(stage: Stage) -> float:
    return float((stage.offered_rps if stage.kind == "open" else stage.concurrency_set) or 0.0)


def levels_of(stages: Sequence[Stage], kind: str) -> list[Level]:
    """Return the stages of one kind that are findings, as levels in order of load.

    A stage that ended early had another load than the one it is named for: it counts only alone.
    """
    kept = [
        s
        for s in stages
        if s.kind == kind
        and not s.client_limited
        and s.requests
        and _load(s)
        and not all_failed(s)
        and (len(stages) == 1 or not s.ended_early)
    ]
    return [level_of(s) for s in sorted(kept, key=_load)]


def open_levels(stages: Sequence[Stage]) -> list[Level]:
    """Return the open stages that count for an estimate, in order of load.

    Not cut short, nor limited by the client, nor violated by an outage, with an answer.
    """
    kept = [
        s for s in stages if s.slo_verdicts and not s.ended_early and (s.slo_met or not s.outage)
    ]
    return levels_of(kept, "open")


def without_outages(stages: Sequence[Stage]) -> list[Stage]:
    """Return the stages without those whose SLOs an outage violated, but for overloads."""
    top = {
        kind: max((_load(s) for s in stages if s.kind == kind and s.slo_met), default=math.inf)
        for kind in ("open", "closed")
    }
    return [s for s in stages if s.slo_met or not s.outage or _load(s) > top[s.kind]]


def violations_above_met(levels: Sequence[Level]) -> list[Level]:
    """Return the levels over the limit that lie above every load shown to meet it.

    A few misses in a short stage far below are chance, or not the load's doing: they bound nothing
    from above.
    """
    met = max((level.load for level in levels if level.met), default=0.0)
    return [level for level in levels if level.is_over and level.load > met]


def surely_violated(levels: Sequence[Level]) -> float | None:
    """Return ln of the lowest load, above all that met the SLOs, that surely violates them."""
    sure = [
        level.x
        for level in violations_above_met(levels)
        if level.overloaded or any(v.clearly_violated(SURE) for v in level.verdicts)
    ]
    return min(sure, default=None)


def stage_rate(stage: Stage) -> float:
    """Return a stage's rate: offered and answered (open loop), or achieved (closed loop).

    Where fewer arrived than chance explains (a trace, sessions that ran out), at those that did.
    """
    if stage.kind != "open":
        return stage.achieved_rps
    offered, arrived = stage.offered_rps or 0.0, stage.arrived_rps
    if offered - arrived > CHANCE_SD * arrived / stage.requests**0.5:
        offered = arrived
    return offered * min(1.0, stage.carried_rps / arrived)


def good_share_at(stages: Sequence[Stage], kind: Loop | None, rate_rps: float) -> float | None:
    """Return the share of the requests that meet every SLO at this rate, or None.

    Interpolated between the stages of ``kind`` that have REQUESTS_MIN requests and a client that
    kept up.
    """
    known = sorted(
        (stage_rate(s), s.slo_attainment)
        for s in stages
        if s.kind == kind
        and not s.client_limited
        and s.requests >= REQUESTS_MIN
        and s.slo_attainment is not None
    )
    rates, shares = [rate for rate, _ in known], [share for _, share in known]
    return float(np.interp(rate_rps, rates, shares)) if known else None


def usd(value: float) -> str:
    """Return an amount in dollars: whole from $100 on, with cents from $1 on, else three digits."""
    if value >= 1:
        return f"${value:,.0f}" if value >= 99.995 else f"${value:,.2f}"
    return f"${number_text(value)}"


def rounded_down(low: float) -> float:
    """Return the low end of an interval in three digits, so that it is not printed above itself.

    A fleet that is worked out from the printed end is then the printed fleet.
    """
    if low <= 0:
        return low
    step = 10.0 ** (math.floor(math.log10(low)) - 2)
    return float(f"{math.floor(round(low / step, 6)) * step:.3g}")


def number_text(value: float | None, digits: int = 3) -> str:
    """Return a number with ``digits`` significant digits and no exponent."""
    if value is None:
        return "unknown"
    rounded = float(f"{value:.{digits}g}")
    if abs(rounded) >= 10**digits / 10:
        return f"{rounded:.0f}"
    return f"{Decimal(repr(rounded)).normalize():f}"
