"""The ways in which ``fault_server`` answers a request, down to the bytes on the socket."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import struct
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

HEADERS = "Content-Type: text/event-stream\r\n"
MAX_TOKENS = 1024


@dataclass
class Request:
    """What arrived: ``connection`` is the number of the connection, ``at_ns`` the time (monotonic)."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    connection: int
    at_ns: int
    fault: str = "ok"

    @property
    def tokens(self) -> int:
        asked = self.body.get("max_tokens", self.body.get("max_completion_tokens", 4))
        return min(int(asked), MAX_TOKENS)


@dataclass
class Call:
    """One request and the means to answer it."""

    request: Request
    writer: asyncio.StreamWriter
    gap_s: float = 0.0

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(
        self, more: str = "Transfer-Encoding: chunked\r\n", status: str = "200 OK"
    ) -> None:
        await self.send(f"HTTP/1.1 {status}\r\n{HEADERS}{more}\r\n".encode())

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    async def token(self, n: int = 0) -> None:
        await self.chunk(event(delta(f"t{n} ")))
        await asyncio.sleep(self.gap_s)

    async def answer(
        self, status: str, body: bytes, more: str = "Content-Type: application/json\r\n"
    ) -> None:
        await self.send(
            f"HTTP/1.1 {status}\r\n{more}Content-Length: {len(body)}\r\n\r\n".encode() + body
        )

    def reset(self) -> None:
        """Break the connection with RST instead of FIN."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    def whole(self) -> bytes:
        """The body of a good answer."""
        n = self.request.tokens
        return role() + b"".join(event(delta(f"t{i} ")) for i in range(n)) + ending(n)


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def delta(text: str | None = None, finish: str | None = None) -> dict[str, Any]:
    content: dict[str, Any] = {} if text is None else {"content": text}
    return {
        "id": "c",
        "choices": [{"index": 0, "delta": content, "text": text, "finish_reason": finish}],
    }


def role() -> bytes:
    return event(
        {"id": "c", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    )


def usage(tokens: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": tokens}})


def ending(tokens: int) -> bytes:
    return event(delta(finish="length")) + usage(tokens) + b"data: [DONE]\n\n"


# -- the ways to answer; False: the connection ends here -------------------------------------------


async def ok(x: Call) -> bool:
    await x.head()
    await x.chunk(role())
    for i in range(x.request.tokens):
        await x.token(i)
    await x.chunk(ending(x.request.tokens))
    await x.send(b"0\r\n\r\n")
    return True


async def late(x: Call) -> bool:
    """A good answer after 1 s of nothing."""
    await asyncio.sleep(1.0)
    return await ok(x)


async def _begin(x: Call, tokens: int = 2) -> None:
    await x.head()
    await x.chunk(role())
    for i in range(tokens):
        await x.token(i)


async def reset_before_headers(x: Call) -> bool:
    x.reset()
    return False


async def close_before_headers(x: Call) -> bool:
    return False


async def reset_mid_headers(x: Call) -> bool:
    await x.send(b"HTTP/1.1 200 OK\r\nContent-Ty")
    await asyncio.sleep(0.02)
    x.reset()
    return False


async def reset_mid_stream(x: Call) -> bool:
    await _begin(x)
    await asyncio.sleep(0.5)  # a reset may overtake what the peer has not read yet
    x.reset()
    return False


async def close_mid_stream(x: Call) -> bool:
    await _begin(x)
    return False


async def no_done(x: Call) -> bool:
    await _begin(x)
    await x.chunk(event(delta(finish="stop")))
    await x.send(b"0\r\n\r\n")
    return True


async def no_done_no_finish(x: Call) -> bool:
    await _begin(x)
    await x.send(b"0\r\n\r\n")
    return True


async def endless(x: Call) -> bool:
    await _begin(x, 1)
    while not x.writer.is_closing():
        await x.token()
        await asyncio.sleep(0.05)
    return False


async def stall(x: Call) -> bool:
    await _begin(x)
    return await _wait_for_the_peer(x)


async def slow_headers(x: Call) -> bool:
    return await _wait_for_the_peer(x)


async def headers_then_nothing(x: Call) -> bool:
    await x.head()
    return await _wait_for_the_peer(x)


async def _wait_for_the_peer(x: Call) -> bool:
    for _ in range(1200):
        if x.writer.is_closing():
            break
        await asyncio.sleep(0.05)
    return False


def refusal(status: str, body: str = "", more: str = "") -> Callable[[Call], Awaitable[bool]]:
    """A complete answer with this status."""

    async def play(x: Call) -> bool:
        await x.answer(status, body.encode(), more)
        return "close" not in more

    return play


async def error_cut_short(x: Call) -> bool:
    await x.send(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 999\r\n\r\nupstream is gone")
    return False


async def error_event(x: Call) -> bool:
    await _begin(x)
    await x.chunk(event({"error": {"message": "out of memory", "code": 500}}) + b"data: [DONE]\n\n")
    await x.send(b"0\r\n\r\n")
    return True


async def invalid_json(x: Call) -> bool:
    await _begin(x)
    await x.chunk(b'data: {"choices": [\n\n' + ending(2))
    await x.send(b"0\r\n\r\n")
    return True


async def invalid_utf8(x: Call) -> bool:
    await _begin(x)
    await x.chunk(b'data: {"choices":[{"text":"\xff\xfe"}]}\n\n' + ending(2))
    await x.send(b"0\r\n\r\n")
    return True


async def big_event(x: Call) -> bool:
    """One event of 10 MiB."""
    await x.head()
    text = b"x" * 10_485_760
    await x.chunk(b'data: {"choices":[{"delta":{"content":"' + text + b'"}}]}\n\n')
    await x.chunk(ending(1))
    await x.send(b"0\r\n\r\n")
    return True


async def _rewritten(x: Call, change: Callable[[bytes], bytes]) -> bool:
    await x.head()
    body = change(x.whole())
    for i in range(0, len(body), 61):  # lines and events are cut anywhere
        await x.chunk(body[i : i + 61])
    await x.send(b"0\r\n\r\n")
    return True


async def crlf(x: Call) -> bool:
    return await _rewritten(x, lambda body: body.replace(b"\n", b"\r\n"))


async def cr(x: Call) -> bool:
    return await _rewritten(x, lambda body: body.replace(b"\n", b"\r"))


async def comments(x: Call) -> bool:
    return await _rewritten(
        x, lambda body: b":\n\n" + body.replace(b"data:", b": ping\n\n: x\ndata:")
    )


async def multi_line(x: Call) -> bool:
    return await _rewritten(x, lambda body: body.replace(b', "choices"', b',\ndata: "choices"'))


async def unknown_fields(x: Call) -> bool:
    return await _rewritten(
        x, lambda body: body.replace(b"data:", b"event: m\nid: 1\nfoo: bar\ndata:")
    )


async def separators(x: Call) -> bool:
    """U+2028, U+0085 and a 4-byte character inside the text."""
    return await _rewritten(x, lambda body: body.replace(b"t0 ", "t\u2028\x85\N{CRAB}".encode()))


async def tokens_after_finish(x: Call) -> bool:
    await x.head()
    await x.chunk(
        event(delta("a")) + event(delta(finish="stop")) + event(delta("b")) + event(delta("c"))
    )
    await x.send(b"0\r\n\r\n")
    return True


async def byte_by_byte(x: Call) -> bool:
    response = b"HTTP/1.1 200 OK\r\n" + HEADERS.encode() + b"Content-Length: %d\r\n\r\n%b"
    for byte in response % (len(x.whole()), x.whole()):
        await x.send(bytes([byte]))
    return True


async def stream_as_json(x: Call) -> bool:
    await x.answer("200 OK", x.whole())
    return True


async def not_streamed(x: Call) -> bool:
    value = {
        "choices": [{"message": {"content": "a b"}, "finish_reason": "stop"}],
        "usage": {"completion_tokens": 2},
    }
    await x.answer("200 OK", json.dumps(value).encode())
    return True


async def empty(x: Call) -> bool:
    await x.head()
    await x.chunk(role() + event(delta(finish="stop")) + b"data: [DONE]\n\n")
    await x.send(b"0\r\n\r\n")
    return True


async def gzipped(x: Call) -> bool:
    await x.answer("200 OK", gzip.compress(x.whole()), HEADERS + "Content-Encoding: gzip\r\n")
    return True


async def gzipped_stream(x: Call) -> bool:
    """Compressed on the way, in chunks that end anywhere."""
    await x.head("Transfer-Encoding: chunked\r\nContent-Encoding: gzip\r\n")
    body = gzip.compress(x.whole())
    for i in range(0, len(body), 40):
        await x.chunk(body[i : i + 40])
    await x.send(b"0\r\n\r\n")
    return True


async def gzip_broken(x: Call) -> bool:
    body = gzip.compress(x.whole())
    await x.answer(
        "200 OK", body[:20] + b"?" * 20 + body[40:], HEADERS + "Content-Encoding: gzip\r\n"
    )
    return True


async def stream_as_text(x: Call) -> bool:
    await x.answer("200 OK", x.whole(), "Content-Type: text/plain\r\n")
    return True


async def slow_good_headers(x: Call) -> bool:
    """Line by line, a tenth of a second each, and then a good answer."""
    for line in ("HTTP/1.1 200 OK\r\n", HEADERS, f"Content-Length: {len(x.whole())}\r\n", "\r\n"):
        await x.send(line.encode())
        await asyncio.sleep(0.1)
    await x.send(x.whole())
    return True


async def short_body(x: Call) -> bool:
    await x.head("Content-Length: 99999\r\n")
    await x.send(event(delta("a")))
    return False


async def close_delimited(x: Call) -> bool:
    await x.head("")
    await x.send(x.whole())
    return False


async def says_close(x: Call) -> bool:
    """A good answer, announced to be the connection's last."""
    await x.head("Transfer-Encoding: chunked\r\nConnection: close\r\n")
    await x.chunk(x.whole())
    await x.send(b"0\r\n\r\n")
    return False


