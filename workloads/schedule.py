"""The seeded plan of one stage: when each request is due and how long it is. Holds no prompt text."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from workloads.arrivals import arrival_times
from workloads.errors import WorkloadError
from workloads.profile import Workload
from workloads.traces import Trace, scale_time

# Spawn keys of the random streams: one can change while the others stay as they are.
_ARRIVALS, _INPUT, _OUTPUT = 0, 1, 2


@dataclass(frozen=True, eq=False)
class Schedule:
    """n requests in the order in which they are due.

    ``scheduled_s`` float64[n], seconds from the stage's start (all 0 in a closed loop, where the driver sets
    them); ``input_tokens`` and ``output_tokens`` int64[n]; request i has the id ``first_request_id + i``. A request
    that waits for others has as ``scheduled_s`` the earliest time that is possible. Further columns: None where unused.
    """

    scheduled_s: NDArray[np.float64]
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    first_request_id: int
    class_names: tuple[str, ...] = ("default",)
    class_index: NDArray[np.int16] | None = None  # into class_names; None: all of the first class
    model_names: tuple[str, ...] = ()
    model_index: NDArray[np.int16] | None = None  # into model_names, -1: the run's model; None: all the run's
    cancel_after_s: NDArray[np.float64] | None = None  # the user leaves so long after the start; NaN: stays
    cancel_after_tokens: NDArray[np.int64] | None = None  # or after so many output tokens; 0: stays
    session: NDArray[np.int64] | None = None  # number of the session; -1: none
    turn: NDArray[np.int32] | None = None  # 0, 1, ... within the session
    think_s: NDArray[np.float64] | None = None  # between the end of what it waits for and its scheduled time
    after_start: NDArray[np.int64] | None = None  # int64[n + 1]: request i waits for the end of ...
    after: NDArray[np.int64] | None = (
        None  # ... the requests (by index here) after[after_start[i]:after_start[i + 1]]
    )

    def __post_init__(self) -> None:
        for name in ("input_tokens", "output_tokens", "class_index", "model_index", "cancel_after_s", "cancel_after_tokens",
                     "session", "turn", "think_s"):  # fmt: skip
            column = getattr(self, name)
            if column is not None and len(column) != len(self.scheduled_s):
                raise WorkloadError(f"the columns of a schedule differ in length: {name}")
        if not np.isfinite(self.scheduled_s).all():
            raise WorkloadError("a scheduled time is not a finite number")

    def __len__(self) -> int:
        return len(self.scheduled_s)

    def planned_tokens(self) -> int:
        """Input and output tokens of all requests."""
        return int(self.input_tokens.sum() + self.output_tokens.sum())

    def capped(
        self, max_requests: int | None = None, max_tokens: int | None = None
    ) -> tuple[Schedule, str | None]:
        """The longest beginning that stays within both limits, and why it was cut (None: it was not).

        ``max_tokens`` counts planned input and output tokens.
        """
        for name, limit in (("max_requests", max_requests), ("max_tokens", max_tokens)):
            if limit is not None and limit < 0:
                raise WorkloadError(f"{name} is {limit}: give 0 or more")
        keep, reason = len(self), None
        if max_requests is not None and max_requests < keep:
            keep, reason = max_requests, f"the limit of {max_requests} requests"
        if max_tokens is not None:
            fit = int(
                np.searchsorted(np.cumsum(self.input_tokens + self.output_tokens), max_tokens, side="right")
            )
            if fit < keep:
                keep, reason = fit, f"the limit of {max_tokens} planned tokens"
        if reason is None:
            return self, None
        cut = replace(
            self,
            scheduled_s=self.scheduled_s[:keep],
            input_tokens=self.input_tokens[:keep],
            output_tokens=self.output_tokens[:keep],
        )
        return cut, f"{reason} leaves {keep} of {len(self)} requests ({cut.planned_tokens()} tokens)"


def open_schedule(
    workload: Workload,
    *,
    rate_rps: float,
    duration_s: float,
    seed: int,
    stage: int,
    first_request_id: int = 0,
) -> Schedule:
    """An open-loop stage of ``duration_s`` seconds at ``rate_rps`` requests/s; ``stage`` varies the draw.

    The lengths of the k-th request depend on workload, seed and stage, not on rate or duration. Raises WorkloadError.
    """
    scheduled_s = arrival_times(workload.arrivals, rate_rps, duration_s, _stream(seed, stage, _ARRIVALS))
    return _with_lengths(workload, scheduled_s, seed, stage, first_request_id)


def closed_schedule(
    workload: Workload, *, requests: int, seed: int, stage: int, first_request_id: int = 0
) -> Schedule:
    """A closed-loop stage of ``requests`` requests: lengths only, every time is 0. Raises WorkloadError."""
    if requests < 0:
        raise WorkloadError(f"requests is {requests}: give 0 or more")
    return _with_lengths(workload, np.zeros(requests, dtype=np.float64), seed, stage, first_request_id)


def trace_schedule(trace: Trace, *, time_scale: float = 1.0, first_request_id: int = 0) -> Schedule:
    """The trace's own times and lengths; ``time_scale`` 2 plays it twice as fast. Raises WorkloadError."""
    scaled = scale_time(trace, time_scale)
    return Schedule(scaled.arrival_s, scaled.input_tokens, scaled.output_tokens, first_request_id)


def _with_lengths(
    workload: Workload, scheduled_s: NDArray[np.float64], seed: int, stage: int, first_request_id: int
) -> Schedule:
    n = len(scheduled_s)
    return Schedule(
        scheduled_s=scheduled_s,
        input_tokens=workload.input_tokens.sample(_stream(seed, stage, _INPUT), n),
        output_tokens=workload.output_tokens.sample(_stream(seed, stage, _OUTPUT), n),
        first_request_id=first_request_id,
    )


def _stream(seed: int, stage: int, key: int) -> np.random.Generator:
    if seed < 0 or stage < 0:
        raise WorkloadError(f"seed {seed} or stage {stage} is negative: give 0 or more")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(stage, key))))
