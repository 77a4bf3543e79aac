"""The ways in which ``fault_server`` answers a request, down to the bytes on the socket."""

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

Play = Callable[[Call], Awaitable[bool]]
Part = bytes | Callable[[Call], bytes]
DONE, LAST = b"data: [DONE]\n\n", b"0\r\n\r\n"


async def _begin(x: Call, tokens: int = 2) -> None:
    await x.head()
    await x.chunk(role())
    for i in range(tokens):
        await x.token(i)


async def ok(x: Call) -> bool:
    await _begin(x, x.request.tokens)
    await x.chunk(ending(x.request.tokens))
    await x.send(LAST)
    return True


def chunks(*parts: Part, tokens: int | None = None, more: str = "", last: bytes = LAST) -> Play:
    """The role and some ``tokens`` (None: neither), then each part as a chunk, and the end."""

    async def play(x: Call) -> bool:
        if tokens is None:
            await x.head("Transfer-Encoding: chunked\r\n" + more)
        else:
            await _begin(x, tokens)
        for part in parts:
            await x.chunk(part(x) if callable(part) else part)
        await x.send(last)
        return "close" not in more

    return play


def changed(change: Callable[[bytes], bytes], coding: str = "", step: int = 61) -> Play:
    """A good answer after a change, or in a content coding, in chunks that end anywhere."""

    async def play(x: Call) -> bool:
        encoding = f"Content-Encoding: {coding}\r\n" if coding else ""
        await x.head(f"Transfer-Encoding: chunked\r\n{encoding}")
        body = change(x.whole())
        for i in range(0, len(body), step):
            await x.chunk(body[i : i + step])
        await x.send(LAST)
        return True

    return play


def refusal(status: str, body: str | Part = b"", more: str = "") -> Play:
    """A complete answer with this status."""

    async def play(x: Call) -> bool:
        content = body.encode() if isinstance(body, str) else body(x) if callable(body) else body
        await x.answer(status, content, more)
        return "close" not in more

    return play


def sent(*parts: Part, reset: bool = False, pause_s: float = 0.0) -> Play:
    """These bytes, and the end of the connection."""

    async def play(x: Call) -> bool:
        for part in parts:
            await x.send(part(x) if callable(part) else part)
        await asyncio.sleep(pause_s)
        if reset:
            x.reset()
        return False

    return play


def streamed(more: str = "", version: str = "1.1") -> bytes:
    return f"HTTP/{version} 200 OK\r\n{HEADERS}{more}\r\n".encode()


async def late(x: Call) -> bool:
    """A good answer after 1 s of nothing."""
    await asyncio.sleep(1.0)
    return await ok(x)


async def reset_mid_stream(x: Call) -> bool:
    await _begin(x)
    await asyncio.sleep(0.5)  # a reset may overtake what the peer has not read yet
    x.reset()
    return False


async def close_mid_stream(x: Call) -> bool:
    await _begin(x)
    return False


async def endless(x: Call) -> bool:
    await _begin(x, 1)
    while not x.writer.is_closing():
        await x.token()
        await asyncio.sleep(0.05)
    return False


def silent(begin: Callable[[Call], Awaitable[None]] | None = None) -> Play:
    """Wait until the peer gives up."""

    async def play(x: Call) -> bool:
        if begin is not None:
            await begin(x)
        for _ in range(1200):
            if x.writer.is_closing():
                break
            await asyncio.sleep(0.05)
        return False

    return play


async def byte_by_byte(x: Call) -> bool:
    for byte in streamed(f"Content-Length: {len(x.whole())}\r\n") + x.whole():
        await x.send(bytes([byte]))
    return True


async def slow_good_headers(x: Call) -> bool:
    """Line by line, a tenth of a second each, and then a good answer."""
    for line in ("HTTP/1.1 200 OK\r\n", HEADERS, f"Content-Length: {len(x.whole())}\r\n", "\r\n"):
        await x.send(line.encode())
        await asyncio.sleep(0.1)
    await x.send(x.whole())
    return True


async def heartbeats(x: Call) -> bool:
    """A comment before the answer, while it is made, between its tokens and behind it; retry and id
    fields."""
    await x.head()
    for _ in range(3):
        await x.chunk(b": heartbeat\n\n")
        await asyncio.sleep(0.02)
    await x.chunk(b"retry: 3000\n\nid: 1\n\nevent: ping\n\n")
    for i in range(x.request.tokens):
        await x.chunk(b"id: %d\nretry: 10\n" % i + event(delta(f"t{i} ")))
        await x.chunk(b":\n\n")
    await x.chunk(ending(x.request.tokens) + b": bye\n\n")
    await x.send(LAST)
    return True


def forever(head: str, part: bytes, pause_s: float = 0.0, most: int = 2**30) -> Play:
    """``part`` for as long as the peer takes it, ``most`` bytes at most.

    ``head`` is the rest of the header of a good answer, or of another one from "HTTP/" on."""

    async def play(x: Call) -> bool:
        await x.send(head.encode() if head.startswith("HTTP/") else streamed(head))
        for _ in range(most // len(part)):
            if x.writer.is_closing():
                break
            await x.send(part)
            await asyncio.sleep(pause_s)
        return False

    return play


@cache
def _bomb() -> bytes:
    """256 KiB of gzip that unfold to 256 MiB."""
    packing = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)
    return b"".join(packing.compress(bytes(2**20)) for _ in range(2**8)) + packing.flush()


