"""The requests of a burst run as vectors, and how many of them are in the system at a time."""

from dataclasses import dataclass

import numpy as np

from ampacity.analysis.contract.burst import Phase
from ampacity.analysis.metrics.requests import Bools, Floats, Ints

SETTLE_SHARE = 0.2  # of the base phase: an endpoint that starts idle fills up first
SAME = 1e-6  # request counts that differ by less are equal
PARTS = 8  # parts of a time span whose scatter shows how much its mean varies
UNSEEN = "what is known of the run ends before the burst does"


@dataclass(frozen=True)
class Timeline:
    """First attempts in scheduled order. Times in s after the start of the stage, shape (n,)."""

    burst_s: float  # when the burst begins
    over_s: float  # when it ends
    end_s: float  # when what is known ends
    at: Floats  # scheduled
    ttft: Floats  # from schedule; inf: failed or cut off before the first token
    answered: Floats  # first token; inf: cut off before it
    finish: Floats  # end of the request, or of what is known where it has none
    ok: Bools

    @property
    def settled_s(self) -> float:
        """Return the beginning of the part of the base phase that counts."""
        return SETTLE_SHARE * self.burst_s


Phases = list[Phase]  # base, burst, recovery


def waiting_at(at: Floats, left: Floats, moments: Floats) -> Ints:
    """Return how many requests have come and not left at each moment; both sorted."""
    return np.searchsorted(at, moments, "right") - np.searchsorted(left, moments, "right")


def elapsed_s(from_s: float, to_s: float) -> float:
    """Return the time between, to the millisecond: less is clock noise."""
    return round(to_s - from_s, 3) + 0.0


def fallen_s(at: Floats, left: Floats, level: float, over_s: float, end_s: float) -> float | None:
    """Return the s from the end of the burst until at most ``level`` requests are left.

    None: that did not happen while there was load.
    """
    left = np.sort(left)
    moments = np.concatenate([[over_s], left[(left > over_s) & (left <= end_s)]])
    down = moments[waiting_at(at, left, moments) <= level + SAME]
    return elapsed_s(over_s, float(down[0])) if len(down) else None
