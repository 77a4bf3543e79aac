"""Plays recorded bytes of a response into an Exchange, as a socket would, without a socket."""

import json
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from ampacity.loadgen.receive.answers import ANSWERS
from ampacity.loadgen.receive.exchange import Exchange
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.send.protocols import Api

FOLDER = Path(__file__).parent
NAMES = sorted(path.stem for path in FOLDER.glob("*.http"))
MS = 1_000_000
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
ROLE = {
    "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]
}
FINISH = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}


def text(content: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": content}, **more}]}


def http_chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


def event(value: dict[str, Any] | str) -> bytes:
    return b"data: " + (value if isinstance(value, str) else json.dumps(value)).encode() + b"\n\n"


def chunk(*values: dict[str, Any] | str) -> bytes:
    """One HTTP chunk with these events."""
    return http_chunk(b"".join(event(v) for v in values))


OK = (text("a"), text("b"), FINISH)


def json_response(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body


def new_exchange(
    api: Api = "chat", on_end: Callable[[Exchange], None] = lambda _: None, *, keep: bool = False
) -> Exchange:
    """An exchange whose request started at 0; ``keep``: it keeps the text."""
    record = RequestRecord(0, 0, 0, "unfinished", started_ns=0)
    exchange = Exchange(record, b"request", on_end, ANSWERS[api])
    if keep:
        exchange.keep_text()
    return exchange


def raw(name: str) -> bytes:
    """The exact bytes of one small stream: status line, headers, framing, body."""
    return (FOLDER / f"{name}.http").read_bytes()


def play(
    reads: Iterable[tuple[int, bytes]], *, started_ns: int = 0, closed: bool = True
) -> RequestRecord:
    """The record after ``reads`` of (ns, bytes); then the peer closes, at the time of the last
    read."""
    record = RequestRecord(
        request_id=0, stage=0, scheduled_ns=started_ns, status="unfinished", started_ns=started_ns
    )
    ends: list[Exchange] = []
    exchange = Exchange(record, b"", ends.append)
    at_ns = started_ns
    for at_ns, data in reads:
        exchange.feed(at_ns, data)
    if closed:
        exchange.eof(at_ns)
    assert len(ends) == int(exchange.ended)
    return record


def in_pieces(data: bytes, cuts: Iterable[int]) -> list[bytes]:
    """``data`` cut at the given offsets."""
    edges = [0, *sorted(cuts), len(data)]
    return [data[a:b] for a, b in pairwise(edges) if b > a]
