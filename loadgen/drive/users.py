"""Virtual users of a closed loop: each begins a session or single request when the last is over.

The first request of a session is scheduled at that moment plus think time.
"""

import asyncio
import math
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ampacity.loadgen.drive.pacer import pace
from ampacity.loadgen.plan import StagePlan
from ampacity.sleeper import Sleeper

DEAD_SERVER_PAUSE_S = 0.1  # of a user after a connect_error
_CHECK_EVERY_S = 0.05  # for the end of the stage


class VirtualUsers:
    """The virtual users of one stage, and their position in its schedule."""

    def __init__(
        self,
        plan: StagePlan,
        first: NDArray[np.int64],
        send: Callable[[int, int, int], None],
        stop: Callable[[], bool],
    ) -> None:
        """``first``: requests that depend on no other. Nothing is sent after ``stop()``."""
        self._plan, self._send, self._stop = plan, send, stop
        self._next = iter(first.tolist())
        self._reason: str | None = None

    async def play(self, start_ns: int, sleeper: Sleeper) -> str | None:
        """Start each user at its time and wait for the end; return why it came early, or None."""
        self._end_ns = math.inf if self._plan.whole else start_ns + int(self._plan.duration_s * 1e9)
        starts_ns = start_ns + np.round(np.array(self._plan.starts_s()) * 1e9).astype(np.int64)
        await pace(starts_ns, lambda user, now_ns: self._begin(), self._over, sleeper)
        while not self._over():
            await asyncio.sleep(min(_CHECK_EVERY_S, (self._end_ns - time.monotonic_ns()) / 1e9))
        return self._reason

    def finished(self, status: str) -> None:
        """Let a user begin its next session; ``status``: of the last request of the old one."""
        # later: an immediate error must neither recurse nor spin on a dead server
        pause_s = max(self._plan.think_s, DEAD_SERVER_PAUSE_S if status == "connect_error" else 0.0)
        asyncio.get_running_loop().call_later(pause_s, self._begin)

    def _over(self) -> bool:
        return self._reason is not None or self._stop() or time.monotonic_ns() >= self._end_ns

    def _begin(self) -> None:
        if self._over():
            return
        index = next(self._next, None)
        if index is None:
            self._reason = self._plan.used_up
        else:
            now_ns = time.monotonic_ns()
            self._send(index, now_ns, now_ns)
