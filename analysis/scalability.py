"""Laws of throughput against concurrency: the Universal Scalability Law, and the asymptotic bounds of a closed system."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from analysis.metrics import Floats

PLATEAU = 0.05  # throughput that grows by less than this share ...
PLATEAU_LOAD = 1.3  # ... while the requests in flight grow by this factor, has reached its ceiling


@dataclass(frozen=True)
class Usl:
    """X(N) = gamma N / (1 + alpha (N - 1) + beta N (N - 1)) (Gunther). ``gamma`` in requests/s for one in flight."""

    gamma: float
    alpha: float
    beta: float

    def at(self, concurrency: Floats) -> Floats:
        """Requests/s at N in flight."""
        n = np.asarray(concurrency, dtype=np.float64)
        return np.asarray(self.gamma * n / (1 + self.alpha * (n - 1) + self.beta * n * (n - 1)))

    @property
    def peak(self) -> float:
        """N* = sqrt((1 - alpha) / beta); infinite without coherency."""
        return math.sqrt(max(1 - self.alpha, 0.0) / self.beta) if self.beta > 0 else math.inf

    def corner(self, top: float) -> float:
        """Where the line of low load, gamma N, meets the highest throughput of the law up to ``top`` in flight.

        It depends on the range that was tried, unless the peak lies in it: the ceiling gamma / alpha is reached nowhere.
        """
        return float(self.at(np.array(min(self.peak, top)))) / self.gamma


def fit_usl(concurrency: Floats, rps: Floats) -> Usl | None:
    """Least squares of the relative error of X itself (Gauss-Newton), alpha and beta not below 0; None where it fails.

    It starts from the linearised form N/X = (1 + alpha (N-1) + beta N (N-1)) / gamma, which alone would weigh the
    noise wrongly.
    """
    n, x = concurrency, rps
    if len(n) < 4 or not (n > 0).all() or not (x > 0).all():
        return None
    terms = np.stack([np.ones_like(n), n - 1, n * (n - 1)], axis=1)
    weight = (x / n)[:, None]  # relative error of N/X
    start = np.linalg.lstsq(terms * weight, np.ones(len(n)), rcond=None)[0]
    free = [0, 1, 2]
    for _ in range(12):
        if start[0] <= 0:
            return None
        below = [i for i in free if i and start[i] < 0]
        if below:  # a negative coefficient is held at 0
            free = [i for i in free if i not in below]
            start = np.zeros(3)
            start[free] = np.linalg.lstsq((terms * weight)[:, free], np.ones(len(n)), rcond=None)[0]
            continue
        whole = terms @ start
        residual = 1 - n / (whole * x)  # of X, relative to what was measured
        slope = (n / (whole**2 * x))[:, None] * terms[:, free]
        step = np.linalg.lstsq(slope, -residual, rcond=None)[0]
        moved = start.copy()
        moved[free] += step
        if not (terms @ moved > 0).all():
            break
        if np.max(np.abs(step)) < 1e-7 * abs(start[0]):
            break
        start = moved
    a, b, c = (float(v) for v in np.maximum(start, 0.0))
    return Usl(1 / a, b / a, c / a) if a > 0 else None


def corner_of_bounds(concurrency: Floats, rps: Floats, saturated: bool) -> float | None:
    """N* = (D + Z) / D_max of the asymptotic bounds (Lazowska et al. 1984); None where no ceiling was reached.

    ``concurrency`` counts requests in flight, so Z = 0: D is the time in flight at the lowest loads (Little), 1 / D_max
    the mean throughput of the plateau. Levels ascending.
    """
    best = float(rps.max())
    plateau = rps >= (1 - PLATEAU) * best
    wide = float(concurrency[plateau].max() / concurrency[plateau].min()) if plateau.any() else 1.0
    if not saturated and wide < PLATEAU_LOAD:
        return None
    low = max(2, len(rps) // 3)
    demand_s = float(np.median((concurrency / rps)[:low]))
    return demand_s * float(rps[plateau].mean())
