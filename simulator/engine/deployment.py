"""Several engines in virtual time: replicas behind a router, and prefill apart from decoding."""

import heapq
import math
import zlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import count

from ampacity.simulator import SimulatorError
from ampacity.simulator.engine.engine import Engine, EngineConfig, Request, StepResult
from ampacity.simulator.engine.options import ROUTINGS
from ampacity.simulator.engine.samples import Sampler


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copy of all KV entries of a prompt from a prefill engine to a decode engine."""

    kv_bytes_per_token: float
    bytes_s: float
    latency_s: float = 0.0

    def seconds(self, tokens: int) -> float:
        return self.latency_s + tokens * self.kv_bytes_per_token / self.bytes_s


@dataclass(frozen=True, slots=True)
class Deployment:
    """`replicas` engines of one configuration behind a `Router`.

    With `prefill`, prompts are computed by `prefill_replicas` engines of that configuration, behind
    a router of the same kind. They give the first token; the other engines decode the rest, once
    the KV entries are copied.
    """

    config: EngineConfig
    replicas: int = 1
    routing: str = "round-robin"
    prefill: EngineConfig | None = None
    prefill_replicas: int = 1
    transfer: Transfer | None = None

    def __post_init__(self) -> None:
        if self.routing not in ROUTINGS:
            raise SimulatorError(f"unknown routing {self.routing!r}; known: {', '.join(ROUTINGS)}")
        if min(self.replicas, self.prefill_replicas) < 1:
            raise SimulatorError(
                f"replicas must be at least 1, got {self.replicas}, and {self.prefill_replicas} "
                "for prompts"
            )
        if (self.prefill is None) != (self.transfer is None):
            raise SimulatorError(
                "deployment: prefill and transfer go together; give both or neither"
            )

    def seeded(self, seed: int) -> "Deployment":
        """Return a copy with another seed for the engines' random numbers."""
        return replace(self, config=replace(self.config, seed=seed))

    @property
    def engines(self) -> int:
        """Return the number of engines, with those for prompts."""
        return self.replicas + (self.prefill_replicas if self.prefill is not None else 0)


class Router:
    """Choose the replica for a request.

    round-robin: in turn. least-request: fewest running and waiting, in turn among equals.
    prefix-hash: by a hash of the prompt's first block. session-sticky: by a hash of the session.
    Both use round-robin for requests without one.
    """

    def __init__(self, routing: str, replicas: int) -> None:
        self._routing = routing
        self._replicas = replicas
        self._turn = -1

    def choose(self, request: Request, engines: Sequence[Engine]) -> int:
        """Return the number of the replica."""
        if self._routing == "prefix-hash" and request.block_hashes:
            return self._hashed(request.block_hashes[0])
        if self._routing == "session-sticky" and request.session is not None:
            return self._hashed(request.session)
        self._turn = (self._turn + 1) % self._replicas
        if self._routing != "least-request":
            return self._turn
        order = [(self._turn + n) % self._replicas for n in range(self._replicas)]
        return min(order, key=lambda n: engines[n].running + engines[n].waiting)

    def _hashed(self, key: Hashable) -> int:
        return zlib.crc32(repr(key).encode()) % self._replicas


