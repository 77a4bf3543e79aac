"""One request and its response: raw socket bytes and their receive times in, one record out.

This is the seam of the design: whatever reads the socket (a Protocol, a recvmsg reader, a test)
calls ``feed(at_ns, data)`` and ``eof(at_ns)`` and nothing else. The caller dates reads before any
parsing. Chunks that match the template of the answer (``templates``) are not parsed at all.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import httptools

from ampacity.loadgen.receive.bodies import FRAMING_MAX_BYTES, FRAMING_TOO_LONG, Body
from ampacity.loadgen.receive.completions import Answer
from ampacity.loadgen.receive.hot_path import ReadHandler
from ampacity.loadgen.receive.quota import write_limits
from ampacity.loadgen.receive.thinking import InlineThinking, Kind
from ampacity.loadgen.rundir.records import CACHE, RequestRecord
from ampacity.loadgen.send.history import AnswerContent
from ampacity.loadgen.send.protocols import (
    REFUSING,
    error_text,
    exceeds_context,
    excerpt,
)
from ampacity.loadgen.send.surrogates import join_surrogates

SEVERAL = "several choices came, one was asked for"
GOOD_HTTP = (200, 201)  # some frameworks answer each POST with 201; 202, 203 and 206 say otherwise
CUT_OFF = "not JSON: Input data was truncated"  # as msgspec says it
_OF_PROMPTS = re.compile(rb"kv|prefix|prompt")  # in names of caches that hold no answers
_REQUEST_ID_HEADERS = {b"x-request-id", b"x-litellm-call-id", b"request-id"}


class Exchange:
    """The life of one request, from dispatch to its final status. Ends exactly once."""

    def __init__(
        self,
        record: RequestRecord,
        request: bytes,
        on_end: Callable[[Exchange], None],
        answer: Callable[[], Answer] = Answer,
        on_whole: Callable[[Exchange], None] | None = None,
    ) -> None:
        """Begin an exchange: ``answer`` makes the reader of the events, ``on_end`` is called once.

        With ``on_whole`` the last read of a response is only parsed: it is called instead, and the
        caller calls ``judge`` later.
        """
        self.record, self.request = record, request
        self._on_end, self._on_whole = on_end, on_whole
        self.ended = False
        self.retried = False  # once, after a kept-alive connection turned out to be dead
        self.close_after = True  # the connection must not be reused
        self.cancel_after_tokens = 0  # the user leaves after this many; 0: never
        self._parsed_ns: int | None = None  # time of the latest parsed read
        self._whole_ns: int | None = None  # ... that left nothing to come but the body's end
        self._between_chunks = False  # where the parser is
        # The seam. While chunks match the template it is the template's own handler: one call per
        # token on the hot path.
        self.feed: ReadHandler = self._parse
        self._body = Body()
        # called by the parser without a Python frame
        self.on_body: Callable[[bytes], None] = self._body.pieces.append
        self._parser: Any = httptools.HttpResponseParser(self)
        self._answer = answer()
        self._content_type = b""
        self._limits: list[tuple[bytes, bytes]] = []  # headers about quotas
        self._date = b""  # by the server's clock
        self._headers_done = False
        self._framing_bytes = 0  # since the last byte of the body
        self._chunked = self._length_known = False  # neither: a close ends the body
        self._informational = False
        self._complete_at: int | None = None  # number of body pieces, once the response is complete

    def keep_text(self) -> None:
        self._answer.keep_text()

    def watch(self) -> None:
        """Search all of the text for inline thinking, also for tags that come in pieces."""
        self._answer.thinking.watches = True

    @property
    def thought(self) -> InlineThinking | None:
        """Return the inline thinking of the answer, once its beginning or end was seen."""
        return self._answer.thinking.thought

    def text(self, reasoning: bool = False) -> str:
        """Return the answer's text so far; empty unless ``keep_text`` was called."""
        texts = [text for kind, text in self._answer.texts or () if reasoning or kind == "answer"]
        return join_surrogates("".join(texts))

    def content(self, reasoning: bool = False) -> AnswerContent:
        """Return text and tool calls for the history; the reasoning where there is nothing else."""
        calls = self._answer.calls.calls() if self._answer.calls is not None else ()
        text = self.text(reasoning) or ("" if calls else self.text(reasoning=True))
        return AnswerContent(text, calls)

    def pieces(self) -> list[tuple[Kind, str]]:
        """Return kind and text of each chunk; a character in two halves belongs to the latter.

        Empty unless ``keep_text`` was called, and where a chunk has no text.
        """
        texts, found, half = self._answer.texts or [], [], ""
        for number, (kind, text) in enumerate(texts, 1):
            if not text:
                return []
            text, half = half + text, ""
            if number < len(texts) and "\ud800" <= text[-1] <= "\udbff":
                text, half = text[:-1], text[-1]
            found.append((kind, join_surrogates(text)))
        return found

    @property
    def merged_events(self) -> int:
        """Return the number of token events that shared their read with the previous one."""
        times = self._answer.chunk_at_ns
        return len(times) - len(set(times))

    @property
    def chunks(self) -> int:
        """Return how many chunks with tokens have arrived."""
        return len(self._answer.chunk_at_ns)

    @property
    def first_token_ns(self) -> int | None:
        """Return when the first token arrived, or None."""
        return next(iter(self._answer.chunk_at_ns), None)

    # -- calls by the connection -------------------------------------------------------------

    @property
    def last_read_ns(self) -> int | None:
        """Return the time of the latest read, or None."""
        tokens_ns = self._answer.chunk_at_ns
        if tokens_ns and self._parsed_ns:
            return max(self._parsed_ns, tokens_ns[-1])
        return self._parsed_ns

    def eof(self, at_ns: int, error: str | None = None) -> None:
        """End after the peer closed or broke the connection."""
        if self.ended or self._complete_at is not None:
            return
        framed = self._chunked or self._length_known
        if not self._headers_done:
            self._give_up("reset", error or "connection closed before the response headers", at_ns)
        elif (error is None and not framed) or (self.record.http_status or 0) >= 300:
            self._conclude(
                self._answered_ns(at_ns)
            )  # a close ends an unframed body (RFC 9112, 6.3)
        else:
            error = error or "connection closed in the middle of the body"
            self._give_up("truncated", error, at_ns)

    def fail(self, status: str, error: str, at_ns: int) -> None:
        """End with ``status``, unless a complete answer or an error has arrived."""
        if self.ended or self._complete_at is not None:
            return
        if self._answer.whole:  # only the end of the body is missing
            self._conclude(self._answered_ns(at_ns))
        else:
            self._give_up(status, error, at_ns)

    def _answered_ns(self, at_ns: int) -> int:
        """Return when a whole answer was there: heartbeats for ever are no part of it."""
        return max([self._whole_ns or at_ns, *self._answer.chunk_at_ns[-1:]])

    def restart(self) -> None:
        """Forget an attempt that received nothing on a dead kept-alive connection."""
        self.retried = True
        self.record.connected_ns = self.record.started_ns = self.record.sent_ns = None

    # -- callbacks of httptools --------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Close the connection after a second response to one request."""
        if self._complete_at is not None:
            self.close_after = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._complete_at is not None:
            return
        name = name.lower()
        if name == b"content-type":
            self._content_type = value.lower()
        elif name == b"content-encoding":
            self._body.encoded(value)
        elif name == b"content-length":
            self._length_known = True
        elif name == b"transfer-encoding":
            codings = {coding.strip() for coding in value.lower().split(b",")}
            self._chunked = self._chunked or b"chunked" in codings
            for coding in codings - {b"chunked"}:
                self._body.encoded(coding)
        elif b"cache" in name and b"hit" in value.lower() and not _OF_PROMPTS.search(name):
            self.record.answered_by = CACHE
        elif b"ratelimit" in name or name.startswith(b"retry-after"):
            self._limits.append((name, value))
        elif name == b"date":
            self._date = value
        elif name in _REQUEST_ID_HEADERS and self.record.server_request_id is None:
            self.record.server_request_id = value.decode("latin-1")[:200]

    def on_headers_complete(self) -> None:
        if self._complete_at is not None:
            return
        status = self._parser.get_status_code()
        self._informational = status < 200
        if self._informational:
            return
        self.record.http_status = status
        self.record.headers_ns = self._parsed_ns
        self._headers_done = True
        if self._limits:
            write_limits(self._limits, self.record, self._date)
        stream = status < 300 and b"json" not in self._content_type
        self._body.begin(status, stream=stream)
        self._between_chunks = stream and self._chunked

    def on_chunk_header(self) -> None:
        self._between_chunks = False

    def on_chunk_complete(self) -> None:
        self._between_chunks = True

    def on_message_complete(self) -> None:
        if self._informational or self._complete_at is not None:
            self._informational = False
            return
        self.close_after = not self._parser.should_keep_alive()
        self._complete_at = len(self._body.pieces)

    # -- reading and judging -----------------------------------------------------------------

    def _parse(self, at_ns: int, data: bytes) -> bool:
        """Parse the framing, read the events, judge the end. Return whether it has ended."""
        self._parsed_ns = at_ns
        broken, tokens = None, len(self._answer.chunk_at_ns)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            broken = f"not HTTP: {error}: {excerpt(data)}"
        if not self._body.pieces:
            self._framing_bytes += len(data)
            if self._framing_bytes > FRAMING_MAX_BYTES and self._complete_at is None and not broken:
                broken = FRAMING_TOO_LONG
        elif self._framing_bytes:
            self._framing_bytes = 0
        if broken is not None:
            self.close_after = True
        if self._complete_at is not None and self._on_whole is not None:
            self.feed = _after_the_end
            self._on_whole(self)
            return True
        late = self._answer.done and bool(self._body.pieces)
        self._decode(at_ns)
        if self.ended:
            return True
        if self._whole_ns is None and self._answer.whole:
            self._whole_ns = at_ns
        if self._complete_at is not None:
            self._conclude(at_ns)
        elif broken is not None:
            self._give_up("protocol_error", broken, at_ns)
        elif late and self._body.between_events:  # heartbeats for ever: nobody waits for those
            self._conclude(self._answered_ns(at_ns))
        elif self._chunked:
            self._between_chunks = self._between_chunks and data.endswith(b"\r\n")
            self.feed = self._parse
            answer = self._answer
            if self.cancel_after_tokens or answer.finish_reason is not None:
                return False  # each token has to be seen, or none is left
            if answer.may_match and self._between_chunks and self._body.between_events:
                if new := len(answer.chunk_at_ns) - tokens:
                    answer.learn(data, new)
                self.feed = answer.read_handler(self._parse) or self._parse
        return self.ended

    def judge(self) -> None:
        """Judge the response, after ``on_whole`` was called."""
        assert self._parsed_ns is not None
        self._decode(self._parsed_ns)
        if not self.ended:
            self._conclude(self._parsed_ns)

    def _decode(self, at_ns: int) -> None:
        answer, limit = self._answer, self.cancel_after_tokens
        events, error = self._body.take(self._complete_at)
        for event in events:
            answer.on_event(at_ns, event)
            if limit and answer.tally.tokens_so_far() >= limit:
                self.close_after = True
                answer.finish()
                self._end("cancelled", f"the user left after {limit} tokens", at_ns)
                return
        if error is not None:
            answer.finish()
            self._end("protocol_error", error, at_ns)

    def _give_up(self, status: str, error: str, at_ns: int) -> None:
        self._answer.finish()
        if self._answer.error is not None and status != "cancelled":  # the server gave the reason
            status, error = "stream_error", self._answer.error
        self._end(status, error, at_ns)

    def _conclude(self, at_ns: int) -> None:
        """Judge a response with a proper end."""
        status = self.record.http_status or 0
        if status >= 300:
            redirect = "redirect: give the final URL"
            error = redirect if status < 400 else error_text(self._body.whole())
            too_long = exceeds_context(status, error)
            self._end("too_long" if too_long else "http_error", f"HTTP {status}: {error}", at_ns)
            return
        answer = self._answer
        if self._body.splitter is not None:
            for data in self._body.splitter.finish():
                answer.on_rest(at_ns, data)
            stray = self._body.splitter.stray or b""
            if answer.first_event_ns is None and stray.lstrip()[:1] == b"{":
                answer.on_whole(at_ns, stray)  # JSON under another content type
        elif whole := self._body.whole():
            answer.on_whole(at_ns, whole)
        answer.finish()
        self._end(*self._verdict(), at_ns)

    def _verdict(self) -> tuple[str, str | None]:
        """Return status and error of a complete answer."""
        answer = self._answer
        tokens, _ = answer.tally.output
        if answer.error is not None:
            too_long = not tokens and exceeds_context(REFUSING[0], answer.error)
            return "too_long" if too_long else "stream_error", answer.error
        stray = self._body.splitter and self._body.splitter.stray
        if answer.bad_json is not None:
            cut = CUT_OFF in answer.bad_json and answer.finish_reason is None
            return "truncated" if cut else "protocol_error", answer.bad_json
        requested = self.record.output_tokens_planned
        if answer.choices.several or answer.choices.may_be_several(tokens, requested):
            return "protocol_error", SEVERAL
        text = f": {excerpt(stray)}" if stray else ""
        if not tokens and answer.whole_ns is None:
            return "protocol_error" if stray else "empty", self._why_empty() + text
        if answer.finish_reason is None and (text or not answer.done):
            end = "without a finish reason" if answer.done else "without a finish reason or [DONE]"
            return "truncated", f"the stream ended {end}{text}"
        if self.record.http_status not in GOOD_HTTP:
            return (
                "protocol_error",
                f"HTTP {self.record.http_status}: by its status no whole answer",
            )
        return "ok", None

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
        self.feed = _after_the_end  # like the parser, it would hold a reference to us
        self._body = Body()
        self._parser = None
        self._on_end(self)
        self.request = b""


def _after_the_end(at_ns: int, data: bytes) -> bool:
    return True
