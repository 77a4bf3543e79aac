"""Is a burst that left no queue seen to leave none, and is one that did seen to be over when its queue is gone?

    .venv/bin/python -m benchmarks.burst_recovery --seeds 200

``slots``: M/M/c in front of a first token that takes a log-normal time (median 45 ms, sigma 0.5). ``engine``: a
preset in virtual time with the lengths of ``chat``, each step a log-normal factor (3 %) off. A recovery time is
late or early by more than one bin against the moment at which, after the burst, nobody waited any more; requests in
flight may take the time of two answers longer. Then of backlogs that outlast the run: when they are gone, and what is
said of that when nothing of it was seen.
"""

from __future__ import annotations

import argparse
import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from ampacity.experiments.burst import BurstPlan
from analysis.burst import summarise_burst
from analysis.metrics import Floats
from analysis.slo import parse_slo
from analysis.stages import read_records
from benchmarks.gate_rates import Unsteady
from loadgen.records import SCHEMA
from simulator.hardware import find_config
from simulator.outcome import simulate as simulate_engine
from workloads.arrivals import arrival_times
from workloads.profile import load_workload
from workloads.schedule import open_schedule


@dataclass(frozen=True)
class Case:
    """``full_rps``: what the server answers when all of it is busy; ``base`` and ``peak`` as shares of that."""

    name: str
    full_rps: float
    base: float
    peak: float
    slots: int  # 0: the engine
    answer_s: float = 0.0  # mean of an answer of the engine's
    base_s: float = 60.0
    burst_s: float = 20.0
    recovery_s: float = 120.0

    @property
    def plan(self) -> BurstPlan:
        return BurstPlan(
            self.base * self.full_rps,
            self.peak / self.base,
            self.base_s,
            self.burst_s,
            self.recovery_s,
            "step",
        )


LOADS = ((0.2, 0.6), (0.4, 0.8), (0.6, 0.9), (0.8, 0.9), (0.4, 1.6), (0.4, 2.4))
CASES = [
    *(Case(f"slots {c}", 8.0, base, peak, c) for c in (8, 64) for base, peak in LOADS),
    Case("slots 8, short", 8.0, 0.35, 0.7, 8, base_s=40.0, recovery_s=60.0),
    *(Case("engine", 12.9, base, peak, 0, answer_s=4.0) for base, peak in LOADS),
]
SERVERS = (("slots 8", 8.0, 8), ("slots 64", 8.0, 64), ("engine", 12.9, 0))
CUT = ((0.6, 3.0, 30.0), (0.8, 3.0, 20.0), (0.8, 3.0, 60.0), (0.9, 2.0, 60.0), (1.2, 2.0, 60.0))
RESTS = [
    Case(name, full, base, peak, c, recovery_s=seen_s)
    for name, full, c in SERVERS
    for base, peak, seen_s in CUT
]


