from collections.abc import Callable
from select import epoll
from typing import Protocol

from ampacity.loadgen.receive.hot_path import ReadHandler, Reads, W

VERSION: int

class Template(Protocol):
    total: int | None  # the running total of tokens

def read_handler(
    template: Template,
    upper: bool,
    before: bytes,
    fixed: tuple[bytes, ...],
    gaps: tuple[int, ...],
    known: set[bytes],
    add_time: Callable[[int], None],
    add_text: Callable[[bytes], None] | None,
    fallback: ReadHandler,
    /,
) -> ReadHandler:
    """Return a handler that records time and text of the next chunk in sequence.

    ``before`` lies between the size line, in upper-case hex if ``upper``, and the text, which is
    one of ``known``; after it comes ``fixed`` with ``template.total`` + 1 + each of ``gaps``
    between its pieces. All other reads go to ``fallback``.
    """

def read_ready(
    epoll: epoll, wires: list[W | None], most: int, near_ns: int, audit_at: int, audit_every: int, /
) -> Reads[W]: ...
