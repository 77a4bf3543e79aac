"""Who waits for whom in a stage: released requests in, those that their answers make due out. No clock, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ampacity.workloads.schedule import AFTER_START, WITH_START, Schedule


@dataclass
class SessionDependencies:
    """The requests of one schedule that wait for others, and how far each session has come."""

    schedule: Schedule
    end_on_failure: bool = True
    _missing: list[int] = field(default_factory=list)  # answers that each request still waits for
    _due_ns: dict[int, int] = field(default_factory=dict)  # when it is due by those that have ended
    _followers: dict[int, list[int]] = field(default_factory=dict)
    _with: dict[int, list[int]] = field(
        default_factory=dict
    )  # those that go with a request's start
    _began_ns: dict[int, int] = field(
        default_factory=dict
    )  # of requests from whose start a pause counts
    _left: dict[int, int] = field(default_factory=dict)  # rows that a session still owes
    _begun: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        schedule = self.schedule
        if schedule.after_start is not None and schedule.after is not None:
            waits = np.diff(schedule.after_start)
            self._missing = waits.tolist()
            for earlier, later in zip(
                schedule.after.tolist(),
                np.repeat(np.arange(len(schedule)), waits).tolist(),
                strict=True,
            ):
                kind = 0 if schedule.counts_from is None else int(schedule.counts_from[later])
                held = self._with if kind == WITH_START else self._followers
                held.setdefault(earlier, []).append(later)
                if kind == AFTER_START:
                    self._began_ns[earlier] = 0
        if schedule.session is not None:
            names, counts = np.unique(schedule.session[schedule.session >= 0], return_counts=True)
            self._left = dict(zip(names.tolist(), counts.tolist(), strict=True))

    def session_of(self, index: int) -> int | None:
        """The number of the session of a request; None: it is of none."""
        session = -1 if self.schedule.session is None else int(self.schedule.session[index])
        return session if session >= 0 else None

    def released(self, index: int, at_ns: int) -> list[tuple[int, int]]:
        """A request of its session has been sent, due at ``at_ns``. [(request that goes with it, when it is due)]."""
        session = self.session_of(index)
        if session is not None:
            self._begun.add(session)
        if index in self._began_ns:
            self._began_ns[index] = at_ns
        return [(later, at_ns + self._pause_ns(later)) for later in self._with.get(index, ())]

    def ended(
        self, index: int, end_ns: int, failed: bool
    ) -> tuple[list[tuple[int, int]], list[int]]:
        """([(request, when it is due)], [requests that will never be sent]) because ``index`` has ended.

        A request is due ``think_s`` after the last end that it waits for, or after the last start and no
        earlier than the last end, as the schedule's ``counts_from`` has it.
        """
        self._count(index)
        followers = self._followers.get(index, [])
        if failed and self.end_on_failure:
            return [], self._give_up(followers)
        due = []
        counts_from = self.schedule.counts_from
        for later in followers:
            self._missing[later] -= 1
            if counts_from is not None and counts_from[later] == AFTER_START:
                at_ns = max(end_ns, self._began_ns[index] + self._pause_ns(later))
            else:
                at_ns = end_ns + self._pause_ns(later)
            at_ns = max(self._due_ns.pop(later, 0), at_ns)
            if self._missing[later] == 0:
                due.append((later, at_ns))
            elif self._missing[later] > 0:
                self._due_ns[later] = at_ns
        return due, []

    def _pause_ns(self, index: int) -> int:
        return (
            0 if self.schedule.think_s is None else round(float(self.schedule.think_s[index]) * 1e9)
        )

    def _give_up(self, requests: list[int]) -> list[int]:
        """These and all that wait for them, in their order; each is given up once."""
        found, waiting = [], list(requests)
        while waiting:
            index = waiting.pop()
            if self._missing[index] >= 0:
                self._missing[index] = -len(
                    self.schedule
                )  # whatever else ends, it never comes to 0
                found.append(index)
                self._count(index)
                waiting += self._followers.get(index, []) + self._with.get(index, [])
        return sorted(found)

    def _count(self, index: int) -> None:
        session = self.session_of(index)
        if session is not None:
            self._left[session] -= 1

    def followed(self, index: int) -> bool:
        """Whether some request waits for this one."""
        return index in self._followers or index in self._with

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
