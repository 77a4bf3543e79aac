"""Several engines in virtual time: replicas behind a router, and prefill apart from decoding."""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count

from simulator import SimulatorError
from simulator.engine import Engine, EngineConfig, Request, StepResult
from simulator.routing import ROUTINGS, Router


@dataclass(frozen=True, slots=True)
class Transfer:
    """How KV entries get from a prefill engine to a decode engine; all of a prompt's after its prefill."""

    kv_bytes_per_token: float
    bytes_s: float
    latency_s: float = 0.0

    def seconds(self, tokens: int) -> float:
        return self.latency_s + tokens * self.kv_bytes_per_token / self.bytes_s


@dataclass(frozen=True, slots=True)
class Deployment:
    """`replicas` engines of one configuration behind a router (`simulator.routing`).

    With `prefill`, prompts are computed by `prefill_replicas` engines of that configuration, behind a router of
    the same kind: the first token comes from there, and the request goes on here when its KV entries are over.
    """

    config: EngineConfig
    replicas: int = 1
    routing: str = "round-robin"
    hash_block: int = 0
    prefill: EngineConfig | None = None
    prefill_replicas: int = 1
    transfer: Transfer | None = None

    def __post_init__(self) -> None:
        if self.routing not in ROUTINGS or min(self.replicas, self.prefill_replicas) < 1:
            raise SimulatorError(
                f"deployment: needs at least one replica and a routing of {', '.join(ROUTINGS)}, got {self}"
            )
        if (self.prefill is None) != (self.transfer is None):
            raise SimulatorError("deployment: prefill and transfer go together; give both or neither")

    @property
    def name(self) -> str:
        return f"{self.replicas} x {self.config.name}"


class Run:
    """One run of a deployment in virtual time. `place` and `ticks` say afterwards when each token came."""

    def __init__(self, deployment: Deployment, on_finish: Callable[[float], None] | None = None) -> None:
        """on_finish(time in s) is called whenever a request has got its last token."""
        config = deployment.config
        self.engines = [Engine(replace(config, seed=config.seed + n)) for n in range(deployment.replicas)]
        self.ticks: list[list[float]] = [[] for _ in self.engines]  # end of each tick of each engine, in s
        self.place: dict[Request, int] = {}  # the engine that decodes a request
        self.continued: dict[Request, Request] = {}  # decode part -> the request that came in
        self._router = Router(deployment.routing, deployment.replicas, deployment.hash_block)
        self._transfer = deployment.transfer
        self._prefill = (
            [Engine(deployment.prefill) for _ in range(deployment.prefill_replicas)]
            if (deployment.prefill is not None)
            else []
        )
        self._prefill_router = Router(deployment.routing, deployment.prefill_replicas, deployment.hash_block)
        self._origin: dict[Request, Request] = {}  # prefill part -> the request that came in
        self._stepping: set[Engine] = set()
        self._events: list[tuple[float, int, Request | None, Engine | None, StepResult | None]] = []
        self._numbers = count()
        self._on_finish = on_finish

    def arrive(self, request: Request, at_s: float) -> None:
        """Let a request arrive at an instant that has not passed yet."""
        heapq.heappush(self._events, (at_s, next(self._numbers), request, None, None))

    def drain(self) -> None:
        """Run until nothing is left to do. Raises SimulatorError for a request that cannot be served."""
        events = self._events
        while events:
            now_s = events[0][0]
            touched: dict[Engine, None] = {}
            while events and events[0][0] == now_s:  # all of an instant, so that they share a step
                _, _, request, engine, result = heapq.heappop(events)
                if request is not None:
                    touched[self._route(request, now_s)] = None
                elif engine is not None and result is not None:
                    self._stepping.discard(engine)
                    self._note(engine, result)
                    touched[engine] = None
            for engine in touched:
                self._wake(engine, now_s)

    def _route(self, request: Request, now_s: float) -> Engine:
        if self._prefill and request not in self.continued:
            request.arrival_s = now_s
            part = Request(
                request.prompt_tokens,
                1,
                block_hashes=request.block_hashes,
                session=request.session,
                adapter=request.adapter,
                deadline_s=request.deadline_s,
            )
            self._origin[part] = request
            engine = self._prefill[self._prefill_router.choose(part, self._prefill)]
            engine.submit(part, now_s)
        else:
            number = self._router.choose(request, self.engines)
            self.place[request] = number
            engine = self.engines[number]
            engine.submit(request, now_s)
        return engine

    def _wake(self, engine: Engine, now_s: float) -> None:
        if engine in self._stepping:
            return
        result = engine.step(now_s)
        if result is not None:
            self._stepping.add(engine)
            heapq.heappush(self._events, (result.end_s, next(self._numbers), None, engine, result))

    def _note(self, engine: Engine, result: StepResult) -> None:
        """Look at a step that has just ended."""
        if engine in self._prefill:
            for part in result.finished:
                self._hand_over(part, result.end_s)
            return
        if result.advanced:
            self.ticks[self.engines.index(engine)].append(result.end_s)
        if self._on_finish is not None:
            for _ in result.finished:
                self._on_finish(result.end_s)

    def _hand_over(self, part: Request, end_s: float) -> None:
        """A prompt is computed: its first token is out, the rest goes on when the KV entries are there."""
        request = self._origin.pop(part)
        request.first_token_s = end_s
        request.cached_tokens = part.cached_tokens
        if request.output_tokens == 1 or self._transfer is None:
            request.finish_s = end_s
            request.token_s = [end_s]
            if self._on_finish is not None:
                self._on_finish(end_s)
            return
        # The first token is part of the context now; its own KV entry is computed with the second token.
        rest = Request(
            request.prompt_tokens + 1,
            request.output_tokens - 1,
            session=request.session,
            adapter=request.adapter,
            deadline_s=request.deadline_s,
            ready_tokens=request.prompt_tokens,
        )
        self.continued[rest] = request
        self.arrive(rest, end_s + self._transfer.seconds(request.prompt_tokens))


def drive_one(config: EngineConfig, requests: Sequence[Request], arrivals_s: Sequence[float]) -> Run:
    """The same as a `Run` of one engine, in a loop that is twice as fast. Arrivals must be sorted."""
    run = Run(Deployment(config))
    engine, ticks = run.engines[0], run.ticks[0]
    now_s = -math.inf
    submitted, total = 0, len(requests)
    step, submit = engine.step, engine.submit
    while True:
        while submitted < total and arrivals_s[submitted] <= now_s:
            submit(requests[submitted], arrivals_s[submitted])
            submitted += 1
        result = step(now_s)
        if result is not None:
            now_s = result.end_s
            if result.advanced:
                ticks.append(now_s)
        elif submitted < total:
            now_s = arrivals_s[submitted]
        else:
            run.place = dict.fromkeys(requests, 0)
            return run
