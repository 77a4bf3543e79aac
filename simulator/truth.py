"""Capacity by the engine's own bookkeeping, in virtual time: what a measurement from outside should find."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulator import SimulatorError
from simulator.engine import Engine, EngineConfig, Request

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
MakeRequests = Callable[[float, int], tuple[ArrayLike, ArrayLike, ArrayLike]]
"""(rate in requests/s, seed) -> arrival times in s (sorted), prompt tokens, output tokens."""
Slo = tuple[str, float, float]
"""(metric in METRICS, quantile, limit in s)."""
METRICS = ("ttft", "itl", "e2e", "tpot")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened to each request (arrays over requests, in s) and when each step ended."""

    arrival_s: Floats
    first_token_s: Floats
    finish_s: Floats
    output_tokens: Integers
    step_end_s: Floats
    first_step: Integers
    last_step: Integers
    segments: dict[int, list[tuple[int, int]]]  # preempted requests: the steps in which they got tokens
    preemptions: int

    @property
    def ttft_s(self) -> Floats:
        return self.first_token_s - self.arrival_s

    @property
    def e2e_s(self) -> Floats:
        return self.finish_s - self.arrival_s

    @property
    def tpot_s(self) -> Floats:
        """NaN for requests of one token."""
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = (self.finish_s - self.first_token_s) / (self.output_tokens - 1)
        return np.where(self.output_tokens > 1, mean, np.nan)

    def token_times_s(self, request: int) -> Floats:
        """When each output token of one request appeared."""
        parts = self.segments.get(request) or [(int(self.first_step[request]), int(self.last_step[request]))]
        return np.concatenate([self.step_end_s[first : last + 1] for first, last in parts])

    def gaps_s(self, chosen: NDArray[np.bool_] | None = None) -> tuple[Floats, Integers]:
        """Gaps between tokens of the chosen requests, over all of them: (length in s, how many such gaps)."""
        counts = np.zeros(len(self.step_end_s) + 1, dtype=np.int64)
        keep = np.ones(len(self.arrival_s), dtype=bool) if chosen is None else chosen.copy()
        across: list[Floats] = []
        for request in self.segments:
            if keep[request]:
                keep[request] = False
                across.append(np.diff(self.token_times_s(request)))
        # A request has a gap at the end of each step after its first token's, up to its last.
        np.add.at(counts, self.first_step[keep] + 1, 1)
        np.add.at(counts, self.last_step[keep] + 1, -1)
        per_step = np.cumsum(counts)[: len(self.step_end_s)]
        lengths = np.diff(self.step_end_s, prepend=self.step_end_s[:1])
        used = per_step > 0
        more = np.concatenate(across) if across else np.empty(0)
        return (
            np.concatenate([lengths[used], more]),
            np.concatenate([per_step[used], np.ones(len(more), dtype=np.int64)]),
        )

    def gap_quantile_s(self, quantile: float = 0.99) -> Floats:
        """That quantile of each request's own gaps; NaN for requests of one token."""
        found = np.full(len(self.arrival_s), np.nan)
        for request in np.flatnonzero(self.output_tokens > 1):
            found[request] = np.quantile(np.diff(self.token_times_s(int(request))), quantile)
        return found

    def concurrency(self, start_s: float, end_s: float) -> float:
        """Time average of the number of requests between arrival and last token, over [start_s, end_s]."""
        inside = np.minimum(self.finish_s, end_s) - np.maximum(self.arrival_s, start_s)
        return float(np.maximum(inside, 0.0).sum() / (end_s - start_s))


