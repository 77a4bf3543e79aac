"""The requests of a trace as arrays: arrival times, token counts, sessions and shared blocks."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ampacity.workloads.prompts.prefixes import take_lists
from ampacity.workloads.traces.recorded import Recorded

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Blocks:
    """Prompts as chains of block ids; request i has ``ids[start[i]:start[i + 1]]``, int64."""

    ids: Ints
    start: Ints

    def take(self, index: Ints) -> "Blocks":
        """Return the chains of the requests ``index``, in that order."""
        places, start = take_lists(self.start, index)
        return Blocks(self.ids[places], start)


_TAKEN = (
    *("input_tokens", "output_tokens", "session", "parent", "client", "cached_tokens"),
    *("shared_blocks", "pause_s", "entry", "place"),
)


@dataclass(frozen=True, eq=False)
class Trace:
    """n requests by arrival: ``arrival_s`` float64[n] from 0, token counts int64[n] of at least 1.

    ``notes``: what a reader of the results should know about the file, one line each.
    ``session``, ``parent`` and ``client`` int64[n] count from 0; -1: none.
    """

    arrival_s: Floats
    input_tokens: Ints
    output_tokens: Ints
    source: str
    notes: tuple[str, ...] = ()
    session: Ints | None = None
    parent: Ints | None = None  # the session that called this one as a helper
    client: Ints | None = None
    cached_tokens: Ints | None = None  # -1: not known
    blocks: Blocks | None = None
    block_tokens: int | None = None  # block size given by the file
    shared_blocks: Ints | None = None  # [n, 2]: shared with the previous turn, and of how many
    end_s: Floats | None = None  # when the answer ended; NaN: not known
    pause_s: Floats | None = None  # recorded pause before the request; NaN: not known
    entry: Ints | None = None  # the request's messages in ``recorded``; -1: none
    recorded: Recorded | None = None
    clock: str = ""  # notation of the times; "": the file has none
    clock_step_s: float | None = None  # of a clock so coarse that requests share their times
    resolution_s: float = 0.0  # times and ends are whole multiples of it
    place: Ints | None = None  # of each row in the file ...
    place_word: str = "line"  # ... counted in lines, entries or rows
    as_schedule: bool = False  # from ``workload sample``: times count from the stage's start
    from_session_start: bool = False  # times count from each session's start: no arrivals

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def says_arrivals(self) -> bool:
        """Return whether the file has arrival times of its requests or sessions."""
        return bool(self.clock) and not self.from_session_start

    def take(self, index: Ints, arrival_s: Floats | None = None) -> "Trace":
        """Return the requests ``index`` sorted by ``arrival_s`` (default: their own times).

        The duration of each answer stays the same.
        """
        arrival_s = self.arrival_s[index] if arrival_s is None else arrival_s
        order = np.argsort(arrival_s, kind="stable")
        index = index[order]
        columns: dict[str, Any] = {
            name: column[index] for name in _TAKEN if (column := getattr(self, name)) is not None
        }
        if self.end_s is not None:
            columns["end_s"] = arrival_s[order] + (self.end_s - self.arrival_s)[index]
        blocks = self.blocks.take(index) if self.blocks else None
        return replace(self, arrival_s=arrival_s[order], blocks=blocks, **columns)
