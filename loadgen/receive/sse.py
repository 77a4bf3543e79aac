"""Split server-sent events incrementally from bytes.

Lines end with LF, CR or CRLF and nothing else (Unicode line separators are text). An event ends
with a blank line; its time is that of the read that brought that blank line.
"""

import json
from functools import lru_cache

from ampacity.loadgen.send.protocols import stream_error

_BOM = b"\xef\xbb\xbf"


class EventSplitter:
    """Turns pieces of a body into whole events."""

    def __init__(self) -> None:
        self.waiting = bytearray()  # the incomplete event so far
        self._searched = 0  # no blank line ends before this offset of the buffer
        self._swallow_lf = False  # the last byte was CR, which may begin a CRLF
        self._began = False
        self.stray: bytes | None = None  # the first text that is no event
        self.comments = 0  # keep-alive lines seen: signs of life, never tokens

    def feed(self, data: bytes) -> list[bytes]:
        """Return the events that ``data`` completes, each as its joined data lines."""
        if not self._began:
            data = self._without_bom(data)
            if not data:
                return []
        if (  # the usual read: one event of one line
            data.startswith(b"data: ")
            and data.find(b"\n") == len(data) - 2
            and data.endswith(b"\n")
            and not self.waiting
            and not self._swallow_lf
            and data.find(b"\r") < 0
        ):
            return [data[6:-2]]
        if self._swallow_lf or b"\r" in data:
            data = self._only_line_feeds(data)
        if not self.waiting and data.endswith(b"\n\n"):  # whole events
            blocks = data[:-2].split(b"\n\n")
        else:
            blocks = self._cut(data)
        return [event for block in blocks if (event := self._data_of(block)) is not None]

    @property
    def between_events(self) -> bool:
        """Tell whether the next byte begins an event."""
        return self._began and not self.waiting and not self._swallow_lf

    def finish(self) -> list[bytes]:
        """Return the event that lacks only its blank line at the end of the body."""
        rest, self.waiting = bytes(self.waiting), bytearray()
        event = self._data_of(rest)
        return [] if event is None else [event]

    def _without_bom(self, data: bytes) -> bytes:
        """Drop a byte order mark, which may come in pieces."""
        data = bytes(self.waiting) + data
        self.waiting.clear()
        if len(data) < len(_BOM) and _BOM.startswith(data):
            self.waiting += data
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
        buffer = self.waiting
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
        """Return the data of one event block, or None where it has none."""
        if b"\n" not in block and block.startswith(b"data:"):
            return block[5:].removeprefix(b" ")
        data: list[bytes] = []
        unknown: list[bytes] = []  # lines that are no field of an event
        is_error = False
        for line in block.split(b"\n"):
            line = line.removeprefix(_BOM)  # of streams that a gateway joined
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif line == b"data":
                data.append(b"")
            elif line.startswith(b":"):
                self.comments += 1
            elif line.startswith(b"event:"):
                is_error = _names_error(line)
            elif line and not line.startswith((b"id:", b"retry:")):
                unknown.append(line)
        if unknown:
            if (error := _error_in(unknown)) is not None:
                return error
            self.stray = self.stray or b"\n".join(unknown)
        if is_error:
            return _as_error(b"\n".join(data) or b"an event named error")
        return b"\n".join(data) if data else None


@lru_cache(64)  # few names, one per event
def _names_error(line: bytes) -> bool:
    return line.strip().lower().endswith((b"error", b"exception"))


def _as_error(words: bytes) -> bytes:
    """Return ``words`` as JSON that ``stream_error`` takes for an error."""
    if stream_error(words) is not None:
        return words
    return json.dumps({"error": words.decode("utf-8", "replace")}).encode()


def _error_in(lines: list[bytes]) -> bytes | None:
    """Return the error in lines that are no field of an event: bare JSON, or after ``error:``."""
    for line in lines:
        words = line[6:].strip()
        if line.startswith(b"error:") and words not in (b"", b"null", b"{}"):
            return _as_error(words)
    text = b"\n".join(lines).strip()
    return text if text[:1] in (b"{", b"[") and stream_error(text) is not None else None
