"""Draw the requests of a stage: classes by weight, or superposed streams of clients.

Every stream has its own random numbers: its k-th request does not depend on the rate or others.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ampacity.workloads.arrivals.processes import arrival_times
from ampacity.workloads.classes import Client, RequestClass, draw_index
from ampacity.workloads.lengths.parse import draw_pairs, fit_copula
from ampacity.workloads.profile import Workload

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
) -> dict[str, Any]:
    """Return schedule columns of lone requests: an open loop, or ``requests`` without times."""
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
    columns = {"scheduled_s": times, **_lengths(sources, source_of, stream)}
    return columns | class_columns(workload, class_of, stream)


def class_columns(
    workload: Workload, class_of: NDArray[np.int16], stream: RandomStream
) -> dict[str, Any]:
    """Return the columns by class: its name, its model, and its cancellation."""
    if not workload.classes:
        return {}
    names = tuple(kind.name for kind in workload.classes)
    columns = {"class_names": names, "class_index": class_of}
    return (
        columns
        | _models(workload.classes, class_of, stream)
        | _cancels(workload.classes, class_of, stream)
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


def _lengths(
    sources: list[_Source], source_of: NDArray[np.int64], stream: RandomStream
) -> dict[str, Any]:
    found = {
        name: np.empty(len(source_of), dtype=np.int64) for name in ("input_tokens", "output_tokens")
    }
    for i, (source, mine) in enumerate(
        zip(sources, _members(source_of, len(sources)), strict=True)
    ):
        part = () if len(sources) == 1 else (i,)
        rng = stream(INPUT, *part), stream(OUTPUT, *part)
        sides = source.client.input_tokens, source.client.output_tokens
        drawn = draw_pairs(*sides, source.copula, rng, len(mine))
        found["input_tokens"][mine], found["output_tokens"][mine] = drawn
    return found


def _models(
    classes: tuple[RequestClass, ...], class_of: NDArray[np.int16], stream: RandomStream
) -> dict[str, Any]:
    names = tuple(dict.fromkeys(name for kind in classes for name in kind.models))
    if not names:
        return {}
    number = {name: i for i, name in enumerate(names)}
    index = np.full(len(class_of), -1, dtype=np.int16)
    for i, (kind, mine) in enumerate(zip(classes, _members(class_of, len(classes)), strict=True)):
        if kind.models:
            numbers = np.array([number[name] for name in kind.models], dtype=np.int16)
            index[mine] = numbers[
                draw_index(kind.model_weights, stream(MODEL, i).random(len(mine)))
            ]
    return {"model_names": names, "model_index": index}


def _cancels(
    classes: tuple[RequestClass, ...], class_of: NDArray[np.int16], stream: RandomStream
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for i, (kind, mine) in enumerate(zip(classes, _members(class_of, len(classes)), strict=True)):
        cancel = kind.cancel
        if cancel is None:
            continue
        leaves = stream(CANCEL, i).random(len(mine)) < cancel.share
        if cancel.after_ms is not None:
            column = found.setdefault("cancel_after_s", np.full(len(class_of), np.nan))
            drawn_ms = cancel.after_ms.sample(stream(CANCEL, i, 1), len(mine))
            column[mine[leaves]] = drawn_ms[leaves] / 1e3
        elif cancel.after_tokens is not None:
            column = found.setdefault(
                "cancel_after_tokens", np.zeros(len(class_of), dtype=np.int64)
            )
            column[mine[leaves]] = cancel.after_tokens.sample(stream(CANCEL, i, 1), len(mine))[
                leaves
            ]
    return found
