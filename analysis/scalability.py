"""The asymptotic bounds of throughput against concurrency."""

from __future__ import annotations

import numpy as np

from analysis.metrics import Floats

PLATEAU = 0.05  # throughput that grows by less than this share ...
PLATEAU_LOAD = 1.3  # ... while the requests in flight grow by this factor, has reached its ceiling
LOW_LOADS = 2


def corner_of_bounds(concurrency: Floats, rps: Floats, saturated: bool) -> tuple[float, float] | None:
    """(N*, 1/D_max) of the asymptotic bounds, N* = (D + Z)/D_max (Lazowska et al. 1984); None where no ceiling was reached.

    ``concurrency`` counts requests in flight, so Z = 0: D is the time in flight at the ``LOW_LOADS`` lowest loads (Little),
    1 / D_max the mean throughput of the plateau in requests/s. Levels ascending.
    """
    plateau = rps >= (1 - PLATEAU) * rps.max()
    wide = float(concurrency[plateau].max() / concurrency[plateau].min())
    if not saturated and wide < PLATEAU_LOAD:
        return None
    demand_s = float(np.mean((concurrency / rps)[:LOW_LOADS]))
    ceiling_rps = float(rps[plateau].mean())
    return demand_s * ceiling_rps, ceiling_rps