async def http_10(x: Call) -> bool:
    """As a server of HTTP/1.0 answers: no length, no chunks, the close is the end."""
    await x.send(f"HTTP/1.0 200 OK\r\n{HEADERS}\r\n".encode())
    await x.send(x.whole())
    return False


async def chunked_trailers(x: Call) -> bool:
    """The last chunk is followed by header lines, one of which would end the connection if it were
    a header.
    """
    await x.head("Transfer-Encoding: chunked\r\nTrailer: X-Checksum\r\n")
    await x.chunk(x.whole())
    await x.send(b"0\r\nX-Checksum: 12\r\nX-Took: 5ms\r\n\r\n")
    return True


async def with_bom(x: Call) -> bool:
    return await _rewritten(x, lambda body: b"\xef\xbb\xbf" + body)


async def heartbeats(x: Call) -> bool:
    """A comment before the answer, while it is made, between its tokens and behind it; retry and id
    fields.
    """
    await x.head()
    for _ in range(3):
        await x.chunk(b": heartbeat\n\n")
        await asyncio.sleep(0.02)
    await x.chunk(b"retry: 3000\n\nid: 1\n\nevent: ping\n\n")
    for i in range(x.request.tokens):
        await x.chunk(b"id: %d\nretry: 10\n" % i + event(delta(f"t{i} ")))
        await x.chunk(b":\n\n")
    await x.chunk(ending(x.request.tokens) + b": bye\n\n")
    await x.send(b"0\r\n\r\n")
    return True


