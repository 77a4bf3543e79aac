"""The asymptotic bounds of throughput against concurrency."""

import numpy as np

from ampacity.analysis.stats.intervals import Floats

# of the highest throughput, itself the luckiest of several; so much below is the ceiling ...
PLATEAU = 0.15
# ... if the requests in flight grow by this factor there, or a stage has no steady state
PLATEAU_LOAD = 1.3
LOW_LOADS = 2


def corner_of_bounds(
    concurrency: Floats, rps: Floats, saturated: bool
) -> tuple[float, float] | None:
    """Return (N*, 1/D_max) of the asymptotic bounds, N* = (D + Z)/D_max (Lazowska et al. 1984).

    None where no ceiling was reached. ``concurrency`` counts requests in flight, so Z = 0: D is the
    time in flight at the ``LOW_LOADS`` lowest loads (Little), 1 / D_max the mean throughput of the
    plateau in requests/s. Levels ascending.
    """
    plateau = rps >= (1 - PLATEAU) * rps.max()
    wide = float(concurrency[plateau].max() / concurrency[plateau].min())
    if not saturated and wide < PLATEAU_LOAD:
        return None
    demand_s = float(np.mean((concurrency / rps)[:LOW_LOADS]))
    ceiling_rps = float(rps[plateau].mean())
    return demand_s * ceiling_rps, ceiling_rps
