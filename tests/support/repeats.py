"""How often a test repeats what it draws: less in `make test`, more in `make test-long`."""

import os

LONG = "LONG_S" in os.environ


def often(usual: int, long: int) -> int:
    """Return ``usual``, or ``long`` where `make test-long` runs."""
    return long if LONG else usual
