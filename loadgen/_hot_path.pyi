from collections.abc import Callable
from select import epoll

from loadgen.hot_path import Reads, Take, Totals
from loadgen.kernel_stamps import KernelWire

VERSION: int

def repeats(before: bytes, known: set[bytes], note: Callable[[int], None], otherwise: Take, /) -> Take: ...
def counting(
    form: Totals,
    before: bytes,
    fixed: tuple[bytes, ...],
    gaps: tuple[int, ...],
    upper: bool,
    known: set[bytes],
    note: Callable[[int], None],
    otherwise: Take,
    /,
) -> Take: ...
def read_ready(
    epoll: epoll, wires: list[KernelWire | None], most: int, near_ns: int, audit_at: int, audit_every: int, /
) -> Reads: ...
