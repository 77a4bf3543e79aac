"""Sends the requests that became due because answers came."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Iterable

from loadgen.exchange import Exchange
from loadgen.pacer import YIELD_EVERY, Sleeper

AHEAD_NS = 5_000_000  # a request is made ready so long before it is due


class Follower:
    """Deadlines that come up while a stage goes on, in their order."""

    def __init__(
        self, make: Callable[[int], Exchange], send: Callable[[int, int, int, Exchange], None]
    ) -> None:
        """``make(index)`` gives a request that is not sent yet, ``send(index, due_ns, now_ns, request)`` lets it go."""
        self._make = make
        self._send = send
        self._due: list[tuple[int, int]] = []  # heap of (when, request)
        self._sleeper: Sleeper | None = None

    def push(self, due: Iterable[tuple[int, int]]) -> None:
        """Requests and when they are due, monotonic ns."""
        for index, due_ns in due:
            heapq.heappush(self._due, (due_ns, index))
            if self._sleeper is not None:
                self._sleeper.wake()

    def due_before(self, until_ns: int) -> bool:
        """Whether anything is waiting to be sent before that."""
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
                if index not in ready and due_ns - now_ns <= AHEAD_NS:
                    ready[index] = self._make(index)
                elif due_ns <= now_ns:
                    heapq.heappop(self._due)
                    self._send(index, due_ns, now_ns, ready.pop(index))
                    sent += 1
                    if sent % YIELD_EVERY == 0:
                        await asyncio.sleep(0)
                else:
                    await sleeper.until(due_ns - (0 if index in ready else AHEAD_NS))
        finally:
            self._sleeper = None
            sleeper.close()