def _gzip_broken(x: Call) -> bytes:
    body = gzip.compress(x.whole())
    return body[:20] + b"?" * 20 + body[40:]


def _three_choices(x: Call) -> list[Part]:
    """Each token of three choices, of which nobody asked for more than one."""
    return [
        event({"choices": [{"index": index, "delta": {"content": f"t{i} "}}]})
        for i in range(x.request.tokens)
        for index in range(3)
    ]


async def three_choices(x: Call) -> bool:
    return await chunks(*_three_choices(x), ending(3 * x.request.tokens))(x)


def broken_off(error: bytes) -> Play:
    """Two tokens, the error as these bytes, and an end as if all were well."""
    return chunks(error, DONE, tokens=2)


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


async def two_responses(x: Call) -> bool:
    """In one write, so that the second one is there before the client can use the connection again."""
    await x.send((streamed(f"Content-Length: {len(x.whole())}\r\n") + x.whole()) * 2)
    return True


async def close_after_answer(x: Call) -> bool:
    """A good answer, and the kept-alive connection is closed without a word."""
    await ok(x)
    return False


async def drop(x: Call) -> bool:
    """Read, worked on for a while, and dropped: the connection is closed without a byte."""
    await asyncio.sleep(0.05)
    return False


def _replaced(old: bytes, new: bytes) -> Play:
    return changed(lambda body: body.replace(old, new))


GZIP = HEADERS + "Content-Encoding: gzip\r\n"
JSON = "Content-Type: application/json\r\n"
BIG = b'data: {"choices":[{"delta":{"content":"%b"}}]}\n\n'
MANY = [{"index": i, "delta": {"content": "t"}} for i in range(10_000)]
WHOLE = {
    "choices": [{"message": {"content": "a b"}, "finish_reason": "stop"}],
    "usage": {"completion_tokens": 2},
}


class Fault(NamedTuple):
    """``status`` the client must record; ``tokens`` received (None: none, -1: as many as asked for,
    -2: some)."""

    play: Callable[[Call], Awaitable[bool]]
    status: str
    tokens: int | None = None
    http: int | None = 200