async def endless_headers(x: Call) -> bool:
    """Header lines for as long as the peer takes them, a hundred MiB at most."""
    await x.send(b"HTTP/1.1 200 OK\r\n")
    for _ in range(1600):
        if x.writer.is_closing():
            break
        await x.send(b"X-Filler: " + b"a" * 65_536 + b"\r\n")
    return False


async def _forever(x: Call, head: bytes, part: bytes, pause_s: float = 0.0) -> bool:
    """Send ``head``, then ``part`` for as long as the peer takes it, a gigabyte at most."""
    await x.send(head)
    for _ in range(2**30 // len(part)):
        if x.writer.is_closing():
            break
        await x.send(part)
        await asyncio.sleep(pause_s)
    return False


def forever(head: str, part: bytes, pause_s: float = 0.0) -> Callable[[Call], Awaitable[bool]]:
    """``head`` is the rest of the header of a good answer, or of another one from "HTTP/" on."""
    whole = head if head.startswith("HTTP/") else f"HTTP/1.1 200 OK\r\n{HEADERS}{head}\r\n"
    return lambda x: _forever(x, whole.encode(), part, pause_s)


@cache
def _bomb() -> bytes:
    """256 KiB of gzip that unfold to 256 MiB."""
    packing = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)
    return b"".join(packing.compress(bytes(2**20)) for _ in range(2**8)) + packing.flush()


