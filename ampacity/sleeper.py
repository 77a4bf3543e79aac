"""Sleep until an absolute monotonic time.

The timers of an event loop are coarse (libuv: milliseconds), so on Linux the sleeper waits on a
timerfd, which is exact to some tens of microseconds.
"""

import asyncio
import contextlib
import ctypes
import os
import struct
import sys
import time
from collections.abc import Callable
from functools import cache

NEVER_NS = 2**63 - 1

_CLOCK_MONOTONIC = 1
_TFD_NONBLOCK_CLOEXEC = 0o4000 | 0o2000000
_TFD_TIMER_ABSTIME = 1
_ITIMERSPEC = struct.Struct("@4l")


class Sleeper:
    """Wakes at an absolute monotonic time, to well below a millisecond where the platform can."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._call: Callable[[], None] | None = None
        self._coarse: asyncio.Handle | None = None
        self.deadline_ns = NEVER_NS  # when it calls next
        self._fd = _timerfd_create()
        if self._fd is not None:
            self._loop.add_reader(self._fd, self._on_timer)

    def call_at(self, deadline_ns: int, call: Callable[[], None]) -> None:
        """Call once, from the event loop, at ``deadline_ns`` (``time.monotonic_ns``) or later.

        Replaces an earlier call that is still pending.
        """
        self._call, self.deadline_ns = call, deadline_ns
        if self._fd is not None:
            _timerfd_settime(self._fd, max(deadline_ns, 1))  # at once where it has passed
            return
        if self._coarse is not None:
            self._coarse.cancel()
        self._coarse = self._loop.call_soon(self._look)

    def _look(self) -> None:
        """Without a timerfd: sleep until 2 ms before the deadline, then poll in the loop."""
        left_ns = self.deadline_ns - time.monotonic_ns()
        if left_ns <= 0:
            self._on_timer()
        elif left_ns <= 2_000_000:
            self._coarse = self._loop.call_soon(self._look)
        else:
            self._coarse = self._loop.call_later(left_ns / 1e9 - 0.002, self._look)

    def _on_timer(self) -> None:
        call, self._call, self.deadline_ns = self._call, None, NEVER_NS
        if call is not None:
            call()
        if self._call is None and self._fd is not None:  # setting it again would clear it too
            with contextlib.suppress(BlockingIOError):
                os.read(self._fd, 8)

    async def until(self, deadline_ns: int) -> None:
        """Return at ``deadline_ns``, or at once if it has passed."""
        if deadline_ns <= time.monotonic_ns():
            return
        self._waiter = self._loop.create_future()
        self.call_at(deadline_ns, self.wake)
        try:
            await self._waiter
        finally:
            self._waiter = None

    def wake(self) -> None:
        """Let ``until`` return now."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """Cancel the pending call and close the descriptor."""
        self._call, self.deadline_ns = None, NEVER_NS
        if self._coarse is not None:
            self._coarse.cancel()
        if self._fd is not None:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None


def _timerfd_create() -> int | None:
    if not sys.platform.startswith("linux"):
        return None
    fd = _libc().timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK_CLOEXEC)
    return fd if fd >= 0 else None


def _timerfd_settime(fd: int, deadline_ns: int) -> None:
    seconds, nanoseconds = divmod(deadline_ns, 1_000_000_000)
    _libc().timerfd_settime(
        fd, _TFD_TIMER_ABSTIME, _ITIMERSPEC.pack(0, 0, seconds, nanoseconds), None
    )


@cache
def _libc() -> ctypes.PyDLL:
    return ctypes.PyDLL(None)  # without giving the GIL away: neither call waits
