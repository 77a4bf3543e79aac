"""Requests that wait for admission, in order of arrival or of deadline."""

import heapq
import math
from collections import deque
from itertools import count

from simulator.request import Request


class ArrivalQueue:
    """First come first served; what was preempted or passed over goes to the front."""

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
        """One of the waiting requests was marked aborted."""
        self._aborted += 1

    def head(self, now_s: float) -> Request | None:
        """The next request, if it has arrived by now_s."""
        waiting = self._waiting
        while waiting:
            request = waiting[0]
            if not request.aborted:
                return request if request.arrival_s <= now_s else None
            waiting.popleft()
            self._aborted -= 1
        return None

    def pop(self) -> None:
        """Take the head."""
        self._waiting.popleft()

    def next_arrival_s(self) -> float | None:
        """When the head arrives, or None when nothing waits."""
        self.head(-math.inf)
        return self._waiting[0].arrival_s if self._waiting else None


class DeadlineQueue:
    """Earliest deadline first among those that have arrived; ties in order of submission."""

    def __init__(self) -> None:
        self._coming: deque[Request] = deque()
        self._ready: list[tuple[float, int, Request]] = []
        self._numbers = count()
        self._aborted = 0

    def __len__(self) -> int:
        return len(self._coming) + len(self._ready) - self._aborted

    def push(self, request: Request) -> None:
        self._coming.append(request)

    def push_front(self, request: Request) -> None:
        heapq.heappush(self._ready, (request.deadline_s, -next(self._numbers), request))

    def note_abort(self) -> None:
        self._aborted += 1

    def head(self, now_s: float) -> Request | None:
        while self._coming and self._coming[0].arrival_s <= now_s:
            request = self._coming.popleft()
            heapq.heappush(self._ready, (request.deadline_s, next(self._numbers), request))
        while self._ready and self._ready[0][2].aborted:
            heapq.heappop(self._ready)
            self._aborted -= 1
        return self._ready[0][2] if self._ready else None

    def pop(self) -> None:
        heapq.heappop(self._ready)

    def next_arrival_s(self) -> float | None:
        head = self.head(-math.inf)
        if head is not None:
            return head.arrival_s
        while self._coming and self._coming[0].aborted:
            self._coming.popleft()
            self._aborted -= 1
        return self._coming[0].arrival_s if self._coming else None
