"""Run the engine in real time: the tokens of a step are sent at its planned end."""

import asyncio
import heapq
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ampacity.simulator.engine.deployment import Deployment, Run
from ampacity.simulator.engine.engine import Request, StepResult
from ampacity.sleeper import Sleeper

GIVE_UP_S = 0.25  # a step later than this delays all after it, instead of catching up
# From the start of a step until it is computed; at most a quarter of the step before.
PATIENCE_S = 0.002


@dataclass(slots=True, eq=False)
class LiveRequest(Request):
    """A request whose `on_tokens(count)` is called once a step; it must not raise."""

    on_tokens: Callable[[int], None] = lambda count: None
    finish_reason: str = "length"
    prefill_s: float = 0.0  # start of the step that completed its prompt
    real_first_token_s: float = 0.0  # when its first token was sent


class LiveRun(Run):
    """Run a deployment on an event loop in real time. Times are `time.monotonic` seconds.

    The tokens of a step are sent at its planned end, and the next step begins at that time, however
    late the tokens were. It is computed a moment after it begins: requests that had arrived by then
    but were still being parsed are in it.
    """

    def __init__(
        self,
        deployment: Deployment,
        on_step: Callable[[int, StepResult, int, float], Any],
        step_end: Callable[[float, float], float] = lambda start_s, end_s: end_s,
    ) -> None:
        """on_step(engine, result, tokens, now) is called after the tokens of each step are sent.

        step_end(start, planned end) returns the end of a step, later if faults lengthen it.
        """
        super().__init__(deployment)
        # tokens sent - planned end of the step
        self.lateness_s: deque[float] = deque(maxlen=8192)
        self.lateness_sum_s = 0.0
        self.steps = 0
        self.timetable_resets = 0
        self._on_step = on_step
        self._stretched = step_end
        self._free_s = [-math.inf] * len(self.engines)  # no next step begins before
        self._patience_s = [0.0] * len(self.engines)
        self._speculative = deployment.config.speculation is not None
        self._loop = asyncio.get_running_loop()
        self._timer = Sleeper()

    def submit(self, requests: Sequence[LiveRequest], arrival_s: float) -> None:
        """Add requests that arrive together. Raises SimulatorError for any, before it adds one."""
        for request in requests:
            self.engines[0].check(request)
        for request in requests:
            self.arrive(request, arrival_s)
        self._pump()

    def abort(self, request: LiveRequest) -> None:
        """Drop a request. Does nothing if it has finished."""
        part = request.part or request
        if part.place >= 0:
            self.engines[part.place].abort(part)
        request.aborted = True

    def close(self) -> None:
        self._timer.close()

    def stretch_again(self) -> None:
        """Update the ends of the current steps after a change of the faults."""
        self._events = [
            (self._step_end_s(what) if isinstance(what, StepResult) else at_s, order, number, what)
            for at_s, order, number, what in self._events
        ]
        heapq.heapify(self._events)
        self._pump()

    def _pump(self) -> None:
        self.advance(time.monotonic())
        if self._events:
            self._timer.call_at(int(self._events[0][0] * 1e9), self._pump)

    def _start(self, number: int, now_s: float) -> None:
        self._busy[number] = True
        start_s = max(now_s, self._free_s[number])
        self._push(max(start_s, time.monotonic()) + self._patience_s[number], number, start_s)

    def _step_end_s(self, result: StepResult) -> float:
        return self._stretched(result.start_s, result.end_s)

    def _end(self, number: int, result: StepResult, at_s: float) -> None:
        receivers = cast(list[LiveRequest], self.engines[number].recipients(result))
        self._finish(number, result, at_s)
        if self._speculative:
            for request, tokens in itertools.groupby(receivers):
                request.on_tokens(sum(1 for _ in tokens))
        else:
            for request in receivers:
                request.on_tokens(1)
        now_s = time.monotonic()
        # the event loop may write after this callback, but not later than in its next turn
        self._loop.call_soon(self._loop.call_soon, self._note_lateness, at_s)
        self._on_step(number, result, len(receivers), now_s)
        self._patience_s[number] = min(PATIENCE_S, 0.25 * (at_s - result.start_s))
        self._free_s[number] = at_s
        if now_s - at_s > GIVE_UP_S:
            self.timetable_resets += 1
            self._free_s[number] = now_s

    def _note_lateness(self, deadline_s: float) -> None:
        late_s = time.monotonic() - deadline_s
        self.lateness_s.append(late_s)
        self.lateness_sum_s += late_s
        self.steps += 1
