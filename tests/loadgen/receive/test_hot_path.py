"""The compiled hot path: built where possible, and it reads as the Python version does."""

from __future__ import annotations

import gc
import select
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
import weakref
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ampacity.loadgen.net.kernel_stamps import NEAR_NS
from ampacity.loadgen.receive import hot_path
from ampacity.loadgen.receive.templates import READ_MAX_BYTES

_SO_TIMESTAMPNS = 35
CLOCKS_NS = 100_000  # how far apart two readings of different clocks may be, with room
BEFORE, TEXT = b'data: {"text":"', b"one"
MODULE = "sys.modules['ampacity.loadgen.receive._hot_path']"

linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="epoll and SO_TIMESTAMPNS are Linux's"
)
compiled = pytest.mark.skipif(not hot_path.COMPILED, reason="_hot_path.c was not built")
either_way = pytest.mark.usefixtures("hot_path_either_way")


def a_compiler_is_there() -> bool:
    headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    return sys.platform.startswith("linux") and headers and shutil.which("cc") is not None


@pytest.mark.skipif(
    not a_compiler_is_there(), reason="no C compiler, no Python headers, or no Linux"
)
def test_it_is_compiled_where_there_is_a_compiler() -> None:
    assert hot_path.COMPILED


@pytest.mark.parametrize(
    "instead",
    [
        f"{MODULE} = None",
        # an older version, and one without a version
        f"ampacity.loadgen.receive._hot_path = {MODULE} = SimpleNamespace(VERSION=0)",
        f"ampacity.loadgen.receive._hot_path = {MODULE} = SimpleNamespace()",
    ],
)
def test_without_it_every_chunk_is_parsed(instead: str) -> None:
    found = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys, ampacity.loadgen.receive; from types import SimpleNamespace; {instead}\n"
            "from ampacity.loadgen import host; from ampacity.loadgen.receive import hot_path as h\n"
            "print(h.COMPILED, h.read_ready.__name__)\n"
            "print(host.host_facts()['compiled_receive_path'])",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split() == ["False", "read_ready_in_python", "False"]


LONG = b"x" * (READ_MAX_BYTES - 43)  # with 37 bytes around it and seven of HTTP


def plain(text: bytes = TEXT, size: bytes = b"%x") -> bytes:
    data = BEFORE + text + b'"}\n\n'
    return size % len(data) + b"\r\n" + data + b"\r\n"


def totals(total: int, text: bytes = TEXT, size: bytes = b"%x") -> bytes:
    data = BEFORE + text + b'","sum":%d,"of":%d}\n\n' % (total + 90, total)
    return size % len(data) + b"\r\n" + data + b"\r\n"


CHUNK = plain()
READS = [  # bytes, and whether they are the chunk expected next
    (CHUNK, True),
    (plain(b"another"), True),
    (b"", False),
    (b"\n", False),
    (b"16\r\n", False),
    (b"0\r\n\r\n", False),
    (CHUNK[:-1], False),
    (CHUNK + b"0\r\n\r\n", False),
    (CHUNK * 2, False),
    (CHUNK.replace(b"16", b"17"), False),
    (CHUNK.replace(b"16", b"016"), False),
    (CHUNK.replace(b"text", b"TEXT"), False),
    (CHUNK.replace(b"one", b"two"), False),
    (CHUNK.replace(b"\r\n", b"\n"), False),
    (b"\r\n" + CHUNK, False),
    (CHUNK + bytes(70_000), False),
]
READS_WITH_TOTALS = [  # nine tokens have come
    (totals(10), True),  # nine was a digit less
    (totals(10, b"another"), True),
    (totals(9), False),
    (totals(11), False),
    (totals(10, b"new"), False),
    (totals(10, b""), False),
    (totals(10)[:-1], False),
    (totals(10) + b"x", False),
    (totals(10) + totals(11), False),
    (b"0" + totals(10), False),
    (totals(10, b"another", size=b"%X"), False),  # 2C, where 2c was learned
    (totals(10).replace(b"\r\n", b"\n", 1), False),
    (totals(10).replace(b"sum", b"Sum"), False),
    (totals(10, LONG[:-1]), True),
    (totals(10, LONG), False),
]


