"""The queue for admission."""

import math
from collections import deque

from ampacity.simulator.engine.request import Request


class WaitingQueue:
    """First come first served; a request that was preempted or passed over comes first."""

    def __init__(self) -> None:
        self._waiting: deque[Request] = deque()
        self._aborted = 0

    def __len__(self) -> int:
        return len(self._waiting) - self._aborted

    def push(self, request: Request) -> None:
        self._waiting.append(request)

    def push_front(self, request: Request) -> None:
        self._waiting.appendleft(request)

    def note_abort(self) -> None:
        """Count a waiting request that was marked as aborted."""
        self._aborted += 1

    def head(self, now_s: float) -> Request | None:
        """Return the next of the requests that have arrived by now_s."""
        waiting = self._waiting
        while waiting and waiting[0].aborted:
            waiting.popleft()
            self._aborted -= 1
        return waiting[0] if waiting and waiting[0].arrival_s <= now_s else None

    def pop(self) -> None:
        """Remove the head."""
        self._waiting.popleft()

    def next_arrival_s(self) -> float | None:
        """Return the arrival time of the next request, or None if none waits."""
        head = self.head(math.inf)
        return None if head is None else head.arrival_s
