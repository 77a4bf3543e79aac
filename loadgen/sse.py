"""Server-sent events, split incrementally from bytes.

Lines end with LF, CR or CRLF and nothing else (Unicode line separators are text). An event ends
with a blank line; its time is that of the read that brought that blank line.
"""

from __future__ import annotations

from functools import lru_cache

_BOM = b"\xef\xbb\xbf"
CHUNKED_EVENT_END = b"\n\n\r\n"  # of an event that ends its HTTP chunk


@lru_cache(4096)
def _chunk_head(length: int) -> bytes:
    """How a chunk begins that has ``length`` bytes with its framing and holds one event."""
    digits = next(d for d in range(1, 16) if length - d - 4 < 16**d)
    return b"%0*x\r\ndata: " % (digits, max(length - digits - 4, 0))


def events_in_chunks(stamps: list[int], reads: list[bytes]) -> tuple[list[int], list[bytes]] | None:
    """(times, data) of events of one line, each in an HTTP chunk of its own; None: the reads hold anything else.

    The first read must begin where a chunk does, and each end with ``CHUNKED_EVENT_END``. Both lists are used up.
    """
    heads = list(map(_chunk_head, map(len, reads)))
    fits = list(map(bytes.startswith, reads, heads))
    while False in fits:  # this read may hold several chunks
        i = fits.index(False)
        chunks = [piece + CHUNKED_EVENT_END for piece in reads[i][:-4].split(CHUNKED_EVENT_END)]
        stamps[i : i + 1], reads[i : i + 1] = [stamps[i]] * len(chunks), chunks
        heads[i : i + 1] = map(_chunk_head, map(len, chunks))
        fits[i : i + 1] = map(bytes.startswith, chunks, heads[i:])
        if not fits[i]:
            return None
    events = [read[len(head) : -4] for read, head in zip(reads, heads, strict=True)]
    body = b"".join(events)
    return None if b"\n" in body or b"\r" in body else (stamps, events)


class EventSplitter:
    """Feed it pieces of a body with the time they were read; it gives back whole events."""

    __slots__ = ("_began", "_buffer", "_searched", "_swallow_lf", "comments")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched = 0  # no blank line ends before this offset of the buffer
        self._swallow_lf = False  # the last byte was CR: an LF that follows belongs to it
        self._began = False
        self.comments = 0  # keep-alive lines seen: signs of life, never tokens

    def feed(self, at_ns: int, data: bytes) -> list[tuple[int, bytes]]:
        """``data`` was read at ``at_ns``: the events completed by it, as (at_ns, joined data lines)."""
        if not self._began:
            data = self._without_bom(data)
            if not data:
                return []
        if (  # the usual read: one event of one line
            data.startswith(b"data: ")
            and data.find(b"\n") == len(data) - 2
            and data.endswith(b"\n")
            and not self._buffer
            and not self._swallow_lf
            and data.find(b"\r") < 0
        ):
            return [(at_ns, data[6:-2])]
        if self._swallow_lf or b"\r" in data:
            data = self._only_line_feeds(data)
        if not self._buffer and data.endswith(b"\n\n"):  # whole events
            blocks = data[:-2].split(b"\n\n")
        else:
            blocks = self._cut(data)
        events = []
        for block in blocks:
            event = self._data_of(block)
            if event is not None:
                events.append((at_ns, event))
        return events

    def feed_all(self, stamps: list[int], pieces: list[bytes]) -> tuple[list[int], list[bytes]]:
        """``feed`` for many pieces: (times, events)."""
        found = [
            event for at_ns, piece in zip(stamps, pieces, strict=False) for event in self.feed(at_ns, piece)
        ]
        return [at_ns for at_ns, _ in found], [event for _, event in found]

    @property
    def between_events(self) -> bool:
        """Whether the next byte begins an event."""
        return self._began and not self._buffer and not self._swallow_lf

    @property
    def waiting_bytes(self) -> int:
        """How much of an event has come so far without its end."""
        return len(self._buffer)

    def finish(self, at_ns: int) -> list[tuple[int, bytes]]:
        """The body ended: an event that lacks only its blank line still counts."""
        rest, self._buffer = bytes(self._buffer), bytearray()
        event = self._data_of(rest)
        return [] if event is None else [(at_ns, event)]

    def _without_bom(self, data: bytes) -> bytes:
        """The beginning of the body without a byte order mark, which may come in pieces."""
        data = bytes(self._buffer) + data
        self._buffer.clear()
        if len(data) < len(_BOM) and _BOM.startswith(data):
            self._buffer += data
            return b""
        self._began = True
        return data.removeprefix(_BOM)

    def _only_line_feeds(self, data: bytes) -> bytes:
        if self._swallow_lf and data.startswith(b"\n"):
            data = data[1:]
            self._swallow_lf = False
        if data:
            self._swallow_lf = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _cut(self, data: bytes) -> list[bytes]:
        buffer = self._buffer
        buffer += data
        blocks: list[bytes] = []
        start = 0
        find_from = self._searched
        while (end := buffer.find(b"\n\n", find_from)) >= 0:
            blocks.append(bytes(buffer[start:end]))
            start = find_from = end + 2
        if start:
            del buffer[:start]
        self._searched = max(len(buffer) - 1, 0)
        return blocks

    def _data_of(self, block: bytes) -> bytes | None:
        """The data of one event block, or None where it has none."""
        if b"\n" not in block:
            line = block
            if line.startswith(b"data:"):
                return line[6:] if line[5:6] == b" " else line[5:]
        data: list[bytes] = []
        for line in block.split(b"\n"):
            if line.startswith(b"data:"):
                data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif line == b"data":
                data.append(b"")
            elif line.startswith(b":"):
                self.comments += 1
        return b"\n".join(data) if data else None