FAULTS: dict[str, Fault] = {
    "ok": Fault(ok, "ok", -1),
    "late": Fault(late, "ok", -1),
    "reset_before_headers": Fault(sent(reset=True), "reset", http=None),
    "close_before_headers": Fault(sent(), "reset", http=None),
    "reset_mid_headers": Fault(
        sent(b"HTTP/1.1 200 OK\r\nContent-Ty", reset=True, pause_s=0.02), "reset", http=None
    ),
    "reset_mid_stream": Fault(reset_mid_stream, "truncated", 2),
    "close_mid_stream": Fault(close_mid_stream, "truncated", 2),
    "no_done": Fault(chunks(event(delta(finish="stop")), tokens=2), "ok", 2),
    "no_done_no_finish": Fault(chunks(tokens=2), "truncated", 2),
    "endless": Fault(endless, "timeout", -2),
    "stall": Fault(silent(_begin), "timeout", 2),
    "slow_headers": Fault(silent(), "timeout", http=None),
    "headers_then_nothing": Fault(silent(Call.head), "timeout"),
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
    "error_cut_short": Fault(
        sent(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 999\r\n\r\nupstream is gone"),
        "http_error",
        http=502,
    ),
    "error_event": Fault(
        chunks(event({"error": {"message": "out of memory", "code": 500}}) + DONE, tokens=2),
        "stream_error",
        2,
    ),
    "invalid_json": Fault(
        chunks(b'data: {"choices": [\n\n' + ending(2), tokens=2), "protocol_error", 2
    ),
    "invalid_utf8": Fault(
        chunks(b'data: {"choices":[{"text":"\xff\xfe"}]}\n\n' + ending(2), tokens=2),
        "protocol_error",
        2,
    ),
    "big_event": Fault(chunks(lambda _: BIG % (b"x" * 10_485_760), ending(1)), "ok", 1),
    "crlf": Fault(_replaced(b"\n", b"\r\n"), "ok", -1),
    "cr": Fault(_replaced(b"\n", b"\r"), "ok", -1),
    "comments": Fault(
        changed(lambda body: b":\n\n" + body.replace(b"data:", b": ping\n\n: x\ndata:")), "ok", -1
    ),
    "multi_line": Fault(_replaced(b', "choices"', b',\ndata: "choices"'), "ok", -1),
    "unknown_fields": Fault(_replaced(b"data:", b"event: m\nid: 1\nfoo: bar\ndata:"), "ok", -1),
    # U+2028, U+0085 and a 4-byte character inside the text
    "separators": Fault(_replaced(b"t0 ", "t\u2028\x85\N{CRAB}".encode()), "ok", -1),
    "tokens_after_finish": Fault(
        chunks(
            event(delta("a")) + event(delta(finish="stop")) + event(delta("b")) + event(delta("c"))
        ),
        "ok",
        3,
    ),
    "byte_by_byte": Fault(byte_by_byte, "ok", -1),
    "html_page": Fault(
        refusal("200 OK", "<html>log in</html>", "Content-Type: text/html\r\n"), "protocol_error"
    ),
    "stream_as_json": Fault(refusal("200 OK", Call.whole, JSON), "protocol_error"),
    "not_streamed": Fault(refusal("200 OK", json.dumps(WHOLE), JSON), "ok", 2),
    "empty": Fault(chunks(role() + event(delta(finish="stop")) + DONE), "empty"),
    "gzipped": Fault(refusal("200 OK", lambda x: gzip.compress(x.whole()), GZIP), "ok", -1),
    "gzipped_stream": Fault(changed(gzip.compress, "gzip", 40), "ok", -1),
    "gzip_broken": Fault(refusal("200 OK", _gzip_broken, GZIP), "protocol_error"),
    "stream_as_text": Fault(
        refusal("200 OK", Call.whole, "Content-Type: text/plain\r\n"), "ok", -1
    ),
    "slow_good_headers": Fault(slow_good_headers, "ok", -1),
    "redirect": Fault(
        refusal("307 Temporary Redirect", more="Location: http://elsewhere.test/v1\r\n"),
        "http_error",
        http=307,
    ),
    "short_body": Fault(
        sent(streamed("Content-Length: 99999\r\n"), event(delta("a"))), "truncated", 1
    ),
    "close_delimited": Fault(sent(streamed(), Call.whole), "ok", -1),
    "says_close": Fault(chunks(Call.whole, more="Connection: close\r\n"), "ok", -1),
    # as a server of HTTP/1.0 answers: no length, no chunks, the close is the end
    "http_10": Fault(sent(streamed(version="1.0"), Call.whole), "ok", -1),
    # header lines behind the last chunk
    "chunked_trailers": Fault(
        chunks(
            Call.whole,
            more="Trailer: X-Checksum\r\n",
            last=b"0\r\nX-Checksum: 12\r\nX-Took: 5ms\r\n\r\n",
        ),
        "ok",
        -1,
    ),
    "with_bom": Fault(changed(lambda body: b"\xef\xbb\xbf" + body), "ok", -1),
    "heartbeats": Fault(heartbeats, "ok", -1),
    "deflated": Fault(changed(zlib.compress, "deflate", 37), "ok", -1),
    "deflated_byte_by_byte": Fault(changed(zlib.compress, "deflate", 1), "ok", -1),
    "raw_deflated": Fault(changed(raw_deflate, "deflate", 37), "ok", -1),
    "gzip_members": Fault(changed(members, "X-GZIP", 37), "ok", -1),
    "brotli": Fault(changed(lambda body: b"\x0b" + body[:40], "br", 37), "protocol_error"),
    "zstandard": Fault(
        changed(lambda body: b"\x28\xb5\x2f\xfd" + body[:40], "zstd", 37), "protocol_error"
    ),
    "brotli_refusal": Fault(
        refusal("400 Bad Request", "\x0b", "Content-Encoding: br\r\n"), "http_error", http=400
    ),
    "identity": Fault(changed(lambda body: body, "identity", 37), "ok", -1),
    "continue_100": Fault(continue_100, "ok", -1),
    "endless_headers": Fault(
        forever("HTTP/1.1 200 OK\r\n", b"X-Filler: " + b"a" * 65_536 + b"\r\n", most=10**8),
        "protocol_error",
        http=None,
    ),
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
    "gzip_bomb": Fault(refusal("200 OK", lambda _: _bomb(), GZIP), "protocol_error"),
    "line_without_end": Fault(forever("", b"data: " + b"x" * 2**20), "protocol_error"),
    "ten_thousand_choices": Fault(
        chunks(event({"choices": MANY}) + ending(1)), "protocol_error", 1
    ),
    "three_choices": Fault(three_choices, "protocol_error", 3 * 4),
    "error_field": Fault(broken_off(b"error: out of memory\n\n"), "stream_error", 2),
    "error_bare": Fault(broken_off(b'{"error": "out of memory"}\n\n'), "stream_error", 2),
    "error_in_choice": Fault(
        broken_off(event({"choices": [{"index": 0, "delta": {}, "error": {"message": "lost"}}]})),
        "stream_error",
        2,
    ),
    "garbage": Fault(sent(b"\x00\x01 this is no HTTP\r\n\r\n" * 3), "protocol_error", http=None),
    # what a TLS server answers to plain HTTP
    "tls_alert": Fault(sent(b"\x15\x03\x01\x00\x02\x02\x46"), "protocol_error", http=None),
    "two_responses": Fault(two_responses, "ok", -1),
    "drop": Fault(drop, "reset", http=None),
    "close_after_answer": Fault(close_after_answer, "ok", -1),
}
"""Every fault that one request can have on a listening port, with what a client must record of it."""
