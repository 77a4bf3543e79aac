"""The stages as levels of load, each at its rate in requests/s."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np

from ampacity.analysis.stage.throughput import CHANCE_SD, REQUESTS_MIN, all_failed


@dataclass(frozen=True)
class Level:
    """One stage as capacity sees it. Rates in requests/s."""

    index: int  # of the stage
    load: float  # what it is ordered by: offered rate, or users of a closed loop
    rate: float  # see stage_rate
    rate_high: float  # where it bounds the capacity from above. Open: offered; closed: achieved
    served: float  # completions per second in the window
    concurrency: float  # requests in flight
    is_open: bool
    verdict: str  # met | broken | inconclusive
    stable: bool
    why: str  # the reason of that verdict
    values: dict[
        str, tuple[float | None, float | None]
    ]  # SLO text -> (percentile in s, attainment)


def stage_rate(stage: Mapping[str, Any]) -> float:
    """Return a stage's rate: offered and answered (open loop), or achieved (closed loop).

    Where fewer arrived than chance explains (a trace, sessions that ran out), at those that did.
    """
    if stage["kind"] != "open":
        return float(stage["achieved_rps"])
    offered, arrived = stage["offered_rps"] or 0.0, stage["arrived_rps"]
    if offered - arrived > CHANCE_SD * arrived / stage["requests"] ** 0.5:
        offered = arrived
    return float(offered * min(1.0, stage["carried_rps"] / arrived))


def good_share_at(stages: Sequence[Mapping[str, Any]], kind: str, rate_rps: float) -> float | None:
    """Return the share of the requests that meet every SLO at this rate.

    Between the two stages of ``kind`` beside it, on a line. Stages with fewer than REQUESTS_MIN
    requests, or whose client was the limit, say nothing. None where none is left.
    """
    known = sorted(
        (stage_rate(s), float(s["slo_attainment"]))
        for s in stages
        if s["kind"] == kind
        and not s["client_limited"]
        and s["requests"] >= REQUESTS_MIN
        and s["slo_attainment"] is not None
    )
    rates, shares = [rate for rate, _ in known], [share for _, share in known]
    return float(np.interp(rate_rps, rates, shares)) if known else None


def levels_of(stages: Sequence[dict[str, Any]], kind: str) -> list[Level]:
    """Return the stages of one kind that are findings, as levels in order of load.

    A stage that ended early had another load than the one it is named for: it counts only where it
    is alone.
    """
    levels: list[Level] = []
    early: list[Level] = []
    for s in stages:
        load = s["offered_rps"] if kind == "open" else s["concurrency_set"]
        if (
            s["kind"] != kind
            or s["client_limited"]
            or not s["requests"]
            or not load
            or all_failed(s)
        ):
            continue
        rate, met = stage_rate(s), s["slo_met"]
        (early if s["ended_early"] else levels).append(
            Level(
                index=s["index"],
                load=load,
                rate=rate,
                rate_high=load if kind == "open" else rate,
                served=s["achieved_rps"],
                concurrency=float(load)
                if kind == "closed" and not s.get("users_pause")
                else s["concurrency"],
                is_open=kind == "open",
                verdict="met" if met else "inconclusive" if met is None else "violated",
                stable=s["stable"] is not False,
                why=str(s["slo_met_reason"]).removeprefix("inconclusive: "),
                values={v["slo"]: (v["value_s"], v["attainment"]) for v in s["slo_verdicts"]},
            )
        )
    if len(stages) == 1:
        levels += early
    return sorted(levels, key=lambda level: level.load)


def number_text(value: float, digits: int = 3) -> str:
    """Return a number with ``digits`` significant digits and no exponent."""
    rounded = float(f"{value:.{digits}g}")
    return (
        f"{rounded:.0f}"
        if abs(rounded) >= 10**digits / 10
        else f"{Decimal(repr(rounded)).normalize():f}"
    )
