"""The results of a run in virtual time: the times of each request and of its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ampacity.simulator.engine.deployment import Deployment, Run, drive_one
from ampacity.simulator.engine.engine import Request
from ampacity.simulator.engine.samples import Sample

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Times of each request (arrays over requests, in s) and the end of each tick.

    The tokens of a request appear at first_token_s and at the end of each tick after first_step, up
    to last_step. `explicit` has the token times of all other requests: preempted, under speculative
    decoding, or with prefill on another engine.
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
    samples: Sequence[Sample] = ()  # of the engines' own state, once a second

    def token_times_s(self, request: int) -> Floats:
        """Return the time of each output token of one request."""
        if request in self.explicit:
            return self.explicit[request]
        first, last = int(self.first_step[request]), int(self.last_step[request])
        return np.concatenate(
            [self.first_token_s[request : request + 1], self.step_end_s[first + 1 : last + 1]]
        )

    def chunks(self, request: int) -> tuple[Floats, Integers]:
        """Return (times in s, tokens) of the chunks of one request; equal times are one chunk."""
        return np.unique(self.token_times_s(request), return_counts=True)


def simulate(deployment: Deployment, arrivals_s: Floats, requests: Sequence[Request]) -> Outcome:
    """Run requests to their end in virtual time; arrivals are sorted.

    Raises SimulatorError if a request cannot be served.
    """
    if deployment.engines == 1:
        return outcome_of(drive_one(deployment, requests, arrivals_s.tolist()), requests)
    run = Run(deployment, sampled=True)
    for request, arrival_s in zip(requests, arrivals_s.tolist(), strict=True):
        run.arrive(request, arrival_s)
    run.advance()
    return outcome_of(run, requests)


def outcome_of(run: Run, requests: Sequence[Request]) -> Outcome:
    """Return the arrays of a run that has ended."""
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
        samples=run.sampler.samples if run.sampler is not None else (),
    )


def _explicit_times(request: Request, ticks: Sequence[Floats]) -> list[float]:
    """Return the time of each token of a finished request, from the ticks of each engine."""
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
