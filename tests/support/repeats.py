"""How often a test repeats what it draws: less in `make test`, more in `make test-long`."""

import os
from typing import TypeVar

T = TypeVar("T", int, float)
LONG = "LONG_S" in os.environ


def often(usual: T, long: T) -> T:
    """Return ``usual``, or ``long`` where `make test-long` runs."""
    return long if LONG else usual