async def gzip_bomb(x: Call) -> bool:
    await x.answer("200 OK", _bomb(), HEADERS + "Content-Encoding: gzip\r\n")
    return True


async def ten_thousand_choices(x: Call) -> bool:
    await x.head()
    each = [{"index": i, "delta": {"content": "t"}} for i in range(10_000)]
    await x.chunk(event({"choices": each}) + ending(1))
    await x.send(b"0\r\n\r\n")
    return True


async def three_choices(x: Call) -> bool:
    """Three choices, of which nobody asked for more than one."""
    await x.head()
    for i in range(x.request.tokens):
        for index in range(3):
            await x.chunk(event({"choices": [{"index": index, "delta": {"content": f"t{i} "}}]}))
    await x.chunk(ending(3 * x.request.tokens))
    await x.send(b"0\r\n\r\n")
    return True


def broken_off(error: bytes) -> Callable[[Call], Awaitable[bool]]:
    """Two tokens, the error as these bytes, and an end as if all were well."""

    async def play(x: Call) -> bool:
        await _begin(x)
        await x.chunk(error)
        await x.chunk(b"data: [DONE]\n\n")
        await x.send(b"0\r\n\r\n")
        return True

    return play


def encoded(
    coding: str, encode: Callable[[bytes], bytes], step: int = 37
) -> Callable[[Call], Awaitable[bool]]:
    """An answer in a content coding that nobody asked for, in chunks that end anywhere."""

    async def play(x: Call) -> bool:
        await x.head(f"Transfer-Encoding: chunked\r\nContent-Encoding: {coding}\r\n")
        body = encode(x.whole())
        for i in range(0, len(body), step):
            await x.chunk(body[i : i + step])
        await x.send(b"0\r\n\r\n")
        return True

    return play


def raw_deflate(body: bytes) -> bytes:
    """Without zlib's header, as some servers take the name to mean."""
    squeezed = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return squeezed.compress(body) + squeezed.flush()


def members(body: bytes) -> bytes:
    """Each event a gzip file of its own."""
    return b"".join(gzip.compress(event + b"\n\n") for event in body.split(b"\n\n") if event)


async def continue_100(x: Call) -> bool:
    await x.send(b"HTTP/1.1 100 Continue\r\n\r\n")
    return await ok(x)


async def garbage(x: Call) -> bool:
    await x.send(b"\x00\x01 this is no HTTP\r\n\r\n" * 3)
    return False