def handler(
    template: Any, add_time: Any, fallback: Any, add_text: Any = None, known: Any = (TEXT,)
) -> Any:
    fixed, gaps = (b'"}\n\n\r\n',), ()
    if template.total is not None:
        fixed, gaps = (b'","sum":', b',"of":', b"}\n\n\r\n"), (90, 0)
    return hot_path.read_handler(
        template, False, BEFORE, fixed, gaps, {*known}, add_time, add_text, fallback
    )


@compiled
@pytest.mark.parametrize("keeps_text", [True, False])
@pytest.mark.parametrize(
    ("total", "read", "is_next"),
    [*((None, *case) for case in READS), *((9, *case) for case in READS_WITH_TOTALS)],
)
def test_only_the_expected_chunk_with_a_known_text_is_recorded(
    total: int | None, read: bytes, is_next: bool, keeps_text: bool
) -> None:
    times, texts, others, template = array("q"), [], [], SimpleNamespace(total=total)

    def fallback(at_ns: int, data: bytes) -> bool:
        others.append((at_ns, data))
        return True

    known = {TEXT, b"another", LONG, LONG[:-1]}
    add_text = texts.append if keeps_text else None
    handle = handler(template, times.append, fallback, add_text, known)
    assert handle(7, read) is not is_next
    assert (times.tolist(), others) == (([7], []) if is_next else ([], [(7, read)]))
    assert [text in read for text in texts] == [True] * (is_next and keeps_text)
    assert template.total == (total + 1 if is_next and total else total)


@compiled
@pytest.mark.parametrize("total", [-1, 2**62, 2**80, "9"])
def test_an_impossible_total_is_left_to_the_parsers_or_raised(total: Any) -> None:
    handle = handler(SimpleNamespace(total=total), print, lambda at_ns, data: True)
    if isinstance(total, str) or total == 2**80:
        with pytest.raises((TypeError, OverflowError)):
            handle(7, totals(10))
    else:
        assert handle(7, totals(10))


@compiled
def test_errors_of_what_is_called_are_raised() -> None:
    def wrong(at_ns: int, data: bytes = b"") -> bool:
        raise LookupError(at_ns)

    for handle, read in (
        (handler(SimpleNamespace(total=None), wrong, wrong), CHUNK),
        (handler(SimpleNamespace(total=None), wrong, wrong), b"x"),
        (handler(SimpleNamespace(total=None), len, wrong, wrong), b"x"),
    ):
        with pytest.raises(LookupError):
            handle(1, read)


@compiled
def test_a_handler_that_holds_itself_is_garbage() -> None:
    class Holder:
        total, handle = None, None

        def fallback(self, at_ns: int, data: bytes) -> bool:
            return False

    holder = Holder()
    holder.handle = handler(holder, print, holder.fallback, holder.fallback)
    gone = weakref.ref(holder)
    del holder
    gc.collect()
    assert gone() is None


# -- reads ---------------------------------------------------------------------------------------


class Wire:
    """A socket pair of TCP with stamps, and what its reads are handed to."""

    def __init__(self, epoll: select.epoll, feed: Any) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.socket = socket.create_connection(server.getsockname())
            self.peer, _ = server.accept()
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self.peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.recvmsg, self.fd, self.last_ns = self.socket.recvmsg, self.socket.fileno(), 0
        self.receiver = SimpleNamespace(
            exchange=None if feed is None else SimpleNamespace(feed=feed)
        )
        epoll.register(self.fd, select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET)

    def close(self) -> None:
        self.socket.close()
        self.peer.close()


def ready(
    epoll: select.epoll, *wires: Wire, most: int = 64, audit: tuple[int, int] = (0, 1)
) -> Any:
    """The reads in the order of the wires, chunks that repeat noted by whoever reads."""
    by_fd: list[Wire | None] = [None] * (max(w.fd for w in wires) + 1)
    for wire in wires:
        by_fd[wire.fd] = wire
    select.select(
        [epoll], [], [], 1.0
    )  # until the first of them has come; sent on this machine, so have the others
    count, near, reads, again, delays_ns = hot_path.read_ready(epoll, by_fd, most, NEAR_NS, *audit)
    left = []
    for wire, at_ns, data in reads:
        feed = None if wire.receiver.exchange is None else wire.receiver.exchange.feed
        if feed is None or isinstance(data, OSError) or not data or feed(at_ns, data):
            left.append((wires.index(wire), data))
    return (
        count,
        near,
        sorted(left, key=lambda item: item[0]),
        [wires.index(w) for w in again],
        len(delays_ns),
    )


