"""The engine in real time: each step's tokens are handed out at its planned end, by absolute deadlines."""

import asyncio
import contextlib
import ctypes
import itertools
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

from simulator import SimulatorError
from simulator.engine import Engine, Request, StepResult

GIVE_UP_S = 0.25  # a step that is later than this moves the timetable instead of hurrying after it


class LiveRequest(Request):
    """A request with a place to put its tokens: `on_tokens(count)` is called once a step and must not raise."""

    __slots__ = ("finish_reason", "on_tokens", "prefill_s", "real_first_token_s")

    def __init__(
        self,
        prompt_tokens: int,
        output_tokens: int,
        on_tokens: Callable[[int], None],
        *,
        finish_reason: str = "length",
        block_hashes: Sequence[Hashable] = (),
        adapter: str | None = None,
    ) -> None:
        super().__init__(prompt_tokens, output_tokens, block_hashes=block_hashes, adapter=adapter)
        self.on_tokens = on_tokens
        self.finish_reason = finish_reason
        self.prefill_s = 0.0  # start of the step that ended its prompt
        self.real_first_token_s = 0.0  # set once its first token was handed out


class DeadlineTimer:
    """Calls back at a `time.monotonic` instant, within some 0.1 ms.

    libuv's and asyncio's own timers have whole milliseconds; on Linux a timerfd has not. Elsewhere their
    timers are used.
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
            self._spec = (ctypes.c_long * 4)()  # struct itimerspec: interval and value, each (s, ns)
            loop.add_reader(self._fd, self._expired)

    def set(self, at_s: float) -> None:
        """Arm for `at_s`, also if that has passed; replaces an earlier deadline."""
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
            self._handle = None

    def _expired(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 8)
            self._callback()


class StepLoop:
    """Drives an Engine on an event loop. Engine times are `time.monotonic` seconds."""

    def __init__(
        self,
        engine: Engine,
        on_step: Callable[[StepResult, int, float], Any],
        step_end: Callable[[float, float], float] = lambda start_s, end_s: end_s,
    ) -> None:
        """on_step(result, tokens handed out, now) is called after the tokens of each step are handed out.

        step_end(start, planned end) is when the step shall really end: later, where faults stretch it.
        """
        self.engine = engine
        self.lateness_s: deque[float] = deque(
            maxlen=8192
        )  # real end of the handing out − planned end of the step
        self.lateness_sum_s = 0.0
        self.steps = 0
        self.timetable_resets = 0
        self._on_step = on_step
        self._step_end = step_end
        self._planned: StepResult | None = None
        self._deadline_s = 0.0
        self._last_end_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._timer = DeadlineTimer(self._loop, self._deadline)

    def submit(self, requests: Sequence[LiveRequest], arrival_s: float) -> None:
        """Queue requests that come together; an idle engine starts its step with all of them.

        Raises SimulatorError as Engine.submit; then none of them is queued.
        """
        for number, request in enumerate(requests):
            try:
                self.engine.submit(request, arrival_s)
            except SimulatorError:
                for queued in requests[:number]:
                    self.engine.abort(queued)
                raise
        if self._planned is None:
            self._plan(max(arrival_s, self._last_end_s))

    def abort(self, request: LiveRequest) -> None:
        self.engine.abort(request)

    def close(self) -> None:
        self._timer.close()

    def stretch_again(self) -> None:
        """The faults have changed: ask again when the step under way shall end."""
        if self._planned is not None:
            self._arm(self._planned)

    def _plan(self, now_s: float) -> None:
        self._planned = self.engine.step(now_s)
        if self._planned is not None:
            self._arm(self._planned)

    def _arm(self, planned: StepResult) -> None:
        self._deadline_s = self._step_end(planned.start_s, planned.end_s)
        self._timer.set(self._deadline_s)

    def _deadline(self) -> None:
        result = self._planned
        if result is None:
            return
        receivers = cast(list[LiveRequest], self.engine.recipients(result))
        if self.engine.config.speculation is None:
            for request in receivers:
                request.on_tokens(1)
        else:
            for request, tokens in itertools.groupby(receivers):
                request.on_tokens(sum(1 for _ in tokens))
        now_s = time.monotonic()
        self._last_end_s = self._deadline_s
        # The event loop may write what it was given after this callback; a turn later it has.
        self._loop.call_soon(self._loop.call_soon, self._note_lateness, self._deadline_s)
        self._on_step(result, len(receivers), now_s)
        if now_s - self._deadline_s > GIVE_UP_S:
            self.timetable_resets += 1
            self._plan(now_s)
        else:
            self._plan(self._deadline_s)

    def _note_lateness(self, deadline_s: float) -> None:
        late_s = time.monotonic() - deadline_s
        self.lateness_s.append(late_s)
        self.lateness_sum_s += late_s
        self.steps += 1
