"""The body of one response: the pieces that HTTP's framing leaves in, events or one whole text out."""

from __future__ import annotations

import zlib
from typing import Any

from loadgen.sse import EventSplitter

WHOLE_BODY_BYTES = 64 * 2**20  # a body that is no stream may be so long, and one event of a stream too
ERROR_BODY_BYTES = 65_536  # so much of an error body is read for its message


class Body:
    """Pieces are appended to ``pieces``; ``take`` uses them up."""

    __slots__ = ("_bytes", "_gunzip", "_kept", "_most_bytes", "pieces", "splitter")

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.splitter: EventSplitter | None = None  # of an event stream
        self._gunzip: Any = None
        self._kept: list[bytes] = []  # of a body that is none
        self._bytes = 0
        self._most_bytes = WHOLE_BODY_BYTES

    def begin(self, status: int, *, stream: bool) -> None:
        """The headers are there."""
        self._most_bytes = WHOLE_BODY_BYTES if status == 200 else ERROR_BODY_BYTES
        if stream:
            self.splitter = EventSplitter()

    def decompress(self) -> None:
        """It comes as gzip or deflate."""
        self._gunzip = zlib.decompressobj(zlib.MAX_WBITS | 32)

    @property
    def between_events(self) -> bool:
        """Whether the next piece is plain text of an event stream and begins an event."""
        return self._gunzip is None and self.splitter is not None and self.splitter.between_events

    def take(self, count: int | None) -> tuple[list[bytes], str | None]:
        """The events of the first ``count`` pieces, which are all of the response; and what is wrong with them.

        A body that is no event stream is only kept, for ``whole``.
        """
        pieces, wrong = self.pieces[:count], None
        self.pieces.clear()
        if self._gunzip is not None:
            pieces, wrong = self._decompressed(pieces)
        if self.splitter is not None:
            events = [event for piece in pieces for event in self.splitter.feed(piece)]
            if self.splitter.waiting_bytes > WHOLE_BODY_BYTES:
                self.splitter = EventSplitter()  # what waits is no event any more
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
        """A body that is no event stream, as far as it was taken; of an error only the beginning."""
        return b"".join(self._kept)

    def _decompressed(self, pieces: list[bytes]) -> tuple[list[bytes], str | None]:
        """The pieces decompressed, up to one that is broken; and what is wrong with that."""
        plain: list[bytes] = []
        try:
            for piece in pieces:
                plain.append(self._gunzip.decompress(piece))
        except zlib.error as error:
            return plain, f"broken compressed body: {error}"
        return plain, None
