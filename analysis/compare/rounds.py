"""Work out how many rounds of an A/B would decide what this one leaves inconclusive."""

import math

import numpy as np
from scipy.special import stdtrit

from ampacity.analysis.change.engine import DEFAULT_TOLERANCE, LEAST
from ampacity.analysis.change.results import Comparison, QuantileChange

MAIN = (0.5, 0.9, 0.95, 0.99)  # quantiles that are worth more rounds


def deciding_rounds(result: Comparison, rounds: int, most: int) -> int | None:
    """Return the rounds after which about the first inconclusive latency is decided, if it stays as it is.

    The half width of an interval is t(n - 1) s / sqrt(n) for n pairs of stages: it must come below
    the change itself, or below what is left to the change that does not matter; t is that of 5 %
    over all quantiles that are tested (Bonferroni). None where some line has a winner, an endpoint
    is compared with itself, no main quantile is inconclusive, or ``most`` do not decide it.
    """
    pairs = result.interleaved_pairs or 0
    won = any(line.winner for line in result.scorecard) or any(s.changed for s in result.shift)
    if pairs < 2 or won or result.aa or result.other_work:
        return None
    tested = [q for s in result.shift for q in s.quantiles if q.p is not None]
    level = 1 - 0.025 / max(len(tested), 1)
    open_ = [q for q in tested if q.verdict == "inconclusive" and q.q in MAIN]
    wanted = [n for q in open_ if (n := _pairs(q, pairs, most * pairs // rounds, level))]
    return max(math.ceil(min(wanted) * rounds / pairs), rounds + 1) if wanted else None


def _pairs(q: QuantileChange, pairs: int, most: int, level: float) -> int | None:
    """Return the pairs of stages whose interval is narrow enough; None above ``most``."""
    low, high = q.change_ci or (None, None)
    if low is None or high is None or q.change is None:
        return None
    size = abs(q.change)
    narrow = max(size if size >= LEAST else 0.0, DEFAULT_TOLERANCE - size)
    n = np.arange(pairs, most + 1)
    deviation = (high - low) / 2 * math.sqrt(pairs) / stdtrit(pairs - 1, 0.975)
    half = stdtrit(n - 1, level) * deviation / np.sqrt(n)
    enough = n[half <= narrow]
    return int(enough[0]) if len(enough) else None
