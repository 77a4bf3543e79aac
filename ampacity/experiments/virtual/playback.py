"""Play a schedule on a simulated engine: sessions, shared prefixes, virtual users."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ampacity.loadgen.drive.dependencies import SessionDependencies
from ampacity.loadgen.plan import user_starts
from ampacity.simulator.engine.deployment import Deployment, Run
from ampacity.simulator.engine.engine import Request
from ampacity.simulator.engine.outcome import Outcome, outcome_of, simulate
from ampacity.workloads.schedule import Schedule


@dataclass(frozen=True)
class Played:
    """The part of a schedule that was sent, with the actual times, and its outcome."""

    schedule: Schedule
    outcome: Outcome
    begun: int = 0  # sessions
    cut: tuple[int, ...] = ()  # sessions that were not over when nothing more was sent
    used_up: bool = False  # the virtual users wanted more requests than there are


def play(
    deployment: Deployment,
    schedule: Schedule,
    *,
    seed: int,
    answers_told: bool = True,
    until_s: float = math.inf,
    users: int | None = None,
    users_until_s: float = math.inf,
    think_s: float = 0.0,
    ramp_s: float = 0.0,
) -> Played:
    """Play a schedule on an idle engine until all requests sent before ``until_s`` are answered.

    A request that waits for others is sent ``think_s`` of the schedule after the last of them.
    With ``users`` the loop is closed: each starts a session (or single request) ``think_s`` after
    the end of the last one, before ``users_until_s``. ``answers_told``: histories contain the
    answers. Raises SimulatorError for requests that cannot be served.
    """
    engine = deployment.seeded(seed)
    requests = make_requests(deployment, schedule, answers_told)
    if users is None and schedule.after_start is None:
        sent = np.flatnonzero(schedule.scheduled_s < until_s)
        schedule = schedule.take(sent)
        outcome = simulate(engine, schedule.scheduled_s, [requests[i] for i in sent.tolist()])
        return Played(schedule, outcome)
    loop = _Loop(engine, schedule, requests, until_s)
    if users is None:
        loop.play_open()
    else:
        loop.play_closed(user_starts(users, ramp_s, think_s), users_until_s, think_s)
    return loop.played()


class _Loop:
    """Sends requests that wait for others, and those of virtual users."""

    def __init__(
        self, engine: Deployment, schedule: Schedule, requests: list[Request], until_s: float
    ) -> None:
        self._schedule, self._requests = schedule, requests
        self._dependencies = SessionDependencies(schedule)
        self._index = {request: i for i, request in enumerate(requests)}
        self._first = iter(schedule.first_requests().tolist())
        self._until_s = self._users_until_s = until_s
        self._think_s: float | None = None  # of users; None: open loop
        self._used_up = False
        self._run = Run(engine, on_finish=self._ended, sampled=True)

    def play_open(self) -> None:
        for index in self._first:
            if self._schedule.scheduled_s[index] < self._until_s:
                self._send(index, float(self._schedule.scheduled_s[index]))
        self._run.advance()

    def play_closed(self, starts_s: Sequence[float], users_until_s: float, think_s: float) -> None:
        self._users_until_s, self._think_s = min(users_until_s, self._until_s), think_s
        for start_s in starts_s:
            self._start(start_s)
        self._run.advance()

    def played(self) -> Played:
        sent = np.flatnonzero([request.finish_s is not None for request in self._requests])
        outcome = outcome_of(self._run, [self._requests[i] for i in sent.tolist()])
        schedule = replace(self._schedule.take(sent), scheduled_s=outcome.arrival_s)
        begun, cut = self._dependencies.begun, tuple(self._dependencies.cut())
        return Played(schedule, outcome, begun, cut, self._used_up)

    def _send(self, index: int, at_s: float) -> None:
        self._run.arrive(self._requests[index], at_s)
        for later, due_ns in self._dependencies.released(index, round(at_s * 1e9)):
            self._send(later, due_ns / 1e9)

    def _start(self, at_s: float) -> None:
        """Start a user's next session or single request."""
        if at_s >= self._users_until_s:
            return
        index = next(self._first, None)
        if index is None:
            self._used_up = True
        else:
            self._send(index, at_s)

    def _ended(self, request: Request, at_s: float) -> None:
        index = self._index[request]
        for later, due_ns in self._dependencies.ended(index, round(at_s * 1e9), failed=False)[0]:
            due_s = max(due_ns / 1e9, at_s)  # rounding must not lead into the past
            if due_s < self._until_s:
                self._send(later, due_s)
        if self._think_s is not None and self._dependencies.over(index):
            self._start(at_s + self._think_s)


def make_requests(
    deployment: Deployment, schedule: Schedule, answers_told: bool = True
) -> list[Request]:
    """Return a schedule's requests, with named blocks if a prefix cache or router needs them."""
    engines = [e for e in (deployment.config, deployment.prefill) if e is not None]
    named = deployment.routing == "prefix-hash" or any(engine.prefix_caching for engine in engines)
    inputs, outputs = schedule.input_tokens.tolist(), schedule.output_tokens.tolist()
    requests: list[Request] = []
    for index, (prompt, output) in enumerate(zip(inputs, outputs, strict=True)):
        request = Request(prompt, output)
        if schedule.session is not None and schedule.session[index] >= 0:
            request.session = int(schedule.session[index])
        if named:
            request.block_hashes = _names(
                schedule, index, requests, deployment.config.block_tokens, answers_told
            )
        requests.append(request)
    return requests


def _names(
    schedule: Schedule, index: int, requests: list[Request], block_tokens: int, answers_told: bool
) -> list[Hashable]:
    """Name all full blocks of a prompt and its answer. Equal names: equal text up to there.

    A prompt that continues a conversation begins with all of it, others with a shared prefix.
    """
    prompt = int(schedule.input_tokens[index])
    blocks = (prompt + int(schedule.output_tokens[index])) // block_tokens
    before = -1 if schedule.continues is None else int(schedule.continues[index])
    if before >= 0:
        earlier = requests[before]
        known = earlier.prompt_tokens + (earlier.output_tokens if answers_told else 0)
        found = list(earlier.block_hashes[: min(known, prompt) // block_tokens])
    else:
        found = _shared_names(schedule, index, prompt, block_tokens)
    return [*found, *((index, number) for number in range(len(found), blocks))]


def _shared_names(schedule: Schedule, index: int, prompt: int, block_tokens: int) -> list[Hashable]:
    """Name blocks by the chain of segments up to the block's end."""
    names: list[Hashable] = []
    chain: Hashable = None
    begin = 0
    for segment, tokens in [] if schedule.shared is None else schedule.shared.of(index):
        end = min(begin + tokens, prompt)
        while (len(names) + 1) * block_tokens <= end:
            names.append((chain, segment, (len(names) + 1) * block_tokens - begin))
        chain, begin = (chain, segment, tokens), end
    return names
