"""The queue for admission, in order of arrival."""

from collections import deque

from ampacity.simulator.engine.request import Request


class WaitingQueue:
    """First come first served; a request that was preempted or passed over is the first."""

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

    def head(self) -> Request | None:
        """Return the next request, which may arrive later."""
        while self._waiting and self._waiting[0].aborted:
            self._waiting.popleft()
            self._aborted -= 1
        return self._waiting[0] if self._waiting else None

    def pop(self) -> None:
        """Remove the head."""
        self._waiting.popleft()