class Run:
    """Run a deployment in virtual time, event by event.

    `engines`: those that decode, then those that only compute prompts. `ticks`: for each engine the
    end of each tick, in s. A request's `place` is the number of the engine that decodes it.
    """

    def __init__(
        self,
        deployment: Deployment,
        on_finish: Callable[[Request, float], None] | None = None,
        *,
        sampled: bool = False,
    ) -> None:
        """on_finish(request, time in s) is called with the last token of each request.

        `sampled`: keep the engines' state once a second, of a run that begins at time 0.
        """
        configs = [
            replace(deployment.config, seed=deployment.config.seed + n)
            for n in range(deployment.replicas)
        ]
        if deployment.prefill is not None:
            configs += [deployment.prefill] * deployment.prefill_replicas
        self.engines = [Engine(config) for config in configs]
        self.ticks: list[list[float]] = [[] for _ in self.engines]
        self.sampler = Sampler(self.engines) if sampled else None
        self._decoders = deployment.replicas
        self._router = Router(deployment.routing, deployment.replicas)
        self._prefill_router = Router(deployment.routing, deployment.prefill_replicas)
        self._transfer = deployment.transfer
        self._busy = [False] * len(self.engines)
        # (time, order of entry, engine, event): a request arrives, a step ends, or one begins (its
        # start in s)
        self._events: list[tuple[float, int, int, Request | StepResult | float]] = []
        self._numbers = count()
        self._on_finish = on_finish

    def arrive(self, request: Request, at_s: float) -> None:
        """Let a request arrive at a time that has not passed yet."""
        self._push(at_s, -1, request)

    def advance(self, until_s: float = math.inf) -> None:
        """Process all events up to a time. Raises SimulatorError if a request cannot be served."""
        events = self._events
        while events and events[0][0] <= until_s:
            now_s = events[0][0]
            touched: dict[int, None] = {}
            while events and events[0][0] == now_s:  # simultaneous events share a step
                _, _, number, what = heapq.heappop(events)
                if isinstance(what, float):
                    self._plan(number, what)
                elif isinstance(what, StepResult):
                    self._busy[number] = False
                    self._end(number, what, now_s)
                    touched[number] = None
                elif not (what.whole or what).aborted:
                    touched[self._route(what, now_s)] = None
            for number in touched:
                if not self._busy[number]:
                    self._start(number, now_s)

    def _push(self, at_s: float, number: int, what: Request | StepResult | float) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), number, what))

    def _start(self, number: int, now_s: float) -> None:
        """Begin the next step of an engine."""
        self._plan(number, now_s)

    def _plan(self, number: int, start_s: float) -> None:
        result = self.engines[number].step(start_s)
        self._busy[number] = result is not None
        if result is not None:
            self._push(self._step_end_s(result), number, result)

    def _step_end_s(self, result: StepResult) -> float:
        return result.end_s

    def _route(self, request: Request, now_s: float) -> int:
        """Give a request, or only its prompt, to an engine; return the number of the engine."""
        decoders, prefill = self.engines[: self._decoders], self.engines[self._decoders :]
        if prefill and request.whole is None:
            request.arrival_s = now_s
            request = request.split(request.prompt_tokens, 1)
            request.place = self._decoders + self._prefill_router.choose(request, prefill)
        else:
            request.place = self._router.choose(request, decoders)
        self.engines[request.place].submit(request, now_s)
        return request.place

    def _end(self, number: int, result: StepResult, at_s: float) -> None:
        if result.advanced:
            self.ticks[number].append(at_s)
        if self.sampler is not None and at_s >= self.sampler.due_s:
            self.sampler.step_ended(result.start_s, at_s, idle_before=not any(self._busy))
        self._finish(number, result, at_s)

    def _finish(self, number: int, result: StepResult, at_s: float) -> None:
        for request in result.finished:
            whole = request.whole
            if whole is not None:
                if number >= self._decoders and self._hand_over(request, whole, at_s):
                    continue
                whole.finish_s = at_s
            if self._on_finish is not None:
                self._on_finish(whole or request, at_s)

    def _hand_over(self, part: Request, whole: Request, at_s: float) -> bool:
        """Pass a request whose first token is out on to decoding; return False if that was all.

        It arrives there when its KV entries are copied.
        """
        whole.first_token_s = at_s
        whole.cached_tokens = part.cached_tokens
        if whole.output_tokens == 1 or self._transfer is None:
            return False
        if not whole.aborted:
            # The first token is in the context now; its KV entry is computed with the second.
            rest = whole.split(
                whole.prompt_tokens + 1, whole.output_tokens - 1, ready_tokens=whole.prompt_tokens
            )
            self.arrive(rest, at_s + self._transfer.seconds(whole.prompt_tokens))
        return True


def drive_one(
    deployment: Deployment, requests: Sequence[Request], arrivals_s: Sequence[float]
) -> Run:
    """Run one engine to the end, twice as fast as `Run.advance`. Arrivals must be sorted."""
    run = Run(deployment, sampled=True)
    engine, ticks = run.engines[0], run.ticks[0]
    now_s = -math.inf
    submitted, total = 0, len(requests)
    step, submit, sampler = engine.step, engine.submit, run.sampler
    while True:
        while submitted < total and arrivals_s[submitted] <= now_s:
            submit(requests[submitted], arrivals_s[submitted])
            submitted += 1
        result = step(now_s)
        if result is not None:
            now_s = result.end_s
            if result.advanced:
                ticks.append(now_s)
            if sampler is not None and now_s >= sampler.due_s:
                sampler.step_ended(result.start_s, now_s, idle_before=True)
        elif submitted < total:
            now_s = arrivals_s[submitted]
        else:
            return run
