from collections.abc import Callable
from select import epoll
from typing import Any

from ampacity.loadgen.receive.hot_path import ReadHandler, Reads, W

VERSION: int

def read_handler(
    before: bytes,
    fixed: tuple[bytes, ...],
    gaps: tuple[int | None, ...],
    marks: tuple[bytes, ...],
    add_time: Callable[[int], None],
    add_count: Callable[[int], None] | None,
    add_text: Callable[[bytes], None] | None,
    fallback: ReadHandler,
    total: int,
    /,
) -> ReadHandler:
    """Return a handler that records time, token count and text of the chunks of a template.

    ``before`` lies between the size line and the text, as JSON writes it, without any of
    ``marks``. After it comes ``fixed``, and between its pieces the running total + each of
    ``gaps``, more than ``total``, or where the gap is None log-probabilities, whose tokens are
    counted. What does not match goes to ``fallback``.
    """

def tls_handler(
    write: Callable[[bytes], int], read: Callable[[int], bytes], receiver: object, fallback: Any, /
) -> ReadHandler:
    """Return a handler of a socket's reads, to be read by ``read_ready``.

    A read of whole records goes through ``write`` and ``read`` to the handler of the receiver's
    exchange. ``fallback`` gets the time and all other bytes, or the rest of the plain text and its
    last piece: empty if TLS is closed, or an exception.
    """

def read_ready(
    epoll: epoll,
    wires: list[W | None],
    most: int,
    near_ns: int,
    audit_at: int,
    audit_every: int,
    by_kernel: bool,
    /,
) -> Reads[W]: ...
