"""The compiled hot path: built where possible, and it reads as the Python version does."""

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

from ampacity.loadgen.net.kernel_stamps import NEAR_TURNS, TURN_NS
from ampacity.loadgen.receive import hot_path
from ampacity.loadgen.receive.thinking import MARKS
from tests.support.servers.kernel_wires import CLOCKS_NS, SO_TIMESTAMPNS

BEFORE, TEXT = b'data: {"text":"', b"one"
MODULE = "sys.modules['ampacity.loadgen.receive._hot_path']"

linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="epoll and SO_TIMESTAMPNS are Linux's"
)
compiled = pytest.mark.skipif(not hot_path.COMPILED, reason="_hot_path.c was not built")
dated = pytest.mark.usefixtures("dated_by_the_kernel")
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
            "from ampacity.loadgen import host\n"
            "from ampacity.loadgen.receive import hot_path as h\n"
            "print(h.COMPILED, h.read_ready.__name__)\n"
            "print(host.host_facts()['compiled_receive_path'])",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split() == ["False", "read_ready_in_python", "False"]


def plain(text: bytes = TEXT, size: bytes = b"%x") -> bytes:
    data = BEFORE + text + b'"}\n\n'
    return size % len(data) + b"\r\n" + data + b"\r\n"


def totals(total: int, text: bytes = TEXT, size: bytes = b"%x") -> bytes:
    data = BEFORE + text + b'","sum":%d,"of":%d}\n\n' % (total + 90, total)
    return size % len(data) + b"\r\n" + data + b"\r\n"


CHUNK = plain()
TEXTS_TO_MATCH = [
    *(b"another", b"</", b"think>", "é".encode(), " 中文".encode(), "🙂".encode()),
    *(rb"\n", rb"a\"b", rb"\\", rb"\t\r\b\f", rb"\u4e2d\u6587", rb"\ud83d\ude42", rb"\u00e9"),
    b"x" * 5000,
]
TEXTS_TO_PARSE = [
    *(b"", b"a\nb", b"\x00", b"\x1f", b"\\", rb"\u12", rb"\u12G4", rb"\x", b"\\\0"),
    *(rb"\u0041", rb"\u003cthink\u003e", rb"<\/think>", rb"\u25c1think", rb"\u25B7"),
    *(rb"\ud83d", rb"\ude42", rb"\ud83dx", rb"\ud83d\u4e2d"),  # halves of a character
    *(b"\xff", b"\xc3", b"\x80a", b"\xed\xa0\x80"),  # no UTF-8
    *(b"a<think>", b"</think>", "◁think▷".encode(), b"assistantfinal"),
]
READS = [  # bytes, and how many of them are chunks that match
    *((plain(text), len(plain(text))) for text in TEXTS_TO_MATCH),
    *((plain(text), 0) for text in TEXTS_TO_PARSE),
    (plain(b"x" * 200, b"%X"), len(plain(b"x" * 200))),
    (b"", 0),
    (b"\n", 0),
    (b"16\r\n", 0),
    (b"0\r\n\r\n", 0),
    (CHUNK[:-1], 0),
    (CHUNK + b"0\r\n\r\n", len(CHUNK)),
    (CHUNK * 2, 2 * len(CHUNK)),
    (CHUNK + CHUNK.replace(b"text", b"TEXT"), len(CHUNK)),
    (CHUNK.replace(b"16", b"17"), 0),
    (CHUNK.replace(b"16", b"ffffffffff"), 0),
    (CHUNK.replace(b"text", b"TEXT"), 0),
    (CHUNK.replace(b"\r\n", b"\n"), 0),
    (b"\r\n" + CHUNK, 0),
    (CHUNK + bytes(70_000), len(CHUNK)),
]
READS_WITH_TOTALS = [  # nine tokens have come
    (totals(10), 1),
    (totals(10, b"another"), 1),
    (totals(12), 1),
    (totals(10) + totals(12), 2),
    (totals(10) + totals(10), 1),
    (totals(9), 0),
    (totals(10, b""), 0),
    (totals(10)[:-1], 0),
    (totals(10) + b"x", 1),
    (totals(10).replace(b":100,", b":101,"), 0),  # of another total
    (totals(10).replace(b"1d", b"1e").replace(b":10}", b":010}"), 0),
    (totals(10).replace(b"sum", b"Sum"), 0),
    (totals(10**9), 0),
    (totals(2**64), 0),
]


def handler(
    add_time: Any, fallback: Any, add_text: Any = None, total: int | None = None, add_total: Any = 0
) -> Any:
    fixed, gaps = (b'"}\n\n',), ()
    if total is not None:
        fixed, gaps = (b'","sum":', b',"of":', b"}\n\n"), (90, 0)
    return hot_path.read_handler(
        BEFORE, fixed, gaps, MARKS, add_time, add_total, add_text, fallback, total or 0
    )


