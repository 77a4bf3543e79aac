"""Run the engine in real time: the tokens of a step are sent at its planned end."""

import asyncio
import contextlib
import ctypes
import heapq
import itertools
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ampacity.simulator.engine.deployment import Deployment, Run
from ampacity.simulator.engine.engine import Request, StepResult

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


class DeadlineTimer:
    """Call back at a time of `time.monotonic`, within some 0.1 ms on Linux, by a timerfd.

    Elsewhere the event loop's own timer is used, which may round to milliseconds.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._handle: asyncio.TimerHandle | None = None
        self._fd = -1
        if sys.platform == "linux":
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._fd = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd >= 0:
            # struct itimerspec: interval and value, each (s, ns)
            self._spec = (ctypes.c_long * 4)()
            loop.add_reader(self._fd, self._expired)

    def set(self, at_s: float) -> None:
        """Set the deadline, replacing any other; one that has passed is due at once."""
        if self._fd >= 0:
            at_ns = max(1, int(at_s * 1e9))
            self._spec[2], self._spec[3] = divmod(at_ns, 1_000_000_000)
            absolute = 1
            self._libc.timerfd_settime(self._fd, absolute, self._spec, None)
        else:
            self._cancel()
            self._handle = self._loop.call_later(max(0.0, at_s - time.monotonic()), self._callback)

    def close(self) -> None:
        self._cancel()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()

    def _expired(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 8)
            self._callback()


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
        self._timer = DeadlineTimer(self._loop, self._pump)

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
            self._timer.set(self._events[0][0])

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
