"""Match chunks that differ from the previous one only in their text, without parsing them.

A server writes the chunks of an answer from one template. Only the text differs and, where the
server counts as it goes, the running totals. So a template is learned from a fully parsed chunk,
and chunks that match it need no parser.

A template is proved when it is learned: the chunk with another text and the next totals filled in
has to decode to just these. A UTF-8 string without quotation mark, backslash or control character
is written in JSON as it is, and so is a number.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from operator import add

from ampacity.loadgen.receive import hot_path
from ampacity.loadgen.receive.hot_path import ReadHandler
from ampacity.loadgen.receive.thinking import MARKS, Kind

EVENT_END = b"\n\n\r\n"  # of an event that ends its HTTP chunk
PLAIN = bytes(c for c in range(0x20, 0x7F) if c not in b'"\\')  # unescaped in JSON
READ_MAX_BYTES = 2048  # longer reads are parsed
SUFFIXES_MAX = 8  # exceeded by a server that varies what follows the text
PLACES_MAX = 4  # occurrences of the text in a chunk that are tried
_HEADERS_END = b"\r\n\r\n"
_TOTALS = re.compile(rb'"(?:completion|total)_tokens": ?([1-9][0-9]{0,8})')

ChunkContent = tuple[Kind, str, int | None]
"""Of one chunk: kind of its text, the text, and the running total of tokens or None."""


@cache
def _size_lines(size: bytes) -> list[bytes]:
    """Return the size line of a chunk by the length of its whole read, for sizes as ``size``.

    ``size`` is ``%x`` or ``%X``. Empty where no chunk has that length: with 255 bytes of data a
    read has 261, with 256 it has one digit more, 263.
    """
    lines = [b""] * READ_MAX_BYTES
    for data_bytes in range(READ_MAX_BYTES):
        line = size % data_bytes + b"\r\n"
        if (read_bytes := len(line) + data_bytes + 2) < READ_MAX_BYTES:
            lines[read_bytes] = line
    return lines


_known: set[bytes] = set()  # texts that need no escape: the words of a language come again
KNOWN_MAX = 20_000
KNOWN_BYTES_MAX = 512  # longer texts are checked each time
# the size line with text and suffix of known chunks, shared by all answers; by suffix and by the
# length of the prefix, which is part of the size
_rests: dict[tuple[bytes, int], set[bytes]] = {}


def _needs_no_escape(text: bytes) -> bool:
    odd = text.translate(None, PLAIN)
    if not text or (odd and (min(odd) < 0x80 or not _is_utf8(text))) or MARKS.search(text):
        return False  # a thinking tag changes the kind of the text around it
    _remember(text, _known)
    return True


def _remember(text: bytes, known: set[bytes]) -> None:
    if len(text) <= KNOWN_BYTES_MAX:
        if len(known) >= KNOWN_MAX:
            known.clear()
        known.add(text)


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _known_rests(behind: bytes, before_bytes: int) -> set[bytes]:
    if len(_rests) >= SUFFIXES_MAX and (behind, before_bytes) not in _rests:
        _rests.clear()
    return _rests.setdefault((behind, before_bytes), set())


class ChunkTemplate:
    """An HTTP chunk with one event of text; where totals run, the next chunk in sequence."""

    __slots__ = (
        "_before",
        "_behind",
        "_behind_total",
        "_fixed",
        "_gaps",
        "_heads",
        "_lines",
        "_size",
        "kind",
        "total",
    )

    def __init__(
        self,
        size: bytes,
        before: bytes,
        behind: list[bytes],
        kind: Kind,
        total: int | None,
        gaps: list[int],
    ) -> None:
        """``behind``: what follows the text, cut at the totals, which are ``total`` + ``gaps``."""
        self._size, self._lines = size, _size_lines(size)
        self._heads: dict[int, bytes] = {}  # everything before the text, by length of the read
        self._before, self._fixed, self._gaps = before, tuple(behind), tuple(gaps)
        self._behind, self._behind_total = b"".join(behind), -1
        self.kind = kind
        self.total = total  # tokens so far: the next chunk has one more

    def _next_behind(self) -> bytes:
        if self.total is not None and self._behind_total != self.total:
            numbers = [b"%d" % (self.total + 1 + gap) for gap in self._gaps]
            self._behind = b"".join(map(add, self._fixed, [*numbers, b""]))
            self._behind_total = self.total
        return self._behind

    def data_of(self, text: bytes) -> bytes:
        """Return the event data of the next chunk with this text."""
        return self._before.partition(b":")[2] + text + self._next_behind()[: -len(EVENT_END)]

    def text_of(self, read: bytes) -> bytes | None:
        """Return the text of the next chunk; None where ``read`` does not match the template."""
        length, behind = len(read), self._next_behind()
        if length >= READ_MAX_BYTES:
            return None
        head = self._heads.get(length)
        if head is None:
            if not self._lines[length]:
                return None
            head = self._heads[length] = self._lines[length] + self._before
        text = read.removeprefix(head).removesuffix(behind)
        if len(head) + len(text) + len(behind) != length:
            return None
        if text not in _known and not _needs_no_escape(text):
            return None
        if self.total is not None:
            self.total += 1
        return text

    def read_handler(self, add_time: Callable[[int], None], fallback: ReadHandler) -> ReadHandler:
        """Return a handler that records the time of matching chunks and passes on all others."""
        if self.total is not None:
            handler = by_chunk(lambda chunk: self.text_of(chunk) is not None, add_time, fallback)
            upper = self._size == b"%X"
            return hot_path.counting(
                self, self._before, self._fixed, self._gaps, upper, _known, add_time, handler
            )
        before, before_bytes = self._before, len(self._before)
        known = _known_rests(self._behind, before_bytes)

        def matches(chunk: bytes) -> bool:
            data_at = chunk.find(10) + 1
            rest = chunk[:data_at] + chunk[data_at + before_bytes :]
            if rest in known and chunk.startswith(before, data_at):
                return True
            if self.text_of(chunk) is None:
                return False
            _remember(rest, known)
            return True

        return hot_path.repeats(before, known, add_time, by_chunk(matches, add_time, fallback))


def by_chunk(
    matches: Callable[[bytes], bool], add_time: Callable[[int], None], fallback: ReadHandler
) -> ReadHandler:
    """Return a handler of reads with several chunks; from the first mismatch on ``fallback``."""

    def handle(at_ns: int, read: bytes) -> bool:
        while (found := read.find(EVENT_END)) >= 0 and matches(read[: found + 4]):
            add_time(at_ns)
            read = read[found + 4 :]
            if not read:
                return False
        return fallback(at_ns, read)

    return handle


def last_chunk(read: bytes) -> bytes:
    """Return the last chunk of a read that ends with one."""
    before = read.rfind(EVENT_END, 0, -1)
    if before < 0:
        before = read.rfind(_HEADERS_END, 0, -1)
    return read if before < 0 else read[before + 4 :]


def learn(read: bytes, decode: Callable[[bytes], ChunkContent | None]) -> ChunkTemplate | None:
    """Return the template of ``read`` if it is one chunk with one one-line event of plain text.

    ``decode`` decodes an event's data: None where that is anything but text.
    """
    line, _, event = read.partition(b"\r\n")
    begin = 6 if event[5:6] == b" " else 5
    data = event[begin:-4]
    if len(read) >= READ_MAX_BYTES or event[:5] != b"data:" or event[-4:] != EVENT_END:
        return None
    size = b"%x" if line + b"\r\n" == _size_lines(b"%x")[len(read)] else b"%X"
    if line + b"\r\n" != _size_lines(size)[len(read)] or b"\n" in data or b"\r" in data:
        return None
    content = decode(data)
    if content is None or not content[1]:
        return None
    kind, text, total = content
    string, at = b'"' + text.encode() + b'"', -1
    for _ in range(PLACES_MAX):
        at = data.find(string, at + 1)
        if at < 0:
            return None
        behind, gaps = _without_totals(data[at + len(string) - 1 :] + EVENT_END, total)
        template = ChunkTemplate(size, event[:begin] + data[: at + 1], behind, kind, total, gaps)
        other, next_total = text + "~", None if total is None else total + 1
        if decode(template.data_of(other.encode())) == (kind, other, next_total):
            return template
    return None


def _without_totals(behind: bytes, total: int | None) -> tuple[list[bytes], list[int]]:
    """Cut what follows the text at its totals; return the pieces and each total - ``total``."""
    pieces: list[bytes] = []
    gaps: list[int] = []
    cut = 0
    if total is not None:
        for number in _TOTALS.finditer(behind):
            pieces.append(behind[cut : number.start(1)])
            gaps.append(int(number[1]) - total)
            cut = number.end(1)
    return [*pieces, behind[cut:]], gaps
