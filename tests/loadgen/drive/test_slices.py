"""Work that can wait gives way to reads, and is done all the same."""

import asyncio
import time
from collections.abc import Callable

import pytest

from ampacity.loadgen.drive import slices
from ampacity.loadgen.drive.slices import GIVES_WAY_NS, SLICE_NS, in_slices


def steps_while(reads_wait: Callable[[int], bool], turns: int) -> list[int]:
    """In which turns of the loop a step was made; each takes a slice, and there is always another
    one."""
    now, made = 0, []

    def step() -> bool:
        made.append(now)
        until_ns = time.monotonic_ns() + SLICE_NS
        while time.monotonic_ns() < until_ns:
            pass
        return True

    async def main() -> None:
        nonlocal now
        working = asyncio.create_task(in_slices(step, lambda: reads_wait(now)))
        for turn in range(turns):
            now = turn
            await asyncio.sleep(0)
        working.cancel()

    asyncio.run(main())
    return made


def test_no_slice_begins_while_reads_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    # not even on a machine that stands still for a while
    monkeypatch.setattr(slices, "GIVES_WAY_NS", 60_000_000_000)
    made = steps_while(lambda turn: turn % 12 < 10, 120)
    assert made
    assert {turn % 12 for turn in made} == {10, 11}


def test_what_waits_is_done_though_there_is_always_something_to_read() -> None:
    began_ns = time.monotonic_ns()
    made = steps_while(lambda turn: True, 20_000)
    passed_ns = time.monotonic_ns() - began_ns
    assert 2 <= len(made) <= 1 + passed_ns / (GIVES_WAY_NS + SLICE_NS)