def simulate(
    config: EngineConfig, arrivals_s: ArrayLike, input_tokens: ArrayLike, output_tokens: ArrayLike
) -> Outcome:
    """Run the requests to their end in virtual time. Raises SimulatorError for requests that cannot be served."""
    arrivals = np.asarray(arrivals_s, dtype=np.float64)
    outputs = np.asarray(output_tokens, dtype=np.int64)
    if len(arrivals) == 0 or np.any(np.diff(arrivals) < 0):
        raise SimulatorError("arrivals_s must hold at least one time and be sorted")
    if not len(arrivals) == len(outputs) == len(np.asarray(input_tokens)):
        raise SimulatorError("arrivals_s, input_tokens and output_tokens must have the same length")
    inputs = np.asarray(input_tokens, dtype=np.int64)
    requests = [Request(i, o) for i, o in zip(inputs.tolist(), outputs.tolist(), strict=True)]
    engine = Engine(config)
    ends = _drive(engine, requests, arrivals.tolist())
    return Outcome(
        arrival_s=arrivals,
        first_token_s=np.array([r.first_token_s for r in requests], dtype=np.float64),
        finish_s=np.array([r.finish_s for r in requests], dtype=np.float64),
        output_tokens=outputs,
        step_end_s=np.array(ends),
        first_step=np.array([r.first_step for r in requests], dtype=np.int64),
        last_step=np.array([r.last_step for r in requests], dtype=np.int64),
        segments={n: r.segments for n, r in enumerate(requests) if r.segments is not None},
        preemptions=engine.preemptions,
    )


def _drive(engine: Engine, requests: list[Request], arrivals: list[float]) -> list[float]:
    """The virtual-time loop: submit what has arrived, step, jump to the step's end. Returns the steps' ends."""
    ends: list[float] = []
    now_s = -math.inf
    submitted, total = 0, len(requests)
    step, submit = engine.step, engine.submit
    while True:
        while submitted < total and arrivals[submitted] <= now_s:
            submit(requests[submitted], arrivals[submitted])
            submitted += 1
        result = step(now_s)
        if result is not None:
            now_s = result.end_s
            ends.append(now_s)
        elif submitted < total:
            now_s = arrivals[submitted]
        else:
            return ends


@dataclass(frozen=True, slots=True)
class Capacity:
    """The highest offered rate at which every SLO holds. Errors are standard errors over replications."""

    usable_rps: float
    usable_rps_se: float
    c_max: float  # time average of requests in flight at that rate
    c_max_se: float
    saturation_rps: float  # completions per second with a queue that never empties
    binding: Slo | None  # the SLO that breaks first; None when the engine saturates before any does
    replications: int


def shares_within(outcome: Outcome, slos: Sequence[Slo], chosen: NDArray[np.bool_]) -> list[float]:
    """For each SLO the share of the chosen requests (for `itl`: of their gaps) within its limit."""
    shares = []
    for metric, _, limit_s in slos:
        if metric == "itl":
            lengths, counts = outcome.gaps_s(chosen)
            within, total = int(counts[lengths <= limit_s].sum()), int(counts.sum())
        else:
            values = {"ttft": outcome.ttft_s, "e2e": outcome.e2e_s, "tpot": outcome.tpot_s}[metric][chosen]
            values = values[~np.isnan(values)]
            within, total = int((values <= limit_s).sum()), len(values)
        shares.append(within / total if total else 1.0)
    return shares


def saturation_rps(config: EngineConfig, make_requests: MakeRequests, seed: int = 0) -> float:
    """Completions per second while the queue is never empty: all requests are there from the start.

    The middle half of the completions counts, so that neither the start nor the drain does.
    """
    _, inputs, outputs = make_requests(1.0, seed)
    outcome = simulate(config, np.zeros(len(np.asarray(inputs))), inputs, outputs)
    finish = np.sort(outcome.finish_s)
    low, high = len(finish) // 4, (3 * len(finish)) // 4
    elapsed = finish[high] - finish[low]
    if elapsed <= 0:
        raise SimulatorError(f"{len(finish)} requests are too few to see the engine saturated; make more")
    return float((high - low) / elapsed)


