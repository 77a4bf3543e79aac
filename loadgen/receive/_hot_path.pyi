from collections.abc import Callable
from select import epoll

from ampacity.loadgen.receive.hot_path import ReadHandler, Reads, Totals, W

VERSION: int

def repeats(
    before: bytes, known: set[bytes], add_time: Callable[[int], None], fallback: ReadHandler, /
) -> ReadHandler: ...
def counting(
    template: Totals,
    before: bytes,
    fixed: tuple[bytes, ...],
    gaps: tuple[int, ...],
    upper: bool,
    known: set[bytes],
    add_time: Callable[[int], None],
    fallback: ReadHandler,
    /,
) -> ReadHandler: ...
def read_ready(
    epoll: epoll, wires: list[W | None], most: int, near_ns: int, audit_at: int, audit_every: int, /
) -> Reads[W]: ...
