"""One stage in virtual time: schedule in, the time of every token out (`Outcome`, in the order given)."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from simulator import SimulatorError
from simulator.deployment import Deployment
from simulator.engine import EngineConfig, Request
from simulator.outcome import Outcome, simulate_closed, simulate_requests


@dataclass(frozen=True, slots=True)
class Traits:
    """What requests have beside their lengths; each a sequence over requests, or None for none of them.

    prefixes and prefix_tokens: the first prefix_tokens of requests with an equal prefix are equal. sessions: what
    follows the prefix is equal in all turns of a session, as far as both go, answers included.
    """

    prefixes: Sequence[Hashable] | None = None
    prefix_tokens: Sequence[int] | None = None
    sessions: Sequence[Hashable] | None = None
    adapters: Sequence[str | None] | None = None
    deadlines_s: Sequence[float] | None = None


def run_stage(
    config: EngineConfig | Deployment,
    scheduled_s: ArrayLike,
    input_tokens: ArrayLike,
    output_tokens: ArrayLike,
    seed: int = 0,
    traits: Traits | None = None,
) -> Outcome:
    """An open-loop stage on an engine that is idle before. The seed draws what the engine draws.

    scheduled_s need not be sorted. Raises SimulatorError for requests that cannot be served.
    """
    scheduled = np.asarray(scheduled_s, dtype=np.float64)
    requests = make_requests(config, input_tokens, output_tokens, traits)
    if len(scheduled) != len(requests):
        raise SimulatorError("scheduled_s, input_tokens and output_tokens must have the same length")
    order = np.argsort(scheduled, kind="stable")
    outcome = simulate_requests(seeded(config, seed), scheduled[order], [requests[n] for n in order])
    return outcome.reordered(np.argsort(order, kind="stable"))


def run_closed_stage(
    config: EngineConfig | Deployment,
    concurrency: int,
    input_tokens: ArrayLike,
    output_tokens: ArrayLike,
    seed: int = 0,
    traits: Traits | None = None,
    think_s: float = 0.0,
) -> Outcome:
    """A closed loop of `concurrency` clients that send the requests in the order given, the first ones at 0 s.

    arrival_s is when each was sent. Raises SimulatorError for requests that cannot be served.
    """
    requests = make_requests(config, input_tokens, output_tokens, traits)
    return simulate_closed(seeded(config, seed), concurrency, requests, think_s)


def make_requests(
    config: EngineConfig | Deployment,
    input_tokens: ArrayLike,
    output_tokens: ArrayLike,
    traits: Traits | None = None,
) -> list[Request]:
    """Requests with these traits; blocks are named when there is a prefix cache to find them in.

    Every block has a name then, so that what is never asked for again takes room in the cache too.
    Raises SimulatorError for sequences of different lengths.
    """
    inputs = np.asarray(input_tokens, dtype=np.int64).tolist()
    outputs = np.asarray(output_tokens, dtype=np.int64).tolist()
    given = traits or Traits()
    for values in (
        outputs, given.prefixes, given.prefix_tokens, given.sessions, given.adapters, given.deadlines_s
    ):  # fmt: skip
        if values is not None and len(values) != len(inputs):
            raise SimulatorError("input_tokens, output_tokens and traits must have the same length")
    engines = [config] if isinstance(config, EngineConfig) else [config.config, config.prefill]
    cached = next((e for e in engines if e is not None and e.prefix_caching), None)
    named = isinstance(config, Deployment) and config.routing == "prefix-hash"
    block = engines[0].block_tokens if engines[0] is not None else 16
    requests = []
    for number, (prompt, output) in enumerate(zip(inputs, outputs, strict=True)):
        request = Request(prompt, output)
        if given.sessions is not None:
            request.session = given.sessions[number]
        if given.adapters is not None:
            request.adapter = given.adapters[number]
        if given.deadlines_s is not None:
            request.deadline_s = given.deadlines_s[number]
        if cached is not None or named:
            request.block_hashes = _names(given, number, (prompt + output) // block, block)
        requests.append(request)
    return requests


def _names(traits: Traits, number: int, blocks: int, block_tokens: int) -> list[Hashable]:
    prefix = None if traits.prefixes is None else traits.prefixes[number]
    shared = 0
    if prefix is not None and traits.prefix_tokens is not None:
        shared = min(traits.prefix_tokens[number] // block_tokens, blocks)
    session = None if traits.sessions is None else traits.sessions[number]
    own: Hashable = ("request", number) if session is None else ("session", session)
    return [("prefix", prefix, n) if n < shared else (own, n) for n in range(blocks)]


def seeded(config: EngineConfig | Deployment, seed: int) -> EngineConfig | Deployment:
    """The same with another seed of what the engine draws."""
    if isinstance(config, EngineConfig):
        return replace(config, seed=seed)
    return replace(config, config=replace(config.config, seed=seed))