async def tls_alert(x: Call) -> bool:
    """What a TLS server answers to plain HTTP."""
    await x.send(b"\x15\x03\x01\x00\x02\x02\x46")
    return False


async def two_responses(x: Call) -> bool:
    """In one write, so that the second one is there before the client can use the connection again."""
    body = x.whole()
    response = f"HTTP/1.1 200 OK\r\n{HEADERS}Content-Length: {len(body)}\r\n\r\n".encode() + body
    await x.send(response + response)
    return True


async def close_after_answer(x: Call) -> bool:
    """A good answer, and the kept-alive connection is closed without a word."""
    await ok(x)
    return False


async def drop(x: Call) -> bool:
    """Read, worked on for a while, and dropped: the connection is closed without a byte."""
    await asyncio.sleep(0.05)
    return False


class Fault(NamedTuple):
    """``status`` the client must record; ``tokens`` received (None: none, -1: as many as asked for,
    -2: some).
    """

    play: Callable[[Call], Awaitable[bool]]
    status: str
    tokens: int | None = None
    http: int | None = 200


FAULTS: dict[str, Fault] = {
    "ok": Fault(ok, "ok", -1),
    "late": Fault(late, "ok", -1),
    "reset_before_headers": Fault(reset_before_headers, "reset", http=None),
    "close_before_headers": Fault(close_before_headers, "reset", http=None),
    "reset_mid_headers": Fault(reset_mid_headers, "reset", http=None),
    "reset_mid_stream": Fault(reset_mid_stream, "truncated", 2),
    "close_mid_stream": Fault(close_mid_stream, "truncated", 2),
    "no_done": Fault(no_done, "ok", 2),
    "no_done_no_finish": Fault(no_done_no_finish, "truncated", 2),
    "endless": Fault(endless, "timeout", -2),
    "stall": Fault(stall, "timeout", 2),
    "slow_headers": Fault(slow_headers, "timeout", http=None),
    "headers_then_nothing": Fault(headers_then_nothing, "timeout"),
    "bad_request": Fault(
        refusal("400 Bad Request", '{"error":{"message":"x is wrong"}}'), "http_error", http=400
    ),
    "not_found_html": Fault(
        refusal("404 Not Found", "<html>\n<h1>404</h1>\n</html>", "Content-Type: text/html\r\n"),
        "http_error",
        http=404,
    ),
    "forbidden_empty": Fault(refusal("403 Forbidden"), "http_error", http=403),
    "empty_500": Fault(refusal("500 Internal Server Error"), "http_error", http=500),
    "rate_limited": Fault(
        refusal("429 Too Many Requests", '{"error":"slow down"}', "Retry-After: 3\r\n"),
        "http_error",
        http=429,
    ),
    "unavailable": Fault(
        refusal("503 Service Unavailable", more="Retry-After: 2\r\nConnection: close\r\n"),
        "http_error",
        http=503,
    ),
    "error_cut_short": Fault(error_cut_short, "http_error", http=502),
    "error_event": Fault(error_event, "stream_error", 2),
    "invalid_json": Fault(invalid_json, "protocol_error", 2),
    "invalid_utf8": Fault(invalid_utf8, "protocol_error", 2),
    "big_event": Fault(big_event, "ok", 1),
    "crlf": Fault(crlf, "ok", -1),
    "cr": Fault(cr, "ok", -1),
    "comments": Fault(comments, "ok", -1),
    "multi_line": Fault(multi_line, "ok", -1),
    "unknown_fields": Fault(unknown_fields, "ok", -1),
    "separators": Fault(separators, "ok", -1),
    "tokens_after_finish": Fault(tokens_after_finish, "ok", 3),
    "byte_by_byte": Fault(byte_by_byte, "ok", -1),
    "html_page": Fault(
        refusal("200 OK", "<html>log in</html>", "Content-Type: text/html\r\n"), "protocol_error"
    ),
    "stream_as_json": Fault(stream_as_json, "protocol_error"),
    "not_streamed": Fault(not_streamed, "ok", 2),
    "empty": Fault(empty, "empty"),
    "gzipped": Fault(gzipped, "ok", -1),
    "gzipped_stream": Fault(gzipped_stream, "ok", -1),
    "gzip_broken": Fault(gzip_broken, "protocol_error"),
    "stream_as_text": Fault(stream_as_text, "ok", -1),
    "slow_good_headers": Fault(slow_good_headers, "ok", -1),
    "redirect": Fault(
        refusal("307 Temporary Redirect", more="Location: http://elsewhere.test/v1\r\n"),
        "http_error",
        http=307,
    ),
    "short_body": Fault(short_body, "truncated", 1),
    "close_delimited": Fault(close_delimited, "ok", -1),
    "says_close": Fault(says_close, "ok", -1),
    "http_10": Fault(http_10, "ok", -1),
    "chunked_trailers": Fault(chunked_trailers, "ok", -1),
    "with_bom": Fault(with_bom, "ok", -1),
    "heartbeats": Fault(heartbeats, "ok", -1),
    "deflated": Fault(encoded("deflate", zlib.compress), "ok", -1),
    "deflated_byte_by_byte": Fault(encoded("deflate", zlib.compress, 1), "ok", -1),
    "raw_deflated": Fault(encoded("deflate", raw_deflate), "ok", -1),
    "gzip_members": Fault(encoded("X-GZIP", members), "ok", -1),
    "brotli": Fault(encoded("br", lambda body: b"\x0b" + body[:40]), "protocol_error"),
    "zstandard": Fault(
        encoded("zstd", lambda body: b"\x28\xb5\x2f\xfd" + body[:40]), "protocol_error"
    ),
    "brotli_refusal": Fault(
        refusal("400 Bad Request", "\x0b", "Content-Encoding: br\r\n"), "http_error", http=400
    ),
    "identity": Fault(encoded("identity", lambda body: body), "ok", -1),
    "continue_100": Fault(continue_100, "ok", -1),
    "endless_headers": Fault(endless_headers, "protocol_error", http=None),
    "many_headers": Fault(
        forever("HTTP/1.1 200 OK\r\n", b"X: 1\r\n" * 1000), "protocol_error", http=None
    ),
    "informational_forever": Fault(
        forever("HTTP/1.1 103 Early Hints\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\n\r\n" * 100),
        "protocol_error",
        http=None,
    ),
    "endless_chunk_extension": Fault(
        forever("Transfer-Encoding: chunked\r\n", b"5;" + b"a" * 65_536), "protocol_error"
    ),
    "slow_drip": Fault(forever("HTTP/1.1 200 OK\r\nX-Filler: ", b"a", 0.1), "timeout", http=None),
    "gzip_bomb": Fault(gzip_bomb, "protocol_error"),
    "line_without_end": Fault(forever("", b"data: " + b"x" * 2**20), "protocol_error"),
    "ten_thousand_choices": Fault(ten_thousand_choices, "protocol_error", 1),
    "three_choices": Fault(three_choices, "protocol_error", 3 * 4),
    "error_field": Fault(broken_off(b"error: out of memory\n\n"), "stream_error", 2),
    "error_bare": Fault(broken_off(b'{"error": "out of memory"}\n\n'), "stream_error", 2),
    "error_in_choice": Fault(
        broken_off(event({"choices": [{"index": 0, "delta": {}, "error": {"message": "lost"}}]})),
        "stream_error",
        2,
    ),
    "garbage": Fault(garbage, "protocol_error", http=None),
    "tls_alert": Fault(tls_alert, "protocol_error", http=None),
    "two_responses": Fault(two_responses, "ok", -1),
    "drop": Fault(drop, "reset", http=None),
    "close_after_answer": Fault(close_after_answer, "ok", -1),
}
"""Every fault that one request can have on a listening port, with what a client must record of it."""
