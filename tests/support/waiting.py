"""Wait for what must come, instead of for a time."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def wait_until(
    holds: Callable[[], T],
    within_s: float = 30.0,
    why: Callable[[], str] = lambda: "it did not come",
) -> T:
    """Look every 20 ms and return what holds. Fails with ``why`` when ``within_s`` are over."""
    end_s = time.monotonic() + within_s
    while not (found := holds()):
        assert time.monotonic() < end_s, why()
        time.sleep(0.02)
    return found


async def until(holds: Callable[[], object], within_s: float = 30.0) -> None:
    """Look every 5 ms. Fails when ``within_s`` are over."""
    end_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end_s, "it did not come"
        await asyncio.sleep(0.005)


def gone(pid: int) -> bool:
    """Return whether a process has ended; a zombie that nobody reaps has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
