"""The body of one response: pieces without HTTP framing in, events or one whole text out."""

from __future__ import annotations

import zlib

from ampacity.loadgen.receive.sse import EventSplitter
from ampacity.loadgen.send.protocols import printable

WHOLE_BODY_BYTES = 64 * 2**20  # limit of a body that is no stream, and of one event
FRAMING_MAX_BYTES = 65_536  # limit of headers, trailers or chunk sizes between bytes of the body
FRAMING_TOO_LONG = f"more than {FRAMING_MAX_BYTES >> 10} KiB of headers"
ERROR_BODY_BYTES = 65_536  # how much of an error body is read for its message


class Inflater:
    """Decompresses gzip, several members too, and deflate (zlib)."""

    def __init__(self) -> None:
        self._member = zlib.decompressobj(zlib.MAX_WBITS | 32)  # either header

    def __call__(self, data: bytes) -> bytes:
        """Decompress further bytes. Raises zlib.error."""
        plain = self._member.decompress(data)
        while rest := self._member.unused_data:
            self._member = zlib.decompressobj(zlib.MAX_WBITS | 32)
            plain += self._member.decompress(rest)
        return plain


class Body:
    """Pieces are appended to ``pieces``; ``take`` consumes them."""

    __slots__ = ("_bytes", "_foreign", "_inflate", "_kept", "_most_bytes", "pieces", "splitter")

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.splitter: EventSplitter | None = None  # of an event stream
        self._inflate: Inflater | None = None
        self._foreign: str | None = None  # a content coding that we cannot decode
        self._kept: list[bytes] = []  # of a body that is no event stream
        self._bytes = 0
        self._most_bytes = WHOLE_BODY_BYTES

    def begin(self, status: int, *, stream: bool) -> None:
        """Begin the body after its headers."""
        self._most_bytes = WHOLE_BODY_BYTES if status == 200 else ERROR_BODY_BYTES
        if stream:
            self.splitter = EventSplitter()

    def encoded(self, name: bytes) -> None:
        """Take the content coding, although none was requested."""
        coding = name.strip().lower()
        if coding in (b"gzip", b"x-gzip", b"deflate"):
            self._inflate = Inflater()
        elif coding not in (b"", b"identity"):
            self._foreign = printable(coding.decode("latin-1"), 40)

    @property
    def between_events(self) -> bool:
        """Whether the next piece is uncompressed and begins an event."""
        return self._inflate is None and self.splitter is not None and self.splitter.between_events

    def take(self, count: int | None) -> tuple[list[bytes], str | None]:
        """Return the events of the first ``count`` pieces, and an error or None.

        A body that is no event stream is only kept, for ``whole``.
        """
        pieces, wrong = self.pieces[:count], None
        self.pieces.clear()
        if self._foreign is not None:
            return [], self._refused()
        if self._inflate is not None:
            pieces, wrong = self._decompressed(pieces, self._inflate)
        if self.splitter is not None:
            events = [event for piece in pieces for event in self.splitter.feed(piece)]
            if self.splitter.waiting_bytes > WHOLE_BODY_BYTES:
                self.splitter = EventSplitter()  # drop what waits
                wrong = f"an event of more than {WHOLE_BODY_BYTES >> 20} MiB"
            return events, wrong
        for piece in pieces:
            self._bytes += len(piece)
            if self._bytes <= self._most_bytes:
                self._kept.append(piece)
        if self._bytes > WHOLE_BODY_BYTES:
            wrong = f"a body of more than {WHOLE_BODY_BYTES >> 20} MiB"
        return [], wrong

    def whole(self) -> bytes:
        """Return a body that is no event stream; of an error body only the beginning."""
        if self._foreign is not None:
            return f"a body in {self._foreign}".encode()
        return b"".join(self._kept)

    def _refused(self) -> str | None:
        """Return why the answer cannot be read; None for a refusal, which stays one."""
        if self._most_bytes == ERROR_BODY_BYTES:
            return None
        return f"the answer comes in the content coding {self._foreign}, which was not asked for"

    def _decompressed(
        self, pieces: list[bytes], inflate: Inflater
    ) -> tuple[list[bytes], str | None]:
        """Return the pieces decompressed, up to a broken one, and its error."""
        plain: list[bytes] = []
        try:
            for piece in pieces:
                plain.append(inflate(piece))
        except zlib.error as error:
            return plain, f"broken compressed body: {error}"
        return plain, None
