"""Bound how late a client may send: by its own audit, or by a stage's records where it has none."""

from collections.abc import Iterable

LATENESS_MAX_S = 0.02  # without an SLO
LATENESS_SHARE_OF_LIMIT = 0.1  # of the tightest SLO limit
LATENESS_FLOOR_S = 0.002
FROM_SCHEDULE = ("ttft", "e2e")  # metrics that a late request makes longer


def lateness_limit_s(limits_s: Iterable[float]) -> float:
    """Return the largest p99 lateness of the client that still allows a verdict on these limits."""
    tightest_s = min(limits_s, default=None)
    if tightest_s is None:
        return LATENESS_MAX_S
    return max(LATENESS_FLOOR_S, LATENESS_SHARE_OF_LIMIT * tightest_s)


def left_late(p99_s: float | None, most_s: float) -> str | None:
    """Return why a client whose requests left so late was the limit; None if it was not."""
    if p99_s is None or p99_s <= most_s:
        return None
    return f"requests left {p99_s * 1e3:.1f} ms late at p99, more than {most_s * 1e3:.1f} ms"
