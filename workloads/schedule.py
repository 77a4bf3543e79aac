"""The seeded plan of one stage: due times and lengths of requests, without prompt text."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ampacity.workloads.arrivals.processes import arrival_times
from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.mix import ARRIVALS, RandomStream, draw_stage, of_classes
from ampacity.workloads.profile import Workload
from ampacity.workloads.prompts.prefixes import SharedPrefixes
from ampacity.workloads.session_draw import draw_conversations, draw_sessions
from ampacity.workloads.timetable import COLUMNS, WHOLE, Floats, Schedule

__all__ = ["WHOLE", "Schedule", "closed_schedule", "endless_schedule", "open_schedule"]

_PREFIXES, _PROMPTS = 31, 30  # those of sessions follow
BLOCK_REQUESTS = 5000  # expected requests of a block of an endless schedule


def open_schedule(
    workload: Workload,
    *,
    rate_rps: float,
    duration_s: float,
    seed: int,
    stage: int,
    first_request_id: int = 0,
    block: tuple[int, ...] = (),
) -> Schedule:
    """Return an open-loop stage of ``duration_s`` s at ``rate_rps``; ``stage`` varies the draw.

    Lengths of the k-th request depend on workload, seed and stage, not on rate or duration.
    Sessions begin at the rate at which their requests, once they overlap, come at ``rate_rps``.
    ``block`` varies the draw, too, but prompts share prefixes with those of other blocks.
    Raises WorkloadError.
    """
    stream = partial(_stream, seed, stage, *block)
    per_arrival = _requests_per_arrival(workload)
    if per_arrival is None:
        drawn = draw_stage(workload, stream, rate_rps=rate_rps, duration_s=duration_s)
        drawn = _with_prefixes(drawn, workload, stage, stream)
    else:
        begin_s = arrival_times(
            workload.arrivals, rate_rps / per_arrival, duration_s, stream(ARRIVALS)
        )
        drawn = _of_sessions(workload, begin_s, stage, stream)
    return replace(drawn, first_request_id=first_request_id)


def endless_schedule(
    workload: Workload,
    *,
    rate_rps: float,
    begin_s: float,
    end_s: float,
    seed: int,
    first_request_id: int = 0,
) -> Schedule:
    """Return the requests of an endless open loop that are due in [``begin_s``, ``end_s``).

    Their times count from ``begin_s``. The load is drawn in blocks of BLOCK_REQUESTS, each from the
    seed and its number, so that a request is the same however the load is cut into parts.
    Raises WorkloadError; a workload of sessions has no such parts.
    """
    if _requests_per_arrival(workload) is not None:
        raise WorkloadError(
            f"workload {workload.name}: conversations cannot be cut into windows; give single "
            "requests, e.g. --workload chat"
        )
    block_s, parts = BLOCK_REQUESTS / rate_rps, []
    for k in range(int(begin_s // block_s), math.ceil(end_s / block_s)):
        drawn = open_schedule(
            workload, rate_rps=rate_rps, duration_s=block_s, seed=seed, stage=0, block=(k,)
        )
        due_s = drawn.scheduled_s + k * block_s
        part = drawn.take(np.flatnonzero((due_s >= begin_s) & (due_s < end_s)))
        parts.append(replace(part, scheduled_s=part.scheduled_s + (k * block_s - begin_s)))
    return _joined(parts, first_request_id)


def _joined(parts: list[Schedule], first_request_id: int) -> Schedule:
    """Return lone requests of one workload, one part after the other."""
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in COLUMNS
        if name != "numbers" and getattr(parts[0], name) is not None
    }
    if parts[0].shared is not None:
        columns["shared"] = SharedPrefixes.joined([part.shared for part in parts if part.shared])
    return replace(parts[0], **columns, numbers=None, first_request_id=first_request_id)


def closed_schedule(
    workload: Workload, *, requests: int, seed: int, stage: int, first_request_id: int = 0
) -> Schedule:
    """Return a closed-loop stage: lengths only, every time is 0. Raises WorkloadError."""
    if requests < 0:
        raise WorkloadError(f"requests is {requests}: give 0 or more")
    stream = partial(_stream, seed, stage)
    per_arrival = _requests_per_arrival(workload)
    if per_arrival is None:
        drawn = draw_stage(workload, stream, requests=requests)
        drawn = _with_prefixes(drawn, workload, stage, stream)
    else:
        sessions = -int(-requests // per_arrival)  # whose requests are about as many
        drawn = _of_sessions(workload, np.zeros(sessions), stage, stream)
    return replace(drawn, first_request_id=first_request_id)


def _with_prefixes(
    drawn: Schedule, workload: Workload, stage: int, stream: RandomStream
) -> Schedule:
    if workload.prefixes is None:
        return drawn
    shared = workload.prefixes.draw(drawn.input_tokens, stage, stream(_PREFIXES))
    return replace(drawn, shared=shared)


def _of_sessions(workload: Workload, begin_s: Floats, stage: int, stream: RandomStream) -> Schedule:
    sessions, outputs = workload.sessions, workload.output_tokens
    if workload.prompts is not None:
        think_ms = None if sessions is None else sessions.think_ms
        order, draws = stream(_PREFIXES), stream(_PROMPTS)
        drawn = draw_conversations(workload.prompts, begin_s, outputs, think_ms, order, draws)
    else:
        assert sessions is not None
        lengths = workload.input_tokens, outputs
        drawn = draw_sessions(sessions, begin_s, *lengths, workload.prefixes, stage, stream)
    return of_classes(drawn, workload, np.zeros(len(drawn), dtype=np.int16), stream)


def _requests_per_arrival(workload: Workload) -> float | None:
    """Return the mean requests of a session or conversation; None: requests arrive alone."""
    if workload.prompts is not None:
        return workload.prompts.mean_turns
    return None if workload.sessions is None else workload.sessions.mean_requests()


def _stream(seed: int, stage: int, *key: int) -> np.random.Generator:
    if seed < 0 or stage < 0:
        raise WorkloadError(f"seed {seed} or stage {stage} is negative: give 0 or more")
    return np.random.Generator(
        np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(stage, *key)))
    )
