"""Fit a client of ServeGen (Xiang et al. 2025): rates by window and histograms of lengths."""

import ast
import csv
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ampacity.files import read_text
from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.fit.lengths import fit_lengths, quantile_table, rounded
from ampacity.workloads.fit.process import Process, choose_windows, gaps_text
from ampacity.workloads.fit.profile import over_time

_WINDOW_S = 600
_WINDOWS_MAX = 100_000  # two years
_NOT_AS_WRITTEN = (
    *(OSError, ValueError, KeyError, TypeError),
    *(SyntaxError, AttributeError, RecursionError, MemoryError),
)
_SIDES = ("input_tokens", "output_tokens")
Window = tuple[float, float, float]  # start in s, requests/s, CV of the gaps
Slots = dict[float, dict[str, dict[int, float]]]  # {start in s: {side: {tokens: probability}}}
Floats = NDArray[np.float64]
_ENDINGS = ("-trace.csv", "-dataset.json")


def is_servegen(path: Path) -> bool:
    """Return whether ``path`` is one of a pair NAME-trace.csv and NAME-dataset.json."""
    pair = _pair(path)
    return pair is not None and all(p.is_file() for p in pair)


def _pair(path: Path) -> tuple[Path, Path] | None:
    stem = next((path.name.removesuffix(e) for e in _ENDINGS if path.name.endswith(e)), None)
    if stem is None:
        return None
    return path.with_name(stem + _ENDINGS[0]), path.with_name(stem + _ENDINGS[1])


def fit_servegen(path: Path) -> dict[str, Any]:
    """Return the profile of one client: lengths and CV are weighted by requests.

    Raises WorkloadError with one line that names the file and the line.
    """
    pair = _pair(path)
    assert pair is not None
    windows = _windows(pair[0])
    slots, notes = _slots(pair[1])
    requests = sum(rate * _WINDOW_S for _, rate, _ in windows)
    if requests < 2:
        raise WorkloadError(f"{pair[0]}: no window has requests: there is nothing to fit")
    rates = np.array([rate for _, rate, _ in windows])
    middle = _median_cv(windows)
    processes = choose_windows(rates * _WINDOW_S, _WINDOW_S, middle)
    best, plain = processes[0], gaps_text(middle)
    span_s = float(len(rates) * _WINDOW_S)
    notes += _process_notes(processes, plain, rates)
    name = pair[0].name.removesuffix(_ENDINGS[0])
    profile: dict[str, Any] = {
        "name": name,
        "source": f"fitted to the ServeGen client {name}, {round(requests)} requests",
        "arrivals": best.text,
    }
    measured: dict[str, Any] = {
        "requests": round(requests),
        "arrivals": {
            "mean_rps": rounded(rates.mean()),
            "gap_cv": rounded(middle),
            "peak_to_mean": {f"{_WINDOW_S}s": rounded(rates.max() / rates.mean())},
            "span_s": span_s,
            "processes": [{"process": p.text, "held_out_nats": p.nats} for p in processes],
            "over_time": over_time(rates, span_s, best.text),
        },
        "notes": notes,
    }
    for side, (values, weights) in _histograms(windows, slots).items():
        profile[side] = {"quantiles": quantile_table(values, weights)}
        measured[side] = fit_lengths(values, weights, round(requests))
    return profile | {"measured": measured}


def _process_notes(processes: list[Process], plain: str, rates: Floats) -> Iterator[str]:
    best = processes[0]
    kind = best.text.partition(":")[0]
    if best.text != plain:
        gain = best.nats - next(p.nats for p in processes if p.text == plain)
        yield (
            f"{np.count_nonzero(rates)} of {len(rates)} windows have requests, up to "
            f"{rates.max():.3g} requests/s: each window is forecast better by {kind} "
            f"than by one rate, by {gain:.3g} nats a request"
        )
    if best.text != plain and kind == "steps":
        yield (
            f"the curve is laid over a stage of any length: {len(rates) * _WINDOW_S} s as "
            f"recorded; sweep and search look for one steady rate, give them --arrivals {plain}"
        )
    yield (
        "ServeGen gives rates by 600 s and histograms: input and output are drawn independently, "
        "and P95 and P99 RPS are not known"
    )