@compiled
@pytest.mark.parametrize("keeps_text", [True, False])
@pytest.mark.parametrize("read", READS, ids=range(len(READS)))
def test_chunks_that_match_are_recorded_and_the_rest_is_passed_on(
    read: tuple[bytes, int], keeps_text: bool
) -> None:
    times, texts, others = array("q"), [], []

    def fallback(at_ns: int, data: bytes) -> bool:
        others.append((at_ns, data))
        return True

    data, matching = read
    handle = handler(times.append, fallback, texts.append if keeps_text else None)
    rest = data[matching:]
    assert handle(7, data) is (bool(rest) or not data)
    assert others == ([(7, rest)] if rest or not data else [])
    assert b"".join(map(plain, texts)).lower() == data[: matching * keeps_text].lower()
    assert set(times) == ({7} if matching else set())


@compiled
@pytest.mark.parametrize(("data", "chunks"), READS_WITH_TOTALS, ids=range(len(READS_WITH_TOTALS)))
def test_running_totals_have_to_rise(data: bytes, chunks: int) -> None:
    times, found, others = [], [], []
    handle = handler(
        times.append, lambda _, rest: others.append(rest) or True, None, 9, found.append
    )
    handle(7, data)
    assert found == [10, 12][:chunks] or found == [12]
    assert len(times) == len(found) == chunks
    assert len(others) == (data != b"".join(map(totals, found))) or b"another" in data


LISTS = {  # log-probabilities, and how many tokens they list; 0: they are parsed
    b'{"content":[{"token":"a","logprob":-0.5}]}': 1,
    b'{ "content" : [ { } ]\t, "refusal" : null }': 1,
    b'{"tokens":["a"],"token_logprobs":[-1.5E-07,0,10.25e+3],"x":{"y":[[],{},true,false]}}': 1,
    '{"tokens":["中"],"content":null}'.encode(): 1,
    '{"tokens":["中"],"bytes":"\\ud83d\\ude00 \\u4e2d \\""}'.encode(): 1,
    b'{"tokens":["\xff"]}': 0,
    b'{"content":[{"token":"\xff"}]}': 1,  # which the parser does not read
    b'{"content":[{},{}]}': 2,
    b'{"tokens":["a","b","c"],"content":null}': 3,
    b'{"content":[{}],"content":null}': 0,  # the parser takes the last
    b'{"tokens":null}': 0,
    b'{"tokens":0}': 0,
    b'{"top_logprobs":[]}': 0,
    b'{"content":[{}],"content":[{}]}': 0,
    b'{"content":[{}],"tokens":["a"]}': 0,
    b'{"content":["a"]}': 0,
    b'{"tokens":[{}]}': 0,
    b'{"content":[]}': 0,
    b"{}": 0,
    b"null": 0,
    b"[]": 0,
    b'{"content":[{}],}': 0,
    b'{"content":[{},]}': 0,
    b'{"content":[{"a":1,}]}': 0,
    b'{"content":[{"a":01}]}': 0,
    b'{"content":[{"a":1.}]}': 0,
    b'{"content":[{"a":-}]}': 0,
    b'{"content":[{"a":1e}]}': 0,
    b'{"content":[{"a":NaN}]}': 0,
    b'{"content":[{"a":tru}]}': 0,
    b'{"content":[{"a"}]}': 0,
    b'{"content":[{a:1}]}': 0,
    b'{"content":[{"a":"\x01"}]}': 0,
    b'{"content":[{"a":"\\x"}]}': 0,
    b'{"content":[{"a":"\\ud83d"}]}': 0,  # half a character
    b'{"content":[{"a":"b}]}': 0,
    b'{"content":[{"a":[1}]}': 0,
    b'{"content":[{"a":\n1}]}': 0,  # a line break ends the event
    b'{"content":[{"a":%b1%b}]}' % (b"[" * 5, b"]" * 5): 1,
    b'{"content":[{"a":%b1%b}]}' % (b"[" * 99, b"]" * 99): 0,
}


@compiled
@pytest.mark.parametrize("listed", LISTS)
def test_log_probabilities_are_passed_over_where_they_are_valid(listed: bytes) -> None:
    fixed, times, counts = (b'","logprobs":', b"}\n\n"), [], []
    body = BEFORE + b"a" + fixed[0] + listed + fixed[1]
    add = times.append, counts.append, None
    handle = hot_path.read_handler(BEFORE, fixed, (None,), MARKS, *add, lambda *_: True, 0)
    for end in range(len(body)):  # cut anywhere it is none, and nothing behind it is read
        handle(7, b"%x\r\n%b\r\n" % (end, body[:end]))
    assert not times
    handle(7, b"%x\r\n%b\r\n" % (len(body), body))
    assert (len(times), counts) == ((1, [LISTS[listed]]) if LISTS[listed] else (0, []))


