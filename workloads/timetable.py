"""The requests of one stage as columns: due times, lengths, classes, sessions, shared prefixes."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.prompts.prefixes import SharedPrefixes, infinite_cache, take_lists

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
WHOLE = "in whole sessions"  # what a limit leaves: there is no room for the next one
# What the pause of a request counts from.
AFTER_END = 0  # the last end of its dependencies
AFTER_START = 1  # their last start; it begins no earlier than their last end
WITH_START = 2  # the start of its one dependency, whatever its outcome


# The columns with one value for each request.
COLUMNS = (
    *("scheduled_s", "input_tokens", "output_tokens", "class_index", "model_index"),
    *("cancel_after_s", "cancel_after_tokens", "session", "turn", "think_s", "counts_from"),
    *("continues", "new_tokens", "entry", "numbers"),
)


@dataclass(frozen=True, eq=False)
class Schedule:
    """n requests in the order in which they are due.

    ``scheduled_s`` float64[n], seconds from the stage's start (all 0 in a closed loop, where the
    driver sets them), of a dependent request the earliest possible time; ``input_tokens`` and
    ``output_tokens`` int64[n]; request i has the id ``first_request_id + i``. Further columns: None
    where unused.
    """

    scheduled_s: Floats
    input_tokens: Ints
    output_tokens: Ints
    first_request_id: int = 0
    class_names: tuple[str, ...] = ("default",)
    class_index: NDArray[np.int16] | None = None  # into class_names; None: all of the first class
    model_names: tuple[str, ...] = ()
    model_index: NDArray[np.int16] | None = None  # into model_names; -1, None: the run's model
    cancel_after_s: Floats | None = None  # the user leaves, from the start; NaN: stays
    cancel_after_tokens: Ints | None = None  # the user leaves, in output tokens; 0: stays
    session: Ints | None = None  # number of the session; -1: none
    turn: NDArray[np.int32] | None = None  # 0, 1, ... within the session
    think_s: Floats | None = None  # pause after its dependencies
    counts_from: NDArray[np.int8] | None = None  # what that pause counts from; None: AFTER_END
    after_start: Ints | None = None  # int64[n + 1]: request i waits for the requests
    after: Ints | None = None  # (by index) after[after_start[i]:after_start[i + 1]]
    continues: Ints | None = None  # index of the request whose conversation it continues; -1: none
    new_tokens: Ints | None = None  # the part of input_tokens after that conversation
    shared: SharedPrefixes | None = None  # prefix that it shares with other prompts
    entry: Ints | None = None  # index into the prompts of a file; -1: none
    shortened: tuple[int, ...] = ()  # sessions of which a limit left only the first turns
    numbers: Ints | None = None  # request i has the id first_request_id + numbers[i]; None: + i

    def __post_init__(self) -> None:
        for name in COLUMNS:
            column = getattr(self, name)
            if column is not None and len(column) != len(self.scheduled_s):
                raise WorkloadError(f"the columns of a schedule differ in length: {name}")
        here = np.arange(len(self))
        waiting = None if self.after_start is None else np.repeat(here, np.diff(self.after_start))
        for earlier, late in ((self.after, waiting), (self.continues, here)):
            if earlier is not None and late is not None and np.any(earlier >= late):
                raise WorkloadError("a request waits for one that stands behind it in the schedule")
        if not np.isfinite(self.scheduled_s).all():
            raise WorkloadError("a scheduled time is not a finite number")

    def __len__(self) -> int:
        return len(self.scheduled_s)

    def planned_tokens(self) -> int:
        """Return the input and output tokens of all requests."""
        return int(self.input_tokens.sum() + self.output_tokens.sum())

    def take(self, kept: Ints) -> "Schedule":
        """Return the requests at these indices, in order; they must include their dependencies."""
        new_index = np.full(len(self) + 1, -1, dtype=np.int64)  # the last one stands for "none"
        new_index[kept] = np.arange(len(kept))
        columns = {
            name: column[kept] for name in COLUMNS if (column := getattr(self, name)) is not None
        }
        if self.continues is not None:
            columns["continues"] = new_index[self.continues[kept]]
        if self.after_start is not None and self.after is not None:
            mine, columns["after_start"] = take_lists(self.after_start, kept)
            columns["after"] = new_index[self.after[mine]]
        if self.shared is not None:
            columns["shared"] = self.shared.take(kept)
        if self.numbers is None and not np.array_equal(kept, np.arange(len(kept))):
            columns["numbers"] = kept
        return replace(self, **columns)

    def in_time_order(self, after: list[list[int]]) -> "Schedule":
        """Return the requests by earliest time, stable, so that none precedes what it waits for.

        ``after``: the indices of the requests that each waits for.
        """
        start = np.concatenate([[0], np.cumsum([len(a) for a in after])]).astype(np.int64)
        waited = np.asarray([k for a in after for k in a], dtype=np.int64)
        order = np.argsort(self.scheduled_s, kind="stable")
        found = replace(self, after_start=start, after=waited).take(order)
        shared = found.shared
        if shared is not None and found.continues is not None:
            # who goes on with a conversation has its beginning from there
            shared = shared.only(found.continues < 0)
        return replace(found, shared=shared, numbers=None)

    def without(self, unwanted: NDArray[np.bool_]) -> "Schedule":
        """Return all but these requests and those that depend on them."""
        out = unwanted.copy()
        if self.after_start is not None and self.after is not None:
            for i in np.flatnonzero(np.diff(self.after_start)):
                out[i] |= out[self.after[self.after_start[i] : self.after_start[i + 1]]].any()
        return self.take(np.flatnonzero(~out)) if out.any() else self

    def request_id(self, index: int) -> int:
        """Return the number of a request in the whole run."""
        return self.first_request_id + (index if self.numbers is None else int(self.numbers[index]))

    @property
    def ids(self) -> Ints:
        """Return int64[n]: the number of each request in the whole run, ascending."""
        numbers = np.arange(len(self)) if self.numbers is None else self.numbers
        return self.first_request_id + numbers

    def planned_cached_tokens(self, answers_too: bool = True) -> Ints:
        """Return int64[n]: what an infinite prefix cache would hit of each prompt, by design.

        ``answers_too``: conversations continue the server's answers, not other text of that length.
        """
        outputs = self.output_tokens if answers_too else None
        return infinite_cache(self.input_tokens, self.shared, self.continues, outputs)

    def class_name(self, index: int) -> str:
        """Return the class of a request."""
        return self.class_names[0 if self.class_index is None else int(self.class_index[index])]

    def model_name(self, index: int) -> str | None:
        """Return the model that a request asks for; None: the run's."""
        k = -1 if self.model_index is None else int(self.model_index[index])
        return self.model_names[k] if k >= 0 else None

    def first_requests(self) -> Ints:
        """Return the indices of the requests that wait for no other."""
        if self.after_start is None:
            return np.arange(len(self), dtype=np.int64)
        return np.flatnonzero(np.diff(self.after_start) == 0)

    def _whole_sessions(self, max_requests: int | None, max_tokens: int | None) -> Ints:
        """Return the indices of the sessions that fit as a whole; of the first at least a part."""
        unit = self.units()
        order = np.argsort(unit, kind="stable")  # session by session, each in its own order
        fits = np.ones(len(self), dtype=bool)
        if max_requests is not None:
            fits &= np.arange(len(self)) < max_requests
        if max_tokens is not None:
            fits &= np.cumsum((self.input_tokens + self.output_tokens)[order]) <= max_tokens
        keep = int(np.count_nonzero(fits))  # from some place on nothing fits
        if 0 < keep < len(self) and unit[order[keep]] == unit[order[keep - 1]] > 0:
            keep = int(np.searchsorted(unit[order], unit[order[keep]]))
        return np.sort(order[:keep])

    def units(self) -> Ints:
        """Return int64[n]: the session or lone request of each request, by first appearance."""
        here = np.arange(len(self), dtype=np.int64)
        if self.session is None:
            return here
        names = np.where(self.session >= 0, self.session, -1 - here)
        _, first, unit = np.unique(names, return_index=True, return_inverse=True)
        rank = np.empty(len(first), dtype=np.int64)
        rank[np.argsort(first)] = np.arange(len(first))
        return rank[unit]

    def capped(
        self, max_requests: int | None = None, max_tokens: int | None = None
    ) -> tuple["Schedule", str | None]:
        """Return the longest beginning within both limits, and why it was cut (None: it was not).

        ``max_tokens`` counts planned input and output tokens.
        """
        for name, limit in (("max_requests", max_requests), ("max_tokens", max_tokens)):
            if limit is not None and limit < 0:
                raise WorkloadError(f"{name} is {limit}: give 0 or more")
        keep, reason = len(self), None
        if max_requests is not None and max_requests < keep:
            keep, reason = max_requests, f"the limit of {max_requests} requests"
        if max_tokens is not None:
            sums = np.cumsum(self.input_tokens + self.output_tokens)
            if np.searchsorted(sums, max_tokens, side="right") < keep:
                reason = f"the limit of {max_tokens} planned tokens"
        if reason is None:
            return self, None
        kept = self._whole_sessions(max_requests, max_tokens)
        cut, how = self.take(kept), ""
        if self.session is not None and len(cut) != max_requests:
            how = f" {WHOLE}"
        if self.session is not None:
            lost = np.delete(self.session, kept)
            apart = np.intersect1d(lost[lost >= 0], self.session[kept])
            cut = replace(cut, shortened=tuple(apart.tolist()))
            how = " of one session, which is cut off" if len(apart) else how
        left = f"{len(cut)} of {len(self)} requests{how} ({cut.planned_tokens()} tokens)"
        return cut, f"{reason} leaves {left}"