def _median_cv(windows: list[Window]) -> float:
    """Return the median CV of the gaps by requests, 1 where none is known."""
    cvs = np.array(sorted((cv, rate) for _, rate, cv in windows if rate > 0 and cv > 0))
    if not len(cvs):
        return 1.0
    return float(cvs[np.searchsorted(np.cumsum(cvs[:, 1]), cvs[:, 1].sum() / 2), 0])


def _histograms(windows: list[Window], slots: Slots) -> dict[str, tuple[Floats, Floats]]:
    """Return (lengths, requests) of each side over all windows, each with its latest slot."""
    sides: dict[str, Counter[int]] = {side: Counter() for side in _SIDES}
    starts = sorted(slots)
    for at, rate, _ in windows:
        slot = slots[max((s for s in starts if s <= at), default=starts[0])]
        for side, total in sides.items():
            for tokens, chance in slot[side].items():
                total[tokens] += chance * rate * _WINDOW_S  # type: ignore[assignment]
    found = {}
    for side, total in sides.items():
        values = np.array(sorted(v for v in total if total[v] > 0), dtype=float)
        found[side] = values, np.array([total[int(v)] for v in values], dtype=float)
    return found


def _windows(path: Path) -> list[Window]:
    """Return (start in s, requests/s, CV of the gaps) of each window; missing ones are idle."""
    found: dict[int, Window] = {}
    try:
        for line, row in enumerate(csv.reader(read_text(path).splitlines()), start=1):
            numbers = [float(cell) for cell in row[:3]]
            if len(numbers) < 3 or not all(math.isfinite(n) and n >= 0 for n in numbers):
                raise WorkloadError(
                    f"{path}:{line}: this is no window: write start, rate and cv, 0 or more"
                )
            place = round(numbers[0] / _WINDOW_S)
            if place in found:
                raise WorkloadError(f"{path}:{line}: a window begins at {numbers[0]:g} s already")
            found[place] = (numbers[0], numbers[1], numbers[2])
    except (OSError, ValueError) as error:
        if isinstance(error, WorkloadError):
            raise
        raise WorkloadError(f"{path}: this is no trace of a ServeGen client: {error}") from None
    if not found or max(found) - min(found) > _WINDOWS_MAX:
        raise WorkloadError(
            f"{path}: there are no windows, or more than {_WINDOWS_MAX} from the first to the last"
        )
    return [
        found.get(i, (float(i * _WINDOW_S), 0.0, 0.0)) for i in range(min(found), max(found) + 1)
    ]


def _slots(path: Path) -> tuple[Slots, list[str]]:
    """Return ({start in s: {side: {tokens: probability}}}, notes).

    The histograms are Python literals inside JSON.
    """
    found: Slots = {}
    unused: Counter[str] = Counter()
    none = empty = 0
    try:
        held = json.loads(read_text(path))
        for start, fields in held.items():
            unused.update(name for name in fields if name not in _SIDES)
            tables = {side: ast.literal_eval(fields.get(side) or "{}") for side in _SIDES}
            if not all(tables.values()):
                empty += 1
                continue
            none += any(int(n) < 1 and p > 0 for table in tables.values() for n, p in table.items())
            found[float(start)] = {
                side: {max(int(n), 1): float(p) for n, p in table.items()}
                for side, table in tables.items()
            }
    except _NOT_AS_WRITTEN as error:
        raise WorkloadError(
            f"{path}: this is no data set of a ServeGen client: {type(error).__name__} {error}"
        ) from None
    if not found:
        raise WorkloadError(f"{path}: no slot holds lengths")
    notes = []
    if unused:
        notes.append(
            f"{path.name}: fields that are not used: "
            + ", ".join(f"{name} (of {count} slots)" for name, count in unused.items())
        )
    if empty:
        notes.append(
            f"{path.name}: {empty} of {len(held)} slots have no lengths: "
            "those of the slot before stand for them"
        )
    if none:
        notes.append(f"{path.name}: lengths of 0 tokens in {none} slots are taken as 1")
    return found, notes
