"""Do deferrable work in short batches, and give way to reads of sockets that are ready.

In batches, as the first step costs as much as five that follow it.
"""

import asyncio
import time
from collections.abc import Callable

SLICE_NS = 250_000  # after which sockets are read again
EVERY_S = 0.1
GIVES_WAY_NS = 2_000_000  # longest wait of a slice for pending reads, else its backlog would grow


async def in_slices(step: Callable[[], bool], reads_wait: Callable[[], bool]) -> None:
    """Call ``step`` in slices until it returns False, and again every EVERY_S; until cancelled.

    A slice waits up to GIVES_WAY_NS while ``reads_wait()``.
    """
    while True:
        waits_until_ns = time.monotonic_ns() + GIVES_WAY_NS
        while reads_wait() and time.monotonic_ns() < waits_until_ns:
            await asyncio.sleep(0)
        slice_ends_ns = time.monotonic_ns() + SLICE_NS
        while (more := step()) and time.monotonic_ns() < slice_ends_ns:
            pass
        await asyncio.sleep(0 if more else EVERY_S)