@compiled
def test_errors_of_what_is_called_are_raised() -> None:
    def wrong(at_ns: int, data: bytes = b"") -> bool:
        raise LookupError(at_ns)

    for handle, read in (
        (handler(wrong, wrong), CHUNK),
        (handler(wrong, wrong), b"x"),
        (handler(print, wrong, wrong), CHUNK),
        (handler(print, wrong, None, 9, wrong), totals(10)),
    ):
        with pytest.raises(LookupError):
            handle(1, read)


@compiled
def test_a_handler_that_holds_itself_is_garbage() -> None:
    class Holder:
        handle = None

        def fallback(self, at_ns: int, data: bytes) -> bool:
            return False

    holder = Holder()
    holder.handle = handler(print, holder.fallback, holder.fallback)
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
        self.socket.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self.peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.recvmsg, self.fd, self.last_ns = self.socket.recvmsg, self.socket.fileno(), 0
        exchange = None if feed is None else SimpleNamespace(feed=feed)
        self.receiver = SimpleNamespace(exchange=exchange)
        epoll.register(self.fd, select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET)

    def close(self) -> None:
        self.socket.close()
        self.peer.close()


def ready(
    epoll: select.epoll,
    *wires: Wire,
    most: int = 64,
    audit: tuple[int, int] = (0, 1),
    by_kernel: bool = True,
) -> Any:
    """The reads in the order of the wires, chunks that repeat noted by whoever reads."""
    by_fd: list[Wire | None] = [None] * (max(w.fd for w in wires) + 1)
    for wire in wires:
        by_fd[wire.fd] = wire
    # until the first of them has come; sent on this machine, so have the others
    select.select([epoll], [], [], 1.0)
    count, near, reads, again, delays_ns = hot_path.read_ready(
        epoll, by_fd, most, NEAR_TURNS * TURN_NS, *audit, by_kernel
    )
    left = []
    for wire, at_ns, data in reads:
        feed = None if wire.receiver.exchange is None else wire.receiver.exchange.feed
        if feed is None or isinstance(data, OSError) or not data or feed(at_ns, data):
            left.append((wires.index(wire), data))
    left.sort(key=lambda item: item[0])
    return count, near, left, [wires.index(w) for w in again], len(delays_ns)


@linux
@either_way
def test_a_turn_notes_what_repeats_and_hands_on_the_rest() -> None:
    """Six sockets: a known chunk, another, an unrequested one, the end, a break, silence."""
    noted = array("q")
    with select.epoll() as epoll:

        def take(at_ns: int, data: bytes) -> bool:
            return data != CHUNK or bool(noted.append(at_ns))

        if hot_path.COMPILED:
            take = handler(noted.append, lambda at_ns, data: True)
        wires = [Wire(epoll, None if i == 2 else take) for i in range(6)]
        for wire, sent in zip(wires[:3], (CHUNK, CHUNK[:-1], b"what?"), strict=True):
            wire.peer.send(sent)
        wires[3].peer.close()
        # closed at once, with a reset
        wires[4].peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        wires[4].peer.close()
        count, _, left, again, _ = ready(epoll, *wires)
        for wire in wires:
            wire.close()
    assert count == 5
    assert left[:-1] == [(1, CHUNK[:-1]), (2, b"what?"), (3, b"")]
    assert (left[3][0], type(left[3][1]), left[3][1].errno) == (4, ConnectionResetError, 104)
    assert again == [3]  # there was more to tell than that it can be read
    assert len(noted) == 1
    assert 0 < noted[0] == wires[0].last_ns


@linux
@dated
@either_way
def test_reads_are_dated_when_they_came_counted_as_near_and_audited_as_asked() -> None:
    """Ten sockets, seven with a latest read after this one: near, and no time goes back.

    Of ten reads the third, sixth and ninth are audited."""
    dates: list[int] = []
    with select.epoll() as epoll:
        wires = [Wire(epoll, lambda at_ns, data: bool(dates.append(at_ns))) for _ in range(10)]
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
    assert all(before_ns - CLOCKS_NS <= at_ns <= after_ns + CLOCKS_NS for at_ns in dates)
    assert sorted(dates)[3:] == [after_ns + CLOCKS_NS] * 7
    assert [wire.last_ns for wire in wires].count(after_ns + CLOCKS_NS) == 7


@linux
@dated
@either_way
def test_without_kernel_dates_a_read_has_its_own_time_and_its_delay_is_audited() -> None:
    dates: list[int] = []
    with select.epoll() as epoll:
        wire = Wire(epoll, lambda at_ns, data: bool(dates.append(at_ns)))
        wire.peer.send(b"x")
        time.sleep(0.005)
        before_ns = time.monotonic_ns()
        *_, audited = ready(epoll, wire, by_kernel=False)
        wire.close()
    assert before_ns <= dates[-1] <= time.monotonic_ns()
    assert audited == 1


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
        assert hot_path.read_ready(epoll, [], 8, NEAR_TURNS * TURN_NS, 0, 1, True)[:3] == (1, 0, [])
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
