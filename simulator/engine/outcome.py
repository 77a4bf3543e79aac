"""What became of each request of a run in virtual time, by the engine's own bookkeeping."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ampacity.simulator import SimulatorError
from ampacity.simulator.engine.deployment import Deployment, Run, drive_one
from ampacity.simulator.engine.engine import EngineConfig, Request
from ampacity.simulator.engine.samples import Sample

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened to each request (arrays over requests, in s) and when each tick ended.

    A request's tokens came at first_token_s and at the ends of the ticks after first_step, up to last_step;
    `explicit` has the token times of those for which that is not so (preempted, speculative, disaggregated).
    """

    arrival_s: Floats
    first_token_s: Floats
    finish_s: Floats
    output_tokens: Integers
    cached_tokens: Integers
    step_end_s: Floats
    first_step: Integers
    last_step: Integers
    explicit: dict[int, Floats]
    preemptions: int
    samples: Sequence[Sample] = ()  # of the engines' own state, once a second

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
        if request in self.explicit:
            return self.explicit[request]
        first, last = int(self.first_step[request]), int(self.last_step[request])
        return np.concatenate(
            [self.first_token_s[request : request + 1], self.step_end_s[first + 1 : last + 1]]
        )

    def chunks(self, request: int) -> tuple[Floats, Integers]:
        """(time in s of each chunk of one request, tokens in it): equal times are one chunk."""
        return np.unique(self.token_times_s(request), return_counts=True)

    def gaps_s(self, chosen: NDArray[np.bool_] | None = None) -> tuple[Floats, Integers]:
        """Gaps between tokens of the chosen requests, over all of them: (length in s, how many such gaps).

        k tokens that come together, g after those before, are k gaps of g/k.
        """
        keep = np.ones(len(self.arrival_s), dtype=bool) if chosen is None else chosen.copy()
        apart = [_gaps(times) for request, times in self.explicit.items() if keep[request]]
        keep[list(self.explicit)] = False
        keep &= self.output_tokens > 1
        first = self.first_step[keep]
        apart.append(self.step_end_s[first + 1] - self.first_token_s[keep])
        # And a gap at the end of each tick after that, up to the last.
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
        """Time average of the number of requests between arrival and last token, over [start_s, end_s]."""
        inside = np.minimum(self.finish_s, end_s) - np.maximum(self.arrival_s, start_s)
        return float(np.maximum(inside, 0.0).sum() / (end_s - start_s))


def _gaps(times: Floats) -> Floats:
    instants, tokens = np.unique(times, return_counts=True)
    return np.repeat(np.diff(instants) / tokens[1:], tokens[1:])


def simulate(config: EngineConfig | Deployment, arrivals_s: ArrayLike, *load: Any) -> Outcome:
    """Run requests to their end in virtual time.

    load: new Requests, or the prompt tokens and the output tokens of plain ones.
    Raises SimulatorError for arrivals that are not sorted and for requests that cannot be served.
    """
    arrivals = np.asarray(arrivals_s, dtype=np.float64)
    requests = load[0]
    if len(load) > 1:
        inputs, outputs = (np.asarray(tokens, dtype=np.int64).tolist() for tokens in load)
        if len(inputs) != len(outputs):
            raise SimulatorError("input_tokens and output_tokens must have the same length")
        requests = list(map(Request, inputs, outputs))
    if len(arrivals) == 0 or np.any(np.diff(arrivals) < 0) or len(arrivals) != len(requests):
        raise SimulatorError(
            "arrivals_s must hold one time for each request, at least one, and be sorted"
        )
    deployment = Deployment(config) if isinstance(config, EngineConfig) else config
    if deployment.engines == 1:
        run = drive_one(deployment, requests, arrivals.tolist())
    else:
        run = Run(deployment, sampled=True)
        for request, arrival_s in zip(requests, arrivals.tolist(), strict=True):
            run.arrive(request, arrival_s)
        run.advance()
    return outcome_of(run, requests)


def outcome_of(run: Run, requests: Sequence[Request]) -> Outcome:
    """Arrays from the requests of a run that has come to its end."""
    ends = [np.array(ticks, dtype=np.float64) for ticks in run.ticks]
    offsets = np.cumsum([0, *map(len, ends)])
    for request in requests:
        if request.part is not None:  # its first token came from an engine for prompts
            first_s = request.first_token_s or 0.0
            rest = [] if request.output_tokens == 1 else _explicit_times(request.part, ends)
            request.token_s = [first_s, *rest]
    shift = offsets[[max(0, request.place) for request in requests]]
    explicit = {
        number: np.asarray(_explicit_times(request, ends), dtype=np.float64)
        for number, request in enumerate(requests)
        if request.token_s is not None or request.segments is not None
    }
    return Outcome(
        arrival_s=np.array([r.arrival_s for r in requests], dtype=np.float64),
        first_token_s=np.array([r.first_token_s for r in requests], dtype=np.float64),
        finish_s=np.array([r.finish_s for r in requests], dtype=np.float64),
        output_tokens=np.array([r.output_tokens for r in requests], dtype=np.int64),
        cached_tokens=np.array([r.cached_tokens for r in requests], dtype=np.int64),
        step_end_s=np.concatenate(ends),
        first_step=shift + np.array([r.first_tick for r in requests], dtype=np.int64),
        last_step=shift + np.array([r.last_tick for r in requests], dtype=np.int64),
        explicit=explicit,
        preemptions=sum(engine.preemptions for engine in run.engines),
        samples=run.sampler.samples if run.sampler is not None else (),
    )


def _explicit_times(request: Request, ticks: Sequence[Floats]) -> list[float]:
    """The time of each token of a request that has finished, by the ticks of each engine."""
    if request.token_s is not None:
        return request.token_s
    first_s = request.first_token_s
    segments = request.segments or [
        (0.0 if first_s is None else first_s, request.first_tick, request.last_tick)
    ]
    times: list[float] = []
    for join_s, first, last in segments:
        times.append(join_s)
        times.extend(ticks[max(0, request.place)][first + 1 : last + 1].tolist())
    return times
