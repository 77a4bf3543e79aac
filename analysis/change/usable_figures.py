"""A line of the scorecard, and those lines that follow from the capacity: they need no load that all runs have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ampacity.analysis.capacity.fleet import AT_USABLE, cost_per_million_output_tokens, size_fleet
from ampacity.analysis.change.arms import Arm
from ampacity.analysis.change.change import LEAST
from ampacity.analysis.change.shift import NOTHING_COUNTS

NO_PRICE = "no price of a GPU hour (--gpu-hour)"
MORE_IN_FLIGHT = "no winner: more in flight at the limit is neither better nor worse"
Row = dict[str, Any]
Ends = list[float | None]


def scorecard_row(
    arms: Sequence[Arm],
    question: str,
    name: str,
    label: str,
    higher: bool | None,
    values: list[float | str],
    brackets: list[Ends] | None = None,
    note: str | None = None,
) -> Row:
    """A figure of every run: ``values`` hold a number, or the reason why there is none; ``higher`` None: none is the better one."""
    numbers = [None if isinstance(v, str) else v for v in values]
    known = [v for v in numbers if v is not None]
    best = (max if higher else min)(known, default=None)
    alone = higher is not None and len(known) > 1 and known.count(best or 0.0) == 1
    tested = higher is not None and len(known) == len(arms)
    return {
        "question": question,
        "name": name,
        "label": label,
        "higher_is_better": higher,
        "values": numbers,
        "brackets": brackets,
        "reasons": [v if isinstance(v, str) else None for v in values],
        "best": arms[numbers.index(best)].name if alone else None,
        "changes": [None] * len(arms),
        "verdict": "open" if tested else "unknown",
        "winner": None,
        "reason": None,
        "smallest_seen": None,
        "note": note,
    }


def usable_rows(arms: Sequence[Arm]) -> list[Row]:
    """Figures with a bracket of tested loads and no test: one wins whose whole bracket is better than all others by ``LEAST``."""
    capacities, fleets = ([a.judged.summary[k] for a in arms] for k in ("capacity", "fleet"))
    (peak, safety), *unlike = {(f["peak_rps"], f["safety_factor"]) for f in fleets}
    rows = [
        _row(
            arms,
            "capacity",
            "capacity_rps",
            "capacity per instance, req/s",
            True,
            lambda arm, x: x,
        ),
        _row(
            arms,
            "capacity",
            "usable_rps_per_gpu",
            "capacity per GPU, req/s",
            True,
            lambda arm, x: x / arm.gpus,
        ),
        _row(
            arms,
            "cost",
            "usd_per_million_output_tokens",
            "USD per million output tokens",
            False,
            _cost,
        ),
    ]
    # longer answers are not the engine's: it must be cheaper by the request too
    by_request = _row(arms, "cost", "", "", False, lambda arm, x: (arm.usd_per_s or 0.0) / x)
    if rows[-1]["winner"] not in (None, by_request["winner"]):
        rows[-1] |= {"winner": None, "verdict": "open"}
    if peak and not unlike:
        rows.append(
            _row(
                arms,
                "capacity",
                "gpus_for_peak",
                f"GPUs for {peak:g} req/s × {safety:g}",
                False,
                lambda arm, x: size_fleet(peak, x, safety, arm.gpus).gpus,
            )
        )
    c_max = [c["c_max"] or str(c["reason"] or "none was found") for c in capacities]
    c_max_row = scorecard_row(
        arms,
        "capacity",
        "c_max",
        "C_max, requests in flight",
        None,
        c_max,
        [c["c_max_ci"] or [None, None] for c in capacities],
    )
    rows.append(c_max_row | {"reason": MORE_IN_FLIGHT})
    return [
        row | {"at_least": [c["crossing"] == "lower_bound" for c in capacities]} for row in rows
    ]


def _cost(arm: Arm, rate_rps: float) -> float | str:
    tokens, price = arm.judged.summary["fleet"]["output_tokens_mean"], arm.gpu_hour_usd
    if price is None or not tokens:
        return NO_PRICE if price is None else NOTHING_COUNTS
    return cost_per_million_output_tokens(price, arm.gpus, rate_rps * tokens)


def usable_bracket(arm: Arm) -> Ends:
    """Of its capacity, req/s. The ends of a closed loop are achieved rates: each with the 95 % interval of its stage's."""
    capacity = arm.judged.summary["capacity"]
    low, high = capacity["capacity_rps_ci"] or (None, None)
    if capacity["c_max_basis"] == "closed":
        stages = {
            s["achieved_rps"]: s["achieved_rps_ci"] or (0.0, None)
            for s in arm.stages
            if s["kind"] == "closed"
        }
        low, high = stages.get(low, (low,))[0], stages.get(high, (high, high))[1]
    return [low, high]


def _row(
    arms: Sequence[Arm],
    question: str,
    name: str,
    label: str,
    higher: bool,
    figure: Callable[[Arm, float], float | str],
) -> Row:
    values: list[float | str] = []
    ends: list[Ends] = []  # the worst first
    for arm in arms:
        capacity = arm.judged.summary["capacity"]
        rate = capacity["capacity_rps"]
        values.append(figure(arm, rate) if rate else str(capacity["reason"] or "none was found"))
        at = [
            figure(arm, end) if end or (end == 0 and higher) else None
            for end in usable_bracket(arm)
        ]
        ends.append([None if isinstance(x, str) else x for x in at])
    row = scorecard_row(
        arms,
        question,
        name,
        label,
        higher,
        values,
        ends if higher else [e[::-1] for e in ends],
        AT_USABLE if question == "cost" else None,
    )
    if any(a.judged.summary["capacity"]["crossing"] == "lower_bound" for a in arms):
        row["best"] = None  # nobody knows which one's is better
    better = 1 + LEAST if higher else 1 / (1 + LEAST)
    for i, (worst, _) in enumerate(ends):
        limits = [
            best if best is None else best * better for k, (_, best) in enumerate(ends) if k != i
        ]
        apart = worst is not None and all(
            x is not None and (x < worst if higher else x > worst) for x in limits
        )
        if apart and row["values"][i] is not None:
            row["winner"], row["best"], row["verdict"] = arms[i].name, arms[i].name, "differs"
    return row