def true_capacity(
    config: EngineConfig,
    make_requests: MakeRequests,
    slos: Sequence[Slo],
    *,
    replications: int = 4,
    seed: int = 0,
    tolerance: float = 0.005,
    warmup_share: float = 0.2,
) -> Capacity:
    """Usable rate and C_max by bisection in log rate, once per replication, with common random numbers.

    make_requests(rate, seed) fixes the length of a run: give it 10,000 requests or more, or the engine's
    queue near its knee has no time to build up. The first `warmup_share` of the requests and the last 5 % are
    not judged. `binding` is that of the first replication. usable_rps is 0 when an SLO breaks at a thousandth
    of the saturation rate. Raises SimulatorError for an SLO that cannot be read.
    """
    for metric, quantile, limit_s in slos:
        if metric not in METRICS or not 0 < quantile < 1 or not limit_s > 0:
            raise SimulatorError(
                f"SLO {(metric, quantile, limit_s)}: needs ({'|'.join(METRICS)}, 0 < q < 1, limit > 0)"
            )
    if replications < 2:
        raise SimulatorError("replications must be at least 2: their spread is the error")
    seeds = range(seed, seed + replications)
    saturations = [saturation_rps(config, make_requests, s) for s in seeds]
    found = [
        _crossing(_Judge(config, make_requests, slos, s, warmup_share), saturation, tolerance)
        for s, saturation in zip(seeds, saturations, strict=True)
    ]
    rates = np.array([rate for rate, _, _ in found])
    levels = np.array([level for _, level, _ in found])
    root = math.sqrt(replications)
    return Capacity(
        usable_rps=float(rates.mean()),
        usable_rps_se=float(rates.std(ddof=1) / root),
        c_max=float(levels.mean()),
        c_max_se=float(levels.std(ddof=1) / root),
        saturation_rps=float(np.mean(saturations)),
        binding=found[0][2],
        replications=replications,
    )


@dataclass(frozen=True, slots=True)
class _Judge:
    """One replication: judges an offered rate with the same random numbers each time."""

    config: EngineConfig
    make_requests: MakeRequests
    slos: Sequence[Slo]
    seed: int
    warmup_share: float

    def at(self, rate_rps: float) -> tuple[Slo | None, float]:
        """(the SLO that misses its quantile by most, or None when all hold; mean requests in flight)."""
        arrivals, inputs, outputs = self.make_requests(rate_rps, self.seed)
        outcome = simulate(self.config, arrivals, inputs, outputs)
        total = len(outcome.arrival_s)
        chosen = np.zeros(total, dtype=bool)
        chosen[int(total * self.warmup_share) : max(1, int(total * 0.95))] = True
        # Misses as a multiple of the misses that are allowed: comparable between quantiles.
        shares = shares_within(outcome, self.slos, chosen)
        misses = [(1 - share) / (1 - slo[1]) for share, slo in zip(shares, self.slos, strict=True)]
        window = outcome.arrival_s[chosen]
        worst = int(np.argmax(misses)) if misses else -1
        broken = bool(misses) and shares[worst] < self.slos[worst][1]
        return (self.slos[worst] if broken else None), outcome.concurrency(
            float(window[0]), float(window[-1])
        )


def _crossing(judge: _Judge, saturation: float, tolerance: float) -> tuple[float, float, Slo | None]:
    """(highest rate that holds, requests in flight there, the SLO that breaks above it)."""
    high, low = saturation, saturation / 2
    binding, level = judge.at(high)
    if binding is None:
        return high, level, None
    while True:
        broken, level = judge.at(low)
        if broken is None:
            break
        high, low, binding = low, low / 2, broken
        if low < saturation / 1000:
            return 0.0, 0.0, binding
    while high / low > 1 + tolerance:
        middle = math.sqrt(low * high)
        broken, at_middle = judge.at(middle)
        if broken is None:
            low, level = middle, at_middle
        else:
            high, binding = middle, broken
    return low, level, binding
