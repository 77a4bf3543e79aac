"""Who waits for whom in a stage: released requests in, those that their answers make due out. No clock, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from workloads.schedule import Schedule


@dataclass
class Turns:
    """The requests of one schedule that wait for others, and how far each session has come."""

    schedule: Schedule
    end_on_failure: bool = True
    _missing: list[int] = field(default_factory=list)  # answers that each request still waits for
    _due_ns: dict[int, int] = field(default_factory=dict)  # the latest of the ends it waited for
    _followers: dict[int, list[int]] = field(default_factory=dict)
    _left: dict[int, int] = field(default_factory=dict)  # rows that a session still owes
    _begun: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        schedule = self.schedule
        if schedule.after_start is not None and schedule.after is not None:
            waits = np.diff(schedule.after_start)
            self._missing = waits.tolist()
            for earlier, later in zip(
                schedule.after.tolist(), np.repeat(np.arange(len(schedule)), waits).tolist(), strict=True
            ):
                self._followers.setdefault(earlier, []).append(later)
        if schedule.session is not None:
            names, counts = np.unique(schedule.session[schedule.session >= 0], return_counts=True)
            self._left = dict(zip(names.tolist(), counts.tolist(), strict=True))

    def session_of(self, index: int) -> int | None:
        """The number of the session of a request; None: it is of none."""
        session = -1 if self.schedule.session is None else int(self.schedule.session[index])
        return session if session >= 0 else None

    def released(self, index: int) -> None:
        """A request of its session has been sent."""
        session = self.session_of(index)
        if session is not None:
            self._begun.add(session)

    def ended(self, index: int, end_ns: int, failed: bool) -> tuple[list[tuple[int, int]], list[int]]:
        """([(request, when it is due)], [requests that will never be sent]) because ``index`` has ended.

        A request is due ``think_s`` after the last end that it waits for.
        """
        self._count(index)
        followers = self._followers.get(index, [])
        if failed and self.end_on_failure:
            return [], self._give_up(followers)
        due = []
        for later in followers:
            self._missing[later] -= 1
            at_ns = max(self._due_ns.pop(later, 0), end_ns)
            if self._missing[later] == 0:
                think_s = 0.0 if self.schedule.think_s is None else float(self.schedule.think_s[later])
                due.append((later, at_ns + round(think_s * 1e9)))
            elif self._missing[later] > 0:
                self._due_ns[later] = at_ns
        return due, []

    def _give_up(self, requests: list[int]) -> list[int]:
        """These and all that wait for them, in their order; each is given up once."""
        found, waiting = [], list(requests)
        while waiting:
            index = waiting.pop()
            if self._missing[index] >= 0:
                self._missing[index] = -len(self.schedule)  # whatever else ends, it never comes to 0
                found.append(index)
                self._count(index)
                waiting += self._followers.get(index, [])
        return sorted(found)

    def _count(self, index: int) -> None:
        session = self.session_of(index)
        if session is not None:
            self._left[session] -= 1

    def followed(self, index: int) -> bool:
        """Whether some request waits for this one."""
        return index in self._followers

    def over(self, index: int) -> bool:
        """Whether nothing more will come of the session of this request."""
        session = self.session_of(index)
        return session is None or self._left[session] == 0

    @property
    def begun(self) -> int:
        """Sessions that have begun."""
        return len(self._begun)

    def cut(self) -> list[int]:
        """Sessions that have begun and are not over."""
        return sorted(session for session in self._begun if self._left[session] > 0)
