"""Requests made before their deadline, so that then they only have to be written; a bounded window of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

READY_MAX = 512  # requests that wait for their deadline ...
READY_MAX_BYTES = 16 * 2**20  # ... and how much they may weigh


class Ahead:
    """The next requests of a stage, in the order in which they will be sent."""

    def __init__(self, make: Callable[[int], bytes], order: NDArray[np.int64]) -> None:
        """``make(index)`` gives a request's bytes; the first window of them is made now."""
        self._make, self._order = make, order
        self._ready: deque[bytes] = deque()
        self._bytes = self._made = 0
        self.make(READY_MAX)

    def make(self, count: int) -> None:
        """Make up to ``count`` more, as far as the window has room; one at least where it is empty."""
        while (
            count > 0
            and self._made < len(self._order)
            and len(self._ready) < READY_MAX
            and (self._bytes < READY_MAX_BYTES or not self._ready)
        ):
            request = self._make(int(self._order[self._made]))
            self._ready.append(request)
            self._bytes += len(request)
            self._made += 1
            count -= 1

    def take(self) -> bytes:
        """The next one, made now if it is not ready."""
        if not self._ready:
            self.make(1)
        request = self._ready.popleft()
        self._bytes -= len(request)
        return request
