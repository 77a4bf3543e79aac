"""What is done for every token: sockets read, reads dated, chunks that repeat the one before them noted.

``_hot_path.c`` says the same in C, and is taken where it was built. Everything that happens less often is left to the
callers of either.
"""

from __future__ import annotations

import select
import struct
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

VERSION = 1  # of what is compiled
READ_BYTES = 65_536
DELAY_MAX_NS = 60_000_000_000  # a stamp further off than this is no stamp of this read
CLOCKS_APART_MAX_NS = 20_000  # two clocks that are read one after the other
_timespec = struct.Struct("@qq").unpack
_ANCILLARY_BYTES = 64  # one cmsg header and a timespec, with room

ReadHandler = Callable[[int, bytes], bool]
"""Takes what was read and when, monotonic ns; whether that ended the answer."""


class Wire(Protocol):
    """What is used of a socket here."""

    last_ns: int  # date of its latest read

    @property
    def recvmsg(self) -> Callable[[int, int], tuple[bytes, list[tuple[int, int, bytes]], int, Any]]:
        """``socket.recvmsg`` of it."""


W = TypeVar("W", bound=Wire)
Reads = tuple[int, int, list[tuple[W, int, bytes | OSError]], list[W], list[int]]
"""What ``read_ready`` gives: sockets that had something, how many reads came soon after the one before of their stream,
(wire, date, what was read or went wrong) of all that is still to be handed on, wires that have to be asked again, and the
delays of the audited reads, ns."""


def read_ready_in_python(
    epoll: select.epoll,
    wires: list[W | None],
    most: int,
    near_ns: int,
    audit_at: int,
    audit_every: int,
    by_kernel: bool = True,
) -> Reads[W]:
    """Read the sockets that ``epoll`` tells of, at most ``most``; ``wires`` by their descriptors, None where there is none.

    ``near_ns``: reads of a stream that come so soon are counted as near. Of the n-th read the delay, read time − kernel
    time, is told where n modulo ``audit_every`` is ``audit_at``. Without ``by_kernel`` dates are those of the reads, and
    all delays are told. What is compiled has always dates of the kernel, and hands on nothing that repeats.
    """
    now_ns = time.monotonic_ns()
    earliest_ns = now_ns - DELAY_MAX_NS
    wall_s, zero_ns = _monotonic_of_wall()
    reads: list[tuple[W, int, bytes | OSError]] = []
    again: list[W] = []
    delays_ns, near = [], 0
    ready = epoll.poll(0, most)
    for number, (fd, events) in enumerate(ready):
        wire = wires[fd] if fd < len(wires) else None
        if wire is None:
            continue
        recvmsg = wire.recvmsg  # called as a method it would be looked up for long
        try:
            data, ancillary, _, _ = recvmsg(READ_BYTES, _ANCILLARY_BYTES)
        except (BlockingIOError, InterruptedError):
            continue
        except OSError as error:
            reads.append((wire, now_ns, error.with_traceback(None)))  # which would hold this frame
            continue
        if events != select.EPOLLIN or len(data) == READ_BYTES:
            again.append(wire)
        stamped = False
        try:
            seconds, nanoseconds = _timespec(ancillary[0][2])  # no other kind was asked for
        except (IndexError, struct.error):
            at_ns = now_ns = time.monotonic_ns()
        else:
            stamped = True
            at_ns = zero_ns + nanoseconds
            if seconds != wall_s:
                at_ns += (seconds - wall_s) * 1_000_000_000
            audited = number % audit_every == audit_at or not by_kernel
            if audited or at_ns > now_ns:  # the clock is looked at where the time matters
                now_ns = time.monotonic_ns()
            dated = earliest_ns < at_ns <= now_ns
            if dated and audited:
                delays_ns.append(now_ns - at_ns)
            if not (dated and by_kernel):
                at_ns = now_ns
        # two clocks are read one after the other, and one may be set: no later read has an earlier date
        gap_ns = at_ns - wire.last_ns
        if gap_ns < 0:
            at_ns = wire.last_ns
        if data and (gap_ns < near_ns or not stamped):  # with no stamp it has to be read at once
            near += 1
        wire.last_ns = at_ns
        reads.append((wire, at_ns, data))
    return len(ready), near, reads, again, delays_ns


def _monotonic_of_wall() -> tuple[int, int]:
    """The wall clock's second, and when on the monotonic clock it began, ns."""
    for _ in range(3):
        before_ns, wall_ns, after_ns = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        if after_ns - before_ns < CLOCKS_APART_MAX_NS:  # longer, and the process was interrupted
            break
    seconds, nanoseconds = divmod(wall_ns, 1_000_000_000)
    return seconds, (before_ns + after_ns) // 2 - nanoseconds


def repeats_in_python(
    before: bytes, known: set[bytes], note: Callable[[int], None], otherwise: ReadHandler
) -> ReadHandler:
    """What takes reads: of one that is a known chunk the time is noted, all others go on.

    ``before`` stands between the line with the chunk's size and its text; ``known`` holds that line with all from the text on.
    """
    before_bytes = len(before)

    def take(at_ns: int, read: bytes) -> bool:
        data_at = read.find(10) + 1  # behind the line with the size
        if read[:data_at] + read[data_at + before_bytes :] in known and read.startswith(
            before, data_at
        ):
            note(at_ns)
            return False
        return otherwise(at_ns, read)

    return take


class Totals(Protocol):
    """A form whose chunks say how many tokens have come by then."""

    total: int | None


def counting_in_python(
    form: Totals,
    before: bytes,
    fixed: tuple[bytes, ...],
    gaps: tuple[int, ...],
    upper: bool,
    known: set[bytes],
    note: Callable[[int], None],
    otherwise: ReadHandler,
) -> ReadHandler:
    """What takes reads: of one that is the chunk due next the time is noted and the total raised, all others go on.

    ``before`` stands between the line with the chunk's size, in capitals if ``upper``, and its text; the text is one of
    ``known``; behind it stands ``fixed`` with, between its pieces, ``form.total`` + 1 + each of ``gaps``. Only what is
    compiled knows such a chunk by itself: ``otherwise`` has to know it too.
    """
    return otherwise


read_ready: Callable[..., Reads[Any]]
counting: Callable[..., ReadHandler]
repeats: Callable[[bytes, set[bytes], Callable[[int], None], ReadHandler], ReadHandler]
try:
    from ampacity.loadgen.receive import _hot_path

    if _hot_path.VERSION != VERSION:  # built from an older source, and not again since
        raise ImportError
except (ImportError, AttributeError):  # or no compiler where this was installed, or no Linux
    COMPILED = False
    read_ready, repeats, counting = read_ready_in_python, repeats_in_python, counting_in_python
else:
    COMPILED = True
    read_ready, repeats, counting = _hot_path.read_ready, _hot_path.repeats, _hot_path.counting
