"""The hot path: read ready sockets and date the reads.

``_hot_path.c`` does the same where it was built (``COMPILED``), and records the chunks that match
a template. Everything that happens less often is left to the callers.
"""

import select
import struct
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

VERSION = 6  # of the compiled module's interface
READ_BYTES = 65_536
DELAY_MAX_NS = 60_000_000_000  # a time stamp further off does not belong to this read
CLOCKS_APART_MAX_NS = 20_000  # between two clocks read one after the other
_timespec = struct.Struct("@qq").unpack
_ANCILLARY_BYTES = 64  # room for one cmsg header and a timespec

ReadHandler = Callable[[int, bytes], bool]
"""Takes the time of a read, monotonic ns, and its bytes; returns whether the answer ended."""


class Wire(Protocol):
    """The part of a connection that the hot path uses."""

    last_ns: int  # time of its latest read

    @property
    def recvmsg(self) -> Callable[[int, int], tuple[bytes, list[tuple[int, int, bytes]], int, Any]]:
        """Return its ``socket.recvmsg``."""


W = TypeVar("W", bound=Wire)
Reads = tuple[int, int, list[tuple[W, int, Any]], list[W], list[int]]
"""Result of ``read_ready``: number of ready sockets, number of reads soon after the previous one
of their stream, (wire, time, bytes or error) of every read that is still to be handled, wires to
read again, and the delays of the audited reads, ns."""


def read_ready_in_python(
    epoll: select.epoll,
    wires: list[W | None],
    most: int,
    near_ns: int,
    audit_at: int,
    audit_every: int,
    by_kernel: bool,
) -> Reads[W]:
    """Read at most ``most`` sockets that ``epoll`` reports; ``wires`` are indexed by descriptor.

    Reads within ``near_ns`` of the previous one of their stream are near. Delays, read time -
    kernel time, are returned of every n-th read with n modulo ``audit_every`` == ``audit_at``.
    Without ``by_kernel`` times are those of the reads. The compiled version returns no read that
    matched a template.
    """
    now_ns = time.monotonic_ns()
    earliest_ns = max(now_ns - DELAY_MAX_NS, 0)
    wall_s, zero_ns = _monotonic_of_wall()
    reads: list[tuple[W, int, bytes | OSError]] = []
    again: list[W] = []
    delays_ns: list[int] = []
    near = 0
    ready = epoll.poll(0, most)
    for number, (fd, events) in enumerate(ready):
        wire = wires[fd] if fd < len(wires) else None
        if wire is None:
            continue
        recvmsg = wire.recvmsg  # a method call would look it up slowly
        try:
            data, ancillary, _, _ = recvmsg(READ_BYTES, _ANCILLARY_BYTES)
        except (BlockingIOError, InterruptedError):
            continue
        except OSError as error:
            reads.append((wire, now_ns, error.with_traceback(None)))  # it would hold this frame
            continue
        if events != select.EPOLLIN or len(data) == READ_BYTES:
            again.append(wire)
        stamp_ns = _stamp_ns(ancillary, wall_s, zero_ns)
        audited = number % audit_every == audit_at
        # the clock is read where it matters
        if audited or not by_kernel or not stamp_ns or stamp_ns > now_ns:
            now_ns = time.monotonic_ns()
        plausible = earliest_ns < stamp_ns <= now_ns
        if plausible and audited:
            delays_ns.append(now_ns - stamp_ns)
        gap_ns = _advance(wire, stamp_ns if plausible and by_kernel else now_ns)
        # without a time stamp, data has to be read at once
        near += bool(data) and (gap_ns < near_ns or not stamp_ns)
        reads.append((wire, wire.last_ns, data))
    return len(ready), near, reads, again, delays_ns


def _stamp_ns(ancillary: list[tuple[int, int, bytes]], wall_s: int, zero_ns: int) -> int:
    """Return the kernel's time stamp on the monotonic clock; 0 where there is none."""
    try:
        # no other kind was requested
        stamp: tuple[int, int] = _timespec(ancillary[0][2])
    except (IndexError, struct.error):
        return 0
    return zero_ns + stamp[1] + (stamp[0] - wall_s) * 1_000_000_000


def _advance(wire: Wire, at_ns: int) -> int:
    """Set the time of the wire's latest read; return the gap to the previous one, ns.

    Two clocks are read in turn, and one may be set: times of a stream never go back.
    """
    gap_ns = at_ns - wire.last_ns
    wire.last_ns = max(at_ns, wire.last_ns)
    return gap_ns


def _monotonic_of_wall() -> tuple[int, int]:
    """Return the wall clock's second, and its beginning on the monotonic clock, ns."""
    for _ in range(3):
        before_ns, wall_ns, after_ns = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        if after_ns - before_ns < CLOCKS_APART_MAX_NS:  # else the process was interrupted
            break
    seconds, nanoseconds = divmod(wall_ns, 1_000_000_000)
    return seconds, (before_ns + after_ns) // 2 - nanoseconds


try:
    from ampacity.loadgen.receive import _hot_path

    if _hot_path.VERSION != VERSION:  # built from an older source
        raise ImportError
except (ImportError, AttributeError):  # no compiler at installation, or no Linux
    COMPILED = False
    read_ready: Callable[..., Reads[Any]] = read_ready_in_python
else:
    COMPILED = True
    read_ready, read_handler = _hot_path.read_ready, _hot_path.read_handler
    tls_handler = _hot_path.tls_handler
