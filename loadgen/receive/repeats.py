"""Chunks that repeat the one before them but for their text, known by their bytes alone.

A server writes the chunks of an answer from one form. What differs is the text and, where it counts as it goes, the
running totals. So a chunk that was read by all of the parsers teaches the form, and what fits it needs none of them.

That this reads the same is shown when the form is learned: the chunk with another text and the next totals in their
places is decoded and says just these. A string of JSON that has no quotation mark, backslash or control character and
is UTF-8 stands for itself, and so does a number.
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
PLAIN = bytes(
    c for c in range(0x20, 0x7F) if c not in b'"\\'
)  # in a text these stand for themselves
READ_MAX_BYTES = 2048  # longer reads are parsed
BEHIND_MAX = 8  # a server that says something of the answer behind its text
PLACES_MAX = 4  # where the text may stand, tried until one is it
_HEADERS_END = b"\r\n\r\n"
_TOTALS = re.compile(rb'"(?:completion|total)_tokens": ?([1-9][0-9]{0,8})')

ChunkContent = tuple[Kind, str, int | None]
"""What one chunk says: of which kind its text is, the text, and the tokens of the answer up to it."""


@cache
def _size_lines(size: bytes) -> list[bytes]:
    """The first line of a chunk that makes a read so long, by its length; its size written as ``%x`` or ``%X``.

    Empty where no chunk makes one: with 255 bytes of data it has 261, with 256 one digit more, 263.
    """
    lines = [b""] * READ_MAX_BYTES
    for data_bytes in range(READ_MAX_BYTES):
        line = size % data_bytes + b"\r\n"
        if (read_bytes := len(line) + data_bytes + 2) < READ_MAX_BYTES:
            lines[read_bytes] = line
    return lines


_known: set[bytes] = (
    set()
)  # texts that stand for themselves: the words of a language come again and again
KNOWN_MAX = 20_000
KNOWN_BYTES_MAX = 512  # longer ones are not remembered, but looked at anew
# such texts with what stands behind them, which is the same for all answers, and the line with the size; by what
# stands behind them and how much stands before them, for that is part of the size
_rests: dict[tuple[bytes, int], set[bytes]] = {}


def _stands_for_itself(text: bytes) -> bool:
    odd = text.translate(None, PLAIN)
    if not text or (odd and (min(odd) < 0x80 or not _is_utf8(text))) or MARKS.search(text):
        return False  # a tag of thinking says what the text around it is
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


def _rests_around(behind: bytes, before_bytes: int) -> set[bytes]:
    if len(_rests) >= BEHIND_MAX and (behind, before_bytes) not in _rests:
        _rests.clear()
    return _rests.setdefault((behind, before_bytes), set())


class ChunkTemplate:
    """One HTTP chunk with one event of text; where totals run, the chunk that is due next."""

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
        """``behind``: what stands behind the text, cut where there are totals, each so far from ``total`` as ``gaps`` says."""
        self._size, self._lines = size, _size_lines(size)
        self._heads: dict[int, bytes] = {}  # all before the text, by the length of the read
        self._before, self._fixed, self._gaps = before, tuple(behind), tuple(gaps)
        self._behind, self._behind_total = b"".join(behind), -1
        self.kind = kind
        self.total = total  # tokens that have come: the next chunk has one more

    def _next_behind(self) -> bytes:
        """What stands behind the text of the next chunk."""
        if self.total is not None and self._behind_total != self.total:
            numbers = [b"%d" % (self.total + 1 + gap) for gap in self._gaps]
            self._behind = b"".join(map(add, self._fixed, [*numbers, b""]))
            self._behind_total = self.total
        return self._behind

    def data_of(self, text: bytes) -> bytes:
        """The event's data in the next chunk, if it says ``text``."""
        return self._before.partition(b":")[2] + text + self._next_behind()[: -len(EVENT_END)]

    def text_of(self, read: bytes) -> bytes | None:
        """The text of ``read``, which is the next chunk; None if it does not repeat the form."""
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
        if text not in _known and not _stands_for_itself(text):
            return None
        if self.total is not None:
            self.total += 1
        return text

    def read_handler(self, note: Callable[[int], None], otherwise: ReadHandler) -> ReadHandler:
        """What takes reads: of one that is the next chunk its time is noted, all others go on. The hot path: few steps."""
        if self.total is not None:
            piece_by_piece = in_pieces(
                lambda chunk: self.text_of(chunk) is not None, note, otherwise
            )
            upper = self._size == b"%X"
            return hot_path.counting(
                self, self._before, self._fixed, self._gaps, upper, _known, note, piece_by_piece
            )
        before, before_bytes = self._before, len(self._before)
        known = _rests_around(self._behind, before_bytes)

        def repeats(chunk: bytes) -> bool:
            data_at = chunk.find(10) + 1
            rest = chunk[:data_at] + chunk[data_at + before_bytes :]
            if rest in known and chunk.startswith(before, data_at):
                return True
            if self.text_of(chunk) is None:
                return False
            _remember(rest, known)
            return True

        return hot_path.repeats(before, known, note, in_pieces(repeats, note, otherwise))