def slots(case: Case, at: Floats, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """First token and end of each request in s: ``case.slots`` servers, first come first served."""
    free, mean_s = [0.0] * case.slots, case.slots / case.full_rps
    ready_s = 0.045 * np.exp(0.5 * rng.standard_normal(len(at)))
    serve_s = rng.exponential(mean_s, len(at))
    begun = np.empty(len(at))
    for i, t in enumerate(at.tolist()):
        begun[i] = max(t, heapq.heappop(free))
        heapq.heappush(free, begun[i] + serve_s[i])
    return begun + np.minimum(ready_s, serve_s), begun + serve_s


def engine(case: Case, at: Floats, rng: np.random.Generator, preset: str) -> tuple[Floats, Floats]:
    config = find_config(preset)
    seed = int(rng.integers(2**31))
    config = replace(config, step_time=Unsteady(config.step_time, 1.0, 0.03, seed), seed=seed)
    drawn = open_schedule(load_workload("chat"), rate_rps=1.0, duration_s=2.0 * len(at), seed=seed, stage=0)
    outputs = np.minimum(drawn.output_tokens[: len(at)], config.max_model_len // 2)
    inputs = np.minimum(drawn.input_tokens[: len(at)], config.max_model_len - outputs)
    found = simulate_engine(config, at, inputs, outputs)
    return found.first_token_s, found.finish_s


def _ns(seconds: Floats) -> Any:
    return np.round(seconds * 1e9).astype(np.int64)


def one(case: Case, seed: int, preset: str) -> tuple[dict[str, Any], float]:
    """The ``burst`` object of one run, and its fluid drain time in s."""
    at, first, end = played(case, seed, preset)
    return judged(case, at, first, end), _emptied_s(at, first, case.base_s + case.burst_s)


def played(case: Case, seed: int, preset: str) -> tuple[Floats, Floats, Floats]:
    """Arrival, first token and end of each request in s."""
    rng, plan = np.random.default_rng(seed), case.plan
    at = arrival_times(plan.arrivals, plan.mean_rps, plan.duration_s, rng)
    return at, *(slots(case, at, rng) if case.slots else engine(case, at, rng, preset))


def judged(case: Case, at: Floats, first: Floats, end: Floats) -> dict[str, Any]:
    """The ``burst`` object of a run that ends with the recovery of ``case``."""
    plan = case.plan
    times = {"scheduled": at, "dispatched": at, "started": at, "first_token": first, "first_answer": first,
             "last_token": end, "ended": end}  # fmt: skip
    known: dict[str, Any] = {f"{name}_ns": _ns(t) for name, t in times.items()}
    known |= {"request_id": np.arange(len(at)), "stage": np.zeros(len(at)), "attempt": np.zeros(len(at)),
              "status": ["ok"] * len(at)}  # fmt: skip
    table = pa.Table.from_arrays(
        [pa.array(known[f.name]).cast(f.type) if f.name in known else pa.nulls(len(at), f.type) for f in SCHEMA], schema=SCHEMA
    )  # fmt: skip
    meta = {"index": 0, "start_ns": 0, "end_ns": int(plan.duration_s * 1e9), "drained_ns": 1}
    return summarise_burst(vars(plan), meta, read_records(table, 0), [parse_slo("ttft_p95=2s")], None)


def rests(case: Case, seeds: int, preset: str) -> str:
    """Of backlogs that are cut at the end of the recovery, and go on for 1,000 s more: is it said when they are gone?"""
    end_s, told, early, late, ratios = case.plan.duration_s, Counter[Any](), 0, 0, []
    for seed in range(seeds):
        at, first, end = played(replace(case, recovery_s=case.recovery_s + 1000.0), seed, preset)
        seen = at < end_s
        backlog = judged(case, at[seen], first[seen], end[seen])["backlog"]
        said = (
            "no queue"
            if backlog["served_rps"] is None
            else "drained"
            if backlog["drained"]
            else backlog["drains"]
        )
        told[said] += 1
        if said is True:
            left = np.sort(first)
            after = left[left > end_s]
            waiting = np.searchsorted(at, after, "right") - np.searchsorted(left, after, "right")
            gone = after[waiting <= backlog["base_waiting"]]
            gone_s = float(gone[0]) - end_s if len(gone) else np.inf
            low, high = backlog["further_s_ci"]
            early, late = early + (gone_s < low), late + (high is not None and gone_s > high)
            ratios.append(backlog["further_s"] / gone_s)
    ratio = f"median further/true {np.median(ratios):.2f}" if ratios else ""
    what = f"{case.name:10} {case.base:.2f} {case.peak:.2f} seen {case.recovery_s:.0f} s"
    return f"{what}  said {dict(told)}  earlier {early} later {late}  {ratio}"


def _emptied_s(at: Floats, first: Floats, over_s: float) -> float:
    """Seconds from the end of the burst until nobody waits who came in it, or before the queue was first empty again."""
    until = over_s
    while (waiting := (at < until) & (first > until)).any():
        until = float(first[waiting].max())
    return until - over_s


def rows(cases: list[Case], seeds: int, preset: str) -> Iterator[str]:
    """One line for each case."""
    for case in cases:
        runs = [one(case, seed, preset) for seed in range(seeds)]
        cells = [f"{case.name:15} {case.base:.2f} {case.peak:.2f}"]
        for name in ("ttft_s", "in_flight"):
            errors = np.array([
                np.inf if b[f"{name}_recovery_s"] is None else b[f"{name}_recovery_s"] - drain for b, drain in runs
            ])  # fmt: skip
            bin_s = runs[0][0]["resolution_s"]
            late = np.mean(
                errors
                > bin_s + (2 * (case.answer_s or case.slots / case.full_rps) if name == "in_flight" else 0.0)
            )
            again = np.mean([bool(b[f"{name}_above_again_s"]) for b, _ in runs])
            early = np.mean(errors < -bin_s)
            median = np.median(errors)
            cells.append(
                f"{name}: late {late:6.1%} early {early:6.1%} median error {median:6.2f} s again {again:5.1%}"
            )
        served = [b["backlog"]["served_rps"] / case.full_rps for b, _ in runs if b["backlog"]["served_rps"]]
        low, high = np.quantile(served, [0.05, 0.95]) if served else (np.nan, np.nan)
        drain = np.median([drain for _, drain in runs])
        cells.append(
            f"queue {len(served) / seeds:4.0%} served/full {low:.2f} to {high:.2f} drain {drain:5.2f} s bin {runs[0][0]['resolution_s']:.2f}"
        )
        yield "  ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--preset", default="demo")
    options = parser.parse_args()
    for row in rows(CASES, options.seeds, options.preset):
        print(row, flush=True)
    for case in RESTS:
        print(rests(case, options.seeds, options.preset), flush=True)


if __name__ == "__main__":
    main()
