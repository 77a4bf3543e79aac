"""Requests made before their deadline, so that then they only have to be written; a bounded window of them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

READY_MAX = 512  # requests that wait for their deadline ...
READY_MAX_BYTES = 16 * 2**20  # ... and how much they may weigh
REFILL_EVERY_S = 0.1  # many in a row: the first one costs as much as five that follow
SLICE_NS = 250_000  # after which sockets are read again


class Ahead:
    """The next requests of a stage, in the order in which they will be sent."""

    def __init__(self, make: Callable[[int], bytes], order: NDArray[np.int64]) -> None:
        """``make(index)`` gives a request's bytes; the first window of them is made now."""
        self._make, self._order = make, order
        self._ready: deque[bytes] = deque()
        self._bytes = self._made = 0
        while self._has_room():
            self._make_one()

    def _has_room(self) -> bool:
        return (
            self._made < len(self._order)
            and len(self._ready) < READY_MAX
            and (self._bytes < READY_MAX_BYTES or not self._ready)
        )

    def _make_one(self) -> None:
        request = self._make(int(self._order[self._made]))
        self._ready.append(request)
        self._bytes += len(request)
        self._made += 1

    async def keep_ready(self) -> None:
        """Keep the window full until cancelled, a slice at a time."""
        while True:
            slice_ends_ns = time.monotonic_ns() + SLICE_NS
            while (room := self._has_room()) and time.monotonic_ns() < slice_ends_ns:
                self._make_one()
            await asyncio.sleep(0 if room else REFILL_EVERY_S)

    def take(self) -> bytes:
        """The next one, made now if it is not ready."""
        if not self._ready:
            self._make_one()
        request = self._ready.popleft()
        self._bytes -= len(request)
        return request
