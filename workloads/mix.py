"""Draw the requests of a stage: classes by weight, or superposed streams of clients.

Every stream has its own random numbers: its k-th request does not depend on the rate or others.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ampacity.workloads.arrivals.processes import arrival_times
from ampacity.workloads.classes import Client, RequestClass, draw_index
from ampacity.workloads.lengths.parse import draw_pairs, fit_copula
from ampacity.workloads.profile import Workload
from ampacity.workloads.timetable import Floats, Ints, Schedule

RandomStream = Callable[..., np.random.Generator]
"""``stream(key, *parts)``: random numbers for one purpose, and one class or client of it."""

# Spawn keys of the random streams: one can change while the others stay as they are.
ARRIVALS, INPUT, OUTPUT, CLASS, CANCEL, MODEL = range(6)


@dataclass(frozen=True)
class _Source:
    """One class, or one client of a class: ``share`` of all requests."""

    class_index: int
    share: float
    client: Client
    copula: float


def draw_stage(
    workload: Workload,
    stream: RandomStream,
    *,
    rate_rps: float = 0.0,
    duration_s: float = 0.0,
    requests: int | None = None,
) -> Schedule:
    """Return lone requests: an open loop, or ``requests`` without times."""
    sources = _sources(workload)
    if requests is None and workload.own_clocks:
        times, source_of = _superposed(sources, workload.arrivals, stream, rate_rps, duration_s)
    else:
        if requests is None:
            times = arrival_times(workload.arrivals, rate_rps, duration_s, stream(ARRIVALS))
        else:
            times = np.zeros(requests, dtype=np.float64)
        shares = tuple(source.share for source in sources)
        source_of = draw_index(shares, stream(CLASS).random(len(times)))
    class_of = np.array([source.class_index for source in sources], dtype=np.int16)[source_of]
    drawn = Schedule(times, *_lengths(sources, source_of, stream))
    return of_classes(drawn, workload, class_of, stream)


def of_classes(
    drawn: Schedule, workload: Workload, class_of: NDArray[np.int16], stream: RandomStream
) -> Schedule:
    """Return the requests with the name, the model and the cancellation of their class."""
    if not workload.classes:
        return drawn
    model_names, model_index = _models(workload.classes, class_of, stream)
    after_s, after_tokens = _cancels(workload.classes, class_of, stream)
    return replace(
        drawn,
        class_names=tuple(kind.name for kind in workload.classes),
        class_index=class_of,
        model_names=model_names,
        model_index=model_index,
        cancel_after_s=after_s,
        cancel_after_tokens=after_tokens,
    )


def _sources(workload: Workload) -> list[_Source]:
    """Return classes, or their clients, with shares that sum to 1."""
    total = sum(kind.weight for kind in workload.kinds)
    return [
        _Source(
            i,
            share,
            client,
            fit_copula(client.input_tokens, client.output_tokens, kind.correlation),
        )
        for i, kind in enumerate(workload.kinds)
        for share, client in kind.senders(kind.weight / total)
    ]


def _superposed(
    sources: list[_Source], clock: str, stream: RandomStream, rate_rps: float, duration_s: float
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return (times, source index) of all sources together, each with its own process."""
    times = []
    for i, source in enumerate(sources):
        own = source.client.arrivals or clock
        rate = rate_rps * source.share
        times.append(arrival_times(own, rate, duration_s, stream(ARRIVALS, i), one_of_many=True))
    source_of = np.repeat(np.arange(len(sources)), [len(t) for t in times])
    merged = np.concatenate(times)
    order = np.argsort(merged, kind="stable")
    return merged[order], source_of[order]


def _members(index: NDArray[Any], count: int) -> list[NDArray[np.int64]]:
    """Return, for each of ``count`` values, the indices in ``index`` with that value."""
    ends = np.cumsum(np.bincount(index, minlength=count))
    return np.split(np.argsort(index, kind="stable"), ends[:-1])


def _lengths(sources: list[_Source], source_of: Ints, stream: RandomStream) -> tuple[Ints, Ints]:
    inputs, outputs = np.empty_like(source_of), np.empty_like(source_of)
    for i, (source, mine) in enumerate(
        zip(sources, _members(source_of, len(sources)), strict=True)
    ):
        part = () if len(sources) == 1 else (i,)
        rng = stream(INPUT, *part), stream(OUTPUT, *part)
        sides = source.client.input_tokens, source.client.output_tokens
        inputs[mine], outputs[mine] = draw_pairs(*sides, source.copula, rng, len(mine))
    return inputs, outputs


def _models(
    classes: tuple[RequestClass, ...], class_of: NDArray[np.int16], stream: RandomStream
) -> tuple[tuple[str, ...], NDArray[np.int16] | None]:
    names = tuple(dict.fromkeys(name for kind in classes for name in kind.models))
    if not names:
        return (), None
    number = {name: i for i, name in enumerate(names)}
    index = np.full(len(class_of), -1, dtype=np.int16)
    for i, (kind, mine) in enumerate(zip(classes, _members(class_of, len(classes)), strict=True)):
        if kind.models:
            numbers = np.array([number[name] for name in kind.models], dtype=np.int16)
            drawn = draw_index(kind.model_weights, stream(MODEL, i).random(len(mine)))
            index[mine] = numbers[drawn]
    return names, index


def _cancels(
    classes: tuple[RequestClass, ...], class_of: NDArray[np.int16], stream: RandomStream
) -> tuple[Floats | None, Ints | None]:
    """Return when the user of each request leaves: in s (NaN: never), in tokens (0: never)."""
    kinds = [kind.cancel for kind in classes if kind.cancel is not None]
    after_s = np.full(len(class_of), np.nan) if any(c.after_ms for c in kinds) else None
    after_tokens = np.zeros(len(class_of), np.int64) if any(c.after_tokens for c in kinds) else None
    for i, (kind, mine) in enumerate(zip(classes, _members(class_of, len(classes)), strict=True)):
        cancel = kind.cancel
        if cancel is None:
            continue
        leaves = stream(CANCEL, i).random(len(mine)) < cancel.share
        if cancel.after_ms is not None and after_s is not None:
            drawn_ms = cancel.after_ms.sample(stream(CANCEL, i, 1), len(mine))
            after_s[mine[leaves]] = drawn_ms[leaves] / 1e3
        elif cancel.after_tokens is not None and after_tokens is not None:
            drawn = cancel.after_tokens.sample(stream(CANCEL, i, 1), len(mine))
            after_tokens[mine[leaves]] = drawn[leaves]
    return after_s, after_tokens
