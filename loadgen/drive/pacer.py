"""Open-loop pacing: absolute deadlines from a schedule made before the clock starts.

``due_count`` is a pure function of the elapsed time; ``pace`` releases what is due.
"""

import asyncio
import time
from bisect import bisect_right
from collections.abc import Callable
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from ampacity.sleeper import Sleeper

YIELD_EVERY = 16  # starts released in a row before the loop may read sockets again


def due_count(scheduled_ns: npt.NDArray[np.int64] | memoryview, released: int, now_ns: int) -> int:
    """Count the sorted deadlines after the first ``released`` that are due at ``now_ns``."""
    return bisect_right(scheduled_ns, now_ns, released) - released


async def pace(
    scheduled_ns: npt.NDArray[np.int64],
    release: Callable[[int, int], None],
    stop: Callable[[], bool],
    sleeper: Sleeper,
) -> int:
    """Call ``release(index, now_ns)`` at every deadline; never wait for an answer.

    ``scheduled_ns``: int64[n], sorted, monotonic ns. Ends within 0.2 s after ``stop()`` turns true.
    Returns the number released.
    """
    deadlines_ns = scheduled_ns.data  # a numpy array would box each number
    released, total = 0, len(deadlines_ns)
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # called by the timer: waking a task would delay each request by a turn of the loop
    def turn() -> None:
        nonlocal released
        now_ns = time.monotonic_ns()
        try:
            if ended.done():
                return
            due = min(due_count(deadlines_ns, released, now_ns), YIELD_EVERY)
            for _ in takewhile(lambda _: not stop(), range(due)):  # a limit holds among them too
                release(released, time.monotonic_ns())
                released += 1
            if released >= total or stop():
                ended.set_result(None)
                return
        except Exception as error:
            ended.set_exception(error)
            return
        sleeper.call_at(min(deadlines_ns[released], now_ns + 200_000_000), turn)  # noqa: F821

    turn()
    try:
        await ended
    finally:
        del turn  # which refers to itself: with it the deadlines would wait for the collector
    return released