def in_pieces(
    repeats: Callable[[bytes], bool], note: Callable[[int], None], otherwise: ReadHandler
) -> ReadHandler:
    """What takes reads of several chunks: those that repeat are noted, from the first that does not the rest goes on."""

    def take(at_ns: int, read: bytes) -> bool:
        while (end := read.find(EVENT_END) + len(EVENT_END)) >= len(EVENT_END) and repeats(
            read[:end]
        ):
            note(at_ns)
            read = read[end:]
            if not read:
                return False
        return otherwise(at_ns, read)

    return take


def last_chunk(read: bytes) -> bytes:
    """What may be the last chunk of a read that ends with one."""
    before = read.rfind(EVENT_END, 0, -1)
    if before < 0:
        before = read.rfind(_HEADERS_END, 0, -1)
    return read if before < 0 else read[before + 4 :]


def learn(read: bytes, said: Callable[[bytes], ChunkContent | None]) -> ChunkTemplate | None:
    """The form of ``read``, if it is one chunk with one event of one line, and that is text that stands for itself.

    ``said`` decodes an event's data: None where that is anything but text.
    """
    line, _, event = read.partition(b"\r\n")
    begin = 6 if event[5:6] == b" " else 5
    data = event[begin:-4]
    if len(read) >= READ_MAX_BYTES or event[:5] != b"data:" or event[-4:] != EVENT_END:
        return None
    size = b"%x" if line + b"\r\n" == _size_lines(b"%x")[len(read)] else b"%X"
    if line + b"\r\n" != _size_lines(size)[len(read)] or b"\n" in data or b"\r" in data:
        return None
    found = said(data)
    if found is None or not found[1]:
        return None
    kind, text, total = found
    string, at = b'"' + text.encode() + b'"', -1
    for _ in range(PLACES_MAX):
        at = data.find(string, at + 1)
        if at < 0:
            return None
        behind, gaps = _without_totals(data[at + len(string) - 1 :] + EVENT_END, total)
        form = ChunkTemplate(size, event[:begin] + data[: at + 1], behind, kind, total, gaps)
        other = text + "~"
        if said(form.data_of(other.encode())) == (
            kind,
            other,
            None if total is None else total + 1,
        ):
            return form
    return None


def _without_totals(behind: bytes, total: int | None) -> tuple[list[bytes], list[int]]:
    """What stands behind the text, cut where there are totals; and how far each of them is from ``total``."""
    pieces: list[bytes] = []
    gaps: list[int] = []
    cut = 0
    if total is not None:
        for number in _TOTALS.finditer(behind):
            pieces.append(behind[cut : number.start(1)])
            gaps.append(int(number[1]) - total)
            cut = number.end(1)
    return [*pieces, behind[cut:]], gaps
