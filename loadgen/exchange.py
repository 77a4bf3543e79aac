"""One request and its response: raw socket bytes and their receive times in, one record out.

This is the seam of the design: whatever reads the socket (a Protocol, a recvmsg reader, a test)
calls ``feed(at_ns, data)`` and ``eof(at_ns)`` and nothing else. Reads are stamped by the caller
before any parsing; events are split and JSON is decoded later, in batches.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import httptools
import numpy as np

from loadgen.answers import Answer
from loadgen.protocols import error_text, excerpt
from loadgen.records import CHUNK_AT_MAX_US, RequestRecord
from loadgen.sse import EventSplitter

DECODE_AT_BYTES = 16_384  # so much body waits undecoded at most, per stream
WHOLE_BODY_BYTES = 64 * 2**20  # a body that is no stream may be so long, and one event of a stream too
ERROR_BODY_BYTES = 65_536  # so much of an error body is read for its message
_REQUEST_ID_HEADERS = {b"x-request-id", b"x-litellm-call-id", b"request-id"}


class Exchange:
    """The life of one request, from dispatch to its final status. Ends exactly once."""

    __slots__ = (
        "_answer", "_at_ns", "_body_bytes", "_content_type", "_framed", "_gunzip", "_headers_done", "_informational", "_new_answer", "_on_end",
        "_parser", "_pieces", "_splitter", "_whole", "cancel_after_tokens", "close_after", "ended", "last_read_ns", "listening", "received_bytes", "record",
        "request", "retried",
    )  # fmt: skip

    def __init__(
        self,
        record: RequestRecord,
        request: bytes,
        on_end: Callable[[Exchange], None],
        answer: type[Answer] = Answer,
    ) -> None:
        """``answer`` reads the events of the API that was asked; ``on_end`` is called exactly once."""
        self._new_answer = answer
        self.record = record
        self.request = request
        self._on_end = on_end
        self.ended = False
        self.retried = False  # once, when a kept-alive connection turned out to be dead
        self.close_after = True  # whether the connection must not be used again
        self.last_read_ns: int | None = None
        self.received_bytes = 0
        self.cancel_after_tokens = 0  # the user leaves after so many; 0: stays
        self.listening = False  # whether somebody wants to know what the answer says
        self._reset_response()

    def listen(self) -> None:
        """Keep the text of the answer, for ``said``."""
        self.listening = True
        self._answer.said = []

    def said(self, reasoning: bool = False) -> str:
        """The answer's text so far, with what was reasoned or without; empty unless ``listen`` was called."""
        return "".join(text for kind, text in self._answer.said or () if reasoning or kind == "answer")

    def _reset_response(self) -> None:
        self._parser: Any = httptools.HttpResponseParser(self)
        self._answer = self._new_answer()
        if self.listening:
            self._answer.said = []
        self._splitter: EventSplitter | None = None
        self._whole: list[bytes] = []  # a body that is no event stream
        self._pieces: list[tuple[int, bytes]] = []  # stamped, not yet split
        self._body_bytes = 0
        self._content_type = b""
        self._gunzip: Any = None
        self._headers_done = False
        self._framed = False  # by Content-Length or chunks; else the close ends the body
        self._informational = False
        self._at_ns = 0

    @property
    def merged_events(self) -> int:
        """Token events that came in one read with the token event before them."""
        return self._answer.merged_events

    # -- the connection's side ---------------------------------------------------------------

    def feed(self, at_ns: int, data: bytes) -> None:
        """``data`` was read from the socket at ``at_ns``."""
        if self.ended:
            self.close_after = True  # bytes after the end of the response: not HTTP that we asked for
            return
        self._at_ns = self.last_read_ns = at_ns
        self.received_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            if not isinstance(error.__context__, zlib.error):
                raise
            self.fail("protocol_error", f"broken compressed body: {error.__context__}", at_ns)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.close_after = True
            self.fail("protocol_error", f"not HTTP: {error}: {excerpt(data)}", at_ns)

    def eof(self, at_ns: int, error: str | None = None) -> None:
        """The peer closed or broke the connection."""
        if self.ended:
            return
        if not self._headers_done:
            self.fail("reset", error or "connection closed before the response headers", at_ns)
        elif (error is None and not self._framed) or (self.record.http_status or 0) >= 300:
            self._conclude(at_ns)  # the close ends an unframed body (RFC 9112, 6.3); a refusal stays one
        else:
            self.fail("truncated", error or "connection closed in the middle of the body", at_ns)

    def fail(self, status: str, error: str, at_ns: int) -> None:
        """End with ``status``; what arrived so far stays in the record."""
        if self.ended:
            return
        self._decode_pending()
        self._answer.finish()
        self._end(status, error, at_ns)

    def restart(self) -> None:
        """Forget an attempt that received nothing on a dead kept-alive connection."""
        self.retried = True
        self.record.connected_ns = self.record.started_ns = self.record.sent_ns = None
        self.received_bytes = 0
        self._reset_response()

    # -- httptools' callbacks ----------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A second response to one request: nobody asked for it."""
        if self.ended:
            self.close_after = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep the few headers that matter."""
        if self.ended:
            return
        name = name.lower()
        if name == b"content-type":
            self._content_type = value.lower()
        elif name == b"content-encoding" and value.lower() in (b"gzip", b"deflate"):
            self._gunzip = zlib.decompressobj(zlib.MAX_WBITS | 32)
        elif name == b"content-length" or (name == b"transfer-encoding" and b"chunked" in value.lower()):
            self._framed = True
        elif name == b"retry-after":
            self.record.retry_after_s = _retry_after(value)
        elif name in _REQUEST_ID_HEADERS and self.record.server_request_id is None:
            self.record.server_request_id = value.decode("latin-1")[:200]

    def on_headers_complete(self) -> None:
        """The status line and all headers are there."""
        if self.ended:
            return
        status = self._parser.get_status_code()
        self._informational = status < 200
        if self._informational:
            return
        self.record.http_status = status
        self.record.headers_ns = self._at_ns
        self._headers_done = True
        if status < 300 and b"json" not in self._content_type:
            self._splitter = EventSplitter()

    def on_body(self, body: bytes) -> None:
        """A piece of the body: stamped and put aside."""
        if self.ended:
            return
        if self._gunzip is not None:
            body = self._gunzip.decompress(body)
        self._body_bytes += len(body)
        if self._splitter is None:
            if self.record.http_status == 200 or self._body_bytes <= ERROR_BODY_BYTES:
                self._whole.append(body)
            if self._body_bytes > WHOLE_BODY_BYTES:
                self.fail("protocol_error", f"a body of more than {WHOLE_BODY_BYTES >> 20} MiB", self._at_ns)
            return
        self._pieces.append((self._at_ns, body))
        if self.cancel_after_tokens:
            self._decode_pending()
            if not self.ended and self._answer.tokens_so_far() >= self.cancel_after_tokens:
                self.fail("cancelled", f"the user left after {self.cancel_after_tokens} tokens", self._at_ns)
        elif self._body_bytes >= DECODE_AT_BYTES:
            self._decode_pending()

    def on_message_complete(self) -> None:
        """The response has its proper end."""
        if self._informational or self.ended:
            self._informational = False
            return
        self.close_after = not self._parser.should_keep_alive()
        self._conclude(self._at_ns)

    # -- reading and judging -----------------------------------------------------------------

    def _decode_pending(self) -> None:
        if self._splitter is None:
            return
        answer = self._answer
        for at_ns, piece in self._pieces:
            for event_ns, data in self._splitter.feed(at_ns, piece):
                answer.on_event(event_ns, data)
        self._pieces.clear()
        self._body_bytes = 0
        if self._splitter.waiting_bytes > WHOLE_BODY_BYTES and not self.ended:
            self._splitter = EventSplitter()  # what waits is no event any more
            self.fail("protocol_error", f"an event of more than {WHOLE_BODY_BYTES >> 20} MiB", self._at_ns)

    def _conclude(self, at_ns: int) -> None:
        """A proper end of HTTP: judge what it brought."""
        status = self.record.http_status or 0
        if status >= 300:
            where = "redirect: give the final URL" if status < 400 else error_text(b"".join(self._whole))
            self._end("http_error", f"HTTP {status}: {where}", at_ns)
            return
        self._decode_pending()
        answer = self._answer
        if self._splitter is not None:
            for event_ns, data in self._splitter.finish(at_ns):
                answer.on_rest(event_ns, data)
        elif self._whole:
            answer.on_whole(at_ns, b"".join(self._whole))
        answer.finish()
        tokens, _ = answer.output_tokens()
        if answer.error is not None:
            self._end("stream_error", answer.error, at_ns)
        elif answer.bad_json is not None:
            self._end("protocol_error", f"not JSON: {answer.bad_json}", at_ns)
        elif not tokens and answer.whole_ns is None:
            self._end("empty", self._why_empty(), at_ns)
        elif answer.finish_reason is None and not answer.done:
            self._end("truncated", "the stream ended without a finish reason or [DONE]", at_ns)
        else:
            self._end("ok", None, at_ns)

    def _why_empty(self) -> str:
        if self._answer.first_event_ns is not None:
            return "the answer has no token"
        kind = self._content_type.decode("latin-1") or "unknown"
        return f"HTTP {self.record.http_status} without a single event, content type {kind}"

    def _end(self, status: str, error: str | None, at_ns: int) -> None:
        record, answer = self.record, self._answer
        record.status = status
        record.error = error
        record.ended_ns = at_ns
        record.first_event_ns = answer.first_event_ns
        record.first_answer_ns = answer.first_answer_ns
        record.finish_reason = answer.finish_reason
        record.input_tokens = answer.input_tokens
        record.cached_tokens = answer.cached_tokens
        record.output_tokens, record.token_source = answer.output_tokens()
        record.reasoning_tokens = answer.reasoning_tokens
        record.last_token_ns = answer.whole_ns
        if answer.chunk_at_ns and record.started_ns is not None:
            start = record.started_ns
            record.first_token_ns, record.last_token_ns = answer.chunk_at_ns[0], answer.chunk_at_ns[-1]
            at_us = (np.frombuffer(answer.chunk_at_ns, dtype=np.int64) - start) // 1000
            record.chunk_at_us = np.minimum(at_us, CHUNK_AT_MAX_US).tolist()
            record.chunk_tokens = answer.chunk_tokens
        self.ended = True
        self._pieces = []
        self._whole = []
        self._parser = None  # it holds a reference back to us
        self._on_end(self)
        self.request = b""


def _retry_after(value: bytes) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None  # an HTTP date: the status says enough
