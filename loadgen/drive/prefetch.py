"""Build requests before their deadline, within a bounded window."""

from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ampacity.loadgen.receive.exchange import Exchange

READY_MAX = 512  # requests built ahead ...
READY_MAX_BYTES = 16 * 2**20  # ... and their size


class RequestPrefetcher:
    """The next requests of a stage, in the order of sending."""

    def __init__(
        self, make: Callable[[int], Exchange], order: NDArray[np.int64], *, now: bool = True
    ) -> None:
        """``make(index)`` builds a request; with ``now`` the first of them are built at once."""
        self._make, self._order = make, order
        self._ready: deque[Exchange] = deque()
        self._bytes = self._made = 0
        while now and self.make_one():
            pass

    def make_one(self) -> bool:
        """Build the next request; return False if there is no room or none left."""
        room = len(self._ready) < READY_MAX and (self._bytes < READY_MAX_BYTES or not self._ready)
        if not room or self._made == len(self._order):
            return False
        exchange = self._make(int(self._order[self._made]))
        self._ready.append(exchange)
        self._bytes += len(exchange.request)
        self._made += 1
        return True

    def take(self) -> Exchange:
        """Return the next request; build it now if it is not ready."""
        if not self._ready:
            self.make_one()
        exchange = self._ready.popleft()
        self._bytes -= len(exchange.request)
        return exchange
