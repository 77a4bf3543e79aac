"""Estimate the rate of a log's busiest hour, which a fleet has to carry, and its interval."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ampacity.workloads.fit.lengths import rounded

Floats = NDArray[np.float64]
HOUR_S = 3600.0
LEAST_WINDOW_S = 60.0  # what comes in less is no load: a request itself may take as long
CELLS = 60  # of a window: a minute of an hour
# cells that choose (as many measure), that do neither, and between two ways to lay them
CHOOSE, GAP, SHIFT = (15, 5, 5)
# of chi-squared with one degree of freedom: the mean without the upper quarter
TRIMMED, TRIMMED_MEAN = (0.25, 0.3685)
# of a longer stretch without a request no more is looked at: a multiple of 2 (CHOOSE + GAP)
IDLE_CELLS = 24 * CELLS
T_95 = 2.1  # Student's t for some 20 independent differences


def busy_hour(arrival_s: Floats) -> dict[str, Any] | None:
    """Return ``rps`` of the busiest hour, ``rps_ci`` (95 %), ``window_s``; None below 4 min.

    ``arrival_s`` sorted, from 0. The window of a log under four hours is a quarter of it. The
    maximum over noisy windows is biased upwards, so no request both selects the window and measures
    it: a quarter of an hour selects, by a smoothed rate, the quarter after the next five minutes
    measures, and so on in turn. The estimate is the mean over eight phases of this pattern.
    """
    span_s = float(arrival_s[-1])
    window_s = min(HOUR_S, span_s / 4)
    if window_s < LEAST_WINDOW_S:
        return None
    cell_s = window_s / CELLS
    rps, ends = busy_rate(cells_of(arrival_s, cell_s), cell_s)
    return {"rps": rounded(rps), "rps_ci": [*map(rounded, ends)], "window_s": rounded(window_s)}


def cells_of(arrival_s: Floats, cell_s: float) -> NDArray[np.int64]:
    """Count requests by whole cell; cut idle stretches to ``IDLE_CELLS``."""
    place, held = np.unique((arrival_s / cell_s).astype(np.int64), return_counts=True)
    inside = place < int(arrival_s[-1] / cell_s + 1e-9)
    place, held = place[inside], held[inside]
    idle, turn = np.diff(place, prepend=-1) - 1, 2 * (CHOOSE + GAP)
    # cells keep their places in a turn
    place -= np.cumsum(np.maximum(idle - IDLE_CELLS, 0) // turn * turn)
    cells = np.zeros(place[-1] + 1, dtype=np.int64)
    cells[place] = held
    return cells


def busy_rate(counts: NDArray[np.int64], cell_s: float) -> tuple[float, tuple[float, float]]:
    """Return (busiest window's rate in 1/s, its 95 % interval), ``CELLS`` to a window."""
    cells = counts.astype(np.float64)
    # of a flat log chance alone puts it below the mean
    rps = max(_busiest(cells), float(cells.mean())) / cell_s
    margin = T_95 * (_dispersion(cells) * rps / (CELLS * cell_s)) ** 0.5
    return rps, (max(rps - margin, 0.0), rps + margin)


def _busiest(cells: Floats) -> float:
    """Return requests per cell in the busiest window, selected and measured on different cells."""
    window = np.ones(CELLS)
    # three windows wide, heaviest in the middle
    smooth = np.convolve(np.convolve(window, window), window)
    found = []
    for shift in range(0, 2 * (CHOOSE + GAP), SHIFT):
        place = (np.arange(len(cells)) + shift) % (2 * (CHOOSE + GAP))
        chooses, measures = place < CHOOSE, (place >= CHOOSE + GAP) & (place < 2 * CHOOSE + GAP)
        best = np.argmax(_mean_of(cells, chooses, smooth))
        found.append(_mean_of(cells, measures, window)[best])
    return float(np.mean(found))


def _mean_of(cells: Floats, known: NDArray[np.bool_], weights: Floats) -> Floats:
    """Return float[windows]: the weighted mean of the known cells around each window's centre."""
    first = (len(weights) + CELLS) // 2 - 1
    inner = slice(first, first + len(cells) - CELLS + 1)
    total, weight = (
        np.convolve(a, weights)[inner] for a in (cells * known, known.astype(np.float64))
    )
    return np.asarray(total / weight, dtype=np.float64)


def _dispersion(cells: Floats) -> float:
    """Return the index of dispersion of an hour's counts at a constant rate, at least 1.

    It comes from third differences, which remove a trend, of counts in a twelfth, a quarter and
    half of a window; the largest counts, since only longer ones hold whole sessions. The upper
    quarter of the squares (steps of the rate) is left out.
    """
    found = [1.0]
    for width in (CELLS // 12, CELLS // 4, CELLS // 2):
        counts = cells[: len(cells) // width * width].reshape(-1, width).sum(axis=1)
        if len(counts) < 8:
            continue
        level = np.convolve(counts, np.full(4, 0.25), "valid")
        squares = (
            np.convolve(counts, [1.0, -3.0, 3.0, -1.0], "valid") ** 2 / 20 / np.maximum(level, 1.0)
        )
        kept = np.sort(squares)[: int((1 - TRIMMED) * len(squares))]
        found.append(float(kept.mean()) / TRIMMED_MEAN)
    return max(found)