@linux
@either_way
def test_a_turn_notes_what_repeats_and_hands_on_the_rest() -> None:
    """Six sockets: a known chunk, another, an unrequested one, the end, a break, silence."""
    noted = array("q")
    with select.epoll() as epoll:

        def take(at_ns: int, data: bytes) -> bool:
            return data != CHUNK or bool(noted.append(at_ns))

        if hot_path.COMPILED:
            take = handler(SimpleNamespace(total=None), noted.append, lambda at_ns, data: True)
        wires = [Wire(epoll, None if i == 2 else take) for i in range(6)]
        for wire, sent in zip(wires[:3], (CHUNK, CHUNK[:-1], b"what?"), strict=True):
            wire.peer.send(sent)
        wires[3].peer.close()
        wires[4].peer.setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0"
        )  # closed at once, with a reset
        wires[4].peer.close()
        count, _, left, again, _ = ready(epoll, *wires)
        for wire in wires:
            wire.close()
    assert count == 5
    assert [
        (i, type(data), bytes(data) if isinstance(data, bytes) else data.errno) for i, data in left
    ] == [
        (1, bytes, CHUNK[:-1]),
        (2, bytes, b"what?"),
        (3, bytes, b""),
        (4, ConnectionResetError, 104),
    ]
    assert again == [3]  # there was more to tell than that it can be read
    assert len(noted) == 1
    assert 0 < noted[0] == wires[0].last_ns


@linux
@either_way
def test_reads_are_dated_when_they_came_counted_as_near_and_audited_as_asked() -> None:
    """Ten sockets, seven with a latest read after this one: near, and no time goes back.

    Of ten reads the third, sixth and ninth are audited.
    """
    dates: list[int] = []
    with select.epoll() as epoll:
        wires = [Wire(epoll, lambda at_ns, data: bool(dates.append(at_ns))) for _ in range(10)]
        for wire in wires:
            wire.peer.send(b"stamps begin with the first packets of a process")
        time.sleep(0.05)
        ready(epoll, *wires)
        before_ns = time.monotonic_ns()
        for wire in wires:
            wire.peer.send(b"x")
        after_ns = time.monotonic_ns()
        for wire in wires[:3]:
            wire.last_ns = 0
        for wire in wires[3:]:
            wire.last_ns = after_ns + CLOCKS_NS
        time.sleep(0.005)
        count, near, left, again, audited = ready(epoll, *wires, audit=(2, 3))
        for wire in wires:
            wire.close()
    assert (count, near, left, again, audited) == (10, 7, [], [], 3)
    assert all(before_ns - CLOCKS_NS <= at_ns <= after_ns + CLOCKS_NS for at_ns in dates[10:])
    assert sorted(dates[10:])[3:] == [after_ns + CLOCKS_NS] * 7
    assert [wire.last_ns for wire in wires].count(after_ns + CLOCKS_NS) == 7


@linux
@either_way
def test_no_more_than_asked_for_are_read_and_what_is_gone_is_passed_by() -> None:
    got: list[bytes] = []
    with select.epoll() as epoll:
        wires = [Wire(epoll, lambda at_ns, data: bool(got.append(data))) for _ in range(9)]
        for wire in wires:
            wire.peer.send(b"x")
        assert ready(epoll, *wires, most=8)[0] == 8
        assert ready(epoll, *wires, most=8)[0] == 1
        assert len(got) == 9
        wires[0].peer.send(b"y")
        select.select([epoll], [], [], 1.0)
        assert hot_path.read_ready(epoll, [], 8, NEAR_NS, 0, 1)[:3] == (1, 0, [])
        for wire in wires:
            wire.close()


@linux
@either_way
def test_a_full_read_is_asked_for_again() -> None:
    got: list[bytes] = []
    with select.epoll() as epoll:
        wire = Wire(epoll, lambda at_ns, data: bool(got.append(data)))
        wire.peer.sendall(bytes(hot_path.READ_BYTES + 1))
        again = []
        for _ in range(50):
            again.append(bool(ready(epoll, wire)[3]))
            if sum(map(len, got)) > hot_path.READ_BYTES:
                break
            epoll.modify(wire.fd, select.EPOLLIN | select.EPOLLET)
        wire.close()
    assert again == [len(data) == hot_path.READ_BYTES for data in got]
    assert b"".join(got) == bytes(hot_path.READ_BYTES + 1)
