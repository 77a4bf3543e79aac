"""Work that can wait, done many steps in a row: the first one costs as much as five that follow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

SLICE_NS = 250_000  # after which sockets are read again
EVERY_S = 0.1


async def in_slices(step: Callable[[], bool]) -> None:
    """Call ``step`` until it says that nothing is left to do, a slice at a time, and again after a while; until cancelled."""
    while True:
        slice_ends_ns = time.monotonic_ns() + SLICE_NS
        while (more := step()) and time.monotonic_ns() < slice_ends_ns:
            pass
        await asyncio.sleep(0 if more else EVERY_S)
