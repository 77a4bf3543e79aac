"""Open-loop pacing: absolute deadlines from a schedule made before the clock starts.

``due_count`` is a pure function of the elapsed time; ``Sleeper`` is the one place that sleeps.
The timers of an event loop are coarse (libuv's count in milliseconds), so on Linux the sleeper
waits on a timerfd, which is exact to some tens of microseconds and costs nothing while it waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import struct
import sys
import time
from bisect import bisect_right
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

YIELD_EVERY = 16  # starts released in a row before the loop may read sockets again

_CLOCK_MONOTONIC = 1
_TFD_NONBLOCK_CLOEXEC = 0o4000 | 0o2000000
_TFD_TIMER_ABSTIME = 1


def due_count(scheduled_ns: npt.NDArray[np.int64], released: int, now_ns: int) -> int:
    """How many of the sorted deadlines, beyond the first ``released``, are due at ``now_ns``."""
    return bisect_right(scheduled_ns, now_ns, released) - released


class Sleeper:
    """Sleeps until an absolute monotonic time, to well below a millisecond where the platform can."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[bool] | None = None
        self._fd = _timerfd_create()
        if self._fd is not None:
            self._loop.add_reader(self._fd, self._on_timer)

    async def until(self, deadline_ns: int) -> None:
        """Return at ``deadline_ns`` (``time.monotonic_ns``), or at once if it has passed."""
        if deadline_ns <= time.monotonic_ns():
            return
        if self._fd is None:
            await self._until_coarse(deadline_ns)
            return
        _timerfd_settime(self._fd, deadline_ns)
        await self._wait()

    async def _wait(self) -> bool:
        """Wait for the timer; False: woken by somebody else."""
        self._waiter = self._loop.create_future()
        try:
            return await self._waiter
        finally:
            self._waiter = None

    async def _until_coarse(self, deadline_ns: int) -> None:
        """Sleep to 2 ms before the deadline, then give way to the loop until it is there."""
        while (left_ns := deadline_ns - time.monotonic_ns()) > 0:
            if left_ns <= 2_000_000:
                await asyncio.sleep(0)
                continue
            timer = self._loop.call_later(left_ns / 1e9 - 0.002, self._end_wait, True)
            try:
                if not await self._wait():
                    return
            finally:
                timer.cancel()

    def _on_timer(self) -> None:
        assert self._fd is not None
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 8)
        self._end_wait(True)

    def _end_wait(self, by_timer: bool) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(by_timer)

    def wake(self) -> None:
        """Let ``until`` return now: there may be an earlier deadline."""
        self._end_wait(False)

    def close(self) -> None:
        """Give the descriptor back."""
        if self._fd is not None:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None


async def pace(
    scheduled_ns: npt.NDArray[np.int64],
    release: Callable[[int, int], None],
    stop: Callable[[], bool],
    sleeper: Sleeper,
) -> int:
    """Call ``release(index, now_ns)`` for every deadline as it comes due; never waits for an answer.

    ``scheduled_ns`` int64[n], sorted, monotonic ns. Ends early when ``stop()`` says so, within 0.2 s.
    Returns how many were released.
    """
    released, total = 0, len(scheduled_ns)
    while released < total and not stop():
        now_ns = time.monotonic_ns()
        due = due_count(scheduled_ns, released, now_ns)
        if due <= 0:
            await sleeper.until(min(int(scheduled_ns[released]), now_ns + 200_000_000))
            continue
        for _ in range(min(due, YIELD_EVERY)):
            release(released, time.monotonic_ns())
            released += 1
        if due > YIELD_EVERY:
            await asyncio.sleep(0)
    return released


def _timerfd_create() -> int | None:
    if not sys.platform.startswith("linux"):
        return None
    fd = _libc().timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK_CLOEXEC)
    return fd if fd >= 0 else None


def _timerfd_settime(fd: int, deadline_ns: int) -> None:
    seconds, nanoseconds = divmod(deadline_ns, 1_000_000_000)
    _libc().timerfd_settime(fd, _TFD_TIMER_ABSTIME, struct.pack("@4l", 0, 0, seconds, nanoseconds), None)


_loaded: list[ctypes.CDLL] = []


def _libc() -> ctypes.CDLL:
    if not _loaded:
        _loaded.append(ctypes.CDLL(None, use_errno=True))
    return _loaded[0]
