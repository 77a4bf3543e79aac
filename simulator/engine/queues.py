"""The queue for admission, in order of arrival or of deadline."""

import heapq
import math
from collections import deque
from itertools import count

from ampacity.simulator.engine.request import Request


class WaitingQueue:
    """First come first served, or earliest deadline first among the requests that have arrived.

    A request that was preempted or passed over is the first among equals.
    """

    def __init__(self, *, by_deadline: bool) -> None:
        self._by_deadline = by_deadline
        self._coming: deque[Request] = deque()
        self._ready: list[tuple[float, int, Request]] = []
        self._numbers = count(1)
        self._aborted = 0

    def __len__(self) -> int:
        return len(self._coming) + len(self._ready) - self._aborted

    def push(self, request: Request) -> None:
        self._coming.append(request)

    def push_front(self, request: Request) -> None:
        self._make_ready(request, -next(self._numbers))

    def _make_ready(self, request: Request, rank: int) -> None:
        deadline_s = request.deadline_s if self._by_deadline else 0.0
        heapq.heappush(self._ready, (deadline_s, rank, request))

    def note_abort(self) -> None:
        """Count a waiting request that was marked as aborted."""
        self._aborted += 1

    def head(self, now_s: float) -> Request | None:
        """Return the next of the requests that have arrived by now_s."""
        coming, ready = self._coming, self._ready
        while coming and coming[0].arrival_s <= now_s:
            self._make_ready(coming.popleft(), next(self._numbers))
        while ready and ready[0][2].aborted:
            heapq.heappop(ready)
            self._aborted -= 1
        return ready[0][2] if ready else None

    def pop(self) -> None:
        """Remove the head."""
        heapq.heappop(self._ready)

    def next_arrival_s(self) -> float | None:
        """Return the arrival time of the next request, or None if none waits."""
        head = self.head(-math.inf)
        if head is not None:
            return head.arrival_s
        while self._coming and self._coming[0].aborted:
            self._coming.popleft()
            self._aborted -= 1
        return self._coming[0].arrival_s if self._coming else None
