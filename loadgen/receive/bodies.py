"""The body of one response: pieces without HTTP framing in, events or one whole text out."""

import zlib
from collections.abc import Iterator

from ampacity.loadgen.receive.sse import EventSplitter
from ampacity.loadgen.send.protocols import printable

WHOLE_BODY_BYTES = 32 * 2**20
"""Limit of a body that is no stream, of one event, and of what one read unfolds to."""
SLICE_BYTES = 4096  # decompressed at once
FRAMING_MAX_BYTES = 65_536  # limit of headers, trailers or chunk sizes between bytes of the body
FRAMING_TOO_LONG = f"more than {FRAMING_MAX_BYTES >> 10} KiB of headers"
ERROR_BODY_BYTES = 65_536  # how much of an error body is read for its message


class Inflater:
    """Decompresses gzip (several members too) and deflate, with or without its zlib header."""

    def __init__(self) -> None:
        self._member = zlib.decompressobj(zlib.MAX_WBITS | 32)  # either header
        self._head = b""  # while too short to tell whether it is a header
        self._began = False

    def all(self, pieces: list[bytes]) -> tuple[list[bytes], str | None]:
        """Return the pieces decompressed, up to a broken one, and its error.

        WHOLE_BODY_BYTES at most: a few bytes can hold gigabytes.
        """
        plain: list[bytes] = []
        left = WHOLE_BODY_BYTES
        try:
            for data in pieces:
                for part in self._plain(self._begin(data), left):
                    plain.append(part)
                    left -= len(part)
        except zlib.error as error:
            return plain, f"broken compressed body: {error}"
        return plain, None

    def _begin(self, data: bytes) -> bytes:
        """Choose the format by the first two bytes; return what can be decompressed by now."""
        if self._began:
            return data
        data, self._head = self._head + data, b""
        if len(data) < 2:
            self._head = data
            return b""
        self._began = True
        header = data[:2] == b"\x1f\x8b" or (
            data[0] & 0x0F == 8 and int.from_bytes(data[:2]) % 31 == 0
        )
        if not header:
            self._member = zlib.decompressobj(-zlib.MAX_WBITS)
        return data

    def _plain(self, data: bytes, most_bytes: int) -> Iterator[bytes]:
        for at in range(0, len(data), SLICE_BYTES):  # each end of a member copies what is left
            rest = data[at : at + SLICE_BYTES]
            while rest:
                if self._member.eof:  # the next member of gzip
                    self._member = zlib.decompressobj(zlib.MAX_WBITS | 32)
                part = self._member.decompress(rest, max(most_bytes, 1))
                most_bytes -= len(part)
                if self._member.unconsumed_tail or most_bytes < 0:
                    raise zlib.error(f"it unfolds to more than {WHOLE_BODY_BYTES >> 20} MiB")
                yield part
                rest = self._member.unused_data


class Body:
    """Pieces are appended to ``pieces``; ``take`` consumes them."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.splitter: EventSplitter | None = None  # of an event stream
        self._inflate: Inflater | None = None
        self._foreign: str | None = None  # a content coding that we cannot decode
        self._kept: list[bytes] = []  # of a body that is no event stream
        self._bytes = 0
        self._most_bytes = WHOLE_BODY_BYTES

    def begin(self, status: int, *, stream: bool) -> None:
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
        """Tell whether the next piece is uncompressed and begins an event."""
        return self._inflate is None and self.splitter is not None and self.splitter.between_events

    def take(self, count: int | None) -> tuple[list[bytes], str | None]:
        """Return the events of the first ``count`` pieces, and an error or None.

        A body that is no event stream is only kept, for ``whole``.
        """
        pieces, wrong = self.pieces[:count], None
        self.pieces.clear()
        if self._foreign is not None:
            if self._most_bytes < WHOLE_BODY_BYTES:  # a refusal stays one
                return [], None
            coding = f"the content coding {self._foreign}, which was not asked for"
            return [], f"the answer comes in {coding}"
        if self._inflate is not None:
            pieces, wrong = self._inflate.all(pieces)
        if self.splitter is not None:
            events: list[bytes] = []
            for piece in pieces:  # a comprehension would be a frame more
                events += self.splitter.feed(piece)
            if len(self.splitter.waiting) > WHOLE_BODY_BYTES:
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
