"""The event splitter against a slow reference implementation of the HTML standard."""

import dataclasses
import json
import re
import time

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from ampacity.loadgen.receive.sse import EventSplitter
from ampacity.loadgen.rundir.records import RequestRecord
from tests.streams.playing import NAMES, in_pieces, play, raw
from tests.support.repeats import often


def reference(body: bytes) -> list[bytes]:
    """Events of a whole body by the HTML standard, 9.2.6, on bytes, slowly.

    Two intended differences: an event with empty data is kept (the standard dispatches none), and
    so is a last one without its blank line. Errors outside of data are left out here."""
    body = body.removeprefix(b"\xef\xbb\xbf")
    events: list[bytes] = []
    data: list[bytes] | None = None
    for line in re.split(rb"\r\n|\n|\r", body):
        if line == b"":
            if data is not None:
                events.append(b"\n".join(data))
            data = None
            continue
        if line.startswith(b":"):
            continue
        name, colon, value = line.partition(b":")
        if colon and value.startswith(b" "):
            value = value[1:]
        if name == b"data":
            data = [*(data or []), value]
    if data is not None:
        events.append(b"\n".join(data))
    return events


def split(pieces: list[bytes]) -> list[bytes]:
    splitter = EventSplitter()
    return [event for piece in pieces for event in splitter.feed(piece)] + splitter.finish()


_LINES = b"data: x|data:x|data|data:|data: |: ping|:|id: 1|event: m|retry: 5|dat|datax: y"
_LINES += b"| data: y|data : y|data:  two spaces|||"
_LINE = st.one_of(
    st.sampled_from(_LINES.split(b"|")),
    st.text(max_size=8).map(lambda s: b"data: " + re.sub(r"[\r\n]", "\u2028\x85", s).encode()),
)
_BODY = st.builds(
    lambda bom, lines: bom + b"".join(line + end for line, end in lines),
    st.sampled_from([b"", b"\xef\xbb\xbf"]),
    st.lists(st.tuples(_LINE, st.sampled_from([b"\n", b"\n", b"\r\n", b"\r"])), max_size=25),
)


@settings(max_examples=often(75, 300), deadline=None)
@given(body=_BODY, data=st.data())
@example(body=b"\xef\xbb\xbfdata: x\r\n\r\n", data=None)
@example(body=b"data: x\r\r\n\ndata: y\n\r\n", data=None)
def test_random_bodies_in_random_pieces(body: bytes, data: st.DataObject | None) -> None:
    expected = reference(body)
    assert split([body]) == expected
    assert split([body[i : i + 1] for i in range(len(body))]) == expected
    if data is not None and body:
        cuts = data.draw(st.lists(st.integers(1, len(body)), max_size=12))
        assert split(in_pieces(body, cuts)) == expected


@given(body=st.binary(max_size=60))
def test_any_bytes_at_all(body: bytes) -> None:
    assume(not re.search(rb'error|exception|"', body.lower()))  # an error may stand anywhere
    expected = reference(body)
    for size in (1, 2, 3, 60):
        assert split([body[i : i + size] for i in range(0, len(body), size)]) == expected


@settings(max_examples=often(15, 60), deadline=None)
@given(name=st.sampled_from(NAMES), data=st.data())
def test_streams_in_random_pieces_give_the_same_record(name: str, data: st.DataObject) -> None:
    response = raw(name)
    cuts = data.draw(st.lists(st.integers(1, len(response) - 1), max_size=40))
    assert _content(play(enumerate(in_pieces(response, cuts)))) == _content(play([(0, response)]))


def _content(record: RequestRecord) -> RequestRecord:
    """The record without times."""
    times = {f.name: 0 for f in dataclasses.fields(record) if f.name.endswith("_ns")}
    return dataclasses.replace(record, chunk_at_us=[0] * len(record.chunk_at_us), **times)


@pytest.mark.parametrize(
    "reads",
    [
        [
            (b"data: a", []),
            (b"\n", []),
            (b"\ndata: b\n\ndata: c\n\nda", [b"a", b"b", b"c"]),
            (b"ta: d\n\n", [b"d"]),
        ],
        # CRLF cut between its bytes is one end of a line
        [(b"data: a\r", []), (b"\ndata: b\r\n\r", [b"a\nb"]), (b"\ndata: c\r\n\r\n", [b"c"])],
    ],
)
def test_an_event_comes_with_the_read_that_has_its_blank_line(
    reads: list[tuple[bytes, list[bytes]]],
) -> None:
    splitter = EventSplitter()
    assert [splitter.feed(read) for read, _ in reads] == [events for _, events in reads]
    assert splitter.finish() == []


def test_multi_line_data_is_joined_with_line_feeds() -> None:
    assert split([b'data: {"a":\ndata: 1}\n\n']) == [b'{"a":\n1}']


def test_comments_are_counted_and_are_no_events() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b": ping\n\n:\n\n") == []
    assert splitter.feed(b": with data\ndata: x\n\n") == [b"x"]
    assert splitter.comments == 3


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1e"])
def test_only_lf_cr_and_crlf_end_a_line(separator: str) -> None:
    event = json.dumps({"text": f"a{separator}b"}, ensure_ascii=False).encode()
    assert split([b"data: " + event + b"\n\n"]) == [event]
    among_others = b"event: m\nid: 1\ndata: " + event + b"\n: x\n\n"
    assert split([among_others]) == [event]


def test_a_four_byte_character_cut_anywhere() -> None:
    event = '{"t":"\N{CRAB}\u2028\x85é"}'.encode()
    body = b"data: " + event + b"\n\n"
    for offset in range(1, len(body)):
        assert split([body[:offset], body[offset:]]) == [event]


def test_ten_megabytes_in_one_event_take_linear_time() -> None:
    """160 pieces of 64 KiB; a search that begins anew for each piece would look at 800 MB."""
    event = b"x" * 10_485_760
    body = b"data: " + event + b"\n\n"
    began = time.process_time()
    pieces = [body[i : i + 65_536] for i in range(0, len(body), 65_536)]
    assert split(pieces) == [event]
    assert time.process_time() - began < 2.0
