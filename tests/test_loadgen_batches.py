"""Events that are read many at a time say what they say one by one, and no end of a response is overlooked."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from streams.playing import in_pieces

from loadgen.completions import Answer
from loadgen.exchange import Exchange
from loadgen.records import RequestRecord

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
FINISH = b'{"choices":[{"delta":{},"finish_reason":"stop"}]}'


class OneByOne(Answer):
    """Reads no batch."""

    __slots__ = ()
    has_texts = False


def text(content: str = "a", **more: Any) -> bytes:
    value = {"choices": [{"index": 0, "delta": {"content": content}}], **more}
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def counted(total: int) -> bytes:
    return text(usage={"prompt_tokens": 7, "completion_tokens": total})


def chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


def event(data: bytes) -> bytes:
    return chunk(b"data: " + data + b"\n\n")


def opened(answer: type[Answer] = Answer) -> Exchange:
    record = RequestRecord(0, 0, 0, "unfinished", started_ns=0)
    exchange = Exchange(record, b"", lambda _: None, answer)
    exchange.listen()
    return exchange


def played(reads: list[bytes], answer: type[Answer] = Answer, *, bytewise: bool = False) -> Exchange:
    """After ``reads``, one a millisecond; ``bytewise``: each comes byte by byte, at its time."""
    exchange = opened(answer)
    for ms, data in enumerate(reads, 1):
        for i in range(len(data)) if bytewise else (slice(None),):
            exchange.feed(ms * 1_000_000, data[i : i + 1] if isinstance(i, int) else data)
    exchange.eof(10**9)
    return exchange


def alike(events: list[bytes]) -> Exchange:
    """The stream of these events read in batches, which must say what it says read slowly."""
    reads = [HEAD, *map(event, [*events, FINISH, b"[DONE]"]), b"0\r\n\r\n"]
    fast, slow = played(reads), played(reads, OneByOne, bytewise=True)
    fast.record.error = fast.record.error and fast.record.error[:30]  # where in a batch it stood is not said
    slow.record.error = slow.record.error and slow.record.error[:30]
    assert fast.record == slow.record
    assert fast.pieces() == slow.pieces()
    return fast


PLAIN = [text()] * 10
ODD = {
    "a value in two events, then two in one": [b'{"choices":[{"delta":', b'{"content":"x"}}]}', text() + text()],
    "split at a comma": [b'{"choices":[{"delta":{"content":"x"}}]', b'"usage":null}', text() + b"," + text()],
    "split in a text": [b'{"choices":[{"delta":{"content":"x', b'"}}]}', text() + text()],
    "split between two objects": [b'{"choices":[{"delta":{"content":"x"}}],"y":[{}', b"{}]}", text() + b"," + text()],
    "nothing, then two": [b"", text() + text()],
    "a space, then two": [b" ", text() + text()],
    "two in one": [text() + b" " + text()],
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_values_that_are_no_event_of_their_own_bear_no_tokens(odd: str) -> None:
    record = alike(PLAIN + ODD[odd] + PLAIN).record
    assert (record.status, record.output_tokens) == ("protocol_error", 20)


def test_running_totals_in_one_event_are_not_taken_apart() -> None:
    events = [*map(counted, range(1, 11)), b" ", counted(11) + counted(12), *map(counted, range(13, 23))]
    record = alike(events).record
    assert (record.status, len(record.chunk_at_us), record.output_tokens) == ("protocol_error", 20, 22)


@pytest.mark.parametrize(
    "wrong",
    [
        b'{"choices":[{"delta":{"content":"x"},"message":5}]}',
        b'{"choices":[{"delta":{"content":"x","reasoning":"\xff"}}]}',
        b'{"choices":[{"delta":{"content":"x"}}],"detail":1e999}',
        b'{"choices":[{"delta":{"content":"x"}}],"usage":{"completion_tokens":3,"prompt_tokens":1e999}}',
    ],
)
def test_what_is_wrong_beside_the_text_is_wrong_in_a_batch_too(wrong: bytes) -> None:
    record = alike([*PLAIN, wrong, *PLAIN]).record
    assert (record.status, len(record.chunk_at_us)) == ("protocol_error", 20)


BODIES = st.sampled_from([
    text(), text(), text("é\u2028"), text('","x":[{'), text("}{"), text("\\"), text(""), text(usage=None), counted(3), counted(4),
    text(error=None), text(error={"message": "no"}), text(detail="x"), b'{"choices":[{"delta":{"content":"x"}}],"y":[{},{"a":"b"}]}',
    b"null", b"{}", b"",
])  # fmt: skip
GLUE = st.sampled_from([b"", b" ", b",", b"{}", b"]", b"}"])


@st.composite
def events_of_any_cut(draw: st.DrawFn) -> list[bytes]:
    """Texts, some of them put together in one event, some cut where a comma or a quotation mark stands, or anywhere."""
    found: list[bytes] = []
    for body in draw(st.lists(BODIES, min_size=4, max_size=24)):
        how = draw(st.integers(0, 9))
        if how == 0 and found:
            found[-1] += draw(GLUE) + body
        elif how == 1:
            marks = [i for i, c in enumerate(body) if c in b',"{}'] or [0]
            at = draw(st.sampled_from(marks) | st.integers(0, len(body)))
            found += [body[:at], body[at + draw(st.integers(0, 1)) :]]
        else:
            found.append(body)
    return found


@settings(max_examples=150, deadline=None)
@given(events=events_of_any_cut())
def test_batches_say_the_same_as_single_events(events: list[bytes]) -> None:
    alike(events)
    stamps = list(range(len(events)))
    batch, single = Answer(), OneByOne()
    batch.on_events(stamps, events)  # as they come over TLS or without chunks
    single.on_events(stamps, events)
    assert (batch.chunk_at_ns, batch.chunk_tokens) == (single.chunk_at_ns, single.chunk_tokens)
    assert (batch.error, batch.bad_json is None) == (single.error, single.bad_json is None)


def test_an_event_without_end_before_texts_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last bytes are parsed and not yet decoded when whole chunks of text follow."""
    monkeypatch.setattr("loadgen.bodies.WHOLE_BODY_BYTES", 20_000)
    exchange = opened()
    reads = [HEAD, event(text()), event(text()), chunk(b"data: " + b"y" * 19_900), chunk(b"y" * 200)]
    for ms, data in enumerate([*reads, *[event(text())] * 12, b"rest"], 1):
        exchange.feed(ms * 1_000_000, data)
    record = exchange.record
    assert (exchange.ended, record.status, record.output_tokens) == (True, "protocol_error", 2)
    assert "an event of more than" in (record.error or "")


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_response_ends_with_the_read_that_holds_its_end(data: st.DataObject) -> None:
    """Whatever follows in that read, it looks like an event that ends its chunk, and however it is cut before."""
    last = data.draw(
        st.sampled_from([b"0\r\n\r\n", b"000\r\n\r\n", b"0\r\nX-T: 1\r\n\r\n", b"0;ext=1\r\n\r\n"])
    )
    rest = data.draw(
        st.sampled_from([b"", b"junk\n\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n\n\n\r\n", event(text())])
    )
    chunks = [
        chunk(b"data: " + text() + b"\n\n" * n) for n in data.draw(st.lists(st.integers(1, 2), max_size=12))
    ]
    before = HEAD + event(text()) + b"".join(chunks) + event(FINISH) + event(b"[DONE]")
    edges, at = [], len(HEAD + event(text()))
    for piece in chunks:
        edges.append(at := at + len(piece))
    near = [st.integers(len(before) - 4, len(before) + len(last) - 1)]
    cuts = data.draw(st.lists(st.one_of(st.sampled_from(edges or [1]), *near), max_size=16))
    exchange, read = opened(), 0
    for ms, piece in enumerate(in_pieces(before + last + rest, set(cuts)), 1):
        assert not exchange.ended
        exchange.feed(ms * 1_000_000, piece)
        read += len(piece)
        if read >= len(before + last):
            break
    assert (exchange.ended, exchange.record.status) == (True, "ok")
    assert exchange.record.output_tokens == len(chunks) + 1
