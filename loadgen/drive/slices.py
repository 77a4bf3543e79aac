"""Work that can wait, done many steps in a row: the first one costs as much as five that follow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

SLICE_NS = 250_000  # after which sockets are read again
EVERY_S = 0.1
GIVES_WAY_NS = (
    2_000_000  # a slice, to reads that wait: so long at most, else what waits here would grow
)


async def in_slices(step: Callable[[], bool], reads_wait: Callable[[], bool]) -> None:
    """Call ``step`` until it says that nothing is left to do, a slice at a time, and again after a while; until cancelled.

    No slice begins while ``reads_wait``, for a while.
    """
    while True:
        waits_until_ns = time.monotonic_ns() + GIVES_WAY_NS
        while reads_wait() and time.monotonic_ns() < waits_until_ns:
            await asyncio.sleep(0)
        slice_ends_ns = time.monotonic_ns() + SLICE_NS
        while (more := step()) and time.monotonic_ns() < slice_ends_ns:
            pass
        await asyncio.sleep(0 if more else EVERY_S)
