"""The true capacity, in virtual time, that a measurement should find."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ampacity.simulator import SimulatorError
from ampacity.simulator.engine import outcome as outcomes
from ampacity.simulator.engine.deployment import Deployment
from ampacity.simulator.engine.options import EngineConfig
from ampacity.simulator.engine.outcome import Floats, Integers, Outcome
from ampacity.simulator.engine.request import Request

MakeRequests = Callable[
    [float, int], tuple[ArrayLike, ArrayLike, ArrayLike] | tuple[ArrayLike, Sequence[Request]]
]
"""(requests/s, seed) -> sorted arrival times in s, and prompt and output tokens or Requests."""
Slo = tuple[str, float, float]
"""(metric in METRICS, quantile, limit in s)."""
METRICS = ("ttft", "itl", "e2e", "tpot")


@dataclass(frozen=True, slots=True)
class Capacity:
    """The highest offered rate that meets every SLO, with standard errors over replications."""

    capacity_rps: float
    usable_rps_se: float
    c_max: float  # mean requests in flight at that rate
    c_max_se: float
    saturation_rps: float  # completions per second with a queue that never empties
    binding: Slo | None  # the first SLO violated; None: saturation comes first


@dataclass(frozen=True, slots=True)
class Measured(Outcome):
    """An outcome with its latencies."""

    @property
    def ttft_s(self) -> Floats:
        return self.first_token_s - self.arrival_s

    @property
    def e2e_s(self) -> Floats:
        return self.finish_s - self.arrival_s

    @property
    def tpot_s(self) -> Floats:
        """Time per output token after the first; NaN for requests of one token."""
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = (self.finish_s - self.first_token_s) / (self.output_tokens - 1)
        return np.where(self.output_tokens > 1, mean, np.nan)

    def gaps_s(self, chosen: NDArray[np.bool_] | None = None) -> tuple[Floats, Integers]:
        """Return (lengths in s, counts) of the gaps between tokens of the chosen requests.

        k tokens that come together, g after the token before, are k gaps of g/k.
        """
        keep = np.ones(len(self.arrival_s), dtype=bool) if chosen is None else chosen.copy()
        apart = [_gaps(times) for request, times in self.explicit.items() if keep[request]]
        keep[list(self.explicit)] = False
        keep &= self.output_tokens > 1
        first = self.first_step[keep]
        apart.append(self.step_end_s[first + 1] - self.first_token_s[keep])
        # and a gap at the end of each further tick, up to the last
        counts = np.zeros(len(self.step_end_s) + 2, dtype=np.int64)
        np.add.at(counts, first + 2, 1)
        np.add.at(counts, self.last_step[keep] + 1, -1)
        per_step = np.cumsum(counts)[: len(self.step_end_s)]
        lengths = np.diff(self.step_end_s, prepend=self.step_end_s[:1])
        used = per_step > 0
        more = np.concatenate(apart)
        return (
            np.concatenate([lengths[used], more]),
            np.concatenate([per_step[used], np.ones(len(more), dtype=np.int64)]),
        )

    def concurrency(self, start_s: float, end_s: float) -> float:
        """Return the mean number of requests in flight from start_s to end_s."""
        inside = np.minimum(self.finish_s, end_s) - np.maximum(self.arrival_s, start_s)
        return float(np.maximum(inside, 0.0).sum() / (end_s - start_s))


def _gaps(times: Floats) -> Floats:
    instants, tokens = np.unique(times, return_counts=True)
    return np.repeat(np.diff(instants) / tokens[1:], tokens[1:])


def measured(outcome: Outcome) -> Measured:
    return Measured(**{field.name: getattr(outcome, field.name) for field in fields(outcome)})


def simulate(config: EngineConfig | Deployment, arrivals_s: ArrayLike, *load: Any) -> Measured:
    """Run requests to their end in virtual time.

    load: new Requests, or their prompt tokens and output tokens. Raises SimulatorError if arrivals
    are not sorted or a request cannot be served.
    """
    arrivals = np.asarray(arrivals_s, dtype=np.float64)
    requests = load[0]
    if len(load) > 1:
        inputs, outputs = (np.asarray(tokens, dtype=np.int64).tolist() for tokens in load)
        requests = list(map(Request, inputs, outputs))
        if len(inputs) != len(outputs):
            raise SimulatorError("input_tokens and output_tokens must have the same length")
    if len(arrivals) == 0 or np.any(np.diff(arrivals) < 0) or len(arrivals) != len(requests):
        raise SimulatorError("arrivals_s must hold one sorted time for each request")
    deployment = Deployment(config) if isinstance(config, EngineConfig) else config
    return measured(outcomes.simulate(deployment, arrivals, requests))


def shares_within(outcome: Measured, slos: Sequence[Slo], chosen: NDArray[np.bool_]) -> list[float]:
    """Return for each SLO the share of chosen requests (`itl`: of their gaps) within its limit."""
    shares = []
    for metric, _, limit_s in slos:
        if metric == "itl":
            lengths, counts = outcome.gaps_s(chosen)
            within, total = int(counts[lengths <= limit_s].sum()), int(counts.sum())
        else:
            values = getattr(outcome, f"{metric}_s")[chosen]
            values = values[~np.isnan(values)]
            within, total = int((values <= limit_s).sum()), len(values)
        shares.append(within / total if total else 1.0)
    return shares


def saturation_rps(
    config: EngineConfig | Deployment, make_requests: MakeRequests, seed: int = 0
) -> float:
    """Return the completions per second when all requests are queued at the start.

    Only the middle half of the completions counts: neither ramp-up nor drain.
    """
    arrivals, *rest = make_requests(1.0, seed)
    outcome = simulate(config, np.zeros(len(np.asarray(arrivals))), *rest)
    finish = np.sort(outcome.finish_s)
    low, high = len(finish) // 4, (3 * len(finish)) // 4
    elapsed = finish[high] - finish[low]
    if elapsed <= 0:
        raise SimulatorError(
            f"{len(finish)} requests are too few to saturate the engine; make more"
        )
    return float((high - low) / elapsed)


def true_capacity(
    config: EngineConfig | Deployment,
    make_requests: MakeRequests,
    slos: Sequence[Slo],
    *,
    replications: int = 4,
    seed: int = 0,
    tolerance: float = 0.005,
    warmup_share: float = 0.2,
) -> Capacity:
    """Find capacity and C_max by bisection in log rate, with common random numbers.

    make_requests(rate, seed) sets the length of a run: with fewer than 10,000 requests the queue
    has no time to build up near the knee. The first `warmup_share` and the last 5 % of the requests
    do not count. `binding` is that of the first replication. capacity_rps is 0 if an SLO is
    violated at a thousandth of the saturation rate. Raises SimulatorError for an invalid SLO.
    """
    for metric, quantile, limit_s in slos:
        if metric not in METRICS or not 0 < quantile < 1 or not limit_s > 0:
            raise SimulatorError(
                f"SLO {(metric, quantile, limit_s)}: needs ({'|'.join(METRICS)}, 0 < q < 1, "
                "limit > 0)"
            )
    if replications < 2:
        raise SimulatorError("replications must be at least 2: the error is their spread")
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
        capacity_rps=float(rates.mean()),
        usable_rps_se=float(rates.std(ddof=1) / root),
        c_max=float(levels.mean()),
        c_max_se=float(levels.std(ddof=1) / root),
        saturation_rps=float(np.mean(saturations)),
        binding=found[0][2],
    )


@dataclass(frozen=True, slots=True)
class _Judge:
    """Check offered rates with the random numbers of one replication."""

    config: EngineConfig | Deployment
    make_requests: MakeRequests
    slos: Sequence[Slo]
    seed: int
    warmup_share: float

    def at(self, rate_rps: float) -> tuple[Slo | None, float]:
        """Return (SLO violated most, None if all are met; mean requests in flight) at a rate."""
        arrivals, *rest = self.make_requests(rate_rps, self.seed)
        outcome = simulate(self.config, arrivals, *rest)
        total = len(outcome.arrival_s)
        chosen = np.zeros(total, dtype=bool)
        chosen[int(total * self.warmup_share) : max(1, int(total * 0.95))] = True
        # misses as a multiple of the allowed misses, comparable between quantiles
        shares = shares_within(outcome, self.slos, chosen)
        misses = [(1 - share) / (1 - slo[1]) for share, slo in zip(shares, self.slos, strict=True)]
        window = outcome.arrival_s[chosen]
        worst = int(np.argmax(misses)) if misses else -1
        violated = bool(misses) and shares[worst] < self.slos[worst][1]
        level = outcome.concurrency(float(window[0]), float(window[-1]))
        return (self.slos[worst] if violated else None), level


def _crossing(
    judge: _Judge, saturation: float, tolerance: float
) -> tuple[float, float, Slo | None]:
    """Return (highest rate that meets the SLOs, requests in flight there, SLO violated above)."""
    high, low = saturation, saturation / 2
    binding, level = judge.at(high)
    if binding is None:
        return high, level, None
    while True:
        violated, level = judge.at(low)
        if violated is None:
            break
        high, low, binding = low, low / 2, violated
        if low < saturation / 1000:
            return 0.0, 0.0, binding
    while high / low > 1 + tolerance:
        middle = math.sqrt(low * high)
        violated, at_middle = judge.at(middle)
        if violated is None:
            low, level = middle, at_middle
        else:
            high, binding = middle, violated
    return low, level, binding
