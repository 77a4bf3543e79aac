from collections.abc import Callable
from select import epoll
from typing import Any

from loadgen.hot_path import Reads, Take

class Repeats:
    def __init__(
        self, before: bytes, known: set[bytes], note: Callable[[int], None], otherwise: Take
    ) -> None: ...
    def __call__(self, at_ns: int, read: bytes, /) -> bool: ...

def read_ready(
    epoll: epoll, wires: list[Any], most: int, near_ns: int, audit_at: int, audit_every: int, /
) -> Reads: ...
