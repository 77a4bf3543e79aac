"""Track which requests depend on which, and when an answer makes another one due. Pure."""

from dataclasses import dataclass, field

import numpy as np

from ampacity.workloads.timetable import AFTER_START, WITH_START, Schedule


@dataclass
class SessionDependencies:
    """The dependent requests of one schedule, and the progress of its sessions."""

    schedule: Schedule
    end_on_failure: bool = True
    _missing: list[int] = field(default_factory=list)  # answers that a request still needs
    _due_ns: dict[int, int] = field(default_factory=dict)  # by the answers that have ended
    _followers: dict[int, list[int]] = field(default_factory=dict)
    _with: dict[int, list[int]] = field(default_factory=dict)  # due with a request's start
    _began_ns: dict[int, int] = field(default_factory=dict)  # where a pause counts from the start
    _left: dict[int, int] = field(default_factory=dict)  # records missing from a session
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
        """Return the number of a request's session, or None."""
        session = -1 if self.schedule.session is None else int(self.schedule.session[index])
        return session if session >= 0 else None

    def released(self, index: int, at_ns: int) -> list[tuple[int, int]]:
        """Note that a request due at ``at_ns`` was sent; return [(request due with it, when)]."""
        session = self.session_of(index)
        if session is not None:
            self._begun.add(session)
        if index in self._began_ns:
            self._began_ns[index] = at_ns
        return [(later, at_ns + self._pause_ns(later)) for later in self._with.get(index, ())]

    def ended(
        self, index: int, end_ns: int, failed: bool
    ) -> tuple[list[tuple[int, int]], list[int]]:
        """Return ([(request, when it is due)], [cancelled requests]) after the end of ``index``.

        A request is due ``think_s`` after the last end that it depends on; with the schedule's
        ``counts_from``, after the last start but no earlier than the last end.
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
        think_s = self.schedule.think_s
        return 0 if think_s is None else round(float(think_s[index]) * 1e9)

    def _give_up(self, requests: list[int]) -> list[int]:
        """Cancel these and all that depend on them; return them sorted, each once."""
        found, waiting = [], list(requests)
        while waiting:
            index = waiting.pop()
            if self._missing[index] >= 0:
                self._missing[index] = -len(self.schedule)  # can never reach 0 again
                found.append(index)
                self._count(index)
                waiting += self._followers.get(index, []) + self._with.get(index, [])
        return sorted(found)

    def _count(self, index: int) -> None:
        session = self.session_of(index)
        if session is not None:
            self._left[session] -= 1

    def followed(self, index: int) -> bool:
        """Return whether a request depends on this one."""
        return index in self._followers or index in self._with

    def over(self, index: int) -> bool:
        """Return whether the session of this request is over."""
        session = self.session_of(index)
        return session is None or self._left[session] == 0

    @property
    def begun(self) -> int:
        """Return the number of sessions that have begun."""
        return len(self._begun)

    def cut(self) -> list[int]:
        """Return the sessions that have begun and are not over."""
        return sorted(session for session in self._begun if self._left[session] > 0)
