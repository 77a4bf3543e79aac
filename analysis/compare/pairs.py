"""The runs of a comparison: what each delivers at its best stage, and the changes between them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_DOWN, Context
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from ampacity.analysis.change import engine
from ampacity.analysis.change.judged import Judged, carried, level_name, prepare, warmup_of
from ampacity.analysis.change.samples import Blocks, blocks_of, in_blocks
from ampacity.analysis.compare import shift
from ampacity.analysis.contract.capacity import LoopCapacity
from ampacity.analysis.contract.stage import Stage
from ampacity.analysis.contract.summary import Summary
from ampacity.analysis.slo import parse_slo
from ampacity.analysis.stage.attainment import observe_slos, requests_meeting
from ampacity.analysis.stage.throughput import NO_FIGURE, REQUESTS_MIN, is_figure
from ampacity.analysis.stats.intervals import smallest_n
from ampacity.loadgen.rundir.files import load_run

RATES = {"good": "goodput_rps", "accepted": "rps", "tokens": "output_tokens_per_s"}
NO_LEVEL = f"no load level that every run has, steady and with {REQUESTS_MIN} requests"
NO_PAIR = "no pair of stages is left"
TOO_FEW_PAIRS = "too few pairs of stages: use more --rounds"
# A closed loop with this share of its peak tokens/s at two thirds of the concurrency gains no more
PLATEAU = 0.95


def compared_run(
    name: str,
    path: Path,
    gpus: int | None = None,
    gpu_hour_usd: float | None = None,
    labels: Mapping[int, bool] | None = None,
) -> ComparedRun:
    """Read and judge a run; what is None comes from it. Raises a ValueError of one line."""
    judged = prepare(load_run(path), labels=labels, limited_too=True)
    inputs = judged.meta.get("fleet_inputs") or {}
    gpus = gpus or int(inputs.get("tensor_parallel") or 1)
    return ComparedRun(name, judged, gpus, gpu_hour_usd or inputs.get("gpu_hour_usd"))


@dataclass(frozen=True)
class ComparedRun:
    """One run, and the cost of its hardware."""

    name: str
    judged: Judged
    gpus: int = 1
    gpu_hour_usd: float | None = None

    @property
    def meta(self) -> dict[str, Any]:
        return self.judged.meta

    @property
    def summary(self) -> Summary:
        return self.judged.summary

    @property
    def usd_per_s(self) -> float | None:
        """Cost of one instance."""
        return None if self.gpu_hour_usd is None else self.gpu_hour_usd * self.gpus / 3600

    @cached_property
    def stages(self) -> list[Stage]:
        """Stages that measure the server: not limited by the client, nor ended early."""
        return [
            s
            for s in self.summary.stages
            if not s.client_limited and not s.ended_early and s.requests
        ]

    def of_kind(self, kind: str) -> list[Stage]:
        return [s for s in self.stages if s.kind == kind]

    @cached_property
    def best(self) -> Stage | None:
        """Return the stage of highest goodput; without SLOs that of most output tokens/s."""
        figures = [s for s in self.stages if is_figure(s)]
        good = [s for s in figures if s.goodput_rps is not None]
        most = max(figures, key=lambda s: s.output_tokens_per_s or 0.0, default=None)
        return max(good, key=lambda s: s.goodput_rps or 0.0, default=most)

    @property
    def limited(self) -> list[int]:
        """Indices of client-limited stages, except those run again (an A/B repeats none)."""
        audit = self.summary.audit
        again = [] if self.meta.get("ab") else audit.repeated_stages
        return [i for i in audit.client_limited_stages if i not in again]

    def at_its_limit(self, basis: str, one_load: bool) -> bool:
        """Return True if its rates show what it can do, not only what it was offered.

        It lost its steady state at some load, or (no latency SLO) more concurrency adds nothing, or
        its SLOs were violated between two loads (not for tokens, which continue to grow), or at
        every load where all best stages are at ``one_load``.
        """
        capacity, peak = self.summary.capacity, self.summary.offline.output_tokens_per_s
        if basis != "tokens" and capacity.capacity_rps and capacity.crossing != "lower_bound":
            return True
        levels = {level_name(s) for s in self.of_kind("open")}
        if levels - {level_name(s) for s in self.stages if s.stable is not False}:
            return True
        closed = self.of_kind("closed") if peak else []
        top = max((s.concurrency_set or 0 for s in closed), default=0)
        lower = [s for s in closed if (s.concurrency_set or 0) <= top / 1.5]
        if any((s.output_tokens_per_s or 0.0) >= PLATEAU * (peak or math.inf) for s in lower):
            return True
        none_met = all(s.slo_met is False for s in self.stages)
        return one_load and basis in ("good", "accepted") and none_met

    def missing(self, basis: str, one_load: bool) -> float:
        """Return the factor up to which it may carry more than at its best stage.

        Up to the load at which it broke; inf where it broke at none.
        """
        if not self.at_its_limit(basis, one_load):
            return math.inf
        ends = self.summary.capacity.capacity_rps_ci if basis != "tokens" else None
        lost = [s.offered_rps or 0.0 for s in self.of_kind("open") if s.stable is False]
        high = (ends and ends[1]) or min(lost, default=None)
        if basis not in RATES or not (self.best and high):
            return 1.0
        closed = self.best.kind == "closed"
        rate = self.best.achieved_rps if closed else self.best.offered_rps
        return max(1.0, high / (rate or math.inf))

    def counted(self, stage: Stage, basis: str, one_load: bool) -> tuple[Blocks, float]:
        """Return what a rate counts in blocks, and the s.d. of its log from run to run.

        At ``one_load`` (open loop) per request or planned token, so that the draw and the offered
        load do not count; else per second.
        """
        level = self.judged.read(stage, warmup_of(stage))
        if basis == "tokens":
            return level.rates(
                "open" if one_load else "closed"
            ), 0.0 if one_load else engine.ASSUMED_NOISE
        slos = [parse_slo(s.text) for s in self.summary.slos]
        met = requests_meeting(level.cohort, observe_slos(level.cohort, slos))
        if basis == "accepted":
            ids = self.judged.run.requests["request_id"].to_numpy()[level.planned.row]
            labels = self.judged.labels or {}
            met = met & np.array([labels.get(int(i), False) for i in ids], dtype=np.bool_)
        good = met.astype(np.float64)
        noise = engine.queue_noise(level.at_arrival, good, np.ones(level.n))
        noise /= max(float(good.mean()), 1 / level.n)
        if one_load:
            return blocks_of(good), noise
        due_s = level.planned.scheduled_ns * 1e-9
        gaps_s = np.diff(due_s, append=due_s[-1] + np.ptp(due_s) / (level.n - 1))
        blocks = Blocks(in_blocks(good), in_blocks(gaps_s), math.inf)
        return blocks, math.hypot(noise, engine.ASSUMED_NOISE)

    def rate(self, stage: Stage, basis: str) -> float | str:
        """Return the rate per second as the summary has it, or why there is none."""
        holder, name = stage.accepted if basis == "accepted" else stage, RATES[basis]
        value: float | None = getattr(holder, name)
        if value is None:
            return str(getattr(holder, f"{name}_reason", None) or getattr(holder, "reason", None))
        return value


def _left(stages: Sequence[Stage]) -> int:
    """Return the requests of the shortest of these without the longest warm-up of them."""
    return min(s.requests + warmup_of(s) for s in stages) - max(map(warmup_of, stages))


@dataclass(frozen=True, eq=False)
class Pairing:
    """Two runs, a against b.

    ``stages``: pairs of stages at one load, all of an A/B (``rounds``), else one at most; ``none``:
    why there is none.
    """

    a: ComparedRun
    b: ComparedRun
    stages: list[tuple[Stage, Stage]]
    rounds: bool
    none: str

    def _pair(self, s: Stage, t: Stage) -> shift.Pair:
        skipped = max(warmup_of(s), warmup_of(t))
        a, b = self.a.judged, self.b.judged
        first, second = a.read(s, skipped), b.read(t, skipped)
        sent = a.schedule(s, first)
        same = sent is not None and sent == b.schedule(t, second)
        order = 1.0 if b.meta_of(t).start_ns > a.meta_of(s).start_ns else -1.0
        return shift.Pair(first, second, same, order)

    @cached_property
    def pairs(self) -> list[shift.Pair]:
        return [self._pair(s, t) for s, t in self.stages]

    @cached_property
    def unpaired(self) -> str:
        """Return why no latency can be compared; empty where it can."""
        if not self.pairs:
            return self.none
        enough = not self.rounds or engine.enough_pairs([p.order for p in self.pairs])
        return "" if enough else TOO_FEW_PAIRS

    @cached_property
    def _quantiles(self) -> dict[tuple[str, float], shift.Quantile]:
        return {}

    def quantile(self, metric: str, q: float) -> shift.Quantile:
        """Return one quantile of both with its change, or the reasons why there is none."""
        if why := self.unpaired:
            return shift.Quantile((why, why), why)
        if (metric, q) not in self._quantiles:
            self._quantiles[metric, q] = shift.quantile_change(self.pairs, metric, q)
        return self._quantiles[metric, q]

    def value(self, basis: str, side: int) -> float | str:
        """Return the value that a figure is based on for a (0) or b (1), or why there is none.

        ``basis``: a rate, ``failed``, ``ttft_p99``, or ``ttft_tail`` for p99 / p50.
        """
        if basis in RATES:
            return self._rate(basis, side)
        if basis == "failed":
            failed = [(p.reference, p.other)[side].failed for p in self.pairs]
            return float(np.mean(np.concatenate(failed))) if failed else self.unpaired
        metric, kind = basis.split("_")
        tail = self.quantile(metric, 0.99)
        p99, p50 = tail.values[side], self.quantile(metric, 0.5).values[side]
        if isinstance(p99, str) or isinstance(p50, str):
            return p99 if isinstance(p99, str) else p50
        return tail.endless if math.isinf(p99) else p99 / (p50 if kind == "tail" else 1.0)

    def _rate(self, basis: str, side: int) -> float | str:
        run = (self.a, self.b)[side]
        stages = [pair[side] for pair in self.stages] if self.rounds else [run.best]
        rates = [run.rate(s, basis) for s in stages if s]
        rates = rates or [NO_PAIR if self.rounds else NO_FIGURE]
        reason = next((r for r in rates if isinstance(r, str)), None)
        return reason or float(np.mean([float(r) for r in rates]))

    def change(self, basis: str) -> engine.Change | str:
        """Return the change of a basis from a to b, or why it is not known."""
        if basis in RATES:
            return self._change_over_rounds(basis) if self.rounds else self._change_at_best(basis)
        if basis == "failed":
            return self.unpaired or shift.failed_change(self.pairs)
        return self.quantile(basis.split("_")[0], 0.99).change

    def at_least(self, basis: str, side: int) -> bool:
        """Return True if a basis uses a p99 whose interval has no upper end."""
        return "_" in basis and self.quantile(basis.split("_")[0], 0.99).at_least[side]

    def _change_over_rounds(self, basis: str) -> engine.Change | str:
        rates = [(self.a.rate(s, basis), self.b.rate(t, basis)) for s, t in self.stages]
        known = np.array([r for r in rates if str not in map(type, r)], dtype=np.float64)
        if self.unpaired or len(known) < len(rates) or known.min() <= 0:
            return self.unpaired or shift.NOTHING_COUNTS
        found = engine.between_rounds(np.log(known[:, 1] / known[:, 0]), shift.orders(self.pairs))
        return found.beside(*known.mean(axis=0).tolist())

    def _change_at_best(self, basis: str) -> engine.Change | str:
        s, t, x, y = self.a.best, self.b.best, self.value(basis, 0), self.value(basis, 1)
        if s is None or t is None or isinstance(x, str) or isinstance(y, str) or min(x, y) <= 0:
            return shift.NOTHING_COUNTS
        one_load = s.kind == t.kind == "open" and level_name(s) == level_name(t)
        same = one_load and warmup_of(s) == warmup_of(t) and self._pair(s, t).same_schedule
        a, noise = self.a.counted(s, basis, one_load)
        b, more = self.b.counted(t, basis, one_load)
        change = shift.rate_change(a, b, paired=same, noise=math.sqrt((noise**2 + more**2) / 2))
        return change if isinstance(change, str) else change.beside(x, y)


def pairings(runs: Sequence[ComparedRun]) -> dict[tuple[int, int], Pairing]:
    """Return all pairs of runs (i < j), at the highest load that all carry; an A/B by rounds."""
    marks = [run.meta.get("ab") or {} for run in runs]
    rounds = len(runs) == 2 and bool(marks[0]) and marks[0].get("pair") == marks[1].get("pair")
    none = NO_PAIR
    if rounds:
        a, b = (_by_round(run) for run in runs)
        shared = [index for index in a if index in b and _left([a[index], b[index]]) > 0]
        stages = [[side[index] for index in shared] for side in (a, b)]
    else:
        fit = [
            {level_name(s): s for s in r.stages if carried(s) and s.requests >= REQUESTS_MIN}
            for r in runs
        ]
        names = set(fit[0]).intersection(*fit[1:])
        long = [n for n in names if _left([f[n] for f in fit]) >= REQUESTS_MIN]
        highest = sorted(long, key=lambda n: _load(fit[0][n]))[-1:]
        stages = [[f[name] for name in highest] for f in fit]
        none = f"{NO_LEVEL}: {_same_load(runs, [list(f.values()) for f in fit])}"
    return {
        (i, j): Pairing(a, b, list(zip(stages[i], stages[j], strict=True)), rounds, none)
        for (i, a), (j, b) in combinations(enumerate(runs), 2)
    }


def _by_round(run: ComparedRun) -> dict[int, Stage]:
    """Return the whole stages of an A/B by their place in it; one that was resumed is in parts."""
    metas = [(s, run.judged.meta_of(s)) for s in run.stages]
    return {
        s.index if m.schedule is None else m.schedule: s for s, m in metas if m.continues is None
    }


def _load(stage: Stage) -> float:
    return float((stage.concurrency_set if stage.kind == "closed" else stage.offered_rps) or 0.0)


def _carried(run: ComparedRun, kind: str, fit: list[Stage]) -> float:
    """Return the highest load it is shown to carry, within its SLOs if it has them; 0 if none."""
    whole = run.summary.capacity
    found: LoopCapacity | None = whole if whole.c_max_basis == kind else whole.closed
    if not (found and run.summary.slos):
        return max((_load(s) for s in fit if s.kind == kind), default=0.0)
    if found.crossing == "pooled":
        return (found.capacity_rps_ci or (0.0, 0.0))[0] or 0.0
    return next((_load(s) for s in run.stages if s.index == found.stage), 0.0)


def _same_load(runs: Sequence[ComparedRun], fit: list[list[Stage]]) -> str:
    """Return what to run to get one load for all.

    The lowest of the highest loads that each is shown to carry; lower than all loads of a run that
    carried none.
    """
    for kind, option in (("open", "--rates"), ("closed", "--concurrency")):
        tried = [[_load(s) for s in run.of_kind(kind)] for run in runs]
        if not all(tried):
            continue
        shown = [_carried(run, kind, f) for run, f in zip(runs, fit, strict=True)]
        load = min(most or min(loads) for most, loads in zip(shown, tried, strict=True))
        text = f"{Context(prec=3, rounding=ROUND_DOWN).create_decimal(repr(load)).normalize():f}"
        none = [run for run, most in zip(runs, shown, strict=True) if not most]
        if not none:
            # Warm-up and chance included
            needed_s = max(30, math.ceil(1.2 * smallest_n(0.99) / float(text)))
            longer = f" --duration {needed_s}s (or longer)" if kind == "open" else ""
            return f"run each again with {option} {text}{longer}, the most that all have carried"
        who = f"{' and '.join(run.name for run in none)} {'is' if len(none) == 1 else 'are'} not"
        who += " shown to carry any that was tried"
        if any(s.slo_met is False or s.stable is False for run in none for s in run.stages):
            return f"run each again with lower {option} than {text}, for longer: {who}"
        again = f"run each again with the same {option}, for longer (--duration)"
        return f"{again}: {who}, nor that any is too high"
    return "give all the same --rates or --concurrency, a load that they carry, for long enough"
