"""Send the requests that answers made due."""

import asyncio
import heapq
import math
import time
from collections.abc import Callable, Iterable

from ampacity.loadgen.drive.pacer import YIELD_EVERY
from ampacity.loadgen.receive.exchange import Exchange
from ampacity.sleeper import Sleeper

# A request is built up to AHEAD_NS before it is due, as a long one takes some ms; but only within
# QUIET_NS of its time while another is due within QUIET_NS.
AHEAD_NS = 100_000_000
QUIET_NS = 20_000_000


class DependentSender:
    """Sends requests whose deadlines become known during a stage, in order of deadline."""

    def __init__(
        self, make: Callable[[int], Exchange], send: Callable[[int, int, int, Exchange], None]
    ) -> None:
        """``make(index)`` builds a request, ``send(index, due_ns, now_ns, request)`` sends it."""
        self._make = make
        self._send = send
        self._due: list[tuple[int, int]] = []  # heap of (when, request)
        self._unmade: list[tuple[int, int]] = []  # heap of those not built yet
        self._sleeper: Sleeper | None = None

    def push(self, due: Iterable[tuple[int, int]]) -> None:
        """Add (request, when it is due in monotonic ns)."""
        for index, due_ns in due:
            heapq.heappush(self._due, (due_ns, index))
            heapq.heappush(self._unmade, (due_ns, index))
            if self._sleeper is not None:
                self._sleeper.wake()

    def due_before(self, until_ns: int) -> bool:
        """Return whether a request is due before ``until_ns``."""
        return bool(self._due) and self._due[0][0] < until_ns

    async def run(self) -> None:
        """Send until cancelled."""
        self._sleeper = sleeper = Sleeper()
        ready: dict[int, Exchange] = {}
        sent = 0
        try:
            while True:
                now_ns = time.monotonic_ns()
                if not self._due:
                    await sleeper.until(now_ns + 1_000_000_000)
                    continue
                due_ns, index = self._due[0]
                if due_ns <= now_ns and index in ready:
                    heapq.heappop(self._due)
                    self._send(index, due_ns, now_ns, ready.pop(index))
                    sent += 1
                    if sent % YIELD_EVERY == 0:
                        await asyncio.sleep(0)
                    continue
                make_ns = self._make_from_ns(now_ns)
                if make_ns <= now_ns:
                    first_ns, first = heapq.heappop(self._unmade)
                    ready[first] = self._make(first)
                    if first_ns > now_ns:
                        await asyncio.sleep(0)  # let the loop read sockets
                else:
                    await sleeper.until(int(min(due_ns, make_ns)))
        finally:
            self._sleeper = None
            sleeper.close()

    def _make_from_ns(self, now_ns: int) -> float:
        """Return when the next request may be built."""
        if not self._unmade:
            return math.inf
        (first_ns, first), (due_ns, index) = self._unmade[0], self._due[0]
        return first_ns - (AHEAD_NS if first == index or due_ns - now_ns > QUIET_NS else QUIET_NS)
