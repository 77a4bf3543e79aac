"""One request and its response: raw socket bytes and their receive times in, one record out.

This is the seam of the design: whatever reads the socket (a Protocol, a recvmsg reader, a test)
calls ``feed(at_ns, data)`` and ``eof(at_ns)`` and nothing else. Reads are stamped by the caller
before any parsing. Chunks that repeat the one before them but for their text pass by all parsers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httptools

from ampacity.loadgen.receive.bodies import FRAMING_MAX_BYTES, FRAMING_TOO_LONG, Body
from ampacity.loadgen.receive.completions import Answer
from ampacity.loadgen.receive.hot_path import ReadHandler
from ampacity.loadgen.receive.thinking import InlineThinking, Kind
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.send.halves import whole_characters
from ampacity.loadgen.send.protocols import (
    REFUSING,
    error_text,
    exceeds_context,
    excerpt,
    retry_after_s,
)
from ampacity.loadgen.send.retold import AnswerContent

SEVERAL = "several choices came, one was asked for"  # merged they have no times of their own
_REQUEST_ID_HEADERS = {b"x-request-id", b"x-litellm-call-id", b"request-id"}


class Exchange:
    """The life of one request, from dispatch to its final status. Ends exactly once."""

    __slots__ = (
        "_answer",
        "_between_chunks",
        "_body",
        "_chunked",
        "_complete_at",
        "_content_type",
        "_framing_bytes",
        "_headers_done",
        "_informational",
        "_length_known",
        "_new_answer",
        "_on_end",
        "_on_whole",
        "_parsed_ns",
        "_parser",
        "cancel_after_tokens",
        "close_after",
        "ended",
        "feed",
        "listening",
        "on_body",
        "record",
        "request",
        "retried",
        "watching",
    )

    def __init__(
        self,
        record: RequestRecord,
        request: bytes,
        on_end: Callable[[Exchange], None],
        answer: Callable[[], Answer] = Answer,
        on_whole: Callable[[Exchange], None] | None = None,
    ) -> None:
        """``answer`` reads the events of the API that was asked; ``on_end`` is called exactly once.

        With ``on_whole`` the last read of a response is not yet judged: this is called, and ``judge`` is to be called later.
        """
        self._new_answer = answer
        self.record = record
        self.request = request
        self._on_end = on_end
        self._on_whole = on_whole
        self.ended = False
        self.retried = False  # once, when a kept-alive connection turned out to be dead
        self.close_after = True  # whether the connection must not be used again
        self.cancel_after_tokens = 0  # the user leaves after so many; 0: stays
        self.listening = False  # whether somebody wants to know what the answer says
        self.watching = False  # whether all of its text is looked at for thinking
        self._reset_response()

    def listen(self) -> None:
        """Keep the text of the answer, for ``said``."""
        self.listening = True
        self._answer.listen()

    def watch(self) -> None:
        """Look at all of the text for thinking in it, also for tags that come in pieces."""
        self.watching = self._answer.thinking.watches = True

    @property
    def thought(self) -> InlineThinking | None:
        """The thinking in the text of the answer, once it was seen to begin or to end."""
        return self._answer.thinking.thought

    def said(self, reasoning: bool = False) -> str:
        """The answer's text so far, with what was reasoned or without; empty unless ``listen`` was called."""
        texts = [text for kind, text in self._answer.said or () if reasoning or kind == "answer"]
        return whole_characters("".join(texts))

    def told(self, reasoning: bool = False) -> AnswerContent:
        """The answer so far as a history tells it; of one that is thinking alone that. Empty unless ``listen`` was called."""
        calls = self._answer.calls.calls() if self._answer.calls is not None else ()
        return AnswerContent(
            self.said(reasoning) or ("" if calls else self.said(reasoning=True)), calls
        )

    def pieces(self) -> list[tuple[Kind, str]]:
        """What each chunk said, in their order; nothing where nobody listened."""
        return [(kind, whole_characters(text)) for kind, text in self._answer.said or ()]

    def _reset_response(self) -> None:
        self._parsed_ns: int | None = None  # when the last read came that was no repetition
        self._between_chunks = False  # where the parser stands, as far as it has read
        # The seam: called with the time of a read, monotonic ns, and its bytes; whether that ended the exchange.
        # While chunks of text repeat each other it is what their form gave: the hot path, one call for a token.
        self.feed: ReadHandler = self._parse
        self._body = Body()
        self.on_body: Callable[[bytes], None] = (
            self._body.pieces.append
        )  # the parser calls it: no frame of Python
        self._parser: Any = httptools.HttpResponseParser(self)
        self._answer = self._new_answer()
        self._answer.thinking.watches = self.watching
        if self.listening:
            self._answer.listen()
        self._content_type = b""
        self._headers_done = False
        self._framing_bytes = 0  # since the last byte of the body
        self._chunked = self._length_known = False  # neither: the close ends the body
        self._informational = False
        self._complete_at: int | None = (
            None  # the response has ended with so many of the body's pieces
        )

    @property
    def merged_events(self) -> int:
        """Token events that came in one read with the token event before them."""
        return self._answer.merged_events

    @property
    def answering(self) -> bool:
        """Whether a token has come."""
        return bool(self._answer.chunk_at_ns)

    # -- the connection's side ---------------------------------------------------------------

    @property
    def last_read_ns(self) -> int | None:
        """When the socket last gave something, or None."""
        tokens_ns = self._answer.chunk_at_ns
        return (
            max(self._parsed_ns, tokens_ns[-1])
            if tokens_ns and self._parsed_ns
            else self._parsed_ns
        )

    def eof(self, at_ns: int, error: str | None = None) -> None:
        """The peer closed or broke the connection."""
        if self.ended or self._complete_at is not None:
            return
        framed = self._chunked or self._length_known
        if not self._headers_done:
            self._give_up("reset", error or "connection closed before the response headers", at_ns)
        elif (error is None and not framed) or (self.record.http_status or 0) >= 300:
            self._conclude(
                at_ns
            )  # the close ends an unframed body (RFC 9112, 6.3); a refusal stays one
        else:
            self._give_up(
                "truncated", error or "connection closed in the middle of the body", at_ns
            )

    def fail(self, status: str, error: str, at_ns: int) -> None:
        """End with ``status``, unless what has arrived ends it otherwise; that stays in the record."""
        if not self.ended and self._complete_at is None:
            self._give_up(status, error, at_ns)

    def restart(self) -> None:
        """Forget an attempt that received nothing on a dead kept-alive connection."""
        self.retried = True
        self.record.connected_ns = self.record.started_ns = self.record.sent_ns = None
        self._reset_response()

    # -- httptools' callbacks ----------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A second response to one request: nobody asked for it."""
        if self._complete_at is not None:
            self.close_after = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep the few headers that matter."""
        if self._complete_at is not None:
            return
        name = name.lower()
        if name == b"content-type":
            self._content_type = value.lower()
        elif name == b"content-encoding":
            self._body.encoded(value)
        elif name == b"content-length":
            self._length_known = True
        elif name == b"transfer-encoding" and b"chunked" in value.lower():
            self._chunked = True
        elif name == b"retry-after":
            self.record.retry_after_s = retry_after_s(value)
        elif name in _REQUEST_ID_HEADERS and self.record.server_request_id is None:
            self.record.server_request_id = value.decode("latin-1")[:200]

    def on_headers_complete(self) -> None:
        """The status line and all headers are there."""
        if self._complete_at is not None:
            return
        status = self._parser.get_status_code()
        self._informational = status < 200
        if self._informational:
            return
        self.record.http_status = status
        self.record.headers_ns = self._parsed_ns
        self._headers_done = True
        stream = status < 300 and b"json" not in self._content_type
        self._body.begin(status, stream=stream)
        self._between_chunks = stream and self._chunked

    def on_chunk_header(self) -> None:
        """The size of a chunk was read."""
        self._between_chunks = False

    def on_chunk_complete(self) -> None:
        """A chunk was read to its end."""
        self._between_chunks = True

    def on_message_complete(self) -> None:
        """The response has its proper end."""
        if self._informational or self._complete_at is not None:
            self._informational = False
            return
        self.close_after = not self._parser.should_keep_alive()
        self._complete_at = len(self._body.pieces)

    # -- reading and judging -----------------------------------------------------------------

    def _parse(self, at_ns: int, data: bytes) -> bool:
        """Take the framing off, read the events, judge the end; whether this is one."""
        self._parsed_ns = at_ns
        broken, tokens = None, len(self._answer.chunk_at_ns)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            broken = f"not HTTP: {error}: {excerpt(data)}"
            self.close_after = True
        if not self._body.pieces:
            self._framing_bytes += len(data)
            if self._framing_bytes > FRAMING_MAX_BYTES and self._complete_at is None and not broken:
                broken, self.close_after = FRAMING_TOO_LONG, True
        elif self._framing_bytes:
            self._framing_bytes = 0
        if self._complete_at is not None and self._on_whole is not None:
            self.feed = _after_the_end
            self._on_whole(self)
            return True
        self._decode(at_ns)
        if self.ended:
            return True
        if self._complete_at is not None:
            self._conclude(at_ns)
        elif broken is not None:
            self._give_up("protocol_error", broken, at_ns)
        elif self._chunked:
            self._between_chunks = self._between_chunks and data.endswith(
                b"\r\n"
            )  # no size has begun
            between = (
                self._between_chunks and self._body.between_events and not self.cancel_after_tokens
            )
            new = len(self._answer.chunk_at_ns) - tokens
            if between and new:
                self._answer.learn(data, new)
            self.feed = (between and self._answer.read_handler(self._parse)) or self._parse
        return self.ended

    def judge(self) -> None:
        """End, after ``on_whole`` was called."""
        assert self._parsed_ns is not None
        self._decode(self._parsed_ns)
        if not self.ended:
            self._conclude(self._parsed_ns)

    def _decode(self, at_ns: int) -> None:
        """Read what the parser gave of the body; of a body that is no event stream only keep it."""
        answer, left = self._answer, False
        events, wrong = self._body.take(self._complete_at)
        for event in events:
            answer.on_event(at_ns, event)
            if self.cancel_after_tokens and answer.tokens_so_far() >= self.cancel_after_tokens:
                left = True  # what comes after it is not read
                break
        if left:
            self.close_after = True
            answer.finish()
            self._end("cancelled", f"the user left after {self.cancel_after_tokens} tokens", at_ns)
        elif wrong is not None:
            answer.finish()
            self._end("protocol_error", wrong, at_ns)

    def _give_up(self, status: str, error: str, at_ns: int) -> None:
        self._answer.finish()
        if (
            self._answer.error is not None and status != "cancelled"
        ):  # the server had said why nothing more would come
            status, error = "stream_error", self._answer.error
        self._end(status, error, at_ns)

    def _conclude(self, at_ns: int) -> None:
        """A proper end of HTTP: judge what it brought."""
        status = self.record.http_status or 0
        if status >= 300:
            where = (
                "redirect: give the final URL" if status < 400 else error_text(self._body.whole())
            )
            ours = exceeds_context(status, where)
            self._end("too_long" if ours else "http_error", f"HTTP {status}: {where}", at_ns)
            return
        answer = self._answer
        if self._body.splitter is not None:
            for data in self._body.splitter.finish():
                answer.on_rest(at_ns, data)
        elif whole := self._body.whole():
            answer.on_whole(at_ns, whole)
        answer.finish()
        tokens, _ = answer.output_tokens()
        if answer.error is not None:
            ours = not tokens and exceeds_context(REFUSING[0], answer.error)
            self._end("too_long" if ours else "stream_error", answer.error, at_ns)
        elif answer.bad_json is not None:
            self._end("protocol_error", f"not JSON: {answer.bad_json}", at_ns)
        elif answer.several:
            self._end("protocol_error", SEVERAL, at_ns)
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
        record = self.record
        record.status = status
        record.error = error
        record.ended_ns = at_ns
        self._answer.write_into(record)
        self.ended = True
        self.feed = (
            _after_the_end  # neither it nor the parser holds a reference back to us any more
        )
        self._body = Body()
        self._parser = None
        self._on_end(self)
        self.request = b""


def _after_the_end(at_ns: int, data: bytes) -> bool:
    return True
